"""Tokens that are written at once have the same bytes as those that are queued, and keep their order."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from quire.core.values import FinishReason, Priority
from quire.engine.outputs import Delta, Usage
from quire.engine.worker.client import Generation
from quire.server.errors import ApiError, Kind
from quire.server.http import BODY_WRITER, BodyWriter, EventEncoder, EventStream, TokenWriter
from quire.server.models import ActiveRequest, ClientGone
from quire.server.protocols import anthropic as messages
from quire.server.protocols import ollama as ollama
from quire.server.protocols import responses
from quire.server.protocols.openai import (
    OPENAI,
    ChatEncoder,
    CompletionEncoder,
    parse_chat,
    parse_completion,
)
from quire.server.protocols.openai_types import ChatCompletionRequest, CompletionRequest
from quire.server.protocols.responses import ResponsesRequest
from quire.text.reasoning import REASONING_FORMATS, Opening, ThoughtParser
from quire.text.stream import AnswerParser, PlainAnswer

HEAD = {
    "id": "chatcmpl-req_1",
    "object": "chat.completion.chunk",
    "created": 5,
    "model": 'a "<text>" model',
    "system_fingerprint": "f",
    "service_tier": "default",
}
TRICKY = [
    "a",
    ' "quoted" \\ back/slash',
    "\x00\x01\x1f\x7f\x80 control",
    "line\nbreak\r\n\ttab",
    "\u2028\u2029 separators",
    "🙂 astral",
    "👩\u200d💻 joined",
    "\ufffd replaced",
    "</script><text>",
    "\ufeff\u0301",
    "é" * 3000,  # a chunk size of four digits
]
THINKING = ["<think>", "\n", 'so "it"\u2028', " goes", "</think>", "\n\nYes", " 🙂", " <think> again"]


class FakeActiveRequest:
    """The parts of an `ActiveRequest` that streams and encoders use."""

    request_id = "req_1"
    model = 'a "<text>" model'
    system_fingerprint = "f"
    created = 5
    priority = Priority.NORMAL
    usage = Usage(3, 2, 0)
    num_thought_tokens = pinned_tokens = 0
    cache = cache_text = prefill_s = decode_s = None
    load_s = 0.0
    is_closed = False
    caller = SimpleNamespace(arrived_s=0.0)
    requests = (SimpleNamespace(prompt=(1, 2), sampling=SimpleNamespace(temperature=1.0, top_p=1.0)),)

    def __init__(self, new_parser: Callable[[], AnswerParser] = PlainAnswer) -> None:
        self.new_parser = new_parser
        self.request = parse_chat(msgspec.convert({"messages": [{"role": "user", "content": "x"}]}, CHAT))
        self.is_waiting = True
        self.generations: list[Any] = [SimpleNamespace(sink=None)]
        self.queue: asyncio.Queue[list[tuple[int, Delta]] | Exception] = asyncio.Queue()
        self.log: list[str] = []

    async def wait_start(self) -> None:
        pass

    async def next_batch(self) -> list[tuple[int, Delta]]:
        found = await self.queue.get()
        if isinstance(found, Exception):
            raise found
        return found

    def fail(self, error: Exception) -> None:
        raise error

    def close(self, error: Exception | None = None) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.log.append(f"closed with {error!r}")


CHAT = ChatCompletionRequest
BODY = msgspec.convert({"input": "x"}, ResponsesRequest)


def completions(active: ActiveRequest, *, has_ids: bool = False, **options: Any) -> EventEncoder:
    fields = {"prompt": ["x", "y"], "n": 2, "return_token_ids": has_ids, "stream": True, "stream_options": options}
    body = msgspec.convert(fields, CompletionRequest)
    active.request = parse_completion(body)
    return CompletionEncoder(active, body)


def chat(active: ActiveRequest, *, include_usage: bool = True) -> EventEncoder:
    options = {"include_usage": include_usage}
    fields = {"messages": [{"role": "user", "content": "x"}], "stream": True, "stream_options": options}
    body = msgspec.convert(fields, CHAT)
    active.request = parse_chat(body)
    return ChatEncoder(active, body)


def anthropic(active: ActiveRequest) -> EventEncoder:
    fields = {"model": "m", "max_tokens": 9, "messages": [], "thinking": {"type": "adaptive"}}
    return messages.Reply(active, msgspec.convert(fields, messages.MessagesRequest), cast(Any, None))


def openai_responses(active: ActiveRequest) -> EventEncoder:
    return responses.Reply(active, BODY)


def ollama_chat(active: ActiveRequest) -> EventEncoder:
    return ollama.ChatReply(active, ollama.OllamaChatRequest(model="m"))


ENCODERS = [completions, chat, anthropic, openai_responses, ollama_chat]


def thinking() -> AnswerParser:
    return ThoughtParser(REASONING_FORMATS[0], Opening.FREE, PlainAnswer())


def delta(text: str, index: int = 0) -> Delta:
    return Delta(index, text, (1,), (), None, None)


class FakeTransport:
    """A connection that has started a response in chunks."""

    def __init__(self) -> None:
        self.data = b""
        self.flow = SimpleNamespace(write_paused=False)
        self.cycle = SimpleNamespace(
            transport=SimpleNamespace(write=self.write),
            flow=self.flow,
            disconnected=False,
            response_started=True,
            chunked_encoding=True,
            scope={"method": "POST"},
        )
        self.writer = BodyWriter(cast(Any, self.cycle))

    def write(self, data: bytes) -> None:
        if self.cycle.disconnected:
            raise RuntimeError("unable to perform operation; the handler is closed")
        self.data += data

    def body(self) -> list[bytes]:
        """Split what was written into chunks, and check their sizes."""
        found: list[bytes] = []
        rest = self.data
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            found.append(rest[: int(size, 16)])
            assert rest[int(size, 16) :].startswith(b"\r\n")
            rest = rest[int(size, 16) + 2 :]
        return found


def without_times(data: bytes) -> bytes:
    return re.sub(rb'"created_at":"[^"]*"', b'"created_at":""', data)


@pytest.mark.parametrize("texts", [TRICKY, THINKING], ids=["tricky", "thinking"])
@pytest.mark.parametrize("new_parser", [PlainAnswer, thinking])
@pytest.mark.parametrize("make", ENCODERS)
def test_a_token_has_the_same_bytes_on_both_paths(
    make: Callable[[ActiveRequest], EventEncoder], new_parser: Callable[[], AnswerParser], texts: list[str]
) -> None:
    active, transport = FakeActiveRequest(new_parser), FakeTransport()
    direct, queued = make(cast(ActiveRequest, active)), make(cast(ActiveRequest, active))
    assert direct.begin() == queued.begin()
    writer = TokenWriter(0, cast(ActiveRequest, active), direct, transport.writer)
    expected: list[bytes] = []
    for text in texts * 2:
        assert writer.take_token(0, 1, text, 1.0)
        expected.append(queued.feed([(0, delta(text))]))
    assert list(map(without_times, transport.body())) == [without_times(data) for data in expected if data]
    end = Delta(0, "!", (1,), (), FinishReason.STOP, None)
    assert without_times(direct.feed([(0, end)])) == without_times(queued.feed([(0, end)]))


@pytest.mark.parametrize("text", TRICKY)
@pytest.mark.parametrize("include_usage", [False, True])
def test_the_bytes_of_a_token_are_those_of_json(text: str, include_usage: bool) -> None:
    active, transport = FakeActiveRequest(), FakeTransport()
    for make, choice in (
        (completions, {"index": 3, "text": text, "logprobs": None, "finish_reason": None}),
        (chat, {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}),
    ):
        encoder = make(cast(ActiveRequest, active), include_usage=include_usage)
        prompt, index = (1, 1) if make is completions else (0, 0)
        writer = TokenWriter(prompt, cast(ActiveRequest, active), encoder, transport.writer)
        writer.take_token(index, 1, "begin", 1.0)
        assert encoder.text_frame(prompt, index) is not None  # from now on, only the text is encoded
        transport.data = b""
        writer.take_token(index, 1, text, 1.0)
        kind = {"id": "cmpl-req_1", "object": "text_completion"} if make is completions else {}
        chunk = HEAD | kind | {"choices": [choice]} | ({"usage": None} if include_usage else {})
        event = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
        assert transport.body() == [f"data: {event}\n\n".encode()]


@pytest.mark.parametrize("more", [{"continuous_usage_stats": True}, {"has_ids": True}])
def test_chunks_with_more_than_text_are_encoded_as_a_whole(more: dict[str, bool]) -> None:
    active, transport = FakeActiveRequest(), FakeTransport()
    encoder = completions(cast(ActiveRequest, active), **more)
    writer = TokenWriter(0, cast(ActiveRequest, active), encoder, transport.writer)
    for token_id, text in enumerate("abc"):
        writer.take_token(0, token_id, text, 1.0)
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in transport.body()]
    assert [one["choices"][0]["text"] for one in chunks] == ["a", "b", "c"]
    if "has_ids" in more:
        assert [one["choices"][0]["token_ids"] for one in chunks] == [[0], [1], [2]]
    else:
        assert [one["usage"]["completion_tokens"] for one in chunks] == [1, 2, 3]


def test_nothing_is_written_at_once_while_the_client_or_the_task_is_behind() -> None:
    active, transport = FakeActiveRequest(), FakeTransport()
    writer = TokenWriter(0, cast(ActiveRequest, active), chat(cast(ActiveRequest, active)), transport.writer)
    for is_waiting, is_paused in ((False, False), (True, True)):
        active.is_waiting, transport.flow.write_paused = is_waiting, is_paused
        assert not writer.take_token(0, 1, "a", 1.0)
        assert not writer.take_delta(delta("a"))
    assert not transport.data
    active.is_waiting, transport.flow.write_paused = True, False
    assert writer.take_token(0, 1, "a", 2.0)
    assert transport.data


def test_a_token_for_a_client_that_has_just_disconnected_is_dropped() -> None:
    active, transport = FakeActiveRequest(), FakeTransport()
    writer = TokenWriter(0, cast(ActiveRequest, active), chat(cast(ActiveRequest, active)), transport.writer)
    assert writer.take_token(0, 1, "a", 1.0)
    before, transport.cycle.disconnected = transport.data, True
    assert writer.take_token(0, 1, "b", 1.0)
    assert writer.take_delta(delta("c"))
    assert transport.data == before


def test_a_stream_writes_tokens_between_what_its_task_sends() -> None:
    """The task sends the start and the end; tokens in between are written when they arrive."""

    async def serve() -> tuple[FakeActiveRequest, bytes]:
        active, transport = FakeActiveRequest(), FakeTransport()

        async def send(message: Any) -> None:
            if message.get("body"):
                transport.writer.write(message["body"])
                active.log.append("sent")

        stream = EventStream(
            cast(ActiveRequest, active), chat(cast(ActiveRequest, active)), {}, OPENAI, keep_alive_s=600
        )
        active.queue.put_nowait([(0, delta("a"))])
        await stream.begin()
        task = asyncio.ensure_future(stream({BODY_WRITER: transport.writer}, cast(Any, None), send))
        while active.generations[0].sink is None or not transport.data:
            await asyncio.sleep(0)
        assert active.generations[0].sink.take_token(0, 1, "b", 1.0)
        assert b'"content":"b"' in transport.data  # without a turn of the event loop
        active.queue.put_nowait([(0, Delta(0, "c", (1,), (), FinishReason.STOP, None))])
        active.queue.put_nowait([])
        await task
        return active, b"".join(transport.body())

    active, data = asyncio.run(serve())
    assert re.findall(rb'"content":"(\w+)"', data) == [b"a", b"b", b"c"]
    assert data.endswith(b"data: [DONE]\n\n")
    # Closed after the last bytes: a shutdown cuts connections whose requests are closed.
    assert active.log == ["sent", "sent", "sent", "closed with None"]


@pytest.mark.parametrize("make", ENCODERS)
def test_a_failure_is_recorded_before_it_is_sent(make: Callable[[ActiveRequest], EventEncoder]) -> None:
    async def serve(error: Exception) -> list[str]:
        active = FakeActiveRequest()

        async def send(message: Any) -> None:
            if message.get("body"):
                active.log.append("failed" if b"too much" in message["body"] else "sent")

        stream = EventStream(
            cast(ActiveRequest, active), make(cast(ActiveRequest, active)), {}, OPENAI, keep_alive_s=600
        )
        active.queue.put_nowait([(0, delta("a"))])
        await stream.begin()
        active.queue.put_nowait(error)
        await stream({}, cast(Any, None), send)
        return [line for line in active.log if line != "sent"]

    error = ApiError(Kind.RATE_LIMITED, "too much")
    assert asyncio.run(serve(error)) == [f"closed with {error!r}", "failed"]
    assert asyncio.run(serve(ClientGone())) == ["closed with ClientGone()"]  # no event is sent


class Ticket:
    priority = Priority.NORMAL

    def leave(self) -> None:
        pass


def closed_request() -> weakref.ref[ActiveRequest]:
    """A request with one generation, and with everything that refers back to it, after it was closed."""
    parsed = parse_chat(msgspec.convert({"messages": [{"role": "user", "content": "x"}]}, CHAT))
    caller = SimpleNamespace(request_id="req_1", endpoint="/x", arrived_s=0.0, key=SimpleNamespace(name="k"))
    model = SimpleNamespace(name="m")
    active = ActiveRequest(cast(Any, model), parsed, cast(Any, caller), cast(Any, Ticket()))
    active.service = cast(Any, SimpleNamespace(client=SimpleNamespace(system_fingerprint="f")))
    answers: Any = SimpleNamespace(
        samples=(),
        tokenizer=SimpleNamespace(plain_texts={}),
        usage=Usage(1, 0, 0),
        output=lambda: SimpleNamespace(completions=()),
    )
    generation = Generation(answers, (1,), lambda _: None, active.updated, lambda _: active.start(0.0))
    writer = cast(BodyWriter, SimpleNamespace(flow=None, write_frame=None))
    generation.sink = TokenWriter(0, active, completions(active), writer)
    active.generations.append(generation)
    active.on_close(lambda: active.is_closed)
    active.close()
    return weakref.ref(active)


def test_a_closed_request_is_freed_without_a_collection() -> None:
    """The collector of a server runs rarely: prompts and answers in a cycle would stay in memory for a long time."""
    gc.disable()
    try:
        assert closed_request()() is None
    finally:
        gc.enable()
