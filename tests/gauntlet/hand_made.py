"""Hostile model files written by hand: pipes, devices, sparse giants, bombs in JSON, pickles, traversal.

Each must be refused, within the same limits as the mutants. The tables of the ordinary tests are included.
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from quire.text.tokenizer import Tokenizer
from quire.weights.gguf import MAX_ARRAY
from quire.weights.opening import open_checkpoint
from quire.weights.tensors import check_tensors
from tests.text.vocabularies import byte_level_json
from tests.weights import test_gguf, test_safetensors
from tests.weights.fuzz_child import Target, open_and_read_all
from tests.weights.makers import F32, Tensor, config, llama_keys, llama_tensors, make_gguf, tiny_gguf, write_folder

Write = Callable[[Path], Path]  # into an empty folder; returns the path to open
CANARY = "executed"  # a file beside the hostile one: a pickle that runs code makes it


class Case(NamedTuple):
    name: str
    write: Write
    open: Callable[[Path], None] = open_and_read_all


def _file(name: str, make: Callable[[], bytes]) -> Write:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(make())
        return folder / name

    return write


def _put(name: str, put: Callable[[Path], object]) -> Write:
    def write(folder: Path) -> Path:
        put(folder / name)
        return folder / name

    return write


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


def _pickle(folder: Path) -> bytes:
    """A pickle that makes the canary when it is read."""
    return b"cos\nsystem\n(S'touch %s'\ntR." % bytes(folder / CANARY)


def _pickled(name: str) -> Write:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(_pickle(folder))
        return folder / name

    return write


def _pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(_pickle(folder.parent))


def _remote_code(folder: Path) -> None:
    text = f"open({str(folder.parent / CANARY)!r}, 'w')\n"
    (folder / "modeling_x.py").write_text(text)
    (folder / "tokenization_x.py").write_text(text)
    settings = config("XForCausalLM", auto_map={"AutoModelForCausalLM": "modeling_x.X"}, model_type="x")
    (folder / "config.json").write_text(json.dumps(settings))


def _split(count: int, number: int) -> Write:
    def write(folder: Path) -> Path:
        path = folder / f"m-{number:05}-of-{count:05}.gguf"
        path.write_bytes(tiny_gguf(split__count=count, split__no=number - 1))
        return path

    return write


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


def _tokenizer(text: str) -> Write:
    def write(folder: Path) -> Path:
        (folder / "tokenizer.json").write_text(text)
        return folder

    return write


def _read_tokenizer(folder: Path) -> None:
    Tokenizer.from_json((folder / "tokenizer.json").read_bytes(), {}).encode("a" * 5000)


def _edited(edit: Callable[[dict[str, Any]], object]) -> str:
    spec = byte_level_json()
    edit(spec)
    return json.dumps(spec)


def _nest_pattern(spec: dict[str, Any]) -> None:
    pattern = {"type": "Split", "pattern": {"Regex": "(" * 5000}, "behavior": "Isolated", "invert": False}
    spec["pre_tokenizer"] = pattern


def _as_unigram(spec: dict[str, Any]) -> None:
    spec["model"] = {"type": "Unigram", "vocab": [["a", float("-inf")]]}


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
    Case("a pickle named .gguf", _pickled("m.gguf")),
    Case("a pickle named .pt", _pickled("m.pt")),
    Case("a pickle named .bin", _pickled("m.bin")),
    Case(
        "a pickle named .safetensors in a folder", _replaced(WEIGHTS, lambda p: p.write_bytes(_pickle(p.parent.parent)))
    ),
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
    Case("a tokenizer nested 100,000 deep", _tokenizer('{"a":' * 100_000), _read_tokenizer),
    Case(
        "a tokenizer with an id of 2^31",
        _tokenizer(_edited(lambda s: s["model"]["vocab"].update(x=1 << 31))),
        _read_tokenizer,
    ),
    Case(
        "a tokenizer with an id of 10^400",
        _tokenizer(_edited(lambda s: s["model"]["vocab"].update(x=10**400))),
        _read_tokenizer,
    ),
    Case("a tokenizer of another kind", _tokenizer(_edited(_as_unigram)), _read_tokenizer),
    Case("a tokenizer with a pattern that is nested", _tokenizer(_edited(_nest_pattern)), _read_tokenizer),
)


def _open_forged(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    try:
        checkpoint.tokenizer_files()
        check_tensors(checkpoint)
    finally:
        checkpoint.close()


def _of_tests() -> list[Case]:
    """The forged files of the ordinary tests."""
    gguf = [Case(f"GGUF: {name}", _file("m.gguf", make), _open_forged) for name, (make, _) in test_gguf.HOSTILE.items()]
    folders = [
        Case(f"folder: {name}", _folder(spoil), _open_forged) for name, (spoil, _) in test_safetensors.HOSTILE.items()
    ]
    return [*gguf, *folders]


CASES: tuple[Case, ...] = (*OWN, *_of_tests())


def target_of(case: Case) -> Target:
    """The case as a target of the mutants' process. It must be refused."""

    def make(_: random.Random, folder: Path) -> Path:
        return case.write(folder)

    def read(path: Path) -> None:
        home = path if (path / "tokenizer.json").exists() else path.parent
        try:
            case.open(path)
        finally:
            assert not list(home.rglob(CANARY)), "code of the file ran"
        raise AssertionError("it loads")

    return Target(f"hand-made: {case.name}", make, read)
