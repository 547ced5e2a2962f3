"""Block I/O of the torch runners: the contract, and the order of copies on the GPU's streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from quire.backends.base import PendingCopy, Runner
from quire.backends.kv_memory import KVSpec, LayerKV, LayerState
from quire.backends.torch import cuda_block_io
from quire.backends.torch.cuda_block_io import CudaBlockIO, PinnedMemory
from quire.backends.torch.kv_store import KVStore
from quire.backends.torch.runner import TorchRunner
from quire.core.step import MemoryKind, MemoryRef
from quire.engine.composition import EngineConfig, make_runner
from quire.errors import InvariantViolation
from quire.weights.opening import open_checkpoint
from tests.backends.block_io_contract import BlockIOContract, all_pieces, allocate, block_io, read, wait, write
from tests.backends.torch.fused_rig import fused_runner
from tests.backends.torch.kernels.device import DEVICE
from tests.backends.torch.streams import Device
from tests.backends.torch.test_cuda import small
from tests.selection import mostly_nightly

# Padding rows compute on any memory content. The interpreter computes in numpy, which warns about it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered"),
]

FAMILIES = ("llama", "gemma3", "gemma4 with shared layers", "mistral with a window", "qwen3_5", "lfm2")
FUSED = ("qwen3_5", "gemma3", "llama")  # the interpreter is slow
SETTINGS: dict[str, Any] = {"backend": "torch", "block_size": 8, "num_blocks": 20, "max_num_seqs": 4, "threads": 1}


def open_runner(path: Path, **settings: Any) -> TorchRunner:
    checkpoint = open_checkpoint(path)
    runner = make_runner(checkpoint, EngineConfig(**{**SETTINGS, "device": "cpu", **settings}))
    checkpoint.close()
    assert isinstance(runner, TorchRunner)
    return runner


FP8 = ("gemma4 with shared layers in fp8", "qwen3_5 in fp8", "fused llama in fp8")


@pytest.fixture(scope="module", params=[*FAMILIES, *mostly_nightly((f"fused {name}" for name in FUSED), 1), *FP8])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    folder, name = tmp_path_factory.mktemp("model"), request.param.removesuffix(" in fp8")
    small(name.removeprefix("fused "), folder)
    is_fp8 = name != request.param
    if not name.startswith("fused "):
        runner: Runner = open_runner(folder, kv_cache_dtype="fp8" if is_fp8 else "auto")
    else:
        runner = fused_runner(folder, num_blocks=12, block_size=8, max_num_seqs=2, is_fp8=is_fp8)
    yield runner
    runner.close()


class TestTorch(BlockIOContract):
    bound = 1e-5  # a step of the GPU runner may use a graph, which rounds in another way


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("name", ["gemma4 with shared layers", "qwen3_5"])
def test_both_runners_have_the_same_order(name: str, is_fp8: bool, tmp_path: Path) -> None:
    """Also where layers have different shapes, or share keys."""
    small(name, tmp_path)
    fused = fused_runner(tmp_path, num_blocks=12, block_size=8, max_num_seqs=2, is_fp8=is_fp8)
    reference = open_runner(tmp_path, kv_cache_dtype="fp8" if is_fp8 else "auto")
    sizes = block_io(fused).sizes
    assert sizes == block_io(reference).sizes
    pieces = [MemoryRef(kind, 3) for kind in MemoryKind if sizes.of(kind)]
    contents = [Random(ref.kind).randbytes(sizes.of(ref.kind)) for ref in pieces]
    for runner in (fused, reference):
        write(runner, pieces, contents)
        assert read(runner, pieces) == contents
    for mine, theirs in zip(pools_of(fused), pools_of(reference), strict=True):
        assert torch.equal(mine[3].cpu().view(torch.uint8), theirs[3].view(torch.uint8))
    BlockIOContract().test_only_the_pieces_change(fused)
    assert block_io(reference).layout != block_io(fused).layout  # their rounding differs
    fused.close()
    reference.close()


def pools_of(runner: Any) -> list[torch.Tensor]:
    layers = [layer for _, pool in runner.store.all_pools() for layer in pool]
    return [*layers, *runner.store.state_pools()]


def test_layouts(tmp_path: Path) -> None:
    folders = [small("gemma3", tmp_path / "a").path, small("gemma3", tmp_path / "b", rms_norm_eps=1e-5).path]
    changes: list[tuple[Path, dict[str, Any]]] = [
        (folders[0], {}),
        (folders[1], {}),
        (folders[0], {"block_size": 16}),
        (folders[0], {"dtype": "bfloat16"}),
        (folders[0], {"kv_cache_dtype": "fp8"}),
        (folders[0], {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
        (folders[0], {"max_model_len": 20}),  # shorter than the window: the layers have no window blocks
        (folders[0], {"num_blocks": 30, "max_num_seqs": 2, "max_model_len": 100}),
    ]
    layouts = [block_io(open_runner(path, **some)).layout for path, some in changes]
    assert layouts[0] == layouts[-1]
    assert len(set(layouts)) == len(layouts) - 1
    fused = [fused_runner(folders[0], block_size=8, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    fused.append(fused_runner(folders[0], block_size=8, is_fp8=True))
    assert len({*layouts, *(block_io(runner).layout for runner in fused)}) == len(layouts) + 2


# Copies of the GPU runner

SPEC = KVSpec((LayerKV(1, 8), LayerKV(2, 16, window=16), LayerState(2, 12, 2, 4, 6), LayerKV(1, 8, shared_with=0)))
COUNTS = (40, 30, 9)
BLOCK, WINDOW, STATE = 2 * 8 * 8 * 4, 2 * 2 * 8 * 16 * 4, (2 * 12 + 2 * 4 * 6) * 4


class Stores:
    """Pools without a model. Fields are those of a runner."""

    def __init__(self) -> None:
        device = torch.device(DEVICE)
        self.store = KVStore(SPEC, COUNTS[0], 8, torch.float32, device, *COUNTS[1:])

    def io(self) -> CudaBlockIO:
        return CudaBlockIO(self.store, COUNTS, "layout", torch.get_device_module(DEVICE).Stream())


@pytest.fixture
def small_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make slots of 2 KiB, for 4 blocks, 1 window block or 4 states, and copies of at most 1,200 bytes."""
    monkeypatch.setattr(cuda_block_io, "SLOT_BYTES", 2048)
    monkeypatch.setattr(cuda_block_io, "EXPORT_BYTES", 3 * 2048)
    monkeypatch.setattr(cuda_block_io, "IMPORT_BYTES", 4 * 2048)
    monkeypatch.setattr(cuda_block_io, "COPY_BYTES", 1200)


class Copies:
    """Records the bytes of every copy between staging and host."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        original = cuda_block_io._copy

        def copy(source: torch.Tensor, target: torch.Tensor) -> None:
            self.sizes.append(len(source))
            original(source, target)

        patch.setattr(cuda_block_io, "_copy", copy)


@pytest.mark.usefixtures("small_staging")
def test_buffers_side_by_side_are_copied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    io = Stores().io()
    copies = Copies(monkeypatch)
    pieces = [MemoryRef(MemoryKind.BLOCK, index) for index in range(1, 7)]
    whole = io.allocate(8 * BLOCK)
    slots = [whole[at * BLOCK : (at + 1) * BLOCK] for at in range(8)]
    for chosen, sizes in (
        ([0, 1, 2, 3, 4, 5], [1200, 4 * BLOCK - 1200, 2 * BLOCK]),  # a slot holds four
        ([0, 1, 3, 4, 6, 5], [2 * BLOCK, 2 * BLOCK, BLOCK, BLOCK]),
        ([5, 4, 3, 2, 1, 0], [BLOCK] * 6),
    ):
        copies.sizes.clear()
        wait(io.export(pieces, [slots[at] for at in chosen]))
        assert copies.sizes == sizes
    copies.sizes.clear()
    wait(io.import_(pieces, [slot.toreadonly() for slot in slots[:6]]))
    assert copies.sizes == [1200, 4 * BLOCK - 1200, 2 * BLOCK]
    copies.sizes.clear()
    wait(io.export(pieces[:2], [io.allocate(BLOCK), io.allocate(BLOCK)]))
    wait(io.export(pieces[:2], [memoryview(bytearray(BLOCK)) for _ in range(2)]))
    assert copies.sizes == [BLOCK] * 4


def test_no_pieces_and_no_bytes() -> None:
    io = Stores().io()
    wait(io.export([], []))
    wait(io.import_([], []))
    assert len(io.allocate(0)) == 0


def test_a_piece_larger_than_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots grow to the largest piece, here a window block."""
    for name in ("SLOT_BYTES", "EXPORT_BYTES", "IMPORT_BYTES"):
        monkeypatch.setattr(cuda_block_io, name, 1024)
    io = Stores().io()
    pieces = [MemoryRef(MemoryKind.WINDOW, index) for index in range(1, 6)]
    buffers = allocate(io, pieces)
    for number, buffer in enumerate(buffers):
        buffer[:] = bytes([number]) * WINDOW
    wait(io.import_(pieces, buffers))
    targets = allocate(io, pieces)
    wait(io.export(pieces, targets))
    assert [bytes(one) for one in targets] == [bytes(one) for one in buffers]


class World:
    """Steps, exports and imports on simulated streams. `contents` is what memory holds if all runs in order."""

    def __init__(self, device: Device, stores: Stores, rng: Random) -> None:
        self.device, self.io, self.rng = device, device.io, rng
        self.pools: list[list[torch.Tensor]] = [
            stores.store.layers_of(is_window=False),
            stores.store.layers_of(is_window=True),
            stores.store.state_pools(),
        ]
        everything = zip(MemoryKind, COUNTS, strict=True)
        self.pieces = [MemoryRef(kind, index) for kind, count in everything for index in range(1, count)]
        self.contents = {ref: bytes(self.io.sizes.of(ref.kind)) for ref in self.pieces}
        self.exports: list[tuple[PendingCopy, list[memoryview], list[bytes]]] = []
        self.imports: list[tuple[PendingCopy, list[MemoryRef], list[memoryview]]] = []
        self.memory = self.io.allocate(1 << 17)

    def fill(self, ref: MemoryRef, value: int) -> None:
        for pool in self.pools[ref.kind]:
            pool[ref.index].view(-1).view(torch.uint8).fill_(value)

    def step(self, num_pieces: int) -> None:
        """Enqueue a step that overwrites pieces."""
        for ref in self.choose(num_pieces):
            value = self.rng.randrange(256)
            self.contents[ref] = bytes([value]) * len(self.contents[ref])
            self.device.steps.enqueue(lambda ref=ref, value=value: self.fill(ref, value))

    def choose(self, num_pieces: int) -> list[MemoryRef]:
        """Return pieces that are not being imported."""
        busy = {ref for _, pieces, _ in self.imports for ref in pieces}
        free = [ref for ref in self.pieces if ref not in busy]
        return self.rng.sample(free, min(num_pieces, len(free)))

    def buffers(self, pieces: list[MemoryRef]) -> list[memoryview]:
        """Return new buffers, mostly side by side."""
        found = []
        for ref in pieces:
            size = self.io.sizes.of(ref.kind)
            first = self.rng.choice((0, 0, 0, 8))
            if len(self.memory) < size + first:
                self.memory, first = self.io.allocate(1 << 17), 0
            found.append(self.memory[first : first + size])
            self.memory = self.memory[first + size :]
        return found

    def export(self, num_pieces: int) -> None:
        pieces = self.choose(num_pieces)
        buffers = self.buffers(pieces)
        self.exports.append((self.io.export(pieces, buffers), buffers, [self.contents[ref] for ref in pieces]))

    def import_(self, num_pieces: int) -> None:
        pieces = self.choose(num_pieces)
        buffers = self.buffers(pieces)
        for ref, buffer in zip(pieces, buffers, strict=True):
            buffer[:] = self.contents[ref] = self.rng.randbytes(len(buffer))
        self.imports.append((self.io.import_(pieces, buffers), pieces, buffers))

    def poll(self) -> None:
        """Check what is done. Buffers of finished imports may be overwritten, their pieces may be used."""
        for entry in [*self.exports]:
            copy, buffers, contents = entry
            if copy.is_done():
                self.exports.remove(entry)
                assert [bytes(buffer) for buffer in buffers] == contents
        for copy, pieces, buffers in [*self.imports]:
            if copy.is_done():
                self.imports = [one for one in self.imports if one[0] is not copy]
                for ref in pieces:
                    assert self.read(ref) == self.contents[ref]
                for buffer in buffers:
                    buffer[:] = bytes(len(buffer))

    def read(self, ref: MemoryRef) -> bytes:
        rows = [pool[ref.index].reshape(-1).view(torch.uint8) for pool in self.pools[ref.kind]]
        return bytes(torch.cat(rows).tolist())


@pytest.mark.skipif(DEVICE != "cpu", reason="simulates streams on a CPU")
@pytest.mark.usefixtures("small_staging")
@pytest.mark.parametrize("seed", mostly_nightly(range(12), 4))
def test_copies_on_any_order_of_the_streams(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps overwrite what is exported, and what an import will overwrite; slots are used again and again."""
    rng, stores = Random(seed), Stores()
    monkeypatch.setattr(cuda_block_io, "MAX_COPIES", rng.choice((3, 20, 512)))
    with torch.inference_mode():
        world = World(Device(stores.io, monkeypatch, rng), stores, rng)
        for _ in range(60):
            action: Callable[[int], None] = rng.choice((world.step, world.export, world.import_))
            action(rng.choice((1, 3, 12)))
            world.device.run(rng.choice((0, 0, 5, 60)))
            world.poll()
        while world.exports or world.imports:
            world.device.run(50)
            world.poll()
        world.device.drain()
        for ref in world.pieces:
            assert world.read(ref) == world.contents[ref]


@pytest.mark.skipif(DEVICE != "cpu", reason="simulates streams on a CPU")
@pytest.mark.usefixtures("small_staging")
def test_a_long_import_does_not_fill_the_queue_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_block_io, "MAX_COPIES", 10)
    device = Device(Stores().io, monkeypatch, Random(0))
    pieces = [MemoryRef(MemoryKind.WINDOW, index) for index in range(1, 30)]  # of two copies each, and four slots
    copy = device.io.import_(pieces, allocate(device.io, pieces))
    waiting = [len(device.io._waiting)]
    assert not copy.is_done()
    assert len(device.io._waiting) == waiting[0]
    while not copy.is_done():
        device.drain()
        waiting.append(len(device.io._waiting))
    assert waiting == [21, 21, 13, 5, 0]


def test_memory_is_allocated_in_any_thread() -> None:
    memory = PinnedMemory(torch.device("cpu"))
    views: list[memoryview] = []
    threads = [threading.Thread(target=lambda: views.append(memory.allocate(5000))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(views) == 8
    for number, view in enumerate(views):
        view[:] = bytes([number]) * 5000
    addresses = [torch.frombuffer(view, dtype=torch.uint8).data_ptr() for view in views]
    for number, first in enumerate(addresses):
        found = memory.find(first + 100, first + 5000)
        assert found is not None
        assert len(found) == 4900
        assert (found == number).all()
        assert memory.find(first, first + 5001) is None
        assert memory.find(first - 1, first + 10) is None
    memory.close()
    assert memory.find(addresses[0], addresses[0] + 1) is None
    assert bytes(views[3][:2]) == b"\x03\x03"


def test_a_closed_runner_copies_nothing(tmp_path: Path) -> None:
    small("llama", tmp_path)
    runner = fused_runner(tmp_path, num_blocks=8, block_size=8)
    io, pieces = block_io(runner), all_pieces(runner)[:1]
    (content,) = read(runner, pieces)
    runner.close()
    for call in (io.export, io.import_):
        with pytest.raises(InvariantViolation, match="closed"):
            call(pieces, [memoryview(bytearray(content))])
