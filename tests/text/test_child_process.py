"""A child process that is slow, dies or writes invalid answers is killed and replaced."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.text import child_process as child_module
from quire.text.child_process import Child, Died, Interrupted, NoAnswer, TooSlow
from tests.waiting import HANG_S

SCRIPT = """
import json, sys, time
for line in sys.stdin:
    order = json.loads(line)
    if "sleep" in order:
        time.sleep(60)
    if "end" in order:
        sys.exit(order["end"])
    print(order.get("say", line.strip()), end=order.get("then", "\\n"), flush=True)
"""


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    child = Child(script)
    yield child
    child.kill()


@pytest.mark.parametrize(
    ("order", "kind", "message"),
    [
        ({"sleep": 1}, TooSlow, r"did not finish within 0\.3 s"),
        ({"end": 3}, Died, "ended its process"),
        ({"say": "[1]"}, NoAnswer, "wrote an invalid answer"),
        ({"say": "{"}, NoAnswer, "wrote an invalid answer"),
        ({"say": "[" * 5000}, NoAnswer, "wrote an invalid answer"),
        ({"say": "x" * 3000, "then": ""}, NoAnswer, "wrote 3000 bytes and did not finish"),
    ],
)
def test_a_failed_child_reports_why_and_is_replaced(
    child: Child, order: dict[str, object], kind: type[NoAnswer], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert child.start()
    assert child.ask({"a": "ł" * 200_000}, HANG_S) == {"a": "ł" * 200_000}  # more than the buffer of a pipe
    assert not child.start()
    monkeypatch.setattr(child_module, "MAX_ANSWER_BYTES", 2000 if "then" in order else 1 << 20)
    with pytest.raises(kind, match=message) as caught:
        child.ask(order, 0.3 if "sleep" in order else HANG_S)
    assert getattr(caught.value, "returncode", 3) == 3
    assert child.start()
    assert child.ask({"b": 1}, HANG_S) == {"b": 1}
    child.kill()
    child.kill()


def test_a_child_that_does_nothing_is_given_up(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python can wait for ever for a thread that could not be started for lack of memory."""
    monkeypatch.setattr(child_module, "IDLE_LIMIT_S", 0.5)
    child.start()
    with pytest.raises(Interrupted, match=r"did nothing for 0\.5 s"):
        child.ask({"sleep": 1}, HANG_S)
    assert child.start()
    assert child.ask({"b": 1}, HANG_S) == {"b": 1}


def test_a_child_that_cannot_start_raises(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    for python in ("", "/nowhere/python"):
        monkeypatch.setattr("sys.executable", python)
        with pytest.raises(NoAnswer, match="does not start: "):
            child.start()
