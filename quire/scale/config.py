"""Settings of `quire deploy`: those of `quire serve`, and how many replicas of each model run where.

`QueuePolicy` decides the number of replicas by the age of the oldest waiting request and by the tokens that wait.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from quire.errors import InvalidRequest
from quire.server.config import ServeConfig

MAX_REPLICAS = 1000
# Ray's names of resources that are not custom, and the fields for them.
OWN_FIELDS = {"CPU": "cpus", "GPU": "gpus", "memory": "memory", "object_store_memory": ""}


@dataclass(frozen=True, slots=True)
class Autoscale:
    """Bounds, and the load that one replica should have at most."""

    min: int = 1
    max: int = 2
    queue_age: float = 2.0  # seconds that the oldest request may wait
    waiting_tokens: int = 16_384  # prompt tokens that may wait for one replica
    up_delay: float = 5.0  # seconds
    down_delay: float = 120.0

    def __post_init__(self) -> None:
        for name in ("min", "max"):
            _check_count(f"autoscale.{name}", getattr(self, name), 1, MAX_REPLICAS)
        if self.max < self.min:
            raise InvalidRequest(f"autoscale.max = {self.max} is less than autoscale.min = {self.min}")
        _check_count("autoscale.waiting_tokens", self.waiting_tokens, 1, 1 << 40)
        for name in ("queue_age", "up_delay", "down_delay"):
            _check_number(f"autoscale.{name}", getattr(self, name), above=-1 if "delay" in name else 0)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one replica needs of its machine. Ray starts it where that is free."""

    cpus: float | None = None  # None: all replicas share the cluster's
    gpus: float = 0.0
    memory: int | None = None  # bytes
    custom: dict[str, float] = field(default_factory=dict)  # Ray's own resources, such as a label of some machines

    def __post_init__(self) -> None:
        if self.cpus is not None:
            _check_number("resources.cpus", self.cpus)
        _check_number("resources.gpus", self.gpus, above=-1)
        if self.memory is not None:
            _check_count("resources.memory", self.memory, 1, 1 << 60)
        if not isinstance(self.custom, dict):
            raise InvalidRequest(f"resources.custom = {self.custom!r:.80} is not a mapping of names to amounts")
        for name, amount in self.custom.items():
            _check_custom(name)
            _check_number(f"resources.custom.{name}", amount)


@dataclass(frozen=True, slots=True)
class ModelDeployment:
    """The replicas of one model."""

    replicas: int = 1
    autoscale: Autoscale | None = None
    resources: Resources = field(default_factory=Resources)

    def __post_init__(self) -> None:
        _check_count("replicas", self.replicas, 1, MAX_REPLICAS)

    @property
    def min_replicas(self) -> int:
        return self.replicas if self.autoscale is None else self.autoscale.min

    @property
    def max_replicas(self) -> int:
        return self.replicas if self.autoscale is None else self.autoscale.max


@dataclass(frozen=True, slots=True)
class DeployConfig:
    server: ServeConfig
    deployments: tuple[ModelDeployment, ...]  # of the models, in their order


def equal_share(machines: Sequence[float], num_replicas: int) -> float:
    """The most CPUs that each of the replicas can have if all of them run at once, each on one of the machines."""
    counts = {cpus for cpus in machines if cpus > 0}
    # The largest share fills a machine with a whole number of replicas.
    shares = sorted({cpus / count for cpus in counts for count in range(1, num_replicas + 1)})

    def fits(share: float) -> bool:
        return sum(int(cpus / share + 1e-9) for cpus in machines) >= num_replicas

    share = shares[bisect_left(shares, True, key=lambda one: not fits(one)) - 1] if shares else 1.0
    return float(int(share)) if share >= 1 else math.floor(share * 10_000) / 10_000  # Ray's smallest part


def parse_deployment(given: Mapping[str, Any], default: ModelDeployment | None = None) -> ModelDeployment:
    """The settings of a model from a YAML file. Errors begin with the field."""
    default = default or ModelDeployment()
    autoscale, resources = given.get("autoscale"), given.get("resources")
    if given.get("replicas") is not None and autoscale is not None:
        raise InvalidRequest(f"replicas = {given['replicas']!r}: autoscale is set too, which has min and max instead")
    scaled = default.autoscale if autoscale is None and given.get("replicas") is None else None
    return ModelDeployment(
        replicas=given.get("replicas", default.replicas),
        autoscale=scaled if autoscale is None else _make(Autoscale, "autoscale", autoscale),
        resources=default.resources if resources is None else _make(Resources, "resources", resources),
    )


def _make(kind: type[Any], name: str, given: Any) -> Any:
    if not isinstance(given, dict):
        raise InvalidRequest(f"{name} = {given!r:.80} is not a mapping of settings")
    known = [one.name for one in fields(kind)]
    values = {str(key).replace("-", "_"): value for key, value in given.items()}
    for key in values:
        if key not in known:
            raise InvalidRequest(f"{name}.{key}: there is no such field; there are {', '.join(known)}")
    if isinstance(values.get("memory"), str):
        from quire.sizes import parse_size

        values["memory"] = parse_size(f"{name}.memory", values["memory"])
    return kind(**values)


def _check_count(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise InvalidRequest(f"{name} = {value!r:.80} is not a whole number from {low} to {high}")


def _check_custom(name: object) -> None:
    if not isinstance(name, str) or name in OWN_FIELDS:
        own = OWN_FIELDS.get(str(name))
        hint = f"use resources.{own}" if own else "Ray does not accept such a name"
        raise InvalidRequest(f"resources.custom.{name!s:.80}: {hint}")


def _check_number(name: str, value: object, above: float = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= above:
        least = "above 0" if above == 0 else "of at least 0"
        raise InvalidRequest(f"{name} = {value!r:.80} is not a number {least}")


# Autoscaling

DOWN_USE = 0.5  # a replica leaves if the others would then be used by less than this


class Figures(NamedTuple):
    """What one replica reports."""

    queue_age_s: float  # of its oldest waiting request
    waiting_tokens: float  # of prompts
    use: float  # running requests, relative to the most that it runs at once


def wanted_replicas(current: int, figures: Iterable[Figures], queue_age_s: float, waiting_tokens: float) -> int:
    """The number of replicas for this load, without bounds and delays. `figures`: of the replicas that run.

    `queue_age_s` and `waiting_tokens`: the longest wait, and the most waiting tokens of one replica, that are accepted.
    While a replica is being started, a long wait adds no other one: the one that starts will shorten it.
    """
    found = list(figures)
    tokens = sum(one.waiting_tokens for one in found)
    needed = math.ceil(tokens / waiting_tokens)
    is_complete = len(found) >= current
    if is_complete and max((one.queue_age_s for one in found), default=0.0) > queue_age_s:
        needed = max(needed, current + 1)
    if needed > current:
        return needed
    is_spare = current > 1 and not tokens and sum(one.use for one in found) < DOWN_USE * (current - 1)
    return current - 1 if is_spare else current


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """An autoscaling policy of Ray Serve, which adds the delays and calls it several times per second."""

    queue_age_s: float
    waiting_tokens: float

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        current = context.target_num_replicas
        wanted = wanted_replicas(current, _figures(context), self.queue_age_s, self.waiting_tokens)
        return min(max(wanted, context.capacity_adjusted_min_replicas), context.capacity_adjusted_max_replicas), {}


def _figures(context: Any) -> list[Figures]:
    """The last reports of the replicas that run."""
    metrics = context.raw_metrics or {}
    found = []
    for replica in context.running_replicas:
        values = [_last(metrics.get(name, {}).get(replica)) for name in Figures._fields]
        found.append(Figures(*values))
    return found


def _last(series: Any) -> float:
    """The last value of a series of (time, value)."""
    if not series:
        return 0.0
    point = series[-1]
    return float(getattr(point, "value", point))
