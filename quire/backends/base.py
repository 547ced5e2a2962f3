"""The interface between the engine and its backends. Code above this module does not depend on the backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.core.cache import BLOCK_SIZE
from quire.core.step import MemoryKind, MemoryRef, StepPlan, StepResult
from quire.errors import InvalidRequest

DEFAULT_MAX_SEQS = 64  # on a CPU
DEFAULT_MAX_CHUNK = 512  # tokens per step from one prompt
PRECISIONS = ("fast", "balanced", "exact")
KV_CACHE_DTYPES = ("auto", "fp8")

# Batch index -> one bit per token of the vocabulary, lowest bit first; 1 = allowed. For a slice with drafts, the masks
# of its sampled positions one after the other.
TokenMasks = Mapping[int, bytes]
Progress = Callable[[int, int], None]  # called with the bytes of weights loaded, and the total


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """Settings that every backend accepts. None and "auto" mean that the backend chooses by the machine."""

    device: str = "auto"
    dtype: str = "auto"
    precision: str = "balanced"  # for backends with low-precision arithmetic: fast, balanced or exact
    quantize: int | None = None  # bits per weight, for weights that the file stores in 16 or 32 bits
    kv_cache_dtype: str = "auto"  # of keys and values: "auto" is the type that the backend computes in
    threads: int | None = None
    block_size: int = BLOCK_SIZE
    num_blocks: int | None = None
    kv_memory: int | None = None  # bytes of the KV pool, used if num_blocks is None
    max_num_seqs: int | None = None
    max_model_len: int | None = None  # None: the model's own limit
    max_num_batched_tokens: int | None = None  # largest step, for backends that reserve memory for it
    max_chunk_tokens: int | None = None

    def context_within(self, most: int) -> int:
        """Return the longest context, for a model that supports `most` tokens."""
        max_model_len = self.max_model_len or most
        if max_model_len > most:
            raise InvalidRequest(f"{max_model_len = } is more than the {most} tokens this model supports")
        return max_model_len


@dataclass(frozen=True, slots=True)
class Capacity:
    """The sizes a runner has room for."""

    num_blocks: int  # the null block included
    block_size: int
    max_num_seqs: int
    max_model_len: int
    vocab_size: int
    has_overlap: bool = True  # the device runs in parallel with the host, so one step should be kept in flight
    has_costly_rows: bool = False  # every row of a batch takes time: lower tiers may be left out of a step
    max_num_batched_tokens: int = 2048  # default limit of tokens per step
    max_chunk_tokens: int = DEFAULT_MAX_CHUNK  # default limit of tokens per step from one prompt
    window: int = 0  # largest window of the layers that have window blocks; 0: every layer keeps its whole context
    num_window_blocks: int = 0  # the null block included
    num_states: int = 0  # slots of recurrent states, the empty state included; 0: the model has none
    max_drafts: int = 0  # draft tokens that a slice may have; 0: the runner does not verify drafts
    max_mixed_tokens: int | None = None  # a server's default limit of prompt tokens beside 64 answers; None: no limit

    @property
    def num_live_states(self) -> int:
        """State slots of a running request: with a step in flight, the state before it must be kept too."""
        return 2 if self.has_overlap else 1


@dataclass(frozen=True, slots=True)
class RunnerFacts:
    """Description of a runner: for people, and for the key of everything that it computes."""

    backend: str  # with version
    device: str
    dtype: str
    num_threads: int  # 1 if the device does not use host threads
    kv_dtype: str = ""  # of keys and values; empty: the backend has one type for them
    weight_bytes: int = 0  # memory that the weights take; 0: unknown
    kv_bytes: int = 0  # memory of the KV pools, windows and states included
    window_bytes: int = 0  # the part of it that holds window blocks
    state_bytes: int = 0  # the part of it that holds recurrent states
    notice: str = ""  # what users must know about the answers; empty: nothing
    layout: str = ""  # see `BlockIO.layout`
    is_row_exact: bool = False  # a row has the same bits in any batch, so that drafts change no answer


@dataclass(frozen=True, slots=True)
class MemorySizes:
    """Bytes of one piece of each kind of memory, in all layers."""

    block: int
    window: int = 0  # 0: the model has no window blocks
    state: int = 0  # 0: the model has no recurrent states

    def of(self, kind: MemoryKind) -> int:
        return (self.block, self.window, self.state)[kind]


class PendingCopy(Protocol):
    """Copies that were started."""

    def is_done(self) -> bool: ...

    def join_steps(self) -> bool:
        """Let the steps that are enqueued from now on wait for these copies, on the device.

        Such steps may use the pieces at once, but the buffers are in use until `is_done`. Returns False if that is not
        possible, or not yet.
        """


class Copied:
    """Copies that were made before the call returned."""

    def is_done(self) -> bool:
        return True

    def join_steps(self) -> bool:
        return True


class BlockIO(Protocol):
    """Copies pieces of a runner's memory to and from host buffers. Called by the engine, between steps.

    A buffer has `sizes.of(kind)` bytes: the piece in all layers. `layout` describes these bytes and the arithmetic that
    computes them: two runners with the same weights and the same layout understand each other's buffers.
    """

    sizes: MemorySizes
    layout: str
    pieces_per_step: int  # that can be copied beside a step without delaying it much
    max_exports: int  # pieces that can be exported at once, before a large step
    is_host_memory: bool  # the runner's memory is host memory itself, so that a host tier below it makes no sense

    def allocate(self, num_bytes: int) -> memoryview:
        """Allocate host memory that is fast to copy from and to (pinned, for a GPU). May take seconds."""

    def export(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview]) -> PendingCopy:
        """Copy pieces into buffers, as the steps enqueued so far leave them. Later steps may overwrite the pieces."""

    def import_(self, pieces: Sequence[MemoryRef], buffers: Sequence[memoryview]) -> PendingCopy:
        """Copy buffers into pieces, after the steps enqueued so far.

        Until the copy is done, the caller changes no buffer and enqueues no step that uses the pieces.
        """


class Runner(Protocol):
    """Executes plans strictly in order, so the next plan may reuse a block as soon as it is free.

    The last sampled token of each batch index is the only state that a runner keeps and a plan does not contain.
    """

    def capacity(self) -> Capacity: ...

    def facts(self) -> RunnerFacts: ...

    def use_threads(self, num_threads: int) -> None:
        """Use this many host threads from the next step on. No effect on a runner that computes elsewhere."""

    def prepare(self) -> bool:
        """Prepare one thing that makes later steps faster, in well under a second. Called while no request waits.

        Returns False if nothing was left to prepare. A runner that was never prepared gives the same results, slower.
        """

    def block_io(self) -> BlockIO | None:
        """Access to the memory for tiers below it. None: this runner has no such access."""

    def forward(self, plan: StepPlan) -> None:
        """Enqueue a step: its block copies, then its forward pass. Does not wait for the device.

        Saves and loads of the plan are made by the engine, through `block_io`.
        """

    def sample(self, masks: TokenMasks | None) -> None:
        """Enqueue sampling for the step that was enqueued last. Does not wait for the device."""

    def collect(self) -> StepResult:
        """Wait for the oldest step that has not been collected, and return its result."""

    def abandon(self) -> None:
        """Discard a step that raised in `forward` or `sample`, so that the next plan can run."""

    def close(self) -> None: ...
