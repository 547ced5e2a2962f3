"""Hand-written hostile requests, each with the field that the refusal must name.

Bodies are made on demand: some are megabytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from quire.server.cache import ExplainRequest
from quire.server.protocols.anthropic import CountTokensRequest, MessagesRequest
from quire.server.protocols.openai import (
    ACCEPTED,
    ACCEPTED_OF_OTHERS,
    ChatCompletionRequest,
    CompletionRequest,
)
from quire.server.protocols.responses import ACCEPTED as ACCEPTED_BY_RESPONSES
from quire.server.protocols.responses import ResponsesRequest
from quire.server.tokenization import DetokenizeRequest, TokenizeRequest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
COUNT = "/v1/messages/count_tokens"
EXPLAIN = "/v1/cache/explain"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
OLLAMA_CHAT = "/api/chat"
OLLAMA_GENERATE = "/api/generate"
ASKED = (CHAT, COMPLETIONS, MESSAGES, RESPONSES, COUNT, EXPLAIN, TOKENIZE, DETOKENIZE, OLLAMA_CHAT, OLLAMA_GENERATE)

DEEP = 100_000
MIB = 1 << 20
PICKLE = b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94."  # os.system("id")
HI = {"role": "user", "content": "Hi"}

# A valid body for each path.
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [HI], "max_tokens": 2},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 2},
    MESSAGES: {"model": "tiny", "messages": [HI], "max_tokens": 2},
    RESPONSES: {"input": "Hi", "max_output_tokens": 2},
    COUNT: {"model": "tiny", "messages": [HI]},
    EXPLAIN: {"prompt": "Hi"},
    TOKENIZE: {"prompt": "Hi"},
    DETOKENIZE: {"tokens": [1]},
    OLLAMA_CHAT: {"model": "tiny", "messages": [HI], "options": {"num_predict": 2}},
    OLLAMA_GENERATE: {"model": "tiny", "prompt": "Hi", "options": {"num_predict": 2}},
}

STRUCTS: dict[str, type[msgspec.Struct]] = {
    CHAT: ChatCompletionRequest,
    COMPLETIONS: CompletionRequest,
    MESSAGES: MessagesRequest,
    RESPONSES: ResponsesRequest,
    COUNT: CountTokensRequest,
    EXPLAIN: ExplainRequest,
    TOKENIZE: TokenizeRequest,
    DETOKENIZE: DetokenizeRequest,
}


@dataclass(frozen=True, slots=True)
class Hostile:
    name: str
    path: str
    make: Callable[[], bytes]
    names: str | None = None  # the field the message must name; None: the body as a whole
    contains: str = ""  # further text that the message must contain
    statuses: tuple[int, ...] = (400,)


def field(
    path: str, name: str, value: object, names: str | None = None, *, label: str = "", contains: str = ""
) -> Hostile:
    """A valid body with one bad field."""
    title = f"{path} {name}={label or repr(value)[:40]}"
    return Hostile(title, path, lambda: json.dumps({**GOOD[path], name: value}).encode(), names or name, contains)


def instead(path: str, label: str, body: object, names: str, statuses: tuple[int, ...] = (400,)) -> Hostile:
    """A different body."""
    return Hostile(f"{path} {label}", path, lambda: json.dumps(body).encode(), names, statuses=statuses)


def literal(
    path: str, name: str, value: str, names: str | None = None, *, label: str = "", contains: str = ""
) -> Hostile:
    """Like `field`, with a value that Python's JSON encoder would not write."""
    rest = {key: kept for key, kept in GOOD[path].items() if key != name}

    def make() -> bytes:
        return (json.dumps(rest)[:-1] + f', "{name}": {value}}}').encode("utf-8", "surrogatepass")

    return Hostile(f"{path} {name}={label or value[:40]}", path, make, names, contains)


def whole(path: str, label: str, data: bytes, contains: str = "") -> Hostile:
    return Hostile(f"{path} body {label}", path, lambda: data, None, contains)


def nested(opening: str, closing: str, depth: int = DEEP) -> str:
    return opening * depth + closing * depth


def with_text(path: str, label: str, content: Callable[[], str], contains: str = "") -> Hostile:
    """A conversation with this text."""

    def make() -> bytes:
        body = {**GOOD[path], "messages": [{"role": "user", "content": content()}]}
        return json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")

    return Hostile(f"{path} text {label}", path, make, "messages", contains)


def prompted(path: str, label: str, prompt: Callable[[], object], contains: str = "", **more: object) -> Hostile:
    def make() -> bytes:
        return json.dumps({**GOOD[path], "prompt": prompt(), **more}).encode()

    return Hostile(f"{path} prompt {label}", path, make, "prompt", contains)


# The body as a whole

_WHOLE = (
    ("empty", b""),
    ("blank", b" \r\n\t "),
    ("null", b"null"),
    ("true", b"true"),
    ("number", b"7"),
    ("string", b'"hello"'),
    ("array", b"[]"),
    ("array of itself", b'[{"messages": []}]'),
    ("half", b'{"messages": [{"role": "us'),
    ("two", b'{"messages": []}{"messages": []}'),
    ("trailing comma", b'{"prompt": "a",}'),
    ("single quotes", b"{'prompt': 'a'}"),
    ("comment", b'{"prompt": "a" /* b */}'),
    ("form", b"prompt=hello&n=1"),
    ("multipart", b'--x\r\ncontent-disposition: form-data; name="prompt"\r\n\r\nhello\r\n--x--\r\n'),
    ("UTF-8 BOM", b'\xef\xbb\xbf{"prompt": "a"}'),
    ("UTF-16", '{"prompt": "a"}'.encode("utf-16")),
    ("NUL first", b'\x00{"prompt": "a"}'),
    ("NUL inside", b'{"pro\x00mpt": "a"}'),
    ("raw control character", b'{"prompt": "a\x01b"}'),
    ("invalid UTF-8", b'{"prompt": "\xff\xfe"}'),
    ("invalid UTF-8 in a key", b'{"\xc3\x28": 1}'),
    ("overlong UTF-8", b'{"prompt": "\xc0\xaf"}'),
    ("raw surrogate bytes", b'{"prompt": "\xed\xa0\x80"}'),
    ("escaped lone surrogate", rb'{"prompt": "\ud800"}'),
    ("escaped half pair", rb'{"prompt": "\udc00\ud800"}'),
    ("escaped surrogate in a key", rb'{"\ud800": 1}'),
    ("bad escape", rb'{"prompt": "\x41"}'),
    ("pickle", PICKLE),
    ("gzip", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xab\x56\x2a\x28"),
    ("arrays 10^5 deep", nested("[", "]").encode()),
    ("objects 10^5 deep", nested('{"a":', "}").replace(":}", ":1}", 1).encode()),
    ("arrays 10^6 deep, never closed", b"[" * 1_000_000),
)  # fmt: skip

# A valid body except for a value deep inside a field
_DEEP = (
    (CHAT, "metadata"),
    (CHAT, "chat_template_kwargs"),
    (CHAT, "unknown_field"),
    (CHAT, "tools"),
    (CHAT, "messages"),
    (CHAT, "temperature"),
    (CHAT, "logit_bias"),
    (COMPLETIONS, "prompt"),
    (COMPLETIONS, "stop"),
    (MESSAGES, "metadata"),
    (MESSAGES, "system"),
    (RESPONSES, "metadata"),
    (RESPONSES, "input"),
    (RESPONSES, "text"),
    (RESPONSES, "tools"),
    (COUNT, "tools"),
    (EXPLAIN, "prompt"),
    (TOKENIZE, "messages"),
    (DETOKENIZE, "tokens"),
)

# Numbers that JSON does not have
_NO_NUMBERS = (
    (CHAT, "temperature", "NaN"),
    (CHAT, "top_p", "Infinity"),
    (CHAT, "min_p", "-Infinity"),
    (CHAT, "max_tokens", "0x10"),
    (CHAT, "max_tokens", "010"),
    (CHAT, "temperature", "+1"),
    (CHAT, "temperature", ".5"),
    (CHAT, "temperature", "1e"),
    (CHAT, "seed", "1_000"),
    (COMPLETIONS, "temperature", "nan"),
    (COMPLETIONS, "logit_bias", '{"5": NaN}'),
    (MESSAGES, "temperature", "NaN"),
    (MESSAGES, "max_tokens", "Infinity"),
    (RESPONSES, "temperature", "NaN"),
    (RESPONSES, "max_output_tokens", "1e"),
)


def _numbers() -> Iterator[Hostile]:
    for path in (CHAT, COMPLETIONS):
        yield from (
            field(path, "n", 10**6),
            field(path, "n", 0),
            field(path, "n", -1),
            field(path, "n", 33),
            field(path, "n", True),
            field(path, "max_tokens", -2),
            field(path, "repeat_penalty", 0),
            field(path, "allowed_token_ids", []),
            field(path, "allowed_token_ids", [-1]),
            field(path, "allowed_token_ids", [10**6], contains="outside the vocabulary"),
            field(path, "allowed_token_ids", list(range(100_000)), label="10^5 ids", contains="100000 tokens"),
            field(path, "ebnf", "yes or no", contains="A GBNF grammar looks like"),
            field(path, "ebnf", "root ::= " + "(" * 10**4, label="10^4 parentheses", contains="nested"),
            field(path, "ebnf", "root ::= root", label="root that is root"),
            field(path, "ebnf", "root ::= [a-z" * 10**6, label="10^6 classes", contains="characters are more than"),
            field(path, "grammar", "yes or no", contains="neither Lark"),
            field(path, "regex", "("),
            field(path, "json_schema", "{"),
            field(path, "mirostat", 2, contains="not supported"),
            field(path, "max_tokens", 2**63),
            field(path, "max_tokens", 1.5),
            field(path, "min_tokens", 3),  # more than max_tokens
            field(path, "min_tokens", -1),
            field(path, "temperature", -1),
            field(path, "temperature", "hot"),
            literal(path, "temperature", "1e999", "temperature"),
            literal(path, "temperature", "-1e999", "temperature"),
            field(path, "top_p", 0),
            field(path, "top_p", 1.5),
            field(path, "top_k", -2),
            field(path, "min_p", -0.1),
            field(path, "presence_penalty", 2.5),
            field(path, "frequency_penalty", -3),
            field(path, "repetition_penalty", 0),
            field(path, "seed", 2**70),
            field(path, "seed", 1.5),
            literal(path, "seed", "1" * 5000, "seed", label="5000 digits"),
            field(path, "priority", "urgent"),
            field(path, "priority", []),
            field(path, "priority", 1.5),
            field(path, "cache_salt", "a b"),
            field(path, "cache_salt", "\x00"),
            field(path, "cache_salt", "s" * 129),
            field(path, "cache_salt", 7),
            field(path, "service_tier", "gold"),
            field(path, "prompt_cache_key", ""),
            field(path, "prompt_cache_key", "k" * 10_000),
            field(path, "prompt_cache_retention", "for ever"),
        )
    yield from (
        field(CHAT, "max_tokens", 0),
        field(CHAT, "max_completion_tokens", 0),
        field(CHAT, "top_logprobs", 21),
        field(CHAT, "top_logprobs", 5),  # without logprobs
        field(CHAT, "prompt_logprobs", 1),
        field(COMPLETIONS, "prompt_logprobs", 10**9),
        field(COMPLETIONS, "logprobs", 21),
        field(COMPLETIONS, "logprobs", True),
        field(COMPLETIONS, "best_of", 10**6),
        field(RESPONSES, "max_output_tokens", 0),
        field(RESPONSES, "max_output_tokens", 2**63),
        field(RESPONSES, "max_output_tokens", "many"),
        field(RESPONSES, "n", 2),
        field(RESPONSES, "top_logprobs", 21),
        field(RESPONSES, "temperature", -1),
        literal(RESPONSES, "temperature", "1e999", "temperature"),
        field(RESPONSES, "seed", 2**70),
        field(RESPONSES, "min_tokens", 3),
        field(RESPONSES, "stop", [""]),
        field(RESPONSES, "logit_bias", {"the": 1}),
        field(MESSAGES, "max_tokens", -1),
        field(MESSAGES, "max_tokens", 2**63),
        field(MESSAGES, "max_tokens", "many"),
        field(MESSAGES, "temperature", -1),
        literal(MESSAGES, "temperature", "1e999", "temperature"),
        field(MESSAGES, "top_k", -2),
        field(MESSAGES, "seed", 2**70),
        field(MESSAGES, "priority", {}),
        field(MESSAGES, "cache_salt", "ü"),
    )


def _lists() -> Iterator[Hostile]:
    for path in (CHAT, COMPLETIONS):
        yield from (
            field(path, "stop", [f"stop {i}" for i in range(10_000)], label="10^4 strings"),
            field(path, "stop", [""]),
            field(path, "stop", ""),
            field(path, "stop", ["x" * 100_000], label="10^5 characters"),
            field(path, "stop", [7], "stop"),
            field(path, "stop_token_ids", list(range(100_000)), label="10^5 ids"),
            field(path, "stop_token_ids", [-1]),
            field(path, "stop_token_ids", [True], "stop_token_ids"),
            field(path, "stop_token_ids", [2**40]),
            field(path, "logit_bias", {str(i): 1 for i in range(100_000)}, label="10^5 entries"),
            field(path, "logit_bias", {"the": 1}),
            field(path, "logit_bias", {"-1": 1}),
            field(path, "logit_bias", {"1.0": 1}),
            field(path, "logit_bias", {"²": 1}),
            field(path, "logit_bias", {"9" * 400: 1}, label="400 digits"),
            field(path, "logit_bias", {"5": 101}),
            literal(path, "logit_bias", '{"5": 1e999}', "logit_bias"),
            field(path, "logit_bias", {"5": "much"}, "logit_bias"),
            field(path, "logit_bias", {"4294967296": 1}, "logit_bias"),
        )
    yield from (
        field(MESSAGES, "stop_sequences", [f"stop {i}" for i in range(10_000)], label="10^4 strings"),
        field(MESSAGES, "stop_sequences", [""]),
        field(MESSAGES, "stop_sequences", "stop"),
    )
    too_many = [HI] * 100_000
    for path in (CHAT, MESSAGES, COUNT, EXPLAIN, TOKENIZE):
        body = {key: value for key, value in GOOD[path].items() if key != "prompt"}
        yield from (
            instead(path, "10^5 messages", {**body, "messages": too_many}, "messages"),
            instead(path, "no messages", {**body, "messages": []}, "messages"),
        )


def _conversations() -> Iterator[Hostile]:
    for path in (CHAT, MESSAGES, COUNT):
        for label, message in (
            ("unknown role", {"role": "root", "content": "Hi"}),
            ("role of 10^6 characters", {"role": "r" * 10**6, "content": "Hi"}),
            ("role null", {"role": None, "content": "Hi"}),
            ("no role", {"content": "Hi"}),
            ("role tool without a call", {"role": "tool", "content": "Hi"}),
            ("content number", {"role": "user", "content": 7}),
            ("content null", {"role": "user", "content": None}),
            ("content missing", {"role": "user"}),
            ("content object", {"role": "user", "content": {"type": "text", "text": "Hi"}}),
            ("part without type", {"role": "user", "content": [{"text": "Hi"}]}),
            ("part without text", {"role": "user", "content": [{"type": "text"}]}),
            ("part of unknown type", {"role": "user", "content": [{"type": "thought", "text": "Hi"}]}),
            ("part text number", {"role": "user", "content": [{"type": "text", "text": 1e9}]}),
            ("message null", None),
            ("message text", "Hi"),
        ):
            yield field(path, "messages", [HI, message], label=label)
    for path in (CHAT, MESSAGES):
        parts = [{"type": "text", "text": ""}] * 100_000
        yield field(path, "messages", [{"role": "user", "content": parts}], label="10^5 parts")
    for path in (MESSAGES, COUNT):
        yield field(path, "messages", [{"role": "assistant", "content": ""}] * 100_000, label="10^5 empty answers")
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/canary.png"}}
    yield field(CHAT, "messages", [{"role": "user", "content": [image]}], label="image")
    audio = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    yield field(CHAT, "messages", [{"role": "user", "content": [audio]}], label="audio")
    block = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:9/canary.png"}}
    yield from (
        field(MESSAGES, "messages", [{"role": "user", "content": [block]}], label="image"),
        field(
            MESSAGES,
            "messages",
            [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}],
            label="tool result of no call",
        ),
        field(CHAT, "messages", [{"role": "user", "content": "Hi", "name": ""}], label="empty name"),
        field(CHAT, "messages", [{"role": "user", "content": "Hi", "name": "n" * 1000}], label="long name"),
        field(CHAT, "messages", [{"role": "assistant", "content": None, "tool_calls": [{}]}], label="tool calls"),
    )
    marked = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral", "ttl": "9y"}}
    yield field(MESSAGES, "messages", [{"role": "user", "content": [marked]}], label="cache_control ttl")
    five = [{**marked, "cache_control": {"type": "ephemeral"}} for _ in range(5)]
    yield from (
        field(MESSAGES, "messages", [{"role": "user", "content": five}], "cache_control", label="5 breakpoints"),
        field(MESSAGES, "system", 7),
        field(CHAT, "continue_final_message", True),
        field(COMPLETIONS, "suffix", "end"),
        field(MESSAGES, "thinking", {"type": "forever"}),
    )


def _items() -> Iterator[Hostile]:
    """Invalid and unsupported items of /v1/responses."""
    for label, item in (
        ("unknown type", {"type": "hologram"}),
        ("type of 10^6 characters", {"type": "t" * 10**6}),
        ("type number", {"type": 7, "role": "user", "content": "Hi"}),
        ("reference", {"type": "item_reference", "id": "msg_1"}),
        ("unknown role", {"role": "root", "content": "Hi"}),
        ("no role", {"content": "Hi"}),
        ("content number", {"role": "user", "content": 7}),
        ("content null", {"role": "user", "content": None}),
        ("content empty", {"role": "user", "content": []}),
        ("part without type", {"role": "user", "content": [{"text": "Hi"}]}),
        ("part without text", {"role": "user", "content": [{"type": "input_text"}]}),
        ("part of unknown type", {"role": "user", "content": [{"type": "thought", "text": "Hi"}]}),
        ("image", {"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1:9/a.png"}]}),
        ("file", {"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}),
        ("call without name", {"type": "function_call", "call_id": "c", "arguments": "{}"}),
        ("call without id", {"type": "function_call", "name": "f", "arguments": "{}"}),
        ("call of no JSON", {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}),
        ("call of deep JSON", {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a":' * 900}),
        ("output of no call", {"type": "function_call_output", "output": "x"}),
        ("output null", {"type": "function_call_output", "call_id": "c", "output": None}),
        ("thought number", {"type": "reasoning", "summary": 7}),
        ("null", None),
        ("text", "Hi"),
    ):
        yield field(RESPONSES, "input", [HI, item], label=label)
    yield from (
        field(RESPONSES, "input", 7),
        field(RESPONSES, "input", []),
        instead(RESPONSES, "no input", {"max_output_tokens": 2}, "input"),
        field(RESPONSES, "input", [HI] * 100_000, label="10^5 items"),
    )
    parts = [{"type": "input_text", "text": ""}] * 100_000
    yield from (
        field(RESPONSES, "input", [{"role": "user", "content": parts}], label="10^5 parts"),
        field(RESPONSES, "input", "a" * (4 * MIB), label="4 MB of a", contains="context"),
        literal(RESPONSES, "input", '"\\ud800"', label="escaped lone surrogate"),
        field(RESPONSES, "instructions", 7),
        field(RESPONSES, "instructions", "a" * (4 * MIB), "input", label="4 MB of a", contains="context"),
        field(RESPONSES, "previous_response_id", "resp_1"),
        field(RESPONSES, "background", True),
        field(RESPONSES, "metadata", {"a": 7}),
        field(RESPONSES, "include", "everything"),
        field(RESPONSES, "text", {"format": {"type": "yaml"}}, label="no such format"),
        field(RESPONSES, "text", {"format": {"type": "json_schema", "name": "a"}}, label="no schema"),
    )
    away = {"type": "json_schema", "name": "a", "schema": {"$ref": "http://127.0.0.1:9/"}, "strict": True}
    yield from (
        field(RESPONSES, "text", {"format": away}, label="a schema elsewhere"),
        field(RESPONSES, "tool_choice", {"type": "web_search"}, label="a server's tool"),
        field(RESPONSES, "tools", [{"type": "function"}], label="no name"),
        field(RESPONSES, "tools", [{"type": "function", "name": "f"}] * 200, label="200 tools"),
        field(RESPONSES, "tools", [{"type": "function", "name": "f"}] * 2, label="two of a name"),
        field(RESPONSES, "tool_choice", "required", label="a call of nothing"),
        field(RESPONSES, "tool_choice", {"type": "function", "name": "g"}, label="a call of an unknown tool"),
        Hostile(f"{RESPONSES} 17 MB", RESPONSES, lambda: b'{"input": "' + b"a" * (17 * 10**6) + b'"}', statuses=(413,)),
    )


def _tools_and_shapes() -> Iterator[Hostile]:
    def function(**parameters: object) -> list[dict[str, object]]:
        return [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]

    away = {"$ref": "http://127.0.0.1:9/"}
    yield from (
        field(CHAT, "tools", function(**away), label="a schema elsewhere"),
        field(CHAT, "tools", function(type="array"), label="arguments that are no object"),
        field(CHAT, "tools", function(properties={"a": {"type": "colour"}}), label="a type that is none"),
        field(CHAT, "tools", function() * 200, label="200 tools"),
        field(CHAT, "tools", function() * 2, label="two of a name"),
        field(CHAT, "tools", [{"type": "function", "function": {"name": "f\n<|im_end|>"}}], label="a name of markup"),
    )
    deep = '{"a":' * 900 + "1" + "}" * 900
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": deep}}
    yield field(CHAT, "messages", [HI, {"role": "assistant", "tool_calls": [call]}, HI], label="deep arguments")
    use = {"type": "tool_use", "id": "c", "name": "f", "input": json.loads(deep)}
    yield from (
        field(MESSAGES, "messages", [HI, {"role": "assistant", "content": [use]}, HI], label="deep input"),
        field(CHAT, "tools", function(properties=json.loads(deep)), label="a deep schema"),
        field(CHAT, "tool_choice", "required", label="a call of nothing"),
        field(CHAT, "tool_choice", {"type": "function", "function": {"name": "g"}}, label="a call of an unknown tool"),
    )
    strict = {"schema": away, "strict": True}
    yield field(CHAT, "response_format", {"type": "json_schema", "json_schema": strict}, label="elsewhere")
    doubled = {f"d{i}": {"oneOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 20} for i in range(30)}
    strict = {"schema": {"$ref": "#/$defs/d0", "$defs": doubled}, "strict": True}
    yield from (
        field(CHAT, "response_format", {"type": "json_schema", "json_schema": strict}, label="doublings"),
        field(CHAT, "response_format", {"type": "json_schema"}, label="no schema"),
        field(CHAT, "response_format", {"type": "yaml"}, label="no such format"),
        field(CHAT, "structured_outputs", {"choice": []}, label="no choice"),
        field(CHAT, "structured_outputs", {"choice": ["a"], "regex": "a"}, label="two shapes"),
        field(COMPLETIONS, "guided_regex", "(a", label="half a regex"),
        field(COMPLETIONS, "guided_grammar", "start: start", label="a grammar of nothing"),
        field(COMPLETIONS, "guided_regex", "a" * 10**5, label="a long regex"),
        field(MESSAGES, "tools", [{"name": "f", "input_schema": {"type": "array"}}], label="no object"),
    )
    tool = {"name": "f", "type": "bash_20250124"}
    forced = {**GOOD[MESSAGES], "tools": [tool], "tool_choice": {"type": "tool", "name": "f"}}
    yield from (
        instead(MESSAGES, "a server's tool", forced, "tool_choice"),
        field(MESSAGES, "output_format", {"type": "json_schema", "schema": {"enum": []}}, label="nothing matches"),
    )


def _templates() -> Iterator[Hostile]:
    yield from (
        field(CHAT, "chat_template", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
        field(CHAT, "chat_template", "{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    )
    for label, value in (
        ("chat_template", {"chat_template": "{{ 'a' * 1000000000 }}"}),
        ("messages", {"messages": []}),
        ("messages as text", {"messages": "mine"}),
        ("bos_token", {"bos_token": "<|im_start|>"}),
        ("tools", {"tools": True}),
        ("add_generation_prompt", {"add_generation_prompt": False}),
        ("empty name", {"": 1}),
        ("a list", {"no_such_name": [1, 2]}),
        ("5000 entries", {f"name_{i}": i for i in range(5000)}),
        ("huge int", {"no_such_name": 10**4000}),
        ("long value", {"no_such_name": "v" * 10**6}),
    ):
        yield field(CHAT, "chat_template_kwargs", value, label=label)
    yield from (
        field(CHAT, "chat_template_kwargs", []),
        literal(CHAT, "chat_template_kwargs", '{"no_such_name": 1e999}', "chat_template_kwargs"),
        literal(CHAT, "chat_template_kwargs", '{"no_such_name": NaN}'),
    )


def _sizes() -> Iterator[Hostile]:
    long = "context"  # the message must name the context as the limit
    for path in (CHAT, MESSAGES):
        yield from (
            with_text(path, "4 MB of a", lambda: "a" * (4 * MIB), long),
            with_text(path, "emoji", lambda: "\U0001f9e8" * MIB, long),
            with_text(path, "combining marks", lambda: "e" + "\u0301" * (2 * MIB), long),
            with_text(path, "right to left", lambda: "\u202e\u05d0" * MIB, long),
            replace(
                with_text(path, "60,000 characters", lambda: "word \u00e9 " * 8_500, long),
                names="prompt" if path == MESSAGES else "messages",
            ),
        )
    yield from (
        with_text(CHAT, "NULs", lambda: "\0" * (2 * MIB), long),
        prompted(COMPLETIONS, "4 MB", lambda: "a " * (2 * MIB), long),
        prompted(EXPLAIN, "4 MB", lambda: "a " * (2 * MIB), long),
        prompted(TOKENIZE, "4 MB", lambda: "a " * (2 * MIB), long),
        prompted(COMPLETIONS, "10^5 tokens", lambda: [5] * 10**5),
        prompted(EXPLAIN, "10^5 tokens", lambda: [5] * 10**5, long),
        prompted(COMPLETIONS, "10^5 texts", lambda: ["a"] * 10**5),
        Hostile("/v1/chat/completions 10^5 unknown fields, one bad", CHAT, _many_fields, "temperature"),
        prompted(COMPLETIONS, "10^5 lists", lambda: [[5]] * 10**5),
        prompted(COMPLETIONS, "10^5 tokens to echo", lambda: [5] * 10**5, echo=True),
    )
    for name, make in _MANY_VALUES.items():
        path = DETOKENIZE if name == "tokens" else COMPLETIONS if name in ("prompt", "logit_bias", "stop") else CHAT
        yield Hostile(f"{path} {name} of 10^6 values", path, filled(path, name, make), None, "values", (413,))
    for path in (CHAT, COMPLETIONS, MESSAGES, COUNT, TOKENIZE):
        yield Hostile(
            f"{path} 17 MB", path, lambda: b'{"prompt": "' + b"a" * (17 * 10**6) + b'"}', None, statuses=(413,)
        )


# Each has more values than an event loop should decode
_MANY_VALUES: dict[str, Callable[[], object]] = {
    "prompt": lambda: [5] * 10**6,
    "stop": lambda: ["a"] * 10**6,
    "logit_bias": lambda: {str(i): 1 for i in range(10**6)},
    "metadata": lambda: [[]] * 10**6,
    "unknown": lambda: [{}] * 10**6,
    "messages": lambda: [HI] * 200_000,
    "tokens": lambda: [5] * 10**6,
}


def filled(path: str, name: str, make: Callable[[], object]) -> Callable[[], bytes]:
    return lambda: json.dumps({**GOOD[path], name: make()}).encode()


def _many_fields() -> bytes:
    return json.dumps({**GOOD[CHAT], **{f"f{i}": i for i in range(100_000)}, "temperature": "hot"}).encode()


def _ids() -> Iterator[Hostile]:
    for label, prompt in (
        ("empty text", ""),
        ("empty list", []),
        ("empty ids", [[]]),
        ("an id too large", [1, 2, 2**31]),
        ("an id beyond the vocabulary", [1, 2, 10**6]),
        ("a negative id", [1, -1]),
        ("an id of 400 digits", [1, 10**400]),
        ("true", [1, True]),
        ("true first", [True, 1]),
        ("a fraction", [1, 1.5]),
        ("null", [1, None]),
        ("text among ids", [1, "a"]),
        ("ids among text", ["a", 1]),
        ("lists in lists", [[[1]]]),
        ("an object", {"text": "a"}),
        ("a number", 7),
        ("65 texts", ["a"] * 65),
    ):
        yield instead(COMPLETIONS, f"prompt {label}", {**GOOD[COMPLETIONS], "prompt": prompt}, "prompt")
        if label not in ("ids among text", "65 texts"):
            yield instead(EXPLAIN, f"prompt {label}", {"prompt": prompt}, "prompt")
    for label, tokens in (
        ("beyond the vocabulary", [10**6]),
        ("negative", [-1]),
        ("huge", [10**400]),
        ("true", [True]),
        ("a fraction", [1.5]),
        ("text", ["1"]),
        ("a number", 7),
        ("null", None),
    ):
        yield field(DETOKENIZE, "tokens", tokens, label=label)
    yield from (
        instead(TOKENIZE, "neither", {}, "prompt"),
        instead(TOKENIZE, "both", {"prompt": "a", "messages": [HI]}, "prompt"),
        instead(EXPLAIN, "neither", {}, "prompt"),
        instead(EXPLAIN, "both", {"prompt": "a", "messages": [HI]}, "messages"),
        field(EXPLAIN, "cache_salt", "a b"),
    )


def _wrong_types() -> Iterator[Hostile]:
    """Every field of every body, with a value of a wrong type."""
    for path, struct in STRUCTS.items():
        for one in msgspec.structs.fields(struct):
            name = one.encode_name
            accepted = {
                *ACCEPTED,
                *ACCEPTED_OF_OTHERS,
                *(ACCEPTED_BY_RESPONSES if path == RESPONSES else ()),
            }
            accepted.update(("return_token_strs", "user", "verbosity"))
            if one.type is Any or name in accepted or (path == MESSAGES and name in ("metadata", "service_tier")):
                continue  # accepts or refuses every value: tested separately
            takes_object = name in (
                "stream_options",
                "prompt_cache_options",
                "chat_template_kwargs",
                "logit_bias",
                "cache_control",
                "structured_outputs",
                "guided_json",
                "json_schema",
                "output_config",
                "context_management",
                "text",
                "reasoning",
            )
            yield field(path, name, 7 if takes_object else {"x": [None]}, label="wrong type")


def _models() -> Iterator[Hostile]:
    for path in (
        CHAT,
        COMPLETIONS,
        MESSAGES,
        RESPONSES,
        COUNT,
        EXPLAIN,
        TOKENIZE,
        DETOKENIZE,
        OLLAMA_CHAT,
        OLLAMA_GENERATE,
    ):
        for label, name in (
            ("unknown", "gpt-9"),
            ("path", "../../etc/passwd"),
            ("long", "m" * 10**6),
            ("control", "a\r\nb: c"),
        ):
            yield instead(path, f"model {label}", {**GOOD[path], "model": name}, "model", (404,))


def _duplicates() -> Iterator[Hostile]:
    """Duplicate keys: the last one counts, in the check and in the use. A bad value cannot hide behind a good one."""
    yield from (
        literal(CHAT, "n", '1, "n": 1000000', "n", label="twice, the last bad"),
        literal(MESSAGES, "max_tokens", '1, "max_tokens": -1', "max_tokens", label="twice, the last bad"),
    )


def corpus() -> tuple[Hostile, ...]:
    rows: list[Hostile] = []
    for path in ASKED:
        some = _WHOLE if path in (CHAT, MESSAGES) else _WHOLE[::5]
        rows += [whole(path, label, data) for label, data in some]
    rows += [literal(path, name, nested("[", "]"), label="10^5 deep") for path, name in _DEEP]
    rows += [literal(CHAT, "metadata", nested('{"a":', "}").replace(":}", ":1}", 1), label="objects 10^5 deep")]
    rows += [literal(path, name, value) for path, name, value in _NO_NUMBERS]
    for make in (
        _numbers,
        _lists,
        _conversations,
        _items,
        _tools_and_shapes,
        _templates,
        _sizes,
        _ids,
        _wrong_types,
        _models,
        _duplicates,
    ):
        rows += make()
    return tuple(rows)


# Odd values of numbers

NUMBERS: dict[str, dict[str, tuple[int, int]]] = {  # path -> field -> its bounds, if they are integers
    CHAT: {
        "n": (1, 32),
        "max_tokens": (-1, 4096),
        "max_completion_tokens": (-1, 4096),
        "min_tokens": (0, 4096),
        "temperature": (0, 2),
        "top_p": (0, 1),
        "top_k": (-1, 2**31 - 1),
        "min_p": (0, 1),
        "frequency_penalty": (-2, 2),
        "presence_penalty": (-2, 2),
        "repetition_penalty": (0, 100),
        "seed": (-(2**63), 2**64 - 1),
        "top_logprobs": (0, 20),
        "priority": (-100, 100),
    },
    COMPLETIONS: {
        "n": (1, 32),
        "max_tokens": (-1, 4096),
        "min_tokens": (0, 4096),
        "logprobs": (0, 20),
        "seed": (-(2**63), 2**64 - 1),
    },
    MESSAGES: {
        "max_tokens": (0, 4096),
        "temperature": (0, 1),
        "top_p": (0, 1),
        "top_k": (0, 2**31 - 1),
        "min_p": (0, 1),
        "repetition_penalty": (0, 100),
        "seed": (-(2**63), 2**64 - 1),
        "priority": (-100, 100),
    },
    RESPONSES: {
        "max_output_tokens": (-1, 4096),
        "temperature": (0, 2),
        "top_p": (0, 1),
        "top_logprobs": (0, 20),
        "seed": (-(2**63), 2**64 - 1),
    },
}
_ODD = (
    *("-1", "-0", "-0.0", "0", "1", "2147483647", "2147483648", "4294967296", "9223372036854775807"),
    *("9223372036854775808", "18446744073709551616", "-9223372036854775809", "1" + "0" * 400, "1e400", "-1e400"),
    *("1e-400", "5e-324", "1e308", "0.1", "1.0", "NaN", "Infinity", "-Infinity"),
    *('"1"', '""', "null", "true", "false", "[]", "[1]", "{}"),
)


def numbers() -> Iterator[tuple[str, str, str]]:
    """Yield (path, field, value as written in the body)."""
    for path, fields in NUMBERS.items():
        for name, (low, high) in fields.items():
            for value in (*_ODD, str(low), str(low - 1), str(high), str(high + 1)):
                yield path, name, value


def body_with(path: str, name: str, value: str, more: Mapping[str, Any] | None = None) -> bytes:
    rest = {key: kept for key, kept in {**GOOD[path], **(more or {})}.items() if key != name}
    return (json.dumps(rest)[:-1] + f', "{name}": {value}}}').encode()


# Not valid HTTP


@dataclass(frozen=True, slots=True)
class Wire:
    """Bytes for a socket. The response has one of the statuses; 0: the connection is closed without a response."""

    name: str
    make: Callable[[], bytes]
    statuses: tuple[int, ...] = (400,)


_BODY = json.dumps({"messages": [HI], "max_tokens": 2}).encode()


def _post(headers: bytes, body: bytes = _BODY) -> bytes:
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n" + headers + b"\r\n" + body


def _length(value: bytes) -> bytes:
    return _post(b"content-length: " + value + b"\r\n")


_SIZE = str(len(_BODY)).encode()

_CHUNKED = b"transfer-encoding: chunked\r\n"


def _get(headers: bytes) -> bytes:
    return b"GET /v1/models HTTP/1.1\r\n" + headers + b"\r\n"


WIRE = (
    Wire("two lengths that differ", lambda: _post(b"content-length: 3\r\ncontent-length: " + _SIZE + b"\r\n")),
    Wire("a length and chunks", lambda: _post(b"content-length: 3\r\ntransfer-encoding: chunked\r\n", b"0\r\n\r\n")),
    Wire("chunks and a length", lambda: _post(b"transfer-encoding: chunked\r\ncontent-length: 3\r\n", b"0\r\n\r\n")),
    Wire("a list of lengths", lambda: _length(_SIZE + b", " + _SIZE)),
    Wire("a negative length", lambda: _length(b"-1")),
    Wire("a length with a sign", lambda: _length(b"+" + _SIZE)),
    Wire("a length in hex", lambda: _length(b"0x10")),
    Wire("a length that is no number", lambda: _length(b"many")),
    Wire("an empty length", lambda: _length(b"")),
    Wire("a length beyond 64 bits", lambda: _length(b"9" * 40)),
    Wire("a length of 10^18", lambda: _length(b"1" + b"0" * 18), (413,)),
    Wire("unknown transfer coding", lambda: _post(b"transfer-encoding: xchunked\r\n"), (400, 501)),
    Wire("chunked twice", lambda: _post(b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n"), (400, 501)),
    Wire("a chunk size that is none", lambda: _post(_CHUNKED, b"zz\r\n\r\n")),
    Wire("a chunk size beyond 64 bits", lambda: _post(_CHUNKED, b"f" * 20 + b"\r\n")),
    Wire("a negative chunk size", lambda: _post(_CHUNKED, b"-1\r\n\r\n")),
    Wire("a chunk longer than it says", lambda: _post(_CHUNKED, b"1\r\n" + _BODY)),
    Wire("a chunk with 4 MiB of extensions", lambda: _post(_CHUNKED, b"1;" + b"a" * (4 * MIB) + b"\r\nx\r\n")),
    Wire("17 MB of chunks", lambda: _post(_CHUNKED, (b"100000\r\n" + b"a" * MIB + b"\r\n") * 17), (413,)),
    Wire("a header of 2 MiB", lambda: _post(b"x: " + b"a" * (2 * MIB) + b"\r\n"), (431,)),
    Wire("a header name of 2 MiB", lambda: _post(b"a" * (2 * MIB) + b": x\r\n"), (431,)),
    Wire("a header of 2 MiB without an end", lambda: _get(b"x: " + b"a" * (2 * MIB))[:-4], (431,)),
    Wire("10,000 headers", lambda: _post(b"".join(b"x-%d: some value\r\n" % i for i in range(10_000))), (431,)),
    Wire("a path of 2 MiB", lambda: b"GET /" + b"a" * (2 * MIB) + b" HTTP/1.1\r\n\r\n", (400, 414, 431)),
    Wire("trailers without an end", lambda: _post(_CHUNKED, b"0\r\n" + b"x: y\r\n" * 100_000), (400, 431)),
    Wire("NUL in a header", lambda: _post(b"x: a\x00b\r\ncontent-length: 0\r\n", b"")),
    Wire("NUL in the path", lambda: b"GET /hea\x00lth HTTP/1.1\r\nhost: localhost\r\n\r\n"),
    Wire("a blank before the colon", lambda: _post(b"content-length : " + _SIZE + b"\r\n")),
    Wire("no colon", lambda: _post(b"nonsense\r\n")),
    Wire("a lone carriage return", lambda: _post(b"x: a\rcontent-length: 3\r\n")),
    Wire("no such method", lambda: b"G@T / HTTP/1.1\r\nhost: localhost\r\n\r\n"),
    Wire("version 9", lambda: b"GET /health HTTP/9.9\r\nhost: localhost\r\n\r\n", (400, 505)),
    Wire("HTTP/2 preface", lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, 403, 404, 405, 501, 505)),
    Wire("TLS hello", lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 500),
    Wire("pickle", lambda: PICKLE),
    Wire("random bytes", lambda: bytes(range(256)) * 64),
    Wire("CONNECT", lambda: b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nhost: localhost\r\n\r\n", (400, 404, 405, 501)),
    Wire("a proxy's request", lambda: b"GET http://a.example/x HTTP/1.1\r\nhost: localhost\r\n\r\n", (400, 403, 404)),
    Wire("two hosts", lambda: _get(b"host: localhost\r\nhost: evil.example\r\n"), (400, 403)),
    Wire("two hosts, the good one last", lambda: _get(b"host: evil.example\r\nhost: localhost\r\n"), (400, 403)),
)  # fmt: skip

# (method, path, allowed statuses) for a request of this machine without a key.
PATHS: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("GET", "//v1/models", (404,)),
    ("GET", "/v1//models", (404,)),
    ("GET", "/v1/models/", (404,)),
    ("GET", "/v1/../health", (404,)),
    ("GET", "/v1/%2e%2e/health", (404,)),
    ("GET", "/%2e%2e/%2e%2e/etc/passwd", (404,)),
    ("GET", "/v1/models/..%2f..%2fhealth", (404,)),
    ("GET", "/v1/models/%00", (404,)),
    ("GET", "/v1/models/%ff%fe", (404,)),
    ("GET", "/v1/models/" + "m" * 10_000, (404,)),
    ("GET", "/V1/MODELS", (404,)),
    ("GET", "/v1/models%20", (404,)),
    ("GET", "/v1/models;a=b", (404,)),
    ("GET", "/docs/../admin", (404,)),
    ("GET", "/%0d%0ax-injected:%20yes", (404,)),
    ("POST", "/v1/chat/completions/", (404,)),
    ("POST", "//v1/chat/completions", (404,)),
    ("GET", "/v1/chat/completions", (405,)),
    ("HEAD", "/v1/chat/completions", (405,)),
    ("OPTIONS", "/v1/chat/completions", (405,)),
    ("TRACE", "/v1/chat/completions", (405,)),
    ("PUT", "/v1/messages", (405,)),
    ("DELETE", "/v1/models", (405,)),
    ("PATCH", "/metrics", (405,)),
    ("POST", "/health", (405,)),
    ("OPTIONS", "/", (405,)),
    ("HEAD", "/nothing", (404,)),
    ("TRACE", "/", (405,)),
)
