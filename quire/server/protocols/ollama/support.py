"""Fields of the protocol that quire knows and does nothing with. One table refuses, the other lets pass and names.

What would change the answer is refused by name, unless its value asks for nothing. What only says how Ollama's own
runner should compute is accepted, and named in `x-quire-ignored-fields`. To build a feature is to remove its row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import Meta

from quire.server.errors import ApiError, Kind
from quire.server.protocols.shape_fields import SHAPE_FIELDS


class Unsupported(NamedTuple):
    why: str
    harmless: tuple[Any, ...] = ()  # values that ask for nothing; null always does


_SHAPE = "format says here what the answer must look like: json, or a JSON schema"
_SAMPLER = "there is no such sampler here"

# Fields of a body, of a message and of options.
UNSUPPORTED = {
    "images": Unsupported("images cannot be read here", ([],)),
    "suffix": Unsupported("the models served write on from the end only", ("",)),
    "template": Unsupported("a request cannot bring its own template; the model's is used", ("",)),
    "mirostat": Unsupported(_SAMPLER, (0,)),
    "typical_p": Unsupported(_SAMPLER, (1,)),
    "tfs_z": Unsupported(_SAMPLER, (1,)),
    **{name: Unsupported(_SHAPE, harmless) for name, harmless in SHAPE_FIELDS.items()},
}

_LOADING = "the server decides that when it loads a model"
_OLD = "no Ollama of today reads it"

IGNORED_OPTIONS = {
    "num_gpu": _LOADING,
    "main_gpu": _LOADING,
    "num_thread": _LOADING,
    "num_batch": _LOADING,
    "use_mmap": _LOADING,
    "use_mlock": _LOADING,
    "numa": _LOADING,
    "low_vram": _LOADING,
    "draft_num_predict": _LOADING,
    "num_keep": "contexts are never shifted here",
    "mirostat_tau": "there is no mirostat here",
    "mirostat_eta": "there is no mirostat here",
    "f16_kv": _OLD,
    "logits_all": _OLD,
    "vocab_only": _OLD,
    "embedding_only": _OLD,
    "penalize_newline": _OLD,
}


def refused(field: str) -> Meta:
    return Meta(description=f"Not supported: {UNSUPPORTED[field].why}.")


def ignored(option: str) -> Meta:
    return Meta(description=f"Accepted, without effect: {IGNORED_OPTIONS[option]}.")


def refuse_unsupported(part: object, prefix: str = "") -> None:
    """Raises ApiError for the first field of this part that asks for what is not built."""
    for field, row in UNSUPPORTED.items():
        value = getattr(part, field, None)
        if value is not None and value not in row.harmless:
            shown = f" = {value!r:.40}" if isinstance(value, int | float) else ""
            message = f"{prefix}{field}{shown} is not supported: {row.why}"
            raise ApiError(Kind.INVALID, message, param=f"{prefix}{field}", reason="unsupported_parameter")
