"""Sizes in bytes as text, and text as bytes.

Memory is counted in powers of two: `--kv-memory 4G` is 4 GiB. Files are counted in powers of ten, as disks and package
indexes do.
"""

from __future__ import annotations

import re

from quire.errors import InvalidRequest

_MEMORY_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE | re.ASCII)


def parse_size(name: str, text: str) -> int:
    """Convert "512M", "1.5 GiB" or "4096" to bytes. `name` is the setting that the error message names."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise InvalidRequest(f"{name} = {text!r:.80} is not a size like 2G or 512M")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def memory_size(num_bytes: int, decimals: int = 1) -> str:
    """Format bytes of memory: "3.0 GiB", "132 MiB", "10 bytes"."""
    for unit, scale in _MEMORY_UNITS:
        if num_bytes >= scale:
            value = num_bytes / scale
            return f"{value:,.0f} {unit}" if value >= 100 and decimals == 1 else f"{value:,.{decimals}f} {unit}"
    return f"{num_bytes} byte{'' if num_bytes == 1 else 's'}"


def compared_sizes(first: int, second: int) -> tuple[str, str]:
    """Format two sizes of memory with enough decimals to show that they differ."""
    texts = memory_size(first), memory_size(second)
    if texts[0] == texts[1] and first != second:
        texts = memory_size(first, 3), memory_size(second, 3)
    return texts if texts[0] != texts[1] or first == second else (f"{first:,} bytes", f"{second:,} bytes")


def reported_size(num_bytes: int) -> str:
    """Format a size that a worker reported. It reports 0 for a size it could not measure."""
    return memory_size(num_bytes) if num_bytes else "unknown"


def file_size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
