"""A server with scripted replies: a small part of the API, with all its possible errors."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any, Self

NAME = "smollm2-135m-instruct"
HEALTHY = {"status": "ok", "server": "quire", "version": "0"}


@dataclass
class Reply:
    status: int = 200
    body: Iterable[bytes] = ()  # chunks
    headers: dict[str, str] = field(default_factory=dict)
    is_cut: bool = False  # close the connection before the end


@dataclass(frozen=True)
class Asked:
    path: str
    headers: dict[str, str]
    body: Any


class HttpThread:
    """An HTTP server in a thread."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class ScriptedServer(HttpThread):
    """Replies of each path, in order. The last one is repeated."""

    def __init__(self) -> None:
        models = [{"id": NAME, "object": "model", "owned_by": "quire", "max_model_len": 60, "root": NAME}]
        self.replies = {
            "/health": [document(HEALTHY)],
            "/v1/models": [document({"object": "list", "data": models})],
        }
        self.asked: list[Asked] = []
        self.was_closed = threading.Event()  # the client closed the connection during an answer
        super().__init__(_handler(self))

    def answers(self, *replies: Reply) -> None:
        """Set the replies to prompts and conversations."""
        self.replies["/v1/chat/completions"] = list(replies)
        self.replies["/v1/completions"] = list(replies)

    def posted(self) -> list[Any]:
        return [asked.body for asked in self.asked if asked.body is not None]

    def next(self, asked: Asked) -> Reply:
        self.asked.append(asked)
        waiting = self.replies.get(asked.path, [refusal(404, "no such path")])
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]


def _handler(script: ScriptedServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def log_message(self, *_: object) -> None: ...

        def _answer(self, body: Any) -> None:
            reply = script.next(Asked(self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self.close_connection = True
            try:
                for chunk in reply.body:
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
                    self.wfile.flush()
                if not reply.is_cut:
                    self.wfile.write(b"0\r\n\r\n")
            except OSError:
                script.was_closed.set()

    return Handler


# Replies


def document(content: Any, status: int = 200, **headers: str) -> Reply:
    return Reply(status, [json.dumps(content).encode()], {"content-type": "application/json", **headers})


def refusal(status: int, message: str, param: str | None = None, code: str | None = None, **headers: str) -> Reply:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return document({"error": error}, status, **{name.replace("_", "-"): value for name, value in headers.items()})


def stream(*events: Any, is_cut: bool = False) -> Reply:
    """An event stream. Values are sent as JSON, bytes unchanged."""
    return Reply(200, [event(one) for one in events], {"content-type": "text/event-stream; charset=utf-8"}, is_cut)


def event(content: Any) -> bytes:
    return content if isinstance(content, bytes) else f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def choice(text: str, index: int = 0, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"index": index, "delta": {"content": text}, "finish_reason": finish, **more}


def chunk(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "x", "object": "chat.completion.chunk", "choices": list(choices), "usage": None, **more}


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    explanation: dict[str, Any] = {"matched_tokens": cached, "matched_blocks": cached // 32, "prompt_tokens": prompt}
    explanation |= {"stopped_at": cached, "reason": "not_found", "message": "no cached prompt continues from here"}
    return chunk(usage={**counts, "prompt_tokens_details": {"cached_tokens": cached}}, cache=explanation)


def said(text: str, finish: str = "stop") -> Reply:
    """A complete answer to a conversation, word by word."""
    words = text.split(" ")
    pieces = [word if number == 0 else f" {word}" for number, word in enumerate(words)]
    role = chunk({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
    ending = chunk(choice("", 0, finish, stop_reason=None))
    return stream(role, *(chunk(choice(piece)) for piece in pieces), ending, usage(7, len(words) + 1, 3), DONE)


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """A chunk with other fields than content."""
    return chunk({"index": 0, "delta": fields, "finish_reason": finish})


def endless(text: str) -> Reply:
    """An answer without end."""
    body = (event(chunk(choice(f"{text}{number} "))) for number in count())
    return Reply(200, body, {"content-type": "text/event-stream"})
