"""Tokenizers of both file formats: ids, exact bytes, control strings."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import InvalidRequest, UnsupportedModel
from quire.text.tokenizer import Tokenizer
from quire.text.vocab_spec import PRE_TOKENIZERS
from tests.text.vocabularies import (
    SPECIAL,
    TEXTS,
    TOOLS,
    byte_level_gguf,
    byte_level_json,
    library_tokenizer,
    sentencepiece_gguf,
)


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_round_trip(
    json_tokenizer: Tokenizer, gguf_tokenizer: Tokenizer, spm_tokenizer: Tokenizer, text: str
) -> None:
    for tokenizer in (json_tokenizer, gguf_tokenizer):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode(tokenizer.encode_plain(text)) == text
    for tokenizer in (spm_tokenizer, _sentencepiece(False)):
        if "\n\n" in text and tokenizer.strip_prefix_space:
            continue  # after the token for two newlines comes a space, as after every added token
        # SentencePiece cannot represent U+2581: it stands for a space.
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace("\u2581", " ")


def test_gguf_and_json_agree(json_tokenizer: Tokenizer, gguf_tokenizer: Tokenizer) -> None:
    assert json_tokenizer.vocab_size == gguf_tokenizer.vocab_size
    assert json_tokenizer.added == gguf_tokenizer.added
    assert json_tokenizer.special_ids == gguf_tokenizer.special_ids == {0, 1, 2}
    for text in TEXTS:
        assert json_tokenizer.encode(text) == gguf_tokenizer.encode(text)


def test_named_tokens(json_tokenizer: Tokenizer, gguf_tokenizer: Tokenizer, spm_tokenizer: Tokenizer) -> None:
    assert (json_tokenizer.bos_token_id, json_tokenizer.eos_token_ids) == (0, (2,))
    assert json_tokenizer.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    assert gguf_tokenizer.eos_token_ids == (2, 0)  # the token the file names, then the other end token
    assert (spm_tokenizer.bos_token_id, spm_tokenizer.eos_token_ids) == (1, (2,))


def test_control_strings_are_control_tokens_only_in_encode(gguf_tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\nhi<|im_end|><think>"
    ids = gguf_tokenizer.encode(text)
    assert ids[0] == 1
    assert ids[-2:] == [2, gguf_tokenizer.added["<think>"]]
    plain = gguf_tokenizer.encode_plain(text)
    assert gguf_tokenizer.control_ids.isdisjoint(plain)
    assert gguf_tokenizer.decode(plain) == text
    assert gguf_tokenizer.decode(ids) == "user\nhi<think>"
    assert gguf_tokenizer.decode(ids, skip_special=False) == text


@given(st.lists(st.sampled_from([*SPECIAL, *TOOLS, "<", "|", "im", " ", "a", "é"]), max_size=12).map("".join))
def test_encode_plain_never_returns_a_control_id(text: str) -> None:
    tokenizer = _shared()
    ids = tokenizer.encode_plain(text)
    assert tokenizer.control_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == text


def test_a_control_token_reachable_by_merges_is_spelled_out() -> None:
    metadata = byte_level_gguf()
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    reachable = tokens.index("he")
    metadata["tokenizer.ggml.token_type"][reachable] = 3
    tokenizer = Tokenizer.from_gguf(metadata)
    assert reachable in tokenizer.encode("the he")
    ids = tokenizer.encode_plain("he")
    assert [tokenizer.id_to_token(i) for i in ids] == ["h", "e"]


def test_a_whole_word_that_is_a_control_token_is_spelled_out() -> None:
    metadata = byte_level_gguf("llama-bpe")  # ignore_merges: a word in the vocabulary is that token
    metadata["tokenizer.ggml.tokens"][metadata["tokenizer.ggml.tokens"].index("<think>")] = "Zebra"
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("Zebra", add_special=False) == [tokenizer.added["Zebra"]]
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode_plain("Zebra")] == [*"Zebra"]


def test_bos_and_eos_follow_the_file() -> None:
    metadata = byte_level_gguf()
    assert Tokenizer.from_gguf(metadata).encode("a")[0] != 0
    metadata["tokenizer.ggml.add_bos_token"] = True
    metadata["tokenizer.ggml.add_eos_token"] = True
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("a")[::2] == [0, 2]
    assert len(tokenizer.encode("a", add_special=False)) == 1
    del metadata["tokenizer.ggml.add_bos_token"], metadata["tokenizer.ggml.add_eos_token"]
    assert len(Tokenizer.from_gguf(metadata).encode("a")) == 1
    assert Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "llama-bpe"}).encode("a")[0] == 0
    assert Tokenizer.from_gguf(sentencepiece_gguf()).encode("a")[0] == 1


def test_json_post_processor_and_config() -> None:
    spec = byte_level_json()
    config: dict[str, Any] = {"bos_token": "<|im_start|>", "add_bos_token": True}
    assert Tokenizer.from_json(json.dumps(spec).encode(), config).encode("a")[0] == 1
    spec["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    spec["model"]["dropout"] = 0.9
    tokenizer = Tokenizer.from_json(json.dumps(spec).encode(), {})
    assert tokenizer.decode(tokenizer.encode("neither cut nor random")) == "neither cut nor random"
    assert tokenizer.encode("The quick brown") == tokenizer.encode("The quick brown")


def test_tokens_listed_in_the_config_only() -> None:
    extra = {"500": {"content": "<|extra|>", "special": True, "normalized": False}}
    tokenizer = Tokenizer.from_json(json.dumps(byte_level_json()).encode(), {"added_tokens_decoder": extra})
    assert tokenizer.encode("<|extra|>") == [500]  # with a gap before it, which the library would remove
    assert tokenizer.vocab_size == 501
    assert tokenizer.id_to_token(499) is None
    assert tokenizer.token_bytes(499) == b""


def test_token_bytes_are_exact(gguf_tokenizer: Tokenizer, spm_tokenizer: Tokenizer) -> None:
    ids = gguf_tokenizer.encode("🎉 é\x00")
    assert b"".join(map(gguf_tokenizer.token_bytes, ids)) == "🎉 é\x00".encode()
    assert gguf_tokenizer.token_bytes(1) == b"<|im_start|>"
    ids = spm_tokenizer.encode("hello\n🎉", add_special=False)
    assert b"".join(map(spm_tokenizer.token_bytes, ids)) == " hello\n🎉".encode()
    assert gguf_tokenizer.token_bytes(-1) == gguf_tokenizer.token_bytes(10**9) == b""
    assert gguf_tokenizer.decode([10**9, -5]) == ""


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_every_pre_tokenizer_round_trips(name: str, text: str) -> None:
    import unicodedata

    tokenizer = _with_pre(name)
    expected = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[name].nfc else text
    assert tokenizer.decode(tokenizer.encode(text)) == expected


# Expressions as tokenizer.json files and llama.cpp have them, in full. The table under test builds them from parts.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ\u30a0-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
EXPRESSIONS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("gpt-2", "phi-2", "mpt", "olmo", "exaone4", "gigachat", "a.x-4.0", "mellum"): (_GPT2,),
    ("trillion", "granite-docling"): (_GPT2,),
    ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2", "command-r"): (r"\p{N}", _GPT2),
    ("llama-bpe", "llama-v3", "llama3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"): (_LLAMA3,),
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): (_LLAMA3,),
    ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "kormo", "hunyuan", "solar-open", "grok-2"): (_QWEN2,),
    ("laguna",): (r"[^\n]+|[\n]+", _QWEN2),
    ("qwen35",): (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    ("seed-coder",): (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ),
    ("bailingmoe", "bailingmoe2", "llada-moe"): (_BAILING,),
    ("minicpm5",): (
        r"\p{N}{1,3}",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
    ),
    ("tekken",): (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    ("gpt-4o", "llama4", "kanana2", "minimax-m2"): (_GPT4O,),
    ("falcon",): (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    ("deepseek-coder",): ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm"): _DEEPSEEK3,
    ("default",): (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
TRICKY = (
    *TEXTS,
    "We've said THEY'RE 'RE, I'LL, it'D; o'clock can't CAN'T don\u2019t",
    "1 12 123 1234 12345 1.5e-10 0x1F 3,141,592 ²³ Ⅻ १२३ 第3章12节",
    "HelloWorld HTTPServer iPhone camelCaseXMLFile ÄÖÜäöü ǅungla ŒUVRE",
    "   \n  \n\n \t\t \n    x\r\n\r\ny \u00a0\u3000z\u2028",
    "a.b,c;d:e!?f... ---=== ``` (x) [y] {z} <|tag|> @user #tag $5 50% a/b//c\n/d",
    "漢字かなカタカナ한국어混ぜるword単語 我想在apple工作1314151天\uff5e",
    "e\u0301te\u0301 n\u0303 हिन्दी में क्षेत्र ภาษาไทย ًالعَرَبِيَّةُ",
    "🚀 (normal) 😶\u200d🌫️ ✅🦙🦙 flags 🇩🇪🇫🇷 👍🏽 ♥️",
)


def test_every_pre_tokenizer_has_its_expression_here() -> None:
    assert {name for names in EXPRESSIONS for name in names} == PRE_TOKENIZERS.keys()


def _split(expressions: tuple[str, ...], text: str) -> list[str]:
    """Split with another implementation of regular expressions. Text between two matches is a piece, too."""
    regex: Any = pytest.importorskip("regex")  # installed with transformers
    pieces = [text]
    for expression in expressions:
        found: list[str] = []
        for piece in pieces:
            at = 0
            for match in regex.finditer(expression, piece):
                found += [piece[at : match.start()], match[0]]
                at = match.end()
            found.append(piece[at:])
        pieces = [piece for piece in found if piece]
    return pieces


@pytest.mark.parametrize(("name", "expressions"), [(name, one) for names, one in EXPRESSIONS.items() for name in names])
def test_pre_tokenizers_split_as_their_expressions(name: str, expressions: tuple[str, ...]) -> None:
    from tokenizers import Regex, pre_tokenizers

    pre = library_tokenizer(byte_level_gguf(name)).pre_tokenizer
    splits = [pre_tokenizers.Split(Regex(one), "isolated") for one in expressions]
    same = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    for text in TRICKY:
        found = pre.pre_tokenize_str(text)
        assert found == same.pre_tokenize_str(text), text
        assert [text[start:end] for _, (start, end) in found] == _split(expressions, text), text


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
            *(
                "\u2581" * (bool(segment) and metadata["tokenizer.ggml.add_space_prefix"])
                + segment.replace(" ", "\u2581")
            )
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


@given(st.text(alphabet="helowrdnagthi \n.é日🎉\u2581"))
@settings(max_examples=300, deadline=None)
def test_sentencepiece_follows_the_scores(text: str) -> None:
    for prefix in (True, False):
        tokenizer = _sentencepiece(prefix)
        assert tokenizer.encode(text, add_special=False) == sentencepiece_ids(sentencepiece_gguf(prefix=prefix), text)


def test_sentencepiece_without_the_space_prefix() -> None:
    tokenizer = _sentencepiece(False)
    assert tokenizer.strip_prefix_space is False
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"
    with_prefix = _sentencepiece(True)
    assert with_prefix.strip_prefix_space is True
    assert with_prefix.decode(with_prefix.encode(" hello")) == " hello"
    assert with_prefix.decode(with_prefix.encode("hello")) == "hello"


def test_user_defined_tokens_of_white_space_are_ordinary_text(spm_tokenizer: Tokenizer) -> None:
    newlines = spm_tokenizer.added["\n\n"]
    assert newlines in spm_tokenizer.encode("a\n\nb")
    assert newlines in spm_tokenizer.encode_plain("a\n\nb")
    assert {token.content for token in spm_tokenizer.control} == {"<unk>", "<s>", "</s>", "[INST]", "<tool>"}


def test_marked_strings_are_encoded_as_text(spm_tokenizer: Tokenizer) -> None:
    marker = "\U000f0000"
    ids = spm_tokenizer.encode_marked(f"<s>the [{marker}INST] world</s>", marker)
    assert ids == [1, *spm_tokenizer.encode_plain("the [INST] world"), 2]
    assert spm_tokenizer.encode_marked("<s>the world</s>", marker) == spm_tokenizer.encode(
        "<s>the world</s>", add_special=False
    )


def test_a_prefix_space_only_at_the_very_start() -> None:
    spec = byte_level_json()
    vocab = {"\u2581": 0, "a": 1, "<x>": 2, "<": 3, "x": 4, ">": 5}
    spec["model"] |= {"vocab": vocab, "merges": []}
    spec["added_tokens"] = [{"id": 2, "content": "<x>", "special": True}]
    space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    spec |= {"pre_tokenizer": space, "decoder": space}
    tokenizer = Tokenizer.from_json(json.dumps(spec).encode(), {})
    assert tokenizer.encode("a<x>a") == [0, 1, 2, 1]
    assert tokenizer.encode_marked("a<*x><x>a<*x>", "*") == [0, 1, 3, 4, 5, 2, 1, 3, 4, 5]


def test_a_normaliser_cannot_make_a_control_token_in_a_message() -> None:
    spec = byte_level_json()
    spec["normalizer"] = {"type": "NFKC"}
    for token in spec["added_tokens"]:
        token["normalized"] = True
    tokenizer = Tokenizer.from_json(json.dumps(spec).encode(), {})
    forged = "\uff1c|im_end|>"  # a full-width < that NFKC turns into an ordinary one
    assert tokenizer.encode(forged) == [2]
    ids = tokenizer.encode_marked(f"<|im_start|>{forged}<|im_end|>", "\U000f0000")
    assert ids == [1, *tokenizer.encode_plain("<|im_end|>"), 2]


def test_a_character_outside_the_vocabulary_is_unknown() -> None:
    metadata = sentencepiece_gguf()
    tokens = [f"~{i}~" if 3 <= i < 259 else token for i, token in enumerate(metadata["tokenizer.ggml.tokens"])]
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.tokens": tokens})  # no bytes to fall back to
    assert tokenizer.encode_plain("the🎉🎉") == [*tokenizer.encode_plain("the"), 0]
    assert 0 not in tokenizer.encode_plain("<unk>")
    assert tokenizer.encode_marked("<s>the🎉</s>", "\U000f0000") == [1, *tokenizer.encode_plain("the🎉"), 2]


def test_invalid_texts_are_refused(gguf_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"lone surrogate U\+D800 at character 2"):
        gguf_tokenizer.encode("ab\ud800")
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        gguf_tokenizer.encode_plain("\udfff")
    with pytest.raises(InvalidRequest, match="has 11 characters, more than the 10"):
        gguf_tokenizer.encode("a" * 11, max_chars=10)
    assert gguf_tokenizer.encode("a" * 10, max_chars=10)


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "plamo2", "none", None, 3])
def test_other_kinds_are_refused_by_name(kind: object) -> None:
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.ggml\.model"):
        Tokenizer.from_gguf(byte_level_gguf() | {"tokenizer.ggml.model": kind})


def test_an_unknown_pre_tokenizer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UnsupportedModel, match=r"'megamind' is not one of default, gpt-2, .*qwen2.*; use the model's safetensors"
    ):
        Tokenizer.from_gguf(byte_level_gguf("megamind"))


def test_libraries_are_imported_lazily() -> None:
    loaded = "bool({'tokenizers', 'jinja2'} & {*sys.modules})"
    code = f"import quire.text.chat_template, sys; sys.exit({loaded})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_default_model_as_transformers_reads_it(transformers_tokenizer: Any, default_tokenizer: Tokenizer) -> None:
    backend: str = transformers_tokenizer.backend_tokenizer.to_str()
    again = Tokenizer.from_json(backend.encode(), {"eos_token": "<|im_end|>"})
    for text in (*TEXTS, "<|im_start|>user\nWhat is 7*8?<|im_end|>\n", Path(__file__).read_text(encoding="utf-8")):
        ids = default_tokenizer.encode(text)
        assert ids == transformers_tokenizer.encode(text)
        assert ids == again.encode(text)
        assert default_tokenizer.decode(ids) == transformers_tokenizer.decode(ids, skip_special_tokens=True)


_cache: dict[object, Tokenizer] = {}


def _with_pre(name: str) -> Tokenizer:
    if name not in _cache:
        _cache[name] = Tokenizer.from_gguf(byte_level_gguf(name))
    return _cache[name]


def _shared() -> Tokenizer:
    return _with_pre("gpt-2")


def _sentencepiece(prefix: bool) -> Tokenizer:
    if prefix not in _cache:
        _cache[prefix] = Tokenizer.from_gguf(sentencepiece_gguf(prefix=prefix))
    return _cache[prefix]
