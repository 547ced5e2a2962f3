"""`quire doctor MODEL` and `quire models --families`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cli import doctor as model_check
from quire.cli.doctor import Memory
from quire.cli.main import app
from quire.cli.models import family_rows
from quire.text.reasoning import REASONING_FORMATS
from quire.text.tool_formats import TOOL_FORMATS
from quire.weights.families import FAMILIES
from tests.backends.torch.families import EVERY_FAMILY
from tests.tiny import write_tiny_model
from tests.weights.makers import config, llama_arrays, write_folder


def report(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    outcome = CliRunner().invoke(app, ["doctor", *map(str, arguments), "--json"])
    return outcome.exit_code, json.loads(outcome.stdout)


def test_a_model_that_runs(tmp_path: Path) -> None:
    code, found = report(write_tiny_model(tmp_path / "tiny"))
    assert (code, found["runs"], found["problem"]) == (0, True, "")
    assert (found["family"], found["backend"], found["device"]) == ("llama", "native", "cpu")
    assert found["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2  # layers, keys and values, KV heads, head size, 16 bits
    assert found["cached_tokens"] > found["max_model_len"] == 4096
    assert found["tokens_per_s"] > 0
    text = CliRunner().invoke(app, ["doctor", str(tmp_path / "tiny")]).stdout
    assert "runs here   yes, on the CPU with the native backend" in text
    assert "tokens/s for one request" in text


def test_a_tokenizer_that_a_load_would_refuse(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    words = json.loads((folder / "tokenizer.json").read_text())
    words["normalizer"] = {"type": "Prepend", "prepend": "a" * 1000}
    (folder / "tokenizer.json").write_text(json.dumps(words))
    code, found = report(folder)
    assert (code, found["runs"]) == (1, False)
    assert "normalizer of type 'Prepend': one character may become 1001 characters" in found["problem"]


def test_a_folder_with_only_a_config(tmp_path: Path) -> None:
    """Before a download: everything that the config tells."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config("LlamaForCausalLM", model_type="llama")))
    code, found = report(folder)
    assert (code, found["runs"], found["has_weights"], found["has_tokenizer"]) == (0, True, False, False)
    assert found["weight_bytes"] > 0
    text = CliRunner().invoke(app, ["doctor", str(folder)]).stdout
    assert "yes, on the CPU with the native backend, once its weights are in this folder" in text
    assert "it has no tokenizer.json" in text
    settings = config("NewestForCausalLM", model_type="newest")
    (folder / "config.json").write_text(json.dumps(settings))
    code, found = report(folder)
    assert (code, found["runs"]) == (1, False)
    assert "quire has no equations for 'NewestForCausalLM'" in found["problem"]


def test_recurrent_states_and_windows(tmp_path: Path) -> None:
    for name in ("qwen3_5", "gpt_oss"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(EVERY_FAMILY[name]().to_dict()))
        code, found = report(folder)
        assert (code, found["problem"]) == (0, "")
        text = CliRunner().invoke(app, ["doctor", str(folder)]).stdout
        if name == "qwen3_5":
            assert found["state_bytes"] > 0
            assert found["cached_states"] > 64
            assert f"{found['cached_states']:,} recurrent states" in text
        else:
            assert found["window"] > 0
            assert "layers with a window keep the last" in text


def test_missing_tensors_are_found_without_a_load(tmp_path: Path) -> None:
    arrays = llama_arrays()
    del arrays["model.layers.1.mlp.up_proj.weight"]
    code, found = report(write_folder(tmp_path / "model", arrays=arrays))
    assert (code, found["runs"]) == (1, False)
    assert "tensors missing: layers.1.up_proj.weight" in found["problem"]


def test_a_model_without_own_equations_runs_through_transformers(tmp_path: Path) -> None:
    settings = config("GPTNeoXForCausalLM", model_type="gpt_neox")
    code, found = report(write_folder(tmp_path / "model", settings))
    assert (code, found["backend"]) == (0, "torch")
    assert "GPTNeoXForCausalLM runs through transformers" in found["notice"]
    assert "correct, slower than a native family" in found["notice"]


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    settings = config("NewestForCausalLM", model_type="newest")
    code, found = report(write_folder(tmp_path / "model", settings))
    assert (code, found["runs"]) == (1, False)
    assert "quire has no equations for 'NewestForCausalLM'" in found["problem"]
    assert "transformers has no models of type 'newest'" in found["problem"]


def test_a_model_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_check, "read_memory", lambda: Memory(cpu_total=50_000, cpu_free=40_000))
    code, found = report(write_tiny_model(tmp_path / "tiny"))
    assert (code, found["runs"]) == (1, False)
    assert "more than this machine has" in found["problem"]


def test_less_memory_than_one_context_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_check, "read_memory", lambda: Memory(cpu_total=1 << 30, cpu_free=1 << 20))
    text = CliRunner().invoke(app, ["doctor", str(write_tiny_model(tmp_path / "tiny"))]).stdout
    assert "--kv-memory sets the size" in text


def test_the_table_of_families() -> None:
    outcome = CliRunner().invoke(app, ["models", "--families", "--json"])
    assert json.loads(outcome.stdout)["families"] == family_rows()
    text = CliRunner().invoke(app, ["models", "--families"]).stdout
    assert all(row.name in text for row in FAMILIES)


def test_formats_in_the_table_exist() -> None:
    assert {row.tools for row in FAMILIES} <= {"", *(one.name for one in TOOL_FORMATS)}
    assert {row.reasoning for row in FAMILIES} <= {"", *(one.name for one in REASONING_FORMATS)}
    assert len({row.name for row in FAMILIES}) == len(FAMILIES)
