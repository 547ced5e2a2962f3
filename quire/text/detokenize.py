"""Tokens to text as they come. Knows bytes and characters; knows nothing of stop strings or streams of events."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one answer, as it grows. The work per token does not depend on what came before.

    What is returned is final: bytes that may still become a character wait for the tokens that complete it. All texts
    joined are `Tokenizer.decode` of all tokens. That includes the first space, which some models write before every
    word: an answer read by itself does not begin with it. Text that continues a prompt does: keep_prefix_space.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        shown_special: frozenset[int] = frozenset(),
        keep_prefix_space: bool = False,
    ) -> None:
        """`shown_special`: those that stay in the text all the same."""
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - shown_special if skip_special else frozenset[int]()
        self._strips_next = tokenizer.strip_prefix_space and not keep_prefix_space
        self._decoder = _Utf8("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became final with these tokens."""
        hidden, token_bytes = self._hidden, self._tokenizer.token_bytes
        data = b"".join([token_bytes(token_id) for token_id in token_ids if token_id not in hidden])
        return self._strip(self._decoder.decode(data))

    def push_each(self, token_ids: Sequence[int]) -> list[str]:
        """The same, token by token: a character belongs to the token that completes it."""
        return [self.push((token_id,)) for token_id in token_ids]

    def finish(self) -> str:
        """The answer is over: half a character that still waited becomes U+FFFD."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if not self._strips_next or not text:
            return text
        self._strips_next = False
        return text.removeprefix(" ")
