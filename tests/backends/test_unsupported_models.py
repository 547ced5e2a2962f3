"""Models that a backend does not run are refused with a reason: the errors of other libraries' code are not shown."""

from __future__ import annotations

import json
import pkgutil
import re
from pathlib import Path
from typing import Any

import mlx_lm.models
import numpy as np
import pytest
from typer.testing import CliRunner

from quire.backends.support import describe_error
from quire.cli.doctor import check_model
from quire.cli.main import app
from quire.engine.composition import EngineConfig, make_engine
from quire.engine.llm import LLM
from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.fields import Fields
from quire.weights.opening import open_checkpoint
from quire.weights.other import find_other_layers, find_unsupported
from tests.backends.torch.hf_architectures import TINY, make_config, write_model
from tests.text.vocabularies import byte_level_json
from tests.weights.makers import safetensors_bytes

INTERNALS = re.compile(
    r"NoneType|has no attribute|__\w+__|positional argument|keyword argument|Traceback|\w+Error\b|list index"
    r"|not in list|not subscriptable|not iterable|unpack|<class|<function| at 0x|unsupported operand|Exception"
)
BACKENDS = ("native", "torch", "mlx")
TORCH_HINT = "The torch backend may run it, through transformers: --backend torch"
MAMBA = r"layers_block_type: layers of type linear_attention \(Mamba: ssm_state_size is 128\) do not run: only"
# Model types, the backend, and a part of the reason.
REASONS = [
    ("nemotron_h", "native", rf"quire has no equations for 'NemotronHForCausalLM'; .*; {MAMBA}"),
    ("nemotron_h", "torch", MAMBA),
    ("nemotron_h", "mlx", "NemotronHForCausalLM does not run on the mlx backend: .*recurrent state"),
    ("gpt2", "mlx", rf"GPT2LMHeadModel does not run on the mlx backend: .*config.json has no 'n_ctx'. {TORCH_HINT}"),
    ("deepseek_v2", "mlx", rf"DeepseekV2ForCausalLM does not run on the mlx backend: .*config.json. {TORCH_HINT}"),
    ("minicpm3", "mlx", rf"MiniCPM3ForCausalLM does not run on the mlx backend: .*{TORCH_HINT}"),
    ("apertus", "mlx", rf"config.json has no 'mlp_bias', 'post_norm', and 'qk_norm'. {TORCH_HINT}"),
    ("afmoe", "mlx", rf"its code does not accept this config.json. {TORCH_HINT}"),  # ValueError of list.index
    ("arcee", "mlx", rf"ArceeForCausalLM does not .* has no model_type 'arcee'. {TORCH_HINT}"),
    ("olmo", "mlx", rf"needs another package for model_type 'olmo'. {TORCH_HINT}"),  # its module ends the process
    ("qwen3_moe", "mlx", r"config.json has no 'head_dim'. The native backend runs it: --backend native"),
    ("granitemoehybrid", "mlx", "does not run it: Unknown layer type: full_attention. The native backend runs it"),
    ("deepseek_v32", "mlx", "its code uses its cache in another way"),
    ("qwen3_next", "mlx", "models with a recurrent state .* do not run yet$"),  # no other backend runs it either
    ("bart", "torch", "encoder_layers is 3: only decoders run"),
    ("bamba", "torch", "mamba_d_state is 256: Mamba layers do not run"),
    ("bloom", "torch", "has attention of its own"),
    ("xmod", "torch", "transformers does not run it on text: Input language unknown"),
]  # fmt: skip


def refuse(folder: Path, backend: str) -> str:
    config = EngineConfig(backend=backend, num_blocks=64, threads=1, max_model_len=256, device="cpu")
    with pytest.raises(ModelFileError) as refused:
        make_engine(folder, config)
    assert not INTERNALS.search(str(refused.value))
    return str(refused.value)


@pytest.mark.parametrize(("model_type", "backend", "reason"), REASONS)
def test_a_model_that_a_backend_does_not_run(model_type: str, backend: str, reason: str, tmp_path: Path) -> None:
    write_model(tmp_path, model_type)
    text = refuse(tmp_path, backend)
    assert re.search(reason, text), text


def test_doctor_and_llm_give_the_same_reason(tmp_path: Path) -> None:
    write_model(tmp_path, "nemotron_h", vocab_size=512)
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_level_json()))
    shown = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert re.search(MAMBA, shown.output.replace("\n", " "))
    for backend in ("native", "torch"):
        with pytest.raises(UnsupportedModel, match=MAMBA):
            LLM(tmp_path, backend=backend)


@pytest.mark.nightly
def test_no_report_of_a_model_type_shows_the_code_of_a_library(tmp_path: Path) -> None:
    """Every causal model type of transformers whose small config can be made."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    num_made, sizeless = 0, []
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        folder = tmp_path / model_type
        try:
            make_config(model_type).save_pretrained(folder)
        except Exception:  # the sizes do not fit this type
            continue
        num_made += 1
        problem = check_model(folder)["problem"]
        assert not INTERNALS.search(problem), f"{model_type}: {problem}"
        sizeless += [model_type] if "is missing" in problem else []
    assert num_made > 170
    assert sizeless == ["blt", "xlm"]  # which have no usual names of sizes


def test_no_model_type_of_mlx_lm_shows_its_code(tmp_path: Path) -> None:
    """A config with a few sizes and a file with one tensor: most types need more."""
    names = [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__) if not module.ispkg]
    assert len(names) > 100
    sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    weights = safetensors_bytes({"model.norm.weight": np.zeros(64, np.float32)})
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": name, **{size: TINY[size] for size in sizes}}))
        (folder / "model.safetensors").write_bytes(weights)
        refuse(folder, "mlx")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"hybrid_override_pattern": "M-M*-"},
            "hybrid_override_pattern is 'M-M*-': layers of type M (Mamba) do not run",
        ),
        ({"layer_types": ["a\x1b[31m", "attention"]}, r"layer_types: layers of type 'a\x1b[31m' do not run"),
        ({"layer_types": ["x" * 5000]}, "layer_types: layers of type xxx"),
        ({"layers_block_type": ["mamba", "attention", "mlp"]}, "layers_block_type: layers of type mamba do not run"),
        ({"text_config": {"mamba_d_state": 16}}, "mamba_d_state is 16: Mamba layers do not run"),
        ({"layer_types": ["attention"], "mamba_d_state": 16}, ""),  # Granite 4 without H
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True: only decoders run"),
        ({"layer_types": 7, "text_config": [1]}, ""),
        ({}, ""),
    ],
)
def test_layers_that_do_not_run_are_found_in_a_config(config: dict[str, Any], reason: str) -> None:
    found = find_other_layers(config)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)
    assert len(found) < 400
    whole = find_unsupported(Fields("config.json", {"architectures": ["Other"], **config}))
    assert reason in whole


def test_the_number_of_layers_may_be_the_length_of_their_list(tmp_path: Path) -> None:
    make_config("nemotron_h").save_pretrained(tmp_path)
    spec = open_checkpoint(tmp_path, "dummy").spec
    assert (spec.num_layers, spec.has_other_layers) == (4, True)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (AttributeError("'NoneType' object has no attribute 'get'"), "otherwise"),
        (KeyError("rope_theta"), "otherwise"),
        (ValueError("'full_attention' is not in list"), "otherwise"),
        (ValueError(""), "otherwise"),
        (ValueError("Unknown layer type:\n  ValueError: conv\x1b[31m"), r"Unknown layer type: conv\x1b[31m"),
        (RuntimeError("x" * 1000), "x" * 300 + "..."),
    ],
)
def test_errors_of_other_libraries(error: Exception, text: str) -> None:
    assert describe_error(error, "otherwise") == text
