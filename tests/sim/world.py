"""A simulated environment for the scheduler, generated from a seed: arrivals, cancels, pins, clock jumps, tiny pools.

After every event it checks, from its own records, everything a client could observe (tokens, order, age, budgets,
isolation of salts) and the core's invariants (`check_scheduler`). An event is one API call, or one schedule and commit.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from quire.backends.base import Capacity
from quire.backends.fake import FakeRunner, Fold, Hybrid, digest, run_alone
from quire.core.cache import FROM_ZERO, StopReason, hash_block_tokens
from quire.core.check import check_scheduler
from quire.core.events import Admitted, Event, Preempted, PrefixHitFound
from quire.core.kv_cache import KVCacheManager
from quire.core.levels.levels import MIN_TIMEOUT_NS, ReadState, SaveLimits
from quire.core.levels.lower_level import LevelSpeed, LowerLevel
from quire.core.policy import Aging, Fair, Policy, StepCost
from quire.core.request import Request, RequestState
from quire.core.scheduler import Scheduler
from quire.core.step import Load, MemoryKind, SeqSlice, StepPlan, TokenUpdate
from quire.core.values import NS_PER_S, FinishReason, Level, Priority, SamplingParams
from quire.errors import ContextTooLong, QueueFull
from tests.core.helpers import wait_bound
from tests.sim.lower_store import COPY_STEPS, LowerStore

SALTS = ("", "tenant-a", "tenant-b")
TENANTS = ("", "ann", "bob")
FAIR = "fair"
FIRST_HYBRID = 1_000_000  # worlds from this seed on have windows, recurrent states, or both
FIRST_TIERED = 2_000_000  # worlds from this seed on have levels below the device, and every other one is hybrid
FIRST_DRAFTING = 3_000_000  # worlds from this seed on have drafts; some are hybrid, some have levels
# Worlds from this seed on are short of memory: long LOW requests fill the pool, short ones of higher tiers preempt them
# again and again, and their cached blocks are evicted. Some are hybrid, some have levels, some have drafts.
FIRST_PRESSED = 4_000_000
HOST_PIECES = ((1, 1, 1), (4, 2, 2), (20, 20, 6), (200, 90, 50))  # slots for blocks, window blocks and states
PIECE_SIZES = (10, 5, 15)  # bytes of a block, a window block and a state in lower levels
NUM_BUFFERS = ((40, 40, 10), (40, 40, 10), (2, 2, 1), (9, 9, 2))  # of each kind, for reads of the disk
HUNG_SHARES = (0.0, 0.0, 0.0, 0.3, 1.0, 0.0)  # of the reads of a world


def weak_digest(parent_key: bytes, tokens: bytes) -> bytes:
    return bytes([hash_block_tokens(parent_key, tokens)[0] % 16])


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        length += 1
    return length


def sibling(parent: Request, request_id: int, index: int) -> Request:
    """Another sample of the same prompt (n > 1)."""
    prompt, sampling = parent.tokens[: parent.num_prompt_tokens], parent.sampling.sample(index)
    account: dict[str, Any] = {"priority": parent.priority, "salt": parent.salt, "tenant": parent.tenant}
    return Request(request_id, prompt, sampling, **account, parent=parent)


def overtake_window(patience_ns: float, behind: Priority, ahead: Priority) -> float:
    """Starvation bound of aging.

    A request of tier `behind` that arrives at time t is admitted before every request of tier `ahead` that arrives
    later than t plus this bound. The exception is a request that waits for a prefix in flight.
    """
    return max(0, behind - ahead) * patience_ns


class WorldFailure(AssertionError):
    """A client could observe an error."""


@dataclass(slots=True)
class Book:
    """The world's own record of one request, independent of the core."""

    request: Request
    prompt: list[int]
    expected: list[int]
    expected_reason: FinishReason
    arrived_ns: int
    wait_start_ns: int
    waited_ns: int = 0  # total of completed waits
    key: tuple[int, int] = (0, 0)  # order of admission
    urgency: int = 0  # while running
    delivered: list[int] = field(default_factory=list)
    was_admitted: bool = False
    is_fork: bool = False  # waits only for its parent
    num_seen: int = 0  # tokens whose prefixes are in `seen`
    prefix: int = 0  # digest of those tokens


@dataclass(frozen=True, slots=True)
class Setup:
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_chunk_tokens: int
    max_model_len: int | None
    max_waiting: int
    patience_s: float | str | None  # None: first come, first served; `FAIR`: the fair policy
    cost: StepCost | None  # None: rows cost no time
    vocab_size: int
    is_late: bool
    is_overlapped: bool
    is_caching: bool
    is_colliding: bool  # keys of 4 bits: only the comparison of tokens distinguishes contents
    max_mixed_tokens: int | None
    window: int = 0
    num_window_blocks: int = 0
    num_states: int = 0
    num_live_states: int = 2
    host_pieces: tuple[int, int, int] = (0, 0, 0)  # slots of the host tier for each kind
    disk_pieces: int = 0  # 0: no disk tier
    max_save_bytes: int = 0
    max_writes: int = 0
    is_slow_below: bool = False  # loads of few tokens do not pay
    num_buffers: tuple[int, int, int] = (0, 0, 0)  # of each kind, for reads of the disk
    hung_share: float = 0.0  # of reads
    draft_share: float = 0.0  # of the slices that could have drafts
    right_share: float = 0.0  # of draft tokens that are right
    is_pressed: bool = False

    @property
    def has_levels(self) -> bool:
        return any(self.host_pieces) or self.disk_pieces > 0

    @staticmethod
    def draw(random: Random, seed: int) -> Setup:
        setup = Setup._draw(random, seed)
        if FIRST_HYBRID <= seed < FIRST_TIERED or (seed >= FIRST_TIERED and seed % 2):
            setup = setup._with_hybrid_memory(random)
        if FIRST_TIERED <= seed < FIRST_DRAFTING or (seed >= FIRST_DRAFTING and seed % 3 == 0):
            setup = setup._with_levels(random)
            hung_share = HUNG_SHARES[seed // 2 % len(HUNG_SHARES)]
            setup = replace(setup, num_buffers=NUM_BUFFERS[seed // 3 % len(NUM_BUFFERS)], hung_share=hung_share)
            if hung_share and seed // 12 % 2:
                setup = replace(setup, host_pieces=(0, 0, 0), disk_pieces=1_000, max_writes=200)
        if seed >= FIRST_PRESSED:
            setup = setup._with_pressure(random)
        if FIRST_DRAFTING <= seed < FIRST_PRESSED or (seed >= FIRST_PRESSED and seed % 5 < 2):
            shares = random.choice((0.3, 0.7, 1.0)), random.choice((0.3, 0.8, 0.97))
            setup = replace(setup, draft_share=shares[0], right_share=shares[1])
        return setup

    def _with_pressure(self, random: Random) -> Setup:
        max_chunk_tokens = random.choice((2, 4, 8))
        num_window_blocks = self.num_window_blocks
        if num_window_blocks:
            num_window_blocks = (self.window - 1 + max_chunk_tokens) // self.block_size + random.choice((4, 6, 40))
        num_blocks = random.choice((9, 12, 20, 32))
        return replace(
            self,
            block_size=random.choice((2, 4)) if not num_window_blocks else self.block_size,
            num_blocks=num_blocks,
            num_window_blocks=num_window_blocks,
            max_chunk_tokens=max_chunk_tokens,
            max_num_batched_tokens=self.max_num_seqs + random.choice((4, 8, 16)),
            max_model_len=None,
            max_waiting=64,
            patience_s=FAIR,
            is_colliding=False,
            is_pressed=True,
        )

    def _with_levels(self, random: Random) -> Setup:
        kind = random.choice(("host", "disk", "both", "both"))
        return replace(
            self,
            is_caching=True,
            is_colliding=False,  # lower levels know the tokens of a block, but rely on keys for those before it
            host_pieces=(0, 0, 0) if kind == "disk" else random.choice(HOST_PIECES),
            disk_pieces=0 if kind == "host" else random.choice((2, 20, 1_000, 1_000)),
            max_save_bytes=random.choice((10, 40, 400)),
            max_writes=random.choice((1, 20, 200)),
            is_slow_below=random.random() < 0.2,
        )

    def _with_hybrid_memory(self, random: Random) -> Setup:
        window = num_window_blocks = num_states = 0
        kind = random.choice(("window", "window", "states", "states", "both"))
        if kind != "states":
            window = random.choice((1, 2, 3, 8, 17, 40))
            least = (window - 1 + self.max_chunk_tokens) // self.block_size + 4
            num_window_blocks = least + random.choice((0, 1, 3, random.randint(0, 40), self.num_blocks))
        num_live = 2 if self.is_overlapped else random.choice((1, 1, 2))
        if kind != "window":
            num_states = 1 + num_live * self.max_num_seqs + random.choice((0, 1, 2, 4, 8, 30))
        return replace(
            self,
            window=window,
            num_window_blocks=num_window_blocks,
            num_states=num_states,
            num_live_states=num_live,
        )

    @staticmethod
    def _draw(random: Random, seed: int) -> Setup:
        block_size = random.choice((1, 2, 4, 4, 8, 8, 16, 32))
        max_num_seqs = random.choice((1, 2, 3, 4, 6, 8))
        most = max(4, 320 // block_size)
        num_blocks = random.choice((3, 4, 5, 6, random.randint(3, most), random.randint(3, most)))
        return Setup(
            block_size=block_size,
            num_blocks=min(num_blocks, most),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + random.choice((0, 1, 4, 16, 64)),
            max_chunk_tokens=random.choice((1, 2, 3, 5, 8, 16, 64)),
            max_model_len=random.choice((None, None, random.randint(2, 200))),
            max_waiting=random.choice((2, 16, 64, 64)),
            patience_s=random.choice((FAIR, FAIR, FAIR, FAIR, FAIR, None, 0.0, 0.02, 0.2, 2.0)),
            cost=random.choice((None, None, StepCost(1, 10), StepCost(5_000_000, 2_000_000), StepCost(10**9, 10**8))),
            vocab_size=random.choice((2, 5, 50, 50)),
            is_late=random.random() < 0.5,
            is_overlapped=random.random() < 0.75,
            is_caching=random.random() < 0.95,
            is_colliding=random.random() < 0.1,
            max_mixed_tokens=(1, 2, 5, 20)[seed // 5 % 4] if seed % 5 == 4 else None,
        )


class World:
    def __init__(self, seed: int, check_every: int = 1) -> None:
        """`check_every`: number of events between two checks of the core's invariants."""
        self.check_every = check_every
        self.random = Random(seed)
        self.setup = setup = Setup.draw(self.random, seed)
        self._seed = seed
        self.counts: Counter[str] = Counter()
        capacity_tokens = (setup.num_blocks - 1) * setup.block_size
        self.max_model_len = min(setup.max_model_len or capacity_tokens, capacity_tokens)
        self._begin_process()
        self.store = LowerStore(
            self.random,
            self.runner,
            host_pieces=setup.host_pieces,
            disk_pieces=setup.disk_pieces,
            num_buffers=setup.num_buffers,
            hung_share=setup.hung_share,
        )
        self.retired: deque[list[int]] = deque(maxlen=12)  # tokens of ended requests, for later turns
        self.seen: dict[str, set[int]] = {salt: set() for salt in SALTS}  # prefixes computed for each salt
        self.clock_ns = 1_000  # wall clock; it may jump back
        self.now_ns = 0  # the latest time passed to the scheduler
        self.next_id = 1
        self.num_events = 0
        self._started: dict[int, int] = {}  # requests admitted in the current plan -> tokens found in the cache
        self._admitted: set[int] = set()  # requests admitted in the current plan
        self._winners: set[int] = set()  # waiting requests for which memory was taken in the current plan
        self._guessing: dict[int, int] = {}  # requests with guesses -> blocks that they had before the current plan
        self._high_wait: tuple[int, int, int] | None = None  # a HIGH request, steps that it waits, and their bound
        self._has_preempted = False  # in the current plan
        self._has_answers = False  # a running request needed only its next token before the current plan
        self._first_high: Request | None = None  # first waiting HIGH request before the current plan
        self._owed: set[Priority] = set()  # tiers owed service before the current plan
        self._roots = frozenset(self.scheduler.cache.tree.root(salt) for salt in SALTS)
        self._done: dict[bytes, int] = dict.fromkeys(self._roots, 0)
        self._depth: dict[bytes, int] = {}  # chain key -> number of tokens up to it
        self._entries: dict[tuple[bytes, bytes], list[int]] = {}
        self._hybrid_contents: dict[bytes, tuple[list[int], int]] = {}  # tokens of a context -> entries and last state
        self._heads = [self._tokens(self.random.randint(1, max(1, self.max_model_len // 2))) for _ in range(3)]
        self._middles = [self._tokens(self.random.randint(1, 2 * setup.block_size)) for _ in range(2)]

    def _begin_process(self) -> None:
        """Create everything that a restart loses."""
        setup, seed = self.setup, self._seed
        self.fair = Fair() if setup.patience_s == FAIR else None
        self.aging = Aging(setup.patience_s) if isinstance(setup.patience_s, float) else None
        self.policy: Policy = self.fair or self.aging or Policy()
        if self.fair is not None:
            self.fair.ledger.cost = setup.cost
        cache = KVCacheManager(
            setup.num_blocks,
            setup.block_size,
            secret=seed.to_bytes(8, "big"),
            is_caching=setup.is_caching,
            digest=weak_digest if setup.is_colliding else hash_block_tokens,
            window=setup.window,
            num_window_blocks=setup.num_window_blocks,
            num_states=setup.num_states,
            num_live_states=setup.num_live_states,
            levels=self._make_levels(),
            save_limits=SaveLimits(setup.max_save_bytes, setup.max_save_bytes // 2, 256, setup.max_writes),
        )
        if setup.is_slow_below:
            cache.levels.ns_per_token = 1_000
        if seed % 3:
            cache.levels.on_loads = self._start_early
            cache.levels.groups = (1, 2)
        self.scheduler = Scheduler(
            cache,
            self.policy,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_chunk_tokens=setup.max_chunk_tokens,
            max_mixed_tokens=setup.max_mixed_tokens,
            max_model_len=setup.max_model_len,
            max_waiting=setup.max_waiting,
            observe=self._observe,
        )
        capacity = Capacity(
            setup.num_blocks,
            setup.block_size,
            setup.max_num_seqs,
            self.max_model_len,
            setup.vocab_size,
            window=setup.window,
            num_window_blocks=setup.num_window_blocks,
            num_states=setup.num_states,
        )
        self.runner = FakeRunner(capacity, is_late=setup.is_late, seed=seed)
        self.books: dict[int, Book] = {}  # running and waiting requests
        self.in_flight: deque[StepPlan] = deque()
        self._num_launched = self._num_committed = 0  # plans
        self._batch_rows: dict[int, tuple[int, int]] = {}  # batch index -> (request id, epoch) last planned there
        self._late: set[int] = set()  # reads and loads that took longer than their deadline
        self._num_advances = 0  # of the store, when it was last looked at
        self._advanced_ns = 0  # when a read or a copy last began or ended
        self._num_idle_steps = 0  # in a row, in which nothing ran although a request could start

    def _make_levels(self) -> list[LowerLevel]:
        levels = []
        if any(self.setup.host_pieces):
            levels.append(LowerLevel(Level.HOST, PIECE_SIZES, self.setup.host_pieces))
        if self.setup.disk_pieces:
            store_bytes, buffers = self.setup.disk_pieces * PIECE_SIZES[0], self.setup.num_buffers
            levels.append(LowerLevel(Level.DISK, PIECE_SIZES, store_bytes=store_bytes, buffers=buffers))
        for level in levels if self.setup.is_slow_below else ():
            level.speed = LevelSpeed(latency_ns=9_000, bytes_per_s=10**9)
        return levels

    # Running

    def run(self, num_events: int) -> Counter[str]:
        operations: list[tuple[int, Callable[[], None]]] = [
            (550, self._step),
            (200, self._add),
            (12, self._burst),
            (45, self._add_siblings),
            (30, self._branch),
            (40, self._cancel),
            (20, self._finish),
            (35, self._pin),
            (8, self._unpin),
            (4, self._clear),
            (8, self._evict_unused),
            (20, self._explain),
            (20, self._jump),
        ]
        if self.setup.is_pressed:
            operations += [(60, self._press)]
        if self.setup.has_levels:
            operations += [(300, self._transfer), (30, self._idle), (4, self._damage), (3, self._restart)]
            operations += [(25, self._delay)]
        if self.setup.hung_share:
            operations += [(40, self._answer)]
        weights = [weight for weight, _ in operations]
        verbs = [verb for _, verb in operations]
        while self.num_events < num_events:
            self._tick(self.random.choice((0, 1_000, 50_000, 1_000_000)))
            self._event(self.random.choices(verbs, weights)[0])
        self.scheduler.drain()
        limit = self.num_events + 200 + 40 * sum(len(book.expected) + len(book.prompt) for book in self.books.values())
        while self.scheduler.has_work:
            self._tick(1_000_000)
            self._event(self._step)
            if self.setup.has_levels:
                self._event(self._transfer)
            if self.store.has_hung:  # which do not end before the requests
                self._tick(100_000_000)
            if self.num_events > limit:
                raise WorldFailure(f"requests do not end: {[book.request for book in self.books.values()]}")
        while self.store.has_work:
            self._transfer()
        check_scheduler(self.scheduler, self._roots)
        self.scheduler.cache.pins.clear()
        self._require(self.scheduler.cache.pool.num_free == self.setup.num_blocks - 1, "blocks leaked")
        self._check_hybrid_leaks()
        self._check_buffer_leaks()
        self._require(not self.books, "requests were lost")
        num_collisions = self.scheduler.cache.tree.num_collisions
        self.counts["collisions"] += num_collisions
        self._require(self.setup.is_colliding or num_collisions == 0, "different contents have the same key")
        self._count_stats()
        return self.counts

    def _event(self, verb: Callable[[], None]) -> None:
        verb()
        self.num_events += 1
        if self.num_events % self.check_every:
            return
        check_scheduler(self.scheduler, self._roots)
        self._check_memory()
        self._check_hybrid_memory()
        self._check_held_by_loads()
        half = (self.setup.num_blocks - 1) // 2
        self._require(self.scheduler.cache.pins.num_blocks <= half, "pins hold more than half the pool")

    def _count_stats(self) -> None:
        self.counts["events"] = self.num_events
        self._count_process()

    def _count_process(self) -> None:
        """Count what the cache has counted since the last restart."""
        stats, levels = self.scheduler.cache.stats(), self.scheduler.cache.levels
        self.counts["twins"] += stats.num_twins
        self.counts["evictions"] += stats.num_evictions
        self.counts["adoptions"] += stats.num_adoptions
        self.counts["partial hits"] += stats.num_partial_hits
        if not levels.levels:
            return
        self.counts["pieces that were not saved"] += levels.saves.num_skipped
        for level in levels.stats():
            self.counts[f"saves to {level.level}"] += level.num_saves
            self.counts[f"failed saves to {level.level}"] += level.num_failed_saves
            self.counts[f"evictions from {level.level}"] += level.num_evictions
            self.counts[f"loads from {level.level}"] += level.num_loads
            self.counts["failed loads"] += level.num_failed_loads

    @staticmethod
    def _require(condition: bool, message: str) -> None:
        if not condition:
            raise WorldFailure(message)

    # Events

    def _tick(self, by_ns: int) -> None:
        self.clock_ns += by_ns

    def _jump(self) -> None:
        self._tick(self.random.choice((-3_000_000, 5_000_000, 500_000_000, 5 * NS_PER_S)))

    def _tokens(self, count: int) -> list[int]:
        return self.random.choices(range(self.setup.vocab_size), k=count)

    def _prompt(self) -> list[int]:
        random = self.random
        kind = random.random()
        if kind < 0.2 and self.retired:
            prompt = [*random.choice(self.retired)]  # the next turn of a conversation, or the same request again
            if random.random() < 0.6:
                prompt += self._tokens(random.randint(1, 6))
        elif kind < 0.3 and self.books:
            prompt = [*random.choice(list(self.books.values())).prompt]
        else:
            prompt = [*random.choice(self._heads)][: random.choice((1, 3, 10**6, 10**6))] if kind < 0.8 else []
            if random.random() < 0.4:
                prompt += random.choice(self._middles)
            prompt += self._tokens(random.randint(0 if prompt else 1, 6))
        if len(prompt) >= self.max_model_len and random.random() < 0.95:
            prompt = prompt[: random.randint(1, max(1, self.max_model_len - 1))]
        return prompt

    def _sampling(self) -> SamplingParams:
        random = self.random
        is_stopping = random.random() < 0.5
        max_tokens = random.choice((None, 1, 2, random.randint(1, 12), random.randint(1, 40)))
        return SamplingParams(
            temperature=random.choice((0.0, 1.0)),
            repetition_penalty=random.choice((1.0, 1.0, 1.1)),
            seed=random.randint(0, 3),
            prompt_logprobs=0 if random.random() < 0.03 else None,
            min_tokens=random.choice((0, 0, 0, 1)),
            max_tokens=max_tokens,
            stop_token_ids=(0,) if is_stopping else (),
        )

    def _burst(self) -> None:
        """Add many requests at once, most of them with the same prompt."""
        prompt = self._prompt()
        for _ in range(self.random.randint(3, 12)):
            self._add(prompt if self.random.random() < 0.7 else None)

    def _add(self, prompt: list[int] | None = None) -> None:
        request = Request(
            self._new_id(),
            prompt or self._prompt(),
            self._sampling(),
            priority=self.random.choice(list(Priority)),
            salt=self.random.choice(("", "", SALTS[1], SALTS[2])),
            tenant=self.random.choice(TENANTS),
        )
        if self.setup.num_window_blocks or self.setup.num_states:
            most = min(len(request.tokens) - 1, 4)
            request.boundaries = tuple(sorted(self.random.sample(range(1, len(request.tokens)), k=most)))
        self._submit(request)

    def _add_siblings(self) -> None:
        """Add several samples of one prompt (n > 1)."""
        self._add()
        first = self.scheduler.requests.get(self.next_id - 1)
        for index in range(1, self.random.randint(2, 4)):
            if first is not None:
                self._submit(sibling(first, self._new_id(), index), sample_index=index)

    def _press(self) -> None:
        """Fill the pool with a LOW request, or add one of a higher tier that needs its memory; evict what is cached."""
        random = self.random
        if random.random() < 0.5:
            self._evict_unused()
        priority = random.choice((Priority.HIGH, Priority.HIGH, Priority.NORMAL, Priority.LOW, Priority.LOW))
        most = self.max_model_len - 1
        length = random.randint(most // 2, most) if priority is Priority.LOW else random.randint(1, max(most // 2, 1))
        max_tokens = random.choice((4, 20)) if priority is Priority.LOW else random.choice((1, 2))
        sampling = SamplingParams(max_tokens=max_tokens, seed=random.randint(0, 3))
        tenant = random.choice(TENANTS)
        self._submit(Request(self._new_id(), self._tokens(length), sampling, priority=priority, tenant=tenant))

    def _branch(self) -> None:
        """Add a request that continues from all known tokens of another."""
        candidates = [book.request for book in self.books.values()]
        if candidates:
            parent = self.random.choice(candidates)
            child = Request(
                self._new_id(),
                parent.tokens,
                self._sampling(),
                priority=self.random.choice(list(Priority)),  # possibly more urgent than its parent
                salt=parent.salt,
                tenant=parent.tenant,
                parent=parent,
            )
            self._submit(child)

    def _submit(self, request: Request, sample_index: int = 0) -> None:
        prompt = [*request.tokens]
        is_fork = request.parent is not None
        should_fit = len(prompt) + 1 <= self.max_model_len
        try:
            self.scheduler.add(request, self.clock_ns)
        except ContextTooLong:
            self.counts["refused, too long"] += 1
            self._require(not should_fit, f"{request!r} was refused but fits")
            return
        except QueueFull:
            self.counts["refused, queue full"] += 1
            self._require(
                len(self.scheduler.waiting) >= self.setup.max_waiting, "refused although the queue is not full"
            )
            return
        self.now_ns = max(self.now_ns, self.clock_ns)
        if not should_fit:
            raise WorldFailure(f"{request!r} cannot fit and was accepted")
        self.counts["forks"] += is_fork
        # The sample index must be the world's number of the sibling, not one chosen by the core.
        sampling = request.sampling
        if sampling.sample_index != sample_index:
            raise WorldFailure(
                f"sample {sample_index} of a prompt has the random numbers of sample {sampling.sample_index}"
            )
        limit = min(len(prompt) + (sampling.max_tokens or self.max_model_len), self.max_model_len) - len(prompt)
        tokens = run_alone(
            prompt,
            sampling,
            limit,
            block_size=self.setup.block_size,
            vocab_size=self.setup.vocab_size,
            window=self.setup.window,
            has_states=self.setup.num_states > 0,
        )
        reason = FinishReason.LENGTH
        for count, token in enumerate(tokens, 1):
            if token in sampling.stop_token_ids and count > sampling.min_tokens:
                tokens, reason = tokens[:count], FinishReason.STOP
                break
        book = Book(request, prompt, tokens, reason, self.now_ns, self.now_ns, is_fork=is_fork)
        self.books[request.request_id] = book
        self._enqueue(book)

    def _new_id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    def _cancel(self) -> None:
        if self.books:
            book = self.random.choice(list(self.books.values()))
            waiters = list(self.scheduler.waiting.load_waiters)
            if waiters and self.random.random() < 0.3:
                book = self.books[self.random.choice(waiters).request_id]
            held = len(book.request.block_table)
            self._count_cancelled_waiter(book.request)
            self._require(self.scheduler.cancel(book.request.request_id), "a live request could not be cancelled")
            self._require(not book.request.block_table, "a cancelled request kept its blocks")
            self.counts["cancels of running"] += held > 0
            self._retire(book)
        self._require(not self.scheduler.cancel(self.next_id + 1000), "cancelled a request that does not exist")

    def _count_cancelled_waiter(self, request: Request) -> None:
        waiters = self.scheduler.waiting.load_waiters
        if request in waiters:
            self.counts["cancels of load waiters"] += 1
            load_id = waiters.group_of(request)
            self.counts["loads without waiters"] += sum(waiters.group_of(one) == load_id for one in waiters) == 1

    def _finish(self) -> None:
        """End a request at a stop string found above the core, some tokens ago."""
        books = [book for book in self.books.values() if book.delivered]
        if books:
            book = self.random.choice(books)
            keep = self.random.randint(0, len(book.delivered))
            self._require(self.scheduler.finish(book.request.request_id, keep), "a live request could not be finished")
            self._require(
                book.request.output == book.delivered[:keep], "finish truncated the answer at the wrong token"
            )
            self._retire(book)

    def _pin(self) -> None:
        books = [book for book in self.books.values() if book.was_admitted]
        tokens, salt = self._prompt(), self.random.choice(SALTS)
        if books and self.random.random() < 0.8:  # probably cached tokens
            book = self.random.choice(books)
            tokens, salt = [*book.request.tokens], book.request.salt
        ttl = self.random.choice((1_000, 1_000_000, 10**12, 10**12))
        pin_id = f"pin-{self.random.randint(0, 4)}"
        self.scheduler.cache.pin(pin_id, Request(0, tokens, salt=salt), len(tokens), self.now_ns + ttl)

    def _unpin(self) -> None:
        self.scheduler.cache.pins.unpin(f"pin-{self.random.randint(0, 4)}")

    def _clear(self) -> None:
        levels = self.scheduler.cache.levels
        self.counts["clears during reads"] += len(levels.reads) > 0
        self.counts["clears during saves"] += self.store.is_saving
        self.scheduler.cache.clear()
        self.store.clear()

    def _transfer(self) -> None:
        """Complete a save or a load."""
        self.store.advance(self.scheduler, self._num_committed)

    def _start_early(self, loads: tuple[Load, ...]) -> None:
        self.store.start_early(loads, self._num_launched, self._num_committed)
        self.counts["loads started early"] += 1

    def _delay(self) -> None:
        """Let reads and loads take longer than their deadline."""
        levels = self.scheduler.cache.levels
        if len(levels.loads) + len(levels.reads):
            self._tick(3 * NS_PER_S)

    def _answer(self) -> None:
        self.store.answer(self.scheduler)

    def _idle(self) -> None:
        """Save cached content while nothing runs, as an idle worker does."""
        for _ in range(0 if self.scheduler.has_work else 6):
            self.store.start(self.scheduler.schedule_idle(), self._num_launched)
            self._transfer()
            self._transfer()

    def _damage(self) -> None:
        self.store.damage()

    def _restart(self) -> None:
        """End the process at once, and start a new one with the same disk."""
        for book in self.books.values():
            self.retired.append([*book.prompt, *book.delivered])
        self._count_process()
        self._begin_process()
        self.now_ns = 0
        found = self.store.restart(self.runner)
        levels = self.scheduler.cache.levels
        if self.setup.disk_pieces and levels.levels:
            self._require(levels.restore(Level.DISK, found) == len(found), "content of the disk was not restored")
        self.counts["restarts"] += 1

    def _evict_unused(self) -> None:
        self.scheduler.cache.evict_unused()
        self._require(self.scheduler.cache.stats().num_cached == 0, "unused content survived evict_unused")

    def _explain(self) -> None:
        request = Request(0, self._prompt(), salt=self.random.choice(SALTS))
        hit = self.scheduler.cache.match(request)
        explanation = self.scheduler.explain(request)
        if self.setup.is_caching:
            is_same = explanation.num_tokens == hit.start + explanation.num_loaded_tokens
            self._require(is_same, "explain and match disagree")
            self.counts["explained loads"] += explanation.num_loaded_tokens > 0
        self._require(explanation.num_tokens < len(request.tokens), "a hit left nothing to compute")
        self.counts[f"explained {explanation.reason}"] += 1
        stranger = self.scheduler.explain(Request(0, request.tokens, salt="stranger"))
        silent = (StopReason.NOT_FOUND, StopReason.TOO_SHORT, StopReason.OFF)
        is_silent = stranger.num_tokens == 0 and stranger.reason in silent
        self._require(is_silent or self.setup.is_colliding, "explain revealed content of another salt")

    def _step(self) -> None:
        self.store.end_old_copies(self.scheduler, self._num_committed)
        self._plan_step()

    def _plan_step(self) -> None:
        """Schedule and forward N+1, collect and commit N, sample N+1; or, without overlap, run one step completely."""
        if self.setup.draft_share:
            self._draft()
        busy = self._busy()
        self._guessing = {one.request_id: len(one.block_table) for one in self.scheduler.running if one.draft}
        self._has_answers = any(
            min(len(r.tokens) + r.num_in_flight, r.token_limit - 1) - r.num_planned <= 1 for r in self.scheduler.running
        )
        self._started = {}
        self._admitted = set()
        self._winners = set()
        self._has_preempted = False
        times: dict[tuple[Priority, str], int] = {}
        if self.fair is not None:
            ledger = self.fair.ledger
            self._owed = {priority for priority in Priority if ledger.is_owed(priority)}
            first = self.scheduler.waiting.head((Priority.HIGH,))
            self._first_high = None if first is None else first[1]
            times = {(p, tenant): ledger.clocks[p].time(tenant) for p in Priority for tenant in TENANTS}
        self.now_ns = max(self.now_ns, self.clock_ns)
        waited = {request.request_id for request in self.scheduler.waiting.prefix_waiters}
        pins = self.scheduler.cache.pins
        num_pins = sum(pin.expires_ns > self.now_ns for pin in pins)
        plan = self.scheduler.schedule(self.clock_ns)
        self._check_plan(plan, busy)
        waiters = {request.request_id for request in self.scheduler.waiting.prefix_waiters}
        self.counts["prefix waits"] += len(waiters - waited)
        self.counts["pins dropped"] += num_pins - len(pins)
        self._check_loads(plan)
        if self.fair is not None:
            self._check_accounts(self.fair, plan, times)
            self._check_wait(self.fair, plan)
        self._check_guesses(plan)
        now = self.now_ns
        self._require(all(pin.expires_ns > now for pin in pins), "a pin did not expire")
        loading = {request.request_id for request in self.scheduler.waiting.load_waiters}
        self._require(self._winners <= self._admitted | loading, "memory was freed for a request that was not admitted")
        is_sampled_first = self.random.random() < 0.5  # the order used when no row has a grammar
        self.store.start(plan, self._num_launched)
        if not plan.is_empty:
            self._num_launched += 1
            self.runner.forward(plan)
            if is_sampled_first:
                self.runner.sample(None)
        if self.in_flight:
            self._commit()
        if not plan.is_empty:
            if not is_sampled_first:
                self.runner.sample(None)
            self.in_flight.append(plan)
            if not self.setup.is_overlapped:
                self._commit()

    def _draft(self) -> None:
        """Guess the next tokens of some running requests, and hold some that have a sample in flight."""
        random, vocab_size = self.random, self.setup.vocab_size
        for request in self.scheduler.running:
            book = self.books[request.request_id]
            request.is_held = random.random() < 0.3
            request.draft = ()
            if random.random() < self.setup.draft_share:
                end = len(book.delivered)
                coming = book.expected[end : end + random.choice((1, 2, 5, 20))]
                is_right = self.setup.right_share
                request.draft = [
                    token if random.random() < is_right else random.randrange(vocab_size)
                    for token in (*coming, random.randrange(vocab_size))
                ]

    def _commit(self) -> None:
        plan = self.in_flight.popleft()
        self._num_committed += 1
        books = {}
        for piece in plan.slices:
            book = self.books.get(piece.request_id)
            if book is not None and book.request.epoch == piece.epoch:
                books[piece.request_id] = book
                self._see(book, piece.start + piece.length - piece.num_drafts)
        before = self.scheduler.num_accepted
        self.counts["stale results"] += len(plan.slices) - len(books)
        updates = self.scheduler.commit(plan, self.runner.collect())
        for piece in plan.slices:
            if piece.num_drafts and piece.request_id in books:
                book = books[piece.request_id]
                self.counts["slices with drafts"] += 1
                self._see(book, min(len(book.request.tokens) - 1, piece.start + piece.length))
                self.counts["states rolled back"] += bool(
                    self.setup.num_states and book.request.num_computed == piece.start
                )
        self.counts["accepted drafts"] += self.scheduler.num_accepted - before
        for update in updates:
            self._deliver(update)

    # Records

    def _deliver(self, update: TokenUpdate) -> None:
        book = self.books.get(update.request_id)
        if book is None:
            raise WorldFailure(f"{update} for a request that has ended")
        book.delivered += update.tokens
        end = len(book.delivered)
        if book.delivered != book.expected[:end]:
            raise WorldFailure(f"{book.request!r} has output {book.delivered}, alone it has {book.expected[:end]}")
        is_end = end == len(book.expected)
        if (update.finish_reason is not None) != is_end:
            raise WorldFailure(f"{book.request!r} ended too early or too late")
        if update.finish_reason is not None:
            self._require(update.finish_reason is book.expected_reason, f"ended with {update.finish_reason}")
            self._retire(book)

    def _retire(self, book: Book) -> None:
        self.retired.append([*book.prompt, *book.delivered])
        if book.request.state is not RequestState.FINISHED:
            raise WorldFailure(f"{book.request!r} is not finished")
        del self.books[book.request.request_id]

    def _see(self, book: Book, num_computed: int) -> None:
        """Record the prefixes computed for each salt."""
        seen = self.seen[book.request.salt]
        while book.num_seen < num_computed:
            book.prefix = digest(book.prefix, book.request.tokens[book.num_seen])
            seen.add(book.prefix)
            book.num_seen += 1

    def _enqueue(self, book: Book) -> None:
        """Start a wait, and compute the key from the world's own record of earlier waits."""
        book.wait_start_ns = self.now_ns
        request = book.request
        key = book.arrived_ns
        if self.aging is not None:
            key = self.now_ns - book.waited_ns + request.priority * round(self.aging.patience_s * NS_PER_S)
        book.key = (key, request.sequence)

    def _urgency(self, book: Book) -> int:
        """Urgency of a waiting request."""
        if self.fair is not None:
            return book.request.priority
        if self.aging is None or not self.aging.patience_s:
            return 0
        waited_ns = book.waited_ns + self.now_ns - book.wait_start_ns
        return book.request.priority - waited_ns // round(self.aging.patience_s * NS_PER_S)

    def _is_ahead(self, one: Book, other: Book) -> bool:
        """Whether `other` should wait for a prefix that `one` computes."""
        if self.fair is not None:
            return self.fair.is_ahead(one.request, other.request)
        return one.key < other.key

    def _observe(self, event: Event) -> None:
        match event:
            case Admitted():
                self._on_admitted(event)
            case Preempted():
                self._on_preempted(event)
            case PrefixHitFound():
                self._on_hit(event)

    def _on_hit(self, event: PrefixHitFound) -> None:
        book = self.books[event.request_id]
        self._started[event.request_id] = event.num_tokens
        parent = book.request.parent
        self.counts["hits beside a parent"] += parent is not None and parent.state is RequestState.RUNNING
        tokens = book.request.tokens
        self._require(event.num_tokens < len(tokens), "a hit left nothing to compute")
        prefix = 0
        self.counts["hits without a state or window"] += event.num_tokens < event.num_kv_tokens
        for token in tokens[: event.num_kv_tokens]:
            prefix = digest(prefix, token)
        if prefix not in self.seen[book.request.salt]:
            raise WorldFailure(f"{book.request!r} hit {event.num_tokens} tokens that were never computed for its salt")

    def _on_admitted(self, event: Admitted) -> None:
        book = self.books[event.request_id]
        if self.fair is not None:
            self._check_fair_order(self.fair, book)
        else:
            self._check_order_of_keys(book)
        for rival in self._prefix_waiters():
            # Waiters of an owner preempted in this step stay parked until the next step.
            is_excused = self._has_preempted or self.setup.is_colliding
            if not is_excused and self._goes_before(rival, book) and not self._awaits_prefix(rival):
                raise WorldFailure(f"{book.request!r} was admitted before {rival.request!r}, which waits for no prefix")
        if not book.is_fork and self._should_have_waited(book):
            raise WorldFailure(f"{book.request!r} computes a prefix that a request ahead of it is computing")
        book.urgency = self._urgency(book)
        book.waited_ns += self.now_ns - book.wait_start_ns
        if event.waited_ns != book.waited_ns:
            raise WorldFailure(f"{book.request!r} reports a wrong age")
        if not event.is_resumed:
            self._check_explanation(book.request)
        book.was_admitted = True
        self._admitted.add(event.request_id)
        self.counts["resumed"] += event.is_resumed

    def _check_explanation(self, request: Request) -> None:
        """Check the explanation of a request that starts: where its tokens come from."""
        found = request.cache_explanation
        if found is None:
            raise WorldFailure(f"{request!r} starts without an explanation")
        self._require(found.num_tokens == request.num_cached_tokens, "the explanation counts other tokens")
        self._require(0 <= found.num_loaded_tokens <= found.num_tokens, f"more was loaded than used: {found}")
        self._require((found.source is None) == (found.num_tokens == 0), f"tokens without a source: {found}")
        is_loaded = found.source in (Level.HOST, Level.DISK)
        self._require(is_loaded == (found.num_loaded_tokens > 0), f"loaded tokens of another tier: {found}")
        self.counts["starts from loaded tokens"] += is_loaded
        if found.reason in (StopReason.LOAD_FAILED, StopReason.NOT_LOADED):
            self.counts[f"starts with {found.reason}"] += 1

    def _prefix_waiters(self) -> list[Book]:
        return [self.books[request.request_id] for request in self.scheduler.waiting.prefix_waiters]

    def _ready(self) -> list[Book]:
        """Waiting requests that do not wait for a prefix."""
        waiting = self.scheduler.waiting
        parked = waiting.prefix_waiters, waiting.load_waiters
        return [self.books[one.request_id] for one in waiting if not any(one in waiters for waiters in parked)]

    def _goes_before(self, one: Book, other: Book) -> bool:
        if self.fair is None:
            return one.key < other.key
        a, b = one.request, other.request
        return a.priority < b.priority or ((a.priority, a.tenant) == (b.priority, b.tenant) and a.sequence < b.sequence)

    def _check_fair_order(self, fair: Fair, book: Book) -> None:
        """Check the order of admission: by tier, unless one is owed; least served tenant first; then by arrival."""
        request = book.request
        clock = fair.ledger.clocks[request.priority]
        for rival in self._ready():
            other = rival.request
            if other.priority < request.priority and request.priority not in self._owed:
                raise WorldFailure(f"{request!r} was admitted before {other!r}, which has a higher tier")
            if other.priority is request.priority and clock.time(other.tenant) < clock.time(request.tenant):
                raise WorldFailure(f"{request!r} was admitted before {other!r}, whose tenant was served less")
            if self._goes_before(rival, book) and other.tenant == request.tenant and request.priority is other.priority:
                raise WorldFailure(f"{request!r} was admitted before {other!r}, which arrived first")

    def _check_order_of_keys(self, book: Book) -> None:
        lanes: dict[Priority, tuple[int, int]] = {book.request.priority: book.key}
        rivals = [(rival.request, rival) for rival in self._ready()]
        for other, rival in rivals:
            if other.priority not in lanes or rival.key < lanes[other.priority]:
                lanes[other.priority] = rival.key
        effective = lanes[book.request.priority]
        patience_ns = self.aging.patience_s * NS_PER_S if self.aging is not None else 0.0
        for other, rival in rivals:
            is_sibling = other.priority is book.request.priority
            is_ahead = other.sequence < book.request.sequence if is_sibling else lanes[other.priority] < effective
            if is_ahead:
                raise WorldFailure(f"{book.request!r} was admitted before {other!r}, which is ahead")
            if not rival.was_admitted and not book.was_admitted:
                late_ns = book.arrived_ns - rival.arrived_ns
                if late_ns > overtake_window(patience_ns, other.priority, book.request.priority):
                    raise WorldFailure(f"{other!r} was overtaken beyond the starvation bound")

    def _awaits_prefix(self, book: Book) -> bool:
        """Whether a running request ahead of this one has yet to compute a block of their common prefix."""
        size = self.setup.block_size
        for owner in self.scheduler.running:
            is_ahead = self._is_ahead(self.books[owner.request_id], book)
            if self.fair is not None:  # the times of tenants have changed since it started to wait
                is_ahead = owner.priority <= book.request.priority
            if owner.salt != book.request.salt or not is_ahead:
                continue
            if owner is book.request.parent:
                return True
            if common_length(book.request.tokens, owner.tokens) // size > owner.num_computed // size:
                return True
        return False

    def _should_have_waited(self, book: Book) -> bool:
        """Whether a running prompt ahead of an admitted request was about to compute its next block."""
        setup, request = self.setup, book.request
        if setup.is_colliding or not setup.is_caching or request.sampling.prompt_logprobs is not None:
            return False
        for owner in self.scheduler.running:
            is_ahead = self._is_ahead(self.books[owner.request_id], book) and owner.salt == request.salt
            is_ahead = is_ahead and owner is not request
            if is_ahead and len(owner.tokens) - owner.num_computed > 1:
                end = (owner.num_computed // setup.block_size + 1) * setup.block_size
                if not self.scheduler.cache.can_publish(owner, owner.num_computed // setup.block_size):
                    continue  # the cache was cleared in the meantime
                if end >= len(request.tokens):
                    continue  # at best a tail to copy, for which there may have been no free block
                # With states, a request may start within the block: waiting would save less than a block.
                least = end - setup.block_size + 1 if setup.num_states or setup.num_window_blocks else end
                was_found = self._started.get(request.request_id, 0) >= least
                if common_length(request.tokens, owner.tokens) >= end and not was_found:
                    return True
        return False

    def _on_preempted(self, event: Preempted) -> None:
        victim, winner = self.books[event.request_id], self.books[event.by_request_id]
        self.counts["preemptions"] += 1
        self._has_preempted = True
        self._require(victim.request.request_id not in self._admitted, "preempted in the step that admitted it")
        request = victim.request
        self.counts["preemptions while catching up"] += request.is_catching_up
        if winner.request.state is RequestState.WAITING:
            self.counts["preemptions by waiting"] += 1
            self._winners.add(event.by_request_id)
            self._require(winner.request.priority < victim.request.priority, "preempted within a tier")
            self._require(
                self._urgency(winner) < victim.urgency, f"{winner.request!r} is not more urgent than its victim"
            )
            self._require(not request.is_spared, "a request was preempted although credit was set aside for it")
            # Credit that was set aside in this plan protects only the request for which it was.
            is_owed = self.fair is not None and self.fair.ledger.is_owed(request.priority)
            is_protected = is_owed and request.priority in self._owed and not request.is_catching_up
            self._require(not is_protected, "a tier that is owed service was preempted")
        elif victim is not winner:
            order = [(book.urgency, book.request.sequence) for book in (winner, victim)]
            self._require(order[0] < order[1], f"{winner.request!r} preempted {victim.request!r}, which is ahead")
            self._require(not request.is_spared, f"{winner.request!r} took memory of {request!r}, which is spared")
            rest = [one for one in self.scheduler.running if one.request_id not in self._admitted]
            lowest = max(self.books[one.request_id].urgency for one in rest)
            self._require(victim.urgency == lowest, f"{winner.request!r} took memory of {request!r}, not of the lowest")
        if winner.request.state is not RequestState.WAITING:
            self._check_guesses_before(victim)
        self._enqueue(victim)

    def _check_guesses_before(self, victim: Book) -> None:
        """Check that no request was preempted for blocks that guesses of this plan took."""
        for request in self.scheduler.running:
            num_before = self._guessing.get(request.request_id)
            if request.num_drafts and num_before is not None:
                num_needed = -(-(request.num_planned - request.num_drafts) // self.setup.block_size)
                took = len(request.block_table) - max(num_needed, num_before)
                self._require(took <= 0, f"{victim.request!r} was preempted for guesses of {request!r}")

    # Checks

    def _busy(self) -> list[Request]:
        """Running requests with tokens to compute. Each gets at least one token in every step."""
        return [
            r
            for r in self.scheduler.running
            if min(r.num_tokens, r.token_limit - 1) > r.num_planned and not r.awaits_sample
        ]

    @property
    def _is_loading(self) -> bool:
        return len(self.scheduler.cache.levels.loads) > 0

    def _check_loads(self, plan: StepPlan) -> None:
        """Check that nothing waits for a load that is late, and count what is loaded."""
        levels, waiters = self.scheduler.cache.levels, self.scheduler.waiting.load_waiters
        if not levels.levels:
            return
        awaited = Counter(waiters.group_of(request) for request in waiters)
        for load in (*levels.loads.values(), *(one for one in levels.reads.values() if one.state is ReadState.READING)):
            is_late = load.deadline_ns <= self.now_ns
            self._require(not (is_late and awaited[load.load_id]), f"a request waits for a late load: {load!r}")
            self.counts["late loads"] += is_late and load.load_id not in self._late
            if is_late:
                self._late.add(load.load_id)
        if self.store.num_advances != self._num_advances or plan.reads or plan.loads:
            self._num_advances, self._advanced_ns = self.store.num_advances, self.now_ns
        is_quiet = self.now_ns - self._advanced_ns > MIN_TIMEOUT_NS and not self.store.is_copying
        self._require(not (is_quiet and awaited), f"nothing is read or copied for long, and {awaited} are waited for")
        self._check_idle_step(plan, [one.priority for one in waiters if levels.loads.get(waiters.group_of(one))])
        self.counts["reads that hung"] = self.store.num_hung
        self.counts["reads that ended late"] = self.store.num_late_answers
        self.counts["steps with queued reads"] += any(read.state is ReadState.QUEUED for read in levels.reads.values())
        self.counts["loads with several waiters"] += sum(count > 1 for count in awaited.values())
        self.counts["steps with two loads in flight"] += len(levels.loads) > 1
        self.counts["pieces copied early"] = self.store.num_early
        self.counts["saves from host to disk"] = self.store.num_from_host
        for piece in plan.loads:
            self.counts[f"loaded {piece.content.kind.name.lower()}s"] += 1
            is_partial = len(piece.content.tokens) < 4 * self.setup.block_size
            self.counts["loaded tails"] += is_partial and piece.content.kind is MemoryKind.BLOCK

    def _check_idle_step(self, plan: StepPlan, loading: list[Priority]) -> None:
        """Check that requests that could start are kept from memory by a copy at most, and not by one after the other.

        `loading`: tiers of the requests that wait for copies. Those of the same or a higher tier may follow each other.
        """
        ready = [book.request.priority for book in self._ready()]
        is_idle = plan.is_empty and not self.in_flight and not len(self.scheduler.running) and bool(ready)
        is_kept = not plan.loads or min(loading, default=Priority.LOW) > min(ready, default=Priority.LOW)
        self._num_idle_steps = self._num_idle_steps + 1 if is_idle and is_kept else 0
        self._require(self._num_idle_steps <= COPY_STEPS + 2, f"{self._ready()[:1]} cannot start beside loads")

    def _num_beside(self, plan: StepPlan) -> int:
        """Number of tokens of the plan beside those that are reserved for requests that ran before."""
        return sum(piece.length - (piece.request_id not in self._admitted) for piece in plan.slices)

    def _check_plan(self, plan: StepPlan, busy: list[Request]) -> None:
        setup = self.setup
        planned = {piece.request_id: piece for piece in plan.slices}
        self._require(len(planned) == len(plan.slices), "a request occurs twice in a plan")
        self._require(plan.num_tokens <= setup.max_num_batched_tokens, "the token budget was exceeded")
        if setup.max_mixed_tokens is not None and self._has_answers and not self._has_preempted:
            self._require(self._num_beside(plan) <= setup.max_mixed_tokens, "too many prompt tokens beside answers")
        for batch_index in plan.released:
            self._batch_rows.pop(batch_index, None)
        for piece in plan.slices:
            self._require(piece.length <= setup.max_chunk_tokens, "a chunk is too long")
            book = self.books[piece.request_id]
            owner = (piece.request_id, piece.epoch)
            last_owner = self._batch_rows.setdefault(piece.batch_index, owner)
            self._require(last_owner == owner, "a batch row has a new owner and its release was not in a plan")
            if piece.sampling.prompt_logprobs is not None and piece.request_id in self._admitted:
                self._require(piece.start == 0, "prompt logprobs were requested and positions were skipped")
            if piece.request_id in self._started:
                self._require(piece.start == self._started[piece.request_id], "a hit was not used as reported")
            known = [*book.prompt, *book.delivered]
            self._require(list(piece.history) == known, "a slice has the wrong history")
            drafted = [*known, *book.request.draft[: piece.num_drafts]]
            self._require(not piece.num_drafts or piece.start + piece.length == len(drafted), "drafts follow no sample")
            self._require(
                not piece.tokens or list(piece.tokens) == drafted[piece.start : piece.start + piece.length],
                "wrong tokens",
            )
        running = list(self.scheduler.running)
        for request in busy:
            if request.state is RequestState.RUNNING and request.request_id not in planned:
                upto = request.num_planned + 1
                is_alone = len(running) == 1
                if self.setup.num_window_blocks:  # for a whole chunk, unlike KV blocks, they are taken step by step
                    num_wanted = max(request.num_tokens - request.num_planned, 1)
                    upto = request.num_planned + min(num_wanted, self.setup.max_chunk_tokens)
                # Sources of copies may hold the last blocks.
                is_short = self.scheduler.cache.growth_shortage(request, upto) > 0
                # Requests that started in this step are not preempted in it.
                is_new = any(other.request_id in self._admitted for other in running[running.index(request) :])
                is_held = bool(self.in_flight) or self._is_loading
                is_stalled = is_short and (is_new or (is_held and is_alone))
                self._require(
                    is_stalled or self._may_be_left_out(request, planned),
                    f"{request!r} had tokens to compute and was left out",
                )
        is_waiting = self._is_loading or len(self.scheduler.waiting.load_waiters) > 0
        is_stuck = plan.is_empty and not self.in_flight and bool(self.books) and not is_waiting
        self._require(not is_stuck, "there is work but nothing was planned")

    def _may_be_left_out(self, request: Request, planned: dict[int, SeqSlice]) -> bool:
        """Whether a request may be left out: only with a step cost, for a higher tier or to keep a LOW step short."""
        if self.fair is None or self.setup.cost is None or request.priority is Priority.HIGH:
            return False
        self.counts["left out"] += 1
        if any(other.priority < request.priority for other in self.scheduler.running):
            return True
        base_ns, token_ns, *_ = self.setup.cost
        num_tokens = sum(piece.length for piece in planned.values())
        is_full = num_tokens + 1 > (max(50_000_000, 4 * base_ns) - base_ns) // token_ns
        return request.priority is Priority.LOW and is_full

    def _check_accounts(self, fair: Fair, plan: StepPlan, times: dict[tuple[Priority, str], int]) -> None:
        """Check that tenants are charged for the tokens of the plan, no more and no less."""
        computed = dict.fromkeys(times, 0)
        for piece in plan.slices:
            request = self.books[piece.request_id].request
            computed[request.priority, request.tenant] += piece.length
        for (priority, tenant), before in times.items():
            charged = fair.ledger.clocks[priority].time(tenant) - before
            is_exact = charged == computed[priority, tenant]
            # If a tier is not short, the times of its tenants are set equal.
            is_equal = len({fair.ledger.clocks[priority].time(name) for name in TENANTS}) == 1
            is_exact = is_exact or (is_equal and charged >= computed[priority, tenant])
            # The time of an idle tenant follows the floor.
            is_idle = not any((b.request.priority, b.request.tenant) == (priority, tenant) for b in self.books.values())
            self._require(
                is_exact or is_idle,
                f"{tenant!r} of {priority.name} was charged {charged} tokens for {computed[priority, tenant]}",
            )

    def _check_guesses(self, plan: StepPlan) -> None:
        """Check that guesses took a block only if one stays free for every other running request."""
        pool, running = self.scheduler.cache.pool, self.scheduler.running
        for piece in plan.slices:
            if piece.num_drafts and piece.request_id in self._guessing:
                end = piece.start + piece.length
                num_needed = -(-(end - piece.num_drafts) // self.setup.block_size)
                took = len(piece.block_table) - max(num_needed, self._guessing[piece.request_id])
                self.counts["blocks for guesses"] += took > 0
                later = sum(one.request_id in self._admitted for one in running)  # they took theirs before the guesses
                is_left = pool.num_free + self._num_taken_after(plan, piece) >= len(running) - 1 - later
                self._require(took <= 0 or is_left, f"guesses of {piece.request_id} took the block of another request")

    def _num_taken_after(self, plan: StepPlan, piece: SeqSlice) -> int:
        """At most this many blocks were taken by slices after this one."""
        later = plan.slices[plan.slices.index(piece) + 1 :]
        return sum(1 + one.num_drafts // self.setup.block_size + (one.num_drafts > 0) for one in later)

    def _check_wait(self, fair: Fair, plan: StepPlan) -> None:
        """Check how long the first HIGH request waits for memory that could be taken from lower levels."""
        head = self.scheduler.waiting.head((Priority.HIGH,))
        if head is None or head[1] is not self._first_high:
            self._high_wait = None  # another request was first; this one may not overtake it
            return
        request = head[1]
        self.counts["HIGH waits"] += 1
        if not self._could_take(request):
            self._high_wait = None
            return
        num_reserved = len(self.scheduler.running) - len(plan.slices)  # a token is reserved for every running request
        is_used_up = plan.num_tokens + num_reserved >= self.setup.max_num_batched_tokens
        if self._has_answers and self.setup.max_mixed_tokens is not None:
            is_used_up = is_used_up or self._num_beside(plan) >= self.setup.max_mixed_tokens
        if self._has_preempted or is_used_up:
            return  # another request was faster: this step does not count
        if self._high_wait is None or self._high_wait[0] != request.request_id:
            num_spared = sum(self._num_spared(one) for one in self.scheduler.running)
            planner = self.scheduler.planner
            bound = wait_bound(planner, num_spared)
            self._require(bound <= wait_bound(planner), "more tokens are spared than the settings allow")
            self._high_wait = request.request_id, 0, bound
        request_id, num_steps, bound = self._high_wait
        self._high_wait = request_id, num_steps + 1, bound
        self.counts["HIGH waits for memory of others"] += 1
        self.counts["HIGH waits for a spared request"] += any(one.is_spared for one in self.scheduler.running)
        if num_steps + 1 > bound:
            raise WorldFailure(f"{request!r} waits longer than {bound} steps: {fair.ledger.credits}")

    @staticmethod
    def _num_spared(request: Request) -> int:
        return request.num_caught_up_at - request.num_computed if request.is_spared else 0

    def _could_take(self, request: Request) -> bool:
        """Whether a HIGH request would fit if requests of lower tiers were preempted that are not owed service.

        A request that catches up counts as one of them, whether it is spared or not: the bound is the time it takes.
        """
        scheduler, setup = self.scheduler, self.setup
        victims = [
            other
            for other in scheduler.running
            if other.priority > Priority.HIGH and (other.is_catching_up or other.priority not in self._owed)
        ]
        rest = [other for other in scheduler.running if other not in victims]
        shares = {Priority.NORMAL: 1 / 4, Priority.LOW: 1 / 8}
        held = scheduler.running.counts
        may_lose = any(held[one.priority] > int(shares[one.priority] * setup.max_num_seqs) for one in victims)
        num_kept = min(scheduler.waiting.num_prefix_waiters(request), setup.max_num_seqs // 2)
        # Free batch rows and blocks may be reserved for an owed tier; then a victim is needed.
        is_kept = bool(self._owed & {book.request.priority for book in self._ready()})
        if not may_lose and (is_kept or scheduler.running.num_free_seqs <= num_kept):
            return False
        cache = scheduler.cache
        dropped = Counter(block for victim in victims for block in victim.block_table)
        dropped.update(block.block_id for pin in cache.pins for block in pin.held.blocks)
        num_freed = sum(cache.pool.blocks[block].ref_count == count for block, count in dropped.items())
        num_needed = -(-len(request.tokens) // setup.block_size)
        num_steps = len(request.tokens) // setup.max_chunk_tokens if request.num_preemptions else 0
        spare = (len(rest) + 1) * (1 + num_steps // setup.block_size) + num_kept + 1
        if cache.pool.num_free + num_freed < num_needed + spare:
            return False
        windows = cache.memory.windows
        if not windows.is_used:
            return True
        tables = Counter(block for victim in victims for block in victim.window_table if block)
        tables.update(block.block_id for pin in cache.pins for block in pin.held.windows)
        num_freed = sum(windows.pool.blocks[block].ref_count == count for block, count in tables.items())
        num_needed = windows.needed(request, FROM_ZERO) + sum(map(windows.debt, rest))
        return windows.pool.num_free + num_freed >= num_needed + 1

    def _check_held_by_loads(self) -> None:
        """Check that reads hold no memory of the device: only requests, pins, copies and steps in flight do."""
        scheduler, memory = self.scheduler, self.scheduler.cache.memory
        if len(scheduler.running) or self.in_flight or self.store.is_copying:
            return
        pins, pool = scheduler.cache.pins, scheduler.cache.pool
        self._require(pool.num_free == pool.num_usable - pins.num_blocks, "reads hold blocks")
        windows, states = memory.windows.pool, memory.states.pool
        pinned = {block.block_id for pin in pins for block in pin.held.windows}
        self._require(windows.num_free == windows.num_usable - len(pinned), "reads hold window blocks")
        held = {slot.block_id for pin in pins for slot in pin.held.states}
        self._require(states.num_free == states.num_usable - len(held), "reads hold states")

    def _check_buffer_leaks(self) -> None:
        """Check that reads that hung hold buffers until they end, and nothing afterwards."""
        levels = self.scheduler.cache.levels
        if not levels.levels:
            return
        self.counts["worlds that end with a hung read"] += self.store.has_hung
        self.store.answer(self.scheduler, is_all=True)
        self._require(not self.store.has_buffers, "buffers of reads leaked")
        self._require(levels.num_buffers == [0, 0, 0] and not len(levels.reads), "reads leaked")

    def _check_hybrid_leaks(self) -> None:
        windows, states = self.scheduler.cache.memory.windows.pool, self.scheduler.cache.memory.states.pool
        self._require(windows.num_free == windows.num_usable, "window blocks leaked")
        self._require(states.num_free == states.num_usable, "states leaked")
        self.counts["window evictions"] += windows.num_evictions
        self.counts["state evictions"] += states.num_evictions

    def _check_hybrid_memory(self) -> None:
        """Check that window blocks and snapshots have the content of the tokens for which they can be found."""
        memory = self.scheduler.cache.memory
        for block in memory.windows.pool.blocks:
            if block.node is not None:
                entries, _ = self._hybrid_content(block.node.parent_key, block.node.tokens)
                found = self.runner.window_memory[block.block_id][: block.node.num_tokens]
                self._require(found == entries, f"{block!r} does not have the content recorded in the tree")
        for slot in memory.states.pool.blocks:
            if slot.parent_key is not None:
                _, state = self._hybrid_content(slot.parent_key, slot.run)
                self._require(self.runner.states[slot.block_id] == state, f"{slot!r} does not have its content")

    def _hybrid_content(self, parent_key: bytes | None, run: bytes) -> tuple[list[int], int]:
        """Window entries of the tokens `run` after a block, and the state after them."""
        packed = [run]
        while parent_key not in self._roots:
            assert parent_key is not None
            block = self.scheduler.cache.tree.find(parent_key)
            if block is None:
                raise WorldFailure("a snapshot or a window block follows a block that is not in the tree")
            packed.append(block.tokens)
            parent_key = block.parent_key
        whole = b"".join(reversed(packed))
        if whole not in self._hybrid_contents:
            model = Hybrid(self.setup.window)
            entries = []
            for i in range(0, len(whole), 4):
                model.step()
                entries.append(model.read(int.from_bytes(whole[i : i + 4], "big"), i // 4))
            self._hybrid_contents[whole] = (entries, model.state)
        entries, state = self._hybrid_contents[whole]
        return entries[len(entries) - len(run) // 4 :], state

    def _check_memory(self) -> None:
        """Check that the runner's memory has the content that the tree records for each block."""
        if self.setup.is_colliding:  # a key may have other content now
            self._entries = {}
            self._done = dict.fromkeys(self._roots, 0)
            self._depth = {}
        memory = self.runner.memory
        for block in self.scheduler.cache.pool.blocks:
            parent_key = block.parent_key
            if parent_key is not None:
                entries = self._entries.get((parent_key, block.tokens))
                if entries is None:
                    entries = self._content(parent_key, block.tokens)
                if memory[block.block_id][: len(entries)] != entries:
                    raise WorldFailure(f"{block!r} does not have the content recorded in the tree")

    def _content(self, parent_key: bytes, tokens: bytes) -> list[int]:
        size = self.setup.block_size
        parent, path = parent_key, []
        while parent not in self._done:
            block = self.scheduler.cache.tree.find(parent)
            assert block is not None
            assert block.parent_key is not None
            path.append(block)
            parent = block.parent_key
        for block in reversed(path):
            assert block.key is not None
            assert block.parent_key is not None
            fold = self._fold(block.parent_key, block.tokens)[1]
            self._done[block.key] = fold.done
            self._depth[block.key] = self._depth.get(block.parent_key, 0) + size
        entries = self._fold(parent_key, tokens)[0]
        self._entries[parent_key, tokens] = entries
        return entries

    def _fold(self, parent_key: bytes, tokens: bytes) -> tuple[list[int], Fold]:
        fold = Fold(self.setup.block_size, self._done[parent_key])
        start = self._depth.get(parent_key, 0)
        entries = []
        for i in range(0, len(tokens), 4):
            entry = fold.entry(int.from_bytes(tokens[i : i + 4], "big"), start + i // 4)
            fold.read((entry,))
            entries.append(entry)
        return entries, fold
