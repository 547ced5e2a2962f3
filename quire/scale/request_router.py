"""Ray Serve's request router for replicas of a model: the front of the same process decides (`Chooser`).

Ray creates a router in every process that has a handle of the deployment. Where there is no front, requests go to the
replica with the shortest queue.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from quire.scale import registry
from quire.scale.transport import Chooser

ACCEPT = "accept"  # a method of the deployment


class PrefixAwareRouter(RequestRouter):  # type: ignore[misc]  # Ray is not checked
    """Ranks replicas for new requests. `application`: the one of the replicas."""

    def initialize_state(self, application: str = "") -> None:
        self._application = application
        self._known: dict[str, RunningReplica] = {}  # also those that are being stopped and have requests
        registry.routers[application] = self

    @property
    def _chooser(self) -> Chooser | None:
        return registry.choosers.get(self._application)

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
