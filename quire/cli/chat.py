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
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli import options
from quire.cli.http_stream import ServerNotFound, malformed, printable
from quire.cli.server_client import PATIENT, QUICK, Address, ServerClient, choose_address, chosen_key, note
from quire.cli.terminal import AnswerWriter, bytes_bar, download_bar, echo
from quire.engine.generation import GenerationParams
from quire.errors import ContextTooLong, InvalidRequest, ModelNotFound, QuireError, RequestFailed, TemplateError
from quire.text.grammar import Grammar, GrammarKind, json_schema_grammar
from quire.text.messages import Thought, Words
from quire.weights.hub import DEFAULT_MODEL, find_known, pull, resolve

if TYPE_CHECKING:
    from quire.engine.generation import GenerationOutput
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
        self._last: Answer | None = None

    def run(self) -> None:
        if sys.stdin.isatty():
            with suppress(ImportError):  # not on every system
                import readline  # noqa: F401  # adds line editing and history to `input`
            echo(f"{self.model.name}, {self.model.max_model_len} tokens of context. /help for help.", err=True)
        for text in read_messages():
            self._handle(text)

    def _handle(self, text: str) -> None:
        try:
            if text.startswith("/"):
                self._command(text)
            elif text.strip():
                self._take_turn(text.strip())
        except BrokenPipeError:
            raise
        except ContextTooLong as error:
            _remark(f"{error}. /reset forgets the conversation, /save FILE keeps it")
        except QuireError as error:
            _remark(str(error))
        except OSError as error:
            _remark(f"{error.filename}: {error.strerror}" if error.filename else str(error))

    # Answering

    @property
    def conversation(self) -> list[dict[str, str]]:
        head = [] if self.system is None else [{"role": "system", "content": self.system}]
        return head + self.messages

    def _take_turn(self, text: str) -> None:
        """Answer a message. A turn without an answer is not in the conversation, so that roles alternate."""
        message = {"role": "user", "content": text}
        self._last = answer = Answer()
        try:
            receive(answer, self.model.answer([*self.conversation, message], self.params), self._writer)
        except KeyboardInterrupt:  # the request is cancelled
            _remark("stopped")
        except RequestFailed as error:
            raise RequestFailed(f"the answer failed: {error}") from None
        else:
            self._print_ending(answer, "" if answer.text else " before it began to answer")
        if answer.text:
            self.messages += [message, {"role": "assistant", "content": answer.text}]

    def _print_ending(self, answer: Answer, when: str) -> None:
        """Print why an answer ended, if the model did not end it, and what it contained besides text."""
        if answer.refusal:
            _remark(f"the model refused: {printable(answer.refusal)}")
        elif answer.finish_reason == "content_filter":
            _remark("a content filter of the server ended the answer")
        if answer.calls:
            _remark(f"the model called {', '.join(answer.calls)}: quire chat has no tools and ignores the call")
        if answer.finish_reason == "length" and answer.num_tokens == self.params.max_tokens:
            _remark(f"stopped at max_tokens = {answer.num_tokens}{when}; /set max_tokens N changes it")
        elif answer.finish_reason == "length":
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
        path.write_text(json.dumps(self.conversation, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
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
        if (last := self._last) is None:
            self._writer.say("last answer: none yet\n")
        else:
            first = "" if last.ttft_ms is None else f", the first after {last.ttft_ms:.0f} ms"
            self._writer.say(f"last answer: {last.rate}{first}{'; ' if last.cached else ''}{last.cached}\n")
        num_turns = sum(message["role"] == "user" for message in self.messages)
        self._writer.say(f"conversation: {num_turns} turns, {self.model.max_model_len} tokens of context\n")

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
        raise typer.Exit


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
        _Command("/save FILE", "write the conversation as JSON", Repl.save),
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
    """The messages of a file: a JSON list."""
    from quire.engine.llm import as_chat

    if path.stat().st_size > MAX_FILE_BYTES:
        raise InvalidRequest(f"{path} has {path.stat().st_size} bytes, more than {MAX_FILE_BYTES}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise InvalidRequest(f"{path}: is nested too deeply") from None
    except ValueError as error:  # of UTF-8 or of JSON
        raise InvalidRequest(f"{path}: is not JSON: {error}") from None
    if not isinstance(found, list) or not all(isinstance(message, Mapping) for message in found):
        raise InvalidRequest(f"{path}: is not a list of messages, each an object with role and content")
    try:
        as_chat(found)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error}") from None
    return [{str(key): value for key, value in message.items() if value is not None} for message in found]


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


def _remark(text: str) -> None:
    """Print a remark to stderr; stdout has answers only."""
    echo(f"[{text}]", err=True)


@options.takes(sampling=options.sampling, engine=options.engine)
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or nothing: read it from standard input.")] = None,
    model: options.ModelOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt without the chat template.")] = False,
    system: options.SystemOption = None,
    max_tokens: options.MaxTokensOption = 512,
    *,
    sampling: options.Settings,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Continue when the model ends its answer.")] = False,
    json_schema: Annotated[Path | None, typer.Option(help="File with the JSON schema of the answer.")] = None,
    regex: Annotated[str | None, typer.Option(help="Regular expression that the answer must match.")] = None,
    grammar: Annotated[Path | None, typer.Option(help="File with the grammar of the answer, Lark or GBNF.")] = None,
    server: options.ServerOption = None,
    api_key: options.KeyOption = None,
    local: options.LocalOption = False,
    engine: options.Settings,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the answer.")] = False,
) -> None:
    """Answer one prompt. The answer is written to stdout as it is generated."""
    with options.options_named(options.FIELDS):
        params = GenerationParams(
            **sampling,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
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
    answer = Answer()
    with options.options_named(options.FIELDS):
        receive(answer, model_used.answer(ask, params), None if as_json else AnswerWriter())
    if as_json:
        echo(json.dumps(_document(model_used.name, answer), ensure_ascii=False))
        return
    reason = ""
    if answer.stop is not None:
        reason = f"stopped at --stop {answer.stop!r}"
    elif answer.finish_reason == "length" and answer.num_tokens == params.max_tokens:
        reason = f"stopped at --max-tokens {params.max_tokens}"
    elif answer.finish_reason == "length":
        reason = f"stopped at the end of the context, {model_used.max_model_len} tokens"
    if sys.stderr.isatty():
        figures = ", ".join(filter(None, (answer.rate, answer.cached)))
        echo("; ".join(filter(None, (figures, reason))), err=True)
    elif answer.finish_reason == "length":  # without figures, but the reader must know of a cut answer
        echo(f"{reason}: the answer is cut", err=True)


def _document(name: str, answer: Answer) -> dict[str, Any]:
    usage = answer.usage
    timings = {"ttft_ms": answer.ttft_ms, "tokens_per_s": answer.tokens_per_s}
    return {
        "model": name,
        "text": answer.text,
        **({"reasoning": answer.thought} if answer.thought else {}),
        "finish_reason": answer.finish_reason,
        "stop": answer.stop,
        "usage": None if usage is None else usage.counts,
        "cache": None if usage is None else usage.cache,
        "timings": {key: None if value is None else round(value, 2) for key, value in timings.items()},
    }


ChatInput = str | Sequence[Mapping[str, str]]  # a raw prompt to continue, or a conversation to answer


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cache: dict[str, Any] | None  # how much of the prompt was cached and where the match ended, as --json prints it

    @property
    def counts(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(slots=True)
class Piece:
    """New output of an answer."""

    text: str = ""
    num_tokens: int = 0  # 1 for text whose tokens are not reported
    thought: str = ""  # reasoning, which precedes the text
    calls: tuple[str, ...] = ()  # names of tools whose calls start in this piece
    refusal: str = ""
    finish_reason: str | None = None
    stop: str | None = None  # the stop string that ended it
    usage: AnswerUsage | None = None  # of the whole answer, after its end; None: it was stopped, or there is none


@dataclass(slots=True)
class Answer(Piece):
    """All pieces of an answer that have arrived, and their speed."""

    started_s: float = field(default_factory=time.perf_counter)
    _num_first: int = 0
    _first_s: float | None = None
    _last_s: float = 0.0

    def take(self, piece: Piece) -> None:
        self.text += piece.text
        self.thought += piece.thought
        self.calls += piece.calls
        self.refusal += piece.refusal
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.stop = piece.stop or self.stop
        if piece.num_tokens:
            self._last_s = time.perf_counter()
            if self._first_s is None:
                self._first_s, self._num_first = self._last_s, piece.num_tokens
            self.num_tokens += piece.num_tokens
        if piece.usage is not None:
            self.usage = piece.usage
            self.num_tokens = piece.usage.completion_tokens

    @property
    def ttft_ms(self) -> float | None:
        return None if self._first_s is None else (self._first_s - self.started_s) * 1000

    @property
    def tokens_per_s(self) -> float | None:
        """Rate after the first token, which includes the prompt. None if there is only one."""
        if self._first_s is None or self._last_s <= self._first_s:
            return None
        return (self.num_tokens - self._num_first) / (self._last_s - self._first_s)

    @property
    def rate(self) -> str:
        tokens = f"{self.num_tokens} token{'' if self.num_tokens == 1 else 's'}"
        rate = self.tokens_per_s
        return tokens if rate is None else f"{tokens}, {rate:.{0 if rate >= 10 else 1}f} tok/s"

    @property
    def cached(self) -> str:
        """How many tokens of the prompt were found in the cache; empty if that is unknown."""
        if self.usage is None:
            return ""
        return f"{self.usage.cached_tokens} of {self.usage.prompt_tokens} prompt tokens cached"


def receive(answer: Answer, pieces: Generator[Piece, None, None], writer: AnswerWriter | None) -> None:
    """Take the pieces of an answer as they arrive, and print them. An exception, also Ctrl-C, cancels the request."""
    try:
        with closing(pieces):
            for piece in pieces:
                answer.take(piece)
                if writer is not None:
                    writer.think(piece.thought)
                    writer.say(piece.text)
    finally:
        if writer is not None:
            writer.end_line()


class LocalModel:
    """A model in this process."""

    def __init__(self, llm: LLM, name: str) -> None:
        self.llm = llm
        self.name = name
        self.max_model_len = llm.max_model_len
        self.has_template = llm.text.template.source is not None

    def answer(self, ask: ChatInput, params: GenerationParams) -> Generator[Piece, None, None]:
        """The pieces of an answer as they arrive. Raises RequestFailed if it is incomplete."""
        from quire.engine.llm import as_chat

        text = self.llm.text
        chat = None if isinstance(ask, str) else as_chat([dict(message) for message in ask])
        size = self.max_model_len
        prompt = text.encode(str(ask), size) if chat is None else text.encode_chat(chat, size)
        parser = text.new_parser(chat, prompt)
        outputs: list[GenerationOutput] = []
        for delta in self.llm.stream(text.request(prompt, params, chat=chat), chat, outputs.append):
            parts = parser.push(delta.text)
            if delta.finish_reason is not None:
                parts += parser.finish(is_cut=delta.finish_reason == "length")
            yield Piece(
                text="".join(part.text for part in parts if isinstance(part, Words)),
                num_tokens=len(delta.token_ids),
                thought="".join(part.text for part in parts if isinstance(part, Thought)),
                finish_reason=None if delta.finish_reason is None else delta.finish_reason.value,
                stop=delta.stop,
            )
            if delta.error is not None:
                raise RequestFailed(delta.error)
        (output,) = outputs
        usage = output.usage
        yield Piece(
            usage=AnswerUsage(
                usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, cache=self._cache_of(output)
            )
        )

    def _cache_of(self, output: GenerationOutput) -> dict[str, Any] | None:
        """The explanation, with the text of the prompt where the match ended."""
        from quire.text.tokenizer import stopped_text

        if (cache := output.cache) is None:
            return None
        text = stopped_text(self.llm.text.tokenizer, output.prompt_token_ids, cache)
        return {**asdict(cache), "stopped_text": None if text is None else asdict(text)}

    def close(self) -> None:
        self.llm.close()


class RemoteModel:
    """A model of a server, with the methods of `LocalModel`."""

    has_template = True  # a server without one refuses the request

    def __init__(self, server: ServerClient, name: str, max_model_len: int) -> None:
        self.name = name
        self.max_model_len = max_model_len
        self._server = server

    def answer(self, ask: ChatInput, params: GenerationParams) -> Generator[Piece, None, None]:
        url = self._server.url
        is_finished = False
        path = "/v1/completions" if isinstance(ask, str) else "/v1/chat/completions"
        with self._server.sent(path, request_body(self.name, ask, params)) as stream:
            for chunk in stream.events():
                try:
                    pieces = list(read_chunk(chunk))
                except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
                    raise malformed(url, "a malformed chunk", chunk) from None
                is_finished = is_finished or any(piece.finish_reason is not None for piece in pieces)
                yield from pieces
        if not is_finished:
            raise RequestFailed(f"{url} ended the stream before the answer was finished")

    def close(self) -> None:
        """Nothing to close: no connection is open between two answers."""


GRAMMAR_NAMES = {"json_schema": "guided_json", "regex": "guided_regex", "lark": "guided_grammar"}  # by kind


def request_body(model: str, ask: ChatInput, params: GenerationParams) -> dict[str, Any]:
    """Parameters that were not given are not sent: the server has the model's own defaults."""
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}, "cache": True}
    neutral = GenerationParams()
    for name in (*SETTINGS, "ignore_eos"):
        if getattr(params, name) != getattr(neutral, name):
            body[name] = getattr(params, name)
    if params.grammar is not None:
        body[GRAMMAR_NAMES[params.grammar.kind]] = params.grammar.given or params.grammar.source
    asked = {"prompt": ask} if isinstance(ask, str) else {"messages": [dict(message) for message in ask]}
    return body | asked


def read_chunk(chunk: dict[str, Any]) -> Iterator[Piece]:
    """The pieces of a chunk. One that is malformed raises KeyError, TypeError or the like."""
    for choice in chunk["choices"]:
        yield _received(choice)
    if usage := chunk.get("usage"):
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        yield Piece(
            usage=AnswerUsage(
                prompt_tokens=_whole(usage["prompt_tokens"]),
                completion_tokens=_whole(usage["completion_tokens"]),
                cached_tokens=_whole(cached),
                cache=_explanation(chunk.get("cache")),
            )
        )


def _received(choice: dict[str, Any]) -> Piece:
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
    stop = choice.get("stop_reason")  # vLLM's field: the stop string, or the id of a stop token
    return Piece(
        text=text or "",
        num_tokens=int(bool(text or thought or refusal)),
        thought=thought or "",
        calls=tuple(printable(str(name)) for name in calls if name),
        refusal=refusal or "",
        finish_reason=reason,
        stop=stop if isinstance(stop, str) else None,
    )


def _explanation(cache: dict[str, Any] | None) -> dict[str, Any] | None:
    if cache is None:
        return None
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
    model: str | None, settings: options.Settings, *, server: str | None, api_key: str | None, is_local: bool
) -> ChatModel:
    """The model on a running server that has it, else in this process. Engine settings select this process."""
    address = choose_address(server, is_local=is_local, engine_options=[options.option_name(name) for name in settings])
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


def open_llm(model: str | None, settings: options.Settings) -> LLM:
    """Load a model, with a progress bar on a terminal. A known model that is not here is downloaded first."""
    from quire.engine.llm import LLM

    path, name = locate(model), model or DEFAULT_MODEL
    try:
        with options.options_named(options.FIELDS), bytes_bar(f"loading {name}") as progress:
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
