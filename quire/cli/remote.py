"""A quire server as a `ChatModel`: which one to ask, and how, with nothing but the standard library.

Nothing it sends is believed: what is not in the API's shape is an error that names the server.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import typer

from quire import __version__
from quire.cli.chat_model import AnswerUsage, ChatInput, Piece, Take
from quire.errors import ContextTooLong, InvalidRequest, QueueFull, QuireError, RequestFailed
from quire.weights.hub import find_known

if TYPE_CHECKING:
    from quire.core.kv_cache import CacheStats
    from quire.engine.params import GenerationParams

DEFAULT_URL = "http://127.0.0.1:8000"
WAIT_S = 60.0  # for a server that still loads: the person just started it
POLL_S = 0.25
READ_LIMIT_S = 600.0  # between two signs of life of an answer; a queue may be long
MAX_DOCUMENT_BYTES = 4 << 20
MAX_EVENT_BYTES = 16 << 20
MAX_MESSAGE_CHARS = 1000

# Fields of GenerationParams by their names in the API. What was not given is not sent: the server has the model's own.
WIRE_NAMES = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty")},
    **{name: name for name in ("frequency_penalty", "logit_bias", "seed", "n", "max_tokens", "min_tokens", "stop")},
    **{name: name for name in ("stop_token_ids", "ignore_eos")},
    "include_stop": "include_stop_str_in_output",
    "skip_special": "skip_special_tokens",
}
GRAMMAR_NAMES = {"json_schema": "guided_json", "regex": "guided_regex", "lark": "guided_grammar"}  # by kind


class ServerError(QuireError):
    """A server that cannot be used, or did not keep to its API. The message names its URL."""


class NotThere(ServerError):
    """Nobody answers at this address, or somebody who is not quire."""


@dataclass(frozen=True, slots=True)
class Limits:
    connect_s: float
    read_s: float


QUICK = Limits(0.3, 10.0)  # for an address nobody named: most often nobody is there. Who accepts may be busy
PATIENT = Limits(5.0, 30.0)


# Which server


@dataclass(frozen=True, slots=True)
class Address:
    url: str  # without a slash at its end
    is_named: bool  # by the person: then not to find it is an error


def choose_address(server: str | None, *, is_local: bool, engine_options: Sequence[str]) -> Address | None:
    """Where to ask: --server, else QUIRE_SERVER, else where a server is by default. None: load the model here."""
    if server is not None and is_local:
        raise InvalidRequest(f"--local loads the model here, and --server {server} was given: choose one")
    if server is not None and engine_options:
        raise InvalidRequest(f"{engine_options[0]} is for a model loaded here, and --server {server} was given")
    if is_local or engine_options:
        return None
    source, text = ("--server", server) if server is not None else ("QUIRE_SERVER", os.environ.get("QUIRE_SERVER", ""))
    if text.strip().lower() == "none":
        return None
    if server is None and not text.strip():
        return Address(DEFAULT_URL, is_named=False)
    return Address(parse_url(source, text), is_named=True)


def parse_url(source: str, text: str) -> str:
    """As http.client can use it. What clients take as base URL, with /v1 at its end, will do; so will HOST:PORT."""
    url = text.strip()
    problem = InvalidRequest(f"{source} = {text!r} is not a URL like {DEFAULT_URL}")
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise problem from None
    if not is_good or not url.isprintable() or set(" ?#@") & set(url):
        raise problem
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1').rstrip('/')}"


def find_server(address: Address, model: str | None, api_key: str | None) -> RemoteModel | None:
    """The server there, ready to answer as that model. None: nobody named it, and it is not there or will not do."""
    server = Server(address.url, api_key, PATIENT if address.is_named else QUICK)
    try:
        server.wait_until_ready()
        name, max_model_len = server.find_model(model)
    except NotThere:
        if address.is_named:
            raise
        return None
    except QuireError as error:
        if address.is_named:
            raise
        note(f"{error}. Loading the model here")
        return None
    note(f"using {name} on {address.url}")
    return RemoteModel(server, name, max_model_len)


def reach_server(server: str | None, api_key: str | None) -> Server:
    """For commands that have nothing to do without one. It is there, and ready."""
    address = choose_address(server, is_local=False, engine_options=())
    if address is None:
        raise InvalidRequest("this needs a server, and QUIRE_SERVER says none: --server URL names one")
    found = Server(address.url, chosen_key(api_key), PATIENT)
    found.wait_until_ready()
    return found


def chosen_key(api_key: str | None) -> str | None:
    keys = [api_key] if api_key else os.environ.get("QUIRE_API_KEY", "").split()  # `quire serve` may have several
    return keys[0] if keys else None


def note(text: str) -> None:
    """For a person at a terminal only."""
    if sys.stderr.isatty():
        typer.echo(f"[{text}]", err=True)


class Server:
    """How to ask one. Each request has a connection of its own: closing it is how an answer is cancelled."""

    def __init__(self, url: str, api_key: str | None, limits: Limits) -> None:
        self.url = url
        self._parts = urlsplit(url)
        self._limits = limits
        self._headers = {"user-agent": f"quire/{__version__}", "accept-encoding": "identity"}
        self._api_key = api_key
        if api_key is not None and not re.fullmatch(r"[\x21-\x7e]+", api_key):
            raise InvalidRequest("the API key has characters no key has: blanks, or others than ASCII")

    def wait_until_ready(self) -> None:
        deadline_s: float | None = None
        while (status := self._health()) in ("loading", "restarting"):
            now_s = time.monotonic()
            if deadline_s is None:
                deadline_s = now_s + WAIT_S
                typer.echo(f"[{self.url} is {status}: waiting for it]", err=True)
            elif now_s >= deadline_s:
                raise ServerError(f"{self.url} is still {status} after {WAIT_S:.0f} s")
            time.sleep(POLL_S)
        if status != "ok":
            raise ServerError(f"{self.url} is {plain(status)}, and takes no requests")

    def find_model(self, wanted: str | None) -> tuple[str, int]:
        """The name it has there, and its context. Without a wish: the first."""
        found = self.get("/v1/models")
        entries = found.get("data") if isinstance(found, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise self.misspoke("a list of models that is none", found)
        models: dict[str, int] = {}
        for entry in entries:
            name, size = entry.get("id"), entry.get("max_model_len")
            if not isinstance(name, str) or not name.isprintable() or type(size) is not int:
                raise self.misspoke("a model without name or max_model_len", entry)
            models[name] = size
        if not models:
            raise ServerError(f"{self.url} has no model")
        if wanted is None:
            return next(iter(models.items()))
        known = find_known(wanted)
        for name in (wanted, known.name if known else wanted):
            if name in models:
                return name, models[name]
        raise InvalidRequest(f"{self.url} has no model {wanted!r}, only {plain(', '.join(models))}")

    def get(self, path: str) -> Any:
        with self.open("GET", path) as response:
            return self._document(response)

    @contextmanager
    def open(
        self, method: str, path: str, body: Any = None, on_connect: Callable[[socket.socket], None] = lambda _sock: None
    ) -> Iterator[http.client.HTTPResponse]:
        """A good answer, to be read. Refusals are raised. Who keeps the socket can end it from another thread."""
        headers = {} if self._api_key is None else {"authorization": f"Bearer {self._api_key}"}
        with self._ask(method, path, headers, body, on_connect) as response:
            if response.status != 200:
                raise self._refusal(response)
            yield response

    def chunks(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        """The body as it comes."""
        while True:
            with self._failures_named("broke off the answer"):
                data = response.read1(65536)
            if not data:
                return
            yield data

    def misspoke(self, what: str, found: object) -> ServerError:
        try:
            shown = repr(found)[:200]
        except RecursionError:
            shown = "something nested very deeply"
        return ServerError(f"{self.url} sent {what}: {plain(shown)}")

    def _health(self) -> str:
        """Without the key: that is nobody's business but a quire's."""
        with self._ask("GET", "/health", {}) as response:
            try:
                found = self._document(response)
            except ServerError:
                found = None
            if response.status not in (200, 503) or not isinstance(found, dict) or found.get("server") != "quire":
                raise NotThere(f"{self.url} answers, but is no quire server")
        return "ok" if response.status == 200 else str(found.get("status"))

    @contextmanager
    def _ask(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: Any = None,
        on_connect: Callable[[socket.socket], None] = lambda _sock: None,
    ) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=self._limits.connect_s)
        headers = {**self._headers, **headers}
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["content-type"] = "application/json"
        try:
            with self._failures_named("does not answer", NotThere):
                connection.connect()
                on_connect(connection.sock)
                connection.sock.settimeout(self._limits.read_s if data is None else READ_LIMIT_S)
                with suppress(BrokenPipeError, ConnectionResetError):  # it may refuse before it has read it all,
                    connection.request(method, self._parts.path + path, data, headers)
                response = connection.getresponse()  # and says why
            try:
                yield response
            finally:
                response.close()
        finally:
            connection.close()

    @contextmanager
    def _failures_named(self, what: str, kind: type[ServerError] = ServerError) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise kind(f"{self.url} {what}: it took too long") from None
        except OSError as error:
            raise kind(f"{self.url} {what}: {error.strerror or error}") from None
        except http.client.IncompleteRead:
            raise kind(f"{self.url} {what}: the connection ended") from None
        except (http.client.HTTPException, UnicodeError) as error:
            raise kind(f"{self.url} {what}: {type(error).__name__} {plain(str(error))}".rstrip()) from None

    def _document(self, response: http.client.HTTPResponse) -> Any:
        with self._failures_named("broke off its answer"):
            data = response.read(MAX_DOCUMENT_BYTES + 1)
        if len(data) > MAX_DOCUMENT_BYTES:
            raise ServerError(f"{self.url} sent more than {MAX_DOCUMENT_BYTES} bytes")
        return self.parse(data)

    def parse(self, data: bytes | str) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise self.misspoke("what is not JSON", data) from None

    def _refusal(self, response: http.client.HTTPResponse) -> QuireError:
        """In the server's words, with the status, the field it is about and when to come back."""
        try:
            found = self._document(response)
        except ServerError:
            found = None
        told = found.get("error") if isinstance(found, dict) else None
        error: dict[str, Any] = told if isinstance(told, dict) else {}
        text = f"{self.url}: {plain(str(error.get('message') or response.reason or 'refused'))}"
        text += f" (HTTP {response.status}{f', {plain(str(param))}' if (param := error.get('param')) else ''})"
        if (retry := response.headers.get("retry-after")) is not None:
            text += f"; try again in {retry} s" if retry.isdecimal() else f"; try again after {plain(retry)}"
        if response.status == 401 and self._api_key is None:
            text += "; --api-key or QUIRE_API_KEY gives it a key"
        if error.get("code") == "context_length_exceeded":
            return ContextTooLong(text)
        if response.status == 429:
            return QueueFull(text)
        return InvalidRequest(text) if response.status in (400, 404, 413, 422) else ServerError(text)


# The speaker


class RemoteModel:
    """A model behind a server."""

    has_template = True  # a server says itself what it lacks

    def __init__(self, server: Server, name: str, max_model_len: int) -> None:
        self.name = name
        self.max_model_len = max_model_len
        self._server = server

    def answer(self, ask: ChatInput, params: GenerationParams, take: Take) -> AnswerUsage | None:
        bill: AnswerUsage | None = None
        unfinished = set(range(params.n))
        path = "/v1/completions" if isinstance(ask, str) else "/v1/chat/completions"
        with self._server.open("POST", path, request_body(self.name, ask, params)) as response:
            kind = response.headers.get_content_type()
            if kind != "text/event-stream":
                raise self._server.misspoke("no event stream, but", kind)
            for chunk in self._chunks(response):
                try:
                    pieces, paid = read_chunk(chunk, has_stops=bool(params.stops))
                except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
                    raise self._server.misspoke("a chunk that is none", chunk) from None
                for piece in pieces:
                    if piece.index not in unfinished:
                        raise self._server.misspoke("more than was asked for", chunk)
                    if piece.finish_reason is not None:
                        unfinished.discard(piece.index)
                    take(piece)
                bill = paid or bill
        if unfinished:
            raise RequestFailed(f"{self._server.url} ended the stream before sample {min(unfinished)} had ended")
        return bill

    def _chunks(self, response: http.client.HTTPResponse) -> Iterator[Any]:
        try:
            for data in read_events(self._server.chunks(response)):
                if data.startswith("[DONE]"):
                    return
                yield self._server.parse(data)
        except OverflowError as error:
            raise ServerError(f"{self._server.url} sent {error}") from None
        raise RequestFailed(f"{self._server.url} ended the stream in the midst of the answer")

    def cache_stats(self) -> CacheStats:
        from quire.core.kv_cache import CacheStats

        found = self._server.get("/v1/cache/stats")
        try:
            return CacheStats(**{field.name: _whole(found[field.name]) for field in fields(CacheStats)})
        except (KeyError, TypeError, ValueError):
            raise self._server.misspoke("cache statistics that are none", found) from None

    def close(self) -> None:
        """Nothing is open between two answers."""


def request_body(model: str, ask: ChatInput, params: GenerationParams) -> dict[str, Any]:
    from quire.engine.params import GenerationParams

    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}, "cache": True}
    neutral = GenerationParams()
    for name, wire_name in WIRE_NAMES.items():
        value = getattr(params, name)
        if value != getattr(neutral, name):
            body[wire_name] = value
    if params.grammar is not None:
        body[GRAMMAR_NAMES[params.grammar.kind]] = params.grammar.given or params.grammar.source  # the server holds it
    if isinstance(ask, str):
        body["prompt"] = ask
        if params.logprobs is not None:
            body["logprobs"] = params.logprobs
    else:
        body["messages"] = [dict(message) for message in ask]
        if params.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": params.logprobs}
    return body


# What comes back


def read_events(chunks: Iterable[bytes]) -> Iterator[str]:
    """The data of server-sent events. They may be cut anywhere; comments and other fields are passed over.

    OverflowError where an event is larger than any answer.
    """
    data: list[str] = []
    num_bytes = 0
    for line in read_lines(chunks):
        if not line:
            if data:
                yield "\n".join(data)
            data, num_bytes = [], 0
            continue
        name, _, value = line.partition(b":")
        if name == b"data":
            num_bytes += len(value)
            if num_bytes > MAX_EVENT_BYTES:
                raise OverflowError(f"an event of more than {MAX_EVENT_BYTES} bytes")
            data.append(value.removeprefix(b" ").decode("utf-8", "replace"))


def read_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    r"""Without their ends: \n, \r\n or \r. What follows the last end is no line, and dropped."""
    rest = b""
    is_after_return = False  # a \n at the start of the next chunk belongs to a line end already seen
    is_first = True
    for chunk in chunks:
        if is_after_return and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        if chunk:
            is_after_return = chunk.endswith(b"\r")
        lines = (rest + chunk).splitlines(keepends=True)
        rest = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        if len(rest) > MAX_EVENT_BYTES:
            raise OverflowError(f"a line of more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            yield line.removeprefix(b"\xef\xbb\xbf" if is_first else b"").rstrip(b"\r\n")
            is_first = False


def read_chunk(chunk: Any, *, has_stops: bool) -> tuple[list[Piece], AnswerUsage | None]:
    """Raises RequestFailed with the server's message, or whatever comes of a chunk in another shape."""
    if error := chunk.get("error"):
        message = error.get("message") if isinstance(error, dict) else error
        raise RequestFailed(plain(str(message or error)))
    usage = chunk.get("usage")
    bill = None
    if usage:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        cache = chunk.get("cache")
        bill = AnswerUsage(
            prompt_tokens=_whole(usage["prompt_tokens"]),
            completion_tokens=_whole(usage["completion_tokens"]),
            cached_tokens=_whole(cached),
            cache=None if cache is None else _explanation(cache),
        )
    return [_piece(choice, has_stops=has_stops) for choice in chunk["choices"]], bill


def _piece(choice: dict[str, Any], *, has_stops: bool) -> Piece:
    delta = choice.get("delta") or {}
    text = choice.get("text") if "text" in choice else delta.get("content")
    thought, refusal = delta.get("reasoning_content"), delta.get("refusal")
    reason = choice.get("finish_reason")
    for value in (text, thought, refusal, reason):
        if not isinstance(value, str | None):
            raise TypeError(value)
    if reason == "error":
        raise RequestFailed("the server could not finish the answer")
    found = choice.get("logprobs")
    logprobs = () if found is None else _logprobs(found)
    stop = choice.get("stop_reason")  # vLLM's name: the stop string, or the id of a stop token
    return Piece(
        index=_whole(choice["index"]),
        text=text or "",
        num_tokens=len(logprobs) if found is not None else None if text or thought or refusal else 0,
        thought=thought or "",
        calls=tuple(_called(delta)),
        refusal=refusal or "",
        logprobs=logprobs,
        finish_reason=reason,
        stop=stop if isinstance(stop, str) else None,
        is_stop_known="stop_reason" in choice or reason != "stop" or not has_stops,
    )


def _called(delta: dict[str, Any]) -> Iterator[str]:
    """A call's name comes with its first part; the others bring its arguments."""
    for call in delta.get("tool_calls") or ():
        if name := (call.get("function") or {}).get("name"):
            yield plain(str(name))


def _logprobs(found: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Of either endpoint, as --json prints them. Token ids and ranks are not in the API."""
    if "content" in found:
        return tuple(_logprob(entry) for entry in found["content"] or ())
    texts, numbers = found["tokens"], found["token_logprobs"]
    tops = found.get("top_logprobs") or [None] * len(texts)
    return tuple(
        {
            "text": str(text),
            "logprob": number,
            **({"top": [{"text": str(other), "logprob": chance} for other, chance in top.items()]} if top else {}),
        }
        for text, number, top in zip(texts, numbers, tops, strict=True)
    )


def _logprob(entry: dict[str, Any]) -> dict[str, Any]:
    top = entry.get("top_logprobs")
    return {
        "text": str(entry["token"]),
        "bytes": entry.get("bytes"),
        "logprob": entry["logprob"],
        **({"top": [_logprob(other) for other in top]} if top else {}),
    }


def _explanation(cache: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_tokens": _whole(cache["matched_tokens"]),
        "num_blocks": _whole(cache["matched_blocks"]),
        "stopped_at": cache["stopped_at"],
        "reason": cache["reason"],
        "stopped_text": cache.get("stopped_text"),
    }


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


def plain(text: str) -> str:
    """What a server says, safe to show: it must not move the cursor or fill the screen."""
    return "".join(char if char.isprintable() else " " for char in text[:MAX_MESSAGE_CHARS])
