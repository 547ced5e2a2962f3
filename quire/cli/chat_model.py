"""A `ChatModel` is a model for `generate`, `run` and `chat`, on a running server that has it or in this process."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.options import FIELDS, Settings, option_name, options_named
from quire.cli.server_client import (
    PATIENT,
    QUICK,
    Address,
    ServerClient,
    ServerNotFound,
    choose_address,
    chosen_key,
    note,
    printable,
)
from quire.cli.terminal import bytes_bar, download_bar, echo
from quire.engine.generation import GenerationParams
from quire.errors import ModelNotFound, QuireError, RequestFailed
from quire.text.stream import AnswerParser, PlainAnswer, Thought, Words
from quire.weights.hub import DEFAULT_MODEL, find_known, pull, resolve

if TYPE_CHECKING:
    from quire.core.kv_cache import CacheStats
    from quire.engine.generation import Delta, GenerationOutput, TokenLogprob
    from quire.engine.llm import LLM

ChatInput = str | Sequence[Mapping[str, str]]  # a raw prompt to continue, or a conversation to answer


@dataclass(frozen=True, slots=True)
class Piece:
    """New output of one sample."""

    index: int  # of the sample
    text: str
    num_tokens: int | None  # None: not reported
    thought: str = ""  # reasoning, which precedes the text
    calls: tuple[str, ...] = ()  # names of tools whose calls start in this piece
    refusal: str = ""
    logprobs: tuple[dict[str, Any], ...] = ()  # as --json prints them
    finish_reason: str | None = None
    stop: str | None = None  # the stop string that ended it
    is_stop_known: bool = True


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    prompt_tokens: int
    completion_tokens: int  # of all samples
    cached_tokens: int
    cache: dict[str, Any] | None  # how much of the prompt was cached and where the match ended, as --json prints it


@dataclass(slots=True)
class TokenRate:
    """Number of tokens of an answer and their rate."""

    started_s: float = field(default_factory=time.perf_counter)
    num_tokens: int = 0
    usage: AnswerUsage | None = None  # None: the answer was stopped, or the server reported none
    _num_first: int = 0
    _first_s: float | None = None
    _last_s: float = 0.0

    def take(self, piece: Piece) -> None:
        """Count a piece. If its tokens are not reported, it counts as one until `settle`."""
        self.count(int(bool(piece.text or piece.thought)) if piece.num_tokens is None else piece.num_tokens)

    def count(self, num_tokens: int) -> None:
        if num_tokens:
            self._last_s = time.perf_counter()
            if self._first_s is None:
                self._first_s, self._num_first = self._last_s, num_tokens
            self.num_tokens += num_tokens

    def settle(self, usage: AnswerUsage | None) -> None:
        self.usage = usage
        if usage is not None:
            self.num_tokens = usage.completion_tokens

    @property
    def ttft_ms(self) -> float | None:
        return None if self._first_s is None else (self._first_s - self.started_s) * 1000

    @property
    def tokens_per_s(self) -> float | None:
        """Rate after the first token, which includes the prompt. None if there is only one."""
        if self._first_s is None or self._last_s <= self._first_s:
            return None
        return (self.num_tokens - self._num_first) / (self._last_s - self._first_s)

    def __str__(self) -> str:
        tokens = f"{self.num_tokens} token{'' if self.num_tokens == 1 else 's'}"
        rate = self.tokens_per_s
        return tokens if rate is None else f"{tokens}, {rate:.{0 if rate >= 10 else 1}f} tok/s"

    @property
    def cached(self) -> str:
        """How many tokens of the prompt were found in the cache; empty if that is unknown."""
        if self.usage is None:
            return ""
        return f"{self.usage.cached_tokens} of {self.usage.prompt_tokens} prompt tokens cached"


Take = Callable[[Piece], None]


class LocalModel:
    """A model in this process. It runs a whole answer itself, which an `LLM` needs to report exact usage."""

    def __init__(self, llm: LLM, name: str) -> None:
        self.llm = llm
        self.name = name
        self.max_model_len = llm.max_model_len
        self.has_template = llm.text.template.exists

    def answer(self, ask: ChatInput, params: GenerationParams, take: Take) -> AnswerUsage:
        """Pass the answer to `take` until all samples have ended.

        An exception in `take`, also Ctrl-C, cancels the request and is raised. Raises RequestFailed if the answer is
        incomplete.
        """
        problem: Exception | None = None
        parsers = self._new_parsers(ask, params.n)

        def pass_on(_number: int, delta: Delta) -> None:
            nonlocal problem
            try:
                take(_piece(delta, parsers[delta.index]))
            except Exception as error:
                problem = error  # an LLM would make it an error of the request
                raise

        if isinstance(ask, str):
            (output,) = self.llm.generate(ask, params, on_output=pass_on)
        else:
            (output,) = self.llm.chat([dict(message) for message in ask], params, on_output=pass_on)
        if problem is not None:
            raise problem
        for completion in output.completions:
            if completion.error is not None:
                raise RequestFailed(completion.error)
        usage = output.usage
        return AnswerUsage(
            usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, cache=self._cache_of(output)
        )

    def _cache_of(self, output: GenerationOutput) -> dict[str, Any] | None:
        """The explanation, with the text of the prompt where the match ended."""
        from quire.text.excerpt import stopped_text

        if (cache := output.cache) is None:
            return None
        text = stopped_text(self.llm.text.tokenizer, output.prompt_token_ids, cache)
        return {**asdict(cache), "stopped_text": None if text is None else asdict(text)}

    def _new_parsers(self, ask: ChatInput, num_samples: int) -> list[AnswerParser]:
        """A parser for each sample. The prompt is rendered again only for models that reason."""
        from quire.engine.llm import as_chat

        text = self.llm.text
        if isinstance(ask, str) or text.template.reasoning is None:
            return [PlainAnswer() for _ in range(num_samples)]
        chat = as_chat([dict(message) for message in ask])
        prompt = text.encode_chat(chat, self.llm.max_model_len)
        return [text.new_parser(chat, prompt) for _ in range(num_samples)]

    def cache_stats(self) -> CacheStats:
        return self.llm.cache_stats()

    def close(self) -> None:
        self.llm.close()


def _piece(delta: Delta, parser: AnswerParser) -> Piece:
    parts = parser.push(delta.text)
    if delta.finish_reason is not None:
        parts += parser.finish(is_cut=delta.finish_reason == "length")
    return Piece(
        index=delta.index,
        text="".join(part.text for part in parts if isinstance(part, Words)),
        num_tokens=len(delta.token_ids),
        thought="".join(part.text for part in parts if isinstance(part, Thought)),
        logprobs=_documents(delta.logprobs),
        finish_reason=None if delta.finish_reason is None else delta.finish_reason.value,
        stop=delta.stop,
    )


def _documents(entries: Sequence[TokenLogprob]) -> tuple[dict[str, Any], ...]:
    """Log probabilities as --json prints them, with `bytes`: a token may be part of a character."""
    return tuple(
        {
            "token_id": entry.token_id,
            "text": entry.text,
            "bytes": list(entry.data),
            "logprob": entry.logprob,
            "rank": entry.rank,
            **({"top": list(_documents(entry.top))} if entry.top else {}),
        }
        for entry in entries
    )


# A model of a server


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


class RemoteModel:
    """A model of a server, with the methods of `LocalModel`."""

    has_template = True  # a server without one refuses the request

    def __init__(self, server: ServerClient, name: str, max_model_len: int) -> None:
        self.name = name
        self.max_model_len = max_model_len
        self._server = server

    def answer(self, ask: ChatInput, params: GenerationParams, take: Take) -> AnswerUsage | None:
        """As `LocalModel.answer`. Returns None if the server reports no usage."""
        usage: AnswerUsage | None = None
        unfinished = set(range(params.n))
        path = "/v1/completions" if isinstance(ask, str) else "/v1/chat/completions"
        with self._server.events("POST", path, request_body(self.name, ask, params)) as events:
            for data in events:
                if data.startswith("[DONE]"):
                    break
                chunk = self._server.parse(data)
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
            else:
                raise RequestFailed(f"{self._server.url} ended the stream before the answer was finished")
        if unfinished:
            raise RequestFailed(f"{self._server.url} ended the stream before sample {min(unfinished)} was finished")
        return usage

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


def read_chunk(chunk: Any, *, has_stops: bool) -> tuple[list[Piece], AnswerUsage | None]:
    """Raises RequestFailed with the server's message. A malformed chunk raises KeyError, TypeError or the like."""
    if error := chunk.get("error"):
        message = error.get("message") if isinstance(error, dict) else error
        raise RequestFailed(printable(str(message or error)))
    pieces = [_received(choice, has_stops=has_stops) for choice in chunk["choices"]]
    if not (usage := chunk.get("usage")):
        return pieces, None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    cache = chunk.get("cache")
    return pieces, AnswerUsage(
        prompt_tokens=_whole(usage["prompt_tokens"]),
        completion_tokens=_whole(usage["completion_tokens"]),
        cached_tokens=_whole(cached),
        cache=None if cache is None else _explanation(cache),
    )


def _received(choice: dict[str, Any], *, has_stops: bool) -> Piece:
    delta = choice.get("delta") or {}
    text = choice.get("text") if "text" in choice else delta.get("content")
    thought, refusal = delta.get("reasoning_content"), delta.get("refusal")
    reason = choice.get("finish_reason")
    for value in (text, thought, refusal, reason):
        if not isinstance(value, str | None):
            raise TypeError(value)
    if reason == "error":
        raise RequestFailed("the server could not finish the answer")
    # The name of a tool is in the first part of a call; the others have its arguments.
    calls = [(call.get("function") or {}).get("name") for call in delta.get("tool_calls") or ()]
    found = choice.get("logprobs")
    logprobs = () if found is None else _logprobs(found)
    stop = choice.get("stop_reason")  # vLLM's field: the stop string, or the id of a stop token
    return Piece(
        index=_whole(choice["index"]),
        text=text or "",
        num_tokens=len(logprobs) if found is not None else None if text or thought or refusal else 0,
        thought=thought or "",
        calls=tuple(printable(str(name)) for name in calls if name),
        refusal=refusal or "",
        logprobs=logprobs,
        finish_reason=reason,
        stop=stop if isinstance(stop, str) else None,
        is_stop_known="stop_reason" in choice or reason != "stop" or not has_stops,
    )


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


# The model of a command

ChatModel = LocalModel | RemoteModel


def open_chat_model(
    model: str | None, settings: Settings, *, server: str | None, api_key: str | None, is_local: bool
) -> ChatModel:
    """The model on a running server that has it, else in this process. Engine settings select this process."""
    address = choose_address(server, is_local=is_local, engine_options=[option_name(name) for name in settings])
    remote = None if address is None else find_server(address, model, chosen_key(api_key))
    return remote or LocalModel(open_llm(model, settings), model or DEFAULT_MODEL)


def find_server(address: Address, model: str | None, api_key: str | None) -> RemoteModel | None:
    """The model on the server at an address.

    Returns None if the address is the default one and has no usable server. Raises if the user gave the address.
    """
    server = ServerClient(address.url, api_key, PATIENT if address.is_named else QUICK)
    try:
        server.wait_until_ready()
        name, max_model_len = server.find_model(model)
    except QuireError as error:
        if address.is_named:
            raise
        if not isinstance(error, ServerNotFound):
            note(f"{error}. Loading the model here")
        return None
    note(f"using {name} on {address.url}")
    return RemoteModel(server, name, max_model_len)


def open_llm(model: str | None, settings: Settings) -> LLM:
    """Load a model, with a progress bar on a terminal. A known model that is not here is downloaded first."""
    from quire.engine.llm import LLM

    path, name = locate(model), model or DEFAULT_MODEL
    try:
        with options_named(FIELDS), bytes_bar(f"loading {name}") as progress:
            return LLM(path, progress=progress, **settings)
    except (MemoryError, RuntimeError) as error:  # on a CPU, PyTorch raises RuntimeError for a lack of memory
        if not isinstance(error, MemoryError) and not re.search(r"alloc|out of memory", str(error)):
            raise
        advice = "try a smaller --kv-memory or --max-model-len, or a smaller model"
        raise QuireError(f"{name}: does not fit into the memory of this machine; {advice}") from None


def locate(name: str | None) -> Path:
    """The path of a model. A known model that is not on this machine is downloaded."""
    try:
        return resolve(name)
    except ModelNotFound:
        known = find_known(name or DEFAULT_MODEL)
        if known is None:
            raise
    echo(f"{known.name} is not on this machine: downloading it, {known.size_bytes / 1e6:.0f} MB", err=True)
    with download_bar(known.name) as progress:
        return pull(known.name, progress)
