"""Messages between a front and replicas through Ray Serve."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress

from ray.exceptions import RayError
from ray.serve._private.common import RequestMetadata
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest

from quire.scale.registry import choosers, routers
from quire.scale.transport import Chooser, ReplicaGone

SEND = "send"  # a method of the deployment


class RayTransport:
    """`deployment`: the name of the replicas' deployment. `front`: the number of this front."""

    def __init__(self, handle: DeploymentHandle, deployment: str, front: int) -> None:
        self._handle = handle
        self._deployment = deployment
        self._front = front

    def start(self, chooser: Chooser) -> None:
        # The router runs in this event loop: it asks the chooser, and no request is passed between threads.
        choosers[self._deployment] = chooser
        if not self._handle.is_initialized:
            self._handle._init(_run_router_in_separate_loop=False)
        self._greeting = asyncio.ensure_future(self._greet())  # Ray creates the router with the first call

    async def _greet(self) -> None:
        with suppress(RayError, RayServeException):
            await self._handle.hello.remote()

    async def choose(self, number: int) -> None:
        try:
            await self._handle.accept.remote(number)
        except (RayError, RayServeException) as error:
            raise ReplicaGone(_reason(error)) from error

    async def send(self, replica: str, frames: Sequence[bytes]) -> None:
        """Send to a replica that may be stopping: Serve's own handles do not reach those any more."""
        router = routers.get(self._deployment)
        running = None if router is None else router.find(replica)
        if running is None:
            raise ReplicaGone(f"replica {replica} has left the cluster")
        number = uuid.uuid4().hex
        metadata = RequestMetadata(number, number, SEND, _on_separate_loop=False)
        request = PendingRequest([self._front, list(frames)], {}, metadata)
        try:
            await running.try_send_request(request, with_rejection=False).get_async()
        except (RayError, RayServeException) as error:
            raise ReplicaGone(_reason(error)) from error

    async def messages(self, replica: str) -> AsyncGenerator[list[bytes], None]:
        stream = self._handle.options(stream=True).messages.remote(replica, self._front)
        try:
            async for frames in stream:
                yield frames
        except (RayError, RayServeException) as error:
            raise ReplicaGone(_reason(error)) from error
        finally:
            stream.cancel()
            if (router := routers.get(self._deployment)) is not None:
                router.forget(replica)

    async def close(self) -> None:
        self._greeting.cancel()
        choosers.pop(self._deployment, None)


def _reason(error: Exception) -> str:
    """The first line of an error of Ray, which may have hundreds."""
    cause = getattr(error, "cause", None)
    return str(cause if cause is not None else error).strip().partition("\n")[0]
