"""Errors of grammars in the words of whoever asked: which field of a body made the grammar. Knows no protocol."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from quire.errors import InvalidRequest
from quire.server.ask import Ask
from quire.server.errors import ApiError, Kind
from quire.text.chat import ChatRequest
from quire.text.tool_grammars import guilty_tool

# What a compiler says, between where it stopped and its picture of that place.
_SAID = re.compile(r"grammar:? ?(?:at \d+\(\d+\): )?(?:failed to compile JSON schema: )?(?P<what>.*?)(?: \d+ \| .*)?$")


@contextmanager
def shape_errors(ask: Ask, words_field: str | None) -> Iterator[None]:
    """`words_field`: the field that asked for the shape of words."""
    try:
        yield
    except InvalidRequest as error:
        if not str(error).startswith("grammar"):
            raise
        field = _guilty_field(ask, str(error)) or words_field or "tools"
        raise shape_error(field, error) from None


def shape_error(field: str, error: InvalidRequest) -> ApiError:
    found = _SAID.match(str(error))
    what = str(error) if found is None else found["what"]
    return ApiError(Kind.INVALID, f"{field}: {what}", param=field)


def _guilty_field(ask: Ask, error: str) -> str | None:
    chat = ask.prompts[0]
    number = guilty_tool(error)
    if not isinstance(chat, ChatRequest) or number is None or number >= len(chat.callable_tools):
        return None
    return chat.callable_tools[number].schema_path or None
