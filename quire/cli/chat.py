"""`quire chat`: a conversation in the terminal, or line by line from standard input. `quire generate`: one answer.

`quire run` is one of both, as in Ollama. Only answers are written to stdout.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli import chat_model, options
from quire.cli.chat_model import ChatInput, ChatModel, Piece, TokenRate
from quire.cli.server_client import printable
from quire.cli.terminal import AnswerWriter, echo
from quire.engine.params import GenerationParams
from quire.errors import ContextTooLong, InvalidRequest, QuireError, RequestFailed, TemplateError
from quire.text.grammar import Grammar, GrammarKind, json_schema_grammar

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
    with closing(
        chat_model.open_chat_model(model, engine, server=server, api_key=api_key, is_local=local)
    ) as model_used:
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
    from quire.text.gbnf import written_grammar

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
