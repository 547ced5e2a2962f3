"""Window blocks and recurrent states as clients see them: statistics, metrics, watch, explanations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

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
