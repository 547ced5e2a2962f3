"""The library's tokenizers of one vocabulary, and the child process that runs them for untrusted descriptions.

A regular expression may backtrack for years and a normalizer may fill the memory, in a call that cannot be interrupted;
unlike a thread, a process can be killed. Reads and writes one JSON object per line, and ends with its input. Imports no
quire modules, so that it starts fast.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
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


def answer(encoder: Encoder, order: dict[str, Any]) -> dict[str, Any]:
    form, text = order["form"], order["text"]
    if form == "spans":
        ids, offsets = encoder.find_spans(text)
        found: dict[str, Any] = {"ids": ids, "offsets": offsets}
    else:
        found = {"ids": encoder.encode(form, text)}
    if len(found["ids"]) > order["max_ids"]:
        return {"error": f"{len(text)} characters become {len(found['ids'])} tokens, more than {order['max_ids']}"}
    return found


def limit_memory(max_bytes: int) -> None:
    """Limit the address space."""
    with suppress(ImportError, ValueError, OSError):  # not available on every platform
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_cpu(max_cpu_s: float) -> None:
    """Limit the CPU time from now on; 0: no limit. On expiry a signal ends the process."""
    if hasattr(signal, "setitimer"):  # not available on every platform
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)


def main() -> None:
    encoder: Encoder | None = None
    for line in sys.stdin.buffer:
        order = json.loads(line)
        limit_cpu(order["max_cpu_s"])
        found: dict[str, Any] = {}
        try:
            if encoder is None:
                limit_memory(order["max_bytes"])
                encoder = Encoder(order["spec"], order["inside"], order["plain_added"])
            else:
                found = answer(encoder, order)
        except BaseException as error:  # a panic of the library is not an Exception
            found = {"error": str(error)[:200] or type(error).__name__}
        limit_cpu(0)
        sys.stdout.buffer.write(json.dumps(found).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
