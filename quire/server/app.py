"""The route table and the ASGI application. Every request passes the host, origin, key and limit checks here."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from urllib.parse import SplitResult, urlsplit

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server import admin, cache, catalog, web
from quire.server import tokenization as tokens
from quire.server.batches import endpoints as batches
from quire.server.batches import service as stored
from quire.server.errors import ApiError, Dialect, Kind
from quire.server.limits import KeyRing, address_of, is_loopback, presented
from quire.server.protocols import anthropic, ollama, openai, responses
from quire.server.protocols.anthropic import ANTHROPIC
from quire.server.protocols.ollama import OLLAMA
from quire.server.protocols.openai import OPENAI
from quire.server.request_context import RequestContext, Served, answer, build_decoders
from quire.server.routes import Access, Endpoint, advice, find_meant, openapi_document, why_unserved
from quire.server.watch import HeldAnswer, WatchSnapshot
from quire.version import __version__

_ANTHROPIC_PATH = re.compile(r"(?:/anthropic)?(?:/v1)*/(?:messages|complete)(?:/|$)")  # served or not
PRIVATE_DOMAINS = (".local", ".lan", ".internal", ".home.arpa", ".localdomain")  # not in public DNS


async def openapi_json(context: RequestContext) -> Response:
    body = await context.run(partial(_openapi_bytes, context.models.default.name), is_slow=True)
    return Response(body, 200, context.headers, "application/json")


@lru_cache(maxsize=4)
def _openapi_bytes(model: str) -> bytes:
    return msgspec.json.encode(openapi_document(ENDPOINTS, __version__, model=model))


async def docs(context: RequestContext) -> Response:
    return HTMLResponse(web.DOCS, headers={**context.headers, **web.DOCS_HEADERS})


ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "POST", "/v1/chat/completions", openai.chat_completions, "Answer a conversation.",
        openai.ChatCompletionRequest, openai.ChatCompletion, streams=True, generates=True, tag="openai",
    ),
    Endpoint(
        "POST", "/v1/completions", openai.completions, "Continue text or token ids.",
        openai.CompletionRequest, openai.Completion, streams=True, generates=True, tag="openai",
    ),
    Endpoint(
        "POST", "/v1/responses", responses.responses,
        "Answer a conversation (OpenAI Responses API). Nothing is stored.",
        responses.ResponsesRequest, responses.ResponseObject, responses.RESPONSES, streams=True, generates=True,
        tag="openai",
    ),
    Endpoint(
        "GET", "/v1/models", catalog.list_models, "List the models of this server.",
        answer=openai.ModelList, tag="openai",
    ),
    Endpoint(
        "POST", "/v1/models/load", admin.load, "Load a model now.",
        admin.LoadRequest, admin.ModelStatus, access=Access.ADMIN, tag="models",
    ),
    Endpoint(
        "POST", "/v1/models/unload", admin.unload, "Unload a model after its requests have ended.",
        admin.UnloadRequest, admin.ModelStatus, access=Access.ADMIN, tag="models",
    ),
    Endpoint(
        "POST", "/v1/models/pin", admin.pin, "Keep a model loaded when another needs memory. Loads nothing.",
        admin.PinRequest, admin.ModelStatus, access=Access.ADMIN, tag="models",
    ),
    Endpoint(
        "POST", "/v1/models/unpin", partial(admin.pin, is_pinned=False),
        "Allow a model to be unloaded when another needs memory.",
        admin.PinRequest, admin.ModelStatus, access=Access.ADMIN, tag="models",
    ),
    Endpoint(
        "GET", "/v1/models/{model:path}", catalog.get_model, "Show one model.",
        answer=openai.Model, tag="openai",
    ),
    Endpoint(
        "POST", "/v1/files", batches.upload_file, "Upload the requests of a batch, as JSONL.",
        answer=stored.FileObject, tag="batches", form=stored.UploadForm,
    ),
    Endpoint(
        "GET", "/v1/files", batches.list_files, "List the files of this key.",
        answer=stored.FileList, tag="batches", query=stored.FilesQuery,
    ),
    Endpoint(
        "GET", "/v1/files/{file_id}", batches.get_file, "Describe a file.", answer=stored.FileObject, tag="batches",
    ),
    Endpoint(
        "DELETE", "/v1/files/{file_id}", batches.delete_file, "Delete a file.",
        answer=stored.FileDeleted, tag="batches",
    ),
    Endpoint("GET", "/v1/files/{file_id}/content", batches.file_content, "Download a file.", tag="batches"),
    Endpoint(
        "POST", "/v1/batches", batches.create_batch, "Run the requests of a file, at low priority.",
        stored.CreateBatchRequest, stored.BatchObject, tag="batches",
    ),
    Endpoint(
        "GET", "/v1/batches", batches.list_batches, "List the batches of this key.",
        answer=stored.BatchList, tag="batches", query=stored.BatchesQuery,
    ),
    Endpoint(
        "GET", "/v1/batches/{batch_id}", batches.get_batch, "Describe a batch.",
        answer=stored.BatchObject, tag="batches",
    ),
    Endpoint(
        "POST", "/v1/batches/{batch_id}/cancel", batches.cancel_batch, "Cancel a batch. Its results are kept.",
        answer=stored.BatchObject, tag="batches",
    ),
    Endpoint(
        "POST", "/v1/messages", anthropic.messages, "Answer a conversation (Anthropic Messages API).",
        anthropic.MessagesRequest, anthropic.MessageResponse, ANTHROPIC, streams=True, generates=True, tag="anthropic",
    ),
    Endpoint(
        "POST", "/v1/messages/count_tokens", anthropic.count_tokens, "Count the tokens of a conversation.",
        anthropic.CountTokensRequest, anthropic.TokenCount, ANTHROPIC, tag="anthropic",
    ),
    Endpoint(
        "POST", "/api/chat", ollama.chat, "Answer a conversation (Ollama API).",
        ollama.OllamaChatRequest, ollama.OllamaChatAnswer, OLLAMA, streams=True, generates=True, tag="ollama",
    ),
    Endpoint(
        "POST", "/api/generate", ollama.generate, "Answer a question, or continue a raw prompt.",
        ollama.OllamaGenerateRequest, ollama.OllamaGenerateAnswer, OLLAMA, streams=True, generates=True, tag="ollama",
    ),
    Endpoint(
        "GET", "/api/tags", catalog.tags, "List the models of this server.",
        answer=ollama.ListedModels, dialect=OLLAMA, tag="ollama",
    ),
    Endpoint(
        "POST", "/api/show", catalog.show, "Describe a model.",
        ollama.ShowRequest, ollama.ShownModel, OLLAMA, tag="ollama",
    ),
    Endpoint(
        "GET", "/api/ps", catalog.ps, "List the loaded models.",
        answer=ollama.LoadedModels, dialect=OLLAMA, tag="ollama",
    ),
    Endpoint(
        "GET", "/api/version", catalog.version, "The Ollama API version that this server implements.",
        answer=ollama.OllamaVersion, dialect=OLLAMA, tag="ollama",
    ),
    Endpoint(
        "POST", "/api/pull", catalog.pull_model, "Download a model to this machine's disk.",
        ollama.PullRequest, ollama.PullProgress, OLLAMA, access=Access.ADMIN, streams=True, tag="ollama",
    ),
    Endpoint(
        "POST", "/v1/cache/explain", cache.explain, "How much of a prompt is cached, and why not more.",
        cache.ExplainRequest, cache.Explanation, tag="cache",
    ),
    Endpoint(
        "GET", "/v1/cache/stats", cache.stats, "Counts of the block pool and the prefix cache.",
        answer=cache.CacheStatsView, tag="cache", query=cache.ModelQuery,
    ),
    Endpoint(
        "POST", "/v1/cache/clear", cache.clear, "Clear the prefix cache and remove all pins.",
        answer=cache.Cleared, access=Access.ADMIN, tag="cache", query=cache.ModelQuery,
    ),
    Endpoint(
        "GET", "/v1/requests", admin.list_requests,
        "The requests in progress: all of them for an admin key, its own for any other.",
        answer=admin.RequestList, tag="requests",
    ),
    Endpoint(
        "POST", "/v1/requests/{request_id}/cancel", admin.cancel_request,
        "Cancel a request in progress: any for an admin key, its own for any other.",
        answer=admin.CancelledRequest, tag="requests",
    ),
    Endpoint(
        "POST", "/tokenize", tokens.tokenize, "Token ids of text or messages.", tokens.TokenizeRequest, tokens.Tokens,
    ),
    Endpoint(
        "POST", "/detokenize", tokens.detokenize, "Text of token ids.",
        tokens.DetokenizeRequest, tokens.DetokenizedText,
    ),
    Endpoint(
        "GET", "/tokenizer_info", tokens.tokenizer_info, "Special tokens and chat template of a model.",
        answer=tokens.TokenizerInfo, query=cache.ModelQuery,
    ),
    Endpoint(
        "GET", "/health", admin.health, "Whether the engine makes progress.",
        answer=admin.Health, access=Access.PUBLIC,
    ),
    Endpoint("GET", "/ready", admin.ready, "Whether the server accepts requests.", answer=admin.Health),
    Endpoint(
        "GET", "/version", admin.version, "Version of quire, and the backend of a model.",
        answer=admin.Version, query=cache.ModelQuery,
    ),
    Endpoint("GET", "/metrics", admin.metrics, "Metrics in Prometheus text format."),
    Endpoint("GET", "/openapi.json", openapi_json, "This API as an OpenAPI document."),
    Endpoint("GET", "/docs", docs, "This API as a web page.", access=Access.PUBLIC),
    Endpoint(
        "GET", "/v1/watch", admin.watch, "Stream the server's state, twice a second. The web page shows it.",
        answer=WatchSnapshot, streams=True, query=admin.WatchQuery,
    ),
    Endpoint(
        "GET", "/v1/watch/held", admin.watch_held, "List the blocks that a request holds.",
        answer=HeldAnswer, query=admin.HeldQuery,
    ),
    Endpoint("GET", "/", web.page_file, "The web page.", access=Access.PUBLIC),
    Endpoint("GET", "/page/{name}", web.page_file, "A file of the web page.", access=Access.PUBLIC),
)  # fmt: skip

# Answers too: /openapi.json uses their type information in a thread.
build_decoders(*{kind for row in ENDPOINTS for kind in (row.body, row.query, row.form, row.answer) if kind is not None})


@dataclass(frozen=True, slots=True)
class Gate:
    """Checks the host, the origin and the API key of a request."""

    keys: KeyRing
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # in addition to loopback names; checked only without keys
    is_local: bool = True  # only this machine can reach it; else IP addresses and private names are allowed too

    def check(self, context: RequestContext, access: Access) -> None:
        headers = context.request.headers
        num_hosts = len(headers.getlist("host"))
        if num_hosts > 1 or (num_hosts == 0 and context.request.scope["http_version"] != "1.0"):
            raise ApiError(Kind.INVALID, f"the Host header appears {num_hosts} times, not once")
        self._check_browser(headers.get("host", ""), headers.get("origin"))
        if access is Access.PUBLIC:
            return
        secrets = presented(context.request.scope["headers"])
        found = [self.keys.find(secret) for secret in secrets or ("",)]
        key = next((key for key in found if key is not None), None)
        if key is None:
            text = "this API key is unknown" if secrets else "no API key was sent"
            raise ApiError(Kind.AUTHENTICATION, f"{text}: send Authorization: Bearer KEY, or x-api-key: KEY")
        context.key = key  # set before a refusal, so that the log names the key
        if access is Access.ADMIN and not key.is_admin:
            raise ApiError(Kind.PERMISSION, f"the key {key.name!r} is not an admin key")

    def _check_browser(self, host: str, origin: str | None) -> None:
        """Refuse requests of foreign web pages that are open in a browser on this machine."""
        is_foreign = origin is not None and (not host or _split(origin).netloc != host)
        if is_foreign and not {"*", origin} & {*self.allowed_origins}:
            text = f"requests from the origin {origin!r:.80} are not allowed; see --allowed-origins"
            raise ApiError(Kind.PERMISSION, text, reason="origin")
        name = _split(f"//{host}").hostname or ""
        is_here = not name or name.endswith(".localhost") or is_loopback(name)
        is_known = is_here or (not self.is_local and _is_private(name))
        if not self.keys and not {"*", name} & {*self.allowed_hosts} and not is_known:
            text = f"Host = {host!r:.80} is not a name of this machine, and no API key is set: "
            hint = f"start the server with --allowed-hosts {name:.80}, or with --api-key"
            raise ApiError(Kind.PERMISSION, text + hint, reason="host")


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("//unknown.invalid")


def _is_private(name: str) -> bool:
    """Whether a host name is an IP address, this machine's own name, or a name that public DNS does not resolve.

    Other names are refused because of DNS rebinding: the owner of a public name can make it resolve to a server behind
    a visitor's firewall, and a web page of that name can then send requests to the server.
    """
    is_own = name == socket.gethostname().lower()
    return is_own or "." not in name.rstrip(".") or name.endswith(PRIVATE_DOMAINS) or address_of(name) is not None


class Path:
    """All methods of one path, as an ASGI application."""

    def __init__(self, endpoints: Sequence[Endpoint], served: Served, gate: Gate) -> None:
        self._endpoints = {endpoint.method: endpoint for endpoint in endpoints}
        if "GET" in self._endpoints:
            self._endpoints.setdefault("HEAD", self._endpoints["GET"])
        self._first = endpoints[0]
        self._served = served
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = RequestContext(scope, receive, send, self._served)
        endpoint = self._endpoints.get(scope["method"])
        call.endpoint = self._first.path  # the route, not the requested path: it is a metrics label
        call.dialect = self._dialect(call)
        try:
            response = await answer(call, partial(self._handle, endpoint))
            if response is not None:
                await response(scope, receive, send)
        finally:
            await call.finish()

    def _dialect(self, context: RequestContext) -> Dialect:
        """The route's protocol, or the client's on routes that several protocols share."""
        if self._first.dialect is OLLAMA or context.request.scope["path"].startswith("/api/"):
            return OLLAMA
        is_anthropic = "anthropic-version" in context.request.headers
        is_anthropic |= _ANTHROPIC_PATH.match(context.request.scope["path"]) is not None
        return ANTHROPIC if is_anthropic else self._first.dialect

    async def _handle(self, endpoint: Endpoint | None, context: RequestContext) -> Response:
        self._gate.check(context, Access.USER if endpoint is None else endpoint.access)
        if endpoint is None:
            context.headers["allow"] = allowed = ", ".join(sorted(self._endpoints))
            raise ApiError(Kind.METHOD, f"{context.request.method} is not allowed for this path: use {allowed}")
        if endpoint.generates:
            context.models.check_open(context.key)
        return await endpoint.handler(context)


async def not_found(context: RequestContext) -> Response:
    path = context.request.scope["path"]
    meant = None if why_unserved(path) else find_meant(path, ENDPOINTS)
    if meant is not None and context.dialect is OPENAI:
        context.dialect = meant.dialect
    raise ApiError(Kind.NOT_FOUND, f"there is no endpoint {path!r:.200}; {advice(path, meant)}")


def make_app(served: Served, gate: Gate) -> ASGIApp:
    paths: dict[str, list[Endpoint]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, []).append(endpoint)
    routes = [Route(path, Path(rows, served, gate)) for path, rows in paths.items()]
    methods = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT")
    fallback = Path([Endpoint(method, "*", not_found, "") for method in methods], served, gate)
    app: ASGIApp = Router(routes, redirect_slashes=False, default=fallback)
    if gate.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=gate.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[
                "x-request-id",
                "request-id",
                "x-quire-ignored-fields",
                "x-quire-unenforced",
                "retry-after",
            ],
        )
    return app
