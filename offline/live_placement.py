"""Keep the experts of expert-parallel decode engines placed for the prompts that are about to decode.

    ray job submit --no-wait --working-dir . -- python -m offline.live_placement --cost COST --top-k K

DIRECTOR's idea on a service (docs/proactive_placement.md): the forecast is what prefill has counted of the
newest prompts, which the router keeps.
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

from eldr_serve.artifacts import ExpertPlacement
from eldr_serve.client import Client, ServiceError
from eldr_serve.errors import sentence
from eldr_serve.expert_placement import Topology, hosts_of
from eldr_serve.serving.decode_router import actor_name, find
from offline.placement.alignment import aligned
from offline.placement.cost import LayerCost
from offline.placement.director import director_placement, placed_work
from offline.placement.forecast import expected_workload
from tools.cli import run

Ints = NDArray[np.int64]


def live_placement(
    cost: Annotated[Path, typer.Option(help="LayerCost (JSON) of the ranks, of `eldr bench ep_layer`.")],
    top_k: Annotated[int, typer.Option(min=1, help="Experts that the model chooses a token.")],
    every: Annotated[float, typer.Option(min=0.1, help="Time between two looks, s.")] = 30.0,
    prompts: Annotated[int, typer.Option(min=1, help="Newest prompts that make the forecast.")] = 128,
    min_gain: Annotated[
        float, typer.Option(min=0, help="Share of the slowest ranks' time that a swap must save.")
    ] = 0.05,
    url: Annotated[str, typer.Option(help="Of the service.")] = "http://127.0.0.1:8000",
    admin_key: Annotated[str | None, typer.Option(envvar="ELDR_ADMIN_KEY", help="Of the service.")] = None,
    application: Annotated[str, typer.Option(help="`name` in the deployment's args.")] = "eldr",
    seed: Annotated[int, typer.Option(help="Seed of DIRECTOR's rounding.")] = 0,
) -> None:
    """Move the experts of decode engines where the prompts that are about to decode want them."""
    if not ray.is_initialized():
        ray.init(address="auto", log_to_driver=False, logging_level="warning")
    client, planner = Client(url, admin_key), Planner(LayerCost.load(cost), top_k, prompts, min_gain, seed)
    while True:
        try:
            recent = ray.get(find(actor_name(application)).recent_signatures.remote())
            if (said := look(planner, client, recent)) is not None:
                typer.echo(said)
        except ServiceError as error:
            typer.echo(f"the experts stay: {sentence(error)}")
        except (RayError, ValueError) as error:  # it is away, or comes again with another deployment
            typer.echo(f"the router of {application!r} does not answer: {sentence(error)}")
        time.sleep(every)


def look(planner: Planner, client: Client, recent: Sequence[NDArray[Any]]) -> str | None:
    """Swap if it pays; returns what was done, or None."""
    status = client.status()
    held: Mapping[str, Mapping[str, Any]] = status.get("ingress", {}).get("experts", {})
    if not held or not recent:
        return None
    placed = planner.plan(recent, held, model=str(status.get("model", "")))
    if placed is None:
        return None
    content, described = placed.files(Path("placement.json")).values()
    took = client.place_experts(content, described, sorted(held))
    moved = sum(swap["experts"] for swap in took.values())
    gain = placed.report["gain"]
    why = "the first look" if gain is None else f"{gain:.1%} less by the cost"
    return f"{why}: {moved} experts moved, placement {placed.id}"


class Planner:
    """DIRECTOR's placement for the newest prompts, if it is worth a swap.

    Args:
        cost: of a layer on the ranks.
        top_k: experts a token.
        prompts: how many make the forecast, the newest.
        min_gain: share of the slowest ranks' time that must be saved.
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
        """The placement to swap in, or None.

        Args:
            recent: unsigned[L,E] each, expert counts of prompts, the newest last.
            held: what each replica holds, see engine.protocol.Engine.experts; not empty.
            model: id of the model.

        Raises:
            ValueError: replicas of several shapes, which no one placement fits.
        """
        shapes = {(found["ranks"], found["slots"]) for found in held.values()}
        if len(shapes) > 1:
            raise ValueError(f"decode replicas have {len(shapes)} kinds of slots: no one placement fits them")
        ((ranks, slots),) = shapes
        newest = recent[-self._prompts :]
        counts = np.stack([one for one in newest if one.shape == newest[-1].shape]).astype(float)
        tokens = np.maximum(counts[:, 0].sum(axis=1) / self._top_k, 1)
        work, topology = expected_workload(counts, tokens, 1), Topology(ranks=ranks)
        last = self._last
        if last is not None and any(found["placement"] != last.id for found in held.values()):
            last = None  # somebody else has moved them, or a replica is new
        start = None if last is None else last.physical_to_logical
        rows = director_placement(
            work, topology=topology, slots=slots // ranks, cost=self._cost, start=start, seed=self._seed
        )[0]
        gain = None  # of what is there at the first look only its id is known
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
        """Of all layers, by the cost."""
        hosts = hosts_of(rows, work.shape[1], topology.ranks)
        done = placed_work(work, hosts, topology=topology)
        return float(self._cost.layer_s(done).sum())


if __name__ == "__main__":
    run(live_placement)
