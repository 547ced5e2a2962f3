"""Check bit by bit that the logits of a token depend on the tokens before it alone: `python -m tests.exactness`.

    python -m tests.exactness --shape qwen3-0.6b --layers 4 --device cuda --rows 50000 --seed 7
    python -m tests.exactness --model FOLDER --backend native --mutant chunk

In each round, requests are drawn: prompts with common heads, greedy or sampled, some with siblings or logprobs. Each is
answered alone, without cache and CUDA graphs. Then conditions are drawn, and the requests are answered together: any
number at once, in chunks, preempted, on cached prefixes, with partly wrong guesses and so on (`CONDITIONS`).

A row of logits is identified by the tokens before it. Its bits, as a sum computed on the device, must be those of the
first row with these tokens. Rows after tokens that no request had alone are not compared: wrong guesses, and what
follows a wrong token. Answers and logprobs must be equal too. The seed decides everything; `--round` repeats one round.
With `--mutant`, a last bit depends on the batch, and the check fails if it is not found.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.backends.fake import FakeRunner
from quire.backends.sampling import sampled_pieces
from quire.core.step import SeqSlice, StepPlan, StepResult, TokenLogprobs
from quire.core.values import Priority
from quire.engine.composition import OpenedLevels, make_scheduler
from quire.engine.engine import Engine, Speculation
from quire.weights.hub import resolve
from tests.backends.torch.rig import Answer, Rig

# S rows of logits, V vocabulary, T tokens of a step

INTEGERS = {2: torch.int16, 4: torch.int32}  # as wide as a number of so many bytes
PART = 64  # rows that are summed at once: their integers take eight bytes per logit
NUM_REQUESTS, NUM_CONDITIONS = 48, 12  # of a round
NUM_CONTINUED = 6  # requests whose answers become prompts: their rows of decodes are also rows of a prompt
LEVEL_BYTES = 256 << 20
SAVE_S = 20.0
WRONG_SHARE = 0.15  # of guesses
FAIL_EACH = 5  # passes
MAX_SHOWN = 10

# How many conditions of 100 have it, and settings of `Rig.reset`. The blocks of a small pool hold so many requests.
CONDITIONS: dict[str, tuple[int, Callable[[Random], dict[str, Any]]]] = {
    "no prefix cache": (30, lambda _: {"enable_prefix_caching": False}),
    "chunks": (50, lambda rng: {"max_chunk_tokens": rng.choice((5, 13, 16, 64, 100, 256, 512))}),
    "short steps": (30, lambda rng: {"max_num_batched_tokens": rng.choice((24, 300, 1000))}),
    "small pool": (40, lambda rng: {"num_blocks": rng.uniform(1.1, 3)}),
    "few at once": (30, lambda rng: {"max_num_seqs": rng.choice((1, 2, 4, 16))}),
    "step in flight": (50, lambda _: {"overlap": True}),
    "guesses": (40, lambda _: {"has_drafts": True}),
    "graphs": (60, lambda _: {}),
    "priorities": (40, lambda _: {}),
    "steps between": (50, lambda _: {}),  # two arrivals
    "out of memory": (20, lambda _: {}),  # some passes, which are repeated in halves
    "lower levels": (25, lambda _: {}),  # host memory and disk; chunks and pool are those of that engine
}


class Row(NamedTuple):
    piece: SeqSlice
    end: int  # tokens before the row
    kind: str

    @property
    def key(self) -> int:
        """Digest of the tokens before the row. A slice without tokens had that of the step before."""
        piece = self.piece
        own = piece.tokens[: self.end - piece.start] or piece.history[piece.start : self.end]
        return hash((array("I", piece.history[: piece.start]) + array("I", own)).tobytes())


Asked = tuple[tuple[int, ...], Mapping[str, Any]]  # a prompt, and parameters of sampling
Rows = tuple[list[Row], Tensor, Tensor]  # S rows; their bits [S] int64, on the host after the step; logits [S, V]


class Recorder:
    """A runner that notes the bits of all logits. `take` gets those of a step when it is collected."""

    def __init__(self, runner: Any) -> None:
        self.inner = runner
        self.take: Callable[[Rows], None]
        self._noted: list[Rows] = []
        self._steps: deque[list[Rows]] = deque()
        self._factors = torch.zeros(0)
        self._graph: Any = None  # of the step
        self.fails, self._num_passes = False, 0
        self._pass, runner.model.forward = runner.model.forward, self._pass_or_fail
        self._inner: Any = SimpleNamespace(**{name: getattr(runner, name, None) for name in ("prompt_rows", "_graph")})
        runner.prompt_rows, runner._graph = self._note_prompts, self._note_graph

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, plan: StepPlan) -> None:
        self._noted, self._graph = [], None
        self.inner.forward(plan)
        whole = {piece.request_id: piece for piece in plan.slices}
        with self.inner._on_stream() if hasattr(self.inner, "_on_stream") else nullcontext():
            for pieces, logits in sampled_rows(self.inner._forwarded):
                suffix = "" if self._graph is None else ", graph"
                ends = [(whole[one.request_id], one.start + one.length) for one in pieces]
                self._note([Row(piece, end, f"{kind_of(piece)}{suffix}") for piece, end in ends], logits)

    def sample(self, masks: Any) -> None:
        self.inner.sample(masks)
        self._steps.append(self._noted)

    def collect(self) -> StepResult:
        result: StepResult = self.inner.collect()
        for rows in self._steps.popleft():
            self.take(rows)
        return result

    @torch.inference_mode()
    def _note(self, rows: list[Row], logits: Tensor) -> None:
        """Sum the bits of each row, times odd numbers: a bit that differs changes the sum."""
        if not len(self._factors):
            generator = torch.Generator().manual_seed(0)
            factors = torch.randint(-(2**62), 2**62, logits.shape[1:], generator=generator)
            self._factors = (factors * 2 + 1).to(logits.device)
        parts = torch.split(logits.view(INTEGERS[logits.itemsize]), PART)
        bits = torch.cat([(part.long() * self._factors).sum(-1) for part in parts])
        self._noted.append((rows, bits.to("cpu", non_blocking=True), logits.clone()))

    def _note_prompts(self, slices: Sequence[SeqSlice], *given: Any) -> Iterator[Any]:
        for place, first, tokens, raw in self._inner.prompt_rows(slices, *given):
            self._note([Row(slices[place], first + row, "rows of prompts") for row in range(len(tokens))], raw)
            yield place, first, tokens, raw

    def _pass_or_fail(self, *given: Any) -> Any:
        """Run the layers. If it fails, the step is repeated in halves."""
        self._num_passes += 1
        if self.fails and self._num_passes % FAIL_EACH == 0:
            raise torch.OutOfMemoryError("on purpose")
        return self._pass(*given)

    def _note_graph(self, step: Any) -> Any:
        self._graph = self._inner._graph(step)
        return self._graph


def kind_of(piece: SeqSlice) -> str:
    return "rows of guesses" if piece.num_drafts else "ends of chunks" if piece.length > 1 else "decodes"


def sampled_rows(forwarded: Any) -> list[tuple[list[SeqSlice], Tensor]]:
    """Return the logits [S, V] of the step that a runner of any backend has enqueued, and a slice that ends at each."""
    if hasattr(forwarded, "passes"):
        return [(one.rows, one.inputs.logits) for one in forwarded.passes if one.inputs is not None]
    slices = forwarded.batch.slices if hasattr(forwarded.batch, "slices") else forwarded.slices
    pieces = [one for piece in slices if piece.wants_token for one in sampled_pieces(piece)]
    return [(pieces, torch.as_tensor(forwarded.logits))] if pieces else []


def draw_requests(rng: Random, longest: int, most_tokens: int, vocab_size: int) -> list[Asked]:
    """Draw prompts of random tokens. Many start like others, up to any token."""
    tokens = range(vocab_size)
    heads = [tuple(rng.choices(tokens, k=rng.randint(1, longest // 2))) for _ in range(5)]
    asked: list[Asked] = []
    while len(asked) < NUM_REQUESTS:
        head = rng.choice((*heads, *(prompt for prompt, _ in asked)))
        own = tuple(rng.choices(tokens, k=int(longest ** rng.random())))
        prompt = head[: rng.choice((0, len(head), rng.randint(0, len(head))))] + rng.choice((own, ())) or own
        sampling = {"logprobs": rng.choice((None, 0, 5)), "max_tokens": rng.randint(1, most_tokens), "seed": len(asked)}
        kinds: list[tuple[dict[str, Any], int]] = [  # parameters, and the number of samples
            *[({}, 1)] * 4,
            ({"prompt_logprobs": 3}, 1),
            ({"repetition_penalty": 1.3, "logit_bias": {rng.choice(tokens): 3.0}}, 1),
            ({"temperature": rng.uniform(0.3, 1.5)}, rng.choice((1, 3, 6))),
            ({"temperature": 0.8, "top_k": 20}, rng.choice((1, 2))),
            ({"temperature": 1.0, "top_p": 0.9, "min_p": 0.02}, 1),
        ]
        extra, num_samples = rng.choice(kinds)
        asked += [(prompt[:longest], {**sampling, **extra, "sample_index": one}) for one in range(num_samples)]
    return asked


class Exactness(Rig):
    """Answers the same requests alone and under conditions, and compares the bits of all logits."""

    def __init__(self, path: Path, seed: int, longest: int, most_tokens: int, **settings: Any) -> None:
        super().__init__(path, **settings)
        self.engine.runner = self.recorder = Recorder(self.engine.runner)
        self.seed, self.longest, self.most_tokens = seed, longest, most_tokens
        self.num_rows: Counter[str] = Counter()  # compared, by condition and kind
        self.num_wrong: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.failures: list[str] = []  # the first row, and all answers
        self.largest = 0.0  # difference of two logits
        self._names: Sequence[str] = ()  # conditions; none: alone
        self._leveled: Engine | None = None

    def run_round(self, number: int, is_over: Callable[[], bool] = lambda: False) -> None:
        rng = Random(f"{self.seed}.{number}")
        self._where, self._names = f"seed {self.seed}, round {number}", ()
        self._known: dict[int, tuple[int, Tensor]] = {}  # by tokens: bits of a row, and the row
        self._expected: list[Answer] = []
        self._asked = draw_requests(rng, self.longest, self.most_tokens, self.vocab_size)
        num_drawn = len(self._asked)
        for index in range(num_drawn + NUM_CONTINUED):
            if index >= num_drawn:
                prompt = self._asked[index - num_drawn][0] + tuple(self._expected[index - num_drawn].tokens)
                self._asked.append((prompt, {"max_tokens": 2, "prompt_logprobs": 2}))
            self._use({"enable_prefix_caching": False, "num_blocks": 1.0})
            self._expected += self._answer([index], rng)
        for _ in range(NUM_CONDITIONS):
            self._names = [name for name, (share, _) in CONDITIONS.items() if rng.randrange(100) < share]
            self._run(rng)
            if is_over():
                break

    def open_levels(self, folder: Path) -> None:
        """Make an engine with levels below the device, and a small pool."""
        host_bytes = 0 if self.recorder.block_io().is_host_memory else LEVEL_BYTES
        config = replace(self.config, host_cache=host_bytes, disk_cache=LEVEL_BYTES, cache_dir=str(folder))
        opened = OpenedLevels(config, self.recorder, "exactness", lambda: "")
        capacity = replace(self.recorder.capacity(), num_blocks=self._num_blocks(1.3), has_overlap=True)
        scheduler = make_scheduler(FakeRunner(capacity), config, levels=opened)
        opened.start(scheduler.cache.levels)  # the time of a prompt was not measured, so all loads pay
        self._leveled = Engine(self.recorder, scheduler, on_plan=self._count, transfers=opened.transfers)

    def close(self) -> None:
        (self._leveled or self.engine).close()

    def _run(self, rng: Random) -> None:
        """Answer some requests together, under the conditions of `_names`."""
        settings = {name: value for one in self._names for name, value in CONDITIONS[one][1](rng).items()}
        most = 4 * settings.get("max_num_seqs", 5 if "guesses" in self._names else 64)
        most = min(most, self.recorder.capacity().max_num_seqs)
        num_picks = min(rng.choice((1, 2, rng.randint(2, 8), rng.randint(8, 64), rng.randint(1, most), most)), most)
        weights = [0.3 if "prompt_logprobs" in sampling else 1.0 for _, sampling in self._asked]
        picks = rng.choices(range(len(self._asked)), weights, k=num_picks)
        self._use(settings)
        for _ in range(1 + (self.engine is self._leveled)):
            for index, answer in zip(picks, self._answer(picks, rng), strict=True):
                self._judge(index, answer)
            self.engine.save_cache(SAVE_S)

    def _use(self, settings: dict[str, Any]) -> None:
        """Use an engine with an empty cache."""
        self.recorder.take = self._compare
        self.recorder.fails = "out of memory" in self._names and not self.recorder.capacity().num_states
        self.recorder.inner._has_graphs = "graphs" in self._names and not self.recorder.fails
        logging.disable(logging.ERROR if self.recorder.fails else logging.NOTSET)
        if self._leveled is not None and "lower levels" in self._names:
            self.engine = self._leveled
            self.engine.clear_cache()  # other engines have used the blocks
            self.engine.capacity = replace(self.recorder.capacity(), has_overlap="overlap" in settings)
            capacity = replace(self.engine.capacity, has_costly_rows=False)
            self.engine.speculation = Speculation(capacity, is_on="has_drafts" in settings)
        else:
            if "num_blocks" in settings:
                settings["num_blocks"] = self._num_blocks(settings["num_blocks"])
            self.reset(**settings)

    def _num_blocks(self, num_requests: float) -> int:
        """Return the number of blocks that hold so many of the longest requests."""
        capacity = self.recorder.capacity()
        num_needed = (self.longest + 2 * self.most_tokens) // capacity.block_size + 1
        return min(int(num_requests * num_needed) + 2, int(capacity.num_blocks))

    def _answer(self, picks: Sequence[int], rng: Random) -> list[Answer]:
        answers: dict[int, Answer] = {}
        running: dict[tuple[int, ...], int] = {}  # by prompt: the last request with it
        self._index: dict[int, int] = {}  # by request id
        for index in picks:
            prompt, sampling = self._asked[index]
            expected = self._expected[index].tokens if "guesses" in self._names else ()
            request_id = self.start(
                prompt,
                0,
                parent=None if "prompt_logprobs" in sampling else running.get(prompt),
                priority=rng.choice(list(Priority)) if "priorities" in self._names else Priority.NORMAL,
                prediction=[max(token - (rng.random() < WRONG_SHARE), 0) for token in expected],
                **{"logprobs": None, **sampling},
            )
            answers[request_id], self._index[request_id], running[prompt] = Answer(), index, request_id
            for _ in range(rng.randint(0, 3) if "steps between" in self._names else 0):
                self.step(answers)
        self.finish(answers)
        return list(answers.values())

    def step(self, answers: dict[int, Answer]) -> None:
        for output in self.engine.step():
            self._take(answers[output.request_id], output)

    def _dense(self, entry: TokenLogprobs) -> Any:
        return entry

    def _count(self, plan: StepPlan) -> None:
        self.events["steps"] += not plan.is_empty
        self.events["copied blocks"] += len(plan.copies)
        self.events["preempted slices"] += sum(piece.epoch % (1 << 32) > 0 for piece in plan.slices)
        self.events.update(f"loads from {load.level}" for load in plan.loads)

    # Comparisons

    def _judge(self, index: int, answer: Answer) -> None:
        """Compare an answer with that of the request alone."""
        self.events["answers"] += 1
        self.events["cached tokens"] += answer.num_cached_tokens
        names = ("error", "tokens", "rows", "prompt_rows")  # rows are logprobs
        found = [name for name in names if getattr(answer, name) != getattr(self._expected[index], name)]
        if found:
            self._fail(index, f"other {', '.join(found)} {answer.error or ''}")

    def _compare(self, rows: Rows) -> None:
        """Compare rows with those of a request alone. Of a request alone, note those that are new."""
        for row, bits, logits in zip(rows[0], rows[1].tolist(), rows[2], strict=True):
            key = row.key
            if key not in self._known:
                if not self._names:
                    self._known[key] = bits, logits
                self.events["rows after other tokens"] += bool(self._names)
                continue
            names = ("all", row.kind, *(self._names or ("alone",)))
            self.num_rows.update(names)
            if bits != self._known[key][0]:
                gap = float((logits.float() - self._known[key][1].float()).abs().max())
                self.largest = max(self.largest, gap)
                if not self.num_wrong["all"]:
                    self._fail(self._index[row.piece.request_id], f"{row.kind}, position {row.end}, by {gap:.3g}")
                self.num_wrong.update(names)

    def _fail(self, index: int, text: str) -> None:
        self.failures.append(f"{self._where}, request {index}, {', '.join(self._names) or 'alone'}: {text}")
        if len(self.failures) <= MAX_SHOWN:
            print(f"DIFFERENT: {self.failures[-1]}", flush=True)

    def report(self, wall_s: float) -> str:
        lines = [f"{'condition':26}{'rows':>10}{'differ':>10}"]
        lines += [f"{name:26}{count:10,}{self.num_wrong[name]:10,}" for name, count in sorted(self.num_rows.items())]
        lines.append(", ".join(f"{name}: {count:,}" for name, count in sorted(self.events.items())))
        counts = f"{self.num_rows['all']:,} rows, {self.num_wrong['all']:,} differ, by at most {self.largest:.3g}"
        lines.append(f"{counts}; {wall_s:.0f} s, {self.num_rows['all'] / wall_s:,.0f} rows per second")
        return "\n".join(lines)


# Mutants


def chunk_rows(positions: Tensor) -> Tensor:
    """Return the rows of slices that do not start at a block, except the first row of each."""
    rows = torch.arange(len(positions), device=positions.device)
    is_first = positions != positions.roll(1) + 1
    starts = positions[torch.where(is_first, rows, 0).cummax(0).values]
    return (starts % 16 != 0) & (positions > starts)


# Rows of a step that get another last bit, given their positions [T]
MUTANTS: dict[str, Callable[[Tensor], Tensor]] = {
    "split": lambda positions: (positions >= 64) & (len(positions) >= 4),  # long contexts, split if there are few rows
    "layout": lambda positions: torch.arange(len(positions), device=positions.device) // 8 % 2 == 1,  # place in a tile
    "chunk": chunk_rows,  # pieces counted from the start of a chunk
}


@contextmanager
def mutated(model: Any, name: str) -> Iterator[None]:
    """Let the last hidden states of a torch model, or the logits of a native one, depend on the batch."""
    forward = model.forward

    def changed(step: Any, *given: Any) -> Any:
        found = forward(step, *given)
        if isinstance(found, Tensor):
            values, rows = found, MUTANTS[name](step.positions())
        else:
            values = torch.from_numpy(found[0])
            rows = MUTANTS[name](torch.from_numpy(step.positions))[torch.from_numpy(given[0]).long()]
        values.view(INTEGERS[values.itemsize])[:, 1] ^= rows.to(INTEGERS[values.itemsize])
        return found

    if name:
        model.forward = changed
    yield
    model.forward = forward


# The command

OPTIONS: dict[str, tuple[Any, str]] = {
    "shape": ("qwen3-0.6b", "of benchmarks/gpu_workloads.py, with random weights"),
    "layers": (4, "of the shape: only the first so many; hybrids need 4"),
    "model": ("", "name, folder or file of a real model, instead of a shape"),
    "backend": ("torch", "torch or native"),
    "device": ("auto", "cpu or cuda"),
    "quantize": ("", "fp8 or int4"),
    "kv-cache-dtype": ("auto", "auto or fp8"),
    "kv-memory": ("2G", "of the pool"),
    "rows": (5000, "stop when so many rows were compared"),
    "seconds": (600, "or after this time"),
    "seed": (0, "of everything"),
    "round": (-1, "run only this round"),
    "at-once": (256, "most requests"),
    "longest": (1200, "tokens of a prompt"),
    "tokens": (32, "most tokens of an answer"),
    "mutant": ("", f"a bug that must be found: {', '.join(MUTANTS)}"),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (default, what) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{what} [{default}]")
    options = parser.parse_args(argv)
    started_s = time.monotonic()

    def is_over() -> bool:
        return bool(rig.num_rows["all"] >= options.rows or time.monotonic() > started_s + options.seconds)

    with TemporaryDirectory() as folder:
        rig = open_rig(options, Path(folder))
        runner = rig.recorder.inner
        with mutated(runner.model, options.mutant):
            while runner.prepare():  # captures graphs
                pass
            rig.open_levels(Path(folder) / "kv")
            ready_s = time.monotonic() - started_s
            print(f"{options.model or options.shape}, ready in {ready_s:.1f} s: {runner.facts().layout}", flush=True)
            started_s = time.monotonic()
            for number in count() if options.round < 0 else (options.round,):
                rig.run_round(number, is_over)
                if is_over():
                    break
            print(rig.report(time.monotonic() - started_s))
        rig.close()
    if options.mutant:
        print(f"mutant {options.mutant}: {'found' if rig.failures else 'NOT FOUND'}")
    return int(bool(rig.failures) != bool(options.mutant))


def open_rig(options: argparse.Namespace, folder: Path) -> Exactness:
    given = {name: getattr(options, name) or None for name in ("backend", "device", "kv_cache_dtype", "quantize")}
    sizes = {"num_blocks": None, "kv_memory": options.kv_memory, "max_num_seqs": options.at_once}
    settings: dict[str, Any] = {**given, **sizes, "max_model_len": options.longest + 2 * options.tokens + 64}
    if options.model:
        path = resolve(options.model)
    else:
        path = folder / options.shape
        workloads = import_module("benchmarks.gpu_workloads")
        workloads.write_shape(options.shape, workloads.FULL, path, options.layers)
        settings |= {"dtype": "bfloat16", "load_format": "dummy"}
    return Exactness(path, options.seed, options.longest, options.tokens, **settings)


if __name__ == "__main__":
    sys.exit(main())
