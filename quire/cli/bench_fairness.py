"""The fairness part of `quire bench`, over HTTP, with its own `quire serve` process.

1. Idle: HIGH requests, one at a time, on an idle server.
2. Backlog: the same beside a constant backlog of LOW requests. Shows the cost of LOW work to HIGH requests over time.
3. Saturated: a constant backlog of both tiers. Shows whether LOW gets its guaranteed share.
4. Resumed: a second server with a small KV pool. A HIGH request preempts a LOW one and evicts its cached blocks. When
   LOW has resumed, the next HIGH request needs its memory. Shows that HIGH does not wait until LOW has caught up.

The clients share the machine with the server and must be cheap: one HTTP request has many prompts, and one thread reads
it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any, NamedTuple

from quire.bench.http_load import HttpStream, RefusedRequest
from quire.bench.report import (
    HIGH_ANSWER,
    HIGH_PROMPT,
    MAX_BACKLOG,
    NUM_IDLE,
    SENTENCES,
    BacklogReport,
    BenchConfig,
    FairnessReport,
    Latency,
    Progress,
    ResumedReport,
    Sample,
    SaturatedReport,
    Setup,
    Stage,
    backlog_report,
    backlog_size,
    fairness_report,
    latency,
    resumed_report,
    saturated_report,
)
from quire.cli.bench_server import ServerProcess, serving
from quire.cli.server_client import PATIENT, ServerClient, ServerError
from quire.core.values import Priority
from quire.errors import InvalidRequest, QuireError


class Shape(NamedTuple):
    """Tokens of a request: of the prompt, and of the answer, which is never shorter."""

    prompt_tokens: int
    output_tokens: int


HIGH_SHAPE = Shape(HIGH_PROMPT, HIGH_ANSWER)
NUM_WARM_UP = 3
MAX_PAUSE_S = 0.2  # between two HIGH requests, so that they arrive at any point of a step
GRACE_S = 30.0  # time for a HIGH request that is running when its phase ends
SETTLE_SHARE = 0.25  # of a saturated phase passes before tokens are counted: the first requests start together
POLL_S = 0.05
PHASES = ("starting a server", "idle", "HIGH beside a LOW backlog", "both tiers saturated", "HIGH behind a resumed LOW")
# The last phase: tokens of the KV pool, and requests of which two do not fit.
POOL_TOKENS = 1088
LARGE_HIGH, LARGE_LOW = Shape(960, 2), Shape(640, 400)
NUM_RESUMED = 3


@dataclass(frozen=True, slots=True)
class Fairness:
    setup: Setup
    report: FairnessReport


def measure_fairness(model: str, config: BenchConfig, settings: Mapping[str, Any], progress: Progress) -> Fairness:
    """Start a server with this model and these engine settings, measure it and stop it."""

    def tell(phase: int) -> None:
        expected_s = None if phase == 0 else 1.7 * config.seconds + NUM_IDLE
        progress(Stage(f"fairness: {PHASES[phase]}", phase, len(PHASES), expected_s))

    tell(0)
    with serving(model, _options(config, settings)) as process:
        visit = _Measurement(process, config)
        tell(1)
        visit.high_requests(is_over=lambda number, _: number >= NUM_WARM_UP)
        idle = latency(visit.high_requests(is_over=lambda number, _: number >= NUM_IDLE))
        tell(2)
        backlog = visit.backlog(backlog_size(config, idle), idle)
        tell(3)
        saturated = visit.saturated()
        token_bytes = visit.token_bytes()
    resumed = None
    if token_bytes and visit.max_model_len >= POOL_TOKENS:
        tell(4)
        pool = {"max_model_len": POOL_TOKENS, "kv_memory": (POOL_TOKENS + visit.setup.block_size) * token_bytes}
        with serving(model, _options(config, {**settings, **pool})) as process:
            resumed = _Measurement(process, config).resumed()
    return Fairness(visit.setup, fairness_report(config.max_num_seqs, idle, backlog, saturated, resumed))


def _options(config: BenchConfig, settings: Mapping[str, Any]) -> list[str]:
    """Options of `quire serve`, with limits high enough that no request of this part is refused."""
    found = {**settings, "max_num_seqs": config.max_num_seqs}
    options: list[str] = []
    for name, value in found.items():
        if value is not None:
            options += [f"--{name.replace('_', '-')}", str(value)]
    most = 2 * max(MAX_BACKLOG, 4 * config.max_num_seqs)
    most_tokens = most * max(config.prompt_tokens, HIGH_PROMPT)
    options += ["--max-queue", str(most), "--max-queued-tokens", str(most_tokens)]
    longest_s = 10 * config.seconds + 600
    return [*options, "--queue-timeout", f"{longest_s:.0f}", "--drain", "1", "--log-level", "warning"]


class _Measurement:
    """Measures one server."""

    def __init__(self, process: ServerProcess, config: BenchConfig) -> None:
        self._config = config
        self._server = ServerClient(process.url, None, PATIENT)
        self._server.wait_until_ready()
        version = self._server.get("/version")
        tokens = self._server.post("/tokenize", {"prompt": " ".join(SENTENCES)})
        try:
            scheduling = version["scheduling"]
            self.setup = Setup(
                model=version["model"],
                backend=version["backend"],
                device=version["device"],
                dtype=version["dtype"],
                num_threads=process.num_threads,
                block_size=scheduling["block_size"],
                num_blocks=scheduling["num_blocks"],
                max_num_seqs=scheduling["max_num_seqs"],
                max_num_batched_tokens=scheduling["max_num_batched_tokens"],
            )
            self.max_model_len = max_model_len = scheduling["max_model_len"]
            token_ids = tokens["tokens"]
        except (KeyError, TypeError):
            raise self._server.malformed("a malformed version or list of tokens", (version, tokens)) from None
        self._low_shape = Shape(config.prompt_tokens, config.output_tokens)
        longest = max(sum(self._low_shape), sum(HIGH_SHAPE))
        if longest > max_model_len:
            raise InvalidRequest(f"fairness needs {longest} tokens of context, and the model has {max_model_len}")
        self._client = StreamClient(self._server, self.setup.model, token_ids, config.seed)
        self._random = Random(config.seed)

    def token_bytes(self) -> int:
        """Bytes of the KV cache for one token; 0: not known."""
        (model,) = [one for one in self._server.get("/v1/watch?once=true")["models"] if one["name"] == self.setup.model]
        return -(-int(model["engine"]["kv_bytes"]) // (self.setup.num_blocks * self.setup.block_size))

    def resumed(self) -> ResumedReport:
        """Send large HIGH requests on the idle server, and then each behind a LOW request that has just resumed."""
        idle = [self._high_request(time.perf_counter(), None, LARGE_HIGH) for _ in range(NUM_RESUMED)]
        high = [self._behind_resumed() for _ in range(NUM_RESUMED)]
        pool_tokens = (self.setup.num_blocks - 1) * self.setup.block_size
        return resumed_report(pool_tokens, LARGE_HIGH.prompt_tokens, LARGE_LOW.prompt_tokens, idle, high)

    def _behind_resumed(self) -> Sample:
        low = Load(self._client, Priority.LOW, LARGE_LOW, 1)
        with _running(low):
            self._wait_for(lambda _: low.num_tokens > 0, low.check)
            self._high_request(time.perf_counter(), None, LARGE_HIGH)  # preempts it, and evicts its blocks
            self._wait_for_running()
            sample = self._high_request(time.perf_counter(), None, LARGE_HIGH)
        self._wait_for(lambda num_requests: num_requests == 0)
        return sample

    def _wait_for_running(self) -> None:
        give_up_s = time.perf_counter() + GRACE_S
        while not self._server.get("/v1/cache/stats")["num_running"]:
            if time.perf_counter() > give_up_s:
                raise ServerError(f"{self._server.url} did not resume a preempted request")
            time.sleep(POLL_S)

    def high_requests(
        self,
        is_over: Callable[[int, float], bool],
        limit_s: float | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> tuple[Sample, ...]:
        """Send requests one after another, with pauses of random length, until `is_over`.

        `is_over` gets the number of requests and the seconds since the start. After `limit_s` seconds a running request
        is cancelled.
        """
        begun_s = time.perf_counter()
        samples: list[Sample] = []
        while not is_over(len(samples), time.perf_counter() - begun_s):
            left_s = None if limit_s is None else begun_s + limit_s - time.perf_counter()
            samples.append(self._high_request(begun_s, left_s))
            check()
            time.sleep(self._random.uniform(0, MAX_PAUSE_S))
        return tuple(samples)

    def _high_request(self, phase_s: float, left_s: float | None, shape: Shape = HIGH_SHAPE) -> Sample:
        stream = Stream(self._client, self._client.body(Priority.HIGH, shape))
        times_s: list[float] = []

        def take(new: NewTokens) -> None:
            times_s.extend([time.perf_counter()] * new.num_tokens)

        timer = None if left_s is None else threading.Timer(max(0.0, left_s), stream.cut)
        if timer is not None:
            timer.start()
        begun_s = time.perf_counter()
        try:
            stream.read(take)
        finally:
            if timer is not None:
                timer.cancel()
        first_s = times_s[0] if times_s else time.perf_counter()
        decode_s = times_s[-1] - first_s if times_s else 0.0
        return Sample(begun_s - phase_s, first_s - begun_s, len(times_s), decode_s)

    def backlog(self, num_low: int, idle: Latency) -> BacklogReport:
        config = self._config
        low = Load(self._client, Priority.LOW, self._low_shape, num_low)
        with _running(low):
            self._wait_for(lambda num_requests: num_requests > num_low - MAX_PROMPTS, low.check)
            clock, before = _Clock(), low.num_tokens
            high = self.high_requests(
                is_over=lambda _, passed_s: passed_s >= config.seconds,
                limit_s=config.seconds + GRACE_S,
                check=low.check,
            )
            low_tokens, passed_s, client_cpu = low.num_tokens - before, clock.passed_s, clock.cpu
        self._wait_for(lambda num_requests: num_requests == 0)
        return backlog_report(config.seconds, num_low, idle, high, low_tokens / passed_s, client_cpu)

    def saturated(self) -> SaturatedReport:
        num_each, seconds = 2 * self._config.max_num_seqs, self._config.seconds / 2
        high, low = (Load(self._client, tier, HIGH_SHAPE, num_each) for tier in (Priority.HIGH, Priority.LOW))
        with _running(high, low):
            self._sleep(seconds * SETTLE_SHARE, high, low)
            clock, before = _Clock(), (high.num_tokens, low.num_tokens)
            self._sleep(seconds, high, low)
            high_tokens, low_tokens = high.num_tokens - before[0], low.num_tokens - before[1]
            passed_s, client_cpu = clock.passed_s, clock.cpu
        return saturated_report(passed_s, num_each, high_tokens, low_tokens, client_cpu)

    def _sleep(self, seconds: float, *loads: Load) -> None:
        end_s = time.perf_counter() + seconds
        while (left_s := end_s - time.perf_counter()) > 0:
            time.sleep(min(left_s, 1.0))
            for load in loads:
                load.check()

    def _wait_for(self, is_reached: Callable[[int], bool], check: Callable[[], None] = lambda: None) -> None:
        """Wait until the number of requests of the server satisfies `is_reached`."""
        give_up_s = time.perf_counter() + GRACE_S
        while True:
            stats = self._server.get("/v1/cache/stats")
            num_requests = stats["num_running"] + stats["num_waiting"]
            if is_reached(num_requests):
                return
            if time.perf_counter() > give_up_s:
                raise ServerError(f"{self._server.url} has {num_requests} requests, not the number that was sent")
            check()
            time.sleep(POLL_S)


class _Clock:
    """Wall time and CPU time of this process, the client, since it was created."""

    def __init__(self) -> None:
        self._wall_s = time.perf_counter()
        self._cpu_s = time.process_time()

    @property
    def passed_s(self) -> float:
        return time.perf_counter() - self._wall_s

    @property
    def cpu(self) -> float:
        """CPU time in cores: 1.0 is one busy core."""
        return (time.process_time() - self._cpu_s) / self.passed_s


@contextmanager
def _running(*loads: Load) -> Iterator[None]:
    try:
        for load in loads:
            load.start()
        yield
        for load in loads:
            load.check()
    finally:
        for load in loads:
            load.stop()


MAX_PROMPTS = 64  # of one HTTP request; the limit of the server


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
