"""`quire chat`: a conversation in the terminal, or line by line from standard input. `quire generate`: one answer.

`quire run` is one of both, as in Ollama. Only answers are written to stdout. A `ChatModel` is the model of these
commands, on a running server that has it or in this process.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli import options
from quire.cli.options import FIELDS, Settings, option_name, options_named
from quire.cli.server_client import (
    PATIENT,
    QUICK,
    Address,
    ServerClient,
    ServerNotFound,
    choose_address,
    chosen_key,
    note,
    printable,
)
from quire.cli.terminal import AnswerWriter, bytes_bar, download_bar, echo
from quire.engine.generation import GenerationParams
from quire.errors import ContextTooLong, InvalidRequest, ModelNotFound, QuireError, RequestFailed, TemplateError
from quire.text.grammar import Grammar, GrammarKind, json_schema_grammar
from quire.text.stream import AnswerParser, PlainAnswer, Thought, Words
from quire.weights.hub import DEFAULT_MODEL, find_known, pull, resolve

if TYPE_CHECKING:
    from quire.core.kv_cache import CacheStats
    from quire.engine.generation import Delta, GenerationOutput, TokenLogprob
    from quire.engine.llm import LLM


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
    with closing(open_chat_model(model, engine, server=server, api_key=api_key, is_local=local)) as found:
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


SEPARATOR = "-" * 8  # between the answers of --n


@options.takes(sampling=options.sampling, engine=options.engine)
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or nothing: read it from standard input.")] = None,
    model: options.ModelOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt without the chat template.")] = False,
    system: options.SystemOption = None,
    max_tokens: options.MaxTokensOption = 512,
    *,
    sampling: options.Settings,
    n: Annotated[int, typer.Option("--n", "-n", help="Number of answers.")] = 1,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue when the model ends its answer.")] = False,
    json_schema: Annotated[Path | None, typer.Option(help="File with the JSON schema of the answer.")] = None,
    regex: Annotated[str | None, typer.Option(help="Regular expression that the answer must match.")] = None,
    grammar: Annotated[Path | None, typer.Option(help="File with the grammar of the answer, Lark or GBNF.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="With --json: alternatives to print for each token.")] = None,
    server: options.ServerOption = None,
    api_key: options.KeyOption = None,
    local: options.LocalOption = False,
    engine: options.Settings,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the answer.")] = False,
) -> None:
    """Answer one prompt. The answer is written to stdout as it is generated."""
    if logprobs is not None and not as_json:
        raise InvalidRequest(f"--logprobs {logprobs} is shown only with --json")
    with options.options_named(options.FIELDS):
        params = GenerationParams(
            **sampling,
            n=n,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            grammar=read_grammar(json_schema=json_schema, regex=regex, grammar=grammar),
        )
        options.check_answer(params)
    ask = read_ask(prompt, system, is_raw=raw)
    with closing(open_chat_model(model, engine, server=server, api_key=api_key, is_local=local)) as model_used:
        _answer(model_used, ask, params, as_json=as_json)


def run(
    model: Annotated[str, typer.Argument(help="A name from `quire models`, a folder or a .gguf file.")],
    prompt: Annotated[list[str] | None, typer.Argument(help="The prompt; without one, a chat begins.")] = None,
    system: options.SystemOption = None,
    max_tokens: options.MaxTokensOption = 1024,
    temperature: options.TemperatureOption = None,
    seed: options.SeedOption = None,
    server: options.ServerOption = None,
    api_key: options.KeyOption = None,
    local: options.LocalOption = False,
    kv_memory: options.MemoryOption = None,
) -> None:
    """Chat with a model, or answer one prompt. `quire chat` and `quire generate` have more options."""
    given = {name: value for name, value in locals().items() if name != "prompt"}
    if not prompt and sys.stdin.isatty():
        chat(**given)
    else:
        generate(" ".join(prompt) if prompt else None, **given)


def read_ask(prompt: str | None, system: str | None, *, is_raw: bool) -> ChatInput:
    if is_raw and system is not None:
        raise InvalidRequest(f"--system {system!r} needs the chat template, and --raw was given")
    text = read_prompt(prompt, is_raw=is_raw)
    head = [] if system is None else [{"role": "system", "content": system}]
    return text if is_raw else [*head, {"role": "user", "content": text}]


def read_grammar(*, json_schema: Path | None, regex: str | None, grammar: Path | None) -> Grammar | None:
    """The grammar of the answer, from one of three options; None if none is given."""
    from quire.text.grammar import written_grammar

    options_given = {"--json-schema": json_schema, "--regex": regex, "--grammar": grammar}
    given = [(option, value) for option, value in options_given.items() if value is not None]
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(option for option, _ in given)} exclude each other")
    if not given:
        return None
    ((option, value),) = given
    source = value if isinstance(value, str) else _read_file(option, value)
    try:
        if option == "--grammar":
            return written_grammar(source)
        kind = GrammarKind.REGEX if option == "--regex" else GrammarKind.JSON_SCHEMA
        found = Grammar(kind, source)  # reports what is wrong with the text
        return found if option == "--regex" else json_schema_grammar(json.loads(source))
    except InvalidRequest as error:
        shown = f"{value!r:.80}" if isinstance(value, str) else value
        problem = str(error).removeprefix("grammar").lstrip(": ")
        raise InvalidRequest(f"{option} {shown}: {problem}") from None


def _read_file(option: str, path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{option} {path} is not UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise InvalidRequest(f"{option} {path} is not a file that can be read: {error.strerror}") from None


def read_prompt(given: str | None, *, is_raw: bool) -> str:
    """The argument, or standard input without its last line end."""
    if given is None and sys.stdin.isatty():
        raise InvalidRequest('prompt is missing: quire generate "...", or pipe one in')
    text = given
    if text is None or text == "-":
        try:
            text = sys.stdin.buffer.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InvalidRequest(
                f"prompt on standard input is not UTF-8: {error.reason} at byte {error.start}"
            ) from None
        text = text.removesuffix("\n").removesuffix("\r")
    elif any("\ud800" <= char <= "\udfff" for char in text):  # bytes of an argument that Python could not decode
        raise InvalidRequest(f"prompt = {text[:80]!r} is not UTF-8")
    if not (text if is_raw else text.strip()):
        raise InvalidRequest(f"prompt = {text!r} is empty")
    return text


def _answer(model_used: ChatModel, ask: ChatInput, params: GenerationParams, *, as_json: bool) -> None:
    if not isinstance(ask, str) and not model_used.has_template:
        raise TemplateError(f"{model_used.name} has no chat template: use --raw to continue the prompt as it is")
    samples = [_Sample() for _ in range(params.n)]
    printer = _Printer(samples, is_silent=as_json)
    pace = printer.pace
    try:
        with options.options_named(options.FIELDS):
            pace.settle(model_used.answer(ask, params, printer.take))
    finally:
        printer.finish()  # also after Ctrl-C: the next output starts on a new line
    if len(samples) == 1 and pace.usage is not None:
        samples[0].num_tokens = pace.usage.completion_tokens
    if as_json:
        document = _document(model_used.name, samples, pace, has_logprobs=params.logprobs is not None)
        echo(json.dumps(document, ensure_ascii=False))
        return
    reasons = [_why_stopped(sample, params.max_tokens, model_used.max_model_len) for sample in samples]
    if sys.stderr.isatty():
        figures = ", ".join(part for part in (str(pace), pace.cached) if part)
        echo("; ".join(dict.fromkeys([figures, *(reason for reason in reasons if reason)])), err=True)
        return
    for sample, reason in zip(samples, reasons, strict=True):
        if sample.is_cut:  # without a terminal no figures are printed, but the reader must know of a cut answer
            echo(f"{reason}: the answer is cut", err=True)
            return


@dataclass(slots=True)
class _Sample:
    """One answer, as far as it is received."""

    text: str = ""
    thought: str = ""
    num_tokens: int | None = 0  # None: not counted
    num_printed: int = 0  # characters
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    end: Piece | None = None

    @property
    def is_cut(self) -> bool:
        return self.end is not None and self.end.finish_reason == "length"

    def take(self, piece: Piece) -> None:
        self.text += piece.text
        self.thought += piece.thought
        self.logprobs += piece.logprobs
        if self.num_tokens is not None:
            self.num_tokens = None if piece.num_tokens is None else self.num_tokens + piece.num_tokens
        if piece.finish_reason is not None:
            self.end = piece


class _Printer:
    """Prints answers one after another. The current one is printed as it arrives, the others are kept."""

    def __init__(self, samples: list[_Sample], *, is_silent: bool) -> None:
        self.pace = TokenRate()
        self._samples = samples
        self._writer = AnswerWriter()
        self._is_silent = is_silent
        self._is_broken = False  # stdout is closed
        self._current = 0

    def take(self, piece: Piece) -> None:
        self.pace.take(piece)
        self._samples[piece.index].take(piece)
        if self._is_silent:
            return
        try:
            if piece.index == self._current:
                self._writer.think(piece.thought)
            self._print()
        except OSError:
            self._is_broken = True
            raise  # ends the request

    def finish(self) -> None:
        if not self._is_broken:
            self._writer.end_line()

    def _print(self) -> None:
        while True:
            sample = self._samples[self._current]
            text = sample.text[sample.num_printed :]
            sample.num_printed += len(text)
            self._writer.say(text)
            if sample.end is None or self._current + 1 == len(self._samples):
                return
            self._writer.end_line()
            self._writer.say(f"{SEPARATOR}\n")
            self._current += 1


# Output


def _why_stopped(sample: _Sample, max_tokens: int | None, max_model_len: int) -> str:
    """Why the answer was cut; empty if the model ended it."""
    if sample.end is not None and sample.end.stop is not None:
        return f"stopped at --stop {sample.end.stop!r}"
    if not sample.is_cut:
        return ""
    if sample.num_tokens is None:
        return f"stopped at --max-tokens {max_tokens}, or at the end of the context, {max_model_len} tokens"
    if sample.num_tokens == max_tokens:
        return f"stopped at --max-tokens {max_tokens}"
    return f"stopped at the end of the context, {max_model_len} tokens"


def _document(name: str, samples: list[_Sample], pace: TokenRate, *, has_logprobs: bool) -> dict[str, Any]:
    usage = pace.usage
    counts = (
        None
        if usage is None
        else {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
    )
    completions = [_completion(sample, has_logprobs=has_logprobs) for sample in samples]
    timings = {"ttft_ms": pace.ttft_ms, "tokens_per_s": pace.tokens_per_s}
    return {
        "model": name,
        **completions[0],
        "usage": counts,
        "cache": None if usage is None else usage.cache,
        "timings": {key: None if value is None else round(value, 2) for key, value in timings.items()},
        **({"completions": completions} if len(completions) > 1 else {}),
    }


def _completion(sample: _Sample, *, has_logprobs: bool) -> dict[str, Any]:
    document: dict[str, Any] = {"text": sample.text, **({"reasoning": sample.thought} if sample.thought else {})}
    if sample.end is not None:
        document["finish_reason"] = sample.end.finish_reason
        if sample.end.is_stop_known:
            document["stop"] = sample.end.stop
    if has_logprobs:
        document["logprobs"] = sample.logprobs
    return document


ChatInput = str | Sequence[Mapping[str, str]]  # a raw prompt to continue, or a conversation to answer


@dataclass(frozen=True, slots=True)
class Piece:
    """New output of one sample."""

    index: int  # of the sample
    text: str
    num_tokens: int | None  # None: not reported
    thought: str = ""  # reasoning, which precedes the text
    calls: tuple[str, ...] = ()  # names of tools whose calls start in this piece
    refusal: str = ""
    logprobs: tuple[dict[str, Any], ...] = ()  # as --json prints them
    finish_reason: str | None = None
    stop: str | None = None  # the stop string that ended it
    is_stop_known: bool = True


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    prompt_tokens: int
    completion_tokens: int  # of all samples
    cached_tokens: int
    cache: dict[str, Any] | None  # how much of the prompt was cached and where the match ended, as --json prints it


@dataclass(slots=True)
class TokenRate:
    """Number of tokens of an answer and their rate."""

    started_s: float = field(default_factory=time.perf_counter)
    num_tokens: int = 0
    usage: AnswerUsage | None = None  # None: the answer was stopped, or the server reported none
    _num_first: int = 0
    _first_s: float | None = None
    _last_s: float = 0.0

    def take(self, piece: Piece) -> None:
        """Count a piece. If its tokens are not reported, it counts as one until `settle`."""
        self.count(int(bool(piece.text or piece.thought)) if piece.num_tokens is None else piece.num_tokens)

    def count(self, num_tokens: int) -> None:
        if num_tokens:
            self._last_s = time.perf_counter()
            if self._first_s is None:
                self._first_s, self._num_first = self._last_s, num_tokens
            self.num_tokens += num_tokens

    def settle(self, usage: AnswerUsage | None) -> None:
        self.usage = usage
        if usage is not None:
            self.num_tokens = usage.completion_tokens

    @property
    def ttft_ms(self) -> float | None:
        return None if self._first_s is None else (self._first_s - self.started_s) * 1000

    @property
    def tokens_per_s(self) -> float | None:
        """Rate after the first token, which includes the prompt. None if there is only one."""
        if self._first_s is None or self._last_s <= self._first_s:
            return None
        return (self.num_tokens - self._num_first) / (self._last_s - self._first_s)

    def __str__(self) -> str:
        tokens = f"{self.num_tokens} token{'' if self.num_tokens == 1 else 's'}"
        rate = self.tokens_per_s
        return tokens if rate is None else f"{tokens}, {rate:.{0 if rate >= 10 else 1}f} tok/s"

    @property
    def cached(self) -> str:
        """How many tokens of the prompt were found in the cache; empty if that is unknown."""
        if self.usage is None:
            return ""
        return f"{self.usage.cached_tokens} of {self.usage.prompt_tokens} prompt tokens cached"


Take = Callable[[Piece], None]


class LocalModel:
    """A model in this process. It runs a whole answer itself, which an `LLM` needs to report exact usage."""

    def __init__(self, llm: LLM, name: str) -> None:
        self.llm = llm
        self.name = name
        self.max_model_len = llm.max_model_len
        self.has_template = llm.text.template.source is not None

    def answer(self, ask: ChatInput, params: GenerationParams, take: Take) -> AnswerUsage:
        """Pass the answer to `take` until all samples have ended.

        An exception in `take`, also Ctrl-C, cancels the request and is raised. Raises RequestFailed if the answer is
        incomplete.
        """
        problem: Exception | None = None
        parsers = self._new_parsers(ask, params.n)

        def pass_on(_number: int, delta: Delta) -> None:
            nonlocal problem
            try:
                take(_piece(delta, parsers[delta.index]))
            except Exception as error:
                problem = error  # an LLM would make it an error of the request
                raise

        if isinstance(ask, str):
            (output,) = self.llm.generate(ask, params, on_output=pass_on)
        else:
            (output,) = self.llm.chat([dict(message) for message in ask], params, on_output=pass_on)
        if problem is not None:
            raise problem
        for completion in output.completions:
            if completion.error is not None:
                raise RequestFailed(completion.error)
        usage = output.usage
        return AnswerUsage(
            usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, cache=self._cache_of(output)
        )

    def _cache_of(self, output: GenerationOutput) -> dict[str, Any] | None:
        """The explanation, with the text of the prompt where the match ended."""
        from quire.text.tokenizer import stopped_text

        if (cache := output.cache) is None:
            return None
        text = stopped_text(self.llm.text.tokenizer, output.prompt_token_ids, cache)
        return {**asdict(cache), "stopped_text": None if text is None else asdict(text)}

    def _new_parsers(self, ask: ChatInput, num_samples: int) -> list[AnswerParser]:
        """A parser for each sample. The prompt is rendered again only for models that reason."""
        from quire.engine.llm import as_chat

        text = self.llm.text
        if isinstance(ask, str) or text.template.reasoning is None:
            return [PlainAnswer() for _ in range(num_samples)]
        chat = as_chat([dict(message) for message in ask])
        prompt = text.encode_chat(chat, self.llm.max_model_len)
        return [text.new_parser(chat, prompt) for _ in range(num_samples)]

    def cache_stats(self) -> CacheStats:
        return self.llm.cache_stats()

    def close(self) -> None:
        self.llm.close()


def _piece(delta: Delta, parser: AnswerParser) -> Piece:
    parts = parser.push(delta.text)
    if delta.finish_reason is not None:
        parts += parser.finish(is_cut=delta.finish_reason == "length")
    return Piece(
        index=delta.index,
        text="".join(part.text for part in parts if isinstance(part, Words)),
        num_tokens=len(delta.token_ids),
        thought="".join(part.text for part in parts if isinstance(part, Thought)),
        logprobs=_documents(delta.logprobs),
        finish_reason=None if delta.finish_reason is None else delta.finish_reason.value,
        stop=delta.stop,
    )


def _documents(entries: Sequence[TokenLogprob]) -> tuple[dict[str, Any], ...]:
    """Log probabilities as --json prints them, with `bytes`: a token may be part of a character."""
    return tuple(
        {
            "token_id": entry.token_id,
            "text": entry.text,
            "bytes": list(entry.data),
            "logprob": entry.logprob,
            "rank": entry.rank,
            **({"top": list(_documents(entry.top))} if entry.top else {}),
        }
        for entry in entries
    )


# A model of a server


# Fields of GenerationParams -> their names in the API. Fields that were not given are not sent: the server has the
# model's own defaults.
WIRE_NAMES = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty")},
    **{name: name for name in ("frequency_penalty", "logit_bias", "seed", "n", "max_tokens", "min_tokens", "stop")},
    **{name: name for name in ("stop_token_ids", "ignore_eos")},
    "include_stop": "include_stop_str_in_output",
    "skip_special": "skip_special_tokens",
}
GRAMMAR_NAMES = {"json_schema": "guided_json", "regex": "guided_regex", "lark": "guided_grammar"}  # by kind


class RemoteModel:
    """A model of a server, with the methods of `LocalModel`."""

    has_template = True  # a server without one refuses the request

    def __init__(self, server: ServerClient, name: str, max_model_len: int) -> None:
        self.name = name
        self.max_model_len = max_model_len
        self._server = server

    def answer(self, ask: ChatInput, params: GenerationParams, take: Take) -> AnswerUsage | None:
        """As `LocalModel.answer`. Returns None if the server reports no usage."""
        usage: AnswerUsage | None = None
        unfinished = set(range(params.n))
        path = "/v1/completions" if isinstance(ask, str) else "/v1/chat/completions"
        with self._server.events("POST", path, request_body(self.name, ask, params)) as events:
            for data in events:
                if data.startswith("[DONE]"):
                    break
                chunk = self._server.parse(data)
                try:
                    pieces, found = read_chunk(chunk, has_stops=bool(params.stops))
                except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
                    raise self._server.malformed("a malformed chunk", chunk) from None
                for piece in pieces:
                    if piece.index not in unfinished:
                        raise self._server.malformed("more samples than requested", chunk)
                    if piece.finish_reason is not None:
                        unfinished.discard(piece.index)
                    take(piece)
                usage = found or usage
            else:
                raise RequestFailed(f"{self._server.url} ended the stream before the answer was finished")
        if unfinished:
            raise RequestFailed(f"{self._server.url} ended the stream before sample {min(unfinished)} was finished")
        return usage

    def cache_stats(self) -> CacheStats:
        from quire.core.kv_cache import CacheStats

        found = self._server.get("/v1/cache/stats")
        try:
            names = [field.name for field in fields(CacheStats) if field.type == "int" and field.default is MISSING]
            counts: dict[str, Any] = {name: _whole(found[name]) for name in names}
            return replace(CacheStats.none(), **counts)
        except (KeyError, TypeError, ValueError):
            raise self._server.malformed("malformed cache statistics", found) from None

    def close(self) -> None:
        """Nothing to close: no connection is open between two answers."""


def request_body(model: str, ask: ChatInput, params: GenerationParams) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}, "cache": True}
    neutral = GenerationParams()
    for name, wire_name in WIRE_NAMES.items():
        value = getattr(params, name)
        if value != getattr(neutral, name):
            body[wire_name] = value
    if params.grammar is not None:
        body[GRAMMAR_NAMES[params.grammar.kind]] = params.grammar.given or params.grammar.source
    if isinstance(ask, str):
        body["prompt"] = ask
        if params.logprobs is not None:
            body["logprobs"] = params.logprobs
    else:
        body["messages"] = [dict(message) for message in ask]
        if params.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": params.logprobs}
    return body


def read_chunk(chunk: Any, *, has_stops: bool) -> tuple[list[Piece], AnswerUsage | None]:
    """Raises RequestFailed with the server's message. A malformed chunk raises KeyError, TypeError or the like."""
    if error := chunk.get("error"):
        message = error.get("message") if isinstance(error, dict) else error
        raise RequestFailed(printable(str(message or error)))
    pieces = [_received(choice, has_stops=has_stops) for choice in chunk["choices"]]
    if not (usage := chunk.get("usage")):
        return pieces, None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    cache = chunk.get("cache")
    return pieces, AnswerUsage(
        prompt_tokens=_whole(usage["prompt_tokens"]),
        completion_tokens=_whole(usage["completion_tokens"]),
        cached_tokens=_whole(cached),
        cache=None if cache is None else _explanation(cache),
    )


def _received(choice: dict[str, Any], *, has_stops: bool) -> Piece:
    delta = choice.get("delta") or {}
    text = choice.get("text") if "text" in choice else delta.get("content")
    thought, refusal = delta.get("reasoning_content"), delta.get("refusal")
    reason = choice.get("finish_reason")
    for value in (text, thought, refusal, reason):
        if not isinstance(value, str | None):
            raise TypeError(value)
    if reason == "error":
        raise RequestFailed("the server could not finish the answer")
    # The name of a tool is in the first part of a call; the others have its arguments.
    calls = [(call.get("function") or {}).get("name") for call in delta.get("tool_calls") or ()]
    found = choice.get("logprobs")
    logprobs = () if found is None else _logprobs(found)
    stop = choice.get("stop_reason")  # vLLM's field: the stop string, or the id of a stop token
    return Piece(
        index=_whole(choice["index"]),
        text=text or "",
        num_tokens=len(logprobs) if found is not None else None if text or thought or refusal else 0,
        thought=thought or "",
        calls=tuple(printable(str(name)) for name in calls if name),
        refusal=refusal or "",
        logprobs=logprobs,
        finish_reason=reason,
        stop=stop if isinstance(stop, str) else None,
        is_stop_known="stop_reason" in choice or reason != "stop" or not has_stops,
    )


def _logprobs(found: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Log probabilities of either endpoint, as --json prints them. The API has no token ids and ranks."""
    if "content" in found:
        return tuple(_logprob(entry) for entry in found["content"] or ())
    texts, numbers = found["tokens"], found["token_logprobs"]
    tops = found.get("top_logprobs") or [None] * len(texts)
    return tuple(
        {
            "text": str(text),
            "logprob": number,
            **({"top": [{"text": str(other), "logprob": chance} for other, chance in top.items()]} if top else {}),
        }
        for text, number, top in zip(texts, numbers, tops, strict=True)
    )


def _logprob(entry: dict[str, Any]) -> dict[str, Any]:
    top = entry.get("top_logprobs")
    return {
        "text": str(entry["token"]),
        "bytes": entry.get("bytes"),
        "logprob": entry["logprob"],
        **({"top": [_logprob(other) for other in top]} if top else {}),
    }


def _explanation(cache: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_tokens": _whole(cache["matched_tokens"]),
        "num_blocks": _whole(cache["matched_blocks"]),
        "stopped_at": cache["stopped_at"],
        "reason": cache["reason"],
        "num_kv_tokens": _whole(cache.get("kv_tokens") or 0),
        "source": cache.get("source"),
        "num_loaded_tokens": _whole(cache.get("loaded_tokens") or 0),
        "stopped_text": cache.get("stopped_text"),
    }


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


# The model of a command

ChatModel = LocalModel | RemoteModel


def open_chat_model(
    model: str | None, settings: Settings, *, server: str | None, api_key: str | None, is_local: bool
) -> ChatModel:
    """The model on a running server that has it, else in this process. Engine settings select this process."""
    address = choose_address(server, is_local=is_local, engine_options=[option_name(name) for name in settings])
    remote = None if address is None else find_server(address, model, chosen_key(api_key))
    return remote or LocalModel(open_llm(model, settings), model or DEFAULT_MODEL)


def find_server(address: Address, model: str | None, api_key: str | None) -> RemoteModel | None:
    """The model on the server at an address.

    Returns None if the address is the default one and has no usable server. Raises if the user gave the address.
    """
    server = ServerClient(address.url, api_key, PATIENT if address.is_named else QUICK)
    try:
        server.wait_until_ready()
        name, max_model_len = server.find_model(model)
    except QuireError as error:
        if address.is_named:
            raise
        if not isinstance(error, ServerNotFound):
            note(f"{error}. Loading the model here")
        return None
    note(f"using {name} on {address.url}")
    return RemoteModel(server, name, max_model_len)


def open_llm(model: str | None, settings: Settings) -> LLM:
    """Load a model, with a progress bar on a terminal. A known model that is not here is downloaded first."""
    from quire.engine.llm import LLM

    path, name = locate(model), model or DEFAULT_MODEL
    try:
        with options_named(FIELDS), bytes_bar(f"loading {name}") as progress:
            return LLM(path, progress=progress, **settings)
    except (MemoryError, RuntimeError) as error:  # on a CPU, PyTorch raises RuntimeError for a lack of memory
        if not isinstance(error, MemoryError) and not re.search(r"alloc|out of memory", str(error)):
            raise
        advice = "try a smaller --kv-memory or --max-model-len, or a smaller model"
        raise QuireError(f"{name}: does not fit into the memory of this machine; {advice}") from None


def locate(name: str | None) -> Path:
    """The path of a model. A known model that is not on this machine is downloaded."""
    try:
        return resolve(name)
    except ModelNotFound:
        known = find_known(name or DEFAULT_MODEL)
        if known is None:
            raise
    echo(f"{known.name} is not on this machine: downloading it, {known.size_bytes / 1e6:.0f} MB", err=True)
    with download_bar(known.name) as progress:
        return pull(known.name, progress)
