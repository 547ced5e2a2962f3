"""The report of a run: a table in Markdown, and a JSON file with every figure."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.gauntlet.figures import Result, show


def table(results: Sequence[Result], *, is_quick: bool) -> str:
    """Figures that must be 0 and are 0, and resources that were released, take one line for each row."""
    lines = ["| row | promise | figure | bar | measured | held |", "| --- | --- | --- | --- | --- | --- |"]
    for result in results:
        title = result.title
        for cells in _lines(result, is_quick=is_quick):
            lines.append(f"| {result.number} | {title} | {' | '.join(cells)} |")
            title = ""
    return "\n".join(lines)


def _lines(result: Result, *, is_quick: bool) -> list[tuple[str, str, str, str]]:
    lines = []
    if result.problem:
        lines.append((f"not measured: {_cell(result.problem)}", "", "", "**no**"))
    zeros, released = [], []
    for figure in result.figures:
        is_held = figure.is_held(is_quick=is_quick)
        if is_held and figure.is_left_over:
            released.append(figure)
        elif is_held and figure.at_most == figure.at_least == 0:
            zeros.append(figure.name)
        else:
            held = "" if not figure.bar else ("not judged" if is_quick and figure.is_timed else "yes")
            lines.append((figure.name, figure.bar, show(figure.value, figure.unit), held if is_held else "**no**"))
    if zeros:
        lines.append(("; ".join(zeros), "0 each", "0 each", "yes"))
    if released:
        name = "KV blocks, open files, threads and processes afterwards, and broken invariants"
        lines.append((f"{name}, in {len(released)} figures", "as before", "as before", "yes"))
    return lines


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())[:200]


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{platform.machine()}, {os.cpu_count()} cores{', ' + names[0] if names else ''}"


def write_report(path: Path, results: Sequence[Result], *, is_quick: bool, soak_s: float) -> None:
    rows = [
        {**asdict(result), "is_held": result.is_held(is_quick=is_quick)}
        | {"figures": [asdict(figure) | {"is_held": figure.is_held(is_quick=is_quick)} for figure in result.figures]}
        for result in results
    ]
    about = {"machine": machine(), "python": platform.python_version(), "is_quick": is_quick, "soak_s": soak_s}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def total(results: Sequence[Result], *, is_quick: bool) -> str:
    """The last line: the number of rows, their time, and those that do not hold."""
    failed = [result.number for result in results if not result.is_held(is_quick=is_quick)]
    verdict = f"not held: {', '.join(failed)}" if failed else "all rows hold"
    return f"{len(results)} rows in {sum(result.seconds for result in results) / 60:.0f} minutes, {verdict}"
