"""R16: processes of a server that are killed, stopped or out of memory while it answers requests."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil  # type: ignore[import-untyped]

from tests.gauntlet.figures import Figure, Gauntlet, Row, exactly
from tests.gauntlet.flood import Flood, chat_body, health_watched, text_of
from tests.gauntlet.hooks import ALLOCATION, MEMORY, hooked
from tests.gauntlet.watch import family, idle_base, left_over
from tests.server.rig import Answer, Server, put_away, serving, spawn, wait_ready
from tests.waiting import HANG_S, eventually

FAKE = ("--backend", "fake", "--num-blocks", "2500", "--device", "5ms")
HANG_LIMIT_S = 8  # of the server; with the default, which is longer, a stopped worker would be noticed later
ENDLESS = 3900
SHOWN = {signal.SIGKILL: "killed", signal.SIGSTOP: "stopped", None: "out of memory"}
Fault = signal.Signals | None  # None: its allocations fail


def strike(pid: int, fault: Fault, *, spare: int = -ALLOCATION // 2) -> None:
    """Kill or stop a process, or limit its address space."""
    if fault is not None:
        os.kill(pid, fault)
        return
    _, most = resource.prlimit(pid, resource.RLIMIT_AS)
    limit = smallest(pid) + spare
    resource.prlimit(pid, resource.RLIMIT_AS, (limit if most < 0 else min(limit, most), most))


def smallest(pid: int) -> int:
    """The size of a process's address space without short allocations: the smallest of several readings."""
    process, sizes = psutil.Process(pid), []
    for _ in range(20):
        sizes.append(int(process.memory_info().vms))
        time.sleep(0.003)
    return min(sizes)


def relieve(pid: int) -> None:
    """Remove the limit of the address space, if the process still runs."""
    with contextlib.suppress(ProcessLookupError):
        _, most = resource.prlimit(pid, resource.RLIMIT_AS)
        resource.prlimit(pid, resource.RLIMIT_AS, (most, most))


def faults(gauntlet: Gauntlet) -> Sequence[Fault]:
    """All faults; in the quick run only kills, because other faults are noticed only after seconds."""
    return (signal.SIGKILL,) if gauntlet.is_quick else tuple(SHOWN)


def zombies(server: Server) -> int:
    def found() -> list[int]:
        return [one.pid for one in family(server)[1:] if one.status() == psutil.STATUS_ZOMBIE]

    with contextlib.suppress(AssertionError, psutil.NoSuchProcess):
        eventually(lambda: not found(), "no zombie", 30.0)
    return len(found())


class Worst:
    """The largest value of each measured time, and the sum of each count of faults, over all rounds."""

    def __init__(self) -> None:
        self.worst: dict[str, float] = {}
        self.sums: dict[str, float] = {}

    def note(self, name: str, value: float) -> None:
        self.worst[name] = max(value, self.worst.get(name, value))

    def add(self, name: str, count: float) -> None:
        self.sums[name] = self.sums.get(name, 0) + count


def timed(prefix: str, seen: Worst, bars: dict[str, float], num_rounds: int) -> list[Figure]:
    where = f", longest of {num_rounds}"
    return [
        Figure(f"{prefix}{name}{where}", seen.worst[name], "s", at_most=bar, is_timed=True)
        for name, bar in bars.items()
    ]


# The worker


def lose_worker(server: Server, fault: Fault, num_streams: int, seen: Worst) -> None:
    pid = server.worker_pid
    with health_watched(server) as health:
        # The first four requests run. The others wait, and the next worker runs them.
        lengths = [ENDLESS] * 4 + [60] * (num_streams - 4)
        flood = Flood(server, [chat_body(f"{i}", count, stream=i % 4 < 3) for i, count in enumerate(lengths)])
        flood.wait_flowing(2)
        begin_s = time.monotonic()
        strike(pid, fault)
        replies = flood.wait()
        eventually(lambda: health.first_s(503, begin_s), "the fault is noticed")
        noticed_s = health.first_s(503, begin_s) or begin_s
        back_s = eventually(lambda: health.first_s(200, noticed_s), "serving again")
    seen.note("time until /health is 503", noticed_s - begin_s)
    # A request that had not begun is run by the next worker. The others end with an error.
    failed_s = [flood.ended_s[index] for index, reply in enumerate(replies) if reply.ending == "error"]
    seen.note("time from the 503 until streams end", max([0.0, *(ended_s - noticed_s for ended_s in failed_s)]))
    seen.note("time from the 503 until requests are served", (back_s or begin_s) - noticed_s)
    seen.add("requests without an answer", sum(reply.ending == "broken" for reply in replies))
    seen.add("failed requests afterwards", sum(server.chat().status != 200 for _ in range(3)))
    seen.add("zombie processes", zombies(server) + psutil.pid_exists(pid))


def worker_figures(what: str, seen: Worst, num_rounds: int) -> list[Figure]:
    bars = {
        "time until /health is 503": 10.0,
        "time from the 503 until streams end": 2.0,
        "time from the 503 until requests are served": 30.0,
    }
    figures = timed(f"{what}: ", seen, bars, num_rounds)
    return figures + [exactly(f"{what}: {name}", count) for name, count in seen.sums.items()]


def lose_workers(gauntlet: Gauntlet) -> list[Figure]:
    num_rounds = gauntlet.size(10, 1)
    env = hooked(gauntlet.folder / "hooks", **{MEMORY: "allocate"})
    options = (*FAKE, "--max-num-seqs", "4", "--hang-limit", str(HANG_LIMIT_S))
    figures: list[Figure] = []
    with serving(str(gauntlet.tiny), *options, env=env) as server:
        Flood(server, [chat_body(f"{i}", 4) for i in range(16)]).wait()
        base = idle_base(server)
        for fault in faults(gauntlet):
            seen = Worst()
            for _ in range(num_rounds):
                lose_worker(server, fault, 16, seen)
            figures += worker_figures(f"worker {SHOWN[fault]}", seen, num_rounds)
        figures += left_over(server, base, prefix="worker: ")
    if not gauntlet.is_quick:
        real = (gauntlet.model, "--num-blocks", "400", "--max-num-seqs", "4", "--hang-limit", str(HANG_LIMIT_S))
        with serving(*real, env=env) as server:
            Flood(server, [chat_body(f"{i}", 4) for i in range(16)]).wait()
            base, seen = idle_base(server), Worst()
            for fault in SHOWN:
                lose_worker(server, fault, 16, seen)
            figures += worker_figures("worker of the real model", seen, len(SHOWN))
            figures += left_over(server, base, prefix="real model: ")
    return figures


# The children for templates and grammars


def child_of(server: Server, script: str) -> int | None:
    for process in family(server):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(part.endswith(script) for part in process.cmdline()):
                return int(process.pid)
    return None


class Children:
    """Injects faults into one kind of child while streams run and other requests need the child."""

    def __init__(self, server: Server, script: str, make: Callable[[int], dict[str, Any]]) -> None:
        self._server = server
        self._script = script
        self._make = make  # makes the body of a request that needs the child
        self._number = 0

    def lose(self, fault: Fault, pause_s: float, seen: Worst) -> None:
        server = self._server
        self._ask()  # it runs
        pid = child_of(server, self._script)
        assert pid is not None
        flood = Flood(server, [chat_body(f"Stream {i}", 400, seed=i) for i in range(3)])
        flood.wait_flowing()
        begin_s = time.monotonic()
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(self._ask) for _ in range(2)]
            time.sleep(pause_s)
            strike(pid, fault, spare=0)
            asked += [pool.submit(self._ask) for _ in range(2)]
            answers = [one.result() for one in asked]
        seen.note("time until requests that need it are answered", time.monotonic() - begin_s)
        seen.add(
            "failed requests, not counting one that was in the child",
            max(0, sum(one.status != 200 for one in answers) - 1),
        )
        if fault is not None:
            seen.add("failed requests", sum(one.status != 200 for one in answers))
        seen.add("other streams that failed", sum(reply.ending != "done" for reply in flood.wait()))
        if fault is None:
            relieve(pid)
        seen.add("failed requests afterwards", self._ask().status != 200)
        seen.add("children not replaced", fault is not None and child_of(server, self._script) in (None, pid))
        seen.add("zombie processes", zombies(server))

    def _ask(self) -> Answer:
        self._number += 1
        return self._server.post("/v1/chat/completions", self._make(self._number))


def plain(number: int) -> dict[str, Any]:
    return chat_body(f"Question {number}", 4, stream=False)


def shaped(number: int) -> dict[str, Any]:
    schema = {"enum": [f"answer {number} {letter}" for letter in "abc"]}
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return chat_body("Question", 40, stream=False, response_format=shape, ignore_eos=False)


def lose_children(gauntlet: Gauntlet) -> list[Figure]:
    num_rounds = gauntlet.size(10, 1)
    figures: list[Figure] = []
    with serving(str(gauntlet.tiny), *FAKE, "--max-num-seqs", "16") as server:
        for script, make, what in (
            ("template_worker.py", plain, "template child"),
            ("trial_child.py", shaped, "grammar child"),
        ):
            children = Children(server, script, make)
            children.lose(signal.SIGKILL, 0.0, Worst())  # threads have started
            base = idle_base(server)
            for fault in faults(gauntlet):
                seen = Worst()
                for _ in range(num_rounds):
                    children.lose(fault, gauntlet.random.random() * 0.03, seen)
                ((kind, worst_s),) = seen.worst.items()
                which = f"{what} {SHOWN[fault]}: "
                figures.append(
                    Figure(f"{which}{kind}, longest of {num_rounds}", worst_s, "s", at_most=10.0, is_timed=True)
                )
                figures += [exactly(f"{which}{kind}", count) for kind, count in seen.sums.items()]
            figures += left_over(server, base, prefix=f"{what}: ")
    return figures


# The process that serves HTTP


@contextlib.contextmanager
def front(gauntlet: Gauntlet, port: int) -> Iterator[Server]:
    server = spawn(str(gauntlet.tiny), *FAKE, "--port", str(port))
    try:
        wait_ready(server)
        yield server
    finally:
        put_away(server)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def lose_front(gauntlet: Gauntlet) -> list[Figure]:
    """Pause the process, kill it, and start the next one on the same port, as an operator's supervisor does."""
    port, seen = free_port(), Worst()
    bodies = [chat_body(f"Stream {i}", 300, seed=i) for i in range(3)]
    killed_s = time.monotonic()
    num_rounds = gauntlet.size(10, 1)
    for number in range(num_rounds + 1):
        with front(gauntlet, port) as server:
            expected = [text_of(reply) for reply in Flood(server, bodies).wait()]
            if number:
                seen.note("time until requests are served again", time.monotonic() - killed_s)
            flood = Flood(server, bodies)
            flood.wait_flowing()
            os.kill(server.process.pid, signal.SIGSTOP)
            time.sleep(0.3)
            os.kill(server.process.pid, signal.SIGCONT)
            replies = flood.wait()
            seen.add("streams that failed because of a pause", sum(reply.ending != "done" for reply in replies))
            seen.add("answers changed by a pause", sum(map(str.__ne__, map(text_of, replies), expected)))
            flood = Flood(server, [chat_body(f"Stream {i}", ENDLESS) for i in range(3)])
            flood.wait_flowing()
            relatives = family(server)[1:]
            killed_s = time.monotonic()
            server.process.kill()
            seen.add("streams that looked complete after the kill", sum(reply.is_whole for reply in flood.wait()))
            seen.note("time until streams are closed", max(flood.ended_s.values()) - killed_s)
            server.process.wait(HANG_S)
            seen.add("orphan processes", len(psutil.wait_procs(relatives, timeout=60)[1]))
    bars = {"time until requests are served again": 30.0, "time until streams are closed": 2.0}
    return [
        *timed("HTTP process killed: ", seen, bars, num_rounds),
        *(exactly(f"HTTP process paused and killed: {name}", count) for name, count in seen.sums.items()),
    ]


def starve_front(gauntlet: Gauntlet) -> list[Figure]:
    """Requests whose bodies do not fit in memory fail. All other requests, during the fault and later, are answered."""
    seen = Worst()
    large = b'{"messages": [{"role": "user", "content": "' + b"x" * (24 << 20) + b'"}]}'
    with serving(str(gauntlet.tiny), *FAKE) as server:
        Flood(server, [chat_body(f"{i}", 4) for i in range(16)]).wait()
        base = idle_base(server)
        for _ in range(gauntlet.size(10, 1)):
            flood = Flood(server, [chat_body(f"Stream {i}", 300, seed=i) for i in range(3)])
            flood.wait_flowing()
            strike(server.process.pid, None, spare=16 << 20)
            for _ in range(2):
                with contextlib.suppress(OSError):
                    answer = server.post("/v1/chat/completions", data=large)
                    seen.add("large requests answered with 200", answer.status == 200)
            seen.add("other streams that failed", sum(reply.ending != "done" for reply in flood.wait()))
            relieve(server.process.pid)
            seen.add("failed requests afterwards", server.chat().status != 200)
        figures = left_over(server, base, prefix="HTTP process out of memory: ")
    return [*(exactly(f"HTTP process out of memory: {name}", count) for name, count in seen.sums.items()), *figures]


def run_crashes(gauntlet: Gauntlet) -> Sequence[Figure]:
    assert gauntlet.tiny.is_dir()  # made once, before the threads
    with ThreadPoolExecutor(2) as pool:
        workers = pool.submit(lose_workers, gauntlet)
        others = pool.submit(lambda: [*lose_children(gauntlet), *lose_front(gauntlet)])
        figures = [*workers.result(), *others.result()]
    return figures if gauntlet.is_quick else [*figures, *starve_front(gauntlet)]


ROWS = (
    Row("R16", "The server recovers after one of its processes is killed, stopped or out of memory", run_crashes, 900),
)
