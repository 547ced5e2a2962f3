"""Progress of a batch on stderr: a bar on a terminal, a line at intervals on a pipe."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from quire.cli.terminal import echo

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_EVERY_S = 10.0


class BatchProgress:
    """Counts results and shows them. `total`: the lines of the input; None if it is a pipe."""

    def __init__(self, total: int | None, num_before: int, *, is_quiet: bool = False) -> None:
        self.num_good = 0
        self.num_failed = 0
        self.num_tokens = 0
        self._total = total
        self._num_before = num_before
        self._is_quiet = is_quiet
        self._started_s = time.monotonic()
        self._ended_s: float | None = None
        self._shown_s = self._started_s
        self._stack = ExitStack()
        self._bar: Progress | None = None

    @property
    def num_done(self) -> int:
        return self.num_good + self.num_failed

    @property
    def elapsed_s(self) -> float:
        return (time.monotonic() if self._ended_s is None else self._ended_s) - self._started_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / max(self.elapsed_s, 1e-9)

    def __enter__(self) -> BatchProgress:
        if sys.stderr.isatty() and not self._is_quiet:
            self._bar = self._stack.enter_context(_make_bar())
            self._task = self._bar.add_task("batch", total=self._total, completed=self._num_before, counts="")
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended_s = time.monotonic()
        self._stack.close()

    def add(self, *, is_good: bool, num_tokens: int) -> None:
        self.num_good += is_good
        self.num_failed += not is_good
        self.num_tokens += num_tokens
        if self._bar is not None:
            counts = f"{self.num_failed} failed, {self.tokens_per_s:.0f} tok/s"
            self._bar.update(self._task, completed=self._num_before + self.num_done, counts=counts)
        elif not self._is_quiet and time.monotonic() - self._shown_s >= LINE_EVERY_S:
            self._shown_s = time.monotonic()
            echo(self.line(), err=True)

    def line(self) -> str:
        """The progress as one line of text, for a pipe."""
        done = self._num_before + self.num_done
        text = f"{done:,} of {self._total:,}" if self._total is not None else f"{done:,}"
        text += f" lines, {self.num_failed:,} failed, {self.tokens_per_s:.0f} tokens/s"
        if self._total is not None and self.num_done:
            left_s = self.elapsed_s * max(0, self._total - done) / self.num_done
            text += f", about {left_s:.0f} s left"
        return text


def _make_bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[counts]}", markup=False),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))
