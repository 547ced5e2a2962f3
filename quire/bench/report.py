"""What a benchmark is asked for, and what comes out of it: plain values that can be written as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quire.errors import InvalidRequest

PARTS = ("speedup", "prefix", "fairness")
TAIL_TOKENS = 16  # what each prompt of the prefix demonstration has of its own
LIVE_TOKENS = 32  # answered by the first request while the second one arrives
SHORT_PROMPT = 24  # of the warm-up
NUM_IDLE = 20  # HIGH requests on the idle server of the fairness part
HIGH_PROMPT, HIGH_ANSWER = 40, 32  # tokens of a HIGH request there
MAX_SECONDS = 3600.0
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
    head_tokens: int = 1024  # what the prompts of the prefix demonstration have in common
    num_siblings: int = 8
    seconds: float = 45.0  # of HIGH beside a LOW backlog; half of it with both tiers saturated
    max_num_seqs: int = 16  # requests in one step of the server whose fairness is measured
    seed: int = 0

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise InvalidRequest(f"parts: {part!r} is not one of {', '.join(PARTS)}")
        lows = {"rounds": 1, "prompt_tokens": 1, "output_tokens": 2, "head_tokens": 1, "num_siblings": 2}
        for name, low in (*lows.items(), ("max_num_seqs", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise InvalidRequest(f"{name} = {value!r} is not a whole number of at least {low}")
        for number in self.clients:
            if type(number) is not int or number < 1:
                raise InvalidRequest(f"clients = {number!r} is not a whole number of at least 1")
        if "speedup" in self.parts and not self.batches:
            raise InvalidRequest(f"clients = {self.clients!r} has no number above 1: one at a time is the baseline")
        if type(self.seconds) not in (int, float) or not 1 <= self.seconds <= MAX_SECONDS:
            raise InvalidRequest(f"seconds = {self.seconds!r} is not a number from 1 to {MAX_SECONDS:g}")

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
class Latency:
    """HIGH requests as their client saw them, over HTTP. None: there were none."""

    requests: int
    ttft_ms_p50: float | None
    ttft_ms_p95: float | None
    ttft_ms_max: float | None
    decode_tokens_per_s: float | None  # of one request, after its first token; median of the requests


@dataclass(frozen=True, slots=True)
class Window:
    """HIGH requests that began in one part of the backlog phase."""

    begin_s: float
    end_s: float
    latency: Latency
    ttft_ratio: float | None  # p95 of this window / p95 on the idle server; None: nothing to compare


@dataclass(frozen=True, slots=True)
class BacklogReport:
    """HIGH requests, one at a time, while LOW requests never run out."""

    seconds: float
    num_low: int  # LOW requests outstanding, at least
    windows: tuple[Window, ...]
    latency: Latency  # of all windows
    decode_ratio: float | None  # HIGH decode speed / the speed on the idle server
    low_tokens_per_s: float  # received by LOW clients meanwhile, prompts included
    client_cpu: float  # CPU time of the client, which shares the machine with the server, in cores


@dataclass(frozen=True, slots=True)
class SaturatedReport:
    """Both tiers always have requests waiting. Tokens are counted where they arrive, prompts with their first token."""

    seconds: float
    num_each: int  # requests outstanding in each tier, at least
    high_tokens: int
    low_tokens: int
    low_share: float | None  # of all tokens; None: there were none
    guaranteed_share: float
    client_cpu: float


@dataclass(frozen=True, slots=True)
class FairnessReport:
    max_num_seqs: int
    idle: Latency
    backlog: BacklogReport
    saturated: SaturatedReport
    max_ttft_ratio: float  # the promise: no window is above it
    min_low_share: float  # the promise, less what a short measurement may miss
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
    if report.fairness is not None and not report.fairness.is_held:
        yield from _unfair(report.fairness)


def _unfair(fair: FairnessReport) -> Iterator[str]:
    ratios = [window.ttft_ratio for window in fair.backlog.windows]
    if any(ratio is None or ratio > fair.max_ttft_ratio for ratio in ratios):
        found = ", ".join("unknown" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        yield (
            f"fairness: HIGH TTFT p95 beside a LOW backlog, window by window, is {found} times that of an idle server,"
            f" and should be at most {fair.max_ttft_ratio:g} times"
        )
    share = fair.saturated.low_share
    if share is None or share < fair.min_low_share:
        found = "no tokens at all were made" if share is None else f"LOW had {share:.1%} of all tokens"
        yield f"fairness: {found} under endless HIGH, and LOW should have at least {fair.min_low_share:.1%}"


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a run is, for whoever shows it."""

    what: str
    num_done: int
    num_stages: int
    expected_s: float | None = None  # of the whole run, once the model's pace is known


Progress = Callable[[Stage], None]
