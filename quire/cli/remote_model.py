"""A model behind a server, as a `ChatModel`: requests are sent to the API, event streams are read back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields, replace
from typing import TYPE_CHECKING, Any

from quire.cli.chat_model import AnswerUsage, ChatInput, Piece, Take
from quire.cli.server_client import PATIENT, QUICK, Address, ServerClient, ServerNotFound, note, printable
from quire.errors import QuireError, RequestFailed

if TYPE_CHECKING:
    from quire.core.kv_cache import CacheStats
    from quire.engine.params import GenerationParams

# Fields of GenerationParams -> their names in the API. Fields that were not given are not sent: the server has the
# model's own defaults.
WIRE_NAMES = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty")},
    **{name: name for name in ("frequency_penalty", "logit_bias", "seed", "n", "max_tokens", "min_tokens", "stop")},
    **{name: name for name in ("stop_token_ids", "ignore_eos")},
    "include_stop": "include_stop_str_in_output",
    "skip_special": "skip_special_tokens",
}
GRAMMAR_NAMES = {"json_schema": "guided_json", "regex": "guided_regex", "lark": "guided_grammar"}  # by kind


def find_server(address: Address, model: str | None, api_key: str | None) -> RemoteModel | None:
    """The model on the server at an address.

    Returns None if the address is the default one and has no usable server. Raises if the user gave the address.
    """
    server = ServerClient(address.url, api_key, PATIENT if address.is_named else QUICK)
    try:
        server.wait_until_ready()
        name, max_model_len = server.find_model(model)
    except ServerNotFound:
        if address.is_named:
            raise
        return None
    except QuireError as error:
        if address.is_named:
            raise
        note(f"{error}. Loading the model here")
        return None
    note(f"using {name} on {address.url}")
    return RemoteModel(server, name, max_model_len)


class RemoteModel:
    """A model of a server."""

    has_template = True  # a server without one refuses the request

    def __init__(self, server: ServerClient, name: str, max_model_len: int) -> None:
        self.name = name
        self.max_model_len = max_model_len
        self._server = server

    def answer(self, ask: ChatInput, params: GenerationParams, take: Take) -> AnswerUsage | None:
        usage: AnswerUsage | None = None
        unfinished = set(range(params.n))
        path = "/v1/completions" if isinstance(ask, str) else "/v1/chat/completions"
        with self._server.events("POST", path, request_body(self.name, ask, params)) as events:
            for chunk in self._chunks(events):
                try:
                    pieces, found = read_chunk(chunk, has_stops=bool(params.stops))
                except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
                    raise self._server.malformed("a malformed chunk", chunk) from None
                for piece in pieces:
                    if piece.index not in unfinished:
                        raise self._server.malformed("more samples than requested", chunk)
                    if piece.finish_reason is not None:
                        unfinished.discard(piece.index)
                    take(piece)
                usage = found or usage
        if unfinished:
            raise RequestFailed(f"{self._server.url} ended the stream before sample {min(unfinished)} was finished")
        return usage

    def _chunks(self, events: Iterable[str]) -> Iterator[Any]:
        for data in events:
            if data.startswith("[DONE]"):
                return
            yield self._server.parse(data)
        raise RequestFailed(f"{self._server.url} ended the stream before the answer was finished")

    def cache_stats(self) -> CacheStats:
        from quire.core.kv_cache import CacheStats

        found = self._server.get("/v1/cache/stats")
        try:
            names = [field.name for field in fields(CacheStats) if field.type == "int" and field.default is MISSING]
            counts: dict[str, Any] = {name: _whole(found[name]) for name in names}
            return replace(CacheStats.none(), **counts)
        except (KeyError, TypeError, ValueError):
            raise self._server.malformed("malformed cache statistics", found) from None

    def close(self) -> None:
        """Nothing to close: no connection is open between two answers."""


def request_body(model: str, ask: ChatInput, params: GenerationParams) -> dict[str, Any]:
    from quire.engine.params import GenerationParams

    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}, "cache": True}
    neutral = GenerationParams()
    for name, wire_name in WIRE_NAMES.items():
        value = getattr(params, name)
        if value != getattr(neutral, name):
            body[wire_name] = value
    if params.grammar is not None:
        body[GRAMMAR_NAMES[params.grammar.kind]] = params.grammar.given or params.grammar.source
    if isinstance(ask, str):
        body["prompt"] = ask
        if params.logprobs is not None:
            body["logprobs"] = params.logprobs
    else:
        body["messages"] = [dict(message) for message in ask]
        if params.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": params.logprobs}
    return body


# Responses


def read_chunk(chunk: Any, *, has_stops: bool) -> tuple[list[Piece], AnswerUsage | None]:
    """Raises RequestFailed with the server's message. A malformed chunk raises KeyError, TypeError or the like."""
    if error := chunk.get("error"):
        message = error.get("message") if isinstance(error, dict) else error
        raise RequestFailed(printable(str(message or error)))
    usage = chunk.get("usage")
    counts = None
    if usage:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        cache = chunk.get("cache")
        counts = AnswerUsage(
            prompt_tokens=_whole(usage["prompt_tokens"]),
            completion_tokens=_whole(usage["completion_tokens"]),
            cached_tokens=_whole(cached),
            cache=None if cache is None else _explanation(cache),
        )
    return [_piece(choice, has_stops=has_stops) for choice in chunk["choices"]], counts


def _piece(choice: dict[str, Any], *, has_stops: bool) -> Piece:
    delta = choice.get("delta") or {}
    text = choice.get("text") if "text" in choice else delta.get("content")
    thought, refusal = delta.get("reasoning_content"), delta.get("refusal")
    reason = choice.get("finish_reason")
    for value in (text, thought, refusal, reason):
        if not isinstance(value, str | None):
            raise TypeError(value)
    if reason == "error":
        raise RequestFailed("the server could not finish the answer")
    found = choice.get("logprobs")
    logprobs = () if found is None else _logprobs(found)
    stop = choice.get("stop_reason")  # vLLM's field: the stop string, or the id of a stop token
    return Piece(
        index=_whole(choice["index"]),
        text=text or "",
        num_tokens=len(logprobs) if found is not None else None if text or thought or refusal else 0,
        thought=thought or "",
        calls=tuple(_called(delta)),
        refusal=refusal or "",
        logprobs=logprobs,
        finish_reason=reason,
        stop=stop if isinstance(stop, str) else None,
        is_stop_known="stop_reason" in choice or reason != "stop" or not has_stops,
    )


def _called(delta: dict[str, Any]) -> Iterator[str]:
    """Names of called tools. The name is in the first part of a call; the others have its arguments."""
    for call in delta.get("tool_calls") or ():
        if name := (call.get("function") or {}).get("name"):
            yield printable(str(name))


def _logprobs(found: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Log probabilities of either endpoint, as --json prints them. The API has no token ids and ranks."""
    if "content" in found:
        return tuple(_logprob(entry) for entry in found["content"] or ())
    texts, numbers = found["tokens"], found["token_logprobs"]
    tops = found.get("top_logprobs") or [None] * len(texts)
    return tuple(
        {
            "text": str(text),
            "logprob": number,
            **({"top": [{"text": str(other), "logprob": chance} for other, chance in top.items()]} if top else {}),
        }
        for text, number, top in zip(texts, numbers, tops, strict=True)
    )


def _logprob(entry: dict[str, Any]) -> dict[str, Any]:
    top = entry.get("top_logprobs")
    return {
        "text": str(entry["token"]),
        "bytes": entry.get("bytes"),
        "logprob": entry["logprob"],
        **({"top": [_logprob(other) for other in top]} if top else {}),
    }


def _explanation(cache: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_tokens": _whole(cache["matched_tokens"]),
        "num_blocks": _whole(cache["matched_blocks"]),
        "stopped_at": cache["stopped_at"],
        "reason": cache["reason"],
        "num_kv_tokens": _whole(cache.get("kv_tokens") or 0),
        "source": cache.get("source"),
        "num_loaded_tokens": _whole(cache.get("loaded_tokens") or 0),
        "stopped_text": cache.get("stopped_text"),
    }


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value
