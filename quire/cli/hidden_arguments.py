"""Hides API keys in the command line of this process, which every user of the machine can read (`ps`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

SECRET_OPTIONS = ("--api-key", "--admin-api-key")
_ARG_START, _ARG_END = 45, 46  # fields of /proc/self/stat, counted after the program's name: addresses of the arguments


def hide_keys(arguments: Sequence[str] = sys.argv) -> None:
    """Overwrite keys in the memory that the kernel shows as the command line. `sys.argv` keeps them.

    Until this runs, the keys are visible. It works only on Linux, which has `/proc`; on other systems, pass keys in
    the environment or in a file.
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
    if not start or end - start != len(line):  # the kernel hides the addresses, or the command line was changed
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
