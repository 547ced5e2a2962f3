"""What every backend is to the engine. Backends differ below this line and nowhere above it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from quire.core.block import BLOCK_SIZE
from quire.core.step import StepPlan, StepResult

DEFAULT_MAX_SEQS = 64  # on a CPU
PRECISIONS = ("fast", "balanced", "exact")

TokenMasks = Mapping[int, bytes]  # batch index -> one bit per token of the vocabulary, lowest bit first; 1 = allowed
Progress = Callable[[int, int], None]  # bytes of the weights loaded, bytes in all


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """What a user may ask of any backend. None and "auto": the backend decides by the machine it finds."""

    device: str = "auto"
    dtype: str = "auto"
    precision: str = "balanced"  # of backends that compute in few bits: fast, balanced or exact
    threads: int | None = None
    block_size: int = BLOCK_SIZE
    num_blocks: int | None = None
    kv_memory: int | None = None  # bytes for the KV pool, where num_blocks is not given
    max_num_seqs: int | None = None
    max_model_len: int | None = None  # None: what the model was made for
    max_num_batched_tokens: int | None = (
        None  # most tokens a step will bring, for backends that set memory aside for it
    )
    max_chunk_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a runner found it can hold."""

    num_blocks: int  # the null block included
    block_size: int
    max_num_seqs: int
    max_model_len: int
    vocab_size: int
    has_overlap: bool = True  # the device runs beside the host, so that keeping one step in flight pays
    has_costly_rows: bool = False  # every row of a batch takes time: lower tiers may be left out of a step
    max_num_batched_tokens: int = 2048  # what a step should hold at most, where nobody said otherwise
    max_chunk_tokens: int = 512  # and of one prompt


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    """What runs where, for people."""

    backend: str  # with its version
    device: str
    dtype: str
    num_threads: int  # 1 where the device has none of the host's
    weight_bytes: int = 0  # memory of the weights as they are held; 0: the backend cannot say
    kv_bytes: int = 0  # memory of the KV pool


class Runner(Protocol):
    """Executes plans strictly in order, so a block that is free may be reused by the next plan at once.

    The last sample of each batch index is the one thing a runner may know that a plan does not say.
    """

    def capacity(self) -> Capacity: ...

    def facts(self) -> RunnerFacts: ...

    def use_threads(self, num_threads: int) -> None:
        """Compute on so many threads of the host from the next step on, where it computes there at all."""

    def prepare(self) -> bool:
        """Make something ready that later steps will gain by, in a moment in which nobody waits: well under a second.

        False: nothing was left to do. A runner serves as well without, only slower.
        """

    def forward(self, plan: StepPlan) -> None:
        """Enqueue a step: its copies, then its forward pass. Does not wait for the device."""

    def sample(self, masks: TokenMasks | None) -> None:
        """Enqueue sampling for the step just enqueued. Does not wait for the device."""

    def collect(self) -> StepResult:
        """Wait for the oldest step that has not been collected."""

    def abandon(self) -> None:
        """Forget a step that raised in `forward` or `sample`, so that the next plan can run."""

    def close(self) -> None: ...
