"""Bodies and answers of `/v1/files` and `/v1/batches`, as OpenAI defines them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from quire.batch.lines import ENDPOINTS

MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 30 * 86_400
MAX_METADATA = 16
COMPLETION_WINDOW = "24h"
WINDOW_S = 86_400
MAX_LISTED_FILES, MAX_LISTED_BATCHES = 10_000, 100

Purpose = Literal["batch", "batch_output"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")
_Id = Annotated[str, Meta(max_length=64)]


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"
    status_details: str | None = None


class FileList(msgspec.Struct, kw_only=True):
    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class FileDeleted(msgspec.Struct):
    id: str
    deleted: bool = True
    object: Literal["file"] = "file"


class UploadForm(msgspec.Struct):
    """The parts of a multipart upload."""

    file: Annotated[bytes, Meta(description="JSONL, one request per line.")]
    purpose: Annotated[Literal["batch"], Meta(description="The purpose of the file. Only batch is supported.")]


class FilesQuery(msgspec.Struct, frozen=True):
    after: Annotated[_Id | None, Meta(description="List the files that follow this one.")] = None
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED_FILES)] = MAX_LISTED_FILES
    order: Literal["asc", "desc"] = "desc"
    purpose: Annotated[_Id | None, Meta(description="Only files of this purpose.")] = None


class BatchesQuery(msgspec.Struct, frozen=True):
    after: Annotated[_Id | None, Meta(description="List the batches that follow this one.")] = None
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED_BATCHES)] = 20


class ExpiresAfter(msgspec.Struct):
    seconds: Annotated[int, Meta(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)]
    anchor: Literal["created_at"] = "created_at"


class CreateBatchRequest(msgspec.Struct, kw_only=True):
    input_file_id: Annotated[_Id, Meta(description="An uploaded file of the purpose batch.")]
    endpoint: Annotated[
        str,
        Meta(description="The URL that every line of the file has.", extra_json_schema={"enum": list(ENDPOINTS)}),
    ]
    completion_window: Annotated[
        str,
        Meta(description="Requests that have not run by then expire.", extra_json_schema={"enum": [COMPLETION_WINDOW]}),
    ]
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=MAX_METADATA, description="Returned with the batch."),
        ]
        | None
    ) = None
    output_expires_after: Annotated[
        ExpiresAfter | None, Meta(description="How long the output files are kept; 30 days by default.")
    ] = None


class BatchError(msgspec.Struct):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct):
    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Status
    created_at: int
    expires_at: int
    object: Literal["batch"] = "batch"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None


class BatchList(msgspec.Struct, kw_only=True):
    data: list[BatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"
