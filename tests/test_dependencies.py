"""The lock file and the bill of materials describe what is installed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests import dependencies
from tests.dependencies import LOCK, ROOT, bill, changed_files, closure, read_lock, unlocked


def test_every_package_of_the_core_is_locked_with_hashes() -> None:
    """If this fails, run `make lock`."""
    assert unlocked() == []
    assert all(hashes for _, hashes in read_lock().values())


def test_the_core_has_few_packages_and_no_cuda() -> None:
    packages = closure()
    assert len(packages) <= 45
    assert not [name for name in packages if re.search(r"nvidia|cuda|cudnn|cublas|triton|torch|cupy", name)]


def test_the_lock_has_the_versions_of_the_constraints() -> None:
    lines = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    pinned = {str(canonicalize_name(name)): version for name, version in lines}
    assert {name: version for name, (version, _) in read_lock().items()} == {name: pinned[name] for name in read_lock()}


def test_the_lock_names_no_host() -> None:
    assert "://" not in LOCK.read_text()


def test_other_versions_and_missing_hashes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = LOCK.read_text()
    version = read_lock()["starlette"][0]
    other = tmp_path / "core.lock"
    other.write_text(text.replace(f"starlette=={version}", "starlette==0.1"))
    monkeypatch.setattr(dependencies, "read_lock", lambda: read_lock(other))
    assert unlocked() == [f"starlette=={version}"]


def test_a_changed_file_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"typer": closure(())["typer"]}
    assert changed_files(packages) == []
    monkeypatch.setattr(Path, "read_bytes", lambda _: b"other")
    assert changed_files(packages)


def test_the_bill_of_materials() -> None:
    packages = closure()
    found = json.loads(json.dumps(bill(packages)))
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    assert [one["name"] for one in found["components"]] == list(packages)
    refs = {one["bom-ref"] for one in found["components"]} | {"quire-llm"}
    assert {one["ref"] for one in found["dependencies"]} == refs
    assert all(set(one["dependsOn"]) <= refs for one in found["dependencies"])
    assert all(one["externalReferences"][0]["hashes"] for one in found["components"])
