"""Bounds of what a tokenizer does to a text, read from its description without running it.

A tokenizer.json is a small program: normalizers rewrite a text, regular expressions split it, post-processors add
tokens. Parts that make a text many times longer are refused. Parts in the tables below take time in proportion to the
text; a tokenizer with any other part runs in a child process (`quire/text/encoder.py`).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import ModelFileError
from quire.text.gguf_vocab import PRE_TOKENIZERS

MAX_PARTS = 32  # of each kind; real tokenizers have at most 5
MAX_GROWTH = 32  # real tokenizers: 1 or 2
INLINE_GROWTH = 2  # beyond this, a child process with a memory limit encodes
MAX_FRAME_IDS = 64  # tokens that are added to a text; real tokenizers add at most 3
MAX_ADDED = 65_536  # added tokens; Gemma has 6,415
MAX_ADDED_SQUARES = 1 << 24  # sum of their squared lengths, which bounds tables of their prefixes; Gemma: 908,922
MAX_TOKEN_CHARS = 1024  # of one token; the longest known has 512

# Split patterns of tokenizer.json files that are not in GGUF files in the same spelling: DeepSeek V3.
_SPELLINGS = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
# Regular expressions of released models. Their time was measured on runs of every class of characters.
KNOWN_PATTERNS = frozenset({regex for pre in PRE_TOKENIZERS.values() for regex in pre.splits}.union(_SPELLINGS))

_FORMS = frozenset(("NFC", "NFD", "NFKC", "NFKD"))
_LINEAR = {
    "normalizer": _FORMS | {"Lowercase", "Strip", "StripAccents", "Nmt", "ByteLevel", "Prepend", "Replace"},
    "pre_tokenizer": frozenset(
        (
            *("ByteLevel", "Metaspace", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "BertPreTokenizer"),
            *("CharDelimiterSplit", "UnicodeScripts", "Split"),
        )
    ),
    "post_processor": frozenset(("TemplateProcessing", "ByteLevel", "RobertaProcessing", "BertProcessing")),
}
_LISTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one tokenizer may do to a text.

    `growth`: the number of characters that one character may become. The first Unicode normal form (up to 18) and the
    first byte alphabet (up to 4) are not counted. What the form does to the text of a request can be computed
    (`form`), so it is only counted if another part writes characters before it.
    """

    growth: int
    is_linear: bool  # all parts are in the tables: their time is in proportion to the text
    form: str | None = None  # the first Unicode normal form

    @property
    def is_inline(self) -> bool:
        """Whether the server may run the tokenizer in its own process."""
        return self.is_linear and self.growth <= INLINE_GROWTH


def find_bounds(spec: Mapping[str, Any]) -> Bounds:
    """The bounds of a description. Raises ModelFileError if they are too high."""
    growth, is_linear = 1, True
    once: set[str] = set()
    form: str | None = None
    for field in _LISTS:
        for name, part in _parts(spec.get(field), field):
            kind = str(part.get("type"))
            form = form or (kind if kind in _FORMS else None)
            is_linear &= kind in _LINEAR[field] and _has_known_pattern(part)
            growth *= 1 if field == "post_processor" else _growth(part, once)
            if growth > MAX_GROWTH:
                raise ModelFileError(
                    f"tokenizer.json: {name} of type {kind[:40]!r}: one character may become {growth} characters,"
                    f" more than {MAX_GROWTH}"
                )
            if field == "post_processor" and not {"single", "pair", "special_tokens"}.isdisjoint(part):
                _check_frame(part, name)
    return Bounds(growth, is_linear, form)


def _parts(root: object, field: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The parts of a field with their names. Sequences are resolved to their members.

    The library also reads lists in place of objects, and ignores the type of some parts: nothing depends on it here.
    """
    found, unread = 0, [] if root is None else [(field, root)]
    while unread:
        name, part = unread.pop()
        if not isinstance(part, Mapping):
            raise ModelFileError(f"tokenizer.json: {name} is a {type(part).__name__}, not an object")
        found += 1
        members = part.get(_LISTS[field], [])
        if not isinstance(members, list):
            raise ModelFileError(f"tokenizer.json: {name}.{_LISTS[field]} is not a list")
        if found + len(members) > MAX_PARTS:
            raise ModelFileError(f"tokenizer.json: {field} has more than {MAX_PARTS} parts")
        unread += [(f"{name}.{_LISTS[field]}[{i}]", one) for i, one in reversed([*enumerate(members)])]
        if not part.keys() <= {"type", _LISTS[field]} or part.get("type") != "Sequence":
            yield name, part  # also a sequence with other fields: the library may read it as another part


MAX_STRING_PATTERN = 32  # characters of a string to search for, in the server's process; longer ones run in a child


def _has_known_pattern(part: Mapping[str, Any]) -> bool:
    if part.get("type") not in ("Split", "Replace"):
        return True
    pattern = part.get("pattern")
    if not isinstance(pattern, Mapping) or len(pattern) != 1:
        return False
    text = pattern.get("String")
    if (
        isinstance(text, str) and 0 < len(text) <= MAX_STRING_PATTERN
    ):  # the search takes time for each of its characters
        return True
    return part["type"] == "Split" and pattern.get("Regex") in KNOWN_PATTERNS


def _growth(part: Mapping[str, Any], once: set[str]) -> int:
    """The factor by which a part may lengthen a text. `once`: what was left out already."""
    kind = str(part.get("type"))
    written = next((value for name in ("content", "prepend") if isinstance(value := part.get(name), str)), "")
    if kind == "ByteLevel" or not unicodedata.is_normalized("NFKD", written):
        once.add(
            "form"
        )  # `Bounds.form` is computed for the request's text: characters that a part writes must be counted
    if kind in _FORMS or kind == "ByteLevel":
        is_first = (group := "form" if kind in _FORMS else kind) not in once
        once.add(group)
        spaced = 2 if kind == "ByteLevel" and part.get("add_prefix_space") is True else 1
        return spaced if is_first else spaced * (4 if kind in ("NFC", "NFD", "ByteLevel") else 18)
    if kind == "Replace" or "content" in part:  # the library knows parts without a type by their fields
        pattern, content = part.get("pattern"), part.get("content")
        text = pattern.get("String") if isinstance(pattern, Mapping) else None
        if text and isinstance(text, str):
            return max(1, -(-_size(content) // len(text)))
        return 1 + _size(content)  # of a regular expression, which may match nothing before each character
    if (
        kind == "Prepend" or "prepend" in part
    ):  # before every text between two added tokens, which may have one character
        return 1 + _size(part.get("prepend"))
    return {"Metaspace": 2, "Lowercase": 3, "BertNormalizer": 3}.get(kind, 1)


def _check_frame(part: Mapping[str, Any], name: str) -> None:
    """Refuse a template that adds many tokens to a text, or repeats the text."""
    name = f"tokenizer.json: {name}"
    for field in ("single", "pair"):  # quire encodes no pairs, but the library builds the template
        pieces = part.get(field)
        if not isinstance(pieces, list) or not all(isinstance(piece, Mapping) for piece in pieces):
            raise ModelFileError(f"{name}.{field} is not a list of objects")
        if len(pieces) > MAX_FRAME_IDS:
            raise ModelFileError(f"{name}.{field} has {len(pieces)} pieces, more than {MAX_FRAME_IDS}")
    texts = [piece["Sequence"] for piece in part["single"] if "Sequence" in piece]
    if len(texts) != 1 or not isinstance(texts[0], Mapping) or texts[0].get("id") != "A":
        raise ModelFileError(f"{name}.single has the texts {str(texts)[:60]}, not one of id 'A'")
    tokens = part.get("special_tokens")
    if not isinstance(tokens, Mapping) or not all(isinstance(token, Mapping) for token in tokens.values()):
        raise ModelFileError(f"{name}.special_tokens is not an object of objects")
    num_ids = sum(max(_size(token.get("ids")), _size(token.get("tokens"))) for token in tokens.values())
    if num_ids > MAX_FRAME_IDS:
        raise ModelFileError(f"{name}.special_tokens has {num_ids} ids, more than {MAX_FRAME_IDS}")


def check_added(contents: Sequence[str]) -> None:
    """Refuse added tokens that would fill tables in memory."""
    if len(contents) > MAX_ADDED:
        raise ModelFileError(f"tokenizer.json: added_tokens has {len(contents)} entries, more than {MAX_ADDED}")
    squares = sum(len(content) ** 2 for content in contents)
    if squares > MAX_ADDED_SQUARES:
        raise ModelFileError(
            f"tokenizer.json: added_tokens are too long: the sum of their squared lengths is {squares}, more than"
            f" {MAX_ADDED_SQUARES}"
        )


def _size(value: object) -> int:
    return len(value) if isinstance(value, str | list) else 0
