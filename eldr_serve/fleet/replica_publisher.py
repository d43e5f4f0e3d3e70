"""The live replicas of a deployment, published to the ingress of the same process from Serve's own handle."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from eldr_serve.fleet.directory import ReplicaDirectory, get_directory


class ReplicaPublisher(RequestRouter):
    """Publishes the live replicas, as a request router of Serve; a call goes to any of them.

    Configure it in `deployment_config.request_router_config`. Keyword arguments (request_router_kwargs):
        directory_name: name of the ReplicaDirectory that the ingress of this process reads.
    """

    directory: ReplicaDirectory

    def initialize_state(self, *, directory_name: str, **kwargs: Any) -> None:
        self.directory = get_directory(directory_name)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self.directory.publish({r.replica_id.unique_id: r.replica_metadata or {} for r in replicas})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self.directory.drop(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return all replicas; called by Serve."""
        return [candidate_replicas]
