"""Hides API keys in this process's command line, which every user of the machine can read (`ps`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

SECRET_OPTIONS = ("--api-key", "--admin-api-key")
_ARG_START, _ARG_END = 45, 46  # fields of /proc/self/stat after the name of the program: where the arguments are


def hide_keys(arguments: Sequence[str] = sys.argv) -> None:
    """Overwrite keys in the memory that the kernel shows as the command line. `sys.argv` keeps them.

    Only Linux has this file; elsewhere, keys belong into the environment or a file. The keys are visible until this
    runs.
    """
    secrets = {secret.encode(errors="surrogateescape") for secret in _secrets(arguments)} - {b""}
    if not secrets:
        return
    try:
        line = Path("/proc/self/cmdline").read_bytes()
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    if not start or end - start != len(line):  # the kernel does not tell, or another program has changed it
        return
    import ctypes  # only with a key: `quire --help` does not need it

    at = 0
    for argument in line.split(b"\0"):
        value = argument.partition(b"=")[2] if argument.startswith(b"--") else argument
        if value in secrets:
            ctypes.memset(start + at + len(argument) - len(value), ord("*"), len(value))
        at += len(argument) + 1


def _secrets(arguments: Sequence[str]) -> Iterator[str]:
    for option, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = option.partition("=")
        if name in SECRET_OPTIONS:
            yield value if equals else following
