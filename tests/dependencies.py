"""The packages that quire installs: a lock file with hashes, a software bill of materials, and checks of both.

`python -m tests.dependencies lock` writes requirements/core.lock from the package index that pip uses. `sbom` writes
build/sbom.json in CycloneDX. `audit` compares what is installed with the lock, verifies the files that the index offers
for this machine against the hashes, and runs pip-audit. What needs a network and has none is reported as not done.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata as metadata
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements" / "core.lock"
SBOM = ROOT / "build" / "sbom.json"
PROJECT = "quire-llm"
CORE = ("server", "native", "hub")  # the extras of `make serve` without a GPU
HEAD = """\
# The packages of `make serve` on a CPU with the hashes of their files, for Linux and macOS on x86-64 and ARM.
# Written by `make lock`. `make serve LOCKED=1` installs from it; `make audit` checks it.
"""
_PYTHONS = re.compile(r"py3|cp31[1-4]$")  # tags of interpreters; wheels for abi3 name the oldest one


def closure(extras: Iterable[str] = CORE, project: str = PROJECT) -> dict[str, metadata.Distribution]:
    """Return the installed packages that the project needs, with these extras, on this machine."""
    found: dict[str, metadata.Distribution] = {}
    todo: list[tuple[str, frozenset[str]]] = [(project, frozenset(extras))]
    done: set[tuple[str, frozenset[str]]] = set()
    while todo:
        one = todo.pop()
        if one in done:
            continue
        done.add(one)
        name, wanted = one
        found[name] = metadata.distribution(name)
        for text in found[name].requires or ():
            needed = Requirement(text)
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in wanted | {""}):
                todo.append((canonicalize_name(needed.name), frozenset(needed.extras)))
    del found[project]
    return dict(sorted(found.items()))


def num_bytes(distribution: metadata.Distribution) -> int:
    """Size of a package's files, without those that Python compiles after the installation."""
    files = [Path(str(file.locate())) for file in distribution.files or () if file.suffix != ".pyc"]
    return sum(file.stat().st_size for file in files if file.is_file())


def read_lock(path: Path = LOCK) -> dict[str, tuple[str, frozenset[str]]]:
    """Return version and hashes of each package."""
    found: dict[str, tuple[str, frozenset[str]]] = {}
    text = path.read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if line and not line.startswith("#"):
            (name, version), hashes = line.split()[0].split("=="), re.findall(r"--hash=sha256:([0-9a-f]{64})\b", line)
            found[canonicalize_name(name)] = (version, frozenset(hashes))
    return found


# The lock


def _is_usable(file_name: str) -> bool:
    """Whether a wheel is for a system and a Python that quire supports."""
    _, _, _, tags = parse_wheel_filename(file_name)
    systems = ("any", "manylinux", "macosx")
    is_here = any(tag.platform.startswith(systems) and "ppc64" not in tag.platform for tag in tags)
    return is_here and any(tag.abi == "abi3" or _PYTHONS.match(tag.interpreter) for tag in tags)


def index_hashes(name: str, version: str) -> list[str]:
    """Return the hashes of a version's wheels in the index that pip uses."""
    from pip._internal.models.index import PyPI
    from pip._internal.network.session import PipSession

    configured = _output(["config", "get", "global.index-url"]).strip()
    index = configured if configured.startswith("http") else str(PyPI.simple_url)
    session: Any = PipSession
    page = session(retries=3).get(f"{index.rstrip('/')}/{name}/", timeout=60)
    page.raise_for_status()
    found = []
    for link, digest in re.findall(r'href="([^"#]+)#sha256=([0-9a-f]{64})', page.text):
        file_name = unquote(link.rpartition("/")[2])
        if file_name.endswith(".whl") and str(parse_wheel_filename(file_name)[1]) == version and _is_usable(file_name):
            found.append(digest)
    if not found:
        raise SystemExit(f"the index has no wheel of {name}=={version}")
    return sorted(found)


def write_lock() -> int:
    lines = [HEAD]
    for name, distribution in closure().items():
        hashes = index_hashes(name, distribution.version)
        lines.append(" \\\n    ".join([f"{name}=={distribution.version}", *(f"--hash=sha256:{one}" for one in hashes)]))
        lines.append("\n")
    LOCK.parent.mkdir(exist_ok=True)
    LOCK.write_text("".join(lines))
    print(f"{LOCK.relative_to(ROOT)}: {len(read_lock())} packages")
    return 0


# The bill of materials


def bill(packages: Mapping[str, metadata.Distribution]) -> dict[str, Any]:
    """Return a bill of materials in CycloneDX 1.6."""
    project = metadata.distribution(PROJECT)
    locked = read_lock()
    components = [_component(name, one, locked.get(name)) for name, one in packages.items()]
    users = {PROJECT: project, **{_ref(name, one): one for name, one in packages.items()}}
    edges = [
        {"ref": ref, "dependsOn": sorted(_ref(name, packages[name]) for name in _needs(one) & packages.keys())}
        for ref, one in users.items()
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
            "component": {"type": "application", "name": PROJECT, "version": project.version, "bom-ref": PROJECT},
        },
        "components": components,
        "dependencies": edges,
    }


def _ref(name: str, distribution: metadata.Distribution) -> str:
    return f"pkg:pypi/{name}@{distribution.version}"


def _needs(distribution: metadata.Distribution) -> set[str]:
    return {str(canonicalize_name(Requirement(text).name)) for text in distribution.requires or ()}


def _component(
    name: str, distribution: metadata.Distribution, locked: tuple[str, frozenset[str]] | None
) -> dict[str, Any]:
    about = distribution.metadata.json
    license_name = str(about.get("license_expression") or about.get("license") or "")
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": _ref(name, distribution),
        "name": name,
        "version": distribution.version,
        "purl": _ref(name, distribution),
    }
    if license_name:
        component["licenses"] = [{"license": {"name": license_name.splitlines()[0][:100]}}]
    if locked is not None and locked[0] == distribution.version:
        hashes = [{"alg": "SHA-256", "content": one} for one in sorted(locked[1])]
        component["externalReferences"] = [{"type": "distribution", "url": _ref(name, distribution), "hashes": hashes}]
    return component


def write_sbom() -> int:
    SBOM.parent.mkdir(exist_ok=True)
    SBOM.write_text(json.dumps(bill(closure()), indent=1) + "\n")
    print(f"{SBOM.relative_to(ROOT)}: {len(closure())} packages")
    return 0


# Checks


def unlocked() -> list[str]:
    """Return the installed packages that the lock lacks or has in another version."""
    locked = read_lock()
    return [
        f"{name}=={one.version}"
        for name, one in closure().items()
        if name not in locked or locked[name][0] != one.version or not locked[name][1]
    ]


def changed_files(packages: Mapping[str, metadata.Distribution]) -> list[str]:
    """Return the installed files that differ from the hashes that their wheels came with."""
    found = []
    for distribution in packages.values():
        for file in distribution.files or ():
            path = Path(str(file.locate()))
            if file.hash is None or file.hash.mode != "sha256" or "bin" in path.parts[-2:-1]:  # pip rewrites programs
                continue
            digest = hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b""
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                found.append(str(file))
    return found


def _output(arguments: list[str]) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def check_index() -> str:
    """Let pip download the locked files for this machine with their hashes. Returns what is wrong, or nothing."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        command += ["--require-hashes", "--only-binary", ":all:", "--dest", folder, "--requirement", str(LOCK)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip()[-1000:]


def vulnerabilities() -> tuple[str, bool]:
    """Run pip-audit over the lock. Returns a report, and whether it could run and found nothing."""
    command = [sys.executable, "-m", "pip_audit", "--progress-spinner", "off", "--require-hashes", "--disable-pip"]
    done = subprocess.run([*command, "--requirement", str(LOCK)], capture_output=True, text=True, check=False)
    text = (done.stdout + done.stderr).strip()
    if "No module named pip_audit" in text:
        return "pip-audit: not run, it is not installed", False
    is_offline = "ConnectionError" in text or "Failed to" in text or "Max retries" in text
    if is_offline:
        return "pip-audit: not run, its service cannot be reached", False
    return f"pip-audit: {text[-2000:]}", done.returncode == 0


def audit() -> int:
    packages = closure()
    wrong = [*unlocked(), *(f"{file} was changed" for file in changed_files(packages))]
    print(f"{len(packages)} packages are installed as locked" if not wrong else "not as locked: " + ", ".join(wrong))
    problem = check_index()
    print(f"the index: {problem or 'all files have the locked hashes'}")
    report, is_clean = vulnerabilities()
    print(report)
    return 0 if not wrong and not problem and (is_clean or "not run" in report) else 1


def main(arguments: list[str]) -> int:
    commands: dict[str, Callable[[], int]] = {"lock": write_lock, "sbom": write_sbom, "audit": audit}
    if len(arguments) != 1 or arguments[0] not in commands:
        print(f"usage: python -m tests.dependencies {{{'|'.join(commands)}}}")
        return 2
    return commands[arguments[0]]()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
