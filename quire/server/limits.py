"""API keys, and limits of keys, queues and bodies, with the estimated time until a refused request would fit.

A lookup of a key compares digests with every key, in constant time. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import TypeVar

import msgspec

from quire.core.values import Priority
from quire.errors import Draining, InvalidRequest
from quire.server.errors import ApiError, Kind

MIN_KEY_CHARS = 8
MAX_KEY_CHARS = 512
MAX_KEYS = 10_000
MAX_PRESENTED = 4


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one key. None: no limit."""

    max_requests: int | None = None  # at once
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt and completion together

    def __post_init__(self) -> None:
        for name in ("max_requests", "requests_per_minute", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequest(f"{name} = {value!r} is less than 1")


@dataclass(frozen=True, slots=True)
class Key:
    """One API key. Requests have the key's tier unless they ask for a lower one."""

    name: str
    tier: Priority = Priority.NORMAL
    ceiling: Priority = Priority.NORMAL  # the highest priority that a request may ask for
    is_admin: bool = False
    limits: Limits = field(default_factory=Limits)
    namespace: str = ""  # part of every chain key, also of content on disk: two namespaces share no cache
    identity: str = ""  # owner name of keys without a name: the number in `name` may be another key's after a restart

    def priority(self, wish: Priority | None) -> Priority:
        return self.tier if wish is None else max(self.ceiling, wish)

    @property
    def tiers(self) -> list[Priority]:
        """The tiers that its requests may have."""
        return [tier for tier in Priority if tier >= min(self.tier, self.ceiling)]

    @property
    def owner(self) -> str:
        """The owner name in stored files and batches."""
        return self.identity or self.name


# The key of every request to a server without keys: an admin key. Such a server listens on this machine only, unless
# --insecure is set.
LOCAL = Key("local", ceiling=Priority.HIGH, is_admin=True)


class KeyRing:
    def __init__(self, keys: Iterable[tuple[str, Key]] = ()) -> None:
        self._keys: list[tuple[bytes, Key]] = []
        names: set[str] = set()
        for secret, key in keys:
            _check_secret(secret, key.name)
            if key.name in names:
                raise InvalidRequest(f"keys: the name {key.name!r} is used twice")
            names.add(key.name)
            self._keys.append((_digest(secret), key))
        if len(self._keys) > MAX_KEYS:
            raise InvalidRequest(f"keys: {len(self._keys)} keys are more than the limit of {MAX_KEYS}")
        if len({digest for digest, _ in self._keys}) < len(self._keys):
            raise InvalidRequest("keys: two names have the same key")

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, secret: str | None) -> Key | None:
        """Return the key with this secret, in constant time. Without configured keys, return LOCAL."""
        if not self._keys:
            return LOCAL
        given = _digest(secret or "")
        found = None
        for digest, key in self._keys:
            if hmac.compare_digest(digest, given):
                found = key
        return found

    def find_owner(self, owner: str) -> Key | None:
        """The key with this owner name; None if it is no longer in use."""
        keys = [key for _, key in self._keys] if self._keys else [LOCAL]
        return next((key for key in keys if key.owner == owner), None)


def address_of(name: str) -> IPv4Address | IPv6Address | None:
    """The IP address that a host is given as. None: it is a name."""
    try:
        return ip_address(name)
    except ValueError:
        return None


def is_loopback(name: str) -> bool:
    """Whether a host name or address is that of this machine."""
    address = address_of(name)
    return name == "localhost" or (address is not None and address.is_loopback)


def presented(headers: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """Return the keys in the headers: `Authorization: Bearer KEY` (OpenAI) and `x-api-key: KEY` (Anthropic).

    A client may send both, and one of them may belong to another server.
    """
    found: list[str] = []
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            found.append(value[7:].strip().decode("latin-1"))
        elif name == b"x-api-key":
            found.append(value.strip().decode("latin-1"))
    return found[:MAX_PRESENTED]


class _KeyEntry(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    name: str
    tier: str = "normal"
    admin: bool = False
    max_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class _KeysFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[_KeyEntry]


def make_keyring(
    api_keys: Iterable[str], admin_keys: Iterable[str], path: Path | None, *, is_shared: bool = False
) -> KeyRing:
    """Make the key ring of `--api-key`, `--admin-api-key` and a keys file. `is_shared`: all share one prefix cache."""
    keys: list[tuple[str, Key]] = []
    for prefix, secrets, is_admin in (("key", api_keys, False), ("admin", admin_keys, True)):
        for number, secret in enumerate(secrets, 1):
            identity = f"{prefix}:{_digest(secret).hex()[:16]}"
            namespace = "" if is_shared else identity
            name = f"{prefix}-{number}"
            keys.append((secret, Key(name, is_admin=is_admin, namespace=namespace, identity=identity)))
    for entry in _read(path).keys if path is not None else ():
        if not entry.name or len(entry.name) > 64 or not entry.name.isprintable():
            raise InvalidRequest(f"keys: name = {entry.name!r:.80} is not 1 to 64 printable characters")
        if entry.tier.upper() not in Priority.__members__:
            tiers = ", ".join(name.lower() for name in Priority.__members__)
            raise InvalidRequest(f"{path}: {entry.name!r}: tier = {entry.tier!r} is not one of {tiers}")
        try:
            limits = Limits(entry.max_requests, entry.requests_per_minute, entry.tokens_per_minute)
        except InvalidRequest as error:
            raise InvalidRequest(f"{path}: {entry.name!r}: {error}") from None
        tier = Priority[entry.tier.upper()]
        namespace = "" if is_shared else entry.name
        keys.append((entry.key, Key(entry.name, tier, tier, entry.admin, limits, namespace)))
    if path is not None and not keys:
        raise InvalidRequest(f"--api-keys-file {str(path)!r}: the file has no keys")
    return KeyRing(keys)


def _read(path: Path) -> _KeysFile:
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=_KeysFile)
    except OSError as error:
        raise InvalidRequest(f"--api-keys-file {str(path)!r}: {error.strerror or error}") from None
    except (msgspec.DecodeError, ValueError) as error:  # the file's text is not quoted: it holds keys
        where = str(error) if isinstance(error, msgspec.ValidationError) else "is not YAML"
        raise InvalidRequest(f"--api-keys-file {str(path)!r}: {where}") from None


def _check_secret(secret: str, name: str) -> None:
    if not MIN_KEY_CHARS <= len(secret) <= MAX_KEY_CHARS or not secret.isascii() or not secret.isprintable():
        size = f"{MIN_KEY_CHARS} to {MAX_KEY_CHARS} printable ASCII characters"
        raise InvalidRequest(f"API keys: the key {name!r} has {len(secret)} characters; a key has {size}")
    if secret.strip() != secret:
        raise InvalidRequest(f"API keys: the key {name!r} begins or ends with a space")


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


NUM_PARSERS = 2  # threads that decode and parse large bodies, and encode large answers
RATE_WINDOW_S = 30.0
MAX_RETRY_AFTER_S = 120.0
MINUTE_S = 60.0
MAX_BODY_BYTES = 256 << 20  # of all bodies that are being read
SMALL_BODY_BYTES = 32 << 10
HARD_FACTOR = 4  # all tenants together may hold this many times the limit of a queue
HARD_BODY_FACTOR = 2  # the same for bodies, which take more memory

T = TypeVar("T")


class QueueTicket:
    """A place in the queue, or a refusal: see `TierQueue.check`.

    `start` and `leave` free it and may be repeated; `start` also counts towards the rate.
    """

    def __init__(self, queue: TierQueue, priority: Priority, tenant: str, num_requests: int) -> None:
        self._queue = queue
        self.priority = priority
        self._tenant = tenant
        self._num_requests = num_requests
        self._num_tokens = 0
        self._is_waiting = True
        queue.check(tenant, num_requests)
        queue.hold(tenant, num_requests, 0)

    def grow(self, num_tokens: int) -> None:
        """Add the tokens of the prompts, once they are tokenised. A refusal leaves the ticket unchanged."""
        if self._queue.num_tokens != self._num_tokens:  # others wait too
            self._queue.check_tokens(self._tenant, num_tokens)
        self._queue.hold(self._tenant, 0, num_tokens)
        self._num_tokens += num_tokens

    def start(self) -> None:
        if self._is_waiting:
            self._queue.note_start(self._num_requests)
        self.leave()

    def leave(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._queue.hold(self._tenant, -self._num_requests, -self._num_tokens)


class TierQueue:
    """Requests and tokens that wait in one tier of a model, and the rate at which they start.

    Each tier has the full limit: a backlog in one does not refuse requests of another.

    A full queue refuses a request with which its tenant would hold more than an equal part of the queue. A tenant
    without a waiting request may add one, until `HARD_FACTOR` times the limit is waiting: one tenant must not shut out
    the others.
    """

    def __init__(self, max_requests: int, max_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_requests = 0
        self.num_tokens = 0
        self._clock = clock
        self._held: dict[str, tuple[int, int]] = {}  # tenant -> waiting requests and tokens
        self._waits_since_s = 0.0  # when the queue last became non-empty
        self._starts: deque[tuple[float, int]] = deque()  # time, number of requests

    def check(self, tenant: str, num_requests: int = 1) -> None:
        """Raise unless all requests fit. An empty queue takes any number: else a large request could never run."""
        held_requests, held_tokens = self._held.get(tenant, (0, 0))
        num_tenants = len(self._held) + (tenant not in self._held)
        is_over = self.num_requests > 0 and self.num_requests + num_requests > self.max_requests
        is_first = held_requests == 0 and num_requests == 1
        is_greedy = not is_first and (held_requests + num_requests) * num_tenants > self.max_requests
        if is_over and (is_greedy or self.num_requests + num_requests > HARD_FACTOR * self.max_requests):
            more = "which is the limit"
            if num_requests > 1:
                more = f"and {num_requests} more exceed the limit of {self.max_requests}"
            raise self._refusal(f"{self.num_requests} requests are already waiting, {more}", "queue_full")
        if self.num_tokens >= self.max_tokens and held_tokens * num_tenants >= self.max_tokens:
            raise self._refusal(f"{self.num_tokens} tokens are already waiting, which is the limit", "queue_tokens")

    def check_tokens(self, tenant: str, num_tokens: int) -> None:
        """Raise unless so many tokens more fit."""
        held_tokens = self._held[tenant][1]
        is_over = self.num_tokens + num_tokens > self.max_tokens
        if is_over and (held_tokens + num_tokens) * len(self._held) > self.max_tokens:
            more = f"{num_tokens} more exceed the limit of {self.max_tokens}"
            raise self._refusal(f"{self.num_tokens} tokens are already waiting; {more}", "queue_tokens")

    def note_start(self, num_requests: int) -> None:
        self._starts.append((self._clock(), num_requests))
        while len(self._starts) > 1 and self._clock() - self._starts[0][0] > RATE_WINDOW_S:
            self._starts.popleft()

    def hold(self, tenant: str, num_requests: int, num_tokens: int) -> None:
        if not self.num_requests:
            self._waits_since_s = self._clock()
        requests, tokens = self._held.pop(tenant, (0, 0))
        if (held := (requests + num_requests, tokens + num_tokens)) != (0, 0):
            self._held[tenant] = held
        self.num_requests += num_requests
        self.num_tokens += num_tokens

    def retry_after_s(self) -> float:
        """Time until half of the waiting requests have started, at the recent rate.

        If none started recently, the time that they have waited.
        """
        now_s = self._clock()
        recent = [(at_s, count) for at_s, count in self._starts if now_s - at_s <= RATE_WINDOW_S]
        if not recent:
            waited_s = now_s - self._waits_since_s if self.num_requests else 0.0
            return min(max(1.0, math.ceil(waited_s)), MAX_RETRY_AFTER_S)
        span_s = max(now_s - recent[0][0], 1.0)
        rate = sum(count for _, count in recent) / span_s
        return min(max(1.0, math.ceil(self.num_requests / 2 / rate)), MAX_RETRY_AFTER_S)

    def _refusal(self, text: str, reason: str) -> ApiError:
        return ApiError(Kind.OVERLOADED, text, retry_after_s=self.retry_after_s(), reason=reason)


def check_room(queues: Iterable[TierQueue], tenant: str) -> None:
    """Raise the first refusal if no queue has room for one more request. Called before the body is read."""
    refusals: list[ApiError] = []
    for queue in queues:
        try:
            return queue.check(tenant)
        except ApiError as error:
            refusals.append(error)
    raise refusals[0]


class BodyBytes:
    """Total bytes of the bodies that are being read: many large, slow bodies must not fill the memory.

    Over the limit, a body is refused if its tenant would hold more than an equal part, as in `TierQueue`. The first
    `SMALL_BODY_BYTES` of each are granted always: large bodies do not block small ones.
    """

    def __init__(self, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self._held: dict[str, int] = {}  # tenant -> bytes

    @contextmanager
    def reading(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes bytes of one body, or refuses them. They are held until the end."""
        num_own = 0

        def take(num_bytes: int) -> None:
            nonlocal num_own
            if num_own + num_bytes > SMALL_BODY_BYTES:
                self._check(tenant, num_bytes)
            self._hold(tenant, num_bytes)
            num_own += num_bytes

        try:
            yield take
        finally:
            self._hold(tenant, -num_own)

    def _check(self, tenant: str, num_bytes: int) -> None:
        num_all = self.num_bytes + num_bytes
        num_tenants = len(self._held) + (tenant not in self._held)
        is_greedy = (self._held.get(tenant, 0) + num_bytes) * num_tenants > self._max_bytes
        if num_all > self._max_bytes and (is_greedy or num_all > HARD_BODY_FACTOR * self._max_bytes):
            text = f"{self.num_bytes} bytes of request bodies are already being read, which is the limit"
            raise ApiError(Kind.OVERLOADED, text, retry_after_s=2.0, reason="body_bytes")

    def _hold(self, tenant: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._held[tenant] = self._held.get(tenant, 0) + num_bytes
        if not self._held[tenant]:
            del self._held[tenant]


class FairSlots:
    """Lets a number of jobs run at once. Tenants take turns: many jobs of one do not delay those of another.

    Belongs to one event loop.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}  # waiting jobs of each tenant, in the order of turns

    async def run(self, tenant: str, pool: Executor, work: Callable[[], T]) -> T:
        """Run work in a thread of the pool. Its slot is free when the thread is, also if the caller is cancelled."""
        await self._enter(tenant)
        loop = asyncio.get_running_loop()

        def leave(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._leave)

        try:
            job = pool.submit(work)
        except RuntimeError:  # the pool was closed
            self._leave()
            raise Draining("the server is shutting down") from None
        job.add_done_callback(leave)
        return await asyncio.wrap_future(job)

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Hold a slot for work that needs no thread: a question to a worker, or work on the event loop."""
        await self._enter(tenant)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, tenant: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # cancelled after its turn came
                self._leave()
            raise

    def _leave(self) -> None:
        """Give the slot to the next tenant. That tenant's other jobs wait until all other tenants had a turn."""
        while self._lines:
            tenant = next(iter(self._lines))
            line = self._lines.pop(tenant)
            while line and line[0].done():  # cancelled
                line.popleft()
            if line:
                line.popleft().set_result(None)
                if line:
                    self._lines[tenant] = line
                return
        self._num_free += 1


class Bucket:
    """A token bucket that holds one minute's amount. May go below 0: output tokens are known only afterwards."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._clock = clock
        self._at_s = clock()

    def wait_s(self, amount: float) -> float:
        """Time until this amount is available; 0: now. An amount above the capacity passes when the bucket is full."""
        self._refill()
        missing = min(amount, self.per_minute) - self._level
        return max(0.0, missing * MINUTE_S / self.per_minute)

    def take(self, amount: float) -> None:
        self._refill()
        self._level -= amount

    def _refill(self) -> None:
        now_s = self._clock()
        self._level = min(self.per_minute, self._level + (now_s - self._at_s) * self.per_minute / MINUTE_S)
        self._at_s = now_s


class Quota:
    """The usage of one key."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_requests = limits.max_requests
        self._buckets: dict[str, Bucket] = {}
        for name in ("requests_per_minute", "tokens_per_minute"):
            if (limit := getattr(limits, name)) is not None:
                self._buckets[name] = Bucket(limit, clock)
        self.num_open = 0

    def enter(self, num_tokens: int) -> None:
        """Count a request with this many prompt tokens, or refuse it and count nothing."""
        if self._max_requests is not None and self.num_open >= self._max_requests:
            raise _used_up("max_requests", self._max_requests, 1.0)
        amounts = {"requests_per_minute": 1, "tokens_per_minute": num_tokens}
        for name, bucket in self._buckets.items():
            if wait_s := bucket.wait_s(amounts[name]):
                raise _used_up(name, bucket.per_minute, wait_s)
        self.num_open += 1
        for name, bucket in self._buckets.items():
            bucket.take(amounts[name])

    def use(self, num_tokens: int) -> None:
        if (bucket := self._buckets.get("tokens_per_minute")) is not None:
            bucket.take(num_tokens)

    def leave(self) -> None:
        self.num_open -= 1


def _used_up(name: str, limit: int, wait_s: float) -> ApiError:
    text = f"this key has reached its limit: {name} = {limit}"
    return ApiError(Kind.RATE_LIMITED, text, retry_after_s=math.ceil(wait_s), reason=f"key_{name}")
