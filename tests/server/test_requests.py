"""`GET /v1/requests` and `POST /v1/requests/{id}/cancel` over a real socket, on the fake backend."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.rig import FAKE, Answer, Server, close_sockets, serving
from tests.tiny import write_tiny_model
from tests.waiting import eventually, paused

ALICE, BOB, ROOT = "sk-alice-0000001", "sk-bob-000000001", "sk-root-00000001"
SLOW = ("--device", "20ms")  # a step of the fake backend: an answer of 3,000 tokens takes a minute
CHAT, MESSAGES, RESPONSES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"
HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 3000, "ignore_eos": True, "stream": True},
    MESSAGES: {"model": "tiny", "messages": HI, "max_tokens": 3000, "stream": True},
    RESPONSES: {"input": "Hi", "max_output_tokens": 3000, "stream": True},
    OLLAMA: {"model": "tiny", "messages": HI, "options": {"num_predict": 3000}},
}


def as_key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keyless(tiny_model: Path) -> Iterator[Server]:
    with serving(str(tiny_model), *FAKE, *SLOW) as server:
        yield server


@pytest.fixture(scope="module")
def locked(tiny_model: Path) -> Iterator[Server]:
    keys = ("--api-key", ALICE, "--api-key", BOB, "--admin-api-key", ROOT)
    with serving(str(tiny_model), *FAKE, *SLOW, *keys, key=ROOT) as server:
        yield server


def listed(server: Server, key: str | None = None) -> list[Any]:
    answer = server.get("/v1/requests", headers=None if key is None else as_key(key))
    assert answer.status == 200
    assert answer.json["object"] == "list"
    found: list[Any] = answer.json["data"]
    return found


def wait_listed(server: Server, state: str, count: int = 1) -> list[Any]:
    def found() -> list[Any] | None:
        entries = [one for one in listed(server) if one["state"] == state]
        return entries if len(entries) == count else None

    return eventually(found, f"{count} requests are {state}") or []


def cancel(server: Server, request_id: str, key: str | None = None) -> Answer:
    return server.post(f"/v1/requests/{request_id}/cancel", headers=None if key is None else as_key(key))


def rest_of(stream: Any) -> bytes:
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += (piece := stream.recv(65536))
        assert piece, data[-300:]
    return data


def test_an_idle_server_lists_nothing(keyless: Server) -> None:
    keyless.wait_free()
    assert listed(keyless) == []


@pytest.mark.parametrize(
    ("path", "ending"),
    [
        (CHAT, b'data: {"error":{"message":"the request was cancelled by an admin","type":"request_cancelled",'),
        (MESSAGES, b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"the request was can'),
        (RESPONSES, b"event: response.failed\n"),
        (OLLAMA, b'{"error":"the request was cancelled by an admin"}\n'),
    ],
)
def test_a_cancelled_stream_ends_with_an_error_of_its_protocol(keyless: Server, path: str, ending: bytes) -> None:
    stream = keyless.begin(BODIES[path], path)
    (found,) = wait_listed(keyless, "running")
    assert (found["endpoint"], found["key"], found["priority"], found["model"]) == (path, "local", "normal", "tiny")
    assert (found["is_streaming"], found["num_samples"], found["max_tokens"]) == (True, 1, 3000)
    assert found["prompt_tokens"] > 0
    answer = cancel(keyless, found["id"])
    assert (answer.status, answer.json) == (200, {"id": found["id"], "cancelled": 1})
    data = rest_of(stream)
    assert ending in data
    assert b"the request was cancelled by an admin" in data
    keyless.wait_free()
    keyless.wait_for(f"request_id={found['id']} .*finish=cancelled error=cancelled")
    assert listed(keyless) == []


def test_a_whole_answer_that_is_cancelled_has_a_status_of_its_own(keyless: Server) -> None:
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(keyless.post, CHAT, {**BODIES[CHAT], "stream": False, "n": 2})
        (found,) = wait_listed(keyless, "running")
        assert found["num_samples"] == 2
        assert cancel(keyless, found["id"]).json["cancelled"] == 1
        answer = asking.result()
    assert (answer.status, answer.headers["x-should-retry"]) == (499, "false")
    error = answer.json["error"]
    assert (error["code"], error["message"]) == ("request_cancelled", "the request was cancelled by an admin")
    keyless.wait_free()


def test_a_request_that_waits_is_cancelled_too(keyless: Server) -> None:
    with paused(keyless.worker_pid), ThreadPoolExecutor() as pool:
        asking = pool.submit(keyless.chat)
        (found,) = wait_listed(keyless, "waiting")
        assert (found["completion_tokens"], found["cached_tokens"]) == (0, 0)
        assert cancel(keyless, found["id"]).json["cancelled"] == 1
        assert asking.result().status == 499  # before the worker goes on
    keyless.wait_free()


def test_a_request_that_waits_for_its_model_is_cancelled_too(tmp_path: Path) -> None:
    paths = [str(write_tiny_model(tmp_path / name, seed=seed)) for seed, name in enumerate("ab")]
    with serving(*paths, *FAKE, *SLOW, "--memory", "9M") as server, ThreadPoolExecutor() as pool:
        server.begin(BODIES[CHAT])  # keeps the memory of a
        asking = pool.submit(server.chat, model="b")
        (found,) = wait_listed(server, "loading")
        assert (found["model"], found["prompt_tokens"]) == ("b", None)
        assert cancel(server, found["id"]).json["cancelled"] == 1
        assert asking.result().json["error"]["code"] == "request_cancelled"
        assert [one["model"] for one in listed(server)] == ["a"]
        close_sockets()
        server.wait_free()


def test_an_admin_sees_and_cancels_all_and_other_keys_their_own(locked: Server) -> None:
    locked.key = ALICE
    stream = locked.begin(BODIES[CHAT])
    locked.key = ROOT
    (found,) = wait_listed(locked, "running")
    assert found["key"] == "key-1"
    assert [one["id"] for one in listed(locked, ALICE)] == [found["id"]]
    assert listed(locked, BOB) == []
    refused = cancel(locked, found["id"], BOB)
    message = f"id = {found['id']!r} is not a request in progress of the key 'key-2'; GET /v1/requests lists them"
    assert (refused.status, refused.json["error"]["message"]) == (404, message)
    assert cancel(locked, found["id"], ALICE).status == 200
    assert b"the request was cancelled with the key 'key-1'" in rest_of(stream)
    locked.wait_free()


def test_an_unknown_id_is_named(keyless: Server) -> None:
    answer = cancel(keyless, "req_nothing")
    assert answer.status == 404
    assert answer.json["error"] == {
        "message": "id = 'req_nothing' is not a request in progress; GET /v1/requests lists them",
        "type": "invalid_request_error",
        "param": "id",
        "code": "request_not_found",
    }


def test_requests_of_one_id_are_cancelled_together(keyless: Server) -> None:
    with ThreadPoolExecutor() as pool:
        headers = {"x-request-id": "mine"}
        asking = [pool.submit(keyless.post, CHAT, {**BODIES[CHAT], "stream": False}, headers=headers) for _ in "12"]
        wait_listed(keyless, "running", 2)
        assert cancel(keyless, "mine").json == {"id": "mine", "cancelled": 2}
        assert [one.result().status for one in asking] == [499, 499]
    keyless.wait_free()
