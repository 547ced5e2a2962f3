"""llama.cpp, measured in its own process through its C API, step by step as `llama-batched-bench` does.

    VENV/bin/python benchmarks/cpu_llama.py '{"kind": "decode", "model": "x.gguf", "num_threads": 2, "num_clients": 8}'

Runs in the venv that `cpu.py` makes, which has llama-cpp-python but not quire. Tokens are random and nothing is
sampled, as in llama-batched-bench: quire's time includes choosing tokens, llama.cpp's does not.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import math
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import cpu_task
from cpu_task import Task

BATCH = 2048  # tokens per call; it computes 512 of them at a time, its default
ERROR = 4  # ggml_log_level
FILE_TYPES = {"Q4_0": 2, "Q8_0": 7}  # llama_ftype

Row = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are wanted


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

    def __init__(self, task: Task) -> None:
        library.llama_backend_init()
        self.model = library.llama_model_load_from_file(task.model.encode(), library.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"{task.model}: llama.cpp cannot load this file")
        params = library.llama_context_default_params()
        params.n_ctx = task.num_clients * task.context
        params.n_seq_max = task.num_clients
        params.n_batch = BATCH
        params.n_threads = params.n_threads_batch = task.num_threads
        params.no_perf = True
        self.context = library.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp cannot create a context")
        self.vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self.model))
        self._memory = library.llama_get_memory(self.context)
        self._batch = library.llama_batch_init(BATCH, 0, 1)
        self._known: list[int] = []  # tokens of the first sequence
        self._lengths: list[int] = []  # of the sequences that answer

    def read(self, tokens: list[int]) -> int:
        """Keep what the sequence has of the prompt, as a slot of llama-server does."""
        num_kept = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(self._known, tokens, strict=False))))
        library.llama_memory_seq_rm(self._memory, 0, num_kept, -1)
        last = len(tokens) - 1
        self.run([(tokens[place], place, 0, place == last) for place in range(num_kept, len(tokens))])
        self._known = tokens
        return num_kept

    def begin(self, prompts: Sequence[list[int]]) -> None:
        self.run(
            [
                (token, place, sequence, place == len(tokens) - 1)
                for sequence, tokens in enumerate(prompts)
                for place, token in enumerate(tokens)
            ]
        )
        self._lengths = [len(tokens) for tokens in prompts]

    def step(self) -> None:
        """Which tokens these are does not matter."""
        self.run([((7 * at + one) % self.vocab_size, at, one, True) for one, at in enumerate(self._lengths)])
        self._lengths = [length + 1 for length in self._lengths]

    def clear(self) -> None:
        library.llama_memory_clear(self._memory, False)
        self._known = []

    def run(self, rows: Sequence[Row]) -> None:
        batch = self._batch
        for start in range(0, len(rows), BATCH):
            part = rows[start : start + BATCH]
            batch.n_tokens = len(part)
            for row, (token, position, sequence, wants_logits) in enumerate(part):
                batch.token[row] = token
                batch.pos[row] = position
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = sequence
                batch.logits[row] = wants_logits
            if code := library.llama_decode(self.context, batch):
                raise RuntimeError(f"llama_decode of {len(part)} tokens returned {code}")
            library.llama_synchronize(self.context)

    def facts(self) -> dict[str, Any]:
        logits = library.llama_get_logits_ith(self.context, -1)
        if not all(math.isfinite(logits[token]) for token in range(self.vocab_size)):
            raise RuntimeError("llama.cpp's logits are not finite")
        context = {name: getattr(library, f"llama_n_{name}")(self.context) for name in ("ctx", "batch", "ubatch")}
        return {"system": library.llama_print_system_info().decode(), **context}


def quantize(task: Task) -> float:
    """Convert the file to another format, as `llama-quantize --allow-requantize` does. Return its bytes."""
    params = library.llama_model_quantize_default_params()
    params.ftype = FILE_TYPES[task.settings["format"]]
    params.nthread = task.num_threads
    params.allow_requantize = True
    code = library.llama_model_quantize(task.model.encode(), task.settings["out"].encode(), ctypes.byref(params))
    if code:
        raise RuntimeError(f"llama_model_quantize returned {code}")
    return float(Path(task.settings["out"]).stat().st_size)


def logits(task: Task) -> float:
    """Write the logits of every position of each sequence in `settings` to a file of floats. Return their number."""
    machine, num_rows = Machine(task), 0
    with Path(task.settings["out"]).open("wb") as out:
        for tokens in task.settings["sequences"]:
            machine.clear()
            for first in range(0, len(tokens), BATCH):
                part = tokens[first : first + BATCH]
                machine.run([(token, first + place, 0, True) for place, token in enumerate(part)])
                num_bytes = 4 * len(part) * machine.vocab_size
                out.write(ctypes.string_at(library.llama_get_logits(machine.context), num_bytes))
                num_rows += len(part)
    return float(num_rows)


if __name__ == "__main__":
    cpu_task.run(Machine, {"quantize": quantize, "logits": logits})
