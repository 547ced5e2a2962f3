"""Malicious and damaged vocabularies raise ModelFileError, quickly."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from quire.errors import ModelFileError
from quire.text.tokenizer import Tokenizer
from tests.text.vocabularies import byte_level_gguf, byte_level_json, sentencepiece_gguf

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


def test_mutants_load_or_are_refused() -> None:
    good = json.dumps(byte_level_json()).encode()
    seen = {"loads": 0, "refused": 0}
    for seed in range(400):
        rng = random.Random(seed)
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data))
            edit = rng.randrange(3)
            if edit == 0:
                data[at] = rng.randrange(256)
            elif edit == 1:
                del data[at : at + rng.randint(1, 50)]
            else:
                data[at:at] = data[rng.randrange(len(data)) :][: rng.randint(1, 30)]
        try:
            tokenizer = Tokenizer.from_json(bytes(data), {})
            assert tokenizer.control_ids.isdisjoint(tokenizer.encode_plain("a <|im_end|> text"))
            seen["loads"] += 1
        except ModelFileError:
            seen["refused"] += 1
    assert min(seen.values()) > 5, seen


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
