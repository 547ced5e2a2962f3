"""The size of the KV pool: what the user asked for, or a share of the free memory."""

from __future__ import annotations

from dataclasses import dataclass

from quire.backends.base import BackendOptions
from quire.backends.machine import available_bytes
from quire.errors import InvalidRequest

CPU_SHARE = 0.4  # of the memory available once the weights are loaded
CPU_CAP = 4 << 30  # the default on a CPU takes no more: other programs need memory too
MIN_POOL_TOKENS = 512  # a default pool that holds less is refused: it could serve nobody
# The default makes no more blocks than this. Only toy models have blocks so small that memory would hold more; a block
# costs the scheduler about 140 bytes and a microsecond of start-up, whatever its size.
DEFAULT_MAX_BLOCKS = 1 << 18


@dataclass(frozen=True, slots=True)
class PoolRequest:
    options: BackendOptions
    block_bytes: int  # of one block over all layers
    max_model_len: int

    def num_blocks_on_cpu(self) -> int:
        free = available_bytes()
        return self.num_blocks(free, min(int(free * CPU_SHARE), CPU_CAP))

    def num_blocks(self, free: int, budget: int) -> int:
        """Blocks in the pool, the null block included. `free` bytes can be taken; the default takes `budget` of them.

        `num_blocks` and `kv_memory` are honoured exactly, or refused if they do not fit. There is no limit by how much
        the running requests can use: the rest of the pool is prefix cache.
        """
        options = self.options
        if options.num_blocks is not None:
            if options.num_blocks * self.block_bytes > free:
                raise InvalidRequest(
                    f"num_blocks = {options.num_blocks} take {options.num_blocks * self.block_bytes:,} bytes of KV"
                    f" cache; {free:,} are free"
                )
            return options.num_blocks
        if options.kv_memory is not None:
            if options.kv_memory > free:
                raise InvalidRequest(f"kv_memory = {options.kv_memory:,} is more than the {free:,} bytes that are free")
            return self._blocks_in(options.kv_memory)
        return self._default(free, max(budget, 0))

    def _default(self, free: int, budget: int) -> int:
        num_blocks = min(budget // self.block_bytes, DEFAULT_MAX_BLOCKS)
        num_tokens = max(num_blocks - 1, 0) * self.options.block_size
        if num_tokens < min(MIN_POOL_TOKENS, self.max_model_len):
            raise InvalidRequest(
                f"kv_memory: {free:,} bytes are free, and the {budget:,} of them that would be taken hold a"
                f" context of {num_tokens} tokens. Free some memory, or say how much to take"
            )
        return num_blocks

    def _blocks_in(self, budget: int) -> int:
        num_blocks = budget // self.block_bytes
        if num_blocks < 2:
            raise InvalidRequest(
                f"kv_memory = {budget:,} is less than the {2 * self.block_bytes:,} that two blocks of"
                f" {self.options.block_size} tokens take"
            )
        return num_blocks
