"""Hostile files in a process with limits of memory and time: `python -m ... TARGET FIRST_SEED COUNT PROGRESS`.

Prints one JSON line: the outcomes, the slowest mutant and the peak of memory. The file PROGRESS holds the seed of the
current mutant, so that a signal is attributed to it. Each target is one format (TARGETS).
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from quire.backends.base import BackendOptions
from quire.backends.native.runner import NativeRunner, make_runner
from quire.errors import InvalidRequest, LoadFailed, ModelFileError, ModelNotFound, TemplateError
from quire.text.chat_template import COMPILE_LIMIT_S, Renderer
from quire.weights.opening import open_checkpoint
from tests.gauntlet import hand_made
from tests.text import family_templates, tool_templates
from tests.weights.fuzz_child import (
    NUMBERS,
    Target,
    mutate_bytes,
    mutate_json,
    mutate_value,
    open_and_read_all,
)
from tests.weights.fuzz_child import TARGETS as MODEL_TARGETS
from tests.weights.layouts import Stored, mixed_safetensors
from tests.weights.makers import config, llama_arrays, tiny_gguf, write_folder

MEMORY_BYTES = 1 << 30  # beside the interpreter with its modules
HAND_MADE, EVERY = "hand-made", "every"  # instead of a target: a case for each seed, and all targets in turn
HANG_S = 60.0  # a mutant that takes longer counts as a fault, also on a busy machine
REFUSALS = (ModelFileError, TemplateError)
# A model that opens and does not fit the options is refused by the loader with these.
LOAD_REFUSALS = (InvalidRequest, LoadFailed, ModelNotFound)


# Quantised safetensors: MXFP4


def _spoil_tensor(rng: random.Random, tensors: dict[str, Stored], names: list[str]) -> None:
    """Leave out a tensor, or give it another shape or random contents."""
    name = rng.choice(names)
    dtype, array = tensors.pop(name)
    way = rng.randrange(3)
    if way == 1:
        shape = [rng.choice((1, 2, 3, 64, size)) for size in array.shape][: rng.choice((1, 2, 3))]
        tensors[name] = Stored(dtype, np.resize(array, shape))
    elif way == 2:
        noise = np.frombuffer(rng.randbytes(array.nbytes), array.dtype).reshape(array.shape)
        tensors[name] = Stored(dtype, noise)


OSS = config(
    "GptOssForCausalLM",
    num_local_experts=2, num_experts_per_tok=1, intermediate_size=64, head_dim=16, attention_bias=True,
    swiglu_limit=7.0, sliding_window=16, layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=False,
    quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
)  # fmt: skip


@cache
def _mxfp4() -> dict[str, Stored]:
    """Tensors of a gpt-oss with two experts, as OpenAI publishes it."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        name: array.shape for name, array in llama_arrays().items() if ".mlp." not in name
    }
    packed: dict[str, Stored] = {}
    for layer in range(2):
        own = f"model.layers.{layer}"
        shapes |= {f"{own}.self_attn.sinks": (4,), f"{own}.mlp.router.weight": (2, 64), f"{own}.mlp.router.bias": (2,)}
        shapes |= {
            f"{own}.self_attn.{one}_proj.bias": (rows,) for one, rows in zip("qkvo", (64, 32, 32, 64), strict=True)
        }
        for which, rows in (("gate_up", 128), ("down", 64)):
            name = f"{own}.mlp.experts.{which}_proj"
            packed[f"{name}_blocks"] = Stored("U8", rng.integers(0, 256, (2, rows, 2, 16), dtype=np.uint8))
            packed[f"{name}_scales"] = Stored("U8", rng.integers(118, 123, (2, rows, 2), dtype=np.uint8))
            shapes[f"{name}_bias"] = (2, rows)
    plain = {name: Stored("F32", rng.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()}
    return plain | packed


def make_mxfp4_mutant(rng: random.Random, folder: Path) -> Path:
    tensors = dict(_mxfp4())
    kind = rng.randrange(3)
    if kind == 0:
        _spoil_tensor(rng, tensors, [one for one in tensors if ".mlp." in one])
    data = mixed_safetensors(tensors)
    (folder / "model.safetensors").write_bytes(mutate_bytes(rng, data, 6000) if kind == 1 else data)
    (folder / "config.json").write_text(json.dumps(mutate_value(rng, OSS) if kind == 2 else OSS))
    return folder


# A model that the native backend packs and runs


@cache
def _small_gguf() -> bytes:
    return tiny_gguf()


def make_served_mutant(rng: random.Random, folder: Path) -> Path:
    """Mutate contents rather than lengths, so that many mutants load and are computed with."""
    if rng.random() < 0.5:
        path = folder / "model.gguf"
        data = bytearray(_small_gguf())
        for _ in range(rng.choice((1, 8, 64))):
            at = rng.randrange(len(data))
            data[at : at + 4] = (rng.choice(NUMBERS) & 0xFFFFFFFF).to_bytes(4, "little")
        path.write_bytes(data if rng.random() < 0.7 else mutate_bytes(rng, _small_gguf(), 3000))
        return path
    write_folder(folder, config(torch_dtype="float32"))
    if rng.random() < 0.5:
        mutate_json(rng, folder / "config.json")
    else:
        path = folder / "model.safetensors"
        path.write_bytes(mutate_bytes(rng, path.read_bytes(), 1 << 20))
    return folder


def serve(path: Path) -> None:
    """Load a model as the worker does, and compute logits, which need not be finite."""
    checkpoint = open_checkpoint(path)
    try:
        options = BackendOptions(threads=1, num_blocks=8, max_num_seqs=1, max_model_len=32)
        runner = make_runner(checkpoint, options)
    finally:
        checkpoint.close()
    assert isinstance(runner, NativeRunner)
    logits = runner.model.logits([1, 2, 3])
    assert logits.shape == (3, runner.model.spec.vocab_size)
    runner.close()


# Chat templates


@cache
def _templates() -> tuple[str, ...]:
    own = [value for name, value in vars(family_templates).items() if name.isupper() and isinstance(value, str)]
    return (*own, *(value for value in vars(tool_templates).values() if isinstance(value, str) and "{%" in value))


WORDS = (
    "{% for i in range(99999999) %}", "{% endfor %}", "{{ 'a' * 999999999 }}", "{% set x = x + x %}", "{{ x }}",
    "{{ ''.__class__.__mro__ }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% include 'x' %}",
    "{{ messages|tojson|center(99999999) }}", "{{ lipsum.__globals__ }}", "{% import 'os' as os %}", "{{ cycler }}",
    "{% raw %}", "{#", "{{ messages[0]['content'] }}", "|items", " not ", "(" * 300, "\udc80", "{{ 9 ** (9 ** 9) }}",
)  # fmt: skip


def make_template_mutant(rng: random.Random, folder: Path) -> Path:
    text = rng.choice(_templates())
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, end = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        way = rng.randrange(4)
        if way == 0:
            text = text[:at] + rng.choice(WORDS) + text[at:]
        elif way == 1:
            text = text[:at] + text[min(end, at + 30) :]
        elif way == 2:
            text = text[:at] + text[at : min(end, at + 60)] + text[at:]
        else:
            text = text[:at] + chr(rng.randrange(1, 0x300)) + text[at + 1 :]
    path = folder / "chat_template.jinja"
    path.write_text(text, errors="replace")
    return path


_renderers: list[Renderer] = []


def render(path: Path) -> None:
    """Compile and render in a child process, as the server does. One child compiles many templates, to save time."""
    source = path.read_text()
    renderer = Renderer(source)
    if _renderers:
        renderer._child = _renderers.pop()._child
    _renderers.append(renderer)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    child = renderer._child
    child.start()
    child.first_answer = child._exchange({"source": source}, COMPILE_LIMIT_S)
    renderer.check({"messages": messages, "add_generation_prompt": True, "bos_token": "<s>"})


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        *MODEL_TARGETS,
        Target("safetensors of MXFP4", make_mxfp4_mutant, open_and_read_all),
        Target("model that is computed with", make_served_mutant, serve),
        Target("chat template", make_template_mutant, render),
    )
}


def choose(name: str, seed: int) -> Target:
    if name == HAND_MADE:
        return hand_made.target_of(hand_made.CASES[seed])
    return list(TARGETS.values())[seed % len(TARGETS)] if name == EVERY else TARGETS[name]


def _hangs(_signal: int, _frame: object) -> None:
    raise TimeoutError(f"more than {HANG_S} s")


def outcome(target: Target, path: Path) -> str:
    """Return `loads`, `refused`, or the exception, which is a fault."""
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        target.open(path)
    except REFUSALS as error:
        str(error).encode()  # must be printable
        return "refused"
    except LOAD_REFUSALS:
        return "refused" if target.open is serve else traceback.format_exc()
    except BaseException:
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "loads"


def virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def limit_memory() -> None:
    limit = virtual_bytes() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def run(choose: Callable[[int], Target], first: int, count: int, folder: Path, progress: Path) -> Mapping[str, Any]:
    outcomes: Counter[str] = Counter()
    faults: list[str] = []
    slowest_s, slowest = 0.0, first
    with progress.open("wb", buffering=0) as file:
        for seed in range(first, first + count):
            os.pwrite(file.fileno(), f"{seed:20}".encode(), 0)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            target = choose(seed)
            path = target.make(random.Random(f"{target.name} {seed}"), folder)
            begin = time.monotonic()
            found = outcome(target, path)
            took_s = time.monotonic() - begin
            if took_s > slowest_s:
                slowest_s, slowest = took_s, seed
            if found not in ("loads", "refused"):
                faults.append(f"{target.name}: seed {seed}: {found[-1500:]}")
                found = "fault"
            outcomes[found] += 1
    users = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    peak = max(resource.getrusage(user).ru_maxrss for user in users) << 10
    return {"outcomes": outcomes, "faults": faults[:20], "slowest_s": slowest_s, "slowest": slowest, "peak": peak}


def main(name: str, first: int, count: int, progress: Path) -> None:
    import gguf  # noqa: F401  # so that the import does not count for a mutant

    signal.signal(signal.SIGALRM, _hangs)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder) / "mutant"
        run(lambda seed: choose(name, seed), first, 1, scratch, progress)  # imports and caches
        limit_memory()
        print(json.dumps(run(lambda seed: choose(name, seed), first, count, scratch, progress)))
    for renderer in _renderers:
        renderer.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
