"""`quire chat` through a pipe and in a terminal, and its commands with a model that echoes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cli import chat as chat_model
from quire.cli.main import app
from quire.core.values import FinishReason
from tests.cli.runs import EchoLLM, quire


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> EchoLLM:
    llm = EchoLLM()
    monkeypatch.setattr(chat_model, "open_llm", lambda _model, _settings: llm)
    return llm


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
    first, _, second, _ = found
    assert first == (0, 37)
    assert second[0] > 37  # the first prompt, and the answer after it
    assert second[1] > second[0]
    assert ">" not in outcome.stdout


# Its commands


def test_history_system_and_reset(echo: EchoLLM) -> None:
    outcome = talk("one two", "/system Be brief.", "three", "/reset", "four", "/system", "five", "/exit", "not said")
    assert outcome.stdout == "one two\nthree\nfour\nfive\n"
    assert [[message["content"] for message in seen] for seen in echo.seen] == [
        ["one two"],
        ["Be brief.", "one two", "one two", "three"],
        ["Be brief.", "four"],
        ["four", "four", "five"],
    ]


def test_lines_are_joined_by_a_backslash(echo: EchoLLM) -> None:
    talk("one\\", "two\\", "three", "", "   ", " /usr/bin", "open\\")
    assert [seen[-1]["content"] for seen in echo.seen] == ["one\ntwo\nthree", "/usr/bin", "open"]


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


@pytest.mark.parametrize("name", ["talk.json", "talk.jsonl"])
def test_save_and_load(echo: EchoLLM, tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    talk("/system Be brief.", "héllo", f"/save {file}", "more", f"/save {file}")
    outcome = talk(f"/load {file}", "again", f"/save {file}")
    assert outcome.stderr.startswith(f"[read 5 messages from {file}]\n[wrote 7 messages")
    assert [message["content"] for message in echo.seen[-1]] == [
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
        ('{"messages": [{"role": "user", "content": 3}]}', "messages[0].content is a int, not a string"),
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
    assert [message["content"] for message in echo.seen[-1]] == ["short", "short", "short again"]


def test_the_reason_of_a_cut_answer_is_printed(echo: EchoLLM) -> None:
    echo.finish = FinishReason.LENGTH
    outcome = talk("one two", "three", options=("--max-tokens", "2"))
    assert outcome.stderr.splitlines() == [
        "[stopped at max_tokens = 2; /set max_tokens N changes it]",
        "[stopped: the context of 60 tokens is full. /reset forgets the conversation]",
    ]


def test_reasoning_is_no_part_of_the_conversation(echo: EchoLLM) -> None:
    echo.thinks = True
    outcome = talk("<think>Hm, a fox.</think>\\", "A fox.", "And then?")
    assert (outcome.stdout, outcome.stderr) == ("A fox.\nAnd then?\n", "")  # no terminal
    assert [message["content"] for message in echo.seen[-1]][1:] == ["A fox.", "And then?"]


def test_an_answer_of_reasoning_only_is_dropped(echo: EchoLLM) -> None:
    echo.thinks, echo.finish = True, FinishReason.LENGTH
    outcome = talk("<think>Hm", "<think>Hm, well", options=("--max-tokens", "1"))
    assert outcome.stderr.splitlines() == [
        "[stopped at max_tokens = 1 before it began to answer; /set max_tokens N changes it]",
        "[stopped before it began to answer: the context of 60 tokens is full. /reset forgets the conversation]",
    ]
    assert len(echo.seen[-1]) == 1


def test_a_failed_answer_is_reported_and_dropped(echo: EchoLLM) -> None:
    echo.finish, echo.error = FinishReason.ERROR, "not a number"
    outcome = talk("one", "two")
    assert outcome.stderr == "[the answer failed: not a number]\n" * 2
    assert [message["content"] for message in echo.seen[-1]] == ["two"]


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
    assert "2 of 10 blocks hold earlier text, 0 evicted; 50 of 100 prompt tokens found (50%)" in outcome.stdout
