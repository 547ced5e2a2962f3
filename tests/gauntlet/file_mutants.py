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
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quire.backends.base import BackendOptions
from quire.backends.native.packing import SOURCES, find_block_type, to_blocks
from quire.backends.native.runner import NativeRunner, make_runner
from quire.backends.torch.packed import format_of, pack
from quire.errors import InvalidRequest, LoadFailed, ModelFileError, ModelNotFound, TemplateError, TemplateRefusal
from quire.text.chat_template import COMPILE_LIMIT_S, Renderer
from quire.text.tokenizer import Tokenizer
from quire.weights.checkpoint import FILE_TYPES, RawTensor, map_file
from quire.weights.families import BY_ARCHITECTURE
from quire.weights.gguf import MAX_ARRAY, read_header
from quire.weights.opening import open_checkpoint
from quire.weights.packed import dequantize
from quire.weights.quants import to_float32
from quire.weights.tensors import check_tensors
from tests.backends.native.matrices import Packed, logits_of
from tests.gauntlet.bodies import mutate_value
from tests.text import family_templates, tool_templates
from tests.text.vocabularies import byte_level_gguf, byte_level_json, sentencepiece_gguf
from tests.weights import test_gguf, test_safetensors
from tests.weights.layouts import LAYOUTS, expert_quants, k_quants, quantize_arrays, write_tensors
from tests.weights.makers import (
    F32,
    LAYERS,
    Stored,
    Tensor,
    config,
    llama_arrays,
    llama_keys,
    llama_tensors,
    make_gguf,
    mixed_safetensors,
    moe_arrays,
    moe_config,
    moe_keys,
    moe_tensors,
    tiny_gguf,
    write_folder,
)


class Target(NamedTuple):
    name: str
    make: Callable[[random.Random, Path], Path]  # writes a mutant into an empty folder, returns the path to open
    open: Callable[[Path], None]


# Mutations

INF = float("inf")
NUMBERS = (0, 1, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 64, 1 << 20, 1 << 40, 10**400, 0.0, 0.5, -0.5, 1e-320, 1e308, "", "x", "..",
    "\ud800", "/etc/passwd", "linear", "model.safetensors", [], [[]], [1, 2], ["x"], {}, {"x": 1},
    {"rope_type": "yarn", "factor": 1e-9},
)  # fmt: skip


def mutate_bytes(rng: random.Random, data: bytes, reach: int) -> bytes:
    """Make a few edits, most of them within the first `reach` bytes, where the lengths are."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        end = min(len(out), reach if rng.random() < 0.8 else len(out))
        at = rng.randrange(max(1, end))
        kind = rng.randrange(7)
        if kind == 0:
            out[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            out[at : at + 1] = bytes([(out[at] if at < len(out) else 0) ^ 1 << rng.randrange(8)])
        elif kind == 2:
            del out[at:]
        elif kind == 3:
            out[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
        elif kind == 4:
            out[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) & 0xFFFFFFFF)
        elif kind == 5:
            source = rng.randrange(max(1, end))
            out[at : at + 16] = out[source : source + 16]
        else:
            del out[at : at + rng.randrange(1, 40)]
    return bytes(out)


def mutate_json(rng: random.Random, path: Path) -> None:
    if rng.random() < 0.3:
        path.write_bytes(mutate_bytes(rng, path.read_bytes(), 1 << 20))
    else:
        path.write_text(json.dumps(mutate_value(rng, json.loads(path.read_bytes()), VALUES)))


# Targets

ROPES = (
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    {"rope_type": "linear", "factor": 2.0},
)
# Models that only mlx-lm runs: packed weights, a mixture of experts, a multimodal model, other names of the sizes.
OTHERS = (
    config(quantization={"bits": 4, "group_size": 64, "mode": "affine"}),
    config("Qwen3MoeForCausalLM", quantization_config={"quant_method": "mxfp4"}),
    {"architectures": ["Llama4ForConditionalGeneration"], "text_config": config(), "eos_token_id": [2, 3]},
    {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 64, "n_positions": 128},
)
SMALL_GGUF = tiny_gguf()
GGUF = tiny_gguf(llama__rope__scaling__type="yarn", llama__rope__scaling__factor=4.0)

MOE_GGUF = make_gguf(moe_keys(), list(moe_tensors().items()))
FAMILY_FIELDS: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1},
    "num_local_experts": 0,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "position_embedding_type": "rope",
    "layer_types": ["full_attention"] * LAYERS,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
    "no_rope_layers": [1] * LAYERS,
    "residual_multiplier": 0.5,
    "sliding_window": 32,
}


def mutant_of(make: Callable[[random.Random], bytes], reach: int) -> Callable[[random.Random, Path], Path]:
    """Return a writer of GGUF mutants. `make` chooses the whole file."""

    def write(rng: random.Random, folder: Path) -> Path:
        path = folder / "mutant.gguf"
        path.write_bytes(mutate_bytes(rng, make(rng), reach))
        return path

    return write


# One layer of experts for each type, in several files: a mutant must not take long to decode.
_CODED = {number: kind for number, kind in FILE_TYPES.items() if kind[1].num_elements > 1}
EXPERTS = [
    expert_quants([(name, "Q8_0") for number, (name, _) in _CODED.items() if number % 8 == i], 32) for i in range(8)
]


def open_all_tensors(path: Path) -> None:
    """Decode all tensors of a GGUF file, of any architecture, and pack the matrices for the native backend."""
    with map_file(path) as buffer:
        header = read_header(path, buffer)
        for info, offset in header.tensors.values():
            data = np.frombuffer(buffer[offset : offset + info.num_bytes], np.uint8)
            values = to_float32(RawTensor(info, data))
            assert values.shape == info.shape
            if info.type in SOURCES and len(info.shape) > 1:
                Packed(info.type, data, values.size // info.shape[-1], info.shape[-1]).unpack(rows=1)


def make_folder_mutant(rng: random.Random, folder: Path) -> Path:
    return _mutate_folder(rng, folder, config(rope_scaling=rng.choice(ROPES)))


def make_moe_mutant(rng: random.Random, folder: Path) -> Path:
    return _mutate_folder(rng, folder, moe_config(), moe_arrays(is_stacked=rng.random() < 0.5))


def make_family_mutant(rng: random.Random, folder: Path) -> Path:
    """Write a config.json of any family, with some of its own fields."""
    settings = config(rng.choice(list(BY_ARCHITECTURE)), **FAMILY_FIELDS)
    settings["text_config"] = {**config(), **FAMILY_FIELDS}
    settings = {name: value for name, value in settings.items() if rng.random() < 0.9}
    (folder / "config.json").write_text(json.dumps(mutate_value(rng, settings, VALUES)))
    return folder


def open_dummy(path: Path) -> None:
    checkpoint = open_checkpoint(path, "dummy")
    check_tensors(checkpoint)


def make_quantized_mutant(rng: random.Random, folder: Path) -> Path:
    """Change the config, the header or the contents of a quantised folder, or leave out one of its tensors."""
    layout = rng.choice(list(LAYOUTS.values()))
    tensors, _ = quantize_arrays(layout, llama_arrays())
    if rng.random() < 0.3:
        _spoil_tensor(rng, tensors, [name for name in tensors if "_proj." in name])
    settings = config(quantization_config=layout.config)
    if rng.random() < 0.4:
        settings["quantization_config"] = mutate_value(rng, layout.config, VALUES)
    path = write_tensors(folder, settings, tensors) / "model.safetensors"
    if rng.random() < 0.3:
        path.write_bytes(mutate_bytes(rng, path.read_bytes(), 8000))
    return folder


def read_packed_too(path: Path) -> None:
    """Read all matrices in both forms, and pack them as the torch and the native backend do."""
    open_and_read_all(path)
    checkpoint = open_checkpoint(path)
    for name in checkpoint.tensors:
        matrix = checkpoint.read_packed(name)
        if matrix is None:
            continue
        shape = checkpoint.tensors[name].shape
        assert dequantize(matrix).shape == shape
        if (format := format_of([matrix])) is not None:
            assert torch.isfinite(pack([matrix], format, torch.float32, torch.device("cpu")).scales).all()
        if (kind := find_block_type(matrix)) is not None:
            assert len(to_blocks(matrix, kind).data) == shape[0]
    checkpoint.close()


K_TYPES = (None, "Q4_K", "Q5_K", "Q6_K", "Q4_1", "MXFP4")


@cache
def k_quants_of(kind: str | None) -> bytes:
    return k_quants(kind, num_layers=1)


def make_other_mutant(rng: random.Random, folder: Path) -> Path:
    return _mutate_folder(rng, folder, rng.choice(OTHERS))


def _mutate_folder(
    rng: random.Random, folder: Path, settings: dict[str, Any], arrays: Mapping[str, NDArray[Any]] | None = None
) -> Path:
    write_folder(folder, settings, arrays, num_shards=rng.choice((1, 2)))
    (folder / "generation_config.json").write_text('{"temperature": 0.7, "top_p": 0.9, "eos_token_id": [2, 3]}')
    files = sorted(folder.iterdir())
    path = rng.choice(files)
    if path.suffix == ".json":
        mutate_json(rng, path)
    else:
        path.write_bytes(mutate_bytes(rng, path.read_bytes(), 2000))
    return folder


def open_other(path: Path) -> None:
    """Do all that commands and the server do with a model that only mlx-lm runs."""
    checkpoint = open_checkpoint(path)
    try:
        checkpoint.tokenizer_files()
        assert len(f"{checkpoint.spec.architecture}{checkpoint.spec.quantization}") < 200
        for name in checkpoint.tensors:
            to_float32(checkpoint.read(name))
    finally:
        checkpoint.close()


def open_and_read_all(path: Path) -> None:
    """Do all that a loader does before the first token."""
    checkpoint = open_checkpoint(path)
    try:
        checkpoint.tokenizer_files()
        for layer in checkpoint.spec.layers:
            if layer.attention.rope is not None:
                layer.attention.rope.inverse_frequencies(checkpoint.spec.max_model_len)
        check_tensors(checkpoint)
        for name in checkpoint.tensors:
            to_float32(checkpoint.read(name))
    finally:
        checkpoint.close()


TOKENIZER = byte_level_json()
VOCABULARIES = (byte_level_gguf(), sentencepiece_gguf())


def make_tokenizer_mutant(rng: random.Random, folder: Path) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>", "add_bos_token": false}')
    mutate_json(rng, folder / rng.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json")))
    return folder


def make_vocabulary_mutant(rng: random.Random, folder: Path) -> Path:
    path = folder / "vocabulary.json"
    path.write_text(json.dumps(mutate_value(rng, rng.choice(VOCABULARIES), VALUES)))
    return path


def open_tokenizer(path: Path) -> None:
    try:
        config = json.loads((path / "tokenizer_config.json").read_bytes())
    except ValueError:
        raise ModelFileError("tokenizer_config.json is not JSON: the checkpoint refuses it") from None
    if not isinstance(config, dict):
        raise ModelFileError("tokenizer_config.json is not an object: the checkpoint refuses it")
    use_tokenizer(Tokenizer.from_json((path / "tokenizer.json").read_bytes(), config))


def open_vocabulary(path: Path) -> None:
    metadata = json.loads(path.read_bytes())
    if not isinstance(metadata, dict):
        raise ModelFileError("metadata is not an object: a checkpoint never returns that")
    use_tokenizer(Tokenizer.from_gguf(metadata))


def use_tokenizer(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The dog, <|im_end|> 1234 \u00e4\U0001f389")
    assert tokenizer.control_ids.isdisjoint(tokenizer.encode_plain("a <|im_end|> text"))
    tokenizer.decode(ids)


MODEL_TARGETS: list[Target] = [
    Target("gguf", mutant_of(lambda _rng: GGUF, 3000), read_packed_too),
    Target("gguf of K types", mutant_of(lambda rng: k_quants_of(rng.choice(K_TYPES)), 8000), read_packed_too),
    Target("gguf of experts", mutant_of(lambda rng: rng.choice(EXPERTS), 6000), open_all_tensors),
    Target("safetensors", make_folder_mutant, open_and_read_all),
    Target("gguf of a mixture of experts", mutant_of(lambda _rng: MOE_GGUF, 4000), open_and_read_all),
    Target("safetensors of a mixture of experts", make_moe_mutant, open_and_read_all),
    Target("config.json of all families", make_family_mutant, open_dummy),
    Target("safetensors of mlx-lm", make_other_mutant, open_other),
    Target("quantised safetensors", make_quantized_mutant, read_packed_too),
    Target("tokenizer.json", make_tokenizer_mutant, open_tokenizer),
    Target("GGUF vocabulary", make_vocabulary_mutant, open_vocabulary),
]


MEMORY_BYTES = 1 << 30  # beside the interpreter with its modules
HAND_MADE, EVERY = "hand-made", "every"  # instead of a target: a case for each seed, and all targets in turn
HANG_S = 60.0  # a mutant that takes longer counts as a fault, also on a busy machine
REFUSALS = (ModelFileError, TemplateError)
# A model that opens and does not fit the options is refused by the loader with these.
LOAD_REFUSALS = (InvalidRequest, LoadFailed, ModelNotFound)


# Quantised safetensors: MXFP4


def _spoil_tensor(rng: random.Random, tensors: dict[str, Stored], names: list[str]) -> None:
    """Leave out a tensor, or give it another shape, another type or random contents."""
    name = rng.choice(names)
    dtype, array = tensors.pop(name)
    way = rng.randrange(4)
    shape = [rng.choice((1, 2, 3, 64, size)) for size in array.shape][: rng.choice((1, 2, 3))]
    if way == 1:
        tensors[name] = Stored(dtype, np.resize(array, shape))
    elif way == 3:
        tensors[name] = Stored(rng.choice(("I8", "U8")), np.zeros(shape, np.uint8))
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
    (folder / "config.json").write_text(json.dumps(mutate_value(rng, OSS, VALUES) if kind == 2 else OSS))
    return folder


# A model that the native backend packs and runs


def make_served_mutant(rng: random.Random, folder: Path) -> Path:
    """Mutate contents rather than lengths, so that many mutants load and are computed with."""
    if rng.random() < 0.5:
        path = folder / "model.gguf"
        data = bytearray(SMALL_GGUF)
        for _ in range(rng.choice((1, 8, 64))):
            at = rng.randrange(len(data))
            data[at : at + 4] = (rng.choice(NUMBERS) & 0xFFFFFFFF).to_bytes(4, "little")
        path.write_bytes(data if rng.random() < 0.7 else mutate_bytes(rng, SMALL_GGUF, 3000))
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
    logits = logits_of(runner.model, [1, 2, 3])
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
    if not _renderers:
        _renderers.append(Renderer(source))
    (renderer,) = _renderers
    renderer.start()
    renderer.first_answer = renderer._exchange({"source": source}, COMPILE_LIMIT_S)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    with suppress(TemplateRefusal):
        renderer.render({"messages": messages, "add_generation_prompt": True, "bos_token": "<s>"})


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
        return target_of(CASES[seed])
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


Write = Callable[[Path], Path]  # into an empty folder; returns the path to open
CANARY = "executed"  # a file beside the hostile one: a pickle that runs code makes it


class Case(NamedTuple):
    name: str
    write: Write
    open: Callable[[Path], None] = open_and_read_all


def _put(name: str, put: Callable[[Path], object]) -> Write:
    def write(folder: Path) -> Path:
        put(folder / name)
        return folder / name

    return write


def _file(name: str, make: Callable[[], bytes]) -> Write:
    return _put(name, lambda path: path.write_bytes(make()))


def _folder(spoil: Callable[[Path], object]) -> Write:
    def write(folder: Path) -> Path:
        write_folder(folder / "model")
        spoil(folder / "model")
        return folder / "model"

    return write


def _replaced(name: str, put: Callable[[Path], object]) -> Write:
    """A folder in which something that is not a file is in place of a file."""

    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        put(folder / name)

    return _folder(spoil)


def _bind(path: Path) -> None:
    there = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(path.name)
    finally:
        os.chdir(there)


def _sparse(num_bytes: int, head: bytes) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        path.write_bytes(head)
        os.truncate(path, num_bytes)

    return put


def _pickle(path: Path) -> None:
    """Write a pickle that makes the canary, in some folder above it, when it is read."""
    path.write_bytes(b"cos\nsystem\n(S'touch %s'\ntR." % bytes(path.parent / CANARY))


def _pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    _pickle(folder / "pytorch_model.bin")


def _remote_code(folder: Path) -> None:
    text = f"open({str(folder.parent / CANARY)!r}, 'w')\n"
    (folder / "modeling_x.py").write_text(text)
    (folder / "tokenization_x.py").write_text(text)
    settings = config("XForCausalLM", auto_map={"AutoModelForCausalLM": "modeling_x.X"}, model_type="x")
    (folder / "config.json").write_text(json.dumps(settings))


def _split(count: int, number: int) -> Write:
    return _file(f"m-{number:05}-of-{count:05}.gguf", lambda: tiny_gguf(split__count=count, split__no=number - 1))


def _many_strings() -> bytes:
    """A vocabulary with the largest allowed length: 4 million empty strings in 32 MB."""
    array = struct.pack("<IIQ", 9, 8, MAX_ARRAY) + bytes(8 * MAX_ARRAY)
    return make_gguf([*llama_keys(), ("tokenizer.ggml.tokens", array)], list(llama_tensors().items())[1:])


def _many_arrays() -> bytes:
    """Arrays of bytes take eight times their size in memory."""
    array = struct.pack("<IIQ", 9, 0, MAX_ARRAY) + bytes(MAX_ARRAY)
    return make_gguf([*llama_keys(), *((f"x{i}", array) for i in range(9))], [])


def _many_tensors() -> bytes:
    tensors = [(f"t{i}", Tensor((8,), F32, bytes(32))) for i in range(60_000)]
    return make_gguf(llama_keys(), tensors)


def _read_tokenizer(path: Path) -> None:
    Tokenizer.from_json(path.read_bytes(), {}).encode("a" * 5000)


def _tokenizer(**parts: Any) -> Write:
    """A tokenizer with other parts."""
    return _file("tokenizer.json", lambda: json.dumps(byte_level_json() | parts).encode())


def _with_token(token_id: int) -> Write:
    model = byte_level_json()["model"]
    return _tokenizer(model=model | {"vocab": model["vocab"] | {"x": token_id}})


NESTED = {"type": "Split", "pattern": {"Regex": "(" * 5000}, "behavior": "Isolated", "invert": False}


def _index_many(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {str(i): str(i) for i in range(100_000)}}))


def _header(header: object, *, tail: bytes = b"") -> Callable[[Path], object]:
    head = json.dumps(header).encode()
    return lambda path: path.write_bytes(struct.pack("<Q", len(head)) + head + tail)


def _entry(**changes: object) -> dict[str, object]:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OWN: tuple[Case, ...] = (
    Case("a pipe in place of a GGUF", _put("m.gguf", os.mkfifo)),
    Case("a folder in place of a GGUF", _put("m.gguf", os.mkdir)),
    Case("a socket in place of a GGUF", _put("m.gguf", _bind)),
    Case("a device in place of a GGUF", _put("m.gguf", lambda path: path.symlink_to("/dev/zero"))),
    Case("a sparse GGUF of 1 TiB of zeros", _put("m.gguf", _sparse(1 << 40, b""))),
    Case("a sparse GGUF with a header", _put("m.gguf", _sparse(1 << 40, b"GGUF\3"))),
    Case("a split model without its parts", _split(3, 1)),
    Case("a later part of a split model", _split(3, 2)),
    Case("a split model of 99,999 parts", _split(99_999, 1)),
    Case("a GGUF of 4 million empty tokens", _file("m.gguf", _many_strings)),
    Case("a GGUF of nine large arrays", _file("m.gguf", _many_arrays)),
    Case("a GGUF of 60,000 tensors", _file("m.gguf", _many_tensors)),
    Case("a pickle named .gguf", _put("m.gguf", _pickle)),
    Case("a pickle named .pt", _put("m.pt", _pickle)),
    Case("a pickle named .bin", _put("m.bin", _pickle)),
    Case("a pickle named .safetensors in a folder", _replaced(WEIGHTS, _pickle)),
    Case("a folder with pickled weights", _folder(_pickled_weights)),
    Case("a folder with its own code", _folder(_remote_code)),
    Case("a pipe in place of weights", _replaced(WEIGHTS, os.mkfifo)),
    Case("a device in place of weights", _replaced(WEIGHTS, lambda path: path.symlink_to("/dev/zero"))),
    Case("a device in place of config.json", _replaced("config.json", lambda path: path.symlink_to("/dev/zero"))),
    Case("a pipe in place of config.json", _replaced("config.json", os.mkfifo)),
    Case("a pipe in place of generation_config.json", _replaced("generation_config.json", os.mkfifo)),
    Case("config.json of 1 TiB", _replaced("config.json", _sparse(1 << 40, b"{"))),
    Case("weights of 1 TiB of zeros", _replaced(WEIGHTS, _sparse(1 << 40, b""))),
    Case("weights with a header of 1 TiB", _replaced(WEIGHTS, _sparse(1 << 40, struct.pack("<Q", 1 << 39) + b"{"))),
    Case("weights of no tensor", _replaced(WEIGHTS, _header({}))),
    Case("a header that is a list", _replaced(WEIGHTS, _header([]))),
    Case("a header with negative offsets", _replaced(WEIGHTS, _header(_entry(data_offsets=[-8, 0]), tail=bytes(8)))),
    Case("a header with fractions", _replaced(WEIGHTS, _header(_entry(shape=[1.5]), tail=bytes(8)))),
    Case("a header with a shape of 10^30", _replaced(WEIGHTS, _header(_entry(shape=[10**30]), tail=bytes(8)))),
    Case(
        "a header nested 100,000 deep",
        _replaced(WEIGHTS, lambda p: p.write_bytes(struct.pack("<Q", 600_000) + b'{"a":' * 120_000)),
    ),
    Case("an index with a path above", _folder(lambda f: (f / INDEX).write_text('{"weight_map": {"x": "../../x"}}'))),
    Case("an index with a device", _folder(lambda f: (f / INDEX).write_text('{"weight_map": {"x": "/dev/zero"}}'))),
    Case("an index of 100,000 files", _folder(_index_many)),
    Case("a tokenizer nested 100,000 deep", _file("tokenizer.json", lambda: b'{"a":' * 100_000), _read_tokenizer),
    Case("a tokenizer with an id of 2^31", _with_token(1 << 31), _read_tokenizer),
    Case("a tokenizer with an id of 10^400", _with_token(10**400), _read_tokenizer),
    Case("a tokenizer of another kind", _tokenizer(model={"type": "Unigram", "vocab": [["a", -INF]]}), _read_tokenizer),
    Case("a tokenizer with a pattern that is nested", _tokenizer(pre_tokenizer=NESTED), _read_tokenizer),
)


def _of_tests() -> list[Case]:
    """The forged files of the ordinary tests."""
    gguf = [Case(f"GGUF: {name}", _file("m.gguf", make)) for name, (make, _) in test_gguf.HOSTILE.items()]
    folders = [Case(f"folder: {name}", _folder(spoil)) for name, (spoil, _) in test_safetensors.HOSTILE.items()]
    return [*gguf, *folders]


CASES: tuple[Case, ...] = (*OWN, *_of_tests())


def target_of(case: Case) -> Target:
    """The case as a target of the mutants' process. It must be refused."""

    def make(_: random.Random, folder: Path) -> Path:
        return case.write(folder)

    def read(path: Path) -> None:
        try:
            case.open(path)
        finally:
            assert not list(path.parent.rglob(CANARY)), "code of the file ran"
        raise AssertionError("it loads")

    return Target(f"hand-made: {case.name}", make, read)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
