"""Data exchanged between scheduler and runner: plans and results of a step, as plain numbers.

Named tuples instead of frozen dataclasses: also immutable, and created four times faster (a step creates one slice per
request).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from quire.core.values import FinishReason, Level, SamplingParams


class StateSnapshot(NamedTuple):
    """A recurrent state to store within a slice."""

    position: int  # the state covers the tokens [0, position)
    slot: int


class SeqSlice(NamedTuple):
    """The tokens of one request in one forward pass.

    Layers with full attention use `block_table`. Layers with a window use `window_table` where the runner has window
    blocks. Layers with a recurrent state read it from slot `state_source` and write it to slot `state_target`, which
    may be the same. Slot 0 is the empty state: it is read at the start of a context and never written.
    """

    request_id: int
    epoch: int  # a result for an old epoch is dropped
    batch_index: int  # row in [0, max_num_seqs), held from admission to release
    tokens: Sequence[int]  # to compute in this step; if empty, the runner uses its last sample of this row
    start: int  # KV of [0, start) is already in the blocks
    length: int  # number of tokens that this slice computes, at least 1
    block_table: Sequence[int]  # append-only, by reference; covers at least [0, start + length)
    history: Sequence[int]  # all known tokens, by reference: penalties also need tokens of a prefix hit
    wants_token: bool  # the slice reaches the last token, so the runner samples after it
    sampling: SamplingParams
    num_prompt_tokens: int  # prompt part of the history: some penalties count only output tokens
    # Positions before this have keys and values in shared blocks of `block_table` already: they are read, not written.
    # Only positions of [start, kv_start) are affected. Window blocks are always written.
    kv_start: int = 0
    window_table: Sequence[int] = ()  # by block number, by reference; blocks behind the window are 0
    state_source: int = 0  # state after [0, start)
    state_target: int = 0  # state after the last token of the slice; 0: the model has no states
    snapshots: tuple[StateSnapshot, ...] = ()  # states to store in addition, by position within (start, end)
    # The last so many tokens are drafts: guesses of the tokens that the runner will sample. It samples after the token
    # before them and after each of them. See `accepted`.
    num_drafts: int = 0

    @property
    def num_sampled(self) -> int:
        """Positions at the end of the slice after which the runner samples."""
        return self.num_drafts + 1 if self.wants_token else 0

    @property
    def drafts(self) -> Sequence[int]:
        return self.tokens[self.length - self.num_drafts :] if self.num_drafts else ()


def accepted(samples: Sequence[int], drafts: Sequence[int]) -> tuple[int, ...]:
    """The samples of a slice that are valid: up to the first that differs from the draft in its place.

    A sample depends on the tokens before it. It is what the request would have got without drafts if all drafts before
    it are equal to the samples in their places.
    """
    count = 0
    while count < len(drafts) and samples[count] == drafts[count]:
        count += 1
    return tuple(samples[: count + 1])


class BlockCopy(NamedTuple):
    source: int
    destination: int


class MemoryKind(IntEnum):
    """The pools of a runner."""

    BLOCK = 0  # a KV block
    WINDOW = 1  # a window block
    STATE = 2  # a recurrent state

    __hash__ = int.__hash__


class MemoryRef(NamedTuple):
    """A place in the runner's memory: a block, a window block or a state slot."""

    kind: MemoryKind
    index: int  # type: ignore[assignment]  # also the name of a method of tuples, which is not used


class Content(NamedTuple):
    """Names cached content by its tokens, in every level and every process with the same root secret."""

    kind: MemoryKind
    key: bytes  # digest of the parent key and the tokens
    parent_key: bytes  # chain key of the full block before it, or the root key
    tokens: bytes  # packed; a block's own tokens, or the tokens between that block and a state


class Save(NamedTuple):
    """Content to copy to lower levels."""

    content: Content
    source: MemoryRef | None  # in the runner's memory; None: from host memory to disk
    levels: tuple[Level, ...]


class Read(NamedTuple):
    """Content to read into a host buffer."""

    read_id: int
    content: Content
    level: Level


class Load(NamedTuple):
    """Content to copy from host memory to the runner's memory."""

    load_id: int
    content: Content
    level: Level
    target: MemoryRef
    read_id: int = 0  # that brought the content to a buffer; 0: it is in the host level


# Saves, loads, drops, reads and dropped reads of a plan
Transfers = tuple[tuple[Save, ...], tuple[Load, ...], tuple[Content, ...], tuple[Read, ...], tuple[int, ...]]
NO_TRANSFERS: Transfers = ((), (), (), (), ())


class StepPlan(NamedTuple):
    """Everything a runner needs for one step.

    No block is both source and destination of copies.
    """

    slices: tuple[SeqSlice, ...]
    copies: tuple[BlockCopy, ...]  # to be made before the forward pass
    released: tuple[int, ...]  # batch indices released since the last plan
    window_copies: tuple[BlockCopy, ...] = ()  # the same as `copies`, among the window blocks
    saves: tuple[Save, ...] = ()  # to be read before the copies; steps may overwrite their sources
    loads: tuple[Load, ...] = ()  # to be started; no step uses their targets until they are reported as done
    drops: tuple[Content, ...] = ()  # to be dropped from host memory, before the saves
    reads: tuple[Read, ...] = ()  # to be started; they use no memory of the runner
    dropped_reads: tuple[int, ...] = ()  # whose buffers are not needed any more, once the reads have ended

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run. An empty plan is not committed; it may have saves and loads."""
        return not self.slices

    @property
    def num_tokens(self) -> int:
        return sum(piece.length for piece in self.slices)


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position: natural logarithms, before penalties and temperature."""

    token: int  # the token at this position
    logprob: float
    rank: int  # rank of that token, 0 for the most probable
    top: tuple[tuple[int, float], ...]  # the most probable tokens, best first


class PromptLogprobs(NamedTuple):
    """Log probabilities of the prompt tokens [start, start + len(entries)).

    The first token of a prompt has none, because no token precedes it.
    """

    start: int
    entries: tuple[TokenLogprobs, ...]


NOTHING: Mapping[int, Any] = MappingProxyType({})


class StepResult(NamedTuple):
    """Result of a step: the sampled tokens of each slice, empty where `wants_token` is false.

    A slice with drafts has one token more than drafts were accepted.
    """

    tokens: tuple[tuple[int, ...], ...]
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = NOTHING  # by slice index, where requested
    prompt_logprobs: Mapping[int, PromptLogprobs] = NOTHING  # by slice index
    failures: Mapping[int, str] = NOTHING  # slice index -> error; only the requests of these slices end
    is_poisoned: bool = False  # a failure may have left KV content that must not be shared


class TokenUpdate(NamedTuple):
    """New tokens of one request."""

    request_id: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, where requested
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None  # message, if the finish reason is ERROR
