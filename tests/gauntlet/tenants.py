"""R5, R29: what one API key can learn of another key's prompts. R30, R35: what it can take from another key.

Controls show that each measurement detects a leak.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from openai import OpenAIError

from quire.server.app import ENDPOINTS
from quire.server.routes import Access
from tests.gauntlet.figures import Figure, Gauntlet, Row, exactly, timed
from tests.gauntlet.flood import chat_body, idle_base, left_over, wait_for_a_place
from tests.server.rig import FAKE, Answer, Server, request_bytes, serving, status_of
from tests.server.test_batches import client_of, line, submit, upload
from tests.tiny import write_tiny_model
from tests.waiting import HANG_S, eventually, repeating

CHAT, COMPLETIONS, EXPLAIN = "/v1/chat/completions", "/v1/completions", "/v1/cache/explain"
KEYS = """
keys:
  - {key: sk-alice-00000001, name: alicename, tier: high}
  - {key: sk-bob-000000002, name: bobname, tier: low}
  - {key: sk-boss-00000003, name: bossname, admin: true}
"""
ALICE, BOB, BOSS = "sk-alice-00000001", "sk-bob-000000002", "sk-boss-00000003"
BLOCK = 32
NUM_TOKENS = 4096  # of the prompts whose timing is measured
# Each is in a different part of the requests and files of the key that is attacked.
CANARIES = {
    part: f"CANARY{number}QX"
    for number, part in enumerate(
        ("prompt", "system", "tool", "schema", "metadata", "user", "session", "filename", "batch", "salt", "request")
    )
}


@contextmanager
def keyed(gauntlet: Gauntlet, *options: str, model: str | Path | None = None) -> Iterator[Server]:
    """A server with three keys of different tiers. Requests use the admin key unless it is replaced."""
    gauntlet.folder.mkdir(parents=True, exist_ok=True)
    path = gauntlet.folder / "keys.yaml"
    path.write_text(KEYS)
    with serving(str(model or gauntlet.tiny), *options, "--api-keys-file", str(path), key=BOSS) as server:
        yield server


# R5: no sharing of the cache


def first_token(server: Server, tokens: Sequence[int]) -> tuple[float, int]:
    """Send a prompt. Returns the time to the first token, and the number of cached tokens."""
    began_s = time.perf_counter()
    body = {"prompt": list(tokens), "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    answer = server.post(COMPLETIONS, body)
    took_s = time.perf_counter() - began_s
    assert answer.status == 200, answer
    return took_s, answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]


def random_prompt(chosen: random.Random, num_tokens: int = NUM_TOKENS) -> tuple[int, ...]:
    return tuple(chosen.randrange(10, 250) for _ in range(num_tokens))


def guesses(
    owner: Server, spy: Server, count: int, chosen: random.Random, num_tokens: int
) -> tuple[list[float], list[float], int]:
    """Times of right and wrong guesses of prompts that `owner` has just sent, and all cached tokens of the spy."""
    right: list[float] = []
    wrong: list[float] = []
    num_cached = 0
    own: set[tuple[int, ...]] = set()  # first tokens of the spy's own prompts, which may be cached
    for is_right in chosen.sample([True, False] * count, 2 * count):
        # Both are made before the owner's request, so that the pause between the two requests is the same.
        prompt, other = random_prompt(chosen, num_tokens), random_prompt(chosen, num_tokens)
        asked = prompt if is_right else other
        first_token(owner, prompt)
        took_s, cached = first_token(spy, asked)
        (right if is_right else wrong).append(took_s)
        num_cached += cached if asked[:cached] not in own else 0
        own |= {asked[:length] for length in range(8)}
    return right, wrong, num_cached


def mann_whitney(ones: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Two-sided p value that both samples have one distribution (normal approximation), and the area under the ROC."""
    num_pairs = len(ones) * len(others)
    num_greater = sum(one > other for one in ones for other in others)  # times of a fine clock have no ties
    score = (num_greater - num_pairs / 2) / math.sqrt(num_pairs * (len(ones) + len(others) + 1) / 12)
    return math.erfc(abs(score) / math.sqrt(2)), num_greater / num_pairs


def timing_figures(
    server: Server, num_guesses: int, num_controls: int, chosen: random.Random, num_tokens: int, label: str
) -> list[Figure]:
    owner, spy = replace(server, key=ALICE), replace(server, key=BOB)
    for _ in range(4):  # the first requests of a worker are slower
        first_token(owner, random_prompt(chosen, num_tokens))
        first_token(spy, [1, *random_prompt(chosen, num_tokens - 1)])
    right, wrong, num_cached = guesses(owner, spy, num_guesses, chosen, num_tokens)
    own_right, own_wrong, own_cached = guesses(owner, owner, num_controls, chosen, num_tokens)
    chance, area = mann_whitney(right, wrong)
    _, own_area = mann_whitney(own_wrong, own_right)
    return [
        exactly(f"{label}: cached tokens that another key finds, {len(right)} prompts of {num_tokens}", num_cached),
        Figure(
            f"{label}: p value, TTFT of right and wrong guesses by another key", chance, at_least=0.01, is_timed=True
        ),
        Figure(f"{label}: area under the ROC, guesses by another key (0.5: chance)", area),
        Figure(
            f"{label}: cached tokens that the own key finds (control)",
            own_cached,
            at_least=num_controls * num_tokens / 2,
        ),
        Figure(f"{label}: area under the ROC, guesses by the own key (control)", own_area, at_least=0.9, is_timed=True),
        Figure(f"{label}: median TTFT of a wrong guess", 1000 * statistics.median(wrong), "ms"),
    ]


def no_sharing(gauntlet: Gauntlet) -> Iterator[Figure]:
    chosen = gauntlet.random
    wide = write_tiny_model(gauntlet.folder / "wide", max_model_len=2 * NUM_TOKENS)
    # The time of a step and its number of tokens are fixed, so the time to the first token tells how many were cached.
    fake = ("--backend", "fake", "--num-blocks", "3000", "--device", "1ms", "--max-num-batched-tokens", "512")
    with keyed(gauntlet, *fake, model=wide) as server:
        server.chat()
        base = idle_base(server)
        counts = (gauntlet.size(200, 4), gauntlet.size(20, 2))
        yield from timing_figures(server, *counts, chosen, NUM_TOKENS, "fake backend")
        yield from left_over(server, base)
    if not gauntlet.is_quick:
        gauntlet.say("the real model")
        with keyed(gauntlet, model=gauntlet.model) as server:
            yield from timing_figures(server, 20, 5, chosen, 64, "real model")


# R29: every channel


def canary_body(**fields: Any) -> dict[str, Any]:
    """A request with a canary in each part."""
    tool = {"type": "function", "function": {"name": CANARIES["tool"], "parameters": {"type": "object"}}}
    long_text = f"{CANARIES['prompt']} " + "The quick brown fox jumps over the lazy dog. " * 12
    messages = [{"role": "system", "content": CANARIES["system"]}, {"role": "user", "content": long_text}]
    body = {"messages": messages, "max_tokens": 4, "tools": [tool], "tool_choice": "none", "user": CANARIES["user"]}
    return {**body, "metadata": {"about": CANARIES["metadata"]}, **fields}


class Leaks:
    """Finds canaries, names and ids of one key in texts that another key receives."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = list(words)
        self.found: list[str] = []
        self.num_answers = 0

    def hide(self, *words: str) -> None:
        self._words += words

    def look(self, channel: str, text: str | bytes) -> None:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        self.num_answers += 1
        self.found += [f"{channel}: {word}" for word in self._words if word in text]

    def answer(self, channel: str, answer: Answer, own: Sequence[str] = ()) -> None:
        """Look at a response. `own`: words that the asking client sent itself."""
        text = answer.body.decode("utf-8", "replace") + json.dumps(answer.headers)
        for word in own:
            text = text.replace(word, "")
        self.look(channel, text)


def readable_paths() -> list[str]:
    """All paths of the route table that a client can read without an id."""
    found = [one for one in ENDPOINTS if one.method == "GET" and one.access is not Access.ADMIN]
    paths = [one.path for one in found if "{" not in one.path and one.path != "/v1/watch"]
    return [*paths, "/v1/watch?once=true"]


@contextmanager
def secrets_of(alice: Server) -> Iterator[dict[str, str]]:
    """Send requests, a file and a batch with one key. Yields their ids while a stream is open."""
    ids = {"request": CANARIES["request"]}
    assert alice.post(CHAT, canary_body()).status == 200
    assert alice.post(CHAT, canary_body(cache_salt=CANARIES["salt"])).status == 200
    schema = {"type": "object", "properties": {CANARIES["schema"]: {"type": "boolean"}}, "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    assert alice.post(CHAT, {"messages": canary_body()["messages"], "response_format": wanted}).status == 200
    stored = alice.post("/v1/responses", {"input": CANARIES["prompt"], "max_output_tokens": 4}).json
    ids["response"] = stored["id"]
    with client_of(alice, ALICE) as client:
        ids["file"] = upload(client, line(CANARIES["batch"], **canary_body(tools=None)), name=CANARIES["filename"])
    about = {"input_file_id": ids["file"], "endpoint": CHAT, "completion_window": "24h"}
    ids["batch"] = alice.post("/v1/batches", about).json["id"]
    ended = eventually(
        lambda: (batch := alice.get(f"/v1/batches/{ids['batch']}").json)["status"] == "completed" and batch,
        "the batch has ended",
    )
    ids["output"] = ended["output_file_id"]
    body = canary_body(max_tokens=3000, ignore_eos=True, stream=True, tools=None, tool_choice=None)
    data = json.dumps(body).encode()
    with alice.raw() as sock:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {ALICE}\r\n"
        head += f"x-request-id: {ids['request']}\r\nx-session-id: {CANARIES['session']}\r\n"
        sock.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        sock.recv(4096)
        yield ids


def num_told_apart(bob: Server, ids: dict[str, str], leaks: Leaks) -> int:
    """Number of answers about ids of another key that differ from those about ids that do not exist."""
    asked = (
        *(("GET", f"/v1/files/{ids[kind]}", ids[kind]) for kind in ("file", "output")),
        *(("GET", f"/v1/files/{ids[kind]}/content", ids[kind]) for kind in ("file", "output")),
        ("DELETE", f"/v1/files/{ids['file']}", ids["file"]),
        ("GET", f"/v1/batches/{ids['batch']}", ids["batch"]),
        ("POST", f"/v1/batches/{ids['batch']}/cancel", ids["batch"]),
        ("POST", f"/v1/requests/{ids['request']}/cancel", ids["request"]),
        ("GET", f"/v1/watch/held?id={ids['request']}", ids["request"]),
        ("GET", f"/v1/files?after={ids['file']}", ids["file"]),
        ("GET", f"/v1/batches?after={ids['batch']}", ids["batch"]),
        ("GET", f"/v1/responses/{ids['response']}", ids["response"]),
    )
    num_different = 0
    for method, path, known in asked:
        unknown = known[:-4] + ("0000" if known[-4:] != "0000" else "1111")
        for_known, for_unknown = (bob.ask(method, path.replace(known, one)) for one in (known, unknown))
        leaks.answer(path, for_known, own=[known])
        texts = [
            answer.body.replace(one.encode(), b"ID") for answer, one in ((for_known, known), (for_unknown, unknown))
        ]
        num_different += (for_known.status, texts[0]) != (for_unknown.status, texts[1])
    for known in (ids["file"], "file-" + "0" * 24):
        about = {"input_file_id": known, "endpoint": CHAT, "completion_window": "24h"}
        num_different += bob.post("/v1/batches", about).status == 200
    body = {"input": "Hi", "max_output_tokens": 4, "previous_response_id": ids["response"]}
    refused = bob.post("/v1/responses", body)
    leaks.answer("previous_response_id", refused, own=[ids["response"]])
    return num_different + (refused.status == 200)


def explained_facts(bob: Server) -> int:
    """Number of fields of an explanation that differ between a prompt of the other key and a new prompt."""
    body = {"messages": canary_body()["messages"]}
    fresh = json.loads(json.dumps(body).replace(CANARIES["prompt"], CANARIES["prompt"][::-1]))
    known, unknown = (bob.post(EXPLAIN, one).json for one in (body, fresh))
    text = ("message", "stopped_text", "prompt_tokens")  # they describe the asked prompt itself
    return int(sum(known[name] != unknown[name] for name in known if name not in text) + known["matched_tokens"])


def visible_channels(gauntlet: Gauntlet) -> list[Figure]:
    """HTTP routes, ids, errors, logs and metrics of one server."""
    device = ("--device", "5ms")  # the stream lasts longer than the measurement
    with keyed(gauntlet, *FAKE, *device, "--log-format", "json") as server:
        alice, bob = replace(server, key=ALICE), replace(server, key=BOB)
        with secrets_of(alice):  # starts the processes and threads for grammars and batches
            pass
        base = idle_base(server)
        leaks = Leaks([*CANARIES.values(), ALICE, BOSS])
        with secrets_of(alice) as ids:
            leaks.hide(*ids.values(), "alicename", "bossname")
            num_facts = explained_facts(bob)
            guess = bob.post(CHAT, canary_body())
            num_cached = guess.json["usage"]["prompt_tokens_details"]["cached_tokens"]
            for path in readable_paths():
                leaks.answer(path, bob.get(path))
            num_different = num_told_apart(bob, ids, leaks)
            seen_by_admin = server.get("/v1/requests").body.decode()
            num_listed = len(bob.get("/v1/requests").json["data"])
            is_open = float(ids["request"] in seen_by_admin)
        num_read = leaks.num_answers
        logged = Leaks([word for part, word in CANARIES.items() if part not in ("request", "filename")] + [ALICE, BOB])
        figures = left_over(server, base)
        logged.look("log", server.log)
        metrics = server.get("/metrics").body.decode()
        num_named = len(re.findall(r"alicename|bobname|bossname", metrics))
    for one in (*leaks.found, *logged.found):
        gauntlet.say(f"leaked: {one}")
    return [
        exactly(f"secrets of another key in {num_read} answers", len(leaks.found)),
        exactly("ids of another key whose answers differ from those of unknown ids", num_different),
        exactly("requests of another key in /v1/requests", num_listed),
        exactly("the admin key sees the open request (control)", is_open, 1),
        exactly("fields of /v1/cache/explain that depend on another key's prompt", num_facts),
        exactly("cached_tokens of another key's prompt", num_cached),
        exactly("secrets in the log", len(logged.found)),
        exactly("key names in /metrics", num_named),
        *figures,
    ]  # fmt: skip


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


def shares(gauntlet: Gauntlet) -> Iterator[Figure]:
    keys = ("--api-key", ATTACKER, "--api-key", VICTIM, "--admin-api-key", ADMIN)
    limits = ("--max-num-seqs", str(MAX_SEQS), "--max-queue", str(MAX_QUEUE), "--max-connections", str(MAX_CONNECTIONS))
    fake = ("--num-blocks", "400", "--device", f"{STEP_S * 1000:g}ms")
    for prefix, options in gauntlet.models(*keys, *limits, *fake, real=(*keys, *limits)):
        with serving(*options, key=ADMIN) as server:
            warm_up(server)
            base = idle_base(server)
            for name, attack, ask in ATTACKS:
                if prefix and name not in WITH_REAL_MODEL:
                    continue
                delay, num_failed = attacked(server, attack, ask, 3 if prefix else gauntlet.size(10, 1))
                yield exactly(f"{prefix}{name}: requests of the other key that failed", num_failed)
                if not prefix:  # the steps of the fake backend are equally long
                    yield timed(f"{name}: delay of the other key's requests", delay, MAX_DELAY, "steps")
                yield from left_over(server, base, prefix=f"{prefix}{name}: ", spare_files=4)
                gauntlet.say(f"{name}: {delay:.1f} steps, {num_failed} failed")


# R35: turns of expensive requests

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
        Expensive("count_tokens", "/v1/messages/count_tokens", {"model": "tiny", "messages": long_chat}),
        Expensive("explain", "/v1/cache/explain", {"prompt": ids}),
        Expensive("explain messages", "/v1/cache/explain", {"messages": long_chat}),
        Expensive("scored prompts", COMPLETIONS, scored, num_clients=2),
        Expensive("echoes", COMPLETIONS, {"prompt": ids, "max_tokens": 1, "echo": True}),
        Expensive("scored answers", CHAT, scores, num_clients=2),
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


def asked_beside(victim: Server, one: Expensive, count: int) -> tuple[float, int, Client]:
    """The time of a chat during an attack, how many failed, and the attacker."""
    attacker = Client(victim, request_bytes(one.path, one.body, key=ATTACKER, method=one.method))
    with repeating(attacker.send, num_threads=one.num_clients):
        eventually(lambda: attacker.num_answers or attacker.wrong, f"an answer of {one.path}")
        during_s, num_failed = ask_often(ask_chat, victim, count)
    return during_s, num_failed, attacker


def turns(gauntlet: Gauntlet) -> Iterator[Figure]:
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
            during_s, failed, attacker = asked_beside(victim, one, count)
            num_failed += failed
            num_wrong += len(attacker.wrong)
            ratio = during_s / quiet_s
            yield timed(f"{one.name}: time of another key's chat", ratio, MAX_RATIO, "x")
            gauntlet.say(f"{one.name}: {quiet_s:.3f} s, {during_s:.3f} s ({ratio:.1f} x), wrong: {attacker.wrong[:3]}")
        yield exactly("chats of the other key that failed", num_failed)
        yield exactly("expensive requests with an unexpected status", num_wrong)
        yield from left_over(server, base, spare_files=4)


ROWS = (
    Row("R5", "Requests with different keys or salts share no cached block", no_sharing, 420),
    Row("R29", "A key learns nothing of the contents of another key's prompts", visible_channels, 240),
    Row("R30", "A key cannot use up the share of another key", shares, 300),
    Row("R35", "Expensive requests of a key take turns with those of other keys", turns, 600),
)
