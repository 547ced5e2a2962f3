"""The models of this server, loaded or not: which one a request means, and its service."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from quire.server.ask import Ask
from quire.server.errors import ApiError, Kind
from quire.server.service import Service
from quire.server.work import Caller, Work


class ModelState(StrEnum):
    UNLOADED = "unloaded"
    LOADING = "loading"  # or waiting for room
    READY = "ready"
    UNLOADING = "unloading"  # finishes what it has; what comes waits for its return
    FAILED = "failed"  # the last load failed; the next request tries again


class Model:
    """One model of this server. What clients may call it: `name`, and `aliases`."""

    def __init__(self, names: tuple[str, ...], service: Service | None = None) -> None:
        self.name = names[0]
        self.aliases = names[1:]
        self.is_pinned = False
        self.service = service  # while it is loaded
        self.num_bytes = 0  # weights and KV as held, or the estimate before the first load
        self.progress: float | None = None  # of loading, 0 to 1
        self.num_waiting = 0  # requests that wait for it to load

    @property
    def state(self) -> ModelState:
        if self.service is None:
            return ModelState.UNLOADED
        return ModelState.LOADING if self.service.client.facts is None else ModelState.READY

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


class Models:
    """Belongs to one event loop."""

    def __init__(self, models: list[Model]) -> None:
        self._models = models
        self._by_name = {name: model for model in models for name in model.names}

    def __iter__(self) -> Iterator[Model]:
        """In the order given."""
        return iter(self._models)

    @property
    def default(self) -> Model:
        return self._models[0]

    def find(self, name: str | None) -> Model:
        """None: the default, which is the first."""
        if name is None:
            return self.default
        if (model := self._by_name.get(name)) is None:
            text = f"model = {name!r:.200} is not served here; this server has {', '.join(self._by_name)}"
            raise ApiError(Kind.NO_MODEL, text, param="model")
        return model

    async def use(self, name: str | None) -> Service:
        """The service of a model, loaded if it was not."""
        service = self.find(name).service
        assert service is not None
        return service

    async def open(self, ask: Ask, caller: Caller) -> Work:
        return await (await self.use(ask.model)).open(ask, caller)
