"""Fields of the protocol that quire knows and does nothing with: one table, checked in one place.

They would change the answer, so they are refused by name. To build a feature is to remove its row.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Meta

from quire.server.errors import ApiError, Kind
from quire.server.protocols.shape_fields import SHAPE_FIELDS


class Unsupported(NamedTuple):
    why: str
    harmless: tuple[str, ...] = ()  # values, of the field or of its `type`, that ask for nothing


_CONVERSATIONS = "conversations are taken as they are"
_SHAPE = "output_config.format says here what the answer must look like, by a JSON schema"
_ONE_MODEL = "one model is served"
_NOTHING: tuple[object, ...] = (None, "", [], {})  # nor do these, in any field

UNSUPPORTED = {
    "mcp_servers": Unsupported("tools are called by the client"),
    "container": Unsupported("no code is run here"),
    "compaction": Unsupported(_CONVERSATIONS),
    "thread": Unsupported(_CONVERSATIONS),
    "diagnostics": Unsupported('send "cache": true to learn what the cache gave, and why not more'),
    "fallbacks": Unsupported(_ONE_MODEL),
    "fallback_credit_token": Unsupported(_ONE_MODEL),
    "inference_geo": Unsupported("the model runs where this server runs", ("global",)),
    "speed": Unsupported("there is one speed", ("standard",)),
    "format": Unsupported(_SHAPE),
    **{name: Unsupported(_SHAPE, ("text",) if name == "response_format" else ()) for name in SHAPE_FIELDS},
}


def refused(field: str) -> Meta:
    return Meta(description=f"Not supported: {UNSUPPORTED[field].why}.")


def refuse_unsupported(body: object) -> None:
    """Raises ApiError for the first field that asks for what is not built, and names the part of it that does."""
    for field, row in UNSUPPORTED.items():
        value = getattr(body, field)
        asked = {field: value}
        if isinstance(value, dict):
            asked = {f"{field}.{key:.80}": value[key] for key in sorted(value, key=lambda key: key != "type")}
        asked = {path: part for path, part in asked.items() if part not in _NOTHING}
        path, part = next(iter(asked.items()), (field, None))
        if not asked or (path in (field, f"{field}.type") and isinstance(part, str) and part in row.harmless):
            continue
        shown = f" = {part!r:.80}" if isinstance(part, str | int | float) else ""
        raise unsupported(path, f"{path}{shown} is not supported: {row.why}")


def unsupported(path: str, message: str) -> ApiError:
    return ApiError(Kind.INVALID, message, param=path, reason="unsupported_parameter")
