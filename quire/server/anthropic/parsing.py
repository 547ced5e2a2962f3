"""From a body of `/v1/messages` to an `Ask`: what is refused by name, and where the cache is to be kept."""

from __future__ import annotations

from quire.engine.params import GenerationParams
from quire.errors import InvalidRequest
from quire.server.anthropic.support import refuse_unsupported, unsupported
from quire.server.anthropic.types import BLOCKS, ROLES, Block, CacheControl, CountTokensRequest, MessagesRequest
from quire.server.ask import Ask, Breakpoint, priority_of
from quire.server.errors import ApiError, Kind
from quire.text.chat import ChatRequest, Message, Part, Role, check_messages, check_parts

TTL_S = {None: 300.0, "5m": 300.0, "1h": 3600.0}

# An assistant's earlier thoughts hold no text for the model: they are left out, so that an answer can be sent back.
_LEFT_OUT = BLOCKS[1:]

# Turns of one role that follow one another are one turn, as in Anthropic's API: many templates know no other. Two
# questions are set apart; an answer goes on where it stopped.
_BETWEEN = {Role.SYSTEM: "\n\n", Role.USER: "\n\n", Role.ASSISTANT: ""}


def to_ask(body: MessagesRequest) -> Ask:
    refuse_unsupported(body)
    chat, breakpoints = conversation(body)
    return Ask(
        model=body.model,
        prompts=(chat,),
        params=_params(body),
        is_streaming=bool(body.stream),
        priority=priority_of(body.priority),
        cache_salt=body.cache_salt or "",
        breakpoints=breakpoints,
        wants_cache=bool(body.cache),
    )


def conversation(body: CountTokensRequest) -> tuple[ChatRequest, tuple[Breakpoint, ...]]:
    """What the model reads, one part a block, and after which parts its cache is to be kept."""
    check_messages(body.messages)
    turns = _Turns()
    if body.system:
        turns.add(Role.SYSTEM, body.system, "system")
    for i, message in enumerate(body.messages):
        if message.role not in ROLES:
            text = f"messages.{i}.role = {message.role!r:.80} is not one of {', '.join(ROLES)}"
            raise ApiError(Kind.INVALID, text, param=f"messages.{i}.role")
        turns.add(Role(message.role), message.content, f"messages.{i}.content")
    if body.cache_control is not None:
        turns.keep(body.cache_control)
    messages = tuple(Message(role, tuple(parts)) for role, parts in turns.turns)
    is_prefill = messages[-1].role is Role.ASSISTANT
    chat = ChatRequest(messages, add_generation_prompt=not is_prefill, continue_last=is_prefill)
    return chat, tuple(turns.breakpoints)


class _Turns:
    def __init__(self) -> None:
        self.turns: list[tuple[Role, list[Part]]] = []
        self.breakpoints: list[Breakpoint] = []

    def add(self, role: Role, content: str | list[Block], path: str) -> None:
        if not self.turns or self.turns[-1][0] is not role:
            self.turns.append((role, []))
        elif self.turns[-1][1] and content and _BETWEEN[role]:
            self.turns[-1][1].append(Part(_BETWEEN[role]))
        parts = self.turns[-1][1]
        if isinstance(content, str):
            parts.append(Part(content))
            return
        check_parts(content, path)
        for i, block in enumerate(content):
            if role is Role.ASSISTANT and block.type in _LEFT_OUT:
                continue
            parts.append(Part(_text(block, f"{path}.{i}")))
            if block.cache_control is not None:
                self.keep(block.cache_control)

    def keep(self, control: CacheControl) -> None:
        """Up to the last part there is. A place that is marked already stays as it is."""
        last = len(self.turns) - 1
        at = (last, len(self.turns[last][1]) - 1)
        if at[1] >= 0 and at not in ((mark.message, mark.part) for mark in self.breakpoints):
            self.breakpoints.append(Breakpoint(*at, TTL_S[control.ttl]))


def _text(block: Block, path: str) -> str:
    if block.type != "text":
        message = f"{path}.type = {block.type!r:.80} is not supported: only text is"
        raise unsupported(f"{path}.type", message)
    if block.text is None:
        raise ApiError(Kind.INVALID, f"{path}.text is missing", param=f"{path}.text")
    return block.text


def _params(body: MessagesRequest) -> GenerationParams:
    try:
        return GenerationParams(
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            seed=body.seed,
            max_tokens=body.max_tokens or 1,  # one is computed in any case; of 0, none is shown
            stop=tuple(body.stop_sequences or ()),
            ignore_eos=bool(body.ignore_eos),
        )
    except InvalidRequest as error:
        text = str(error)
        if text.startswith("stop"):
            text = text.replace("stop", "stop_sequences", 1)
        raise InvalidRequest(text) from None
