"""The Ray cluster that quire uses: finds it, starts it on this machine, and ends it here."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # part of Ray's own installation
import ray
from ray._private.authentication.authentication_token_setup import (
    enable_token_auth_by_default,
    ensure_token_if_auth_enabled,
    maybe_enable_token_auth_if_token_available,
)
from ray._private.utils import read_ray_address

from quire.errors import InvalidRequest, QuireError

PORT = 6379  # Ray's default, which its documentation uses for other machines
PROBE_S = 5.0
END_S = 10.0
POLL_S = 0.1
ADDRESS_VARIABLE = "RAY_ADDRESS"


class DeployFailed(QuireError):
    """The application did not start."""


def connect(address: str | None, *, starts: bool = False) -> None:
    """Join a Ray cluster: at an address, or the one of this machine. `starts`: start one here if there is none.

    The one of this machine is the one that `ray start` has started last. Ray's own "auto" also joins clusters that
    belong to a program, and ends with it.
    """
    if ray.is_initialized():
        return
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Ray uses the token of this user only for clusters that it finds by itself. A cluster without a token ignores it.
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    # Without it, Ray hides all GPUs from replicas without `gpus`, and warns that this will change.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    option, found = "--address", address or ""
    if not found and os.environ.get(ADDRESS_VARIABLE):
        option, found = ADDRESS_VARIABLE, os.environ[ADDRESS_VARIABLE]
    if found:
        _check(option, found)
    else:
        option = "the Ray cluster of this machine,"
        found = _address_here() or ""
        if not found:
            if not starts:
                raise InvalidRequest("no Ray cluster runs on this machine; --address names one elsewhere")
            found = _start_ray()
    try:
        ray.init(address=found, log_to_driver=False, logging_level=logging.ERROR, namespace="serve")
    except (ConnectionError, RuntimeError) as error:
        text = f"{option} {found!r}: Ray could not join the cluster: {first_line(error)}"
        raise InvalidRequest(f"{text}; if it asks for a token, ~/.ray/auth_token must be that of its head") from None


def _check(name: str, address: str) -> None:
    """Ray tries for many minutes to reach a cluster that does not exist."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or "/" in address:
        raise InvalidRequest(f"{name} {address!r} is not HOST:PORT, such as 10.0.0.1:{PORT}")
    if (problem := _problem(address)) is not None:
        raise InvalidRequest(f"{name} {address!r}: there is no Ray cluster: {problem}")


def _problem(address: str) -> str | None:
    """Why nothing answers at an address; None: something does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S).close()
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def _address_here() -> str | None:
    """The cluster of this machine. Ray writes its address to a file, which stays if the machine is switched off."""
    address = read_ray_address()
    return None if not address or _problem(address) else address


def is_here() -> bool:
    """Whether a Ray cluster runs on this machine that `connect` would join."""
    return bool(os.environ.get(ADDRESS_VARIABLE)) or _address_here() is not None


def _start_ray() -> str:
    """Start Ray on this machine, so that it stays after this process. Returns its address.

    Ray listens on all interfaces, and runs what it is sent: a cluster that quire starts asks for the user's token.
    """
    _make_token()
    with socket.socket() as probe:
        try:
            probe.bind(("", PORT))
        except OSError:  # something else listens there
            port = 0
        else:
            port = PORT
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", f"--port={port}"]
    command += ["--disable-usage-stats", "--include-dashboard=false"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:  # Ray's own command is not beside Python
        raise DeployFailed(f"Ray could not be started: {error}") from None
    if done.returncode:
        raise DeployFailed(f"Ray could not be started: {first_line(done.stderr or done.stdout)}")
    address: str | None = read_ray_address()
    if not address:
        raise DeployFailed("Ray was started, but has not written its address")
    return address


def _make_token() -> None:
    """Create the token of this user if there is none, unless the environment says that there should be none."""
    if not enable_token_auth_by_default():
        return
    before = os.umask(0o077)
    try:
        ensure_token_if_auth_enabled(create_token_if_missing=True)
    finally:
        os.umask(before)
    with contextlib.suppress(OSError):  # Ray itself writes it so that every user can read it
        (Path.home() / ".ray/auth_token").chmod(0o600)


def stop_ray() -> None:
    """End the connected cluster on this machine. `ray stop` would end all clusters of the machine."""
    address = ray.get_runtime_context().gcs_address
    sessions = {found[0] for node in ray.nodes() if (found := re.findall(r"session_[^/]+", node["RayletSocketName"]))}
    ray.shutdown()
    ending = [one for one in psutil.process_iter(["cmdline"]) if _belongs(one.info["cmdline"] or [], sessions, address)]
    for leader in tuple(ending):
        with contextlib.suppress(psutil.Error):  # here and below: it has ended, or belongs to someone else
            ending += leader.children(recursive=True)
    _send(ending, psutil.Process.terminate)
    began = time.monotonic()
    while (left := [one for one in ending if _runs(one)]) and time.monotonic() - began < END_S:
        time.sleep(POLL_S)
    _send(left, psutil.Process.kill)


def _belongs(command: list[str], sessions: set[str], address: str) -> bool:
    is_ray = any("ray" in Path(word).parts or word.startswith("ray.") for word in command[:4])
    return is_ray and any(_names(word, one) for word in command for one in (address, *sessions))


def _names(word: str, name: str) -> bool:
    """Whether a word of a command line has this address or session, and not one that starts or ends like it."""
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", word) is not None


def _runs(process: Any) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _send(processes: Iterable[Any], method: Any) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            method(process)


def first_line(text: object) -> str:
    return str(text).strip().partition("\n")[0]
