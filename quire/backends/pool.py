"""How large a KV pool to make: as it was asked for, or as memory allows, but no more than could ever be used."""

from __future__ import annotations

from dataclasses import dataclass

from quire.backends.base import BackendOptions
from quire.backends.machine import available_bytes
from quire.errors import InvalidRequest

CPU_SHARE = 0.4  # of the memory available once the weights are loaded
CPU_CAP = 4 << 30  # a laptop has other things to do
MIN_POOL_TOKENS = 512  # a pool chosen by quire that holds less is no use to anybody


@dataclass(frozen=True, slots=True)
class PoolRequest:
    options: BackendOptions
    block_bytes: int  # of one block over all layers
    max_seqs: int
    max_context: int

    def num_blocks_on_cpu(self) -> int:
        free = available_bytes()
        return self.num_blocks(free, min(int(free * CPU_SHARE), CPU_CAP))

    def num_blocks(self, free: int, budget: int) -> int:
        """`free` bytes there are, `budget` of them to take where nobody said how much. The null block is included."""
        options, block_size = self.options, self.options.block_size
        if options.num_blocks is not None:
            if options.num_blocks * self.block_bytes > free:
                raise InvalidRequest(
                    f"num_blocks = {options.num_blocks} take {options.num_blocks * self.block_bytes:,} bytes of KV"
                    f" cache; {free:,} are free"
                )
            return options.num_blocks
        if options.kv_bytes is not None:
            if options.kv_bytes > free:
                raise InvalidRequest(f"kv_bytes = {options.kv_bytes:,} is more than the {free:,} bytes that are free")
            num_blocks = self._blocks_in(options.kv_bytes)
        else:
            num_blocks = max(budget, 0) // self.block_bytes
            num_tokens = (num_blocks - 1) * block_size
            if num_tokens < min(MIN_POOL_TOKENS, self.max_context):
                raise InvalidRequest(
                    f"kv_bytes: {free:,} bytes are free, and the {max(budget, 0):,} of them that would be taken hold a"
                    f" context of {max(num_tokens, 0)} tokens. Free some memory, or say how much to take"
                )
        return min(num_blocks, self.max_seqs * -(-self.max_context // block_size) + 1)  # everyone at full length

    def _blocks_in(self, budget: int) -> int:
        num_blocks = budget // self.block_bytes
        if num_blocks < 2:
            raise InvalidRequest(
                f"kv_bytes = {budget:,} is less than the {2 * self.block_bytes:,} that two blocks of"
                f" {self.options.block_size} tokens take"
            )
        return num_blocks
