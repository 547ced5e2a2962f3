"""Measures the time of a new process to its first token, with nothing compiled before.

    python benchmarks/gpu_ready.py FOLDER DEVICE MAX_SEQS MAX_CONTEXT     # started by `measure`

The child reports each stage it has reached; the parent, which started it, measures the time.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LIMIT_S = 180.0
PROMPT_TOKENS = 128
WARM_UP_TOKENS = 8  # as a server's worker does before it reports that it is ready


def measure(folder: Path, device: str, max_num_seqs: int, max_model_len: int) -> dict[str, float]:
    """Return seconds since the process start: imported, loaded, ready, first token; and of capturing graphs."""
    root = Path(__file__).resolve().parents[1]
    with TemporaryDirectory() as cache:
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TRITON_CACHE_DIR": f"{cache}/triton",
            "CUDA_CACHE_PATH": f"{cache}/cuda",
        }
        started_s = time.perf_counter()
        command = [sys.executable, __file__, str(folder), device, str(max_num_seqs), str(max_model_len)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        limit = threading.Timer(LIMIT_S, child.kill)
        limit.start()
        found: dict[str, float] = {}
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith("{"):
                    message: dict[str, Any] = json.loads(line)
                    found |= message.get("values", {}) or {message["what"]: time.perf_counter() - started_s}
            child.wait()
        finally:
            limit.cancel()
            child.kill()
    if child.returncode or "first_token_s" not in found:
        raise RuntimeError(f"the process ended with {child.returncode} after {found}")
    return found


def say(what: str, **values: float) -> None:
    print(json.dumps({"what": f"{what}_s", "values": values}), flush=True)


def main(folder: str, device: str, max_num_seqs: str, max_model_len: str) -> None:
    logging.basicConfig(level=logging.INFO)  # prints where the time is spent
    from quire.core.values import SamplingParams
    from quire.engine.composition import EngineConfig, import_backend, make_engine, make_scheduler
    from quire.engine.engine import Engine

    config = EngineConfig(
        device=device,
        dtype="bfloat16",
        load_format="dummy",
        max_num_seqs=int(max_num_seqs),
        max_model_len=int(max_model_len),
    )
    import_backend(config)
    say("imported")
    engine = make_engine(Path(folder), config)
    say("loaded")
    spare = Engine(engine.runner, make_scheduler(engine.runner, config))
    spare.add(0, (0,) * WARM_UP_TOKENS, SamplingParams(temperature=0, max_tokens=2))
    while spare.has_work:
        spare.step()
    say("ready")
    num_tokens = min(PROMPT_TOKENS, int(max_model_len) // 2)
    engine.add(1, [(7 * i) % 100 for i in range(num_tokens)], SamplingParams(temperature=0.6, seed=1, max_tokens=8))
    has_token = False
    while engine.has_work:
        outputs = engine.step()
        if not has_token and any(output.tokens for output in outputs):
            has_token = True
            say("first_token")
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
