"""R20: no secret in logs, errors, metrics or process lists. R21: one guarded socket and no outgoing connection."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from quire.server.app import ENDPOINTS
from quire.server.routes import Access
from tests.gauntlet.figures import Figure, Gauntlet, Row, exactly
from tests.gauntlet.flood import family, idle_base, left_over
from tests.server import corpus
from tests.server.rig import Server, hooked, serving, status_of
from tests.server.test_access import OPEN, path_of
from tests.waiting import eventually

PROMPT = "prompt-canary-41c7"
FIELD = "field-canary-9d02"
KEY, OTHER_KEY = "sk-canary-5f1d0e77", "sk-other-00000001"
ENVIRONMENT = {"SOME_PASSWORD": "environment-canary-77aa", "HF_TOKEN": "hf_canary0123456789"}
SECRETS = (PROMPT, FIELD, KEY, *ENVIRONMENT.values())
TEXT_FIELDS = {"content", "text", "prompt", "input", "system", "instructions", "query", "suffix"}
REPORTED = (
    "/metrics",
    "/health",
    "/v1/watch?once=true",
    "/v1/cache/stats",
    "/v1/models",
    "/v1/requests",
    "/openapi.json",
)


# Requests that carry canaries


def variants(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Bodies with the canary as text, with a wrong type around it, and with too much of it."""
    filled = _filled(body)
    yield filled
    yield {**filled, "stream": True}
    yield {**filled, "temperature": -5, "top_p": 7}
    yield {**filled, "user": FIELD, "metadata": {"a": FIELD}, "unknown_field": FIELD}
    yield {**filled, "tools": [FIELD], "tool_choice": FIELD}
    yield {**filled, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": FIELD}}}
    for name in TEXT_FIELDS & body.keys():
        yield {**filled, name: {"text": PROMPT}}
        yield {**filled, name: [PROMPT, 1]}
        yield {**filled, name: PROMPT * 9000}
    if "messages" in body:
        for messages in (PROMPT, [PROMPT], [{"role": FIELD, "content": PROMPT}], [{"role": "user", "content": 5}]):
            yield {**filled, "messages": messages}
        yield {**filled, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": PROMPT}]}]}


def _filled(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _filled(one, key) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, name) for one in value]
    return f"{PROMPT} and more" if name in TEXT_FIELDS else value


def send_canaries(server: Server) -> list[str]:
    """Send requests with canaries. Returns the bodies of all refusals."""
    errors: list[str] = []
    for path, body in corpus.GOOD.items():
        for one in variants(body):
            for headers in ({}, {"authorization": f"Bearer {KEY}x"}):
                answer = server.post(path, one, headers=headers)
                if answer.status != 200:
                    errors.append(answer.body.decode())
    broken = b'{"messages": [{"role": "user", "content": "' + PROMPT.encode() + b'"}], "x"'
    errors.append(server.post(corpus.CHAT, data=broken).body.decode())
    server.get(f"/v1/models?key={KEY}&prompt={PROMPT}")
    server.get(f"/v1/{FIELD}?key={KEY}")
    return errors


def hits(text: str, secrets: Sequence[str] = SECRETS) -> int:
    return sum(text.count(secret) for secret in secrets)


def seen_by_others(server: Server) -> str:
    """The reports that another key can read while a request with a canary runs, and after its worker crashed."""
    other = {"authorization": f"Bearer {OTHER_KEY}"}
    body = {"messages": [{"role": "user", "content": f"{PROMPT} tell a long story"}], "max_tokens": 400}
    with server.begin({**body, "stream": True, "ignore_eos": True}):
        texts = [server.get(path, headers=other).body.decode() for path in REPORTED]
        os.kill(server.worker_pid, signal.SIGSEGV)
    eventually(lambda: server.chat().status == 200, "a new worker answers")
    texts += [server.get(path, headers=other).body.decode() for path in REPORTED]
    return "\n".join(texts)


def shown_to_others(server: Server) -> tuple[int, int]:
    """Secrets in the names and command lines of the server's processes, and API keys in the environment of children."""
    num_shown = num_keys = 0
    for process in family(server):
        with contextlib.suppress(psutil.NoSuchProcess):
            num_shown += hits(" ".join((process.name(), *process.cmdline())))
            is_child = process.pid != server.process.pid
            num_keys += hits("\n".join(process.environ().values()), (KEY, OTHER_KEY)) if is_child else 0
    return num_shown, num_keys


def secrets(gauntlet: Gauntlet) -> Sequence[Figure]:
    options = gauntlet.one_model()
    keys = ("--api-key", KEY, "--api-key", OTHER_KEY)
    with serving(*options, *keys, key=KEY, env=ENVIRONMENT) as server:
        server.chat(f"{PROMPT} hello")
        base = idle_base(server)
        errors = send_canaries(server)
        left = left_over(server, base, spare_files=8)
        num_shown, num_keys = shown_to_others(server)
        others = seen_by_others(server)
        metrics = server.get("/metrics").body.decode()
        server.stop()
        log = server.log
    with serving(*options, key=KEY, env={**ENVIRONMENT, "QUIRE_API_KEY": KEY}) as server:
        server.chat()
        from_environment, more_keys = shown_to_others(server)
    assert "SIGSEGV" in log, "the crash is not in the log"
    return [
        Figure("requests with canaries that were refused", len(errors), at_least=100),
        exactly("secrets in errors", sum(hits(text, (PROMPT, KEY, *ENVIRONMENT.values())) for text in errors)),
        exactly("secrets in logs, which include a crash", hits(log)),
        exactly("secrets in metrics", hits(metrics)),
        exactly("secrets in reports that another key can read", hits(others)),
        exactly("secrets in the process list, with keys as options", num_shown),
        exactly("secrets in the process list, with keys in the environment", from_environment),
        exactly("API keys in the environment of child processes", num_keys + more_keys),
        *left,
    ]


# R21: outgoing connections

HOOK = '''
"""Writes every use of the network by this process, and of one folder, to a file."""
import os, sys
_file = os.open(os.environ["GAUNTLET_AUDIT"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
_outside = os.environ["GAUNTLET_OUTSIDE"]
def _hook(event, args):
    if event in ("open", "os.listdir", "os.scandir") and _outside in str(args[0]):
        os.write(_file, f"open {args[0]}\\n".encode())
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request"):
        os.write(_file, (event + " " + repr(args[1] if event == "socket.connect" else args) + "\\n").encode())
sys.addaudithook(_hook)
'''


@contextlib.contextmanager
def audited(folder: Path, outside: Path = Path("/no folder")) -> Iterator[tuple[dict[str, str], Path]]:
    """An environment in which every Python process reports its use of the network and of a folder, and the report."""
    report = folder / "audit.txt"
    report.write_text("")
    yield hooked(folder / "hook", HOOK, GAUNTLET_AUDIT=str(report), GAUNTLET_OUTSIDE=str(outside)), report


@contextlib.contextmanager
def canary_site() -> Iterator[tuple[str, list[str]]]:
    """A web server that must get no request."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    site = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=site.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{site.server_port}", asked
    finally:
        site.shutdown()
        site.server_close()
        thread.join()


def ask_with_urls(server: Server, url: str) -> None:
    """Requests that name a URL in every place where another server would fetch it."""
    schema = {"type": "object", "properties": {"x": {"$ref": f"{url}/schema.json#/x"}}}
    picture = [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {"url": f"{url}/image.png"}}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"$ref": f"{url}/tool.json"}}}
    answer = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": picture}]},
        {"messages": [corpus.HI], "response_format": answer},
        {"messages": [corpus.HI], "tools": [tool]},
        {"messages": [corpus.HI], "model": f"{url}/model.gguf"},
        {"messages": [corpus.HI], "user": url, "metadata": {"url": url}},
    ]
    for body in bodies:
        server.post(corpus.CHAT, {**body, "max_tokens": 2})
    picture[1] = {"type": "input_image", "image_url": f"{url}/image.png"}
    server.post(corpus.RESPONSES, {"input": [{"role": "user", "content": picture}], "max_output_tokens": 2})
    source = {"type": "url", "url": f"{url}/image.png"}
    blocks = [{"type": "image", "source": source}, {"type": "document", "source": source}]
    server.post(corpus.MESSAGES, {"messages": [{"role": "user", "content": blocks}], "max_tokens": 2, "model": "tiny"})
    server.get("/v1/models", headers={"referer": url, "host": "localhost"})


# R21: access without a key


def raw_paths(path: str) -> list[str]:
    """Other ways to write a path. None of them may reach its handler without a key."""
    rest = path.lstrip("/")
    return [
        f"//{rest}", f"/v1/..{path}", f"/health/..{path}", f"/health/%2e%2e{path}", f"/./{rest}", f"{path}/",
        f"{path}%00", f"{path}%2f", f"{path};x=1", f"{path}?x=/health", f"{path}#/health", f"/%76{path[2:]}",
        path.upper(), path.replace("/", "\\"), f"http://localhost{path}", f"http://localhost/health?{path}",
        f"/health{path}", f"{path}/../../health", f"{path}.json", f"{path}//",
    ]  # fmt: skip


def raw_status(server: Server, method: str, target: str, hosts: Sequence[str] = ("localhost",)) -> int:
    head = "".join(f"host: {host}\r\n" for host in hosts)
    data = f"{method} {target} HTTP/1.1\r\n{head}connection: close\r\ncontent-length: 0\r\n\r\n".encode("latin-1")
    with contextlib.closing(socket.create_connection(server.address, timeout=60)) as sock:
        sock.sendall(data)
        received = b""
        while piece := sock.recv(65536):
            received += piece
    return status_of(received)


HOSTS = (("evil.example",), ("localhost/health?",), ("localhost", "localhost"), (), ("",), ("127.0.0.1:1",), ("[::1]",))


def without_a_key(server: Server, step: int) -> tuple[int, list[str]]:
    """Ask every route without a key, with odd paths and hosts. Returns the number of requests, and those answered.

    Other keys, methods and the paths of `TRICKS` are those of tests/server/test_access.py.
    """
    ways: list[tuple[str, str, Sequence[str], bool]] = []
    for endpoint in ENDPOINTS:
        path = path_of(endpoint)
        ways += [(method, other, ("localhost",), False) for other in raw_paths(path) for method in ("GET", "POST")]
        ways += [(endpoint.method, path, hosts, endpoint.access is Access.PUBLIC) for hosts in HOSTS]
    passed: list[str] = []
    for method, path, hosts, is_open in ways[::step]:
        status = raw_status(server, method, path, hosts)
        # 400: the bytes are no HTTP request, or the Host is missing or sent twice.
        is_public = is_open or _names_open(path, method)
        if status not in ((200, 401, 400, 404, 405) if is_public else (401, 400)):
            passed.append(f"{method} {path} ({hosts}): {status}")
    return len(ways[::step]), passed


def _names_open(target: str, method: str) -> bool:
    """Whether a request target is one of the public pages, written in another way that HTTP allows."""
    path = re.sub(r"^http://localhost", "", target).partition("?")[0].partition("#")[0]
    is_page = re.fullmatch(r"/page/[^/]+", path) is not None  # a public route: other names than its files are a 404
    return (path in OPEN or is_page) and method in ("GET", "HEAD")


def listening(server: Server) -> list[str]:
    """What the server's processes listen on: addresses, and paths of Unix sockets."""
    found: list[str] = []
    for process in family(server):
        found += [one.laddr.ip for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
        found += [one.laddr.ip for one in process.net_connections("udp")]
        found += [one.laddr for one in process.net_connections("unix") if one.laddr]
    return found


def attack_surface(gauntlet: Gauntlet) -> Sequence[Figure]:
    options = gauntlet.one_model()
    with audited(gauntlet.folder) as (env, report), canary_site() as (url, asked), serving(
        *options, "--api-key", KEY, key=KEY, env={**env, "HF_HUB_OFFLINE": ""}
    ) as server:  # fmt: skip
        ask_with_urls(server, url)  # starts the process that tries schemas
        base = idle_base(server)
        sockets = listening(server)
        num_asked, passed = without_a_key(server, gauntlet.size(1, 19))
        ask_with_urls(server, url)
        left = left_over(server, base, spare_files=8)
        calls = [line for line in report.read_text().splitlines() if not _is_own(line)]
    for line in (*passed[:10], *calls[:10]):
        gauntlet.say(line)
    return [
        exactly("sockets that it listens on", len(sockets), 1),
        exactly("sockets that are not on loopback", sum(ip not in ("127.0.0.1", "::1") for ip in sockets)),
        Figure("requests without a valid key", num_asked, at_least=gauntlet.size(2_000, 100)),
        exactly("requests without a valid key that were answered", len(passed)),
        exactly("outgoing connections", len(calls)),
        exactly("requests of the server to URLs that clients send", len(asked)),
        *left,
    ]


def _is_own(line: str) -> bool:
    """Whether a line of the report is the lookup of the address that the server listens on."""
    return line.startswith(("socket.getaddrinfo ('127.0.0.1'", "socket.getaddrinfo ('localhost'"))


ROWS: tuple[Row, ...] = (
    Row("R20", "Logs, errors, metrics, reports to other keys and process lists contain no secret", secrets, 300),
    Row(
        "R21",
        "The server has one socket, guards every route and opens no connection",
        attack_surface,
        300,
    ),
)
