"""R15, R16, R18, R27: exceptions in requests, and processes that crash, are killed, are stopped or have no memory."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil  # type: ignore[import-untyped]

from tests.gauntlet.figures import Figure, Gauntlet, Row, counted, exactly, timed
from tests.gauntlet.flood import (
    SHAPE,
    Flood,
    chat_body,
    family,
    health_watched,
    left_over,
    num_changed,
    text_of,
    warm_up,
)
from tests.gauntlet.hooks import (
    ALLOCATION,
    CRASH,
    DETOKENISER,
    GRAMMAR,
    MEMORY,
    SAMPLER,
    SINK,
    START,
    TEMPLATE,
    faulty,
)
from tests.server.rig import Answer, Server, serving
from tests.waiting import eventually

REAL = ("--num-blocks", "400", "--max-num-seqs", "16")
FAKE = ("--num-blocks", "2500", "--max-num-seqs", "32", "--device", "3ms")
KINDS: dict[str, dict[str, Any]] = {
    "sampler": {"seed": SAMPLER},
    "grammar": {"seed": GRAMMAR, "response_format": SHAPE},
    "detokeniser": {"seed": DETOKENISER},
    "callback at the start": {"seed": START},
    "callback of the answer": {"seed": SINK},
    "template": {},
}
PER_ROUND = 12


# R15: one faulty request


def bad_body(kind: str, number: int) -> dict[str, Any]:
    text = TEMPLATE if kind == "template" else f"bad {number}"
    return chat_body(text, 40, stream=number % 2 == 0, **KINDS[kind])


def is_error(answer: Answer) -> bool:
    """Whether the client got an error: a status, or an event of a stream that had begun."""
    return answer.status >= 400 or b'data: {"error":' in answer.body


def strike_requests(server: Server, bodies: Sequence[dict[str, Any]], num_faults: int) -> tuple[int, Counter[str]]:
    """Run streams and, at the same time, faulty requests, until `num_faults` of these have failed."""
    texts = [text_of(reply) for reply in Flood(server, bodies).wait()]
    kinds, number, num_struck = list(KINDS), 0, 0
    found: Counter[str] = Counter()
    while num_struck < num_faults and number < 4 * num_faults * PER_ROUND:
        flood = Flood(server, bodies)
        flood.wait_flowing()
        with ThreadPoolExecutor(4) as pool:
            bad = [bad_body(kinds[i % len(kinds)], i) for i in range(number, number + PER_ROUND)]
            answers = list(pool.map(lambda body: server.post("/v1/chat/completions", body), bad))
        number += PER_ROUND
        num_struck += sum(map(is_error, answers)) if flood.is_running else 0
        found["faulty requests that got no error"] += sum(not is_error(answer) for answer in answers)
        replies = flood.wait()
        found["other streams that failed"] += sum(reply.ending != "done" for reply in replies)
        found["other streams that changed"] += num_changed(replies, texts)
    return num_struck, found


def run_isolation(gauntlet: Gauntlet) -> Iterator[Figure]:
    env = faulty(gauntlet.folder / "hooks")
    for prefix, options in gauntlet.models(*FAKE, real=REAL):
        num_faults = PER_ROUND if prefix else gauntlet.size(100, 12)
        with serving(*options, env=env) as server:
            base, worker = warm_up(server), server.worker_pid
            num_streams, num_tokens = (4, 300) if prefix else (8, gauntlet.size(1200, 400))
            bodies = [chat_body(f"Stream {i}", num_tokens, seed=i) for i in range(num_streams)]
            num_struck, found = strike_requests(server, bodies, num_faults)
            found["restarts of the worker"] += server.worker_pid != worker
            yield Figure(f"{prefix}exceptions injected", num_struck, at_least=num_faults)
            yield from (*counted(prefix, found), *left_over(server, base, prefix=prefix))


# R18: out of memory in a forward pass


def num_repeated(server: Server) -> int:
    return sum("repeating the step of" in line for line in list(server.stderr))


def run_starvation(gauntlet: Gauntlet) -> Iterator[Figure]:
    env = faulty(gauntlet.folder / "hooks", **{MEMORY: "17"})  # every 17th forward pass
    bodies = [chat_body(f"Stream {i}: " + "why " * 20 * i, 60, seed=i, temperature=1.0) for i in range(12)]
    for prefix, options in gauntlet.models(*FAKE, real=REAL):
        num_faults = 10 if prefix else gauntlet.size(100, 6)
        with serving(*options) as server:
            texts = [text_of(reply) for reply in Flood(server, bodies).wait()]
        with serving(*options, env=env) as server:
            base, worker = warm_up(server), server.worker_pid
            found: Counter[str] = Counter()
            while num_repeated(server) < num_faults:
                replies = Flood(server, bodies).wait()
                found["requests without a complete answer"] += sum(reply.ending != "done" for reply in replies)
                found["answers changed"] += num_changed(replies, texts)
            found["restarts of the worker"] += server.worker_pid != worker
            yield Figure(f"{prefix}steps that ran out of memory", num_repeated(server), at_least=num_faults)
            yield from (*counted(prefix, found), *left_over(server, base, prefix=prefix))


# R27: a request that crashes the worker


def crash(server: Server, number: int) -> Counter[str]:
    """Send a request that crashes the worker while two others run. Returns the problems."""
    before = server.worker_pid
    bystanders = Flood(server, [chat_body(f"Bystander {number}-{i}", 3000) for i in range(2)])
    bystanders.wait_flowing()
    (reply,) = Flood(server, [chat_body(f"Crash {number}", 50, stream=number % 2 == 0, seed=CRASH)]).wait()
    others = bystanders.wait()
    eventually(lambda: server.chat(max_tokens=4).status == 200, "another request is served")
    named = re.compile(rf"request_id={re.escape(reply.headers['x-request-id'])} .* error=died")
    eventually(lambda: named.search("".join(list(server.stderr))), "the log names the request")
    return Counter(
        {
            "crashing and other running requests that got no error": sum(
                one.ending != "error" for one in (reply, *others)
            ),
            "crashing requests whose answer asks for a retry": reply.headers.get("x-should-retry") == "true",
            "workers not replaced": before == server.worker_pid,
        }
    )


def run_crash(gauntlet: Gauntlet) -> Iterator[Figure]:
    env = faulty(gauntlet.folder / "hooks")
    for prefix, options in gauntlet.models(*FAKE, real=("--num-blocks", "400")):
        count = 2 if prefix else gauntlet.size(10, 2)
        with serving(*options, env=env) as server:
            base = warm_up(server)
            found: Counter[str] = Counter()
            for number in range(count):
                found.update(crash(server, number))
            num_starts = sum("is ready again" in line for line in list(server.stderr))
            yield exactly(f"{prefix}restarts of the worker after {count} crashes", num_starts, count)
            yield from (*counted(prefix, found), *left_over(server, base, prefix=prefix))


# R16: a worker that is killed, stopped or has no memory

HANG_LIMIT_S = 8  # of the server; with the default, which is longer, a stopped worker would be noticed later
ENDLESS = 3900
SHOWN = {signal.SIGKILL: "killed", signal.SIGSTOP: "stopped", None: "out of memory"}
Fault = signal.Signals | None  # None: its allocations fail
MAX_S = {
    "time until /health is 503": 10.0,
    "time from the 503 until streams end": 2.0,
    "time from the 503 until requests are served": 30.0,
}


def strike(pid: int, fault: Fault, *, spare: int = -ALLOCATION // 2) -> None:
    """Kill or stop a process, or limit its address space."""
    if fault is not None:
        os.kill(pid, fault)
        return
    process, sizes = psutil.Process(pid), []
    for _ in range(20):  # the smallest size is that without short allocations
        sizes.append(int(process.memory_info().vms))
        time.sleep(0.003)
    _, most = resource.prlimit(pid, resource.RLIMIT_AS)
    limit = min(sizes) + spare
    resource.prlimit(pid, resource.RLIMIT_AS, (limit if most < 0 else min(limit, most), most))


def num_zombies(server: Server) -> int:
    def found() -> list[int]:
        return [one.pid for one in family(server)[1:] if one.status() == psutil.STATUS_ZOMBIE]

    with contextlib.suppress(AssertionError, psutil.NoSuchProcess):
        eventually(lambda: not found(), "no zombie", 30.0)
    return len(found())


def lose_worker(server: Server, fault: Fault, longest_s: dict[str, float], found: Counter[str]) -> None:
    pid = server.worker_pid
    with health_watched(server) as health:
        # The first four requests run. The others wait, and the next worker runs them.
        lengths = [ENDLESS] * 4 + [60] * 12
        flood = Flood(server, [chat_body(f"{i}", count, stream=i % 4 < 3) for i, count in enumerate(lengths)])
        flood.wait_flowing(2)
        begin_s = time.monotonic()
        strike(pid, fault)
        replies = flood.wait()
        eventually(lambda: health.first_s(503, begin_s), "the fault is noticed")
        noticed_s = health.first_s(503, begin_s) or begin_s
        back_s = eventually(lambda: health.first_s(200, noticed_s), "serving again") or begin_s
    # A request that had not begun is run by the next worker. The others end with an error.
    failed_s = [flood.ended_s[index] for index, reply in enumerate(replies) if reply.ending == "error"]
    times_s = (noticed_s - begin_s, max([noticed_s, *failed_s]) - noticed_s, back_s - noticed_s)
    longest_s.update({name: max(one_s, longest_s[name]) for name, one_s in zip(MAX_S, times_s, strict=True)})
    found["requests without an answer"] += sum(reply.ending == "broken" for reply in replies)
    found["failed requests afterwards"] += sum(server.chat().status != 200 for _ in range(3))
    found["zombie processes"] += num_zombies(server) + psutil.pid_exists(pid)


def lose_workers(gauntlet: Gauntlet) -> Iterator[Figure]:
    env = faulty(gauntlet.folder / "hooks", **{MEMORY: "allocate"})
    options = ("--max-num-seqs", "4", "--hang-limit", str(HANG_LIMIT_S), "--num-blocks")
    for prefix, model in gauntlet.models("--device", "5ms", *options, "2500", real=(*options, "400")):
        with serving(*model, env=env) as server:
            base = warm_up(server)
            # In the quick run only kills: other faults are noticed only after seconds.
            for fault in (signal.SIGKILL,) if gauntlet.is_quick else SHOWN:
                what = f"{prefix}worker {SHOWN[fault]}: "
                longest_s, found = dict.fromkeys(MAX_S, 0.0), Counter[str]()
                for _ in range(1 if prefix else gauntlet.size(10, 1)):
                    lose_worker(server, fault, longest_s, found)
                yield from (timed(f"{what}{name}", longest_s[name], bar) for name, bar in MAX_S.items())
                yield from counted(what, found)
            yield from left_over(server, base, prefix=f"{prefix}worker: ")


def starve_front(gauntlet: Gauntlet) -> list[Figure]:
    """Requests whose bodies do not fit in memory fail. All other requests, during the fault and later, are answered."""
    where, found = "HTTP process out of memory: ", Counter[str]()
    large = b'{"messages": [{"role": "user", "content": "' + b"x" * (24 << 20) + b'"}]}'
    with serving(str(gauntlet.tiny), "--backend", "fake", *FAKE) as server:
        base, pid = warm_up(server), server.process.pid
        for _ in range(10):
            flood = Flood(server, [chat_body(f"Stream {i}", 300, seed=i) for i in range(3)])
            flood.wait_flowing()
            strike(pid, None, spare=16 << 20)
            for _ in range(2):
                with contextlib.suppress(OSError):
                    answer = server.post("/v1/chat/completions", data=large)
                    found["large requests answered with 200"] += answer.status == 200
            found["other streams that failed"] += sum(reply.ending != "done" for reply in flood.wait())
            _, most = resource.prlimit(pid, resource.RLIMIT_AS)
            resource.prlimit(pid, resource.RLIMIT_AS, (most, most))
            found["failed requests afterwards"] += server.chat().status != 200
        return [*counted(where, found), *left_over(server, base, prefix=where)]


def run_lost_processes(gauntlet: Gauntlet) -> Iterator[Figure]:
    yield from lose_workers(gauntlet)
    if not gauntlet.is_quick:
        yield from starve_front(gauntlet)


ROWS = (
    Row("R15", "An exception in one request does not affect other requests", run_isolation, 300),
    Row("R16", "A worker that is killed, stopped or out of memory is replaced", run_lost_processes, 900),
    Row("R18", "A step that runs out of memory is repeated and loses no request", run_starvation, 300),
    Row("R27", "A request that crashes the worker gets an error and is not run again", run_crash, 300),
)
