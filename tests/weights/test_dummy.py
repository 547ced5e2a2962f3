"""Models without weights: what works with only a config.json, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.core.values import SamplingParams
from quire.engine.composition import EngineConfig, make_engine
from quire.engine.generation import GenerationParams, GenerationRequest
from quire.engine.llm import LLM
from quire.engine.model_text import ModelText
from quire.errors import ModelFileError, ModelNotFound
from quire.weights.opening import open_checkpoint
from quire.weights.tensors import check_tensors, expected_tensors
from tests.tiny import write_tiny_model
from tests.weights.makers import config, tiny_gguf, write_folder


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder with only a config.json."""
    folder = write_folder(tmp_path / "m", config(torch_dtype="bfloat16"))
    (folder / "model.safetensors").unlink()
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    return folder


def test_every_tensor_is_listed_and_none_can_be_read(bare: Path) -> None:
    checkpoint = open_checkpoint(bare, "dummy")
    check_tensors(checkpoint)
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    assert shapes == expected_tensors(checkpoint.spec)
    assert checkpoint.spec.dtype == "bfloat16"
    with pytest.raises(ModelFileError, match=r"norm\.weight cannot be read: with load_format = dummy"):
        checkpoint.read("norm.weight")
    checkpoint.close()


def test_existing_weight_files_are_not_opened(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", config())
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    open_checkpoint(folder, "dummy").close()
    with pytest.raises(ModelFileError, match="is not a valid safetensors file"):
        open_checkpoint(folder)


def test_without_a_config_there_is_no_shape(tmp_path: Path) -> None:
    (tmp_path / "one.gguf").write_bytes(tiny_gguf())
    for path in (tmp_path, tmp_path / "one.gguf"):
        with pytest.raises(ModelFileError, match=r"is not a folder with config\.json"):
            open_checkpoint(path, "dummy")
    with pytest.raises(ModelNotFound):
        open_checkpoint(tmp_path / "nothing", "dummy")


@pytest.mark.parametrize("backend", ["fake", "torch"])
def test_an_engine_needs_no_tokenizer(bare: Path, backend: str) -> None:
    engine = make_engine(bare, EngineConfig(backend=backend, load_format="dummy", num_blocks=8, threads=1))
    engine.add(1, GenerationRequest.of([3, 4, 5], SamplingParams(temperature=0, max_tokens=6)))
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens += output.tokens
    assert len(tokens) == 6
    engine.close()


def test_text_without_a_tokenizer_is_refused(bare: Path) -> None:
    for say in (lambda: ModelText.open(bare, load_format="dummy"), lambda: LLM(bare, load_format="dummy")):
        with pytest.raises(ModelFileError, match=r"m: has no tokenizer\.json: only an Engine with token ids"):
            say()


def test_text_works_with_a_tokenizer(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    with LLM(folder, load_format="dummy", num_blocks=8, threads=1) as llm:
        answers = llm.generate(["Hello"] * 2, GenerationParams(max_tokens=4, ignore_eos=True, temperature=0))
        assert [one.completions[0].error for one in answers] == [None, None]
        assert answers[0].completions[0].token_ids == answers[1].completions[0].token_ids
