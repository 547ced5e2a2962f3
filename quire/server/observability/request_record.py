"""The record of one finished request, for metrics and logs. Holds no prompt or answer text."""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.values import Priority


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
    cache_reason: str | None  # why the cache match of the first prompt ended
    queued_s: float | None  # None: never started
    ttft_s: float | None  # from arrival to the first token; None: no token
    prefill_s: float | None  # from the start to the first token
    decode_s: float | None  # from the first token to the last
    e2e_s: float  # from arrival to the end
    finish: str  # stop, length, cancelled (also by disconnecting), error, or the reason of a refusal
    error: str | None = None  # the kind of error, never its text
    cache_source: str | None = None  # slowest tier that cached tokens of the first prompt came from: device, host, disk

    @property
    def tokens_per_s(self) -> float | None:
        """Decode speed of all samples together."""
        if not self.decode_s or self.completion_tokens < 2:
            return None
        return (self.completion_tokens - 1) / self.decode_s
