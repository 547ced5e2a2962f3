"""Types are decoded only after their type information was built at import: msgspec builds it unsafely in threads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import quire
from quire.server.app import ENDPOINTS
from quire.server.request_context import build_decoders, built_types, convert, decode
from tests.server.type_info import decoded_types, has_type_info, types_in

ROOT = Path(quire.__file__).parents[1]
# Typed decoding outside of quire/server/request_context.py, and why it is safe.
ALONE = {
    "quire/engine/worker/protocol.py": "its decoders are built at import",
    "quire/engine/worker/client.py": "its decoders are built at import",
    "quire/server/batches/store.py": "its decoders are built at import",
    "quire/scale/cluster_client.py": "its types have a decoder in the client of a worker",
    "quire/server/limits.py": "the keys file is read once, before the server listens",
    "quire/cli/serve_models.py": "the configuration is read once, before the server listens",
}
PLAIN = ("dict[str, Any]", "dict[str, object]")  # types without fields, for which msgspec keeps no information


class Inner(msgspec.Struct):
    number: int


class Outer(msgspec.Struct):
    inner: list[Inner]


class Known(msgspec.Struct):
    number: int


class Unknown(msgspec.Struct):
    number: int


def test_every_type_that_a_server_decodes_is_built_at_import() -> None:
    """In a new process: other tests use these types too."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.server.type_info"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert found.stdout.split() == []


def test_the_list_of_types_is_complete() -> None:
    assert len(decoded_types()) > 60
    found = {one.__qualname__ for kind in decoded_types().values() for one in types_in(kind)}
    nested = {"ChatMessage", "ToolParam", "FunctionDefinition", "InputItem", "OllamaOptions", "StoredBatch", "Ready"}
    assert nested <= found
    assert {"Started", "TierStats", "CacheExplanation"} <= found  # named tuples in messages of the worker
    bodies = {kind for row in ENDPOINTS for kind in (row.body, row.query) if kind is not None}
    assert bodies <= built_types()


def test_type_information_is_detected() -> None:
    assert not has_type_info(Outer)
    msgspec.json.encode(Outer([Inner(1)]))
    assert not has_type_info(Outer)  # encoding needs none
    msgspec.json.Decoder(Outer)
    assert has_type_info(Outer)
    assert has_type_info(Inner)  # of all types in it, at once


def test_a_type_without_a_decoder_is_refused() -> None:
    with pytest.raises(TypeError, match="Unknown has no decoder"):
        decode(b'{"number": 1}', Unknown)
    with pytest.raises(TypeError, match="Unknown has no decoder"):
        convert({"number": "1"}, Unknown)
    assert not has_type_info(Unknown)


def test_a_built_type_is_decoded_and_converted() -> None:
    build_decoders(Known)
    assert decode(b'{"number": 1}', Known) == convert({"number": "1"}, Known) == Known(1)
    with pytest.raises(msgspec.ValidationError):
        decode(b'{"number": "1"}', Known)


CALLS = ("json.decode", "msgpack.decode", "yaml.decode", "msgspec.convert", "json.Decoder", "msgpack.Decoder")


def test_no_other_module_decodes_into_types() -> None:
    """msgspec.json.decode(type=...), msgspec.convert and decoders of their own would go past the list."""
    found: set[str] = set()
    for path in sorted(ROOT.joinpath("quire").rglob("*.py")):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text()
        if name == "quire/server/request_context.py" or not any(word in text for word in CALLS):
            continue  # parsing all of them takes seconds
        if any(map(_is_typed, ast.walk(ast.parse(text)))):
            found.add(name)
    assert found == set(ALONE)


def _is_typed(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    if not name.endswith(CALLS):
        return False
    if name.endswith("decode"):
        return any(one.arg == "type" and ast.unparse(one.value) not in PLAIN for one in node.keywords)
    return True
