"""Offline inference in this process: `LLM(model).generate(prompts)` batches all prompts."""

from __future__ import annotations

import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from quire.backends.base import Progress
from quire.core.kv_cache import CacheStats
from quire.engine.composition import EngineConfig, check_cache_folders, check_supported, make_engine
from quire.engine.generation import (
    Delta,
    EngineOutput,
    Generation,
    GenerationOutput,
    GenerationParams,
    GenerationRequest,
)
from quire.engine.grammars import Compiled, Grammars
from quire.engine.model_text import ModelText
from quire.errors import InvalidRequest, ModelNotFound, QueueFull
from quire.text.messages import ChatRequest, Message, Part, Role
from quire.weights.hub import DEFAULT_MODEL, find_known, pull, resolve

Prompt = str | Sequence[int]
Conversation = ChatRequest | Sequence[Mapping[str, str]] | str
MAX_SAVE_S = 10.0  # for cached content that is not on disk when an LLM is closed
OnOutput = Callable[[int, Delta], None]  # index of the prompt, and its new text
Asked = tuple[GenerationRequest, ChatRequest | None]  # a request, and the conversation that it was made of


class LLM:
    """A model in this process. Pass all prompts at once: they are batched and share common prefixes.

    `model` is a name (`quire models` lists them), a folder of safetensors or a GGUF file. Without one, the default
    model is used and downloaded the first time. Settings are those of `EngineConfig`. Thread-safe: requests of several
    threads are batched together.
    """

    def __init__(self, model: str | Path | None = None, *, progress: Progress | None = None, **settings: Any) -> None:
        self.config = EngineConfig(**settings)
        check_cache_folders([self.config])
        path = _find(None if model is None else str(model))
        check = partial(check_supported, config=self.config)
        self.text = ModelText.open(path, load_format=self.config.load_format, check=check)
        try:
            self.engine = make_engine(path, self.config, progress)
        except BaseException:
            self.text.close()
            raise
        self.max_model_len = self.engine.scheduler.max_model_len
        vocabulary = self.text.tokenizer, self.text.eos_token_ids
        self.grammars = Grammars(lambda: vocabulary, self.engine.capacity.vocab_size)
        self.next_id = count(1).__next__
        self.owners: dict[int, _Run] = {}  # request id -> its run: calls may be nested or made by several threads
        self.lock = threading.RLock()  # protects the engine
        self._is_closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: GenerationParams | Sequence[GenerationParams] | None = None,
        *,
        on_output: OnOutput | None = None,
        progress: bool = True,
    ) -> list[GenerationOutput]:
        """Continue each prompt, raw text or token ids. A failed prompt has its error in its output; others continue.

        `on_output` is called with the index of a prompt and its new text. If it raises, all prompts end.
        `progress`: show a bar on a terminal while there are several answers.
        """
        if not isinstance(prompts, str | list | tuple):
            raise InvalidRequest(f"prompts = {prompts!r:.80} is not text, token ids or a list of them")
        todo: list[Prompt] = [prompts] if isinstance(prompts, str) or _are_ids(prompts) else list(prompts)
        asked: list[Asked] = [
            (self.text.request(self._encode(prompt), one), None) for prompt, one in _pair(todo, params)
        ]
        return self._run(asked, on_output, has_bar=progress)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: GenerationParams | Sequence[GenerationParams] | None = None,
        *,
        on_output: OnOutput | None = None,
        progress: bool = True,
    ) -> list[GenerationOutput]:
        """Answer each conversation, using the model's chat template. A string is a single user message."""
        todo: list[Any] = [conversations] if _is_conversation(conversations) else list(conversations)  # type: ignore[arg-type]
        asked: list[Asked] = [
            (self.text.request(self.text.encode_chat(chat, self.max_model_len), chosen, chat=chat), chat)
            for chat, chosen in ((as_chat(one), chosen) for one, chosen in _pair(todo, params))
        ]
        return self._run(asked, on_output, has_bar=progress)

    def stream(
        self,
        request: GenerationRequest,
        chat: ChatRequest | None = None,
        on_end: Callable[[GenerationOutput], object] = lambda _output: None,
    ) -> Generator[Delta, None, None]:
        """Yield the deltas of one request, made of `chat` if given. Closing the generator early cancels it.

        `on_end` gets the whole output, with its usage.
        """
        run = _Run(self, [(request, chat)])
        try:
            while not run.is_finished:
                yield from (delta for _, delta in run.step())
        finally:
            run.close()
        on_end(run.generations[0].output())

    def cache_stats(self) -> CacheStats:
        return self.engine.scheduler.cache.stats()

    def close(self) -> None:
        """Free everything. With a disk cache, first save cached content, for at most `MAX_SAVE_S`."""
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            self.engine.save_cache(MAX_SAVE_S)
        self.grammars.close()
        self.engine.close()
        self.text.close()

    def check_open(self) -> None:
        if self._is_closed:
            raise InvalidRequest("this LLM is closed: create a new one")

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            return self.text.encode(prompt, self.max_model_len)
        if not isinstance(prompt, list | tuple | range):
            raise InvalidRequest(f"prompt = {prompt!r:.80} is not text or a list of token ids")
        return tuple(prompt)

    def _run(self, asked: Sequence[Asked], on_output: OnOutput | None, *, has_bar: bool) -> list[GenerationOutput]:
        run = _Run(self, asked)
        try:
            with _bar(run.num_left, is_shown=has_bar) as show:
                while not run.is_finished:
                    for number, delta in run.step():
                        if on_output is not None:
                            on_output(number, delta)
                    show(run.num_left)
        finally:
            run.close()
        return [generation.output() for generation in run.generations]


class _Run:
    """The requests of one call, run on the engine in this thread."""

    def __init__(self, llm: LLM, asked: Sequence[Asked]) -> None:
        llm.check_open()
        self._llm = llm
        self._engine = llm.engine
        self._compiled: list[Compiled | None] = []  # the grammar of each request
        self.generations: list[Generation] = []
        for number, (request, chat) in enumerate(asked):
            try:
                self._engine.check(request)
                self._compiled.append(None if request.grammar is None else llm.grammars.compile(request.grammar))
            except InvalidRequest as error:
                if len(asked) == 1:
                    raise
                raise type(error)(f"prompts[{number}]: {error}") from None
            ids = tuple(llm.next_id() for _ in range(request.n))
            new_parser = llm.text.turn_parser(chat, request.prompt.tokens)
            self.generations.append(Generation(request, llm.text.tokenizer, ids, new_parser=new_parser))
        self._todo = deque((number, index) for number, (request, _) in enumerate(asked) for index in range(request.n))
        self._alive: dict[int, tuple[int, int]] = {}  # request id -> number of the request, index of the sample
        self._deltas: list[tuple[int, Delta]] = []  # not returned yet

    @property
    def num_left(self) -> int:
        """Number of answers that have not ended."""
        return len(self._alive) + len(self._todo)

    @property
    def is_finished(self) -> bool:
        return not self._alive and not self._todo and not self._deltas

    def step(self) -> list[tuple[int, Delta]]:
        """The new deltas of this run. They may come from a step of another run, since runs are batched together."""
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
        generation = self.generations[number]
        try:
            delta = generation.push(index, output)
        except Exception as error:  # ends this sample only
            delta = generation.fail_sample(index, f"the answer could not be read: {type(error).__name__}: {error}")
        if delta.finish_reason is not None:
            del self._alive[output.request_id], self._llm.owners[output.request_id]
            if output.finish_reason is None:  # the engine does not know the end yet
                self._engine.finish(output.request_id, generation.num_tokens(index))
        self._deltas.append((number, delta))

    def close(self) -> None:
        """Cancel unfinished requests. The last run to end also collects a step that is still in flight."""
        with self._llm.lock:
            self._todo.clear()
            for request_id in list(self._alive):
                del self._alive[request_id], self._llm.owners[request_id]
                self._engine.cancel(request_id)
            while not self._llm.owners and self._engine.has_work:
                self._engine.step()

    def _fill(self) -> None:
        """Add requests until the queue is full: a call may have more prompts than the queue can hold."""
        while self._todo:
            number, index = self._todo[0]
            generation, compiled = self.generations[number], self._compiled[number]
            request_id, parent_id = generation.request_ids[index], generation.request_ids[0]
            matcher = None if compiled is None else compiled.matcher()
            try:
                self._engine.add(request_id, generation.request, index=index, parent_id=parent_id, matcher=matcher)
            except QueueFull:
                return
            self._todo.popleft()
            self._alive[request_id] = (number, index)
            self._llm.owners[request_id] = self


@contextmanager
def _bar(num_answers: int, *, is_shown: bool) -> Iterator[Callable[[int], object]]:
    """Yield a function that shows how many answers are left, if there are several and stderr is a terminal."""
    if not is_shown or num_answers < 2 or not sys.stderr.isatty():
        yield lambda _num_left: None
        return
    from rich.console import Console
    from rich.progress import Progress as ProgressBar

    with ProgressBar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("answers", total=num_answers)
        yield lambda num_left: bar.update(task, completed=num_answers - num_left)


@contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Defer Ctrl-C to the end of the step, so that no plan is left half executed."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # no KeyboardInterrupt can be raised here
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
    """The path of a model. A model that quire knows is downloaded if it is missing."""
    try:
        return resolve(name)
    except ModelNotFound:
        if find_known(name or DEFAULT_MODEL) is None:
            raise
        return pull(name)


def as_chat(conversation: Conversation) -> ChatRequest:
    """A ChatRequest of messages in the usual form {"role": ..., "content": ...}."""
    if isinstance(conversation, ChatRequest):
        return conversation
    if isinstance(conversation, str):
        return ChatRequest((Message(Role.USER, (Part(conversation),)),))
    messages = []
    for i, message in enumerate(conversation):
        unknown = set(message) - {"role", "content", "name"}
        if unknown or not {"role", "content"} <= set(message):
            raise InvalidRequest(
                f"messages[{i}] has the fields {sorted(message)}, not role, content and optionally name"
            )
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
        raise InvalidRequest(f"{len(chosen)} params for {len(todo)} prompts: pass one for all, or one per prompt")
    return list(zip(todo, chosen, strict=True))
