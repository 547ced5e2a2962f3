"""Fuzzing with schemathesis: it reads /openapi.json and sends valid and invalid requests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.selection import mostly_nightly
from tests.server.rig import FAKE, Server, serving
from tests.waiting import HANG_S

KEY = "sk-admin-canary-1"
# A schema cannot express that a body needs one of two fields, that one field bounds another, or that a known field is
# refused. Data that is valid by the schema may therefore be refused. All other checks are on.
LEFT_OUT = "positive_data_acceptance"


# A short context bounds the answers, whatever max_tokens is.
OPTIONS = (*FAKE, "--max-model-len", "128", "--admin-api-key", KEY)


def fuzz(server: Server, folder: Path, mode: str, num_examples: int, *more: str) -> subprocess.CompletedProcess[str]:
    """Run schemathesis. `mode`: all, or negative for invalid requests only."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {KEY}", "--checks", "all", "--exclude-checks", LEFT_OUT]
    command += ["--mode", mode, "--phases", "examples,fuzzing", "--max-examples", str(num_examples)]
    command += ["--seed", "1", "--continue-on-failure", "--no-shrink", "--request-timeout", str(HANG_S)]
    command += ["--generation-database", "none", "--no-color", "--suppress-health-check"]
    command.append("too_slow" if mode == "all" else "all")  # some operations have few invalid requests
    command += ["--exclude-path", "/api/pull"]  # any org/name would be downloaded
    command += ["--exclude-path", "/v1/watch"]  # an endless stream, tested in tests/server/test_watch.py
    if mode == "negative":  # schemathesis fails for operations that have no invalid request
        command += [part for path in paths_with_bodies(server) for part in ("--include-path", path)]
    return subprocess.run([*command, *more], cwd=folder, capture_output=True, text=True, check=False)


def paths_with_bodies(server: Server) -> list[str]:
    """The paths of operations with a JSON body."""
    paths = server.get("/openapi.json").json["paths"]
    bodies = {
        path: operations.get("post", {}).get("requestBody", {"content": {}}) for path, operations in paths.items()
    }
    return [path for path, body in bodies.items() if "application/json" in body["content"]]


def num_generated(stdout: str) -> int:
    found = re.search(r"(\d+) generated, (\d+) passed", stdout)
    assert found is not None, stdout[-2000:]
    return int(found[1])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_examples", mostly_nightly([6, 40], 1))  # of each operation, valid and not
def test_schemathesis_finds_nothing(num_examples: int, tiny_model: Path, tmp_path: Path) -> None:
    with serving(str(tiny_model), *OPTIONS, key=KEY) as server:
        worker_pid = server.worker_pid
        found = fuzz(server, tmp_path, "all", num_examples)
        assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
        assert num_generated(found.stdout) > 25 * num_examples  # it covered the whole schema

        server.wait_free()
        assert server.worker_pid == worker_pid
        assert server.get("/health").json["status"] == "ok"
        assert "Traceback" not in server.log
        text = server.get("/metrics").body.decode()
        served = re.findall(r"^quire:request_success_total\{.*\} (\S+)$", text, re.MULTILINE)
        assert sum(map(float, served)) > num_examples  # and not all requests were refused
