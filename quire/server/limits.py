"""Bounds on what may wait and on what a key may use, and how long until there is room again. Knows no HTTP."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.server.auth import Key, Limits
from quire.server.errors import ApiError, Kind

RATE_WINDOW_S = 30.0
MAX_RETRY_AFTER_S = 120.0
MINUTE_S = 60.0


class Ticket:
    """A place in the queue. `start` gives it up for a place on the machine, `leave` for good; both may be repeated."""

    def __init__(self, door: Door, num_requests: int) -> None:
        self._door = door
        self.num_requests = num_requests
        self.num_tokens = 0
        self._is_waiting = True

    def grow(self, num_tokens: int) -> None:
        """The prompts have been tokenised: they are so long. Refused, the ticket stays as it was."""
        self._door.check_tokens(self, num_tokens)
        self.num_tokens += num_tokens
        self._door.num_tokens += num_tokens

    def start(self) -> None:
        if self._is_waiting:
            self._door.started(self)
        self.leave()

    def leave(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._door.left(self)


class Door:
    """Counts what waits, by requests and by tokens, and the rate at which the machine takes it."""

    def __init__(self, max_requests: int, max_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_requests = 0
        self.num_tokens = 0
        self._clock = clock
        self._starts: deque[tuple[float, int]] = deque()  # when, how many requests

    def check(self) -> None:
        """Before anything is read or tokenised: is there room for one more at all?"""
        if self.num_requests >= self.max_requests:
            raise self._refusal(f"{self.num_requests} requests wait already, which is the limit", "queue_full")
        if self.num_tokens >= self.max_tokens:
            raise self._refusal(f"{self.num_tokens} tokens wait already, which is the limit", "queue_tokens")

    def enter(self, num_requests: int) -> Ticket:
        """All or nothing. An empty queue takes anything, or what is larger than the bound could never pass."""
        if self.num_requests and self.num_requests + num_requests > self.max_requests:
            text = f"{self.num_requests} requests wait already; {num_requests} more exceed {self.max_requests}"
            raise self._refusal(text, "queue_full")
        self.num_requests += num_requests
        return Ticket(self, num_requests)

    def check_tokens(self, ticket: Ticket, num_tokens: int) -> None:
        is_alone = self.num_tokens == ticket.num_tokens
        if not is_alone and self.num_tokens + num_tokens > self.max_tokens:
            text = f"{self.num_tokens} tokens wait already; {num_tokens} more exceed {self.max_tokens}"
            raise self._refusal(text, "queue_tokens")

    def started(self, ticket: Ticket) -> None:
        self._starts.append((self._clock(), ticket.num_requests))
        while len(self._starts) > 1 and self._clock() - self._starts[0][0] > RATE_WINDOW_S:
            self._starts.popleft()

    def left(self, ticket: Ticket) -> None:
        self.num_requests -= ticket.num_requests
        self.num_tokens -= ticket.num_tokens

    def retry_after_s(self) -> float:
        """Until half of those who wait have begun, at the rate of late: then there is room, and not for one alone."""
        now_s = self._clock()
        recent = [(at_s, count) for at_s, count in self._starts if now_s - at_s <= RATE_WINDOW_S]
        if not recent:
            return min(RATE_WINDOW_S, MAX_RETRY_AFTER_S)
        span_s = max(now_s - recent[0][0], 1.0)
        rate = sum(count for _, count in recent) / span_s
        return min(max(1.0, math.ceil(self.num_requests / 2 / rate)), MAX_RETRY_AFTER_S)

    def _refusal(self, text: str, reason: str) -> ApiError:
        return ApiError(Kind.OVERLOADED, text, retry_after_s=self.retry_after_s(), reason=reason)


class Reading:
    """Bytes of all bodies that are being read: many slow large ones must not fill the memory."""

    def __init__(self) -> None:
        self.num_bytes = 0

    @contextmanager
    def __call__(self, max_bytes: int) -> Iterator[Budget]:
        budget = Budget(self, max_bytes)
        try:
            yield budget
        finally:
            self.num_bytes -= budget.num_bytes


class Budget:
    """One body's part of it."""

    def __init__(self, reading: Reading, max_bytes: int) -> None:
        self._reading = reading
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        if self._reading.num_bytes + num_bytes > self._max_bytes:
            text = f"{self._reading.num_bytes} bytes of requests are being read already, which is the limit"
            raise ApiError(Kind.OVERLOADED, text, retry_after_s=2.0, reason="body_bytes")
        self._reading.num_bytes += num_bytes
        self.num_bytes += num_bytes


class Bucket:
    """So many a minute, all at once if need be. May be overdrawn by what is known only afterwards."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._capacity = float(per_minute)
        self._level = float(per_minute)
        self._clock = clock
        self._at_s = clock()

    def wait_s(self, amount: float) -> float:
        """Until this much is there; 0: now. More than a minute's worth passes when the bucket is full."""
        self._refill()
        missing = min(amount, self._capacity) - self._level
        return max(0.0, missing * MINUTE_S / self._capacity)

    def take(self, amount: float) -> None:
        self._refill()
        self._level -= amount

    def _refill(self) -> None:
        now_s = self._clock()
        self._level = min(self._capacity, self._level + (now_s - self._at_s) * self._capacity / MINUTE_S)
        self._at_s = now_s


class Quota:
    """What one key has used."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._requests = _bucket(limits.requests_per_minute, clock)
        self._tokens = _bucket(limits.tokens_per_minute, clock)
        self.num_open = 0

    def enter(self, num_tokens: int) -> None:
        """Counts a request with so many prompt tokens, or refuses it and counts nothing."""
        limits = self._limits
        if limits.max_requests is not None and self.num_open >= limits.max_requests:
            raise _used_up("max_requests", limits.max_requests, 1.0)
        if self._requests is not None and (wait_s := self._requests.wait_s(1)):
            raise _used_up("requests_per_minute", limits.requests_per_minute, wait_s)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(num_tokens)):
            raise _used_up("tokens_per_minute", limits.tokens_per_minute, wait_s)
        self.num_open += 1
        if self._requests is not None:
            self._requests.take(1)
        self.use(num_tokens)

    def use(self, num_tokens: int) -> None:
        if self._tokens is not None:
            self._tokens.take(num_tokens)

    def leave(self) -> None:
        self.num_open -= 1


class Quotas:
    """One a key, made when it first asks."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._quotas: dict[str, Quota] = {}

    def of(self, key: Key) -> Quota:
        if key.name not in self._quotas:
            self._quotas[key.name] = Quota(key.limits, self._clock)
        return self._quotas[key.name]


def _bucket(per_minute: int | None, clock: Callable[[], float]) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, clock)


def _used_up(name: str, limit: int | None, wait_s: float) -> ApiError:
    text = f"this key has reached its limit: {name} = {limit}"
    return ApiError(Kind.RATE_LIMITED, text, retry_after_s=math.ceil(wait_s), reason=f"key_{name}")
