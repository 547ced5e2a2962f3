"""R15, R18, R27: a fault of one request or of one step does not affect other requests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.gauntlet.figures import Figure, Gauntlet, Row, exactly
from tests.gauntlet.flood import Flood, chat_body, text_of
from tests.gauntlet.hooks import CRASH, DETOKENISER, GRAMMAR, MEMORY, SAMPLER, SINK, START, TEMPLATE, hooked
from tests.gauntlet.watch import idle_base, left_over
from tests.server.rig import Answer, Reply, Server, serving
from tests.waiting import eventually

FAKE = ("--backend", "fake", "--num-blocks", "2500", "--device", "3ms", "--max-num-seqs", "32")
SHAPE = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "pattern": "[a-z]{20,40}"}}}
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


def strike(server: Server, bodies: Sequence[dict[str, Any]], num_faults: int) -> dict[str, float]:
    """Run streams and, at the same time, faulty requests, until `num_faults` of these have failed."""
    texts = [text_of(reply) for reply in Flood(server, bodies).wait()]
    kinds, number = list(KINDS), 0
    found = {"struck": 0.0, "touched": 0.0, "changed": 0.0, "silent": 0.0, "rounds": 0.0}
    while found["struck"] < num_faults and found["rounds"] < 4 * num_faults:
        flood = Flood(server, bodies)
        flood.wait_flowing()
        with ThreadPoolExecutor(4) as pool:
            bad = [bad_body(kinds[(number + i) % len(kinds)], number + i) for i in range(PER_ROUND)]
            number += PER_ROUND
            answers = list(pool.map(lambda body: server.post("/v1/chat/completions", body), bad))
        found["struck"] += sum(map(is_error, answers)) if flood.is_running else 0
        found["silent"] += sum(not is_error(answer) for answer in answers)
        for reply, text in zip(flood.wait(), texts, strict=True):
            found["touched"] += reply.ending != "done"
            found["changed"] += reply.ending == "done" and text_of(reply) != text
        found["rounds"] += 1
    return found


def warm_up(server: Server) -> None:
    """Start the threads, and the child that checks grammars, which start at the first load."""
    assert server.chat(response_format=SHAPE, ignore_eos=False, max_tokens=60).status == 200
    assert all(reply.ending == "done" for reply in Flood(server, [chat_body(f"{i}", 4) for i in range(8)]).wait())


def run_isolation(gauntlet: Gauntlet) -> Sequence[Figure]:
    figures: list[Figure] = []
    num_faults = gauntlet.size(100, 12)
    with serving(str(gauntlet.tiny), *FAKE, env=hooked(gauntlet.folder / "hooks")) as server:
        warm_up(server)
        base, worker = idle_base(server), server.worker_pid
        bodies = [chat_body(f"Stream {i}", gauntlet.size(1200, 400), seed=i) for i in range(8)]
        found = strike(server, bodies, num_faults)
        figures += [
            Figure("exceptions injected", found["struck"], at_least=num_faults),
            exactly("other streams that failed or changed", found["touched"] + found["changed"]),
            exactly("faulty requests that got no error", found["silent"]),
            exactly("restarts of the worker", int(server.worker_pid != worker)),
            *left_over(server, base),
        ]
    if not gauntlet.is_quick:
        figures += _isolation_of_the_real_model(gauntlet)
    return figures


def _isolation_of_the_real_model(gauntlet: Gauntlet) -> list[Figure]:
    """The same with the real model. Texts are not compared, because other batches round differently."""
    env = hooked(gauntlet.folder / "hooks")
    with serving(gauntlet.model, "--num-blocks", "400", "--max-num-seqs", "16", env=env) as server:
        warm_up(server)
        worker = server.worker_pid
        found = strike(server, [chat_body(f"Tell me of {i}.", 300) for i in range(4)], PER_ROUND)
        return [
            Figure("real model: exceptions injected", found["struck"], at_least=PER_ROUND),
            exactly("real model: other streams that failed", found["touched"]),
            exactly("real model: restarts of the worker", int(server.worker_pid != worker)),
            exactly("real model: KV blocks held afterwards", server.wait_free()["num_in_use"]),
        ]


# R18: out of memory in a forward pass


def starve(server: Server, bodies: Sequence[dict[str, Any]], texts: Sequence[str], num_faults: int) -> dict[str, float]:
    """Run streams until `num_faults` steps ran out of memory. `texts`: the expected answers; empty: not compared."""
    found = {"asked": 0.0, "lost": 0.0, "changed": 0.0}
    while num_repeated(server) < num_faults:
        replies = Flood(server, bodies).wait()
        found["asked"] += len(replies)
        found["lost"] += sum(reply.ending != "done" for reply in replies)
        found["changed"] += sum(text_of(reply) != text for reply, text in zip(replies, texts, strict=False))
    return found


def num_repeated(server: Server) -> int:
    return sum("repeating the step of" in line for line in list(server.stderr))


def run_starvation(gauntlet: Gauntlet) -> Sequence[Figure]:
    num_faults = gauntlet.size(100, 6)
    bodies = [chat_body(f"Stream {i}: " + "why " * 20 * i, 60, seed=i, temperature=1.0) for i in range(12)]
    with serving(str(gauntlet.tiny), *FAKE) as server:
        texts = [text_of(reply) for reply in Flood(server, bodies).wait()]
    env = hooked(gauntlet.folder / "hooks", **{MEMORY: "17"})  # every 17th forward pass
    with serving(str(gauntlet.tiny), *FAKE, env=env) as server:
        warm_up(server)
        base, worker = idle_base(server), server.worker_pid
        found = starve(server, bodies, texts, num_faults)
        figures = [
            Figure("steps that ran out of memory", num_repeated(server), at_least=num_faults),
            exactly(f"requests without a complete answer, of {found['asked']:.0f}", found["lost"]),
            exactly("answers changed", found["changed"]),
            exactly("restarts of the worker", int(server.worker_pid != worker)),
            *left_over(server, base),
        ]
    if not gauntlet.is_quick:
        with serving(gauntlet.model, "--num-blocks", "400", "--max-num-seqs", "16", env=env) as server:
            found = starve(server, [chat_body(f"Tell me of {i}.", 40) for i in range(8)], (), 10)
            figures += [
                Figure("real model: steps that ran out of memory", num_repeated(server), at_least=10),
                exactly(f"real model: requests without a complete answer, of {found['asked']:.0f}", found["lost"]),
                exactly("real model: KV blocks held afterwards", server.wait_free()["num_in_use"]),
            ]
    return figures


# R27: a request that crashes the worker


def crash(server: Server, number: int) -> dict[str, float]:
    """Send a request that crashes the worker while two others run. Returns the problems."""
    before = server.worker_pid
    bystanders = Flood(server, [chat_body(f"Bystander {number}-{i}", 3000) for i in range(2)])
    bystanders.wait_flowing()
    (reply,) = Flood(server, [chat_body(f"Crash {number}", 50, stream=number % 2 == 0, seed=CRASH)]).wait()
    others = bystanders.wait()
    eventually(lambda: _is_served(server), "another request is served")
    is_named = _is_logged(server, reply)
    after = server.worker_pid
    return {
        "unanswered": sum(one.ending != "error" for one in (reply, *others)),
        "unnamed": not is_named,
        "not replaced": before == after,
        "retryable": reply.headers.get("x-should-retry") == "true",
    }


def _is_served(server: Server) -> bool:
    return server.chat(max_tokens=4).status == 200


def _is_logged(server: Server, reply: Reply) -> bool:
    wanted = re.compile(rf"request_id={re.escape(reply.headers['x-request-id'])} .* error=died")
    return bool(eventually(lambda: wanted.search("".join(list(server.stderr))), "the log names the request", 30.0))


def run_crash(gauntlet: Gauntlet) -> Sequence[Figure]:
    num_crashes = gauntlet.size(10, 2)
    figures: list[Figure] = []
    parts: list[tuple[str, tuple[str, ...], int]] = [("", (str(gauntlet.tiny), *FAKE), num_crashes)]
    if not gauntlet.is_quick:
        parts.append(("real model: ", (gauntlet.model, "--num-blocks", "400"), 2))
    for prefix, options, count in parts:
        with serving(*options, env=hooked(gauntlet.folder / "hooks")) as server:
            warm_up(server)
            base = idle_base(server)
            assert server.chat(response_format=SHAPE, ignore_eos=False, max_tokens=60).status == 200
            faults = [crash(server, number) for number in range(count)]
            num_starts = sum("is ready again" in line for line in list(server.stderr))
            figures += [
                exactly(f"{prefix}restarts of the worker after {count} crashing requests", num_starts, count),
                exactly(
                    f"{prefix}crashing and other running requests that got no error",
                    sum(one["unanswered"] for one in faults),
                ),
                exactly(f"{prefix}crashing requests that the log does not name", sum(one["unnamed"] for one in faults)),
                exactly(
                    f"{prefix}crashing requests whose answer asks for a retry", sum(one["retryable"] for one in faults)
                ),
                exactly(f"{prefix}workers not replaced", sum(one["not replaced"] for one in faults)),
                *left_over(server, base, prefix=prefix),
            ]
    return figures


ROWS = (
    Row("R15", "An exception in one request does not affect other requests", run_isolation, 300),
    Row("R18", "A step that runs out of memory is repeated and loses no request", run_starvation, 300),
    Row(
        "R27",
        "A request that crashes the worker gets an error, is named in the log and is not run again",
        run_crash,
        300,
    ),
)
