"""Fields of Anthropic's API that quire does not support. See `quire/server/protocols/support.py`."""

from __future__ import annotations

from typing import Any

from msgspec import Meta

from quire.server.protocols.shape_fields import SHAPE_FIELDS
from quire.server.protocols.support import Unsupported, check_supported, describe_refused

_CONVERSATIONS = "conversations are used unchanged"
_SHAPE = "use output_config.format, which takes a JSON schema"
_ONE_MODEL = "a request uses one model"
_EMPTY: tuple[object, ...] = (None, "", [], {})  # values that request nothing in any field

UNSUPPORTED = {
    "mcp_servers": Unsupported("tools are run by the client"),
    "container": Unsupported("this server runs no code"),
    "compaction": Unsupported(_CONVERSATIONS),
    "thread": Unsupported(_CONVERSATIONS),
    "diagnostics": Unsupported('send "cache": true for an explanation of the cache hit'),
    "fallbacks": Unsupported(_ONE_MODEL),
    "fallback_credit_token": Unsupported(_ONE_MODEL),
    "inference_geo": Unsupported("the location of this server cannot be chosen", ("global",)),
    "speed": Unsupported("this server has a single speed", ("standard",)),
    "format": Unsupported(_SHAPE),
    **{name: Unsupported(_SHAPE, ("text",) if name == "response_format" else ()) for name in SHAPE_FIELDS},
}


def refused(field: str) -> Meta:
    return describe_refused(UNSUPPORTED[field])


def refuse_unsupported(body: object) -> None:
    """Raise ApiError for the first field that requests an unsupported feature. Names the member of an object."""
    for field, row in UNSUPPORTED.items():
        path, value = _requested(field, getattr(body, field))
        is_whole = path in (field, f"{field}.type")  # harmless values are those of the field or of its `type`
        check_supported(path, value, row if is_whole else Unsupported(row.why), shown=(str, int, float))


def _requested(field: str, value: Any) -> tuple[str, Any]:
    """The path and the value of the part that requests something: of an object, its `type` or its first member."""
    parts = {field: value}
    if isinstance(value, dict):
        parts = {f"{field}.{key:.80}": value[key] for key in sorted(value, key=lambda key: key != "type")}
    return next(((path, part) for path, part in parts.items() if part not in _EMPTY), (field, None))
