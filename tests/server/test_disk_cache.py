"""Levels below the KV cache as clients and operators see them: a real server, restarted on the same folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.runs import quire
from tests.engine.levels.contents import all_files
from tests.server.rig import Server, serving
from tests.waiting import eventually

# A step takes so long that a load always pays, however slow this machine reads files when the server measures them.
SLOW_FAKE = ("--backend", "fake", "--device", "300ms")
LONG = "The quick brown fox jumps over the lazy dog. " * 8
QUESTION = [{"role": "user", "content": LONG}]


def ask(server: Server, text: str = LONG, *, key: str | None = None, **fields: Any) -> Any:
    """Ask for one token. Returns the answer."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0, "cache": True, **fields}
    answer = server.post("/v1/chat/completions", body, headers=headers)
    assert answer.status == 200, answer.body
    return answer.json


def cached(answer: Any) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert found == answer["cache"]["matched_tokens"]
    return found


def levels(server: Server, model: str | None = None) -> Any:
    return (server.stats() if model is None else server.stats_of(model))["tiers"]


def wait_saved(server: Server, num_pieces: int, model: str | None = None) -> None:
    """Wait until the server, which is idle, has saved this much. At its end, it saves for a limited time only."""
    eventually(lambda: levels(server, model)[-1]["num_pieces"] >= num_pieces, f"{num_pieces} pieces are saved")


def banner(server: Server) -> str:
    return next(line for line in server.stdout if "cache up to" in line)


def metrics(server: Server) -> dict[str, float]:
    """Metrics of lower levels, by name and storage."""
    pattern = r'^quire:(lower_cache_\w+)\{.*storage="(\w+)".*\} (\S+)$'
    found = re.findall(pattern, server.get("/metrics").body.decode(), re.MULTILINE)
    return {f"{name} {storage}": float(value) for name, storage, value in found}


def test_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    options = (str(tiny_model), *SLOW_FAKE, "--disk-cache", "10M", "--cache-dir", str(folder))
    with serving(*options) as server:
        assert re.search(r"disk cache up to 10\.0 MiB; faster than computing", banner(server))
        assert f"             in {folder}\n" in server.stdout
        first = ask(server)
        assert (cached(first), first["cache"]["source"], first["cache"]["loaded_tokens"]) == (0, None, 0)
        again = ask(server)
        assert (cached(again), again["cache"]["source"], again["cache"]["loaded_tokens"]) == (156, "device", 0)
        wait_saved(server, 5)
        (disk,) = levels(server)
        assert (disk["tier"], disk["num_pieces"], disk["num_saves"], disk["num_loads"]) == ("disk", 5, 5, 0)
        assert (disk["num_bytes"], disk["max_bytes"], disk["num_failed_saves"]) == (5 * 32 * 8, 10 << 20, 0)
        assert metrics(server) == {
            "lower_cache_bytes disk": 1280,
            "lower_cache_max_bytes disk": 10 << 20,
            "lower_cache_pieces disk": 5,
            "lower_cache_loads_total disk": 0,
            "lower_cache_loaded_tokens_total disk": 0,
            "lower_cache_load_failures_total disk": 0,
            "lower_cache_saves_total disk": 5,
            "lower_cache_save_failures_total disk": 0,
            "lower_cache_evictions_total disk": 0,
        } | {name: value for name, value in metrics(server).items() if name.endswith("_created disk")}
        assert server.stop() == 0
    assert len(all_files(folder)) == 5
    with serving(*options) as server:
        assert "disk cache up to 10.0 MiB, 1.2 KiB found; faster than" in banner(server)
        explained = server.post("/v1/cache/explain", {"messages": QUESTION}).json
        assert (explained["source"], explained["loaded_tokens"], explained["reason"]) == ("disk", 156, "complete")
        assert explained["message"].startswith(
            "156 of 157 prompt tokens come from the cache, 156 of them loaded from disk"
        )
        assert levels(server)[0]["num_loads"] == 0  # explaining loads nothing
        loaded = ask(server)
        assert loaded["choices"] == first["choices"]
        assert (cached(loaded), loaded["cache"]["source"], loaded["cache"]["loaded_tokens"]) == (156, "disk", 156)
        assert loaded["cache"] == explained
        server.wait_for("cached_tokens=156 completion_tokens=1 cache=complete cache_source=disk ")
        assert ask(server)["cache"]["source"] == "device"
        (disk,) = levels(server)
        assert (disk["num_loads"], disk["num_loaded_tokens"], disk["num_loaded_bytes"]) == (1, 156, 1280)
        assert metrics(server)["lower_cache_loaded_tokens_total disk"] == 156
        assert server.post("/v1/cache/clear").json == {"cleared": True}
        assert all_files(folder) == []
        assert levels(server)[0]["num_pieces"] == 0
        assert cached(ask(server)) == 0


def test_keys_share_nothing_on_disk(tiny_model: Path, tmp_path: Path) -> None:
    """Also if the order of the keys changes between two starts: a number is not an identity."""
    folder = tmp_path / "kv"
    options = (str(tiny_model), *SLOW_FAKE, "--disk-cache", "10M", "--cache-dir", str(folder))
    alice, bob, carol = "sk-alice-0001", "sk-bob-000002", "sk-carol-0003"
    with serving(*options, "--api-key", alice, "--api-key", bob, key=alice) as server:
        assert cached(ask(server, key=alice)) == 0
        assert cached(ask(server, key=bob, cache_salt="x")) == 0
        wait_saved(server, 10)
        assert server.post("/v1/cache/clear").status == 403
        server.stop()
    with serving(*options, "--api-key", bob, "--api-key", carol, "--api-key", alice, key=alice) as server:
        for key in (bob, carol):
            answer = ask(server, key=key)
            assert (cached(answer), answer["cache"]["reason"], answer["cache"]["source"]) == (0, "not_found", None)
            explained = server.post(
                "/v1/cache/explain", {"messages": QUESTION}, headers={"authorization": f"Bearer {key}"}
            )
            assert explained.json["loaded_tokens"] == 0
        assert ask(server, key=bob, cache_salt="x")["cache"]["source"] == "disk"
        answer = ask(server, key=alice)
        assert (cached(answer), answer["cache"]["source"]) == (156, "disk")


def test_content_that_is_evicted_goes_to_host_memory(tiny_model: Path) -> None:
    with serving(str(tiny_model), *SLOW_FAKE, "--num-blocks", "20", "--host-cache", "64K") as server:
        assert "host cache up to 64.0 KiB; faster than computing" in banner(server)
        for text in (LONG, LONG.upper(), LONG.replace("o", "0"), LONG[::-1]):
            assert ask(server, text)["cache"]["source"] in (None, "device")
        answer = ask(server)
        assert answer["cache"]["source"] == "host"
        assert cached(answer) == 156
        assert answer["cache"]["message"].startswith("156 of 157 prompt tokens come from the cache, ")
        assert "of them loaded from host memory" in answer["cache"]["message"]
        (host,) = levels(server)
        assert (host["tier"], host["max_bytes"], host["num_loads"]) == ("host", 1 << 16, 1)
        assert host["num_saves"] == host["num_pieces"] > 5
        assert metrics(server)["lower_cache_loads_total host"] == 1


# Errors


def test_invalid_values_are_refused_before_a_model_is_loaded(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    wrong = {
        ("--disk-cache", "abc"): "--disk-cache = 'abc' is not a size like 2G or 512M",
        ("--disk-cache", "-1"): "--disk-cache = '-1' is not a size like 2G or 512M",
        ("--host-cache", "1X"): "--host-cache = '1X' is not a size like 2G or 512M",
        ("--cache-dir", "kv"): "--cache-dir = 'kv' has no effect: set --disk-cache to a size too",
        ("--disk-cache", "0", "--cache-dir", "kv"): "--cache-dir = 'kv' has no effect: --disk-cache is 0, which turns",
        ("--disk-cache", "1G", "--cache-dir", ""): "--cache-dir = '' is not the path of a folder",
        ("--disk-cache", "1G", "--cache-dir", "file"): "--cache-dir = 'file': the cache folder file is not a folder",
        ("--disk-cache", "1G", "--cache-dir", "file/a"): "--cache-dir = 'file/a': the cache folder file/a cannot be",
        ("--disk-cache", "1G", "--cache-dir", "/proc/a"): "--cache-dir = '/proc/a': the cache folder /proc/a cannot be",
        ("--disk-cache", "1G", "--cache-dir", "open"): "--cache-dir = 'open': every user of this machine can write to",
        ("--disk-cache", "1K", "--no-enable-prefix-caching"): "--disk-cache = 1.0 KiB needs prefix caching",
        ("--host-cache", "1K", "--no-enable-prefix-caching"): "--host-cache = 1.0 KiB needs prefix caching",
    }  # fmt: skip
    for options, message in wrong.items():
        outcome = quire("serve", str(tiny_model), "--backend", "fake", *options, folder=tmp_path)
        assert (outcome.returncode, outcome.stdout) == (2, "")
        assert outcome.stderr.startswith(f"quire: {message}"), (outcome.stderr, message)
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--backend", "native", "--host-cache", "1G"),
            "--host-cache = 1.0 GiB: the KV cache of this backend is in host memory already; --kv-memory sets its size",
        ),
        (
            ("--backend", "fake", "--disk-cache", "300"),
            "--disk-cache = 300 bytes is too small for this model: it needs at least 512 bytes",
        ),
    ],
)
def test_values_that_do_not_fit_the_model_are_refused(
    tiny_model: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    outcome = quire("serve", str(tiny_model), "--port", "0", *options, env={"QUIRE_CACHE": str(tmp_path)})
    assert outcome.returncode == 2
    assert outcome.stderr.splitlines()[-1] == f"quire: {message}"
    assert outcome.stderr.count(message.partition(" = ")[2].partition(":")[0]) == 2  # here, and once in the log


def test_zero_is_off(tiny_model: Path, tmp_path: Path) -> None:
    options = ("--backend", "fake", "--disk-cache", "0", "--host-cache", "0")
    with serving(str(tiny_model), *options, env={"QUIRE_CACHE": str(tmp_path)}) as server:
        assert server.stats()["tiers"] == []
        assert not any("cache up to" in line for line in server.stdout)
        assert metrics(server) == {}
    assert not (tmp_path / "kv").exists()
