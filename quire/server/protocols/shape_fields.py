"""Fields by which OpenAI's protocol, vLLM, SGLang and llama.cpp ask for the shape of an answer.

Anthropic's and Ollama's protocols have a field of their own for it. There these are refused by name: an answer that
ignores them is a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

SHAPE_FIELDS: dict[str, tuple[Any, ...]] = {  # with the values that ask for nothing
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "json_schema": (),
    "regex": ("",),
    "grammar": ("",),
    "ebnf": ("",),
    "guided_json": (),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
}


def with_shape_fields(name: str, describe: Callable[[str], Meta], **config: Any) -> type[msgspec.Struct]:
    """A base for bodies that has all of them, with their descriptions."""
    fields = [(field, Annotated[Any, describe(field)], None) for field in SHAPE_FIELDS]
    return msgspec.defstruct(name, fields, kw_only=True, module=__name__, **config)
