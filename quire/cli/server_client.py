"""HTTP client for a quire server: which address to use, requests, errors and event streams.

Every response is checked. A response that does not follow the API raises `ServerError` with the server's URL.

Also a private `quire serve` process on a free port, for `quire batch`, which stops it when it ends.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, Any
from urllib.parse import urlsplit

from quire.cli.http_stream import (
    STREAM_READ_S,
    HttpStream,
    RefusedRequest,
    ServerError,
    ServerNotFound,
    Timeouts,
    malformed,
    parse,
    printable,
    value_of,
)
from quire.cli.terminal import echo
from quire.errors import ContextTooLong, InvalidRequest, MissingExtra, QueueFull, QuireError
from quire.version import __version__
from quire.weights.hub import find_known

DEFAULT_URL = "http://127.0.0.1:8000"
WAIT_S = 60.0  # for a server that is still loading
POLL_S = 0.25


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


def chosen_key(api_key: str | None) -> str | None:
    keys = [api_key] if api_key else os.environ.get("QUIRE_API_KEY", "").split()  # `quire serve` may have several
    return keys[0] if keys else None


def note(text: str) -> None:
    """Print a remark to stderr if it is a terminal."""
    if sys.stderr.isatty():
        echo(f"[{text}]", err=True)


# Requests


class ServerClient:
    """Sends requests to one server, each on its own connection."""

    def __init__(self, url: str, api_key: str | None, timeouts: Timeouts, *, is_own: bool = False) -> None:
        self.url = url
        self.timeouts = timeouts
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
        found = self.fetch(path)
        entries = found.get("data") if isinstance(found, dict) else None
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise malformed(self.url, f"a malformed list of {what}", found)
        return entries

    def find_model(self, wanted: str | None) -> tuple[str, int]:
        """The name of the model on the server and its context length. None selects the first model."""
        models: dict[str, int] = {}
        for entry in self.entries("/v1/models", "models"):
            name, size = entry.get("id"), entry.get("max_model_len")
            if not isinstance(name, str) or not name.isprintable() or type(size) is not int:
                raise malformed(self.url, "a model without id or max_model_len", entry)
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

    def fetch(self, path: str, body: Any = None) -> Any:
        """The JSON document of the response to a request, with a body a POST."""
        with self.sent(path, body) as stream:
            return parse(self.url, stream.read())

    @contextmanager
    def sent(self, path: str, body: Any = None) -> Iterator[HttpStream]:
        """A request, with a body a POST, whose refusal is an error. Leaving the block cancels it."""
        stream = self.stream(path, body)
        try:
            yield stream
        except RefusedRequest as error:
            raise self._refusal(error) from None
        finally:
            stream.cut()

    def stream(self, path: str, body: Any = None, *, has_key: bool = True) -> HttpStream:
        headers = {"user-agent": f"quire/{__version__}"}
        if has_key and self._api_key is not None:
            headers["authorization"] = f"Bearer {self._api_key}"
        timeouts = self.timeouts
        if body is not None:
            timeouts = Timeouts(timeouts.connect_s, max(timeouts.read_s, STREAM_READ_S))
        return HttpStream(self.url, path, body, headers, timeouts=timeouts, is_own=self._is_own)

    def _refusal(self, refused: RefusedRequest) -> QuireError:
        """The error for a response that is not 200: the server's message, the status, the field, when to retry."""
        found = value_of(refused.body)
        detail = found.get("error") if isinstance(found, dict) else None
        error: dict[str, Any] = detail if isinstance(detail, dict) else {}
        text = f"{self.url}: {printable(str(error.get('message') or refused.reason or 'refused'))}"
        text += f" (HTTP {refused.status}{f', {printable(str(param))}' if (param := error.get('param')) else ''})"
        if (retry := refused.headers.get("retry-after")) is not None:
            text += f"; try again in {retry} s" if retry.isdecimal() else f"; try again after {printable(retry)}"
        if refused.status == 401 and self._api_key is None:
            text += "; --api-key or QUIRE_API_KEY sets a key"
        if error.get("code") == "context_length_exceeded":
            return ContextTooLong(text)
        if refused.status == 429:
            return QueueFull(text)
        return InvalidRequest(text) if refused.status in (400, 404, 413, 422) else ServerError(text)

    def _health(self) -> str:
        """The status in /health. Sent without the API key: the server is not known to be quire yet."""
        try:
            found = value_of(self.stream("/health", has_key=False).read())
        except RefusedRequest as error:
            found = value_of(error.body) if error.status == 503 else None
        except ServerNotFound:
            raise
        except ServerError:
            found = None
        if not isinstance(found, dict) or found.get("server") != "quire":
            raise ServerNotFound(f"{self.url} answers, but is not a quire server")
        return str(found.get("status"))


STOP_S = 10.0  # after SIGTERM; then it is killed
NUM_TAIL_LINES = 10
KEPT_VARIABLES = ("QUIRE_CACHE",)  # the folder of models; other variables would set options of the server
# The comment names the process in a list of processes.
_SERVE = "from quire.cli.server_client import run_while_parent_lives as run; run()  # quire serve"


@dataclass(frozen=True, slots=True)
class ServerProcess:
    pid: int
    url: str


def check_installed(what: str) -> None:
    """Refuse a missing library of the server before a model is loaded."""
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
    with (
        TemporaryFile("a+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # ends with this process, even if it is killed
            stdout=subprocess.PIPE,
            stderr=log,
            encoding="utf-8",
            errors="replace",
            env=environment,
        ) as process,
    ):
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
    for line in process.stdout:
        if (url := re.search(r" at (http://\S+)$", line)) is not None:
            return ServerProcess(process.pid, url[1])
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
