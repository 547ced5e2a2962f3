"""R33: large bodies that arrive at the same moment, at fresh and at warm servers.

Large bodies are decoded in threads. msgspec is not safe in the first use of a type (decision 0044).
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

from quire.server.app import ENDPOINTS
from tests.gauntlet.bodies import RICH
from tests.gauntlet.figures import Figure, Gauntlet, Row, counted
from tests.gauntlet.flood import idle_base, left_over, sum_of
from tests.server import corpus
from tests.server.rig import FAKE, Server, request_bytes, serving, status_of
from tests.server.test_decoding import read_report, reporting
from tests.waiting import HANG_S

PADDING = {"padding": "x" * (72 << 10)}  # an unknown field: larger bodies than 64 KiB are decoded in a thread
FIRST = (corpus.MESSAGES, corpus.COUNT)  # the types with the most fields: their information takes longest to build
ADMIN = "sk-admin-0000003"
# Valid bodies of the paths that `RICH` does not have.
OTHERS: dict[str, dict[str, Any]] = {
    "/v1/models/load": {"model": "tiny"},
    "/v1/models/unload": {"model": "unknown"},  # the model must stay
    "/v1/models/pin": {"model": "tiny"},
    "/v1/models/unpin": {"model": "tiny"},
    "/v1/batches": {"input_file_id": "file-unknown", "endpoint": corpus.CHAT, "completion_window": "24h"},
    "/api/show": {"model": "tiny"},
    "/api/pull": {"model": "../unknown"},  # refused before a download
}
PATHS = tuple(sorted({row.path for row in ENDPOINTS if row.body is not None}, key=lambda path: path not in FIRST))
READ = tuple(row.path for row in ENDPOINTS if row.method == "GET" and not row.streams and "{" not in row.path)


def large_bodies(path: str) -> list[dict[str, Any]]:
    """Bodies of one endpoint that are decoded in a thread: with padding, many tools, or many messages."""
    body = {**OTHERS, **RICH}[path]
    found = [{**body, **PADDING}]
    if "tools" in body:
        (tool,) = body["tools"]
        found.append({**body, "tools": [_named(tool, number) for number in range(18)]})
    if "messages" in body and path != corpus.CHAT:
        roles = ("user", "assistant")
        found.append({**body, "messages": [{"role": roles[i % 2], "content": f"Text {i}."} for i in range(2001)]})
    return found


def _named(tool: dict[str, Any], number: int) -> dict[str, Any]:
    """A copy of a tool, with another name and a description of 4 kB."""
    if "function" in tool:
        return {**tool, "function": _named(tool["function"], number)}
    return {**tool, "name": f"tool_{number}", "description": "What it does. " * 290}


@dataclass
class Pairs:
    """Sends equal requests at the same moment, and counts the statuses of the answers. 0: there was none."""

    server: Server
    size: int
    num_sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter)

    def send_all(self, *, first: int) -> None:
        """Send one group to each endpoint, with each of its bodies. `first`: where the order begins."""
        order = PATHS[first % len(PATHS) :] + PATHS[: first % len(PATHS)]
        key = self.server.key
        groups = [request_bytes(path, body, key=key) for path in order for body in large_bodies(path)]
        groups += [request_bytes(path, None, key=key, method="GET") for path in READ]
        with ThreadPoolExecutor(self.size) as pool:
            for data in groups:
                if self.server.process.poll() is not None:
                    return
                self._send_group(pool, data)

    def _send_group(self, pool: ThreadPoolExecutor, data: bytes) -> None:
        ready = Barrier(self.size)
        self.statuses.update(pool.map(lambda _: self._send(data, ready), range(self.size)))
        self.num_sent += 1

    def _send(self, data: bytes, ready: Barrier) -> int:
        """Send the last byte at the same moment as the others. Returns the status."""
        try:
            with socket.create_connection(self.server.address, timeout=HANG_S) as sock:
                sock.sendall(data[:-1])
                ready.wait(HANG_S)
                sock.sendall(data[-1:])
                return status_of(sock.recv(64, socket.MSG_WAITALL))
        except (OSError, BrokenBarrierError):
            ready.abort()
            return 0


def run(gauntlet: Gauntlet) -> Sequence[Figure]:
    """Fresh servers, whose first requests are groups of large bodies, and then more groups at the same servers."""
    num_servers, num_rounds = gauntlet.size(40, 2), gauntlet.size(5, 1)
    found = Counter({"servers that died": 0, "restarts of the worker": 0})
    num_sent, left = 0, list[Figure]()
    for number in range(num_servers):
        folder = gauntlet.folder / f"hooks{number}"
        options = (str(gauntlet.tiny), *FAKE, "--served-model-name", "tiny", "--admin-api-key", ADMIN)
        with serving(*options, key=ADMIN, env=reporting(folder)) as server:
            pairs = Pairs(server, 2 + number % 2)
            base = None
            for round_number in range(num_rounds):
                pairs.send_all(first=number // 2 * 5 + round_number)
                if server.process.poll() is not None:
                    found["servers that died"] += 1
                    break
                server.post("/v1/cache/clear")  # pins hold blocks
                base = base or idle_base(server)
            else:
                assert base is not None
                found["restarts of the worker"] += int(sum_of(server, "quire:worker_restarts_total"))
                left = left_over(server, base)
            num_sent += pairs.num_sent
            found["large bodies without an answer"] += pairs.statuses[0]
            found["large bodies answered with 5xx"] += sum(pairs.statuses[one] for one in pairs.statuses if one >= 500)
            found["tracebacks in the log"] += server.log.count("Traceback")
            gauntlet.say(f"server {number}: {pairs.num_sent} groups, {dict(pairs.statuses)}, {server.process.poll()}")
        found["types that a request used first"] += len(_report(folder))
    least = gauntlet.size(200, 2) * len(PATHS)
    return [
        Figure("endpoints with a body", len(PATHS), at_least=16),
        Figure("fresh servers", num_servers, at_least=num_servers),
        Figure("groups of two or three large bodies at the same moment", num_sent, at_least=least),
        *counted("", found),
        *left,
    ]


def _report(folder: Path) -> list[str]:
    try:
        return read_report(folder)
    except FileNotFoundError:
        return ["no report: the server died"]


ROWS = (Row("R33", "Large requests at the same moment do not end the server", run, 1200),)
