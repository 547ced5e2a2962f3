"""Types are decoded only after their type information was built at import: msgspec builds it unsafely in threads."""

from __future__ import annotations

import ast
import dataclasses
import gc
import os
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

import quire
from quire.server.app import ENDPOINTS
from quire.server.request_context import _decoders, build_decoders, convert, decode
from tests.server.rig import hooked

ROOT = Path(quire.__file__).parents[1]
# Typed decoding outside of quire/server/request_context.py, and why it is safe.
ALONE = {
    "quire/engine/worker/protocol.py": "its decoders are built at import",
    "quire/engine/worker/client.py": "its decoders are built at import",
    "quire/server/batches/service.py": "its decoders are built at import",
    "quire/scale/cluster_client.py": "its types have a decoder in the client of a worker",
    "quire/server/limits.py": "the keys file is read once, before the server listens",
    "quire/sim/traces.py": "the simulator has one thread",
    "quire/cli/serve.py": "the configuration is read once, before the server listens",
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
        [sys.executable, "-m", "tests.server.test_decoding"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert found.stdout.split() == []


def test_the_list_of_types_is_complete() -> None:
    assert len(decoded_types()) > 60
    found = {one.__qualname__ for kind in decoded_types().values() for one in types_in(kind)}
    nested = {"ChatMessage", "ToolParam", "FunctionDefinition", "InputItem", "OllamaOptions", "StoredBatch", "Ready"}
    assert nested <= found
    assert {"Started", "TierStats", "CacheExplanation"} <= found  # named tuples in messages of the worker
    bodies = {kind for row in ENDPOINTS for kind in (row.body, row.query) if kind is not None}
    assert bodies <= _decoders.keys()


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


REPORT = "QUIRE_TEST_TYPES"  # the file for the report of a server


def has_type_info(kind: type) -> bool:
    """Whether msgspec has begun to build it. A Struct refers to it; other types have it as an attribute."""
    if issubclass(kind, msgspec.Struct):
        return any(type(one).__name__ == "StructInfo" for one in gc.get_referents(kind))
    return "__msgspec_cache__" in vars(kind)


def types_in(annotation: Any) -> set[type]:
    """All types with fields that a value of this type may contain: Structs, dataclasses, named tuples, typed dicts."""
    found: set[type] = set()
    open_ones = [annotation]
    while open_ones:
        one = open_ones.pop()
        if isinstance(one, type) and _has_fields(one):
            if one not in found:
                found.add(one)
                open_ones += typing.get_type_hints(one, include_extras=True).values()
        else:
            open_ones += typing.get_args(one)
    return found


def _has_fields(kind: type) -> bool:
    is_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind) or is_tuple or typing.is_typeddict(kind)


def decoded_types() -> dict[str, Any]:
    """Every type that a server decodes, by name. Its modules have been imported, so their decoders are built."""
    import quire.server.launcher  # noqa: F401
    from quire.engine.worker.client import ANSWERS
    from quire.engine.worker.protocol import from_worker, to_worker
    from quire.server.app import ENDPOINTS
    from quire.server.batches.service import StoredBatch, StoredFile

    kinds = {kind for row in ENDPOINTS for kind in (row.body, row.query, row.form, row.answer) if kind is not None}
    kinds |= {StoredFile, StoredBatch}
    named: dict[str, Any] = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in kinds}
    named |= {f"answer {kind}": kind for kind in ANSWERS}
    return {**named, "to_worker": to_worker.type, "from_worker": from_worker.type}


def unbuilt() -> list[str]:
    """Types that a server can decode and whose type information is not built."""
    found = {one for kind in decoded_types().values() for one in types_in(kind)}
    return sorted(one.__qualname__ for one in found if not has_type_info(one))


def late() -> list[str]:
    """Structs with type information that no decoder has built at import."""
    known = {one for kind in decoded_types().values() for one in types_in(kind)}
    return sorted(one.__qualname__ for one in _below(msgspec.Struct) if has_type_info(one) and one not in known)


def _below(kind: type) -> list[type]:
    found: list[type] = type.__subclasses__(kind)
    return [*found, *(one for sub in found for one in _below(sub))]


def reporting(folder: Path) -> dict[str, str]:
    """The environment of a server that writes `late()` to a file when it ends."""
    code = "from tests.server.test_decoding import install\n\ninstall()\n"
    return hooked(folder, code, **{REPORT: str(folder / "late")})


def read_report(folder: Path) -> list[str]:
    return (folder / "late").read_text().split()


def install() -> None:
    if REPORT not in os.environ or "serve" not in sys.orig_argv:  # a worker, or a child of one
        return
    from quire.server.launcher import Launcher

    serve = Launcher.serve

    async def serve_and_report(self: Launcher) -> None:
        try:
            await serve(self)
        finally:
            Path(os.environ[REPORT]).write_text("\n".join(late()))

    Launcher.serve = serve_and_report  # type: ignore[method-assign]


if __name__ == "__main__":
    print("\n".join(unbuilt()))
