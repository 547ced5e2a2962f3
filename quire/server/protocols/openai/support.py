"""Fields of OpenAI's API that quire does not support. See `quire/server/protocols/support.py`."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Meta

from quire.server.protocols.support import Unsupported, describe_accepted, describe_refused

UNSUPPORTED = {
    "functions": Unsupported("it is the older form of tools", ([],)),
    "function_call": Unsupported("it is the older form of tool_choice and tool_calls", ("none", "auto")),
    "modalities": Unsupported("this server answers in text only", ([], ["text"])),
    "audio": Unsupported("this server answers in text only"),
    "web_search_options": Unsupported("this server does not search the web"),
    "moderation": Unsupported("this server has no moderation model"),
    "documents": Unsupported("put them into messages", ([],)),
    "chat_template": Unsupported("a request cannot bring its own template; the model's is used"),
    "suffix": Unsupported("the models generate at the end of the prompt only", ("",)),
    "prompt_logprobs": Unsupported("in completions, echo with logprobs returns them"),
    "bad_words": Unsupported("logit_bias can exclude tokens", ([],)),
    "use_beam_search": Unsupported("every answer is sampled", (False,)),
    "truncate_prompt_tokens": Unsupported("a prompt that is too long is refused"),
}

# Fields that only one of chat and completions supports.
CHAT_UNSUPPORTED = {
    "echo": Unsupported("only completions repeat the prompt", (False,)),
    "add_special_tokens": Unsupported("the chat template adds them", (False,)),
    "return_token_ids": Unsupported("only completions return them", (False,)),
}
COMPLETION_UNSUPPORTED = {
    "add_special_tokens": Unsupported("a prompt of token ids is used unchanged", (True,)),
}

ACCEPTED = {
    "user": "requests are not stored",
    "safety_identifier": "requests are not stored",
    "store": "requests are not stored",
    "metadata": "requests are not stored",
    "verbosity": "a hint",
}


def refused(field: str, table: Mapping[str, Unsupported] = UNSUPPORTED) -> Meta:
    return describe_refused(table[field])


def accepted(field: str) -> Meta:
    return describe_accepted(ACCEPTED[field])
