"""The tiers of a simulated world: what the engine's transfers do with real memory and files.

Copies take a random time. Some fail: the disk is full, a file is torn or missing. The disk has a limit of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from random import Random

from quire.backends.fake import FakeRunner
from quire.core.scheduler import Scheduler
from quire.core.step import Content, Load, MemoryKind, MemoryRef, Save, StepPlan, Tier

Payload = list[int]


@dataclass(slots=True)
class _Saving:
    content: Content
    tier: Tier
    payload: Payload


@dataclass(slots=True)
class _Loading:
    load_id: int
    pieces: list[Load]
    num_launched: int  # plans that were launched before; the copies must not overtake them
    num_written: int = 0  # of the pieces: the first ones, that were copied before the plan was complete
    failures: set[Content] = field(default_factory=set)


class LowerStore:
    def __init__(
        self, random: Random, runner: FakeRunner, *, host_pieces: tuple[int, int, int], disk_pieces: int
    ) -> None:
        self._random = random
        self.runner = runner
        self._host_pieces = host_pieces
        self._disk_pieces = disk_pieces
        self.stored: dict[Tier, OrderedDict[Content, Payload]] = {Tier.HOST: OrderedDict(), Tier.DISK: OrderedDict()}
        self._saving: list[_Saving] = []
        self._loading: list[_Loading] = []
        self._early: dict[int, _Loading] = {}  # loads whose plan is being made
        self.num_early = self.num_from_host = 0
        self.num_failures = 0
        self.num_evictions = 0

    @property
    def has_work(self) -> bool:
        return bool(self._saving or self._loading)

    @property
    def is_saving(self) -> bool:
        return bool(self._saving)

    def start(self, plan: StepPlan, num_launched: int) -> None:
        """Start the transfers of a plan, before its step is launched."""
        for content in plan.drops:
            del self.stored[Tier.HOST][content]
        for save in plan.saves:
            payload = self._read(save)
            self._saving += [_Saving(save.content, tier, payload) for tier in save.tiers]
        to_host = [one.content for one in self._saving if one.tier is Tier.HOST]
        for kind in MemoryKind:
            count = sum(content.kind is kind for content in (*self.stored[Tier.HOST], *to_host))
            assert count <= self._host_pieces[kind], f"{count} {kind.name} in host memory, of {self._host_pieces}"
        loads: dict[int, list[Load]] = {}
        for load in plan.loads:
            loads.setdefault(load.load_id, []).append(load)
        for load_id, pieces in loads.items():
            loading = self._early.pop(load_id, None) or _Loading(load_id, [], num_launched)
            loading.pieces += pieces
            self._loading.append(loading)
        assert not self._early, "a plan has no piece of a load that was started early"

    def start_early(self, loads: tuple[Load, ...], num_launched: int, num_committed: int) -> None:
        """Start the first loads of a plan that is being made. If no step is in flight, they are copied at once."""
        for load in loads:
            loading = self._early.setdefault(load.load_id, _Loading(load.load_id, [], num_launched))
            loading.pieces.append(load)
            if num_launched == num_committed:
                self._copy(loading, load)
                loading.num_written += 1
                self.num_early += 1

    def advance(self, scheduler: Scheduler, num_committed: int) -> None:
        """Complete one transfer, if there is one that may complete."""
        ready = [one for one in self._loading if one.num_launched <= num_committed]
        if ready and (not self._saving or self._random.random() < 0.5):
            self._load(scheduler, self._random.choice(ready))
        elif self._saving:
            self._save(scheduler, self._saving.pop(self._random.randrange(len(self._saving))))

    def damage(self) -> None:
        """Lose a stored piece without telling anyone, as if a file was torn."""
        tier = self._random.choice((Tier.HOST, Tier.DISK, Tier.DISK))
        if self.stored[tier] and tier is Tier.DISK:
            self.stored[tier][self._random.choice(list(self.stored[tier]))] = []

    def clear(self) -> None:
        """Drop everything; saves in flight are forgotten. Loads in flight still end."""
        self._saving.clear()
        for stored in self.stored.values():
            stored.clear()

    def restart(self, runner: FakeRunner) -> list[Content]:
        """A new process: only files that were complete are left."""
        self.runner = runner
        self._saving.clear()
        self._loading.clear()
        self.stored[Tier.HOST].clear()
        return list(self.stored[Tier.DISK])

    def _save(self, scheduler: Scheduler, saving: _Saving) -> None:
        is_saved = self._random.random() < 0.95
        self.num_failures += not is_saved
        if is_saved:
            self.stored[saving.tier][saving.content] = saving.payload
        scheduler.finish_save(saving.content, saving.tier, is_saved=is_saved)
        disk = self.stored[Tier.DISK]
        while len(disk) > self._disk_pieces:
            content, _ = disk.popitem(last=False)
            self.num_evictions += 1
            scheduler.lose_stored(Tier.DISK, [content])

    def _load(self, scheduler: Scheduler, loading: _Loading) -> None:
        self._loading.remove(loading)
        for piece in loading.pieces[loading.num_written :]:
            self._copy(loading, piece)
        self.num_failures += bool(loading.failures)
        for content in loading.failures:
            for piece in loading.pieces:
                if piece.content == content and piece.tier is Tier.DISK:  # the core decides what host memory has
                    self.stored[Tier.DISK].pop(content, None)
        scheduler.finish_load(loading.load_id, loading.failures, self._random.choice((0, 1_000, 10**9)))

    def _copy(self, loading: _Loading, piece: Load) -> None:
        payload = self.stored[piece.tier].get(piece.content)
        if not payload or self._random.random() < 0.02:
            loading.failures.add(piece.content)
        else:
            self._write(piece.target, payload)

    def _read(self, save: Save) -> Payload:
        if save.source is None:
            self.num_from_host += 1
            return self.stored[Tier.HOST][save.content]
        kind, index = save.source
        if kind is MemoryKind.STATE:
            return [self.runner.states[index]]
        return [*self._memory(save.source)[index]]

    def _write(self, target: MemoryRef, payload: Payload) -> None:
        if target.kind is MemoryKind.STATE:
            (self.runner.states[target.index],) = payload
        else:
            self._memory(target)[target.index][:] = payload

    def _memory(self, ref: MemoryRef) -> list[Payload]:
        return self.runner.window_memory if ref.kind is MemoryKind.WINDOW else self.runner.memory
