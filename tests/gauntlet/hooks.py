"""Faults inside the processes of a server: exceptions, crashes, failed allocations, and a wall clock that jumps.

A row starts a server with `faulty`. Python imports `sitecustomize` from its PYTHONPATH at the start of each process,
and that calls `install`. A request chooses its fault by its seed, because the worker knows neither text nor ids.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.server.rig import hooked

FAULTS, MEMORY, CLOCK, LOG = "GAUNTLET_FAULTS", "GAUNTLET_MEMORY", "GAUNTLET_CLOCK", "GAUNTLET_LOG"
SAMPLER, GRAMMAR, DETOKENISER, START, SINK, CRASH = range(100_001, 100_007)  # seeds
TEMPLATE = "the template of this request raises"
ALLOCATION = 64 << 20  # of each step, where GAUNTLET_MEMORY is "allocate"
ROOT = Path(__file__).parents[2]


def faulty(folder: Path, **variables: str) -> dict[str, str]:
    """The environment of a server with these faults."""
    return hooked(folder, "from tests.gauntlet.hooks import install\n\ninstall()\n", **{FAULTS: "1"}, **variables)


def install() -> None:
    if FAULTS not in os.environ:  # a child for templates or grammars, which inherits few variables
        return
    if CLOCK in os.environ:
        _move_clock(Path(os.environ[CLOCK]))
    if LOG in os.environ:
        os.dup2(os.open(os.environ[LOG], os.O_WRONLY), 2)  # standard error
    _break_worker()
    _break_server()


def _move_clock(file: Path) -> None:
    """Add the offset in the file to every reading of the wall clock."""
    now, now_ns = time.time, time.time_ns

    def offset_s() -> float:
        try:
            return float(file.read_text() or 0)
        except (OSError, ValueError):
            return 0.0

    time.time = lambda: now() + offset_s()
    time.time_ns = lambda: now_ns() + int(offset_s() * 1e9)


class _FaultyRunner:
    """A runner that raises in steps with faulty requests, or for lack of memory."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._plan: Any = None
        self._num_calls = 0
        memory = os.environ.get(MEMORY, "")
        self._fail_every = int(memory) if memory.isdecimal() else 0
        self._allocates = memory == "allocate"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, plan: Any) -> None:
        self._plan = plan
        self._num_calls += 1
        if self._fail_every and self._num_calls % self._fail_every == 0:
            raise MemoryError("injected")
        if self._allocates:
            _allocate()
        if any(piece.sampling.seed == CRASH and _is_late(piece) for piece in plan.slices):
            os.kill(os.getpid(), signal.SIGSEGV)
        self._runner.forward(plan)

    def sample(self, masks: Any) -> None:
        if any(piece.sampling.seed == SAMPLER and _is_late(piece) for piece in self._plan.slices):
            raise RuntimeError("injected into the sampler")
        self._runner.sample(masks)


def _allocate() -> None:
    try:
        mmap.mmap(-1, ALLOCATION).close()
    except OSError as error:
        raise MemoryError(str(error)) from None


def _is_late(piece: Any) -> bool:
    """Whether the answer has begun, so that other requests run in the same steps."""
    return bool(piece.start >= piece.num_prompt_tokens + 2)


class _BadMatcher:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._num_masks = 0
        self.family: object = self

    def mask(self) -> bytes:
        self._num_masks += 1
        if self._num_masks == 3:
            raise RuntimeError("injected into the grammar")
        found: bytes = self._matcher.mask()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


def _break_worker() -> None:
    from quire.engine.engine import Engine

    initialise, add = Engine.__init__, Engine.add

    def make(self: Engine, runner: Any, *values: Any, **named: Any) -> None:
        initialise(self, _FaultyRunner(runner), *values, **named)

    def add_faulty(self: Engine, request_id: int, request: Any, **named: Any) -> None:
        if request.sampling.seed == GRAMMAR and named.get("matcher") is not None:
            named["matcher"] = _BadMatcher(named["matcher"])
        add(self, request_id, request, **named)

    Engine.__init__ = make  # type: ignore[method-assign]
    Engine.add = add_faulty  # type: ignore[method-assign]


def _break_server() -> None:
    from quire.engine.generation import Generation
    from quire.text.chat_template import Renderer

    def seed_of(generation: Any) -> int | None:
        found: int | None = generation.request.sampling.seed
        return found

    def is_late(generation: Any) -> bool:
        return len(generation.samples[0].token_ids) >= 3

    _raise_in(Generation, "start", lambda one: seed_of(one) == START)
    _raise_in(Generation, "push_token", lambda one: seed_of(one) == DETOKENISER and is_late(one))
    _raise_in(Generation, "deliver", lambda one: seed_of(one) == SINK)
    render = Renderer.render

    def render_faulty(self: Renderer, variables: Any) -> str:
        if TEMPLATE in str(variables):
            raise RuntimeError("injected into the template")
        return render(self, variables)

    Renderer.render = render_faulty  # type: ignore[method-assign]


def _raise_in(owner: type, name: str, is_wanted: Callable[[Any], bool]) -> None:
    original = getattr(owner, name)

    def faulty(self: Any, *values: Any) -> Any:
        if is_wanted(self):
            raise RuntimeError(f"injected into {name}")
        return original(self, *values)

    setattr(owner, name, faulty)
