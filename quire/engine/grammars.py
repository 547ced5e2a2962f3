"""Compiles grammars for one vocabulary with llguidance, which is imported at first use.

A compiled grammar is cached for its owner, an API key; every answer gets a copy. `GrammarTrial` compiles a grammar in a
child process first, which can be killed, at normal priority within a budget of CPU time for each owner, and one for
all. `GrammarQueue` has the requests that wait for their grammars: a slow one delays only requests of its own tenant.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from quire.engine.masks import GrammarFailed, Matcher
from quire.engine.model_text import make_tokenizer
from quire.engine.process import lower_thread_priority
from quire.engine.worker.protocol import Add
from quire.errors import InvalidRequest, MissingExtra, QueueFull, QuireError, RequestFailed
from quire.text.child_process import Child, Interrupted, NoAnswer, died
from quire.text.grammar import Grammar, GrammarKind, json_style
from quire.text.tokenizer import Tokenizer
from quire.weights.opening import open_checkpoint

if TYPE_CHECKING:
    import llguidance


COMPILE_LIMIT_S = 2.0  # CPU time
FIRST_MASK_LIMIT_S = 0.1  # CPU time: a grammar with a slow first mask stays slow
WAIT_LIMIT_S = 120.0  # wall-clock time: the machine may be busy with steps
EXCHANGE_LIMIT_S = 120.0  # of one exchange with the child, or of its start
LOOK_S = 0.02  # interval of the questions whether a slow trial has ended
log = logging.getLogger(__name__)
_CHILD = Path(__file__).with_name("trial_child.py")


class Tried(NamedTuple):
    """The result of a trial."""

    normal_s: float  # at normal priority; at most the patience that was given
    is_slow: bool  # it went on at a low priority
    problem: str  # why the grammar is refused; empty: it is not


class GrammarTrial:
    """Tries grammars in a child process, which forks for each of them. Thread-safe.

    The child starts at the first use, or when `start_early` is called, and ends with its parent.
    """

    def __init__(self, first_order: Callable[[], Mapping[str, Any]]) -> None:
        """`first_order`: the vocabulary and the limits, as the child reads them when it starts."""
        self._first_order = first_order
        self._lock = threading.Lock()  # held for one exchange with the child, not for a whole trial
        self._child = Child(_CHILD)
        self._closed = threading.Event()

    def run(self, source: str, patience_s: float) -> Tried:
        """Try a grammar, for `patience_s` at normal priority, and then at a low one."""
        try:
            return self._try(source, patience_s)
        except Interrupted as error:
            log.warning("the process that checks grammars %s; checking again in a new process", error)
        try:
            return self._try(source, 0.0)
        except Interrupted as error:
            raise RequestFailed(f"the process that checks grammars {error}") from None

    def _try(self, source: str, patience_s: float) -> Tried:
        answer = self._ask({"source": source, "patience_s": patience_s})
        is_slow = "trial" in answer or patience_s <= 0
        while "trial" in answer:
            self._closed.wait(LOOK_S)
            answer = self._ask({"trial": answer["trial"]})
        return Tried(patience_s if is_slow else min(answer["cpu_s"], patience_s), is_slow, _problem(answer))

    def _ask(self, order: Mapping[str, Any]) -> Mapping[str, Any]:
        with self._lock:
            try:
                self._start()
                return self._child.ask(order, EXCHANGE_LIMIT_S)
            except NoAnswer as error:  # not the fault of the grammar, which is compiled in a fork
                raise Interrupted(str(error)) from None

    def start_early(self) -> None:
        """Start the child in a thread, so that no grammar waits for that."""
        threading.Thread(target=self._start_alone, name="grammar trial", daemon=True).start()

    def _start_alone(self) -> None:
        with self._lock, suppress(NoAnswer, RequestFailed):  # a request that needs the child reports the problem
            self._start()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._child.kill()

    def _start(self) -> None:
        if self._closed.is_set():
            raise RequestFailed("the engine is closed")
        if self._child.start():
            self._child.ask(self._first_order(), EXCHANGE_LIMIT_S)


def _problem(answer: Mapping[str, Any]) -> str:
    """Why a grammar is refused: the compiler's error, or the limit that was exceeded. Raises Interrupted."""
    if "returncode" in answer:
        ended = died(answer["returncode"])
        if isinstance(ended, Interrupted):
            raise ended
        limits = {  # by the signal that ended the trial
            signal.SIGALRM: f"compiling it does not finish within {WAIT_LIMIT_S:g} s",
            signal.SIGPROF: f"compiling it takes more than {COMPILE_LIMIT_S:g} s",
        }
        others = "its rules are nested too deeply, or compiling it takes too much memory"
        return f"grammar is too complex: {limits.get(-answer['returncode'], others)}"
    error, first_mask_s = answer["error"], answer.get("first_mask_s", 0.0)
    if error.startswith("NoExtensionBias"):
        return "grammar: no answer matches it"
    if not error and first_mask_s > FIRST_MASK_LIMIT_S:
        took = f"choosing its first token takes {first_mask_s * 1000:.0f} ms"
        return f"grammar is too complex: {took}, more than {FIRST_MASK_LIMIT_S * 1000:.0f}"
    return error and f"grammar: {one_line(error)}"


def one_line(error: str, limit: int = 300) -> str:
    """An error message of llguidance, which has several lines, as one short line."""
    text = " ".join(error.replace("<non-verbose/>", "").split())
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


PATIENCE_S = 0.1  # for one grammar; a common schema takes 5 ms
MIN_S = 0.01  # less is not worth a start at normal priority


class Allowance(NamedTuple):
    """At most `burst_s` at once, which is earned again at `share` of the time that passes."""

    burst_s: float
    share: float


OF_OWNER = Allowance(0.5, 0.005)
OF_ALL = Allowance(2.0, 0.01)
_ALL = None  # the owner of the budget of all owners


class NormalTime:
    """The budgets of all owners. Thread-safe.

    In any t seconds, grammars of one owner get at most OF_OWNER.burst_s + OF_OWNER.share * t by `take`, and those of
    all owners together at most OF_ALL.burst_s + OF_ALL.share * t: other work keeps the rest, whatever clients send.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._earned_s: dict[str | None, float] = {}  # when an owner has earned again all that it has used

    def take(self, owner: str) -> float:
        """Take time for one grammar: PATIENCE_S, or what is left, or 0."""
        with self._lock:
            now_s = self._clock()
            left_s = min(
                allowance.burst_s - (self._earned_s.get(one, now_s) - now_s) * allowance.share
                for one, allowance in ((owner, OF_OWNER), (_ALL, OF_ALL))
            )
            taken_s = min(PATIENCE_S, left_s) if left_s >= MIN_S else 0.0
            self.use(owner, taken_s)
            return taken_s

    def use(self, owner: str, seconds: float) -> None:
        """Record time that was used beyond what was taken. A negative number of seconds was taken and not used."""
        with self._lock:
            now_s = self._clock()
            for one, allowance in ((owner, OF_OWNER), (_ALL, OF_ALL)):
                self._earned_s[one] = max(self._earned_s.get(one, now_s), now_s) + seconds / allowance.share
            self._earned_s = {one: earned_s for one, earned_s in self._earned_s.items() if earned_s > now_s}


MAX_COMPILED = 256
MAX_COMPILED_BYTES = 64 << 20
NUM_THREADS = 3  # of each pool
STACK_BYTES = 16 << 20  # stack of each thread: the compiler is recursive
LIMITS: Mapping[str, Any] = {
    "max_lexer_states": 20_000,  # a state takes one to two kB
    "verbose_errors": False,  # verbose errors contain the answer so far
}
_IN_STRING = r'[^"\\\x00-\x1F\x7F]'  # characters that need no escape in a JSON string
# Tokens that a grammar allows or forbids together are not checked one by one. llguidance's default slices cover
# strings; these also cover the short rest of a string with a maxLength, and names in addresses and patterns.
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    r"[a-z0-9]{1,10}",
    *(rf"[a-zA-Z0-9]{{1,{length}}}" for length in (3, 6, 10)),
    *(rf"{_IN_STRING}{{1,{length}}}" for length in (3, 6, 10, 15, 30)),
    rf"{_IN_STRING}+",
)


T = TypeVar("T")
_Owned = tuple[str, Grammar]  # owner and grammar


class Grammars:
    """Compiles grammars in threads and caches the results. Thread-safe.

    Owners share no results: a request that is fast because another owner sent the same schema would reveal it.
    """

    def __init__(self, open_tokenizer: Callable[[], tuple[Tokenizer, tuple[int, ...]]], vocab_size: int) -> None:
        """`open_tokenizer` returns a tokenizer and the model's end-of-text ids. It is called once, at first use."""
        self._open_tokenizer = open_tokenizer
        self.vocab_size = vocab_size
        self._is_closed = False
        self._opening = threading.Lock()
        self._lock = threading.RLock()  # protects the fields below
        self._compiler: _Compiler | None = None
        self._compiled: OrderedDict[_Owned, Compiled] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self._jobs: dict[_Owned, Future[Compiled]] = {}
        self._normal_time = NormalTime()
        self._pool = ThreadPoolExecutor(NUM_THREADS, "grammar")
        self._slow_pool = ThreadPoolExecutor(NUM_THREADS, "slow grammar", initializer=lower_thread_priority)

    def find(self, grammar: Grammar, owner: str = "") -> Compiled | None:
        with self._lock:
            compiled = self._compiled.get((owner, grammar))
            if compiled is not None:
                self._compiled.move_to_end((owner, grammar))
            return compiled

    def submit(self, grammar: Grammar, owner: str = "") -> Future[Compiled]:
        """Compile in a thread. The future may raise a QuireError: InvalidRequest if the grammar is at fault."""
        with self._lock:
            if (known := self._jobs.get((owner, grammar))) is not None:
                return known
            if (compiled := self.find(grammar, owner)) is not None:  # for an earlier request
                job: Future[Compiled] = Future()
                job.set_result(compiled)
                return job
            job = self._jobs[owner, grammar] = _submit(self._pool, self._compile, grammar, owner)
            return job

    def prepare(self) -> None:
        """Open the vocabulary and start the child process that tries grammars, in a thread: the first grammar need not.

        An error is not reported: the first grammar gets the same.
        """
        with self._lock:
            _submit(self._pool, self._open, is_early=True)

    def compile(self, grammar: Grammar) -> Compiled:
        """Compile and wait for the result."""
        return self.submit(grammar).result()

    def close(self) -> None:
        self._is_closed = True
        for pool in (self._pool, self._slow_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._compiler is not None:
            self._compiler.trial.close()

    def _compile(self, grammar: Grammar, owner: str) -> Compiled:
        try:
            compiled = self._make(grammar, owner)
            with self._lock:
                self._remember((owner, grammar), compiled)
            return compiled
        finally:
            with self._lock:
                self._jobs.pop((owner, grammar), None)

    def _make(self, grammar: Grammar, owner: str) -> Compiled:
        if grammar.kind is GrammarKind.TOKENS:
            return _TokenMask(grammar.source, self.vocab_size)
        compiler = self._open()
        source = compiler.translate(grammar)
        taken_s = self._normal_time.take(owner)
        tried = compiler.trial.run(source, taken_s)  # in another process first: some grammars crash the compiler
        self._normal_time.use(owner, tried.normal_s - taken_s)
        if tried.problem:
            raise InvalidRequest(tried.problem)
        if tried.is_slow:
            with self._lock:
                job = _submit(self._slow_pool, compiler.compile, source, len(grammar.source))
            return job.result()
        start_s = time.thread_time()
        compiled = compiler.compile(source, len(grammar.source))
        self._normal_time.use(owner, time.thread_time() - start_s)
        return compiled

    def _open(self, *, is_early: bool = False) -> _Compiler:
        with self._opening:
            if self._compiler is None:
                self._compiler = _Compiler(*self._open_tokenizer(), self.vocab_size, is_early=is_early)
            if self._is_closed:
                self._compiler.trial.close()
            return self._compiler

    def _remember(self, owned: _Owned, compiled: Compiled) -> None:
        if (replaced := self._compiled.pop(owned, None)) is not None:
            self._num_bytes -= replaced.num_bytes
        self._compiled[owned] = compiled
        self._num_bytes += compiled.num_bytes
        while len(self._compiled) > MAX_COMPILED or self._num_bytes > MAX_COMPILED_BYTES:
            self._num_bytes -= self._compiled.pop(self._next_to_drop()).num_bytes

    def _next_to_drop(self) -> _Owned:
        """The least recently used grammar of the owner with the most: no owner displaces the grammars of others."""
        is_number = len(self._compiled) > MAX_COMPILED
        held: Counter[str] = Counter()
        for (owner, _), compiled in self._compiled.items():
            held[owner] += 1 if is_number else compiled.num_bytes
        ((most, _),) = held.most_common(1)
        return next(owned for owned in self._compiled if owned[0] == most)


def _submit(pool: ThreadPoolExecutor, function: Callable[..., T], *values: Any, **options: Any) -> Future[T]:
    """Submit to a pool, whose threads get their stack then. The size is the process's: callers hold a lock."""
    before = threading.stack_size(STACK_BYTES)
    try:
        return pool.submit(function, *values, **options)
    finally:
        threading.stack_size(before)


def open_tokenizer(path: Path, load_format: str) -> tuple[Tokenizer, tuple[int, ...]]:
    """A model's tokenizer and end-of-text ids, for the grammars of a process that has not opened it yet."""
    checkpoint = open_checkpoint(path, load_format)
    try:
        tokenizer = make_tokenizer(path, checkpoint.tokenizer_files())
        return tokenizer, tuple(dict.fromkeys((*checkpoint.spec.eos_token_ids, *tokenizer.eos_token_ids)))
    finally:
        checkpoint.close()


class Compiled(Protocol):
    """A compiled grammar."""

    @property
    def num_bytes(self) -> int:
        """Approximate memory use."""

    def matcher(self) -> Matcher:
        """A matcher for one answer."""


@dataclass(slots=True, eq=False)
class _LLMatcher:
    """A `Matcher` that uses llguidance; at its start, the compiled grammar itself. Masks are returned unchanged."""

    _matcher: llguidance.LLMatcher
    _mask_bytes: int
    num_bytes: int
    family: object  # copies share the lexer, which is protected by a lock

    def matcher(self) -> Matcher:
        return _LLMatcher(self._matcher.deep_copy(), self._mask_bytes, self.num_bytes, self.family)

    def mask(self) -> bytes:
        with _panics_converted:
            mask = self._matcher.compute_bitmask()  # releases the GIL
        if self._matcher.is_error():
            raise GrammarFailed(one_line(self._matcher.get_error()))
        return mask[: self._mask_bytes]

    def consume(self, token: int) -> bool:
        with _panics_converted:
            is_consumed = self._matcher.consume_token(token)
        if not is_consumed:
            raise GrammarFailed(one_line(self._matcher.get_error()))
        return self._matcher.is_stopped()

    def forced(self) -> Sequence[int]:
        with _panics_converted:
            return self._matcher.compute_ff_tokens()

    def num_valid(self, tokens: Sequence[int]) -> int:
        with _panics_converted:
            return self._matcher.validate_tokens(list(tokens))

    def draft_masks(self, drafts: Sequence[int]) -> bytes:
        masks = [self.mask()]
        num_consumed = 0
        with _panics_converted:
            try:
                for token in drafts:
                    self.consume(token)
                    num_consumed += 1
                    masks.append(self.mask())
            finally:
                self._matcher.rollback(num_consumed)
        return b"".join(masks)


class _TokenMask:
    """A list of allowed tokens: the same mask at every position. Needs neither state nor llguidance."""

    def __init__(self, source: str, vocab_size: int) -> None:
        token_ids: list[int] = json.loads(source)
        if token_ids[-1] >= vocab_size:
            raise InvalidRequest(f"grammar: token id {token_ids[-1]} is outside the vocabulary of {vocab_size}")
        mask = bytearray(-(-vocab_size // 8))
        for token_id in token_ids:
            mask[token_id // 8] |= 1 << token_id % 8
        self._mask = bytes(mask)
        self.num_bytes = len(mask) + len(source)
        self.family = self

    def matcher(self) -> Matcher:
        return self

    def mask(self) -> bytes:
        return self._mask

    def consume(self, _token: int) -> bool:
        return False  # no state: the answer ends at a stop token or at max_tokens

    def forced(self) -> Sequence[int]:
        return ()

    def num_valid(self, tokens: Sequence[int]) -> int:
        is_valid = [self._mask[token // 8] >> token % 8 & 1 for token in tokens]
        return is_valid.index(0) if 0 in is_valid else len(is_valid)

    def draft_masks(self, drafts: Sequence[int]) -> bytes:
        return self._mask * (1 + len(drafts))


class _PanicsConverted:
    """Converts panics of the library, which are BaseExceptions, to GrammarFailed.

    A class, because a generator takes longer than most calls of the library.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None or isinstance(error, QuireError | KeyboardInterrupt | SystemExit | MemoryError):
            return
        raise GrammarFailed(f"{type(error).__name__}: {str(error)[:200]}") from None


_panics_converted = _PanicsConverted()


class VocabularyAdapter:
    """The tokens of a model, in the interface of llguidance."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]  # b"": never sampled
        self.eos_token_ids = eos_token_ids
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(tokenizer.special_ids | tokenizer.control_ids | set(eos_token_ids))

    def __call__(self, text: bytes | str) -> list[int]:
        """Encode text that the grammar forces, in the tokens that the model itself would use."""
        return self._tokenizer.encode_plain(text.decode() if isinstance(text, bytes) else text, at_start=False)

    def first_order(self) -> dict[str, Any]:
        """The vocabulary and the limits for the child that tries grammars."""
        return {
            "tokens": [token.decode("latin-1") for token in self.tokens],
            "eos_token_ids": self.eos_token_ids,
            "special_token_ids": self.special_token_ids,
            "slices": SLICES,
            "limits": LIMITS,
            "max_cpu_s": COMPILE_LIMIT_S,
            "max_wait_s": WAIT_LIMIT_S,
        }


class _Compiler:
    def __init__(
        self, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...], vocab_size: int, *, is_early: bool = False
    ) -> None:
        try:
            import llguidance
        except ModuleNotFoundError as error:
            raise MissingExtra.of("grammar: a structured answer", error.name) from error
        if not eos_token_ids:
            raise InvalidRequest("grammar: this model has no end-of-text token, so an answer could not end")
        vocabulary = VocabularyAdapter(tokenizer, eos_token_ids, vocab_size)
        self.trial = GrammarTrial(vocabulary.first_order)
        if is_early:
            self.trial.start_early()  # the child prepares the vocabulary at the same time
        self._library = llguidance
        self._mask_bytes = -(-vocab_size // 8)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(vocabulary),
            n_vocab=vocab_size,
            eos_token=list(eos_token_ids),
            slices=list(SLICES),
        )
        self._limits = llguidance.LLParserLimits(**LIMITS)

    def compile(self, source: str, num_characters: int) -> Compiled:
        """Compile a translated grammar that has passed its trial. `num_characters`: before its translation."""
        with _panics_converted:
            start = self._library.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
            if start.is_error():
                raise InvalidRequest(f"grammar: {one_line(start.get_error())}")
            start.compute_bitmask()  # copies reuse the result
        # Measured: 80 kB for small schemas, 50 bytes per character for large ones.
        return _LLMatcher(start, self._mask_bytes, (128 << 10) + 50 * num_characters, family=object())

    def translate(self, grammar: Grammar) -> str:
        """The grammar in llguidance's format."""
        matcher = self._library.LLMatcher
        if grammar.kind is GrammarKind.REGEX:
            return matcher.grammar_from_regex(grammar.source)
        if grammar.kind is GrammarKind.LARK:
            return matcher.grammar_from_lark(grammar.source)
        schema = json.loads(grammar.source)
        options: Any = {**json_style(schema), "lenient": False, "coerce_one_of": False}  # enforce every keyword
        try:
            return matcher.grammar_from_json_schema(schema, overrides=options)
        except ValueError as error:
            raise InvalidRequest(f"grammar: {one_line(str(error))}") from None


MAX_COMPILING = 256  # requests; a common grammar takes milliseconds, a hostile one two seconds
HARD_FACTOR = 4  # requests of all tenants together: at most this many times MAX_COMPILING
MAX_OF_TENANT = NUM_THREADS - 1  # compiled at the same time: one tenant does not use every thread
SIGN_OF_LIFE_S = 5.0  # interval of messages while the worker only waits for grammars


class _Compiling(NamedTuple):
    message: Add
    job: Future[Compiled]


class GrammarQueue:
    """Compiles the grammars of waiting requests; tenants (API keys) take turns.

    Used by the thread of the worker's loop. Other threads call `wake` when there is something to `take`.
    """

    def __init__(self, grammars: Grammars, wake: Callable[[], None]) -> None:
        self._grammars = grammars
        self._wake = wake
        self._lines: dict[str, deque[Add]] = {}  # of tenants with waiting requests, in the order of their turns
        self._compiling: list[_Compiling] = []
        self._abandoned: list[_Compiling] = []  # cancelled requests whose grammars still use a thread
        self._last_sign_s = 0.0

    def __len__(self) -> int:
        return len(self._compiling) + sum(map(len, self._lines.values()))

    def add(self, message: Add) -> None:
        """Queue the compilation of a request's grammar. Raises QueueFull.

        A full queue refuses a request with which its tenant would have more than an equal part of the queue.
        """
        num_all = len(self)
        tenant, compiling = message.request.tenant, [one.message.request.tenant for one in self._compiling]
        num_tenants = len({tenant, *self._lines, *compiling})
        num_own = len(self._lines.get(tenant, ())) + compiling.count(tenant)
        is_greedy = (num_own + 1) * num_tenants > MAX_COMPILING
        if num_all >= MAX_COMPILING and (is_greedy or num_all >= HARD_FACTOR * MAX_COMPILING):
            raise QueueFull(f"{num_all} requests wait for their grammars to be compiled, which is the limit")
        if not num_all:
            self._last_sign_s = time.monotonic()
        self._lines.setdefault(tenant, deque()).append(message)
        self._begin()

    def _begin(self) -> None:
        """Start jobs while threads are free. Tenants take turns, one request each."""
        self._abandoned = [one for one in self._abandoned if not one.job.done()]
        while (tenant := self._next_tenant()) is not None:
            line = self._lines.pop(tenant)
            message = line.popleft()
            if line:
                self._lines[tenant] = line
            grammar = message.request.grammar
            assert grammar is not None
            job = self._grammars.submit(grammar, tenant)
            self._compiling.append(_Compiling(message, job))
            job.add_done_callback(lambda _: self._wake())

    def _next_tenant(self) -> str | None:
        """The tenant whose turn it is. None: no thread is free for any of them."""
        running = Counter(
            one.message.request.tenant for one in (*self._compiling, *self._abandoned) if not one.job.done()
        )
        if running.total() >= NUM_THREADS:
            return None
        return next((tenant for tenant in self._lines if running[tenant] < MAX_OF_TENANT), None)

    def cancel(self, request_id: int) -> None:
        """Remove a request with all its samples: a client that cancels one cancels all of them."""
        self._abandoned += [one for one in self._compiling if request_id in one.message.request_ids]
        self._compiling = [one for one in self._compiling if request_id not in one.message.request_ids]
        for tenant, line in list(self._lines.items()):
            self._lines[tenant] = deque(message for message in line if request_id not in message.request_ids)
        self._lines = {tenant: line for tenant, line in self._lines.items() if line}

    def take(self) -> Sequence[tuple[Add, Compiled | QuireError]]:
        """The requests whose grammars are compiled or failed, in the order in which their compilation began."""
        ended = [(one, one.job.done()) for one in self._compiling]  # asked once: a job may end in between
        done = [one for one, is_done in ended if is_done]
        self._compiling = [one for one, is_done in ended if not is_done]
        self._begin()
        return [(one.message, _outcome(one.job)) for one in done]

    def is_sign_due(self) -> bool:
        """Whether to tell the client that the worker is alive and waiting. True at most once per interval."""
        now_s = time.monotonic()
        if not len(self) or now_s - self._last_sign_s < SIGN_OF_LIFE_S:
            return False
        self._last_sign_s = now_s
        return True


def _outcome(job: Future[Compiled]) -> Compiled | QuireError:
    try:
        return job.result()
    except QuireError as error:
        return error
    except Exception as error:
        return RequestFailed(f"compiling the grammar failed: {type(error).__name__}: {error}")
