"""`quire generate`: answer one prompt. Only the answer is written to stdout. `quire run`, as in Ollama, or a chat."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli import chat_model, options
from quire.cli.chat import chat
from quire.cli.chat_model import ChatInput, ChatModel, Piece, TokenRate
from quire.cli.terminal import AnswerWriter, echo
from quire.engine.generation import GenerationParams
from quire.errors import InvalidRequest, TemplateError
from quire.text.grammar import Grammar, GrammarKind, json_schema_grammar

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
