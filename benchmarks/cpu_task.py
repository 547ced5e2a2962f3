"""The measurements of `cpu.py`, in processes of their own: a task on input, findings on output.

Standard library only: llama.cpp's process runs in its own venv.

decode: tokens per second of all clients together. prefill: one prompt. prefix: the first token of a request whose
prefix was computed before. start: to the first token; the parent measures it.
"""

from __future__ import annotations

import json
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol

CONTEXT_STEP = 256  # llama.cpp rounds contexts up to this; quire gets the same
SLACK_TOKENS = 32  # per sequence: for sequences that start to answer while others still read
WARM_UP_TOKENS = 16
CACHE_STEP = 32  # the prefix cache of quire has whole blocks
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


class Machine(Protocol):
    """A model in this process."""

    vocab_size: int

    def read(self, tokens: list[int]) -> int:
        """Compute a prompt, up to its first token. Return how many tokens of it were not computed again."""

    def begin(self, prompts: Sequence[list[int]]) -> None:
        """Compute prompts that answer together from now on."""

    def step(self) -> None:
        """Decode one token of each of these answers."""

    def clear(self) -> None:
        """End all answers and forget what was computed."""

    def facts(self) -> dict[str, Any]: ...


def prompt(seed: int, num_tokens: int, vocab_size: int) -> list[int]:
    """Return random tokens, the same for every contender."""
    return Random(seed).choices(range(vocab_size), k=num_tokens)


def decode(machine: Machine, task: Task) -> dict[str, Any]:
    prompts = [prompt(seed, task.prompt_tokens, machine.vocab_size) for seed in range(task.num_clients)]
    started_s = time.perf_counter()
    machine.begin(prompts)
    begun_s, used_s = time.perf_counter(), time.process_time()
    for _ in range(task.output_tokens):
        machine.step()
    ended_s, used_s = time.perf_counter(), time.process_time() - used_s
    num_tokens = task.num_clients * task.output_tokens
    return {
        "value": num_tokens / (ended_s - begun_s),
        "tokens_per_cpu_s": num_tokens / used_s,
        "prompts_tokens_per_s": task.num_clients * task.prompt_tokens / (begun_s - started_s),
    }


def prefill(machine: Machine, task: Task) -> dict[str, Any]:
    took_s = []
    for seed in range(task.repeats):
        took_s.append(_read_s(machine, prompt(seed, task.prompt_tokens, machine.vocab_size)))
        machine.clear()
    return {"value": task.prompt_tokens / statistics.median(took_s)}


def prefix(machine: Machine, task: Task) -> dict[str, Any]:
    head = prompt(0, task.prompt_tokens, machine.vocab_size)
    tails = [prompt(seed, task.tail_tokens, machine.vocab_size) for seed in range(1, 2 + task.repeats)]
    cold_s = _read_s(machine, head + tails[0])
    least = task.prompt_tokens - CACHE_STEP
    took_s = [_read_s(machine, head + tail, least) for tail in tails[1:]]
    return {"value": 1e3 * statistics.median(took_s), "cold_ms": 1e3 * cold_s}


def start(machine: Machine, task: Task) -> dict[str, Any]:
    machine.read(prompt(0, task.prompt_tokens, machine.vocab_size))
    print(json.dumps({"event": FIRST_TOKEN}), flush=True)
    return {"value": 0.0}


def _read_s(machine: Machine, tokens: list[int], least_cached: int = -1) -> float:
    started_s = time.perf_counter()
    num_cached = machine.read(tokens)
    took_s = time.perf_counter() - started_s
    if num_cached <= least_cached:
        raise RuntimeError(f"only {num_cached} of {len(tokens)} tokens came from the cache")
    return took_s


KINDS = {"decode": decode, "prefill": prefill, "prefix": prefix, "start": start}


def run(open_machine: Callable[[Task], Machine], others: Mapping[str, Callable[[Task], float]]) -> None:
    """Do the task of the command line. `others`: kinds that only this contender has."""
    task = Task(**json.loads(sys.argv[1]))
    if task.kind in others:
        findings: dict[str, Any] = {"value": others[task.kind](task)}
    else:
        machine = open_machine(task)
        if task.kind != "start":
            machine.begin([prompt(-1, WARM_UP_TOKENS, machine.vocab_size)])
            machine.step()
            machine.clear()
        findings = KINDS[task.kind](machine, task) | {"peak_bytes": peak_bytes(), "facts": machine.facts()}
    print(json.dumps({"findings": findings}), flush=True)


def peak_bytes() -> int:
    """Return the peak memory of this process."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii")
        return int(re.findall(r"^VmHWM:\s+(\d+) kB$", text, re.MULTILINE)[0]) * 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # of macOS, in bytes
