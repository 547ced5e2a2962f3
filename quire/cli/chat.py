"""`quire chat`: a conversation in the terminal, or line by line from standard input."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from quire.cli import chat_model, options
from quire.cli.chat_model import ChatModel, Piece, TokenRate
from quire.cli.server_client import printable
from quire.cli.terminal import AnswerWriter, echo
from quire.engine.generation import GenerationParams
from quire.errors import ContextTooLong, InvalidRequest, QuireError, RequestFailed, TemplateError

MAX_FILE_BYTES = 64 << 20
PROMPT, CONTINUED = "> ", "... "
DEFAULT_WORDS = ("default", "none")

# Settings that /set changes -> how to parse the value.
SETTINGS: dict[str, Callable[[str], Any]] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
    "max_tokens": int,
    "stop": str,
}


@options.takes(sampling=options.sampling, engine=options.engine)
def chat(
    model: options.ModelOption = None,
    system: options.SystemOption = None,
    max_tokens: options.MaxTokensOption = 1024,
    *,
    sampling: options.Settings,
    server: options.ServerOption = None,
    api_key: options.KeyOption = None,
    local: options.LocalOption = False,
    engine: options.Settings,
) -> None:
    """Chat with a model. Ctrl-C stops an answer, Ctrl-D ends the chat, /help lists commands."""
    with options.options_named(options.FIELDS):
        params = GenerationParams(**sampling, max_tokens=max_tokens)
        options.check_answer(params)
    with closing(chat_model.open_chat_model(model, engine, server=server, api_key=api_key, is_local=local)) as found:
        if not found.has_template:
            raise TemplateError(f"{found.name} has no chat template: quire generate --raw continues a prompt")
        Repl(found, params, system).run()


class Repl:
    """The chat loop and the conversation. An error in a turn is printed and does not end the chat."""

    def __init__(self, model: ChatModel, params: GenerationParams, system: str | None = None) -> None:
        self.model = model
        self.params = params
        self.system = system or None
        self.messages: list[dict[str, str]] = []  # without the system prompt, which can be changed
        self._writer = AnswerWriter()
        self._files: set[Path] = set()  # saved or loaded in this chat: these may be overwritten
        self._last: TokenRate | None = None  # of the last answer
        self._is_over = False

    def run(self) -> None:
        if sys.stdin.isatty():
            with suppress(ImportError):  # not on every system
                import readline  # noqa: F401  # adds line editing and history to `input`
            echo(f"{self.model.name}, {self.model.max_model_len} tokens of context. /help for help.", err=True)
        for text in read_messages():
            self._handle(text)
            if self._is_over:
                return

    def _handle(self, text: str) -> None:
        try:
            if text.startswith("/"):
                self._command(text)
            elif text.strip():
                self._take_turn(text.strip())
        except BrokenPipeError:
            raise
        except ContextTooLong as error:
            _remark(f"{_bare(error)}. /reset forgets the conversation, /save FILE keeps it")
        except QuireError as error:
            _remark(_bare(error))
        except OSError as error:
            _remark(f"{error.filename}: {error.strerror}" if error.filename else str(error))

    # Answering

    @property
    def conversation(self) -> list[dict[str, str]]:
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return head + self.messages

    def _take_turn(self, text: str) -> None:
        """Answer a message. A turn without an answer is removed from the conversation, so that roles alternate."""
        self.messages.append({"role": "user", "content": text})
        answer = ""
        try:
            answer = self._answer()
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": answer})
            else:
                self.messages.pop()

    def _answer(self) -> str:
        pace = TokenRate()
        pieces: list[Piece] = []

        def take(piece: Piece) -> None:
            pace.take(piece)
            pieces.append(piece)
            self._writer.think(piece.thought)
            self._writer.say(piece.text)

        is_stopped = False
        try:
            pace.settle(self.model.answer(self.conversation, self.params, take))
        except KeyboardInterrupt:  # the request is cancelled
            is_stopped = True
        except RequestFailed as error:
            raise RequestFailed(f"the answer failed: {error}") from None
        finally:
            self._writer.end_line()
        self._last = pace
        answer = "".join(piece.text for piece in pieces)
        if is_stopped:
            _remark("stopped")
        else:
            self._print_ending(pieces, pace.num_tokens, "" if answer else " before it began to answer")
        return answer

    def _print_ending(self, pieces: list[Piece], num_tokens: int, when: str) -> None:
        """Print why an answer ended, if the model did not end it, and what it contained besides text."""
        reason = pieces[-1].finish_reason if pieces else None
        if refusal := "".join(piece.refusal for piece in pieces):
            _remark(f"the model refused: {printable(refusal)}")
        elif reason == "content_filter":
            _remark("a content filter of the server ended the answer")
        if calls := ", ".join(name for piece in pieces for name in piece.calls):
            _remark(f"the model called {calls}: quire chat has no tools and ignores the call")
        if reason == "length" and num_tokens == self.params.max_tokens:
            _remark(f"stopped at max_tokens = {num_tokens}{when}; /set max_tokens N changes it")
        elif reason == "length":
            size = self.model.max_model_len
            _remark(f"stopped{when}: the context of {size} tokens is full. /reset forgets the conversation")

    # Commands

    def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name not in COMMANDS:
            raise InvalidRequest(
                f"{name} is not a command; /help lists them. Put a space before a message that begins with /"
            )
        COMMANDS[name].run(self, rest.strip())

    def help(self, _rest: str) -> None:
        for command in dict.fromkeys(COMMANDS.values()):
            self._writer.say(f"{command.usage:18}{command.what}\n")
        self._writer.say(
            "A line that ends with \\ continues on the next one. Ctrl-C stops an answer, Ctrl-D ends the chat.\n"
        )

    def reset(self, _rest: str) -> None:
        self.messages = []

    def set_system(self, rest: str) -> None:
        self.system = rest or None

    def save(self, rest: str) -> None:
        path = _path("/save", rest)
        if path.exists() and path.resolve() not in self._files:
            raise InvalidRequest(f"{path} exists and was not saved or loaded in this chat: choose another name")
        if path.suffix == ".jsonl":
            text = "".join(json.dumps(message, ensure_ascii=False) + "\n" for message in self.conversation)
        else:
            text = json.dumps(self.conversation, ensure_ascii=False, indent=2) + "\n"
        path.write_text(text, encoding="utf-8")
        self._files.add(path.resolve())
        _remark(f"wrote {len(self.conversation)} messages to {path}")

    def load(self, rest: str) -> None:
        path = _path("/load", rest)
        messages = read_conversation(path)
        self.system = messages.pop(0)["content"] if messages[0]["role"] == "system" else None
        self.messages = messages
        self._files.add(path.resolve())
        _remark(f"read {len(self.conversation)} messages from {path}")

    def stats(self, _rest: str) -> None:
        if (pace := self._last) is None:
            self._writer.say("last answer: none yet\n")
        else:
            first = "" if pace.ttft_ms is None else f", the first after {pace.ttft_ms:.0f} ms"
            self._writer.say(f"last answer: {pace}{first}{'; ' if pace.cached else ''}{pace.cached}\n")
        num_turns = sum(message["role"] == "user" for message in self.messages)
        self._writer.say(f"conversation: {num_turns} turns, {self.model.max_model_len} tokens of context\n")
        try:
            cache = self.model.cache_stats()
        except QuireError as error:
            self._writer.say(f"cache: unknown: {error}\n")
            return
        self._writer.say(
            f"cache: {cache.num_cached} of {cache.num_blocks} blocks hold earlier text, {cache.num_evictions} evicted;"
            f" {cache.num_hit_tokens} of {cache.num_queried_tokens} prompt tokens found ({cache.hit_rate:.0%})\n"
        )

    def set_param(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if not name:
            for known in SETTINGS:
                setting = getattr(self.params, known)
                self._writer.say(f"{known:20}{'default' if setting in (None, ()) else setting}\n")
            return
        if name not in SETTINGS:
            raise InvalidRequest(f"/set {name} is not one of {', '.join(SETTINGS)}")
        changed = replace(self.params, **{name: _parsed(name, value.strip())})
        options.check_answer(changed)
        self.params = changed

    def leave(self, _rest: str) -> None:
        self._is_over = True


@dataclass(frozen=True, slots=True)
class _Command:
    usage: str
    what: str
    run: Callable[[Repl, str], None]


COMMANDS: dict[str, _Command] = {
    command.usage.split()[0]: command
    for command in (
        _Command("/help", "this list", Repl.help),
        _Command("/reset", "forget the conversation", Repl.reset),
        _Command("/system TEXT", "instructions to the model; without TEXT, none", Repl.set_system),
        _Command("/set NAME VALUE", "change a sampling parameter; /set alone lists them", Repl.set_param),
        _Command("/save FILE", "write the conversation as JSON, or as JSON lines to a .jsonl file", Repl.save),
        _Command("/load FILE", "continue a saved conversation", Repl.load),
        _Command("/stats", "speed of the last answer, and tokens reused from the cache", Repl.stats),
        _Command("/exit", "end the chat, like Ctrl-D or Ctrl-C at the prompt", Repl.leave),
    )
}
COMMANDS["/quit"] = COMMANDS["/bye"] = COMMANDS["/exit"]


# Input


def read_messages() -> Iterator[str]:
    """Messages: lines, joined where one ends with a backslash. Ctrl-C while waiting ends the chat, as Ctrl-D does."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    lines: list[str] = []
    while True:
        try:
            line = _read_line(CONTINUED if lines else PROMPT)
        except KeyboardInterrupt:
            line, lines = None, []
        if line is None:
            if sys.stdin.isatty():
                echo("", err=True)  # the shell's prompt starts on a new line
            if lines:
                yield "\n".join(lines)
            return
        is_continued = line.endswith("\\")
        lines.append(line[:-1] if is_continued else line)
        if not is_continued:
            yield "\n".join(lines)
            lines = []


def _read_line(prompt: str) -> str | None:
    if sys.stdin.isatty() and sys.stdout.isatty():
        try:
            return input(prompt)
        except EOFError:
            return None
    if sys.stdin.isatty():
        echo(prompt, nl=False, err=True)  # stdout is for the answers
    line = sys.stdin.readline()
    return line.removesuffix("\n") if line else None


def read_conversation(path: Path) -> list[dict[str, str]]:
    """Messages of a file: a JSON list, an object with `messages`, or one message per line."""
    from quire.engine.llm import as_chat

    if path.stat().st_size > MAX_FILE_BYTES:
        raise InvalidRequest(f"{path} has {path.stat().st_size} bytes, more than {MAX_FILE_BYTES}")
    found = _read_json(path)
    if isinstance(found, Mapping) and "messages" in found:
        found = found["messages"]
    if not isinstance(found, list) or not all(isinstance(message, Mapping) for message in found):
        raise InvalidRequest(f"{path}: is not a list of messages, each an object with role and content")
    try:
        as_chat(found)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error}") from None
    return [{str(key): value for key, value in message.items() if value is not None} for message in found]


def _read_json(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".jsonl":
            return json.loads(text)
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except RecursionError:
        raise InvalidRequest(f"{path}: is nested too deeply") from None
    except ValueError as error:  # of UTF-8 or of JSON
        raise InvalidRequest(f"{path}: is not JSON{' lines' if path.suffix == '.jsonl' else ''}: {error}") from None


def _path(command: str, given: str) -> Path:
    if not given:
        raise InvalidRequest(f"{command} needs the name of a file")
    return Path(os.path.expanduser(given))


def _parsed(name: str, value: str) -> Any:
    if not value:
        raise InvalidRequest(f"/set {name}: needs a value, or {DEFAULT_WORDS[0]}")
    if value.lower() in DEFAULT_WORDS:
        return next(known.default for known in fields(GenerationParams) if known.name == name)
    try:
        return SETTINGS[name](value)
    except ValueError:
        kind = "a whole number" if SETTINGS[name] is int else "a number"
        raise InvalidRequest(f"{name} = {value!r} is not {kind}") from None


def _bare(error: QuireError) -> str:
    return str(error).removeprefix("prompts[0]: ")


def _remark(text: str) -> None:
    """Print a remark to stderr; stdout has answers only."""
    echo(f"[{text}]", err=True)
