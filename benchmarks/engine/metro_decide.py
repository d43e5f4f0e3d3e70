"""Time METRO's decision (which replica serves each expert of a batch) by implementation, experts and ranks.

    python -m benchmarks.engine.metro_decide

numpy and torch run on one CPU core. They decide one layer at a time, as in an engine, and 48 layers at once,
as in a simulation. The optimum (bisection and matching, METRO's section IV-B and Figure 6) decides one layer.
On a CUDA device, the Triton kernel runs in a CUDA graph of 48 consecutive layers, whose replays are timed by
events. The placements are EPLB's for skewed loads. 60 % of the experts have tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

import numpy as np
import torch
import typer

from benchmarks.lib import options
from benchmarks.lib.ep.replica_choice import route_optimal
from eldr_serve.commands.run import run
from eldr_serve.experts.expert_placement import hosts_of
from eldr_serve.experts.parallel.metro import MetroPlan
from eldr_serve.experts.parallel.metro_torch import TorchMetro
from loadgen.results import p50_p99_us, publish, time_calls
from offline.expert_placement.packed_placements import eplb_placement

BENCHMARKS = {"metro_decide": "default"}
SHAPES = ((32, 8), (64, 8), (128, 8), (256, 16), (256, 32))  # experts, ranks
LAYERS = 48
TimedForm = Callable[[int], list[float]]  # number of decisions -> seconds of each


def metro_decide(
    calls: Annotated[int, typer.Option(min=20, help="Decisions timed for each row.")] = 400,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Time METRO's decision in each implementation that this machine can run."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for experts, ranks in SHAPES:
        for ratio in (1.125, 1.5):
            load = rng.lognormal(size=(LAYERS, experts))
            slots = round(experts * ratio / ranks) * ranks
            hosts = hosts_of(eplb_placement(load, slots, groups=1, nodes=1, ranks=ranks), experts, ranks)
            batches = [(rng.uniform(size=(LAYERS, experts)) < 0.6).astype(np.int32) for _ in range(16)]
            for form, layers, timed in _forms(hosts, batches):
                row: dict[str, Any] = {"form": form, "experts": experts, "ranks": ranks}
                row |= {"replication": slots / experts, "layers": layers} | p50_p99_us(timed(calls))
                rows.append(row | {"p50_us_per_layer": row["p50_us"] / layers})
    cuda = "" if torch.cuda.is_available() else "; no CUDA device here, so the kernel is not in the table"
    publish(
        "metro_decide",
        rows,
        seed=seed,
        out=out,
        inputs={"calls": calls},
        notes=f"One core. All forms but the optimum choose the same replicas{cuda}.",
    )


def _forms(hosts: np.ndarray, batches: list[np.ndarray]) -> list[tuple[str, int, TimedForm]]:
    """Return (name, layers at once, function that times some decisions) of each implementation."""
    forms: list[tuple[str, int, TimedForm]] = []
    for layers in (1, LAYERS):
        plan = MetroPlan.from_hosts(hosts[:layers])
        arrays = [batch[:layers] for batch in batches]
        tensors, metro = [torch.from_numpy(a) for a in arrays], TorchMetro(plan)
        for array, tensor in zip(arrays, tensors, strict=True):
            if not np.array_equal(plan.route(array), metro.route(tensor).numpy()):
                raise RuntimeError("TorchMetro chose other replicas than MetroPlan")
        forms.append(("numpy", layers, partial(_time_by_clock, plan.route, arrays)))
        forms.append(("torch, CPU", layers, partial(_time_by_clock, metro.route, tensors)))
    optimum = partial(route_optimal, hosts=hosts[:1])
    forms.append(("optimum", 1, partial(_time_by_clock, optimum, [batch[:1] for batch in batches])))
    if torch.cuda.is_available():
        forms.append(("triton, CUDA graph", LAYERS, partial(_time_by_events, hosts, batches)))
    return forms


def _time_by_clock(route: Callable[[Any], object], batches: list[Any], calls: int) -> list[float]:
    return time_calls(lambda n: route(batches[n % len(batches)]), calls=calls)


def _time_by_events(hosts: np.ndarray, batches: list[np.ndarray], calls: int) -> list[float]:
    """Time replays of a graph that decides layer by layer, as in a model's step."""
    from benchmarks.lib.cuda_graph import TimedGraph
    from eldr_serve.experts.parallel.metro_triton import TritonMetro

    tokens = torch.zeros(batches[0].shape, dtype=torch.int32, device="cuda")
    tensors = [torch.from_numpy(batch).cuda() for batch in batches]
    layers = [TritonMetro(MetroPlan.from_hosts(hosts[n : n + 1]), "cuda") for n in range(len(hosts))]

    def step() -> None:
        for number, layer in enumerate(layers):
            layer.route(tokens[number : number + 1])

    graph = TimedGraph(step)
    seconds = []
    for n in range(calls):
        tokens.copy_(tensors[n % len(tensors)])
        seconds.append(graph.time_replay())
    chosen = torch.cat([layer.chosen for layer in layers]).cpu().numpy()
    expected = MetroPlan.from_hosts(hosts).route(batches[(calls - 1) % len(batches)])
    if not np.array_equal(chosen, expected):
        raise RuntimeError("the kernel in a CUDA graph chose other replicas than MetroPlan")
    return seconds


if __name__ == "__main__":
    run(metro_decide)
