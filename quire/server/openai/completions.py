"""POST /v1/completions: a prompt as it stands, several at once, token ids too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from quire.core.request import check_tokens
from quire.engine.outputs import Delta, GenerationOutput, TokenLogprob, Usage
from quire.errors import InvalidRequest
from quire.server.ask import MAX_PROMPTS, Ask, Prompt
from quire.server.cache_view import CacheView
from quire.server.openai.encoding import (
    StreamEncoder,
    bill,
    cache_view,
    events,
    finish_reason,
    finite,
    head_of,
    stop_reason,
    token_text,
)
from quire.server.openai.parsing import NAMES, ask_of, in_their_words, includes_usage, params_of
from quire.server.openai.support import refuse_unsupported, unsupported
from quire.server.openai.tools import shape_field
from quire.server.openai.types import (
    DEFAULT_COMPLETION_TOKENS,
    AnswerHead,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from quire.server.shapes import answer_in_shape, with_unenforced
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from starlette.responses import Response

    from quire.server.call import Call


async def completions(call: Call) -> Response:
    body = await call.body(CompletionRequest)
    ask = parse_completion(body)
    with in_their_words(NAMES):
        return await answer_in_shape(ask, shape_field(body), partial(_respond, call, body))


async def _respond(call: Call, body: CompletionRequest, ask: Ask) -> Response:
    work = await call.open(ask)
    tokenizer = call.service.text.tokenizer
    echoes = [echoed(prompt, tokenizer, ask) for prompt in ask.prompts] if body.echo else None
    head = head_of(work, "cmpl", "text_completion")
    if ask.is_streaming:
        encoder = completion_stream(
            head, ask, echoes, include_usage=includes_usage(body), has_ids=bool(body.return_token_ids)
        )
        return await call.stream(work, events(work, encoder))
    outputs = await call.result(work)
    answer = whole_completion(head, outputs, work.usage, cache_view(work), echoes, tokenizer)
    if body.return_token_ids:
        for choice, one in zip(answer.choices, (one for part in outputs for one in part.completions), strict=True):
            choice.token_ids = list(one.token_ids)
    return call.json(answer)


# In


def parse_completion(body: CompletionRequest) -> Ask:
    """Pure. Raises ApiError for what is known and not built, InvalidRequest for what can never work."""
    refuse_unsupported(body)
    if body.best_of not in (None, 1, body.n or 1):
        raise unsupported(
            "best_of", f"best_of = {body.best_of} is not supported: only 1 and n are, without a choice among answers"
        )
    scores_prompt = bool(body.echo) and body.logprobs is not None
    if scores_prompt and body.stream:
        raise unsupported("echo", "echo with logprobs is not supported in a stream")
    max_tokens = body.max_tokens
    if max_tokens is None:
        max_tokens = max(DEFAULT_COMPLETION_TOKENS, body.min_tokens or 0)
    with in_their_words(NAMES):
        prompts = _prompts(body.prompt)
        params = params_of(
            body,
            max_tokens=max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if scores_prompt else None,
        )
        return with_unenforced(ask_of(body, prompts, params), shape_field(body))


def _prompts(given: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    if isinstance(given, str):
        return (given,)
    if given and isinstance(given[0], int):
        kinds = {type(entry) for entry in given}
        if kinds != {int}:  # said without the entry: it may be text
            at = next(i for i, entry in enumerate(given) if type(entry) is not int)
            raise InvalidRequest(f"prompt[{at}] is a {type(given[at]).__name__}, not a token id")
        check_tokens("prompt", given)  # type: ignore[arg-type]  # says which entry is none
        return (tuple(given),)  # type: ignore[arg-type]
    if len(given) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(given)} entries, not 1 to {MAX_PROMPTS}")
    prompts: list[Prompt] = []
    for i, entry in enumerate(given):
        if isinstance(entry, int) or type(entry) is not type(given[0]):
            raise InvalidRequest(f"prompt[{i}] is a {type(entry).__name__}, of another kind than prompt[0]")
        if isinstance(entry, list):
            check_tokens(f"prompt[{i}]", entry)
        prompts.append(entry if isinstance(entry, str) else tuple(entry))
    return tuple(prompts)


# Out


def echoed(prompt: Prompt, tokenizer: Tokenizer, ask: Ask) -> str:
    """The text of a prompt: its own, or that of its tokens."""
    if isinstance(prompt, str):
        return prompt
    assert isinstance(prompt, tuple)
    return tokenizer.decode(prompt, skip_special=ask.params.skip_special)


class CompletionChoices:
    """The text, then why it ended. With echo, the prompt first."""

    def __init__(self, n: int, echoes: Sequence[str] | None, *, has_ids: bool = False) -> None:
        self._n = n
        self._has_ids = has_ids
        self._echoes = echoes
        self._offsets: dict[int, int] = {}  # choice -> characters so far

    def begin(self, index: int) -> CompletionChoice | None:
        echo = "" if self._echoes is None else self._echoes[index // self._n]
        self._offsets[index] = len(echo)
        return CompletionChoice(index, echo) if echo else None

    def grow(self, index: int, delta: Delta) -> list[CompletionChoice]:
        ids = list(delta.token_ids) if self._has_ids else UNSET
        if not delta.logprobs:
            return [CompletionChoice(index, delta.text, token_ids=ids)] if delta.text or ids else []
        logprobs = _old_logprobs(delta.logprobs, self._offsets[index])
        self._offsets[index] += _num_characters(delta.logprobs)
        return [CompletionChoice(index, delta.text, logprobs, token_ids=ids)]

    def end(self, index: int, finish_reason: str, stop: str | None) -> CompletionChoice:
        return CompletionChoice(index, "", finish_reason=finish_reason, stop_reason=stop_reason(stop))


def completion_stream(
    head: AnswerHead, ask: Ask, echoes: Sequence[str] | None, *, include_usage: bool, has_ids: bool = False
) -> StreamEncoder:
    n = ask.params.n
    choices = CompletionChoices(n, echoes, has_ids=has_ids)
    return StreamEncoder(head, choices, n=n, num_prompts=len(ask.prompts), include_usage=include_usage, has_ids=has_ids)


def whole_completion(
    head: AnswerHead,
    outputs: Sequence[GenerationOutput],
    usage: Usage,
    cache: CacheView | None,
    echoes: Sequence[str] | None,
    tokenizer: Tokenizer,
) -> Completion:
    choices: list[CompletionChoice] = []
    for number, output in enumerate(outputs):
        echo = "" if echoes is None else echoes[number]
        scored = None if output.prompt_logprobs is None else _prompt_entries(output, tokenizer)
        for one in output.completions:
            logprobs = None
            if one.logprobs is not None:
                logprobs = _old_logprobs([*(scored or ()), *one.logprobs], 0 if scored else len(echo))
                if scored:  # nothing comes before the first token, so nothing was expected of it
                    logprobs.token_logprobs[0] = None
                    if logprobs.top_logprobs is not None:
                        logprobs.top_logprobs[0] = None
            reason = finish_reason(one.finish_reason, one.error)
            choices.append(CompletionChoice(len(choices), echo + one.text, logprobs, reason, stop_reason(one.stop)))
    return Completion(
        **msgspec.structs.asdict(head), choices=choices, usage=bill(usage), cache=UNSET if cache is None else cache
    )


def _prompt_entries(output: GenerationOutput, tokenizer: Tokenizer) -> list[TokenLogprob]:
    entries: list[TokenLogprob] = []
    for token_id, entry in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True):
        if entry is None:
            data = tokenizer.token_bytes(token_id)
            entry = TokenLogprob(token_id, data.decode("utf-8", "replace"), data, 0.0, 0)
        entries.append(entry)
    return entries


def _old_logprobs(entries: Sequence[TokenLogprob], start: int) -> CompletionLogprobs:
    """The four lists of before chat. The chosen token is among its alternatives even where it is not of the best."""
    has_tops = any(entry.top for entry in entries)
    offsets: list[int] = []
    for entry in entries:
        offsets.append(start)
        start += _num_characters((entry,))
    return CompletionLogprobs(
        tokens=[token_text(entry) for entry in entries],
        token_logprobs=[finite(entry.logprob) for entry in entries],
        top_logprobs=[_alternatives(entry) for entry in entries] if has_tops else None,
        text_offset=offsets,
    )


def _alternatives(entry: TokenLogprob) -> dict[str, float]:
    found = {token_text(top): finite(top.logprob) for top in entry.top}
    found.setdefault(token_text(entry), finite(entry.logprob))
    return found


def _num_characters(entries: Sequence[TokenLogprob]) -> int:
    """That begin in these tokens: a character may be spread over several."""
    return sum(byte & 0xC0 != 0x80 for entry in entries for byte in entry.data)
