"""Endpoints of `/v1/files` and `/v1/batches`. A key sees its own files and batches; an admin key sees all.

A multipart upload is written to disk as it arrives. `Sender` passes a request of a batch through the handlers of this
server, without a socket: the body passes the same parsing, limits and errors as one that arrives over HTTP.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.responses import FileResponse, Response
from starlette.types import Message, Scope

from quire.batch.runner import ENDPOINTS, ConnectionLost, Reply
from quire.server.batches.service import (
    COMPLETION_WINDOW,
    MAX_EXPIRY_S,
    MIN_EXPIRY_S,
    BatchesQuery,
    BatchList,
    BatchObject,
    BatchService,
    CreateBatchRequest,
    FileDeleted,
    FileList,
    FileObject,
    FilesQuery,
    Upload,
    new_file,
    storing,
)
from quire.server.errors import ApiError, Dialect, Kind
from quire.server.limits import Key
from quire.server.protocols import openai, responses
from quire.server.protocols.support import one_of
from quire.server.request_context import Handler, RequestContext, Served, answer

HANDLERS: dict[str, tuple[Handler, Dialect]] = {
    "/v1/chat/completions": (openai.chat_completions, openai.OPENAI),
    "/v1/completions": (openai.completions, openai.OPENAI),
    "/v1/responses": (responses.responses, responses.RESPONSES),
}
RETRIED = (429, 503)


class Sender:
    def __init__(self, served: Served) -> None:
        self._served = served

    @property
    def max_num_seqs(self) -> int:
        """Requests that the default model runs in one step."""
        facts = self._served.models.default.facts
        return 64 if facts is None else facts.capacity.max_num_seqs

    async def send(self, key: Key, url: str, body: bytes, request_id: str) -> Reply:
        """Answer one request as this key. Cancelling it cancels the generation."""
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            """Return the body once, then wait until it is cancelled."""
            if not messages:
                await asyncio.get_running_loop().create_future()
            return messages.pop()

        headers = [(b"content-length", str(len(body)).encode()), (b"x-request-id", request_id.encode())]
        scope: Scope = {
            "type": "http", "http_version": "1.1", "method": "POST", "path": url, "raw_path": url.encode(),
            "root_path": "", "scheme": "http", "query_string": b"", "headers": headers,
        }  # fmt: skip
        context = RequestContext(scope, receive, _refuse_send, self._served)
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


async def _refuse_send(message: Message) -> None:
    raise AssertionError(f"{message['type']} in a request that does not stream")


MAX_PARTS = 16
MAX_FIELD_BYTES = 4096  # of a part other than the file
MAX_NAME_CHARS = 255
MAX_SHOWN_CHARS = 80  # of a value in an error
FLUSH_BYTES = 1 << 20  # a thread writes chunks of this size


class UploadParser:
    """Parses the form: the part `file` is written to the upload, the other parts are short texts in `fields`.

    The library limits each part to 8 headers of 4 KiB.
    """

    def __init__(self, content_type: str, upload: Upload) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 70:
            raise ApiError(Kind.INVALID, "content-type is not multipart/form-data with a boundary")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None  # None: no part `file` so far
        self.is_complete = False
        self._upload = upload
        self._num_parts = 0
        self._name = ""
        self._header = b""
        self._headers: dict[bytes, bytes] = {}
        self._value = b""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._part_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise ApiError(Kind.INVALID, f"the body is not multipart/form-data: {error}"[:200]) from None

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise ApiError(Kind.INVALID, f"the form has more than {MAX_PARTS} parts")
        self._headers, self._header, self._value, self._name = {}, b"", b"", ""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header, self._value = b"", b""

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name != "file":
            return
        if self.filename is not None:
            raise ApiError(Kind.INVALID, "file is in the form twice", param="file")
        if b"filename" not in options:
            raise ApiError(Kind.INVALID, "file is not a file: its part has no filename", param="file")
        self.filename = plain_name(options.get(b"filename", b"").decode("utf-8", "replace"))

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._upload.write(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise ApiError(Kind.INVALID, f"{self._name[:80]!r} has more than {MAX_FIELD_BYTES} bytes")

    def _end_part(self) -> None:
        if self._name != "file":
            self.fields[self._name[:80]] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self.is_complete = True


def plain_name(name: str) -> str:
    """A file name for display, without folders and control characters. It is never used as a path."""
    last = re.split(r"[/\\]", name)[-1]
    return "".join(char for char in last if char.isprintable())[:MAX_NAME_CHARS] or "upload.jsonl"


async def receive_upload(chunks: AsyncIterator[bytes], content_type: str, upload: Upload) -> UploadParser:
    """Read a form to its end and write its content to disk."""
    parser = UploadParser(content_type, upload)
    waiting = bytearray()
    async for chunk in chunks:
        waiting += chunk
        if len(waiting) >= FLUSH_BYTES:
            await asyncio.to_thread(parser.feed, bytes(waiting))
            waiting.clear()
    await asyncio.to_thread(parser.feed, bytes(waiting))
    if not parser.is_complete:
        raise ApiError(Kind.INVALID, "the form ends before its last boundary")
    if parser.filename is None:
        raise ApiError(Kind.INVALID, "file is missing", param="file")
    await asyncio.to_thread(upload.finish)
    return parser


def expiry_s(fields: dict[str, str], low_s: int, high_s: int) -> int:
    """The lifetime in `expires_after[seconds]`; the maximum if it is not given."""
    text = fields.get("expires_after[seconds]")
    if text is None:
        return high_s
    seconds = int(text) if re.fullmatch(r"[0-9]{1,12}", text) else -1
    if not low_s <= seconds <= high_s:
        message = f"expires_after.seconds = {_shown(text)} is not a whole number from {low_s} to {high_s}"
        raise ApiError(Kind.INVALID, message, param="expires_after")
    if (anchor := fields.get("expires_after[anchor]", "created_at")) != "created_at":
        raise ApiError(
            Kind.INVALID, f"expires_after.anchor = {_shown(anchor)} is not created_at", param="expires_after"
        )
    return seconds


def _shown(text: str) -> str:
    """A value for an error: its beginning, and its length if it is cut."""
    return repr(text) if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]!r}... ({len(text)} characters)"


FORM_BYTES = 64 << 10  # of a form, in addition to its file


async def _open(context: RequestContext) -> BatchService:
    if context.served.batches is None:
        raise ApiError(Kind.NOT_FOUND, "this server stores no files: it was started with --state-dir none")
    await context.served.batches.open()
    return context.served.batches


# Files


async def upload_file(context: RequestContext) -> Response:
    content_type = context.request.headers.get("content-type", "")
    if not content_type.lower().startswith("multipart/form-data"):
        raise ApiError(Kind.INVALID, "content-type is not multipart/form-data: a file is uploaded as a form")
    store = (await _open(context)).store
    announced = int(context.length) - FORM_BYTES if context.length.isdigit() else 0
    with storing("the file"), closing(store.begin_upload(context.key, announced)) as upload:
        chunks = context.chunks(store.max_file_bytes + FORM_BYTES)
        form = await receive_upload(chunks, content_type, upload)
        purpose = form.fields.get("purpose")
        if purpose != "batch":
            text = "purpose is missing" if purpose is None else f"purpose = {purpose!r:.80} is not batch"
            raise ApiError(Kind.INVALID, f"{text}: only files for batches are stored", param="purpose")
        ttl_s = expiry_s(form.fields, MIN_EXPIRY_S, MAX_EXPIRY_S)
        facts = new_file(form.filename or "", upload.num_bytes, "batch", ttl_s)
        return context.json(await store.add_file(context.key.owner, upload.path, facts))


async def list_files(context: RequestContext) -> Response:
    query = context.query(FilesQuery)
    found = (await _open(context)).store.list_files(context.key)
    if query.purpose is not None:
        found = [one for one in found if one.purpose == query.purpose]
    if query.order == "asc":
        found.reverse()
    return context.json(FileList(**_page(found, query.after, query.limit)))


async def get_file(context: RequestContext) -> Response:
    store = (await _open(context)).store
    return context.json(store.find_file(context.request.path_params["file_id"], context.key))


async def file_content(context: RequestContext) -> Response:
    store = (await _open(context)).store
    found = store.find_file(context.request.path_params["file_id"], context.key)
    headers = {**context.headers, "x-content-type-options": "nosniff"}
    path = store.content(found.id)
    return FileResponse(path, headers=headers, media_type="application/octet-stream", filename=found.filename)


async def delete_file(context: RequestContext) -> Response:
    store = (await _open(context)).store
    found = store.find_file(context.request.path_params["file_id"], context.key)
    await store.delete_file(found.id)
    return context.json(FileDeleted(found.id))


# Batches


async def create_batch(context: RequestContext) -> Response:
    body = await context.body(CreateBatchRequest)
    one_of("endpoint", body.endpoint, ENDPOINTS)
    if body.completion_window != COMPLETION_WINDOW:
        text = f"completion_window = {body.completion_window!r:.80} is not {COMPLETION_WINDOW}"
        raise ApiError(Kind.INVALID, text, param="completion_window")
    batches = await _open(context)
    source = batches.store.find_file(body.input_file_id, context.key, "input_file_id")
    if source.purpose != "batch":
        text = f"input_file_id = {source.id!r} has the purpose {source.purpose}, not batch"
        raise ApiError(Kind.INVALID, text, param="input_file_id")
    with storing("the batch"):
        return context.json(await batches.create(body, context.key))


async def list_batches(context: RequestContext) -> Response:
    query = context.query(BatchesQuery)
    found = (await _open(context)).store.list_batches(context.key)
    return context.json(BatchList(**_page(found, query.after, query.limit)))


async def get_batch(context: RequestContext) -> Response:
    store = (await _open(context)).store
    return context.json(store.find_batch(context.request.path_params["batch_id"], context.key).batch)


async def cancel_batch(context: RequestContext) -> Response:
    batches = await _open(context)
    stored = batches.store.find_batch(context.request.path_params["batch_id"], context.key)
    with storing("the batch"):
        return context.json(await batches.cancel(stored))


def _page(found: Sequence[FileObject | BatchObject], after: str | None, limit: int) -> dict[str, Any]:
    """The fields of one page of a list: the entries that follow `after`."""
    ids = [one.id for one in found]
    if after is not None and after not in ids:
        raise ApiError(Kind.INVALID, f"after = {after!r:.80} is not in the list", param="after")
    start = 0 if after is None else ids.index(after) + 1
    page = found[start : start + limit]
    ends = (page[0].id, page[-1].id) if page else (None, None)
    return {"data": page, "has_more": start + limit < len(found), "first_id": ends[0], "last_id": ends[1]}
