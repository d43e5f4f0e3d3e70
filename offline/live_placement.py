"""Keep the experts of expert-parallel decode engines placed for the prompts that will decode next.

    ray job submit --no-wait --working-dir . -- python -m offline.live_placement --cost COST --top-k K

This applies DIRECTOR's idea to a service (docs/proactive_placement.md): the forecast is what prefill has
counted of the newest prompts, which the router keeps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import ray
import typer
from numpy.typing import NDArray
from ray.exceptions import RayError

from eldr_serve.channel.actors import find_actor
from eldr_serve.client import Client, ServiceError
from eldr_serve.command_errors import run
from eldr_serve.errors import sentence
from eldr_serve.experts.placement import Topology, hosts_of
from eldr_serve.experts.routing_table import ExpertPlacement
from eldr_serve.router.actor import actor_name
from offline.placement.alignment import aligned
from offline.placement.cost import LayerCost
from offline.placement.director import director_placement, placed_work
from offline.placement.forecast import expected_workload

Ints = NDArray[np.int64]


def live_placement(
    cost: Annotated[Path, typer.Option(help="LayerCost (JSON) of the ranks, from `eldr bench ep_layer`.")],
    top_k: Annotated[int, typer.Option(min=1, help="Experts that the model chooses per token.")],
    every: Annotated[float, typer.Option(min=0.1, help="Time between two checks, s.")] = 30.0,
    prompts: Annotated[int, typer.Option(min=1, help="Newest prompts used for the forecast.")] = 128,
    min_gain: Annotated[
        float, typer.Option(min=0, help="Share of the slowest ranks' time that a swap must save.")
    ] = 0.05,
    url: Annotated[str, typer.Option(help="URL of the service.")] = "http://127.0.0.1:8000",
    admin_key: Annotated[str | None, typer.Option(envvar="ELDR_ADMIN_KEY", help="Its admin key.")] = None,
    application: Annotated[str, typer.Option(help="`name` in the deployment's args.")] = "eldr",
    seed: Annotated[int, typer.Option(help="Seed of DIRECTOR's rounding.")] = 0,
) -> None:
    """Move the experts of decode engines to where the next prompts need them."""
    if not ray.is_initialized():
        ray.init(address="auto", log_to_driver=False, logging_level="warning")
    client, planner = Client(url, admin_key), Planner(LayerCost.load(cost), top_k, prompts, min_gain, seed)
    while True:
        try:
            recent = ray.get(find_actor(actor_name(application)).recent_counts.remote())
            if (result := update_placement(planner, client, recent)) is not None:
                typer.echo(result)
        except ServiceError as error:
            typer.echo(f"placement unchanged: {sentence(error)}")
        except (RayError, ValueError) as error:  # the actor is away, or restarts with another deployment
            typer.echo(f"the router of {application!r} does not answer: {sentence(error)}")
        time.sleep(every)


def update_placement(planner: Planner, client: Client, recent: Sequence[NDArray[Any]]) -> str | None:
    """Swap the placement if it pays; return what was done, or None."""
    status = client.status()
    held: Mapping[str, Mapping[str, Any]] = status.get("ingress", {}).get("experts", {})
    if not held or not recent:
        return None
    placed = planner.plan(recent, held, model=str(status.get("model", "")))
    if placed is None:
        return None
    content, described = placed.files(Path("placement.json")).values()
    swaps = client.place_experts(content, described, sorted(held))
    moved = sum(swap["experts"] for swap in swaps.values())
    gain = placed.report["gain"]
    why = "first placement" if gain is None else f"{gain:.1%} less by the cost"
    return f"{why}: {moved} experts moved, placement {placed.id}"


class Planner:
    """Computes DIRECTOR's placement for the newest prompts, if it is worth a swap.

    Args:
        cost: cost of a layer on the ranks.
        top_k: experts per token.
        prompts: number of newest prompts in the forecast.
        min_gain: share of the slowest ranks' time that a swap must save.
        seed: of the rounding.
    """

    def __init__(self, cost: LayerCost, top_k: int, prompts: int, min_gain: float, seed: int) -> None:
        self._cost, self._top_k, self._prompts = cost, top_k, prompts
        self._min_gain, self._seed = min_gain, seed
        self._last: ExpertPlacement | None = None

    def plan(
        self,
        recent: Sequence[NDArray[Any]],
        held: Mapping[str, Mapping[str, Any]],
        *,
        model: str,
    ) -> ExpertPlacement | None:
        """Return the placement to swap in, or None.

        Args:
            recent: unsigned[L,E] each, expert counts of prompts, the newest last.
            held: experts that each replica holds, see engine.protocol.Engine.experts; not empty.
            model: id of the model.

        Raises:
            ValueError: the replicas have different shapes, so that no single placement fits.
        """
        shapes = {(engine["ranks"], engine["slots"]) for engine in held.values()}
        if len(shapes) > 1:
            raise ValueError(f"decode replicas have {len(shapes)} kinds of slots: no one placement fits them")
        ((ranks, slots),) = shapes
        newest = recent[-self._prompts :]
        counts = np.stack([one for one in newest if one.shape == newest[-1].shape]).astype(float)
        tokens = np.maximum(counts[:, 0].sum(axis=1) / self._top_k, 1)
        work, topology = expected_workload(counts, tokens, 1), Topology(ranks=ranks)
        last = self._last
        if last is not None and any(engine["placement"] != last.id for engine in held.values()):
            last = None  # another process has moved them, or a replica is new
        start = None if last is None else last.physical_to_logical
        rows = director_placement(
            work, topology=topology, slots=slots // ranks, cost=self._cost, start=start, seed=self._seed
        )[0]
        gain = None  # of the first placement only the id is known
        if start is not None:
            rows = aligned(start, rows, ranks, alike=True)
            gain = 1 - self._seconds(work, rows, topology) / self._seconds(work, start, topology)
            if gain < self._min_gain:
                return None
        self._last = ExpertPlacement(
            rows, ranks, work.shape[1], model=model, method="director, live", report={"gain": gain}
        )
        return self._last

    def _seconds(self, work: NDArray[np.float64], rows: Ints, topology: Topology) -> float:
        """Return the time of all layers according to the cost."""
        hosts = hosts_of(rows, work.shape[1], topology.ranks)
        done = placed_work(work, hosts, topology=topology)
        return float(self._cost.layer_s(done).sum())


if __name__ == "__main__":
    run(live_placement)
