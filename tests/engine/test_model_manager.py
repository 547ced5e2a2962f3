"""The rules of the model manager, with fake models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest

from quire.engine.model_manager import ManagedModel, ModelManager, ModelState, Needs
from quire.errors import LoadFailed, ModelFileError, ModelTooLarge
from tests.waiting import VirtualLoop

pytestmark = pytest.mark.anyio

UNLOADED, LOADING, READY = ModelState.UNLOADED, ModelState.LOADING, ModelState.READY
UNLOADING, FAILED = ModelState.UNLOADING, ModelState.FAILED


class FakeModel(ManagedModel):
    """A model whose load waits for `gate`, if set."""

    weight_bytes: int = 30
    kv_bytes: int | None = 10
    context_bytes: int = 10
    truth_bytes: int | None = None  # the actual size of the weights, known after the load
    gate: asyncio.Event | None = None
    failure: Exception | None = None
    given: int | None = None

    def __init__(self, name: str, log: list[str], loads_now: list[str]) -> None:
        super().__init__(name)
        self.log = log
        self.loads_now = loads_now
        self.on_cut: Callable[[], None] = lambda: None

    @property
    def needs(self) -> Needs:
        return Needs(self.weight_bytes, self.context_bytes, self.kv_bytes)

    async def measure(self) -> Needs:
        await asyncio.sleep(0)
        return self.needs

    async def load(self, kv_bytes: int | None) -> int:
        self.loads_now.append(self.name)
        assert self.loads_now == [self.name], "one load at a time"
        try:
            self.log.append(f"load {self.name}")
            await (asyncio.sleep(0) if self.gate is None else self.gate.wait())
            if self.failure is not None:
                raise self.failure
        finally:
            self.loads_now.remove(self.name)
        self.given = kv_bytes
        self.weight_bytes = self.truth_bytes or self.weight_bytes
        return self.weight_bytes + (kv_bytes or 0)

    async def unload(self) -> None:
        self.log.append(f"unload {self.name}")
        await asyncio.sleep(0)

    def cut(self) -> None:
        self.log.append(f"cut {self.name}")
        self.on_cut()


class Rig:
    def __init__(self, names: str, budget: int | None, **fields: object) -> None:
        self.log: list[str] = []
        loads_now: list[str] = []
        self.models = {name: FakeModel(name, self.log, loads_now) for name in names}
        for name, value in fields.items():
            for model in self.models.values():
                setattr(model, name, value)
        self.managed = self.models
        self.manager = ModelManager(list(self.managed.values()), budget)

    async def touch(self, *names: str) -> None:
        """One request for each model, one after the other."""
        for name in names:
            await self.hold(name)
            self.release(name)

    async def hold(self, name: str) -> None:
        await self.manager.hold(self.managed[name])
        assert self.manager.budget_bytes is None or self.manager.num_bytes <= self.manager.budget_bytes

    def release(self, name: str) -> None:
        self.manager.release(self.managed[name])

    def begin(self, name: str) -> asyncio.Task[None]:
        return asyncio.create_task(self.hold(name))

    def states(self) -> str:
        """The state of each model, as text."""
        return " ".join(f"{name}:{managed.state}" for name, managed in self.managed.items())

    @property
    def loaded(self) -> str:
        return "".join(name for name, managed in self.managed.items() if managed.state is READY)


async def settle(turns: int = 20) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, object]]:
    """Tests run in virtual time: sleeps and timers take no time and keep their order on any machine."""
    return "asyncio", {"loop_factory": VirtualLoop}


async def test_the_least_recently_used_model_is_unloaded_first() -> None:
    rig = Rig("abcd", 120)  # 40 each: three fit
    await rig.touch("a", "b", "c", "a")
    assert rig.loaded == "abc"
    await rig.touch("d")
    assert rig.loaded == "acd"  # b was least recently used
    await rig.touch("b")
    assert rig.loaded == "abd"  # then c
    assert rig.log == ["load a", "load b", "load c", "unload b", "load d", "unload c", "load b"]
    assert rig.manager.num_bytes == 120


async def test_pinned_models_are_not_unloaded() -> None:
    rig = Rig("abc", 80)
    rig.manager.pin(rig.managed["a"])
    await rig.touch("a", "b", "c", "b", "c")
    assert rig.loaded == "ac"
    rig.manager.pin(rig.managed["c"])
    with pytest.raises(ModelTooLarge, match=r"b needs .* pinned models hold"):
        await rig.hold("b")
    assert rig.loaded == "ac"
    rig.manager.unpin(rig.managed["a"])
    await rig.touch("b")
    assert rig.loaded == "bc"


async def test_a_model_that_can_never_fit_unloads_no_other(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig("ab", 2**20 * 50)
    rig.models["b"].weight_bytes = 2**20 * 60
    await rig.touch("a")
    with pytest.raises(ModelTooLarge, match=r"^b needs 60\.0 MiB; the memory of all models is 50\.0 MiB$"):
        await rig.hold("b")
    assert (rig.states(), rig.log) == ("a:ready b:failed", ["load a"])
    assert "b could not be loaded: b needs 60.0 MiB" in caplog.text  # a load at startup has no waiter to report to


async def test_models_load_one_at_a_time_in_order() -> None:
    rig = Rig("abcde", None)
    await asyncio.gather(*(rig.hold(name) for name in "cabed"))
    assert rig.log == [f"load {name}" for name in "cabed"]  # FakeModel.load checks that they do not overlap


async def test_many_waiters_cause_one_load() -> None:
    rig = Rig("a", 100)
    await asyncio.gather(*(rig.hold("a") for _ in range(50)))
    assert rig.log == ["load a"]
    assert rig.managed["a"].num_leases == 50


async def test_a_busy_model_accepts_no_new_requests_before_it_is_unloaded() -> None:
    rig = Rig("ab", 40)
    await rig.hold("a")
    wants_b = rig.begin("b")
    await settle()
    assert rig.states() == "a:unloading b:loading"
    later = [rig.begin("a") for _ in range(3)]  # a stream of requests for a cannot starve b
    await settle()
    assert not any(task.done() for task in later)
    rig.release("a")
    await wants_b
    assert rig.log == ["load a", "unload a", "load b"]
    await settle()
    assert rig.states() == "a:loading b:unloading"  # now a waits for b
    rig.release("b")
    await asyncio.gather(*later)
    assert rig.states() == "a:ready b:unloaded"


async def test_a_model_that_becomes_idle_is_unloaded_instead_of_a_busy_one() -> None:
    rig = Rig("abc", 80)
    await rig.hold("a")
    await rig.hold("b")
    wants_c = rig.begin("c")
    await settle()
    assert rig.states() == "a:unloading b:ready c:loading"  # a was least recently used
    waits_for_a = rig.begin("a")
    await settle()
    rig.release("b")
    await wants_c
    await waits_for_a
    assert rig.states() == "a:ready b:unloaded c:ready"
    assert rig.log == ["load a", "load b", "unload b", "load c"]


async def test_an_abandoned_load_unloads_no_other() -> None:
    rig = Rig("ab", 40)
    await rig.hold("a")
    wants_b = rig.begin("b")
    await settle()
    waits_for_a = rig.begin("a")
    await settle()
    wants_b.cancel()
    await waits_for_a  # a stays loaded
    assert (rig.states(), rig.log) == ("a:ready b:unloaded", ["load a"])


async def test_a_failed_load_raises_in_all_waiters_and_is_retried() -> None:
    rig = Rig("ab", 40)
    rig.models["a"].failure = ModelFileError("not sound")
    results = await asyncio.gather(*(rig.hold("a") for _ in range(3)), return_exceptions=True)
    assert [str(result) for result in results] == ["not sound"] * 3
    assert (rig.managed["a"].state, rig.managed["a"].num_failures, rig.manager.num_bytes) == (FAILED, 1, 0)
    await rig.touch("b")  # its memory is free
    rig.models["a"].failure = None
    await rig.touch("a")
    assert rig.states() == "a:ready b:unloaded"


async def test_repeated_failures_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig("ab", None)
    rig.models["a"].failure = RuntimeError("bug")
    slept: list[float] = []
    sleep = asyncio.sleep

    async def note(delay_s: float) -> None:
        slept.extend([delay_s] if delay_s else [])
        await sleep(0)

    monkeypatch.setattr("quire.engine.model_manager.asyncio.sleep", note)
    for _ in range(9):
        with pytest.raises(LoadFailed, match="RuntimeError: bug"):
            await rig.hold("a")
    assert slept == [1, 2, 4, 8, 16, 30, 30]
    rig.models["a"].failure = None
    await rig.manager.load(rig.managed["a"])  # an administrator does not wait
    assert len(slept) == 7
    assert rig.managed["a"].num_failed_in_a_row == 0


async def test_weights_larger_than_estimated_unload_others() -> None:
    rig = Rig("abc", 120)
    rig.models["c"].truth_bytes = 60
    await rig.touch("a", "b", "c")
    assert (rig.loaded, rig.manager.num_bytes) == ("bc", 110)


async def test_weights_larger_than_estimated_leave_less_for_kv() -> None:
    rig = Rig("a", 100, kv_bytes=None)
    rig.models["a"].truth_bytes = 80
    await rig.touch("a")
    assert rig.models["a"].given == 20
    assert rig.log == ["load a", "unload a", "load a"]
    assert rig.manager.num_bytes == 100


@pytest.mark.parametrize(
    ("budget", "context", "kv"),
    [
        (200, 10, 70),  # (200 - 2 * 30) / 2
        (200, 90, 90),  # a full context is larger
        (50, 10, 10),  # the weights leave nothing: a full context, one model at a time
        (50, 90, 20),  # less than a full context: what is left
    ],
)
async def test_the_share_of_kv(budget: int, context: int, kv: int) -> None:
    rig = Rig("ab", budget, kv_bytes=None, context_bytes=context)
    await rig.touch("a")
    assert rig.models["a"].given == kv
    await rig.touch("b")
    assert rig.models["b"].given == kv


async def test_a_configured_kv_size_is_not_shared() -> None:
    rig = Rig("abc", 300, kv_bytes=None)
    rig.models["a"].kv_bytes = 110
    await rig.touch("a", "b", "c")
    assert [rig.models[name].given for name in "abc"] == [110, 50, 50]  # (300 - 90 - 110) / 2
    assert (rig.loaded, rig.manager.num_bytes) == ("abc", 300)


async def test_idle_models_are_unloaded_unless_pinned() -> None:
    rig = Rig("abc", None)
    for managed in rig.managed.values():
        managed.idle_unload_s = 0.05
    rig.manager.pin(rig.managed["b"])
    await rig.touch("b", "c")
    await rig.hold("a")
    await asyncio.sleep(0.2)
    assert rig.states() == "a:ready b:ready c:unloaded"
    rig.release("a")
    rig.manager.unpin(rig.managed["b"])
    await asyncio.sleep(0.03)
    await rig.touch("a")  # used in between: the timer restarts
    await asyncio.sleep(0.03)
    assert rig.managed["a"].state is READY
    await asyncio.sleep(0.2)
    assert rig.loaded == ""


async def test_unload_waits_for_running_requests() -> None:
    rig = Rig("a", None)
    await rig.hold("a")
    unloading = asyncio.create_task(rig.manager.unload(rig.managed["a"]))
    await settle()
    assert (unloading.done(), rig.managed["a"].state) == (False, UNLOADING)
    rig.release("a")
    await unloading
    assert (rig.managed["a"].state, rig.manager.num_bytes) == (UNLOADED, 0)
    await rig.manager.unload(rig.managed["a"])  # no effect the second time
    assert rig.log == ["load a", "unload a"]


async def test_forced_unload_fails_running_requests() -> None:
    rig = Rig("a", None)
    rig.models["a"].on_cut = lambda: rig.release("a")
    await rig.hold("a")
    await rig.manager.unload(rig.managed["a"], is_forced=True)
    assert rig.log == ["load a", "cut a", "unload a"]


async def test_forced_unload_cancels_a_load() -> None:
    rig = Rig("ab", 40)
    rig.models["a"].gate = asyncio.Event()
    wants = rig.begin("a")
    await settle()
    await rig.manager.unload(rig.managed["a"], is_forced=True)
    with pytest.raises(LoadFailed, match="unloaded before it was ready"):
        await wants
    assert rig.states() == "a:unloaded b:unloaded"
    await rig.touch("b")


async def test_forced_unload_cancels_a_load_before_its_first_step() -> None:
    """The waiter gets an error, and the next request loads the model."""
    rig = Rig("a", None)

    wants = rig.begin("a")
    unloading = asyncio.create_task(rig.manager.unload(rig.managed["a"], is_forced=True))  # directly after it
    await unloading
    with pytest.raises(LoadFailed, match="unloaded before it was ready"):
        await wants
    await rig.touch("a")


async def test_a_second_forced_unload_does_not_interrupt_cleanup(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig("a", None)

    async def load(_: int | None) -> int:
        try:
            await asyncio.Event().wait()
        finally:
            await settle(5)
            rig.log.append("cleaned up")
        return 0

    monkeypatch.setattr(rig.models["a"], "load", load)
    wants = rig.begin("a")
    await settle()
    unloads = []
    for _ in range(3):
        unloads.append(asyncio.create_task(rig.manager.unload(rig.managed["a"], is_forced=True)))
        await settle(2)
    await asyncio.gather(*unloads)
    with pytest.raises(LoadFailed, match="unloaded before it was ready"):
        await wants
    assert rig.log == ["cleaned up"]


async def test_a_request_during_an_abandoned_load_starts_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are larger than estimated, and no request waits for the memory any more."""
    rig = Rig("ab", 80)
    rig.models["b"].truth_bytes = 50

    async def unload() -> None:
        rig.log.append("unload b")
        await settle(5)

    monkeypatch.setattr(rig.models["b"], "unload", unload)
    await rig.hold("a")
    first = rig.begin("b")
    await settle()
    assert rig.states() == "a:unloading b:loading"
    first.cancel()
    while rig.log[-1] != "unload b":
        await asyncio.sleep(0)
    second = rig.begin("b")
    await settle()
    rig.release("a")
    await second


async def test_a_failed_unload_does_not_block_other_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig("ab", 40)

    async def fail() -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(rig.models["a"], "unload", fail)
    await rig.touch("a", "b", "a")
    assert rig.states() == "a:ready b:unloaded"


async def test_close_unloads_everything() -> None:
    rig = Rig("abcd", 80)
    await rig.hold("a")
    await rig.touch("b")
    rig.models["c"].gate = asyncio.Event()
    wants = [rig.begin("c"), rig.begin("d")]
    await settle()
    await rig.manager.close()
    results = await asyncio.gather(*wants, return_exceptions=True)
    assert all(isinstance(result, LoadFailed) for result in results)
    assert not any(managed.num_bytes for managed in rig.managed.values())
    assert rig.log.count("unload a") == 1
    with pytest.raises(LoadFailed, match="shutting down"):
        await rig.hold("a")


@pytest.mark.parametrize("seed", range(30))
async def test_random_traffic(seed: int) -> None:
    """All requests are served, the budget is never exceeded, and no leases are left."""
    random = Random(seed)
    rig = Rig("abcdef", 100)
    for model in rig.models.values():
        model.weight_bytes = random.randint(5, 80)
    served: list[str] = []

    async def client() -> None:
        for _ in range(8):
            name = random.choice("abcdef")
            try:
                async with asyncio.timeout(random.choice([0.002, 5])):
                    await rig.hold(name)
            except TimeoutError:
                continue
            assert rig.managed[name].state in ("ready", "unloading")
            await asyncio.sleep(random.choice([0, 0, 0.001]))
            assert rig.managed[name].state in ("ready", "unloading")
            rig.release(name)
            served.append(name)

    async def admin() -> None:
        for _ in range(15):
            managed = rig.managed[random.choice("abcdef")]
            await asyncio.sleep(0.001)
            if random.random() < 0.5:
                await rig.manager.unload(managed)
            elif not any(other.is_pinned for other in rig.managed.values()) and managed.num_bytes <= 10:
                rig.manager.pin(managed)
                rig.manager.unpin(managed)

    await asyncio.gather(admin(), *(client() for _ in range(12)))
    assert len(served) > 12
    await settle()
    assert all(not managed.num_leases and not managed.waiters for managed in rig.managed.values())
    await rig.manager.close()
    assert rig.manager.num_bytes == 0
    assert rig.log.count("load a") - rig.log.count("unload a") in (0, 1)
