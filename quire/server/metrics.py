"""Prometheus metrics: vLLM's names under `quire:`, and quire's own. See docs/metrics.md.

Belongs to the event loop. Nothing here blocks for long: `stepped` and `tokens` are called at every step.

The record of a finished request is for metrics and logs; it has no text of a prompt or an answer. The counters of a
model's activity are for `/v1/watch`, and cheap enough to be always on.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.core.values import Priority
from quire.engine.model_manager import ManagedModel, ModelState
from quire.engine.worker.protocol import Ready, ReplicaStatus, Stats, Stepped
from quire.server.errors import Kind


@dataclass(frozen=True, slots=True)
class RequestRecord:
    request_id: str  # as in x-request-id
    endpoint: str  # the route's path
    model: str
    key_name: str
    priority: Priority
    is_streaming: bool
    num_prompts: int
    n: int
    max_tokens: int | None
    prompt_tokens: int  # of all prompts together
    cached_tokens: int
    completion_tokens: int
    cache_reason: str | None  # why the cache match of the first prompt ended
    queued_s: float | None  # None: never started
    ttft_s: float | None  # from arrival to the first token; None: no token
    prefill_s: float | None  # from the start to the first token
    decode_s: float | None  # from the first token to the last
    e2e_s: float  # from arrival to the end
    finish: str  # stop, length, cancelled (also by disconnecting), error, or the reason of a refusal
    error: str | None = None  # the kind of error, never its text
    cache_source: str | None = None  # slowest level that cached tokens of the first prompt came from

    @property
    def tokens_per_s(self) -> float | None:
        """Decode speed of all samples together."""
        if not self.decode_s or self.completion_tokens < 2:
            return None
        return (self.completion_tokens - 1) / self.decode_s


RECENT_S = 300.0
MAX_RECENT = 256  # requests


class Ttft(NamedTuple):
    """Time to first token of the requests that ended recently."""

    num_requests: int
    p50_s: float
    p95_s: float


class Finished(NamedTuple):
    """A request that has ended, and when: seconds since 1970."""

    at: float
    record: RequestRecord


class ActivityCounters:
    """Totals since the model was loaded. A rate is the difference of two readings."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_computed_tokens = 0  # of prompts and answers
        self.num_generated_tokens = 0
        self._clock = clock
        # Newest last. More are kept than shown, because a key sees only its own.
        self.recent: deque[Finished] = deque(maxlen=MAX_RECENT)
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=MAX_RECENT)  # end time, TTFT

    @property
    def num_prefilled_tokens(self) -> int:
        """Computed prompt tokens.

        The last token of a prompt produces the first token of the answer and counts as generated. A step that is still
        running when an answer ends counts here.
        """
        return max(0, self.num_computed_tokens - self.num_generated_tokens)

    def stepped(self, stepped: Stepped) -> None:
        self.num_computed_tokens += stepped.num_tokens
        self.num_generated_tokens += stepped.num_generated

    def finished(self, record: RequestRecord) -> None:
        self.recent.append(Finished(time.time(), record))
        if record.ttft_s is not None:
            self._ttfts.append((self._clock(), record.ttft_s))

    def ttft(self) -> Ttft | None:
        """Return the recent TTFT. None: no request had a first token recently."""
        since_s = self._clock() - RECENT_S
        recent = sorted(ttft_s for at_s, ttft_s in self._ttfts if at_s >= since_s)
        if not recent:
            return None
        return Ttft(len(recent), _percentile(recent, 0.50), _percentile(recent, 0.95))


def _percentile(ordered: list[float], share: float) -> float:
    """Return the smallest value that at least this share of all values do not exceed."""
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 100) * len(ordered) // 100) - 1))]


disable_created_metrics()  # type: ignore[no-untyped-call]  # they double every counter's series

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "quire:"
_ENGINE = "0"  # vLLM numbers its data-parallel engines; here there is one
_LABELS = ("model_name", "engine")

# Seconds. The first buckets are finer than vLLM's: small models answer in milliseconds.
_TTFT_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = (
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0),
    *(20_000.0, 50_000.0, 100_000.0, 200_000.0),
)
_STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16_384.0)
_SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 128.0)


class _Spec(NamedTuple):
    text: str
    labels: tuple[str, ...] = ()


class _HistogramSpec(NamedTuple):
    text: str
    bounds: tuple[float, ...]
    labels: tuple[str, ...] = ()


GAUGES = {
    "num_requests_running": _Spec("Sequences that are running."),
    "num_requests_waiting": _Spec("Sequences that are waiting."),
    "kv_cache_usage_perc": _Spec("Share of the KV blocks that requests or pins hold, 0 to 1."),
    "cache_config_info": _Spec(
        "Always 1; the labels hold the engine's cache settings.",
        ("block_size", "num_gpu_blocks", "cache_dtype", "kv_bytes", "max_num_seqs", "max_model_len"),
    ),
    "kv_blocks": _Spec(
        "KV blocks by state: free + cached + in_use = all; in_use includes shared and pinned.", ("state",)
    ),
    "window_blocks": _Spec(
        "Blocks of layers with a window, by state: free + cached + in_use = all. Absent if the model has none.",
        ("state",),
    ),
    "recurrent_states": _Spec(
        "Slots of recurrent states, by state: free + cached + in_use = all. Absent if the model has none.", ("state",)
    ),
    "lower_cache_bytes": _Spec("Bytes of cached content in host memory or on disk. Absent if off.", ("storage",)),
    "lower_cache_max_bytes": _Spec(
        "Size limit of that content; on disk for all models that share the folder. Absent if off.", ("storage",)
    ),
    "lower_cache_pieces": _Spec("Stored blocks, window blocks and states. Absent if off.", ("storage",)),
    "queue_age_seconds": _Spec("Waiting time of the oldest request of a tier.", ("tier",)),
    "queue_requests": _Spec("Waiting sequences of a tier.", ("tier",)),
    "queue_tokens": _Spec("Tokens to compute for the waiting sequences of a tier.", ("tier",)),
    "engine_moving": _Spec("1 while the worker runs and its loop makes progress, else 0."),
    "model_state": _Spec("1 for the model's current state, 0 for the others.", ("state",)),
    "model_bytes": _Spec("Bytes of the model's weights and KV cache in memory."),
    "model_requests_waiting": _Spec("Requests that wait for the model to load."),
    "replicas": _Spec("Replicas of the model that the server is connected to. 0: it runs on this machine."),
    "replica_requests": _Spec("Sequences that run or wait on a replica.", ("replica",)),
    "replica_kv_cache_usage_perc": _Spec("Share of a replica's KV blocks that requests or pins hold.", ("replica",)),
}
COUNTERS = {
    "prompt_tokens": _Spec("Prompt tokens of finished requests, cached or computed."),
    "prompt_tokens_cached": _Spec("Prompt tokens of finished requests, found in the prefix cache."),
    "generation_tokens": _Spec("Generated tokens, counted at each step."),
    "request_success": _Spec("Accepted requests that have finished.", ("finished_reason",)),
    "num_preemptions": _Spec("Preemptions: running requests whose blocks were freed for others."),
    "draft_tokens": _Spec("Guessed tokens that were verified."),
    "draft_tokens_accepted": _Spec("Guessed tokens that were right: each saved a step of its request."),
    "prefix_cache_queries": _Spec("Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": _Spec("Prompt tokens found in the prefix cache."),
    "kv_evictions": _Spec("Cached blocks that were reused for other content."),
    "window_evictions": _Spec("Cached window blocks that were reused for other content."),
    "state_evictions": _Spec("Stored recurrent states that were evicted."),
    "prefix_cache_recomputed": _Spec("Prompt tokens computed again for lack of a state or of window blocks."),
    "lower_cache_loads": _Spec("Prefixes loaded from host memory or disk.", ("storage",)),
    "lower_cache_loaded_tokens": _Spec("Prompt tokens loaded from host memory or disk.", ("storage",)),
    "lower_cache_load_failures": _Spec("Stored pieces that were damaged or missing, and late loads.", ("storage",)),
    "lower_cache_saves": _Spec("Pieces stored in host memory or on disk.", ("storage",)),
    "lower_cache_save_failures": _Spec("Pieces that could not be stored.", ("storage",)),
    "lower_cache_evictions": _Spec("Stored pieces that were evicted.", ("storage",)),
    "requests_rejected": _Spec("Requests answered with an error.", ("reason",)),
    "invariant_violations": _Spec("Violated invariants of the core. Each is a bug."),
    "worker_restarts": _Spec("Restarts of the worker process."),
    "model_loads": _Spec("Number of times the model was loaded."),
    "model_load_failures": _Spec("Number of times the model could not be loaded."),
    "model_unloads": _Spec("Number of times the model was unloaded."),
    "replica_requests_routed": _Spec("Requests sent to a replica.", ("replica",)),
    "replica_prefix_cache_queries": _Spec("Prompt tokens looked up in a replica's prefix cache.", ("replica",)),
    "replica_prefix_cache_hits": _Spec("Prompt tokens found in a replica's prefix cache.", ("replica",)),
}
HISTOGRAMS = {
    "time_to_first_token_seconds": _HistogramSpec("From arrival to the first token.", _TTFT_S),
    "inter_token_latency_seconds": _HistogramSpec("From one token to the next.", _TOKEN_S),
    "request_time_per_output_token_seconds": _HistogramSpec("A request's mean time from token to token.", _TOKEN_S),
    "e2e_request_latency_seconds": _HistogramSpec("From arrival to the end of the request.", _REQUEST_S),
    "request_queue_time_seconds": _HistogramSpec("Waiting time of requests before they started.", _REQUEST_S),
    "request_prefill_time_seconds": _HistogramSpec("From the start to the first token.", _REQUEST_S),
    "request_decode_time_seconds": _HistogramSpec("From the first token to the last.", _REQUEST_S),
    "request_inference_time_seconds": _HistogramSpec("From the start to the last token.", _REQUEST_S),
    "request_prompt_tokens": _HistogramSpec("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": _HistogramSpec("Generated tokens of a request.", _TOKENS),
    "request_params_n": _HistogramSpec("The parameter n of a request.", _SAMPLES),
    "request_params_max_tokens": _HistogramSpec("The parameter max_tokens of requests that set it.", _TOKENS),
    "iteration_tokens_total": _HistogramSpec("Tokens computed in one step.", _STEP_TOKENS),
    "queue_wait_seconds": _HistogramSpec(
        "Waiting time of a tier's requests before they started.", _REQUEST_S, ("tier",)
    ),
    "step_seconds": _HistogramSpec("Duration of one step.", _TOKEN_S),
}
REQUEST_HISTOGRAMS = {  # name -> field of RequestRecord
    "e2e_request_latency_seconds": "e2e_s",
    "time_to_first_token_seconds": "ttft_s",
    "request_prefill_time_seconds": "prefill_s",
    "request_decode_time_seconds": "decode_s",
    "request_prompt_tokens": "prompt_tokens",
    "request_generation_tokens": "completion_tokens",
    "request_params_n": "n",
    "request_params_max_tokens": "max_tokens",
}
REPLICA_COUNTERS = {
    "replica_requests_routed": "num_routed",
    "replica_prefix_cache_queries": "num_queried_tokens",
    "replica_prefix_cache_hits": "num_hit_tokens",
}
REPLICA_METRICS = ("replica_requests", "replica_kv_cache_usage_perc", *REPLICA_COUNTERS)
# Metrics that vLLM has too. `compat="vllm"` exports them a second time under `vllm:`.
VLLM = frozenset(
    {
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
        *("prompt_tokens", "prompt_tokens_cached", "generation_tokens", "request_success", "num_preemptions"),
        *("prefix_cache_queries", "prefix_cache_hits", "iteration_tokens_total"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
        *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
        *("request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens"),
        *("request_generation_tokens", "request_params_n", "request_params_max_tokens"),
    }
)

TIERS = tuple(priority.name.lower() for priority in Priority)
# All values that a label may have. Any other value becomes "other", so that no request can create a new series.
OTHER = "other"
FINISHES = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}  # quire's name -> vLLM's
REASONS = frozenset(
    {
        *(kind.name.lower() for kind in Kind),
        *("queue_full", "queue_tokens", "queue_timeout", "body_bytes", "draining", "loading", "restarting", "internal"),
        *("load_failed", "model_too_large", "unloading", "watchers", "pulling", "download_failed"),
        *("origin", "host", "unsupported_parameter", "unsupported_value", "request_not_found"),
        *("uploads", "key_batches", "state_dir", "storage", "no_file", "no_batch"),
        *("key_max_requests", "key_requests_per_minute", "key_tokens_per_minute"),
    }
)


class Histogram:
    """Like prometheus_client's, but has no lock, takes `count` equal values at once, and needs a fifth of the time."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        buckets: list[tuple[str, float]] = []
        num_below = 0
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            num_below += count
            buckets.append((bound, num_below))
        family.add_metric(labels, buckets, self._sum)


class _Histograms:
    """The histograms of one model."""

    def __init__(self, labels: tuple[str, ...]) -> None:
        self.labels = labels
        self.all: dict[str, dict[tuple[str, ...], Histogram]] = {
            name: {values: Histogram(spec.bounds) for values in ([(tier,) for tier in TIERS] if spec.labels else [()])}
            for name, spec in HISTOGRAMS.items()
        }

    def one(self, name: str, *values: str) -> Histogram:
        return self.all[name][values]


class _AllHistograms(Collector):
    def __init__(self) -> None:
        self.models: list[_Histograms] = []

    def collect(self) -> Iterator[Metric]:
        for name, spec in HISTOGRAMS.items():
            family = HistogramMetricFamily(_PREFIX + name, spec.text, labels=(*_LABELS, *spec.labels))
            for model in self.models:
                for values, histogram in model.all[name].items():
                    histogram.add_to(family, (*model.labels, *values))
            yield family


class _Mirror(Collector):
    """Exports the same series under another server's prefix, for existing dashboards."""

    def __init__(self, source: CollectorRegistry, prefix: str, names: frozenset[str]) -> None:
        self._source = source
        self._prefix = prefix
        self._names = names

    def describe(self) -> list[Metric]:
        return []  # registering must not collect

    def collect(self) -> Iterator[Metric]:
        for family in self._source.collect():
            if (name := family.name.removeprefix(_PREFIX)) in self._names:
                mirrored = Metric(self._prefix + name, family.documentation, family.type)
                mirrored.samples = [
                    sample._replace(name=self._prefix + sample.name.removeprefix(_PREFIX)) for sample in family.samples
                ]
                yield mirrored


class Exposition:
    """The metric families of the server, each with one series per model."""

    def __init__(self, compat: str | None = None) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self._mirror = CollectorRegistry() if compat else None
        if self._mirror is not None:
            self._mirror.register(_Mirror(registry, f"{compat}:", VLLM))
        self.gauges = {
            name: Gauge(_PREFIX + name, spec.text, (*_LABELS, *spec.labels), registry=registry)
            for name, spec in GAUGES.items()
        }
        self.counters = {
            name: Counter(_PREFIX + name, spec.text, (*_LABELS, *spec.labels), registry=registry)
            for name, spec in COUNTERS.items()
        }
        self.histograms = _AllHistograms()
        registry.register(self.histograms)

    def render(self) -> tuple[bytes, str]:
        """Return the text and its content type."""
        text = generate_latest(self._registry)
        if self._mirror is not None:
            text += generate_latest(self._mirror)
        return text, CONTENT_TYPE


class Worker(Protocol):
    """The parts of an `EngineClient` that metrics read."""

    @property
    def num_restarts(self) -> int: ...
    @property
    def is_moving(self) -> bool: ...
    @property
    def facts(self) -> Ready | None: ...
    @property
    def replica_statuses(self) -> tuple[ReplicaStatus, ...]: ...


Totals = dict[tuple[str, str], int]


class Metrics:
    """The metrics of one model. They are kept across worker restarts and reloads."""

    def __init__(self, model_name: str, *, exposition: Exposition | None = None) -> None:
        self._labels = (model_name.encode("utf-8", "backslashreplace").decode(), _ENGINE)
        exposition = exposition or Exposition()
        self.exposition = exposition
        self._gauges, self._counters = exposition.gauges, exposition.counters
        self._histograms = _Histograms(self._labels)
        exposition.histograms.models.append(self._histograms)
        self._config_labels: tuple[str, ...] | None = None
        self._worker = 0, 0  # num_restarts at the last stats, which identifies the worker, and its steps
        # Totals that were taken, by metric and label: of the worker, of its client, of the model, of replicas.
        self._of_worker: Totals = {}
        self._of_client: Totals = {}
        self._of_model: Totals = {}
        self._of_replicas: Totals = {}
        self._bind()

    def _bind(self) -> None:
        """Create every series once: the first scrape then shows them at 0, and updates need no lookup."""
        self._finishes = {finish: self._count("request_success", label) for finish, label in FINISHES.items()}
        self._other_finish = self._count("request_success", OTHER)
        self._rejections = {reason: self._count("requests_rejected", reason) for reason in sorted(REASONS)}
        self._other_rejection = self._count("requests_rejected", OTHER)
        self._plain = {name: self._count(name) for name, spec in COUNTERS.items() if not spec.labels}
        self._generated = self._plain["generation_tokens"]
        self._waits = {
            priority: self._histograms.one("queue_wait_seconds", priority.name.lower()) for priority in Priority
        }
        self._wait = self._histograms.one("request_queue_time_seconds")
        self._token = self._histograms.one("inter_token_latency_seconds")
        self._step = self._histograms.one("step_seconds")
        self._step_tokens = self._histograms.one("iteration_tokens_total")
        self._reset_gauges()
        for name in ("model_bytes", "model_requests_waiting", "replicas"):
            self._set(name, 0)

    def _reset_gauges(self) -> None:
        for name in ("num_requests_running", "num_requests_waiting", "engine_moving"):
            self._set(name, 0)  # correct while the model loads, and autoscalers need a value

    def _count(self, name: str, *values: str) -> Counter:
        return self._counters[name].labels(*self._labels, *values)

    def _set(self, name: str, value: float, *values: str) -> None:
        self._gauges[name].labels(*self._labels, *values).set(value)

    def _follow(self, seen: Totals, name: str, total: int, label: str = "") -> None:
        """Count up to a total that is counted elsewhere."""
        self._count(name, *filter(None, (label,))).inc(max(0, total - seen.get((name, label), 0)))
        seen[name, label] = total

    # Updated by events

    def stepped(self, stepped: Stepped) -> None:
        if stepped.num_tokens:
            self._step_tokens.observe(stepped.num_tokens)
            self._step.observe(stepped.took_s)
        if num_generated := stepped.num_generated:
            self._generated.inc(num_generated)

    def started(self, priority: Priority, queued_s: float) -> None:
        self._wait.observe(queued_s)
        self._waits[priority].observe(queued_s)

    def tokens(self, gap_s: float, count: int) -> None:
        """Count tokens that arrived `gap_s` after the previous token of their answer."""
        self._token.observe(gap_s, count)

    def finished(self, record: RequestRecord) -> None:
        self._finishes.get(record.finish, self._other_finish).inc()
        self._plain["prompt_tokens"].inc(record.prompt_tokens)
        self._plain["prompt_tokens_cached"].inc(record.cached_tokens)
        one = self._histograms.one
        for name, field in REQUEST_HISTOGRAMS.items():
            if (value := getattr(record, field)) is not None:
                one(name).observe(value)
        if record.decode_s is not None:
            one("request_inference_time_seconds").observe((record.prefill_s or 0.0) + record.decode_s)
            num_steps = (
                record.completion_tokens / (record.num_prompts * record.n) - 1
            )  # answers are generated in parallel
            if num_steps > 0:
                one("request_time_per_output_token_seconds").observe(record.decode_s / num_steps)

    def rejected(self, reason: str) -> None:
        self._rejections.get(reason, self._other_rejection).inc()

    # Updated at each scrape

    def take(self, stats: Stats | None, worker: Worker) -> None:
        """Take the worker's stats. None: the worker did not answer, and the last known ones stay."""
        if stats is not None:
            # The stats of a cluster include the counts of replicas that have left.
            self._take_totals(stats, 0 if worker.replica_statuses else worker.num_restarts)
            self._take_gauges(stats)
        self._follow(self._of_client, "worker_restarts", worker.num_restarts)
        self._set("engine_moving", float(worker.is_moving))
        if worker.facts is not None:
            self._take_facts(worker.facts)
        self._take_replicas(worker.replica_statuses)

    def _take_replicas(self, statuses: tuple[ReplicaStatus, ...]) -> None:
        """Take the figures of replicas. Those of replicas that have left are removed."""
        self._set("replicas", len(statuses))
        for name in {name for _, name in self._of_replicas} - {one.name for one in statuses}:
            for metric in REPLICA_METRICS:
                series = self._gauges.get(metric) or self._counters[metric]
                with suppress(KeyError):
                    series.remove(*self._labels, name)
                self._of_replicas.pop((metric, name), None)
        for one in statuses:
            self._set("replica_requests", one.num_requests, one.name)
            num_held = one.num_blocks - one.num_free_blocks
            self._set("replica_kv_cache_usage_perc", num_held / one.num_blocks if one.num_blocks else 0.0, one.name)
            for metric, field in REPLICA_COUNTERS.items():
                self._follow(self._of_replicas, metric, getattr(one, field), one.name)

    def take_model_state(self, managed: ManagedModel) -> None:
        """Take the model's state, memory, waiters and load counts from the manager."""
        for state in ModelState:
            self._set("model_state", float(state is managed.state), state.value)
        self._set("model_bytes", managed.num_bytes)
        self._set("model_requests_waiting", len(managed.waiters))
        if managed.state is not ModelState.READY:
            self._reset_gauges()
        self._follow(self._of_model, "model_loads", managed.num_loads)
        self._follow(self._of_model, "model_load_failures", managed.num_failures)
        self._follow(self._of_model, "model_unloads", managed.num_unloads)

    def forget_worker(self) -> None:
        """Prepare for a new worker, which counts from 0."""
        self._of_worker.clear()
        self._of_client.clear()

    def _take_totals(self, stats: Stats, num_restarts: int) -> None:
        """Add the worker's new counts. A new worker counts from 0, so its counts are added to the earlier ones."""
        if num_restarts != self._worker[0] or stats.num_steps < self._worker[1]:
            self._of_worker.clear()
        self._worker = num_restarts, stats.num_steps
        for name, total in _totals(stats).items():
            self._follow(self._of_worker, name, total)
        for level in stats.cache.levels:
            self._set("lower_cache_bytes", level.num_bytes, level.level)
            if level.max_bytes is not None:
                self._set("lower_cache_max_bytes", level.max_bytes, level.level)
            self._set("lower_cache_pieces", level.num_pieces, level.level)
            for name, field in TIER_COUNTERS.items():
                self._follow(self._of_worker, name, getattr(level, field), level.level)

    def _take_gauges(self, stats: Stats) -> None:
        cache = stats.cache
        self._set("num_requests_running", stats.num_running)
        self._set("num_requests_waiting", stats.num_waiting)
        self._set("kv_cache_usage_perc", cache.num_in_use / cache.num_blocks if cache.num_blocks else 0.0)
        self._set_pool("kv_blocks", cache.num_free - cache.num_cached, cache.num_cached, cache.num_in_use)
        self._set("kv_blocks", cache.num_shared, "shared")
        self._set("kv_blocks", cache.num_pinned, "pinned")
        if cache.windows is not None:
            windows = cache.windows
            self._set_pool(
                "window_blocks", windows.num_free - windows.num_cached, windows.num_cached, windows.num_in_use
            )
        if cache.states is not None:
            states = cache.states
            self._set_pool("recurrent_states", states.num_free, states.num_cached, states.num_in_use)
        for tier, one in zip(TIERS, stats.tiers, strict=True):
            self._set("queue_requests", one.num_waiting, tier)
            self._set("queue_tokens", one.num_tokens, tier)
            self._set("queue_age_seconds", one.oldest_age_s, tier)

    def _set_pool(self, name: str, num_free: int, num_cached: int, num_in_use: int) -> None:
        self._set(name, num_free, "free")
        self._set(name, num_cached, "cached")
        self._set(name, num_in_use, "in_use")

    def _take_facts(self, ready: Ready) -> None:
        capacity = ready.capacity
        sizes = capacity.block_size, capacity.num_blocks - 1, ready.facts.kv_dtype or "auto", ready.kv_bytes
        labels = tuple(map(str, (*sizes, capacity.max_num_seqs, ready.max_model_len)))
        if self._config_labels not in (None, labels):  # a new worker may have a different number of blocks
            self._gauges["cache_config_info"].remove(*self._labels, *(self._config_labels or ()))
        self._config_labels = labels
        self._set("cache_config_info", 1, *labels)


TIER_COUNTERS = {  # name of a counter -> field of LevelStats
    "lower_cache_loads": "num_loads",
    "lower_cache_loaded_tokens": "num_loaded_tokens",
    "lower_cache_load_failures": "num_failed_loads",
    "lower_cache_saves": "num_saves",
    "lower_cache_save_failures": "num_failed_saves",
    "lower_cache_evictions": "num_evictions",
}


def _totals(stats: Stats) -> dict[str, int]:
    return {
        "num_preemptions": stats.num_preemptions,
        "draft_tokens": stats.num_drafted,
        "draft_tokens_accepted": stats.num_accepted,
        "prefix_cache_queries": stats.cache.num_queried_tokens,
        "prefix_cache_hits": stats.cache.num_hit_tokens,
        "prefix_cache_recomputed": stats.cache.num_recomputed_tokens,
        "kv_evictions": stats.cache.num_evictions,
        "window_evictions": 0 if stats.cache.windows is None else stats.cache.windows.num_evictions,
        "state_evictions": 0 if stats.cache.states is None else stats.cache.states.num_evictions,
        "invariant_violations": stats.num_violations,
    }
