"""The library's tokenizers of one vocabulary. For untrusted descriptions, they run in a child process.

A regular expression may backtrack for years and a normalizer may fill the memory, in a call that cannot be interrupted;
unlike a thread, a process can be killed. Imports no quire modules, so that the child starts fast.
"""

from __future__ import annotations

import os
from typing import Any

LONG_CHARS = 4096


class Encoder:
    """The tokenizers of one vocabulary: with its control tokens, and without them. Thread-safe."""

    def __init__(self, spec: str, inside: str | None, plain_added: list[tuple[str, bool]]) -> None:
        """All descriptions are JSON. `inside`: a tokenizer whose pre-tokenizer is that of text inside a prompt."""
        # Batches would start threads of their own. They are used because only they release the interpreter's lock.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers

        self._library = tokenizers
        full = tokenizers.Tokenizer.from_str(spec)
        self._forms: dict[str, Any] = {"full": full}
        self._inside = None if inside is None else tokenizers.Tokenizer.from_str(inside).pre_tokenizer
        self._plain_added = plain_added

    def encode(self, form: str, text: str) -> list[int]:
        """Token ids. `form`: "special", "full", or plain text at the "start" of a prompt or "inside" it."""
        ids: list[int] = self._encode(form, text).ids
        return ids

    def find_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of the form "full", and the begin and end of each token in the text."""
        encoding = self._encode("full", text)
        return encoding.ids, encoding.offsets

    def close(self) -> None:
        pass

    def _encode(self, form: str, text: str) -> Any:
        tokenizer = self._tokenizer("full" if form == "special" else form)
        if len(text) < LONG_CHARS:
            return tokenizer.encode(text, add_special_tokens=form == "special")
        return tokenizer.encode_batch([text], add_special_tokens=form == "special")[0]

    def _tokenizer(self, form: str) -> Any:
        """Plain forms are made at their first use. They share the model, so they are cheap."""
        if form not in self._forms:
            full = self._forms["full"]
            plain = self._library.Tokenizer(full.model)
            if full.normalizer is not None:
                plain.normalizer = full.normalizer
            if full.pre_tokenizer is not None:
                plain.pre_tokenizer = full.pre_tokenizer if form == "start" else self._inside
            added = [
                self._library.AddedToken(content, normalized=normalized, special=False)
                for content, normalized in self._plain_added
            ]
            plain.add_tokens(added)
            self._forms[form] = plain
        return self._forms[form]


class Worker:
    """Runs the tokenizers in a process of its own (`quire/text/limited_child.py`)."""

    def __init__(self) -> None:
        self._encoder: Encoder | None = None

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        if self._encoder is not None:
            return self._encoded(self._encoder, order)
        self._encoder = Encoder(order["spec"], order["inside"], order["plain_added"])
        return {}

    def _encoded(self, encoder: Encoder, order: dict[str, Any]) -> dict[str, Any]:
        form, text = order["form"], order["text"]
        if form == "spans":
            ids, offsets = encoder.find_spans(text)
            found: dict[str, Any] = {"ids": ids, "offsets": offsets}
        else:
            found = {"ids": encoder.encode(form, text)}
        if len(found["ids"]) > order["max_ids"]:
            raise ValueError(f"{len(text)} characters become {len(found['ids'])} tokens, more than {order['max_ids']}")
        return found
