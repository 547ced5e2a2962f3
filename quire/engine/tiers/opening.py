"""Opens the tiers of an engine: host memory and a folder on disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from quire.backends.base import BlockIO
from quire.core.levels.lower_tier import LowerTier, PieceCounts, PieceSizes
from quire.core.levels.saves import SaveLimits
from quire.core.levels.tiers import Tiers
from quire.core.values import Tier
from quire.engine.tiers.break_even import in_sequence, measure_disk, measure_import
from quire.engine.tiers.cache_folder import open_root, root_secret
from quire.engine.tiers.disk_store import DiskStore
from quire.engine.tiers.host_memory import HostStore, Slots
from quire.engine.tiers.transfers import Transfers
from quire.errors import InvalidRequest
from quire.sizes import compared_sizes

READ_BYTES = 256 << 20  # of buffers for content that is read from files: all that reads hold, also those that hang
SAVE_BYTES = 128 << 20  # of buffers that wait to be written
MIN_PIECES = 2
NUM_READERS = max(1, min(16, os.cpu_count() or 1))

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Sizes in bytes; 0: the tier is off."""

    host_bytes: int = 0
    disk_bytes: int = 0
    folder: Path | None = None  # of the disk tier

    @property
    def is_any(self) -> bool:
        return bool(self.host_bytes or self.disk_bytes)

    def check_fits(self, num_bytes: int) -> None:
        """Refuse tiers that have no room for a few pieces."""
        for name, given in (("host_cache", self.host_bytes), ("disk_cache", self.disk_bytes)):
            if 0 < given < num_bytes:
                there, needed = compared_sizes(given, num_bytes)
                raise InvalidRequest(f"{name} = {there} is too small for this model: it needs at least {needed}")


class OpenedTiers:
    """The tiers of one engine, before and after its scheduler is made."""

    def __init__(
        self,
        settings: TierSettings,
        block_io: BlockIO,
        pool_sizes: PieceCounts,
        model: str,
        arithmetic: Callable[[], Mapping[str, str]],
    ) -> None:
        """`pool_sizes`: blocks, window blocks and states of the runner. `arithmetic`: what determines their content."""
        self.block_io = block_io
        sizes = block_io.sizes
        self.secret = b""  # of the folder; empty: there is none
        self._host = self._disk = None
        self.tiers: list[LowerTier] = []
        self._slots: list[Slots] = []
        pieces = (sizes.block, sizes.window, sizes.state)
        settings.check_fits(MIN_PIECES * sum(pieces))
        if settings.host_bytes:
            counts = divide(settings.host_bytes, pieces, pool_sizes)
            self._slots.append(Slots(block_io.allocate, sizes, counts, is_early=True))
            self._host = HostStore(self._slots[-1])
            self.tiers.append(LowerTier(Tier.HOST, pieces, counts))
        read_counts, save_counts = (
            at_most(divide(num_bytes, pieces, pool_sizes), pool_sizes) for num_bytes in (READ_BYTES, SAVE_BYTES)
        )
        if settings.disk_bytes and settings.folder is not None:
            self._disk = _open_disk(settings, model, arithmetic)
            self.secret = root_secret(settings.folder)
            self.tiers.append(LowerTier(Tier.DISK, pieces, store_bytes=settings.disk_bytes, buffers=read_counts))
        # Of a model whose layers all have windows, window blocks.
        self._block_bytes, self._num_blocks = (
            (sizes.block, pool_sizes[0]) if sizes.block else (sizes.window, pool_sizes[1])
        )
        self.save_limits = SaveLimits(
            max_bytes=block_io.max_exports * self._block_bytes,
            idle_bytes=block_io.pieces_per_step * self._block_bytes,
            max_pending=sum(save_counts) + (4 * block_io.max_exports if self._host is not None else 0),
            max_writes=min(count for count in save_counts if count),
        )
        has_pinned = self._disk is not None and not block_io.is_host_memory  # which takes time to allocate
        self._slots.append(Slots(block_io.allocate, sizes, read_counts, is_early=has_pinned))
        self.transfers = Transfers(
            block_io,
            self._host,
            self._disk,
            read_slots=self._slots[-1],
            save_slots=Slots(block_io.allocate, sizes, save_counts),
            num_readers=NUM_READERS,
        )

    def start(self, tiers: Tiers) -> None:
        """Tell the cache what is on disk, and measure the speed of loads."""
        copies = measure_import(self.block_io, self._num_blocks)
        for tier in self.tiers:
            tier.speed = copies
        if self._disk is not None:
            reads = measure_disk(self._disk.space, self._block_bytes, NUM_READERS)
            self.tiers[-1].speed = copies if reads is None else in_sequence(reads, copies)
            tiers.restore(Tier.DISK, self._disk.scan())
        for tier in self.tiers:
            tier.is_filled = tiers.break_even(tier) is not None
            if not tier.is_filled:
                log.warning("nothing is saved to the %s cache: loads would take longer than computing", tier.tier)
        for slots in self._slots:
            slots.allocate_all()


def divide(num_bytes: int, sizes: PieceSizes, pool_sizes: PieceCounts) -> PieceCounts:
    """Divide memory among the kinds of pieces as the runner's own memory is divided; at least a few of each."""
    total = sum(size * count for size, count in zip(sizes, pool_sizes, strict=True))
    blocks, windows, states = (
        max(num_bytes * count // total, MIN_PIECES) if size else 0
        for size, count in zip(sizes, pool_sizes, strict=True)
    )
    return blocks, windows, states


def at_most(counts: PieceCounts, pool_sizes: PieceCounts) -> PieceCounts:
    """Limit buffers to the pieces of the runner: no more can be loaded or saved at the same time."""
    blocks, windows, states = map(min, counts, pool_sizes)
    return blocks, windows, states


def _open_disk(settings: TierSettings, model: str, arithmetic: Callable[[], Mapping[str, str]]) -> DiskStore:
    assert settings.folder is not None
    open_root(settings.folder)
    secret = sha256(root_secret(settings.folder)).hexdigest()[:16]  # keys depend on it
    return DiskStore(settings.folder, {**arithmetic(), "secret": secret}, settings.disk_bytes, name=model)
