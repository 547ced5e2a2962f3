"""Window blocks and recurrent states as clients see them: statistics, metrics, watch, explanations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.server.rig import FAKE, Server, serving

LONG = "The quick brown fox jumps over the lazy dog. " * 8


def write_model(folder: Path, tiny: Path, **changes: Any) -> Path:
    """A tiny model whose layers the fake backend only reads the description of."""
    shutil.copytree(tiny, folder)
    config = json.loads((tiny / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def engine(server: Server) -> Any:
    return server.get("/v1/watch?once=true").json["models"][0]["engine"]


@pytest.mark.nightly
def test_a_model_with_windows(tmp_path: Path, tiny_model: Path) -> None:
    changes = {"architectures": ["MistralForCausalLM"], "sliding_window": 64}
    with serving(str(write_model(tmp_path / "windows", tiny_model, **changes)), *FAKE) as server:
        server.chat(LONG, max_tokens=4)
        assert server.chat(LONG, max_tokens=4).json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        stats = server.wait_free()
        windows = stats["windows"]
        assert stats["states"] is None
        assert (windows["num_blocks"], windows["num_in_use"]) == (399, 0)
        assert 0 < windows["num_cached"] <= windows["num_free"] == 399
        watched = engine(server)
        assert watched["states"] is None
        assert watched["windows"]["cached"] == windows["num_cached"]
        assert sum(watched["windows"][state] for state in ("free", "cached", "in_use")) == 399
        metrics = server.get("/metrics").body.decode()
        assert "quire:window_blocks{" in metrics
        assert "quire:recurrent_states{" not in metrics


def test_a_model_with_states(tmp_path: Path, tiny_model: Path) -> None:
    changes = {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["conv", "full_attention"],
        "conv_L_cache": 3,
        "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": False,
    }
    with serving(str(write_model(tmp_path / "states", tiny_model, **changes)), *FAKE) as server:
        server.chat(LONG, max_tokens=4)
        other = server.post("/v1/cache/explain", {"messages": [{"role": "user", "content": LONG[:90]}]}).json
        assert other["reason"] == "no_state"
        assert "but the nearest state of the recurrent layers is at token" in other["message"]
        again = server.chat(LONG, max_tokens=4, cache=True).json
        # The state is at the start of the answer's header if that is closer than half a block to the end.
        assert again["cache"]["matched_tokens"] > again["usage"]["prompt_tokens"] - 18
        stats = server.wait_free()
        assert stats["windows"] is None
        assert stats["states"]["num_cached"] == stats["states"]["num_snapshots"] >= 2  # the prompt and the answer
        watched = engine(server)
        assert watched["windows"] is None
        assert watched["states"]["cached"] == stats["states"]["num_cached"]
        metrics = server.get("/metrics").body.decode()
        assert "quire:recurrent_states{" in metrics


@pytest.mark.nightly
def test_a_model_without_them(tiny_model: Path) -> None:
    with serving(str(tiny_model), *FAKE) as server:
        server.chat(max_tokens=1)
        stats = server.stats()
        assert (stats["windows"], stats["states"], stats["num_recomputed_tokens"]) == (None, None, 0)
        assert (engine(server)["windows"], engine(server)["states"]) == (None, None)
