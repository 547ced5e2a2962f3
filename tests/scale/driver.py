"""A Ray cluster of its own with a deployed quire, until its standard input ends. Run by `tests/scale/rig.py`.

    python -m tests.scale.driver CONFIG.yaml NUM_NODES

Prints a line of JSON for each thing that happens. Commands on standard input: `deploy FILE` deploys again,
`remove_node N` ends a machine, `quire ARGUMENTS` runs a command in this process, which has joined the cluster.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import time
from types import SimpleNamespace
from typing import Any

import ray
from ray.cluster_utils import Cluster

from quire.cli.main import run
from quire.scale import ray_cluster

CPUS_PER_NODE = 16  # logical: replicas of tests share the real ones


# Ray gives a node 30 s to start, a constant. On a busy machine a node takes longer.
SLOW_CLOCK = SimpleNamespace(time=time.time, sleep=time.sleep, monotonic=lambda: time.monotonic() / 20)


def tell(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main() -> None:
    os.environ["RAY_DISABLE_IMPORT_WARNING"] = "1"
    os.environ.pop(ray_cluster.ADDRESS_VARIABLE, None)
    ray_cluster.END_S = 0.5  # a raylet whose GCS has ended does not end, and is killed
    file, num_nodes = sys.argv[1], int(sys.argv[2])
    ray._private.node.time = SLOW_CLOCK
    ray_cluster._make_token()  # otherwise the cluster would have none, and commands one
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS_PER_NODE, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=CPUS_PER_NODE) for _ in range(num_nodes - 1)]
    # It has written its address to a file below RAY_TMPDIR, as `ray start` does. Commands join it, and start no other.
    assert ray_cluster.is_here()
    deploy(file)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "deploy":
            deploy(argument)
        elif command == "remove_node":
            cluster.remove_node(nodes.pop(), allow_graceful=False)
            tell(nodes=len(nodes) + 1)
        elif command == "quire":
            tell(**quire(*argument.split()))
    if ray.is_initialized():  # otherwise a command has ended the cluster
        ray.shutdown()
        cluster.shutdown()


def deploy(file: str) -> None:
    done = quire("deploy", file)
    if done["code"]:
        tell(error=done["err"])
        return
    print(done["out"], flush=True)
    (url,) = re.findall(r"quire serves at (\S+)", done["out"])
    tell(url=url)


def quire(*arguments: str) -> dict[str, Any]:
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv[1:] = arguments
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run()
        except SystemExit as end:
            code = int(end.code or 0)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


if __name__ == "__main__":
    main()
