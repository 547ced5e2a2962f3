"""Hostile tokenizers and vocabularies are refused, or run in a child process within limits."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from quire.errors import ContextTooLong, InvalidRequest, ModelFileError
from quire.text import tokenizer as encoder
from quire.text import vocab_spec
from quire.text.chat_template import ChatTemplate
from quire.text.messages import ChatRequest, Message, Part, Role
from quire.text.tokenizer import MAX_DECODED_BYTES, Tokenizer
from quire.text.vocab_spec import PRE_TOKENIZERS
from tests.text.vocabularies import TEXTS, byte_level_gguf, byte_level_json, sentencepiece_gguf
from tests.waiting import eventually

Edit = Callable[[dict[str, Any]], object]
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def normalized(*parts: dict[str, Any]) -> Edit:
    return lambda spec: spec.update(normalizer={"type": "Sequence", "normalizers": list(parts)})


def cut(*parts: dict[str, Any]) -> Edit:
    return lambda spec: spec.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [*parts, BYTES]})


def framed(num_pieces: int, num_ids: int, num_texts: int = 1, kind: str = "TemplateProcessing") -> Edit:
    pieces = [{"SpecialToken": {"id": "x", "type_id": 0}}] * num_pieces
    pieces += [{"Sequence": {"id": "A", "type_id": 0}}] * num_texts
    names = {"x": {"id": "x", "ids": [1] * num_ids, "tokens": ["x"] * num_ids}}
    pair = [*pieces, {"Sequence": {"id": "B", "type_id": 1}}]
    frame = {"type": kind, "single": pieces, "pair": pair, "special_tokens": names}
    return lambda spec: spec.update(post_processor=frame)


def added(contents: list[str]) -> Edit:
    return lambda spec: spec["added_tokens"].extend(
        {"id": 1000 + i, "content": content, "special": True} for i, content in enumerate(contents)
    )


def opened(edit: Edit) -> Tokenizer:
    spec = byte_level_json()
    edit(spec)
    return Tokenizer.from_json(json.dumps(spec).encode(), {})


# Refused by their description alone: the library is not called.
REFUSED: dict[str, tuple[Edit, str]] = {
    "two normalizers of 1000": (
        normalized(replace("a", "a" * 1000), replace("a", "a" * 1000)),
        "normalizer.normalizers[0] of type 'Replace': one character may become 1000 characters, more than 32",
    ),
    "six normalizers of 2": (normalized(*[replace("a", "aa")] * 6), "normalizers[5] of type 'Replace'"),
    "nested sequences": (
        normalized({"type": "Sequence", "normalizers": [replace("a", "aaaaaa")] * 2}),
        "normalizer.normalizers[0].normalizers[1] of type 'Replace': one character may become 36",
    ),
    "an expression before every character": (normalized(replace("x*", "a" * 40, "Regex")), "may become 41"),
    "a prefix of every text": (normalized({"type": "Prepend", "prepend": "a" * 40}), "may become 41"),
    "normal forms in turn": (
        normalized(*[{"type": "NFKD"}, replace("\u0644", "\ufdfa")] * 3),
        "normalizers[4] of type 'NFKD'",
    ),
    "bytes of bytes": (cut(*[BYTES] * 20), "pre_tokenizer.pretokenizers[3] of type 'ByteLevel'"),
    "many normalizers": (normalized(*[{"type": "NFC"}] * 1000), "normalizer has more than 32 parts"),
    "deep sequences": (
        lambda spec: spec.update(normalizer=json.loads('{"type": "Sequence", "normalizers": [' * 90 + "]}" * 90)),
        "normalizer has more than 32 parts",
    ),
    "20,000 x 500 ids": (framed(20_000, 500), "post_processor.single has 20001 pieces, more than 64"),
    "60 x 500 ids": (framed(60, 500), "post_processor.special_tokens has 500 ids, more than 64"),
    "the text again and again": (framed(1, 1, num_texts=50), "post_processor.single has the texts [{'id': 'A'"),
    "a template of text": (
        lambda spec: spec.update(post_processor={"type": "TemplateProcessing", "single": "$A", "pair": "$A $B"}),
        "post_processor.single is not a list of objects",
    ),
    # The library reads these as if they were written in the usual way.
    "a template of another type": (framed(20_000, 500, kind="ByteLevel"), "post_processor.single has 20001 pieces"),
    "a template of type Sequence": (framed(20_000, 500, kind="Sequence"), "post_processor.single has 20001 pieces"),
    "a Sequence that repeats the text": (
        framed(1, 1, num_texts=50, kind="Sequence"),
        "post_processor.single has the texts [{'id': 'A'",
    ),
    "a normalizer without a type": (
        normalized({"pattern": {"String": "a"}, "content": "a" * 1000}),
        "of type 'None': one character may become 1000 characters",
    ),
    "a prefix of another type": (normalized({"type": "Nonsense", "prepend": "a" * 40}), "may become 41"),
    "a sequence as a list": (
        lambda spec: spec.update(normalizer=[[replace("a", "a" * 1000)] * 2]),
        "normalizer is a list, not an object",
    ),
    "a special token as a list": (
        lambda spec: (framed(1, 1)(spec), spec["post_processor"]["special_tokens"].update(x=["x", [1] * 500, ["x"]])),
        "post_processor.special_tokens is not an object of objects",
    ),
    "the second of one text": (
        lambda spec: (framed(1, 1)(spec), spec["post_processor"]["single"][-1]["Sequence"].update(id="B")),
        "post_processor.single has the texts [{'id': 'B', 'type_id': 0}], not one of id 'A'",
    ),
    "a long added token": (added(["<" + "x" * 5000 + ">"]), "has 5002 characters: more than 1024"),
    "long added tokens": (added([f"<{i}{'x' * 1000}>" for i in range(20)]), "sum of their squared lengths is"),
    "many added tokens": (added([f"<{i}>" for i in range(70_000)]), "added_tokens has 70006 entries, more than 65536"),
    "a long token": (lambda spec: spec["model"]["vocab"].update({"x" * 5000: 390}), "has 5000 characters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_description_is_refused_before_the_library_reads_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edit, message = REFUSED[name]
    monkeypatch.setattr(encoder, "InlineEncoder", _unreachable)
    monkeypatch.setattr(encoder, "ChildEncoder", _unreachable)
    with pytest.raises(ModelFileError) as caught:
        opened(edit)
    assert message in str(caught.value)


def _unreachable(*_: object) -> None:
    raise AssertionError("the library was called")


def test_a_template_adds_a_few_tokens() -> None:
    with pytest.raises(ModelFileError, match="post_processor adds 200 tokens"):
        opened(framed(10, 20))
    assert len(opened(framed(8, 8)).encode("")) == 64


def test_json_that_takes_much_memory_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("json.loads", _unreachable)
    with pytest.raises(ModelFileError, match="has 8000001 values, more than 6291456"):
        vocab_spec.parse(b'{"added_tokens": ' + b"[]," * 4_000_000 + b"1}")
    with pytest.raises(ModelFileError, match=r"has \d+ bytes, more than"):
        vocab_spec.parse(b" " * (vocab_spec.MAX_JSON_BYTES + 1))


# Unknown parts: a child process builds and tries the tokenizer.
TRIED: dict[str, tuple[Edit, str]] = {
    "backtracking": (cut(split("(a+)+b")), "the tokenizer cannot be built: "),
    "backtracking over spaces": (cut(split(r"(\s|\s\s)+\d")), "the tokenizer cannot be built: "),
    "an expression that is no expression": (cut(split("(")), "the tokenizer cannot be built: Onig"),
    "an unknown part": (cut({"type": "Nonsense"}), "the tokenizer cannot be built: "),
    "a type that is no text": (normalized({"type": {}}), "the tokenizer cannot be built: "),
}


@pytest.mark.parametrize("name", TRIED)
def test_an_unknown_part_is_tried_in_a_child(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edit, message = TRIED[name]
    monkeypatch.setattr(encoder, "InlineEncoder", _unreachable)
    with pytest.raises(ModelFileError) as caught:
        opened(edit)
    assert message in str(caught.value)


def test_an_expression_that_needs_too_long_ends_its_child_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "ENCODE_LIMIT_S", 0.2)
    # Cubic at every position, below the library's own limit of steps for one position.
    tokenizer = opened(cut(split("z*z*z*q")))
    with pytest.raises(InvalidRequest, match=r"the tokenizer did not finish within 0\.\d+ s of CPU time"):
        tokenizer.encode("z" * 380 + " q")
    assert tokenizer.decode(tokenizer.encode("another text")) == "another text"  # in a new child


def test_a_child_without_memory_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "MEMORY_BYTES", 256 << 20)
    monkeypatch.setattr(encoder, "ENCODE_LIMIT_S", 60.0)
    tokenizer = opened(normalized(replace("z", "z" * 8)))
    assert not tokenizer.is_inline
    with pytest.raises(InvalidRequest, match="text cannot be encoded: "):
        tokenizer.encode("z" * 400_000)  # 3.2 million characters: about 300 MB
    assert len(tokenizer.encode("za")) >= 2


@pytest.mark.parametrize(
    ("parts", "is_inline"),
    [
        ([{"type": "NFC"}], True),
        ([{"type": "NFKC"}], False),  # it may make 18 characters of one
        ([{"type": "NFC"}, replace("z", "zz")], True),
        ([replace("z", "z" * 3)], False),
        ([{"type": "NFC"}, {"type": "NFD"}], False),
    ],
)
def test_a_tokenizer_that_lengthens_texts_runs_in_a_child(parts: list[dict[str, Any]], is_inline: bool) -> None:
    tokenizer = opened(normalized(*parts))
    assert tokenizer.is_inline is is_inline
    assert tokenizer.encode("a" * 4000, max_chars=4000)
    with pytest.raises(ContextTooLong, match="text has 4001 characters, more than the 4000 that can fit"):
        tokenizer.encode("a" * 4001, max_chars=4000)


@pytest.mark.parametrize("text", TEXTS)
def test_a_child_encodes_as_the_library_in_this_process(text: str) -> None:
    known = opened(cut(split(PRE_TOKENIZERS["qwen2"].splits[0])))
    assert known.is_inline
    forms: list[Callable[[Tokenizer], list[int]]] = [
        lambda tokenizer: tokenizer.encode(text),
        lambda tokenizer: tokenizer.encode_plain(text, at_start=False),
        lambda tokenizer: tokenizer.encode_marked(f"<|im_start|>{text}<\U000f0000|im_end|><|im_end|>", "\U000f0000"),
    ]
    for form in forms:
        assert form(_in_a_child()) == form(known)


_children: list[Tokenizer] = []


def _in_a_child() -> Tokenizer:
    if not _children:
        # The same expression in a spelling that is not known.
        _children.append(opened(cut(split(f"(?:{PRE_TOKENIZERS['qwen2'].splits[0]})"))))
        assert not _children[0].is_inline
    return _children[0]


def test_pieces_that_can_be_split_in_many_ways_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF file of 500 kB with the pieces a, aa, aaa... took 14 s and 1.7 GB to load."""

    def opened_with(length: int) -> Tokenizer:
        metadata = sentencepiece_gguf()
        added = ["a" * size for size in range(2, length)]
        for name, values in (("tokens", added), ("scores", [-9.0] * len(added)), ("token_type", [1] * len(added))):
            metadata[f"tokenizer.ggml.{name}"] = [*metadata[f"tokenizer.ggml.{name}"], *values]
        return Tokenizer.from_gguf(metadata)

    with pytest.raises(ModelFileError, match=r"can be split in too many ways .* or 40000000 characters of them"):
        opened_with(600)
    assert opened_with(40).encode("a" * 39)
    monkeypatch.setattr(vocab_spec, "MAX_MERGES", 600)
    with pytest.raises(ModelFileError, match="too many ways for a SentencePiece model: more than 600 merges"):
        opened_with(40)


def test_known_tokenizers_run_in_this_process() -> None:
    assert Tokenizer.from_json(json.dumps(byte_level_json()).encode(), {}).is_inline
    assert all(Tokenizer.from_gguf(byte_level_gguf(name)).is_inline for name in PRE_TOKENIZERS)
    assert Tokenizer.from_gguf(sentencepiece_gguf()).is_inline


def test_a_child_ends_with_its_tokenizer() -> None:
    tokenizer = opened(cut(split("z+|.")))
    child: Any = tokenizer._encoder._process  # type: ignore[union-attr]
    assert child.poll() is None
    tokenizer.close()
    eventually(lambda: child.poll() is not None, "the child ended")


def test_an_answer_of_the_child_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = opened(cut(split("z+|.")))
    child = tokenizer._encoder
    for answer in ({}, {"ids": "abc"}, {"ids": [1, "2"]}, {"ids": [-1]}, {"ids": [True]}):
        monkeypatch.setattr(child, "ask", lambda *_, found=answer: found)
        with pytest.raises(InvalidRequest, match="invalid answer"):
            tokenizer.encode("z")
        monkeypatch.undo()
    assert tokenizer.encode("z")


def test_decoding_has_a_limit() -> None:
    tokenizer = opened(lambda spec: spec["model"]["vocab"].update({"x" * 1024: 999}))
    with pytest.raises(
        InvalidRequest, match=f"the text of 65537 tokens has 67109888 bytes, more than {MAX_DECODED_BYTES}"
    ):
        tokenizer.decode([999] * 65_537)
    assert tokenizer.decode([999] * 3) == "x" * 3072


def test_a_template_cannot_write_more_than_the_context() -> None:
    tokenizer = opened(normalized())
    template = ChatTemplate("{{ 'a' * 100000 }}{{ messages[0].content }}", tokenizer)
    chat = ChatRequest([Message(Role.USER, (Part("Hi"),))])
    assert len(template.encode(chat)) == 100_002
    with pytest.raises(ContextTooLong, match="text has 100002 characters, more than the 65536 that can fit"):
        template.encode(chat, max_chars=65_536)


def test_a_long_string_to_replace_runs_in_a_child() -> None:
    """Searching for it takes time for each of its characters at each position of a text."""
    spec = byte_level_json()
    spec["normalizer"] = {"type": "Replace", "pattern": {"String": "a" * 33 + "b"}, "content": ""}
    tokenizer = Tokenizer.from_json(json.dumps(spec).encode(), {})
    assert not tokenizer.is_inline
    spec["normalizer"]["pattern"]["String"] = "a" * 31 + "b"
    assert Tokenizer.from_json(json.dumps(spec).encode(), {}).is_inline


KEY = "tokenizer.ggml."


def _without(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda metadata: metadata.pop(KEY + key)


def _with(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda metadata: metadata.update({KEY + key: value})


def _edit(key: str, edit: Callable[[list[Any]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda metadata: edit(metadata[KEY + key])


GGUF_FAULTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "tokens is missing": _without("tokens"),
    "tokens is empty": _with("tokens", []),
    "tokens is 'abc', not an array": _with("tokens", "abc"),
    "tokens is a dict, not an array": _with("tokens", {}),
    "tokens[5] = 7 is not a string": _edit("tokens", lambda tokens: tokens.__setitem__(5, 7)),
    "tokens[6] = b": _edit("tokens", lambda tokens: tokens.__setitem__(6, b"x")),
    "is not valid text": _edit("tokens", lambda tokens: tokens.__setitem__(6, "\ud800")),
    "occurs twice": _edit("tokens", lambda tokens: tokens.__setitem__(5, tokens[9])),
    "merges is missing": _without("merges"),
    "merges[0] = 'nospace'": _edit("merges", lambda merges: merges.__setitem__(0, "nospace")),
    "merges[1] = 'a' 'b c'": _edit("merges", lambda merges: merges.__setitem__(1, "a b c")),
    "merges[2] = 'x' 'qqqq'": _edit("merges", lambda merges: merges.__setitem__(2, "x qqqq")),
    "merges[3] = '' ''": _edit("merges", lambda merges: merges.__setitem__(3, " ")),
    "token_type has": _edit("token_type", lambda types: types.pop()),
    "token_type[0] = 9": _edit("token_type", lambda types: types.__setitem__(0, 9)),
    "token_type[0] = 1.0": _edit("token_type", lambda types: types.__setitem__(0, 1.0)),
    "token_type[0] = a list": _edit("token_type", lambda types: types.__setitem__(0, [])),
    "bos_token_id = 100000 is outside": _with("bos_token_id", 100000),
    "eos_token_id = -7 is outside": _with("eos_token_id", -7),
    "eos_token_id = True": _with("eos_token_id", True),
    "padding_token_id = '1'": _with("padding_token_id", "1"),
    "add_bos_token = 1 is not a bool": _with("add_bos_token", 1),
    "pre = a list": _with("pre", []),
}


@pytest.mark.parametrize("message", GGUF_FAULTS)
def test_faults_of_a_byte_level_gguf(message: str) -> None:
    metadata = byte_level_gguf()
    GGUF_FAULTS[message](metadata)
    with pytest.raises(ModelFileError) as caught:
        Tokenizer.from_gguf(metadata)
    assert message.split(" = b")[0] in str(caught.value)


SPM_FAULTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "scores is missing": _without("scores"),
    "scores has": _edit("scores", lambda scores: scores.pop()),
    "scores[3] = nan": _edit("scores", lambda scores: scores.__setitem__(3, float("nan"))),
    "scores[3] = 'x'": _edit("scores", lambda scores: scores.__setitem__(3, "x")),
    "too long": _edit("tokens", lambda tokens: tokens.__setitem__(300, "ab" * 20_000)),
}


@pytest.mark.parametrize("message", SPM_FAULTS)
def test_faults_of_a_sentencepiece_gguf(message: str) -> None:
    metadata = sentencepiece_gguf()
    SPM_FAULTS[message](metadata)
    with pytest.raises(ModelFileError) as caught:
        Tokenizer.from_gguf(metadata)
    assert message in str(caught.value)


def _frame(token_id: int) -> dict[str, Any]:
    parts = [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*parts, {"Sequence": {"id": "B", "type_id": 1}}]
    names = {"x": {"id": "x", "ids": [token_id], "tokens": ["x"]}}
    return {"type": "TemplateProcessing", "single": parts, "pair": pair, "special_tokens": names}


def _model(**fields: object) -> Callable[[dict[str, Any]], object]:
    return lambda spec: spec["model"].update(fields)


JSON_FAULTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "has no model": lambda spec: spec.pop("model"),
    "model.type = 'Unigram'": _model(type="Unigram"),
    "model.type = 'WordPiece'": _model(type="WordPiece"),
    "model.vocab is not": _model(vocab=[]),
    "has the id -1": lambda spec: spec["model"]["vocab"].update(x=-1),
    "has the id 99999999999": lambda spec: spec["model"]["vocab"].update(x=99999999999),
    "has the id 1.5": lambda spec: spec["model"]["vocab"].update(x=1.5),
    "token id 5 stands for": lambda spec: spec["model"]["vocab"].update(twice=5),
    "model.merges is not a list": _model(merges={}),
    "merges[0] is not a pair": _model(merges=["abc"]),
    "merges[0] = 'a' 'qqq'": _model(merges=[["a", "qqq"]]),
    "continuing_subword_prefix": _model(continuing_subword_prefix="##"),
    "added_tokens is not": lambda spec: spec.update(added_tokens={"a": 1}),
    "has no content": lambda spec: spec["added_tokens"].append({"id": 1}),
    "has the ids": lambda spec: spec["added_tokens"].append({"id": 77, "content": "<|im_end|>"}),
    "special is not a bool": lambda spec: spec["added_tokens"].append({"id": 777, "content": "x!", "special": 1}),
    "a decoder of": lambda spec: spec.update(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}),
    "decoder.decoders is not": lambda spec: spec.update(decoder={"type": "Sequence", "decoders": 5}),
    "post_processor adds 999999": lambda spec: spec.update(post_processor=_frame(999999)),
    "cannot be built": lambda spec: spec.update(pre_tokenizer={"type": "Nonsense"}),
    "normalizer is a list, not an object": lambda spec: spec.update(normalizer=[[[]]]),
    "cannot be built: ": lambda spec: spec.update(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    ),
}


@pytest.mark.parametrize("message", JSON_FAULTS)
def test_faults_of_a_tokenizer_json(message: str) -> None:
    spec = byte_level_json()
    JSON_FAULTS[message](spec)
    with pytest.raises(ModelFileError) as caught:
        Tokenizer.from_json(json.dumps(spec).encode(), {})
    assert message.strip() in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"{", b"[" * 100_000, b'{"model": ' * 5000, b"nan", b"1" * 5000])
def test_invalid_json_is_refused(data: bytes) -> None:
    with pytest.raises(ModelFileError):
        Tokenizer.from_json(data, {})


@pytest.mark.parametrize("listed", [[], {"x": {"content": "a"}}, {"1": 5}, {"9" * 5000: {"content": "<y>"}}])
def test_a_forged_tokenizer_config(listed: object) -> None:
    with pytest.raises(ModelFileError):
        Tokenizer.from_json(json.dumps(byte_level_json()).encode(), {"added_tokens_decoder": listed})


@pytest.mark.nightly
def test_large_vocabularies_are_built_in_seconds_of_cpu_time() -> None:
    rng = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz\u2581"
    pieces = list(dict.fromkeys("".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(300_000)))[:262_000]
    tokens = ["<unk>", "<s>", "</s>", *letters, *pieces]
    metadata = {
        KEY + "model": "llama",
        KEY + "tokens": tokens,
        KEY + "scores": [-float(i) for i in range(len(tokens))],
        KEY + "token_type": [2, 3, 3] + [1] * (len(tokens) - 3),
        KEY + "unknown_token_id": 0,
    }
    before_s = time.process_time()
    tokenizer = Tokenizer.from_gguf(metadata)
    assert time.process_time() - before_s < 60  # about 2 s; a quadratic algorithm would take hours
    assert tokenizer.decode(tokenizer.encode_plain("some words")) == "some words"
