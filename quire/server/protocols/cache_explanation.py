"""JSON view of a cache explanation."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from quire.core.cache.prefix import CacheExplanation, StopReason
from quire.core.values import Tier
from quire.text.excerpt import Excerpt

# Follows "N of M prompt tokens come from the cache"; {at} is the first token that does not.
_WHY = {
    StopReason.COMPLETE: ". The last token is always computed",
    StopReason.DIVERGED: ". At token {at} the prompt differs from the cached ones",
    StopReason.EVICTED: ". The rest, from token {at} on, was cached, but has been evicted",
    StopReason.TOO_SHORT: ". The rest, from token {at} on, does not fill a block, and no cached block begins with it",
    StopReason.IN_FLIGHT: ". The rest, from token {at} on, is being computed by another request",
    StopReason.NOT_FOUND: ". No cached prompt continues like this one from token {at} on",
    StopReason.NO_STATE: ". Keys and values are cached up to token {kv}, but the nearest state of the recurrent layers"
    " is at token {at}: {again} tokens are computed again",
    StopReason.NO_WINDOW: ". Keys and values are cached up to token {kv}, but those of the layers with a window only up"
    " to token {at}: {again} tokens are computed again",
    StopReason.LOAD_FAILED: ". The rest, from token {at} on, was stored in host memory or on disk, but could not be"
    " loaded",
    StopReason.NOT_LOADED: ". The rest, from token {at} on, is stored in host memory or on disk, but is not loaded,"
    " because computing it is faster or too few blocks are free",
    StopReason.OFF: ". Caching is off, or the request needs every prompt token to be computed",
}


_LOADED = {Tier.DEVICE: "in memory", Tier.HOST: "loaded from host memory", Tier.DISK: "loaded from disk"}


class StoppedText(msgspec.Struct):
    """The caller's own prompt around `stopped_at`, at most 40 characters on each side."""

    before: str
    after: str


class CacheView(msgspec.Struct):
    matched_tokens: Annotated[int, Meta(description="Tokens of the prompt that come from the cache.")]
    matched_blocks: Annotated[int, Meta(description="Full blocks among them.")]
    prompt_tokens: int
    stopped_at: Annotated[int | None, Meta(description="The first token that is not reused; null if all are.")]
    reason: Annotated[
        str,
        Meta(
            description="Why the cache match ended.",
            extra_json_schema={"enum": [reason.value for reason in StopReason]},
        ),
    ]
    message: str
    stopped_text: Annotated[
        StoppedText | None,
        Meta(description="The text of this prompt before and from `stopped_at`; null: complete or off."),
    ] = None
    kv_tokens: Annotated[
        int | None,
        Meta(
            description="Tokens whose keys and values are cached, if a missing state or window is the reason why fewer"
            " are reused; otherwise null."
        ),
    ] = None
    source: Annotated[
        str | None,
        Meta(
            description="The slowest tier that matched tokens came from: device (the KV cache), host (host memory) or"
            " disk; null if none matched.",
            extra_json_schema={"enum": [*(tier.value for tier in Tier), None]},
        ),
    ] = None
    loaded_tokens: Annotated[int, Meta(description="Matched tokens that were loaded from host memory or disk.")] = 0


def view(explanation: CacheExplanation, prompt_tokens: int, stopped_text: Excerpt | None = None) -> CacheView:
    is_complete = explanation.reason is StopReason.COMPLETE
    return CacheView(
        matched_tokens=explanation.num_tokens,
        matched_blocks=explanation.num_blocks,
        prompt_tokens=prompt_tokens,
        stopped_at=None if is_complete else explanation.stopped_at,
        reason=explanation.reason.value,
        message=_sentence(explanation, prompt_tokens) + _quote(explanation.reason, stopped_text) + ".",
        stopped_text=None if stopped_text is None else StoppedText(stopped_text.before, stopped_text.after),
        kv_tokens=explanation.num_kv_tokens or None,
        source=None if explanation.source is None else explanation.source.value,
        loaded_tokens=explanation.num_loaded_tokens,
    )


def _quote(reason: StopReason, text: Excerpt | None) -> str:
    if text is None or reason is not StopReason.DIVERGED:
        return ""
    return f', between "{text.before}" and "{text.after}"'


def _sentence(explanation: CacheExplanation, prompt_tokens: int) -> str:
    """One sentence that fits both a request and a dry run."""
    how_many = f"{explanation.num_tokens:,}" if explanation.num_tokens else "None"
    unit = "token comes" if prompt_tokens == 1 and explanation.num_tokens else "tokens come"
    at, kv = explanation.stopped_at, explanation.num_kv_tokens
    why = _WHY[explanation.reason].format(at=f"{at:,}", kv=f"{kv:,}", again=f"{kv - at:,}")
    loaded = ""
    if explanation.num_loaded_tokens and explanation.source is not None:
        loaded = f", {explanation.num_loaded_tokens:,} of them {_LOADED[explanation.source]}"
    return f"{how_many} of {prompt_tokens:,} prompt {unit} from the cache{loaded}{why}"
