"""What an answer must look like: a JSON object, a JSON schema, a regular expression, a grammar. Checked when made.

`Grammar` is a plain value that travels to the worker; the masks are made there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from quire.errors import InvalidRequest

MAX_SOURCE_CHARS = 64 * 1024


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"  # the source is a schema, as JSON; {"type": "object"} is OpenAI's json_object
    REGEX = "regex"  # the whole answer matches
    LARK = "lark"  # llguidance's dialect of Lark; may hold JSON schemas and special tokens


@dataclass(frozen=True, slots=True)
class Grammar:
    kind: GrammarKind
    source: str

    def __post_init__(self) -> None:
        if len(self.source) > MAX_SOURCE_CHARS:
            raise InvalidRequest(f"grammar of {len(self.source)} characters is more than {MAX_SOURCE_CHARS}")
