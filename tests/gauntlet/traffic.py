"""Mixed traffic for R6 and R32: requests of every kind on keep-alive connections, and their outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tests.server.rig import Reply, read_reply, request_bytes

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
WORDS = ("the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with")


@dataclass(frozen=True)
class Kind:
    """One kind of request: the expected statuses, and whether the client disconnects before the end."""

    name: str
    make: Callable[[str], tuple[str, dict[str, Any]]]
    statuses: tuple[int, ...] = (200,)
    is_cancelled: bool = False
    has_key: bool = True
    method: str = "POST"


def messages(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


def schema(text: str) -> dict[str, Any]:
    name = f"name_{len(text) % 8}"  # eight schemas
    wanted = {"type": "object", "properties": {name: {"type": "boolean"}}, "additionalProperties": False}
    return messages(text, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": wanted}})


PLAIN = (
    Kind("chat", lambda text: (CHAT, messages(text))),
    Kind("completion", lambda text: (COMPLETIONS, {"prompt": text, "max_tokens": 4})),
    Kind("stream", lambda text: (CHAT, messages(text, stream=True))),
    Kind("cancelled", lambda text: (CHAT, messages(text, stream=True, max_tokens=500)), is_cancelled=True),
    Kind("structured", lambda text: (CHAT, schema(text))),
    Kind("tools", lambda text: (CHAT, messages(text, tools=[TOOL]))),
    Kind("messages", lambda text: (MESSAGES, messages(text, model="claude-x", stream=True))),
    Kind("responses", lambda text: (RESPONSES, {"input": text, "max_output_tokens": 4, "stream": True})),
    Kind("embeddings", lambda text: ("/v1/embeddings", {"input": text}), (200, 404)),
)
WRONG = (
    Kind("image", lambda text: (CHAT, {"messages": [{"role": "user", "content": [*IMAGE]}], "user": text}), (400,)),
    Kind("400", lambda text: (CHAT, messages(text, temperature=-1)), (400,)),
    Kind("401", lambda text: (CHAT, messages(text)), (401,), has_key=False),
    Kind("404", lambda text: (f"/v1/{text[:8].replace(' ', '-')}", {}), (404,)),
    Kind("no model", lambda text: (CHAT, messages(text, model=f"none-{text[:8]}")), (404,)),
    Kind("unknown field", lambda text: (CHAT, messages("Hi", max_tokens=1, **{f"f{hash(text) % 10**6}": 1}))),
)


class Tally(Counter[str]):
    """The outcomes of all requests, by name."""

    def take(self, kind: Kind, reply: Reply) -> None:
        self["ended"] += 1
        if reply.status >= 500:
            self["answers with 5xx"] += 1
        elif reply.status == 429:
            self["refused"] += 1
        elif not kind.is_cancelled and (not reply.is_whole or reply.ending == "broken"):
            self["answers lost or incomplete"] += 1
        elif reply.status not in kind.statuses:
            self[f"unexpected: {kind.name} {reply.status}"] += 1

    def faults(self) -> dict[str, float]:
        return {
            "answers with 5xx": self["answers with 5xx"],
            "answers lost or incomplete": self["answers lost or incomplete"] + self["sent"] - self["ended"],
            "answers with an unexpected status": sum(self[name] for name in self if name.startswith("unexpected")),
        }


def sentence(chosen: random.Random) -> str:
    return " ".join(chosen.choices(WORDS, k=chosen.randrange(4, 24)))


class Target(Protocol):
    """What a client needs of a server."""

    @property
    def address(self) -> tuple[str, int]: ...
    @property
    def key(self) -> str | None: ...


class Client:
    """One client with a keep-alive connection, which is opened again after a cancelled or refused request."""

    def __init__(self, server: Target, chosen: random.Random, tally: Tally) -> None:
        self._server = server
        self._random = chosen
        self._tally = tally
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, kind: Kind) -> Reply:
        path, body = kind.make(sentence(self._random))
        self._tally["sent"] += 1
        if self._streams is not None and self._streams[0].at_eof():
            self.close()  # the server has closed a connection that was idle for long
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._server.address, limit=1 << 22)
        reader, writer = self._streams
        writer.write(request_bytes(path, body, key=self._server.key if kind.has_key else None, method=kind.method))
        if kind.is_cancelled:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n\r\n")
                await reader.read(self._random.randrange(1, 400))
            self.close()
            reply = Reply(200, {}, b"", False)
        else:
            reply = await read_reply(reader)
        if not reply.is_whole or reply.headers.get("connection") == "close":
            self.close()
        self._tally.take(kind, reply)
        return reply

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None
