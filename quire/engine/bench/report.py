"""What a benchmark is asked for, and what comes out of it: plain values that can be written as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.errors import InvalidRequest

if TYPE_CHECKING:
    pass


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
