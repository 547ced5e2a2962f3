"""Short excerpts of a prompt, safe to show on a terminal or in a JSON answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.core.cache.prefix import CacheExplanation, StopReason
from quire.text.tokenizer import Tokenizer

MAX_CHARS = 40  # on each side
_MAX_TOKENS = 4 * MAX_CHARS  # a character may take four tokens
_ELLIPSIS = "…"


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The text just before a token of a prompt, and the text from that token on."""

    before: str
    after: str


def excerpt_at(tokenizer: Tokenizer, prompt: Sequence[int], at: int) -> Excerpt:
    """At most 40 characters on each side of token `at`: control tokens by name, control characters escaped."""
    before = tokenizer.decode(prompt[max(0, at - _MAX_TOKENS) : at], skip_special=False)
    after = tokenizer.decode(prompt[at : at + _MAX_TOKENS], skip_special=False)
    is_cut = at > _MAX_TOKENS or len(before) > MAX_CHARS
    is_long = len(prompt) - at > _MAX_TOKENS or len(after) > MAX_CHARS
    return Excerpt(
        (_ELLIPSIS if is_cut else "") + _escaped(before[-MAX_CHARS:]),
        _escaped(after[:MAX_CHARS]) + (_ELLIPSIS if is_long else ""),
    )


def stopped_text(tokenizer: Tokenizer, prompt: Sequence[int], explanation: CacheExplanation) -> Excerpt | None:
    """The text of a prompt where its cache match ended. None: it was complete, or the cache was not used."""
    if explanation.reason in (StopReason.COMPLETE, StopReason.OFF):
        return None
    return excerpt_at(tokenizer, prompt, explanation.stopped_at)


def _escaped(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
