"""Divides memory among the pools of a model: blocks, window blocks and recurrent states.

The memory is the configured size, or a share of what is free.

The states of running requests come first: one for each request, or two on a device with overlap. Half of the rest is
for cached states, but at most one per block and at least MIN_SNAPSHOTS. What is left is for blocks. For every block of
the layers that keep their whole context there are `(window + chunk) / TYPICAL_CONTEXT` window blocks, at most one.

`kv_memory` is the sum of all three. `num_blocks` is the number of blocks for whole contexts; window blocks and states
are added to them.

`KVSpec` is what each layer stores: keys and values per token, or one state per request. The sizes of the pools follow
from it.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace

from quire.backends.base import BackendOptions
from quire.backends.machine import available_bytes
from quire.errors import InvalidRequest
from quire.sizes import compared_sizes, memory_size
from quire.weights.spec import AttentionSpec, DeltaNetSpec, Mixer, ModelSpec, ShortConvSpec

SCALE_BYTES = 2  # of a key or value of one head in FP8
STATE_BYTES = 4  # of an element of a recurrent state, which is fp32 whatever the type of the model


@dataclass(frozen=True, slots=True)
class LayerKV:
    num_kv_heads: int
    head_size: int
    window: int = 0  # keys older than this are not read; 0: all are
    num_groups: int = 1  # query heads per KV head, by which attention is divided into tiles
    shared_with: int | None = None  # the layer stores nothing and reads the keys and values of this one

    @property
    def num_vectors(self) -> int:
        """Keys and values per token."""
        return 0 if self.shared_with is not None else 2 * self.num_kv_heads


@dataclass(frozen=True, slots=True)
class LayerState:
    """State of a layer after some token: the last inputs of its convolution, and a matrix per head."""

    num_rows: int  # inputs of the convolution, in the type of the model
    num_channels: int
    num_heads: int = 0  # matrices of [key_size, value_size] in fp32; 0: the layer has none
    key_size: int = 0
    value_size: int = 0

    def num_bytes(self, item_bytes: int) -> int:
        matrices = self.num_heads * self.key_size * self.value_size
        return self.num_rows * self.num_channels * item_bytes + matrices * STATE_BYTES


@dataclass(frozen=True, slots=True)
class KVSpec:
    layers: tuple[LayerKV | LayerState, ...]
    # Keys and values are stored in FP8, each with a scale, whatever the type of the model. States are not.
    is_fp8: bool = field(default=False, repr=False)  # caches on disk are found by the `repr` of the layers

    @classmethod
    def of(cls, spec: ModelSpec, *, is_fp8: bool = False) -> KVSpec:
        return cls(tuple(_layer(layer.mixer, spec.hidden_size) for layer in spec.layers), is_fp8)

    @property
    def kv_layers(self) -> tuple[LayerKV, ...]:
        """The layers that attend."""
        return tuple(layer for layer in self.layers if isinstance(layer, LayerKV))

    @property
    def windows(self) -> tuple[int, ...]:
        return tuple(layer.window if isinstance(layer, LayerKV) else 0 for layer in self.layers)

    @property
    def window(self) -> int:
        """The largest window; 0: no layer has one."""
        return max(self.windows)

    @property
    def has_states(self) -> bool:
        return any(isinstance(layer, LayerState) for layer in self.layers)

    def within(self, max_model_len: int) -> KVSpec:
        """Return the spec without windows that no context of this length exceeds."""
        layers = tuple(
            replace(layer, window=0) if isinstance(layer, LayerKV) and layer.window >= max_model_len else layer
            for layer in self.layers
        )
        return replace(self, layers=layers)

    def block_bytes(self, block_size: int, item_bytes: int) -> int:
        """Return the bytes of one block in all layers."""
        return self.full_block_bytes(block_size, item_bytes) + self.window_block_bytes(block_size, item_bytes)

    def full_block_bytes(self, block_size: int, item_bytes: int) -> int:
        """Return the bytes of one block in the layers that keep their whole context."""
        return self._block_bytes(block_size, item_bytes, has_window=False)

    def window_block_bytes(self, block_size: int, item_bytes: int) -> int:
        """Return the bytes of one block in the layers with a window."""
        return self._block_bytes(block_size, item_bytes, has_window=True)

    def context_bytes(self, num_tokens: int, item_bytes: int) -> int:
        """Return the bytes that a request with a context of this length holds: keys, values and its state."""
        full, window = self.full_block_bytes(1, item_bytes), self.window_block_bytes(1, item_bytes)
        return num_tokens * full + min(num_tokens, self.window) * window + self.state_bytes(item_bytes)

    def state_bytes(self, item_bytes: int) -> int:
        """Return the bytes of the state of one request in all layers."""
        return sum(layer.num_bytes(item_bytes) for layer in self.layers if isinstance(layer, LayerState))

    def _block_bytes(self, block_size: int, item_bytes: int, *, has_window: bool) -> int:
        chosen = [layer for layer in self.layers if isinstance(layer, LayerKV) and bool(layer.window) == has_window]
        num_elements = sum(layer.num_vectors * layer.head_size for layer in chosen)
        if self.is_fp8:
            return (num_elements + SCALE_BYTES * sum(layer.num_vectors for layer in chosen)) * block_size
        return num_elements * block_size * item_bytes


def _layer(mixer: Mixer, hidden_size: int) -> LayerKV | LayerState:
    if isinstance(mixer, AttentionSpec):
        num_groups = mixer.num_heads // mixer.num_kv_heads
        return LayerKV(mixer.num_kv_heads, mixer.head_size, mixer.window, num_groups, mixer.shared_with)
    if isinstance(mixer, DeltaNetSpec):
        sizes = mixer.num_value_heads, mixer.key_head_size, mixer.value_head_size
        return LayerState(mixer.num_taps - 1, mixer.num_channels, *sizes)
    assert isinstance(mixer, ShortConvSpec)
    return LayerState(mixer.num_taps - 1, hidden_size)


CPU_SHARE = 0.4  # of the memory available once the weights are loaded
CPU_CAP = 4 << 30  # upper bound of the default on a CPU: other programs need memory too
MIN_POOL_TOKENS = 512  # a default pool that holds fewer tokens is refused: it is too small to be useful
# Upper bound of the default number of blocks. Only toy models have blocks so small that memory would hold more. Each
# block costs the scheduler about 140 bytes and one microsecond of start-up, whatever its size.
DEFAULT_MAX_BLOCKS = 1 << 18

HAS_WINDOWS = True  # layers with a window have a pool of their own; tests set False to compare with whole contexts
TYPICAL_CONTEXT = 8192  # tokens: of such a context, only the window and the chunk that is computed need window blocks
WINDOW_CHUNK = 1024  # default limit of a chunk in a model with windows: its blocks are held until it is computed
MIN_SNAPSHOTS = 8  # cached states
MIN_BLOCKS = 2  # with the null block

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVCosts:
    """Bytes of each kind of memory of a model."""

    full_block: int  # one block in the layers that keep their whole context
    window_block: int = 0  # one block in the layers with a window
    state: int = 0  # the state of one request
    window: int = 0  # the largest one; 0: no layer has window blocks

    @property
    def is_mixed(self) -> bool:
        """Whether there are other pieces than blocks of whole contexts."""
        return bool(self.window or self.state)

    @classmethod
    def of(cls, kv_spec: KVSpec, block_size: int, item_bytes: int, *, has_windows: bool = True) -> KVCosts:
        """Return the costs of a spec without windows longer than any context (`KVSpec.within`).

        `has_windows`: the backend has window blocks for this model.
        """
        state = kv_spec.state_bytes(item_bytes)
        if not (HAS_WINDOWS and has_windows and kv_spec.window):
            return cls(kv_spec.block_bytes(block_size, item_bytes), state=state)
        full_block = kv_spec.full_block_bytes(block_size, item_bytes)
        return cls(full_block, kv_spec.window_block_bytes(block_size, item_bytes), state, kv_spec.window)


@dataclass(frozen=True, slots=True)
class KVMemory:
    """The sizes of the pools, and the limits that depend on them."""

    num_blocks: int  # the null block included
    max_num_seqs: int  # lower than the default if the states of more requests do not fit
    max_chunk_tokens: int
    num_window_blocks: int = 0  # the null block included; 0: layers with a window keep their whole context
    num_states: int = 0  # the empty state included; 0: the model has none

    def num_bytes(self, costs: KVCosts) -> int:
        blocks = self.num_blocks * costs.full_block + self.num_window_blocks * costs.window_block
        return blocks + self.num_states * costs.state


@dataclass(frozen=True, slots=True)
class MemoryRequest:
    options: BackendOptions
    costs: KVCosts
    max_model_len: int
    max_num_seqs: int
    max_chunk_tokens: int  # the backend's default
    has_overlap: bool

    def divide_on_cpu(self) -> KVMemory:
        free = available_bytes()
        return self.divide(free, min(int(free * CPU_SHARE), CPU_CAP))

    def divide(self, free: int, budget: int) -> KVMemory:
        """Return the sizes. `free` bytes are available; the default uses `budget` of them.

        `num_blocks` and `kv_memory` are used exactly as given, or refused if they do not fit. The pool may be larger
        than the running requests can use: the rest is prefix cache.
        """
        options, costs = self.options, self.costs
        if options.num_blocks is not None:
            memory = self._add_to(options.num_blocks)
            if (num_bytes := memory.num_bytes(costs)) > free:
                needed, available = compared_sizes(num_bytes, max(free, 0))
                others = f", with {memory.num_window_blocks} window blocks and {memory.num_states} states"
                raise InvalidRequest(
                    f"num_blocks = {options.num_blocks} takes {needed} of KV cache{others if costs.is_mixed else ''},"
                    f" more than the {available} that are free"
                )
        elif options.kv_memory is not None:
            if options.kv_memory > free:
                needed, available = compared_sizes(options.kv_memory, max(free, 0))
                raise InvalidRequest(f"kv_memory = {needed} is more than the {available} that are free")
            memory = self._fit(options.kv_memory, free)
        else:
            memory = self._fit(max(budget, 0), free)
        if costs.is_mixed:
            log.info(
                "KV cache of %s: %d blocks, %d window blocks, %d states",
                memory_size(memory.num_bytes(costs)),
                memory.num_blocks,
                memory.num_window_blocks,
                memory.num_states,
            )
        return memory

    @property
    def chunk(self) -> int:
        """The largest chunk of a prompt."""
        if self.options.max_chunk_tokens is not None:
            return self.options.max_chunk_tokens
        return min(self.max_chunk_tokens, WINDOW_CHUNK) if self.costs.window else self.max_chunk_tokens

    # States

    @property
    def _states_per_seq(self) -> int:
        return 2 if self.has_overlap else 1

    def _num_live(self, max_num_seqs: int) -> int:
        """Return the number of states of running requests, with the empty state."""
        return 1 + self._states_per_seq * max_num_seqs

    def _fitting_seqs(self, budget: int) -> int:
        """Return how many requests have room for their states.

        A default is lowered so that they take at most half of the memory. A configured number is not: it is refused
        if it leaves too little for anything else.
        """
        if not self.costs.state:
            return self.max_num_seqs
        state = self.costs.state
        if self.options.max_num_seqs is not None:
            least = MIN_BLOCKS * self.costs.full_block + self._min_windows * self.costs.window_block
            fitting = ((budget - least) // state - MIN_SNAPSHOTS - 1) // self._states_per_seq
        else:
            fitting = (budget // 2 // state - 1) // self._states_per_seq
        if fitting >= self.max_num_seqs:
            return self.max_num_seqs
        if fitting < 1 or self.options.max_num_seqs is not None:
            needed = memory_size(self._num_live(self.max_num_seqs) * state)
            raise InvalidRequest(
                f"max_num_seqs = {self.max_num_seqs} takes {needed} for the recurrent states of running requests, and"
                f" the KV cache of {memory_size(budget)} has room for those of {max(fitting, 0)}. Lower max_num_seqs,"
                " or raise kv_memory"
            )
        log.warning(
            "max_num_seqs is %d instead of %d: the recurrent states of more requests would take over half of the"
            " KV cache of %s",
            fitting,
            self.max_num_seqs,
            memory_size(budget),
        )
        return fitting

    def _num_cached(self, budget: int) -> int:
        """Return the number of cached states, given what the running requests leave."""
        half = max(budget // 2 // self.costs.state, MIN_SNAPSHOTS)
        num_blocks = self._num_blocks(budget - half * self.costs.state)
        return max(min(half, num_blocks), MIN_SNAPSHOTS)

    # Windows

    @property
    def _min_windows(self) -> int:
        """The window blocks that the scheduler requires for one request with the largest chunk."""
        if not self.costs.window:
            return 0
        return (self.costs.window - 1 + self.chunk) // self.options.block_size + 4

    @property
    def _window_share(self) -> float:
        """The number of window blocks per other block."""
        if not self.costs.window:
            return 0.0
        return min((self.costs.window + self.chunk) / min(TYPICAL_CONTEXT, self.max_model_len), 1.0)

    def _num_windows(self, num_blocks: int) -> int:
        return max(math.ceil(self._window_share * num_blocks), self._min_windows)

    # All kinds

    def _add_to(self, num_blocks: int) -> KVMemory:
        """Add window blocks and states to a configured number of blocks."""
        memory = KVMemory(num_blocks, self.max_num_seqs, self.chunk, self._num_windows(num_blocks))
        if not self.costs.state:
            return memory
        num_cached = max(min(memory.num_bytes(self.costs) // self.costs.state, num_blocks), MIN_SNAPSHOTS)
        return replace(memory, num_states=self._num_live(self.max_num_seqs) + num_cached)

    def _fit(self, budget: int, free: int) -> KVMemory:
        """Divide a number of bytes."""
        memory = KVMemory(0, self._fitting_seqs(budget), self.chunk)
        if self.costs.state:
            num_live = self._num_live(memory.max_num_seqs)
            num_cached = self._num_cached(budget - num_live * self.costs.state)
            memory = replace(memory, num_states=num_live + num_cached)
        num_blocks = self._num_blocks(budget - memory.num_bytes(self.costs))
        if self.options.kv_memory is None:
            num_blocks = min(num_blocks, DEFAULT_MAX_BLOCKS)
        memory = replace(memory, num_blocks=num_blocks, num_window_blocks=self._num_windows(num_blocks))
        self._refuse_small(memory, budget, free)
        return memory

    def _num_blocks(self, budget: int) -> int:
        """Return how many blocks fit, with their window blocks."""
        costs, share = self.costs, self._window_share
        num_blocks = int(max(budget, 0) / (costs.full_block + share * costs.window_block))
        if self._num_windows(num_blocks) <= self._min_windows:
            left = budget - self._min_windows * costs.window_block
            if costs.full_block:
                return max(left // costs.full_block, 0)
            return int(self._min_windows / share) if left >= 0 else 0  # blocks in no layer take no memory
        while num_blocks * costs.full_block + self._num_windows(num_blocks) * costs.window_block > budget:
            num_blocks -= 1  # window blocks are rounded up
        return num_blocks

    def _refuse_small(self, memory: KVMemory, budget: int, free: int) -> None:
        options, is_mixed = self.options, self.costs.is_mixed
        if options.kv_memory is not None:
            if memory.num_blocks < MIN_BLOCKS:
                least = replace(memory, num_blocks=MIN_BLOCKS, num_window_blocks=self._min_windows)
                given, needed = compared_sizes(options.kv_memory, least.num_bytes(self.costs))
                others = (
                    f", {least.num_window_blocks} window blocks and {least.num_states} states. Raise kv_memory, or"
                    " lower max_num_seqs or max_chunk_tokens"
                )
                raise InvalidRequest(
                    f"kv_memory = {given} is less than the {needed} of two blocks of {options.block_size} tokens"
                    f" each{others if is_mixed else ''}"
                )
            return
        num_tokens = max(memory.num_blocks - 1, 0) * options.block_size
        if num_tokens < min(MIN_POOL_TOKENS, self.max_model_len):
            raise InvalidRequest(
                f"kv_memory: {'' if is_mixed else f'{memory_size(max(free, 0))} are free, and '}the default share of"
                f" {memory_size(budget)} holds {f'{memory.num_states} states and ' if is_mixed else ''}a context of"
                f" {num_tokens} tokens, which is too short. Free some memory, or set kv_memory"
                f"{' or a lower max_num_seqs' if is_mixed else ''}"
            )
