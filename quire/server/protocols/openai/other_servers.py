"""Fields of vLLM's, SGLang's, llama.cpp's and TGI's bodies that quire has no use for.

What would change the answer is refused by name unless its value asks for nothing; the rest is accepted, and named in
the header of ignored fields. Those that quire has a mechanism for are in `types.py`. To add a field is to add a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from quire.server.protocols.openai.support import Unsupported

_SAMPLERS = "the samplers are temperature, top_k, top_p, min_p, penalties and logit_bias"
_THOUGHTS = "thoughts are told apart, in reasoning_content, as they come"
_LOGPROBS = "logprobs and top_logprobs give them"
_NO_CODE = "a request cannot bring code"
_NO_LORA = "there are no adapters: name a model that is served"

REFUSED = {
    # Samplers of llama.cpp and its relatives, with the value that switches each off.
    "typical_p": Unsupported(_SAMPLERS, (1,)),
    "tfs_z": Unsupported(_SAMPLERS, (1,)),
    "top_a": Unsupported(_SAMPLERS, (0,)),
    "top_n_sigma": Unsupported(_SAMPLERS, (0, -1)),
    "mirostat": Unsupported(_SAMPLERS, (0,)),
    "mirostat_mode": Unsupported(_SAMPLERS, (0,)),
    "dynatemp_range": Unsupported(_SAMPLERS, (0,)),
    "dry_multiplier": Unsupported(_SAMPLERS, (0,)),
    "xtc_probability": Unsupported(_SAMPLERS, (0,)),
    "min_keep": Unsupported(_SAMPLERS, (0, 1)),
    "samplers": Unsupported("their order is fixed", ([],)),
    "do_sample": Unsupported("temperature = 0 takes the most probable token", (True,)),
    "watermarking": Unsupported("answers have no watermark", (False,)),
    # Other ways to choose among answers or to end them.
    "length_penalty": Unsupported("every answer is sampled", (1,)),
    "early_stopping": Unsupported("every answer is sampled", (False,)),
    "stop_regex": Unsupported("stop takes strings", ("", [])),
    "repetition_detection": Unsupported("set max_tokens"),
    "t_max_predict_ms": Unsupported("max_tokens bounds an answer", (0,)),
    "n_indent": Unsupported("structured_outputs.regex can ask for it", (0,)),
    "n_cmpl": Unsupported("n says how many answers", (1,)),
    "guided_whitespace_pattern": Unsupported("JSON is written with one blank behind comma and colon"),
    # Thoughts.
    "separate_reasoning": Unsupported(_THOUGHTS, (True,)),
    "stream_reasoning": Unsupported(_THOUGHTS, (True,)),
    "include_reasoning": Unsupported(_THOUGHTS, (True,)),
    "reasoning_format": Unsupported(_THOUGHTS, ("auto", "deepseek")),
    "parse_tool_calls": Unsupported("calls are always told as calls", (True,)),
    # What else an answer would have to tell.
    "n_probs": Unsupported(_LOGPROBS, (0,)),
    "post_sampling_probs": Unsupported(_LOGPROBS, (False,)),
    "logprob_token_ids": Unsupported(_LOGPROBS, ([],)),
    "return_tokens_as_token_ids": Unsupported("return_token_ids gives them, in completions", (False,)),
    "return_tokens": Unsupported("return_token_ids gives them, in completions", (False,)),
    "return_prompt_text": Unsupported("echo repeats it, in completions", (False,)),
    "return_hidden_states": Unsupported("only text and log probabilities are told", (False,)),
    "return_routed_experts": Unsupported("only text and log probabilities are told", (False,)),
    "response_fields": Unsupported("an answer has all its fields", ([],)),
    # What is computed, and by what.
    "custom_logit_processor": Unsupported(_NO_CODE),
    "custom_params": Unsupported(_NO_CODE, ({},)),
    "logits_processors": Unsupported(_NO_CODE, ([],)),
    "vllm_xargs": Unsupported("they are for extensions of vLLM", ({},)),
    "lora": Unsupported(_NO_LORA, ([],)),
    "lora_path": Unsupported(_NO_LORA),
    "input_ids": Unsupported("completions take token ids, as prompt"),
    "session_params": Unsupported("nothing is kept of a request: send the whole conversation"),
    "kv_transfer_params": Unsupported("prompt and answer are computed in one place", ({},)),
}

# How many tokens to think.
BUDGETS = ("thinking_budget", "thinking_budget_tokens", "thinking_token_budget", "reasoning_budget")

_BUDGET = "0: do not think. Others: no effect, max_tokens bounds thought and answer together."

ACCEPTED = {
    "mirostat_tau": "it is a setting of mirostat",
    "mirostat_eta": "it is a setting of mirostat",
    "dynatemp_exponent": "it is a setting of dynatemp_range",
    "dry_base": "it is a setting of dry_multiplier",
    "dry_allowed_length": "it is a setting of dry_multiplier",
    "dry_penalty_last_n": "it is a setting of dry_multiplier",
    "dry_sequence_breakers": "it is a setting of dry_multiplier",
    "xtc_threshold": "it is a setting of xtc_probability",
    "truncation_side": "it is a setting of truncate_prompt_tokens",
    "n_keep": "no token of a prompt is discarded",
    "n_discard": "no token of a prompt is discarded",
    "cache_prompt": "the cache changes no answer",
    "n_cache_reuse": "the cache changes no answer",
    "id_slot": "there are no slots",
    "spaces_between_special_tokens": "text is what its tokens stand for",
    "guided_decoding_backend": "there is one",
    "mm_processor_kwargs": "there are no images",
    "media_io_kwargs": "there are no images",
    "timings_per_token": "/metrics has them",
    "return_progress": "a silent stream gets a comment now and then",
    "sse_ping_interval": "--keep-alive-interval sets it",
    "stream_interval": "each chunk comes as soon as there is text",
    "rid": "x-request-id names a request",
    "request_id": "x-request-id names a request",
    "session_id": "nothing is kept of a request",
}


def _field(name: str, description: str) -> tuple[str, Any, None]:
    return name, Annotated[Any, Meta(description=description)], None


if TYPE_CHECKING:

    class OtherServersFields(msgspec.Struct, kw_only=True):
        """A base of the bodies that has the fields of both tables, with their descriptions."""
else:
    OtherServersFields = msgspec.defstruct(
        "OtherServersFields",
        [
            *(_field(name, f"Not supported: {row.why}.") for name, row in REFUSED.items()),
            *((name, Annotated[int, Meta(description=_BUDGET)] | None, None) for name in BUDGETS),
            *(_field(name, f"Accepted, without effect: {why}.") for name, why in ACCEPTED.items()),
        ],
        kw_only=True,
        module=__name__,
    )
