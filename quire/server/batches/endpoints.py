"""Endpoints of `/v1/files` and `/v1/batches`. A key sees its own files and batches; an admin key sees all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TypeVar

from starlette.responses import FileResponse, Response

from quire.batch.lines import ENDPOINTS
from quire.server.batches.service import BatchService
from quire.server.batches.store import new_file, storing
from quire.server.batches.types import (
    COMPLETION_WINDOW,
    MAX_EXPIRY_S,
    MIN_EXPIRY_S,
    BatchesQuery,
    BatchList,
    BatchObject,
    CreateBatchRequest,
    FileDeleted,
    FileList,
    FileObject,
    FilesQuery,
)
from quire.server.batches.upload import expiry_s, receive_upload
from quire.server.errors import ApiError, Kind
from quire.server.observability.watch_endpoints import parse_query
from quire.server.request_context import RequestContext

FORM_BYTES = 64 << 10  # of a form, in addition to its file

Listed = TypeVar("Listed", FileObject, BatchObject)


async def _open(context: RequestContext) -> BatchService:
    if context.batches is None:
        raise ApiError(Kind.NOT_FOUND, "this server stores no files: it was started with --state-dir none")
    await context.batches.open()
    return context.batches


# Files


async def upload_file(context: RequestContext) -> Response:
    content_type = context.request.headers.get("content-type", "")
    if not content_type.lower().startswith("multipart/form-data"):
        raise ApiError(Kind.INVALID, "content-type is not multipart/form-data: a file is uploaded as a form")
    batches = await _open(context)
    store = batches.store
    with batches.uploading(context.key):
        length = context.request.headers.get("content-length", "0")
        announced = int(length) - FORM_BYTES if length.isdigit() else 0
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
    query = parse_query(context, FilesQuery)
    found = (await _open(context)).store.list_files(context.key)
    if query.purpose is not None:
        found = [one for one in found if one.purpose == query.purpose]
    if query.order == "asc":
        found.reverse()
    page, has_more = _page(found, query.after, query.limit)
    first, last = _ends(page)
    return context.json(FileList(data=page, has_more=has_more, first_id=first, last_id=last))


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
    if body.endpoint not in ENDPOINTS:
        text = f"endpoint = {body.endpoint!r:.80} is not one of {', '.join(ENDPOINTS)}"
        raise ApiError(Kind.INVALID, text, param="endpoint")
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
    query = parse_query(context, BatchesQuery)
    page, has_more = _page((await _open(context)).store.list_batches(context.key), query.after, query.limit)
    first, last = _ends(page)
    return context.json(BatchList(data=page, has_more=has_more, first_id=first, last_id=last))


async def get_batch(context: RequestContext) -> Response:
    store = (await _open(context)).store
    return context.json(store.find_batch(context.request.path_params["batch_id"], context.key).batch)


async def cancel_batch(context: RequestContext) -> Response:
    batches = await _open(context)
    stored = batches.store.find_batch(context.request.path_params["batch_id"], context.key)
    with storing("the batch"):
        return context.json(await batches.cancel(stored))


def _page(found: Sequence[Listed], after: str | None, limit: int) -> tuple[list[Listed], bool]:
    """One page of a list: the entries that follow `after`, and whether there are more."""
    start = 0
    if after is not None:
        at = next((number for number, one in enumerate(found) if one.id == after), None)
        if at is None:
            raise ApiError(Kind.INVALID, f"after = {after!r:.80} is not in the list", param="after")
        start = at + 1
    return list(found[start : start + limit]), start + limit < len(found)


def _ends(page: Sequence[Listed]) -> tuple[str | None, str | None]:
    return (page[0].id, page[-1].id) if page else (None, None)
