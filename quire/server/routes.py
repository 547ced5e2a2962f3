"""What a row of the route table is, and what is made from the rows: the OpenAPI document, and hints for 404 responses.

There are no redirects: a redirect would hide a wrong base URL and cost a round trip with each request.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
from typing import Any

import msgspec

from quire.server.errors import Dialect
from quire.server.protocols.openai import OPENAI
from quire.server.request_context import Handler

Json = dict[str, Any]

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(?P<name>\w+)(?::\w+)?\}")


class Access(Enum):
    PUBLIC = "public"
    USER = "user"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One row of the route table. A route needs a key unless its access is PUBLIC."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    dialect: Dialect = OPENAI
    access: Access = Access.USER
    streams: bool = False
    generates: bool = False  # refused before its body is read while all queues are full
    tag: str = "server"
    query: type[msgspec.Struct] | None = None  # the URL's query parameters
    form: type[msgspec.Struct] | None = None  # a body of multipart/form-data


STATUSES = {
    400: "A field has an invalid value, or the body is not JSON. The message names the field.",
    401: "The API key is missing or unknown.",
    403: "The key is not allowed to do this, or the request comes from a foreign web page.",
    404: "No such model or object.",
    405: "The path does not support this method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "A limit of this key or of the server is reached. `Retry-After` is the time to wait.",
    499: "The request was cancelled, by an admin or with its own key.",
    500: "The request failed in the server, or the model's process died.",
    503: "The server or the model is starting, shutting down or stuck. `Retry-After` is the time to wait.",
    529: "The queue is full. `Retry-After` is the time to wait.",
}
_MAY_RETRY = (429, 503, 529)

# JSON schemas of each protocol's errors, by the name of the dialect.
ERRORS: Mapping[str, Json] = {
    "openai": {
        "title": "OpenAIError",
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string", "description": "The error, with the field and its value."},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"], "description": "The field at fault, if there is one."},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    },
    "anthropic": {
        "title": "AnthropicError",
        "type": "object",
        "required": ["type", "error", "request_id"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {
                    "type": {"type": "string"},
                    "message": {"type": "string", "description": "The error, with the field and its value."},
                },
            },
            "request_id": {"type": "string"},
        },
    },
    "ollama": {
        "title": "OllamaError",
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "string", "description": "The error, with the field and its value."}},
    },
}

# Descriptions of body fields without one of their own: a name means the same in all protocols.
FIELDS = {
    "add_generation_prompt": "End the prompt with the start of the assistant's turn.",
    "allowed_token_ids": "Only these tokens may appear in the answer.",
    "cache": "Add a `cache` object to the response: how much of the prompt was cached, and why not more.",
    "cache_control": "Keep the cache of the prompt up to here for `ttl`.",
    "cache_salt": "Share the cache only with requests that send the same salt.",
    "format": "The answer's format: json for any object, or a JSON schema.",
    "ebnf": "Like `grammar`, in GBNF.",
    "frequency_penalty": "-2 to 2: lowers a token's logit for each of its occurrences in the answer.",
    "grammar": "A grammar that the answer must follow, in llguidance's dialect of Lark or in GBNF.",
    "guided_choice": "Like `structured_outputs.choice`.",
    "guided_grammar": "Like `structured_outputs.grammar`.",
    "guided_json": "Like `structured_outputs.json`.",
    "guided_regex": "Like `structured_outputs.regex`.",
    "ignore_eos": "Continue after the model's end-of-sequence token.",
    "include_stop_str_in_output": "Keep the stop string in the answer.",
    "input": "The conversation: a text, or items, oldest first.",
    "instructions": "A system prompt before the conversation.",
    "json_schema": "A schema, or its JSON text, that the answer must follow.",
    "logit_bias": "Maps token ids to numbers from -100 to 100, which are added to their logits.",
    "logprobs": "Return log probabilities.",
    "max_completion_tokens": (
        "The longest answer, in tokens. -1: no limit but the context. Default: --default-max-tokens, 4096."
    ),
    "max_output_tokens": "The longest answer, in tokens. Default: --default-max-tokens, 4096.",
    "max_tokens": (
        "The longest answer, in tokens. -1: no limit but the context. 0 (completions only): no answer."
        " Default: in completions 16, else --default-max-tokens, 4096."
    ),
    "messages": "The conversation, oldest first.",
    "min_p": "0 to 1: sample only tokens at least this probable, relative to the most probable one.",
    "min_tokens": "The shortest answer, in tokens.",
    "model": "The name of the model, as listed by `/v1/models`.",
    "n": "The number of answers. They share the computation of the prompt.",
    "options": "Sampling parameters and length limits.",
    "n_predict": "Like `max_tokens`.",
    "no_stop_trim": "Like `include_stop_str_in_output`.",
    "parallel_tool_calls": "false: at most one call in an answer.",
    "presence_penalty": "-2 to 2: lowers the logit of tokens that occur in the answer.",
    "priority": "high, normal or low; or a number: 0 is normal, below 0 high, above 0 low. The key's tier bounds it.",
    "prompt": "Text, token ids, or a list of either.",
    "prompt_cache_key": "Keep this prompt's cache under this name.",
    "prompt_cache_options": "How this prompt's cache is kept.",
    "prompt_cache_retention": "How long this prompt's cache is kept.",
    "regex": "A regular expression that the whole answer must match.",
    "repeat_penalty": "Like `repetition_penalty`.",
    "repetition_penalty": "Above 1: divides the logit of tokens that occur in the prompt or the answer.",
    "repeat_last_n": "0: no penalties. Any other value: penalties apply to the whole context.",
    "response_format": "The format of the answer.",
    "seed": "The same seed gives the same answer, alone and in any batch.",
    "skip_special_tokens": "Leave the model's control tokens out of the text.",
    "stop": "Up to 16 strings that end the answer.",
    "stop_sequences": "Up to 16 strings that end the answer.",
    "stop_token_ids": "Tokens that end the answer.",
    "stream": "Stream the answer as server-sent events.",
    "stream_options": "Options of a stream.",
    "structured_outputs": "A constraint on the answer; set one of its fields.",
    "system": "The system prompt.",
    "temperature": "0 to 2 (Anthropic: 1); 0: always the most probable token. Default: the model's own, else 1.",
    "tokens": "Token ids.",
    "tool_choice": "Whether to call a tool, and which.",
    "tools": "Functions that the answer may call; the client runs them.",
    "top_k": "Sample from this many of the most probable tokens.",
    "top_logprobs": "Number of alternatives per token, 0 to 20.",
    "top_p": "0 to 1: sample from the most probable tokens that together reach this probability.",
}

HEADERS = {
    "x-request-id": {"description": "The id of the request in the server log.", "schema": {"type": "string"}},
    "x-should-retry": {"description": "Whether a retry may succeed.", "schema": {"enum": ["true", "false"]}},
    "retry-after": {"description": "Seconds.", "schema": {"type": "string", "pattern": "^[0-9]+$"}},
}

# Values of the fields in example bodies.
EXAMPLES: Mapping[str, Any] = {
    "messages": [{"role": "user", "content": "Name three colours."}],
    "input": "Name three colours.",
    "prompt": "Once upon a time",
    "text": "Once upon a time",
    "tokens": [1, 2, 3],
    "max_tokens": 32,
    "input_file_id": "file-0123456789abcdef01234567",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
}

_INFO = (
    "A local model server with batching and prefix caching. It implements the APIs of OpenAI, Anthropic and Ollama. "
    "Unknown fields are ignored and named in the header `x-quire-ignored-fields`."
)


def openapi_document(endpoints: Iterable[Endpoint], version: str, *, model: str | None = None) -> Json:
    """Make the document. `model`: a model name for the examples."""
    routes = list(endpoints)
    kinds = list(dict.fromkeys(kind for route in routes for kind in (route.body, route.answer) if kind is not None))
    refs, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    schema_of = dict(zip(kinds, refs, strict=True))
    _describe(schemas, [ref for kind, ref in schema_of.items() if any(route.body is kind for route in routes)])
    examples = {**EXAMPLES, "model": model} if model is not None else EXAMPLES
    paths: dict[str, Json] = {}
    for route in routes:
        operation = _operation(route, schema_of, schemas, examples)
        paths.setdefault(_plain_path(route.path), {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "quire",
            "version": version,
            "description": _INFO,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "tags": [{"name": name} for name in dict.fromkeys(route.tag for route in routes)],
        "paths": paths,
        "components": {
            "schemas": {**schemas, **{str(error["title"]): error for error in ERRORS.values()}},
            "headers": HEADERS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(
    route: Endpoint, schema_of: Mapping[type[msgspec.Struct], Json], schemas: Json, examples: Mapping[str, Any]
) -> Json:
    operation: Json = {
        "operationId": "_".join([route.method.lower(), *re.findall(r"\w+", _plain_path(route.path))]),
        "summary": route.summary,
        "tags": [route.tag],
        "security": [] if route.access is Access.PUBLIC else [{"bearer": []}, {"x-api-key": []}],
        "responses": _responses(route, schema_of),
    }
    if route.access is Access.ADMIN:
        operation["description"] = "Needs an admin key."
    if parameters := _parameters(route.path, examples) + _query_parameters(route.query):
        operation["parameters"] = parameters
    if route.body is not None:
        schema = schema_of[route.body]
        media = {"schema": schema, "example": _example(_resolved(schema, schemas), examples)}
        operation["requestBody"] = {"required": True, "content": {"application/json": media}}
    if route.form is not None:
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _form(route.form)}}}
    return operation


def _form(kind: type[msgspec.Struct]) -> Json:
    """The schema of a form. A field of bytes is a file, which is sent as it is."""
    _, schemas = msgspec.json.schema_components((kind,), ref_template=_REF)
    schema: Json = schemas[kind.__name__]
    for field in schema["properties"].values():
        if field.pop("contentEncoding", None) is not None:
            field |= {"format": "binary"}
    return schema


def _responses(route: Endpoint, schema_of: Mapping[type[msgspec.Struct], Json]) -> Json:
    good: Json = {"description": "Success.", "headers": _header_refs("x-request-id")}
    if route.answer is not None:
        good["content"] = {"application/json": {"schema": schema_of[route.answer]}}
    if route.streams:
        kind, events = _stream(route)
        good.setdefault("content", {})[kind] = {"schema": {"description": events}}
    responses: Json = {"200": good}
    error: Json = {"$ref": _REF.format(name=ERRORS.get(route.dialect.name, ERRORS["openai"])["title"])}
    for status in _statuses(route):
        schema: Json = error
        if status == 503 and route.body is None and route.answer is not None:
            schema = {"anyOf": [error, schema_of[route.answer]]}  # /health and /ready return their body with 503 too
        names = ("x-request-id", "x-should-retry", *(["retry-after"] if status in _MAY_RETRY else []))
        responses[str(status)] = {
            "description": STATUSES[status],
            "headers": _header_refs(*names),
            "content": {"application/json": {"schema": schema}},
        }
    return responses


def _stream(route: Endpoint) -> tuple[str, str]:
    """Return the media type and the description of a stream."""
    if route.dialect.name == "ollama":
        return "application/x-ndjson", "One JSON object per line, unless `stream` is false."
    when = "unless `once` is true" if route.body is None else "if `stream` is true"
    return "text/event-stream", f"Server-sent events, {when}."


def _statuses(route: Endpoint) -> list[int]:
    found = {403, 405, 500, 503}
    if route.access is not Access.PUBLIC:
        found.add(401)
    if route.body is not None or route.form is not None:
        found |= {400, 404, 408, 413, 429}
        if route.dialect.name == "anthropic":
            found.add(529)
    if route.generates:
        found.add(499)
    if _PARAMETER.search(route.path):
        found |= {400, 404}
    if route.query is not None:
        found |= {400, 404, 429}
    return sorted(found)


def _plain_path(path: str) -> str:
    """The path without Starlette's converters."""
    return _PARAMETER.sub(r"{\g<name>}", path)


def _parameters(path: str, examples: Mapping[str, Any]) -> list[Json]:
    parameters = []
    for found in _PARAMETER.finditer(path):
        schema = {"type": "string", "minLength": 1}
        parameter: Json = {"name": found["name"], "in": "path", "required": True, "schema": schema}
        for name in (found["name"], found["name"].removesuffix("_id")):
            if name in examples:
                parameter["example"] = examples[name]
        parameters.append(parameter)
    return parameters


def _query_parameters(kind: type[msgspec.Struct] | None) -> list[Json]:
    """Return the query parameters: the fields of a struct of plain values."""
    if kind is None:
        return []
    _, schemas = msgspec.json.schema_components((kind,), ref_template=_REF)
    schema = schemas[kind.__name__]
    return [
        {"name": name, "in": "query", "required": name in schema.get("required", ()), "schema": field}
        for name, field in schema["properties"].items()
    ]


def _example(schema: Json, examples: Mapping[str, Any]) -> Json:
    """Return an example body: its fields that have an example, which are at least the required ones."""
    names = [name for name in ("model", *EXAMPLES) if name in schema["properties"] and name in examples]
    if "messages" in names or "input" in names:
        names = [name for name in names if name not in ("prompt", "text")]  # alternatives to messages
    return {name: examples[name] for name in names}


def _describe(schemas: Json, bodies: Sequence[Json]) -> None:
    """Add missing descriptions to the fields of bodies and of the types in them."""
    todo: list[object] = list(bodies)
    done: set[str] = set()
    while todo:
        found = todo.pop()
        if isinstance(found, list):
            todo += found
        elif isinstance(found, dict):
            if "$ref" in found and found["$ref"] not in done:
                done.add(found["$ref"])
                todo.append(_resolved(found, schemas))
            for name, schema in found.get("properties", {}).items():
                if name in FIELDS and not any("description" in one for one in schema.get("anyOf", ())):
                    schema.setdefault("description", FIELDS[name])
                todo.append(schema)
            todo += [found.get(name) for name in ("anyOf", "items", "prefixItems", "additionalProperties")]


def _resolved(schema: Json, schemas: Json) -> Json:
    resolved: Json = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    return resolved


def _header_refs(*names: str) -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


MAX_PATH_CHARS = 200  # longer paths are not typos
NEAR = 0.85  # difflib's ratio of paths that differ in a letter or two
# Prefixes that base URLs often repeat or lack.
_PREFIXES = ("v1", "api", "openai", "anthropic")
BASES = {
    "openai": "OpenAI clients need a base URL that ends in a single /v1",
    "anthropic": "Anthropic clients add /v1 themselves: their base URL ends without it",
    "ollama": "Ollama clients need the address without a path",
}
_NO_EMBEDDINGS = "quire serves text generation models and computes no embeddings"
_NO_STORE = "this server does not store such objects"
_NO_MODELS = "the models are fixed at start: download them with `quire pull` and restart the server"

# Paths of other servers, without the prefixes above, and why they are not served.
UNSERVED = {
    "embeddings": _NO_EMBEDDINGS,
    "embed": _NO_EMBEDDINGS,
    "embedding": _NO_EMBEDDINGS,
    "rerank": _NO_EMBEDDINGS,
    "score": _NO_EMBEDDINGS,
    "audio": "quire reads and writes text only",
    "images": "quire reads and writes text only",
    "videos": "quire reads and writes text only",
    "realtime": "quire reads and writes text only",
    "moderations": "this server has no moderation model",
    "uploads": _NO_STORE,
    "assistants": _NO_STORE,
    "threads": _NO_STORE,
    "conversations": _NO_STORE,
    "vector_stores": _NO_STORE,
    "messages/batches": _NO_STORE,
    "fine_tuning": "this server does not train",
    "complete": "it is the older form of /v1/messages",
    "create": _NO_MODELS,
    "copy": _NO_MODELS,
    "delete": _NO_MODELS,
    "push": _NO_MODELS,
    "blobs": _NO_MODELS,
    "infill": "the models generate at the end of the prompt only",
    "props": "GET /v1/models and POST /api/show describe a model, GET /tokenizer_info has its chat template",
    "slots": "GET /v1/requests lists the requests in progress",
    "apply-template": "POST /tokenize with messages returns the tokens of their prompt, with their texts",
}


# The same for paths below served paths.
UNSERVED_BELOW = {"responses": _NO_STORE, "chat/completions": _NO_STORE}


def _split(path: str) -> tuple[list[str], str]:
    """Split a path into its prefixes and the rest, in lower case and without empty parts."""
    parts = [part for part in path.lower().split("/") if part]
    prefix = [*takewhile(_PREFIXES.__contains__, parts)]
    return prefix, "/".join(parts[len(prefix) :])


def find_meant(path: str, rows: Sequence[Endpoint]) -> Endpoint | None:
    """Return the endpoint that differs only in prefixes, slashes, case, a missing end or a letter or two."""
    prefix, core = _split(path)
    if len(path) > MAX_PATH_CHARS or not core:
        return None
    known = [(*_split(row.path.partition("{")[0]), row) for row in rows]
    same = [one for one in known if one[1] == core]
    siblings = [one for one in known if prefix and one[0] == prefix[-1:]]
    if not any(one in siblings for one in same):
        longer = [one for one in siblings if one[1].startswith(core + "/")]
        same = longer if len(longer) == 1 else same  # /v1/chat is the beginning of one path, /v1/cache of several
    if not same:  # with a path parameter, such as a model name
        same = [one for one in known if "{" in one[2].path and core.startswith(one[1] + "/")]
    if not same:
        near = difflib.get_close_matches(core, {one[1] for one in known}, n=1, cutoff=NEAR)
        same = [one for one in known if one[1] in near]
    same.sort(key=lambda one: (one[0][-1:] != prefix[-1:], "{" in one[2].path))
    return same[0][2] if same else None


def why_unserved(path: str) -> str | None:
    """Return why a path of other servers is not served. None: not such a path."""
    core = _split(path)[1] if len(path) <= MAX_PATH_CHARS else ""
    for head, why in UNSERVED_BELOW.items():
        if core.startswith(f"{head}/"):
            return why
    heads = (core, "/".join(core.split("/")[:2]), core.split("/", maxsplit=1)[0])
    return next((UNSERVED[head] for head in heads if head in UNSERVED), None)


def advice(path: str, meant: Endpoint | None) -> str:
    """Return the second part of the 404 message."""
    if meant is not None:
        text = f"did you mean {meant.method} {_plain_path(meant.path)}?"
        is_base = _split(path)[0] != _split(meant.path)[0]
        return f"{text} {BASES[meant.tag]}" if is_base and meant.tag in BASES else text
    if (why := why_unserved(path)) is not None:
        return f"it is not served: {why}"
    return "/docs lists all endpoints"
