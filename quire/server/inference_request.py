"""The protocol-independent request: a frozen value, checked when it is made. Codecs make it; `ModelService` runs it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from quire.core.values import Priority
from quire.engine.params import GenerationParams
from quire.errors import InvalidRequest
from quire.text.messages import ChatRequest

MAX_PROMPTS = 64
MAX_SAMPLES_IN_ALL = 128
MAX_BREAKPOINTS = 4
MAX_TTL_S = 86_400.0
MAX_NAME_CHARS = 256
_SALT = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

Prompt = ChatRequest | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A cache breakpoint: the prompt's cache is kept through part `part` of message `message` of the ChatRequest."""

    message: int
    part: int
    ttl_s: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.ttl_s) or not 0 < self.ttl_s <= MAX_TTL_S:
            raise InvalidRequest(f"cache_control.ttl = {self.ttl_s!r} s is not above 0 and at most {MAX_TTL_S:g} s")


@dataclass(frozen=True, slots=True)
class ThinkingField:
    """A field of a body that sets whether, or how much, to think."""

    name: str
    wants: bool | None  # True: think; False: do not; None: how much


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One request to generate, in the engine's terms."""

    model: str | None  # None: the default model
    prompts: tuple[Prompt, ...]
    params: GenerationParams
    is_unbounded: bool = False  # it requests an answer without a limit, not the model's default limit
    is_streaming: bool = False
    priority: Priority | None = None  # as requested; the key's tier bounds it
    cache_salt: str = ""
    cache_key: str | None = None  # the cache of this prompt is pinned under this name (OpenAI's prompt_cache_key)
    cache_ttl_s: float = 300.0
    breakpoints: tuple[Breakpoint, ...] = ()
    wants_cache: bool = False  # include the cache explanation in the response
    thinking_fields: tuple[ThinkingField, ...] = ()  # ignored if the model does not support them
    ignored: tuple[str, ...] = ()  # fields without effect, for the header x-quire-ignored-fields
    unenforced: tuple[str, ...] = ()  # schema keywords that are not enforced, for the header x-quire-unenforced

    def __post_init__(self) -> None:
        if not 1 <= len(self.prompts) <= MAX_PROMPTS:
            raise InvalidRequest(f"prompt has {len(self.prompts)} entries, not 1 to {MAX_PROMPTS}")
        if len(self.prompts) * self.params.n > MAX_SAMPLES_IN_ALL:
            raise InvalidRequest(
                f"n = {self.params.n} for {len(self.prompts)} prompts is more than {MAX_SAMPLES_IN_ALL} answers"
            )
        if self.cache_salt and not _SALT.fullmatch(self.cache_salt):
            raise InvalidRequest(f"cache_salt = {self.cache_salt!r:.80} is not 1 to 128 of A-Z a-z 0-9 _ . : -")
        if self.cache_key is not None and not 1 <= len(self.cache_key) <= MAX_NAME_CHARS:
            raise InvalidRequest(f"prompt_cache_key has {len(self.cache_key)} characters, not 1 to {MAX_NAME_CHARS}")
        if len(self.breakpoints) > MAX_BREAKPOINTS:
            raise InvalidRequest(f"cache_control appears {len(self.breakpoints)} times, more than {MAX_BREAKPOINTS}")


def priority_of(value: str | int | None) -> Priority | None:
    """Parse `priority`: a tier name, or a number as in vLLM (0 is normal, below 0 is high, above 0 is low)."""
    if value is None or isinstance(value, Priority):
        return value
    if isinstance(value, str):
        if value.upper() not in Priority.__members__:
            names = ", ".join(name.lower() for name in Priority.__members__)
            raise InvalidRequest(f"priority = {value!r:.80} is not one of {names}, or a whole number")
        return Priority[value.upper()]
    return Priority.NORMAL if value == 0 else Priority.HIGH if value < 0 else Priority.LOW
