"""What a front knows about one replica: its connection, its load, and its last figures."""

from __future__ import annotations

from quire.core.kv_cache import CacheStats
from quire.engine.composition import EngineConfig, Scheduling
from quire.engine.worker.connection import WorkerConnection
from quire.engine.worker.generation import Generation
from quire.engine.worker.protocol import ReplicaStatus, Stats
from quire.scale.combination import counters_of
from quire.scale.routing import ReplicaLoad

RECONNECT_S = 1.0  # pause before the first attempt to connect again; it doubles with each failure
MAX_RECONNECT_S = 30.0


class ReplicaView:
    """One replica. `number`: its place in the router. `fingerprint`: of the model and settings that it must have."""

    def __init__(self, replica: str, number: int, connection: WorkerConnection, fingerprint: str) -> None:
        self.replica = replica
        self._fingerprint = fingerprint
        self.number = number
        self.connection = connection
        self.num_free_blocks = 0
        self.num_routed = 0  # requests
        self.is_accepting = True  # False: it is being stopped, and ends its requests
        self.stats: Stats | None = None  # the last known
        self._num_ends = 0  # of connections in a row that served nothing
        self._scheduling: Scheduling | None = None
        self._sent: dict[Generation, int] = {}  # requests without a token so far -> prompt tokens to compute

    @property
    def is_foreign(self) -> bool:
        """Whether it has another model or other settings than this front."""
        return self.connection.facts is not None and self.connection.facts.fingerprint != self._fingerprint

    @property
    def is_open(self) -> bool:
        return self.connection.facts is not None and not self.is_foreign and not self.connection.process.is_over

    @property
    def figures(self) -> Stats | None:
        """The last known figures. Without a connection only the counts are valid."""
        return self.stats if self.stats is None or self.is_open else counters_of(self.stats)

    def note(self, generation: Generation, num_tokens: int) -> None:
        """Record a request that is sent there, with the tokens of its prompt that are expected not to be cached."""
        self._sent[generation] = num_tokens
        self.num_routed += 1

    def note_end(self, has_served: bool) -> float:
        """Record that the connection has ended. Returns the seconds after which to connect again."""
        self._sent.clear()
        self._num_ends = 1 if has_served else self._num_ends + 1
        return min(RECONNECT_S * 2.0 ** min(self._num_ends - 1, 10), MAX_RECONNECT_S)

    def _limits(self, config: EngineConfig) -> Scheduling:
        """The replica's settings, which never change."""
        if self._scheduling is None:
            assert self.connection.facts is not None
            self._scheduling = config.scheduling(self.connection.facts.capacity)
        return self._scheduling

    def status(self, config: EngineConfig) -> ReplicaStatus:
        cache = CacheStats.none() if self.stats is None else self.stats.cache
        num_blocks = self._limits(config).num_blocks - 1  # without the null block
        return ReplicaStatus(
            self.replica,
            self.is_accepting,
            self.connection.num_requests,
            self.num_routed,
            num_blocks,
            self.num_free_blocks,
            cache.num_queried_tokens,
            cache.num_hit_tokens,
        )

    def load(self, config: EngineConfig) -> ReplicaLoad:
        """Its load: from this front's own requests, which is at once, and from its last report."""
        for generation in [one for one in self._sent if _has_begun(one)]:
            del self._sent[generation]
        queued = [0, 0, 0]
        for generation, num_tokens in self._sent.items():
            queued[generation.answers.request.priority] += num_tokens
        limits = self._limits(config)
        return ReplicaLoad(
            (queued[0], queued[1], queued[2]),
            num_requests=self.connection.num_requests,
            max_num_seqs=limits.max_num_seqs,
            num_free_blocks=self.num_free_blocks,
            num_blocks=limits.num_blocks,
        )


def _has_begun(generation: Generation) -> bool:
    """Whether its prompt is computed, or it has ended."""
    return generation.first_s is not None or generation.error is not None or generation.answers.is_finished
