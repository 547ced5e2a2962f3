"""Converts the tokens of one answer to text, up to a stop string.

The caller owns the stream and its request: when a delta has a `stop`, the caller must finish the request in the engine
with `num_tokens` tokens. Tokens already in flight may still be pushed; they are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from quire.text.detokenize import Detokenizer
from quire.text.stop_strings import StopStrings

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer


class TokenText(NamedTuple):
    """The text of one token of the answer, for log probabilities."""

    token_id: int
    text: str  # became final with this token; "" while a character is incomplete, or for a hidden token
    offset: int  # characters of the answer before it; text held back for a stop string counts


class TextDelta(NamedTuple):
    text: str  # text to show now
    num_tokens: int  # pushed tokens that belong to the answer: all, or up to the one that completed `stop`
    stop: str | None = None  # the stop string that ended the answer in this push
    tokens: tuple[TokenText, ...] = ()  # one for each of num_tokens


class TextStream:
    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        shown_special: frozenset[int] = frozenset(),
        keep_prefix_space: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`min_tokens`: minimum length of the answer. Text of the first tokens is not searched for stop strings."""
        self.detokenizer = Detokenizer(
            tokenizer, skip_special=skip_special, shown_special=shown_special, keep_prefix_space=keep_prefix_space
        )
        self._stops = StopStrings(stops, include_stop=include_stop)
        self._min_tokens = min_tokens
        self.num_tokens = 0  # of the whole answer, so far
        self.num_chars = 0  # of the whole answer so far, released or held back
        self.stop: str | None = None

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Push the next tokens. A final EOS token need not be pushed; if it is, it is hidden."""
        shown: list[str] = []
        tokens: list[TokenText] = []
        for token_id in token_ids:
            if self.stop is not None:
                break
            text = self.detokenizer.push((token_id,))
            tokens.append(TokenText(token_id, text, self.num_chars))
            self.num_chars += len(text)
            self.num_tokens += 1
            if self.num_tokens <= self._min_tokens:
                shown.append(text)
                continue
            match = self._stops.push(text)
            shown.append(match.text)
            self.stop = match.stop
        return TextDelta("".join(shown), len(tokens), self.stop if tokens else None, tuple(tokens))

    def finish(self) -> TextDelta:
        """Flush an incomplete character and held text at the end. This may still complete a stop string."""
        if self.stop is not None:
            return TextDelta("", 0)
        rest = self.detokenizer.finish()
        self.num_chars += len(rest)
        match = self._stops.push(rest)
        self.stop = match.stop
        return TextDelta(match.text + self._stops.finish(), 0, match.stop)
