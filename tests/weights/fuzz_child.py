"""Opens broken model files in a separate process with little memory and time: `python -m ... SEED COUNT`.

Each mutant must load or be refused with `ModelFileError`. Anything else ends this process with a traceback and the
target and seed, which reproduce the mutant.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quire.backends.native.packing import SOURCES, find_block_type, to_blocks
from quire.backends.torch.packed import format_of, pack
from quire.errors import ModelFileError
from quire.text.tokenizer import Tokenizer
from quire.weights.checkpoint import RawTensor, map_file
from quire.weights.families import BY_ARCHITECTURE
from quire.weights.gguf import FILE_TYPES, read_header
from quire.weights.opening import open_checkpoint
from quire.weights.packed import dequantize
from quire.weights.quants import to_float32
from quire.weights.tensors import check_tensors
from tests.backends.native.matrices import Packed
from tests.text.vocabularies import byte_level_gguf, byte_level_json, sentencepiece_gguf
from tests.weights.k_quants import k_quants
from tests.weights.layouts import LAYOUTS, Stored, quantize_arrays, write_tensors
from tests.weights.makers import (
    LAYERS,
    config,
    experts_gguf,
    llama_arrays,
    make_gguf,
    moe_arrays,
    moe_config,
    moe_keys,
    moe_tensors,
    tiny_gguf,
    write_folder,
)

MEMORY_BYTES = 4 << 30
SECONDS = 2.0


class Target(NamedTuple):
    name: str
    make: Callable[[random.Random, Path], Path]  # writes a mutant into an empty folder, returns the path to open
    open: Callable[[Path], None]


# Mutations

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


def mutate_value(rng: random.Random, value: Any) -> Any:
    """Replace a random value inside."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {one: value[one] for one in value if one != key}
        return {**value, key: mutate_value(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], mutate_value(rng, value[at]), *value[at + 1 :]]
    return rng.choice(VALUES)


def mutate_json(rng: random.Random, path: Path) -> None:
    if rng.random() < 0.3:
        path.write_bytes(mutate_bytes(rng, path.read_bytes(), 1 << 20))
    else:
        path.write_text(json.dumps(mutate_value(rng, json.loads(path.read_bytes()))))


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
EXPERTS = [experts_gguf({number: kind for number, kind in _CODED.items() if number % 8 == i}) for i in range(8)]


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
    (folder / "config.json").write_text(json.dumps(mutate_value(rng, settings)))
    return folder


def open_dummy(path: Path) -> None:
    checkpoint = open_checkpoint(path, "dummy")
    check_tensors(checkpoint)


def make_quantized_mutant(rng: random.Random, folder: Path) -> Path:
    """Change the config, the header or the contents of a quantised folder, or leave out one of its tensors."""
    layout = rng.choice(list(LAYOUTS.values()))
    tensors, _ = quantize_arrays(layout, llama_arrays())
    if rng.random() < 0.3:
        name = rng.choice([name for name in tensors if "_proj." in name])
        dtype, array = tensors.pop(name)
        if rng.random() < 0.7:
            shape = [rng.choice((1, 2, 3, 64, size)) for size in array.shape][: rng.choice((1, 2, 3))]
            tensors[name] = Stored(rng.choice((dtype, dtype, "I8", "U8")), np.resize(array, shape))
            if array.itemsize > 1 and tensors[name].dtype in ("I8", "U8"):
                tensors[name] = Stored(tensors[name].dtype, np.zeros(shape, np.uint8))
    settings = config(quantization_config=layout.config)
    if rng.random() < 0.4:
        settings["quantization_config"] = mutate_value(rng, layout.config)
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
    path.write_text(json.dumps(mutate_value(rng, rng.choice(VOCABULARIES))))
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


TARGETS: list[Target] = [
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


def _too_slow(_signal: int, _frame: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def run_one(target: Target, seed: int, folder: Path) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    path = target.make(random.Random(f"{target.name} {seed}"), folder)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        target.open(path)
    except ModelFileError as error:
        str(error).encode()  # must be printable
        return "refused"
    except BaseException:
        print(f"{target.name}: seed {seed}", file=sys.stderr)
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "loads"


def main(first_seed: int, count: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, _too_slow)
    import gguf  # noqa: F401  # so that the import does not count for a mutant

    with tempfile.TemporaryDirectory() as name:
        for target in TARGETS:
            outcomes = Counter(run_one(target, first_seed + i, Path(name) / "mutant") for i in range(count))
            print(json.dumps({"target": target.name, **outcomes}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
