"""Converts a GGUF file's vocabulary to the structure of tokenizer.json, so that one code path builds both.

A GGUF file does not contain its pre-tokenizer, only its name in `tokenizer.ggml.pre`. PRE_TOKENIZERS maps these names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    if not tokens:
        raise ModelFileError(f"{_KEY}tokens is empty")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(i for i, token in enumerate(tokens) if vocab[token] != i)
        raise ModelFileError(f"{_KEY}tokens[{twice}] = {_short(tokens[twice])} occurs twice")
    types = _types(metadata, len(tokens))
    named = _named_ids(metadata, len(tokens))
    spec = _byte_level(metadata, vocab) if kind == "gpt2" else _sentencepiece(metadata, tokens, vocab, types, named)
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


def _byte_level(metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> dict[str, Any]:
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
        "post_processor": _bos_eos(metadata, vocab, bos_by_default=pre.add_bos),
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
    if len(scores) != len(tokens):
        raise ModelFileError(f"{_KEY}scores has {len(scores)} entries, {_KEY}tokens {len(tokens)}")
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
        "post_processor": _bos_eos(metadata, vocab, bos_by_default=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _merges_from_scores(pieces: set[str], vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Ranked merges that are equivalent to the scores: SentencePiece joins the neighbours whose piece scores best.

    Two splits of the same piece have the same score. They are ordered by the ids of their left halves, as in common
    converters, because the order decides which of two overlapping pairs is merged.
    """
    steps = sum(len(piece) ** 2 for piece in pieces)
    if steps > MAX_CUT_STEPS:
        raise ModelFileError(
            f"{_KEY}tokens are too long for a SentencePiece model: {steps = } exceeds {MAX_CUT_STEPS = }"
        )
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


def _bos_eos(metadata: Mapping[str, Any], vocab: Mapping[str, int], *, bos_by_default: bool) -> dict[str, Any] | None:
    """The post-processor that adds BOS and EOS to an encoded text."""
    named = _named_ids(metadata, len(vocab))
    before = "bos" in named and _flag(metadata, "add_bos_token", bos_by_default)
    after = "eos" in named and _flag(metadata, "add_eos_token", False)
    if not before and not after:
        return None

    def special(name: str) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": 0}}

    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    single = [special("bos")] * before + single + [special("eos")] * after
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            name: {"id": name, "ids": [named[name]], "tokens": [name]} for name in ("bos", "eos") if name in named
        },
    }


def _named_ids(metadata: Mapping[str, Any], num_tokens: int) -> dict[str, int]:
    keys = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding"}
    named = {}
    for name, key in keys.items():
        value = metadata.get(f"{_KEY}{key}_token_id")
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelFileError(f"{_KEY}{key}_token_id = {_short(value)} is not an int")
        if 0 <= value < num_tokens:
            named[name] = value
        elif value not in (-1, 0xFFFFFFFF):  # written by converters for "none"
            raise ModelFileError(f"{_KEY}{key}_token_id = {value} is outside the vocabulary of {num_tokens}")
    return named


def _types(metadata: Mapping[str, Any], num_tokens: int) -> list[TokenType]:
    if _KEY + "token_type" not in metadata:
        return [TokenType.NORMAL] * num_tokens
    values = _list(metadata, "token_type", MAX_VOCAB)
    if len(values) != num_tokens:
        raise ModelFileError(f"{_KEY}token_type has {len(values)} entries, {_KEY}tokens {num_tokens}")
    known: dict[Any, TokenType] = {kind.value: kind for kind in TokenType}
    types = []
    for i, value in enumerate(values):
        kind = known.get(value) if isinstance(value, int) else None
        if kind is None:
            raise ModelFileError(f"{_KEY}token_type[{i}] = {_short(value)} is not one of {[*known]}")
        types.append(kind)
    return types


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
    """The array of that name as a list of plain values (readers return lists or numpy arrays)."""
    values: Any = metadata.get(_KEY + name)
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise ModelFileError(f"{_KEY}{name} is {'missing' if values is None else _short(values) + ', not an array'}")
    if len(values) > limit:
        raise ModelFileError(f"{_KEY}{name} has {len(values)} entries, more than {limit}")
    return list(values)


def _short(value: object) -> str:
    """A shortened value for an error message: a malicious file must not write megabytes into a log."""
    if isinstance(value, str):
        return repr(value[:80])
    return repr(value) if isinstance(value, int | float | None) else f"a {type(value).__name__}"
