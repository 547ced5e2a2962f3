from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.core.request import Priority
from quire.engine.trace import TraceRequest, read_trace, synthesize, text
from quire.errors import InvalidRequest, TraceError

GOOD = {"arrival_s": 1.5, "prompt_tokens": 10, "output_tokens": 3}


def write(folder: Path, *lines: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


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


def test_a_trace_is_put_in_order_of_arrival(tmp_path: Path) -> None:
    requests = read_trace(write(tmp_path, {**GOOD, "arrival_s": 5}, {**GOOD, "arrival_s": 2}))
    assert [request.arrival_s for request in requests] == [2, 5]


def test_token_ids_can_be_given(tmp_path: Path) -> None:
    (request,) = read_trace(write(tmp_path, {"arrival_s": 0, "prompt": [4, 5, 6], "output_tokens": 1}))
    assert (request.prompt_ids(9), request.prompt_tokens) == ([4, 5, 6], 3)


def test_mooncake_lines_are_understood(tmp_path: Path) -> None:
    line = {"timestamp": 2500, "input_length": 1100, "output_length": 0, "hash_ids": [7, 8, 9]}
    (request,) = read_trace(write(tmp_path, line))
    assert (request.arrival_s, request.prompt_tokens, request.output_tokens) == (2.5, 1100, 1)
    assert request.prompt_ids(0)[:1024] == text("hash 7", 512) + text("hash 8", 512)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: not an object but list"),
        ({"arrival_s": 1, "output_tokens": 3}, "line 2: field 'prompt_tokens' is missing"),
        ({**GOOD, "arrival_s": -1}, "line 2: field 'arrival_s' = -1 is not a number from 0 up"),
        ({**GOOD, "arrival_s": "soon"}, "line 2: field 'arrival_s' = 'soon' is not a number"),
        ('{"arrival_s": NaN, "prompt_tokens": 1, "output_tokens": 1}', "field 'arrival_s' = nan is not a number"),
        ({**GOOD, "prompt_tokens": 0}, "line 2: field 'prompt_tokens' = 0 is not a whole number from 1"),
        ({**GOOD, "output_tokens": 2.5}, "line 2: field 'output_tokens' = 2.5 is not a whole number"),
        ({**GOOD, "output_tokens": 10**12}, "line 2: field 'output_tokens' = 1000000000000 is not a whole number"),
        ({**GOOD, "priority": "URGENT"}, "line 2: field 'priority' = 'URGENT' is not one of HIGH, NORMAL, LOW"),
        ({**GOOD, "salt": 5}, "line 2: field 'salt' = 5 is not a string"),
        ({**GOOD, "shared": [["a"]]}, "line 2: field 'shared' = .* is not a list of"),
        ({**GOOD, "shared": [["a", True]]}, "line 2: field 'shared' = .* is not a list of"),
        ({**GOOD, "shared": [["a", 11]]}, "line 2: field 'shared' has more tokens than prompt_tokens = 10"),
        ({**GOOD, "prompt": [1]}, "line 2: field 'prompt' says all there is to say; leave out prompt_tokens"),
        (
            {"arrival_s": 0, "output_tokens": 1, "prompt": [1, -2]},
            r"line 2: field 'prompt'\[1\] = -2 is not a token id",
        ),
        ({"arrival_s": 0, "output_tokens": 1, "prompt": []}, "line 2: field 'prompt' is not a list"),
        ({**GOOD, "promt_tokens": 3}, "line 2: field 'promt_tokens' is not known; known are arrival_s"),
        ({**GOOD, "hash_ids": "x", "input_length": 5}, "line 2: field 'hash_ids' is not a list of numbers"),
        ({**GOOD, "hash_ids": []}, "line 2: field 'input_length' is missing"),
    ],
)
def test_bad_lines_are_refused_by_line_and_field(tmp_path: Path, line: object, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path, GOOD, line))


def test_a_missing_an_empty_and_a_binary_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nothing.jsonl: .*No such file"):
        read_trace(tmp_path / "nothing.jsonl")
    with pytest.raises(TraceError, match="no requests"):
        read_trace(write(tmp_path, ""))
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match=r"binary.jsonl: .*decode"):
        read_trace(binary)


def test_synthetic_traces_survive_a_round_trip(tmp_path: Path) -> None:
    requests = synthesize(200, 5.0, seed=3)
    assert read_trace(write(tmp_path, *(request.as_line() for request in requests))) == requests
    assert synthesize(200, 5.0, seed=3) == requests
    assert synthesize(200, 5.0, seed=4) != requests


def test_a_synthetic_chat_contains_its_own_answers() -> None:
    requests = synthesize(200, 5.0)
    answers = {request.output for request in requests if request.output}
    turns = [request for request in requests if any(name in answers for name, _ in request.shared)]
    assert len(turns) > 40
    assert {request.priority for request in requests} == set(Priority)


@pytest.mark.parametrize(("count", "rate"), [(0, 1.0), (1, 0.0), (1, -2.0), (1, float("nan"))])
def test_an_impossible_synthetic_trace_is_refused(count: int, rate: float) -> None:
    with pytest.raises(InvalidRequest, match=r"num_requests|rate"):
        synthesize(count, rate)
