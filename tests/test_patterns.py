"""Regular expressions of the package on text that makes ambiguous ones backtrack: they match in about linear time.

A match cannot be interrupted and holds the interpreter's lock, so the patterns are tried in a child process.
"""

from __future__ import annotations

import subprocess
import sys

# Four adjacent `\\s*` take years here. CPU time does not depend on the load of the machine.
TRY_ALL = r"""
import importlib, pkgutil, re, resource, sys
import quire

resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
LENGTH = 20_000
found = {}
for module in pkgutil.walk_packages(quire.__path__, "quire."):
    if not re.search(r"\.mlx|\.torch|\.ray_|__main__|_child|template_worker|libquire", module.name):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
                found[value.pattern] = module.name, name, value
for where, name, pattern in found.values():
    print(where, name, flush=True)  # the last line names the pattern that does not end
    literals = set(re.sub(r"\\[a-zA-Z]", "", pattern.pattern)) & set("{}[]()\"'\\\\<>:=#/.,-_*+?|&;@%$")
    chars = [*sorted(literals), "a", "0", " ", "\n"]
    for first in ["", *chars]:
        for repeated in chars:
            pattern.match(first + repeated * LENGTH + "\0")
print(len(found))
"""


def test_no_pattern_backtracks() -> None:
    done = subprocess.run([sys.executable, "-c", TRY_ALL], check=False, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, (done.stdout.splitlines()[-1:], done.stderr[-500:])
    assert int(done.stdout.splitlines()[-1]) > 30
