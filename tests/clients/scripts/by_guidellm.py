"""guidellm: a short streaming benchmark of each endpoint. It counts tokens with the default model's tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import checks

NUM_REQUESTS = 4


def benchmark(path: str) -> str:
    report = checks.FOLDER / "report.json"
    report.unlink(missing_ok=True)
    options = {
        "backend": f"kind=openai_http,target={checks.URL},model={checks.MODEL},request_format={path}",
        "profile": "kind=concurrent,streams=2",
        "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "tokenizer": f"kind=huggingface_auto,model={os.environ['QUIRE_TOKENIZER']}",
        "data": "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        "output": f"kind=json,path={report}",
    }
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
    for name, value in options.items():
        command += [f"--{name}", value]
    done = subprocess.run(
        command, cwd=checks.FOLDER, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900, check=False
    )
    checks.expect(done.returncode == 0 and report.exists(), (done.returncode, done.stdout[-300:], done.stderr[-600:]))
    (found,) = json.loads(report.read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    checks.expect(totals["successful"] == NUM_REQUESTS and not totals["errored"], totals)
    ttft = found["metrics"]["time_to_first_token_ms"]["successful"]["median"]
    return f"{NUM_REQUESTS} requests, TTFT {ttft:.0f} ms"


def chat() -> object:
    return benchmark("/v1/chat/completions")


def completions() -> object:
    return benchmark("/v1/completions")


def responses() -> object:
    return benchmark("/v1/responses")
