"""Fields of the protocol that quire knows and does nothing with. One table refuses, the other lets pass.

What would change the answer is refused by name: an answer that ignores `modalities` is a wrong answer. What only
hints or files away is accepted. To build a feature is to remove its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec import Meta

from quire.server.errors import ApiError, Kind


class Unsupported(NamedTuple):
    why: str
    harmless: tuple[Any, ...] = ()  # values that ask for nothing; null always does

    def allows(self, value: Any) -> bool:
        """Whether the value asks for nothing. A boolean never equals a number here."""
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.harmless)

    def say(self, field: str) -> str:
        return f"{field} is not supported: {self.why}"


UNSUPPORTED = {
    "functions": Unsupported("it is the older form of tools", ([],)),
    "function_call": Unsupported("it is the older form of tool_choice and tool_calls", ("none", "auto")),
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

# Where one way to ask has what the other does not.
CHAT_UNSUPPORTED = {
    "echo": Unsupported("completions can repeat a prompt", (False,)),
    "add_special_tokens": Unsupported("the model's template writes them", (False,)),
    "return_token_ids": Unsupported("completions can tell them", (False,)),
}
COMPLETION_UNSUPPORTED = {
    "add_special_tokens": Unsupported("a prompt of token ids has only those that are sent", (True,)),
}

ACCEPTED = {
    "user": "nothing is kept of a request",
    "safety_identifier": "nothing is kept of a request",
    "store": "nothing is kept of a request",
    "metadata": "nothing is kept of a request",
    "prediction": "it could only make the same answer come sooner",
    "verbosity": "a hint",
}


def refused(field: str, table: Mapping[str, Unsupported] = UNSUPPORTED) -> Meta:
    return Meta(description=f"Not supported: {table[field].why}.")


def accepted(field: str) -> Meta:
    return Meta(description=f"Accepted, without effect: {ACCEPTED[field]}.")


def refuse_unsupported(body: object, table: Mapping[str, Unsupported] = UNSUPPORTED) -> None:
    """Raises ApiError for the first field that asks for what is not built."""
    for field, row in table.items():
        value = getattr(body, field, None)
        if value is not None and not row.allows(value):
            raise unsupported(field, row.say(field))


def unsupported(field: str, message: str, *, is_value: bool = False) -> ApiError:
    reason = "unsupported_value" if is_value else "unsupported_parameter"
    return ApiError(Kind.INVALID, message, param=field, reason=reason)
