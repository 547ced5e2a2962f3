"""Hints for 404 responses: the endpoint that was probably meant, from the route table, or why there is none.

There are no redirects: a redirect would hide a wrong base URL and cost a round trip with each request.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

MAX_PATH_CHARS = 200  # longer paths are not typos
NEAR = 0.85  # difflib's ratio of paths that differ in a letter or two
# Prefixes that base URLs often repeat or lack.
_PREFIXES = ("v1", "api", "openai", "anthropic")
BASES = {
    "openai": "OpenAI clients need a base URL that ends in a single /v1",
    "anthropic": "Anthropic clients add /v1 themselves: their base URL ends without it",
    "ollama": "Ollama clients need the address without a path",
}
_NO_EMBEDDINGS = "quire serves text generation models and computes no embeddings"
_NO_STORE = "this server does not store such objects"
_NO_MODELS = "the models are fixed at start: download them with `quire pull` and restart the server"

# Paths of other servers, without the prefixes above, and why they are not served.
UNSERVED = {
    "embeddings": _NO_EMBEDDINGS,
    "embed": _NO_EMBEDDINGS,
    "embedding": _NO_EMBEDDINGS,
    "rerank": _NO_EMBEDDINGS,
    "score": _NO_EMBEDDINGS,
    "audio": "quire reads and writes text only",
    "images": "quire reads and writes text only",
    "videos": "quire reads and writes text only",
    "realtime": "quire reads and writes text only",
    "moderations": "this server has no moderation model",
    "uploads": _NO_STORE,
    "assistants": _NO_STORE,
    "threads": _NO_STORE,
    "conversations": _NO_STORE,
    "vector_stores": _NO_STORE,
    "messages/batches": _NO_STORE,
    "fine_tuning": "this server does not train",
    "complete": "it is the older form of /v1/messages",
    "create": _NO_MODELS,
    "copy": _NO_MODELS,
    "delete": _NO_MODELS,
    "push": _NO_MODELS,
    "blobs": _NO_MODELS,
    "infill": "the models generate at the end of the prompt only",
}


# The same for paths below served paths.
UNSERVED_BELOW = {"responses": _NO_STORE, "chat/completions": _NO_STORE}


class Row(Protocol):
    """The parts of an `Endpoint` of `app.py` that a hint uses."""

    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def tag(self) -> str: ...


R = TypeVar("R", bound=Row)


@dataclass(frozen=True, slots=True)
class _Typed:
    """A path split into its prefixes and the rest."""

    prefix: tuple[str, ...]
    core: str

    @staticmethod
    def of(path: str) -> _Typed:
        parts = [part for part in path.lower().split("/") if part]
        size = 0
        while size < len(parts) and parts[size] in _PREFIXES:
            size += 1
        return _Typed(tuple(parts[:size]), "/".join(parts[size:]))


def find_meant(path: str, rows: Sequence[R]) -> R | None:
    """Return the endpoint that differs only in prefixes, slashes, case, a missing end or a letter or two."""
    typed = _Typed.of(path)
    if len(path) > MAX_PATH_CHARS or not typed.core:
        return None
    known = [(_Typed.of(_fixed(row.path)), row) for row in rows]
    same = [(one, row) for one, row in known if one.core == typed.core]
    siblings = [(one, row) for one, row in known if typed.prefix and one.prefix == typed.prefix[-1:]]
    if not any(pair in siblings for pair in same):
        longer = [(one, row) for one, row in siblings if one.core.startswith(typed.core + "/")]
        same = longer if len(longer) == 1 else same  # /v1/chat is the beginning of one path, /v1/cache of several
    if not same:  # with a path parameter, such as a model name
        same = [(one, row) for one, row in known if "{" in row.path and typed.core.startswith(one.core + "/")]
    if not same:
        near = difflib.get_close_matches(typed.core, {one.core for one, _ in known}, n=1, cutoff=NEAR)
        same = [(one, row) for one, row in known if one.core in near]
    same.sort(key=lambda pair: (pair[0].prefix[-1:] != typed.prefix[-1:], "{" in pair[1].path))
    return same[0][1] if same else None


def why_unserved(path: str) -> str | None:
    """Return why a path of other servers is not served. None: not such a path."""
    core = _Typed.of(path).core if len(path) <= MAX_PATH_CHARS else ""
    for head, why in UNSERVED_BELOW.items():
        if core.startswith(f"{head}/"):
            return why
    heads = (core, "/".join(core.split("/")[:2]), core.split("/", maxsplit=1)[0])
    return next((UNSERVED[head] for head in heads if head in UNSERVED), None)


def advice(path: str, meant: Row | None) -> str:
    """Return the second part of the 404 message."""
    if meant is not None:
        text = f"did you mean {meant.method} {_plain(meant.path)}?"
        is_base = _Typed.of(path).prefix != _Typed.of(meant.path).prefix
        return f"{text} {BASES[meant.tag]}" if is_base and meant.tag in BASES else text
    if (why := why_unserved(path)) is not None:
        return f"it is not served: {why}"
    return "/docs lists all endpoints"


def _fixed(path: str) -> str:
    """The path up to its first parameter."""
    return path.partition("{")[0]


def _plain(path: str) -> str:
    """The path without Starlette's converters."""
    return re.sub(r"\{(\w+)(?::\w+)?\}", r"{\1}", path)
