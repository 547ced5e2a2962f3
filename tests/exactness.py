"""Check bit by bit that the logits of a token depend on the tokens before it alone: `python -m tests.exactness`.

    python -m tests.exactness --shape qwen3-0.6b --layers 4 --device cuda --rows 50000 --seed 7
    python -m tests.exactness --backend native --rows 5000 --mutant chunk

In each round, requests are drawn: random prompts, many with common heads, greedy or sampled, some with siblings or
logprobs. Each is answered alone, without cache and CUDA graphs. Then conditions are drawn, and the requests are answered
together: any number at once, chunks, small pools, cached prefixes, loads from host memory and disk, preemptions,
siblings, partly wrong guesses, CUDA graphs, a step in flight.

A row of logits is identified by the tokens before it. Its bits, as a sum computed on the device, must be those of the
first row with these tokens. Rows after tokens that no request had alone are not compared: wrong guesses, and what follows
a wrong token. Answers and logprobs must be equal too. Everything follows from the seed; `--round` repeats one round.
With `--mutant`, a last bit depends on the batch, and the check fails if that is not found.
"""

from __future__ import annotations

import argparse
import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.backends.base import TokenMasks
from quire.backends.fake import FakeRunner
from quire.backends.sampling import prompt_parts, sampled_pieces
from quire.core.check import check_scheduler
from quire.core.step import SeqSlice, StepPlan, StepResult, TokenLogprobs
from quire.core.values import Priority
from quire.engine.composition import EngineConfig, OpenedLevels, make_scheduler
from quire.engine.engine import Engine, Speculation
from tests.backends.torch.rig import Rig

# S rows of logits, V vocabulary, T tokens of a step

TINY = "tiny"
INTEGERS = {2: torch.int16, 4: torch.int32}  # as wide as a number of so many bytes
PART = 64  # rows that are summed at once: their integers take eight bytes per logit
WRONG_EACH = 6  # of these guesses, one is wrong
NUM_CONDITIONS = 12  # of a round
LEVEL_BYTES = 64 << 20
SAVE_S = 20.0

Owner = tuple[int, int]  # bits of a row, and the index of the request that had it first


# Bits of logits


class Row(NamedTuple):
    piece: SeqSlice
    end: int  # tokens before the row
    kind: str

    @property
    def key(self) -> int:
        """Digest of the tokens before the row. A slice without tokens gets its token from the step before."""
        piece = self.piece
        if not piece.num_drafts:
            return hash(array("I", piece.history[: self.end]).tobytes())
        guessed = piece.tokens[: self.end - piece.start]
        return hash(array("I", [*piece.history[: piece.start], *guessed]).tobytes())


class Rows(NamedTuple):
    rows: list[Row]
    bits: Tensor  # [S] int64, on the host once the step is collected
    logits: Tensor | None  # [S, V]


class Recorder:
    """A runner that notes the bits of all logits. `take` gets those of a step when it is collected."""

    def __init__(self, runner: Any) -> None:
        self.inner = runner
        self.take: Callable[[Rows], None] = lambda _: None
        self.keeps_logits = True
        self.num_graphs = 0  # steps that ran as a graph
        self._noted: list[Rows] = []
        self._steps: deque[list[Rows]] = deque()
        self._factors: Tensor | None = None
        if hasattr(runner, "prompt_rows"):
            self._prompt_rows, runner.prompt_rows = runner.prompt_rows, self._note_prompts
        else:
            self._rank_prompts, runner._rank_prompts = runner._rank_prompts, self._note_native_prompts
        if hasattr(runner, "_graph"):
            self._graph, runner._graph = runner._graph, self._count_graph

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, plan: StepPlan) -> None:
        self._noted = []
        self.inner.forward(plan)
        whole = {piece.request_id: piece for piece in plan.slices}
        with self._on_stream():
            for pieces, logits in sampled_rows(self.inner):
                ends = [(whole[one.request_id], one.start + one.length) for one in pieces]
                self._note([Row(piece, end, kind_of(piece)) for piece, end in ends], logits)

    def sample(self, masks: TokenMasks | None) -> None:
        self.inner.sample(masks)
        self._steps.append(self._noted)

    def collect(self) -> StepResult:
        result: StepResult = self.inner.collect()
        for rows in self._steps.popleft():
            self.take(rows)
        return result

    def _on_stream(self) -> AbstractContextManager[object]:
        return self.inner._on_stream() if hasattr(self.inner, "_on_stream") else nullcontext()

    @torch.inference_mode()
    def _note(self, rows: list[Row], logits: Tensor) -> None:
        """Sum the bits of each row, times odd numbers: one different bit changes the sum."""
        if self._factors is None:
            generator = torch.Generator().manual_seed(0)
            factors = torch.randint(-(2**62), 2**62, logits.shape[1:], generator=generator) * 2 + 1
            self._factors = factors.to(logits.device)
        whole = logits.view(INTEGERS[logits.itemsize])
        bits = torch.cat([(part.long() * self._factors).sum(-1) for part in whole.split(PART)])
        kept = logits.clone() if self.keeps_logits else None
        self._noted.append(Rows(rows, bits.to("cpu", non_blocking=True), kept))

    def _note_prompts(self, slices: Sequence[SeqSlice], *given: Any) -> Iterator[tuple[int, int, tuple[int, ...], Tensor]]:
        for place, first, tokens, raw in self._prompt_rows(slices, *given):
            self._note([Row(slices[place], first + row, "prompts") for row in range(len(tokens))], raw)
            yield place, first, tokens, raw

    def _note_native_prompts(self, slices: Sequence[SeqSlice], batch: Any, hidden: Any) -> Any:
        for piece, first_row in zip(slices, batch.first_rows.tolist(), strict=False):
            for row, tokens in prompt_parts(piece):
                raw = self.inner.model.head(hidden[first_row + row : first_row + row + len(tokens)])
                ends = range(piece.start + 1 + row, piece.start + 1 + row + len(tokens))
                self._note([Row(piece, end, "prompts") for end in ends], torch.from_numpy(raw))
        return self._rank_prompts(slices, batch, hidden)

    def _count_graph(self, step: Any) -> Any:
        graph = self._graph(step)
        self.num_graphs += graph is not None
        return graph


def kind_of(piece: SeqSlice) -> str:
    if piece.num_drafts:
        return "guesses"
    return "ends of chunks" if piece.length > 1 else "decodes"


def sampled_rows(runner: Any) -> list[tuple[list[SeqSlice], Tensor]]:
    """Return the logits [S, V] of the step that a runner of any backend has enqueued, and a slice that ends at each."""
    forwarded = runner._forwarded
    if hasattr(forwarded, "passes"):
        return [(one.rows, one.inputs.logits) for one in forwarded.passes if one.inputs is not None]
    slices = forwarded.batch.slices if hasattr(forwarded.batch, "slices") else forwarded.slices
    pieces = [one for piece in slices if piece.wants_token for one in sampled_pieces(piece)]
    return [(pieces, torch.as_tensor(forwarded.logits))] if pieces else []


# Requests and conditions


@dataclass(frozen=True, slots=True)
class Asked:
    prompt: tuple[int, ...]
    num_tokens: int
    sampling: Mapping[str, Any]
    first: int | None = None  # index of the first of siblings


@dataclass(slots=True)
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    num_cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    num_requests: int = 48  # of a round
    longest: int = 1200  # prompt
    most_tokens: int = 32  # of an answer


@dataclass(frozen=True, slots=True)
class Condition:
    num_requests: int
    settings: Mapping[str, Any]  # of `Rig.reset`
    has_graphs: bool
    has_levels: bool
    has_priorities: bool
    gap: int  # most steps between the arrivals of two requests

    @property
    def features(self) -> list[str]:
        sizes = ((1, "alone"), (8, "2 to 8 at once"), (64, "9 to 64 at once"), (1 << 30, "more at once"))
        names = {
            "with lower levels": self.has_levels,
            "cached prefixes": self.has_levels or self.settings["enable_prefix_caching"],
            "in chunks": "max_chunk_tokens" in self.settings and not self.has_levels,
            "small pool": "num_blocks" in self.settings,
            "priorities": self.has_priorities,
            "guesses on": self.settings["has_drafts"],
            "step in flight": self.settings["overlap"],
            "graphs on": self.has_graphs,
        }
        size = next(name for most, name in sizes if self.num_requests <= most)
        return [size, *(name for name, is_on in names.items() if is_on)]


def draw_requests(rng: Random, scale: Scale, vocab_size: int, texts: Sequence[Sequence[int]]) -> list[Asked]:
    """Draw prompts of random tokens or of `texts`. Many start like others, up to any token."""

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    longest = scale.longest
    heads = [tokens(rng.randint(1, longest // 2)) for _ in range(5)]
    asked: list[Asked] = []
    while len(asked) < scale.num_requests:
        kind = rng.random()
        own = tokens(int(longest ** rng.random()))
        if texts and kind < 0.5:
            prompt = list(rng.choice(texts))
        elif kind < 0.3:
            prompt = own
        else:
            head = list(rng.choice(asked).prompt) if asked and kind < 0.5 else rng.choice(heads)
            prompt = head[: rng.choice((len(head), rng.randint(0, len(head))))] + own
        sampling: dict[str, Any] = {"logprobs": rng.choice((None, None, 0, 5)), "seed": rng.randrange(1 << 40)}
        if rng.random() < 0.5:
            sampling |= {"temperature": rng.uniform(0.3, 1.5), "top_k": rng.choice((0, 1, 20, 1000))}
            sampling |= {"top_p": rng.choice((1.0, 0.9)), "min_p": rng.choice((0.0, 0.0, 0.05))}
        if rng.random() < 0.15:
            sampling |= {"repetition_penalty": 1.3, "logit_bias": {rng.randrange(vocab_size): 3.0}}
        num_siblings = rng.choice((0, 1, 3, 6)) if sampling.get("temperature") else 0
        if not num_siblings and rng.random() < 0.3:
            sampling["prompt_logprobs"] = rng.choice((0, 3))
        first, count = len(asked), rng.randint(1, scale.most_tokens)
        asked.append(Asked(tuple(prompt[-longest:]), count, sampling))
        asked += [
            replace(asked[first], sampling=sampling | {"sample_index": number}, first=first)
            for number in range(1, num_siblings + 1)
        ]
    return asked


def draw_condition(rng: Random, most: int, num_needed: int, *, has_levels: bool) -> Condition:
    """`most`: requests at once. `num_needed`: blocks of the longest request."""
    count = rng.choice((1, 2, rng.randint(2, 8), rng.randint(8, 64), rng.randint(1, most), rng.randint(64, 256)))
    settings: dict[str, Any] = {"enable_prefix_caching": rng.random() < 0.7, "overlap": rng.random() < 0.5}
    settings["has_drafts"] = rng.random() < 0.35
    if settings["has_drafts"]:
        count = min(count, rng.randint(1, 16))
    if rng.random() < 0.5:
        settings["max_chunk_tokens"] = rng.choice((5, 13, 16, 64, 100, 256, 512))
        settings["max_num_batched_tokens"] = rng.choice((24, 300, 1000, 2048))
    if rng.random() < 0.4:
        settings["num_blocks"] = int(num_needed * rng.uniform(1.1, 3)) + 2
    if rng.random() < 0.3:
        settings["max_num_seqs"] = min(rng.choice((1, 2, 4, 16)), most)
    return Condition(
        num_requests=min(count, most),
        settings=settings,
        has_graphs=rng.random() < 0.6,
        has_levels=has_levels and rng.random() < 0.25,
        has_priorities=rng.random() < 0.4,
        gap=rng.choice((0, 0, 1, 4)),
    )


def partly_wrong(tokens: Sequence[int]) -> list[int]:
    return [token ^ (place % WRONG_EACH == WRONG_EACH - 1) for place, token in enumerate(tokens)]


# The comparison


@dataclass(slots=True)
class Failure:
    text: str
    key: int
    owner: int
    row: Tensor | None  # [V]


class Exactness:
    """Answers the same requests alone and under conditions, and compares the bits of all logits."""

    def __init__(self, rig: Rig, scale: Scale, seed: int, texts: Sequence[Sequence[int]] = ()) -> None:
        self.rig, self.scale, self.seed, self.texts = rig, scale, seed, texts
        self.recorder = Recorder(rig.engine.runner)
        rig.engine.runner = self.recorder
        self.capacity = rig.engine.capacity
        self.num_rows: Counter[str] = Counter()  # compared, by feature
        self.num_wrong: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.failures: list[str] = []
        self.explained = ""
        self.alone_s = 0.0
        self._failure: Failure | None = None  # the first one of a condition
        self._where = ""
        self._features: list[str] = []
        self._known: dict[int, Owner] = {}
        self._asked: list[Asked] = []
        self._expected: list[Answer] = []
        self._index: dict[int, int] = {}  # by request id
        self._leveled: Engine | None = None

    @property
    def total(self) -> int:
        return self.num_rows["all"]

    @property
    def num_different(self) -> int:
        return self.num_wrong["all"] + len(self.failures)

    def run_round(self, number: int, is_over: Callable[[], bool] = lambda: False) -> None:
        rng = Random(f"{self.seed}.{number}")
        self._known, self._asked, self._expected = {}, [], []
        asked = draw_requests(rng, self.scale, self.capacity.vocab_size, self.texts)
        started_s = time.monotonic()
        self._where, self._features = f"round {number}, alone", ["references"]
        for one in asked:
            self._answer_alone(one)
        for index in rng.sample(range(len(asked)), min(6, len(asked))):  # rows of decodes again, as rows of a prompt
            prompt = (*asked[index].prompt, *self._expected[index].tokens)
            self._answer_alone(Asked(prompt, 2, {"logprobs": None, "prompt_logprobs": 2}))
        self._explain()
        self.alone_s += time.monotonic() - started_s
        longest = max(len(one.prompt) + one.num_tokens for one in self._asked)
        num_needed = -(-longest // self.capacity.block_size) + 1
        for place in range(NUM_CONDITIONS):
            condition = draw_condition(rng, self.capacity.max_num_seqs, num_needed, has_levels=self._leveled is not None)
            self._where, self._features = f"round {number}, condition {place}: {condition}", condition.features
            self._run(condition, rng)
            self._explain()
            if is_over():
                break

    def open_levels(self, folder: Path) -> None:
        """Make an engine with levels below the device, and a pool that holds two of the longest requests."""
        num_blocks = 2 * (self.scale.longest + self.scale.most_tokens) // self.capacity.block_size + 4
        is_host = self.recorder.block_io().is_host_memory
        config = replace(
            self.rig.config, host_cache=0 if is_host else LEVEL_BYTES, disk_cache=LEVEL_BYTES, cache_dir=str(folder)
        )
        opened = OpenedLevels(config, self.recorder, "exactness", lambda: "random")
        capacity = replace(self.capacity, num_blocks=min(num_blocks, self.capacity.num_blocks), has_overlap=True)
        scheduler = make_scheduler(FakeRunner(capacity), config, levels=opened)
        opened.start(scheduler.cache.levels)  # the time of a prompt is unknown, so that all loads pay
        self._leveled = Engine(self.recorder, scheduler, transfers=opened.transfers)

    def close(self) -> None:
        (self._leveled or self.rig.engine).close()

    def _answer_alone(self, one: Asked) -> None:
        """Answer a request alone. Its rows become the known ones, if they are not yet."""
        self._asked.append(one)
        self.recorder.take = self._learn
        self._expected.append(self._reference(len(self._asked) - 1))

    def _reference(self, index: int) -> Answer:
        self.rig.reset(enable_prefix_caching=False)
        self.recorder.inner._has_graphs = False
        (answer,) = self._answer_all([index], Condition(1, {}, False, False, False, 0), Random(0))
        return answer

    def _run(self, condition: Condition, rng: Random) -> None:
        picks = rng.choices(range(len(self._asked)), k=condition.num_requests)
        self._prepare(condition)
        self.recorder.take = self._compare
        for _ in range(2 if condition.has_levels else 1):
            for index, answer in zip(picks, self._answer_all(picks, condition, rng), strict=True):
                self._judge(index, answer)
            if condition.has_levels:
                self.rig.engine.save_cache(SAVE_S)
        scheduler = self.rig.engine.scheduler
        check_scheduler(scheduler)
        self.events["guesses"] += scheduler.num_drafted
        self.events["right guesses"] += scheduler.num_accepted
        if condition.has_levels:
            scheduler.num_drafted = scheduler.num_accepted = 0

    def _prepare(self, condition: Condition) -> None:
        self.recorder.inner._has_graphs = condition.has_graphs
        if not condition.has_levels or self._leveled is None:
            settings = dict(condition.settings)
            settings["num_blocks"] = min(settings.get("num_blocks", 1 << 30), self.capacity.num_blocks)
            self.rig.reset(**settings)
        else:
            self.rig.engine = self._leveled
            self._leveled.clear_cache()  # other engines have used the blocks
            capacity = replace(self.capacity, has_overlap=condition.settings["overlap"])
            self._leveled.capacity = capacity
            costless = replace(capacity, has_costly_rows=False)
            self._leveled.speculation = Speculation(costless, is_on=condition.settings["has_drafts"])
        self.rig.engine.on_plan = self._count

    def _answer_all(self, picks: Sequence[int], condition: Condition, rng: Random) -> list[Answer]:
        engine, answers = self.rig.engine, dict[int, Answer]()
        firsts: dict[int, int] = {}  # index -> id of the request that has it
        requests = []
        self._index = {}
        has_guesses = condition.settings.get("has_drafts", False)
        for index in picks:
            one = self._asked[index]
            request_id = self.rig.start(
                one.prompt,
                one.num_tokens,
                parent=None if one.first is None else firsts.get(one.first),
                priority=rng.choice(list(Priority)) if condition.has_priorities else Priority.NORMAL,
                prediction=partly_wrong(self._expected[index].tokens) if has_guesses else (),
                **one.sampling,
            )
            firsts[index if one.first is None else one.first] = request_id
            answers[request_id], self._index[request_id] = Answer(), index
            requests.append(engine.scheduler.requests.get(request_id))
            for _ in range(rng.randint(0, condition.gap)):
                self._step(answers)
        while engine.has_work:
            self._step(answers)
        self.events["preemptions"] += sum(request.num_preemptions for request in requests if request is not None)
        return list(answers.values())

    def _step(self, answers: Mapping[int, Answer]) -> None:
        for output in self.rig.engine.step():
            answer = answers[output.request_id]
            answer.tokens += output.tokens
            answer.logprobs += output.logprobs
            answer.num_cached_tokens = output.num_cached_tokens
            answer.error = output.error
            if output.prompt_logprobs is not None:
                answer.prompt_logprobs |= dict(
                    enumerate(output.prompt_logprobs.entries, output.prompt_logprobs.start)
                )

    def _count(self, plan: StepPlan) -> None:
        self.events["steps"] += bool(plan.slices)
        self.events["copied blocks"] += len(plan.copies)
        for load in plan.loads:
            self.events[f"pieces loaded, {'disk' if load.read_id else load.level}"] += 1

    def _judge(self, index: int, answer: Answer) -> None:
        """Compare an answer with that of the request alone."""
        expected, request = self._expected[index], self._asked[index]
        self.events["answers"] += 1
        self.events["cached tokens"] += answer.num_cached_tokens
        names = {
            "error": (answer.error, None),
            "tokens": (answer.tokens, expected.tokens),
            "logprobs": (answer.logprobs, expected.logprobs),
            "logprobs of the prompt": (answer.prompt_logprobs, expected.prompt_logprobs),
        }
        for name, (found, wanted) in names.items():
            if found != wanted:
                self.events[f"answers with other {name}"] += 1
                self.failures.append(f"{name} of request {index}, {request.sampling}: {found!s:.80} for {wanted!s:.80}")
                return

    # Rows

    def _learn(self, rows: Rows) -> None:
        """Note rows of a request alone, and compare those that are known from another one."""
        index = len(self._asked) - 1
        fresh = [self._known.setdefault(row.key, (bits, index)) == (bits, index) for row, bits in _pairs(rows)]
        if not all(fresh):
            self._compare(rows)

    def _compare(self, rows: Rows) -> None:
        for place, (row, bits) in enumerate(_pairs(rows)):
            key = row.key
            known = self._known.get(key)
            if known is None:
                self.events["rows after other tokens"] += 1
                continue
            names = ("all", row.kind, *self._features)
            self.num_rows.update(names)
            if known[0] != bits:
                self.num_wrong.update(names)
                if self._failure is None:
                    index = self._index[row.piece.request_id]
                    text = f"{self._where}, request {index}, {row.kind}, position {row.end}"
                    logits = None if rows.logits is None else rows.logits[place].float().cpu()
                    self._failure = Failure(text, key, known[1], logits)

    def _explain(self) -> None:
        """Compute the row of the first failure alone again, to tell the difference."""
        failure, self._failure = self._failure, None
        if failure is None or failure.row is None or self.explained:
            return
        again: list[Tensor] = []

        def take(rows: Rows) -> None:
            found = [place for place, row in enumerate(rows.rows) if row.key == failure.key]
            again.extend(rows.logits[place].float().cpu() for place in found if rows.logits is not None)

        self.recorder.take = take
        self._reference(failure.owner)
        gap = (again[0] - failure.row).abs()
        self.explained = (
            f"seed {self.seed}, {failure.text}: {int((gap > 0).sum())} logits differ from those of request"
            f" {failure.owner} alone, by at most {float(gap.max()):.3g}"
        )
        if not gap.any():
            self.explained += ": alone it has other bits than before"
        print(f"DIFFERENT: {self.explained}", flush=True)
        self.recorder.keeps_logits = False

    def report(self, wall_s: float) -> str:
        lines = [f"{'condition':20}{'rows':>10}{'differ':>8}"]
        lines += [f"{name:20}{self.num_rows[name]:10}{self.num_wrong[name]:8}" for name in sorted(self.num_rows)]
        lines.append(", ".join(f"{name}: {count}" for name, count in sorted(self.events.items())))
        lines.append(f"graphs: {self.recorder.num_graphs} steps. {self.total / wall_s:,.0f} rows per second,")
        lines[-1] += f" {wall_s:.1f} s, {self.alone_s:.1f} s of them for answers alone."
        lines += [f"DIFFERENT: {text}" for text in self.failures[:10]]
        lines.append(f"total: {self.total} rows, {self.num_wrong['all']} differ; {len(self.failures)} answers differ")
        return "\n".join(lines)


def _pairs(rows: Rows) -> Iterator[tuple[Row, int]]:
    return zip(rows.rows, rows.bits.tolist(), strict=True)


# Mutants: which rows of a step [T], by their positions [T], have another last bit


def split(positions: Tensor) -> Tensor:
    """A split of long contexts that follows the batch."""
    return (positions >= 64) & (len(positions) >= 4)


def layout(positions: Tensor) -> Tensor:
    """A reduction that follows a row's place in its tile."""
    return torch.arange(len(positions), device=positions.device) // 8 % 2 == 1


def chunk(positions: Tensor) -> Tensor:
    """Pieces of keys that are counted from the first row of a chunk."""
    rows = torch.arange(len(positions), device=positions.device)
    is_first = torch.ones_like(rows, dtype=torch.bool)
    is_first[1:] = positions[1:] != positions[:-1] + 1
    starts = positions[torch.where(is_first, rows, 0).cummax(0).values]
    return (starts % 16 != 0) & (positions > starts)


MUTANTS: dict[str, Callable[[Tensor], Tensor]] = {one.__name__: one for one in (split, layout, chunk)}


def nudge(values: Tensor, rows: Tensor) -> None:
    """Change the last bit of one number in these rows."""
    whole = values.view(INTEGERS[values.itemsize])
    whole[:, 1] ^= rows.to(whole.dtype)


@contextmanager
def mutated(model: Any, name: str | None) -> Iterator[None]:
    """Let the last hidden states (torch) or the logits (native) of a model follow the batch.

    "product": the last product is split in two from five rows on.
    """
    forward, logits_of = model.forward, getattr(model, "logits", None)

    def torch_forward(step: Any) -> Tensor:
        hidden: Tensor = forward(step)
        nudge(hidden, MUTANTS[name or ""](step.positions()))
        return hidden

    def native_forward(batch: Any, logit_rows: Any, hidden: Any = None) -> Any:
        logits, is_sound = forward(batch, logit_rows, hidden)
        rows = MUTANTS[name or ""](torch.from_numpy(batch.positions).long())
        nudge(torch.from_numpy(logits), rows[torch.from_numpy(logit_rows).long()])
        if hidden is not None:
            nudge(torch.from_numpy(hidden), rows)
        return logits, is_sound

    def split_logits(hidden: Tensor, out: Tensor | None = None) -> Tensor:
        if len(hidden) < 5 or logits_of is None:
            return logits_of(hidden, out=out)  # type: ignore[misc,no-any-return]
        first = hidden.clone()
        first[:, hidden.shape[1] // 2 :] = 0
        total = logits_of(first) + logits_of(hidden - first)
        return total if out is None else out.copy_(total)

    if name == "product":
        model.logits = split_logits
    elif name is not None:
        model.forward = native_forward if logits_of is None else torch_forward
    yield
    if name is not None:
        model.forward = forward
        if logits_of is not None:
            model.logits = logits_of


# The command


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    with TemporaryDirectory() as folder:
        path, settings, texts = open_model(options, Path(folder))
        started_s = time.monotonic()
        rig = Rig(path, **settings)
        runner: Any = rig.engine.runner
        with mutated(runner.model, options.mutant):
            while options.graphs and runner.prepare():
                pass
            check = Exactness(rig, Scale(options.requests, options.longest, options.tokens), options.seed, texts)
            if options.levels:
                check.open_levels(Path(folder) / "kv")
            facts = runner.facts()
            print(f"{options.model or options.shape}: {facts.backend}, {facts.device}, {facts.dtype}", end="; ")
            print(f"ready in {time.monotonic() - started_s:.1f} s", flush=True)
            started_s = time.monotonic()

            def is_over() -> bool:
                return check.total >= options.rows or time.monotonic() - started_s > options.seconds

            number = 0 if options.round is None else options.round
            check.run_round(number, is_over)
            while options.round is None and not is_over():
                number += 1
                check.run_round(number, is_over)
            print(check.report(time.monotonic() - started_s))
            check.close()
    if options.mutant is not None:
        print(f"mutant {options.mutant}: {'found' if check.num_different else 'NOT FOUND'}")
        return int(not check.num_different)
    return int(check.num_different > 0)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default=TINY, help="of benchmarks/gpu_workloads.py, with random weights")
    parser.add_argument("--layers", type=int, help="only the first so many layers of a shape; hybrids need 4")
    parser.add_argument("--model", help="name, folder or file of a real model, which is asked questions too")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", help="fp8 or int4")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto or fp8")
    parser.add_argument("--kv-gib", type=float, default=8.0, help="memory of the pool")
    parser.add_argument("--rows", type=int, default=5000, help="stop when so many rows were compared")
    parser.add_argument("--seconds", type=float, default=600.0, help="or after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--round", type=int, help="run only this round")
    parser.add_argument("--requests", type=int, default=Scale.num_requests, help="different ones in a round")
    parser.add_argument("--at-once", type=int, default=256, help="most requests at once")
    parser.add_argument("--longest", type=int, default=Scale.longest, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=Scale.most_tokens, help="most tokens of an answer")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false", help="capture none before the start")
    parser.add_argument("--no-levels", dest="levels", action="store_false", help="no host memory and disk")
    parser.add_argument("--mutant", choices=[*MUTANTS, "product"], help="must be found; product: torch only")
    return parser.parse_args(argv)


def open_model(options: argparse.Namespace, folder: Path) -> tuple[Path, dict[str, Any], Sequence[Sequence[int]]]:
    """Return a model's path, settings of its engine, and prompts of text. Imports only what the model needs."""
    names = ("backend", "device", "dtype", "kv_cache_dtype", "quantize")
    settings = {name: getattr(options, name) for name in names}
    settings |= {"max_num_seqs": options.at_once, "num_blocks": None, "kv_memory": int(options.kv_gib * 2**30)}
    settings["max_model_len"] = max(options.longest + 2 * options.tokens + 16, 512)
    if options.model is not None:
        from quire.engine.model_text import ModelText
        from quire.weights.hub import resolve
        from tests.equality import make_prompts

        path = resolve(options.model)
        text = ModelText.open(path)
        texts = [prompt[: options.longest] for prompt in make_prompts(text, 300)]
        text.close()
        return path, settings, texts
    if options.shape == TINY:
        from tests.tiny import write_tiny_model

        return write_tiny_model(folder / TINY), settings, ()
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
    from gpu_workloads import FULL, write_shape

    write_shape(options.shape, FULL, folder / options.shape, options.layers)
    if options.dtype == "auto":
        settings["dtype"] = "bfloat16"
    return folder / options.shape, settings | {"load_format": "dummy"}, ()


if __name__ == "__main__":
    sys.exit(main())
