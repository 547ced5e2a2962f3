"""Where a request continues after a prefix hit, in a model with windows or recurrent states.

Cached keys and values of full attention are not enough for such a model. To continue after token t it also needs the
keys and values of its window layers for the last `window` tokens before t, and the recurrent state after exactly t
tokens. A continuation is the largest t for which all of them exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from quire.core.block import TOKEN_BYTES, KVCacheBlock
from quire.core.chain import TokenChain
from quire.core.state_memory import StateMemory
from quire.core.state_pool import StateSlot
from quire.core.window_pool import WindowBlock

WindowAt = Callable[[int], WindowBlock | None]  # block number -> the window block with its tokens


class Continuation(NamedTuple):
    """Memory to continue from. Valid only until the next change of pools or tree: do not store it."""

    start: int  # number of tokens that are not computed again
    state: StateSlot | None = None  # after these tokens
    windows: tuple[WindowBlock, ...] = ()  # full blocks before `start` that a window reaches, to be shared
    window_tail: WindowBlock | None = None  # holds the tokens from the last block boundary to `start`, to be copied
    is_window_adoptable: bool = False  # the window tail is continued in place instead of copied


FROM_ZERO = Continuation(0)


class Continuations:
    """Finds continuations within a cached prefix."""

    def __init__(self, block_size: int, window: int, states: StateMemory | None) -> None:
        self._block_size = block_size
        self._window = window  # 0: no layer has one
        self._states = states

    def first_block(self, position: int) -> int:
        """Number of the first block that a token at `position` sees through the window."""
        return max(position - self._window + 1, 0) // self._block_size

    def find(
        self, chain: TokenChain, blocks: Sequence[KVCacheBlock], num_kv_tokens: int, window_at: WindowAt
    ) -> Continuation:
        """The best continuation of a prefix whose full-attention KV exists for `num_kv_tokens`.

        `blocks`: its full blocks.
        """
        if self._states is None:
            candidates: Iterator[tuple[int, StateSlot | None]] = self._boundaries(num_kv_tokens)
        else:
            candidates = self._snapshots(chain, blocks, num_kv_tokens)
        blocked = num_kv_tokens  # no position after this has all of its window blocks
        for position, state in candidates:
            if position > blocked:
                continue
            if not self._window:
                return Continuation(position, state)
            missing = self._missing(position, window_at)
            if missing is None:
                return self._with_windows(position, state, window_at)
            blocked = missing * self._block_size
        return FROM_ZERO

    def _boundaries(self, num_kv_tokens: int) -> Iterator[tuple[int, StateSlot | None]]:
        """Positions to continue from without a state: the end, then every block boundary before it."""
        if num_kv_tokens % self._block_size:
            yield num_kv_tokens, None
        for position in range(num_kv_tokens // self._block_size * self._block_size, 0, -self._block_size):
            yield position, None

    def _snapshots(
        self, chain: TokenChain, blocks: Sequence[KVCacheBlock], num_kv_tokens: int
    ) -> Iterator[tuple[int, StateSlot | None]]:
        """Positions with a snapshot, last first."""
        assert self._states is not None
        size = self._block_size
        num_full, num_tail = divmod(num_kv_tokens, size)
        for number in range(num_full, -1, -1):
            key = chain.parent_key(number)
            found = self._states.pool.at(key)
            # The blocks of a running parent may not be in the tree, and other content may have the same key.
            if found is None or (number and blocks[number - 1].key != key):
                continue
            longest = num_tail if number == num_full else size - 1
            run = chain.run(number * size, number * size + longest)
            for length in range(longest, -1, -1):
                state = found.get(run[: length * TOKEN_BYTES])
                if state is not None and self._states.may_hold(state):
                    yield number * size + length, state

    def _missing(self, position: int, window_at: WindowAt) -> int | None:
        """The last block that a token at `position` sees and whose window block is not cached."""
        last = (position - 1) // self._block_size
        return next((n for n in range(last, self.first_block(position) - 1, -1) if window_at(n) is None), None)

    def _with_windows(self, position: int, state: StateSlot | None, window_at: WindowAt) -> Continuation:
        num_full, num_tail = divmod(position, self._block_size)
        blocks = [window_at(number) for number in range(self.first_block(position), num_full)]
        tail = window_at(num_full) if num_tail else None
        return Continuation(position, state, tuple(block for block in blocks if block is not None), tail)
