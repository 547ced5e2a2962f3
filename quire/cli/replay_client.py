"""Sends a trace to a server: each request at its time, on its own connection.

Each request has a thread, which waits for tokens most of the time: a few hundred threads cost little.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from quire.cli.load_stream import LoadStream
from quire.cli.server_client import ServerClient, ServerError
from quire.errors import ContextTooLong, InvalidRequest, QueueFull, QuireError, RequestFailed
from quire.sim.replay import Ending, Served
from quire.sim.traces import TraceRequest, text

LEAD_S = 0.05  # a thread starts this much earlier, to prepare its prompt
MAX_OPEN = 1000  # connections; further requests are sent late, which is reported
VOCAB_SIZES = (32_000, 16_000, 8_000, 4_000, 2_000, 1_000, 500, 250)


def find_vocab_size(server: ServerClient, model: str) -> int:
    """The largest of VOCAB_SIZES that the model's vocabulary has. Prompts of traces use ids below it."""
    for size in VOCAB_SIZES:
        with suppress(InvalidRequest):
            server.post("/detokenize", {"model": model, "tokens": [size - 1]})
            return size
    raise ServerError(f"{server.url}: the vocabulary of {model} has fewer than {VOCAB_SIZES[-1]} tokens")


class Texts:
    """Token ids of the parts of prompts. A part that is an earlier answer has the ids that the server returned."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._answers: dict[str, list[int]] = {}
        self._made_up: set[str] = set()  # needed before they were received: they keep their made-up text
        self._lock = threading.Lock()
        self._names: frozenset[str] = frozenset()

    @property
    def num_made_up(self) -> int:
        """Number of answers that were not received before a later prompt needed them."""
        return len(self._made_up)

    def expect(self, names: frozenset[str]) -> None:
        """Set the names of parts that are answers."""
        self._names = names

    def answered(self, name: str, ids: list[int]) -> None:
        with self._lock:
            if name not in self._made_up:
                self._answers[name] = ids

    def prompt(self, number: int, one: TraceRequest) -> list[int]:
        if one.prompt:
            return list(one.prompt)
        ids: list[int] = []
        for name, count in one.shared:
            ids += self._part(name, count)
        return ids + self._new(f"own prompt {number}", one.prompt_tokens - len(ids))

    def _part(self, name: str, count: int) -> list[int]:
        with self._lock:
            answer = self._answers.get(name, [])
            if not answer and name in self._names:
                self._made_up.add(name)
        return answer[:count] + self._new(name, count)[len(answer) :]

    def _new(self, name: str, count: int) -> list[int]:
        return [token % self._vocab_size for token in text(name, count)]


@dataclass(slots=True)
class _Run:
    """One request of the trace, sent to the server."""

    stream: LoadStream
    token_ids: list[int] = field(default_factory=list)
    first_at_s: float | None = None
    usage: dict[str, Any] = field(default_factory=dict)


class ReplayClient:
    """Sends traces. `salt` separates their prompts from everything that the server has cached before."""

    def __init__(self, server: ServerClient, model: str, texts: Texts, salt: str) -> None:
        self._server = server
        self._model = model
        self._texts = texts
        self._salt = salt
        self._slots = threading.Semaphore(MAX_OPEN)

    def play(self, trace: Sequence[TraceRequest], progress: Callable[[int], None] = lambda _done: None) -> list[Served]:
        """Send the trace and wait until all requests have ended. `progress` gets their number."""
        self._texts.expect(frozenset(one.output for one in trace if one.output))
        runs = [_Run(LoadStream(self._server)) for _ in trace]
        served: list[Served | None] = [None] * len(trace)
        events = [(one.arrival_s - LEAD_S, number, True) for number, one in enumerate(trace)]
        for number, one in enumerate(trace):
            if one.cancel_after_s is not None:
                events.append((one.arrival_s + one.cancel_after_s, number, False))
        start_s = time.monotonic() + 2 * LEAD_S
        threads: list[threading.Thread] = []

        def send(number: int) -> None:
            try:
                served[number] = self._send(number, trace[number], runs[number], start_s)
            finally:
                self._slots.release()
                progress(sum(one is not None for one in served))

        try:
            for at_s, number, is_arrival in sorted(events):
                time.sleep(max(0.0, start_s + at_s - time.monotonic()))
                if is_arrival:
                    self._slots.acquire()
                    threads.append(threading.Thread(target=send, args=(number,), daemon=True))
                    threads[-1].start()
                else:
                    runs[number].stream.cancel()
            for thread in threads:
                thread.join()
        finally:  # an interrupted replay cancels its requests
            for run in runs:
                run.stream.cancel()
        if (lost := next((number for number, one in enumerate(served) if one is None), None)) is not None:
            raise RequestFailed(f"request {lost} of the trace could not be sent")
        return [one for one in served if one is not None]

    def _send(self, number: int, one: TraceRequest, run: _Run, start_s: float) -> Served:
        body = self._body(number, one)
        time.sleep(max(0.0, start_s + one.arrival_s - time.monotonic()))
        sent_s = time.monotonic()
        ending, problem = Ending.FINISHED, ""
        try:
            self._read(body, run)
            if one.output:
                self._texts.answered(one.output, run.token_ids)
        except QuireError as error:
            refused = isinstance(error, QueueFull | InvalidRequest | ContextTooLong)
            ending, problem = Ending.REFUSED if refused else Ending.FAILED, str(error)
            if run.stream.is_cancelled:
                ending, problem = Ending.LEFT, ""
        details = run.usage.get("prompt_tokens_details") or {}
        return Served(
            priority=one.priority,
            due_s=one.arrival_s,
            sent_s=sent_s - start_s,
            end_s=time.monotonic() - start_s,
            ending=ending,
            ttft_s=None if run.first_at_s is None else run.first_at_s - sent_s,
            num_outputs=len(run.token_ids),
            num_prompt_tokens=run.usage.get("prompt_tokens", 0),
            num_cached_tokens=details.get("cached_tokens", 0),
            problem=problem,
        )

    def _body(self, number: int, one: TraceRequest) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": self._texts.prompt(number, one),
            "max_tokens": one.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "priority": one.priority.name.lower(),
            "cache_salt": f"{self._salt}.{blake2b(one.salt.encode(), digest_size=8).hexdigest()}",
        }

    def _read(self, body: dict[str, Any], run: _Run) -> None:
        for chunk in run.stream.chunks(body):
            try:
                for choice in chunk["choices"]:
                    if ids := choice.get("token_ids"):
                        run.first_at_s = run.first_at_s or time.monotonic()
                        run.token_ids += map(int, ids)
                run.usage = chunk.get("usage") or run.usage
            except (AttributeError, KeyError, TypeError, ValueError):
                raise self._server.malformed("a malformed chunk", chunk) from None
