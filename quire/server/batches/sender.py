"""Sends a request of a batch through the handlers of this server, without a socket.

The body passes the same parsing, limits and errors as one that arrives over HTTP.
"""

from __future__ import annotations

import asyncio

from starlette.responses import Response
from starlette.types import Message, Scope

from quire.batch.results import Reply
from quire.batch.runner import ConnectionLost
from quire.server.auth import Key
from quire.server.errors import Dialect
from quire.server.models import Models
from quire.server.observability.watch import Watch
from quire.server.protocols.openai import chat, completions, responses
from quire.server.protocols.openai.encoding import OPENAI, RESPONSES
from quire.server.request_context import Handler, RequestContext, RequestLimits, answer

HANDLERS: dict[str, tuple[Handler, Dialect]] = {
    "/v1/chat/completions": (chat.chat_completions, OPENAI),
    "/v1/completions": (completions.completions, OPENAI),
    "/v1/responses": (responses.responses, RESPONSES),
}
RETRIED = (429, 503)


class Sender:
    def __init__(self, models: Models, watch: Watch, limits: RequestLimits) -> None:
        self._models = models
        self._watch = watch
        self._limits = limits

    @property
    def max_num_seqs(self) -> int:
        """Requests that the default model runs in one step."""
        facts = self._models.default.facts
        return 64 if facts is None else facts.capacity.max_num_seqs

    async def send(self, key: Key, url: str, body: bytes, request_id: str) -> Reply:
        """Answer one request as this key. Cancelling it cancels the generation."""
        context = RequestContext(
            _scope(url, body, request_id), _Body(body), _refuse_send,
            models=self._models, watch=self._watch, limits=self._limits,
        )  # fmt: skip
        handler, context.dialect = HANDLERS[url]
        context.endpoint, context.key = url, key

        async def handle(context: RequestContext) -> Response:
            context.models.check_open(key)
            return await handler(context)

        try:
            response = await answer(context, handle)
        finally:
            await context.finish()
        if response is None:
            raise ConnectionLost("the request was dropped")
        after = response.headers.get("retry-after", "")
        is_retried = response.status_code in RETRIED and response.headers.get("x-should-retry") == "true"
        return Reply(
            status=response.status_code,
            request_id=context.request_id,
            body=bytes(response.body),
            retry_after_s=float(after) if after.isdecimal() else None,
            may_retry=is_retried,
        )


class _Body:
    """The ASGI `receive` function: returns the body once, then waits until it is cancelled."""

    def __init__(self, data: bytes) -> None:
        self._data: bytes | None = data

    async def __call__(self) -> Message:
        if self._data is None:
            await asyncio.get_running_loop().create_future()
        data, self._data = self._data, None
        return {"type": "http.request", "body": data, "more_body": False}


async def _refuse_send(message: Message) -> None:
    raise AssertionError(f"{message['type']} in a request that does not stream")


def _scope(url: str, data: bytes, request_id: str) -> Scope:
    headers = [(b"content-length", str(len(data)).encode()), (b"x-request-id", request_id.encode())]
    return {
        "type": "http", "http_version": "1.1", "method": "POST", "path": url, "raw_path": url.encode(),
        "root_path": "", "scheme": "http", "query_string": b"", "headers": headers,
    }  # fmt: skip
