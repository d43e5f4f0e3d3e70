"""Adapt the expert placement of a live service's decode engines to the prompts that will decode next.

Unlike most of this package, it acts on a running service. It runs as a Ray job beside the service:

    ray job submit --no-wait --working-dir . -- python -m offline.live_placement --cost COST --top-k K

It applies DIRECTOR's idea (docs/proactive_placement.md). The forecast is made from the expert counts of the
prompts that decode or wait for a decode worker or, if there are none, from those of the newest prompts. If
the service samples its traffic, the decode correction is learnt from the samples.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import ray
import typer
from numpy.typing import NDArray
from ray.exceptions import RayError

from eldr_serve.actors import find_actor
from eldr_serve.commands.client import OperatorClient, ServiceError
from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError, one_line_message
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.expert_placement import ExpertPlacement, Topology
from eldr_serve.router.actor import actor_name
from offline.expert_placement.cost import LayerCost
from offline.expert_placement.director import director_placement, renewed_placement
from offline.expert_placement.forecast import decode_correction, workload_by_rank

_CHECKS_PER_CORRECTION = 10  # checks between two fetches of the sampled traffic


def live_placement(
    cost: Annotated[Path, typer.Option(help="LayerCost (JSON) of the ranks, from `eldr bench ep_layer`.")],
    top_k: Annotated[int, typer.Option(min=1, help="Experts that the model chooses per token.")],
    every: Annotated[float, typer.Option(min=0.1, help="Time between two checks, s.")] = 30.0,
    prompts: Annotated[
        int, typer.Option(min=1, help="Number of newest prompts used for the forecast, at most.")
    ] = 128,
    min_gain: Annotated[
        float, typer.Option(min=0, help="Share of the slowest ranks' time that a swap must save.")
    ] = 0.05,
    token_bytes: Annotated[
        float, typer.Option(min=0, help="Bytes that a token sends to a rank; 0: all ranks see all tokens.")
    ] = 0,
    url: Annotated[str, typer.Option(help="URL of the service.")] = "http://127.0.0.1:8000",
    admin_key: Annotated[str | None, typer.Option(envvar="ELDR_ADMIN_KEY", help="Admin key.")] = None,
    application: Annotated[str, typer.Option(help="Application's `name` in the deployment.")] = "eldr",
    seed: Annotated[int, typer.Option(help="Seed of DIRECTOR's rounding.")] = 0,
) -> None:
    """Move the experts of decode engines to where the next prompts need them."""
    if not ray.is_initialized():
        ray.init(address="auto", log_to_driver=False, logging_level="warning")
    planner = Planner(LayerCost.load(cost), top_k, prompts, min_gain, seed, token_bytes)
    client = OperatorClient(url, admin_key)
    for check in count():
        try:
            if check % _CHECKS_PER_CORRECTION == 0:
                planner.correction = learn_correction(client)
            router = find_actor(actor_name(application))
            pending, recent = ray.get([router.pending_counts.remote(), router.recent_counts.remote()])
            if (result := update_placement(planner, client, pending or recent)) is not None:
                typer.echo(result)
        except UserInputError as error:
            typer.echo(f"placement unchanged: {one_line_message(error)}")
        except (RayError, ValueError) as error:  # no such actor, or it is lost
            typer.echo(f"the router of {application!r} does not answer: {one_line_message(error)}")
        time.sleep(every)


def learn_correction(client: OperatorClient) -> NDArray[np.float64] | None:
    """Return `decode_correction` [L, E] of the service's sampled traffic, or None without samples."""
    try:
        trace = CalibrationTrace.from_bytes(client.trace())
    except ServiceError:  # no signature pool, or no samples yet
        return None
    has_steps = trace.decode_steps > 0
    columns = (trace.prefill_counts, trace.prompt_tokens, trace.decode_counts, trace.decode_steps)
    return decode_correction(*(column[has_steps] for column in columns)) if has_steps.any() else None


def update_placement(planner: Planner, client: OperatorClient, recent: Sequence[NDArray[Any]]) -> str | None:
    """Swap the placement of the service's engines if that pays.

    Returns:
        One sentence about the swap; None if there was none.
    """
    status = client.status()
    live: Mapping[str, Mapping[str, Any]] = status.get("ingress", {}).get("experts", {})
    if not live or not recent:
        return None
    placement = planner.plan(recent, live, model=str(status.get("model", "")))
    if placement is None:
        return None
    content, sidecar = placement.files(Path("placement.json")).values()
    swaps = client.place_experts(content, sidecar, sorted(live))
    num_moved = sum(swap["experts"] for swap in swaps.values())
    gain = placement.report["gain"]
    why = "first placement" if gain is None else f"{gain:.1%} less time according to the cost"
    return f"{why}: {num_moved} experts moved, placement {placement.id}"


class Planner:
    """Plans DIRECTOR's placement for the newest prompts, if that is worth a swap.

    Args:
        cost: cost of a layer on the ranks.
        top_k: experts per token.
        prompts: number of newest prompts in the forecast.
        min_gain: share of the slowest ranks' time that a swap must save.
        seed: seed of the rounding.
        token_bytes: bytes that a token sends to a rank which serves it.

    Attributes:
        correction: float[L, E], factor of each expert's prefill counts (`decode_correction`); None: 1.
    """

    def __init__(
        self,
        cost: LayerCost,
        top_k: int,
        prompts: int,
        min_gain: float,
        seed: int,
        token_bytes: float = 0.0,
    ) -> None:
        self._cost, self._top_k, self._prompts = cost, top_k, prompts
        self._min_gain, self._seed, self._token_bytes = min_gain, seed, token_bytes
        self._last: ExpertPlacement | None = None
        self.correction: NDArray[np.float64] | None = None

    def plan(
        self,
        recent: Sequence[NDArray[Any]],
        live: Mapping[str, Mapping[str, Any]],
        *,
        model: str,
    ) -> ExpertPlacement | None:
        """Return the placement to swap in, or None.

        Args:
            recent: unsigned[L,E] each, expert counts of prompts, the newest last.
            live: status of the experts (see engine.protocol.Engine.expert_status) by replica, not empty.
            model: id of the model.

        Raises:
            UserInputError: the replicas have different shapes, so that no single placement fits.
        """
        shapes = {(engine["ranks"], engine["slots"]) for engine in live.values()}
        if len(shapes) > 1:
            raise UserInputError("decode replicas differ in ranks or slots, so no single placement fits all")
        ((ranks, slots),) = shapes
        newest = recent[-self._prompts :]
        counts = np.stack([counts for counts in newest if counts.shape == newest[-1].shape]).astype(float)
        tokens = np.maximum(counts[:, 0].sum(axis=1) / self._top_k, 1)
        corrected = False
        if self.correction is not None and self.correction.shape == counts.shape[1:]:
            counts, corrected = counts * self.correction, True
        topology = Topology(ranks=ranks)
        work = workload_by_rank(counts, tokens, 1, topology)
        engine: dict[str, Any] = {"topology": topology, "slots": slots // ranks, "cost": self._cost}
        engine |= {"token_bytes": self._token_bytes, "seed": self._seed}
        last = self._last
        if last is not None and any(replica["placement"] != last.id for replica in live.values()):
            last = None  # another process has moved the experts, or a replica is new
        gain = None  # unknown for a first placement, since the service reports only the id of the old one
        if last is None:
            rows = director_placement(work, **engine)[0]
        else:
            rows, gain = renewed_placement(work, last.physical_to_logical, **engine)
            if gain < self._min_gain:
                return None
        self._last = ExpertPlacement(
            rows,
            ranks,
            work.shape[2],
            model=model,
            method="director, live",
            report={"gain": gain, "corrected": corrected},
            expected_tokens=np.round(work.sum(axis=1), 4),
        )
        return self._last


if __name__ == "__main__":
    run(live_placement)
