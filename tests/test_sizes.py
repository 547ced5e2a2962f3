"""Sizes as text and as bytes."""

from __future__ import annotations

from typing import Any

import pytest

from quire.engine.composition import EngineConfig
from quire.errors import InvalidRequest
from quire.sizes import compared_sizes, file_size, memory_size, parse_size, reported_size

GIB = 1 << 30


def test_text_is_parsed_in_powers_of_two() -> None:
    sizes = {"512M": 512 << 20, "2G": 2 << 30, "1.5 GiB": 3 << 29, "1t": 1 << 40, "4096": 4096, "3kb": 3072}
    assert {text: parse_size("--x", text) for text in sizes} == sizes
    for text in ("", "G", "-1G", "1e3", "2GG", "٣G"):
        with pytest.raises(InvalidRequest, match="--x = "):
            parse_size("--x", text)


def test_memory_is_shown_in_binary_units_and_files_in_decimal_units() -> None:
    shown = {
        0: "0 bytes",
        10: "10 bytes",
        2048: "2.0 KiB",
        132 << 20: "132 MiB",
        3 * GIB: "3.0 GiB",
        4096 * GIB: "4,096 GiB",
    }
    assert {num_bytes: memory_size(num_bytes) for num_bytes in shown} == shown
    assert (reported_size(0), reported_size(GIB)) == ("unknown", "1.0 GiB")
    assert (file_size(105_400_000), file_size(2_500_000_000)) == ("105.4 MB", "2.5 GB")


def test_two_different_sizes_never_read_the_same() -> None:
    assert compared_sizes(8 * GIB, 4 * GIB) == ("8.0 GiB", "4.0 GiB")
    assert compared_sizes(4 * GIB, 4 * GIB - (20 << 20)) == ("4.000 GiB", "3.980 GiB")
    assert compared_sizes(4 * GIB, 4 * GIB + 1) == ("4,294,967,296 bytes", "4,294,967,297 bytes")


def test_engine_config_takes_kv_memory_as_text() -> None:
    given: dict[str, Any] = {"kv_memory": "512M"}
    assert EngineConfig(**given) == EngineConfig(kv_memory=512 << 20)
    for text, message in (("lots", "kv_memory = 'lots' is not a size like 2G or 512M"), ("0", "kv_memory = 0 is not")):
        given["kv_memory"] = text
        with pytest.raises(InvalidRequest, match=message):
            EngineConfig(**given)
