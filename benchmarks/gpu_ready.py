"""Measures the time of a new process to its first token, with nothing compiled before.

    python benchmarks/gpu_ready.py FOLDER DEVICE MAX_SEQS MAX_CONTEXT     # started by `measure`

The child reports each stage it has reached; the parent, which started it, measures the time.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

LIMIT_S = 180.0
PROMPT_TOKENS = 128
WARM_UP_TOKENS = 8  # as a server's worker does before it reports that it is ready


def measure(folder: Path, device: str, max_num_seqs: int, max_model_len: int) -> dict[str, float]:
    """Return seconds since the process start: imported, loaded, ready, first token."""
    import harness

    command = [sys.executable, __file__, str(folder), device, str(max_num_seqs), str(max_model_len)]
    with TemporaryDirectory() as cache:
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(harness.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "TRITON_CACHE_DIR": f"{cache}/triton",
            "CUDA_CACHE_PATH": f"{cache}/cuda",
        }
        return {message["what"]: at_s for at_s, message in harness.child_messages(command, LIMIT_S, env)}


def say(what: str) -> None:
    print(json.dumps({"what": f"{what}_s"}), flush=True)


def main(folder: str, device: str, max_num_seqs: str, max_model_len: str) -> None:
    from quire.core.values import SamplingParams
    from quire.engine.composition import EngineConfig, import_backend, make_engine, make_scheduler
    from quire.engine.engine import Engine
    from quire.engine.generation import GenerationRequest

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
    spare.add(0, GenerationRequest.of((0,) * WARM_UP_TOKENS, SamplingParams(temperature=0, max_tokens=2)))
    while spare.has_work:
        spare.step()
    say("ready")
    num_tokens = min(PROMPT_TOKENS, int(max_model_len) // 2)
    sampling = SamplingParams(temperature=0.6, seed=1, max_tokens=8)
    engine.add(1, GenerationRequest.of([(7 * i) % 100 for i in range(num_tokens)], sampling))
    while not any(output.tokens for output in engine.step()):
        pass
    say("first_token")
    while engine.has_work:
        engine.step()
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
