"""Content for tests of the disk store: everything of it follows from a number."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from quire.core.cache import hash_block_tokens, pack_tokens
from quire.core.step import Content, MemoryKind
from quire.engine.levels.disk_store import DiskStore, StoredFile, list_files, space_folders

FACTS = {"weights": "0f" * 32, "backend": "native", "dtype": "float16", "block_size": "32"}
PAYLOAD_BYTES = 1000


def make_content(number: int, kind: MemoryKind = MemoryKind.BLOCK, num_tokens: int = 32) -> Content:
    parent_key = number.to_bytes(16, "big")
    tokens = pack_tokens(range(number, number + num_tokens))
    return Content(kind, hash_block_tokens(parent_key, tokens), parent_key, tokens)


def make_payload(content: Content, num_bytes: int = PAYLOAD_BYTES) -> memoryview:
    """The payload that a test expects for this content."""
    seed = sha256(content.key).digest()
    return memoryview(bytearray((seed * (num_bytes // len(seed) + 1))[:num_bytes]))


def new_buffer(num_bytes: int = PAYLOAD_BYTES) -> memoryview:
    return memoryview(bytearray(num_bytes))


def read(store: DiskStore, content: Content, out: memoryview) -> None:
    """Read content. Raises what is wrong with its file."""
    (damage,) = store.read_many([content], [out])
    if damage is not None:
        raise damage


def read_back(store: DiskStore, content: Content, num_bytes: int = PAYLOAD_BYTES) -> bool:
    """Read content and compare it with what was written."""
    buffer = new_buffer(num_bytes)
    read(store, content, buffer)
    return buffer == make_payload(content, num_bytes)


def all_files(root: Path) -> list[StoredFile]:
    """The files of all spaces, least recently used first."""
    found = [file for folder in space_folders(root) for file in list_files(folder).files]
    return sorted(found, key=lambda file: file.used_ns)


def temporary_files(root: Path) -> list[Path]:
    return [path for path in root.rglob(".tmp-*") if not path.is_dir()]
