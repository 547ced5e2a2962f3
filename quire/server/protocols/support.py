"""Fields that a protocol defines and quire does not support. The tables are in each protocol's `support.py`.

A field that would change the answer is refused by name, unless its value requests nothing: an answer that ignores
`modalities` is a wrong answer. A field that is only a hint or a label is accepted without effect. A new feature removes
its row from the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec import Meta

from quire.server.errors import ApiError, Kind


class Unsupported(NamedTuple):
    """A row of a table of refused fields."""

    why: str
    harmless: tuple[Any, ...] = ()  # values that request nothing, in addition to null

    def allows(self, value: Any) -> bool:
        """Whether the value requests nothing. A boolean never equals a number here."""
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.harmless)

    def message(self, path: str) -> str:
        return f"{path} is not supported: {self.why}"


def refuse_unsupported(
    part: object, table: Mapping[str, Unsupported], prefix: str = "", *, shown: tuple[type, ...] = ()
) -> None:
    """Raise ApiError for the first field of this part of a body that requests an unsupported feature.

    `prefix`: the path of the part. `shown`: types of values that the message repeats; a prompt must not be repeated.
    """
    for field, row in table.items():
        check_supported(f"{prefix}{field}", getattr(part, field, None), row, shown=shown)


def check_supported(path: str, value: Any, row: Unsupported, *, shown: tuple[type, ...] = ()) -> None:
    """Raise ApiError if this value of an unsupported field requests something."""
    if value is not None and not row.allows(value):
        text = f" = {value!r:.80}" if isinstance(value, shown) else ""
        raise unsupported(path, row.message(f"{path}{text}"))


def unsupported(path: str, message: str, *, is_value: bool = False) -> ApiError:
    reason = "unsupported_value" if is_value else "unsupported_parameter"
    return ApiError(Kind.INVALID, message, param=path, reason=reason)


def describe_refused(row: Unsupported) -> Meta:
    return Meta(description=f"Not supported: {row.why}.")


def describe_accepted(why: str) -> Meta:
    return Meta(description=f"Accepted, without effect: {why}.")
