"""A Hugging Face hub in a few lines, for `quire pull`: HF_ENDPOINT points to it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.cli.scripted import HttpThread

COMMIT = "c" * 40


@dataclass
class Repository:
    files: dict[str, bytes]
    sizes: dict[str, int] = field(default_factory=dict)  # reported instead of the real ones
    gguf: dict[str, Any] | None = None

    @property
    def document(self) -> dict[str, Any]:
        siblings = [
            {"rfilename": name, "size": self.sizes.get(name, len(data)), "blobId": "b", "lfs": None}
            for name, data in self.files.items()
        ]
        found = {"id": "org/name", "modelId": "org/name", "sha": COMMIT, "private": False, "tags": [], "downloads": 0}
        return {**found, "siblings": siblings, **({} if self.gguf is None else {"gguf": self.gguf})}

    @property
    def tree(self) -> list[dict[str, Any]]:
        return [{"type": "file", "path": name, "size": len(data), "oid": "b"} for name, data in self.files.items()]


class FakeHub(HttpThread):
    """`org_name=` is the repository org/name."""

    def __init__(self, **repositories: Repository) -> None:
        self.repositories = {name.replace("_", "/"): one for name, one in repositories.items()}
        self.fetched: list[str] = []  # files, in order
        super().__init__(_handler(self))

    def env(self, home: Path) -> dict[str, str]:
        """Variables for a process that uses this hub, with caches of its own."""
        settings = {"HF_ENDPOINT": self.url, "HF_HOME": str(home / "hf"), "QUIRE_CACHE": str(home / "quire")}
        return {**settings, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def log_message(self, *_: object) -> None: ...

        def _answer(self) -> None:
            parts = urlsplit(self.path).path.strip("/").split("/")
            is_api = parts[:2] == ["api", "models"]
            name = "/".join(parts[2:4] if is_api else parts[:2])
            repository = hub.repositories.get(name)
            if repository is None:
                self._send(404, b"{}", {"x-error-code": "RepoNotFound"})
            elif is_api:
                found: Any = repository.tree if "tree" in parts else {**repository.document, "id": name}
                self._send(200, json.dumps(found).encode(), {"content-type": "application/json"})
            elif (data := repository.files.get(parts[-1])) is None:
                self._send(404, b"", {"x-error-code": "EntryNotFound"})
            else:
                if self.command == "GET":
                    hub.fetched.append(parts[-1])
                etag = hashlib.sha256(data).hexdigest()
                self._send(200, data, {"etag": f'"{etag}"', "x-repo-commit": COMMIT, "accept-ranges": "bytes"})

        def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

    return Handler
