"""What is known of one request when it is over: for metrics and logs. No text of anyone's."""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.request import Priority


@dataclass(frozen=True, slots=True)
class RequestRecord:
    request_id: str  # as in x-request-id
    endpoint: str  # the route's path
    model: str
    key_name: str
    priority: Priority
    is_streaming: bool
    num_prompts: int
    n: int
    max_tokens: int | None
    prompt_tokens: int  # of all prompts together
    cached_tokens: int
    completion_tokens: int
    cache_reason: str | None  # why the first prompt's match went no further
    queued_s: float | None  # None: never began
    ttft_s: float | None  # from arrival to the first token; None: there was none
    prefill_s: float | None  # from the beginning to the first token
    decode_s: float | None  # from the first token to the last
    e2e_s: float  # from arrival to the end
    finish: str  # stop, length, cancelled (the client left, or an admin ended it), error, or the reason of a refusal
    error: str | None = None  # the kind of error, never its text

    @property
    def tokens_per_s(self) -> float | None:
        """Of decode, all samples together."""
        if not self.decode_s or self.completion_tokens < 2:
            return None
        return (self.completion_tokens - 1) / self.decode_s
