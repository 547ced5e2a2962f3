"""Clients of the fairness part of `quire bench`: streams of completions, and a load of them that never runs out.

They share the machine with the server, so they are cheap: one HTTP request carries many prompts, and a thread reads it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from random import Random
from typing import Any, NamedTuple

from quire.cli.remote import Server, plain, read_events
from quire.core.request import Priority
from quire.errors import QuireError, RequestFailed

MAX_PROMPTS = 64  # of one HTTP request; the server takes no more


class Shape(NamedTuple):
    """Tokens of a request: the prompt, and the answer, which is never shorter."""

    prompt_tokens: int
    output_tokens: int


class News(NamedTuple):
    """Tokens of one prompt of a stream that have just arrived."""

    prompt: int  # its number
    num_tokens: int
    is_finished: bool


class StreamClient:
    """Makes requests. No two have a prompt in common, and each has a salt of its own: there is nothing to share."""

    def __init__(self, server: Server, model: str, token_ids: Sequence[int], seed: int) -> None:
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
        """Their first tokens differ, as far as there are tokens enough: the cache would share even one."""
        is_enough = num_prompts <= len(self._distinct)
        draw = self._random.sample if is_enough else self._random.choices
        firsts = draw(self._distinct, k=num_prompts)
        return [[first, *self._random.choices(self._token_ids, k=length - 1)] for first in firsts]


class Stream:
    """One HTTP request on its way. `cut` may be called from any thread, at any time."""

    def __init__(self, asker: StreamClient, body: dict[str, Any]) -> None:
        self._asker = asker
        self._body = body
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self.is_cut = False

    def read(self, take: Callable[[News], None]) -> None:
        """Send it and give out its tokens as they arrive. Returns at its end, or when it is cut."""
        try:
            self._read(take)
        except QuireError:
            if not self.is_cut:
                raise
        finally:
            with self._lock:
                self._sock = None

    def cut(self) -> None:
        with self._lock:
            self.is_cut = True
            if self._sock is not None:
                with suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    def _connected(self, sock: socket.socket) -> None:
        with self._lock:
            if self.is_cut:
                raise RequestFailed("it was cut before it was sent")
            self._sock = sock

    def _read(self, take: Callable[[News], None]) -> None:
        server = self._asker.server
        with server.open("POST", "/v1/completions", self._body, self._connected) as response:
            for data in read_events(server.chunks(response)):
                if data.startswith("[DONE]"):
                    return
                for news in self._parse(server.parse(data)):
                    take(news)
        raise RequestFailed(f"{server.url} ended the stream in the midst of the answer")

    def _parse(self, chunk: Any) -> list[News]:
        try:
            if error := chunk.get("error"):
                raise RequestFailed(plain(str(error.get("message") or error)))
            return [
                News(one["index"], len(one.get("token_ids") or ()), one.get("finish_reason") is not None)
                for one in chunk["choices"]
            ]
        except (AttributeError, KeyError, TypeError):
            raise self._asker.server.misspoke("a chunk that is none", chunk) from None


class Load:
    """Keeps at least `num_requests` requests of one tier outstanding, from `start` to `stop`."""

    def __init__(self, asker: StreamClient, priority: Priority, shape: Shape, num_requests: int) -> None:
        self._asker = asker
        self._priority = priority
        self._shape = shape
        self._num_requests = num_requests
        self._lock = threading.RLock()
        self._streams: dict[Stream, threading.Thread] = {}
        self._is_stopped = False
        self._problem: QuireError | None = None
        self._num_open = 0
        self.num_tokens = 0  # received; a prompt counts, whole, with its first token

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
        """Raise what went wrong, if anything did: then there is no load any more."""
        if self._problem is not None:
            raise self._problem

    def _refill(self) -> None:
        while self._num_open < self._num_requests and not self._is_stopped:
            num_prompts = min(MAX_PROMPTS, -(-self._num_requests // 2))
            self._num_open += num_prompts
            stream = Stream(self._asker, self._asker.body(self._priority, self._shape, num_prompts))
            thread = threading.Thread(target=self._run, args=(stream,), daemon=True)
            self._streams[stream] = thread
            thread.start()

    def _run(self, stream: Stream) -> None:
        begun: set[int] = set()

        def take(news: News) -> None:
            with self._lock:
                if news.num_tokens and news.prompt not in begun:
                    begun.add(news.prompt)
                    self.num_tokens += self._shape.prompt_tokens
                self.num_tokens += news.num_tokens
                if news.is_finished:
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
