"""POST /v1/completions: prompts without a chat template, as text or token ids, several per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec import UNSET

from quire.core.values import check_tokens
from quire.engine.outputs import Delta, GenerationOutput, TokenLogprob, Usage
from quire.errors import InvalidRequest
from quire.server.model_service import MAX_PROMPTS, InferenceRequest, Prompt
from quire.server.protocols.openai.encoding import (
    AnswerEvents,
    StreamEncoder,
    cache_view,
    finish_reason,
    finite,
    head_of,
    stop_reason,
    token_text,
    usage_body,
)
from quire.server.protocols.openai.parsing import (
    NAMES,
    has_continuous_usage,
    includes_usage,
    make_request,
    params_of,
    protocol_field_names,
    shape_field,
)
from quire.server.protocols.openai.types import (
    COMPLETION_UNSUPPORTED,
    DEFAULT_COMPLETION_TOKENS,
    UNSUPPORTED,
    AnswerHead,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from quire.server.protocols.support import CacheView, answer_in_shape, refuse_unsupported, unsupported, with_unenforced
from quire.text.stream import Detokenizer, Piece, Thought, Words
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from starlette.responses import Response

    from quire.server.request_context import RequestContext


async def completions(context: RequestContext) -> Response:
    body = await context.body(CompletionRequest)
    request = await context.parse(parse_completion, body)
    with protocol_field_names(NAMES):
        return await answer_in_shape(request, shape_field(body), partial(_respond, context, body))


async def _respond(context: RequestContext, body: CompletionRequest, request: InferenceRequest) -> Response:
    active = await context.open(request)
    tokenizer = context.service.text.tokenizer
    echoes = await _echoes(context, request) if body.echo else None
    head = head_of(active, "cmpl", "text_completion")
    if request.is_streaming:
        encoder = completion_stream(
            head,
            request,
            echoes,
            include_usage=includes_usage(body),
            has_running_usage=has_continuous_usage(body),
            has_ids=bool(body.return_token_ids),
        )
        return await context.stream(active, AnswerEvents(active, encoder))
    outputs = await context.result(active)

    def make() -> Completion:
        answer = whole_completion(head, outputs, active.usage, cache_view(active), echoes, tokenizer)
        if body.return_token_ids:
            for choice, one in zip(answer.choices, (one for part in outputs for one in part.completions), strict=True):
                choice.token_ids = list(one.token_ids)
        return answer

    return await context.json_of(make, active.num_values)


async def _echoes(context: RequestContext, request: InferenceRequest) -> list[Echo]:
    """The prompts as text. Many token ids are decoded in a thread."""
    tokenizer = context.service.text.tokenizer

    def make() -> list[Echo]:
        return [echo_of(prompt, tokenizer, request) for prompt in request.prompts]

    num_ids = sum(len(prompt) for prompt in request.prompts if isinstance(prompt, tuple))
    return await context.on_values(make, num_ids)


# Parsing


def parse_completion(body: CompletionRequest) -> InferenceRequest:
    """Pure. Raises ApiError for unsupported fields and InvalidRequest for invalid values."""
    refuse_unsupported(body, UNSUPPORTED)
    refuse_unsupported(body, COMPLETION_UNSUPPORTED)
    if body.best_of not in (None, 1, body.n or 1):
        raise unsupported(
            "best_of", f"best_of = {body.best_of} is not supported: only 1 and n are, because answers are not ranked"
        )
    scores_prompt = bool(body.echo) and body.logprobs is not None
    if scores_prompt and body.stream:
        raise unsupported("echo", "echo with logprobs is not supported in a stream")
    max_tokens = body.max_tokens
    if max_tokens is None and body.n_predict is None:
        max_tokens = max(DEFAULT_COMPLETION_TOKENS, body.min_tokens or 0)
    with protocol_field_names(NAMES):
        prompts = _prompts(body.prompt)
        params = params_of(
            body,
            max_tokens=max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if scores_prompt else None,
            may_be_empty=True,
        )
        return with_unenforced(make_request(body, prompts, params), shape_field(body))


def _prompts(given: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    if isinstance(given, str):
        return (given,)
    if given and isinstance(given[0], int):
        kinds = {type(entry) for entry in given}
        if kinds != {int}:  # the message does not repeat the entry: it may be text
            at = next(i for i, entry in enumerate(given) if type(entry) is not int)
            raise InvalidRequest(f"prompt[{at}] is a {type(given[at]).__name__}, not a token id")
        check_tokens("prompt", given)  # type: ignore[arg-type]  # raises with the position
        return (tuple(given),)  # type: ignore[arg-type]
    if len(given) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(given)} entries, not 1 to {MAX_PROMPTS}")
    prompts: list[Prompt] = []
    for i, entry in enumerate(given):
        if isinstance(entry, int):
            raise InvalidRequest(f"prompt[{i}] is a token id among prompts: put the token ids into a list of their own")
        if isinstance(entry, list):
            check_tokens(f"prompt[{i}]", entry)
        prompts.append(entry if isinstance(entry, str) else tuple(entry))
    return tuple(prompts)


# Encoding


class Echo(NamedTuple):
    """A prompt as `echo` repeats it."""

    text: str
    hidden: frozenset[int] = frozenset()  # special tokens that the text does not contain


def echo_of(prompt: Prompt, tokenizer: Tokenizer, request: InferenceRequest) -> Echo:
    """Text is repeated unchanged; token ids are decoded."""
    if isinstance(prompt, str):
        return Echo(prompt)
    assert isinstance(prompt, tuple)
    is_skipping = request.params.skip_special
    text = tokenizer.decode(prompt, skip_special=is_skipping)
    return Echo(text, tokenizer.special_ids if is_skipping else frozenset())


def token_offsets(echo: Echo, token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Return the position in the text of each prompt token. Tokens that are not in the text have no width: hidden
    ones, and a BOS that the tokenizer adds."""
    detokenizer = Detokenizer(tokenizer, skip_special=False, keep_prefix_space=True)
    offsets: list[int] = []
    at = 0
    for token_id in token_ids:
        offsets.append(at)
        if token_id in echo.hidden:
            continue
        piece = detokenizer.push((token_id,))
        if not echo.text.startswith(piece, at):
            piece = piece.removeprefix(" ")  # some tokenizers add one before the first word
        if echo.text.startswith(piece, at) or token_id not in tokenizer.special_ids:
            at = min(at + len(piece), len(echo.text))  # a normaliser may have changed the text
    return offsets


class CompletionChoices:
    """Chunks of completion choices: with echo the prompt first, then the text, then the finish reason."""

    def __init__(self, n: int, echoes: Sequence[Echo] | None, *, has_ids: bool = False) -> None:
        self._n = n
        self._has_ids = has_ids
        self._echoes = echoes

    def begin(self, index: int) -> CompletionChoice | None:
        echo = self._echo(index)
        return CompletionChoice(index, echo) if echo else None

    def _echo(self, index: int) -> str:
        return "" if self._echoes is None else self._echoes[index // self._n].text

    def grow(self, index: int, delta: Delta) -> list[CompletionChoice]:
        ids = list(delta.token_ids) if self._has_ids else UNSET
        if not delta.logprobs:
            return [CompletionChoice(index, delta.text, token_ids=ids)] if delta.text or ids else []
        logprobs = _old_logprobs(delta.logprobs, len(self._echo(index)))
        return [CompletionChoice(index, delta.text, logprobs, token_ids=ids)]

    def grow_pieces(self, index: int, pieces: Sequence[Piece]) -> list[CompletionChoice]:
        raise AssertionError(f"{index = } {pieces = }: completions have no parser")

    def parser(self, index: int) -> None:
        """None: the text of a completion is not parsed."""

    def text(self, index: int, piece: Words | Thought) -> CompletionChoice:
        return CompletionChoice(index, piece.text)

    def end(self, index: int, finish_reason: str, stop: str | None) -> CompletionChoice:
        return CompletionChoice(index, "", finish_reason=finish_reason, stop_reason=stop_reason(stop))


def completion_stream(
    head: AnswerHead,
    request: InferenceRequest,
    echoes: Sequence[Echo] | None,
    *,
    include_usage: bool,
    has_running_usage: bool = False,
    has_ids: bool = False,
) -> StreamEncoder:
    n = request.params.n
    return StreamEncoder(
        head,
        CompletionChoices(n, echoes, has_ids=has_ids),
        n=n,
        num_prompts=len(request.prompts),
        include_usage=include_usage,
        has_running_usage=has_running_usage,
        has_ids=has_ids,
    )


def whole_completion(
    head: AnswerHead,
    outputs: Sequence[GenerationOutput],
    usage: Usage,
    cache: CacheView | None,
    echoes: Sequence[Echo] | None,
    tokenizer: Tokenizer,
) -> Completion:
    choices: list[CompletionChoice] = []
    for number, output in enumerate(outputs):
        echo = Echo("") if echoes is None else echoes[number]
        scored = None if output.prompt_logprobs is None else _prompt_logprobs(output, echo, tokenizer)
        for one in output.completions:
            logprobs = None
            if one.logprobs is not None:
                logprobs = _joined(scored, _old_logprobs(one.logprobs, len(echo.text)))
            reason = finish_reason(one.finish_reason, one.error)
            text = echo.text + one.text
            choices.append(CompletionChoice(len(choices), text, logprobs, reason, stop_reason(one.stop)))
    return Completion(
        **msgspec.structs.asdict(head),
        choices=choices,
        usage=usage_body(usage),
        cache=UNSET if cache is None else cache,
    )


def _prompt_logprobs(output: GenerationOutput, echo: Echo, tokenizer: Tokenizer) -> CompletionLogprobs:
    ids = output.prompt_token_ids
    entries: list[TokenLogprob] = []
    offsets = token_offsets(echo, ids, tokenizer)
    for token_id, entry, offset in zip(ids, output.prompt_logprobs or (), offsets, strict=True):
        if entry is None:
            data = tokenizer.token_bytes(token_id)
            entry = TokenLogprob(token_id, data.decode("utf-8", "replace"), data, 0.0, 0)
        entries.append(replace(entry, offset=offset))
    found = _old_logprobs(entries, 0)
    found.token_logprobs[0] = found.top_logprobs[0] = None  # the first token has no context to be predicted from
    return found


def _old_logprobs(entries: Sequence[TokenLogprob], start: int) -> CompletionLogprobs:
    """Make the four lists of the completions API. The chosen token is always among its alternatives.

    `start`: number of characters before the first offset.
    """
    return CompletionLogprobs(
        tokens=[token_text(entry) for entry in entries],
        token_logprobs=[finite(entry.logprob) for entry in entries],
        top_logprobs=[_alternatives(entry) for entry in entries],
        text_offset=[start + entry.offset for entry in entries],
    )


def _joined(first: CompletionLogprobs | None, second: CompletionLogprobs) -> CompletionLogprobs:
    if first is None:
        return second
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def _alternatives(entry: TokenLogprob) -> dict[str, float]:
    found = {token_text(top): finite(top.logprob) for top in entry.top}
    found.setdefault(token_text(entry), finite(entry.logprob))
    return found
