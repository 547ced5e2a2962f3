"""Runs the tokenizers of a vocabulary: in this process, or in a child process that can be killed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from quire.text.child_process import LimitedChild, NoAnswer
from quire.text.encoder_child import Encoder as InlineEncoder
from quire.text.vocab_spec import AddedToken, Bounds

# CPU time. Building takes 0.13 s for each MB of JSON, encoding 1.5 s for a million characters (ARM Neoverse-N1).
BUILD_LIMIT_S, BUILD_LIMIT_S_PER_MB = 1.0, 0.5
ENCODE_LIMIT_S, ENCODE_LIMIT_S_PER_CHAR = 1.0, 1e-5
MEMORY_BYTES, MEMORY_BYTES_PER_BYTE = 512 << 20, 16  # of address space, and more for each byte of JSON
MAX_IDS_PER_CHAR = 32
# Encoded at load. Runs of letters, digits and spaces find the most common patterns that backtrack without end.
TRIAL = f"{'a' * 64}! {'aB' * 32}\n{'1' * 64}.{' ' * 64}x\t{'é日' * 16}🎉 The quick brown fox's 3.14\r\n\r\n"
_CHILD = Path(__file__).with_name("encoder_child.py")
_EMPTY: Mapping[str, Any] = {
    "version": "1.0",
    **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {}, "merges": []},
}


class Encoder(Protocol):
    """The tokenizers of one vocabulary. Thread-safe. See `quire/text/encoder_child.py`."""

    def encode(self, form: str, text: str) -> list[int]: ...

    def find_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]: ...

    def close(self) -> None: ...


def make_encoder(spec: Mapping[str, Any], added: Sequence[AddedToken], bounds: Bounds) -> Encoder:
    """Build the tokenizers of a checked description. Raises exceptions of the library, or EncoderError."""
    # The decoder is not passed on: quire decodes itself.
    full = json.dumps({**spec, "decoder": None})
    inside = None
    if spec["pre_tokenizer"] is not None:
        inside = json.dumps({**_EMPTY, "pre_tokenizer": _never_prepended(spec["pre_tokenizer"])})
    plain = [(token.content, token.normalized) for token in added if not token.is_control and not token.special]
    return (InlineEncoder if bounds.is_inline else ChildEncoder)(full, inside, plain)


class EncoderError(Exception):
    """The child cannot build the tokenizers, or cannot encode this text within its limits."""


class ChildEncoder:
    """Tokenizers in a child process. Thread-safe: texts are encoded one after the other."""

    def __init__(self, spec: str, inside: str | None, plain_added: list[tuple[str, bool]]) -> None:
        max_bytes = MEMORY_BYTES + MEMORY_BYTES_PER_BYTE * len(spec)
        description = {"spec": spec, "inside": inside, "plain_added": plain_added, "max_bytes": max_bytes}
        build_limit_s = BUILD_LIMIT_S + BUILD_LIMIT_S_PER_MB * len(spec) / 1e6
        names = ("the process that runs the tokenizer", "the tokenizer")
        self._child = LimitedChild(_CHILD, description, build_limit_s, names=names, failure=EncoderError, check=_check)
        self.close = self._child.close
        try:
            for form in ("special", "start", "inside"):
                self.encode(form, TRIAL)
        except BaseException:
            self.close()
            raise

    def encode(self, form: str, text: str) -> list[int]:
        ids: list[int] = self._ask(form, text)["ids"]
        return ids

    def find_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = self._ask("spans", text)
        return found["ids"], [(begin, end) for begin, end in found["offsets"]]

    def _ask(self, form: str, text: str) -> dict[str, Any]:
        order = {"form": form, "text": text, "max_ids": MAX_IDS_PER_CHAR * (len(text) + 32)}
        return self._child.request(order, ENCODE_LIMIT_S + ENCODE_LIMIT_S_PER_CHAR * len(text))


def _check(order: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    if "error" in answer:
        raise EncoderError(str(answer["error"])[:300])
    if "form" in order and not _is_valid(answer, has_offsets=order["form"] == "spans"):
        raise NoAnswer("wrote an invalid answer")


def _is_valid(answer: Mapping[str, Any], *, has_offsets: bool) -> bool:
    """Whether an answer has the right shape. It is not trusted: hostile input may take over the child."""
    ids = answer.get("ids")
    if not isinstance(ids, list) or not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        return False
    if not has_offsets:
        return True
    offsets = answer.get("offsets")
    return (
        isinstance(offsets, list)
        and len(offsets) == len(ids)
        and all(isinstance(pair, list) and len(pair) == 2 and all(type(at) is int for at in pair) for pair in offsets)
    )


def _never_prepended(part: Any) -> Any:
    """The pre-tokenizer for text inside a prompt: it must not add the space of the prompt's start."""
    if isinstance(part, dict):
        changed = {key: _never_prepended(value) for key, value in part.items()}
        return changed | ({"prepend_scheme": "never"} if part.get("prepend_scheme") == "first" else {})
    return [_never_prepended(item) for item in part] if isinstance(part, list) else part
