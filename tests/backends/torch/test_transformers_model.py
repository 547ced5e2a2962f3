"""Decoders of `transformers` over the paged cache equal the library's own attention, or are refused by name."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quire.backends.support import find_transformers_problem
from quire.backends.torch import block_io
from quire.backends.torch.models import transformers_model
from quire.backends.torch.models.hf_loading import Siblings, merge_siblings
from quire.backends.torch.models.hf_modules import find_window, replace_norms
from quire.backends.torch.models.transformers_model import load_transformers_model
from quire.errors import ModelFileError, UnsupportedModel
from quire.weights.safetensors import SafetensorsCheckpoint
from tests.backends.contract import Contract, Pair, random_prompt
from tests.backends.torch.hf_architectures import (
    BOUND,
    EQUAL,
    NUM_KEPT,
    REFUSED,
    EagerReference,
    largest_error,
    load_tiny,
    write_model,
)
from tests.backends.torch.hf_rig import ModelRig
from tests.backends.torch.rig import Answer, Rig, same_rows
from tests.selection import mostly_nightly
from tests.tiny import write_tiny_model

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


@pytest.mark.parametrize("model_type", mostly_nightly(EQUAL, NUM_KEPT))
def test_distributions_equal_those_of_eager_attention(model_type: str, tmp_path: Path) -> None:
    model = write_model(tmp_path, model_type)
    assert largest_error(EagerReference(model), ModelRig(load_tiny(tmp_path))) < BOUND


@pytest.mark.parametrize(("model_type", "reason"), REFUSED.items())
def test_other_models_are_refused_by_name(model_type: str, reason: str, tmp_path: Path) -> None:
    write_model(tmp_path, model_type)
    with pytest.raises(UnsupportedModel, match=reason):
        load_tiny(tmp_path)


@pytest.fixture(scope="module", params=["gpt_oss", "deepseek_v3", "gemma4_text"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("model")
    model = write_model(folder, request.param)
    return EagerReference(model), ModelRig(load_tiny(folder), block_size=32)


class TestContract(Contract):
    """All tests of backends on models with windows, sinks, experts, values of another size, and shared caches."""

    bound = BOUND


# Merging and norms


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.other = nn.Linear(8, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.tanh(self.gate(x)) * self.up(x) + self.other(x))
        return out


def test_products_with_the_same_input_are_merged() -> None:
    torch.manual_seed(0)
    module = _Gated().requires_grad_(False)
    x, y = torch.randn(2, 1, 5, 8)
    expected, lone = module(x), module.up(y)
    siblings = Siblings(module)
    with siblings.recording():
        module(x)
    assert merge_siblings(siblings) == 1  # gate and up; `other` has no bias
    assert module.gate.weight.untyped_storage().data_ptr() == module.up.weight.untyped_storage().data_ptr()
    for _ in range(2):
        torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(module.up(y), lone)  # out of order: a product of its own
    module.gate(x)
    torch.testing.assert_close(module.up(y), lone)
    torch.testing.assert_close(module(x), expected)


def test_a_llama_has_two_merged_products_per_layer_and_no_norm_of_the_library(tmp_path: Path) -> None:
    model: Any = write_model(tmp_path, "llama")
    siblings = Siblings(model)
    with siblings.recording():
        model(input_ids=torch.tensor([[3, 4, 5]]))
    groups = siblings.groups()
    sizes = sorted(tuple(linear.out_features for linear in group) for group in groups)
    assert sizes == [(64, 32, 32)] * 3 + [(96, 96)] * 3
    assert replace_norms(model) == 2 * 3 + 1


@pytest.mark.parametrize(("model_type", "count"), [("gemma3_text", 3 * 6 + 1), ("olmo", 0), ("gpt2", 0)])
def test_only_standard_norms_are_replaced(model_type: str, count: int, tmp_path: Path) -> None:
    """Gemma's 1 + w is known; norms without weights, and layer norms, stay."""
    assert replace_norms(write_model(tmp_path, model_type)) == count


# What must be refused


def test_windows_are_read_from_masks() -> None:
    from transformers import masking_utils as masks

    cpu = torch.device("cpu")
    assert find_window(masks.causal_mask_function, 100, cpu, "m") == 0
    assert find_window(masks.sliding_window_causal_mask_function(7), 100, cpu, "m") == 7
    assert find_window(masks.sliding_window_causal_mask_function(100), 100, cpu, "m") == 0
    chunks = masks.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64))
    for function in (masks.bidirectional_mask_function, chunks):
        with pytest.raises(UnsupportedModel):
            find_window(function, 100, cpu, "m")


def test_loading_reports_its_progress(tmp_path: Path) -> None:
    write_model(tmp_path, "gpt2")
    seen: list[tuple[int, int]] = []
    load = partial(load_transformers_model, SafetensorsCheckpoint(tmp_path), torch.float32, torch.device("cpu"), 64)
    load(lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == len(seen)


def test_missing_tensors_are_not_random(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_model(tmp_path, "gpt2")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["transformer.h.1.attn.c_attn.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelFileError, match=r"1 tensors are missing or have other shapes: .*c_attn"):
        load_tiny(tmp_path)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "deci", "auto_map": {"AutoConfig": "x.Deci"}}, "need the code in their folder"),
        ({"model_type": "neverheard"}, "a newer version may"),
        ({"model_type": "bart", "is_encoder_decoder": True}, "encoder"),
        ({"model_type": "vit"}, "no decoder of text"),
        ({"model_type": "gpt2", "quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, "layers of type conv"),
        ({"model_type": "gpt2"}, ""),
        ({"model_type": "gpt2", "auto_map": {"AutoConfig": "x.Own"}}, ""),  # the library's class is used
    ],
)
def test_reasons_are_known_before_loading(config: dict[str, Any], reason: str) -> None:
    found = find_transformers_problem(config)
    assert reason in found if reason else not found


def test_the_code_of_a_folder_is_never_run(tmp_path: Path) -> None:
    write_model(tmp_path, "gpt2")
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = json.loads((tmp_path / "config.json").read_text())
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": names}))
    load_tiny(tmp_path)
    assert not (tmp_path / "ran").exists()


# Loading


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64,
}
MSCALES = {"short_mscale": 1.0, "long_mscale": 1.6}


def _largest_difference(one: Answer, other: Answer) -> float:
    return float((torch.stack(one.rows) - torch.stack(other.rows)).abs().max())


@pytest.mark.parametrize(
    ("model_type", "settings"), [("phimoe", MSCALES), ("llama", {}), ("phi3", {}), ("minicpm3", {"factor": 4.0})]
)
def test_long_rope_does_not_depend_on_other_requests_chunks_or_the_cache(
    model_type: str, settings: dict[str, float], tmp_path: Path
) -> None:
    """The rope of phimoe reads the largest position of a pass, in its own code."""
    num_pairs = 4 if model_type == "minicpm3" else 8
    rope = LONG_ROPE | settings | {"short_factor": [1.0] * num_pairs, "long_factor": [4.0] * num_pairs}
    outside = {"original_max_position_embeddings": 64} if model_type == "phi3" else {}
    reference = EagerReference(write_model(tmp_path, model_type, rope_parameters=rope, **outside))
    model = load_tiny(tmp_path)
    assert model.notice
    rig = ModelRig(model)
    short, long = random_prompt(5, 40), random_prompt(6, 100)
    alone = {len(prompt): rig.answer(prompt, 4) for prompt in (short, long)}
    rig.reset(max_chunk_tokens=16)
    together = rig.run(*[rig.start(prompt, 4) for prompt in (short, long)])
    for prompt, answer in zip((short, long), together.values(), strict=True):
        assert _largest_difference(answer, alone[len(prompt)]) < BOUND
    cached = rig.answer([*short, 7, 8, 9, *long], 4)
    assert cached.num_cached_tokens == len(short)
    rig.reset()
    assert _largest_difference(rig.answer([*short, 7, 8, 9, *long], 4), cached) < BOUND
    expected = reference.logprobs([*long, *alone[100].tokens])  # what the library does with a long request
    assert same_rows(alone[100], expected, 100) < BOUND


def test_the_trial_finds_a_rope_that_reads_the_longest_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_model, "_always_see", lambda *_: None)
    write_model(tmp_path, "phimoe", rope_parameters=LONG_ROPE | MSCALES)
    with pytest.raises(UnsupportedModel, match="logits differ by"):
        load_tiny(tmp_path)


@pytest.mark.parametrize(
    ("changes", "max_model_len", "has_notice"),
    [
        (MSCALES, 256, True),
        (MSCALES, 64, False),
        ({"short_mscale": 1.2, "long_mscale": 1.2}, 256, False),  # the published phimoe: one rotation for all lengths
    ],
)
def test_users_are_told_if_short_requests_are_rotated_in_another_way(
    changes: dict[str, float], max_model_len: int, has_notice: bool, tmp_path: Path
) -> None:
    write_model(tmp_path, "phimoe", rope_parameters=LONG_ROPE | changes)
    model = load_transformers_model(SafetensorsCheckpoint(tmp_path), torch.float32, torch.device("cpu"), max_model_len)
    assert ("--max-model-len 64 uses" in model.notice) == has_notice
    assert ModelRig(model).engine.runner.facts().notice == model.notice


def test_an_engine_runs_a_folder_that_quire_has_no_equations_for(tmp_path: Path) -> None:
    reference = EagerReference(write_model(tmp_path, "gpt2"))
    rig = Rig(tmp_path)
    prompt = random_prompt(4, 40)
    answer = rig.answer(prompt, 4)
    expected = reference.logprobs([*prompt, *answer.tokens])
    assert same_rows(answer, expected, len(prompt)) < BOUND
    rig.engine.close()


def test_the_layout_has_the_version_of_the_library_that_has_the_equations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a part of `system_fingerprint`, and of the key of cached content on disk."""
    write_model(tmp_path / "other", "gpt2")
    write_tiny_model(tmp_path / "known")
    for name, is_equal in (("other", False), ("known", True)):
        engine = Rig(tmp_path / name).engine
        before = engine.runner.facts().layout
        with monkeypatch.context() as patch:
            patch.setattr(block_io, "version", lambda _: "0.0.1")
            assert (engine.runner.facts().layout == before) is is_equal
        engine.close()


def test_the_page_lists_every_model_type() -> None:
    page = (ROOT / "docs/transformers.md").read_text()
    assert f"{len(EQUAL)} of the" in page
    runs, _, refused = page.partition("## What does not run")
    assert [name for name in EQUAL if f"`{name}`" not in runs] == []
    assert [name for name in REFUSED if f"`{name}`" not in refused] == []
