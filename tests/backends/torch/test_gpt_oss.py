"""gpt-oss with experts in MXFP4, as OpenAI's safetensors and as GGUF: packed in memory, and equal to `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from quire.backends.torch.experts import Experts
from quire.backends.torch.loading import WeightLoader
from quire.backends.torch.models.decoder import DecoderModel, RoutedMlp
from quire.backends.torch.packed import MAX_EXPONENT, Mxfp4Stack
from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.checkpoint import TensorType
from quire.weights.opening import open_checkpoint
from quire.weights.tensors import check_tensors
from tests.backends.torch.families import Reference
from tests.backends.torch.fused_rig import FusedRig
from tests.backends.torch.rig import Rig, same_rows
from tests.weights.converting import write_gguf

PROMPT = [5, 70, 12, 33, 4, 90, 101, 64, 7, 9] * 4


def decoded(blocks: np.ndarray[Any, Any], scales: np.ndarray[Any, Any]) -> torch.Tensor:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found: torch.Tensor = convert_moe_packed_tensors(
        torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
    )
    return found


class PackedReference(Reference):
    """Random codes in MXFP4 in `path`, and the same model with decoded weights in `plain`."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.plain = folder / "plain"
        super().__init__("gpt_oss", self.plain, **changes)
        self.path = folder / "packed"
        self.path.mkdir()
        rng = np.random.default_rng(0)
        arrays = load_file(self.plain / "model.safetensors")
        for name, matrix in [(name, array) for name, array in arrays.items() if name.endswith("_proj")]:
            num_experts, num_columns, num_rows = matrix.shape
            blocks = rng.integers(0, 256, (num_experts, num_rows, num_columns // 32, 16), dtype=np.uint8)
            scales = rng.integers(118, 123, blocks.shape[:-1], dtype=np.uint8)
            arrays |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            self.model.get_parameter(name).data = decoded(blocks, scales)
            del arrays[name]
        save_file(arrays, self.path / "model.safetensors")
        config = json.loads((self.plain / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
        (self.path / "config.json").write_text(json.dumps(config))
        self.model.save_pretrained(self.plain)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> PackedReference:
    layers = ["sliding_attention", "full_attention"]
    return PackedReference(tmp_path_factory.mktemp("gpt_oss"), num_hidden_layers=2, layer_types=layers)


@pytest.fixture(scope="module")
def gguf(reference: PackedReference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(reference.plain, tmp_path_factory.mktemp("gguf") / "m.gguf", packs_experts=True)


def load(path: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    with torch.inference_mode():
        return DecoderModel(WeightLoader(open_checkpoint(path), dtype, torch.device("cpu")), 512)


def experts_of(weights: DecoderModel) -> list[Experts]:
    return [layer.mlp.experts for layer in weights.layers if isinstance(layer.mlp, RoutedMlp)]


def test_files_and_memory_are_packed(reference: PackedReference, gguf: Path) -> None:
    plain = load(reference.plain)
    for path in (reference.path, gguf):
        checkpoint = open_checkpoint(path)
        check_tensors(checkpoint)
        assert checkpoint.tensors["layers.1.experts.3.up_proj.weight"].type is TensorType.MXFP4
        weights = load(path)
        assert weights.num_bytes < 0.6 * plain.num_bytes
        for packed, other in zip(experts_of(weights), experts_of(plain), strict=True):
            for stack, dense in ((packed.gate_up, other.gate_up), (packed.down, other.down)):
                assert isinstance(stack, Mxfp4Stack)
                assert all(torch.equal(stack[expert], dense[expert]) for expert in range(len(stack)))


def test_answers_equal_transformers(reference: PackedReference, gguf: Path) -> None:
    for path in (reference.path, gguf, reference.plain):
        rig = Rig(path)
        answer = rig.answer(PROMPT, 5)
        assert same_rows(answer, reference.logprobs(PROMPT + answer.tokens), len(PROMPT)) < 5e-5
        rig.engine.close()


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.filterwarnings("ignore:divide by zero encountered")
def test_answers_of_the_kernels(reference: PackedReference) -> None:
    rig = FusedRig(reference.path)
    answer = rig.answer(PROMPT, 3)
    assert same_rows(answer, reference.logprobs(PROMPT + answer.tokens), len(PROMPT)) < 2e-4


def rewritten(reference: PackedReference, folder: Path, **changes: Any) -> Path:
    """Return a copy with other tensors; None removes one."""
    folder.mkdir()
    arrays = load_file(reference.path / "model.safetensors") | changes
    save_file({name: one for name, one in arrays.items() if one is not None}, folder / "model.safetensors")
    (folder / "config.json").write_text((reference.path / "config.json").read_text())
    return folder


def test_exponents_out_of_range_are_decoded_when_loaded(reference: PackedReference, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj_scales"
    scales = load_file(reference.path / "model.safetensors")[name].copy()
    scales[0, 0, 0] = MAX_EXPONENT + 1
    first, second = experts_of(load(rewritten(reference, tmp_path / "m", **{name: scales})))
    assert isinstance(first.down, Mxfp4Stack)
    assert isinstance(second.gate_up, torch.Tensor)  # the kernels need both matrices in the same form
    assert isinstance(second.down, torch.Tensor)
    want = decoded(load_file(reference.path / "model.safetensors")[name.replace("scales", "blocks")], scales)
    assert torch.equal(second.down, want.transpose(1, 2))


def test_wrong_files_are_refused(reference: PackedReference, tmp_path: Path) -> None:
    prefix = "model.layers.0.mlp.experts.gate_up_proj"
    arrays = load_file(reference.path / "model.safetensors")
    cases: dict[str, dict[str, Any]] = {
        "have shape None": {f"{prefix}_scales": None},
        r"have shape \(6, 192, 1\)": {f"{prefix}_scales": arrays[f"{prefix}_scales"][:, :, :1].copy()},
        "has shape": {f"{prefix}_blocks": arrays[f"{prefix}_blocks"][:3].copy()},
        "missing": {f"{prefix}_bias": None},
        "does not have": {"model.layers.7.mlp.experts.down_proj_bias": arrays[f"{prefix}_bias"]},
    }
    for number, (problem, changes) in enumerate(cases.items()):
        folder = rewritten(reference, tmp_path / str(number), **changes)
        with pytest.raises(ModelFileError, match=problem):
            check_tensors(open_checkpoint(folder))
    folder = rewritten(reference, tmp_path / "bytes", **{"model.norm.weight": np.zeros(64, np.uint8)})
    with pytest.raises(UnsupportedModel, match="U8"):
        open_checkpoint(folder)


def test_another_activation_is_refused(reference: PackedReference, tmp_path: Path) -> None:
    folder = rewritten(reference, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "swiglu_limit": 10.0}))
    with pytest.raises(UnsupportedModel, match="swiglu_limit is 10"):
        open_checkpoint(folder)
