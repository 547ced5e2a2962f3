"""Every kernel compiles for an H200, also without one: the compiler may refuse what the interpreter accepts."""

from __future__ import annotations

import gc
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import interpreter

from quire.backends.torch.kernel_compilation import (
    LATER_NICE,
    Compiling,
    first_calls,
    later_calls,
    packed_calls,
    routed_calls,
)
from quire.backends.torch.kernels.blocks import copy_blocks
from quire.backends.torch.loading import expert_formats
from quire.backends.torch.packed import QUANTIZED
from quire.weights.opening import open_checkpoint
from tests.backends.torch.fused_rig import FusedRig
from tests.backends.torch.kernels.device import DEVICE

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 5000,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
DTYPES = (torch.float32, torch.bfloat16)
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        **SIZES,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 80,
        "attn_logit_softcapping": 30.0,
        **SIZES,
        "hidden_size": 576,  # not a multiple of the tiles
        "intermediate_size": 500,
        "head_dim": 80,
    },
}
GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"],
    **SIZES,
    "head_dim": 64,
    "global_head_dim": 128,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": 5000,
}
# Kernels that only some families need.
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        **SIZES,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        **SIZES,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "quantization_config": {"quant_method": "mxfp4"},
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma4": {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
    "gemma4 with experts": {
        **GEMMA4,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 128,
    },
    "gemma4 with shared layers": {
        **GEMMA4,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], **SIZES},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], **SIZES, "no_rope_layers": [1, 0]},
    "granite": {"architectures": ["GraniteForCausalLM"], **SIZES, "residual_multiplier": 0.22, "logits_scaling": 4.0},
    "ministral3": {
        "architectures": ["Ministral3ForCausalLM"],
        **SIZES,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "llama_4_scaling_beta": 0.1,
        },
    },
}


def write_config(name: str, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIGS, **VARIANTS}[name]))
    return folder


def ptxas_problem() -> str | None:
    """Return why there is no assembler for GPUs here, or None if there is one."""
    script = "from triton import knobs; print(knobs.nvidia.ptxas.path)"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    if found.returncode:
        return "Triton finds no ptxas for this platform: " + found.stderr.strip().rsplit("\n", 1)[-1]
    return None


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_every_kernel_compiles_for_an_h200(tmp_path: Path) -> None:
    """Uses one process, so that kernels shared by the models are compiled once."""
    if (problem := ptxas_problem()) is not None:
        pytest.skip(problem)
    cache = tmp_path / "cache"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    folders = [str(write_config(name, tmp_path / name)) for name in (*CONFIGS, *VARIANTS)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.torch.compile_child", *folders],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = {path.stem for path in cache.glob("*/*.cubin")}
    sampling = {"_change", "_count", "_edit", "_find_floors", "_measure", "_pick", "_weigh"}
    blocks = {"_copy_blocks", "_update_tables", "_move_pieces"}
    layers = {"_attend", "_embed", "_gated", "_merge", "_norm", "_rope_store", "_few_rows"}
    layers |= {"_packed_rows", "_packed_tiles", "_quantize_rows", "_fp8_product", "_expand_packed"}
    layers |= {"_apply_scales", "_gated_rows"}
    experts = {"_route", "_sort", "_grouped_product", "_weighted_sum", "_gated_alone", "_down_alone"}
    experts |= {"_mxfp4_product", "_gated_alone_mxfp4", "_down_alone_mxfp4", "_expand"}
    experts |= {"_quantized_product", "_gated_alone_quantized", "_down_alone_quantized"}
    states = {"_decode", "_convolved", "_prepare", "_pass_states", "_finish", "_gate_output"}
    states |= {"_short_decode", "_short_chunk", "_short_store"}
    assert compiled == sampling | blocks | layers | experts | states | {
        "_tile_product",
        "_large_product",
        "_norm_columns",
    }


def kind(value: object) -> object:
    """Return what Triton compiles a kernel for: the type of a tensor, the width of a number."""
    if isinstance(value, Tensor):
        return value.dtype
    return "i64" if isinstance(value, int) and not -(2**31) <= value < 2**31 else None


def zeroed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **options: make(*args, **options).zero_()


class Launches:
    """Records which kernels are launched in which form, that is, what Triton would compile each for. None runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forms: set[tuple[object, ...]] = set()

        def run(kernel: Any, *args: Any, **options: Any) -> None:
            values = inspect.signature(kernel.fn).bind_partial(*args).arguments
            types = tuple((name, kind(value)) for name, value in values.items())
            constants = {name: value for name, value in options.items() if name not in ("grid", "warmup")}
            self.forms.add((kernel.fn.__name__, types, *sorted(constants.items())))

        monkeypatch.setattr(interpreter.InterpretedFunction, "run", run)
        # What a kernel would have written is 0, not the content of unused memory: token 0 is sampled.
        for name in ("empty", "empty_like"):
            monkeypatch.setattr(torch, name, zeroed(getattr(torch, name)))


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")  # rows of padding
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # in bf16, on a CPU without instructions for it
@pytest.mark.skipif(DEVICE != "cpu", reason="reads the arguments of the interpreter")
@pytest.mark.parametrize(
    ("name", "dtype", "bits", "is_fp8"),
    [
        *((name, dtype, None, False) for name in CONFIGS for dtype in DTYPES),
        *((one, torch.float32, None, False) for one in VARIANTS),
        *((name, torch.float32, bits, False) for name in (*CONFIGS, "qwen3_moe") for bits in QUANTIZED),
        *((name, torch.bfloat16, 8, False) for name in CONFIGS),
        *((name, torch.float32, None, True) for name in (*CONFIGS, "gemma4 with shared layers", "gpt_oss")),
    ],
)
def test_kernels_of_steps_are_compiled_in_advance(
    name: str, dtype: torch.dtype, bits: int | None, is_fp8: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A form that is not in the lists would be compiled in a request's first step, or while a graph is captured."""
    folder = write_config(name, tmp_path)
    rig = FusedRig(folder, max_num_seqs=8, load_format="dummy", dtype=dtype, quantize_bits=bits, is_fp8=is_fp8)
    spec, format = rig.runner.model.spec, None if bits is None else QUANTIZED[bits]
    formats = expert_formats(open_checkpoint(folder, "dummy"), bits)
    with monkeypatch.context() as patch, torch.inference_mode():
        ahead = Launches(patch)
        for call in first_calls(spec, dtype, 32, torch.device("cpu"), has_fp8_kv=is_fp8):
            call()
        for call in routed_calls(spec, dtype, 512, formats):
            call()
        for call in packed_calls(spec, dtype, format):
            call()
        first = set(ahead.forms)
        for call in later_calls(spec, dtype, 32, format, has_fp8_kv=is_fp8):
            call()
    launches = Launches(monkeypatch)
    answers = rig.run(rig.start([5] * 5, 2, logprobs=None), rig.start([6] * 4, 2, temperature=1.0, logprobs=None))
    assert [len(answer.tokens) for answer in answers.values()] == [2, 2]
    assert launches.forms <= first
    others = {form[0] for form in first - launches.forms}
    unused = {"_merge", "_find_floors", "_weigh"}  # nothing was split, top-p was not used
    routed = {"_route", "_sort", "_count", "_grouped_product", "_weighted_sum", "_gated_alone", "_down_alone"}
    routed |= {"_mxfp4_product", "_gated_alone_mxfp4", "_down_alone_mxfp4", "_expand"}
    routed |= {"_quantized_product", "_gated_alone_quantized", "_down_alone_quantized"}
    unused |= {"_fp8_product"}  # tiles for more rows
    unused |= {"_norm", "_gated_rows", "_apply_scales"} if bits == 8 else set()
    if bits is not None:  # of experts, with many rows
        routed |= {"_quantize_rows", "_expand_packed"}
    assert others <= (unused | routed if spec.has_experts else unused)  # other numbers of rows have other tiles
    with torch.inference_mode():
        while rig.runner._graphs.prepare():
            pass
    assert launches.forms <= ahead.forms
    names = ("_row_product", "_tile_product", "_packed_rows", "_packed_tiles")
    products = {form for form in ahead.forms if form[0] in names and of_few_rows(form)}
    assert products <= launches.forms  # and none is compiled without being used


def of_few_rows(form: tuple[object, ...]) -> bool:
    return not {("ROWS", 32), ("ROWS", 64), ("ROWS", 128)} & {*form}  # larger graphs than these were captured


@pytest.mark.skipif(DEVICE != "cpu", reason="reads the arguments of the interpreter")
def test_a_pool_of_any_size_is_copied_by_the_same_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of the larger pool has 2**32 elements: that stride would not be a 32-bit number, unlike the smaller's."""
    launches = Launches(monkeypatch)
    one = torch.zeros(1, dtype=torch.int32)
    for num_blocks in (2, 2**18):
        copy_blocks(torch.empty(3, num_blocks, 2, 4, 32, 64, dtype=torch.bfloat16, device="meta"), one, one)
    assert len(launches.forms) == 1


def test_a_compiling_child_never_collects_garbage(tmp_path: Path) -> None:
    """Found on a GPU: the child collected tensors of the parent and aborted."""
    first, later = tmp_path / "first", tmp_path / "later"
    calls: list[Callable[[], object]] = [lambda: first.write_text(str(gc.isenabled()))]
    more: list[Callable[[], object]] = [lambda: later.write_text(str(gc.isenabled()))]
    compiling = Compiling(calls, more, GPUTarget("cuda", 90, 32))
    compiling.wait()
    assert first.read_text() == later.read_text() == "False"
    assert gc.isenabled()
    assert not compiling.is_running


def test_the_first_kernels_do_not_wait_for_the_later_ones(tmp_path: Path) -> None:
    """The later ones run at a low priority. A call that fails does not end its child."""
    order = tmp_path / "order"
    go = tmp_path / "go"

    def first() -> None:
        order.write_text("first")

    def later() -> None:
        while not go.exists():
            time.sleep(0.01)
        order.write_text(f"later {os.nice(0)}")

    compiling = Compiling([first, lambda: 1 / 0], [later], GPUTarget("cuda", 90, 32))
    compiling.wait_first()
    assert order.read_text() == "first"
    assert compiling.is_running
    go.touch()
    compiling.wait()
    assert order.read_text() == f"later {min(os.nice(0) + LATER_NICE, 19)}"
    assert not compiling.is_running


def test_a_compiling_child_that_dies_does_not_delay_the_parent() -> None:
    compiling = Compiling([lambda: os._exit(1)], [], GPUTarget("cuda", 90, 32))
    compiling.wait_first()
    compiling.wait()
    assert not compiling.is_running
