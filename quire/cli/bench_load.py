"""Clients of the fairness part of `quire bench`: streams of completions, and a constant load of them.

They share the machine with the server and must be cheap: one HTTP request has many prompts, and one thread reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import count
from random import Random
from typing import Any, NamedTuple

from quire.bench.http_load import HttpStream, RefusedRequest
from quire.cli.server_client import ServerClient
from quire.core.values import Priority
from quire.errors import QuireError

MAX_PROMPTS = 64  # of one HTTP request; the limit of the server


class Shape(NamedTuple):
    """Tokens of a request: of the prompt, and of the answer, which is never shorter."""

    prompt_tokens: int
    output_tokens: int


class NewTokens(NamedTuple):
    """Tokens of one prompt of a stream that have just arrived."""

    prompt: int  # its number
    num_tokens: int
    is_finished: bool


class StreamClient:
    """Makes request bodies. No two share a prompt, and each has its own cache salt, so that nothing is cached."""

    def __init__(self, server: ServerClient, model: str, token_ids: Sequence[int], seed: int) -> None:
        self.server = server
        self._model = model
        self._token_ids = token_ids
        self._distinct = sorted(set(token_ids))
        self._random = Random(seed)
        self._numbers = count(1)
        self._lock = threading.Lock()

    def body(self, priority: Priority, shape: Shape, num_prompts: int = 1) -> dict[str, Any]:
        with self._lock:
            prompts = self._prompts(num_prompts, shape.prompt_tokens)
            number = next(self._numbers)
        return {
            "model": self._model,
            "prompt": prompts,
            "max_tokens": shape.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
            "priority": priority.name.lower(),
            "cache_salt": f"bench.{number}",
        }

    def _prompts(self, num_prompts: int, length: int) -> list[list[int]]:
        """Prompts with different first tokens, if there are enough: the cache shares even a single token."""
        is_enough = num_prompts <= len(self._distinct)
        draw = self._random.sample if is_enough else self._random.choices
        firsts = draw(self._distinct, k=num_prompts)
        return [[first, *self._random.choices(self._token_ids, k=length - 1)] for first in firsts]


class Stream:
    """One HTTP request. `cut` may be called from any thread at any time."""

    def __init__(self, client: StreamClient, body: dict[str, Any]) -> None:
        self._server = client.server
        self._stream = HttpStream(client.server.url, "/v1/completions", body, client.server.headers())
        self.cut = self._stream.cut

    def read(self, take: Callable[[NewTokens], None]) -> None:
        """Send the request and pass on its tokens as they arrive. Returns when it has ended or is cut."""
        try:
            for chunk in self._stream.events():
                for one in chunk["choices"]:
                    is_finished = one.get("finish_reason") is not None
                    take(NewTokens(one["index"], len(one.get("token_ids") or ()), is_finished))
        except RefusedRequest as error:
            raise self._server.refusal(error.status, error.reason, error.headers, error.body) from None
        except QuireError:
            if not self._stream.is_cut:
                raise


class Load:
    """Keeps at least `num_requests` requests of one tier outstanding, from `start` to `stop`."""

    def __init__(self, client: StreamClient, priority: Priority, shape: Shape, num_requests: int) -> None:
        self._client = client
        self._priority = priority
        self._shape = shape
        self._num_requests = num_requests
        self._lock = threading.RLock()
        self._streams: dict[Stream, threading.Thread] = {}
        self._is_stopped = False
        self._problem: QuireError | None = None
        self._num_open = 0
        self.num_tokens = 0  # received; all of a prompt counts with its first token

    @property
    def num_outstanding(self) -> int:
        with self._lock:
            return self._num_open

    def start(self) -> None:
        with self._lock:
            self._refill()

    def stop(self) -> None:
        """Cut all streams. The server cancels their requests."""
        with self._lock:
            self._is_stopped = True
            running = dict(self._streams)
        for stream in running:
            stream.cut()
        for thread in running.values():
            thread.join()

    def check(self) -> None:
        """Raise the error of a stream, if there was one. The load has stopped then."""
        if self._problem is not None:
            raise self._problem

    def _refill(self) -> None:
        while self._num_open < self._num_requests and not self._is_stopped:
            num_prompts = min(MAX_PROMPTS, -(-self._num_requests // 2))
            self._num_open += num_prompts
            stream = Stream(self._client, self._client.body(self._priority, self._shape, num_prompts))
            thread = threading.Thread(target=self._run, args=(stream,), daemon=True)
            self._streams[stream] = thread
            thread.start()

    def _run(self, stream: Stream) -> None:
        begun: set[int] = set()

        def take(new: NewTokens) -> None:
            with self._lock:
                if new.num_tokens and new.prompt not in begun:
                    begun.add(new.prompt)
                    self.num_tokens += self._shape.prompt_tokens
                self.num_tokens += new.num_tokens
                if new.is_finished:
                    self._num_open -= 1
                    self._refill()

        try:
            stream.read(take)
        except QuireError as error:
            with self._lock:
                self._problem = self._problem or error
                self._is_stopped = True
        finally:
            with self._lock:
                del self._streams[stream]
