"""Messages between a front and replicas through Ray Serve.

The front chooses the replica of a request, and calls replicas without Serve's routing. Serve reports to it which
replicas there are.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ray.exceptions import RayError
from ray.serve._private.common import RequestMetadata
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaResult, RequestRouter, RunningReplica

from quire.scale import transport
from quire.scale.ray_cluster import first_line
from quire.scale.transport import Batches, ReplicaGone, SetReplicas, joined

SEND, MESSAGES = "send", "messages"  # methods of the deployment


class ReplicaWatcher(RequestRouter):  # type: ignore[misc]  # Ray is not checked
    """Ray Serve's request router, of which the front of the same process uses only the list of replicas.

    Ray creates a router in every process that has a handle of the deployment. `application`: the one of the replicas.
    """

    def initialize_state(self, application: str = "") -> None:
        self._application = application

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        if (take := transport.takers.get(self._application)) is not None:
            take({one.replica_id.unique_id: one for one in replicas})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Let any replica take a call: the first one of a front, which has no effect."""
        del pending_request
        return [candidate_replicas]


class RayTransport:
    """`application`: the one of the replicas. `front`: the number of this front."""

    def __init__(self, handle: DeploymentHandle, application: str, front: int) -> None:
        self._handle = handle
        self._application = application
        self._front = front
        self._replicas: dict[str, RunningReplica] = {}  # also those that are being stopped and have requests

    def start(self, set_replicas: SetReplicas) -> None:
        self._set_replicas = set_replicas
        transport.takers[self._application] = self.take
        # The router runs in this event loop: nothing is passed between threads.
        if not self._handle.is_initialized:
            self._handle._init(_run_router_in_separate_loop=False)
        self._greeting = asyncio.ensure_future(self._greet())  # Ray creates the router with the first call

    async def _greet(self) -> None:
        with suppress(RayError, RayServeException):
            await self._handle.hello.remote()

    def take(self, current: dict[str, RunningReplica]) -> None:
        """Take the replicas that accept requests. Those that are being stopped are kept while the front uses them."""
        known = self._replicas = self._replicas | current
        used = self._set_replicas(current)
        self._replicas = {replica: one for replica, one in known.items() if replica in used}

    async def send(self, replica: str, frames: Sequence[bytes]) -> None:
        with _calling("the call"):
            await self._call(replica, SEND, [self._front, list(frames)]).get_async()

    def messages(self, replica: str) -> Batches:
        return joined(lambda is_continued: self._stream(replica, is_continued))

    async def _stream(self, replica: str, is_continued: bool) -> Batches:
        with _calling("its stream"):
            result = self._call(replica, MESSAGES, [self._front, is_continued], is_streaming=True)
        try:
            while True:
                with _calling("its stream"):
                    frames = await result.__anext__()
                yield frames
        except StopAsyncIteration:
            return
        finally:
            result.cancel()

    def _call(self, replica: str, method: str, arguments: list[Any], is_streaming: bool = False) -> ReplicaResult:
        """Call a replica without Serve's routing: handles do not reach a replica that is being stopped."""
        running = self._replicas.get(replica)
        if running is None:
            raise ReplicaGone(f"replica {replica} has left the cluster")
        number = uuid.uuid4().hex
        metadata = RequestMetadata(number, number, method, is_streaming=is_streaming, _on_separate_loop=False)
        return running.try_send_request(PendingRequest(arguments, {}, metadata), with_rejection=False)

    async def close(self) -> None:
        self._greeting.cancel()
        transport.takers.pop(self._application, None)


@contextmanager
def _calling(what: str) -> Iterator[None]:
    """Report errors of Ray as ReplicaGone. If Ray has cancelled a call, awaiting it raises CancelledError."""
    try:
        yield
    except (RayError, RayServeException) as error:
        raise ReplicaGone(first_line(getattr(error, "cause", None) or error)) from error  # Ray's may have hundreds
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ReplicaGone(f"{what} was cancelled") from None
