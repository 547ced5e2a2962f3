"""`quire ps` and `quire cancel` with a scripted server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cli.main import app
from tests.cli.scripted import NAME, Reply, ScriptedServer, document, refusal

REQUEST: dict[str, Any] = {
    "id": "req_1",
    "model": NAME,
    "key": "alice",
    "endpoint": "/v1/chat/completions",
    "state": "running",
    "priority": "high",
    "is_streaming": True,
    "age_s": 12.3,
    "num_samples": 1,
    "max_tokens": 256,
    "prompt_tokens": 120,
    "cached_tokens": 96,
    "completion_tokens": 20,
}
LOADING = {**REQUEST, "id": "req_2", "state": "loading", "prompt_tokens": None, "cached_tokens": 0, "max_tokens": None}


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        server.replies["/v1/requests"] = [document({"object": "list", "data": [REQUEST, LOADING]})]
        yield server


def run(server: ScriptedServer, *arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments, "--server", server.url])


def test_ps_lists_models_and_below_them_requests(server: ScriptedServer) -> None:
    lines = [line.split() for line in run(server, "ps").stdout.splitlines()]
    assert lines[0] == ["name", "aliases", "state", "memory", "context"]
    assert lines[1][0] == NAME
    assert lines[2] == []
    assert lines[3] == ["request", "model", "key", "state", "priority", "age", "prompt", "answer"]
    assert lines[4] == [
        "req_1",
        NAME,
        *["alice", "running", "high", "12", "s", "120,", "96", "cached", "20", "of", "256"],
    ]
    assert lines[5] == ["req_2", NAME, *["alice", "loading", "high", "12", "s", "20"]]


def test_ps_can_list_requests_alone(server: ScriptedServer) -> None:
    assert run(server, "ps", "--requests").stdout.startswith("request ")
    assert json.loads(run(server, "ps", "--requests", "--json").stdout) == [REQUEST, LOADING]
    assert [entry["id"] for entry in json.loads(run(server, "ps", "--json").stdout)] == [NAME]
    server.replies["/v1/requests"] = [document({"object": "list", "data": []})]
    assert run(server, "ps", "--requests").stdout == "no request is running\n"
    assert "request" not in run(server, "ps").stdout


@pytest.mark.parametrize("reply", [document([]), document({"data": [3]}), document({})])
def test_a_malformed_list_of_requests_is_an_error(server: ScriptedServer, reply: Reply) -> None:
    server.replies["/v1/requests"] = [reply]
    assert f"{server.url} sent a malformed list of requests: " in str(run(server, "ps").exception)


def test_models_are_loaded_unloaded_and_pinned(server: ScriptedServer) -> None:
    ready = {"model": NAME, "state": "ready", "is_pinned": True, "max_model_len": 2048, "full_model_len": 8192}
    note = ", with 2,048 tokens of context instead of 8,192: its KV cache is too small for more"
    for arguments, answer, text, body in (
        (("load",), ready, f"{NAME} is ready, pinned{note}", {}),
        (("load",), {**ready, "max_model_len": 8192, "is_pinned": False}, f"{NAME} is ready", {}),
        (("pin",), {**ready, "state": "unloaded"}, f"{NAME} is unloaded, pinned", {}),
        (("unpin",), {"model": NAME, "state": "loading"}, f"{NAME} is loading", {}),
        (("unload",), {"model": NAME, "state": "unloaded"}, f"{NAME} is unloaded", {"force": False}),
        (("unload", "--force"), {"model": NAME, "state": "unloaded"}, f"{NAME} is unloaded", {"force": True}),
    ):
        server.replies[f"/v1/models/{arguments[0]}"] = [document(answer)]
        assert run(server, *arguments, NAME).stdout == f"{text}\n"
        assert server.posted()[-1] == {"model": NAME, **body}
    server.replies["/v1/models/load"] = [document({"model": NAME})]
    assert "sent no model state" in str(run(server, "load", NAME).exception)


def test_cancel(server: ScriptedServer) -> None:
    server.replies["/v1/requests/req_1/cancel"] = [document({"id": "req_1", "cancelled": 1})]
    assert run(server, "cancel", "req_1").stdout == "req_1 is cancelled\n"
    server.replies["/v1/requests/a%2Fb/cancel"] = [document({"id": "a/b", "cancelled": 2})]
    assert run(server, "cancel", "a/b").stdout == "a/b is cancelled (2 requests)\n"
    message = "id = 'x' is not a request in progress; GET /v1/requests lists them"
    server.replies["/v1/requests/x/cancel"] = [refusal(404, message, "id", "request_not_found")]
    assert str(run(server, "cancel", "x").exception) == f"{server.url}: {message} (HTTP 404, id)"
    server.replies["/v1/requests/y/cancel"] = [document({"id": "y"})]
    assert "sent no number of cancelled requests" in str(run(server, "cancel", "y").exception)
