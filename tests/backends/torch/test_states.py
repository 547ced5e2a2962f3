"""Families with a recurrent state have the distributions of `transformers`, wherever their states are stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.backends.torch.recurrence import causal_conv
from quire.backends.torch.runner import TorchRunner
from quire.backends.torch.state_work import Segment
from quire.core.step import SeqSlice, StateSnapshot, StepPlan, StepResult
from quire.core.values import SamplingParams
from quire.engine.composition import EngineConfig, make_runner
from quire.weights.opening import open_checkpoint
from tests.backends.contract import HEAD, Contract, Pair, random_prompt
from tests.backends.torch.families import STATE_FAMILIES, Reference
from tests.backends.torch.rig import Rig
from tests.weights.converting import write_gguf

BOUND = 3e-5
VOCAB = 160


@pytest.fixture(scope="module", params=STATE_FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Reference, Rig]]:
    folder = tmp_path_factory.mktemp("model")
    reference = Reference(request.param, folder)
    rig = Rig(folder)
    yield reference, rig
    rig.engine.close()


class TestStates(Contract):
    bound = BOUND

    def test_through_shared_and_forked_blocks(self, pair: Pair) -> None:
        """A hit needs a state: there is one where a second prompt left the first, and at the end of an answer."""
        reference, rig = pair
        rig.reset()
        head = random_prompt(3, HEAD)
        first, second, third = [*head, 5, 6, 7], [*head, 8, 9], [*head, 10]
        answer = rig.answer(first, 8)
        self.check(reference, first, answer)
        self.check(reference, second, rig.answer(second, 8))
        shared = rig.answer(third, 8)
        self.check(reference, third, shared)
        assert shared.num_cached_tokens > 0
        turn = [*first, *answer.tokens, 11, 12, 13]
        continued = rig.answer(turn, 8)
        self.check(reference, turn, continued)
        assert continued.num_cached_tokens >= len(first)

    @pytest.mark.parametrize("chunk", [64, 65, 150])
    def test_in_chunks_about_as_long_as_those_of_a_delta_net(self, pair: Pair, chunk: int) -> None:
        reference, rig = pair
        rig.reset(max_chunk_tokens=chunk)
        prompt = random_prompt(6, 200)
        self.check(reference, prompt, rig.answer(prompt, 4))


@pytest.mark.parametrize("name", [name for name in STATE_FAMILIES if name != "lfm2 with biases"])
def test_a_gguf_has_the_same_distributions(name: str, tmp_path: Path) -> None:
    """The file has llama.cpp's order of value heads, which differs if there are fewer key heads."""
    reference = Reference(name, tmp_path / "saved")
    rig = Rig(write_gguf(tmp_path / "saved", tmp_path / "m.gguf"))
    prompt = random_prompt(3, 70)
    TestStates().check(reference, prompt, rig.answer(prompt, 5))
    rig.engine.close()


# Slots chosen by hand


class Driver:
    """Runs slices on a runner and reads the distributions after their last tokens."""

    def __init__(self, path: Path) -> None:
        checkpoint = open_checkpoint(path)
        config = EngineConfig(backend="torch", num_blocks=64, max_num_seqs=8, threads=1)
        runner = make_runner(checkpoint, config)
        checkpoint.close()
        assert isinstance(runner, TorchRunner)
        self.runner = runner

    def run(self, *slices: SeqSlice) -> list[Tensor]:
        self.runner.forward(StepPlan(slices, (), ()))
        self.runner.sample(None)
        result: StepResult = self.runner.collect()
        assert not result.failures
        return [self._row(result, index) for index in range(len(slices))]

    def _row(self, result: StepResult, index: int) -> Tensor:
        row = torch.full((VOCAB,), float("nan"))
        for token, logprob in result.logprobs[index][0].top:
            row[token] = logprob
        return row

    def state(self, slot: int) -> list[Tensor]:
        return [pool[slot].clone() for pool in self.runner.store.state_pools()]


def piece(
    tokens: Sequence[int],
    start: int,
    end: int,
    source: int,
    target: int,
    *snapshots: tuple[int, int],
    batch_index: int = 0,
    first_block: int = 1,
) -> SeqSlice:
    """Return the slice [start, end) of a prompt whose blocks follow each other from `first_block` on."""
    return SeqSlice(
        request_id=batch_index,
        epoch=0,
        batch_index=batch_index,
        tokens=list(tokens[start:end]),
        start=start,
        length=end - start,
        block_table=list(range(first_block, first_block + 8)),
        history=list(tokens),
        wants_token=True,
        sampling=SamplingParams(temperature=0.0, max_tokens=1, logprobs=VOCAB),
        num_prompt_tokens=len(tokens),
        state_source=source,
        state_target=target,
        snapshots=tuple(StateSnapshot(*one) for one in snapshots),
    )


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe", "lfm2", "lfm2_moe"])
def driven(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Reference, Driver]:
    folder = tmp_path_factory.mktemp("model")
    return Reference(request.param, folder), Driver(folder)


def near(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) < BOUND


def test_snapshots_continue_as_if_the_prompt_had_ended_there(driven: tuple[Reference, Driver]) -> None:
    reference, driver = driven
    prompt = random_prompt(20, 180)
    expected = reference.logprobs(prompt)
    cuts = (1, 2, 33, 100, 179)
    snapshots = [(position, 10 + i) for i, position in enumerate(cuts)]
    (row,) = driver.run(piece(prompt, 0, 180, 0, 1, *snapshots))
    assert near(row, expected[179])
    for position, slot in snapshots:
        before = driver.state(slot)
        (row,) = driver.run(piece(prompt, position, 180, slot, 20))  # a published state is read, not written
        assert near(row, expected[179])
        assert all(torch.equal(one, other) for one, other in zip(before, driver.state(slot), strict=True))
        for one, other in zip(driver.state(20), driver.state(1), strict=True):
            assert torch.allclose(one, other, atol=1e-5)
    assert not any(pool.any() for pool in driver.state(0))


def test_the_empty_state_is_never_written(driven: tuple[Reference, Driver]) -> None:
    _, driver = driven
    prompt = random_prompt(40, 20)
    driver.run(piece(prompt, 0, 20, 0, 0))
    driver.run(piece(prompt, 0, 1, 0, 0), piece(prompt, 0, 1, 0, 5, batch_index=1, first_block=9))
    assert not any(pool.any() for pool in driver.state(0))


@pytest.mark.parametrize("taps", [2, 3, 4])
def test_a_convolution_continues_over_segments(taps: int) -> None:
    torch.manual_seed(taps)
    x, weight, bias = torch.randn(20, 6), torch.randn(6, taps), torch.randn(6)
    whole = torch.nn.functional.conv1d(x.t()[None], weight[:, None], bias, padding=taps - 1, groups=6)[0, :, :20].t()
    pool = torch.zeros(4, taps - 1, 6)
    cut = [Segment(0, 1, 0, 1), Segment(1, 1, 1, 2), Segment(2, 11, 2, 2), Segment(13, 7, 2, 3)]
    assert torch.allclose(causal_conv(x, weight, bias, pool, cut), whole, atol=1e-5)
    assert torch.equal(pool[3], x[21 - taps :])
    assert torch.equal(pool[1], torch.cat((torch.zeros(taps - 2, 6), x[:1])))
