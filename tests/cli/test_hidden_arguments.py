"""API keys are not shown in the list of processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pathlib import Path
from quire.cli.main import hide_keys
before = list(sys.argv)
hide_keys()
assert sys.argv == before
print(Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").replace(b"\\0", b" ").decode(errors="replace"))
"""
KEY = "sk-secret-00000001"
pytestmark = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="only Linux has the file")


def shown(*arguments: str) -> str:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().rpartition("\n")[2]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("serve", "--api-key", KEY, "--port", "1"), f"serve --api-key {'*' * len(KEY)} --port 1"),
        (("--api-key=" + KEY, "x"), f"--api-key={'*' * len(KEY)} x"),
        (("--admin-api-key", KEY, "--api-key", "sk-2"), f"--admin-api-key {'*' * len(KEY)} --api-key ****"),
        (("--api-key", "ä" * 9), f"--api-key {'*' * 18}"),
        (("chat", KEY), f"chat {KEY}"),
        (("--api-key",), "--api-key"),
        (("--api-key", ""), "--api-key"),
    ],
)
def test_keys_are_hidden(arguments: tuple[str, ...], expected: str) -> None:
    assert shown(*arguments).endswith(expected)
