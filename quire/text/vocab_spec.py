"""Validates a parsed tokenizer.json before it is passed to the tokenizers library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import ModelFileError, UnsupportedModel
from quire.text.gguf_vocab import MAX_MERGES, MAX_VOCAB, SPACE, added_token
from quire.text.tokenizer_bounds import MAX_TOKEN_CHARS, check_added

MAX_JSON_BYTES = 64 * 1024 * 1024  # Gemma 3: 32 MiB
MAX_JSON_VALUES = 6 << 20  # about 100 bytes of memory each; Gemma 3: 1,862,983
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# Gemma has tokens for these tags and for runs of white space. They are ordinary text in any role.
_TAGS = (
    *("table", "caption", "thead", "tbody", "tfoot", "tr", "th", "td", "h1", "h2", "h3", "h4", "h5", "h6"),
    *("blockquote", "strong", "em", "b", "i", "u", "s", "sub", "sup", "code"),
)
_HTML = frozenset(f"<{slash}{tag}>" for slash in ("", "/") for tag in _TAGS)


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A string that is split off from a text before the vocabulary's model processes it."""

    content: str
    token_id: int
    special: bool  # omitted from decoded text
    normalized: bool

    @property
    def is_control(self) -> bool:
        """Whether it controls the model, so that user text must not produce it.

        Runs of white space and HTML tags are plain text that has a token of its own. A single character cannot be
        distinguished from prose.
        """
        if len(self.content) < 2 or not self.content.strip().strip(SPACE):
            return False
        return self.special or self.content not in _HTML


def parse(tokenizer_json: bytes) -> dict[str, Any]:
    if len(tokenizer_json) > MAX_JSON_BYTES:
        raise ModelFileError(f"tokenizer.json has {len(tokenizer_json)} bytes, more than {MAX_JSON_BYTES}")
    if (count := sum(map(tokenizer_json.count, (b"[", b"{", b",")))) > MAX_JSON_VALUES:  # one before each value
        raise ModelFileError(f"tokenizer.json has {count} values, more than {MAX_JSON_VALUES}")
    try:
        spec = json.loads(tokenizer_json)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"tokenizer.json is not JSON: {str(error)[:200]}") from None
    if not isinstance(spec, dict):
        raise ModelFileError(f"tokenizer.json holds a {type(spec).__name__}, not an object")
    added = spec.setdefault("added_tokens", [])
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise ModelFileError("tokenizer.json: added_tokens is not a list of objects")
    return spec


def checked_vocab(spec: Mapping[str, Any]) -> dict[str, int]:
    model = spec.get("model")
    if not isinstance(model, dict):
        raise ModelFileError("tokenizer.json has no model")
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind != "BPE":
        raise UnsupportedModel(f"tokenizer.json: model.type = {str(kind)[:40]!r}: quire reads BPE")
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not vocab:
        raise ModelFileError("tokenizer.json: model.vocab is not an object of tokens")
    return vocab


def check_spec(spec: dict[str, Any]) -> tuple[AddedToken, ...]:
    """Check a description and normalize it so that the library builds it as written. Returns the added tokens."""
    vocab = checked_vocab(spec)
    model = spec["model"]
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise UnsupportedModel(f"tokenizer.json: model.{name} = {str(model[name])[:40]!r} is not supported")
    unknown = model.get("unk_token")
    if unknown is not None and not isinstance(unknown, str):
        raise ModelFileError(f"tokenizer.json: model.unk_token = {ascii(unknown)[:40]} is not a token")
    seen: dict[int, str] = {}
    for token, token_id in vocab.items():
        _check_id(token, token_id)
        if seen.setdefault(token_id, token) != token:
            raise ModelFileError(f"token id {token_id} stands for {seen[token_id][:80]!r} and {token[:80]!r}")
    model["merges"] = _checked_merges(model.get("merges", []), vocab)
    added = [_checked_added(token) for token in spec["added_tokens"]]
    check_added([token.content for token in added])
    for extra in added:
        # The library ignores the id of an added token and assigns the next free one, unless the token is in the
        # vocabulary.
        text, token_id = extra.content, extra.token_id
        if vocab.setdefault(text, token_id) != token_id:
            raise ModelFileError(f"added token {text[:80]!r} has the ids {vocab[text]} and {token_id}")
        if seen.setdefault(token_id, text) != text:
            raise ModelFileError(f"token id {token_id} stands for {seen[token_id][:80]!r} and {text[:80]!r}")
    model |= {"type": "BPE", "dropout": None}  # dropout is for training: it would make encoding random
    spec |= {"version": "1.0", "truncation": None, "padding": None}
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        spec.setdefault(name, None)
    return tuple(added)


def _check_id(token: str, token_id: object) -> None:
    if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < MAX_VOCAB:
        raise ModelFileError(f"token {token[:80]!r} has the id {ascii(token_id)[:40]}, not one in [0, {MAX_VOCAB})")
    if len(token) > MAX_TOKEN_CHARS:
        raise ModelFileError(
            f"token {token_id}, {token[:40]!r}..., has {len(token)} characters: more than {MAX_TOKEN_CHARS}"
        )


def _checked_merges(merges: object, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    if not isinstance(merges, list):
        raise ModelFileError("tokenizer.json: model.merges is not a list")
    if len(merges) > MAX_MERGES:
        raise ModelFileError(f"tokenizer.json: model.merges has {len(merges)} entries, more than {MAX_MERGES}")
    checked = []
    for i, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ModelFileError(f"merges[{i}] is not a pair of tokens")
        left, right = pair
        if not isinstance(left, str) or not isinstance(right, str):
            raise ModelFileError(f"merges[{i}] is not a pair of tokens")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelFileError(f"merges[{i}] = {left[:40]!r} {right[:40]!r} is not in the vocabulary")
        checked.append((left, right))
    return checked


def _checked_added(token: dict[str, Any]) -> AddedToken:
    content, token_id = token.get("content"), token.get("id")
    if not isinstance(content, str) or not content:
        raise ModelFileError("tokenizer.json: an added token has no content")
    if not content.isascii():
        try:
            content.encode()
        except UnicodeEncodeError:
            raise ModelFileError(f"added token {content[:80]!a} is not valid text") from None
    _check_id(content, token_id)
    for flag in _FLAGS:
        if not isinstance(token.setdefault(flag, False), bool):
            raise ModelFileError(f"added token {content[:80]!r}: {flag} is not a bool")
    return AddedToken(content, int(str(token_id)), token["special"], token["normalized"])


def add_from_config(spec: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Add the tokens that are listed in tokenizer_config.json only."""
    listed = config.get("added_tokens_decoder", {})
    if not isinstance(listed, Mapping):
        raise ModelFileError("tokenizer_config.json: added_tokens_decoder is not an object")
    known = {token.get("content") for token in spec["added_tokens"] if isinstance(token.get("content"), str)}
    for key, token in listed.items():
        if not isinstance(token, Mapping) or not isinstance(token.get("content"), str) or not str(key).isdecimal():
            raise ModelFileError(f"tokenizer_config.json: added_tokens_decoder[{str(key)[:40]!r}] is not a token")
        if token["content"] not in known:
            flags = {flag: token[flag] for flag in _FLAGS if flag in token}
            spec["added_tokens"].append(added_token(token["content"], int(str(key)[:12]), special=True) | flags)


def decoder_kind(decoder: object) -> tuple[bool, bool]:
    """Whether tokens use the byte alphabet, and whether decoding strips the first space."""
    parts = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise ModelFileError("tokenizer.json: decoder.decoders is not a list of objects")
    kinds = [str(part.get("type")) for part in parts]
    if kinds == ["ByteLevel"]:
        return True, False
    if kinds == ["Metaspace"]:
        scheme = parts[0].get("prepend_scheme", "always")
        return False, scheme != "never" and parts[0].get("add_prefix_space", True) is not False
    if kinds and kinds[0] == "Replace" and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return False, "Strip" in kinds
    raise UnsupportedModel(
        f"tokenizer.json: a decoder of {str(kinds)[:100]}: quire reads ByteLevel, Metaspace and Replace"
    )


def leading_bos(token_id: int) -> dict[str, Any]:
    text = [{"SpecialToken": {"id": "bos", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": text,
        "pair": [*text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"bos": {"id": "bos", "ids": [token_id], "tokens": ["bos"]}},
    }
