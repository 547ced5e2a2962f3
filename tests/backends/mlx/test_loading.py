"""Loading into models of mlx-lm: results equal those of `transformers` and of the torch backend; errors are named."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from torch import Tensor

from quire.backends.base import BackendOptions
from quire.backends.mlx import gguf_model
from quire.backends.mlx.loading import load_from_tensors, load_model
from quire.backends.mlx.parameters import Layout, flat_parameters, main_layout, num_bytes
from quire.backends.mlx.spec_model import MODEL_TYPES
from quire.errors import InvalidRequest, ModelFileError, UnsupportedModel
from quire.weights.checkpoint import BLOCKS, Checkpoint, RawTensor, TensorInfo, TensorType
from quire.weights.opening import open_checkpoint
from quire.weights.quants import pack_blocks, to_float32
from quire.weights.tensors import check_tensors
from tests.backends.mlx.architectures import DenseReference, write_model
from tests.backends.mlx.test_runner import open_runner
from tests.backends.torch.families import FAMILIES, MINISTRAL_ROPE, SIZES, Reference
from tests.backends.torch.families import logprobs as reference_logprobs
from tests.backends.torch.rig import Rig, same_rows
from tests.weights.layouts import LAYOUTS, write_k_quants, write_quantized
from tests.weights.makers import (
    FFN,
    HIDDEN,
    config,
    llama_arrays,
    llama_keys,
    llama_tensors,
    make_gguf,
    set_scales,
    tiny_gguf,
    write_folder,
)

BOUND = 5e-5
BY_NUMBER = {"layer_types": None, "sliding_window": 24}
TOKENS = [(7919 * i) % 160 for i in range(1, 61)]  # longer than the windows of the small models


def load(
    path: Path, load_format: str = "auto", progress: Callable[[int, int], None] | None = None, **options: Any
) -> Module:
    checkpoint = open_checkpoint(path, load_format)
    try:
        return load_model(checkpoint, BackendOptions(**options), progress)
    finally:
        checkpoint.close()


def logprobs(model: Module, tokens: Sequence[int]) -> Tensor:
    """Return [len(tokens), V]. The second half is computed after the first, from the cache."""
    cache, half = make_prompt_cache(model), len(tokens) // 2
    parts = [model(mx.array([list(part)]), cache=cache)[0] for part in (tokens[:half], tokens[half:])]
    logits = mx.concatenate(parts).astype(mx.float32)
    return torch.log_softmax(torch.from_numpy(np.array(logits)), -1)


def quantized_layers(model: Module) -> dict[str, Layout]:
    layers: Any = tree_flatten(model.leaf_modules(), is_leaf=Module.is_module)
    return {path: Layout(layer.bits, layer.group_size) for path, layer in layers if hasattr(layer, "bits")}


def dtypes(model: Module) -> set[mx.Dtype]:
    return {array.dtype for _, array in flat_parameters(model)}


def change_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


# The families that quire knows, against transformers


# mlx-lm has these as well, but not as transformers 5 saves them: it ignores Gemma 2's windows, reads one rotary
# embedding of OLMo 3, and does not know the name of Granite 4's layers.
NOT_IN_MLX = ("gemma2", "olmo3", "granite4")
# mlx-lm 0.32 reads the experts of gpt-oss in MXFP4 only, and not the per_layer_config of transformers 5.
NOT_READ_BY_MLX = ("gpt_oss", "gemma4")
IN_MLX = [name for name in FAMILIES if name.split()[0] not in (*NOT_IN_MLX, *NOT_READ_BY_MLX)]


@pytest.fixture(scope="module", params=IN_MLX)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(request.param, tmp_path_factory.mktemp("model"))


def test_folders_equal_transformers(reference: Reference) -> None:
    assert float((logprobs(load(reference.path), TOKENS) - reference.logprobs(TOKENS)).abs().max()) < BOUND


def test_tensors_equal_transformers(reference: Reference) -> None:
    """The code that reads GGUF files, with the tensors of a folder."""
    checkpoint = open_checkpoint(reference.path)
    if checkpoint.spec.family not in MODEL_TYPES:
        refusal = f"does not read GGUF files or dummy weights of {checkpoint.spec.family}"
        with pytest.raises(UnsupportedModel, match=refusal):
            load_from_tensors(checkpoint, BackendOptions(), "float32")
        return
    model = load_from_tensors(checkpoint, BackendOptions(), "float32")
    assert float((logprobs(model, TOKENS) - reference.logprobs(TOKENS)).abs().max()) < BOUND


@pytest.mark.parametrize("inner", ["mistral", "ministral3"])
def test_the_language_model_of_a_multimodal_mistral(inner: str, tmp_path: Path) -> None:
    """transformers reads tie_word_embeddings outside of text_config, mlx-lm inside."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    plain = {"rope_type": "default", "rope_theta": 10000.0}
    rope = MINISTRAL_ROPE if inner == "ministral3" else plain
    text = {**SIZES, "model_type": inner, "head_dim": 32, "sliding_window": None, "rope_parameters": rope}
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    vision = {"model_type": "pixtral", **sizes, "image_size": 32, "patch_size": 16, "head_dim": 16}
    torch.manual_seed(0)
    model: Any = Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision)).eval()
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    check_tensors(checkpoint)
    assert checkpoint.spec.family == "ministral3"
    assert float((logprobs(load(tmp_path), TOKENS) - reference_logprobs(model, TOKENS)).abs().max()) < BOUND


class WithNormsAsInGguf:
    """A checkpoint whose norm weights include the 1 that Gemma adds, as in GGUF files."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.path, self.tensors, self.generation = checkpoint.path, checkpoint.tensors, checkpoint.generation
        self.spec = replace(checkpoint.spec, norm_offset=0.0)
        self.read_packed = checkpoint.read_packed
        self.tokenizer_files, self.close = checkpoint.tokenizer_files, checkpoint.close

    def read(self, name: str) -> RawTensor:
        raw = self._checkpoint.read(name)
        if not name.endswith("norm.weight"):
            return raw
        return raw._replace(data=(to_float32(raw) + 1).view(np.uint8))


def test_norms_of_gemma_in_gguf(tmp_path: Path) -> None:
    reference = Reference("gemma3", tmp_path)
    model = load_from_tensors(WithNormsAsInGguf(open_checkpoint(tmp_path)), BackendOptions(), "float32")
    assert float((logprobs(model, TOKENS) - reference.logprobs(TOKENS)).abs().max()) < BOUND


def test_long_rope_follows_the_longest_context(tmp_path: Path) -> None:
    """With contexts over the trained length, the long factors replace the short ones, whatever the prompt's length."""
    Reference("phi3 long rope", tmp_path)
    change_config(tmp_path, original_max_position_embeddings=256)
    short, long = (
        load(tmp_path, max_model_len=length).layers[0].self_attn.rope(mx.ones((1, 1, 9, 16))) for length in (256, 512)
    )
    assert mx.array_equal(short[0, 0, 0], long[0, 0, 0])
    assert not mx.array_equal(short[0, 0, 8], long[0, 0, 8])


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("gemma3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "every n-th layer"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "logit softcapping"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, **BY_NUMBER}, "windows in some layers"),
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}, "activation"),
    ],
)
def test_settings_that_mlx_lm_ignores_are_refused(
    name: str, change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    Reference(name, tmp_path)
    change_config(tmp_path, **change)
    with pytest.raises(UnsupportedModel, match=problem):
        load(tmp_path)


# GGUF


def random_matrix(kind: TensorType, num_rows: int = 48, num_columns: int = 512) -> RawTensor:
    """Make random codes with scales of usual sizes."""
    rng = np.random.default_rng(1)
    block = BLOCKS[kind]
    count = num_rows * num_columns // block.num_elements
    data = rng.integers(0, 256, (count, block.num_bytes), np.uint8)
    set_scales(kind, data, rng.standard_normal((count, 2)) * 2e-3)
    info = TensorInfo("matrix", kind, (num_rows, num_columns), data.nbytes)
    return RawTensor(info, data.reshape(num_rows, -1))


def rms_error(found: mx.array, expected: np.ndarray[Any, Any]) -> float:
    return float(np.sqrt(np.square(np.array(found) - expected).sum() / np.square(expected).sum()))


@pytest.mark.parametrize(
    ("kind", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q4_K", 4), ("Q5_0", 5), ("Q5_1", 5), ("Q5_K", 5), ("Q8_0", 8)]
)
def test_codes_of_the_file_are_kept(kind: str, bits: int) -> None:
    raw = random_matrix(TensorType[kind])
    expected = np.concatenate([to_float32(raw)] * 2)
    found = gguf_model._pack([pack_blocks(raw)] * 2)
    assert found is not None
    layout, weight, scales, biases = found
    assert layout == Layout(bits, 32)

    def error(dtype: mx.Dtype) -> float:
        rounded = [one.astype(dtype).astype(mx.float32) for one in (scales, biases)]
        return rms_error(mx.dequantize(weight, rounded[0], rounded[1], group_size=32, bits=bits), expected)

    assert error(mx.float32) < 1e-7
    assert error(mx.float16) < (4e-4 if "K" in kind else 1e-7)
    assert error(mx.bfloat16) < 3e-3


def test_a_gguf_file_stays_packed(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf())
    seen: list[tuple[int, int]] = []
    loaded = load(path, progress=lambda done, total: seen.append((done, total)))
    assert 0 < seen[0][0] < seen[-1][0] == seen[-1][1]
    assert dtypes(loaded) == {mx.float32, mx.uint32}  # on a CPU
    layers = quantized_layers(loaded)
    assert layers["model.embed_tokens"] == Layout(8, 32)
    assert layers["model.layers.1.self_attn.q_proj"] == Layout(4, 32)
    assert "model.layers.0.self_attn.v_proj" not in layers  # F16 in the file
    assert dtypes(load(path, dtype="float16")) == {mx.float16, mx.uint32}
    rig = Rig(path)
    answer = rig.answer(range(40), 3)
    rig.engine.close()
    assert same_rows(answer, logprobs(loaded, [*range(40), *answer.tokens]), 40) < BOUND


@pytest.mark.parametrize(
    ("kind", "layouts", "bound"),
    [(None, {Layout(4, 32), Layout(8, 32)}, 0.15), ("Q5_K", {Layout(5, 32)}, BOUND)],
)
def test_k_quants(
    kind: str | None, layouts: set[Layout], bound: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_model, "CHUNK_ELEMENTS", 7 * 256)  # several parts, the last smaller
    path = write_k_quants(tmp_path, kind)
    loaded = load(path)
    assert set(quantized_layers(loaded).values()) == layouts
    rig = Rig(path)
    answer = rig.answer(range(40), 3)
    rig.engine.close()
    assert same_rows(answer, logprobs(loaded, [*range(40), *answer.tokens]), 40) < bound


def test_quantize_applies_to_what_a_gguf_file_does_not_quantise(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf())
    layers = quantized_layers(load(path, quantize=8))
    assert layers["model.layers.0.self_attn.v_proj"] == Layout(8, 64)
    assert layers["model.layers.1.self_attn.q_proj"] == Layout(4, 32)


def test_a_quantised_gguf_file_is_not_quantised_again(default_model: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"quantize = 4: .* is quantised already, to Q4_1"):
        load(default_model, quantize=4)


def test_scales_beyond_the_range_of_float16(tmp_path: Path) -> None:
    """The bias of Q8_0 is -128 times its scale."""
    tensors = llama_tensors()
    matrix = tensors["token_embd.weight"]
    blocks = np.frombuffer(matrix.data, np.uint8).reshape(-1, 34).copy()
    blocks[:, :2] = np.frombuffer(np.float16(512).tobytes(), np.uint8)
    tensors["token_embd.weight"] = matrix._replace(data=blocks.tobytes())
    path = tmp_path / "large.gguf"
    path.write_bytes(make_gguf(llama_keys(), list(tensors.items())))
    with pytest.raises(ModelFileError, match=r"embedding.weight has scales that are not finite in float16"):
        load(path, dtype="float16")
    load(path)


# The default model


def test_a_quantised_folder_is_not_quantised_again(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "llama", quantization={"group_size": 32, "bits": 4})
    with pytest.raises(InvalidRequest, match=r"quantize = 8: .* to 4 bits \(affine, groups of 32\)"):
        load(folder, quantize=8)


# Folders


@pytest.mark.parametrize("bits", [4, 8])
def test_quantize_a_plain_folder(bits: int, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, arrays={name: one / 8 for name, one in llama_arrays().items()})
    plain, loaded = load(folder), load(folder, quantize=bits)
    assert num_bytes(loaded) < num_bytes(plain)
    layers = quantized_layers(loaded)
    assert layers["model.embed_tokens"] == layers["lm_head"] == Layout(bits, 64)
    assert layers["model.layers.0.mlp.down_proj"] == Layout(bits, 32)  # 64 does not divide 96
    for path, layout in layers.items():
        layer, before = (_at(one, path) for one in (loaded, plain))
        found = mx.dequantize(layer.weight, layer.scales, layer.biases, layout.group_size, layout.bits)
        assert mx.abs(found - before.weight).max() < mx.abs(before.weight).max() * 2 / (2**bits - 1)


def _at(model: Module, path: str) -> Any:
    found: Any = model
    for name in path.split("."):
        found = found[int(name)] if name.isdigit() else getattr(found, name)
    return found


def test_a_model_decides_which_layers_are_quantised(tmp_path: Path) -> None:
    """mlx-lm's gpt_oss keeps 8 bits in groups of 64 for the router."""
    layers = quantized_layers(load(write_model(tmp_path / "m", "gpt_oss"), quantize=4))
    assert layers["model.layers.0.mlp.router"] == Layout(8, 64)
    assert layers["model.layers.0.self_attn.q_proj"] == Layout(4, 64)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes(dtype: str, tmp_path: Path) -> None:
    arrays = {name: one.astype(np.float16) for name, one in llama_arrays().items()}
    folder = write_folder(tmp_path, config(torch_dtype="float16"), arrays, dtype="F16")
    assert dtypes(load(folder, dtype=dtype)) == {getattr(mx, dtype)}


def test_quantising_frees_each_layer_before_the_next(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 512}
    folder = write_model(tmp_path / "m", "llama", **sizes, head_dim=128)
    checkpoint = open_checkpoint(folder)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    seen: list[tuple[int, int]] = []
    loaded = load_model(checkpoint, BackendOptions(quantize=4), lambda done, total: seen.append((done, total)))
    peak = mx.get_peak_memory() - before
    largest = 4 * 512 * 1024
    assert peak < num_bytes(loaded) + 3 * largest
    assert sum(info.num_bytes for info in checkpoint.tensors.values()) > 2 * peak
    assert seen[-1] == (num_bytes(loaded), num_bytes(loaded))
    assert len(seen) > 8 * 7


def test_the_language_model_of_a_multimodal_gemma(tmp_path: Path) -> None:
    text: dict[str, Any] = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 4}
    text |= {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    text |= {"sliding_window": 8, "query_pre_attn_scalar": 16}
    nested = {**text, "sliding_window_pattern": 2, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    changes: dict[str, Any] = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": nested}
    for quantization in (None, {"group_size": 32, "bits": 4}):  # the first is read by quire, the second by mlx-lm
        folder = tmp_path / f"{quantization}"
        write_model(folder, "llama", quantization=quantization, model_type="gemma3", vocab_size=160, **changes)
        found = logprobs(load(folder, dtype="float32"), TOKENS)
        assert float((found - DenseReference(folder).logprobs(TOKENS)).abs().max()) < BOUND


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("awq g32", Layout(4, 32)),
        ("ct w4 asymmetric", Layout(4, 32)),
        ("ct w4 g64", Layout(4, 64)),
        ("gptq act-order", Layout(8, 32)),
        ("fp8 small blocks", Layout(8, 32)),
        ("ct w8 g64", Layout(8, 64)),
    ],
)
def test_quantised_safetensors(name: str, layout: Layout, tmp_path: Path) -> None:
    """Codes stay as they are. Without groups of columns in order, and in FP8, they are rounded again."""
    arrays = {key: array / 8 for key, array in llama_arrays().items()}
    for i in range(2):  # 96 is not a multiple of 64
        for key in ("gate_proj", "up_proj"):
            rows = f"model.layers.{i}.mlp.{key}.weight"
            arrays[rows] = np.concatenate((arrays[rows], arrays[rows][:32]))
        down = f"model.layers.{i}.mlp.down_proj.weight"
        arrays[down] = np.concatenate((arrays[down], arrays[down][:, :32]), axis=1)
    settings = config(intermediate_size=128, model_type="llama")
    weights = write_quantized(tmp_path / "packed", LAYOUTS[name], settings, arrays)
    expected = load(write_folder(tmp_path / "plain", settings, weights))
    loaded = load(tmp_path / "packed")
    assert main_layout(loaded) == layout
    tokens = [one % 64 for one in TOKENS]
    difference = float((logprobs(loaded, tokens) - logprobs(expected, tokens)).abs().max())
    assert difference < (0.05 if name in ("gptq act-order", "fp8 small blocks") else BOUND)


# Errors


@pytest.mark.parametrize("name", ["cache", "base", "llama-x", "olmo77"])
def test_a_module_of_mlx_lm_that_is_missing_or_no_model(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=rf"mlx-lm \d.* has no model_type '{name}'"):
        load(change_config(write_model(tmp_path / "m", "olmo2"), model_type=name))


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    folder = change_config(write_model(tmp_path / "m", "olmo2"), model_file="model.py")
    (folder / "model.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UnsupportedModel, match=r"model_file 'model.py' is code in the folder, which is not run"):
        load(folder)
    assert not (tmp_path / "ran").exists()


def test_missing_and_unexpected_tensors(tmp_path: Path) -> None:
    arrays = llama_arrays()
    del arrays["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelFileError, match=r"Missing 1 parameters: model.layers.1.mlp.up_proj.weight"):
        load(write_folder(tmp_path / "a", arrays=arrays))
    extra = {f"model.extra.{i}": np.zeros(4, np.float32) for i in range(9)}
    with pytest.raises(ModelFileError, match=r"Received 9 parameters not in model: model.extra.0"):
        load(write_folder(tmp_path / "b", arrays={**llama_arrays(), **extra}))


def test_tensors_of_the_wrong_shape(tmp_path: Path) -> None:
    arrays = {**llama_arrays(), "model.norm.weight": np.zeros(HIDDEN + 1, np.float32)}
    with pytest.raises(ModelFileError, match=r"cannot load it: .*model.norm.weight"):
        load(write_folder(tmp_path, arrays=arrays))


@pytest.mark.parametrize(
    "changes",
    [
        {"intermediate_size": "many"},
        {"hidden_size": None},
        {"num_attention_heads": 3},
        {"num_experts": -1},
        {"nested": {"n_layers": 1 << 40}},
        {"rope_scaling": {"type": "yarn"}},
        {"quantization": {"bits": 4}},
        {"quantization": {"bits": 77, "group_size": 64}},
        {"quantization": [1]},
        {"text_config": 7},
        {"architectures": [["x"]]},
    ],
)
def test_a_forged_config_is_a_model_file_error(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "olmoe")
    with pytest.raises((ModelFileError, InvalidRequest)) as raised:
        open_runner(change_config(folder, **changes))
    assert len(str(raised.value)) < 1000


# Random weights


@pytest.mark.parametrize("name", ["llama with biases", "qwen3", "gemma3", "phi3 long rope"])
def test_dummies(name: str, tmp_path: Path) -> None:
    Reference(name, tmp_path)
    first, second = (load(tmp_path, "dummy") for _ in range(2))
    for (path, array), (_, same) in zip(flat_parameters(first), flat_parameters(second), strict=True):
        assert mx.array_equal(array, same)
        if path.endswith("norm.weight"):
            assert mx.all(array == (0 if name == "gemma3" else 1))  # mlx-lm's Gemma adds 1
        else:
            assert 0 < mx.abs(array).max() < 0.12
    layers = [layer.self_attn.o_proj.weight for layer in first.layers]
    assert not mx.array_equal(layers[0], layers[1])
    assert mx.all(mx.isfinite(first(mx.array([TOKENS]))))


def test_a_quantised_dummy(tmp_path: Path) -> None:
    write_folder(tmp_path, config(torch_dtype="bfloat16"))
    loaded = load(tmp_path, "dummy", quantize=4)
    assert main_layout(loaded) == Layout(4, 64)
    assert _at(loaded, "model.layers.0.mlp.down_proj").scales.shape == (HIDDEN, FFN // 32)


# Files that mlx-lm would read


def test_files_of_weights_that_were_not_checked_are_refused(tmp_path: Path) -> None:
    """mlx-lm reads every model*.safetensors in a folder, and a later file replaces tensors of an earlier one."""
    folder = write_model(tmp_path / "m", "llama", architectures=["LlamaForCausalLM"], tie_word_embeddings=False)
    outside = tmp_path / "outside.safetensors"
    mx.save_safetensors(str(outside), {"model.norm.weight": mx.full((64,), 7.0)})
    (folder / "model_extra.safetensors").symlink_to(outside)
    with pytest.raises(ModelFileError, match="model_extra"):
        load(folder)


@pytest.mark.parametrize("name", ["num_experts", "n_routed_experts", "moe_num_experts"])
def test_forged_numbers_of_experts_are_refused(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "dbrx" if name.startswith("moe") else "qwen3_moe")
    config = json.loads((folder / "config.json").read_text())
    (config["ffn_config"] if name.startswith("moe") else config)[name] = 300_000
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match=name):
        load(folder)


def test_experts_in_16_bits_run_on_a_cpu(tmp_path: Path) -> None:
    """MLX gathers matrices of experts in float32 only there."""
    folder = write_model(tmp_path / "m", "qwen3_moe")
    weights: Any = mx.load(str(folder / "model.safetensors"))
    half = {name: array.astype(mx.bfloat16) for name, array in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), half, {"format": "mlx"})
    rig = Rig(folder, backend="mlx")
    assert rig.answer([5, 6, 7], 3).error is None
    assert rig.engine.runner.facts().dtype == "float32"
    rig.engine.close()
