"""`quire generate`: one prompt, its answer on stdout and nothing else there."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli import loading
from quire.errors import InvalidRequest, RequestFailed, TemplateError
from quire.weights.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    from quire.engine.llm import LLM
    from quire.engine.outputs import Completion, Delta, GenerationOutput, TokenLogprob
    from quire.engine.params import GenerationParams

SEPARATOR = "-" * 8  # between the answers of --n


def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to answer; - or nothing reads a pipe.")] = None,
    model: loading.ModelOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without chat template.")] = False,
    system: loading.SystemOption = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 512,
    temperature: loading.TemperatureOption = None,
    top_k: loading.TopKOption = None,
    top_p: loading.TopPOption = None,
    min_p: loading.MinPOption = None,
    repetition_penalty: loading.RepetitionOption = None,
    presence_penalty: loading.PresenceOption = 0.0,
    frequency_penalty: loading.FrequencyOption = 0.0,
    seed: loading.SeedOption = None,
    stop: loading.StopOption = None,
    n: Annotated[int, typer.Option("--n", "-n", help="How many answers.")] = 1,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on where the model would end.")] = False,
    logprobs: Annotated[int | None, typer.Option(help="With --json: alternatives to show at each token.")] = None,
    dtype: loading.DtypeOption = "auto",
    device: loading.DeviceOption = "auto",
    threads: loading.ThreadsOption = None,
    max_context: loading.ContextOption = None,
    kv_memory: loading.MemoryOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the answer.")] = False,
) -> None:
    """Answer one prompt. The answer alone goes to stdout, as it comes."""
    from quire.engine.params import GenerationParams

    if raw and system is not None:
        raise InvalidRequest(f"--system {system!r} needs the chat template, and --raw was given")
    if logprobs is not None and not as_json:
        raise InvalidRequest(f"--logprobs {logprobs} is shown only with --json")
    with loading.options_named():
        params = GenerationParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
            n=n,
            max_tokens=max_tokens,
            stop=stop or (),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
        )
    settings = loading.engine_settings(dtype, device, threads, max_context, kv_memory)
    text = read_prompt(prompt, is_raw=raw)
    with loading.open_llm(model, settings) as llm:
        _answer(llm, text, params, model or DEFAULT_MODEL, is_raw=raw, system=system, as_json=as_json)


def read_prompt(given: str | None, *, is_raw: bool) -> str:
    """The argument, or what is piped in. One line end at the end of a pipe is the shell's, not the prompt's."""
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


def _answer(
    llm: LLM, prompt: str, params: GenerationParams, name: str, *, is_raw: bool, system: str | None, as_json: bool
) -> None:
    printer = _Printer(params.n, is_silent=as_json)
    try:
        output = _run(llm, prompt, params, printer, is_raw=is_raw, system=system)
    finally:
        printer.finish()  # also after ^C: what was printed stands on a line of its own
    if as_json:
        typer.echo(json.dumps(_document(name, output, printer.pace), ensure_ascii=False))
    elif sys.stderr.isatty():
        typer.echo(_summary(output, params, printer.pace, llm.max_context), err=True)


def _run(
    llm: LLM, prompt: str, params: GenerationParams, printer: _Printer, *, is_raw: bool, system: str | None
) -> GenerationOutput:
    with loading.options_named():
        if is_raw:
            (output,) = llm.generate(prompt, params, on_output=printer.take)
        else:
            if not llm.text.template.exists:
                raise TemplateError(f"{llm.text.name} has no chat template: use --raw to continue the prompt as it is")
            messages = [{"role": "system", "content": system}] if system is not None else []
            messages.append({"role": "user", "content": prompt})
            (output,) = llm.chat(messages, params, on_output=printer.take)
    if printer.problem is not None:
        raise printer.problem
    for completion in output.completions:
        if completion.error is not None:
            raise RequestFailed(completion.error)
    return output


class _Printer:
    """Prints answers one after another: the first as it comes, the others when it is their turn."""

    def __init__(self, num_answers: int, *, is_silent: bool) -> None:
        self.pace = loading.Pace()
        self.problem: OSError | None = None  # stdout is gone
        self._speech = loading.Speech()
        self._is_silent = is_silent
        self._current = 0
        self._waiting = [""] * num_answers
        self._is_finished = [False] * num_answers

    def take(self, _number: int, delta: Delta) -> None:
        self.pace.count(len(delta.token_ids))
        if self._is_silent:
            return
        self._waiting[delta.index] += delta.text
        self._is_finished[delta.index] |= delta.finish_reason is not None
        try:
            self._print()
        except OSError as error:
            self.problem = error
            raise  # ends the request

    def finish(self) -> None:
        if self.problem is None:
            self._speech.end_line()

    def _print(self) -> None:
        while True:
            self._speech.say(self._waiting[self._current])
            self._waiting[self._current] = ""
            if not self._is_finished[self._current] or self._current + 1 == len(self._waiting):
                return
            self._speech.end_line()
            self._speech.say(f"{SEPARATOR}\n")
            self._current += 1


# What came out


def _summary(output: GenerationOutput, params: GenerationParams, pace: loading.Pace, max_context: int) -> str:
    usage = output.usage
    parts = [f"{pace}, {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached"]
    for completion in output.completions:
        said = why_stopped(completion, params.max_tokens, max_context)
        if said and said not in parts:
            parts.append(said)
    return "; ".join(parts)


def why_stopped(completion: Completion, max_tokens: int | None, max_context: int) -> str:
    """Nothing, if the model ended its answer itself."""
    from quire.core.request import FinishReason

    if completion.stop is not None:
        return f"stopped at --stop {completion.stop!r}"
    if completion.finish_reason is not FinishReason.LENGTH:
        return ""
    if len(completion.token_ids) == max_tokens:
        return f"stopped at --max-tokens {max_tokens}"
    return f"stopped at the end of the context, {max_context} tokens"


def _document(name: str, output: GenerationOutput, pace: loading.Pace) -> dict[str, Any]:
    completions = [_completion(completion) for completion in output.completions]
    document = {"model": name, **completions[0]}
    document["usage"] = {**asdict(output.usage), "total_tokens": output.usage.total_tokens}
    document["cache"] = None if output.cache is None else asdict(output.cache)
    document["timings"] = {"ttft_ms": _rounded(pace.ttft_ms), "tokens_per_s": _rounded(pace.tokens_per_s)}
    if len(completions) > 1:
        document["completions"] = completions
    return document


def _completion(completion: Completion) -> dict[str, Any]:
    document: dict[str, Any] = {
        "text": completion.text,
        "finish_reason": completion.finish_reason.value,
        "stop": completion.stop,
    }
    if completion.logprobs is not None:
        document["logprobs"] = _logprobs(completion.logprobs)
    return document


def _logprobs(entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """`bytes` beside the text: a token may be part of a character."""
    return [
        {
            "token_id": entry.token_id,
            "text": entry.text,
            "bytes": list(entry.data),
            "logprob": entry.logprob,
            "rank": entry.rank,
            **({"top": _logprobs(entry.top)} if entry.top else {}),
        }
        for entry in entries
    ]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
