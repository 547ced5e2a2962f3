"""Incremental detokenization. Knows bytes and characters, not stop strings or event streams."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Converts the tokens of one answer to text as they arrive. Constant work per token.

    Returned text is final: the bytes of an incomplete character are held back until it is complete. The concatenated
    texts equal `Tokenizer.decode` of all tokens. Some models write a space before every word; the first one is removed,
    except with `keep_prefix_space`, for text that continues a prompt.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        shown_special: frozenset[int] = frozenset(),
        keep_prefix_space: bool = False,
    ) -> None:
        """`shown_special`: special tokens to keep in the text even with `skip_special`."""
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - shown_special if skip_special else frozenset[int]()
        self._strips_next = tokenizer.strip_prefix_space and not keep_prefix_space
        self._decoder = _Utf8("replace")
        # Nothing is held back or to be removed: the text of the next token is its entry in `Tokenizer.plain_texts`,
        # if that is not empty, and pushing such a token would change nothing here.
        self.is_clean = not self._strips_next

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became final with these tokens."""
        hidden, token_bytes = self._hidden, self._tokenizer.token_bytes
        data = b"".join([token_bytes(token_id) for token_id in token_ids if token_id not in hidden])
        text = self._strip(self._decoder.decode(data))
        self.is_clean = not self._strips_next and not self._decoder.getstate()[0]
        return text

    def push_each(self, token_ids: Sequence[int]) -> list[str]:
        """Like `push`, with one text per token: a character belongs to the token that completes it."""
        return [self.push((token_id,)) for token_id in token_ids]

    def finish(self) -> str:
        """Flush at the end of the answer: an incomplete character becomes U+FFFD."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if not self._strips_next or not text:
            return text
        self._strips_next = False
        return text.removeprefix(" ")
