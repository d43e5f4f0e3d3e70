"""Refit the expert placement of each decode engine of a live service together with the routing table.

Like offline.live_placement, it acts on a running service, beside which it runs as a Ray job:

    ray job submit --no-wait --working-dir . -- python -m offline.position_placement

ELDR places the experts of each decode worker by the activation of its own cluster (paper, section 5). When
the service has a new table, the job makes a placement for each cluster from the sampled traffic. At each
check, every engine that holds another placement gets the placement of its position. So an engine that has
replaced another one gets it too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from eldr_serve.commands.client import OperatorClient
from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError, one_line_message
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.expert_placement import ExpertPlacement
from eldr_serve.experts.routing_table import RoutingTable
from offline.expert_placement.packed_placements import activation_placement, activation_probability


def position_placement(
    every: Annotated[float, typer.Option(min=0.1, help="Time between two checks, s.")] = 30.0,
    batch: Annotated[int, typer.Option(min=1, help="Tokens of a decode step, over all ranks.")] = 64,
    url: Annotated[str, typer.Option(help="URL of the service.")] = "http://127.0.0.1:8000",
    admin_key: Annotated[str | None, typer.Option(envvar="ELDR_ADMIN_KEY", help="Admin key.")] = None,
) -> None:
    """Place the experts of each decode engine for its cluster of the live table."""
    placements = PositionPlacements(OperatorClient(url, admin_key), batch)
    while True:
        try:
            for sentence in placements.check():
                typer.echo(sentence)
        except UserInputError as error:
            typer.echo(f"placements unchanged: {one_line_message(error)}")
        time.sleep(every)


class PositionPlacements:
    """The placements of the clusters of a service's table, which its decode engines get by position.

    Args:
        client: client of the service, with its admin key.
        batch: tokens of a decode step.
    """

    def __init__(self, client: OperatorClient, batch: int) -> None:
        self._client, self._batch = client, batch
        self._made_for: tuple[bytes, int] | None = None  # file of the table, and ranks
        self._placements: list[ExpertPlacement] = []

    def check(self) -> Iterator[str]:
        """Give each engine the placement of its position; yield one sentence for each change.

        As with the centroids of a table, position i has placement i modulo their number.

        Raises:
            UserInputError: no placements can be made yet, or the service refuses a call.
        """
        table, status = self._client.table(), self._client.status()
        live = status.get("ingress", {}).get("experts", {})
        positions = {
            worker["worker"]: worker["position"]
            for worker in status.get("workers", [])
            if worker["worker"] in live
        }
        if not positions:
            raise UserInputError(
                "no decode engine reports experts that it can move: see docs/expert_parallel_engines.md"
            )
        engine = live[min(positions)]
        self._fit(table, engine["ranks"], engine["slots"])
        for replica, position in positions.items():
            placement = self._placements[position % len(self._placements)]
            if live[replica]["placement"] != placement.id:
                content, sidecar = placement.files(Path("placement.json")).values()
                swap = self._client.place_experts(content, sidecar, [replica])[replica]
                yield f"position {position}: {swap['experts']} experts moved, placement {placement.id}"

    def _fit(self, file: bytes, ranks: int, slots: int) -> None:
        """Make the placements again if the file of the table or the number of ranks has changed."""
        if self._made_for == (file, ranks):
            return
        table = RoutingTable.from_bytes(file)
        if slots != table.num_experts:
            raise UserInputError(
                f"the engines have {slots} slots for {table.num_experts} experts, but a placement by "
                "activation has no replicas: remove `redundant_experts` from eldr_experts, or on GPUs "
                "`num_redundant_experts` from eplb_config"
            )
        trace = CalibrationTrace.from_bytes(self._client.trace())
        self._placements = placements_of_clusters(table, trace, ranks, self._batch)
        self._made_for = file, ranks


def placements_of_clusters(
    table: RoutingTable, trace: CalibrationTrace, ranks: int, batch: int
) -> list[ExpertPlacement]:
    """Return ELDR's placement for each cluster of the table, from the decode counts of its requests.

    Args:
        batch: tokens of a decode step.

    Raises:
        UserInputError: no request of a cluster has a decode step, or the trace does not fit the table.
    """
    cluster_of = (table.spec.encode(trace.prefill_counts) @ table.centroids.T).argmax(axis=1)
    placements = []
    for cluster in range(len(table.centroids)):
        is_own = cluster_of == cluster
        steps = int(trace.decode_steps[is_own].sum())
        if not steps:
            raise UserInputError(f"no sampled request of cluster {cluster} has a decode step yet")
        load = trace.decode_counts[is_own].sum(axis=0, dtype=np.float64)
        placement = ExpertPlacement(
            activation_placement(activation_probability(load, steps, batch), ranks),
            ranks,
            table.num_experts,
            model=table.model,
            method="activation",
            report={"batch": batch, "cluster": cluster, "steps": steps},
            expected_tokens=np.round(load * batch / steps, 4),
        )
        placements.append(placement)
    return placements


if __name__ == "__main__":
    run(position_placement)
