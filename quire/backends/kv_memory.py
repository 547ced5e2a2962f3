"""The size of the KV pool: the configured size, or a share of the free memory."""

from __future__ import annotations

from dataclasses import dataclass

from quire.backends.base import BackendOptions
from quire.backends.machine import available_bytes
from quire.errors import InvalidRequest
from quire.sizes import compared_sizes, memory_size

CPU_SHARE = 0.4  # of the memory available once the weights are loaded
CPU_CAP = 4 << 30  # upper bound of the default on a CPU: other programs need memory too
MIN_POOL_TOKENS = 512  # a default pool that holds fewer tokens is refused: it is too small to be useful
# Upper bound of the default number of blocks. Only toy models have blocks so small that memory would hold more. Each
# block costs the scheduler about 140 bytes and one microsecond of start-up, whatever its size.
DEFAULT_MAX_BLOCKS = 1 << 18


def cpu_budget() -> tuple[int, int]:
    """Return the bytes that are available on a CPU, and those of the default pool."""
    free = available_bytes()
    return free, min(int(free * CPU_SHARE), CPU_CAP)


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """The size of a single pool. `quire.backends.kv_division` divides memory among several."""

    options: BackendOptions
    block_bytes: int  # one block in all layers
    max_model_len: int

    def num_blocks_on_cpu(self) -> int:
        return self.num_blocks(*cpu_budget())

    def num_blocks(self, free: int, budget: int) -> int:
        """Return the number of blocks in the pool, the null block included.

        `free` bytes are available; the default uses `budget` of them. `num_blocks` and `kv_memory` are used exactly as
        given, or refused if they do not fit. The pool may be larger than the running requests can use: the rest is
        prefix cache.
        """
        options = self.options
        if options.num_blocks is not None:
            if (num_bytes := options.num_blocks * self.block_bytes) > free:
                needed, available = compared_sizes(num_bytes, max(free, 0))
                raise InvalidRequest(
                    f"num_blocks = {options.num_blocks} takes {needed} of KV cache, more than the {available} that are"
                    " free"
                )
            return options.num_blocks
        if options.kv_memory is not None:
            if options.kv_memory > free:
                needed, available = compared_sizes(options.kv_memory, max(free, 0))
                raise InvalidRequest(f"kv_memory = {needed} is more than the {available} that are free")
            return self._blocks_in(options.kv_memory)
        return self._default(free, max(budget, 0))

    def _default(self, free: int, budget: int) -> int:
        num_blocks = min(budget // self.block_bytes, DEFAULT_MAX_BLOCKS)
        num_tokens = max(num_blocks - 1, 0) * self.options.block_size
        if num_tokens < min(MIN_POOL_TOKENS, self.max_model_len):
            raise InvalidRequest(
                f"kv_memory: {memory_size(max(free, 0))} are free, and the default share of {memory_size(budget)} holds"
                f" a context of {num_tokens} tokens, which is too short. Free some memory, or set kv_memory"
            )
        return num_blocks

    def _blocks_in(self, budget: int) -> int:
        num_blocks = budget // self.block_bytes
        if num_blocks < 2:
            given, needed = compared_sizes(budget, 2 * self.block_bytes)
            raise InvalidRequest(
                f"kv_memory = {given} is less than the {needed} of two blocks of {self.options.block_size} tokens each"
            )
        return num_blocks
