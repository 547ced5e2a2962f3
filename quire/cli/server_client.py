"""HTTP client for a quire server: which address to use, requests, errors and event streams.

Every response is checked. A response that does not follow the API raises `ServerError` with the server's URL.

The transport is httpcore, the lower half of httpx: importing httpx would add 130 ms of CPU time to the 240 ms of
`quire generate --server`, httpcore adds 25 ms. It is imported with the first request. Load generators have many
connections at once and use `quire.bench.http_load` instead.

Also a private `quire serve` process on a free port, for `quire bench` and `quire batch`, which stop it when they end.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import IncrementalNewlineDecoder
from itertools import chain
from tempfile import TemporaryFile
from types import FrameType
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import urlsplit

from quire.cli.terminal import echo
from quire.errors import ContextTooLong, InvalidRequest, MissingExtra, QueueFull, QuireError
from quire.version import __version__
from quire.weights.hub import find_known

if TYPE_CHECKING:
    import ssl

    import httpcore


DEFAULT_URL = "http://127.0.0.1:8000"
WAIT_S = 60.0  # for a server that is still loading
POLL_S = 0.25
STREAM_READ_S = 600.0  # between two reads of a response to a POST; the server's queue may be long
MAX_DOCUMENT_BYTES = 4 << 20
MAX_EVENT_BYTES = 16 << 20
MAX_MESSAGE_CHARS = 1000


class ServerError(QuireError):
    """The server cannot be used, or its response does not follow the API. The message names its URL."""


class ServerNotFound(ServerError):
    """No server at this address, or a server that is not quire."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    connect_s: float
    read_s: float


QUICK = Timeouts(0.3, 10.0)  # for the default address: usually no server runs there, and one that does may be busy
PATIENT = Timeouts(5.0, 30.0)


# Address


@dataclass(frozen=True, slots=True)
class Address:
    url: str  # without a trailing slash
    is_named: bool  # by --server or QUIRE_SERVER: then a missing server is an error


def choose_address(server: str | None, *, is_local: bool, engine_options: Sequence[str]) -> Address | None:
    """The address in --server, else QUIRE_SERVER, else the default one. None: load the model in this process."""
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
    """Normalise a base URL. A trailing /v1, as other clients need it, is removed; HOST:PORT is accepted."""
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


def reach_server(server: str | None, api_key: str | None) -> ServerClient:
    """A client of a server that is ready, for commands that need one."""
    address = require_address(server)
    found = ServerClient(address.url, chosen_key(api_key), PATIENT)
    try:
        found.wait_until_ready()
    except ServerNotFound as error:
        raise ServerNotFound(f"{error}; `quire serve` starts a server, --server URL names another") from None
    return found


def require_address(server: str | None) -> Address:
    address = choose_address(server, is_local=False, engine_options=())
    if address is None:
        raise InvalidRequest("this command needs a server, and QUIRE_SERVER is none: name one with --server URL")
    return address


def chosen_key(api_key: str | None) -> str | None:
    keys = [api_key] if api_key else os.environ.get("QUIRE_API_KEY", "").split()  # `quire serve` may have several
    return keys[0] if keys else None


def note(text: str) -> None:
    """Print a remark to stderr if it is a terminal."""
    if sys.stderr.isatty():
        echo(f"[{text}]", err=True)


# Requests


class ServerClient:
    """Sends requests to one server.

    Each request has its own connection, and closing it cancels the request. Proxies of the environment are not used:
    a server on this machine or in the local network is not reachable through them.
    """

    def __init__(self, url: str, api_key: str | None, timeouts: Timeouts, *, is_own: bool = False) -> None:
        self.url = url
        self.timeouts = timeouts
        self._parts = urlsplit(url)
        self._api_key = api_key
        self._is_own = is_own  # the server of this process, whose certificate may name another host
        if api_key is not None and not re.fullmatch(r"[\x21-\x7e]+", api_key):
            raise InvalidRequest("the API key contains blanks or characters that are not ASCII")

    def wait_until_ready(self) -> None:
        deadline_s: float | None = None
        while (status := self._health()) in ("loading", "restarting"):
            now_s = time.monotonic()
            if deadline_s is None:
                deadline_s = now_s + WAIT_S
                echo(f"[{self.url} is {status}: waiting for it]", err=True)
            elif now_s >= deadline_s:
                raise ServerError(f"{self.url} is still {status} after {WAIT_S:.0f} s")
            time.sleep(POLL_S)
        if status != "ok":
            raise ServerError(f"{self.url} is {printable(status)} and accepts no requests")

    def entries(self, path: str, what: str) -> list[dict[str, Any]]:
        """The entries of a list, such as /v1/models."""
        found = self.get(path)
        entries = found.get("data") if isinstance(found, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise self.malformed(f"a malformed list of {what}", found)
        return entries

    def find_model(self, wanted: str | None) -> tuple[str, int]:
        """The name of the model on the server and its context length. None selects the first model."""
        models: dict[str, int] = {}
        for entry in self.entries("/v1/models", "models"):
            name, size = entry.get("id"), entry.get("max_model_len")
            if not isinstance(name, str) or not name.isprintable() or type(size) is not int:
                raise self.malformed("a model without id or max_model_len", entry)
            models[name] = size
        if not models:
            raise ServerError(f"{self.url} has no model")
        if wanted is None:
            return next(iter(models.items()))
        known = find_known(wanted)
        for name in (wanted, known.name if known else wanted):
            if name in models:
                return name, models[name]
        raise InvalidRequest(f"{self.url} has no model {wanted!r}, only {printable(', '.join(models))}")

    def get(self, path: str) -> Any:
        """The JSON document at a path."""
        with self._open("GET", path) as response:
            return self.parse(self._body(response))

    def post(self, path: str, body: Any) -> Any:
        """Send JSON and return the JSON document of the response."""
        with self._open("POST", path, body) as response:
            return self.parse(self._body(response))

    @contextmanager
    def events(self, method: str, path: str, body: Any = None) -> Iterator[Iterator[str]]:
        """The data of the server-sent events of a response, as they arrive. Leaving the block cancels the request."""
        with self._open(method, path, body) as response:
            kind = _headers(response).get("content-type", "").partition(";")[0].strip().lower()
            if kind != "text/event-stream":
                raise self.malformed("a response that is not an event stream", kind)
            yield self.read_events(self._chunks(response))

    def read_events(self, chunks: Iterable[bytes]) -> Iterator[str]:
        """Like the function `read_events`, with errors that name the server."""
        try:
            yield from read_events(chunks)
        except OverflowError as error:
            raise ServerError(f"{self.url} sent {error}") from None

    def headers(self, *, has_body: bool = False, has_key: bool = True) -> dict[str, str]:
        found = {"user-agent": f"quire/{__version__}", "accept-encoding": "identity"}
        if has_body:
            found["content-type"] = "application/json"
        if has_key and self._api_key is not None:
            found["authorization"] = f"Bearer {self._api_key}"
        return found

    def parse(self, data: bytes | str) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise self.malformed("text that is not JSON", data) from None

    def malformed(self, what: str, found: object) -> ServerError:
        """The error for a response that does not follow the API."""
        try:
            shown = repr(found)[:200]
        except RecursionError:
            shown = "something nested very deeply"
        return ServerError(f"{self.url} sent {what}: {printable(shown)}")

    def refusal(self, status: int, reason: str, headers: Mapping[str, str], data: bytes) -> QuireError:
        """The error for a response that is not 200: the server's message, the status, the field, when to retry."""
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        detail = found.get("error") if isinstance(found, dict) else None
        error: dict[str, Any] = detail if isinstance(detail, dict) else {}
        text = f"{self.url}: {printable(str(error.get('message') or reason or 'refused'))}"
        text += f" (HTTP {status}{f', {printable(str(param))}' if (param := error.get('param')) else ''})"
        if (retry := headers.get("retry-after")) is not None:
            text += f"; try again in {retry} s" if retry.isdecimal() else f"; try again after {printable(retry)}"
        if status == 401 and self._api_key is None:
            text += "; --api-key or QUIRE_API_KEY sets a key"
        if error.get("code") == "context_length_exceeded":
            return ContextTooLong(text)
        if status == 429:
            return QueueFull(text)
        return InvalidRequest(text) if status in (400, 404, 413, 422) else ServerError(text)

    def _health(self) -> str:
        """The status in /health. Sent without the API key: the server is not known to be quire yet."""
        with self._connect("GET", "/health", self.headers(has_key=False)) as response:
            try:
                found = self.parse(self._body(response))
            except ServerError:
                found = None
            if response.status not in (200, 503) or not isinstance(found, dict) or found.get("server") != "quire":
                raise ServerNotFound(f"{self.url} answers, but is not a quire server")
        return "ok" if response.status == 200 else str(found.get("status"))

    @contextmanager
    def _open(self, method: str, path: str, body: Any = None) -> Iterator[httpcore.Response]:
        """A response with status 200. Others are raised."""
        data = None if body is None else json.dumps(body).encode()
        with self._connect(method, path, self.headers(has_body=data is not None), data) as response:
            if response.status != 200:
                try:
                    content = self._body(response)
                except ServerError:
                    content = b""
                reason = response.extensions.get("reason_phrase", b"").decode("ascii", "replace")
                raise self.refusal(response.status, reason, _headers(response), content)
            yield response

    @contextmanager
    def _connect(
        self, method: str, path: str, headers: dict[str, str], data: bytes | None = None
    ) -> Iterator[httpcore.Response]:
        """Send a request on a new connection. The response's body is still to be read."""
        import httpcore

        if data is not None:
            headers = {**headers, "content-length": str(len(data))}
        read_s = self.timeouts.read_s if data is None else STREAM_READ_S
        timeouts = {"connect": self.timeouts.connect_s, "write": read_s, "read": read_s}
        with httpcore.ConnectionPool(ssl_context=self._ssl_context()) as pool:
            with self._transport_errors("does not answer", ServerNotFound):
                host = (self._parts.hostname or "").encode("idna")
                name = f"[{host.decode()}]" if b":" in host else host.decode()  # httpcore omits the brackets
                name += "" if self._parts.port is None else f":{self._parts.port}"
                url = httpcore.URL(
                    scheme=self._parts.scheme.encode(),
                    host=host,
                    port=self._parts.port,
                    target=(self._parts.path + path).encode("ascii"),
                )
                response = pool.handle_request(
                    httpcore.Request(
                        method,
                        url,
                        headers=[("host", name), *headers.items()],
                        content=data,
                        extensions={"timeout": timeouts},
                    )
                )
            try:
                yield response
            finally:
                response.close()

    def _ssl_context(self) -> ssl.SSLContext | None:
        """Trust the certificate authorities of this system; httpcore would use those of certifi."""
        if self._parts.scheme != "https":
            return None
        import ssl

        found = ssl.create_default_context()
        if self._is_own:
            found.check_hostname, found.verify_mode = False, ssl.CERT_NONE
        return found

    @contextmanager
    def _transport_errors(self, what: str, kind: type[ServerError] = ServerError) -> Iterator[None]:
        import httpcore

        try:
            yield
        except httpcore.TimeoutException:
            raise kind(f"{self.url} {what}: it took too long") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, UnicodeError) as error:
            raise kind(f"{self.url} {what}: {_reason(error)}") from None

    def _chunks(self, response: httpcore.Response) -> Iterator[bytes]:
        with self._transport_errors("broke off the answer"):
            yield from response.iter_stream()

    def _body(self, response: httpcore.Response) -> bytes:
        found = bytearray()
        for chunk in self._chunks(response):
            found += chunk
            if len(found) > MAX_DOCUMENT_BYTES:
                raise ServerError(f"{self.url} sent more than {MAX_DOCUMENT_BYTES} bytes")
        return bytes(found)


def _headers(response: httpcore.Response) -> dict[str, str]:
    return {name.decode("ascii").lower(): value.decode("latin-1") for name, value in response.headers}


def _reason(error: Exception) -> str:
    """The message of an error, without error numbers and class names."""
    cause = error.args[0] if error.args else None  # httpcore wraps the error of the socket
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    text = printable(str(error))
    return "the connection ended" if text.startswith("peer closed connection") else text


# Server-sent events


def read_events(chunks: Iterable[bytes]) -> Iterator[str]:
    """The data of server-sent events, which may be cut anywhere. Comments and other fields are skipped.

    Raises OverflowError for an event of more than MAX_EVENT_BYTES.
    """
    data: list[str] = []
    for line in _read_lines(chunks):
        name, _, value = line.partition(":")
        if name == "data":
            data.append(value.removeprefix(" "))
            if sum(map(len, data)) > MAX_EVENT_BYTES:
                raise OverflowError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        elif not line and data:
            yield "\n".join(data)
            data = []


def _read_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    r"""Lines without their ends (\n, \r\n or \r). Characters after the last end are dropped."""
    decoder = IncrementalNewlineDecoder(getincrementaldecoder("utf-8-sig")("replace"), translate=True)
    rest = ""
    for chunk in chain(filter(None, chunks), (b"",)):
        *lines, rest = (rest + decoder.decode(chunk, final=not chunk)).split("\n")
        if len(rest) > MAX_EVENT_BYTES:
            raise OverflowError(f"a line of more than {MAX_EVENT_BYTES} bytes")
        yield from lines


def printable(text: str) -> str:
    """A server's text, safe to print: cut to MAX_MESSAGE_CHARS, control characters replaced by blanks."""
    return "".join(char if char.isprintable() else " " for char in text[:MAX_MESSAGE_CHARS])


STOP_S = 10.0  # after SIGTERM; then it is killed
NUM_TAIL_LINES = 10
KEPT_VARIABLES = ("QUIRE_CACHE",)  # the folder of models; other variables would set options of the server
# The comment names the process in a list of processes.
_SERVE = "from quire.cli.server_client import run_while_parent_lives as run; run()  # quire serve"


@dataclass(frozen=True, slots=True)
class ServerProcess:
    pid: int
    url: str
    num_threads: int


def check_installed(what: str = "the server of the fairness part") -> None:
    """Refuse a missing library of the server before anything is measured."""
    try:
        import quire.server.launcher  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("quire"):
            raise
        raise MissingExtra.of(what, error.name) from error


@contextmanager
def serving(model: str, options: Sequence[str], variables: Mapping[str, str] | None = None) -> Iterator[ServerProcess]:
    """Start a server and wait until it is ready. The last lines of its log are added to errors.

    `variables`: added to its environment, which other users of the machine cannot read, unlike options. The server has
    no state directory, so that it does not continue the batches of another server.
    """
    command = [sys.executable, "-c", _SERVE, "serve", model, "--host", "127.0.0.1", "--port", "0", *options]
    command += ["--state-dir", "none"]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("QUIRE_") or name in KEPT_VARIABLES
    } | dict(variables or {})
    with TemporaryFile("a+", encoding="utf-8", errors="replace") as log, _terminable():
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # ends with this process, even if it is killed
            stdout=subprocess.PIPE,
            stderr=log,
            encoding="utf-8",
            errors="replace",
            env=environment,
        )
        try:
            yield _wait_ready(process)
        except QuireError as error:
            if not (tail := _tail(log)):
                raise
            raise type(error)(f"{error}. The last lines of its log:\n{tail}") from error
        finally:
            _stop(process)


def run_while_parent_lives() -> None:
    """The `quire` command in a child process: its standard input is a pipe that ends with the parent."""
    from quire.cli.main import run

    def watch() -> None:
        while os.read(0, 4096):
            pass
        for _ in range(2):  # the second signal ends requests that are still open
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)

    threading.Thread(target=watch, daemon=True).start()
    run()


def _wait_ready(process: subprocess.Popen[str]) -> ServerProcess:
    """Wait for the line with the address. There is no time limit: a large model may load for minutes."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        url, computes = re.search(r" at (http://\S+)", text), re.search(r"^  computes .*$", text, re.MULTILINE)
        if url is not None and computes is not None:
            threads = re.search(r"(\d+) threads?$", computes[0])  # on a CPU only
            return ServerProcess(process.pid, url[1], int(threads[1]) if threads else 1)
    raise ServerError(f"`quire serve` did not start: it ended with exit code {process.wait()}")


def _tail(log: IO[str]) -> str:
    log.seek(0)
    return "\n".join(f"  {printable(line.rstrip())}" for line in log.readlines()[-NUM_TAIL_LINES:])


def _stop(process: subprocess.Popen[str]) -> None:
    """Stop the server, which stops its worker process."""
    try:
        process.terminate()
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also after a second Ctrl-C
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def _terminable() -> Iterator[None]:
    """Make SIGTERM raise an exception, so that the server is stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    raise SystemExit(128 + number)
