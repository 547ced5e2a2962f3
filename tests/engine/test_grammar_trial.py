"""The child process that tries grammars: when it starts, the priorities of its forks, and the bound of normal ones."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil  # type: ignore[import-untyped]
import pytest

from quire.engine import grammars as grammars_module
from quire.engine.grammars import OF_ALL, OF_OWNER, PATIENCE_S, Grammars, NormalTime
from quire.errors import InvalidRequest, RequestFailed
from quire.text.child_process import Interrupted
from quire.text.grammar import Grammar, GrammarKind, choice_grammar, regex_grammar
from quire.text.tokenizer import Tokenizer
from tests.engine.serving import client, worker_pid
from tests.engine.test_grammars import answer
from tests.waiting import HANG_S, ManualClock, eventually

pytestmark = pytest.mark.anyio

SLOW = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer", "multipleOf": 99999999}')  # compiles for half a minute
ENDLESS_S = 1e6  # of CPU time
LOW = max(psutil.Process().nice(), 10)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return grammars_module.open_tokenizer(tiny_model, "auto")[0]


@pytest.fixture
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    made = Grammars(lambda: (tokenizer, (2,)), tokenizer.vocab_size)
    yield made
    made.close()


def trial_children(pid: int | None = None) -> list[psutil.Process]:
    found = []
    for one in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            found += [one] if any("trial_child" in part for part in one.cmdline()) else []
    return found


def fork_of(child: psutil.Process) -> psutil.Process:
    """The process that tries a grammar now."""
    (found,) = eventually(child.children, "a grammar is tried")
    assert isinstance(found, psutil.Process)
    return found


def nice_values(pid: int) -> set[int]:
    return {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir(f"/proc/{pid}/task")}


def wait_for_priority(fork: psutil.Process, nice: int) -> None:
    eventually(lambda: len(fork.threads()) == 2 and nice_values(fork.pid) == {nice}, f"both threads have {nice = }")


def wait_for_end(fork: psutil.Process) -> None:
    eventually(lambda: not fork.is_running(), "the fork has ended")


# When the child starts


async def test_a_worker_starts_the_child_before_the_first_grammar(tiny_model: Path) -> None:
    async with client(tiny_model, backend="fake") as engine:
        await engine.start()
        pid = worker_pid(engine)
        assert pid is not None
        (child,) = await asyncio.to_thread(eventually, lambda: trial_children(pid), "the child is started")
        assert (await answer(engine, grammar=choice_grammar(["on"]))).text == "on"
        assert [one.pid for one in trial_children(pid)] == [child.pid]


def test_a_killed_child_is_started_again_by_the_next_grammar(grammars: Grammars) -> None:
    grammars.prepare()
    grammars.compile(regex_grammar("before"))
    (child,) = trial_children()
    child.kill()
    assert grammars.compile(regex_grammar("after")).matcher().mask()
    grammars.close()
    eventually(lambda: not trial_children(), "no child is left")


def test_closing_ends_a_preparation(tokenizer: Tokenizer) -> None:
    may_open = threading.Event()

    def open_tokenizer() -> tuple[Tokenizer, tuple[int, ...]]:
        may_open.wait(HANG_S)
        return tokenizer, (2,)

    made = Grammars(open_tokenizer, tokenizer.vocab_size)
    made.prepare()
    made.close()
    may_open.set()
    eventually(lambda: made._compiler, "it was opened")
    with pytest.raises(RequestFailed, match="the engine is closed"):
        made._make(regex_grammar("a"), "")
    eventually(lambda: not trial_children(), "no child is left")


# Slow and killed trials


def test_a_slow_grammar_does_not_delay_another_one(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "COMPILE_LIMIT_S", ENDLESS_S)
    slow = grammars.submit(SLOW, "greedy")
    grammars.submit(regex_grammar("fast"), "patient").result(HANG_S)
    assert not slow.done()


def test_a_trial_ends_at_its_time_limit(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "COMPILE_LIMIT_S", ENDLESS_S)
    monkeypatch.setattr(grammars_module, "WAIT_LIMIT_S", 0.5)
    with pytest.raises(InvalidRequest, match=r"does not finish within 0\.5 s"):
        grammars.compile(SLOW)
    (child,) = trial_children()
    assert child.children() == []


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_fork_that_was_killed_or_stopped_is_replaced_once(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, *, is_stopped: bool
) -> None:
    monkeypatch.setattr(grammars_module, "COMPILE_LIMIT_S", ENDLESS_S)
    job = grammars.submit(SLOW)
    (child,) = eventually(trial_children, "the child is started")
    for _ in range(2):
        fork = fork_of(child)
        (fork.suspend if is_stopped else fork.kill)()
        wait_for_end(fork)
    with pytest.raises(RequestFailed, match="the process that checks grammars was killed"):
        job.result(HANG_S)
    assert [one.pid for one in trial_children()] == [child.pid]


def test_forks_end_with_the_child(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "COMPILE_LIMIT_S", ENDLESS_S)
    job = grammars.submit(SLOW)
    (child,) = eventually(trial_children, "the child is started")
    fork = fork_of(child)
    grammars.close()
    eventually(lambda: not fork.is_running() or fork.status() == psutil.STATUS_ZOMBIE, "the fork has ended")
    with pytest.raises(RequestFailed, match="the engine is closed"):
        job.result(HANG_S)


# Priorities


@on_linux
def test_a_trial_begins_at_normal_priority_and_goes_on_at_a_low_one(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars_module, "COMPILE_LIMIT_S", ENDLESS_S)
    compiler = grammars._open()
    source = compiler.translate(SLOW)
    for patience_s, expected in ((HANG_S, psutil.Process().nice()), (PATIENCE_S, LOW), (0.0, LOW)):
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(compiler.trial._try, source, patience_s)
            (child,) = eventually(trial_children, "the child is started")
            fork = fork_of(child)
            wait_for_priority(fork, expected)
            assert child.nice() == psutil.Process().nice()  # of the next fork
            fork.kill()
            assert isinstance(job.exception(HANG_S), Interrupted)


@on_linux
def test_only_grammars_with_a_slow_trial_are_compiled_at_a_low_priority(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars.compile(regex_grammar("fast[ab]{3}"))
    assert not grammars._slow_pool._threads
    monkeypatch.setattr(grammars_module, "OF_OWNER", grammars_module.Allowance(0.0, 1.0))
    grammars.compile(regex_grammar("slow[ab]{3}"))
    for pool, expected in ((grammars._pool, psutil.Process().nice()), (grammars._slow_pool, LOW)):
        threads = [thread.native_id for thread in pool._threads]
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads if thread is not None} == {expected}


def test_hostile_grammars_use_up_the_time_of_their_owner_only(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also grammars that are refused: the rule is on time that was used, not on answers."""
    monkeypatch.setattr(grammars_module, "COMPILE_LIMIT_S", 0.3)
    grammars._normal_time = NormalTime(clock=lambda: 0.0)
    for number in range(6):
        hostile = Grammar(GrammarKind.JSON_SCHEMA, SLOW.source.replace("}", " " * number + "}"))
        with pytest.raises(InvalidRequest, match=r"more than 0\.3 s"):
            grammars.submit(hostile, "a").result()
    assert grammars._normal_time.take("a") == 0.0
    assert grammars._normal_time.take("b") == PATIENCE_S
    grammars.submit(regex_grammar("b"), "b").result()


@pytest.mark.parametrize("seed", range(20))
def test_the_time_at_normal_priority_is_bounded(seed: int) -> None:
    """For each owner and for all together, from any moment on; and owners are forgotten."""
    random, clock = Random(seed), ManualClock()
    budget = NormalTime(clock)
    owners = [f"key {number}" for number in range(random.randint(1, 30))]
    uses: list[tuple[float, str, float]] = []
    for _ in range(800):
        clock.now_s += random.choice((0.0, 0.01, 0.1, 1.0, 30.0))
        owner = random.choice(owners)
        taken_s = budget.take(owner)
        assert 0.0 <= taken_s <= PATIENCE_S
        used_s = taken_s * random.choice((0.1, 1.0, 1.0))
        budget.use(owner, used_s - taken_s)
        uses.append((clock.now_s, owner, used_s))
    for start_s in {at_s for at_s, _, _ in uses[::40]}:
        since = [(at_s, owner, used_s) for at_s, owner, used_s in uses if at_s >= start_s]
        passed_s = since[-1][0] - start_s
        assert sum(used_s for _, _, used_s in since) <= OF_ALL.burst_s + OF_ALL.share * passed_s + 1e-6
        for name in owners:
            total_s = sum(used_s for _, owner, used_s in since if owner == name)
            assert total_s <= OF_OWNER.burst_s + OF_OWNER.share * passed_s + 1e-6
    clock.now_s += 1e6
    budget.take("another")
    assert len(budget._earned_s) == 2  # this one, and the budget of all
