"""Results on disk: OpenAI's format, and what an interrupted run finds again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.batch.runner import (
    BatchRequest,
    InvalidLine,
    LineSet,
    Reply,
    Result,
    ResultFile,
    ResultScan,
    drop_failed,
    num_completion_tokens,
    open_output,
    result_line,
    scan_results,
)
from quire.errors import InvalidRequest


def result(number: int, status: int = 200, body: bytes = b'{"ok":1}') -> Result:
    return Result(BatchRequest(number, f"id-{number}", "/v1/completions", b"{}"), Reply(status, "req_1", body))


def test_a_result_is_in_openais_format() -> None:
    assert json.loads(result_line(result(3))) == {
        "id": "batch_req_3",
        "custom_id": "id-3",
        "response": {"status_code": 200, "request_id": "req_1", "body": {"ok": 1}},
        "error": None,
    }
    assert json.loads(result_line(result(3), "ab12"))["id"] == "batch_req_ab12_3"
    wrong = Result(InvalidLine(4, None, "line 4: url is missing", "url", "missing"), None)
    assert json.loads(result_line(wrong)) == {
        "id": "batch_req_4",
        "custom_id": None,
        "response": None,
        "error": {"code": "missing", "message": "line 4: url is missing", "line": 4, "param": "url"},
    }


def test_a_body_with_line_ends_stays_one_line() -> None:
    line = result_line(result(1, body=b'{\n "ok": 1\r\n}\n'))
    assert line.count(b"\n") == 1
    assert json.loads(line)["response"]["body"] == {"ok": 1}
    text = "a\x85b\u2028c\u2029d"
    line = result_line(result(1, body=json.dumps({"text": text}, ensure_ascii=False).encode()))
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line)["response"]["body"] == {"text": text}


def write(path: Path, *results: Result, torn: bytes = b"") -> None:
    path.write_bytes(b"".join(result_line(one) for one in results) + torn)


def test_finished_lines_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, result(7), result(2, 400), torn=result_line(result(5))[:-20])
    file = ResultFile.append(path, ResultScan())
    assert [number for number in range(10) if number in file.scan.finished] == [2, 7]
    assert (file.scan.num_good, file.scan.num_failed, file.scan.num_finished) == (1, 1, 2)
    file.write(result(5))
    assert (5 in file.scan.finished, file.scan.num_good) == (True, 2)
    file.close()
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == [
        "batch_req_7", "batch_req_2", "batch_req_5",
    ]  # fmt: skip


def test_the_number_of_a_line_is_found_in_any_id(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(result_line(result(12), "0123ab"))
    assert 12 in scan_results(path, ResultScan()).finished


@pytest.mark.parametrize(
    "text", ["hello\n", "{}\n", '{"id": 1}\n', '{"id": "batch_req_x", "response": null}\n', "[]\n", "\n"]
)
def test_another_file_is_not_taken_for_results(tmp_path: Path, text: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match="line 1 is not a result"):
        scan_results(path, ResultScan())


def test_failed_results_are_dropped_to_run_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, result(1), result(2, 500), result(3), torn=b'{"id"')
    drop_failed(path)
    scan = scan_results(path, ResultScan())
    assert [number for number in range(5) if number in scan.finished] == [1, 3]
    assert [one.name for one in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_set_of_lines_is_a_bit_a_line() -> None:
    lines = LineSet()
    for number in (1, 9, 1_000_000):
        lines.add(number)
    assert [number for number in (0, 1, 2, 8, 9, 10, 999_999, 1_000_000, 10**9) if number in lines] == [1, 9, 1_000_000]


def test_tokens_are_counted_as_either_endpoint_says_them() -> None:
    bodies: list[Any] = [{"usage": {"completion_tokens": 4}}, {"usage": {"output_tokens": 5}}, {}, [], {"usage": 1}]
    assert [num_completion_tokens(body) for body in bodies] == [4, 5, 0, 0, 0]


# Which input an output belongs to


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('"a"\n"b"\n')
    return path


def opened(tmp_path: Path, source: Path | None, **options: Any) -> ResultFile:
    settings = {"--max-tokens": options.pop("max_tokens", 8)}
    return open_output(tmp_path / "out.jsonl", source, settings, **options)


def begin(tmp_path: Path, source: Path) -> None:
    output = opened(tmp_path, source)
    output.write(result(1))
    output.write(result(2, 500))
    output.close()


def test_the_same_input_continues_also_if_it_has_grown(tmp_path: Path, source: Path) -> None:
    begin(tmp_path, source)
    for more in ("", '"c"\n'):
        with source.open("a") as file:
            file.write(more)
        output = opened(tmp_path, source)
        assert output.scan.num_finished == 2
        output.close()
    output = opened(tmp_path, source, is_retrying=True)
    assert (output.scan.num_good, output.scan.num_failed) == (1, 0)
    output.close()


def test_another_input_is_refused(tmp_path: Path, source: Path) -> None:
    begin(tmp_path, source)
    for text in ('"a"\n"x"\n', '"a"\n', ""):
        source.write_text(text)
        with pytest.raises(InvalidRequest, match=r"an input other than.*--overwrite"):
            opened(tmp_path, source)
    output = opened(tmp_path, source, is_overwriting=True)
    assert output.scan.num_finished == 0
    output.close()
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_other_settings_are_refused_by_name(tmp_path: Path, source: Path) -> None:
    begin(tmp_path, source)
    with pytest.raises(InvalidRequest, match="--max-tokens = 8, not 9"):
        opened(tmp_path, source, max_tokens=9)


def test_a_pipe_and_a_foreign_file_do_not_continue(tmp_path: Path, source: Path) -> None:
    begin(tmp_path, source)
    with pytest.raises(InvalidRequest, match="standard input"):
        opened(tmp_path, None)
    (tmp_path / "out.jsonl.batch.json").unlink()
    with pytest.raises(InvalidRequest, match="not the output of an interrupted batch"):
        opened(tmp_path, source)
    assert (tmp_path / "out.jsonl").stat().st_size > 0  # nothing is lost


def test_two_runs_do_not_share_an_output(tmp_path: Path, source: Path) -> None:
    output = opened(tmp_path, source)
    with pytest.raises(InvalidRequest, match="another `quire batch`"):
        opened(tmp_path, source)
    output.close()
    opened(tmp_path, source).close()
