"""Builds a trace from a server log: arrival times and lengths of prompts and answers.

Logs contain no text, so shared prefixes are unknown: in such a trace, only the n samples of one prompt share tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.core.values import Priority
from quire.errors import TraceError
from quire.sim.traces import TraceRequest

MAX_SPLIT = 4096  # prompts times samples of one line


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    requests: list[TraceRequest]  # in order of arrival, the first at 0
    num_left_out: int  # refused and failed requests, whose lengths are unknown


def read_log(path: str) -> RecordedTrace:
    """Read a log of `quire serve --log-format json`; `-` is standard input.

    Other log lines are ignored.
    """
    try:
        if path == "-":
            found = list(_parse_lines("standard input", sys.stdin))
        else:
            with Path(path).open(encoding="utf-8-sig", errors="replace") as lines:
                found = list(_parse_lines(path, lines))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    requests = sorted((one for part in found for one in part), key=lambda one: one.arrival_s)
    if not requests:
        raise TraceError(f"{path}: no served requests found; quire serve --log-format json logs them to stderr")
    start_s = requests[0].arrival_s
    return RecordedTrace(
        [replace(one, arrival_s=round(one.arrival_s - start_s, 6)) for one in requests],
        num_left_out=sum(not part for part in found),
    )


def _parse_lines(name: str, lines: Iterable[str]) -> Iterator[list[TraceRequest]]:
    """Trace requests of each log line; an empty list for a request that was not served."""
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(entry, dict) or entry.get("logger") != "quire.request" or entry.get("message") != "request":
            continue
        try:
            yield _parse(entry, number)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise TraceError(f"{name} line {number}: not a request record: {type(error).__name__} {error}") from None


def _parse(entry: dict[str, Any], number: int) -> list[TraceRequest]:
    """One trace request per prompt and sample.

    A line has only their total lengths, which are divided equally.
    """
    finish = entry["finish"]
    if finish not in ("stop", "length", "cancelled"):
        return []
    ended_s = datetime.fromisoformat(entry["time"]).timestamp()
    num_prompts, n = _count(entry, "prompts"), _count(entry, "n")
    prompt_tokens, output_tokens = _count(entry, "prompt_tokens"), int(entry["completion_tokens"])
    if num_prompts * n > MAX_SPLIT:
        raise ValueError(f"prompts = {num_prompts} times n = {n} is more than {MAX_SPLIT}")
    is_left = finish == "cancelled"
    one_output = output_tokens // (num_prompts * n)
    if is_left:  # without the cancellation it would have continued
        one_output = max(one_output, int(entry.get("max_tokens", one_output)))
    size = max(1, prompt_tokens // num_prompts)
    request = TraceRequest(
        arrival_s=ended_s - float(entry["e2e_s"]),
        prompt_tokens=size,
        output_tokens=max(1, one_output),
        priority=Priority[entry["tier"].upper()],
        cancel_after_s=float(entry["e2e_s"]) if is_left else None,
    )
    if n == 1:
        return [request] * num_prompts
    return [
        replace(request, shared=((f"line {number} prompt {prompt}", size),))
        for prompt in range(num_prompts)
        for _ in range(n)
    ]


def _count(entry: dict[str, Any], field: str) -> int:
    value = entry[field]
    if type(value) is not int or value < 1:
        raise ValueError(f"{field} = {value!r:.60} is not a whole number of at least 1")
    return value
