"""Finds the types for which msgspec has built type information in this process. Builds none itself.

msgspec.inspect, msgspec.structs and msgspec.json.schema build it, so types are walked by their annotations.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import typing
from pathlib import Path
from typing import Any

import msgspec

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
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text("from tests.server.type_info import install\n\ninstall()\n")
    paths = [str(folder), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path), REPORT: str(folder / "late")}


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
