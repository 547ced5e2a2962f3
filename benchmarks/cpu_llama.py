"""llama.cpp, measured in its own process through its C API, step by step as `llama-batched-bench` does.

    VENV/bin/python benchmarks/cpu_llama.py '{"kind": "decode", "model": "x.gguf", "num_threads": 2, "num_clients": 8}'

Runs in the venv that `cpu_peer.py` makes, which has llama-cpp-python but not quire. Tokens are random and nothing is
sampled, as in llama-batched-bench: quire's time includes choosing tokens, llama.cpp's does not.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import cpu_child
from cpu_child import Task

BATCH = 2048  # tokens per call; it computes 512 of them at a time, its default
WARM_UP_TOKENS = 16
ERROR = 4  # ggml_log_level
FILE_TYPES = {"Q4_0": 2, "Q8_0": 7}  # llama_ftype


def load_library() -> Any:
    """Load only the low-level binding: the package itself also imports a tokenizer and a server."""
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.submodule_search_locations is None:
        sys.exit("llama_cpp is not installed here")
    package = ModuleType("llama_cpp")
    package.__path__ = list(found.submodule_search_locations)
    sys.modules["llama_cpp"] = package
    return importlib.import_module("llama_cpp.llama_cpp")


library = load_library()


@library.llama_log_callback  # type: ignore[untyped-decorator]
def _quiet(level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
    if level == ERROR:
        sys.stderr.write(text.decode(errors="replace"))


library.llama_log_set(_quiet, ctypes.c_void_p(0))


class Machine:
    """A model, a context of several sequences, and one batch that is reused."""

    def __init__(self, task: Task, *, is_logits_of_all: bool = False) -> None:
        library.llama_backend_init()
        params = library.llama_model_default_params()
        self.model = library.llama_model_load_from_file(task.model.encode(), params)
        if not self.model:
            raise RuntimeError(f"{task.model}: llama.cpp cannot load this file")
        context = library.llama_context_default_params()
        context.n_ctx = task.num_clients * task.context
        context.n_seq_max = task.num_clients
        context.n_batch = BATCH
        context.n_threads = context.n_threads_batch = task.num_threads
        context.no_perf = True
        self.context = library.llama_init_from_model(self.model, context)
        if not self.context:
            raise RuntimeError("llama.cpp cannot create a context")
        self.memory = library.llama_get_memory(self.context)
        self.vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self.model))
        self.batch = library.llama_batch_init(BATCH, 0, 1)
        self._is_logits_of_all = is_logits_of_all

    def warm_up(self) -> None:
        self.read(0, cpu_child.prompt(-1, WARM_UP_TOKENS, self.vocab_size))
        self.step([0], WARM_UP_TOKENS)
        self.clear()

    def clear(self) -> None:
        library.llama_memory_clear(self.memory, False)

    def read(self, sequence: int, tokens: Sequence[int], first: int = 0) -> None:
        """Read tokens of one sequence from this position on, with logits of the last."""
        self.read_all([(sequence, tokens)], first)

    def read_all(self, prompts: Sequence[tuple[int, Sequence[int]]], first: int = 0) -> None:
        rows = [
            (token, first + place, sequence, self._is_logits_of_all or place == len(tokens) - 1)
            for sequence, tokens in prompts
            for place, token in enumerate(tokens)
        ]
        for start in range(0, len(rows), BATCH):
            self._run(rows[start : start + BATCH])

    def step(self, sequences: Sequence[int], position: int) -> None:
        """Decode one more token of each sequence; which token does not matter."""
        self._run([((7 * position + sequence) % self.vocab_size, position, sequence, True) for sequence in sequences])

    def _run(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        batch = self.batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, wants_logits) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = wants_logits
        code = library.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode of {len(rows)} tokens returned {code}")
        library.llama_synchronize(self.context)

    def findings(self, value: float, **more: Any) -> dict[str, Any]:
        self._check_logits()
        head_size = library.llama_model_n_embd(self.model) // library.llama_model_n_head(self.model)
        num_heads = library.llama_model_n_layer(self.model) * library.llama_model_n_head_kv(self.model)
        kv_bytes = library.llama_n_ctx(self.context) * num_heads * head_size * 2 * 2  # keys and values in fp16
        return {
            "value": value,
            **more,
            "memory": cpu_child.memory(library.llama_model_size(self.model), kv_bytes),
            "facts": {"system": library.llama_print_system_info().decode(), "context": task_facts(self.context)},
        }

    def _check_logits(self) -> None:
        """Check that the computed logits are finite."""
        logits = library.llama_get_logits_ith(self.context, -1)
        if not all(math.isfinite(logits[token]) for token in range(self.vocab_size)):
            raise RuntimeError("llama.cpp's logits are not finite")


def task_facts(context: Any) -> dict[str, int]:
    return {
        "tokens": library.llama_n_ctx(context),
        "batch": library.llama_n_batch(context),
        "ubatch": library.llama_n_ubatch(context),
        "threads": library.llama_n_threads(context),
    }


def decode(task: Task) -> dict[str, Any]:
    machine = Machine(task)
    machine.warm_up()
    sequences = range(task.num_clients)
    prompts = [(number, cpu_child.prompt(number, task.prompt_tokens, machine.vocab_size)) for number in sequences]
    started_s = time.perf_counter()
    machine.read_all(prompts)
    begun_s, used_s = time.perf_counter(), time.process_time()
    for step in range(task.output_tokens):
        machine.step(sequences, task.prompt_tokens + step)
    ended_s, used_s = time.perf_counter(), time.process_time() - used_s
    return machine.findings(
        task.num_clients * task.output_tokens / (ended_s - begun_s),
        tokens_per_cpu_s=task.num_clients * task.output_tokens / used_s,
        prompts_tokens_per_s=task.num_clients * task.prompt_tokens / (begun_s - started_s),
    )


def prefill(task: Task) -> dict[str, Any]:
    machine = Machine(task)
    machine.warm_up()
    took_s = []
    for number in range(task.repeats):
        tokens = cpu_child.prompt(number, task.prompt_tokens, machine.vocab_size)
        started_s = time.perf_counter()
        machine.read(0, tokens)
        took_s.append(time.perf_counter() - started_s)
        machine.clear()
    return machine.findings(task.prompt_tokens / statistics.median(took_s))


def prefix(task: Task) -> dict[str, Any]:
    """Keep the prefix in its sequence, as in a slot of llama-server; only the tail is computed again."""
    machine = Machine(task)
    machine.warm_up()
    head = cpu_child.prompt(0, task.prompt_tokens, machine.vocab_size)
    started_s = time.perf_counter()
    machine.read(0, [*head, *cpu_child.prompt(1, task.tail_tokens, machine.vocab_size)])
    cold_s = time.perf_counter() - started_s
    took_s = []
    for number in range(2, 2 + task.repeats):
        tail = cpu_child.prompt(number, task.tail_tokens, machine.vocab_size)
        started_s = time.perf_counter()
        library.llama_memory_seq_rm(machine.memory, 0, task.prompt_tokens, -1)
        machine.read(0, tail, task.prompt_tokens)
        took_s.append(time.perf_counter() - started_s)
    return machine.findings(1e3 * statistics.median(took_s), cold_ms=1e3 * cold_s)


def start(task: Task) -> dict[str, Any]:
    machine = Machine(task)
    machine.read(0, cpu_child.prompt(0, task.prompt_tokens, machine.vocab_size))
    cpu_child.report(cpu_child.FIRST_TOKEN)
    return machine.findings(0.0)


def quantize(task: Task) -> dict[str, Any]:
    """Convert the file to another format, as `llama-quantize --allow-requantize` does."""
    params = library.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[task.settings["format"]]
    params.nthread = task.num_threads
    params.allow_requantize = True
    code = library.llama_model_quantize(task.model.encode(), task.settings["out"].encode(), ctypes.byref(params))
    if code:
        raise RuntimeError(f"llama_model_quantize returned {code}")
    return {"value": float(Path(task.settings["out"]).stat().st_size)}


def logits(task: Task) -> dict[str, Any]:
    """Write the logits of every position of each sequence in `settings` to a file of floats, in order."""
    machine = Machine(task, is_logits_of_all=True)
    num_rows = 0
    with Path(task.settings["out"]).open("wb") as out:
        for tokens in task.settings["sequences"]:
            machine.clear()
            for first in range(0, len(tokens), BATCH):
                part = tokens[first : first + BATCH]
                machine.read(0, part, first)
                num_bytes = 4 * len(part) * machine.vocab_size
                out.write(ctypes.string_at(library.llama_get_logits(machine.context), num_bytes))
                num_rows += len(part)
    return {"value": float(num_rows)}


if __name__ == "__main__":
    cpu_child.run(
        {"decode": decode, "prefill": prefill, "prefix": prefix, "start": start, "quantize": quantize, "logits": logits}
    )
