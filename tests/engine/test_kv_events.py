"""KV events: their bytes are vLLM's, levels and salts are kept apart, settings are checked. No sockets."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from quire.core.cache import hash_block_tokens, pack_tokens, root_key
from quire.core.events import Cleared, Published, Removed
from quire.core.values import Level
from quire.engine.worker.kv_events import CacheEvents, Endpoint, KvEventsConfig, parse_endpoint, start_payload
from quire.errors import InvalidRequest, MissingExtra
from quire.server.config import ModelConfig, ServeConfig
from tests.engine import vllm_events as vllm
from tests.engine.vllm_events import Router

SIZE = 4
ROOT, SALTED = root_key(b"secret", ""), root_key(b"secret", "tenant")
LOCAL = "tcp://127.0.0.1:5557"


def chain(length: int, *, root: bytes = ROOT, first: int = 0) -> list[Published]:
    """Blocks of consecutive tokens, each after the one before it."""
    found: list[Published] = []
    for index in range(length):
        tokens = pack_tokens(range(first + index * SIZE, first + (index + 1) * SIZE))
        parent = found[-1].key if found else root
        found.append(Published(hash_block_tokens(parent, tokens), parent, tokens))
    return found


def name(block: Published) -> int:
    return int.from_bytes(block.key[:8], "big")


def started() -> CacheEvents:
    """A queue whose first batch, which begins with a clear, was sent."""
    queue = CacheEvents(ROOT, SIZE)
    queue.take(Cleared())
    assert queue.pop(1.0) == vllm.encode(1.0, vllm.AllBlocksCleared(), vllm.AllBlocksCleared())
    return queue


def test_stored_blocks_are_encoded_like_vllms() -> None:
    queue, blocks = started(), chain(3)
    for block in blocks:
        queue.take(block)
    names = [name(block) for block in blocks]
    expected = vllm.BlockStored([*names], None, [*range(12)], SIZE, None, "GPU", None, extra_keys=[None] * 3)
    assert queue.pop(12.5) == vllm.encode(12.5, expected)
    assert queue.pop(13.0) is None
    fourth = chain(4)[3]
    queue.take(fourth)
    expected = vllm.BlockStored([name(fourth)], names[2], [12, 13, 14, 15], SIZE, None, "GPU", None, extra_keys=[None])
    assert queue.pop(14.0) == vllm.encode(14.0, expected)


def test_the_bytes_on_the_wire() -> None:
    """Pinned once as bytes: the reimplementation of vLLM's encoder in the tests could change with the code."""
    queue, (block,) = started(), chain(1)
    queue.take(block)
    payload = queue.pop(2.0)
    assert payload is not None
    assert payload == (
        b"\x93\xcb\x40\x00\x00\x00\x00\x00\x00\x00\x91\x89"
        b"\xa4type\xabBlockStored\xacblock_hashes\x91\xcf" + block.key[:8] + b"\xb1parent_block_hash\xc0"
        b"\xa9token_ids\x94\x00\x01\x02\x03\xaablock_size\x04\xa7lora_id\xc0\xa6medium\xa3GPU\xa9lora_name\xc0"
        b"\xaaextra_keys\x91\xc0\x00"
    )
    assert start_payload(2.0) == b"\x93\xcb\x40\x00\x00\x00\x00\x00\x00\x00\x91\x81\xa4type\xb0AllBlocksCleared\x00"


def test_removals_and_clears_are_encoded_like_vllms() -> None:
    queue, blocks = started(), chain(3)
    for block in blocks:
        queue.take(block)
    queue.pop(1.0)
    queue.take(Removed((blocks[2].key, blocks[1].key)))
    queue.take(Removed((blocks[0].key,)))
    expected = vllm.BlockRemoved([name(block) for block in reversed(blocks)], "GPU")
    assert queue.pop(2.0) == vllm.encode(2.0, expected)
    queue.take(blocks[0])
    queue.take(Cleared())
    assert queue.pop(3.0) == vllm.encode(3.0, vllm.AllBlocksCleared())
    queue.take(blocks[0])  # it can be announced again
    assert queue.pop(4.0) is not None


def test_the_first_batch_clears_what_a_router_knows_of_an_earlier_worker() -> None:
    queue = CacheEvents(ROOT, SIZE)
    assert queue.pop(1.0) is None
    queue.take(chain(1)[0])
    first = vllm.decode(queue.pop(1.0) or b"")
    assert [type(event).__name__ for event in first.events] == ["AllBlocksCleared", "BlockStored"]
    queue.take(chain(2)[1])
    assert len(vllm.decode(queue.pop(1.0) or b"").events) == 1


def test_each_tier_announces_its_own_content() -> None:
    queue, (first, second, third), router = started(), chain(3), Router(SIZE)

    def media() -> dict[str, list[int]]:
        if (payload := queue.pop(1.0)) is not None:
            router.take(payload)
        return {medium: [*known] for medium, known in router.media.items() if known}

    queue.take(first)
    queue.stored(Level.HOST, *first)
    queue.stored(Level.HOST, *second)  # only there, after content of another level
    queue.stored(Level.DISK, *third)
    names = [name(block) for block in (first, second, third)]
    assert media() == {"GPU": names[:1], "CPU": names[:2], "STORAGE": names[2:]}
    queue.stored(Level.HOST, *second)  # again: no event
    queue.removed(Level.DISK, [second.key])  # never announced there
    assert queue.pop(1.0) is None
    queue.removed(Level.DEVICE, [first.key])
    assert media() == {"CPU": names[:2], "STORAGE": names[2:]}
    queue.take(first)
    queue.take(Cleared())  # the device level alone: AllBlocksCleared would clear the others as well
    assert media() == {"CPU": names[:2], "STORAGE": names[2:]}
    queue.removed(Level.HOST, [second.key, first.key])
    queue.removed(Level.DISK, [third.key])
    assert media() == {}
    assert queue._levels == {}


def test_no_tier_announces_salted_orphaned_or_partial_content() -> None:
    queue = started()
    for level in Level:
        for block in chain(3, root=SALTED):
            queue.stored(level, *block)
        queue.stored(level, *chain(2)[1])  # its parent is not announced
        tail = pack_tokens(range(SIZE - 1))
        queue.stored(level, hash_block_tokens(ROOT, tail), ROOT, tail)
        queue.removed(level, [block.key for block in chain(3, root=SALTED)])
    assert queue.pop(1.0) is None
    assert queue._levels == {}


# Settings


@pytest.mark.parametrize(
    ("text", "endpoint", "is_local"),
    [
        ("tcp://127.0.0.1:5557", Endpoint("127.0.0.1", 5557), True),
        ("tcp://localhost:0", Endpoint("127.0.0.1", 0), True),
        ("tcp://[::1]:5557", Endpoint("::1", 5557), True),
        ("tcp://0.0.0.0:65535", Endpoint("0.0.0.0", 65535), False),
        ("tcp://10.1.2.3:80", Endpoint("10.1.2.3", 80), False),
        ("tcp://[::]:80", Endpoint("::", 80), False),
    ],
)
def test_endpoints(text: str, endpoint: Endpoint, is_local: bool) -> None:
    assert parse_endpoint("kv_events", text) == endpoint
    assert endpoint.is_local is is_local
    assert parse_endpoint("kv_events", str(endpoint)) == endpoint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not tcp://HOST:PORT"),
        ("5557", "is not tcp://HOST:PORT"),
        ("127.0.0.1:5557", "is not tcp://HOST:PORT"),
        ("ipc:///tmp/events", "is not tcp://HOST:PORT"),
        ("tcp://127.0.0.1", "is not tcp://HOST:PORT"),
        ("tcp://127.0.0.1:", "is not tcp://HOST:PORT"),
        ("tcp://127.0.0.1:65536", "with a port from 0 to 65535"),
        ("tcp://127.0.0.1:-1", "with a port from 0 to 65535"),
        ("tcp://127.0.0.1:٣", "with a port from 0 to 65535"),
        ("tcp://127.0.0.1:5557/x", "with a port from 0 to 65535"),
        ("tcp://*:5557", r"every network of this machine: give the address to listen on \(0.0.0.0: all of them\)"),
        ("tcp://:5557", "'' is neither an IP address nor localhost"),
        ("tcp://router.example:5557", "'router.example' is neither an IP address nor localhost"),
        ("tcp://eth0;127.0.0.1:5557", "is neither an IP address nor localhost"),
    ],
)
def test_invalid_endpoints_are_refused_by_name_and_value(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        parse_endpoint("kv_events", text)
    assert str(refused.value).startswith(f"kv_events = {text!r}")


def config(*names: str, **settings: Any) -> ServeConfig:
    models = tuple(ModelConfig(Path(name), (name,)) for name in names or ("one",))
    return ServeConfig(models=models, **settings)


def test_each_model_has_two_ports_and_a_topic() -> None:
    given = config("one", "two", "org/three", kv_events=LOCAL, kv_events_replay="tcp://127.0.0.1:5558")
    assert [given.kv_events_of(index) for index in range(3)] == [
        KvEventsConfig("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558", "kv@127.0.0.1:8000@one"),
        KvEventsConfig("tcp://127.0.0.1:5559", "tcp://127.0.0.1:5560", "kv@127.0.0.1:8000@two"),
        KvEventsConfig("tcp://127.0.0.1:5561", "tcp://127.0.0.1:5562", "kv@127.0.0.1:8000@org/three"),
    ]
    plain = config("one", "two", kv_events="tcp://127.0.0.1:0", kv_events_topic="kv@pod-7@{model}")
    assert plain.kv_events_of(1) == KvEventsConfig("tcp://127.0.0.1:0", None, "kv@pod-7@two")
    assert config("one").kv_events_of(0) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_events_replay": LOCAL}, "kv_events_replay = 'tcp://127.0.0.1:5557' needs --kv-events"),
        ({"kv_events_topic": "kv"}, "kv_events_topic = 'kv' needs --kv-events"),
        (
            {"kv_events": LOCAL, "kv_events_replay": LOCAL},
            "port 5557 is needed for kv_events of one and for kv_events_rep",
        ),
        (
            {"kv_events": LOCAL, "kv_events_replay": "tcp://127.0.0.1:5559"},
            "port 5559 is needed for kv_events_replay of one and for kv_events of two",
        ),
        ({"kv_events": "tcp://127.0.0.1:65534"}, "kv_events of two needs port 65536, above 65535"),
        ({"kv_events": LOCAL, "kv_events_topic": "a\n"}, "is not at most 256 printable characters"),
        ({"kv_events": "tcp://*:1"}, r"kv_events = 'tcp://\*:1' would send"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        config("one", "two", **settings)


def test_without_pyzmq_the_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(
        MissingExtra, match=r"--kv-events needs pyzmq, which is not installed: \S+ -m pip install pyzmq"
    ):
        config(kv_events=LOCAL)
    config()
