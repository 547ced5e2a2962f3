"""Shared code of the measuring processes of `cpu.py`: the task on input, the findings on output.

Standard library only: llama.cpp's process runs in its own venv.
"""

from __future__ import annotations

import json
import platform
import re
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

CONTEXT_STEP = 256  # llama.cpp rounds contexts up to this; quire gets the same
SLACK_TOKENS = 32  # per sequence: for sequences that start to answer while others still read
FIRST_TOKEN = "first token"


@dataclass(frozen=True, slots=True)
class Task:
    kind: str  # decode, prefill, prefix, start; for llama.cpp also quantize and logits
    model: str
    num_threads: int
    num_clients: int = 1
    prompt_tokens: int = 128
    output_tokens: int = 64
    tail_tokens: int = 16  # after a shared prefix of `prompt_tokens`
    repeats: int = 1
    settings: dict[str, Any] = field(default_factory=dict)  # of the backend; for `quantize` and `logits`: the output

    @property
    def context(self) -> int:
        """Tokens per sequence."""
        num_tokens = self.prompt_tokens + self.tail_tokens + self.output_tokens + SLACK_TOKENS
        return -(-num_tokens // CONTEXT_STEP) * CONTEXT_STEP


def prompt(number: int, num_tokens: int, vocab_size: int) -> list[int]:
    """Return random tokens, the same for every contender."""
    return Random(number).choices(range(vocab_size), k=num_tokens)


def memory(weight_bytes: int, kv_bytes: int) -> dict[str, int]:
    """Return the peak memory of this process, and the parts that are weights and KV cache."""
    peak = _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if platform.system() == "Darwin" else 1024
    )
    of_files = _status("RssFile")  # pages of mapped files: shared, and reclaimed when memory is short
    return {
        "peak_bytes": peak,
        "of_files_bytes": of_files,
        "weight_bytes": weight_bytes,
        "kv_bytes": kv_bytes,
        "rest_bytes": peak - weight_bytes - kv_bytes,
    }


def _status(name: str) -> int:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def report(event: str) -> None:
    """Send an event at once to the parent, which started the clock."""
    print(json.dumps({"event": event}), flush=True)


def run(kinds: dict[str, Callable[[Task], dict[str, Any]]]) -> None:
    task = Task(**json.loads(sys.argv[1]))
    print(json.dumps({"findings": kinds[task.kind](task)}), flush=True)
