"""`quire generate` and `quire chat` with a scripted server: its address, requests, responses and errors."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cli import chat as chat_model
from quire.cli import server_client
from quire.cli.chat import request_body
from quire.cli.http_stream import HttpStream, Timeouts
from quire.cli.main import app
from quire.cli.server_client import parse_url
from quire.engine.generation import GenerationParams
from quire.errors import InvalidRequest, QuireError
from quire.text.grammar import Grammar, GrammarKind, json_schema_grammar
from tests.cli.runs import LIMIT_S, EchoLLM, Terminal
from tests.cli.scripted import (
    DONE,
    HEALTHY,
    NAME,
    Reply,
    ScriptedServer,
    choice,
    chunk,
    delta,
    document,
    endless,
    refusal,
    said,
    stream,
    usage,
)

PARIS = "The capital of France is Paris."


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        server.answers(said(PARIS))
        yield server


@pytest.fixture
def default(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, echo: EchoLLM) -> ScriptedServer:
    """A server at the default address, which no option names."""
    monkeypatch.delenv("QUIRE_SERVER")
    monkeypatch.setattr(server_client, "DEFAULT_URL", server.url)
    monkeypatch.setattr(chat_model, "QUICK", Timeouts(LIMIT_S, LIMIT_S))  # a slow machine must not miss it
    del echo
    return server


def run(*arguments: str, stdin: str = "") -> Any:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def failure(*arguments: str) -> str:
    """The message of a command that must fail with a QuireError."""
    outcome = run(*arguments)
    assert isinstance(outcome.exception, QuireError), outcome
    return str(outcome.exception)


def free_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


# Which server


def test_the_server_that_is_up_answers(default: ScriptedServer) -> None:
    outcome = run("generate", "Hi")
    assert (outcome.stdout, outcome.stderr) == (f"{PARIS}\n", "")
    assert [asked.path for asked in default.asked] == ["/health", "/v1/models", "/v1/chat/completions"]


@pytest.mark.parametrize(
    "options",
    [["--local"], ["--threads", "1"], ["--dtype", "auto"], ["--load-format", "auto"], ["--kv-memory", "1G"]],
)
def test_engine_options_load_the_model_in_this_process(default: ScriptedServer, options: list[str]) -> None:
    assert run("generate", "Hi", *options).stdout == "Hi\n"
    assert not default.asked


def test_the_environment_names_a_server_or_none(
    server: ScriptedServer, echo: EchoLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_client, "DEFAULT_URL", server.url)
    assert run("generate", "Hi").stdout == "Hi\n"  # the environment of the tests sets none
    assert not server.asked
    monkeypatch.setenv("QUIRE_SERVER", f"{server.url}/v1/")
    assert run("generate", "Hi").stdout == f"{PARIS}\n"
    assert run("generate", "Hi", "--server", "none").stdout == "Hi\n"
    assert run("generate", "Hi", "--max-model-len", "50").stdout == "Hi\n"
    monkeypatch.setenv("QUIRE_SERVER", free_url())
    assert "does not answer: Connection refused" in failure("generate", "Hi")
    assert len(echo.seen) == 3


def test_no_server_at_the_default_address_prints_nothing(echo: EchoLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_SERVER")
    monkeypatch.setattr(server_client, "DEFAULT_URL", free_url())
    outcome = run("generate", "Hi")
    assert (outcome.stdout, outcome.stderr) == ("Hi\n", "")
    assert len(echo.seen) == 1


@pytest.mark.parametrize(
    "stranger",
    [
        document({"status": "ok"}),
        document({"detail": "Not Found"}, 404),
        document(["quire"]),
        Reply(200, [b"<html>It works!</html>"]),
        Reply(200, [b"{"], is_cut=True),
        Reply(200, [b"[" * 100_000]),
        Reply(200, [b"\xff" * 5_000_000]),
    ],
)
def test_another_program_on_the_port_is_ignored(default: ScriptedServer, stranger: Reply) -> None:
    default.replies["/health"] = [stranger]
    assert run("generate", "Hi", "--api-key", "secret").stdout == "Hi\n"
    assert run("generate", "Hi", "--api-key", "secret").stdout == "Hi\n"
    assert [asked.path for asked in default.asked] == ["/health", "/health"]
    assert "secret" not in str(default.asked)
    message = failure("generate", "Hi", "--server", default.url)
    assert message == f"{default.url} answers, but is not a quire server"


def test_a_port_without_http_is_ignored(echo: EchoLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and sends nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(chat_model, "QUICK", Timeouts(0.3, 0.05))
        monkeypatch.setattr(chat_model, "PATIENT", Timeouts(0.3, 0.05))
        monkeypatch.setattr(server_client, "DEFAULT_URL", url)
        monkeypatch.delenv("QUIRE_SERVER")
        assert run("generate", "Hi").stdout == "Hi\n"
        assert failure("generate", "Hi", "--server", url) == f"{url} does not answer: it took too long"
    assert len(echo.seen) == 1


def test_options_that_exclude_each_other() -> None:
    url = "http://127.0.0.1:1"
    message = "--dtype is for a model loaded here, and --server http://127.0.0.1:1 was given"
    assert failure("generate", "Hi", "--server", url, "--dtype", "float32") == message
    assert "--kv-memory is for a model loaded here" in failure("chat", "--server", url, "--kv-memory", "1G")
    message = "--local loads the model here, and --server http://127.0.0.1:1 was given: choose one"
    assert failure("generate", "Hi", "--server", url, "--local") == message


def test_urls() -> None:
    good = {
        "http://localhost:8000": "http://localhost:8000",
        " https://gpu.example/v1/ ": "https://gpu.example",
        "gpu:9000": "http://gpu:9000",
        "http://[::1]:8000/": "http://[::1]:8000",
        "https://example.org/models/quire/v1": "https://example.org/models/quire",
    }
    assert {text: parse_url("--server", text) for text in good} == good
    bad = ("", "http://", "ftp://x", "http://x:0", "http://x:99999", "http://[::1", "http://a b", "x\ny")
    for text in (*bad, "http://x/?q", "http://me:secret@x", "\ud800"):
        with pytest.raises(InvalidRequest, match=re.escape(f"--server = {text!r} is not a URL like http://")):
            parse_url("--server", text)


def test_an_invalid_host_name_is_a_one_line_error() -> None:
    url = f"http://{'a' * 70}.invalid"
    assert failure("generate", "Hi", "--server", url).startswith(f"{url} does not answer: ")


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_proxies_of_the_environment_are_not_used(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, free_url())
    assert run("generate", "Hi", "--server", server.url).stdout == f"{PARIS}\n"


# Which model


def test_a_model_by_its_name_or_alias(default: ScriptedServer) -> None:
    for name in (NAME, "smollm2", "SmolLM2-135M"):
        assert run("generate", "Hi", "--model", name).stdout == f"{PARIS}\n"
    assert {body["model"] for body in default.posted()} == {NAME}


def test_a_model_the_server_lacks(default: ScriptedServer) -> None:
    assert run("generate", "Hi", "--model", "other").stdout == "Hi\n"
    message = failure("generate", "Hi", "--model", "other", "--server", default.url)
    assert message == f"{default.url} has no model 'other', only {NAME}"


@pytest.mark.parametrize("found", [[], {}, {"data": 3}, {"data": [3]}, {"data": [{"id": ["x"]}]}, {"data": []}])
def test_a_malformed_list_of_models(default: ScriptedServer, found: Any) -> None:
    default.replies["/v1/models"] = [document(found)]
    assert run("generate", "Hi").stdout == "Hi\n"
    assert failure("generate", "Hi", "--server", default.url).startswith(f"{default.url} ")


def test_a_server_that_needs_a_key(default: ScriptedServer) -> None:
    models = default.replies["/v1/models"]
    default.replies["/v1/models"] = [refusal(401, "no key")]
    assert run("generate", "Hi").stdout == "Hi\n"
    message = failure("generate", "Hi", "--server", default.url)
    assert message == f"{default.url}: no key (HTTP 401); --api-key or QUIRE_API_KEY sets a key"
    assert failure("generate", "Hi", "--server", default.url, "--api-key", "k") == f"{default.url}: no key (HTTP 401)"
    default.replies["/v1/models"] = models
    default.asked.clear()
    assert run("generate", "Hi", "--api-key", "k").stdout == f"{PARIS}\n"
    assert [asked.headers.get("authorization") for asked in default.asked] == [None, "Bearer k", "Bearer k"]


def test_the_key_of_the_environment(default: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("from-env", "from-env another"):  # as `quire serve` reads it
        monkeypatch.setenv("QUIRE_API_KEY", value)
        run("generate", "Hi")
        assert default.asked.pop().headers["authorization"] == "Bearer from-env"
    message = failure("generate", "Hi", "--api-key", "se\ncret")
    assert message.startswith("the API key contains blanks or characters that are not ASCII")
    assert "cret" not in message


# A server that is not ready


def health(status: str) -> Reply:
    return document({**HEALTHY, "status": status}, 503)


@pytest.mark.parametrize("is_named", [True, False])
def test_a_loading_server_is_waited_for(
    default: ScriptedServer, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    monkeypatch.setattr(server_client, "POLL_S", 0)
    default.replies["/health"] = [health("loading"), health("loading"), health("restarting"), document(HEALTHY)]
    outcome = run("generate", "Hi", *(["--server", default.url] if is_named else []))
    assert (outcome.stdout, outcome.stderr) == (f"{PARIS}\n", f"[{default.url} is loading: waiting for it]\n")


def test_a_server_that_never_gets_ready_is_an_error(default: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "POLL_S", 0)
    monkeypatch.setattr(server_client, "WAIT_S", 0)
    default.replies["/health"] = [health("loading")]
    assert failure("generate", "Hi", "--server", default.url) == f"{default.url} is still loading after 0 s"
    assert run("generate", "Hi").stdout == "Hi\n"


@pytest.mark.parametrize("status", ["draining", "stuck", "\x1b[2J"])
def test_a_server_that_accepts_no_requests(default: ScriptedServer, status: str) -> None:
    default.replies["/health"] = [health(status)]
    shown = status.replace("\x1b", " ")
    message = f"{default.url} is {shown} and accepts no requests"
    assert failure("generate", "Hi", "--server", default.url) == message
    assert run("generate", "Hi").stdout == "Hi\n"


# What is sent


def test_what_was_not_given_is_not_sent(server: ScriptedServer) -> None:
    run("generate", "Hi", "--server", server.url)
    assert server.posted() == [
        {
            "model": NAME,
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 512,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache": True,
        }
    ]


def test_every_option_arrives(server: ScriptedServer) -> None:
    options = "--temperature 0 --top-k 5 --top-p 0.5 --min-p 0.1 --repetition-penalty 1.5 --presence-penalty 0.5"
    options += " --frequency-penalty 0.25 --seed 7 --stop END --max-tokens 9 --ignore-eos"
    run("generate", "Hi", "--system", "Be brief.", *options.split(), "--server", server.url)
    (body,) = server.posted()
    assert body.pop("messages") == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert {name: body[name] for name in list(body)[4:]} == {
        "temperature": 0,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "seed": 7,
        "max_tokens": 9,
        "stop": ["END"],
        "ignore_eos": True,
    }


@pytest.mark.parametrize(
    ("kind", "name"), [("json_schema", "guided_json"), ("regex", "guided_regex"), ("lark", "guided_grammar")]
)
def test_a_grammar_is_sent_in_the_field_of_its_kind(kind: str, name: str) -> None:
    grammar = Grammar(GrammarKind(kind), "{}")
    assert request_body("m", "Once", GenerationParams(grammar=grammar))[name] == "{}"


def test_a_schema_is_sent_as_it_was_given() -> None:
    """The server rewrites schemas for the compiler and would refuse a rewritten one."""
    schema = {"type": "string", "pattern": "^.$"}
    body = request_body("m", "Once", GenerationParams(grammar=json_schema_grammar(schema)))
    assert json.loads(body["guided_json"]) == schema


def test_a_raw_prompt_is_a_completion(server: ScriptedServer) -> None:
    def text(content: str, finish: str | None = None) -> dict[str, Any]:
        return chunk({"index": 0, "text": content, "finish_reason": finish, "logprobs": None})

    server.answers(stream(text(" upon"), text(" a time", "length"), usage(1, 3), DONE))
    outcome = run("generate", "Once", "--raw", "--server", f"{server.url}/v1")
    assert outcome.stdout == " upon a time\n"
    assert server.asked[-1].path == "/v1/completions"
    assert server.posted()[0]["prompt"] == "Once"
    assert "messages" not in server.posted()[0]


# What comes back


def test_json_has_what_the_api_has(server: ScriptedServer) -> None:
    server.answers(stream(chunk(choice("H")), chunk(choice("é", 0, "stop", stop_reason="END")), usage(40, 3, 32), DONE))
    found = json.loads(run("generate", "Hi", "--json", "--server", server.url).stdout)
    assert found.pop("timings").keys() == {"ttft_ms", "tokens_per_s"}
    assert found == {
        "model": NAME,
        "text": "Hé",
        "finish_reason": "stop",
        "stop": "END",
        "usage": {"prompt_tokens": 40, "completion_tokens": 3, "cached_tokens": 32, "total_tokens": 43},
        "cache": {
            "num_tokens": 32,
            "num_blocks": 1,
            "stopped_at": 32,
            "reason": "not_found",
            "num_kv_tokens": 0,
            "source": None,
            "num_loaded_tokens": 0,
            "stopped_text": None,
        },
    }


def test_events_are_read_wherever_they_are_cut(server: ScriptedServer) -> None:
    events = (
        b': hello\n\ndata: {"a": "\xf0\x9f\xa6\x8a"}\n\nevent: x\ndata: {"b": 2}\n\n: ping\n\n' + DONE + b"data: {}\n\n"
    )
    for at in range(len(events)):
        server.answers(stream(events[:at] or b"\n", events[at:]))
        assert list(HttpStream(server.url, "/v1/completions", {}).events()) == [{"a": "🦊"}, {"b": 2}], at


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, server: ScriptedServer) -> None:
    monkeypatch.setattr("quire.cli.http_stream.MAX_EVENT_BYTES", 100)
    server.answers(stream(b"data: ", *[b"x" * 20] * 10))
    message = failure("generate", "Hi", "--server", server.url)
    assert message == f"{server.url} sent an event of more than 100 bytes"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (stream(chunk(choice("Hi")), {"error": {"message": "the worker died\x1b"}}), "the worker died "),
        (stream({"error": "all is lost"}), "all is lost"),
        (stream(b"event: error\n", {"error": {"message": "dead"}}), "dead"),
        (stream(chunk(choice("Hi", 0, "error"))), "the server could not finish the answer"),
        (stream(chunk(choice("Hi"))), "URL ended the stream before the answer was finished"),
        (stream(chunk(choice("Hi")), DONE), "URL ended the stream before the answer was finished"),
        (stream(chunk(choice("Hi", 0, "stop")), is_cut=True), "URL broke off the answer: the connection ended"),
        (stream(b"data: {\n\n"), "URL sent text that is not JSON: '{'"),
        (stream(b'data: {"a":' + b"[" * 100_000 + b"\n\n"), """URL sent text that is not JSON: '{"a":[["""),
        (stream({"choices": None}), "URL sent a malformed chunk: {'choices': None}"),
        (stream({"choices": [3]}), "URL sent a malformed chunk: "),
        (stream({}), "URL sent a malformed chunk: {}"),
        (stream(chunk(choice(3))), "URL sent a malformed chunk: "),  # type: ignore[arg-type]
        (stream(delta(reasoning_content=3)), "URL sent a malformed chunk: "),
        (stream(delta(tool_calls=[3])), "URL sent a malformed chunk: "),
        (stream(chunk(usage={"prompt_tokens": "many"})), "URL sent a malformed chunk: "),
        (document({"choices": []}), "URL ended the stream before the answer was finished"),
        (refusal(400, "top_k is odd", "top_k"), "URL: top_k is odd (HTTP 400, top_k)"),
        (refusal(429, "queue is full", retry_after="3"), "URL: queue is full (HTTP 429); try again in 3 s"),
        (refusal(503, "draining", retry_after="later"), "URL: draining (HTTP 503); try again after later"),
        (refusal(401, "wrong key"), "URL: wrong key (HTTP 401); --api-key or QUIRE_API_KEY sets a key"),
        (Reply(500, [b"<h1>oops"]), "URL: Internal Server Error (HTTP 500)"),
        (Reply(307, [], {"location": "/elsewhere"}), "URL: Temporary Redirect (HTTP 307)"),
        (refusal(500, "\x1b]0;owned\x07" + "x" * 5000), "URL:  ]0;owned xxxx"),
    ],
)
def test_a_bad_answer_is_one_line(server: ScriptedServer, reply: Reply, message: str) -> None:
    server.answers(reply)
    found = failure("generate", "Hi", "--server", server.url)
    assert found.startswith(message.replace("URL", server.url))
    assert len(found) < 1200
    assert found.isprintable()


def test_nothing_heavy_is_imported(server: ScriptedServer) -> None:
    script = (
        "import sys\nfrom quire.cli.main import app\n"
        "try: app()\nexcept SystemExit: pass\n"
        "names = {'httpx', 'torch', 'numpy', 'tokenizers', 'msgspec'}\n"
        "names |= {'starlette', 'uvicorn', 'jinja2', 'gguf', 'asyncio'}\n"
        "print(sorted(names & set(sys.modules)), file=sys.stderr)\n"
    )
    for arguments, stdin in ((["generate", "Hi", "--json"], ""), (["chat"], "Hi\n/stats\n")):
        command = [sys.executable, "-c", script, *arguments, "--server", server.url]
        outcome = subprocess.run(command, input=stdin, capture_output=True, text=True, check=True, timeout=LIMIT_S)
        assert PARIS in outcome.stdout
        assert outcome.stderr == "[]\n"


# Leaving


def test_a_closed_stdout_cancels_the_request(server: ScriptedServer) -> None:
    server.answers(endless("word"))
    command = [sys.executable, "-m", "quire", "generate", "Count.", "--server", server.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(3)
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(LIMIT_S) == 1
    assert server.was_closed.wait(LIMIT_S)


def test_ctrl_c_cancels_the_answer_and_the_chat_continues(server: ScriptedServer) -> None:
    server.answers(endless("word"), said(PARIS))
    with Terminal("chat", env={"QUIRE_SERVER": server.url}) as terminal:
        at = terminal.wait_for(f"[using {NAME} on {server.url}]\r\n{NAME}, 60 tokens of context. /help for help.\r\n> ")
        terminal.type("Talk.\n")
        at = terminal.wait_for("word7 ", after=at)
        terminal.type("\x03")
        at = terminal.wait_for("[stopped]\r\n> ", after=at)
        assert server.was_closed.wait(LIMIT_S)
        terminal.type("And France?\n")
        at = terminal.wait_for(f"{PARIS}\r\n> ", after=at)
        terminal.type("\x04")
        assert terminal.exit_code() == 0
    first, second = server.posted()
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][0] == first["messages"][0]
    assert second["messages"][1]["content"].startswith("word0 word1 ")


# Chat


def talk(server: ScriptedServer, *lines: str, options: tuple[str, ...] = ()) -> Any:
    outcome = run("chat", "--server", server.url, *options, stdin="".join(f"{line}\n" for line in lines))
    assert outcome.exit_code == 0, outcome.exception
    return outcome


def test_stats_are_the_servers(server: ScriptedServer) -> None:
    outcome = talk(server, "Hi", "/stats")
    assert re.search(r"last answer: 7 tokens.*, the first after \d+ ms; 3 of 7 prompt tokens cached\n", outcome.stdout)
    assert "conversation: 1 turns, 60 tokens of context\n" in outcome.stdout


def thinking(*thoughts: str) -> list[dict[str, Any]]:
    return [delta(reasoning_content=thought) for thought in thoughts]


def test_reasoning_is_dimmed_and_not_sent_back(server: ScriptedServer) -> None:
    server.answers(stream(*thinking("Hm, \x1b[7m", "a fox."), chunk(choice("A fox.", 0, "stop")), DONE), said("Two."))
    with Terminal("chat", env={"QUIRE_SERVER": server.url, "TERM": "xterm"}) as terminal:
        at = terminal.wait_for("/help for help.\r\n> ")
        terminal.type("Who?\n")
        shown = "\x1b[2mHm, \ufffd[7m\x1b[0m\x1b[2ma fox.\x1b[0m\r\nA fox.\r\n> "
        at = terminal.wait_for(shown, after=at)
        terminal.type("And?\n")
        terminal.wait_for("Two.\r\n> ", after=at)
        terminal.type("\x04")
        assert terminal.exit_code() == 0
    first, second = server.posted()
    answer = {"role": "assistant", "content": "A fox."}
    assert second["messages"] == [*first["messages"], answer, {"role": "user", "content": "And?"}]


def test_reasoning_is_in_json_and_not_in_plain_output(server: ScriptedServer) -> None:
    server.answers(stream(*thinking("Hm, ", "a fox."), chunk(choice("A fox.", 0, "stop")), usage(1, 4), DONE))
    outcome = run("generate", "Who?", "--server", server.url)
    assert (outcome.stdout, outcome.stderr) == ("A fox.\n", "")
    found = json.loads(run("generate", "Who?", "--json", "--server", server.url).stdout)
    assert (found["text"], found["reasoning"]) == ("A fox.", "Hm, a fox.")


def test_tool_calls_refusals_and_filters_are_reported(server: ScriptedServer) -> None:
    called = [{"index": 0, "id": "a", "type": "function", "function": {"name": "look_up", "arguments": ""}}]
    more = [{"index": 0, "function": {"arguments": "{}"}}]
    server.answers(
        stream(delta(tool_calls=called), delta(tool_calls=more), delta("tool_calls"), DONE),
        stream(delta(refusal="I will\x1b not."), delta("stop"), DONE),
        stream(chunk(choice("It")), delta("content_filter"), DONE),
        stream(*thinking("Hm"), delta("length"), usage(1, 3), DONE),
        said(PARIS),
    )
    outcome = talk(server, "one", "two", "three", "four", "five", options=("--max-tokens", "3"))
    assert outcome.stderr.splitlines() == [
        "[the model called look_up: quire chat has no tools and ignores the call]",
        "[the model refused: I will  not.]",
        "[a content filter of the server ended the answer]",
        "[stopped at max_tokens = 3 before it began to answer; /set max_tokens N changes it]",
    ]
    assert [message["content"] for message in server.posted()[-1]["messages"]] == ["three", "It", "five"]
