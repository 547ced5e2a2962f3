"""Tiers that are fair to each other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING

from quire.core.events import Admitted, Event, Preempted
from quire.core.kv_cache import KVCacheManager
from quire.core.policy import NS_PER_S, Aging
from quire.core.request import Priority
from quire.core.scheduler import Scheduler
from quire.engine.bench.driving import Bench, Session, Track, driven
from quire.engine.bench.report import (
    NUM_STREAM_LOW,
    SHORT_ANSWER,
    SHORT_PROMPT,
    STREAM_LIMIT_S,
    FairnessReport,
    FloodReport,
    StreamReport,
    Tier,
)
from quire.engine.engine import Engine

if TYPE_CHECKING:
    pass


class _Watch:
    """What the scheduler said about who began when."""

    def __init__(self) -> None:
        self.admissions: list[int] = []  # request ids, by their first admission
        self.waits_ns: dict[int, int] = {}  # until then
        self.num_preemptions = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Preempted):
            self.num_preemptions += 1
        elif isinstance(event, Admitted) and not event.is_resumed:
            self.admissions.append(event.request_id)
            self.waits_ns[event.request_id] = event.waited_ns


class _Crowd:
    """Requests of different tiers on a machine that is too small for them: the same weights, few slots."""

    def __init__(self, bench: Bench) -> None:
        runner, config = bench.engine.runner, bench.config
        capacity = runner.capacity()
        self.watch = _Watch()
        self.num_slots = config.num_slots
        self.scheduler = Scheduler(
            KVCacheManager(capacity.num_blocks, capacity.block_size),
            Aging(config.patience_s),
            max_seqs=config.num_slots,
            max_context=capacity.max_context,
            observe=self.watch,
        )
        self.bound_s = self.scheduler.policy.overtake_window_s(Priority.LOW, Priority.HIGH)
        self.bound_ns = round(self.bound_s * NS_PER_S)
        self.engine = Engine(runner, self.scheduler)
        self.arrivals_ns: dict[int, int] = {}
        self._prompts = bench.prompts
        self._next_id = bench.next_id

    @contextmanager
    def session(self) -> Iterator[Session]:
        with driven(self.engine, self._next_id) as session:
            yield session

    def add(self, session: Session, priority: Priority) -> Track:
        prompt = self._prompts.make(SHORT_PROMPT)
        track = session.add(prompt, SHORT_ANSWER, priority=priority, salt=f"bench {self._next_id()}")
        request = self.scheduler.get(track.request_id)
        assert request is not None
        self.arrivals_ns[track.request_id] = request.arrived_ns
        return track

    def is_late(self, high: Track, low: Track) -> bool:
        """Whether a HIGH came too long after a LOW to go before it."""
        return self.arrivals_ns[high.request_id] > self.arrivals_ns[low.request_id] + self.bound_ns

    def tiers(self, session: Session) -> dict[str, Tier]:
        """Of those who have had a first token."""
        found = {}
        for priority in Priority:
            tracks = [one for one in session.tracks.values() if one.priority is priority and one.token_times]
            if tracks:
                waits_s = [self.watch.waits_ns[one.request_id] / NS_PER_S for one in tracks]
                ttfts_s = [one.ttft_s for one in tracks]
                found[priority.name] = Tier(len(tracks), median(waits_s), max(waits_s), median(ttfts_s), max(ttfts_s))
        return found


def measure_fairness(bench: Bench) -> FairnessReport:
    bench.engine.scheduler.cache.clear()  # the same memory is about to be written by others
    bench.tell("fairness: HIGH into a flood of LOW")
    flood = _run_flood(_Crowd(bench))
    bench.tell("fairness: LOW under a stream of HIGH")
    crowd = _Crowd(bench)
    stream = _run_stream(crowd)
    is_ordered = flood.num_overtakes > 0 and flood.num_out_of_order == 0
    return FairnessReport(
        num_slots=crowd.num_slots,
        patience_s=bench.config.patience_s,
        bound_s=crowd.bound_s,
        flood=flood,
        stream=stream,
        is_held=is_ordered and stream.low_wait_s is not None and stream.num_late_overtakes == 0,
    )


def _run_flood(crowd: _Crowd) -> FloodReport:
    with crowd.session() as session:
        lows = [crowd.add(session, Priority.LOW) for _ in range(3 * crowd.num_slots)]
        session.run(until=lambda: sum(bool(low.token_times) for low in lows) >= crowd.num_slots)
        waiting = [low for low in lows if not low.token_times]
        highs = [crowd.add(session, Priority.HIGH) for _ in range(crowd.num_slots)]
        session.run()
    pairs = [(high, low) for high in highs for low in waiting]
    return FloodReport(
        num_low_waiting=len(waiting),
        num_high=len(highs),
        num_overtakes=sum(high.first_s < low.first_s for high, low in pairs),
        num_out_of_order=sum(high.first_s >= low.first_s and not crowd.is_late(high, low) for high, low in pairs),
        num_preemptions=crowd.watch.num_preemptions,
        tiers=crowd.tiers(session),
    )


def _run_stream(crowd: _Crowd) -> StreamReport:
    """Twice as many HIGH ones as slots at any time; until the LOW ones have begun, and a HIGH they may not wait for."""
    watch, highs, lows = crowd.watch, list[Track](), list[Track]()

    def step() -> None:
        while sum(not high.is_finished for high in highs) < 2 * crowd.num_slots:
            highs.append(crowd.add(session, Priority.HIGH))
        session.step()

    def late() -> list[Track]:
        return [one for one in highs if crowd.is_late(one, lows[-1]) and one.request_id in watch.waits_ns]

    with crowd.session() as session:
        while len(watch.admissions) < 2 * crowd.num_slots:
            step()
        num_before = len(watch.admissions)
        lows += [crowd.add(session, Priority.LOW) for _ in range(NUM_STREAM_LOW)]
        give_up_s = time.perf_counter() + STREAM_LIMIT_S + 5 * crowd.bound_s
        while not (all(low.token_times for low in lows) and late()) and time.perf_counter() < give_up_s:
            step()
    return _stream_report(crowd, session, highs, lows, late(), num_before)


def _stream_report(
    crowd: _Crowd, session: Session, highs: list[Track], lows: list[Track], late: list[Track], num_before: int
) -> StreamReport:
    watch = crowd.watch
    places = {request_id: place for place, request_id in enumerate(watch.admissions)}
    never = len(places)
    low_places = [places.get(low.request_id, never) for low in lows]
    starts_s = [(crowd.arrivals_ns[one.request_id] + watch.waits_ns[one.request_id]) / NS_PER_S for one in late]
    high_ids = {high.request_id for high in highs}
    return StreamReport(
        num_high=len(highs),
        num_high_ahead=sum(one in high_ids for one in watch.admissions[num_before : max(low_places)]),
        low_wait_s=None if never in low_places else max(watch.waits_ns[low.request_id] for low in lows) / NS_PER_S,
        first_late_high_s=min(starts_s) - crowd.arrivals_ns[lows[0].request_id] / NS_PER_S if starts_s else None,
        num_late_overtakes=sum(
            crowd.is_late(high, low) and places[high.request_id] < place
            for low, place in zip(lows, low_places, strict=True)
            for high in late
        ),
        tiers=crowd.tiers(session),
    )
