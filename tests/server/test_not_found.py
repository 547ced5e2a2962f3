"""404 responses name the endpoint that was probably meant, in the client's protocol."""

from __future__ import annotations

import re

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


@pytest.fixture(scope="module")
def server(plain_server: Server) -> Server:
    return plain_server


def test_each_protocol_gets_its_own_error_format(server: Server) -> None:
    openai = server.post("/chat/completions", {})
    assert openai.status == 404
    assert openai.json["error"]["code"] == "unknown_url"
    assert "did you mean POST /v1/chat/completions?" in openai.json["error"]["message"]
    for anthropic in (server.post("/messages", {}), server.post("/nothing", {}, headers={"anthropic-version": "1"})):
        assert (anthropic.status, anthropic.json["error"]["type"]) == (404, "not_found_error")
    ollama = server.post("/api/embed", {"model": "tiny", "input": "Hi"})
    assert ollama.status == 404
    assert "no embeddings" in ollama.json["error"]
    assert "/docs" in server.get("/api/nothing").json["error"]


def test_what_a_newcomer_typed(server: Server) -> None:
    listed = server.get("/v1/models/")
    assert listed.status == 404
    assert listed.json["error"]["message"] == "there is nothing at '/v1/models/'; did you mean GET /v1/models?"
    for path in ("/v1/responses/resp_1", "/v1/responses/resp_1/input_items", "/v1/chat/completions/chatcmpl-1"):
        assert "it is not served: this server does not store such objects" in server.get(path).json["error"]["message"]
    batches = server.post("/v1/messages/batches", {})
    assert batches.json["type"] == "error"
    assert "this server does not store such objects" in batches.json["error"]["message"]
    hi = [{"role": "user", "content": "Hi"}]
    for path, more in (("/v1/chat/completions", {}), ("/v1/messages", {"max_tokens": 1}), ("/api/chat", {})):
        body = {"model": "", "messages": hi, "stream": False, "options": {"num_predict": 1}}
        assert server.post(path, body | more).status == 200, path


def test_a_model_of_anthropics_is_found_where_it_is_answered(server: Server) -> None:
    found = server.get("/v1/models/claude-sonnet-4-5", headers={"anthropic-version": "2023-06-01"})
    assert (found.status, found.json["id"], found.json["alias_of"]) == (200, "claude-sonnet-4-5", "tiny")
    other = server.get("/v1/models/claude-sonnet-4-5")
    assert (other.status, other.json["error"]["code"]) == (404, "model_not_found")
    assert other.json["error"]["message"].endswith("is not served here; /v1/messages uses tiny for it")


def test_a_limit_that_is_none_names_the_way_to_have_none(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": -2}
    message = server.post("/v1/chat/completions", body).json["error"]["message"]
    assert message == "max_tokens = -2 is not at least 1 or -1 (no limit)"


def test_a_prompt_that_is_too_long_says_what_to_do(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "word " * 5000}]}
    message = server.post("/v1/chat/completions", body).json["error"]["message"]
    assert re.fullmatch(
        r"messages of \d+ tokens does not fit: this model's maximum context length is 4096 tokens, the answer included;"
        r" shorten it, or serve a model with a longer context",
        message,
    ), message
    body = {"messages": [{"role": "user", "content": "word " * 50000}]}
    message = server.post("/v1/chat/completions", body).json["error"]["message"]
    assert "250000 characters cannot fit the context of 4096 tokens: shorten it, or serve a model" in message


def test_a_wrong_method_gets_the_allowed_ones(server: Server) -> None:
    answer = server.get("/v1/chat/completions")
    assert answer.status == 405
    assert answer.json["error"]["message"] == "GET is not allowed for this path: use POST"
    assert server.get("/api/chat").json == {"error": "GET is not allowed for this path: use POST"}


def test_head_requests_of_clients_that_probe_the_server(server: Server) -> None:
    assert server.ask("HEAD", "/").status == 200
    assert server.ask("HEAD", "/api/version").status == 200
    assert server.ask("HEAD", "/api/tags").status == 200
