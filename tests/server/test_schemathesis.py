"""Fuzzing with schemathesis: it reads /openapi.json and sends valid and invalid requests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.rig import FAKE, serving
from tests.waiting import HANG_S

KEY = "sk-admin-canary-1"
NUM_EXAMPLES = 40  # of each operation, valid and not
# A schema cannot express that a body needs one of two fields, that one field bounds another, or that a known field is
# refused. Data that is valid by the schema may therefore be refused. All other checks are on.
LEFT_OUT = "positive_data_acceptance"


@pytest.mark.timeout(3600)
def test_schemathesis_finds_nothing(tiny_model: Path, tmp_path: Path) -> None:
    # A short context bounds the answers, whatever max_tokens is.
    options = (*FAKE, "--max-model-len", "128", "--admin-api-key", KEY)
    with serving(str(tiny_model), *options, key=KEY) as server:
        worker_pid = server.worker_pid
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
        command += ["--header", f"Authorization: Bearer {KEY}", "--checks", "all", "--exclude-checks", LEFT_OUT]
        command += ["--mode", "all", "--phases", "examples,fuzzing", "--max-examples", str(NUM_EXAMPLES)]
        command += ["--seed", "1", "--continue-on-failure", "--no-shrink", "--request-timeout", str(HANG_S)]
        command += ["--generation-database", "none", "--no-color", "--suppress-health-check", "too_slow"]
        command += ["--exclude-path", "/api/pull"]  # any org/name would be downloaded
        command += ["--exclude-path", "/v1/watch"]  # an endless stream, tested in tests/server/test_watch.py
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
        generated = re.search(r"(\d+) generated, (\d+) passed", found.stdout)
        assert generated is not None, found.stdout[-2000:]
        assert int(generated[1]) > 1000  # it covered the whole schema

        server.wait_free()
        assert server.worker_pid == worker_pid
        assert server.get("/health").json["status"] == "ok"
        assert "Traceback" not in server.log
        text = server.get("/metrics").body.decode()
        served = re.findall(r"^quire:request_success_total\{.*\} (\S+)$", text, re.MULTILINE)
        assert sum(map(float, served)) > 50  # and not all requests were refused
