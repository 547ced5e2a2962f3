"""Turns of agents, through a proxy that forces a small model to call an agent's tool exactly once.

The first request that offers the tool gets a `tool_choice` that names it, and a tool schema with a single value, so
that the grammar determines the call. Every other request gets the choice `none`, because the model would call tools
endlessly. Nothing else in a request is changed. With QUIRE_RECORD, the unchanged requests are written into that folder:
`trim.py` makes golden bodies of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import checks

TIMEOUT_S = 3600  # a first prompt of 8,000 to 12,000 tokens takes minutes on a CPU, more on a busy one
# A schema bounds the answer: a small model may not stop, and Claude Code retries a truncated answer.
SHORT = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 40}},
    "required": ["answer"],
    "additionalProperties": False,
}
WORD = "heron-1729"  # only the tool can find it
RECORDED = os.environ.get("QUIRE_RECORD")


class Passed(NamedTuple):
    """A forwarded request."""

    path: str
    body: dict[str, Any]
    status: int
    is_forced: bool
    ignored: str  # the server's x-quire-ignored-fields


class Forced(NamedTuple):
    tool: str
    values: Mapping[str, str]  # of its arguments


def has_result(body: Mapping[str, Any]) -> bool:
    """Whether the conversation contains a tool's result."""
    found = json.dumps(body)
    return '"tool_result"' in found or '"function_call_output"' in found


def force(path: str, body: dict[str, Any], forced: Forced | None) -> bool:
    """Force a call of the tool if it is offered and was not called yet; otherwise forbid calls."""
    offered = body.get("tools") or []
    tools = [tool for tool in offered if forced is not None and tool.get("name") == forced.tool]
    if forced is None or not tools or has_result(body):
        if offered:
            body["tool_choice"] = {"type": "none"} if "/messages" in path else "none"
        return False
    key = "input_schema" if "input_schema" in tools[0] else "parameters"
    properties = {name: {"type": "string", "enum": [value]} for name, value in forced.values.items()}
    tools[0][key] = {"type": "object", "properties": properties, "required": list(properties)}
    tools[0][key]["additionalProperties"] = False
    kind = "tool" if "/messages" in path else "function"
    body["tool_choice"] = {"type": kind, "name": forced.tool}
    return True


@contextlib.contextmanager
def proxy(url: str, forced: Forced | None) -> Iterator[tuple[str, list[Passed]]]:
    """Run the proxy. Yields its URL and the list of forwarded requests."""
    passed: list[Passed] = []
    host, _, port = url.removeprefix("http://").partition(":")

    class Handler(BaseHTTPRequestHandler):
        def pass_on(self) -> None:
            data = self.rfile.read(int(self.headers.get("content-length") or 0))
            body: dict[str, Any] = json.loads(data) if data.startswith(b"{") else {}
            if RECORDED is not None:
                row = {"method": self.command, "path": self.path, "headers": dict(self.headers), "body": body}
                Path(RECORDED, f"{time.time_ns()}.json").write_text(json.dumps(row))
            is_forced = force(self.path, body, forced)
            upstream = HTTPConnection(host, int(port), timeout=TIMEOUT_S)
            kept = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "content-length", "connection")}
            upstream.request(self.command, self.path, json.dumps(body) if body else data, kept)
            answer = upstream.getresponse()
            ignored = answer.headers.get("x-quire-ignored-fields", "")
            passed.append(Passed(self.path, body, answer.status, is_forced, ignored))
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()
            while piece := answer.read1():
                self.wfile.write(piece)
                self.wfile.flush()
            upstream.close()

        def __getattr__(self, name: str) -> Any:
            if name.startswith("do_"):
                return self.pass_on
            raise AttributeError(name)

        def log_message(self, format: str, *values: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", passed
    finally:
        server.shutdown()
        server.server_close()


def chat(answer: Callable[[str], str]) -> str:
    """A turn without a tool. `answer` runs the agent with this URL."""
    with proxy(checks.URL, None) as (url, passed):
        text = answer(url)
    checks.expect([one.status for one in passed] == [200], passed)
    return f"{text}; ignored: {passed[0].ignored}"


def tool(forced: Forced, answer: Callable[[str, str], str]) -> tuple[str, dict[str, Any]]:
    """A turn in which the model calls the tool, and the agent runs it and sends its result. Returns that request."""
    (checks.FOLDER / "word.txt").write_text(WORD)
    with proxy(checks.URL, forced) as (url, passed):
        text = answer(url, "Read the word in word.txt.")
    checks.expect([one.status for one in passed] == [200, 200], passed)
    checks.expect([one.is_forced for one in passed] == [True, False], passed)
    return f"called, run and answered: {text}", passed[1].body
