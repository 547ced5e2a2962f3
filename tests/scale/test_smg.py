"""SMG in front of two servers: a router that people already run, without code of ours."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.weights.hub import DEFAULT_MODEL
from tests.server.rig import Server, serving
from tests.waiting import HANG_S, eventually

SYSTEM = "You are a librarian. " + " ".join(f"Rule {number}: say it plainly." for number in range(60))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def routing(*servers: Server) -> Iterator[Server]:
    """SMG with the command of docs/scale.md."""
    port = free_port()
    command = [sys.executable, "-m", "smg.launch_router", "--policy", "cache_aware", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--worker-urls", *(server.url for server in servers)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True, env=os.environ)
    router = Server(process, f"http://127.0.0.1:{port}", [], [])
    try:

        def is_ready() -> bool:
            assert process.poll() is None, "it has ended"
            try:
                return ask(router, "Hi", "Hi") is not None
            except OSError:
                return False

        eventually(is_ready, "the router knows its servers")
        yield router
    finally:
        process.kill()
        process.wait(HANG_S)


def ask(router: Server, system: str, question: str) -> int | None:
    """The cached tokens of a request; None: it was refused."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"model": DEFAULT_MODEL, "messages": messages, "max_tokens": 4, "temperature": 0}
    answer = router.post("/v1/chat/completions", body)
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]) if answer.status == 200 else None


@pytest.mark.nightly  # needs a router and two servers
def test_conversations_stay_and_a_dead_server_is_left_out(default_model: Path) -> None:
    del default_model  # is here now
    options = ("--num-blocks", "300")
    with serving(*options) as one, serving(*options) as other, routing(one, other) as router:
        for persona in range(4):
            hits = [ask(router, f"Persona {persona}. {SYSTEM}", f"Question {turn}?") for turn in range(3)]
            assert all(hit is not None and hit > 500 for hit in hits[1:]), hits
        other.process.kill()
        other.process.wait(HANG_S)
        eventually(lambda: ask(router, "Hi", "After it?") is not None, "the other server answers")
