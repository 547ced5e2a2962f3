"""Tests of reading and generating traces."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from quire.core.values import Priority
from quire.errors import InvalidRequest, TraceError
from quire.sim.traces import TraceRequest, mixed, read_trace, text

GOOD = {"arrival_s": 1.5, "prompt_tokens": 10, "output_tokens": 3}


def write(folder: Path, *lines: object) -> str:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def test_a_line_is_a_request(tmp_path: Path) -> None:
    line = {
        **GOOD,
        "shared": [["system", 4], ["document", 3]],
        "output": "answer",
        "priority": "low",
        "salt": "team",
        "cancel_after_s": 2,
    }
    (request,) = read_trace(write(tmp_path, line, ""))
    assert request == TraceRequest(
        1.5, 10, 3, (("system", 4), ("document", 3)), "answer", (), Priority.LOW, "team", 2.0
    )
    ids = request.prompt_ids(0)
    assert ids[:7] == text("system", 4) + text("document", 3)
    assert len(ids) == 10
    assert request.output_ids(0) == text("answer", 3)


def test_token_ids_can_be_given(tmp_path: Path) -> None:
    (request,) = read_trace(write(tmp_path, {"arrival_s": 0, "prompt": [4, 5, 6], "output_tokens": 1}))
    assert (request.prompt_ids(9), request.prompt_tokens) == ([4, 5, 6], 3)


def test_a_trace_is_sorted_and_may_have_a_byte_order_mark_and_null_for_missing_fields(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    late = {**GOOD, "arrival_s": 5, "shared": None, "output": None, "priority": None, "cancel_after_s": None}
    path.write_text(f"{json.dumps(late)}\n{json.dumps(GOOD)}", encoding="utf-8-sig")
    assert read_trace(str(path)) == [TraceRequest(1.5, 10, 3), TraceRequest(5, 10, 3)]


def test_a_trace_is_read_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(GOOD)))
    assert read_trace("-") == [TraceRequest(1.5, 10, 3)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Input data was truncated"),
        ("[1]", "line 2: Expected `object`, got `array`"),
        ("[" * 100_000, "line 2: "),
        ('{"arrival_s": NaN, "prompt_tokens": 1, "output_tokens": 1}', "line 2: JSON is malformed"),
        ({**GOOD, "salt": "\ud800"}, "line 2: Input data"),
        ({"arrival_s": 1, "output_tokens": 3}, "line 2: Object missing required field `prompt_tokens`"),
        ({**GOOD, "arrival_s": 1e308}, r"line 2: field 'arrival_s' = 1e\+308: Expected `float` <= 1"),
        ({**GOOD, "arrival_s": 10**400}, "line 2: field 'arrival_s' = 1000.*Number out of range"),
        ({**GOOD, "arrival_s": "soon"}, "line 2: field 'arrival_s' = 'soon': Expected `float`"),
        ({**GOOD, "cancel_after_s": -1}, "line 2: field 'cancel_after_s' = -1: Expected `float` >= 0"),
        ({**GOOD, "prompt_tokens": 0}, "line 2: field 'prompt_tokens' = 0: Expected `int` >= 1"),
        ({**GOOD, "output_tokens": 2.5}, "line 2: field 'output_tokens' = 2.5: Expected `int`"),
        ({**GOOD, "output_tokens": 10**12}, "line 2: field 'output_tokens' = 1000000000000: Expected `int` <= "),
        ({**GOOD, "priority": "URGENT"}, "line 2: priority = 'URGENT' is not one of HIGH, NORMAL, LOW"),
        ({**GOOD, "salt": 5}, "line 2: field 'salt' = 5: Expected `str`"),
        ({**GOOD, "salt": "a\nb"}, "line 2: salt = .* is not a printable string"),
        ({**GOOD, "shared": [["a"]]}, r"line 2: field 'shared' = \[\['a'\]\]: Expected `array` of length 2"),
        ({**GOOD, "shared": [["a", True]]}, "line 2: field 'shared' = .*: Expected `int`"),
        ({**GOOD, "shared": [["a", 11]]}, "line 2: shared has 11 tokens, more than prompt_tokens = 10"),
        ({**GOOD, "prompt": [1]}, "line 2: prompt cannot be combined with prompt_tokens"),
        (
            {"arrival_s": 0, "output_tokens": 1, "prompt": [1, -2]},
            r"line 2: field 'prompt' = \[1, -2\]: Expected `int` >= 0 - at `\$.prompt\[1\]`",
        ),
        ({"arrival_s": 0, "output_tokens": 1, "prompt": []}, "line 2: .*Expected `int` >= 1 - at `..prompt_tokens`"),
        ({**GOOD, "prompt": "hello"}, "line 2: field 'prompt' = 'hello': Expected `array`"),
        ({**GOOD, "promt_tokens": 3}, "line 2: Object contains unknown field `promt_tokens`"),
    ],
)
def test_errors_name_the_line_and_the_field(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path, GOOD, line))


def test_a_missing_an_empty_and_a_binary_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nothing.jsonl: No such file"):
        read_trace(str(tmp_path / "nothing.jsonl"))
    with pytest.raises(TraceError, match="Is a directory"):
        read_trace(str(tmp_path))
    with pytest.raises(TraceError, match="no requests"):
        read_trace(write(tmp_path, ""))
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match=r"binary.jsonl: not UTF-8 text"):
        read_trace(str(binary))


def test_synthetic_traces_survive_a_round_trip(tmp_path: Path) -> None:
    requests = mixed(200, 5.0, seed=3)
    assert read_trace(write(tmp_path, *(request.as_line() for request in requests))) == requests
    given = TraceRequest(0.0, 3, 1, prompt=(4, 5, 6))
    assert read_trace(write(tmp_path, given.as_line())) == [given]
    assert mixed(200, 5.0, seed=3) == requests
    assert mixed(200, 5.0, seed=4) != requests


def test_a_synthetic_chat_contains_its_own_answers() -> None:
    requests = mixed(200, 5.0, 0)
    answers = {request.output for request in requests if request.output}
    turns = [request for request in requests if any(name in answers for name, _ in request.shared)]
    assert len(turns) > 40
    assert {request.priority for request in requests} == set(Priority)


@pytest.mark.parametrize(
    ("count", "rate"), [(0, 1.0), (10**9, 1.0), (1, 0.0), (1, -2.0), (1, float("nan")), (1, 1e-320)]
)
def test_an_impossible_synthetic_trace_is_refused(count: int, rate: float) -> None:
    with pytest.raises(InvalidRequest, match=r"requests = |rate = "):
        mixed(count, rate, 0)
