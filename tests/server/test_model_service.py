"""The model service behind the protocols: limits, usage and failures, over HTTP with the fake backend."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.server.models import _is_short
from tests.server.rig import FAKE, Server, children, close_sockets, serving
from tests.waiting import eventually, is_asleep

KEYS = """
keys:
  - {key: sk-plain-key, name: plain}
  - {key: sk-three-a-minute, name: three, requests_per_minute: 3}
  - {key: sk-admin-key, name: root, admin: true}
"""
SHORT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "ignore_eos": True}
LONG = {**SHORT, "max_tokens": 3000, "stream": True}


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(KEYS)
    options = ("--device", "20ms", "--max-queue", "4", "--max-num-seqs", "2", "--api-keys-file", str(path))
    with serving(str(tiny_model), *FAKE, *options, key="sk-admin-key") as server:
        yield server


def metric(server: Server, name: str) -> float:
    lines = server.get("/metrics").body.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_a_refusal_by_the_queue_does_not_count_for_the_key(server: Server) -> None:
    server.begin({**LONG, "n": 2})
    server.send_request(LONG)
    eventually(lambda: server.stats()["num_waiting"], "the machine is full")
    headers = {"authorization": "Bearer sk-three-a-minute"}
    before = metric(server, "quire:request_success_total")
    for _ in range(5):
        answer = server.post("/v1/chat/completions", {**SHORT, "n": 8}, headers=headers)
        assert answer.status == 429
        assert answer.json["error"]["code"] == "server_overloaded"
    assert metric(server, "quire:request_success_total") == before  # and does not count as served
    close_sockets()
    server.wait_free()
    for _ in range(3):
        assert server.post("/v1/chat/completions", SHORT, headers=headers).status == 200
    while (answer := server.post("/v1/chat/completions", SHORT, headers=headers)).status == 200:
        pass  # a slow machine may take the 20 s after which the limit allows another request
    assert (answer.status, answer.json["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["x-should-retry"] == "true"


def test_only_short_texts_are_tokenised_on_the_event_loop() -> None:
    assert _is_short(["word " * 800])
    assert not _is_short(["word " * 801])
    assert not _is_short(["word " * 80] * 11)  # the prompts of a request follow each other without a pause
    assert _is_short(["\u8a9e" * 1000])
    assert not _is_short(["\u8a9e" * 1001])  # takes longer
    assert _is_short([(1, 2, 3)] * 5000)  # needs no tokenizer


def test_unknown_fields_are_named_at_any_depth_and_logged_once(server: Server) -> None:
    body = {
        **SHORT,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": "Ho", "mood": "good"},
            {"role": "user", "content": "Hi", "mood": "bad"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True, "speed": 9},
        "b\u00e4d\nname": 1,
    }
    answer = server.post("/v1/chat/completions", body)
    assert answer.status == 200
    names = set(answer.headers["x-quire-ignored-fields"].split(", "))
    assert names == {"messages[0].content[0].cache_control", "messages[1].mood", "stream_options.speed", "b?d?name"}
    assert server.post("/v1/chat/completions", body | {"newer": 1}).status == 200
    server.wait_for("/v1/chat/completions: the unknown field newer was ignored")
    assert server.log.count("the unknown field b?d?name was ignored") == 1
    assert server.log.count("the unknown field messages[].mood was ignored") == 1


def test_fields_of_a_tool_that_is_left_out_are_not_named(server: Server) -> None:
    function = {"type": "function", "function": {"name": "f"}, "cost": 1}
    search = {"type": "web_search", "max_uses": 3, "cost": 1}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "mood": 1}
    answer = server.post("/v1/chat/completions", {**body, "tools": [search, function]})
    assert answer.headers["x-quire-ignored-fields"] == "mood, tools[0].web_search"
    body |= {"model": "tiny", "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 3}]}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        named = server.post(path, body).headers["x-quire-ignored-fields"].split(", ")
        assert "tools[0].web_search_20250305" in named
        assert "tools[0].max_uses" not in named


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "high"}, "reasoning_effort"),
        ("/v1/chat/completions", {"reasoning_effort": "none", "enable_thinking": False, "thinking_budget": 0}, None),
        ("/v1/chat/completions", {"enable_thinking": True}, "enable_thinking"),
        ("/v1/chat/completions", {"thinking_budget": 512}, "thinking_budget"),
        ("/v1/chat/completions", {"thinking_budget": -1}, None),
        ("/v1/responses", {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ("/v1/responses", {"reasoning": {"effort": "none"}}, None),
        ("/v1/messages", {"thinking": {"type": "adaptive"}}, "thinking"),
        (
            "/v1/messages",
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            "thinking.budget_tokens, thinking",
        ),
        ("/v1/messages", {"thinking": {"type": "disabled"}}, None),
        ("/v1/messages", {"output_config": {"effort": "high"}}, "output_config.effort"),
        ("/api/chat", {"think": True}, "think"),
        ("/api/chat", {"think": "high"}, "think"),
        ("/api/chat", {"think": False}, None),
    ],
)
def test_thinking_of_a_model_that_does_not_think_is_named(
    server: Server, path: str, fields: dict[str, Any], named: str | None
) -> None:
    """In every protocol; a request not to think asks for nothing."""
    prompt = {"input": "Hi"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "Hi"}]}
    limit: dict[str, Any] = {"max_output_tokens": 1} if path == "/v1/responses" else {"max_tokens": 1}
    limit = {"options": {"num_predict": 1}} if path == "/api/chat" else limit
    answer = server.post(path, {"model": "tiny", **prompt, **limit, **fields})
    assert answer.status == 200, answer.body
    assert answer.headers.get("x-quire-ignored-fields") == named


def test_unknown_template_arguments_are_named(server: Server) -> None:
    body = {**SHORT, "chat_template_kwargs": {"enable_thinking": False, "tone": "dry"}, "enable_thinking": True}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status == 200, answer
    names = answer.headers["x-quire-ignored-fields"].split(", ")
    assert names == ["chat_template_kwargs.enable_thinking", "chat_template_kwargs.tone", "enable_thinking"]


def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(server: Server) -> None:
    data = b'{"prompt": [' + b"[1]," * 400_000 + b"[1]]}"
    answer = server.post("/v1/completions", data=data)
    assert (answer.status, answer.json["error"]["code"]) == (413, "request_too_large")
    assert "262144 values" in answer.json["error"]["message"]


def test_cache_stats_without_a_prefix_cache(tiny_model: Path) -> None:
    with serving(str(tiny_model), *FAKE, "--no-enable-prefix-caching") as server:
        system = [{"type": "text", "text": "be kind " * 200, "cache_control": {"type": "ephemeral"}}]
        body = {"model": "tiny", "max_tokens": 2, "system": system, "messages": [{"role": "user", "content": "Hi"}]}
        for _ in range(2):
            usage = server.post("/v1/messages", body).json["usage"]
            assert usage["cache_creation_input_tokens"] == usage["cache_read_input_tokens"] == 0
            assert usage["input_tokens"] > 200


def test_a_hung_worker_is_found_after_its_clients_disconnected(tiny_model: Path) -> None:
    with serving(str(tiny_model), *FAKE, "--hang-limit", "4") as server:
        assert server.chat().status == 200
        worker = server.worker_pid
        os.kill(worker, signal.SIGSTOP)

        def is_found() -> bool:
            server.send_request(LONG).close()  # clients that disconnect long before the hang limit
            return worker not in children(server.process.pid)

        eventually(is_found, "the worker that hangs is ended")
        eventually(lambda: server.get("/health").status == 200, "another serves")
        assert server.chat().status == 200
        assert server.worker_pid != worker


def test_one_key_cannot_displace_the_pins_of_another(server: Server) -> None:
    server.post("/v1/cache/clear")

    def ask(key: str, text: str, name: str) -> int:
        body = {**SHORT, "messages": [{"role": "user", "content": text}], "prompt_cache_key": name}
        answer = server.post("/v1/chat/completions", body, headers={"authorization": f"Bearer {key}"})
        assert answer.status == 200
        return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    ask("sk-plain-key", "my words " * 40, "mine")
    for i in range(12):
        ask("sk-admin-key", f"{i} other words " * 80, f"theirs-{i}")
    again = ask("sk-plain-key", "my words " * 40, "mine")
    assert again > 50
    server.post("/v1/cache/clear")
    server.wait_free()


def test_the_server_holds_no_weights(server: Server) -> None:
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "/torch/" not in maps


def test_an_idle_server_uses_no_cpu(server: Server) -> None:
    server.wait_free()
    eventually(lambda: is_asleep(server.process.pid, server.worker_pid), "no process wakes up for two seconds")
