"""404 responses name the endpoint that was probably meant, in the client's protocol."""

from __future__ import annotations

import re
from typing import Any

import pytest

from quire.server.app import ENDPOINTS
from quire.server.routes import BASES, UNSERVED, advice, find_meant, why_unserved
from tests.server.rig import Server

MEANT = {
    "/chat/completions": "/v1/chat/completions",
    "/v1/v1/chat/completions": "/v1/chat/completions",
    "/v1/chat/completions/": "/v1/chat/completions",
    "//v1//chat/completions": "/v1/chat/completions",
    "/V1/Chat/Completions": "/v1/chat/completions",
    "/api/v1/chat/completions": "/v1/chat/completions",
    "/api/chat/completions": "/v1/chat/completions",
    "/openai/v1/chat/completions": "/v1/chat/completions",
    "/v1/chat/completion": "/v1/chat/completions",
    "/v1/chat": "/v1/chat/completions",
    "/chat": "/api/chat",
    "/v1/api/chat": "/api/chat",
    "/api/api/tags": "/api/tags",
    "/api/chat/": "/api/chat",
    "/api/chats": "/api/chat",
    "/messages": "/v1/messages",
    "/v1/v1/messages": "/v1/messages",
    "/anthropic/v1/messages": "/v1/messages",
    "/messages/count_tokens": "/v1/messages/count_tokens",
    "/completions": "/v1/completions",
    "/completion": "/v1/completions",
    "/responses": "/v1/responses",
    "/models": "/v1/models",
    "/v1/model": "/v1/models",
    "/models/some/name": "/v1/models/{model:path}",
    "/v1/tokenize": "/tokenize",
    "/v1/health": "/health",
    "/health/": "/health",
}


@pytest.mark.parametrize("path", MEANT)
def test_a_nearly_right_path_gets_a_hint(path: str) -> None:
    found = find_meant(path, ENDPOINTS)
    assert found is not None
    assert found.path == MEANT[path]


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/", "/api", "/nothing", "/v1/cache", "/wp-login.php", "/" + "a" * 10_000]
)
def test_other_paths_get_no_hint(path: str) -> None:
    assert find_meant(path, ENDPOINTS) is None
    assert advice(path, None) == "/docs lists all endpoints"


def test_a_wrong_base_url_is_explained_and_a_typo_is_not() -> None:
    chat = next(one for one in ENDPOINTS if one.path == "/v1/chat/completions")
    assert advice("/chat/completions", chat) == f"did you mean POST /v1/chat/completions? {BASES['openai']}"
    assert advice("/v1/chat/completions/", chat) == "did you mean POST /v1/chat/completions?"
    assert {row.tag for row in ENDPOINTS} > set(BASES)


def test_unserved_paths_of_other_servers_are_explained() -> None:
    for path in (
        "/v1/embeddings",
        "/embeddings",
        "/api/embed",
        "/v1/audio/speech",
        "/v1/messages/batches/x",
        "/api/blobs/a",
    ):
        assert why_unserved(path) is not None
    cores = {row.path.removeprefix("/v1/").removeprefix("/api/") for row in ENDPOINTS}
    assert not cores & set(UNSERVED)  # a new endpoint removes its row
    assert not any(why_unserved(row.path) for row in ENDPOINTS)


HI = [{"role": "user", "content": "Hi"}]
NAMELESS = {"model": "", "messages": HI, "stream": False, "options": {"num_predict": 1}}
NOT_STORED = "it is not served: this server does not store such objects"
ONLY_POST = "GET is not allowed for this path: use POST"
CLAUDE = "/v1/models/claude-sonnet-4-5"
# What clients and newcomers send, and the status and parts of the answer, in the protocol of the client.
ANSWERS: list[tuple[str, str, Any, int, tuple[str, ...]]] = [
    (
        "POST",
        "/chat/completions",
        {},
        404,
        ('{"error":{"message":', "did you mean POST /v1/chat/completions?", '"code":"unknown_url"'),
    ),
    ("POST", "/messages", {}, 404, ('{"type":"error","error":{"type":"not_found_error"',)),
    ("POST", "/api/embed", {"model": "tiny", "input": "Hi"}, 404, ('{"error":"', "no embeddings")),
    ("GET", "/api/nothing", None, 404, ('{"error":"', "/docs")),
    ("GET", "/v1/models/", None, 404, ("there is nothing at '/v1/models/'; did you mean GET /v1/models?",)),
    ("GET", "/v1/responses/resp_1", None, 404, (NOT_STORED,)),
    ("GET", "/v1/responses/resp_1/input_items", None, 404, (NOT_STORED,)),
    ("GET", "/v1/chat/completions/chatcmpl-1", None, 404, (NOT_STORED,)),
    ("POST", "/v1/messages/batches", {}, 404, ('{"type":"error"', NOT_STORED)),
    ("POST", "/v1/chat/completions", NAMELESS, 200, ()),
    ("POST", "/v1/messages", NAMELESS | {"max_tokens": 1}, 200, ()),
    ("POST", "/api/chat", NAMELESS, 200, ()),
    ("GET", CLAUDE, None, 404, ('"code":"model_not_found"', "is not served here; /v1/messages uses tiny for it")),
    (
        "POST",
        "/v1/chat/completions",
        {"messages": HI, "max_tokens": -2},
        400,
        ('"max_tokens = -2 is not at least 1 or -1 (no limit)"',),
    ),
    ("GET", "/v1/chat/completions", None, 405, (ONLY_POST,)),
    ("GET", "/api/chat", None, 405, (f'{{"error":"{ONLY_POST}"}}',)),
    ("HEAD", "/", None, 200, ()),
    ("HEAD", "/api/version", None, 200, ()),
    ("HEAD", "/api/tags", None, 200, ()),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "words"), ANSWERS, ids=lambda value: str(value)[:40])
def test_an_answer(
    plain_server: Server, method: str, path: str, body: Any, status: int, words: tuple[str, ...]
) -> None:
    answer = plain_server.ask(method, path, body)
    assert answer.status == status
    assert not [word for word in words if word not in answer.body.decode()], answer.body


def test_a_header_tells_the_protocol(plain_server: Server) -> None:
    sent = {"anthropic-version": "2023-06-01"}
    assert plain_server.post("/nothing", {}, headers=sent).json["error"]["type"] == "not_found_error"
    found = plain_server.get(CLAUDE, headers=sent)
    assert (found.status, found.json["id"], found.json["alias_of"]) == (200, "claude-sonnet-4-5", "tiny")


def test_a_prompt_that_is_too_long_says_what_to_do(plain_server: Server) -> None:
    for num_words, text in (
        (
            5000,
            r"messages of \d+ tokens does not fit: this model's maximum context length is 4096 tokens, the answer"
            r" included; shorten it, or serve a model with a longer context",
        ),
        (50_000, ".*250000 characters cannot fit the context of 4096 tokens: shorten it, or serve a model.*"),
    ):
        body = {"messages": [{"role": "user", "content": "word " * num_words}]}
        message = plain_server.post("/v1/chat/completions", body).json["error"]["message"]
        assert re.fullmatch(text, message), message
