"""Measures a real model: many clients against one at a time, a prefix that is shared, tiers that are fair.

Drives an engine by hand, so that arrival times are its own, and reads what it reports off the plans, the blocks and the
events of the scheduler that serves. Times are measured; sharing, copies and order are checked.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from quire.core.events import Admitted, Event, Preempted
from quire.core.kv_cache import KVCacheManager
from quire.core.policy import NS_PER_S, Aging
from quire.core.request import Priority, SamplingParams
from quire.core.scheduler import Scheduler
from quire.core.step import StepPlan
from quire.engine.engine import Engine
from quire.errors import InvalidRequest, RequestFailed

if TYPE_CHECKING:
    from quire.backends.base import Runner
    from quire.engine.llm import LLM
    from quire.text.tokenizer import Tokenizer

PARTS = ("speedup", "prefix", "fairness")
TAIL_TOKENS = 16  # what each prompt of the prefix demonstration has of its own
LIVE_TOKENS = 32  # answered by the first request while the second one arrives
SHORT_PROMPT, SHORT_ANSWER = 24, 16  # of the fairness demonstration
NUM_STREAM_LOW = 2
STREAM_LIMIT_S = 60.0  # and five windows: who has not begun by then starves
SENTENCES = (
    "The harbour was quiet when the last ferry came in, and the lamps along the quay went out one by one.",
    "A good proof leaves nothing to memory: every step follows from the one before it, or from something well known.",
    "Bread rises because yeast eats sugar and breathes out gas, which the dough is elastic enough to hold.",
    "She kept the letters in a tin box under the stairs, sorted by the year in which they had been answered.",
    "Rivers carry more sand after a storm than in all the calm weeks between, so their banks move in jumps.",
    "When two trains share one track, the timetable is a contract, and the signal is what enforces it.",
    "Copper turns green in sea air, iron turns red, and gold stays as it was on the day it was found.",
    "Nobody in the village could say who had built the wall, but everyone knew whose task it was to mend it.",
    "Light takes eight minutes from the sun to the earth and more than four hours to the outermost planet.",
    "Older maps show an island there, drawn with care, named after a captain who had only seen a cloud.",
    "It is easier to add a rule than to remove one, which is why old games have such thick books.",
    "Violins are varnished in thin coats over many weeks, and the colour deepens for a hundred years.",
    "Most birds that cross the ocean do it at night, steering by stars that they learned in the nest.",
    "Water boils sooner on a mountain, so beans take longer there and tea is never quite hot enough.",
    "Under the old bridge the stream runs fast and clear, and boys have always dared each other to wade it.",
    "He counted the coins twice, wrote the sum in pencil, and then counted the coins a third time.",
)


# What is asked for, and what comes out


@dataclass(frozen=True, slots=True)
class BenchConfig:
    parts: tuple[str, ...] = PARTS
    clients: tuple[int, ...] = (1, 2, 4, 8, 16)
    rounds: int = 3
    prompt_tokens: int = 100
    output_tokens: int = 64
    head_tokens: int = 1024  # what the prompts of the prefix demonstration have in common
    num_siblings: int = 8
    num_slots: int = 4  # of the fairness demonstration
    patience_s: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise InvalidRequest(f"parts: {part!r} is not one of {', '.join(PARTS)}")
        lows = {"rounds": 1, "prompt_tokens": 1, "output_tokens": 2, "head_tokens": 1, "num_siblings": 2}
        for name, low in (*lows.items(), ("num_slots", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise InvalidRequest(f"{name} = {value!r} is not a whole number of at least {low}")
        for number in self.clients:
            if type(number) is not int or number < 1:
                raise InvalidRequest(f"clients = {number!r} is not a whole number of at least 1")
        if "speedup" in self.parts and not self.batches:
            raise InvalidRequest(f"clients = {self.clients!r} has no number above 1: one at a time is the baseline")
        if not 0 < self.patience_s <= 60:
            raise InvalidRequest(f"patience_s = {self.patience_s!r} is not above 0 and at most 60")

    @property
    def batches(self) -> tuple[int, ...]:
        """How many clients at once, smallest first; one client is measured in any case."""
        return tuple(sorted({number for number in self.clients if number > 1}))


@dataclass(frozen=True, slots=True)
class Measurement:
    """Some requests that arrived together, from the first arrival to the last token."""

    clients: int
    round: int
    num_threads: int
    wall_s: float
    num_output_tokens: int
    num_cached_tokens: int
    tokens_per_s: float  # output tokens, prompts included in the time
    decode_tokens_per_s: float | None  # from the moment everyone has a first token
    ttft_ms: float  # median of the clients


@dataclass(frozen=True, slots=True)
class Baseline:
    """One at a time: the best measurement of all, whatever the number of threads it had."""

    tokens_per_s: float
    decode_tokens_per_s: float
    median_tokens_per_s: float  # of those with as many threads as the best
    num_threads: int
    best_by_threads: dict[int, float]


@dataclass(frozen=True, slots=True)
class Level:
    """So many clients at once. Medians over the rounds; ratios against the best baseline of the whole run."""

    clients: int
    tokens_per_s: float
    decode_tokens_per_s: float | None
    ttft_ms: float
    ratio: float
    ratio_min: float
    ratio_max: float
    decode_ratio: float | None
    ratio_to_median: float  # against the median baseline: typical against typical


@dataclass(frozen=True, slots=True)
class SpeedupReport:
    baseline: Baseline
    levels: tuple[Level, ...]
    measurements: tuple[Measurement, ...]
    num_cached_tokens: int  # 0, or the cache has helped
    is_held: bool

    @property
    def ratios(self) -> dict[int, float]:
        return {level.clients: level.ratio for level in self.levels}


@dataclass(frozen=True, slots=True)
class SiblingReport:
    """Requests with one new prompt that arrive together."""

    num_requests: int
    prompt_tokens: int
    prefill_tokens: int  # computed for all of them
    prefill_tokens_unshared: int  # what that would be if each computed its own
    copies: int  # the block of the last prompt token, which everyone goes on writing
    ttft_max_ms: float
    is_held: bool


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """Requests with one head and tails of their own. Times are medians over the repeats, counts the worst of them."""

    head_tokens: int
    repeats: int
    ttft_cold_ms: float  # nothing cached
    ttft_hit_ms: float  # after everyone else has ended
    ttft_live_ms: float  # while the first one still decodes
    ratio: float  # cold to hit
    shared_blocks: int
    ref_count_min: int  # of the shared blocks, while both run
    ref_count_max: int
    copies: int  # in all plans from the second request on
    cached_tokens: int  # that the hits found
    siblings: SiblingReport
    is_held: bool


@dataclass(frozen=True, slots=True)
class Tier:
    requests: int
    wait_s_p50: float
    wait_s_max: float
    ttft_s_p50: float
    ttft_s_max: float


@dataclass(frozen=True, slots=True)
class FloodReport:
    """HIGH requests come while LOW ones fill all slots and the queue."""

    num_low_waiting: int
    num_high: int
    num_overtakes: int  # pairs in which a HIGH had its first token before a LOW that was waiting when it came
    num_out_of_order: int  # pairs in which it should have, by the policy, and had not
    num_preemptions: int
    tiers: dict[str, Tier]


@dataclass(frozen=True, slots=True)
class StreamReport:
    """LOW requests wait while HIGH ones keep coming, more than there are slots for."""

    num_high: int
    num_high_ahead: int  # that began before the last LOW did
    low_wait_s: float | None  # the longest; None: one never began
    first_late_high_s: float | None  # when the first HIGH began that came after the window; counted as low_wait_s
    num_late_overtakes: int  # of a LOW by a HIGH that came later than the bound after it
    tiers: dict[str, Tier]


@dataclass(frozen=True, slots=True)
class FairnessReport:
    num_slots: int
    patience_s: float
    bound_s: float  # a HIGH that comes later than this after a LOW does not pass it
    flood: FloodReport
    stream: StreamReport
    is_held: bool


@dataclass(frozen=True, slots=True)
class Setup:
    """What the figures were measured on."""

    model: str
    backend: str
    device: str
    dtype: str
    num_threads: int
    block_size: int
    num_blocks: int
    max_seqs: int
    max_step_tokens: int


@dataclass(frozen=True, slots=True)
class BenchReport:
    setup: Setup
    config: BenchConfig
    duration_s: float
    speedup: SpeedupReport | None
    prefix: PrefixReport | None
    fairness: FairnessReport | None

    @property
    def not_held(self) -> tuple[str, ...]:
        """What a demonstration was to show and did not, in words."""
        return tuple(_problems(self))


def _problems(report: BenchReport) -> Iterator[str]:
    if report.speedup is not None and not report.speedup.is_held:
        yield f"speedup: the cache gave {report.speedup.num_cached_tokens} tokens, and should give none"
    if (prefix := report.prefix) is not None and not prefix.is_held:
        counts = f"{prefix.ref_count_min} to {prefix.ref_count_max}"
        yield (
            f"prefix: {prefix.shared_blocks} blocks shared with ref counts {counts} and {prefix.copies} copies;"
            f" {prefix.head_tokens} tokens should be shared with a count of 2 and no copy"
        )
    if (prefix := report.prefix) is not None and not prefix.siblings.is_held:
        one = prefix.siblings
        wanted = f"{one.num_requests} with one prompt of {one.prompt_tokens}"
        yield f"siblings: {wanted} computed {one.prefill_tokens} tokens, and should compute it once"
    if (fair := report.fairness) is not None and not fair.is_held:
        never = " and some LOW never began" if fair.stream.low_wait_s is None else ""
        yield (
            f"fairness: {fair.flood.num_overtakes} overtakes of a LOW, {fair.flood.num_out_of_order} missing,"
            f" {fair.stream.num_late_overtakes} HIGH later than {fair.bound_s:g} s before a LOW{never}"
        )


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a run is, for whoever shows it."""

    what: str
    num_done: int
    num_stages: int
    expected_s: float | None = None  # of the whole run, once the model's pace is known


Progress = Callable[[Stage], None]


def run_bench(llm: LLM, config: BenchConfig, progress: Progress = lambda _stage: None) -> BenchReport:
    """Measure a loaded model that has nothing else to do. Leaves its prefix cache empty."""
    _check_fits(llm.engine, config)
    begun_s = time.perf_counter()
    bench = _Bench(llm, config, progress)
    bench.warm_up()
    speedup = _measure_speedup(bench) if "speedup" in config.parts else None
    prefix = _measure_prefix(bench) if "prefix" in config.parts else None
    fairness = _measure_fairness(bench) if "fairness" in config.parts else None
    llm.engine.scheduler.cache.clear()
    return BenchReport(_setup(llm), config, time.perf_counter() - begun_s, speedup, prefix, fairness)


def _check_fits(engine: Engine, config: BenchConfig) -> None:
    """Refuse what could not run undisturbed: too long, or so much that requests would wait or be preempted."""
    capacity, max_context = engine.capacity, engine.scheduler.max_context
    if engine.has_work:
        raise InvalidRequest("engine: it has requests of its own; a benchmark needs it alone")
    longest = {"speedup": config.prompt_tokens + config.output_tokens, "fairness": SHORT_PROMPT + SHORT_ANSWER}
    longest["prefix"] = config.head_tokens + TAIL_TOKENS + LIVE_TOKENS
    for part in config.parts:
        if longest[part] > max_context:
            raise InvalidRequest(f"{part} needs {longest[part]} tokens of context, and the model has {max_context}")
    if config.head_tokens % capacity.block_size:
        raise InvalidRequest(f"head_tokens = {config.head_tokens} is not a multiple of {capacity.block_size = }")
    if config.num_slots > capacity.max_seqs:
        raise InvalidRequest(f"num_slots = {config.num_slots} is more than max_seqs = {capacity.max_seqs}")
    most = max(config.batches, default=1) if "speedup" in config.parts else 1
    if most > capacity.max_seqs:
        raise InvalidRequest(f"clients = {most} is more than max_seqs = {capacity.max_seqs}")
    num_needed = most * (-(-longest["speedup"] // capacity.block_size) + 1)
    if "prefix" in config.parts:
        num_own = -(-(TAIL_TOKENS + LIVE_TOKENS) // capacity.block_size) + 2
        num_needed = max(num_needed, config.head_tokens // capacity.block_size + config.num_siblings * num_own)
    if num_needed > capacity.num_blocks - 1:
        raise InvalidRequest(f"num_blocks = {capacity.num_blocks} is too few: the run needs {num_needed + 1}")


# Driving an engine


class _Track:
    """One request as its client sees it."""

    def __init__(self, request_id: int, priority: Priority) -> None:
        self.request_id = request_id
        self.priority = priority
        self.arrived_s = time.perf_counter()
        self.token_times: list[float] = []
        self.num_cached_tokens = 0
        self.is_finished = False

    @property
    def first_s(self) -> float:
        return self.token_times[0]

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrived_s


class _Session:
    """Requests on their way through an engine, and what its plans did for them."""

    def __init__(self, engine: Engine, next_id: Callable[[], int]) -> None:
        self.engine = engine
        self.tracks: dict[int, _Track] = {}
        self.num_copies = 0
        self.num_prefill_tokens = 0
        self._next_id = next_id

    def add(
        self, prompt: Sequence[int], max_tokens: int, *, priority: Priority = Priority.NORMAL, salt: str = ""
    ) -> _Track:
        """Greedy, and to the end of max_tokens whatever the model says."""
        track = _Track(self._next_id(), priority)
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.engine.add(track.request_id, prompt, sampling, priority=priority, salt=salt)
        self.tracks[track.request_id] = track
        return track

    def step(self) -> None:
        outputs = self.engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            track = self.tracks[output.request_id]
            if output.error is not None:
                raise RequestFailed(f"request {output.request_id} failed: {output.error}")
            track.token_times += [now_s] * len(output.tokens)
            track.num_cached_tokens = output.num_cached_tokens
            track.is_finished = output.finish_reason is not None

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while self.engine.has_work and not until():
            self.step()

    def note(self, plan: StepPlan) -> None:
        self.num_copies += len(plan.copies)
        self.num_prefill_tokens += sum(
            min(piece.length, piece.num_prompt_tokens - piece.start)
            for piece in plan.slices
            if piece.start < piece.num_prompt_tokens
        )


@contextmanager
def _session(engine: Engine, next_id: Callable[[], int]) -> Iterator[_Session]:
    """Leaves the engine as it was, without requests, though something went wrong."""
    session, before = _Session(engine, next_id), engine.on_plan
    engine.on_plan = session.note
    try:
        yield session
    finally:
        engine.on_plan = before
        for request_id, track in session.tracks.items():
            if not track.is_finished:
                engine.cancel(request_id)
        while engine.has_work:  # a step in flight: the runner must not hand its result to whoever comes next
            engine.step()


class _Prompts:
    """Real text in the model's own tokens, different for every seed and every call."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)

    def make(self, num_tokens: int) -> list[int]:
        ids = self._tokenizer.encode(self._text())
        while len(ids) < num_tokens:
            ids += self._tokenizer.encode(" " + self._text(), add_special=False)
        return ids[:num_tokens]

    def tails(self, count: int, num_tokens: int) -> list[list[int]]:
        """No two begin with the same token: the cache reuses parts of a block too, and would copy that one token."""
        ids = self._tokenizer.encode(" " + self._text(), add_special=False)
        starts = list({token: place for place, token in reversed(list(enumerate(ids[:-num_tokens])))}.values())
        if len(starts) < count:
            raise InvalidRequest(f"tokenizer: {len(starts)} different tokens in {len(ids)}, not the {count} needed")
        return [ids[start : start + num_tokens] for start in starts[:count]]

    def _text(self) -> str:
        return " ".join(self._random.sample(SENTENCES, len(SENTENCES)))


class _Threads:
    """How many threads compute, where that can be chosen: PyTorch on a CPU."""

    def __init__(self, runner: Runner, backend: str) -> None:
        self._set: Callable[[int], None] | None = None
        self.default = 1
        if backend == "torch" and not runner.capacity().has_overlap:
            import torch

            self._set, self.default = torch.set_num_threads, torch.get_num_threads()

    @property
    def choices(self) -> tuple[int, ...]:
        """More threads are not always faster for one stream."""
        return (self.default,) if self._set is None or self.default == 1 else (self.default, 1)

    @contextmanager
    def using(self, num_threads: int) -> Iterator[None]:
        if self._set is not None:
            self._set(num_threads)
        try:
            yield
        finally:
            if self._set is not None:
                self._set(self.default)


class _Bench:
    """A run in progress: the engine, where its prompts come from, and how far it is."""

    def __init__(self, llm: LLM, config: BenchConfig, progress: Progress) -> None:
        self.engine = llm.engine
        self.config = config
        self.prompts = _Prompts(llm.text.tokenizer, config.seed)
        self.threads = _Threads(llm.engine.runner, llm.config.backend)
        self.next_id = llm.next_id
        self._progress = progress
        self._num_done = 0
        self._expected_s: float | None = None
        per_round = len(self.threads.choices) + 2 * len(config.batches)
        sizes = {"speedup": config.rounds * per_round, "prefix": config.rounds + 1, "fairness": 2}
        self._num_stages = len(self.threads.choices) + sum(sizes[part] for part in config.parts)

    def tell(self, what: str) -> None:
        """Something begins."""
        self._progress(Stage(what, self._num_done, self._num_stages, self._expected_s))
        self._num_done += 1

    def session(self) -> AbstractContextManager[_Session]:
        return _session(self.engine, self.next_id)

    def warm_up(self) -> None:
        """Touch every path once, and learn the pace from it."""
        config = self.config
        singles = []
        for num_threads in self.threads.choices:
            self.tell("warming up")
            singles.append(self.measure(1, 0, num_threads))
        if "speedup" in config.parts:
            for clients in config.batches:
                self.measure(clients, 0, self.threads.default, num_prompt=SHORT_PROMPT, num_output=2)
        self._expected_s = _expected_s(config, singles[0], len(singles))

    def measure(
        self, clients: int, number: int, num_threads: int, *, num_prompt: int = 0, num_output: int = 0
    ) -> Measurement:
        """Clients that arrive together, each with a prompt and a salt of its own: there is nothing to share."""
        num_prompt, num_output = num_prompt or self.config.prompt_tokens, num_output or self.config.output_tokens
        prompts = [self.prompts.make(num_prompt) for _ in range(clients)]
        self.engine.scheduler.cache.clear()
        with self.threads.using(num_threads), self.session() as session:
            begun_s = time.perf_counter()
            for prompt in prompts:
                session.add(prompt, num_output, salt=f"bench {self.next_id()}")
            session.run()
        tracks = list(session.tracks.values())
        times = sorted(at_s for track in tracks for at_s in track.token_times)
        all_begun_s = max(track.first_s for track in tracks)
        num_decoded = sum(at_s > all_begun_s for at_s in times)
        wall_s = times[-1] - begun_s
        return Measurement(
            clients=clients,
            round=number,
            num_threads=num_threads,
            wall_s=wall_s,
            num_output_tokens=len(times),
            num_cached_tokens=sum(track.num_cached_tokens for track in tracks),
            tokens_per_s=len(times) / wall_s,
            decode_tokens_per_s=num_decoded / (times[-1] - all_begun_s) if num_decoded else None,
            ttft_ms=median(track.ttft_s for track in tracks) * 1000,
        )


def _expected_s(config: BenchConfig, one: Measurement, num_choices: int) -> float:
    """A guess from one request: prompts cost by the token, and a step of K clients about as much as K / 3 of one."""
    prefill_s = one.ttft_ms / 1000 / config.prompt_tokens
    step_s = (one.wall_s - one.ttft_ms / 1000) / (config.output_tokens - 1)
    per_round = (num_choices + len(config.batches)) * one.wall_s
    for clients in config.batches:
        per_round += clients * config.prompt_tokens * prefill_s + config.output_tokens * step_s * max(1, clients / 3)
    num_fair = 8 * config.num_slots  # requests, in both parts
    spent = {
        "speedup": config.rounds * per_round,
        "prefix": (config.rounds + 1) * (config.head_tokens * prefill_s + 2 * LIVE_TOKENS * step_s),
        "fairness": 2 * config.patience_s + num_fair * (SHORT_PROMPT * prefill_s + SHORT_ANSWER * step_s / 2),
    }
    return sum(spent[part] for part in config.parts)


# Many clients against one at a time


def _measure_speedup(bench: _Bench) -> SpeedupReport:
    """Every batch has a single stream before and after it, so that both saw the machine in the same mood."""
    config, threads = bench.config, bench.threads
    singles: list[Measurement] = []
    batches: list[Measurement] = []
    for number in range(config.rounds):
        name = f"round {number + 1} of {config.rounds}"
        for num_threads in threads.choices:
            bench.tell(f"{name}: one at a time")
            singles.append(bench.measure(1, number, num_threads))
        for clients in config.batches:
            bench.tell(f"{name}: {clients} clients")
            batches.append(bench.measure(clients, number, threads.default))
            bench.tell(f"{name}: one at a time")
            singles.append(bench.measure(1, number, _best(singles).num_threads))
    baseline = _baseline(singles)
    levels = tuple(
        _level([one for one in batches if one.clients == clients], baseline) for clients in bench.config.batches
    )
    num_cached = sum(one.num_cached_tokens for one in (*singles, *batches))
    return SpeedupReport(baseline, levels, (*singles, *batches), num_cached, num_cached == 0)


def _best(singles: Sequence[Measurement]) -> Measurement:
    return max(singles, key=lambda one: one.tokens_per_s)


def _baseline(singles: Sequence[Measurement]) -> Baseline:
    best = _best(singles)
    by_threads: dict[int, float] = {}
    for one in singles:
        by_threads[one.num_threads] = max(one.tokens_per_s, by_threads.get(one.num_threads, 0.0))
    return Baseline(
        tokens_per_s=best.tokens_per_s,
        decode_tokens_per_s=max(one.decode_tokens_per_s or 0.0 for one in singles),
        median_tokens_per_s=median(one.tokens_per_s for one in singles if one.num_threads == best.num_threads),
        num_threads=best.num_threads,
        best_by_threads=by_threads,
    )


def _level(measurements: Sequence[Measurement], baseline: Baseline) -> Level:
    rates = [one.tokens_per_s for one in measurements]
    rate = median(rates)
    decoding = [one.decode_tokens_per_s for one in measurements if one.decode_tokens_per_s is not None]
    decode_rate = median(decoding) if decoding else None
    return Level(
        clients=measurements[0].clients,
        tokens_per_s=rate,
        decode_tokens_per_s=decode_rate,
        ttft_ms=median(one.ttft_ms for one in measurements),
        ratio=rate / baseline.tokens_per_s,
        ratio_min=min(rates) / baseline.tokens_per_s,
        ratio_max=max(rates) / baseline.tokens_per_s,
        decode_ratio=None if decode_rate is None else decode_rate / baseline.decode_tokens_per_s,
        ratio_to_median=rate / baseline.median_tokens_per_s,
    )


# A head that is shared


@dataclass(frozen=True, slots=True)
class _Sharing:
    cold: _Track
    live: _Track
    hit: _Track
    ref_counts: tuple[int, ...]  # of the blocks that two tables have in common, while both run
    num_copies: int


def _measure_prefix(bench: _Bench) -> PrefixReport:
    config, repeats = bench.config, []
    for number in range(config.rounds):
        bench.tell(f"prefix, {number + 1} of {config.rounds}")
        repeats.append(_share_head(bench))
    siblings = _run_siblings(bench)
    cold_s, hit_s = median(one.cold.ttft_s for one in repeats), median(one.hit.ttft_s for one in repeats)
    shared_blocks = min(len(one.ref_counts) for one in repeats)
    counts = [count for one in repeats for count in one.ref_counts]
    copies = max(one.num_copies for one in repeats)
    cached_tokens = min(min(one.hit.num_cached_tokens, one.live.num_cached_tokens) for one in repeats)
    num_full = config.head_tokens // bench.engine.capacity.block_size
    is_held = set(counts) == {2} and copies == 0 and shared_blocks == num_full and cached_tokens == config.head_tokens
    return PrefixReport(
        head_tokens=config.head_tokens,
        repeats=len(repeats),
        ttft_cold_ms=cold_s * 1000,
        ttft_hit_ms=hit_s * 1000,
        ttft_live_ms=median(one.live.ttft_s for one in repeats) * 1000,
        ratio=cold_s / hit_s,
        shared_blocks=shared_blocks,
        ref_count_min=min(counts, default=0),
        ref_count_max=max(counts, default=0),
        copies=copies,
        cached_tokens=cached_tokens,
        siblings=siblings,
        is_held=is_held,
    )


def _share_head(bench: _Bench) -> _Sharing:
    """One request in the cold, one while that still decodes, one after both."""
    head = bench.prompts.make(bench.config.head_tokens)
    tails = bench.prompts.tails(3, TAIL_TOKENS)
    scheduler = bench.engine.scheduler
    scheduler.cache.clear()
    with bench.session() as session:
        cold = session.add([*head, *tails[0]], LIVE_TOKENS)
        session.run(until=lambda: bool(cold.token_times))
        live = session.add([*head, *tails[1]], 4)
        session.run(until=lambda: bool(live.token_times))
        tables = [request.block_table for one in (cold, live) if (request := scheduler.get(one.request_id)) is not None]
        common = [mine for mine, other in zip(*tables, strict=False) if mine == other] if len(tables) == 2 else []
        ref_counts = tuple(scheduler.cache.pool.blocks[block_id].ref_count for block_id in common)
        session.run()
        hit = session.add([*head, *tails[2]], 4)
        session.run()
    return _Sharing(cold, live, hit, ref_counts, session.num_copies)


def _run_siblings(bench: _Bench) -> SiblingReport:
    config, block_size = bench.config, bench.engine.capacity.block_size
    bench.tell(f"prefix, {config.num_siblings} siblings")
    bench.engine.scheduler.cache.clear()
    prompt = bench.prompts.make(config.head_tokens)
    with bench.session() as session:
        tracks = [session.add(prompt, 4) for _ in range(config.num_siblings)]
        session.run()
    num_computed = session.num_prefill_tokens
    return SiblingReport(
        num_requests=config.num_siblings,
        prompt_tokens=len(prompt),
        prefill_tokens=num_computed,
        prefill_tokens_unshared=config.num_siblings * len(prompt),
        copies=session.num_copies,
        ttft_max_ms=max(track.ttft_s for track in tracks) * 1000,
        is_held=num_computed <= len(prompt) + (config.num_siblings - 1) * block_size,
    )


# Tiers that are fair


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

    def __init__(self, bench: _Bench) -> None:
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
    def session(self) -> Iterator[_Session]:
        with _session(self.engine, self._next_id) as session:
            yield session

    def add(self, session: _Session, priority: Priority) -> _Track:
        prompt = self._prompts.make(SHORT_PROMPT)
        track = session.add(prompt, SHORT_ANSWER, priority=priority, salt=f"bench {self._next_id()}")
        request = self.scheduler.get(track.request_id)
        assert request is not None
        self.arrivals_ns[track.request_id] = request.arrived_ns
        return track

    def is_late(self, high: _Track, low: _Track) -> bool:
        """Whether a HIGH came too long after a LOW to go before it."""
        return self.arrivals_ns[high.request_id] > self.arrivals_ns[low.request_id] + self.bound_ns

    def tiers(self, session: _Session) -> dict[str, Tier]:
        """Of those who have had a first token."""
        found = {}
        for priority in Priority:
            tracks = [one for one in session.tracks.values() if one.priority is priority and one.token_times]
            if tracks:
                waits_s = [self.watch.waits_ns[one.request_id] / NS_PER_S for one in tracks]
                ttfts_s = [one.ttft_s for one in tracks]
                found[priority.name] = Tier(len(tracks), median(waits_s), max(waits_s), median(ttfts_s), max(ttfts_s))
        return found


def _measure_fairness(bench: _Bench) -> FairnessReport:
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
    watch, highs, lows = crowd.watch, list[_Track](), list[_Track]()

    def step() -> None:
        while sum(not high.is_finished for high in highs) < 2 * crowd.num_slots:
            highs.append(crowd.add(session, Priority.HIGH))
        session.step()

    def late() -> list[_Track]:
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
    crowd: _Crowd, session: _Session, highs: list[_Track], lows: list[_Track], late: list[_Track], num_before: int
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


def _setup(llm: LLM) -> Setup:
    backend, device, dtype, num_threads = llm.config.backend, llm.config.device, llm.config.dtype, 1
    if backend == "torch":
        import torch

        from quire.backends.torch.runner import TorchRunner

        backend, num_threads = f"torch {torch.__version__}", torch.get_num_threads()
        if isinstance(llm.engine.runner, TorchRunner):
            store = llm.engine.runner.store
            device, dtype = str(store.device), str(store.dtype).removeprefix("torch.")
            if store.device.type == "cuda":
                device = f"{device} ({torch.cuda.get_device_name(store.device)})"
    capacity = llm.engine.capacity
    return Setup(
        model=llm.text.name,
        backend=backend,
        device=device,
        dtype=dtype,
        num_threads=num_threads,
        block_size=capacity.block_size,
        num_blocks=capacity.num_blocks,
        max_seqs=capacity.max_seqs,
        max_step_tokens=llm.config.max_step_tokens,
    )
