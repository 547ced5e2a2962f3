"""The files in deploy/: the image's steps and command, the compose file and the systemd unit.

No container engine is needed: each instruction is checked against the repository, and the command that the image runs
is started here with the image's environment.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.server.rig import serving

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions with their arguments, continuation lines joined, comments left out."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())]


def arguments(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def image_environment() -> dict[str, str]:
    return dict(entry.split("=", 1) for line in arguments("ENV") for entry in shlex.split(line))


def test_copied_files_exist_and_suffice_to_build_a_wheel() -> None:
    copied = [shlex.split(rest) for rest in arguments("COPY")]
    sources = {source for parts in copied if not parts[0].startswith("--from") for source in parts[:-1]}
    assert all((ROOT / source).exists() for source in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = {"pyproject.toml", "CMakeLists.txt", "quire", project["project"]["readme"]}
    assert needed | set(project["project"]["license-files"]) <= sources


def test_the_image_installs_extras_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (install,) = (rest for rest in arguments("RUN") if rest.startswith("pip install"))
    found = re.search(r"\[([\w,$]+)\]", install)
    assert found is not None
    for backend in ("native", "torch"):
        names = found[1].replace("$BACKEND", backend).split(",")
        assert set(names) <= set(project["optional-dependencies"])


def test_the_command_of_the_image_serves_and_is_healthy(tmp_path: Path, tiny_model: Path) -> None:
    """The entry point with the image's environment, but for the port and the folder of the cache."""
    command = json.loads(arguments("ENTRYPOINT")[0]) + json.loads(arguments("CMD")[0])
    assert command == ["quire", "serve"]
    environment = image_environment()
    assert environment["QUIRE_HOST"] == "0.0.0.0"
    environment |= {"QUIRE_API_KEY": "a-secret-of-the-test", "QUIRE_CACHE": str(tmp_path)}
    del environment["QUIRE_PORT"]
    with serving(str(tiny_model), "--backend", "fake", env=environment) as server:
        (check,) = arguments("HEALTHCHECK")
        code = json.loads(check[check.index("[") :])[2].replace("127.0.0.1:8000", server.url.removeprefix("http://"))
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        assert server.get("/v1/models").status == 401
        assert server.get("/v1/models", headers={"authorization": "Bearer a-secret-of-the-test"}).status == 200


def test_without_a_key_the_image_refuses_to_start(tmp_path: Path, tiny_model: Path) -> None:
    environment = {**os.environ, **image_environment(), "QUIRE_CACHE": str(tmp_path)}
    environment.pop("QUIRE_API_KEY", None)
    command = [sys.executable, "-m", "quire", "serve", str(tiny_model), "--backend", "fake"]
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert outcome.returncode != 0
    assert "API key" in outcome.stderr


def test_compose_agrees_with_the_image() -> None:
    compose: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    service = compose["services"]["quire"]
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    assert set(service["build"]["args"]) <= {rest.partition("=")[0] for rest in arguments("ARG")}
    (volume,) = service["volumes"]
    name, _, place = volume.partition(":")
    assert name in compose["volumes"]
    assert place == arguments("VOLUME")[0] == image_environment()["QUIRE_CACHE"]
    assert service["ports"][0].endswith(":" + arguments("EXPOSE")[0])


def test_the_example_config_is_valid(tmp_path: Path, tiny_model: Path) -> None:
    """The file of /etc/quire, but for the model and the port, starts a server."""
    values = yaml.safe_load((DEPLOY / "quire.yaml").read_text(encoding="utf-8"))
    values |= {"models": [str(tiny_model)], "backend": "fake"}
    del values["port"]
    path = tmp_path / "quire.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    with serving("--config", str(path)) as server:
        assert server.get("/health").status == 200


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "quire.service").read_text(encoding="utf-8")
    assert "/opt/quire/bin/quire serve --config /etc/quire/quire.yaml" in text
    unit = tmp_path / "quire.service"
    unit.write_text(text.replace("/opt/quire/bin/quire", sys.executable), encoding="utf-8")
    outcome = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False, timeout=120
    )
    assert "quire.service" not in outcome.stderr, outcome.stderr
