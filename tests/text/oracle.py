"""Slow, simple reference implementations of two tokenizers."""

from __future__ import annotations

import functools
import itertools
import re
import unicodedata
from typing import Any

SPACE = "\u2581"


def byte_pair_ids(metadata: dict[str, Any], text: str) -> list[int]:
    """Byte-level BPE as in GPT-2: split into words, then apply the merge of the lowest rank until none is left.

    For texts without control strings. Knows the pre-tokenizers gpt-2 and smollm.
    """
    vocab, ranks = _tables(metadata)
    ids = []
    for word in _words(text, digits=metadata["tokenizer.ggml.pre"] == "smollm"):
        parts = [_letters()[byte] for byte in word.encode()]
        while len(parts) > 1:
            pairs = [(ranks.get(pair, len(ranks)), i) for i, pair in enumerate(itertools.pairwise(parts))]
            rank, at = min(pairs)
            if rank == len(ranks):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [vocab[part] for part in parts]
    return ids


def sentencepiece_ids(metadata: dict[str, Any], text: str) -> list[int]:
    """SentencePiece: join the neighbours whose piece scores best, the leftmost on ties; then fall back to bytes."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    types = metadata["tokenizer.ggml.token_type"]
    ids = []
    vocab = {token: i for i, token in enumerate(tokens)}
    for segment in re.split("(\n\n)", text):  # the only user-defined token in these texts
        if segment == "\n\n":
            ids.append(vocab[segment])
            continue
        parts = [
            *(SPACE * (bool(segment) and metadata["tokenizer.ggml.add_space_prefix"]) + segment.replace(" ", SPACE))
        ]
        while True:
            joint = [left + right for left, right in itertools.pairwise(parts)]
            known = [(-scores[vocab[j]], i) for i, j in enumerate(joint) if j in vocab and types[vocab[j]] == 1]
            if not known:
                break
            at = min(known)[1]
            parts[at : at + 2] = [joint[at]]
        for part in parts:
            ids += [vocab[part]] if part in vocab else [vocab[f"<0x{byte:02X}>"] for byte in part.encode()]
    return ids


_CONTRACTION = re.compile("'(?:s|t|re|ve|m|ll|d)")
_WORD = re.compile(r" ?L+| ?N+| ?P+|[ S]+(?![LNP])|[ S]+")
_WHITE = {*range(9, 14), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}


def _words(text: str, *, digits: bool) -> list[str]:
    """GPT-2's expression, applied to character kinds, because `re` does not support Unicode categories."""
    kinds = "".join(map(_kind, text))
    words = []
    at = 0
    while at < len(text):
        if digits and kinds[at] == "N":
            end = at + 1
        else:
            upto = next((i for i in range(at, len(text)) if kinds[i] == "N"), len(text)) if digits else len(text)
            found = _CONTRACTION.match(text, at, upto) or _WORD.match(kinds, at, upto)
            assert found is not None
            end = found.end()
        words.append(text[at:end])
        at = end
    return words


def _kind(char: str) -> str:
    if ord(char) in _WHITE:
        return " " if char == " " else "S"
    kind = unicodedata.category(char)[0]
    return kind if kind in "LN" else "P"


@functools.cache
def _letters() -> dict[int, str]:
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def _tables(metadata: dict[str, Any]) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    pairs = [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    return vocab, {(left, right): i for i, (left, right) in enumerate(pairs)}
