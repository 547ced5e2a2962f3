"""Runs requests of several clients on an engine and measures the times."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from typing import TYPE_CHECKING

from quire.bench.report import (
    HIGH_ANSWER,
    HIGH_PROMPT,
    LIVE_TOKENS,
    NUM_IDLE,
    SENTENCES,
    SHORT_PROMPT,
    BenchConfig,
    Measurement,
    Progress,
    Stage,
)
from quire.core.step import StepPlan, TokenLogprobs
from quire.core.values import PackedPrompt, SamplingParams
from quire.engine.engine import Engine
from quire.errors import InvalidRequest, RequestFailed

if TYPE_CHECKING:
    from quire.backends.base import Runner
    from quire.engine.llm import LLM
    from quire.engine.structured.masks import Matcher
    from quire.text.tokenizer import Tokenizer


class Track:
    """Times and token counts of one request."""

    def __init__(self, request_id: int) -> None:
        self.request_id = request_id
        self.arrived_s = time.perf_counter()
        self.tokens: list[int] = []
        self.token_times: list[float] = []
        self.logprobs: list[TokenLogprobs] = []
        self.num_cached_tokens = 0
        self.is_finished = False

    @property
    def first_s(self) -> float:
        return self.token_times[0]

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrived_s


class Session:
    """Requests that run on an engine, with counters read from its plans."""

    def __init__(self, engine: Engine, next_id: Callable[[], int]) -> None:
        self.engine = engine
        self.tracks: dict[int, Track] = {}
        self.plan: StepPlan | None = None  # the last one
        self.num_steps = 0
        self.num_copies = 0
        self.num_prefill_tokens = 0
        self._next_id = next_id

    def add(
        self,
        prompt: Sequence[int] | PackedPrompt,
        sampling: SamplingParams | int,
        *,
        salt: str = "",
        matcher: Matcher | None = None,
    ) -> Track:
        """Add a request. A number of tokens for parameters: greedy, and exactly so many, as it has no stop tokens."""
        track = Track(self._next_id())
        if isinstance(sampling, int):
            sampling = SamplingParams(temperature=0.0, max_tokens=sampling)
        self.engine.add(track.request_id, prompt, sampling, salt=salt, matcher=matcher)
        self.tracks[track.request_id] = track
        return track

    def step(self) -> None:
        outputs = self.engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            track = self.tracks[output.request_id]
            if output.error is not None:
                raise RequestFailed(f"request {output.request_id} failed: {output.error}")
            track.tokens += output.tokens
            track.token_times += [now_s] * len(output.tokens)
            track.logprobs += output.logprobs
            track.num_cached_tokens = output.num_cached_tokens
            track.is_finished = output.finish_reason is not None

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while self.engine.has_work and not until():
            self.step()

    def note(self, plan: StepPlan) -> None:
        """Count steps, copies and prefill tokens of a plan."""
        self.plan = plan
        self.num_steps += not plan.is_empty
        self.num_copies += len(plan.copies)
        self.num_prefill_tokens += sum(
            min(piece.length, piece.num_prompt_tokens - piece.start)
            for piece in plan.slices
            if piece.start < piece.num_prompt_tokens
        )


@contextmanager
def driven(engine: Engine, next_id: Callable[[], int]) -> Iterator[Session]:
    """A session on an engine.

    On exit, also after an error, all requests are ended and `on_plan` is restored.
    """
    session, before = Session(engine, next_id), engine.on_plan
    engine.on_plan = session.note
    try:
        yield session
    finally:
        engine.on_plan = before
        for request_id, track in session.tracks.items():
            if not track.is_finished:
                engine.cancel(request_id)
        while engine.has_work:  # finish a step in flight: its result must not reach later requests
            engine.step()


class Prompts:
    """Prompts of real text in the model's tokens, different for every seed and every call."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)

    def make(self, num_tokens: int) -> list[int]:
        ids = self._tokenizer.encode(self._text())
        while len(ids) < num_tokens:
            ids += self._tokenizer.encode(" " + self._text(), add_special=False)
        return ids[:num_tokens]

    def tails(self, count: int, num_tokens: int) -> list[list[int]]:
        """Token lists with different first tokens.

        With equal first tokens, the cache would reuse part of a block and copy it.
        """
        ids = self._tokenizer.encode(" " + self._text(), add_special=False)
        starts = list({token: index for index, token in reversed(list(enumerate(ids[:-num_tokens])))}.values())
        if len(starts) < count:
            raise InvalidRequest(f"tokenizer: {len(starts)} different tokens in {len(ids)}, but {count} are needed")
        return [ids[start : start + num_tokens] for start in starts[:count]]

    def _text(self) -> str:
        return " ".join(self._random.sample(SENTENCES, len(SENTENCES)))


class Threads:
    """Sets the number of compute threads, where the backend supports it."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.default = runner.facts().num_threads

    @property
    def choices(self) -> tuple[int, ...]:
        """Thread counts to measure: more threads are not always faster for one stream."""
        return (self.default,) if self.default == 1 else (self.default, 1)

    @contextmanager
    def using(self, num_threads: int) -> Iterator[None]:
        self._runner.use_threads(num_threads)
        try:
            yield
        finally:
            self._runner.use_threads(self.default)


class Bench:
    """State of a benchmark run: the engine, the source of prompts, and the progress."""

    def __init__(self, llm: LLM, config: BenchConfig, progress: Progress) -> None:
        self.engine = llm.engine
        self.config = config
        self.prompts = Prompts(llm.text.tokenizer, config.seed)
        self.threads = Threads(llm.engine.runner)
        self.next_id = llm.next_id
        self._progress = progress
        self._num_done = 0
        self._expected_s: float | None = None
        per_round = len(self.threads.choices) + 2 * len(config.batches)
        sizes = {"speedup": config.rounds * per_round, "prefix": config.rounds + 1, "drafts": 2 * config.rounds}
        self._num_stages = len(self.threads.choices) + sum(sizes.get(part, 0) for part in config.parts)

    def begin_stage(self, what: str) -> None:
        """Report the start of a stage to the progress callback."""
        self._progress(Stage(what, self._num_done, self._num_stages, self._expected_s))
        self._num_done += 1

    def session(self) -> AbstractContextManager[Session]:
        return driven(self.engine, self.next_id)

    def warm_up(self) -> None:
        """Run every code path once, and estimate the duration of the whole run from it."""
        config = self.config
        singles = []
        for num_threads in self.threads.choices:
            self.begin_stage("warming up")
            singles.append(self.measure(1, 0, num_threads))
        if "speedup" in config.parts:
            for clients in config.batches:
                self.measure(clients, 0, self.threads.default, num_prompt=SHORT_PROMPT, num_output=2)
        self._expected_s = _expected_s(config, singles[0], len(singles))

    def measure(
        self, clients: int, number: int, num_threads: int, *, num_prompt: int = 0, num_output: int = 0
    ) -> Measurement:
        """Measure clients that arrive together, each with its own prompt and salt, so that nothing is shared."""
        num_prompt, num_output = num_prompt or self.config.prompt_tokens, num_output or self.config.output_tokens
        prompts = [self.prompts.make(num_prompt) for _ in range(clients)]
        self.engine.clear_cache()
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
    """Estimated duration of the run, from one request.

    Prompts cost time per token, and a step of K clients takes about K / 3 as long as one.
    """
    prefill_s = one.ttft_ms / 1000 / config.prompt_tokens
    step_s = (one.wall_s - one.ttft_ms / 1000) / (config.output_tokens - 1)
    per_round = (num_choices + len(config.batches)) * one.wall_s
    for clients in config.batches:
        per_round += clients * config.prompt_tokens * prefill_s + config.output_tokens * step_s * max(1, clients / 3)
    spent = {
        "speedup": config.rounds * per_round,
        "prefix": (config.rounds + 1) * (config.head_tokens * prefill_s + 2 * LIVE_TOKENS * step_s),
        "drafts": 2 * config.rounds * (2.5 * config.prompt_tokens * prefill_s + config.output_tokens * step_s),
        "fairness": 1.7 * config.seconds + NUM_IDLE * (HIGH_PROMPT * prefill_s + HIGH_ANSWER * step_s),
    }
    return sum(spent[part] for part in config.parts)
