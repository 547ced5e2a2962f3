"""Offline use: `LLM(model).generate(prompts)`, in this process, with all prompts batched."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

from quire.backends.base import Progress
from quire.core.kv_cache import CacheStats
from quire.core.request import FinishReason
from quire.engine.composition import EngineConfig, make_engine
from quire.engine.engine import EngineOutput
from quire.engine.model_text import ModelText
from quire.engine.outputs import Answers, Delta, GenerationOutput
from quire.engine.params import GenerationParams, GenerationRequest
from quire.engine.progress import progress_bar
from quire.engine.structured.grammars import Compiled, Grammars
from quire.errors import InvalidRequest, ModelNotFound, QueueFull
from quire.text.messages import ChatRequest, Message, Part, Role
from quire.weights.hub import DEFAULT_MODEL, find_known, pull, resolve

Prompt = str | Sequence[int]
Conversation = ChatRequest | Sequence[Mapping[str, str]] | str
OnOutput = Callable[[int, Delta], None]  # number of the prompt, what one step added to it


class LLM:
    """A model in this process. Give it all prompts at once: they share steps, and what they have in common.

    `model` is a name (`quire models` lists them), a folder of safetensors or a GGUF file; without one, the default
    model, fetched the first time. Settings are those of `EngineConfig`. Threads may share it: they share its steps.
    """

    def __init__(self, model: str | Path | None = None, *, progress: Progress | None = None, **settings: Any) -> None:
        try:
            self.config = EngineConfig(**settings)
        except TypeError as error:
            raise InvalidRequest(f"settings: {error}") from None
        path = _find(None if model is None else str(model))
        self.text = ModelText.open(path, load_format=self.config.load_format)
        try:
            self.engine = make_engine(path, self.config, progress)
        except BaseException:
            self.text.close()
            raise
        self.max_model_len = self.engine.scheduler.max_model_len
        words = self.text.tokenizer, self.text.eos_token_ids
        self.grammars = Grammars(lambda: words, self.engine.capacity.vocab_size)
        self._num_requests = 0
        self.owners: dict[int, _Run] = {}  # request id -> whose it is: calls may be nested, streams interleaved
        self.lock = threading.RLock()  # around the engine: threads may share an LLM, and then share its steps
        self._is_closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: GenerationParams | Sequence[GenerationParams] | None = None,
        *,
        on_output: OnOutput | None = None,
        progress: bool = True,
    ) -> list[GenerationOutput]:
        """Continue each prompt: text as it is, or token ids. A prompt that fails carries its error; others go on.

        `progress`: show a bar on a terminal while there are several prompts.
        """
        if not isinstance(prompts, str | list | tuple):
            raise InvalidRequest(f"prompts = {prompts!r:.80} is not text, token ids or a list of them")
        todo: list[Prompt] = [prompts] if isinstance(prompts, str) or _are_ids(prompts) else list(prompts)
        requests = [self.text.request(self._encode(prompt), one) for prompt, one in _pair(todo, params)]
        return self._run(requests, on_output, has_bar=progress and len(requests) > 1)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: GenerationParams | Sequence[GenerationParams] | None = None,
        *,
        on_output: OnOutput | None = None,
        progress: bool = True,
    ) -> list[GenerationOutput]:
        """Answer each conversation through the model's chat template. A string is one message of a user.

        `progress`: show a bar on a terminal while there are several conversations.
        """
        todo: list[Any] = [conversations] if _is_conversation(conversations) else list(conversations)  # type: ignore[arg-type]
        requests = [
            self.text.request(self.text.encode_chat(chat, self.max_model_len), chosen, chat=chat)
            for chat, chosen in ((as_chat(one), chosen) for one, chosen in _pair(todo, params))
        ]
        return self._run(requests, on_output, has_bar=progress and len(requests) > 1)

    def stream(self, request: GenerationRequest) -> Generator[Delta, None, None]:
        """One request, delta by delta. Stopping early cancels it."""
        run = _Run(self, [request])
        try:
            while not run.is_finished:
                yield from (delta for _, delta in run.step())
        finally:
            run.close()

    def cache_stats(self) -> CacheStats:
        return self.engine.scheduler.cache.stats()

    def close(self) -> None:
        self._is_closed = True
        self.grammars.close()
        self.engine.close()
        self.text.close()

    def check_open(self) -> None:
        if self._is_closed:
            raise InvalidRequest("this LLM is closed: make a new one")

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def next_id(self) -> int:
        self._num_requests += 1
        return self._num_requests

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            return self.text.encode(prompt, self.max_model_len)
        if not isinstance(prompt, list | tuple | range):
            raise InvalidRequest(f"prompt = {prompt!r:.80} is not text or a list of token ids")
        return tuple(prompt)

    def _run(
        self, requests: Sequence[GenerationRequest], on_output: OnOutput | None, *, has_bar: bool
    ) -> list[GenerationOutput]:
        run = _Run(self, requests)
        try:
            with progress_bar([request.n for request in requests]) if has_bar else nullcontext() as bar:
                while not run.is_finished:
                    for number, delta in run.step():
                        if bar is not None:
                            bar(number, delta)
                        if on_output is not None:
                            run.tell(on_output, number, delta)
        finally:
            run.close()
        return [answers.output() for answers in run.answers]


class _Run:
    """Some requests on their way through an engine that runs in this thread."""

    def __init__(self, llm: LLM, requests: Sequence[GenerationRequest]) -> None:
        llm.check_open()
        self._llm = llm
        self._engine = llm.engine
        self._compiled: list[Compiled | None] = []  # the grammar of each request
        for number, request in enumerate(requests):
            try:
                self._engine.check(request.packed, request.sampling)
                self._compiled.append(None if request.grammar is None else llm.grammars.compile(request.grammar))
            except InvalidRequest as error:
                if len(requests) == 1:
                    raise
                raise type(error)(f"prompts[{number}]: {error}") from None
        self.answers = [Answers(request, llm.text.tokenizer) for request in requests]
        self._todo = deque((number, index) for number, request in enumerate(requests) for index in range(request.n))
        self._parents: dict[int, int] = {}  # number of a request -> id of its first sample
        self._alive: dict[int, tuple[int, int]] = {}  # request id -> number of the request, index of the sample
        self._deltas: list[tuple[int, Delta]] = []  # not told yet
        self._silenced: set[int] = set()  # whose callback has raised

    @property
    def is_finished(self) -> bool:
        return not self._alive and not self._todo and not self._deltas

    def step(self) -> list[tuple[int, Delta]]:
        """What is new for this run. A step serves everyone, so another run's may have brought it."""
        with self._llm.lock:
            if not self._deltas:
                self._llm.check_open()
                self._fill()
                with _interrupt_deferred():
                    outputs = self._engine.step()
                for output in outputs:
                    if (owner := self._llm.owners.get(output.request_id)) is not None:
                        owner.take(output)
            deltas, self._deltas = self._deltas, []
            return deltas

    def take(self, output: EngineOutput) -> None:
        number, index = self._alive[output.request_id]
        answers = self.answers[number]
        try:
            delta = answers.push(index, output)
        except Exception as error:  # its text could not be made: it ends, the others do not
            delta = answers.fail(index, f"the answer could not be read: {type(error).__name__}: {error}")
        if delta.finish_reason is not None:
            self._end(output.request_id, output.finish_reason, answers.num_tokens(index))
        self._deltas.append((number, delta))

    def tell(self, on_output: OnOutput, number: int, delta: Delta) -> None:
        """A callback that raises ends its own request, and is not called for it again."""
        if number in self._silenced:
            return
        try:
            on_output(number, delta)
        except Exception as error:
            self._silenced.add(number)
            message = f"its callback raised {type(error).__name__}: {error}"
            with self._llm.lock:
                self.answers[number].fail_all(message)
                for request_id, (other, _) in list(self._alive.items()):
                    if other == number:
                        self._end(request_id, None, None)
                self._todo = deque(place for place in self._todo if place[0] != number)
                self._deltas = [entry for entry in self._deltas if entry[0] != number]

    def close(self) -> None:
        """Cancel what is left. The last run to end also collects the step that may still be in flight."""
        with self._llm.lock:
            self._todo.clear()
            for request_id in list(self._alive):
                self._end(request_id, None, None)
            while not self._llm.owners and self._engine.has_work:
                self._engine.step()

    def _fill(self) -> None:
        """Let in as many as the queue takes: a caller may bring more prompts than a server would let wait."""
        while self._todo:
            number, index = self._todo[0]
            request = self.answers[number].request
            request_id = self._llm.next_id()
            compiled = self._compiled[number]
            try:
                self._engine.add(
                    request_id,
                    request.packed,
                    request.sampling.sample(index),
                    priority=request.priority,
                    salt=request.salt,
                    tenant=request.tenant,
                    parent_id=self._parents.get(number),
                    pins=() if index else request.pins,
                    matcher=None if compiled is None else compiled.matcher(),
                )
            except QueueFull:
                return
            self._todo.popleft()
            self._alive[request_id] = (number, index)
            self._llm.owners[request_id] = self
            self._parents.setdefault(number, request_id)

    def _end(self, request_id: int, engine_reason: FinishReason | None, num_tokens: int | None) -> None:
        del self._alive[request_id], self._llm.owners[request_id]
        if engine_reason is not None:
            return  # the engine knows already
        if num_tokens is None:
            self._engine.cancel(request_id)
        else:
            self._engine.finish(request_id, num_tokens)


@contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Ctrl-C waits for the end of the step: in the midst of one it would leave a plan half done."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # nobody would raise here
        return
    was_asked = False

    def note(_signal: int, _frame: object) -> None:
        nonlocal was_asked
        was_asked = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if was_asked:
        raise KeyboardInterrupt


def _find(name: str | None) -> Path:
    """Where the model lies. One that quire knows is fetched if it is not here: nobody has to have heard of `pull`."""
    try:
        return resolve(name)
    except ModelNotFound:
        if find_known(name or DEFAULT_MODEL) is None:
            raise
        return pull(name)


def as_chat(conversation: Conversation) -> ChatRequest:
    """Messages as the clients of the field write them: {"role": ..., "content": ...}."""
    if isinstance(conversation, ChatRequest):
        return conversation
    if isinstance(conversation, str):
        return ChatRequest((Message(Role.USER, (Part(conversation),)),))
    messages = []
    for i, message in enumerate(conversation):
        unknown = set(message) - {"role", "content", "name"}
        if unknown or not {"role", "content"} <= set(message):
            raise InvalidRequest(f"messages[{i}] has the fields {sorted(message)}, not role, content and maybe name")
        if message["role"] not in list(Role):
            raise InvalidRequest(f"messages[{i}].role = {message['role']!r} is not one of {', '.join(Role)}")
        if not isinstance(message["content"], str):
            raise InvalidRequest(f"messages[{i}].content is a {type(message['content']).__name__}, not a string")
        messages.append(Message(Role(message["role"]), (Part(message["content"]),), message.get("name")))
    return ChatRequest(tuple(messages))


def _is_conversation(value: object) -> bool:
    if isinstance(value, str | ChatRequest):
        return True
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], Mapping)


def _are_ids(value: object) -> bool:
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], int)


def _pair(
    todo: Sequence[Any], params: GenerationParams | Sequence[GenerationParams] | None
) -> list[tuple[Any, GenerationParams]]:
    if params is None or isinstance(params, GenerationParams):
        chosen: Sequence[GenerationParams] = [params or GenerationParams()] * len(todo)
    elif isinstance(params, list | tuple) and all(isinstance(one, GenerationParams) for one in params):
        chosen = params
    else:
        raise InvalidRequest(f"params = {params!r:.80} is not GenerationParams or a list of them")
    if len(chosen) != len(todo):
        raise InvalidRequest(f"{len(chosen)} params for {len(todo)} prompts: one for all, or one for each")
    return list(zip(todo, chosen, strict=True))
