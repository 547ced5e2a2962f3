"""A fake request, and an `AnswerEncoder` run over its batches in the order of `EventStream`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec

from quire.core.cache import CacheExplanation
from quire.core.values import PackedPrompt, Priority
from quire.engine.generation import Completion, Delta, GenerationOutput, Usage
from quire.server.models import ActiveRequest, InferenceRequest
from quire.server.protocols.support import AnswerEncoder
from quire.text.messages import AnswerParser, ChatRequest, PlainAnswer
from quire.text.reasoning import REASONING_FORMATS, Opening, ThoughtParser
from quire.text.tool_formats import PROMPTED, CallParser


@dataclass
class FakeActiveRequest:
    """The parts of an `ActiveRequest` that a codec reads."""

    request: InferenceRequest
    steps: Sequence[Sequence[Delta]] = ()
    num_prompt: int = 100
    num_cached: int = 0
    pinned_tokens: int = 0
    cache: CacheExplanation | None = None
    cache_text: None = None
    error: Exception | None = None
    request_id: str = "req_1"
    model: str = "tiny"
    created: int = 1_700_000_000
    system_fingerprint: str = "fp_x"
    priority: Priority = Priority.NORMAL
    num_thought_tokens: int = 0
    load_s: float = 0.5
    prefill_s: float | None = 0.25
    decode_s: float | None = 2.0
    caller: Any = field(default_factory=lambda: SimpleNamespace(arrived_s=0.0))
    prompt: tuple[int, ...] = (5, 6)
    requests: Any = ()
    parser: AnswerParser | None = None
    num_done: int = field(default=0, init=False)

    @property
    def usage(self) -> Usage:
        return Usage(self.num_prompt, self.num_done, self.num_cached)

    @property
    def generations(self) -> Any:
        return [SimpleNamespace(samples=[SimpleNamespace(token_ids=(7,) * self.num_done)])]

    def new_parser(self) -> AnswerParser:
        if self.parser is not None:
            return self.parser
        parser: AnswerParser = PlainAnswer()
        if isinstance(chat := self.request.prompts[0], ChatRequest) and chat.tools:
            parser = CallParser(PROMPTED, chat.callable_tools)
        return ThoughtParser(REASONING_FORMATS[0], Opening.FREE, parser)

    async def wait_start(self) -> None:
        """The fake has started."""

    async def __aenter__(self) -> FakeActiveRequest:
        return self

    async def __aexit__(self, *_: object) -> None:
        """The fake is closed."""

    async def batches(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        for step in self.steps:
            self.num_done += sum(len(delta.token_ids) for delta in step)
            yield [(0, delta) for delta in step]
        if self.error is not None:
            raise self.error


def chat_of(ask: InferenceRequest) -> ChatRequest:
    (prompt,) = ask.prompts
    assert isinstance(prompt, ChatRequest)
    return prompt


def whole_of(encoder: AnswerEncoder, *completions: Completion) -> Any:
    """The whole answer with these samples, as JSON."""
    encoder.samples.clear()
    encoder.outputs = [GenerationOutput(PackedPrompt.of((1, 2)), completions, encoder.active.usage, None)]
    return msgspec.to_builtins(encoder.whole())


async def events_of(active: ActiveRequest, encoder: AnswerEncoder) -> AsyncIterator[bytes]:
    """Yield what is written, one item for each write. Raises the request's error."""
    if encoder.waits_for_start:
        await active.wait_start()
    if data := encoder.begin():
        yield data
    async for batch in active.batches():
        if data := encoder.feed(batch):
            yield data
    yield encoder.finish()
