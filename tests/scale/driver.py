"""A Ray cluster of its own with a deployed quire, until its standard input ends. Run by `tests/scale/rig.py`.

    python -m tests.scale.driver CONFIG.yaml NUM_NODES

Prints a line of JSON for each thing that happens. Commands on standard input: `deploy FILE` deploys again,
`remove_node N` ends a machine, `status` prints the state.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from quire.cli.deploy import read_config
from quire.errors import QuireError
from quire.scale import application

CPUS_PER_NODE = 16  # logical: replicas of tests share the real ones


def tell(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main() -> None:
    os.environ["RAY_DISABLE_IMPORT_WARNING"] = "1"
    file, num_nodes = Path(sys.argv[1]), int(sys.argv[2])
    nodes: list[Any] = []
    cluster = None
    if num_nodes == 1:
        ray.init(
            address="local",
            num_cpus=CPUS_PER_NODE,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace="serve",
        )
    else:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS_PER_NODE, "include_dashboard": False})
        nodes = [cluster.add_node(num_cpus=CPUS_PER_NODE) for _ in range(num_nodes - 1)]
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, namespace="serve")
    deploy(file)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "deploy":
            deploy(Path(argument))
        elif command == "remove_node" and cluster is not None:
            cluster.remove_node(nodes.pop(), allow_graceful=False)
            tell(nodes=len(nodes) + 1)
        elif command == "status":
            tell(status=application.status())
        elif command == "stop":
            tell(stopped=application.stop())
    ray.shutdown()
    if cluster is not None:
        cluster.shutdown()


def deploy(file: Path) -> None:
    try:
        tell(url=application.deploy(read_config(file)))
    except QuireError as error:
        tell(error=str(error))


if __name__ == "__main__":
    main()
