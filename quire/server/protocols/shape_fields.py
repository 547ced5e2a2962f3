"""Fields of OpenAI, vLLM, SGLang and llama.cpp bodies that constrain the format of an answer.

Anthropic's and Ollama's protocols have their own fields for this and refuse these by name: an answer that ignores them
is a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

SHAPE_FIELDS: dict[str, tuple[Any, ...]] = {  # field -> values that request nothing
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
    """Make a base class of bodies with all these fields and their descriptions."""
    fields = [(field, Annotated[Any, describe(field)], None) for field in SHAPE_FIELDS]
    return msgspec.defstruct(name, fields, kw_only=True, module=__name__, **config)
