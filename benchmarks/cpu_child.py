"""What the measuring processes of `cpu.py` share: the task that comes in, the findings that go out.

Standard library only: llama.cpp's process runs in a venv of its own.
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

CONTEXT_STEP = 256  # llama.cpp rounds contexts up to this; ours gets the same
SLACK_TOKENS = 32  # of each sequence: for those that begin to answer while others still read
FIRST_TOKEN = "first token"


@dataclass(frozen=True, slots=True)
class Task:
    kind: str  # decode, prefill, prefix, start; of llama.cpp also quantize and logits
    model: str
    num_threads: int
    num_clients: int = 1
    prompt_tokens: int = 128
    output_tokens: int = 64
    tail_tokens: int = 16  # after a shared head of `prompt_tokens`
    repeats: int = 1
    settings: dict[str, Any] = field(default_factory=dict)  # of the backend; of `quantize` and `logits`: where to

    @property
    def context(self) -> int:
        """Tokens of each sequence."""
        num_tokens = self.prompt_tokens + self.tail_tokens + self.output_tokens + SLACK_TOKENS
        return -(-num_tokens // CONTEXT_STEP) * CONTEXT_STEP


def prompt(number: int, num_tokens: int, vocab_size: int) -> list[int]:
    """Random tokens, the same for everyone who is measured."""
    return Random(number).choices(range(vocab_size), k=num_tokens)


def memory(weight_bytes: int, kv_bytes: int) -> dict[str, int]:
    """The most this process ever held, and what of it are weights and KV cache."""
    peak = _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if platform.system() == "Darwin" else 1024
    )
    of_files = _status("RssFile")  # pages of mapped files: shared, and given up when others need them
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


def tell(event: str) -> None:
    """The parent, which started the clock, hears it at once."""
    print(json.dumps({"event": event}), flush=True)


def run(kinds: dict[str, Callable[[Task], dict[str, Any]]]) -> None:
    task = Task(**json.loads(sys.argv[1]))
    print(json.dumps({"findings": kinds[task.kind](task)}), flush=True)
