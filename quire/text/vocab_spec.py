"""Validates a parsed tokenizer.json before it is passed to the tokenizers library, and bounds what it does to a text.

A tokenizer.json is a small program: normalizers rewrite a text, regular expressions split it, post-processors add
tokens. Parts that make a text many times longer are refused. Parts in the tables below take time in proportion to the
text; a tokenizer with any other part runs in a child process (`quire/text/tokenizer.py`).

A GGUF file's vocabulary is converted to the structure of tokenizer.json, so that one code path builds both. The file
does not contain its pre-tokenizer, only its name in `tokenizer.ggml.pre`. PRE_TOKENIZERS maps these names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from quire.errors import ModelFileError, UnsupportedModel

MAX_VOCAB = 4_000_000
MAX_MERGES = 4_000_000
# A SentencePiece vocabulary has no merges: they are found by splitting every piece at every position. Real
# vocabularies need about 20 million steps; a malicious one with long pieces would need years.
MAX_CUT_STEPS = 400_000_000
# Merges are stored as pairs of pieces, several times: 350 million characters take 14 s and 1.5 GB. Real vocabularies
# have at most 20 million.
MAX_MERGE_CHARS = 40_000_000
SPACE = "\u2581"  # SentencePiece's character for a space
_KEY = "tokenizer.ggml."

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _TAIL
_SEED = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _TAIL
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",  # Chinese and Japanese
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _TAIL,
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",  # Chinese, Japanese and Korean
    r"\p{N}",
)
_MINICPM5 = (r"\p{N}{1,3}", _QWEN2.replace(r"\p{N}|", r"\p{N}+|"))
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a byte-level model splits text before its merges, and defaults for missing keys."""

    splits: tuple[str, ...] = ()  # regular expressions, applied one after the other; empty: GPT-2's own
    digits: bool = False  # every digit is split off
    nfc: bool = False  # the model's tokenizer.json composes characters first
    ignore_merges: bool = False  # a word that is a token becomes that token, regardless of the merges
    add_bos: bool = False  # the default if tokenizer.ggml.add_bos_token is missing


_PLAIN = PreTokenizer()
_CODE = PreTokenizer(digits=True)
_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_CL100K = PreTokenizer((_LLAMA3,))
_QWEN = PreTokenizer((_QWEN2,))
_O200K = PreTokenizer((_GPT4O,))

# Keys are the names that llama.cpp's converter writes. It finds a name by encoding a text, so that models share the
# name of another model with the same splits. The comments name such models; they were not checked with their files.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer(_DEFAULT),
    # GPT-2's expression
    "gpt-2": _PLAIN,
    "phi-2": _PLAIN,
    "mpt": PreTokenizer(nfc=True),
    "olmo": PreTokenizer(nfc=True),  # OLMo 1 and OLMoE
    "exaone4": _PLAIN,
    "gigachat": _PLAIN,
    "a.x-4.0": _PLAIN,
    "mellum": _PLAIN,
    "trillion": _PLAIN,
    "granite-docling": _PLAIN,
    # the same with single digits
    "smollm": _CODE,
    "starcoder": _CODE,
    "refact": _CODE,  # Granite 3
    "codeshell": _CODE,
    "exaone": _CODE,
    "minerva-7b": _CODE,
    "mellum2": _CODE,
    "command-r": PreTokenizer(digits=True, nfc=True),
    # Llama 3's expression: up to three digits
    "llama-bpe": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "falcon3": _LLAMA_BPE,
    "falcon-h1": _LLAMA_BPE,
    "pixtral": _LLAMA_BPE,
    "midm-2.0": _LLAMA_BPE,
    "lfm2": _LLAMA_BPE,
    "dbrx": _CL100K,  # OLMo 2 and 3, Phi-4, Granite 4
    "smaug-bpe": _CL100K,  # SmolLM3
    "glm4": _CL100K,
    "chatglm-bpe": _CL100K,
    # Qwen's expression: single digits
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),  # Qwen 2, 2.5 and 3
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "deepseek-r1-qwen": _QWEN,
    "stablelm2": _QWEN,
    "megrez": _QWEN,
    "kormo": _QWEN,
    "hunyuan": _QWEN,
    "solar-open": _QWEN,
    "grok-2": _QWEN,
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    "seed-coder": PreTokenizer((_SEED,)),  # Seed-OSS
    "bailingmoe": PreTokenizer((_BAILING,)),
    "bailingmoe2": PreTokenizer((_BAILING,)),
    "llada-moe": PreTokenizer((_BAILING,)),
    "minicpm5": PreTokenizer(_MINICPM5, ignore_merges=True),
    # letters split by case
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),  # Mistral since Nemo, Ministral 3
    "gpt-4o": _O200K,  # Phi-4-mini, gpt-oss
    "llama4": _O200K,
    "kanana2": _O200K,
    "minimax-m2": _O200K,
    # several expressions
    "falcon": PreTokenizer(_FALCON),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "deepseek-v3": PreTokenizer(_DEEPSEEK3),
    "hunyuan-dense": PreTokenizer(_DEEPSEEK3),
    "joyai-llm": PreTokenizer(_DEEPSEEK3),
}

# Control tokens that end an answer, in addition to the end-of-sequence token that a file names.
END_OF_ANSWER = frozenset(
    (
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|end|>",
        "<end_of_turn>",
        "<EOT>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    )
)

# Pairs of control tokens that both end an answer, in vocabularies that have both: gpt-oss, Gemma 4.
_ENDING_PAIRS = (("<|return|>", "<|call|>"), ("<turn|>", "<|tool_response>"))


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class GgufVocab(NamedTuple):
    """The arguments of Tokenizer."""

    spec: dict[str, Any]  # a tokenizer.json, parsed
    named: dict[str, int]  # ids that the file names: "bos", "eos", "unk", "pad"
    eos_ids: tuple[int, ...]


def gguf_vocab(metadata: Mapping[str, Any]) -> GgufVocab:
    """Read the tokenizer.ggml.* keys. Raises ModelFileError, or UnsupportedModel for an unsupported kind."""
    kind = metadata.get(_KEY + "model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(f"{_KEY}model = {_short(kind)}: quire reads the kinds 'gpt2' and 'llama'")
    tokens = _strings(metadata, "tokens", MAX_VOCAB)
    _require(bool(tokens), f"{_KEY}tokens is empty")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(i for i, token in enumerate(tokens) if vocab[token] != i)
        raise ModelFileError(f"{_KEY}tokens[{twice}] = {_short(tokens[twice])} occurs twice")
    types = _types(metadata, len(tokens))
    named = _named_ids(metadata, len(tokens))
    spec = (
        _byte_level(metadata, vocab, named) if kind == "gpt2" else _sentencepiece(metadata, tokens, vocab, types, named)
    )
    spec["added_tokens"] = [
        added_token(token, token_id, special=types[token_id] is not TokenType.USER_DEFINED)
        for token_id, token in enumerate(tokens)
        if token and types[token_id] in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    ]
    eos = [named[name] for name in ("eos", "eot", "eom") if name in named]
    eos += [i for i, token in enumerate(tokens) if types[i] is TokenType.CONTROL and token in END_OF_ANSWER]
    eos += ending_ids(vocab)
    if "<|return|>" in vocab and "<|call|>" in vocab:  # gpt-oss: <|end|> ends a message, not the answer
        eos = [token_id for token_id in eos if tokens[token_id] != "<|end|>"]
    return GgufVocab(spec, named, tuple(dict.fromkeys(eos)))


def ending_ids(ids: Mapping[str, int]) -> tuple[int, ...]:
    """The tokens that end an answer although the files of a model may not name them. `ids`: by token."""
    return tuple(ids[token] for pair in _ENDING_PAIRS if all(one in ids for one in pair) for token in pair)


def added_token(content: str, token_id: int, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": special, **flags}


def _byte_level(metadata: Mapping[str, Any], vocab: Mapping[str, int], named: Mapping[str, int]) -> dict[str, Any]:
    name = metadata.get(_KEY + "pre", "default")
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise UnsupportedModel(
            f"{_KEY}pre = {_short(name)} is not one of {known}; use the model's safetensors: they come with it"
        )
    merges = [merge.partition(" ")[::2] for merge in _strings(metadata, "merges", MAX_MERGES)]
    cuts: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if pre.digits else []
    cuts += [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} for regex in pre.splits
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not pre.splits}
    return {
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, byte_level]},
        "post_processor": _bos_eos(metadata, named, bos_by_default=pre.add_bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(vocab, merges, ignore_merges=pre.ignore_merges),
    }


def _sentencepiece(
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    vocab: Mapping[str, int],
    types: Sequence[TokenType],
    named: Mapping[str, int],
) -> dict[str, Any]:
    scores = _list(metadata, "scores", MAX_VOCAB)
    _require(len(scores) == len(tokens), f"{_KEY}scores has {len(scores)} entries, {_KEY}tokens {len(tokens)}")
    for i, score in enumerate(scores):
        if not isinstance(score, int | float) or score != score:
            raise ModelFileError(f"{_KEY}scores[{i}] = {_short(score)} is not a number")
    pieces = {token for token, kind in zip(tokens, types, strict=True) if token and kind in (1, 4, 5)}
    prefix = _flag(metadata, "add_space_prefix", True)
    # The space is prepended to every text between two control tokens, as in llama.cpp.
    normalizers: list[dict[str, Any]] = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = named.get("unk")
    model = _bpe(vocab, _merges_from_scores(pieces, vocab, scores), ignore_merges=False)
    model |= {"unk_token": tokens[unknown] if unknown is not None else None, "fuse_unk": True, "byte_fallback": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": _bos_eos(metadata, named, bos_by_default=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _merges_from_scores(pieces: set[str], vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Ranked merges that are equivalent to the scores: SentencePiece joins the neighbours whose piece scores best.

    Two splits of the same piece have the same score. They are ordered by the ids of their left halves, as in common
    converters, because the order decides which of two overlapping pairs is merged.
    """
    steps = sum(len(piece) ** 2 for piece in pieces)
    problem = f"{_KEY}tokens are too long for a SentencePiece model: {steps = } exceeds {MAX_CUT_STEPS = }"
    _require(steps <= MAX_CUT_STEPS, problem)
    found: list[tuple[float, int, int, str, str]] = []
    num_chars = 0
    for piece in pieces:
        score, num_before = -scores[vocab[piece]], len(found)
        for cut in range(1, len(piece)):
            left = piece[:cut]
            if left in pieces:
                right = piece[cut:]
                if right in pieces:
                    found.append((score, vocab[left], vocab[right], left, right))
        num_chars += (len(found) - num_before) * len(piece)
        if num_chars > MAX_MERGE_CHARS or len(found) > MAX_MERGES:
            raise ModelFileError(
                f"{_KEY}tokens can be split in too many ways for a SentencePiece model: more than {MAX_MERGES} merges,"
                f" or {MAX_MERGE_CHARS} characters of them"
            )
    found.sort()
    return [(left, right) for *_, left, right in found]


def _bpe(vocab: Mapping[str, int], merges: list[tuple[str, str]], *, ignore_merges: bool) -> dict[str, Any]:
    return {"type": "BPE", "vocab": dict(vocab), "merges": merges, "ignore_merges": ignore_merges}


def _bos_eos(metadata: Mapping[str, Any], named: Mapping[str, int], *, bos_by_default: bool) -> dict[str, Any] | None:
    """The post-processor that adds BOS and EOS to an encoded text."""
    before = "bos" in named and _flag(metadata, "add_bos_token", bos_by_default)
    after = "eos" in named and _flag(metadata, "add_eos_token", False)
    return framing(named, ["bos"] * before, ["eos"] * after) if before or after else None


def framing(named: Mapping[str, int], before: Sequence[str], after: Sequence[str] = ()) -> dict[str, Any]:
    """A post-processor that adds named tokens before and after a text."""
    first, last = ([{"SpecialToken": {"id": name, "type_id": 0}} for name in names] for names in (before, after))
    single: list[dict[str, Any]] = [*first, {"Sequence": {"id": "A", "type_id": 0}}, *last]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {name: {"id": name, "ids": [named[name]], "tokens": [name]} for name in (*before, *after)},
    }


def _named_ids(metadata: Mapping[str, Any], num_tokens: int) -> dict[str, int]:
    keys = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding"}
    named = {}
    for name, key in keys.items():
        value = metadata.get(f"{_KEY}{key}_token_id")
        if value in (None, -1, 0xFFFFFFFF):  # the last two are written by converters for "none"
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_tokens:
            problem = f"is outside the vocabulary of {num_tokens}"
            raise ModelFileError(f"{_KEY}{key}_token_id = {_short(value)} {problem}")
        named[name] = value
    return named


def _types(metadata: Mapping[str, Any], num_tokens: int) -> list[TokenType]:
    if _KEY + "token_type" not in metadata:
        return [TokenType.NORMAL] * num_tokens
    values = _list(metadata, "token_type", MAX_VOCAB)
    _require(len(values) == num_tokens, f"{_KEY}token_type has {len(values)} entries, {_KEY}tokens {num_tokens}")
    known: dict[Any, TokenType] = {kind.value: kind for kind in TokenType}
    wrong = next((i for i, value in enumerate(values) if not isinstance(value, int) or value not in known), None)
    if wrong is not None:
        raise ModelFileError(f"{_KEY}token_type[{wrong}] = {_short(values[wrong])} is not one of {[*known]}")
    return [known[value] for value in values]


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(_KEY + name, default)
    if not isinstance(value, bool):
        raise ModelFileError(f"{_KEY}{name} = {_short(value)} is not a bool")
    return value


def _strings(metadata: Mapping[str, Any], name: str, limit: int) -> list[str]:
    values = _list(metadata, name, limit)
    for i, value in enumerate(values):
        if not isinstance(value, str):
            raise ModelFileError(f"{_KEY}{name}[{i}] = {_short(value)} is not a string")
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ModelFileError(f"{_KEY}{name}[{i}] = {_short(value)} is not valid text") from None
    return values


def _list(metadata: Mapping[str, Any], name: str, limit: int) -> list[Any]:
    values: Any = metadata.get(_KEY + name)
    if not isinstance(values, list | tuple):
        raise ModelFileError(f"{_KEY}{name} is {'missing' if values is None else _short(values) + ', not an array'}")
    _require(len(values) <= limit, f"{_KEY}{name} has {len(values)} entries, more than {limit}")
    return list(values)


def _require(is_right: bool, problem: str) -> None:
    if not is_right:
        raise ModelFileError(problem)


def _short(value: object) -> str:
    """A shortened value for an error message: a malicious file must not write megabytes into a log."""
    if isinstance(value, str):
        return repr(value[:80])
    return repr(value) if isinstance(value, int | float | None) else f"a {type(value).__name__}"


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
    num_bytes = len(tokenizer_json)
    _require(num_bytes <= MAX_JSON_BYTES, f"tokenizer.json has {num_bytes} bytes, more than {MAX_JSON_BYTES}")
    count = sum(map(tokenizer_json.count, (b"[", b"{", b",")))  # one before each value
    _require(count <= MAX_JSON_VALUES, f"tokenizer.json has {count} values, more than {MAX_JSON_VALUES}")
    try:
        spec = json.loads(tokenizer_json)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"tokenizer.json is not JSON: {str(error)[:200]}") from None
    if not isinstance(spec, dict):
        raise ModelFileError(f"tokenizer.json holds a {type(spec).__name__}, not an object")
    added = spec.setdefault("added_tokens", [])
    is_right = isinstance(added, list) and all(isinstance(token, dict) for token in added)
    _require(is_right, "tokenizer.json: added_tokens is not a list of objects")
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
    problem = f"tokenizer.json: model.merges has {len(merges)} entries, more than {MAX_MERGES}"
    _require(len(merges) <= MAX_MERGES, problem)
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
    is_right = isinstance(parts, list) and all(isinstance(part, dict) for part in parts)
    _require(is_right, "tokenizer.json: decoder.decoders is not a list of objects")
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

# Parts of these kinds are not counted when they occur first: they lengthen few texts.
_ONCE = {**dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD"), "form"), "ByteLevel": "bytes"}
# The number of characters that a part may make of one.
_GROWTHS = {
    "NFC": 4,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "ByteLevel": 4,
    "Metaspace": 2,
    "Lowercase": 3,
    "BertNormalizer": 3,
}
_LINEAR = {
    "normalizer": frozenset(
        ("NFC", "NFD", "Lowercase", "Strip", "StripAccents", "Nmt", "ByteLevel", "Prepend", "Replace")
    ),
    "pre_tokenizer": frozenset(
        (
            *("ByteLevel", "Metaspace", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "BertPreTokenizer"),
            *("CharDelimiterSplit", "UnicodeScripts", "Split"),
        )
    ),
    "post_processor": frozenset(("TemplateProcessing", "ByteLevel", "RobertaProcessing", "BertProcessing")),
}
_LISTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}


def is_safe(spec: Mapping[str, Any]) -> bool:
    """Whether the server may run a tokenizer in its own process. Raises ModelFileError if no process may.

    It may if all parts are in the tables, so that their time is in proportion to the text, and lengthen a text little.
    """
    growth, is_linear = 1, True
    seen: set[str] = set()
    for field in _LISTS:
        for name, part in _parts(spec.get(field), field):
            kind = str(part.get("type"))
            is_linear &= kind in _LINEAR[field] and _has_known_pattern(part)
            if field == "post_processor":
                if not {"single", "pair", "special_tokens"}.isdisjoint(part):
                    _check_frame(part, name)
            elif kind in _ONCE and _ONCE[kind] not in seen:
                seen.add(_ONCE[kind])
                growth *= 2 if part.get("add_prefix_space") is True else 1
            else:
                growth *= _growth(part, kind)
            if growth > MAX_GROWTH:
                raise ModelFileError(
                    f"tokenizer.json: {name} of type {kind[:40]!r}: one character may become {growth} characters,"
                    f" more than {MAX_GROWTH}"
                )
    return is_linear and growth <= INLINE_GROWTH


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
        _require(isinstance(members, list), f"tokenizer.json: {name}.{_LISTS[field]} is not a list")
        _require(found + len(members) <= MAX_PARTS, f"tokenizer.json: {field} has more than {MAX_PARTS} parts")
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


def _growth(part: Mapping[str, Any], kind: str) -> int:
    """The number of characters that a part may make of one."""
    if kind == "Replace" or "content" in part:  # the library knows parts without a type by their fields
        pattern, content = part.get("pattern"), part.get("content")
        text = pattern.get("String") if isinstance(pattern, Mapping) else None
        if text and isinstance(text, str):
            return max(1, -(-_size(content) // len(text)))
        return 1 + _size(content)  # of a regular expression, which may match nothing before each character
    if kind == "Prepend" or "prepend" in part:  # before every text between two added tokens, which may be short
        return 1 + _size(part.get("prepend"))
    return _GROWTHS.get(kind, 1)


def _check_frame(part: Mapping[str, Any], name: str) -> None:
    """Refuse a template that adds many tokens to a text, or repeats the text."""
    name = f"tokenizer.json: {name}"
    for field in ("single", "pair"):  # quire encodes no pairs, but the library builds the template
        pieces = part.get(field)
        if not isinstance(pieces, list) or not all(isinstance(piece, Mapping) for piece in pieces):
            raise ModelFileError(f"{name}.{field} is not a list of objects")
        _require(len(pieces) <= MAX_FRAME_IDS, f"{name}.{field} has {len(pieces)} pieces, more than {MAX_FRAME_IDS}")
    texts = [piece["Sequence"] for piece in part["single"] if "Sequence" in piece]
    if len(texts) != 1 or not isinstance(texts[0], Mapping) or texts[0].get("id") != "A":
        raise ModelFileError(f"{name}.single has the texts {str(texts)[:60]}, not one of id 'A'")
    tokens = part.get("special_tokens")
    if not isinstance(tokens, Mapping) or not all(isinstance(token, Mapping) for token in tokens.values()):
        raise ModelFileError(f"{name}.special_tokens is not an object of objects")
    num_ids = sum(max(_size(token.get("ids")), _size(token.get("tokens"))) for token in tokens.values())
    _require(num_ids <= MAX_FRAME_IDS, f"{name}.special_tokens has {num_ids} ids, more than {MAX_FRAME_IDS}")


def check_added(contents: Sequence[str]) -> None:
    """Refuse added tokens that would fill tables in memory."""
    num_added = len(contents)
    _require(num_added <= MAX_ADDED, f"tokenizer.json: added_tokens has {num_added} entries, more than {MAX_ADDED}")
    squares = sum(len(content) ** 2 for content in contents)
    _require(
        squares <= MAX_ADDED_SQUARES,
        f"tokenizer.json: added_tokens are too long: the sum of their squared lengths is {squares}, more than"
        f" {MAX_ADDED_SQUARES}",
    )


def _size(value: object) -> int:
    return len(value) if isinstance(value, str | list) else 0
