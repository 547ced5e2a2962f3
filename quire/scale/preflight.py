"""Checks of a deployment before anything that runs is changed.

Ray replaces replicas and the front one after the other, and does not return to the old settings if a new one cannot
start. So everything that can be known before is checked before.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

import ray

from quire.errors import InvalidRequest
from quire.scale.config import ModelDeployment
from quire.server.auth import make_keyring
from quire.server.config import ServeConfig

HEAD = "node:__internal_head__"  # Ray's resource of the machine that leads the cluster
BIND_S = 20.0  # a new process of Ray may take some seconds


def check_server(server: ServeConfig, url: str | None) -> None:
    """Check the settings of the front: the keys file, and the address, unless the running front at `url` has it."""
    make_keyring(server.api_key, server.admin_api_key, server.api_keys_file, is_shared=server.share_prefix_cache)
    if server.port == 0 or (url is not None and urlsplit(url).port == server.port):
        return
    check = ray.remote(num_cpus=0, resources={HEAD: 0.001})(find_problem)
    try:
        problem = ray.get(check.remote(server.host, server.port), timeout=BIND_S)
    except ray.exceptions.GetTimeoutError:
        return  # Ray is busy; the front itself reports what is wrong
    if problem is not None:
        raise InvalidRequest(f"host = {server.host!r}, port = {server.port}: the head cannot listen there: {problem}")


def find_problem(host: str, port: int) -> str | None:
    """Why this machine cannot listen at an address; None: it can."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return None


def needs(one: ModelDeployment) -> dict[str, float]:
    """What one replica needs of its machine, by Ray's names of resources."""
    wanted = {"CPU": one.resources.cpus or 0.0, "GPU": one.resources.gpus, **one.resources.custom}
    if one.resources.memory is not None:
        wanted["memory"] = float(one.resources.memory)
    return {kind: amount for kind, amount in wanted.items() if amount}


def check_resources(deployments: Mapping[str, ModelDeployment]) -> None:
    """Refuse replicas that no machine of the cluster could run, even without anything else on it."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for name, one in deployments.items():
        wanted = needs(one)
        if not any(all(machine.get(kind, 0) >= amount for kind, amount in wanted.items()) for machine in machines):
            text = f"{name}: no machine of the cluster has what one replica needs: {_text(wanted)}"
            raise InvalidRequest(f"{text}; --wait waits until such a machine joins")


def has_room(deployments: Sequence[ModelDeployment]) -> bool:
    """Whether the first replicas of new deployments fit beside what runs, as far as the sums of resources show."""
    free = ray.available_resources()
    total: dict[str, float] = {}
    for one in deployments:
        for kind, amount in needs(one).items():
            total[kind] = total.get(kind, 0.0) + amount * one.min_replicas
    return all(free.get(kind, 0.0) >= amount for kind, amount in total.items())


def _text(wanted: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {amount:g}" for kind, amount in wanted.items())
