"""Text to token ids and back, over the `tokenizers` library, and the end of a text at a stop string.

Both formats, tokenizer.json and the tokenizer.ggml.* keys of a GGUF file, are converted to one description, checked and
built once. On bad input the library renumbers tokens, panics or raises bare Exceptions. Here every defect of a file
raises ModelFileError, and every defect of a text raises InvalidRequest.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from quire.core.cache import CacheExplanation, StopReason
from quire.errors import ContextTooLong, InvalidRequest, ModelFileError, QuireError
from quire.text.child_process import LimitedChild, NoAnswer
from quire.text.encoder_child import Encoder as InlineEncoder
from quire.text.vocab_spec import (
    MAX_FRAME_IDS,
    SPACE,
    AddedToken,
    add_from_config,
    check_spec,
    checked_vocab,
    decoder_kind,
    ending_ids,
    framing,
    gguf_vocab,
    is_safe,
    parse,
)

MAX_DECODED_BYTES = 64 * 1024 * 1024
MAX_STOPS = 16
MAX_STOP_CHARS = 256
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level models use for bytes: printable bytes as they are, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


class Tokenizer:
    """One vocabulary. Immutable after construction except for caches; thread-safe."""

    def __init__(self, spec: dict[str, Any], special: Mapping[str, int], eos_token_ids: Sequence[int]) -> None:
        """Use `from_json` or `from_gguf`. `special`: ids by name (bos, eos, unk, pad)."""
        self._added = check_spec(spec)
        self._byte_level, self.strip_prefix_space = decoder_kind(spec["decoder"])
        vocab: Mapping[str, int] = spec["model"]["vocab"]
        self._tokens: list[str | None] = [None] * (max(vocab.values()) + 1)
        for token, token_id in vocab.items():
            self._tokens[token_id] = token
        self.vocab_size = len(self._tokens)
        self.added: Mapping[str, int] = {token.content: token.token_id for token in self._added}
        self.special_ids = frozenset(token.token_id for token in self._added if token.special)
        self.control = tuple(token for token in self._added if token.is_control)
        self.control_ids = frozenset(token.token_id for token in self.control)
        self.special_tokens: Mapping[str, str] = {
            f"{name}_token": text for name, i in special.items() if (text := self.id_to_token(i)) is not None
        }
        self.bos_token_id = special.get("bos")
        self.eos_token_ids = tuple(eos_token_ids)
        unknown = spec["model"].get("unk_token")
        self._never_plain = self.control_ids - {vocab.get(unknown)}
        self.is_inline = is_safe(spec)  # the tokenizer runs in this process, and is fast
        with _guarded(ModelFileError, "the tokenizer cannot be built"):
            self._encoder = make_encoder(spec, self._added, is_inline=self.is_inline)
            frame = self._encoder.encode("special", "")
        # The library does not check the ids of a post-processor.
        unknown_ids = [token_id for token_id in frame if not 0 <= token_id < self.vocab_size]
        if unknown_ids or len(frame) > MAX_FRAME_IDS:
            self.close()
            what = f"{unknown_ids[0]}, vocabulary of {self.vocab_size}" if unknown_ids else f"{len(frame)} tokens"
            raise ModelFileError(f"tokenizer.json: post_processor adds {what}")
        self._is_exact = spec["normalizer"] is None or not any(token.normalized for token in self.control)
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        self.plain_texts: Mapping[int, str] = _PlainTexts(self)

    @classmethod
    def from_json(cls, tokenizer_json: bytes, config: Mapping[str, Any]) -> Tokenizer:
        """From tokenizer.json and tokenizer_config.json ({} if there is none)."""
        spec = parse(tokenizer_json)
        vocab = checked_vocab(spec)
        add_from_config(spec, config)
        ids = dict(vocab) | {t["content"]: t["id"] for t in spec["added_tokens"] if isinstance(t.get("content"), str)}
        named = {}
        for name in ("bos", "eos", "unk", "pad"):
            value = config.get(f"{name}_token")
            content = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(content, str) and isinstance(ids.get(content), int):
                named[name] = ids[content]
        if spec.get("post_processor") is None and config.get("add_bos_token") is True and "bos" in named:
            spec["post_processor"] = framing(named, ["bos"])
        eos = [named["eos"]] if "eos" in named else []
        return cls(spec, named, tuple(dict.fromkeys((*eos, *ending_ids(ids)))))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the tokenizer.ggml.* keys of a GGUF file."""
        return cls(*gguf_vocab(metadata))

    def encode(self, text: str, *, add_special: bool = True, max_chars: int | None = None) -> list[int]:
        """Token ids of a text. Control strings in it become control tokens.

        `add_special` adds BOS and EOS if the model wants them. A text longer than `max_chars` is refused before any
        work is done.
        """
        check_text(text, max_chars=max_chars)
        return self._ids("special" if add_special else "full", text)

    def encode_plain(self, text: str, *, at_start: bool = True, max_chars: int | None = None) -> list[int]:
        """Token ids of a text in which control strings are plain text: no control token is returned.

        The unknown token is the exception, for a character that is not in the vocabulary. `at_start`: the text is the
        start of the prompt, where some models add a space.
        """
        check_text(text, max_chars=max_chars)
        ids = self._ids("start" if at_start else "inside", text)
        if self._never_plain.isdisjoint(ids):
            return ids
        # Merges or whole words may still produce a control token: its text is then encoded byte by byte.
        spelled: list[int] = []
        for token_id in ids:
            spelled += self._spell(token_id) if token_id in self._never_plain else [token_id]
        return spelled

    def encode_marked(self, text: str, marker: str, *, max_chars: int | None = None) -> list[int]:
        """Token ids of a text in which a `marker` inside a control string makes it plain text.

        The text between two real control tokens is encoded as one piece without its markers. The ids are those the
        text would have if the marked strings were not control strings.
        """
        check_text(text, max_chars=max_chars)
        if marker not in text and self._is_exact:
            return self._ids("full", text)
        with _guarded(InvalidRequest, "text cannot be encoded"):
            found = list(zip(*self._encoder.find_spans(text), strict=True))
        ids: list[int] = []
        pending: list[int] = []
        start, is_clean = 0, True
        for token_id, (begin, end) in found:
            if token_id not in self.control_ids:
                pending.append(token_id)
            elif text[begin:end].strip() != (self._tokens[token_id] or "").strip():
                is_clean = False  # the normalizer turned other text into a control string
            else:
                ids += self._piece(text[start:begin], marker, start == 0, pending if is_clean else None)
                ids.append(token_id)
                start, is_clean, pending = end, True, []
        return ids + self._piece(text[start:], marker, start == 0, pending if is_clean else None)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of a whole answer. Invalid UTF-8 becomes U+FFFD; ids without a token are skipped.

        If the model writes a space before its first word (`strip_prefix_space`), that space is removed, as by the
        decoder of its tokenizer.json.
        """
        pieces = [
            b"" if skip_special and token_id in self.special_ids else self.token_bytes(token_id) for token_id in ids
        ]
        if (size := sum(map(len, pieces))) > MAX_DECODED_BYTES:
            raise InvalidRequest(f"the text of {len(pieces)} tokens has {size} bytes, more than {MAX_DECODED_BYTES}")
        text = b"".join(pieces).decode("utf-8", "replace")
        return text[1:] if self.strip_prefix_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; for a special token, its name. b"" for an id without a token."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it."""
        return self._tokens[token_id] if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        return self._ids_by_token.get(token)

    def close(self) -> None:
        """End the child process, if the tokenizer has one."""
        self._encoder.close()

    @cached_property
    def _ids_by_token(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self._tokens) if token is not None}

    def _ids(self, form: str, text: str) -> list[int]:
        with _guarded(InvalidRequest, "text cannot be encoded"):
            return self._encoder.encode(form, text)

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._tokens[token_id]
        if token is None:
            return b""
        if self.added.get(token) != token_id:
            return self._model_bytes(token)
        return (token if self._byte_level or token_id in self.special_ids else token.replace(SPACE, " ")).encode()

    def _model_bytes(self, token: str) -> bytes:
        if self._byte_level:
            known = [_ALPHABET.get(char) for char in token]
            return bytes(b for b in known if b is not None) if None not in known else token.encode()
        if _BYTE_TOKEN.fullmatch(token):
            return bytes((int(token[3:5], 16),))
        return token.replace(SPACE, " ").encode()

    def _spell(self, token_id: int) -> list[int]:
        """The text of a token, encoded as one token per byte."""
        letters = {byte: char for char, byte in _ALPHABET.items()}
        ids = []
        for byte in self._model_bytes(self._tokens[token_id] or ""):
            name = letters[byte] if self._byte_level else f"<0x{byte:02X}>"
            found = self.token_to_id(name)
            if found is None and not self._byte_level and byte < 0x80:
                found = self.token_to_id(chr(byte).replace(" ", SPACE))
            if found is None or found in self.control_ids:
                raise InvalidRequest(f"text contains {self._tokens[token_id]!r}, which this model cannot read as text")
            ids.append(found)
        return ids

    def _piece(self, text: str, marker: str, at_start: bool, known: list[int] | None) -> list[int]:
        if known is not None and marker not in text:
            return known
        return self.encode_plain(text.replace(marker, ""), at_start=at_start)


class _PlainTexts(dict[int, str]):
    """The texts of the tokens that mean the same text in every context, made when they are first needed.

    "" for all others: special tokens, parts of characters, and ids without a token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        tokenizer = self._tokenizer
        try:
            text = "" if token_id in tokenizer.special_ids else tokenizer.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            text = ""
        if 0 <= token_id < tokenizer.vocab_size:
            self[token_id] = text
        return text


def check_text(text: str, *, max_chars: int | None = None, name: str = "text") -> None:
    """Raise InvalidRequest for a text that is too long or cannot be encoded as UTF-8."""
    if max_chars is not None and len(text) > max_chars:
        raise ContextTooLong(f"{name} has {len(text)} characters, more than the {max_chars} that can fit the context")
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise InvalidRequest(f"{name} has a lone surrogate U+{code:04X} at character {error.start}") from None


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
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
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

    def finish(self) -> str:
        """Flush at the end of the answer: an incomplete character becomes U+FFFD."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if not self._strips_next or not text:
            return text
        self._strips_next = False
        return text.removeprefix(" ")


class StopMatch(NamedTuple):
    text: str  # released by this push: final, and not part of a stop string
    stop: str | None  # the stop string that ended the text, if one did


class StopStrings:
    """Matches one text against its stop strings.

    The stop string that ends first wins; of those that end at the same character, the longest. This is the result of
    reading the text one character at a time, so it does not depend on how the text is split into pieces. The cost of
    a push depends on its text and the lengths of the stop strings, not on the length of the text so far.
    """

    def __init__(self, stops: Sequence[str] = (), *, include_stop: bool = False) -> None:
        _check_stops(stops)
        self._stops = tuple(dict.fromkeys(stops))
        self._include_stop = include_stop
        # Every proper prefix: text that ends with one of them may be the start of a stop string.
        self._prefixes = frozenset(stop[:size] for stop in self._stops for size in range(1, len(stop)))
        self._longest = max(map(len, self._prefixes), default=0)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> StopMatch:
        """Push text and return what can be released. After a match all further text is dropped."""
        if self._stopped:
            return StopMatch("", None)
        if not self._stops:
            return StopMatch(text, None)
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held, self._stopped = "", True
            return StopMatch(text[: end if self._include_stop else start], stop)
        keep = min(self._longest, len(text))
        while keep and text[-keep:] not in self._prefixes:
            keep -= 1
        self._held = text[len(text) - keep :]
        return StopMatch(text[: len(text) - keep], None)

    def finish(self) -> str:
        """Release the held text at the end: it is not a stop string."""
        held, self._held = self._held, ""
        return held


def _check_stops(stops: Sequence[str]) -> None:
    if isinstance(stops, str):
        raise InvalidRequest(f"stop = {stops[:80]!r} is a string, not a list of strings")
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} strings, more than {MAX_STOPS}")
    for i, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise InvalidRequest(f"stop[{i}] is a {type(stop).__name__}, not a string")
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"stop[{i}] has {len(stop)} characters, not 1 to {MAX_STOP_CHARS}")
        check_text(stop, name=f"stop[{i}]")


@contextmanager
def _guarded(error: type[QuireError], what: str) -> Iterator[None]:
    """Convert the library's errors: bare Exceptions, and its own BaseException for a panic."""
    try:
        yield
    except (QuireError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as cause:
        raise error(f"{what}: {str(cause)[:200]}") from None


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


def make_encoder(
    spec: Mapping[str, Any], added: Sequence[AddedToken], *, is_inline: bool
) -> InlineEncoder | ChildEncoder:
    """Build the tokenizers of a checked description. Raises exceptions of the library, or EncoderError."""
    # The decoder is not passed on: quire decodes itself.
    full = json.dumps({**spec, "decoder": None})
    inside = None
    if spec["pre_tokenizer"] is not None:
        inside = json.dumps({**_EMPTY, "pre_tokenizer": _never_prepended(spec["pre_tokenizer"])})
    plain = [(token.content, token.normalized) for token in added if not token.is_control and not token.special]
    return (InlineEncoder if is_inline else ChildEncoder)(full, inside, plain)


class EncoderError(Exception):
    """The child cannot build the tokenizers, or cannot encode this text within its limits."""


class ChildEncoder(LimitedChild):
    """Tokenizers in a child process."""

    def __init__(self, spec: str, inside: str | None, plain_added: list[tuple[str, bool]]) -> None:
        max_bytes = MEMORY_BYTES + MEMORY_BYTES_PER_BYTE * len(spec)
        description = {"spec": spec, "inside": inside, "plain_added": plain_added, "max_bytes": max_bytes}
        build_limit_s = BUILD_LIMIT_S + BUILD_LIMIT_S_PER_MB * len(spec) / 1e6
        names = ("the process that runs the tokenizer", "the tokenizer")
        super().__init__(_CHILD, description, build_limit_s, names=names, failure=EncoderError, check=_check)
        try:
            for form in ("special", "start", "inside"):
                self.encode(form, TRIAL)
        except BaseException:
            self.close()
            raise

    def encode(self, form: str, text: str) -> list[int]:
        ids: list[int] = self._encoded(form, text)["ids"]
        return ids

    def find_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = self._encoded("spans", text)
        return found["ids"], [(begin, end) for begin, end in found["offsets"]]

    def _encoded(self, form: str, text: str) -> dict[str, Any]:
        order = {"form": form, "text": text, "max_ids": MAX_IDS_PER_CHAR * (len(text) + 32)}
        return self.request(order, ENCODE_LIMIT_S + ENCODE_LIMIT_S_PER_CHAR * len(text))


def _check(order: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    if "error" in answer:
        raise EncoderError((str(answer["error"]) or str(answer.get("kind")))[:300])
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


MAX_CHARS = 40  # on each side
_MAX_TOKENS = 4 * MAX_CHARS  # a character may take four tokens
_ELLIPSIS = "…"


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The text just before a token of a prompt, and the text from that token on."""

    before: str
    after: str


def excerpt_at(tokenizer: Tokenizer, prompt: Sequence[int], at: int) -> Excerpt:
    """At most 40 characters on each side of token `at`: control tokens by name, control characters escaped."""
    before = tokenizer.decode(prompt[max(0, at - _MAX_TOKENS) : at], skip_special=False)
    after = tokenizer.decode(prompt[at : at + _MAX_TOKENS], skip_special=False)
    is_cut = at > _MAX_TOKENS or len(before) > MAX_CHARS
    is_long = len(prompt) - at > _MAX_TOKENS or len(after) > MAX_CHARS
    return Excerpt(
        (_ELLIPSIS if is_cut else "") + _escaped(before[-MAX_CHARS:]),
        _escaped(after[:MAX_CHARS]) + (_ELLIPSIS if is_long else ""),
    )


def stopped_text(tokenizer: Tokenizer, prompt: Sequence[int], explanation: CacheExplanation) -> Excerpt | None:
    """The text of a prompt where its cache match ended. None: it was complete, or the cache was not used."""
    if explanation.reason in (StopReason.COMPLETE, StopReason.OFF):
        return None
    return excerpt_at(tokenizer, prompt, explanation.stopped_at)


def _escaped(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
