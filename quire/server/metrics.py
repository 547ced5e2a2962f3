"""Prometheus metrics: vLLM's names under `quire:`, and quire's own. See docs/metrics.md.

Belongs to the event loop. Nothing here blocks for long: `stepped` and `tokens` are called at every step.

The record of a finished request is for metrics, `/v1/watch` and its line of the log. It has no text of a prompt or an
answer, no key and no path of this machine. In the line, values that a client sent are escaped, so that none can forge
another line.
"""

from __future__ import annotations

import json
import logging
import math
import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire.core.cache import StateStats
from quire.core.values import Priority
from quire.engine.model_manager import ManagedModel, ModelState
from quire.engine.process import FIELDS, UNCOUNTED
from quire.engine.worker.client import ModelClient
from quire.engine.worker.protocol import Ready, ReplicaStatus, Stats, Stepped
from quire.server.errors import Kind

MAX_VALUE_CHARS = 200  # in a line of the log
_OUR_FAULT = frozenset({"failed", "died", "internal"})
_PLAIN = re.compile(r"[A-Za-z0-9_./:@+{}-]+")

_request_log = logging.getLogger("quire.request")


class RequestSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request came from."""

    id: Annotated[str, Meta(description="The x-request-id of its response.")]
    key: Annotated[str, Meta(description="The name of its API key.")]
    endpoint: str
    tier: str


class FinishedRequest(RequestSource, frozen=True, kw_only=True):
    """A request that has ended. Contains no text."""

    num_samples: int
    finished_at: Annotated[float, Meta(description="Seconds since 1970.")]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cache_reason: Annotated[str | None, Meta(description="Why the first prompt's match ended; null: it never ran.")]
    ttft_s: Annotated[float | None, Meta(description="Arrival to first token; null: there was none.")]
    duration_s: Annotated[float, Meta(description="Arrival to end.")]
    tokens_per_s: Annotated[float | None, Meta(description="Decode speed of all samples together.")]
    finish: Annotated[str, Meta(description="stop, length, cancelled or error.")]
    error: Annotated[str | None, Meta(description="The kind of error.")]


class RequestRecord(FinishedRequest, frozen=True, kw_only=True):
    """What metrics and the log need besides. The times are exact."""

    model: str
    is_streaming: bool
    num_prompts: int
    n: int
    max_tokens: int | None
    cache_source: str | None = None  # slowest level that cached tokens of the first prompt came from
    queued_s: float | None  # None: never started
    prefill_s: float | None  # from the start to the first token
    decode_s: float | None  # from the first token to the last

    def shown(self) -> FinishedRequest:
        exact = {name: getattr(self, name) for name in FinishedRequest.__struct_fields__}
        digits = {"finished_at": 2, "ttft_s": 4, "duration_s": 3, "tokens_per_s": 1}
        return FinishedRequest(
            **{
                name: round(value, digits[name]) if name in digits and value is not None else value
                for name, value in exact.items()
            }
        )


def log_request(record: RequestRecord) -> None:
    level = logging.WARNING if record.error in _OUR_FAULT else logging.INFO
    if not _request_log.isEnabledFor(level):
        return
    fields = request_fields(record)
    # The model's speed bounds the number of served requests. Only the rate limit bounds the others.
    extra = {FIELDS: fields, UNCOUNTED: record.finish in ("stop", "length")}
    _request_log.log(level, "%s", " ".join(f"{name}={_word(value)}" for name, value in fields.items()), extra=extra)


def log_refusal(
    request_id: str, endpoint: str, key_name: str | None, status: int, reason: str, param: str | None
) -> None:
    """Log one line for a refused request. It names the field at fault, not the field's value."""
    if not _request_log.isEnabledFor(logging.INFO):
        return
    fields: dict[str, object] = {
        "request_id": request_id,
        "endpoint": endpoint,
        "key": key_name or "none",
        "status": status,
        "finish": "refused",
        "error": reason,
        **({"param": param} if param else {}),
    }
    text = " ".join(f"{name}={_word(_cut(value))}" for name, value in fields.items())
    _request_log.info("%s", text, extra={FIELDS: fields})


def request_fields(record: RequestRecord) -> dict[str, object]:
    """Return the fields of a request's log line, in order. Unknown ones are left out."""
    fields: dict[str, object] = {
        "request_id": record.id,
        "endpoint": record.endpoint,
        "model": record.model,
        "key": record.key,
        "tier": record.tier,
        "stream": record.is_streaming,
        "prompts": record.num_prompts,
        "n": record.n,
        "max_tokens": record.max_tokens,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "cache": record.cache_reason,
        "cache_source": record.cache_source,
        "queued_s": _rounded(record.queued_s),
        "ttft_s": _rounded(record.ttft_s),
        "e2e_s": _rounded(record.duration_s),
        "tokens_per_s": _rounded(record.tokens_per_s),
        "finish": record.finish,
        "error": record.error,
    }
    return {name: _cut(value) for name, value in fields.items() if value is not None}


def _word(value: object) -> str:
    """Format the value of `name=value`: quoted unless it consists of plain characters."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return str(value)
    return value if _PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)


def _cut(value: object) -> object:
    return value[:MAX_VALUE_CHARS] if isinstance(value, str) else value


def _rounded(value: float | None) -> float | None:
    """Round to 0.1 ms."""
    return round(value, 4) if value is not None and math.isfinite(value) else None


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
    bounds: tuple[float, ...] = ()  # of a histogram


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
    "time_to_first_token_seconds": _Spec("From arrival to the first token.", bounds=_TTFT_S),
    "inter_token_latency_seconds": _Spec("From one token to the next.", bounds=_TOKEN_S),
    "request_time_per_output_token_seconds": _Spec("A request's mean time from token to token.", bounds=_TOKEN_S),
    "e2e_request_latency_seconds": _Spec("From arrival to the end of the request.", bounds=_REQUEST_S),
    "request_queue_time_seconds": _Spec("Waiting time of requests before they started.", bounds=_REQUEST_S),
    "request_prefill_time_seconds": _Spec("From the start to the first token.", bounds=_REQUEST_S),
    "request_decode_time_seconds": _Spec("From the first token to the last.", bounds=_REQUEST_S),
    "request_inference_time_seconds": _Spec("From the start to the last token.", bounds=_REQUEST_S),
    "request_prompt_tokens": _Spec("Prompt tokens of a request.", bounds=_TOKENS),
    "request_generation_tokens": _Spec("Generated tokens of a request.", bounds=_TOKENS),
    "request_params_n": _Spec("The parameter n of a request.", bounds=_SAMPLES),
    "request_params_max_tokens": _Spec("The parameter max_tokens of requests that set it.", bounds=_TOKENS),
    "iteration_tokens_total": _Spec("Tokens computed in one step.", bounds=_STEP_TOKENS),
    "queue_wait_seconds": _Spec("Waiting time of a tier's requests before they started.", ("tier",), _REQUEST_S),
    "step_seconds": _Spec("Duration of one step.", bounds=_TOKEN_S),
}
REQUEST_HISTOGRAMS = {  # name -> field of RequestRecord
    "e2e_request_latency_seconds": "duration_s",
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

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self.total += value * count

    def add_to(self, family: Metric, labels: dict[str, str]) -> None:
        num_below = 0
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            num_below += count
            family.add_sample(f"{family.name}_bucket", {**labels, "le": bound}, num_below)
        family.add_sample(f"{family.name}_count", labels, num_below)
        family.add_sample(f"{family.name}_sum", labels, self.total)


class Exposition(Collector):
    """The series of the server, by metric and labels.

    `compat`: metrics that vLLM has too are exported a second time under this prefix, for existing dashboards.
    """

    def __init__(self, compat: str | None = None) -> None:
        self.values: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in (*GAUGES, *COUNTERS)}
        self.histograms: dict[str, dict[tuple[str, ...], Histogram]] = {name: {} for name in HISTOGRAMS}
        self._compat = compat

    def collect(self) -> Iterator[Metric]:
        yield from self._families(_PREFIX, {*GAUGES, *COUNTERS, *HISTOGRAMS})
        if self._compat is not None:
            yield from self._families(f"{self._compat}:", VLLM)

    def _families(self, prefix: str, names: Collection[str]) -> Iterator[Metric]:
        for kind, specs in (("gauge", GAUGES), ("counter", COUNTERS), ("histogram", HISTOGRAMS)):
            for name in [name for name in specs if name in names]:
                family = Metric(prefix + name, specs[name].text, kind)
                label_names = *_LABELS, *specs[name].labels
                for labels, value in self.values.get(name, {}).items():
                    sample = f"{family.name}_total" if kind == "counter" else family.name
                    family.add_sample(sample, dict(zip(label_names, labels, strict=True)), value)
                for labels, histogram in self.histograms.get(name, {}).items():
                    histogram.add_to(family, dict(zip(label_names, labels, strict=True)))
                yield family


Totals = dict[tuple[str, str], int]


class Metrics:
    """The metrics of one model. They are kept across worker restarts and reloads."""

    def __init__(self, model_name: str, *, exposition: Exposition | None = None) -> None:
        self._labels = (model_name.encode("utf-8", "backslashreplace").decode(), _ENGINE)
        self.exposition = exposition = exposition or Exposition()
        self._values, self._histograms = exposition.values, exposition.histograms
        self._config_labels: tuple[str, ...] | None = None
        self._worker = 0, 0  # num_restarts at the last stats, which identifies the worker, and its steps
        # Totals that were taken, by metric and label. Only those of replicas among the others have labels.
        self._of_worker: Totals = {}
        self._of_others: Totals = {}
        self._make_series()
        self._token = self._histogram("inter_token_latency_seconds")
        self._step = self._histogram("step_seconds")
        self._step_tokens = self._histogram("iteration_tokens_total")

    def _make_series(self) -> None:
        """Make every series that has few labels, so that the first scrape shows them at 0."""
        of_one_label = {"request_success": [*FINISHES.values(), OTHER], "requests_rejected": [*sorted(REASONS), OTHER]}
        for name, spec in COUNTERS.items():
            for label in of_one_label.get(name, []):
                self._count(name, 0, label)
            if not spec.labels:
                self._count(name, 0)
        for name, spec in HISTOGRAMS.items():
            for labels in [(tier,) for tier in TIERS] if spec.labels else [()]:
                self._histograms[name][*self._labels, *labels] = Histogram(spec.bounds)
        self._reset_gauges()
        for name in ("model_bytes", "model_requests_waiting", "replicas"):
            self._set(name, 0)

    def _reset_gauges(self) -> None:
        for name in ("num_requests_running", "num_requests_waiting", "engine_moving"):
            self._set(name, 0)  # correct while the model loads, and autoscalers need a value

    def _set(self, name: str, value: float, *labels: str) -> None:
        self._values[name][*self._labels, *labels] = value

    def _count(self, name: str, amount: int = 1, *labels: str) -> None:
        series, key = self._values[name], (*self._labels, *labels)
        series[key] = series.get(key, 0) + amount

    def _follow(self, seen: Totals, name: str, total: int, label: str = "") -> None:
        """Count up to a total that is counted elsewhere."""
        self._count(name, max(0, total - seen.get((name, label), 0)), *filter(None, (label,)))
        seen[name, label] = total

    def _histogram(self, name: str, *labels: str) -> Histogram:
        return self._histograms[name][*self._labels, *labels]

    # Updated by events

    def stepped(self, stepped: Stepped) -> None:
        if stepped.num_tokens:
            self._step_tokens.observe(stepped.num_tokens)
            self._step.observe(stepped.took_s)
        if num_generated := stepped.num_generated:
            self._count("generation_tokens", num_generated)

    @property
    def num_tokens(self) -> tuple[float, float]:
        """Tokens of prompts and of answers that were computed so far.

        The last token of a prompt produces the first token of the answer and counts as generated. A step that is still
        running when an answer ends counts to the prompts.
        """
        num_generated = self._values["generation_tokens"][self._labels]
        return max(0, self._step_tokens.total - num_generated), num_generated

    def started(self, priority: Priority, queued_s: float) -> None:
        self._histogram("request_queue_time_seconds").observe(queued_s)
        self._histogram("queue_wait_seconds", priority.name.lower()).observe(queued_s)

    def tokens(self, gap_s: float, count: int) -> None:
        """Count tokens that arrived `gap_s` after the previous token of their answer."""
        self._token.observe(gap_s, count)

    def finished(self, record: RequestRecord) -> None:
        self._count("request_success", 1, FINISHES.get(record.finish, OTHER))
        self._count("prompt_tokens", record.prompt_tokens)
        self._count("prompt_tokens_cached", record.cached_tokens)
        for name, field in REQUEST_HISTOGRAMS.items():
            if (value := getattr(record, field)) is not None:
                self._histogram(name).observe(value)
        if record.decode_s is not None:
            self._histogram("request_inference_time_seconds").observe((record.prefill_s or 0.0) + record.decode_s)
            num_steps = record.completion_tokens / record.num_samples - 1  # answers are generated in parallel
            if num_steps > 0:
                self._histogram("request_time_per_output_token_seconds").observe(record.decode_s / num_steps)

    def rejected(self, reason: str) -> None:
        self._count("requests_rejected", 1, reason if reason in REASONS else OTHER)

    # Updated at each scrape

    def take(self, stats: Stats | None, worker: ModelClient) -> None:
        """Take the worker's stats. None: the worker did not answer, and the last known ones stay."""
        if stats is not None:
            # The stats of a cluster include the counts of replicas that have left.
            self._take_totals(stats, 0 if worker.replica_statuses else worker.num_restarts)
            self._take_gauges(stats)
        self._follow(self._of_others, "worker_restarts", worker.num_restarts)
        self._set("engine_moving", float(worker.is_moving))
        if worker.facts is not None:
            self._take_facts(worker.facts)
        self._take_replicas(worker.replica_statuses)

    def _take_replicas(self, statuses: tuple[ReplicaStatus, ...]) -> None:
        """Take the figures of replicas. Those of replicas that have left are removed."""
        self._set("replicas", len(statuses))
        for name in {name for _, name in self._of_others if name} - {one.name for one in statuses}:
            for metric in REPLICA_METRICS:
                self._values[metric].pop((*self._labels, name), None)
                self._of_others.pop((metric, name), None)
        for one in statuses:
            self._set("replica_requests", one.num_requests, one.name)
            num_held = one.num_blocks - one.num_free_blocks
            self._set("replica_kv_cache_usage_perc", num_held / one.num_blocks if one.num_blocks else 0.0, one.name)
            for metric, field in REPLICA_COUNTERS.items():
                self._follow(self._of_others, metric, getattr(one, field), one.name)

    def take_model_state(self, managed: ManagedModel) -> None:
        """Take the model's state, memory, waiters and load counts from the manager."""
        for state in ModelState:
            self._set("model_state", float(state is managed.state), state.value)
        self._set("model_bytes", managed.num_bytes)
        self._set("model_requests_waiting", len(managed.waiters))
        if managed.state is not ModelState.READY:
            self._reset_gauges()
        self._follow(self._of_others, "model_loads", managed.num_loads)
        self._follow(self._of_others, "model_load_failures", managed.num_failures)
        self._follow(self._of_others, "model_unloads", managed.num_unloads)

    def forget_worker(self) -> None:
        """Prepare for a new worker, which counts from 0."""
        self._of_worker.clear()
        self._of_others.pop(("worker_restarts", ""), None)

    def _take_totals(self, stats: Stats, num_restarts: int) -> None:
        """Add the worker's new counts. A new worker counts from 0, so its counts are added to the earlier ones."""
        if num_restarts != self._worker[0] or stats.num_steps < self._worker[1]:
            self._of_worker.clear()
        self._worker = num_restarts, stats.num_steps
        cache = stats.cache
        totals = {
            "num_preemptions": stats.num_preemptions,
            "draft_tokens": stats.num_drafted,
            "draft_tokens_accepted": stats.num_accepted,
            "prefix_cache_queries": cache.num_queried_tokens,
            "prefix_cache_hits": cache.num_hit_tokens,
            "prefix_cache_recomputed": cache.num_recomputed_tokens,
            "kv_evictions": cache.num_evictions,
            "window_evictions": 0 if cache.windows is None else cache.windows.num_evictions,
            "state_evictions": 0 if cache.states is None else cache.states.num_evictions,
            "invariant_violations": stats.num_violations,
        }
        for name, total in totals.items():
            self._follow(self._of_worker, name, total)
        for level in cache.levels:
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
        for name, pool in (("kv_blocks", cache), ("window_blocks", cache.windows), ("recurrent_states", cache.states)):
            if pool is not None:
                num_empty = pool.num_free - (0 if isinstance(pool, StateStats) else pool.num_cached)
                self._set(name, num_empty, "free")
                self._set(name, pool.num_cached, "cached")
                self._set(name, pool.num_in_use, "in_use")
        self._set("kv_blocks", cache.num_shared, "shared")
        self._set("kv_blocks", cache.num_pinned, "pinned")
        for tier, one in zip(TIERS, stats.tiers, strict=True):
            self._set("queue_requests", one.num_waiting, tier)
            self._set("queue_tokens", one.num_tokens, tier)
            self._set("queue_age_seconds", one.oldest_age_s, tier)

    def _take_facts(self, ready: Ready) -> None:
        capacity = ready.capacity
        sizes = capacity.block_size, capacity.num_blocks - 1, ready.facts.kv_dtype or "auto", ready.facts.kv_bytes
        labels = tuple(map(str, (*sizes, capacity.max_num_seqs, ready.max_model_len)))
        if self._config_labels not in (None, labels):  # a new worker may have a different number of blocks
            del self._values["cache_config_info"][*self._labels, *(self._config_labels or ())]
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
