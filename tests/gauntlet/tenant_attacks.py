"""R30: one API key attacks each shared resource, and the requests of another key must still be answered."""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from openai import OpenAIError

from tests.gauntlet.figures import Figure, Gauntlet, Row, exactly, timed
from tests.gauntlet.flood import chat_body, idle_base, left_over, wait_for_a_place
from tests.server.rig import Server, serving
from tests.server.test_batches import client_of, line, submit, upload
from tests.waiting import eventually

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ATTACKER, VICTIM, ADMIN = "sk-attacker-0001", "sk-victim-00001", "sk-admin-0000003"
MAX_SEQS = 8
MAX_QUEUE = 32
MAX_CONNECTIONS = 192
STEP_S = 0.005
MAX_DELAY = 100  # steps, half a second: the attacker's whole queue would take longer
MIB = 1 << 20
WORDS = "The quick brown fox jumps over the lazy dog. "
Attack = Callable[["Attacker"], None]


WITH_REAL_MODEL = ("queue places", "many samples (n)", "tokenisation", "batch jobs")


@dataclass
class Attacker:
    """Opens connections of one key and keeps them open."""

    server: Server
    num: int  # size of the attack; each uses a multiple of it
    sockets: list[socket.socket] = field(default_factory=list)
    batch_id: str = ""

    def send(self, body: object, path: str = CHAT) -> socket.socket:
        sock = self.server.send_request(body, path)
        self.sockets.append(sock)
        return sock

    def begin(self, path: str, content_type: str, num_bytes: int, data: bytes = b"") -> None:
        """Send the headers of a request and a part of its body."""
        sock = self.server.raw()
        self.sockets.append(sock)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {self.server.key}\r\n"
        sock.sendall(f"{head}content-type: {content_type}\r\ncontent-length: {num_bytes}\r\n\r\n".encode())
        with contextlib.suppress(OSError):  # it was refused
            sock.sendall(data)

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()
        self.sockets.clear()
        if self.batch_id:
            self.server.post(f"/v1/batches/{self.batch_id}/cancel")


def chat_of(text: str, num_tokens: int, **fields: Any) -> dict[str, Any]:
    return chat_body(text, num_tokens, stream=False, **fields)


# The attacks: each has begun when its function returns, and lasts until the attacker closes


def queue_places(attacker: Attacker) -> None:
    def is_full() -> bool:
        """On a busy machine the first requests may have ended when the last ones are sent: then it sends more."""
        for _ in range(4 * MAX_QUEUE):
            attacker.send(chat_of("Hi", 40))
            if attacker.server.stats()["num_waiting"] >= MAX_QUEUE - 1:
                return True
        attacker.close()
        return False

    for _ in range(3 * MAX_QUEUE):
        attacker.send(chat_of("Hi", 40))
    eventually(is_full, "the queue is full")


def samples(attacker: Attacker) -> None:
    for _ in range(8):
        attacker.send(chat_of("Hi", 40, n=16, temperature=1))
    eventually(lambda: attacker.server.stats()["num_running"] >= MAX_SEQS, "the samples run")


def long_prompts(attacker: Attacker) -> None:
    for number in range(MAX_QUEUE):
        attacker.send({"prompt": [number + 10, *[20] * 3000], "max_tokens": 2}, COMPLETIONS)
    eventually(lambda: attacker.server.stats()["num_running"] > 0, "a prompt is being computed")


def blocks(attacker: Attacker) -> None:
    """Answers that grow until the pool is full."""
    for number in range(2 * MAX_SEQS):
        attacker.send({"prompt": [number + 10, *[20] * 2000], "max_tokens": 200, "ignore_eos": True}, COMPLETIONS)
    eventually(lambda: attacker.server.stats()["num_in_use"] > 200, "blocks are held")


def pins(attacker: Attacker) -> None:
    for number in range(16):
        text = f"{number} " + WORDS * 60
        body = chat_of(text, 1, prompt_cache_key=f"pin-{number}", prompt_cache_retention="24h")
        assert attacker.server.post(CHAT, body).status == 200
    assert attacker.server.stats()["num_pinned"] > 0


def grammars(attacker: Attacker) -> None:
    """Grammars that take long to compile, each different."""
    for number in range(4 * attacker.num):
        names = [f"n{number}_{index}" for index in range(400)]
        properties = {name: {"type": "string", "pattern": f"^(a|b|ab|{name}){{1,400}}$"} for name in names}
        schema = {"type": "object", "properties": properties, "additionalProperties": False}
        wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        attacker.send({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "response_format": wanted})
    eventually(lambda: attacker.server.get("/v1/requests").json["data"], "grammars are being compiled")


def tokenisation(attacker: Attacker) -> None:
    """Prompts that are slow to tokenise, and then too long."""
    text = WORDS * (60_000 // len(WORDS))
    for number in range(12 * attacker.num):
        attacker.send({"prompt": f"{number} {text}"}, "/tokenize")


def bodies(attacker: Attacker) -> None:
    """Bodies whose last byte is never sent: 256 MiB may be read at once."""
    data = b" " * (16 * MIB - 100)
    for _ in range(17):
        attacker.begin(CHAT, "application/json", 16 * MIB - 10, data)


def half_requests(attacker: Attacker) -> None:
    for _ in range(MAX_CONNECTIONS):
        attacker.begin(CHAT, "application/json", 1000, b"{")
    wait_for_a_place(attacker.server)


def idle_connections(attacker: Attacker) -> None:
    for _ in range(MAX_CONNECTIONS):
        sock = attacker.server.raw()
        attacker.sockets.append(sock)
        with contextlib.suppress(OSError):
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            sock.recv(1024)
    wait_for_a_place(attacker.server)


def watchers(attacker: Attacker) -> None:
    for _ in range(32):
        sock = attacker.server.raw()
        attacker.sockets.append(sock)
        head = f"GET /v1/watch?interval_ms=100 HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {ATTACKER}\r\n\r\n"
        sock.sendall(head.encode())


def uploads(attacker: Attacker) -> None:
    head = b'--quire\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    for _ in range(32):
        attacker.begin("/v1/files", "multipart/form-data; boundary=quire", 1 << 20, head)


def batch_jobs(attacker: Attacker) -> None:
    server = attacker.server
    attacker.batch_id = start_batch(server, 300)
    eventually(lambda: server.get(f"/v1/batches/{attacker.batch_id}").json["status"] == "in_progress", "the batch runs")


def start_batch(server: Server, num_lines: int) -> str:
    with client_of(server, server.key or "") as client:
        return str(submit(client, *(line(f"{number}", max_tokens=20) for number in range(num_lines))).id)


# Requests of the victim during an attack. Each returns a status or raises


def ask_chat(victim: Server) -> int:
    return victim.chat("Hello", max_tokens=4).status


def ask_schema(victim: Server) -> int:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False}
    schema["title"] = f"{time.monotonic_ns()}"  # not compiled before
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "response_format": wanted}
    return victim.post(CHAT, body).status


def ask_long_chat(victim: Server) -> int:
    return victim.chat(WORDS * 100, max_tokens=2).status


def ask_large_body(victim: Server) -> int:
    return victim.ask("POST", CHAT, data=json.dumps(chat_of("Hi", 2)).encode() + b" " * 200_000).status


def ask_watch(victim: Server) -> int:
    return victim.get("/v1/watch?once=true").status


def ask_upload(victim: Server) -> int:
    with client_of(victim, victim.key or "") as client:
        try:
            upload(client, "{}")
        except OpenAIError as error:
            return getattr(error, "status_code", 0)
    return 200


def ask_pinned(victim: Server) -> int:
    return victim.chat("Pinned. " + WORDS * 20, max_tokens=1, prompt_cache_key="victim").status


def ask_batch(victim: Server) -> int:
    """A batch of the victim ends before the larger and older one of the attacker."""
    batch_id = start_batch(victim, 8)
    attacker = replace(victim, key=ATTACKER)

    def ended() -> bool:
        return bool(victim.get(f"/v1/batches/{batch_id}").json["status"] == "completed")

    eventually(ended, "the victim's batch has ended")
    is_running = any(one["status"] == "in_progress" for one in attacker.get("/v1/batches").json["data"])
    return 200 if is_running else 500


ATTACKS: tuple[tuple[str, Attack, Callable[[Server], int]], ...] = (
    ("queue places", queue_places, ask_chat),
    ("many samples (n)", samples, ask_chat),
    ("long prompts", long_prompts, ask_chat),
    ("blocks", blocks, ask_chat),
    ("pins", pins, ask_pinned),
    ("grammars", grammars, ask_schema),
    ("tokenisation", tokenisation, ask_long_chat),
    ("bodies", bodies, ask_large_body),
    ("half requests", half_requests, ask_chat),
    ("idle connections", idle_connections, ask_chat),
    ("watchers", watchers, ask_watch),
    ("uploads", uploads, ask_upload),
    ("batch jobs", batch_jobs, ask_chat),
    ("batch jobs against a batch", batch_jobs, ask_batch),
)


def ask_often(ask: Callable[[Server], int], victim: Server, count: int) -> tuple[float, int]:
    """The median time of a request, and how many failed."""
    times: list[float] = []
    num_failed = 0
    for _ in range(count):
        began_s, status = time.perf_counter(), 0
        with contextlib.suppress(OSError):
            status = ask(victim)
        times.append(time.perf_counter() - began_s)
        num_failed += status != 200
    return statistics.median(times), num_failed


def attacked(server: Server, attack: Attack, ask: Callable[[Server], int], count: int) -> tuple[float, int]:
    """By how many steps an attack delays the victim's requests, and how many of them fail."""
    victim, attacker = replace(server, key=VICTIM), Attacker(replace(server, key=ATTACKER), count)
    quiet_s = 0.0 if ask is ask_batch else ask_often(ask, victim, count)[0]
    try:
        attack(attacker)
        during_s, num_failed = ask_often(ask, victim, 1 if ask is ask_batch else count)
    finally:
        attacker.close()
    server.post("/v1/cache/clear")
    return max(0.0, during_s - quiet_s) / STEP_S if quiet_s else 0.0, num_failed


def warm_up(server: Server) -> None:
    """Start every thread of every pool. Pools start threads when they are needed, and keep them."""
    with ThreadPoolExecutor(16) as pool:
        for ask in (ask_schema, ask_long_chat, ask_upload):
            list(pool.map(ask, [server] * 16))
    ask_watch(server)
    attacker = Attacker(server, 1)
    grammars(attacker)  # slow ones, so that both threads are needed
    ask_schema(server)
    attacker.close()


def shares(gauntlet: Gauntlet) -> Sequence[Figure]:
    keys = ("--api-key", ATTACKER, "--api-key", VICTIM, "--admin-api-key", ADMIN)
    limits = ("--max-num-seqs", str(MAX_SEQS), "--max-queue", str(MAX_QUEUE), "--max-connections", str(MAX_CONNECTIONS))
    fake = ("--num-blocks", "400", "--device", f"{STEP_S * 1000:g}ms")
    figures: list[Figure] = []
    for prefix, options in gauntlet.models(*keys, *limits, *fake, real=(*keys, *limits)):
        with serving(*options, key=ADMIN) as server:
            warm_up(server)
            base = idle_base(server)
            for name, attack, ask in ATTACKS:
                if prefix and name not in WITH_REAL_MODEL:
                    continue
                delay, num_failed = attacked(server, attack, ask, 3 if prefix else gauntlet.size(10, 1))
                figures.append(exactly(f"{prefix}{name}: requests of the other key that failed", num_failed))
                if not prefix:  # the steps of the fake backend are equally long
                    figures.append(timed(f"{name}: delay of the other key's requests", delay, MAX_DELAY, "steps"))
                figures += left_over(server, base, prefix=f"{prefix}{name}: ", spare_files=4)
                gauntlet.say(f"{name}: {delay:.1f} steps, {num_failed} failed")
    return figures


ROWS = (Row("R30", "A key cannot use up the share of another key", shares, 300),)
