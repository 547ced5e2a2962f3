"""Enforceable values of JSON Schema's `format`, and their patterns or bounds."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from quire.text.patterns import hold_pattern

# Enforced by the grammar compiler itself.
NATIVE_FORMATS = frozenset(("duration", "email", "ipv4", "ipv6", "uuid", "uri"))

# Additional patterns: the compiler does not limit the length of a mailbox or of its domain's labels.
_SHORT_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
ALSO: Mapping[str, str] = {"email": rf"^[^@]{{1,64}}@(?:\[.*|{_SHORT_LABEL}(?:\.{_SHORT_LABEL})*)$"}

_LEAP_DAY = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"
_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_DAY})"
)
# A leap second is the last second of a day, and is written in UTC.
_OFFSET = r"(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = (
    rf"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?{_OFFSET}"
    r"|23:59:60(?:\.[0-9]+)?(?:[zZ]|[+-]00:00))"
)
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"
# No label has hyphens as third and fourth character: that prefix marks encoded international names.
_LABEL = (
    r"[A-Za-z0-9](?:[A-Za-z0-9]|{m}[A-Za-z0-9](?:{m}{{0,59}}[A-Za-z0-9])?|{m}-[A-Za-z0-9](?:{m}{{0,58}}[A-Za-z0-9])?)?"
)
_LABEL = _LABEL.format(m="[A-Za-z0-9-]")

# Enforced by patterns, because the compiler's own date allows February 29 in every year.
FORMATS: Mapping[str, str] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": rf"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
}
MAX_LENGTHS: Mapping[str, int] = {"hostname": 253, "email": 254}

# Integer formats of OpenAPI. int64 is missing because its bounds exceed those of the compiler.
NUMBER_FORMATS: Mapping[str, tuple[int, int]] = {
    "int8": (-(2**7), 2**7 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "uint8": (0, 2**8 - 1),
    "uint16": (0, 2**16 - 1),
    "uint32": (0, 2**32 - 1),
}


@functools.cache
def format_patterns(name: str) -> tuple[str, ...]:
    """The patterns that texts of a known format must match, in the compiler's dialect."""
    given = [table[name] for table in (FORMATS, ALSO) if name in table]
    return tuple(source for pattern in given for source in hold_pattern(pattern).sources)
