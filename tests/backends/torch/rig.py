"""Drives an engine, by default over the torch runner, with full logprobs: the whole distribution of every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.backends.fake import FakeRunner
from quire.core.check import check_scheduler
from quire.core.step import StepPlan, TokenLogprobs
from quire.core.values import PackedPrompt, Priority, SamplingParams
from quire.engine.composition import EngineConfig, make_engine, make_scheduler
from quire.engine.engine import Engine, Speculation
from quire.engine.generation import EngineOutput, GenerationRequest
from quire.engine.masks import Matcher


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)  # the distribution from which each token was sampled
    prompt_rows: dict[int, Tensor] = field(default_factory=dict)  # by position of the predicted token
    num_cached_tokens: int = 0
    error: str | None = None


class Rig:
    """An engine that counts the operations of its plans."""

    def __init__(self, path: Path, **settings: Any) -> None:
        config = EngineConfig(**{"backend": "torch", "num_blocks": 64, "max_num_seqs": 8, "threads": 1, **settings})
        self.use(make_engine(path, config), config)

    def use(self, engine: Engine, config: EngineConfig) -> None:
        self.engine, self.config = engine, config
        self.vocab_size = self.engine.capacity.vocab_size
        self.num_copies = 0
        self.num_computed = 0
        self.engine.on_plan = self._count
        self._num_requests = 0

    def reset(
        self,
        *,
        overlap: bool = False,
        num_blocks: int | None = None,
        max_num_seqs: int | None = None,
        has_drafts: bool = False,
        **settings: Any,
    ) -> None:
        """Make a new scheduler and an empty cache over the same weights, optionally with fewer blocks and sequences.

        `has_drafts`: verify drafts, whatever a row costs.
        """
        runner = self.engine.runner
        whole = runner.capacity()
        capacity = replace(
            whole,
            has_overlap=overlap,
            num_blocks=num_blocks or whole.num_blocks,
            max_num_seqs=max_num_seqs or whole.max_num_seqs,
        )
        config = replace(self.config, **settings)
        # The fake runner only reports the capacity.
        self.engine = Engine(runner, make_scheduler(FakeRunner(capacity), config), on_plan=self._count)
        self.engine.capacity = capacity
        self.engine.speculation = Speculation(replace(capacity, has_costly_rows=False), is_on=has_drafts)
        self.num_copies = self.num_computed = 0

    def start(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        parent: int | None = None,
        priority: Priority = Priority.NORMAL,
        matcher: Matcher | None = None,
        prediction: Sequence[int] = (),
        **sampling: Any,
    ) -> int:
        self._num_requests += 1
        params = {"temperature": 0.0, "max_tokens": num_tokens, "logprobs": self.vocab_size, **sampling}
        self.engine.add(
            self._num_requests,
            GenerationRequest.of(
                list(prompt),
                SamplingParams(**params),
                priority=priority,
                prediction=PackedPrompt.of(prediction) if prediction else None,
            ),
            parent_id=parent,
            matcher=matcher,
        )
        return self._num_requests

    def run(self, *request_ids: int) -> dict[int, Answer]:
        answers = {request_id: Answer() for request_id in request_ids}
        num_steps = 0
        while self.engine.has_work:
            self.step(answers)
            num_steps += 1
            assert num_steps < 5_000
        return answers

    def finish(self, answers: dict[int, Answer]) -> None:
        while self.engine.has_work:
            self.step(answers)

    def step(self, answers: dict[int, Answer]) -> None:
        for output in self.engine.step():
            self._take(answers[output.request_id], output)
        check_scheduler(self.engine.scheduler)

    def answer(self, prompt: Sequence[int], num_tokens: int, **sampling: Any) -> Answer:
        request_id = self.start(prompt, num_tokens, **sampling)
        return self.run(request_id)[request_id]

    def _count(self, plan: StepPlan) -> None:
        self.num_copies += len(plan.copies)
        self.num_computed += plan.num_tokens

    def _take(self, answer: Answer, output: EngineOutput) -> None:
        answer.tokens += output.tokens
        answer.num_cached_tokens = output.num_cached_tokens
        answer.error = output.error
        answer.rows += [self._dense(entry) for entry in output.logprobs]
        if output.prompt_logprobs is not None:
            for position, entry in enumerate(output.prompt_logprobs.entries, output.prompt_logprobs.start):
                answer.prompt_rows[position] = self._dense(entry)

    def _dense(self, entry: TokenLogprobs) -> Tensor:
        row = torch.full((self.vocab_size,), float("nan"))
        if entry.top:
            tokens, logprobs = zip(*entry.top, strict=True)
            row[torch.tensor(tokens)] = torch.tensor(logprobs)
        return row


def same_rows(answer: Answer, expected: Tensor, num_prompt: int) -> float:
    """Return the largest difference between an answer's distributions and [positions, V] of the whole sequence."""
    rows = torch.stack(answer.rows)
    return float((rows - expected[num_prompt - 1 : num_prompt - 1 + len(rows)]).abs().max())
