"""The worker process of one model: receives messages, runs engine steps and sends their outputs.

Sleeps in `select` while idle, never blocks on sending, and ends when the client closes the socket. The client starts it
as `python -m quire.engine.worker.worker FD [LOG_FORMAT]`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.core.check import audit
from quire.core.events import Admitted, Event, Preempted
from quire.core.request import Request
from quire.core.step import StepPlan
from quire.core.values import Priority, SamplingParams
from quire.engine.composition import begin_fingerprint, import_backend, make_bare_engine, make_engine
from quire.engine.engine import Engine, StepEstimator, Work, work_of
from quire.engine.generation import EngineOutput, GenerationRequest
from quire.engine.grammars import SIGN_OF_LIFE_S, Compiled, GrammarQueue, Grammars, open_tokenizer
from quire.engine.process import calm_collector, setup_worker_log
from quire.engine.worker.block_map import BlockMap, held_ranges
from quire.engine.worker.kv_events import CacheReporter
from quire.engine.worker.protocol import (
    MAX_RUNNING_LISTED,
    Add,
    Answered,
    Ask,
    Begun,
    Blocks,
    Cancel,
    Channel,
    ClearCache,
    Explain,
    Failed,
    FindHeld,
    Fingerprinted,
    Finish,
    GetBlocks,
    GetStats,
    Load,
    Loading,
    Query,
    Ready,
    Refused,
    Running,
    Started,
    Stats,
    TierStats,
    ToWorker,
    Working,
    encode,
    stepped,
)
from quire.errors import InvariantViolation, QuireError

if TYPE_CHECKING:
    from quire.engine.fingerprint import Fingerprinting
    from quire.engine.worker.event_publisher import EventPublisher

AUDIT_AFTER_S = 1.0  # an audit starts after this much idle time
SAVE_AFTER_S = 0.5  # saves to disk start after this much idle time
SAVE_INTERVAL_S = 0.005  # between them
MAX_FINAL_SAVE_S = 4.0  # at the end; the client kills the process after EXIT_LIMIT_S
LONG_STEP_S = 3.0  # a step predicted to take longer is announced
PATIENCE_FACTOR = 10.0  # the announced limit is this multiple of the prediction
MAX_PATIENCE_S = 300.0  # maximum of that limit: SDKs time out after 600 s, and a hang must be found before that
WARM_UP_TOKENS = 8  # tokens of the prompt
WARM_UP_ANSWER = 2
MAX_VISITED_BLOCKS = 500  # visited at once by the block map or an audit, which takes one to two milliseconds
MAX_HELD_BLOCKS = 2000  # listed one by one for the map
MAP_LIFE_S = 10.0  # after it was last asked for, the map is not maintained any more
READ_ONLY = frozenset({Explain, GetStats, GetBlocks, FindHeld})  # do not change the core

log = logging.getLogger(__name__)


class Worker:
    """The loop of a worker process.

    `events`: those of the engine's scheduler, which appends to this list. Without `grammars`, no request has a grammar.
    Without `publisher`, changes of the cache are not announced; without `reporter`, not reported to the client.
    """

    def __init__(
        self,
        channel: Channel,
        engine: Engine,
        events: list[Event],
        grammars: Grammars | None = None,
        publisher: EventPublisher | None = None,
        reporter: CacheReporter | None = None,
    ) -> None:
        self._channel = channel
        self._engine = engine
        self._events = events  # since the last plan
        self._num_preemptions = 0
        self._estimator = StepEstimator()
        self._planned = Work()  # work of the last plan
        self._running = Work()  # enqueued by the previous call of `step`, if a step is in flight
        self._is_read_announced = False  # since the last progress: how long reads may take
        self._num_steps = 0
        self._num_violations = 0
        self._last_change_s = 0.0
        self._is_audited = True  # no change since the last audit
        self._audit: Iterator[None] | None = None  # the current one
        self._is_preparing = True  # the runner may have optional preparation to do while idle
        self._publisher = publisher
        self._reporter = reporter
        self._grammars = grammars
        self._compilations: GrammarQueue | None = None  # created with the first grammar
        self._map: BlockMap | None = None  # while a client requests it
        self._map_end_s = 0.0  # unless it is requested again
        engine.on_plan = self._announce
        self._handlers: dict[type, Callable[..., None]] = {
            Add: self._add,
            Cancel: self._cancel,
            Finish: self._finish,
            Ask: self._answer,
        }

    def warm_up(self) -> None:
        """Run a few steps: the first is slow, and the step estimator needs samples.

        The first step is as small as a decode, so that a faster one of the same size replaces it in the estimate. A
        separate scheduler with just enough blocks is used, so that the worker's own statistics are not affected.
        """
        runner = self._engine.runner
        spare = make_bare_engine(runner, WARM_UP_TOKENS + WARM_UP_ANSWER)
        spare.on_plan = self._note
        runs = ((1, 1), (min(WARM_UP_TOKENS, spare.scheduler.max_model_len - 1), WARM_UP_ANSWER))
        for request_id, (num_tokens, num_outputs) in enumerate(runs):
            sampling = SamplingParams(temperature=0, max_tokens=num_outputs)
            spare.add(request_id, GenerationRequest.of((0,) * num_tokens, sampling))
            while spare.has_work:
                self._timed_step(spare)

    def run(self, waiting: Sequence[ToWorker] = (), fingerprinting: Fingerprinting | None = None) -> None:
        """Serve until the client closes the socket. `fingerprinting`: reported when it ends."""
        self._handle(waiting)
        while True:
            messages = self._channel.receive(self._sleep_s())
            if messages and self._engine.follow_clears():  # before messages: it may have slept for long
                self._note_change()
            self._handle(messages)
            if self._map is not None and time.monotonic() > self._map_end_s:
                self._map.close()
                self._map = None
            if self._compilations:
                self._take_compiled(self._compilations)
            if fingerprinting is not None and fingerprinting.found:
                self._channel.send(Fingerprinted(fingerprinting.found))
                fingerprinting = None
            if self._engine.has_work:
                self._step()
            elif self._is_preparing:
                self._prepare()
            elif self._engine.has_idle_work and self._save_in_s() == 0.0:
                self._engine.idle()
                self._audit, self._is_audited = None, False  # an audit in progress would read what has changed
            elif not messages and self._audit_in_s() == 0.0:
                self._continue_audit()
            if self._publisher is not None:
                self._publisher.flush()
            if self._reporter is not None:
                report = self._reporter.pop(is_idle=not self._engine.has_work)
                if report is not None:
                    self._channel.send(report)

    def _handle(self, messages: Sequence[ToWorker]) -> None:
        for message in messages:
            self._handlers[type(message)](message)
            kind = type(message.query) if isinstance(message, Ask) else type(message)
            if kind not in READ_ONLY:
                self._note_change()

    def _note_change(self) -> None:
        """Restart the audit: the core has changed."""
        self._is_audited = False
        self._audit = None
        self._last_change_s = time.monotonic()

    def _sleep_s(self) -> float | None:
        """How long to wait for messages. None: without limit, so that an idle worker uses no CPU."""
        if self._engine.has_work or self._is_preparing:
            return 0.0
        # An audit waits for the end of the saves.
        is_saving = self._engine.has_idle_work
        limits_s = [max(self._save_in_s(), SAVE_INTERVAL_S) if is_saving else self._audit_in_s()]
        if self._compilations:
            limits_s.append(SIGN_OF_LIFE_S)
        return min((limit_s for limit_s in limits_s if limit_s is not None), default=None)

    def _save_in_s(self) -> float:
        """Time until cached content is saved: not at once, because the next request may follow soon."""
        return max(self._last_change_s + SAVE_AFTER_S - time.monotonic(), 0.0)

    def _audit_in_s(self) -> float | None:
        """Time until an audit starts or continues. None: no change since the last one."""
        if self._is_audited:
            return None
        return 0.0 if self._audit is not None else max(self._last_change_s + AUDIT_AFTER_S - time.monotonic(), 0.0)

    # Steps

    def _step(self) -> None:
        if self._engine.awaits_tokens:  # the step in flight is collected before a plan is made
            self._announce_wait(self._estimator.predict_s(self._running))
        outputs, done, took_s = self._timed_step(self._engine)
        self._note_change()
        if not self._engine.has_progressed:
            self._announce_reads()
            return
        self._is_read_announced = False
        self._num_steps += 1
        self._channel.send(stepped(outputs, done.num_tokens, took_s))

    def _announce_reads(self) -> None:
        """Report once how long the client should wait for a slow disk. If nothing follows, the worker is stuck."""
        if not self._is_read_announced:
            self._is_read_announced = True
            limit_s = self._engine.read_limit_s
            if limit_s > LONG_STEP_S:
                self._channel.send(Working(min(limit_s, MAX_PATIENCE_S) + LONG_STEP_S))

    def _timed_step(self, engine: Engine) -> tuple[list[EngineOutput], Work, float]:
        """Run a step. Returns its outputs, the work that was computed and the duration.

        With a step in flight, the work is that of the previous plan.
        """
        start_s = time.monotonic()
        outputs = engine.step()
        took_s = time.monotonic() - start_s
        done = self._planned
        if engine.capacity.has_overlap:
            done, self._running = self._running, self._planned
        self._estimator.learn(done, took_s)
        if engine.capacity.has_costly_rows:
            self._engine.scheduler.policy.ledger.cost = self._estimator.cost()
        return outputs, done, took_s

    def _note(self, plan: StepPlan) -> None:
        self._planned = work_of(plan)

    def _announce(self, plan: StepPlan) -> None:
        """Before a step runs, report the requests it starts, and whether it will be long."""
        self._note(plan)
        begun = [event for event in self._events if isinstance(event, Admitted) and not event.is_resumed]
        self._num_preemptions += sum(isinstance(event, Preempted) for event in self._events)
        self._events.clear()
        if begun:
            self._channel.send(Begun(tuple(map(self._describe, begun))))
        self._announce_wait(self._estimator.predict_s(self._running) + self._estimator.predict_s(self._planned))

    def _announce_wait(self, predicted_s: float) -> None:
        if predicted_s > LONG_STEP_S:
            self._channel.send(Working(min(PATIENCE_FACTOR * predicted_s, MAX_PATIENCE_S)))

    def _describe(self, event: Admitted) -> Started:
        request = self._engine.scheduler.requests[event.request_id]  # just admitted, and its step has not run
        return Started(event.request_id, event.waited_ns / 1e9, request.num_cached_tokens, request.cache_explanation)

    def _prepare(self) -> None:
        """Prepare one piece, so that a new request waits for at most one piece."""
        try:
            self._is_preparing = self._engine.runner.prepare()
        except Exception:
            log.exception("the runner's optional preparation failed; continuing without it")
            self._is_preparing = False

    def _continue_audit(self) -> None:
        """Check the next slice of the core's invariants. If one is broken, clear the cache and continue."""
        if self._audit is None:
            self._audit = audit(self._engine.scheduler, max_blocks=MAX_VISITED_BLOCKS)
        try:
            for _ in self._audit:
                return  # handle messages that arrived meanwhile first
        except InvariantViolation as violation:
            self._num_violations += 1
            log.error("an invariant of the core is broken; clearing the cache: %s", violation)
            self._engine.drop_cache()
        self._audit, self._is_audited = None, True

    # Requests

    def _add(self, message: Add) -> None:
        grammar, tenant = message.request.grammar, message.request.tenant
        if grammar is None:
            self._admit(message, None)
            return
        try:
            assert self._grammars is not None
            self._engine.check(message.request)
            compiled = self._grammars.find(grammar, tenant)
            if compiled is None:
                if self._compilations is None:
                    self._compilations = GrammarQueue(self._grammars, self._channel.wake)
                self._compilations.add(message)
                return
        except QuireError as error:
            self._refuse(message.request_ids, error)
        else:
            self._admit(message, compiled)

    def _take_compiled(self, compilations: GrammarQueue) -> None:
        for message, outcome in compilations.take():
            if isinstance(outcome, QuireError):
                self._refuse(message.request_ids, outcome)
            else:
                self._admit(message, outcome)
        if compilations.is_sign_due():
            self._channel.send(Working(PATIENCE_FACTOR * SIGN_OF_LIFE_S))

    def _admit(self, message: Add, compiled: Compiled | None) -> None:
        """Add all samples of a request, or none."""
        added: list[int] = []
        try:
            for index, request_id in enumerate(message.request_ids):
                matcher = None if compiled is None else compiled.matcher()
                self._engine.add(
                    request_id, message.request, index=index, parent_id=message.request_ids[0], matcher=matcher
                )
                added.append(request_id)
        except QuireError as error:
            for request_id in added:
                self._engine.cancel(request_id)
            self._refuse(message.request_ids, error)

    def _refuse(self, ids: tuple[int, ...], error: QuireError) -> None:
        self._channel.send(Refused(ids, type(error).__name__, str(error)))

    def _cancel(self, message: Cancel) -> None:
        if self._compilations:
            self._compilations.cancel(message.request_id)
        self._engine.cancel(message.request_id)

    def _finish(self, message: Finish) -> None:
        try:
            self._engine.finish(message.request_id, message.num_output_tokens)
        except QuireError:
            self._engine.cancel(message.request_id)

    # Queries

    def _answer(self, message: Ask) -> None:
        try:
            result = self._result(message.query)
        except QuireError as error:
            self._refuse((message.query_id,), error)
        else:
            self._channel.send(Answered(message.query_id, msgspec.Raw(encode(result))))

    def _result(self, query: Query) -> object:
        scheduler = self._engine.scheduler
        match query:
            case Explain(prompt=prompt, salt=salt):
                return scheduler.explain(Request(0, prompt, salt=salt))
            case GetStats():
                return self._stats()
            case GetBlocks(max_cells=max_cells, min_per_cell=min_per_cell):
                return self._blocks(max_cells, min_per_cell)
            case FindHeld(request_ids=request_ids):
                return held_ranges(scheduler, request_ids)
            case ClearCache():
                self._engine.clear_cache()
        return None

    def _stats(self) -> Stats:
        scheduler = self._engine.scheduler
        return Stats(
            cache=scheduler.cache.stats(),
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(self._compilations or ()),
            tiers=tier_stats(scheduler.waiting, self._engine.clock()),
            num_preemptions=self._num_preemptions,
            num_steps=self._num_steps,
            num_violations=self._num_violations,
            num_drafted=scheduler.num_drafted,
            num_accepted=scheduler.num_accepted,
        )

    def _blocks(self, max_cells: int, min_per_cell: int) -> Blocks:
        scheduler = self._engine.scheduler
        found = self._map
        if found is None or (found.max_cells, found.min_per_cell) != (max_cells, min_per_cell):
            found = self._map = BlockMap(scheduler.cache, max_cells, min_per_cell)
        found.update(MAX_VISITED_BLOCKS)
        self._map_end_s = time.monotonic() + MAP_LIFE_S
        running = islice(scheduler.running, MAX_RUNNING_LISTED)
        return Blocks(
            num_blocks=found.num_blocks,
            block_size=scheduler.cache.block_size,
            blocks_per_cell=found.blocks_per_cell,
            cells=found.runs(),
            totals=found.totals,
            max_holders=found.max_holders,
            num_pending=found.num_pending,
            running=tuple(Running(one.request_id, one.num_computed, len(one.block_table)) for one in running),
            held=found.held_runs(MAX_HELD_BLOCKS),
        )


def tier_stats(waiting: Iterable[Request], now_ns: int) -> tuple[TierStats, ...]:
    """Statistics of every priority, most urgent first."""
    tiers: dict[Priority, list[Request]] = {priority: [] for priority in Priority}
    for request in waiting:
        tiers[request.priority].append(request)
    return tuple(
        TierStats(
            num_waiting=len(requests),
            num_tokens=sum(len(request.tokens) for request in requests),
            oldest_age_s=max((now_ns - one.enqueued_ns + one.earlier_waits_ns for one in requests), default=0) / 1e9,
        )
        for requests in tiers.values()
    )


def serve(peer: socket.socket) -> int:
    """Load the model that the first message names, then serve. Returns the exit code."""
    channel = Channel(peer)
    try:
        return _load_and_run(channel)
    except ConnectionError:  # the client has ended
        return 0
    except QuireError as error:
        problem = Failed(type(error).__name__, str(error))
    except Exception as error:
        log.exception("the worker failed")
        problem = Failed("WorkerDied", f"{type(error).__name__}: {error}")
    with contextlib.suppress(ConnectionError):
        channel.send(problem)
    return 1


def _load_and_run(channel: Channel) -> int:
    first, *rest = channel.receive(None)
    if not isinstance(first, Load):
        raise ValueError(f"the first message is {type(first).__name__}, not Load")
    timings_s: dict[str, float] = {}
    events: list[Event] = []
    with contextlib.ExitStack() as stack:
        publisher = None
        if first.kv_events is not None:  # before the model is loaded, because a port may be taken
            from quire.engine.worker.event_publisher import EventPublisher  # imports pyzmq

            publisher = stack.enter_context(contextlib.closing(EventPublisher(first.kv_events)))
        with _timed(timings_s, "import"):
            import_backend(first.config)
        prepared: list[Grammars] = []  # while the weights are loaded

        def prepare_grammars(vocab_size: int) -> None:
            prepared.append(Grammars(partial(open_tokenizer, Path(first.path), first.config.load_format), vocab_size))
            prepared[-1].prepare()

        with _timed(timings_s, "weights"):
            engine = make_engine(
                Path(first.path),
                first.config,
                lambda num_done, num_bytes: channel.send(Loading(num_done, num_bytes)),
                events.append,
                is_server=True,
                chain_secret=first.chain_secret,
                on_open=lambda spec: prepare_grammars(spec.vocab_size),
            )
        stack.callback(engine.close)
        if prepared[0].vocab_size != engine.capacity.vocab_size:  # a library's model may have more logits
            prepared[0].close()
            prepare_grammars(engine.capacity.vocab_size)
        cache = engine.scheduler.cache
        reporter = CacheReporter(cache) if first.reports_cache else None
        fingerprinting = begin_fingerprint(Path(first.path), first.config, engine, channel.wake)
        worker = Worker(channel, engine, events, prepared[-1], publisher, reporter)
        with _timed(timings_s, "warm_up"):
            worker.warm_up()
        calm_collector()
        facts = engine.runner.facts()
        kv_events = None if publisher is None else publisher.start(cache)
        fingerprint = fingerprinting.wait()
        ready = Ready(
            engine.capacity,
            engine.scheduler.max_model_len,
            facts,
            timings_s,
            cache.stats().levels,
            kv_events,
            cache.tree.secret if first.reports_cache else b"",
            system_fingerprint=fingerprint,
        )
        channel.send(ready)
        try:
            worker.run(rest, None if fingerprint else fingerprinting)
        except ConnectionError:
            engine.save_cache(MAX_FINAL_SAVE_S)
            raise
    return 0


@contextlib.contextmanager
def _timed(timings_s: dict[str, float], name: str) -> Iterator[None]:
    start_s = time.monotonic()
    yield
    timings_s[name] = time.monotonic() - start_s


def main() -> None:
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent handles them, and may finish requests first
        signal.signal(number, signal.SIG_IGN)
    setup_worker_log(sys.argv[2] if len(sys.argv) > 2 else None)
    with socket.socket(fileno=int(sys.argv[1])) as peer:
        code = serve(peer)
    sys.stdout.flush()
    os._exit(code)  # at once, even if threads of a backend are left: there is no state to save


if __name__ == "__main__":
    main()
