"""Tokens that are written at once have the same bytes as those that are queued, and keep their order."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import resource
import socket
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from uvicorn.server import ServerState

from quire.core.values import FinishReason, Priority, SamplingParams
from quire.engine.generation import Delta, Generation, GenerationRequest
from quire.errors import InvalidRequest
from quire.server import http
from quire.server.config import ModelConfig, ServeConfig
from quire.server.errors import ApiError, Kind
from quire.server.http import (
    BODY_WRITER,
    FREE_BYTES,
    GRACE_S,
    LINGER_S,
    SPARE_FILES,
    BodyWriter,
    HttpProtocol,
    OpenConnections,
    bind,
    make_config,
    raise_file_limit,
)
from quire.server.models import ActiveRequest, ClientGone
from quire.server.protocols import anthropic as messages
from quire.server.protocols import ollama as ollama
from quire.server.protocols import responses
from quire.server.protocols.openai import (
    OPENAI,
    ChatCompletionRequest,
    ChatEncoder,
    CompletionEncoder,
    CompletionRequest,
    parse_chat,
    parse_completion,
)
from quire.server.protocols.responses import ResponsesRequest
from quire.server.protocols.support import AnswerEncoder, EventStream, TokenWriter
from quire.text.messages import AnswerParser, PlainAnswer
from quire.text.reasoning import REASONING_FORMATS, Opening, ThoughtParser
from quire.text.tokenizer import Tokenizer
from tests.server import streams
from tests.text.vocabularies import byte_level_gguf

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


class FakeActiveRequest(streams.FakeActiveRequest):
    """Its batches come from a queue. `log`: what is written and closed."""

    is_closed = False

    def __init__(self, new_parser: Callable[[], AnswerParser] = PlainAnswer) -> None:
        request = parse_chat(msgspec.convert({"messages": [{"role": "user", "content": "x"}]}, CHAT))
        super().__init__(request, model='a "<text>" model', created=5, system_fingerprint="f")
        self.new_parser = new_parser  # type: ignore[method-assign]
        self.requests = (SimpleNamespace(prompt=(1, 2), sampling=SimpleNamespace(temperature=1.0, top_p=1.0)),)
        self.is_waiting = True
        self.started: list[Any] = [SimpleNamespace(sink=None)]
        self.queue: asyncio.Queue[list[tuple[int, Delta]] | Exception] = asyncio.Queue()
        self.log: list[str] = []

    @property
    def generations(self) -> Any:
        return self.started

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


def completions(active: ActiveRequest, *, has_ids: bool = False, **options: Any) -> AnswerEncoder:
    fields = {"prompt": ["x", "y"], "n": 2, "return_token_ids": has_ids, "stream": True, "stream_options": options}
    body = msgspec.convert(fields, CompletionRequest)
    active.request = parse_completion(body)
    return CompletionEncoder(active, body)


def chat(active: ActiveRequest, *, include_usage: bool = True) -> AnswerEncoder:
    options = {"include_usage": include_usage}
    fields = {"messages": [{"role": "user", "content": "x"}], "stream": True, "stream_options": options}
    body = msgspec.convert(fields, CHAT)
    active.request = parse_chat(body)
    return ChatEncoder(active, body)


def anthropic(active: ActiveRequest) -> AnswerEncoder:
    fields = {"model": "m", "max_tokens": 9, "messages": [], "thinking": {"type": "adaptive"}}
    return messages.Reply(active, msgspec.convert(fields, messages.MessagesRequest), cast(Any, None))


def openai_responses(active: ActiveRequest) -> AnswerEncoder:
    return responses.Reply(active, BODY)


def ollama_chat(active: ActiveRequest) -> AnswerEncoder:
    return ollama.ChatReply(active, ollama.OllamaChatRequest(model="m"))


ENCODERS = [completions, chat, anthropic, openai_responses, ollama_chat]


def stream_of(
    active: FakeActiveRequest, make: Callable[[ActiveRequest], AnswerEncoder] = chat, *, keep_alive_s: float = 600
) -> EventStream:
    work = cast(ActiveRequest, active)
    return EventStream(work, make(work), {}, OPENAI, keep_alive_s=keep_alive_s)


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
    make: Callable[[ActiveRequest], AnswerEncoder], new_parser: Callable[[], AnswerParser], texts: list[str]
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


def test_chunks_with_more_than_text_are_encoded_as_a_whole() -> None:
    active, transport = FakeActiveRequest(), FakeTransport()
    encoder = completions(cast(ActiveRequest, active), has_ids=True)
    writer = TokenWriter(0, cast(ActiveRequest, active), encoder, transport.writer)
    for token_id, text in enumerate("abc"):
        writer.take_token(0, token_id, text, 1.0)
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in transport.body()]
    assert [one["choices"][0]["text"] for one in chunks] == ["a", "b", "c"]
    assert [one["choices"][0]["token_ids"] for one in chunks] == [[0], [1], [2]]


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

        stream = stream_of(active)
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
def test_a_failure_is_recorded_before_it_is_sent(make: Callable[[ActiveRequest], AnswerEncoder]) -> None:
    async def serve(error: Exception) -> list[str]:
        active = FakeActiveRequest()

        async def send(message: Any) -> None:
            if message.get("body"):
                active.log.append("failed" if b"too much" in message["body"] else "sent")

        stream = stream_of(active, make)
        active.queue.put_nowait([(0, delta("a"))])
        await stream.begin()
        active.queue.put_nowait(error)
        await stream({}, cast(Any, None), send)
        return [line for line in active.log if line != "sent"]

    error = ApiError(Kind.RATE_LIMITED, "too much")
    assert asyncio.run(serve(error)) == [f"closed with {error!r}", "failed"]
    assert asyncio.run(serve(ClientGone())) == ["closed with ClientGone()"]  # no event is sent


def closed_request() -> weakref.ref[ActiveRequest]:
    """A request with one generation, and with everything that refers back to it, after it was closed."""
    parsed = parse_chat(msgspec.convert({"messages": [{"role": "user", "content": "x"}]}, CHAT))
    caller = SimpleNamespace(request_id="req_1", endpoint="/x", arrived_s=0.0, key=SimpleNamespace(name="k"))
    model = SimpleNamespace(name="m")
    ticket = SimpleNamespace(priority=Priority.NORMAL, leave=lambda: None)
    active = ActiveRequest(cast(Any, model), parsed, cast(Any, caller), cast(Any, ticket))
    active.service = cast(Any, SimpleNamespace(client=SimpleNamespace(system_fingerprint="f")))
    tokenizer = Tokenizer.from_gguf(byte_level_gguf())
    request = GenerationRequest.of((1,), SamplingParams())
    generation = Generation(request, tokenizer, (1,), updated=active.updated, on_start=active.start)
    generation.on_cancel = lambda _: None
    writer = cast(BodyWriter, SimpleNamespace(flow=None, write_frame=None))
    generation.sink = TokenWriter(0, active, completions(active), writer)
    active.generations.append(generation)
    active.on_close.callback(lambda: active.is_closed)
    active.close()
    return weakref.ref(active)


def test_a_closed_request_is_freed_without_a_collection() -> None:
    """The collector of a server runs rarely: prompts and answers in a cycle would stay in memory for a long time."""
    gc.disable()
    try:
        assert closed_request()() is None
    finally:
        gc.enable()


SLOW_S, HEADER_S = HttpProtocol.slow_reader_s, HttpProtocol.header_s


@dataclass(eq=False)
class Waiting:
    """A connection that notes its eviction."""

    evict: Callable[[], None]


class Timer:
    def __init__(self, delay_s: float, call: Callable[[], None]) -> None:
        self.delay_s = delay_s
        self.call = call
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Loop:
    """An event loop whose time passes only when a test fires a timer."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def call_later(self, delay_s: float, call: Callable[..., None], *values: object) -> Timer:
        self.timers.append(Timer(delay_s, lambda: call(*values)))
        return self.timers[-1]

    def fire(self, delay_s: float) -> None:
        """Fire the one timer with this delay."""
        (timer,) = [timer for timer in self.timers if timer.delay_s == delay_s and not timer.is_cancelled]
        self.timers.remove(timer)
        timer.call()


class Transport:
    def __init__(self) -> None:
        self.num_unread = 0
        self.written = b""
        self.is_aborted = self.is_closed = False

    def get_extra_info(self, _name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return self.num_unread

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.is_closed or self.is_aborted

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True


class Connection:
    def __init__(self, state: ServerState | None = None) -> None:
        self.loop, self.transport = Loop(), Transport()
        config = make_config(lambda: None, ServeConfig((ModelConfig(Path("m"), ("m",)),)))
        config.load()
        self.protocol = HttpProtocol(config, state or ServerState(), {}, cast(asyncio.AbstractEventLoop, self.loop))
        self.protocol.connection_made(cast(asyncio.Transport, self.transport))

    def answer(self) -> None:
        """End the response to a request: the connection is idle."""
        cycle = SimpleNamespace(scope={}, response_complete=True, message_event=asyncio.Event())
        self.protocol.cycle = cast(Any, cycle)
        self.protocol.on_response_complete()

    def close(self) -> None:
        self.protocol.connection_lost(None)


def test_a_slow_reader_is_kept_and_one_that_does_not_read_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    connection = Connection()
    transport = connection.transport
    transport.num_unread = 100_000
    connection.protocol.pause_writing()
    for num_unread in (99_999, 70_000, 10):
        transport.num_unread = num_unread
        connection.loop.fire(SLOW_S)
        assert not transport.is_aborted
    connection.loop.fire(SLOW_S)
    assert transport.is_aborted
    assert "a client read nothing for 30 s: its connection is aborted" in caplog.text


def test_resuming_the_write_stops_the_timer() -> None:
    connection = Connection()
    connection.transport.num_unread = 100_000
    connection.protocol.pause_writing()
    connection.protocol.resume_writing()
    assert all(timer.is_cancelled for timer in connection.loop.timers if timer.delay_s == SLOW_S)


def test_a_lost_connection_has_no_timers() -> None:
    """Else the loop keeps the connection, and clients that reset their connections would use up the memory."""
    for error in (None, ConnectionResetError()):
        connection = Connection()
        connection.answer()  # starts the timer between two requests
        connection.transport.num_unread = 100_000
        connection.protocol.pause_writing()
        connection.protocol.connection_lost(error)
        assert [timer.delay_s for timer in connection.loop.timers if not timer.is_cancelled] == []


def test_a_connection_without_headers_gets_408_and_is_closed() -> None:
    connection = Connection()
    connection.protocol.data_received(b"GET /health HTTP/1.1\r\nhost: local")
    connection.loop.fire(HEADER_S)
    assert connection.transport.written.startswith(b"HTTP/1.1 408 ")
    assert connection.transport.is_closed
    connection.loop.fire(LINGER_S)  # the client does not read the response either
    assert connection.transport.is_aborted


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> OpenConnections:
    """Shared by the connections of one test."""
    found = OpenConnections(max_bytes=100_000)
    monkeypatch.setattr(HttpProtocol, "others", found)
    return found


def test_all_connections_share_a_budget_of_header_bytes(others: OpenConnections) -> None:
    half = b"GET /health HTTP/1.1\r\nx-long: " + b"a" * 50_000
    first, second, third, small = [Connection() for _ in range(4)]
    for connection in (first, second):
        connection.protocol.data_received(half)
        assert not connection.transport.is_closing()
    third.protocol.data_received(half)
    assert third.transport.written.startswith(b"HTTP/1.1 503 ")
    small.protocol.data_received(half[:FREE_BYTES])
    assert not small.transport.is_closing()  # still accepted
    for connection in (first, second, third, small):
        connection.close()
    assert others.num_bytes == 0


def test_the_order_of_eviction() -> None:
    """Silent connections, then idle ones, then those without a complete body; none in its time of grace."""
    now_s = 0.0
    connections = OpenConnections(clock=lambda: now_s)
    evicted: list[str] = []
    half, idle, first, second, late, newcomer = (
        cast(HttpProtocol, Waiting(partial(evicted.append, name)))
        for name in ("half", "idle", "first", "second", "late", "newcomer")
    )
    connections.sends(half)
    connections.waits(idle, was_served=True)
    connections.waits(first, was_served=False)
    connections.waits(second, was_served=False)
    assert not connections.evict_oldest(newcomer)
    now_s = GRACE_S
    connections.waits(late, was_served=False)
    while connections.evict_oldest(newcomer):
        pass
    assert evicted == ["first", "second", "idle", "half"]
    now_s = 2 * GRACE_S
    assert connections.evict_oldest(newcomer)
    assert evicted[-1] == "late"


def test_at_the_limit_the_oldest_silent_connection_is_evicted(
    others: OpenConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    del others
    monkeypatch.setattr(http, "GRACE_S", 0.0)
    monkeypatch.setattr(HttpProtocol, "max_connections", 2)
    state = ServerState()
    served = Connection(state)
    served.answer()  # idle, and older than the next one
    silent = Connection(state)
    silent.protocol.data_received(b"GET /health HTTP/1.1\r\nhost: local")  # half a header is no request
    newcomer = Connection(state)
    assert silent.transport.is_aborted
    silent.close()
    assert not served.transport.is_closing()
    assert not newcomer.transport.is_closing()
    newcomer.protocol.others.waits_no_more(newcomer.protocol)  # it has a request
    served.transport.num_unread = 10
    last = Connection(state)
    assert (served.transport.is_closed, served.transport.is_aborted) == (True, False)  # its last bytes are sent first
    served.close()
    last.protocol.others.waits_no_more(last.protocol)
    refused = Connection(state)
    assert refused.transport.written.startswith(b"HTTP/1.1 503 ")  # each of the others has a request
    assert not last.transport.is_closing()


def test_the_headers_of_a_stream_are_sent_with_its_first_keep_alive() -> None:
    """An earlier failure has its own status; a later one is an event."""
    error = ApiError(Kind.OVERLOADED, "waited too long", reason="queue_timeout")

    async def serve() -> list[Any]:
        sent: list[Any] = []
        active = FakeActiveRequest()

        async def send(message: Any) -> None:
            sent.append(message)
            if message.get("body") == OPENAI.keep_alive:
                active.queue.put_nowait(error)

        stream = stream_of(active, keep_alive_s=0.01)
        await stream.begin()
        await stream({}, cast(Any, None), send)
        return sent

    head, *bodies = asyncio.run(serve())
    assert head["status"] == 200
    assert bodies[0]["body"] == OPENAI.keep_alive
    assert b"waited too long" in bodies[-1]["body"]
    assert bodies[-1]["more_body"] is False


@pytest.mark.anyio
async def test_a_failure_before_the_first_keep_alive_has_its_own_status() -> None:
    active = FakeActiveRequest()
    active.queue.put_nowait(ApiError(Kind.OVERLOADED, "the queue is full"))
    with pytest.raises(ApiError, match="the queue is full"):
        await stream_of(active).begin()
    assert active.is_closed


def test_the_limit_of_open_files_is_raised_as_far_as_macos_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [256, resource.RLIM_INFINITY]

    def set_limit(_kind: int, wanted: tuple[int, int]) -> None:
        if wanted[0] > 10_240:
            raise ValueError("not allowed to raise maximum limit")
        limits[0] = wanted[0]

    monkeypatch.setattr(resource, "getrlimit", lambda _kind: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    assert raise_file_limit(4096) == 4096
    assert raise_file_limit(50_000) == limits[0] - SPARE_FILES == 10_240 - SPARE_FILES


def test_an_address_that_cannot_be_used_is_an_error_before_anything_is_loaded() -> None:
    (own,) = bind("127.0.0.1", 0)
    with own:
        assert own.getsockname()[0] == "127.0.0.1"
        assert not own.getblocking()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for address, text in (
            (("127.0.0.1", port), f"port {port}: Address already in use; --port {port + 1} may be free"),
            (("192.0.2.1", 0), "cannot listen on 192.0.2.1 port 0: Cannot assign requested address"),
            (("no-such-host.invalid", 0), "--host 'no-such-host.invalid': "),
        ):
            with pytest.raises(InvalidRequest) as refused:
                bind(*address)
            assert text in str(refused.value)
            assert ("may be free" in str(refused.value)) == (address[1] > 0)
