"""KV events as vLLM defines them, written from the description of its wire format: for tests, in both directions.

Names, order and defaults are those of vllm/distributed/kv_events.py (August 2026). vLLM encodes an event as a map with
its class as `type` and leaves out fields with their default; a batch is an array.
"""

from __future__ import annotations

from typing import Any

import msgspec


class VllmEvent(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(VllmEvent):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(VllmEvent):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(VllmEvent):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def decode(payload: bytes) -> Batch:
    return msgspec.msgpack.decode(payload, type=Batch, strict=True)


def encode(ts: float, *events: VllmEvent) -> bytes:
    """The payload that vLLM sends."""
    return msgspec.msgpack.encode(Batch(ts, list(events), 0))  # type: ignore[arg-type]  # one of the three


class Router:
    """A router's view of one server: announced content by hash, for each medium. Refuses what it could not apply."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.media: dict[str, dict[int, tuple[int | None, tuple[int, ...]]]] = {}  # hash -> parent, tokens
        self.num_stored = self.num_removed = self.num_cleared = 0

    @property
    def device(self) -> dict[int, tuple[int | None, tuple[int, ...]]]:
        return self.media.get("GPU", {})

    def take(self, payload: bytes) -> None:
        batch = decode(payload)
        assert batch.ts > 0
        assert batch.data_parallel_rank == 0
        assert batch.events
        for event in batch.events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    self.media.clear()
                    self.num_cleared += 1

    def _store(self, event: BlockStored) -> None:
        size = event.block_size
        assert size == self.block_size
        assert len(event.token_ids) == len(event.block_hashes) * size
        assert event.extra_keys == [None] * len(event.block_hashes)
        assert event.medium in ("GPU", "CPU", "STORAGE")
        parent = event.parent_block_hash
        for index, name in enumerate(event.block_hashes):
            assert isinstance(name, int)
            assert not isinstance(parent, bytes)
            assert 0 <= name < 2**64
            assert parent is None or any(parent in known for known in self.media.values()), "stored before its parent"
            known = self.media.setdefault(event.medium, {})
            assert name not in known, "stored twice"
            known[name] = parent, tuple(event.token_ids[index * size : (index + 1) * size])
            parent = name
            self.num_stored += 1

    def _remove(self, event: BlockRemoved) -> None:
        assert event.medium is not None
        for name in event.block_hashes:
            assert isinstance(name, int)
            assert name in self.media[event.medium], "removed, but not stored"
            del self.media[event.medium][name]
            self.num_removed += 1

    def num_matched(self, tokens: tuple[int, ...]) -> int:
        """The number of leading tokens of a prompt that are on the device."""
        children = {place: name for name, place in self.device.items()}
        parent, start = None, 0
        while (name := children.get((parent, tokens[start : start + self.block_size]))) is not None:
            parent, start = name, start + self.block_size
        return start
