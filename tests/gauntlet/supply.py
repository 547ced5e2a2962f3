"""R23: the packages of the core install, their hashes and their bill of materials."""

from __future__ import annotations

import importlib.metadata as metadata
import re
from collections.abc import Sequence

from packaging.version import Version

from tests.dependencies import CORE, bill, changed_files, check_index, closure, num_bytes, read_lock, unlocked
from tests.dependencies import vulnerabilities as run_audit
from tests.gauntlet.figures import Figure, Gauntlet, Row, exactly

_CUDA = re.compile(r"nvidia|cuda|cudnn|cublas|triton|torch|cupy")
_OFFLINE = re.compile(r"Max retries|ConnectionError|Name or service|Could not find a version|timed out")


def supply_chain(gauntlet: Gauntlet) -> Sequence[Figure]:
    packages = closure()
    locked = read_lock()
    materials = bill(packages)
    listed = {one["name"] for one in materials["components"]}
    without_hash = [one["name"] for one in materials["components"] if "externalReferences" not in one]
    gauntlet.say(f"the core is quire with the extras {', '.join(CORE)}: what `make serve` installs without a GPU")
    figures = [
        Figure("packages of the core install", len(packages), at_most=45),
        Figure("packages of the install without extras", len(closure(())), at_most=12),
        Figure("size of the core install", sum(map(num_bytes, packages.values())) / 1e6, "MB", at_most=180),
        exactly(
            "packages of CUDA or PyTorch in the core install", sum(_CUDA.search(name) is not None for name in packages)
        ),
        exactly("installed packages without a locked hash", len(unlocked())),
        Figure("hashes in the lock", sum(len(hashes) for _, hashes in locked.values()), at_least=len(locked)),
        exactly("installed files that differ from their wheels", len(changed_files(packages))),
        exactly("packages missing in the bill of materials", len(packages.keys() - listed)),
        exactly("packages without a hash in the bill of materials", len(without_hash)),
        exactly(
            "starlette is older than 1.0.1 (1: yes)", int(Version(metadata.version("starlette")) < Version("1.0.1"))
        ),
    ]
    if not gauntlet.is_quick:
        figures += _with_network(gauntlet)
    return figures


def _with_network(gauntlet: Gauntlet) -> list[Figure]:
    """Checks that need the package index or a database. Without a network they are reported as not run."""
    problem = check_index()
    is_offline = bool(problem) and _OFFLINE.search(problem) is not None and "hash" not in problem.lower()
    report, is_clean = run_audit()
    has_run = "not run" not in report
    gauntlet.say(problem[:500] or "the index has the locked files")
    gauntlet.say(report[:500])
    figures = [Figure("files of the index were compared with the lock (1: yes)", float(not is_offline))]
    figures += [] if is_offline else [exactly("files of the index with another hash", float(bool(problem)))]
    figures.append(Figure("pip-audit has run (1: yes)", float(has_run)))
    figures += [exactly("pip-audit has findings (1: yes)", float(not is_clean))] if has_run else []
    return figures


ROWS: tuple[Row, ...] = (
    Row(
        "R23",
        "The core install has few packages, locked with hashes and listed in a bill of materials",
        supply_chain,
        240,
    ),
)
