"""Ray Serve's request router for replicas of a model: the front of the same process decides (`Chooser`).

Ray creates a router in every process that has a handle of the deployment. Where there is no front, requests go to the
replica with the shortest queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from quire.scale import registry
from quire.scale.transport import Chooser

ACCEPT, MESSAGES = "accept", "messages"  # methods of the deployment


class PrefixAwareRouter(RequestRouter):  # type: ignore[misc]  # Ray is not checked
    """Ranks replicas for new requests. The other calls name their replica."""

    def initialize_state(self, deployment: str = "") -> None:
        self._deployment = deployment
        self._known: dict[str, RunningReplica] = {}  # also those that are being stopped and have requests
        registry.routers[deployment] = self

    @property
    def _chooser(self) -> Chooser | None:
        return registry.choosers.get(self._deployment)

    def find(self, replica: str) -> RunningReplica | None:
        """A replica by its id, until the front forgets it."""
        return self._known.get(replica)

    def forget(self, replica: str) -> None:
        if replica not in {one.replica_id.unique_id for one in self.curr_replicas.values()}:
            self._known.pop(replica, None)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._known |= {one.replica_id.unique_id: one for one in replicas}
        if self._chooser is not None:
            self._chooser.set_replicas([one.replica_id.unique_id for one in replicas])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or self._chooser is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        by_id = {one.replica_id.unique_id: one for one in candidate_replicas}
        if pending_request.metadata.call_method == ACCEPT:
            ranked: Sequence[str] = self._chooser.rank(pending_request.args[0], list(by_id))
        elif pending_request.metadata.call_method == MESSAGES:
            ranked = pending_request.args[:1]
        else:
            return [candidate_replicas]
        return [[by_id[replica]] for replica in ranked if replica in by_id]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        del result
        if self._chooser is not None and pending_request.metadata.call_method == ACCEPT:
            self._chooser.note_routed(pending_request.args[0], replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._known.pop(replica_id.unique_id, None)


def router_kwargs(deployment: str) -> dict[str, Any]:
    return {"deployment": deployment}
