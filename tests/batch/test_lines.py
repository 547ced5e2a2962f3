"""Lines of batch input: both formats, and an error that names the line and the field for each that is wrong."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from quire.batch.runner import (
    ENDPOINTS,
    MAX_LINE_BYTES,
    BatchLine,
    BatchRequest,
    InvalidLine,
    LineParser,
    LineSettings,
    read_lines,
)

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi", "max_tokens": 2}}


def parse(*lines: object, **settings: Any) -> list[BatchLine]:
    data = b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    return list(LineParser(LineSettings(**settings)).parse_all(io.BytesIO(data)))


def one(line: object, **settings: Any) -> BatchRequest:
    (found,) = parse(line, **settings)
    assert isinstance(found, BatchRequest), found
    return found


def body(line: object, **settings: Any) -> Any:
    return json.loads(one(line, **settings).body)


def error(line: object, **settings: Any) -> InvalidLine:
    (found,) = parse(line, **settings)
    assert isinstance(found, InvalidLine), found
    assert found.message.startswith("line 1: ")
    return found


def test_openais_format_is_kept_as_it_is() -> None:
    found = one(GOOD)
    assert (found.number, found.custom_id, found.url) == (1, "a", "/v1/completions")
    assert json.loads(found.body) == GOOD["body"]
    for url in ENDPOINTS:
        assert one({**GOOD, "url": url}).url == url


def test_plain_prompts_become_a_chat() -> None:
    user = {"role": "user", "content": "Hi"}
    assert body("Hi") == {"messages": [user]}
    assert body({"prompt": "Hi", "seed": 3}) == {"messages": [user], "seed": 3}
    assert body({"messages": [user]}) == {"messages": [user]}
    assert one({"prompt": "Hi", "custom_id": "mine"}).custom_id == "mine"
    assert one("Hi").custom_id == "line-1"
    assert one("Hi").url == "/v1/chat/completions"


def test_defaults_are_for_plain_prompts_only() -> None:
    defaults = {"max_tokens": 5, "temperature": 0.5}
    assert body("Hi", defaults=defaults)["max_tokens"] == 5
    assert body({"prompt": "Hi", "max_tokens": 7}, defaults=defaults)["max_tokens"] == 7
    assert body(GOOD, defaults=defaults) == GOOD["body"]
    system = {"role": "system", "content": "Be brief."}
    assert body("Hi", system="Be brief.")["messages"][0] == system
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "Hi"}]
    assert body({"messages": own}, system="Be brief.")["messages"] == own


def test_model_and_priority_are_forced_on_every_line() -> None:
    named = {**GOOD, "body": {"prompt": "Hi", "model": "gpt", "priority": "high"}}
    assert body(named, model="tiny", priority="low") == {"prompt": "Hi", "model": "tiny", "priority": "low"}
    assert body(named)["model"] == "gpt"


WRONG: list[tuple[object, str | None, str]] = [
    (b"{", None, "not JSON"),
    (b"\xff\xfe", None, "not UTF-8"),
    (b"[" * 100_000, None, "nested too deeply"),
    (b'{"prompt": NaN}', None, "NaN"),
    (b"9" * 5000, None, "not JSON"),
    (7, None, "a JSON number"),
    ([], None, "a JSON array"),
    (None, None, "a JSON null"),
    ({}, "prompt", "neither prompt nor messages"),
    ({"prompt": "a", "messages": []}, "prompt", "both"),
    ({"prompt": ""}, "prompt", "prompt = ''"),
    ({"prompt": ["a"]}, "prompt", "prompt = ['a']"),
    ({"messages": []}, "messages", "messages = []"),
    ({"messages": "Hi"}, "messages", "messages = 'Hi'"),
    ("  ", "prompt", "empty"),
    ({**GOOD, "custom_id": 7}, "custom_id", "custom_id = 7"),
    ({**GOOD, "custom_id": ""}, "custom_id", "1 to 512"),
    ({**GOOD, "custom_id": "x" * 513}, "custom_id", "1 to 512"),
    ({**GOOD, "method": "GET"}, "method", "'GET' is not POST"),
    ({**GOOD, "method": 1}, "method", "not a text"),
    ({**GOOD, "url": "/v1/embeddings"}, "url", "/v1/chat/completions"),
    ({**GOOD, "url": "http://evil.example/v1/completions"}, "url", "is not one of"),
    ({**GOOD, "body": []}, "body", "not an object"),
    ({**GOOD, "body": {"prompt": "Hi", "stream": True}}, "body.stream", "whole answers"),
    ({name: value for name, value in GOOD.items() if name != "custom_id"}, "custom_id", "missing"),
    ({name: value for name, value in GOOD.items() if name != "body"}, "body", "missing"),
    ({name: value for name, value in GOOD.items() if name != "url"}, "url", "missing"),
]


@pytest.mark.parametrize(("line", "param", "text"), WRONG)
def test_a_wrong_line_names_what_is_wrong(line: object, param: str | None, text: str) -> None:
    found = error(line)
    assert found.param == param
    assert text in found.message


def test_a_wrong_line_does_not_end_the_file() -> None:
    found = parse(b"{", "Hi", b"", [], {**GOOD})
    assert [type(line) for line in found] == [InvalidLine, BatchRequest, InvalidLine, BatchRequest]
    assert [line.number for line in found] == [1, 2, 4, 5]  # a blank line counts, and has no request


def test_a_custom_id_is_used_once() -> None:
    first, second, third = parse(GOOD, GOOD, {**GOOD, "custom_id": "b"})
    assert isinstance(first, BatchRequest)
    assert isinstance(second, InvalidLine)
    assert (second.code, second.custom_id) == ("duplicate_custom_id", "a")
    assert isinstance(third, BatchRequest)


def test_a_batch_of_one_endpoint_takes_no_other_and_no_plain_prompts() -> None:
    settings = {"endpoint": "/v1/completions", "allows_plain": False}
    assert one(GOOD, **settings).url == "/v1/completions"
    assert error({**GOOD, "url": "/v1/responses"}, **settings).code == "mismatched_endpoint"
    assert "not an object with custom_id" in error("Hi", **settings).message
    assert error({"prompt": "Hi"}, **settings).param == "custom_id"


def test_line_ends_and_a_mark_of_byte_order_are_no_part_of_a_line() -> None:
    assert list(read_lines(io.BytesIO(b'\xef\xbb\xbf"a"\r\n\n"b"'))) == [(1, b'"a"'), (3, b'"b"')]
    assert list(read_lines(io.BytesIO(b""))) == []


def test_a_long_line_is_skipped_in_bounded_memory() -> None:
    data = b"12345\n" + b"x" * 50 + b"\n123456789\n1234567890\n" + b"y" * 99
    assert list(read_lines(io.BytesIO(data), max_bytes=10)) == [
        (1, b"12345"), (2, None), (3, b"123456789"), (4, b"1234567890"), (5, None),
    ]  # fmt: skip
    assert "longer than" in error(b'"' + b"x" * (MAX_LINE_BYTES + 2) + b'"').message


def test_surrogates_survive() -> None:
    assert json.loads(one(rb'"\ud800 Hi"').body)["messages"][0]["content"] == "\ud800 Hi"
    assert one(rb'{"prompt": "Hi", "custom_id": "\ud800"}').custom_id == "\ud800"
