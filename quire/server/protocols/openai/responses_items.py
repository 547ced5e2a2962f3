"""Builds the output items of a response and their events. Pure: knows no engine and no HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import UNSET

from quire.server.protocols.openai.responses_tools import INPUT, ClientTool
from quire.server.protocols.openai.responses_types import (
    ContentPartAdded,
    ContentPartDone,
    CustomToolCallInputDelta,
    CustomToolCallInputDone,
    CustomToolCallItem,
    Event,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputItemAdded,
    OutputItemDone,
    OutputMessage,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    ReasoningItem,
    ReasoningText,
    ReasoningTextDelta,
    ReasoningTextDone,
)
from quire.server.protocols.openai.types import ChatTokenLogprob
from quire.text.answers import CallArguments, CallStart, Piece, Thought, Words

Logprobs = tuple[ChatTokenLogprob, ...]


class _Growing(Protocol):
    """An item under construction."""

    def begin(self) -> list[Event]: ...
    def grow(self, text: str, logprobs: Logprobs) -> list[Event]: ...
    def end(self, status: ItemStatus) -> tuple[list[Event], OutputItem]:
        """Return the events before the item's done event, and the item."""


class _Message:
    def __init__(self, answer_id: str, index: int) -> None:
        self._id, self._index = f"msg_{answer_id}_{index}", index
        self._texts: list[str] = []
        self._logprobs: list[ChatTokenLogprob] = []

    def begin(self) -> list[Event]:
        added = OutputItemAdded(output_index=self._index, item=OutputMessage(id=self._id, status="in_progress"))
        return [added, ContentPartAdded(item_id=self._id, output_index=self._index, part=OutputText(""))]

    def grow(self, text: str, logprobs: Logprobs) -> list[Event]:
        self._texts.append(text)
        self._logprobs += logprobs
        return [OutputTextDelta(item_id=self._id, output_index=self._index, delta=text, logprobs=logprobs)]

    def end(self, status: ItemStatus) -> tuple[list[Event], OutputItem]:
        part = OutputText("".join(self._texts), tuple(self._logprobs))
        item = OutputMessage(id=self._id, status=status, content=(part,))
        done = OutputTextDone(item_id=self._id, output_index=self._index, text=part.text, logprobs=part.logprobs)
        return [done, ContentPartDone(item_id=self._id, output_index=self._index, part=part)], item

    def extend(self, text: str) -> None:
        """Add text whose event the caller makes."""
        self._texts.append(text)


class _Reasoning:
    def __init__(self, answer_id: str, index: int) -> None:
        self._id, self._index = f"rs_{answer_id}_{index}", index
        self._texts: list[str] = []

    def begin(self) -> list[Event]:
        added = OutputItemAdded(output_index=self._index, item=ReasoningItem(id=self._id, status="in_progress"))
        return [added, ContentPartAdded(item_id=self._id, output_index=self._index, part=ReasoningText(""))]

    def grow(self, text: str, logprobs: Logprobs) -> list[Event]:
        del logprobs  # the protocol has no field for them here
        self._texts.append(text)
        return [ReasoningTextDelta(item_id=self._id, output_index=self._index, delta=text)]

    def end(self, status: ItemStatus) -> tuple[list[Event], OutputItem]:
        part = ReasoningText("".join(self._texts))
        item = ReasoningItem(id=self._id, status=status, content=(part,))
        done = ReasoningTextDone(item_id=self._id, output_index=self._index, text=part.text)
        return [done, ContentPartDone(item_id=self._id, output_index=self._index, part=part)], item


class _FunctionCall:
    def __init__(self, answer_id: str, index: int, call_id: str, tool: ClientTool) -> None:
        self._id, self._index = f"fc_{answer_id}_{index}", index
        self._call_id, self._tool = call_id, tool
        self._texts: list[str] = []

    def begin(self) -> list[Event]:
        return [OutputItemAdded(output_index=self._index, item=self._item("in_progress"))]

    def grow(self, text: str, logprobs: Logprobs) -> list[Event]:
        del logprobs
        self._texts.append(text)
        return [FunctionCallArgumentsDelta(item_id=self._id, output_index=self._index, delta=text)]

    def end(self, status: ItemStatus) -> tuple[list[Event], OutputItem]:
        item = self._item(status)
        done = FunctionCallArgumentsDone(
            item_id=self._id, output_index=self._index, name=item.name, arguments=item.arguments
        )
        return [done], item

    def _item(self, status: ItemStatus) -> FunctionCallItem:
        return FunctionCallItem(
            id=self._id,
            status=status,
            call_id=self._call_id,
            name=self._tool.name,
            arguments="".join(self._texts),
            namespace=UNSET if self._tool.namespace is None else self._tool.namespace,
        )


class _CustomCall:
    """A custom tool call. The model writes its text as JSON, so it is sent as a whole when the JSON is complete."""

    def __init__(self, answer_id: str, index: int, call_id: str, tool: ClientTool) -> None:
        self._id, self._index = f"ctc_{answer_id}_{index}", index
        self._call_id, self._tool = call_id, tool
        self._texts: list[str] = []

    def begin(self) -> list[Event]:
        return [OutputItemAdded(output_index=self._index, item=self._item("in_progress", ""))]

    def grow(self, text: str, logprobs: Logprobs) -> list[Event]:
        del logprobs
        self._texts.append(text)
        return []

    def end(self, status: ItemStatus) -> tuple[list[Event], OutputItem]:
        text = _input("".join(self._texts))
        delta = CustomToolCallInputDelta(item_id=self._id, output_index=self._index, delta=text)
        done = CustomToolCallInputDone(item_id=self._id, output_index=self._index, input=text)
        return [delta, done], self._item(status, text)

    def _item(self, status: ItemStatus, text: str) -> CustomToolCallItem:
        return CustomToolCallItem(
            id=self._id,
            status=status,
            call_id=self._call_id,
            name=self._tool.name,
            input=text,
            namespace=UNSET if self._tool.namespace is None else self._tool.namespace,
        )


def _input(arguments: str) -> str:
    """Extract the text for a custom tool; empty if the answer was cut off."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return ""
    text = found.get(INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else ""


class AnswerItems:
    """The items of one answer. One item is open at a time, and a piece of another kind ends it."""

    def __init__(self, answer_id: str, tools: Mapping[str, ClientTool] | None = None) -> None:
        """`tools`: the client's tools by the name that the model uses."""
        self.done: list[OutputItem] = []
        self._answer_id = answer_id
        self._tools = tools or {}
        self._open: _Growing | None = None
        self._held: Logprobs = ()  # of tokens whose text has not arrived yet

    def take(self, pieces: Sequence[Piece], logprobs: Logprobs = ()) -> list[Event]:
        """Add pieces and return their events. `logprobs`: of the tokens of the pieces; sent with the next text."""
        events: list[Event] = []
        self._held += logprobs
        for piece in pieces:
            match piece:
                case Words(text):
                    if not isinstance(self._open, _Message):
                        events += self._begin(_Message(self._answer_id, self._next_index()))
                    events += self._grow(text)
                case Thought(text):
                    if not isinstance(self._open, _Reasoning):
                        events += self._begin(_Reasoning(self._answer_id, self._next_index()))
                    events += self._grow(text)
                case CallStart():
                    tool = self._tools.get(piece.name, ClientTool(piece.name))
                    kind = _CustomCall if tool.is_custom else _FunctionCall
                    events += self._begin(kind(self._answer_id, self._next_index(), piece.call_id, tool))
                case CallArguments(_, text):
                    assert isinstance(self._open, _FunctionCall | _CustomCall), (
                        "arguments follow the start of their call"
                    )
                    events += self._grow(text)
        return events

    def extend_message(self, text: str) -> bool:
        """Add text to the open message, without an event. False: no message is open, or log probabilities are held."""
        if self._held or not isinstance(self._open, _Message):
            return False
        self._open.extend(text)
        return True

    def finish(self, *, is_whole: bool) -> list[Event]:
        """End the answer. An answer without items gets one empty message."""
        events: list[Event] = []
        if self._open is None:
            events += self._begin(_Message(self._answer_id, 0))
        if self._held and isinstance(self._open, _Message):  # every token has logprobs, also one without text
            events += self._grow("")
        return [*events, *self._end("completed" if is_whole else "incomplete")]

    def _next_index(self) -> int:
        return len(self.done) + (self._open is not None)

    def _begin(self, item: _Growing) -> list[Event]:
        events = self._end("completed")
        self._open = item
        return [*events, *item.begin()]

    def _grow(self, text: str) -> list[Event]:
        assert self._open is not None
        held, self._held = self._held, ()
        return self._open.grow(text, held)

    def _end(self, status: ItemStatus) -> list[Event]:
        if self._open is None:
            return []
        events, item = self._open.end(status)
        self._open = None
        self.done.append(item)
        return [*events, OutputItemDone(output_index=len(self.done) - 1, item=item)]
