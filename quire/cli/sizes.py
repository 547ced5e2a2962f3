"""Bytes for people. Memory is counted as options and the page count it: `--kv-memory 4G` is 4 GiB. Files are counted as
disks and package indexes do, in powers of ten."""

from __future__ import annotations


def memory_size(num_bytes: int) -> str:
    """0: nobody has said."""
    if not num_bytes:
        return "unknown"
    return _scaled(num_bytes / 2**30, "GiB") if num_bytes >= 2**30 else _scaled(num_bytes / 2**20, "MiB")


def file_size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _scaled(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
