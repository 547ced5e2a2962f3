"""Tests of the block I/O of every runner, over the runner's own interface.

A test module subclasses `BlockIOContract` and has a fixture `runner`. Bytes are random, or the content of a context
that the runner computed. A context whose memory was exported, overwritten and imported elsewhere continues with the
same tokens and distributions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import pytest

from quire.backends.base import BlockIO, PendingCopy, Runner
from quire.core.step import MemoryKind, MemoryRef, SeqSlice, StepPlan, TokenLogprobs
from quire.core.values import SamplingParams
from quire.errors import InvariantViolation

WIPED = b"\x3c"  # in every type a finite number: stale memory may be anything finite
NUM_CACHED = 32  # tokens whose memory is exported, in whole blocks
NUM_TOKENS = 35  # of the context, before its answer
NUM_STEPS = 2  # the rest of the context, then decodes


def block_io(runner: Runner) -> BlockIO:
    found = runner.block_io()
    assert found is not None
    assert runner.block_io() is found
    return found


def counts(runner: Runner) -> dict[MemoryKind, int]:
    capacity = runner.capacity()
    numbers = (capacity.num_blocks, capacity.num_window_blocks, capacity.num_states)
    return {kind: count for kind, count in zip(MemoryKind, numbers, strict=True) if count}


def all_pieces(runner: Runner) -> list[MemoryRef]:
    return [MemoryRef(kind, index) for kind, count in counts(runner).items() for index in range(1, count)]


def allocate(io: BlockIO, pieces: Sequence[MemoryRef]) -> list[memoryview]:
    """Return a buffer for each piece, side by side in memory."""
    sizes = [io.sizes.of(ref.kind) for ref in pieces]
    whole, at, buffers = io.allocate(sum(sizes)), 0, []
    assert (whole.nbytes, whole.format, whole.readonly) == (sum(sizes), "B", False)
    for size in sizes:
        buffers.append(whole[at : at + size])
        at += size
    return buffers


def wait(copy: PendingCopy) -> None:
    for _ in range(10_000_000):
        if copy.is_done():
            return
    raise AssertionError("a copy is never done")


def read(runner: Runner, pieces: Sequence[MemoryRef] | None = None) -> list[bytes]:
    """Return the content of pieces, by default of all."""
    io = block_io(runner)
    pieces = all_pieces(runner) if pieces is None else pieces
    buffers = allocate(io, pieces)
    wait(io.export(pieces, buffers))
    return [bytes(buffer) for buffer in buffers]


def write(runner: Runner, pieces: Sequence[MemoryRef], contents: Sequence[bytes]) -> None:
    io = block_io(runner)
    buffers = allocate(io, pieces)
    for buffer, content in zip(buffers, contents, strict=True):
        buffer[:] = content
    wait(io.import_(pieces, buffers))


def wipe(runner: Runner) -> None:
    io, pieces = block_io(runner), all_pieces(runner)
    write(runner, pieces, [WIPED * io.sizes.of(ref.kind) for ref in pieces])


class Places(NamedTuple):
    """Where a context lies."""

    blocks: list[int]
    window_blocks: list[int]  # by block number
    state: int

    @classmethod
    def choose(cls, runner: Runner, rng: Random) -> Places:
        """Take random places for a context of NUM_TOKENS and its answer."""
        capacity = runner.capacity()
        num_blocks = -(-(NUM_TOKENS + NUM_STEPS) // capacity.block_size)
        blocks = rng.sample(range(1, capacity.num_blocks), num_blocks)
        window_blocks = []
        if capacity.num_window_blocks:
            window_blocks = rng.sample(range(1, capacity.num_window_blocks), num_blocks)
        return cls(blocks, window_blocks, rng.randrange(1, capacity.num_states) if capacity.num_states else 0)

    def cached(self, runner: Runner) -> list[MemoryRef]:
        """Return what a continuation after NUM_CACHED tokens reads."""
        capacity = runner.capacity()
        last = NUM_CACHED // capacity.block_size
        pieces = [MemoryRef(MemoryKind.BLOCK, block) for block in self.blocks[:last]]
        if self.window_blocks:
            first = max(NUM_CACHED - capacity.window + 1, 0) // capacity.block_size
            pieces += [MemoryRef(MemoryKind.WINDOW, block) for block in self.window_blocks[first:last]]
        return [*pieces, MemoryRef(MemoryKind.STATE, self.state)] if self.state else pieces


def part(places: Places, tokens: Sequence[int], start: int, end: int) -> SeqSlice:
    return SeqSlice(
        request_id=1,
        epoch=0,
        batch_index=0,
        tokens=tokens[start:end],
        start=start,
        length=end - start,
        block_table=places.blocks,
        history=tokens,
        wants_token=end == len(tokens),
        sampling=SamplingParams(temperature=0.0, logprobs=8),
        num_prompt_tokens=NUM_TOKENS,
        window_table=places.window_blocks,
        state_source=places.state if start else 0,
        state_target=places.state,
    )


def enqueue(runner: Runner, *slices: SeqSlice) -> None:
    runner.forward(StepPlan(slices, (), ()))
    runner.sample(None)


def begin(runner: Runner, places: Places, tokens: Sequence[int]) -> None:
    """Compute the part of a context that is exported."""
    enqueue(runner, part(places, tokens, 0, NUM_CACHED))
    assert not runner.collect().failures


def go_on(runner: Runner, places: Places, tokens: Sequence[int]) -> list[TokenLogprobs]:
    """Compute the rest of a context and an answer. Returns its tokens, with logprobs."""
    tokens, start = list(tokens), NUM_CACHED
    found = []
    for _ in range(NUM_STEPS):
        enqueue(runner, part(places, tokens, start, len(tokens)))
        result = runner.collect()
        assert not result.failures
        (token,), start = result.tokens[0], len(tokens)
        tokens.append(token)
        found.append(result.logprobs[0][0])
    return found


def difference(one: Sequence[TokenLogprobs], other: Sequence[TokenLogprobs]) -> float:
    """Return the largest difference of logprobs; infinite if the tokens differ."""
    if [[token for token, _ in entry.top] for entry in one] != [[token for token, _ in entry.top] for entry in other]:
        return math.inf
    pairs = zip(one, other, strict=True)
    return max(abs(a - b) for x, y in pairs for (_, a), (_, b) in zip(x.top, y.top, strict=True))


def random_tokens(seed: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(3, 160) for _ in range(NUM_TOKENS)]


@pytest.mark.sweep("class")
class BlockIOContract:
    bound = 0.0  # on differences of logprobs

    @pytest.mark.sweep("test")
    def test_random_bytes(self, runner: Runner) -> None:
        """Every piece of every kind; then the same bytes in other places."""
        rng, pieces, io = Random(0), all_pieces(runner), block_io(runner)
        contents = [rng.randbytes(io.sizes.of(ref.kind)) for ref in pieces]
        write(runner, pieces, contents)
        assert read(runner) == contents
        wipe(runner)
        assert set(b"".join(read(runner))) == {WIPED[0]}
        places = [*pieces]
        for kind in counts(runner):
            own = [at for at, ref in enumerate(pieces) if ref.kind is kind]
            for at, other in zip(own, rng.sample(own, len(own)), strict=True):
                places[at] = pieces[other]
        write(runner, places, contents)
        assert read(runner, places) == contents

    def test_only_the_pieces_change(self, runner: Runner) -> None:
        rng, pieces, io = Random(1), all_pieces(runner), block_io(runner)
        contents = [rng.randbytes(io.sizes.of(ref.kind)) for ref in pieces]
        write(runner, pieces, contents)
        chosen = sorted(rng.sample(range(len(pieces)), len(pieces) // 3))
        for at in chosen:
            contents[at] = rng.randbytes(len(contents[at]))
        write(runner, [pieces[at] for at in chosen], [contents[at] for at in chosen])
        assert read(runner) == contents

    def test_buffers_of_any_kind(self, runner: Runner) -> None:
        """Not allocated by the runner, read-only, or not in the order of the pieces."""
        io, pieces = block_io(runner), all_pieces(runner)[:3]
        contents = [Random(at).randbytes(io.sizes.of(ref.kind)) for at, ref in enumerate(pieces)]
        wait(io.import_(pieces, [memoryview(content) for content in contents]))
        buffers = [memoryview(bytearray(len(content))) for content in contents]
        wait(io.export(pieces, buffers))
        assert [bytes(buffer) for buffer in buffers] == contents
        buffers = list(reversed(allocate(io, pieces)))
        wait(io.export(pieces, buffers))
        assert [bytes(buffer) for buffer in buffers] == contents
        wait(io.import_(pieces[::-1], buffers))
        assert read(runner, pieces) == contents[::-1]
        wait(io.export([], []))
        wait(io.import_([], []))
        assert len(io.allocate(0)) == 0

    @pytest.mark.sweep("test")
    def test_a_context_goes_on_elsewhere(self, runner: Runner) -> None:
        rng, io, tokens = Random(2), block_io(runner), random_tokens(2)
        wipe(runner)
        places = Places.choose(runner, rng)
        begin(runner, places, tokens)
        expected = go_on(runner, places, tokens)
        begin(runner, places, tokens)
        pieces = places.cached(runner)
        buffers = allocate(io, pieces)
        copy = io.export(pieces, buffers)
        begin(runner, places, random_tokens(3))  # overwrites them
        wait(copy)
        wipe(runner)
        assert difference(go_on(runner, places, tokens), expected) > 1e-3  # the content was lost
        wipe(runner)
        others = Places.choose(runner, rng)
        wait(io.import_(others.cached(runner), buffers))
        assert difference(go_on(runner, others, tokens), expected) <= self.bound

    def test_copies_are_in_the_order_of_the_steps(self, runner: Runner) -> None:
        """An export with steps in flight has what the steps before it wrote, and nothing that later ones wrote."""
        io, tokens = block_io(runner), [random_tokens(seed) for seed in range(4, 7)]
        wipe(runner)
        places = Places.choose(runner, Random(3))
        pieces = places.cached(runner)
        expected = []
        for some in tokens:
            begin(runner, places, some)
            expected.append(read(runner, pieces))
        assert expected[0] != expected[1] != expected[2]
        found, copies = [], []
        enqueue(runner, part(places, tokens[0], 0, NUM_CACHED))
        for some in (*tokens[1:], tokens[0]):
            found.append(allocate(io, pieces))
            copies.append(io.export(pieces, found[-1]))
            enqueue(runner, part(places, some, 0, NUM_CACHED))
            runner.collect()
        runner.collect()
        for copy, buffers, content in zip(copies, found, expected, strict=True):
            wait(copy)
            assert [bytes(buffer) for buffer in buffers] == content

    def test_an_import_follows_the_steps_before_it(self, runner: Runner) -> None:
        io, tokens = block_io(runner), random_tokens(7)
        wipe(runner)
        places = Places.choose(runner, Random(4))
        pieces = places.cached(runner)
        buffers = allocate(io, pieces)
        for buffer in buffers:
            buffer[:] = Random(5).randbytes(len(buffer))
        enqueue(runner, part(places, tokens, 0, NUM_CACHED))
        copy = io.import_(pieces, buffers)
        assert not runner.collect().failures
        wait(copy)
        assert read(runner, pieces) == [bytes(buffer) for buffer in buffers]

    def test_wrong_arguments_change_nothing(self, runner: Runner) -> None:
        io = block_io(runner)
        wipe(runner)
        before = read(runner)
        good = all_pieces(runner)[0]
        size = io.sizes.of(good.kind)
        buffer, small, spread = memoryview(bytearray(size)), memoryview(bytearray(2)), memoryview(bytearray(2 * size))
        wrong: list[tuple[list[Any], list[memoryview], str]] = [
            ([good], [], "1 pieces and 0 buffers"),
            ([], [buffer], "0 pieces and 1 buffers"),
            ([good], [small], f"2 bytes for BLOCK 1 of {size} bytes"),
            ([good], [memoryview(bytes(size + 1))], f"{size + 1} bytes for BLOCK 1"),
            ([good, good], [buffer, small], "2 bytes"),
            ([good], [spread[::2]], "not contiguous"),
            ([good], [buffer.cast("I")], "not bytes"),
        ]
        for kind in MemoryKind:
            count, own = counts(runner).get(kind, 0), memoryview(bytearray(io.sizes.of(kind)))
            wrong += [
                ([MemoryRef(kind, index)], [own], f"{kind.name} {index} is not in the runner's memory")
                for index in (0, -1, count, count + 10**9)
            ]
        for pieces, buffers, message in wrong:
            for call in (io.export, io.import_):
                with pytest.raises(InvariantViolation, match=message):
                    call(pieces, buffers)
        with pytest.raises(InvariantViolation, match="read-only"):
            io.export([good], [memoryview(bytes(size))])
        with pytest.raises(InvariantViolation, match="two buffers are imported into one piece"):
            io.import_([good, good], [buffer, buffer])
        assert read(runner) == before

    def test_facts(self, runner: Runner) -> None:
        io, capacity = block_io(runner), runner.capacity()
        assert io.pieces_per_step >= 1
        assert bool(io.sizes.window) == bool(capacity.num_window_blocks)
        assert bool(io.sizes.state) == bool(capacity.num_states)
        assert f"block_size={capacity.block_size}" in io.layout
        assert " " not in io.layout.replace(" ", "", io.layout.count("="))  # a word for each fact
