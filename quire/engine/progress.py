"""A progress bar on stderr for several prompts. `rich` is imported only if a bar is drawn."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from quire.engine.outputs import Delta

SHOW_S = 0.1  # between two updates: steps may be much shorter

OnDelta = Callable[[int, Delta], None]  # index of the prompt, its new output


@contextmanager
def progress_bar(num_answers: Sequence[int]) -> Iterator[OnDelta | None]:
    """Count finished prompts and tokens per second. None: stderr is not a terminal. `num_answers`: per prompt."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("prompts", total=len(num_answers), rate="")
        yield _Counter(num_answers, lambda done, rate: bar.update(task, completed=done, rate=rate, refresh=True)).add


class _Counter:
    """Counts deltas, and shows the counts now and then."""

    def __init__(self, num_answers: Sequence[int], show: Callable[[int, str], object]) -> None:
        self._left = list(num_answers)
        self._show = show
        self._num_done = 0
        self._num_tokens = 0
        self._began_s = time.monotonic()
        self._shown_s = self._began_s

    def add(self, number: int, delta: Delta) -> None:
        self._num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._left[number] -= 1
            self._num_done += self._left[number] == 0
        now_s = time.monotonic()
        if now_s - self._shown_s >= SHOW_S or self._num_done == len(self._left):
            self._shown_s = now_s
            rate = self._num_tokens / max(now_s - self._began_s, 1e-9)
            self._show(self._num_done, f"{rate:.0f} tok/s")
