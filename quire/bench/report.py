"""Configuration and report of a benchmark: plain values that can be written as JSON. No HTTP and no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

from quire.core.policy import LOW_SHARE
from quire.errors import InvalidRequest
from quire.sim.simulator import percentile

PARTS = ("speedup", "prefix", "drafts", "fairness")
TAIL_TOKENS = 16  # tokens after the shared head, different in each prompt of the prefix part
LIVE_TOKENS = 32  # output tokens of the first request, which still decodes when the second one arrives
SHORT_PROMPT = 24  # prompt tokens in the warm-up
NUM_IDLE = 20  # HIGH requests on the idle engine of the fairness part
MAX_SECONDS = 3600.0
NUM_WINDOWS = 3  # separate windows, because a policy may fail only after some time
MAX_TTFT_RATIO = 3.0
MAX_BACKLOG = 4096
SHARE_KEPT = 0.9  # tolerance for the guaranteed share: the measurement ends in the middle of a prompt
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


@dataclass(frozen=True, slots=True)
class BenchConfig:
    parts: tuple[str, ...] = PARTS
    clients: tuple[int, ...] = (1, 2, 4, 8, 16)
    rounds: int = 3
    prompt_tokens: int = 100
    output_tokens: int = 64
    head_tokens: int = 1024  # shared head of the prompts of the prefix part
    num_siblings: int = 8
    seconds: float = 45.0  # duration of HIGH next to a LOW backlog; the saturated phase takes half as long
    max_num_seqs: int = 16  # requests in one step of the engine whose fairness is measured
    seed: int = 0

    def __post_init__(self) -> None:
        if "speedup" in self.parts and not self.batches:
            raise InvalidRequest(f"clients = {self.clients!r} has no number above 1: one at a time is the baseline")

    @property
    def batches(self) -> tuple[int, ...]:
        """Numbers of concurrent clients above 1, ascending. A single client is always measured."""
        return tuple(sorted({number for number in self.clients if number > 1}))


@dataclass(frozen=True, slots=True)
class Measurement:
    """Requests that arrived together, measured from the first arrival to the last token."""

    clients: int
    round: int
    num_threads: int
    wall_s: float
    num_output_tokens: int
    num_cached_tokens: int
    tokens_per_s: float  # output tokens; the time includes prefill
    decode_tokens_per_s: float | None  # after all clients have their first token
    ttft_ms: float  # median of the clients


@dataclass(frozen=True, slots=True)
class Baseline:
    """The best measurement of one client at a time, over all thread counts."""

    tokens_per_s: float
    decode_tokens_per_s: float
    median_tokens_per_s: float  # of the measurements with the best thread count
    num_threads: int
    best_by_threads: dict[int, float]


@dataclass(frozen=True, slots=True)
class Level:
    """Results for one number of concurrent clients: medians over the rounds, ratios to the best baseline."""

    clients: int
    tokens_per_s: float
    decode_tokens_per_s: float | None
    ttft_ms: float
    ratio: float
    ratio_min: float
    ratio_max: float
    decode_ratio: float | None
    ratio_to_median: float  # ratio to the median baseline


@dataclass(frozen=True, slots=True)
class SpeedupReport:
    baseline: Baseline
    levels: tuple[Level, ...]
    measurements: tuple[Measurement, ...]
    num_cached_tokens: int  # must be 0: the cache must not help


@dataclass(frozen=True, slots=True)
class SiblingReport:
    """Requests with the same uncached prompt that arrive together."""

    num_requests: int
    prompt_tokens: int
    prefill_tokens: int  # prompt tokens computed for all requests together
    prefill_tokens_unshared: int  # the same without sharing
    copies: int  # of the block of the last prompt token, into which each request continues to write
    ttft_max_ms: float
    is_held: bool


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """Requests with a shared head and different tails.

    Times are medians of the repeats, counts are the worst.
    """

    head_tokens: int
    ttft_cold_ms: float  # with an empty cache
    ttft_hit_ms: float  # after all other requests have ended
    ttft_live_ms: float  # while the first request still decodes
    ratio: float  # cold / hit
    shared_blocks: int
    ref_count_min: int  # of the shared blocks, while both requests run
    ref_count_max: int
    copies: int  # in all plans
    cached_tokens: int  # found by the later requests
    siblings: SiblingReport
    is_held: bool


@dataclass(frozen=True, slots=True)
class DraftsReport:
    """One request at a time whose answer repeats its prompt, with and without drafts.

    Speeds are medians of the rounds, counts are totals.
    """

    tokens_per_s: float  # after the first token
    tokens_per_s_without: float
    ratio: float
    ratio_min: float
    ratio_max: float
    steps: int
    steps_without: int
    draft_tokens: int  # that were verified
    draft_tokens_accepted: int
    acceptance: float | None  # None: there were no drafts
    tokens_per_step: float
    is_equal: bool  # whether the answers are equal; on a GPU a tie may be decided otherwise


@dataclass(frozen=True, slots=True)
class Latency:
    """Latency of HIGH requests. None: there were no requests."""

    requests: int
    ttft_ms_p50: float | None
    ttft_ms_p95: float | None
    ttft_ms_max: float | None
    decode_tokens_per_s: float | None  # of one request, after its first token; median of the requests


@dataclass(frozen=True, slots=True)
class Window:
    """HIGH requests that started in one window of the backlog phase."""

    begin_s: float
    end_s: float
    latency: Latency
    ttft_ratio: float | None  # p95 of this window / p95 on the idle engine; None: one of them is unknown


@dataclass(frozen=True, slots=True)
class BacklogReport:
    """HIGH requests, one at a time, next to a permanent backlog of LOW requests."""

    num_low: int  # minimum number of outstanding LOW requests
    windows: tuple[Window, ...]
    latency: Latency  # of all windows
    decode_ratio: float | None  # HIGH decode speed / the speed on the idle engine
    low_tokens_per_s: float  # prompt and output tokens of LOW requests in the same time


@dataclass(frozen=True, slots=True)
class SaturatedReport:
    """Phase in which both tiers always have waiting requests. Prompt tokens are counted with the first output token."""

    num_each: int  # minimum number of outstanding requests in each tier
    high_tokens: int
    low_tokens: int
    low_share: float | None  # of all tokens; None: there were no tokens
    guaranteed_share: float = LOW_SHARE


@dataclass(frozen=True, slots=True)
class ResumedReport:
    """HIGH requests that need the memory of a LOW request that was preempted, lost its cached blocks and resumed."""

    pool_tokens: int
    idle: Latency  # of the same requests without a LOW one
    latency: Latency
    ttft_ratio: float | None


@dataclass(frozen=True, slots=True)
class FairnessReport:
    idle: Latency
    backlog: BacklogReport
    saturated: SaturatedReport
    resumed: ResumedReport | None = None  # None: the context is too short
    max_ttft_ratio: float = MAX_TTFT_RATIO  # limit for every window
    min_low_share: float = SHARE_KEPT * LOW_SHARE


@dataclass(frozen=True, slots=True)
class Setup:
    """The setup that was measured."""

    model: str
    backend: str
    device: str
    dtype: str
    num_threads: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class BenchReport:
    setup: Setup
    config: BenchConfig
    duration_s: float
    speedup: SpeedupReport | None
    prefix: PrefixReport | None
    fairness: FairnessReport | None
    drafts: DraftsReport | None = None

    @property
    def not_held(self) -> tuple[str, ...]:
        """Messages for the criteria that were not met."""
        return tuple(_problems(self))


def _problems(report: BenchReport) -> Iterator[str]:
    if report.speedup is not None and report.speedup.num_cached_tokens:
        yield f"speedup: {report.speedup.num_cached_tokens} tokens came from the cache, expected 0"
    if (prefix := report.prefix) is not None and not prefix.is_held:
        counts = f"{prefix.ref_count_min} to {prefix.ref_count_max}"
        yield (
            f"prefix: {prefix.shared_blocks} blocks shared with ref counts {counts} and {prefix.copies} copies;"
            f" expected {prefix.head_tokens} shared tokens with ref count 2 and no copy"
        )
    if (prefix := report.prefix) is not None and not prefix.siblings.is_held:
        one = prefix.siblings
        wanted = f"{one.num_requests} requests with the same prompt of {one.prompt_tokens} tokens"
        yield f"siblings: {wanted} computed {one.prefill_tokens} tokens, expected the prompt once"
    if report.fairness is not None:
        yield from unfair(report.fairness)


def unfair(fair: FairnessReport) -> Iterator[str]:
    """Messages for the criteria of fairness that were not met."""
    ratios = [window.ttft_ratio for window in fair.backlog.windows]
    if any(ratio is None or ratio > fair.max_ttft_ratio for ratio in ratios):
        found = ", ".join("unknown" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        yield (
            f"fairness: HIGH TTFT p95 next to a LOW backlog, by window, is {found} times that of an idle engine,"
            f" expected at most {fair.max_ttft_ratio:g} times"
        )
    ratio = 0.0 if fair.resumed is None else fair.resumed.ttft_ratio
    if ratio is None or ratio > fair.max_ttft_ratio:
        found = "unknown" if ratio is None else f"{ratio:.2f}"
        yield (
            f"fairness: HIGH TTFT behind a LOW request that was preempted and resumed is {found} times that of an idle"
            f" engine, expected at most {fair.max_ttft_ratio:g} times"
        )
    share = fair.saturated.low_share
    if share is None or share < fair.min_low_share:
        found = "no tokens were generated" if share is None else f"LOW had {share:.1%} of all tokens"
        yield f"fairness: {found} under constant HIGH load, expected at least {fair.min_low_share:.1%} for LOW"


Progress = Callable[[str], object]  # called with the name of a part when it begins


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurements of one request."""

    begun_s: float  # start, from the start of its phase
    ttft_s: float  # if the request was aborted before its first token: the time until then
    num_tokens: int
    decode_s: float  # from the first token to the last


def backlog_size(config: BenchConfig, idle: Latency) -> int:
    """Number of LOW requests to keep outstanding.

    The oldest must have waited since the start of the phase, because a policy with aging treats an old backlog
    differently from a new one. So the backlog is larger than the number of requests that the engine could answer during
    the phase if each batch row were as fast as one request alone.
    """
    rate = idle.decode_tokens_per_s or 0.0
    num_answered = ceil(config.seconds * config.max_num_seqs * rate / config.output_tokens)
    return max(2 * config.max_num_seqs, min(num_answered, MAX_BACKLOG))


def latency(samples: Sequence[Sample]) -> Latency:
    ttfts_ms = [one.ttft_s * 1000 for one in samples]
    rates = [(one.num_tokens - 1) / one.decode_s for one in samples if one.num_tokens > 1 and one.decode_s > 0]
    return Latency(
        requests=len(samples),
        ttft_ms_p50=percentile(ttfts_ms, 0.5),
        ttft_ms_p95=percentile(ttfts_ms, 0.95),
        ttft_ms_max=max(ttfts_ms, default=None),
        decode_tokens_per_s=median(rates) if rates else None,
    )


def windows(samples: Sequence[Sample], seconds: float, idle: Latency) -> tuple[Window, ...]:
    """Divide the phase into equal windows. Each contains the requests that started in it."""
    found = []
    for number in range(NUM_WINDOWS):
        begin_s, end_s = (seconds * edge / NUM_WINDOWS for edge in (number, number + 1))
        is_last = number == NUM_WINDOWS - 1
        part = latency([one for one in samples if begin_s <= one.begun_s and (is_last or one.begun_s < end_s)])
        found.append(Window(begin_s, end_s, part, _ratio(part.ttft_ms_p95, idle.ttft_ms_p95)))
    return tuple(found)


def backlog_report(
    seconds: float, num_low: int, idle: Latency, high: Sequence[Sample], low_tokens_per_s: float
) -> BacklogReport:
    in_all = latency(high)
    decode_ratio = _ratio(in_all.decode_tokens_per_s, idle.decode_tokens_per_s)
    return BacklogReport(num_low, windows(high, seconds, idle), in_all, decode_ratio, low_tokens_per_s)


def saturated_report(num_each: int, high_tokens: int, low_tokens: int) -> SaturatedReport:
    total = high_tokens + low_tokens
    return SaturatedReport(num_each, high_tokens, low_tokens, low_tokens / total if total else None)


def resumed_report(pool_tokens: int, idle: Sequence[Sample], high: Sequence[Sample]) -> ResumedReport:
    alone, behind = latency(idle), latency(high)
    return ResumedReport(pool_tokens, alone, behind, _ratio(behind.ttft_ms_p95, alone.ttft_ms_p95))


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base
