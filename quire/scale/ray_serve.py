"""Messages between a front and replicas through Ray Serve, and Serve's request router for the replicas of a model.

The front of the same process decides where a request goes (`Chooser`). Ray creates a router in every process that has a
handle of the deployment. Where there is no front, requests go to the replica with the shortest queue.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ray.exceptions import RayError
from ray.serve._private.common import RequestMetadata
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from quire.scale import transport
from quire.scale.transport import Batches, Chooser, ReplicaGone, choosers, joined, routers

SEND, MESSAGES = "send", "messages"  # methods of the deployment


class RayTransport:
    """`application`: the one of the replicas. `front`: the number of this front."""

    def __init__(self, handle: DeploymentHandle, application: str, front: int) -> None:
        self._handle = handle
        self._application = application
        self._front = front

    def start(self, chooser: Chooser) -> None:
        # The router runs in this event loop: it asks the chooser, and no request is passed between threads.
        choosers[self._application] = chooser
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
        try:
            await self._call(replica, SEND, [self._front, list(frames)]).get_async()
        except (RayError, RayServeException) as error:
            raise ReplicaGone(_reason(error)) from error
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise ReplicaGone("the call was cancelled") from None

    def messages(self, replica: str) -> Batches:
        return joined(lambda is_continued: self._stream(replica, is_continued))

    async def _stream(self, replica: str, is_continued: bool) -> Batches:
        result = None
        try:
            result = self._call(replica, MESSAGES, [self._front, is_continued], is_streaming=True)
            while True:
                yield await result.__anext__()
        except StopAsyncIteration:
            return
        except (RayError, RayServeException) as error:
            raise ReplicaGone(_reason(error)) from error
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise ReplicaGone("its stream was cancelled") from None
        finally:
            if result is not None:
                result.cancel()

    def _call(self, replica: str, method: str, arguments: list[Any], is_streaming: bool = False) -> ReplicaResult:
        """Call a replica without Serve's routing.

        A replica that is being stopped is not reached by handles any more. And Serve makes a few routing decisions at a
        time: while all of these wait for a replica, the call that connects the front to one would wait behind them.
        """
        router = routers.get(self._application)
        running = None if router is None else router.find(replica)
        if running is None:
            raise ReplicaGone(f"replica {replica} has left the cluster")
        number = uuid.uuid4().hex
        metadata = RequestMetadata(number, number, method, is_streaming=is_streaming, _on_separate_loop=False)
        return running.try_send_request(PendingRequest(arguments, {}, metadata), with_rejection=False)

    async def close(self) -> None:
        self._greeting.cancel()
        choosers.pop(self._application, None)


def _is_cancelled() -> bool:
    """Whether this task is cancelled. If Ray has cancelled a call, awaiting it raises CancelledError too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _reason(error: Exception) -> str:
    """The first line of an error of Ray, which may have hundreds."""
    cause = getattr(error, "cause", None)
    return str(cause if cause is not None else error).strip().partition("\n")[0]


ACCEPT = "accept"  # a method of the deployment


class PrefixAwareRouter(RequestRouter):  # type: ignore[misc]  # Ray is not checked
    """Ranks replicas for new requests. `application`: the one of the replicas."""

    def initialize_state(self, application: str = "") -> None:
        self._application = application
        self._known: dict[str, RunningReplica] = {}  # also those that are being stopped and have requests
        transport.routers[application] = self

    @property
    def _chooser(self) -> Chooser | None:
        return transport.choosers.get(self._application)

    def find(self, replica: str) -> RunningReplica | None:
        """A replica by its id, also if it is being stopped, as long as the front uses it."""
        return self._known.get(replica)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        current = {one.replica_id.unique_id: one for one in replicas}
        self._known |= current
        chooser = self._chooser
        if chooser is not None:
            chooser.set_replicas(list(current))
        self._known = {
            replica: one
            for replica, one in self._known.items()
            if replica in current or (chooser is not None and chooser.uses(replica))
        }

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if self._chooser is None or pending_request is None or pending_request.metadata.call_method != ACCEPT:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        by_id = {one.replica_id.unique_id: one for one in candidate_replicas}
        ranked = [one for one in self._chooser.rank(pending_request.args[0], list(by_id)) if one in by_id]
        if ranked:  # sent at once: the replica's answer to this call would cost another round trip
            self._chooser.note_routed(pending_request.args[0], ranked[0])
        return [[by_id[replica]] for replica in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Called when a replica has accepted the call. No effect if the request was sent when it was chosen."""
        del result
        if self._chooser is not None and pending_request.metadata.call_method == ACCEPT:
            self._chooser.note_routed(pending_request.args[0], replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._known.pop(replica_id.unique_id, None)
