"""Fields of vLLM, SGLang, llama.cpp and TGI bodies that quire does not support.

REFUSED fields would change the answer; see `quire/server/protocols/support.py`. ACCEPTED fields are named in the header
of ignored fields. Supported fields of these servers are in `types.py`. A new field needs one row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from quire.server.protocols.support import Unsupported, describe_accepted, describe_refused

_SAMPLERS = "the samplers are temperature, top_k, top_p, min_p, penalties and logit_bias"
_THOUGHTS = "reasoning is streamed separately, in reasoning_content"
_LOGPROBS = "use logprobs and top_logprobs"
_NO_CODE = "a request cannot contain code"
_NO_LORA = "adapters are not supported: use the name of a served model"

REFUSED = {
    # Samplers of llama.cpp and related servers, with the value that disables each.
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
    "samplers": Unsupported("the order of the samplers is fixed", ([],)),
    "do_sample": Unsupported("temperature = 0 selects the most probable token", (True,)),
    "watermarking": Unsupported("answers have no watermark", (False,)),
    # Other ways to select or end answers.
    "length_penalty": Unsupported("every answer is sampled", (1,)),
    "early_stopping": Unsupported("every answer is sampled", (False,)),
    "stop_regex": Unsupported("stop supports strings only", ("", [])),
    "repetition_detection": Unsupported("use max_tokens"),
    "t_max_predict_ms": Unsupported("use max_tokens", (0,)),
    "n_indent": Unsupported("use structured_outputs.regex", (0,)),
    "n_cmpl": Unsupported("use n", (1,)),
    "guided_whitespace_pattern": Unsupported("JSON is written with one space after comma and colon"),
    # Reasoning.
    "separate_reasoning": Unsupported(_THOUGHTS, (True,)),
    "stream_reasoning": Unsupported(_THOUGHTS, (True,)),
    "include_reasoning": Unsupported(_THOUGHTS, (True,)),
    "reasoning_format": Unsupported(_THOUGHTS, ("auto", "deepseek")),
    "parse_tool_calls": Unsupported("tool calls are always parsed", (True,)),
    # Further contents of a response.
    "n_probs": Unsupported(_LOGPROBS, (0,)),
    "post_sampling_probs": Unsupported(_LOGPROBS, (False,)),
    "logprob_token_ids": Unsupported(_LOGPROBS, ([],)),
    "return_tokens_as_token_ids": Unsupported("use return_token_ids, in completions", (False,)),
    "return_tokens": Unsupported("use return_token_ids, in completions", (False,)),
    "return_prompt_text": Unsupported("use echo, in completions", (False,)),
    "return_hidden_states": Unsupported("only text and log probabilities are returned", (False,)),
    "return_routed_experts": Unsupported("only text and log probabilities are returned", (False,)),
    "response_fields": Unsupported("a response has all its fields", ([],)),
    # The computation itself.
    "custom_logit_processor": Unsupported(_NO_CODE),
    "custom_params": Unsupported(_NO_CODE, ({},)),
    "logits_processors": Unsupported(_NO_CODE, ([],)),
    "vllm_xargs": Unsupported("these are arguments of vLLM extensions", ({},)),
    "lora": Unsupported(_NO_LORA, ([],)),
    "lora_path": Unsupported(_NO_LORA),
    "input_ids": Unsupported("send token ids as prompt, in completions"),
    "session_params": Unsupported("requests are not stored: send the whole conversation"),
    "kv_transfer_params": Unsupported("prefill and decode run in one process", ({},)),
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
    "id_slot": "quire has no fixed slots",
    "spaces_between_special_tokens": "text is decoded without extra spaces",
    "guided_decoding_backend": "there is only one backend",
    "mm_processor_kwargs": "images are not supported",
    "media_io_kwargs": "images are not supported",
    "timings_per_token": "see /metrics",
    "return_progress": "a silent stream gets keep-alive comments",
    "sse_ping_interval": "--keep-alive-interval sets it",
    "stream_interval": "each chunk is sent as soon as it has text",
    "rid": "use the header x-request-id",
    "request_id": "use the header x-request-id",
    "session_id": "requests are not stored",
}


def _field(name: str, description: Meta) -> tuple[str, Any, None]:
    return name, Annotated[Any, description], None


if TYPE_CHECKING:

    class OtherServersFields(msgspec.Struct, kw_only=True):
        """Base of the bodies: the fields of both tables with their descriptions."""
else:
    OtherServersFields = msgspec.defstruct(
        "OtherServersFields",
        [
            *(_field(name, describe_refused(row)) for name, row in REFUSED.items()),
            *((name, Annotated[int, Meta(description=_BUDGET)] | None, None) for name in BUDGETS),
            *(_field(name, describe_accepted(why)) for name, why in ACCEPTED.items()),
        ],
        kw_only=True,
        module=__name__,
    )
