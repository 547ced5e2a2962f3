"""Models of mlx-lm over the paged cache: the distributions of mlx-lm's dense cache, and of `transformers`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.backends.mlx.batch import BatchMode, build_passes
from quire.backends.mlx.kernel_check import gather_attention
from quire.backends.mlx.paged_cache import DecodeKernel
from quire.backends.mlx.runner import MlxRunner
from quire.errors import UnsupportedModel
from tests.backends.contract import HEAD, Contract, Pair, random_prompt
from tests.backends.mlx.architectures import DIVIDED, FLAT, REFUSED, DenseReference, write_model
from tests.backends.plans import piece
from tests.backends.torch.families import Reference
from tests.backends.torch.rig import Rig

SETTINGS: dict[str, Any] = {"backend": "mlx", "dtype": "float32"}
TRANSFORMERS = ("llama", "llama 3 rope", "llama yarn", "qwen3", "gemma3", "phi3")
# In `make test`: each kind of attention, position, norm, expert and block that the others have too.
KEPT = (
    *("llama with windows", "cohere2", "dbrx", "exaone4", "gemma3_text", "gemma4_text", "glm4_moe", "gpt2", "gpt_neox"),
    *("gpt_oss", "granite", "ministral3", "nemotron", "olmo2", "phi", "phimoe", "qwen3_moe", "smollm3", "stablelm"),
)
WHOLE_CONTRACT = ("llama with windows", "gpt_oss", "qwen3_moe", "deepseek_v3", "gemma2")


def mode(rig: Rig) -> BatchMode:
    assert isinstance(rig.engine.runner, MlxRunner)
    return rig.engine.runner.model.mode


@pytest.fixture(scope="module", params=[*(f"transformers: {name}" for name in TRANSFORMERS), *WHOLE_CONTRACT])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("model")
    prefix, _, family = request.param.partition("transformers: ")
    reference = Reference(family, folder) if family else DenseReference(write_model(folder, prefix))
    rig = Rig(folder, **SETTINGS)
    yield reference, rig
    rig.engine.close()


class TestMlx(Contract):
    bound = 5e-5


def check_mixed(folder: Path, rig: Rig, bound: float) -> None:
    """Chunks beside decodes, a shared prefix with a forked tail, samples of one prompt, with a step in flight."""
    reference, contract = DenseReference(folder), Contract()
    contract.bound = bound
    rig.reset(max_chunk_tokens=13, max_num_batched_tokens=40, overlap=mode(rig) is BatchMode.FLAT)
    head = random_prompt(3, HEAD)
    first = rig.start([*head, 5, 6], 5)
    prompts = {first: [*head, 5, 6]}
    for length in (1, 20, 33):
        prompt = random_prompt(length, length)
        prompts[rig.start(prompt, 6)] = prompt
    answers = rig.run(*prompts)
    for request_id, prompt in prompts.items():
        contract.check(reference, prompt, answers[request_id])
    second = rig.answer([*head, 8, 9], 4)
    assert second.num_cached_tokens == HEAD
    assert rig.num_copies == 1
    contract.check(reference, [*head, 8, 9], second)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in KEPT else pytest.mark.nightly) for name in FLAT]
)
def test_architectures_in_one_pass_per_step(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", name)
    rig = Rig(folder, **SETTINGS)
    assert mode(rig) is BatchMode.FLAT
    check_mixed(folder, rig, 1e-4)
    rig.engine.close()


ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}


@pytest.mark.parametrize("name", ["olmo2", "qwen2_moe"])
def test_rotary_settings_as_transformers_saves_them_now(name: str, tmp_path: Path) -> None:
    """The same model with the old names and the new ones. Most of mlx-lm's models read only the old ones."""
    old = write_model(tmp_path / "old", name, rope_theta=500.0, rope_scaling={"type": "linear", "factor": 4.0})
    plain = write_model(tmp_path / "plain", name)
    new = write_model(tmp_path / "new", name, rope_parameters=ROPE, rope_theta=None)
    rows = []
    for folder in (old, new, plain):
        rig = Rig(folder, **SETTINGS)
        rows.append(rig.answer(random_prompt(1, 30), 1).rows[0])
        rig.engine.close()
    assert float((rows[0] - rows[1]).abs().max()) < 1e-5
    assert float((rows[0] - rows[2]).abs().max()) > 1e-3


@pytest.mark.parametrize("name", DIVIDED)
def test_architectures_in_several_passes(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_model(tmp_path / "m", name)
    rig = Rig(folder, **SETTINGS)
    assert mode(rig) is (BatchMode.DENSE if name == "deepseek_v3" else BatchMode.SINGLE)
    assert "several forward passes" in caplog.text
    check_mixed(folder, rig, 1e-4)
    rig.engine.close()


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3_text"])
def test_logits_are_computed_only_for_rows_that_sample(name: str, tmp_path: Path) -> None:
    rig = Rig(write_model(tmp_path / "m", name), **SETTINGS)
    runner = rig.engine.runner
    assert isinstance(runner, MlxRunner)
    model: Any = runner.model.model
    num_rows: list[int] = []
    head = model.lm_head

    class Counting(type(head)):  # type: ignore[misc]
        def __call__(self, x: mx.array) -> mx.array:
            num_rows.append(x.shape[0])
            return super().__call__(x)  # type: ignore[no-any-return]

    head.__class__ = Counting
    rig.reset(max_chunk_tokens=16)
    rig.run(*(rig.start(random_prompt(number, 30), 3, logprobs=None) for number in range(2)))
    assert max(num_rows) == 2
    rig.engine.close()


@pytest.mark.parametrize("name", REFUSED)
def test_models_with_a_state_are_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", name)
    with pytest.raises(UnsupportedModel, match="ArraysCache"):
        Rig(folder, **SETTINGS)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("llama", {"group_size": 64, "bits": 4}),
        ("llama", {"group_size": 32, "bits": 2}),
        ("qwen2", {"group_size": 32, "bits": 3}),
        ("qwen3", {"group_size": 64, "bits": 8}),
        ("gemma3_text", {"group_size": 32, "bits": 6}),
        ("olmo2", {"group_size": 32, "bits": 5}),
        ("mixtral", {"group_size": 32, "bits": 4}),
        ("gpt_oss", {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
        ("llama", {"group_size": 32, "bits": 8, "mode": "mxfp8"}),
        ("qwen3_moe", {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
    ],
)
def test_quantised_checkpoints(name: str, quantization: dict[str, Any], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", name, quantization=quantization)
    rig = Rig(folder, **SETTINGS)
    check_mixed(folder, rig, 2e-4)
    rig.engine.close()


@pytest.mark.parametrize("name", ["llama with windows", "gpt_oss", "gemma3_text", "qwen3_moe"])
def test_decodes_through_the_kernel(name: str, tmp_path: Path) -> None:
    """Lengths, windows, sinks and block tables reach the kernel as it expects them."""
    folder = write_model(tmp_path / "m", name)
    rig = Rig(folder, **SETTINGS)
    assert isinstance(rig.engine.runner, MlxRunner)
    store, num_rows = rig.engine.runner.store, []

    def attend(queries: mx.array, *arrays: mx.array, **settings: Any) -> mx.array:
        num_rows.append(len(queries))
        return gather_attention(queries, *arrays, **settings)

    store.use_kernel(DecodeKernel(attend, store.layers[0].shape.attention(store.block_size), least_rows=2))
    check_mixed(folder, rig, 1e-4)
    assert min(num_rows) == 2
    rig.engine.close()


def test_large_groups_of_decodes_are_divided() -> None:
    """Gathered contexts take memory, so a group has a bound: three rows of two blocks here."""
    slices = [piece(start=40, length=1, tokens=[5], batch_index=index, block_table=[1, 2]) for index in range(8)]
    (step,) = build_passes(slices, 32, 3 * 2 * 32, mx.zeros(8, mx.int32), BatchMode.FLAT)
    assert [group.num_seqs for group in step.groups] == [3, 3, 2]
