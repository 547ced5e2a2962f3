"""R35: one key sends expensive requests to each endpoint, and the chats of another key must hardly be slower."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.gauntlet.figures import Figure, Gauntlet, Row, exactly, timed
from tests.gauntlet.flood import idle_base, left_over
from tests.gauntlet.tenants import (
    ADMIN,
    ATTACKER,
    CHAT,
    COMPLETIONS,
    VICTIM,
    WORDS,
    ask_chat,
    ask_often,
    chat_of,
)
from tests.server.rig import Server, request_bytes, serving, status_of
from tests.waiting import HANG_S, eventually, repeating

NUM_IDS = 250_000  # of /detokenize: a body may have 262,144 values
MAX_RATIO = 8.0


@dataclass(frozen=True)
class Expensive:
    """A request that makes the server work, and how many clients send it."""

    name: str
    path: str
    body: Any = None
    method: str = "POST"
    num_clients: int = 12


def expensive() -> tuple[Expensive, ...]:
    text = WORDS * 200
    long_chat = [{"role": ("user", "assistant")[i % 2], "content": f"Text {i}."} for i in range(301)]
    ids = [20 + i % 50 for i in range(3000)]
    scores = chat_of("Hi", 400, n=8, logprobs=True, top_logprobs=20)
    scored = {"prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 5}
    return (
        Expensive("detokenize", "/detokenize", {"tokens": [i % 100 for i in range(NUM_IDS)]}),
        Expensive("tokenize", "/tokenize", {"prompt": text}),
        Expensive("tokenize messages", "/tokenize", {"messages": long_chat}),
        Expensive("templates", "/apply-template", {"messages": long_chat}),
        Expensive("count_tokens", "/v1/messages/count_tokens", {"model": "tiny", "messages": long_chat}),
        Expensive("explain", "/v1/cache/explain", {"prompt": ids}),
        Expensive("explain messages", "/v1/cache/explain", {"messages": long_chat}),
        Expensive("scored prompts", COMPLETIONS, scored, num_clients=2),
        Expensive("echoes", COMPLETIONS, {"prompt": ids, "max_tokens": 1, "echo": True}),
        Expensive("scored answers", CHAT, scores, num_clients=2),
        Expensive("blocks", "/v1/watch/blocks?first=1&count=2000", method="GET"),
        Expensive("metrics", "/metrics", method="GET"),
        Expensive("openapi", "/openapi.json", method="GET"),
        Expensive("requests", "/v1/requests", method="GET"),
        Expensive("stats", "/v1/cache/stats", method="GET"),
        Expensive("watch", "/v1/watch?once=true", method="GET", num_clients=2),
    )


@dataclass
class Client:
    """A client of the attacker: sends the same request again and again, on one connection each time."""

    server: Server
    data: bytes
    num_answers: int = 0
    wrong: list[int] = field(default_factory=list)

    def send(self) -> None:
        status = 0
        with contextlib.suppress(OSError), socket.create_connection(self.server.address, timeout=HANG_S) as sock:
            sock.sendall(self.data)
            status = status_of(sock.recv(64, socket.MSG_WAITALL))
            sock.shutdown(socket.SHUT_WR)
        if status == 200:
            self.num_answers += 1
        else:
            self.wrong.append(status)


def attacked(victim: Server, one: Expensive, count: int) -> tuple[float, int, Client]:
    """The time of a chat during an attack, how many failed, and the attacker."""
    attacker = Client(victim, request_bytes(one.path, one.body, key=ATTACKER, method=one.method))
    with repeating(attacker.send, num_threads=one.num_clients):
        eventually(lambda: attacker.num_answers or attacker.wrong, f"an answer of {one.path}")
        during_s, num_failed = ask_often(ask_chat, victim, count)
    return during_s, num_failed, attacker


def run(gauntlet: Gauntlet) -> Iterator[Figure]:
    fake = ("--backend", "fake", "--num-blocks", "4000", "--device", "5ms", "--served-model-name", "tiny")
    keys = ("--api-key", ATTACKER, "--api-key", VICTIM, "--admin-api-key", ADMIN)
    num_wrong = num_failed = 0
    with serving(str(gauntlet.tiny), *fake, *keys, key=ADMIN) as server:
        victim = replace(server, key=VICTIM)
        ask_often(ask_chat, victim, 4)
        base = idle_base(server)
        count = gauntlet.size(12, 1)
        for one in expensive():
            quiet_s, _ = ask_often(ask_chat, victim, count)
            during_s, failed, attacker = attacked(victim, one, count)
            num_failed += failed
            num_wrong += len(attacker.wrong)
            ratio = during_s / quiet_s
            yield timed(f"{one.name}: time of another key's chat", ratio, MAX_RATIO, "x")
            gauntlet.say(f"{one.name}: {quiet_s:.3f} s, {during_s:.3f} s ({ratio:.1f} x), wrong: {attacker.wrong[:3]}")
        yield exactly("chats of the other key that failed", num_failed)
        yield exactly("expensive requests with an unexpected status", num_wrong)
        yield from left_over(server, base, spare_files=4)


ROWS = (Row("R35", "Expensive requests of a key take turns with those of other keys", run, 600),)
