"""Changes of the prefix cache in all levels: as KV events in vLLM's wire format, and as reports to a router.

Knows no sockets (`event_publisher.py`) and does not import pyzmq.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import NamedTuple

import msgspec

from quire.core.cache import unpack_tokens
from quire.core.events import Published, Removed, TreeChange
from quire.core.kv_cache import KVCacheManager
from quire.core.levels.lower_level import LowerLevel
from quire.core.step import Content, MemoryKind
from quire.core.values import TOKEN_BYTES, Level
from quire.errors import InvalidRequest, MissingExtra

HASH_BYTES = 8  # of a chain key, in events and reports: enough to tell a billion blocks apart
MAX_TOPIC = 256
PORTS_PER_MODEL = 2  # events and replay


# Settings


class Endpoint(NamedTuple):
    """A TCP address to listen on."""

    host: str  # an IP address
    port: int  # 0: any free port

    def __str__(self) -> str:
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return ip_address(self.host).is_loopback

    def offset(self, by: int) -> Endpoint:
        return self if self.port == 0 else Endpoint(self.host, self.port + by)


def parse_endpoint(name: str, text: str) -> Endpoint:
    """The address in `tcp://HOST:PORT`. Raises InvalidRequest; `name` is the setting."""
    scheme, separator, rest = text.partition("://")
    host, _, port = rest.rpartition(":")
    host = "127.0.0.1" if host == "localhost" else host.removeprefix("[").removesuffix("]")
    if scheme != "tcp" or not separator or not port.isascii() or not port.isdecimal() or int(port) > 65_535:
        raise InvalidRequest(f"{name} = {text!r:.80} is not tcp://HOST:PORT with a port from 0 to 65535")
    if host == "*":
        reason = "would send the tokens of prompts to every network of this machine: give the address to listen on"
        raise InvalidRequest(f"{name} = {text!r:.80} {reason} (0.0.0.0: all of them)")
    try:
        ip_address(host)
    except ValueError:
        raise InvalidRequest(f"{name} = {text!r:.80}: {host!r:.80} is neither an IP address nor localhost") from None
    return Endpoint(host, int(port))


def cannot_listen(name: str, endpoint: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{name} = {endpoint!r}: cannot listen there: {reason}")


def check_topic(name: str, topic: str) -> None:
    if len(topic) > MAX_TOPIC or not topic.isprintable():
        raise InvalidRequest(f"{name} = {topic!r:.80} is not at most {MAX_TOPIC} printable characters")


def check_installed() -> None:
    if importlib.util.find_spec("zmq") is None:
        raise MissingExtra.of("--kv-events", "zmq")


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """Where the worker of one model sends its events."""

    endpoint: str
    replay_endpoint: str | None = None  # None: missed batches cannot be requested
    topic: str = ""


@dataclass(frozen=True, slots=True)
class KvEventsStatus(KvEventsConfig):
    """The sockets of a worker, with the ports that were bound."""

    silent_because: str | None = None  # why nothing is announced; None: the cache is announced


# Encoding. Names, order and defaults of the fields are vLLM's (vllm/distributed/kv_events.py): a batch is an array, an
# event a map with its `type`. Fields that vLLM leaves out if they have their defaults are not here.


class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None  # None: the first block of a prompt
    token_ids: list[int]  # of all these blocks
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    extra_keys: list[None]  # vLLM's salts and images, one entry per block; prefixes here have neither


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True):
    """All blocks of all levels."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float  # seconds since the epoch
    events: list[KvEvent]
    data_parallel_rank: int = 0


def block_hash(key: bytes) -> int:
    """The name of content in events: the first half of its chain key, as an unsigned number.

    Dynamo accepts only numbers of 64 bits, llm-d numbers or bytes of which it uses 8. Both hash the tokens themselves
    and use this name only to find parents and removed blocks. With half of a key, a reader cannot compute other keys.
    """
    return int.from_bytes(key[:HASH_BYTES], "big")


MEDIA = {Level.DEVICE: "GPU", Level.HOST: "CPU", Level.DISK: "STORAGE"}  # vLLM's words, with every backend
_BITS = {Level.DEVICE: 1, Level.HOST: 2, Level.DISK: 4}  # in `CacheEvents._levels`


class CacheEvents:
    """Collects the changes of the cache in all levels until they are sent, as KV events or as a report to a router.

    Every level announces its own content: `take` for the prefix tree, which is the device level, `stored` and `removed`
    for the levels below it. KV events have tokens, so content is announced only if it follows the root of the empty
    salt or content that is announced in some level: no prefix with a salt is ever announced, and each parent before its
    children. Reports have no tokens and include prefixes of all salts: without the secret, a chain key tells nothing.
    """

    def __init__(self, root: bytes, block_size: int, *, has_salts: bool = False) -> None:
        """`root`: the root key of the empty salt. `has_salts`: for reports."""
        self._root = root
        self._block_size = block_size
        self._has_salts = has_salts
        self._below: Sequence[LowerLevel] = ()
        self._levels: dict[bytes, int] = {}  # key of announced content -> bits of the levels that hold it
        self._events: list[KvEvent] = []  # since the last batch
        self.changed: dict[bytes, None] = {}  # keys, since the last report
        self.is_cleared = False  # since the last report
        self._is_first = True

    def follow(self, cache: KVCacheManager) -> None:
        """Announce what lower levels hold already, and from now on all changes.

        Routers learn each block after its parent. Levels are not filled in this order: the end of a prefix is evicted,
        and saved, before its beginning. So blocks that are already stored are announced together with their parent.
        """
        cache.tree.reports_salts = self._has_salts
        cache.tree.on_change = self.take
        self._below = cache.levels.levels
        for level in self._below:
            level.on_change = self._take_level
            for stored in level.pieces(MemoryKind.BLOCK).values() if self._has_salts else ():
                self._store_content(level.level, stored.content)
        self._announce_after(self._root)

    def _take_level(self, level: Level, content: Content, is_stored: bool) -> None:
        if content.kind is not MemoryKind.BLOCK:
            return
        if not is_stored:
            self.removed(level, (content.key,))
            return
        self._store_content(level, content)
        if content.key in self._levels:
            self._announce_after(content.key)

    def _announce_after(self, key: bytes) -> None:
        keys = [key]
        while keys:
            parent_key = keys.pop()
            for level in self._below:
                for stored in level.after(MemoryKind.BLOCK, parent_key) or ():
                    if stored.content.key not in self._levels:
                        keys.append(stored.content.key)
                    self._store_content(level.level, stored.content)

    def _store_content(self, level: Level, content: Content) -> None:
        self.stored(level, content.key, content.parent_key, content.tokens)

    def take(self, change: TreeChange) -> None:
        """Announce a change of the prefix tree. This is its `on_change`."""
        if isinstance(change, Published):
            self.stored(Level.DEVICE, *change)
        elif isinstance(change, Removed):
            self.removed(Level.DEVICE, change.keys)
        else:
            self.cleared()

    def stored(self, level: Level, key: bytes, parent_key: bytes, tokens: bytes) -> None:
        """Announce content that a level holds now. `tokens` are packed (`pack_tokens`). Partial blocks are left out."""
        known, bit = self._levels, _BITS[level]
        levels = known.get(key, 0)
        is_public = self._has_salts or parent_key in known or parent_key == self._root or levels
        if levels & bit or not is_public or len(tokens) != self._block_size * TOKEN_BYTES:
            return
        known[key] = levels | bit
        if self._has_salts:
            self.changed[key] = None
            return
        name, parent = block_hash(key), None if parent_key == self._root else block_hash(parent_key)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == parent and last.medium == MEDIA[level]:
            last.block_hashes.append(name)
            last.token_ids.extend(unpack_tokens(tokens))
            last.extra_keys.append(None)
        else:
            tokens_of_block = unpack_tokens(tokens)
            self._events.append(
                BlockStored([name], parent, tokens_of_block, self._block_size, None, MEDIA[level], None, [None])
            )

    def removed(self, level: Level, keys: Iterable[bytes]) -> None:
        """Announce that a level no longer holds this content. Content that was not announced is left out."""
        known, bit = self._levels, _BITS[level]
        gone = [key for key in dict.fromkeys(keys) if known.get(key, 0) & bit]
        for key in gone:
            known[key] &= ~bit
            if not known[key]:
                del known[key]
        if self._has_salts:
            self.changed |= dict.fromkeys(gone)
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.medium == MEDIA[level]:
            last.block_hashes.extend(map(block_hash, gone))
        elif gone:
            self._events.append(BlockRemoved([*map(block_hash, gone)], MEDIA[level]))

    def cleared(self) -> None:
        """Announce that the device level is empty. The event for that clears all levels: others need single events."""
        if all(levels == _BITS[Level.DEVICE] for levels in self._levels.values()):
            self._levels.clear()
            self._events, self.changed, self.is_cleared = [AllBlocksCleared()], {}, True
        else:
            self.removed(Level.DEVICE, [*reversed(self._levels)])  # children before their parents

    def pop(self, now_s: float) -> bytes | None:
        """The events since the last call, as the payload of a batch; None: there are none.

        The first batch begins with a clear: subscribers that connect after the worker's start miss the one that is
        sent then, and may know the blocks of an earlier worker.
        """
        events, self._events = self._events, []
        if not events:
            return None
        if self._is_first:
            events.insert(0, AllBlocksCleared())
            self._is_first = False
        return msgspec.msgpack.encode(Batch(now_s, events))

    def pop_report(self, num_free_blocks: int) -> CacheReport:
        """The changes since the last call, as a report."""
        known, changed = self._levels, self.changed
        added = b"".join([key[:HASH_BYTES] for key in changed if key in known])
        removed = b"".join([key[:HASH_BYTES] for key in changed if key not in known])
        report = CacheReport(added, removed, self.is_cleared, num_free_blocks)
        self.changed, self.is_cleared = {}, False
        return report


def start_payload(now_s: float) -> bytes:
    """The batch that a worker sends when it starts: its cache is empty."""
    return msgspec.msgpack.encode(Batch(now_s, [AllBlocksCleared()]))


INTERVAL_S = 0.05  # between reports while steps run


class CacheReport(msgspec.Struct, tag="cache_report", frozen=True):
    """Changes of the prefix cache since the last report, for a router: the first 8 bytes of chain keys.

    Content of all levels counts as cached. Removals come before additions.
    """

    added: bytes
    removed: bytes
    is_cleared: bool  # before these changes
    num_free_blocks: int  # that no running request uses


def split_keys(keys: bytes) -> list[bytes]:
    """The first bytes of chain keys, from a report in which they follow each other."""
    return [keys[at : at + HASH_BYTES] for at in range(0, len(keys), HASH_BYTES)]


class CacheReporter:
    """Makes the reports of a cache to the front of a cluster (`quire/scale/routing.py`)."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._pool = cache.pool
        self._last_s = 0.0
        self._num_free = -1
        self._events = CacheEvents(cache.tree.root(""), cache.block_size, has_salts=True)
        if cache.is_caching:
            self._events.follow(cache)

    def pop(self, *, is_idle: bool) -> CacheReport | None:
        """The report that is due. While steps run, one is due after an interval."""
        num_free = self._pool.num_free
        if not self._events.changed and not self._events.is_cleared and num_free == self._num_free:
            return None
        now_s = time.monotonic()
        if not is_idle and now_s - self._last_s < INTERVAL_S:
            return None
        self._last_s, self._num_free = now_s, num_free
        return self._events.pop_report(num_free)
