"""Codec of /api/chat and /api/generate: parsing, lines and errors; and a server with a fake model."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from quire.core.values import FinishReason, Priority
from quire.engine.generation import Completion, Delta, GenerationParams, TokenLogprob
from quire.errors import DownloadFailed, InvalidRequest
from quire.server import catalog
from quire.server.catalog import API_VERSION, NEVER
from quire.server.errors import ApiError, Kind
from quire.server.models import ActiveRequest, InferenceRequest, Models
from quire.server.protocols.ollama import (
    IGNORED_OPTIONS,
    OLLAMA,
    ChatReply,
    GenerateReply,
    OllamaBody,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    Reply,
    find_model,
    parse_chat,
    parse_generate,
    unloads,
)
from quire.text.grammar import json_object_grammar, json_schema_grammar
from quire.text.messages import ChatRequest, Message, Part, Role, Tool, ToolCall
from tests.server.rig import FAKE, Server, serving
from tests.server.streams import FakeActiveRequest, events_of, whole_of
from tests.waiting import HANG_S

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Look.", "parameters": WEATHER}}


def chat_ask(**body: Any) -> InferenceRequest:
    data = json.dumps({"model": "m", "messages": HELLO} | body)
    return parse_chat(msgspec.json.decode(data, type=OllamaChatRequest))


def generate_ask(**body: Any) -> InferenceRequest:
    data = json.dumps({"model": "m", "prompt": "Hello"} | body)
    return parse_generate(msgspec.json.decode(data, type=OllamaGenerateRequest))


def chat_of(ask: InferenceRequest) -> ChatRequest:
    (prompt,) = ask.prompts
    assert isinstance(prompt, ChatRequest)
    return prompt


# Parsing


def test_every_field_of_a_chat_is_parsed() -> None:
    options = {
        "num_predict": 7, "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.2,
        "repeat_last_n": -1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 3, "stop": ["END"],
    }  # fmt: skip
    ask = chat_ask(
        stream=False, format="json", options=options, tools=[TOOL], think="high", logprobs=True, top_logprobs=2,
        priority="low", cache_salt="team-a", cache=True,
    )  # fmt: skip
    assert ask == InferenceRequest(
        model="m",
        prompts=(
            ChatRequest(
                (Message(Role.USER, (Part("Hello"),)),),
                tools=(Tool("weather", "Look.", WEATHER, is_strict=False),),
                wants_thought=True,
                reasoning_effort="high",
            ),
        ),
        params=GenerationParams(
            temperature=0.5, top_k=40, top_p=0.9, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.5,
            frequency_penalty=-0.5, seed=3, max_tokens=7, stop=["END"], logprobs=2, grammar=json_object_grammar(),
        ),
        priority=Priority.LOW,
        cache_salt="team-a",
        wants_cache=True,
    )  # fmt: skip


def test_answers_are_streamed_by_default() -> None:
    assert chat_ask().is_streaming
    assert chat_ask(stream=None).is_streaming
    assert not chat_ask(stream=False).is_streaming


def test_null_options_are_absent_options() -> None:
    assert chat_ask(options=dict.fromkeys(OllamaOptions.__struct_fields__)) == chat_ask()


def test_a_prompt_is_a_conversation_unless_it_is_raw() -> None:
    chat = chat_of(generate_ask(system="Be brief.", think=False))
    assert chat == ChatRequest(
        [Message(Role.SYSTEM, (Part("Be brief."),)), Message(Role.USER, (Part("Hello"),))], wants_thought=False
    )
    assert generate_ask(raw=True).prompts == ("Hello",)
    for other in ({"system": "S"}, {"context": [1]}):
        with pytest.raises(InvalidRequest, match=f"raw and {next(iter(other))} exclude"):
            generate_ask(raw=True, **other)


def test_an_assistant_at_the_end_is_continued() -> None:
    assert chat_of(chat_ask()).add_generation_prompt
    chat = chat_of(chat_ask(messages=[*HELLO, {"role": "assistant", "content": "The answer is ("}]))
    assert (chat.continue_last, chat.add_generation_prompt) == (True, False)
    call = {"function": {"name": "weather", "arguments": {}}}
    with pytest.raises(InvalidRequest, match=r"messages\[1\].tool_calls has no result"):
        chat_ask(messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}])


def called(name: str, **more: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {"city": "Wien"}}, **more}


def test_tool_results_are_matched_without_ids() -> None:
    """Ollama's own Python client sends no ids."""
    messages = [
        *HELLO,
        {"role": "Assistant", "content": "", "thinking": "Hm.", "tool_calls": [called("weather"), called("time")]},
        {"role": "tool", "content": "noon", "tool_name": "time"},
        {"role": "tool", "content": "21", "tool_name": "weather"},
        {"role": "assistant", "tool_calls": [called("weather", id="mine"), called("weather")]},
        {"role": "tool", "content": "second", "tool_call_id": "call_3"},
        {"role": "tool", "content": "first"},
        {"role": "tool", "content": "nobody asked", "tool_name": "other"},
    ]
    found = chat_of(chat_ask(messages=messages)).messages
    assert found[1].thought == "Hm."
    assert found[1].tool_calls == (
        ToolCall("call_0", "weather", '{"city":"Wien"}'),
        ToolCall("call_1", "time", '{"city":"Wien"}'),
    )
    assert [call.call_id for call in found[4].tool_calls] == ["mine", "call_3"]
    answers = [(one.text, one.name, one.tool_call_id) for one in found if one.role is Role.TOOL]
    assert answers == [
        ("noon", "time", "call_1"),
        ("21", "weather", "call_0"),
        ("second", None, "call_3"),
        ("first", None, "mine"),
        ("nobody asked", "other", None),
    ]


@pytest.mark.parametrize(
    ("options", "params"),
    [
        ({"num_predict": -1}, GenerationParams()),
        ({"num_predict": -2}, GenerationParams()),
        ({"num_predict": 0}, GenerationParams()),
        ({"seed": -1}, GenerationParams()),
        ({"top_k": -1}, GenerationParams(top_k=0)),
        ({"stop": "END"}, GenerationParams(stop="END")),
        ({"repeat_penalty": 1.3, "presence_penalty": 1, "repeat_last_n": 0}, GenerationParams(repetition_penalty=1.0)),
        ({"mirostat": 0, "typical_p": 1.0, "tfs_z": 1}, GenerationParams()),
    ],
)
def test_options(options: dict[str, Any], params: GenerationParams) -> None:
    ask = chat_ask(options=options)
    assert (ask.params, ask.ignored) == (params, ())


def test_fields_without_effect_are_named() -> None:
    everything = dict.fromkeys(IGNORED_OPTIONS, 1)
    assert chat_ask(options=everything).ignored == tuple(f"options.{name}" for name in IGNORED_OPTIONS)
    assert chat_ask(options={"repeat_last_n": 64}).ignored == ()  # without a penalty
    assert chat_ask(options={"repeat_last_n": 64, "repeat_penalty": 1.1}).ignored == ("options.repeat_last_n",)
    assert chat_ask(keep_alive="5m", truncate=True, shift=True, top_logprobs=3).ignored == (
        *("keep_alive", "truncate", "shift", "top_logprobs"),
    )
    assert chat_ask(truncate=False, shift=False).ignored == ()  # this is quire's behaviour anyway


@pytest.mark.parametrize("value", [{}, {"type": "object", "properties": {"a": {"type": "integer"}}}])
def test_a_schema_is_enforced(value: dict[str, Any]) -> None:
    assert chat_ask(format=value).params.grammar == json_schema_grammar(value, strict=False)
    assert chat_ask(format="").params.grammar is None


IMAGES = [{"role": "user", "content": "Hi", "images": ["aGk="]}]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": IMAGES}, r"messages\[0\].images is not supported: only text input"),
        (
            {"messages": [{"role": "judge", "content": "Hi"}]},
            r"\[0\].role = 'judge' is not one of system, user",
        ),
        ({"messages": [{"role": "user", "tool_calls": [called("a")]}]}, r"messages\[0\].tool_calls is only for"),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [called("a b")]}]}, r"\[0\].function.name = 'a b'"),
        ({"options": {"mirostat": 1}}, "options.mirostat = 1 is not supported: quire does not have this sampler"),
        ({"options": {"typical_p": 0.5}}, r"options.typical_p = 0.5 is not supported"),
        ({"options": {"temperature": -1}}, r"options.temperature = -1.0"),
        ({"options": {"temperature": 2.1}}, r"options.temperature = 2.1 is not from 0 to 2"),
        ({"options": {"repeat_penalty": 0}}, r"options.repeat_penalty = 0.0"),
        ({"options": {"num_predict": -3}}, r"options.num_predict = -3 is neither"),
        ({"options": {"repeat_last_n": -2}}, r"options.repeat_last_n = -2"),
        ({"options": {"stop": [""]}}, r"options.stop\[0\]"),
        ({"format": "xml"}, "format = 'xml' is neither json nor a JSON schema"),
        ({"think": "deeply"}, "think = 'deeply' is not true, false or one of low, medium, high, max"),
        ({"keep_alive": "soon"}, "keep_alive = 'soon' is neither seconds nor a duration"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs = 21"),
        ({"tools": [{**TOOL, "type": "web_search"}]}, r"tools\[0\].type = 'web_search' is not supported"),
        ({"priority": "urgent"}, "priority = 'urgent'"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:40],
)
def test_refusals_name_the_field(body: dict[str, Any], words: str) -> None:
    with pytest.raises((InvalidRequest, ApiError), match=words):
        chat_ask(**body)


def test_a_keep_alive_of_0_unloads() -> None:
    for zero in (0, 0.0, "0", "0s", "0h0.0m", ".0s"):
        assert unloads(zero)
    for other in (None, 300, -1, 2.5, "5m", "1h30m", "500ms", "-1", "-1m", "60", "0h1m", ".5s"):
        assert not unloads(other)
    for invalid in ("", "m", "5x", "1h 30m", "five", "--1", "9" * 100, "1" * 40 + "s", "٣m"):
        with pytest.raises(InvalidRequest, match="keep_alive = "):
            unloads(invalid)


def test_a_model_is_found_with_the_default_tag_and_without() -> None:
    names = {"small": 1, "org/name:Q4": 2, "odd:latest": 3}
    models = cast(Models, SimpleNamespace(names=tuple(names), find=names.get, default=1))
    expected = {"small": 1, "small:latest": 1, "org/name:Q4": 2, "odd:latest": 3, "": 1}
    assert {name: cast(Any, find_model(models, name)) for name in expected} == expected
    for name in ("large", "small:8b", ":latest"):
        with pytest.raises(ApiError, match=f"^model '{name}' not found; this server has small, ") as info:
            find_model(models, name)
        assert OLLAMA.status(info.value) == 404


# Encoding


def delta(words: str, *, finish: FinishReason | None = None, logprobs: tuple[TokenLogprob, ...] = ()) -> Delta:
    return Delta(0, words, (1,), logprobs, finish, None)


def steps_of(text: str, size: int = 3, finish: FinishReason = FinishReason.STOP) -> list[list[Delta]]:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    return [[delta(piece)] for piece in pieces[:-1]] + [[delta(pieces[-1], finish=finish)]]


CHAT_BODY = OllamaChatRequest(model="m:latest")


def lines_of(
    work: FakeActiveRequest, kind: type[Reply] = ChatReply, body: OllamaBody = CHAT_BODY
) -> list[dict[str, Any]]:
    async def read() -> bytes:
        active = cast(ActiveRequest, work)
        return b"".join([line async for line in events_of(active, kind(active, body))])

    data = asyncio.run(read())
    assert data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def test_a_stream_of_a_chat() -> None:
    first, second, last = lines_of(FakeActiveRequest(chat_ask(), steps_of("Hello", 3)))
    assert [first["message"], second["message"]] == [{"role": "assistant", "content": text} for text in ("Hel", "lo")]
    assert [part["done"] for part in (first, second, last)] == [False, False, True]
    assert "done_reason" not in first
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["model"], last["done_reason"]) == ("m:latest", "stop")
    assert (last["prompt_eval_count"], last["eval_count"]) == (100, 2)
    seconds = [last[f"{name}_duration"] / 1e9 for name in ("load", "prompt_eval", "eval")]
    assert seconds == [0.5, 0.25, 2.0]
    assert last["total_duration"] > 1
    assert last["created_at"].endswith("Z")


def test_a_stream_of_a_generation_ends_with_its_context() -> None:
    raw, body = (OllamaGenerateRequest(model="m", raw=raw) for raw in (True, None))
    work = FakeActiveRequest(generate_ask(), steps_of("<think>Hm.</think>Yes", 4))
    *parts, last = lines_of(work, GenerateReply, raw)
    assert "".join(part["response"] for part in parts) == "Yes"
    assert "".join(part.get("thinking", "") for part in parts) == "Hm."
    assert "context" not in last
    *_, last = lines_of(FakeActiveRequest(generate_ask(), steps_of("Yes")), GenerateReply, body)
    assert last["context"] == [5, 6, 7]


def test_durations_of_an_answer_of_one_token_are_not_zero() -> None:
    """Clients divide by the duration."""
    *_, last = lines_of(FakeActiveRequest(chat_ask(), steps_of("Yes"), prefill_s=None, decode_s=0.0))
    assert (last["eval_duration"], last["prompt_eval_duration"]) == (1, 1)


CALLS = (
    'Look: <tool_call>\n{"name": "weather", "arguments": {"city": "Wien"}}\n</tool_call>'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Graz", "n": 1}}\n</tool_call>'
)


@pytest.mark.parametrize("size", [1, 2, 7, 30, 1000])
def test_calls_are_complete_with_arguments_as_objects(size: int) -> None:
    *parts, last = lines_of(FakeActiveRequest(chat_ask(tools=[TOOL]), steps_of(CALLS, size)))
    calls = [call for part in parts for call in part["message"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [
        {"index": 0, "name": "weather", "arguments": {"city": "Wien"}},
        {"index": 1, "name": "weather", "arguments": {"city": "Graz", "n": 1}},
    ]
    assert len({call["id"] for call in calls}) == 2
    assert "".join(part["message"]["content"] for part in parts).strip() == "Look:"
    assert last["done_reason"] == "stop"
    assert "tool_calls" not in last["message"]


def whole(text: str, finish: FinishReason = FinishReason.STOP, **body: Any) -> Any:
    work = FakeActiveRequest(chat_ask(stream=False, **body))
    return whole_of(ChatReply(cast(ActiveRequest, work), CHAT_BODY), Completion(0, text, (1, 2), finish))


def test_a_whole_answer() -> None:
    answer = whole(f"<think>Which?</think>{CALLS}", tools=[TOOL])
    assert answer["message"]["thinking"] == "Which?"
    assert [call["function"]["arguments"]["city"] for call in answer["message"]["tool_calls"]] == ["Wien", "Graz"]
    assert (answer["done"], answer["done_reason"]) == (True, "stop")


def test_an_incomplete_call_is_left_out() -> None:
    """A client would run the call without the rest of its arguments."""
    cut = CALLS[:-40]
    answer = whole(cut, FinishReason.LENGTH, tools=[TOOL])
    assert [call["function"]["arguments"] for call in answer["message"]["tool_calls"]] == [{"city": "Wien"}]
    assert answer["done_reason"] == "length"
    *parts, last = lines_of(FakeActiveRequest(chat_ask(tools=[TOOL]), steps_of(cut, 5, FinishReason.LENGTH)))
    assert sum(len(part["message"].get("tool_calls", ())) for part in parts) == 1
    assert last["done_reason"] == "length"


def test_logprobs_are_sent_with_their_text() -> None:
    top = TokenLogprob(4, "yes", b"yes", -math.inf, 1)
    entry = TokenLogprob(3, "Yes", b"Yes", -0.5, 0, (top,))
    steps = [[delta("Yes", finish=FinishReason.STOP, logprobs=(entry,))]]
    part, last = lines_of(FakeActiveRequest(chat_ask(), steps))
    (found,) = part["logprobs"]
    assert (found["token"], found["logprob"], found["bytes"]) == ("Yes", -0.5, [89, 101, 115])
    assert found["top_logprobs"] == [{"token": "yes", "logprob": -9999.0, "bytes": [121, 101, 115]}]
    assert "logprobs" not in last


# Errors


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_of_error_has_a_status(kind: Kind) -> None:
    error = ApiError(kind, "it is so", param="field")
    assert 400 <= OLLAMA.status(error) < 600
    assert json.loads(OLLAMA.body(error, "req_1")) == {"error": "field: it is so"}
    assert OLLAMA.event(error, "req_1") == OLLAMA.body(error, "req_1") + b"\n"


def test_an_error_with_a_lone_surrogate_is_encoded() -> None:
    assert json.loads(OLLAMA.body(ApiError(Kind.INVALID, "a \ud800 b"), "")) == {"error": "a ? b"}


def test_a_keep_alive_is_not_a_line() -> None:
    """Clients parse every line as an object: an empty line would end the stream with an error."""
    data = OLLAMA.keep_alive * 3 + b'{"done": true}\n'
    assert [json.loads(line) for line in data.splitlines()] == [{"done": True}]


# Over a socket, with the fake backend

USER, ADMIN = "sk-user-00000001", "sk-admin-0000001"
AS_ADMIN = {"authorization": f"Bearer {ADMIN}"}
CHAT = {"model": "tiny", "messages": HELLO, "options": {"num_predict": 4, "seed": 1}}


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    options = (*FAKE, "--api-key", USER, "--admin-api-key", ADMIN, "--idle-unload", "500")
    with serving(str(tiny_model), *options, key=USER) as found:
        yield found


def test_a_stream_is_lines_of_json(server: Server) -> None:
    answer = server.post("/api/chat", CHAT)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/x-ndjson"
    parts = [json.loads(line) for line in answer.body.splitlines()]
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1]["done_reason"], parts[-1]["eval_count"]) == ("length", 4)
    whole = server.post("/api/chat", CHAT | {"stream": False})
    assert whole.headers["content-type"] == "application/json"
    assert whole.json["message"]["role"] == "assistant"


NO_KEY = {"authorization": ""}
UNKNOWN = "is neither a known model name nor an org/name of the hub"
PULLED = '{"status":"success"}'
ANSWERS: list[tuple[str, str, Any, dict[str, str], int, str]] = [
    (
        "POST",
        "/api/chat",
        CHAT | {"messages": [{"role": "user", "content": "word " * 9000}]},
        {},
        400,
        "maximum context",
    ),
    ("POST", "/api/show", {}, {}, 400, '{"error":"model is missing"}'),
    ("POST", "/api/show", {"model": "x"}, {}, 404, '{"error":"'),
    ("GET", "/api/version", None, {}, 200, f'{{"version":"{API_VERSION}"'),
    ("POST", "/api/pull", {"model": "tiny"}, {}, 403, '{"error":"'),
    ("POST", "/api/pull", {"model": "tiny:latest"}, AS_ADMIN, 200, PULLED + "\n"),
    ("POST", "/api/pull", {"name": "tiny", "stream": False}, AS_ADMIN, 200, PULLED),
    *(
        ("POST", "/api/pull", {"model": name}, AS_ADMIN, 404, UNKNOWN)
        for name in ("nothing", "/etc/passwd", "../tiny", "a/b/c", "./tiny.gguf", "a/../b")
    ),
    # The path decides on the format of an error.
    ("GET", "/api/tags", None, NO_KEY, 401, '{"error":"no API key was sent'),
    ("GET", "/api/nothing", None, NO_KEY, 401, '{"error":"no API key was sent'),
    (
        "POST",
        "/api/chat",
        {"model": "x", "messages": HELLO},
        {"anthropic-version": "2023-06-01"},
        404,
        '{"error":"model \'x\' not found',
    ),
]


@pytest.mark.parametrize(("method", "path", "body", "headers", "status", "words"), ANSWERS)
def test_an_answer(
    server: Server, method: str, path: str, body: Any, headers: dict[str, str], status: int, words: str
) -> None:
    answer = server.ask(method, path, body, headers=headers)
    assert (answer.status, words in answer.body.decode()) == (status, True), answer
    is_stream = path == "/api/pull" and status == 200 and "stream" not in body
    assert answer.headers["content-type"] == ("application/x-ndjson" if is_stream else "application/json")


def test_unsatisfied_fields_are_named(server: Server) -> None:
    options = {"num_ctx": 1 << 20, "num_gpu": 1, "num_predict": 1, "frobnicate": 1}
    body = CHAT | {"options": options, "think": True, "keep_alive": -1, "colour": "red"}
    for stream in (True, False):
        answer = server.post("/api/chat", body | {"stream": stream})
        named = set(answer.headers["x-quire-ignored-fields"].split(", "))
        assert named == {"options.num_ctx", "options.num_gpu", "options.frobnicate", "think", "keep_alive", "colour"}
    fits = server.post("/api/chat", CHAT | {"options": {"num_ctx": 64, "num_predict": 1}, "think": False})
    assert "x-quire-ignored-fields" not in fits.headers
    raw = {"model": "tiny", "prompt": "Hi", "raw": True, "think": "low", "options": {"num_predict": 1}}
    assert server.post("/api/generate", raw).headers["x-quire-ignored-fields"] == "think"


def test_a_context_is_the_conversation_so_far(server: Server) -> None:
    body = {"model": "tiny", "prompt": "Hi", "stream": False, "options": {"num_predict": 3}}
    first = server.post("/api/generate", body).json
    assert len(first["context"]) == first["prompt_eval_count"] + first["eval_count"]
    second = server.post("/api/generate", body | {"context": first["context"]}).json
    assert second["prompt_eval_count"] == len(first["context"]) + first["prompt_eval_count"]
    assert second["context"][: len(first["context"])] == first["context"]
    assert "context" not in server.post("/api/generate", body | {"raw": True}).json
    huge = server.post("/api/generate", body | {"context": [10**9]})
    assert huge.status == 400


def test_only_an_admin_unloads(server: Server) -> None:
    empty = {"model": "tiny:latest", "keep_alive": 0}
    refused = server.post("/api/generate", empty)
    assert refused.status == 403
    assert "keep_alive = 0 without a prompt unloads the model" in refused.json["error"]
    gone = server.post("/api/generate", empty, headers=AS_ADMIN)
    assert (gone.status, gone.json["done_reason"], gone.json["response"]) == (200, "unload", "")
    assert server.get("/api/ps").json == {"models": []}
    loaded = server.post("/api/chat", {"model": "tiny", "messages": [], "keep_alive": "5m"})
    assert (loaded.json["done_reason"], loaded.json["message"]["content"]) == ("load", "")
    assert loaded.headers["x-quire-ignored-fields"] == "keep_alive"
    (model,) = server.get("/api/ps").json["models"]
    assert model["name"] == "tiny"
    assert model["expires_at"] < NEVER  # --idle-unload
    assert server.post("/v1/models/pin", {"model": "tiny"}, headers=AS_ADMIN).status == 200
    try:
        assert "is pinned" in server.post("/api/generate", empty, headers=AS_ADMIN).json["error"]
        assert server.get("/api/ps").json["models"][0]["expires_at"] == NEVER
    finally:
        server.post("/v1/models/unpin", {"model": "tiny"}, headers=AS_ADMIN)


def test_the_catalog(server: Server) -> None:
    (listed,) = server.get("/api/tags").json["models"]
    assert (listed["name"], listed["model"], listed["details"]["format"]) == ("tiny", "tiny", "safetensors")
    assert len(listed["digest"]) == 64
    for body in ({"model": "tiny"}, {"name": "tiny:latest", "verbose": True}):
        shown = server.post("/api/show", body).json
        family = shown["details"]["family"]
        assert shown["model_info"]["general.architecture"] == family
        assert shown["model_info"][f"{family}.context_length"] > 0
        assert shown["capabilities"][:2] == ["completion", "tools"]
        assert "messages" in shown["template"]


def test_no_answer_names_a_path_of_this_machine(server: Server, tiny_model: Path) -> None:
    answers = [server.get(path) for path in ("/api/tags", "/api/ps")]
    answers.append(server.post("/api/show", {"model": "tiny"}))
    for answer in answers:
        assert answer.status == 200
        assert str(tiny_model.parent) not in answer.body.decode()


@pytest.mark.parametrize("error", [None, DownloadFailed("the line is cut"), OSError("the disk is full")])
def test_a_pull_reports_its_progress_and_its_end(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    is_shown = threading.Event()

    def fetch(name: str, progress: Callable[[str, int, int], None]) -> Path:
        assert name == "smollm2"
        progress("downloading", 10, 1000)
        assert is_shown.wait(HANG_S)
        if error is not None:
            raise error
        return Path("/model")

    monkeypatch.setattr(catalog, "pull", fetch)

    async def read() -> list[dict[str, Any]]:
        lines = []
        async for line in catalog._lines(catalog._download("smollm2")):
            lines.append(json.loads(line))
            if "completed" in lines[-1]:
                with pytest.raises(ApiError, match="only one download"):
                    await anext(catalog._download("org/name"))
                is_shown.set()
        return lines

    *_, part, last = asyncio.run(read())
    assert part.pop("digest").startswith("sha256:")
    assert part == {"status": "downloading smollm2", "total": 1000, "completed": 10}
    if error is None:
        assert last["status"] == "success"
        assert "quire serve smollm2" in last["note"]
    else:
        assert str(error) in last["error"]
