"""Fields of the protocol that quire knows and does nothing with. One table refuses, the other lets pass.

What would change the answer is refused by name: an answer that ignores `response_format` is a wrong answer. What only
hints or files away is accepted. To build a feature is to remove its row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import Meta

from quire.server.errors import ApiError, Kind


class Unsupported(NamedTuple):
    why: str
    harmless: tuple[Any, ...] = ()  # values that ask for nothing; null always does

    def say(self, field: str) -> str:
        yet = " yet" if self.why in (_TOOLS, _SHAPES) else ""
        return f"{field} is not supported{yet}: {self.why}"


_TOOLS = "tool calling comes with a later version"
_SHAPES = "answers of a given shape come with a later version"

UNSUPPORTED = {
    "tools": Unsupported(_TOOLS, ([],)),
    "tool_choice": Unsupported(_TOOLS, ("none", "auto")),  # auto, where there is no tool, is an answer in words
    "functions": Unsupported(_TOOLS, ([],)),
    "function_call": Unsupported(_TOOLS, ("none", "auto")),
    "response_format": Unsupported(_SHAPES, ({"type": "text"},)),
    "structured_outputs": Unsupported(_SHAPES),
    "guided_json": Unsupported(_SHAPES),
    "guided_regex": Unsupported(_SHAPES),
    "guided_choice": Unsupported(_SHAPES),
    "guided_grammar": Unsupported(_SHAPES),
    "modalities": Unsupported("this server answers in text only", ([], ["text"])),
    "audio": Unsupported("this server answers in text only"),
    "web_search_options": Unsupported("this server does not search"),
    "moderation": Unsupported("this server does not moderate"),
    "documents": Unsupported("put them into messages", ([],)),
    "chat_template": Unsupported("a request cannot bring its own template; the model's is used"),
    "suffix": Unsupported("the models served write on from the end only", ("",)),
    "prompt_logprobs": Unsupported("in completions, echo with logprobs gives them"),
    "bad_words": Unsupported("logit_bias can exclude tokens", ([],)),
    "use_beam_search": Unsupported("every answer is sampled", (False,)),
    "truncate_prompt_tokens": Unsupported("a prompt that is too long is refused"),
}

ACCEPTED = {
    "user": "nothing is kept of a request",
    "safety_identifier": "nothing is kept of a request",
    "store": "nothing is kept of a request",
    "metadata": "nothing is kept of a request",
    "parallel_tool_calls": "there are no tools to call",
    "prediction": "it could only make the same answer come sooner",
    # How hard to think is the template's business: one that can be told is told by chat_template_kwargs.
    "reasoning_effort": "a hint; give it in chat_template_kwargs where the model's template knows it",
    "verbosity": "a hint",
}


def refused(field: str) -> Meta:
    return Meta(description=f"Not supported: {UNSUPPORTED[field].why}.")


def accepted(field: str) -> Meta:
    return Meta(description=f"Accepted, without effect: {ACCEPTED[field]}.")


def refuse_unsupported(body: object) -> None:
    """Raises ApiError for the first field that asks for what is not built."""
    for field, row in UNSUPPORTED.items():
        value = getattr(body, field, None)
        if value is not None and value not in row.harmless:
            raise unsupported(field, row.say(field))


def unsupported(field: str, message: str, *, is_value: bool = False) -> ApiError:
    reason = "unsupported_value" if is_value else "unsupported_parameter"
    return ApiError(Kind.INVALID, message, param=field, reason=reason)
