"""The context of a request: its tokens, their chain keys, and the memory that holds their keys, values and states.

A chain key is a hash that identifies a block by its tokens and all tokens before it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Self

from quire.core.cache.block import StateSlot
from quire.core.values import TOKEN_BYTES

KEY_BYTES = 16
BLOCKS_PER_BATCH = 64  # blocks packed at a time during a match; those after the first miss are not needed yet

Digest = Callable[[bytes, bytes], bytes]

_blank = blake2b(digest_size=KEY_BYTES)  # copying it is faster than creating a new one


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Pack tokens as big-endian 32-bit words, so that comparing bytes compares tokens in order."""
    words = array("I", tokens)
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """The tokens of `pack_tokens`."""
    words = array("I", packed)
    if sys.byteorder == "little":
        words.byteswap()
    return words.tolist()


def root_key(secret: bytes, salt: str) -> bytes:
    """Parent key of the first block for one salt.

    Without the secret, keys and collisions cannot be computed.
    """
    return blake2b(salt.encode(), digest_size=KEY_BYTES, key=secret, person=b"quire root").digest()


def hash_block_tokens(parent_key: bytes, tokens: bytes) -> bytes:
    """Chain key of a block. The same tokens after a different parent have a different key."""
    state = _blank.copy()
    state.update(parent_key)
    state.update(tokens)
    return state.digest()


class TokenChain:
    """Chain keys of one request's blocks. Each is computed once, on first use."""

    __slots__ = ("_block_size", "_blocks", "_digest", "_keys", "_leader", "_num_led", "_tokens", "root")

    def __init__(self, root: bytes, tokens: array[int], block_size: int, digest: Digest) -> None:
        self.root = root
        self._tokens = tokens  # by reference; it only grows at the end
        self._block_size = block_size
        self._digest = digest
        self._blocks: list[bytes] = []  # packed tokens of the first full blocks
        self._keys: list[bytes] = []  # chain keys of the first full blocks, of fewer or as many
        self._leader: TokenChain | None = None  # a chain with the same first blocks, whose keys are copied on use
        self._num_led = 0  # number of those blocks

    def key(self, index: int) -> bytes:
        """Chain key of full block `index`. All of its tokens must be known."""
        if len(self._keys) <= index:
            self._extend(index + 1)
        return self._keys[index]

    def parent_key(self, index: int) -> bytes:
        return self.key(index - 1) if index else self.root

    def block(self, index: int) -> bytes:
        """Packed tokens of full block `index`."""
        if len(self._blocks) <= index:
            self._pack(index + 1)
        return self._blocks[index]

    def entries(self, start: int, stop: int) -> Iterator[tuple[bytes, bytes]]:
        """Chain keys and packed tokens of the full blocks [start, stop)."""
        self.key(stop - 1)
        self.block(stop - 1)
        return zip(self._keys[start:stop], self._blocks[start:stop], strict=True)

    def blocks(self, count: int) -> Iterator[bytes]:
        """Packed tokens of the first `count` blocks, packed as the iterator advances."""
        return chain.from_iterable(self._batches(count))

    def _batches(self, count: int) -> Iterator[list[bytes]]:
        start = 0
        while start < count:
            end = min(count, start + BLOCKS_PER_BATCH)
            if len(self._blocks) < end:
                self._pack(end)
            yield self._blocks[start:end]
            start = end

    def learn(self, keys: Sequence[bytes]) -> None:
        """Take the keys of the first blocks from cached blocks with the same content: they are not computed."""
        self._keys += keys[len(self._keys) :]

    def num_common(self, other: TokenChain, known: int, most: int) -> int:
        """Number of leading full blocks that two chains share, at most `most`.

        The caller knows that they share the first `known` blocks. Compares tokens, which is much faster than hashing
        them, and hashes neither chain. Shared blocks are hashed once: this chain copies their keys from the other one.
        """
        size, ours, theirs = self._block_size, self._tokens, other._tokens
        while known < most:
            middle = (known + most + 1) // 2
            if ours[known * size : middle * size] == theirs[known * size : middle * size]:
                known = middle
            else:
                most = middle - 1
        if self.root == other.root:
            self._follow(other, known)
        return known

    def _follow(self, other: TokenChain, count: int) -> None:
        """Copy the keys of the first `count` blocks, on use, from a chain that shares them."""
        if other._leader is not None and count <= other._num_led:
            other = other._leader
        if other._leader is not None or other is self or count <= max(len(self._keys), self._num_led):
            return  # a leader never has a leader itself, so there are no cycles
        self._leader, self._num_led = other, count

    def run(self, start: int, stop: int) -> bytes:
        """Packed tokens [start, stop)."""
        return pack_tokens(self._tokens[start:stop])

    def _pack(self, count: int) -> None:
        size = self._block_size * TOKEN_BYTES
        packed = self.run(len(self._blocks) * self._block_size, count * self._block_size)
        self._blocks += [packed[i : i + size] for i in range(0, len(packed), size)]

    def _extend(self, count: int) -> None:
        """Compute the keys of the first `count` blocks."""
        keys, digest = self._keys, self._digest
        if self._leader is not None:
            self._copy_keys(self._leader, min(count, self._num_led))
        if len(self._blocks) < count:
            self._pack(count)
        key = keys[-1] if keys else self.root
        for block in self._blocks[len(keys) : count]:
            key = digest(key, block)
            keys.append(key)

    def _copy_keys(self, leader: TokenChain, count: int) -> None:
        if len(leader._keys) < count:
            leader._extend(count)
        self._keys += leader._keys[len(self._keys) : count]
        if count == self._num_led:
            self._leader = None


class Context:
    """Tokens, and the memory of three kinds that belongs to them.

    Token positions:

        [0, num_computed)               KV exists and is committed: shared blocks first, then its own
        [num_computed, num_planned)     in a step that is in flight
        [num_planned, num_tokens)       to be planned; the last one may be a sample that is still in flight
    """

    __slots__ = (
        "block_table",
        "boundaries",
        "chain",
        "kv_start",
        "live_states",
        "next_point",
        "num_computed",
        "num_in_flight",
        "num_planned",
        "num_published",
        "num_windows_passed",
        "num_windows_published",
        "parent",
        "points",
        "salt",
        "snapshots",
        "state_base",
        "state_slot",
        "state_start",
        "token_limit",
        "tokens",
        "window_table",
    )

    def __init__(self, tokens: array[int], salt: str, boundaries: tuple[int, ...], parent: Self | None) -> None:
        # All known tokens: the prompt, then the samples. Append-only. An array, so that no object per token is created.
        self.tokens = tokens
        self.salt = salt  # contexts with different salts share nothing
        self.boundaries = boundaries  # positions in the prompt where messages start, ascending
        self.parent = parent  # a request whose blocks to share while it runs (n > 1, branches)
        self.token_limit = 0  # prompt and output together
        self.chain: TokenChain | None = None  # chain keys of its blocks

        self.block_table: list[int] = []  # append-only while held, replaced (never cleared) on release
        self.kv_start = 0  # the KV of tokens before it was cached: it is not written again if they are computed again
        self.num_computed = self.num_planned = 0
        self.num_in_flight = 0  # samples of steps that are not committed yet
        self.num_published = 0  # leading full blocks passed to the tree

        # In a model with windows or recurrent states
        self.points: list[int] = []  # positions where others are expected to continue, ascending
        self.next_point = 0  # index of the first that is not planned yet
        self.window_table: list[int] = []  # window blocks by block number; 0 behind the window
        self.num_windows_passed = 0  # leading entries that are 0
        self.num_windows_published = 0  # leading entries passed to the tree
        self.live_states: tuple[StateSlot, ...] = ()  # its own slots, written in turn
        self.state_slot: StateSlot | None = None  # has the state after `num_planned` tokens; None: the empty state
        self.snapshots: list[StateSlot] = []  # held besides: snapshots it reads, and those it writes
        self.state_start = self.state_base = 0  # positions of the state it continued from; of the last snapshot

    @property
    def num_tokens(self) -> int:
        """Known tokens plus samples in flight."""
        return len(self.tokens) + self.num_in_flight
