"""Judges texts by a grammar, over a vocabulary of bytes and markers."""

from __future__ import annotations

import llguidance

from quire.text.grammar import Grammar


class Letters:
    """A vocabulary for llguidance: all bytes, and special tokens, of which the first ends a text."""

    eos_token_id = 256
    bos_token_id = None

    def __init__(self, *names: str) -> None:
        self.names = names
        self.tokens = (*(bytes((byte,)) for byte in range(256)), *(name.encode() for name in names))
        self.special_token_ids = tuple(range(256, len(self.tokens)))

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class Judge:
    def __init__(self, *names: str) -> None:
        self._names = names
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Letters(*names)), n_vocab=256 + len(names))

    def __call__(self, grammar: Grammar | None, text: str, *, is_plain: bool = False) -> str:
        """whole: the text may end here; part: more must follow; no: it is not allowed. `is_plain`: without markers."""
        assert grammar is not None
        matcher = llguidance.LLMatcher(self._tokenizer, grammar.source, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids: list[int] = []
        while text:
            name = None if is_plain else next((name for name in self._names if text.startswith(name)), None)
            ids += list(text[0].encode()) if name is None else [256 + self._names.index(name)]
            text = text[1 if name is None else len(name) :]
        if matcher.try_consume_tokens(ids) < len(ids):
            return "no"
        return "whole" if matcher.is_accepting() else "part"

    def marker_id(self, marker: str) -> int | None:
        return 256 + self._names.index(marker) if marker in self._names else None
