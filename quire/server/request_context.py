"""One HTTP request: its key, its body, its response, and whether the client is still connected.

Handlers receive a `RequestContext` and return a response. An error they raise is encoded by the protocol's dialect.

Bodies and queries are decoded into types whose decoders are built at import. msgspec builds the type information of a
Struct at its first use, and publishes it before it is complete: a second thread that decodes the same type at that
moment reads a null pointer, and the process ends (decision 0044). Therefore a type is decoded only after
`build_decoders`, which is called when the server is imported, before there are threads.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, TypeVar

import msgspec
from msgspec import inspect
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from quire.errors import InvalidRequest
from quire.server.batches.service import BatchService
from quire.server.config import ServeConfig
from quire.server.errors import ApiError, Dialect, Kind, api_error
from quire.server.limits import NUM_PARSERS, Key
from quire.server.metrics import MAX_VALUE_CHARS, log_refusal
from quire.server.models import ActiveRequest, Caller, ClientGone, InferenceRequest, Model, Models, ModelService
from quire.server.watch import Watch

T = TypeVar("T", bound=msgspec.Struct)
Parsed = TypeVar("Parsed")
MAX_NAMED_FIELDS = 16
MAX_NAME_CHARS = 160  # of the name of a field: the path of a schema keyword is long
IGNORED = "x-quire-ignored-fields"
UNENFORCED = "x-quire-unenforced"
MAX_VALUES = 1 << 18  # in a body
MAX_SHOWN_BYTES = 1 << 20  # larger bodies are not searched for the value to show in an error
MAX_PLAIN_BYTES = 64 << 10  # of a body without a schema; a larger one is decoded and parsed in a thread
MAX_QUICK_BYTES = 4 << 10  # the same of a body with one of SLOW_WORDS: its schemas may take a fifth of a second
SLOW_WORDS = (b'"tools"', b"schema", b"grammar")  # in bodies whose schemas take long to parse
MAX_PLAIN_VALUES = 2048  # in an answer; one with more tokens or scores is made in a thread
MAX_PART = 128  # items of a list that are encoded in one call
MIB = 1 << 20
MIN_BODY_RATE = 16 << 10  # bytes per second of a body that is streamed to disk
# Values of these fields are not repeated in errors, because clients log errors.
PROMPT_FIELDS = ("messages", "prompt", "system", "input", "instructions", "tools")
DISCARD_S = 2.0
QUIET_S = 0.5  # a client that sends nothing for so long waits for the response
MAX_DISCARDED_BYTES = 64 * MIB
MAX_WARNINGS = 1_000  # of `log_once`
_TOOL = re.compile(r"tools\[\d+\](?:\.tools\[\d+\])*")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]+)`(?: - at `\$(?P<path>[^`]*)`)?$")
_PATH = re.compile(r"^(?P<what>.*?) - at `\$(?P<path>[^`]*)`$", re.DOTALL)

_parsers = ThreadPoolExecutor(NUM_PARSERS, "quire-parse")
_log = logging.getLogger("quire.server")


_logged: set[str] = set()  # warnings


def log_once(message: str) -> None:
    """Log each warning once, and at most MAX_WARNINGS different ones: clients choose what they are about."""
    message = message[: 2 * MAX_VALUE_CHARS]  # a client's field name may be megabytes
    if message not in _logged and len(_logged) < MAX_WARNINGS:
        _logged.add(message)
        _log.warning("%s", message)
        if len(_logged) == MAX_WARNINGS:
            _log.warning("%d different warnings of this kind were logged: no more follow", MAX_WARNINGS)


@dataclass(frozen=True, slots=True)
class Served:
    """What the requests of a server share."""

    models: Models
    watch: Watch
    config: ServeConfig
    batches: BatchService | None = None  # None: this server stores nothing


class RequestContext:
    def __init__(self, scope: Scope, receive: Receive, send: Send, served: Served) -> None:
        self.request = Request(scope, receive, send)
        self.served = served
        self.models = served.models
        self.arrived_s = time.monotonic()
        self.endpoint = str(scope["path"])
        self.dialect: Dialect
        self.key: Key
        given = self.request.headers.get("x-request-id", "")
        self.request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        session = self.request.headers.get("x-session-id", "")
        self.session = (
            session if _REQUEST_ID.fullmatch(session) else ""
        )  # of a conversation, for the router of a cluster
        self.headers: dict[str, str] = {
            "x-request-id": self.request_id,  # OpenAI's name
            "request-id": self.request_id,  # Anthropic's name
        }
        self.fields: frozenset[str] = frozenset()  # field names of the body
        self._is_slow = False  # the body takes long to decode and to parse
        self._receive = receive
        self.length = self.request.headers.get("content-length", "0")  # as announced
        self.has_body = "transfer-encoding" in self.request.headers or self.length != "0"  # an unread body
        self._gone: asyncio.Task[None] | None = None
        self._active: ActiveRequest | None = None
        self.model = self.models.default  # the model whose metrics count this request
        self._held: set[Model] = set()  # kept loaded until the request ends
        self.on_finish = ExitStack()  # what ends with this request

    @property
    def service(self) -> ModelService:
        """The service of the model that this request has opened or used; before that, of the default model."""
        return self.model.loaded

    # Request body

    async def body(self, kind: type[T]) -> T:
        """Read and decode the body. Unknown fields are ignored, named in a header and logged once."""
        self.fields = _field_names(kind)
        with self.models.body_bytes.reading(self.key.name) as take:
            data = await self._read(take)
            self._gone = asyncio.create_task(self._watch())
            self._is_slow = is_slow(data)
            return await self.run(partial(self._decode, data, kind), is_slow=self._is_slow)

    async def parse(self, parse: Callable[[T], Parsed], body: T) -> Parsed:
        """Call a codec's parser: for a large body in a thread, so that the streams of others continue."""
        return await self.run(partial(parse, body), is_slow=self._is_slow)

    async def run(self, work: Callable[[], Parsed], *, is_slow: bool) -> Parsed:
        """Do work at once; slow work in a thread, when it is the turn of this key."""
        return await self.models.parsing.run(self.key.name, _parsers, work) if is_slow else work()

    def _decode(self, data: bytes, kind: type[T]) -> T:
        """Decode a body. The number of values is bounded, because decoding time depends on it."""
        max_values = max(MAX_VALUES, 2 * self.models.max_model_len)
        if data.count(b",") > max_values:
            raise ApiError(Kind.TOO_LARGE, f"the body has more than {max_values} values")
        try:
            value = decode(data, kind)
            unknown: dict[str, str] = {}
            _find_unknown(msgspec.json.decode(data), _shape(kind), "", unknown)
            for name in list(unknown)[:MAX_NAMED_FIELDS]:
                log_once(f"{self.endpoint}: the unknown field {_printable(name)} was ignored")
            self.note(IGNORED, unknown.values())
            return value
        except msgspec.ValidationError as error:
            raise _wrong_type(error, data) from None
        except RecursionError:
            raise ApiError(Kind.INVALID, "the body is nested too deeply") from None
        except UnicodeDecodeError as error:
            raise ApiError(Kind.INVALID, f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
        except msgspec.DecodeError as error:
            raise ApiError(Kind.INVALID, f"the body is not JSON: {error}") from None

    async def _read(self, take: Callable[[int], None]) -> bytes:
        data = bytearray()  # not a list: a body that arrives in pieces of two bytes would take twenty times its size
        async for chunk in self.chunks(self.served.config.max_body_size, MIB):
            take(len(chunk))
            data += chunk
        return bytes(data)

    async def chunks(self, max_bytes: int, min_rate: int = MIN_BODY_RATE) -> AsyncIterator[bytes]:
        """Yield the body as it arrives.

        Limits the size and the time between two chunks, and requires an average of `min_rate` bytes per second.
        """
        if not self.length.isdigit() or int(self.length) > max_bytes:
            text = f"a body of {self.length[:24]} bytes exceeds the limit of {max_bytes} bytes"
            raise ApiError(Kind.TOO_LARGE, text)
        size = 0
        began_s = time.monotonic()
        stream = aiter(self.request.stream())
        while True:
            try:
                async with asyncio.timeout(self.served.config.body_timeout):
                    chunk = await anext(stream, None)
            except TimeoutError:
                text = f"no bytes of the body arrived for {self.served.config.body_timeout:g} s, after {size} bytes"
                raise ApiError(Kind.TIMEOUT, text) from None
            except ClientDisconnect:
                raise ClientGone from None
            if chunk is None:
                self.has_body = False  # read completely: the connection can be reused
                return
            size += len(chunk)
            if size > max_bytes:
                raise ApiError(Kind.TOO_LARGE, f"the body exceeds the limit of {max_bytes} bytes")
            if time.monotonic() - began_s > self.served.config.body_timeout + size / min_rate:
                raise ApiError(Kind.TIMEOUT, f"the body arrived at less than {min_rate} bytes per second")
            yield chunk

    def query(self, kind: type[T]) -> T:
        """Parse the URL's query parameters. Unknown ones are ignored."""
        given = dict(self.request.query_params)
        try:
            return convert(given, kind)
        except msgspec.ValidationError as error:
            what, _, path = str(error).partition(" - at `$.")
            name = path.rstrip("`")
            if not name:
                raise InvalidRequest(what.replace("Object missing required field", "the query lacks")) from None
            raise ApiError(Kind.INVALID, f"{name} = {given.get(name)!r:.80}: {what}", param=name) from None

    def note_ignored(self, names: Sequence[str]) -> None:
        """Add fields without effect to the header. A tool that is ignored as a whole takes the place of its fields."""
        tools = tuple(f"{found[0]}." for name in names if (found := _TOOL.match(name)) is not None)
        before = self.headers.pop(IGNORED, "").split(", ")
        self.note(IGNORED, [*(name for name in before if name and not name.startswith(tools)), *names])

    def note(self, header: str, names: Iterable[str]) -> list[str]:
        """Add names of ignored or unenforced fields to a response header. Returns the new names that fit.

        If some do not fit, the header ends with `...`.
        """
        before = [name for name in self.headers.get(header, "").split(", ") if name]
        found = [_printable(name) for name in names]
        new = [name for name in dict.fromkeys(found) if name not in before]
        room = max(0, MAX_NAMED_FIELDS - len(before))
        if new:
            more = ["..."] if len(new) > room and "..." not in before else []
            self.headers[header] = ", ".join([*before, *new[:room], *more])
        return new[:room]

    # Response

    def json(self, value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
        return Response(msgspec.json.encode(value), status, {**self.headers, **(headers or {})}, "application/json")

    async def json_of(self, make: Callable[[], object], num_values: int) -> Response:
        """Make an answer of so many tokens and scores, and encode it."""
        if num_values <= MAX_PLAIN_VALUES:
            return self.json(make())
        return await self.run(lambda: self.json(in_parts(make())), is_slow=True)

    async def open(self, request: InferenceRequest) -> ActiveRequest:
        """Submit the request to its model, unless the client disconnects first."""
        self.model = self.models.find(request.model)
        self.note_ignored(request.ignored)
        self.note(UNENFORCED, request.unenforced)
        caller = Caller(self.key, self.request_id, self.endpoint, self.arrived_s, self.session)
        assert self._gone is not None, "the body must be read first"
        if self._gone.done():
            raise ClientGone
        self._active = active = self.models.enter(request, caller)
        await self.models.open(active)
        self.note(IGNORED, active.ignored)
        return active

    async def use(self, name: str | None) -> ModelService:
        """Return the service of a model. Loads the model and keeps it loaded until this request ends."""
        self.model = model = self.models.find(name)
        if self._gone is None:  # a request without a body
            self._gone = asyncio.create_task(self._watch())
        if model not in self._held:
            holding = asyncio.create_task(self.models.hold(model))
            try:
                await self.wait_for(holding)
            finally:
                if not holding.done():
                    holding.cancel()
                    await asyncio.wait({holding})
                if not holding.cancelled() and holding.exception() is None:
                    self._held.add(model)
                    self.on_finish.callback(self.models.release, model)
        return self.service

    async def wait_for(self, task: asyncio.Task[None]) -> None:
        """Wait for the task. If the client disconnects, raise ClientGone; the task continues."""
        gone = self._gone
        assert gone is not None, "the body must be read first"
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise ClientGone
        task.result()

    def streaming(self, parts: AsyncIterator[bytes], media_type: str) -> Response:
        """A stream that is not a generation: it ends with its parts, or when the client disconnects."""
        headers = {**self.headers, "cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(parts, headers=headers, media_type=media_type)

    async def refuse(self, error: ApiError) -> Response:
        """Count and log an error, and return its response."""
        self.model.metrics.rejected(error.reason)
        key: Key | None = getattr(self, "key", None)  # None: it was not checked yet
        if key is not None and key.is_admin:
            error.message = error.admin_message
        status = self.dialect.status(error)
        if self._active is None or not self._active.is_accepted:  # an accepted request has its own log line
            name = None if key is None else key.name
            log_refusal(self.request_id, self.endpoint, name, status, error.reason, error.param)
        if self.has_body and error.kind is not Kind.TIMEOUT:
            await self.discard()
        headers = {**self.headers, "x-should-retry": "true" if error.may_retry else "false"}
        if error.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        if self.has_body:
            headers["connection"] = "close"  # the rest of the body is not read
        if error.kind is Kind.AUTHENTICATION:
            headers["www-authenticate"] = "Bearer"
        return Response(self.dialect.body(error, self.request_id), status, headers, "application/json")

    # Disconnect and cleanup

    async def _watch(self) -> None:
        """Wait for the client's disconnect, then cancel its request."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._active is not None:
            self._active.fail(ClientGone())

    async def discard(self) -> None:
        """Read the rest of a refused body: closing the connection with unread data may lose the response."""
        size = 0
        if "expect" in self.request.headers:
            return  # the client waits for 100 Continue and has not sent the body
        loop = asyncio.get_running_loop()
        end_s = loop.time() + DISCARD_S
        with suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(QUIET_S) as limit:
                async for chunk in self.request.stream():
                    limit.reschedule(min(end_s, loop.time() + QUIET_S))
                    size += len(chunk)
                    if size > MAX_DISCARDED_BYTES:
                        return
                self.has_body = False

    async def finish(self) -> None:
        """Cancel all tasks of this request and release its models."""
        if self._gone is not None and not self._gone.done():
            self._gone.cancel()
            await asyncio.wait({self._gone})
        if self._active is not None:
            self._active.close()
        self.on_finish.close()
        self._active = self._gone = None  # they refer to this object


Handler = Callable[[RequestContext], Awaitable[Response]]


async def answer(context: RequestContext, handler: Handler) -> Response | None:
    """Run a handler and turn every failure into an error response. None: the client has disconnected."""
    try:
        return await handler(context)
    except ClientGone:
        return None
    except Exception as error:
        return await context.refuse(api_error(error, context.request_id, context.fields))


def is_slow(body: bytes) -> bool:
    """Whether a body takes long to decode and to parse: a large one, or a schema of some size."""
    return len(body) > MAX_QUICK_BYTES and (len(body) > MAX_PLAIN_BYTES or any(word in body for word in SLOW_WORDS))


def in_parts(value: object) -> object:
    """Encode the long lists in an answer. A call of msgspec holds the interpreter's lock, which must not last long."""
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        found = {name: made for name, one in fields.items() if (made := in_parts(one)) is not one}
        return msgspec.structs.replace(value, **found) if found else value
    if not isinstance(value, list | tuple):
        return value
    if len(value) <= MAX_PART:
        return [in_parts(one) for one in value] if value and isinstance(value[0], msgspec.Struct) else value
    parts = (msgspec.json.encode(value[at : at + MAX_PART])[1:-1] for at in range(0, len(value), MAX_PART))
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


@cache
def _field_names(kind: type[msgspec.Struct]) -> frozenset[str]:
    """The names of a body's fields. Cached: msgspec evaluates all annotations, which takes milliseconds."""
    return frozenset(known.encode_name for known in msgspec.structs.fields(kind))


def _printable(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.$\[\]/-]", "?", name)[:MAX_NAME_CHARS]


def _wrong_type(error: msgspec.ValidationError, data: bytes) -> ApiError:
    """Convert msgspec's error: name the field as the client sent it, and its value."""
    missing = _MISSING.match(str(error))
    if missing is not None:
        path = f"{missing['path'] or ''}.{missing['name']}".lstrip(".")
        return ApiError(Kind.INVALID, f"{path} is missing", param=path)
    found = _PATH.match(str(error))
    if found is None:
        return ApiError(Kind.INVALID, f"the body: {error}")
    path = found["path"].lstrip(".")
    value = _value_at(data, path)
    shown = "" if value is None else f" = {value}"
    return ApiError(Kind.INVALID, f"{path or 'the body'}{shown}: {found['what']}", param=path or None)


def _value_at(data: bytes, path: str) -> str | None:
    """Return the value at this path as short text; None if it cannot be found or must not be shown."""
    if "..." in path or path.startswith(PROMPT_FIELDS) or len(data) > MAX_SHOWN_BYTES:
        return None
    try:
        value: Any = msgspec.json.decode(data)
        for name, index in re.findall(r"\.?([^.\[\]]+)|\[(\d+)\]", path):
            value = value[int(index)] if index else value[name]
    except (msgspec.DecodeError, LookupError, TypeError, RecursionError, UnicodeDecodeError):
        return None
    if isinstance(value, dict | list):
        return None
    return f"{value!r:.80}"


_decoders: dict[type[msgspec.Struct], msgspec.json.Decoder[Any]] = {}


def build_decoders(*kinds: type[msgspec.Struct]) -> None:
    """Build the decoders of these types, with the type information of all types in their fields."""
    for kind in kinds:
        _decoders[kind] = msgspec.json.Decoder(kind)


def decode(data: bytes, kind: type[T]) -> T:
    """Decode JSON. May be called in any thread. Raises msgspec's errors."""
    value: T = _decoder(kind).decode(data)
    return value


def convert(values: Mapping[str, str], kind: type[T]) -> T:
    """Convert texts, such as query parameters. May be called in any thread. Raises msgspec's errors."""
    _decoder(kind)  # raises for an unknown type
    return msgspec.convert(values, kind, strict=False)


def _decoder(kind: type[T]) -> msgspec.json.Decoder[Any]:
    if kind not in _decoders:
        raise TypeError(f"{kind.__qualname__} has no decoder: call build_decoders where the type is defined")
    return _decoders[kind]


_NUMBER = re.compile(r"\[\d+\]")
Shape = dict[str, Any]  # field -> the shape of the structs in it, or None; "[]": the shape of a list's items


def _find_unknown(value: Any, shape: Shape | None, path: str, found: dict[str, str]) -> None:
    """Find the first occurrence of each unknown field, such as `messages[2].cache_control`, by its path without
    numbers, `messages[].cache_control`."""
    if shape is None:
        return
    if isinstance(value, list):
        for i, item in enumerate(value):
            _find_unknown(item, shape.get("[]"), f"{path}[{i}]", found)
    elif isinstance(value, dict) and "{}" in shape:
        fields = shape["{}"]
        for name, item in value.items():
            full = f"{path}.{name}" if path else name
            if name not in fields:
                found.setdefault(_NUMBER.sub("[]", full), full)
            elif fields[name] is not None:
                _find_unknown(item, fields[name], full, found)


@lru_cache(maxsize=64)
def _shape(kind: type[msgspec.Struct]) -> Shape | None:
    return _shape_of(inspect.type_info(kind))


def _shape_of(node: inspect.Type) -> Shape | None:
    """{"{}": fields} for a struct, {"[]": items} for a list, both for a union of them; None: no struct in it."""
    match node:
        case inspect.Metadata(type=inner):
            return _shape_of(inner)
        case inspect.StructType():
            fields = {field.encode_name: _shape_of(field.type) for field in node.fields}
            if node.tag_field is not None:
                fields[node.tag_field] = None
            return {"{}": fields}
        case inspect.ListType(item_type=item):
            inner_shape = _shape_of(item)
            return None if inner_shape is None else {"[]": inner_shape}
        case inspect.UnionType(types=types):
            merged: Shape = {}
            for one in types:
                merged |= _shape_of(one) or {}
            return merged or None
        case _:
            return None
