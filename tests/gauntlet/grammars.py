"""R13: hostile templates, regular expressions, schemas and grammars."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tests.gauntlet.crowds import CHAT, memory_of
from tests.gauntlet.figures import Figure, Gauntlet, Row, exactly
from tests.gauntlet.flood import Streams, left_over, percentile, streaming, warm_up
from tests.server.rig import FAKE, Server, ask_async, serving
from tests.text.test_rendering import HOSTILE as TEMPLATES
from tests.text.test_schemas import HOSTILE as SCHEMAS
from tests.text.test_schemas import PRODUCTS

MAX_ANSWER_S = 10.0  # a trial may take 2 s of CPU time, and others wait for the same process
MAX_SLOWER = 10.0  # percent
HI = [{"role": "user", "content": "Hi"}]
REGEXES = (
    "(a+)+b",
    "(a|aa)+$",
    "(a|a?)+b",
    "(.*a){25}",
    "[ab]*a[ab]{40}",
    "[ab]*a[ab]{400}",
    "a{100000}",
    "((a{1,100}){1,100}){1,100}",
    "(a|b|ab|ba|aab){1,3000}(.*x){30}",
    "(" * 5000 + "a" + ")" * 5000,
    "(?:" * 900 + "a" + ")*" * 900,
    "|".join(f"w{i}" for i in range(3000)),
    "(x+x+)+y",
    "(?=a)b",
    r"(a)\1",
    "[^\\s\\S]",
    r"\p{L}{1,1000}" * 8,
    "(?i:" + "ß" * 500 + ")*",
    "a{4294967296}",
    "[a-\U0010ffff]{1,2000}[b-\U0010ffff]{1,2000}",
)
MORE_SCHEMAS: dict[str, Any] = {
    "itself": {"$ref": "#"},
    "elsewhere": {"$ref": "http://127.0.0.1:9/x"},
    "a file": {"$ref": "file:///etc/passwd"},
    "an enum of 10^5": {"enum": [f"value {i}" for i in range(100_000)]},
    "nothing": {"enum": []},
    "a multiple": {"type": "integer", "multipleOf": 99999999},
    "long texts": {"type": "string", "minLength": 10**6, "maxLength": 2 * 10**6},
    "many items": {"type": "array", "minItems": 10**6, "items": {"type": "integer"}},
    "a pattern": {"type": "string", "pattern": "^(a+)+$"},
    "10^4 properties": {"properties": {f"p{i}": {"type": "string"} for i in range(10_000)}},
}
LARK = (
    "start: start",
    "start: nothing",
    "start: " + "(" * 4000,
    'start: ("a" | "a" "a")* "b"',
    "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(60)).replace("a0", "start") + '\na60: "x"',
    "\n".join(f"a{i}: a{i + 1}" for i in range(4000)).replace("a0", "start"),
    'start: a a a a a a\na: "x"* | "y"* | a a',
    "root ::= [a-z" * 1000,
)


ALL_SCHEMAS = {**SCHEMAS, **{name: schema for name, (schema, _) in PRODUCTS.items()}, **MORE_SCHEMAS}


def _tools() -> Iterator[tuple[str, dict[str, Any]]]:
    """Schemas as parameters of a tool. They are a part of the prompt, so they are not sent to the real model."""
    for name, schema in ALL_SCHEMAS.items():
        yield f"tool {name}", {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}


def _requests(template_step: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, source in list(TEMPLATES.items())[::template_step]:
        yield f"template {name}", {"chat_template": source}
        yield f"template argument {name}", {"chat_template_kwargs": {"chat_template": source}}
    for source in REGEXES:
        yield f"regex {source[:30]}", {"structured_outputs": {"regex": source}}
    for name, schema in ALL_SCHEMAS.items():
        shape = {"name": "x", "schema": schema}
        yield f"schema {name}", {"response_format": {"type": "json_schema", "json_schema": shape}}
    deep: Any = {}
    for _ in range(400):
        deep = {"items": deep}
    yield "schema 400 deep", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}}
    for source in LARK:
        yield f"grammar {source[:30]}", {"structured_outputs": {"grammar": source}}


def run(gauntlet: Gauntlet) -> Iterator[Figure]:
    requests = list(_requests(gauntlet.size(1, 6)))[:: gauntlet.size(1, 4)]
    ordinary: list[tuple[str, dict[str, Any]]] = [("ordinary", {"user": f"{i}"}) for i in range(gauntlet.size(200, 8))]
    blocks = () if gauntlet.is_quick else ("--num-blocks", "1000")
    with serving(*gauntlet.one_model("--device", "10ms"), *blocks) as server:
        base = warm_up(server)
        worker_pid = server.worker_pid
        with streaming(server, gauntlet.size(16, 4)) as streams, memory_of(server.process.pid, worker_pid) as memory:
            streams.wait(gauntlet.size(1500, 20))
            alone_s = streams.take()
            asyncio.run(_send(gauntlet, server, ordinary[::2]))
            before_s = streams.take()
            yield from asyncio.run(_send(gauntlet, server, requests))
            beside_s = streams.take()
            asyncio.run(_send(gauntlet, server, ordinary[1::2]))
            before_s += streams.take()
        yield from (
            Figure("growth of memory during hostile requests", memory.growth_mb, "MB", at_most=512),
            *_slower(streams, alone_s, before_s, beside_s),
            exactly("restarts of the worker", int(server.worker_pid != worker_pid)),
            *left_over(server, base),
        )
    yield from _in_tools(gauntlet)


async def _send(gauntlet: Gauntlet, server: Server, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[Figure]:
    """Send them two at a time, with short answers."""
    statuses: Counter[str] = Counter()
    times_s: list[float] = []
    rest = iter(requests)

    async def send() -> None:
        for name, fields in rest:
            begin = time.monotonic()
            reply = await ask_async(server, CHAT, {"messages": HI, "max_tokens": 4, **fields})
            times_s.append(time.monotonic() - begin)
            is_known = reply.status in (200, 400, 413) and reply.is_whole
            statuses[str(reply.status) if is_known else "other"] += 1
            if not is_known or times_s[-1] > MAX_ANSWER_S / 2:
                gauntlet.say(f"{name}: {reply.status} in {times_s[-1]:.1f} s {reply.body[:200]!r}")

    await asyncio.gather(send(), send())
    return [
        Figure("hostile requests", len(requests), at_least=gauntlet.size(60, 12)),
        Figure(
            "hostile requests refused with 400 or 413", statuses["400"] + statuses["413"], at_least=gauntlet.size(50, 5)
        ),
        Figure("hostile requests answered", statuses["200"]),
        exactly("requests neither answered nor refused", statuses["other"]),
        Figure("longest time to an answer or a refusal", max(times_s), "s", at_most=MAX_ANSWER_S, is_timed=True),
    ]


def _slower(
    streams: Streams, alone_s: Sequence[float], before_s: Sequence[float], beside_s: Sequence[float]
) -> list[Figure]:
    """Compare with the time beside ordinary requests: a prompt makes the step of all streams longer, hostile or not."""
    alone, before, beside = (percentile(times_s, 99) for times_s in (alone_s, before_s, beside_s))
    return [
        exactly("other streams that failed", len(streams.problems)),
        Figure("time between tokens of other streams without other requests, p99", alone * 1000, "ms"),
        Figure("time between tokens of other streams beside ordinary requests, p99", before * 1000, "ms"),
        Figure("time between tokens of other streams beside hostile requests, p99", beside * 1000, "ms"),
        Figure(
            "increase of the time between tokens of other streams, hostile against ordinary requests, p99",
            100 * (beside / before - 1),
            "%",
            at_most=MAX_SLOWER,
            is_timed=True,
        ),
    ]


def _in_tools(gauntlet: Gauntlet) -> list[Figure]:
    with serving(str(gauntlet.tiny), *FAKE) as server:
        figures = asyncio.run(_send(gauntlet, server, list(_tools())[:: gauntlet.size(1, 6)]))
        others = [one for one in figures if "hostile" not in one.name]
        return [replace(one, name=f"hostile schemas in tools: {one.name}") for one in others]


ROWS = (Row("R13", "Hostile templates, patterns and schemas do not harm other requests", run, limit_s=480),)
