"""Compare the saving that the live page's shadow policy predicts with the true saving, at known step costs.

    python -m benchmarks.papers.shadow_simulated

The simulator runs two policies in turn over the same requests, each with the other as its shadow. The shadow
uses the simulator's own step cost. So the difference has no noise, and shows what the shadow ignores by
design. The `closed` loop has a fixed number of requests in flight. In the `open` loop requests arrive
at the rate at which the second policy finished them in the closed loop, so that a faster policy has fewer in
flight.

`step` is the change of the decode step time per token from the second to the first policy. `priced` is the
shadow's prediction of that change while one of the policies is live. `share` is the mean of both predictions
over `step`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.lib import options
from benchmarks.lib.captured_routes import load_or_capture
from benchmarks.papers.figures.common import mean
from eldr_serve.commands.run import run
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.scheduling import StepCost, make_policy
from loadgen.results import publish
from offline.simulation.cluster import Cluster, Decode
from offline.simulation.outcome import Outcome
from offline.simulation.requests import Experts, Requests
from offline.simulation.run import simulate

BENCHMARKS = {"shadow_simulated": "default"}
_HANDOVER_S = 0.02


def step_ms(outcome: Outcome) -> float:
    """Return the decode step time per token in milliseconds."""
    return 1e3 * float(np.average(outcome.seconds, weights=outcome.batch))


def row(first: Outcome, second: Outcome) -> dict[str, Any]:
    """Return a row from the outcomes with either policy live and the other as its shadow."""
    assert first.shadow_comparison is not None
    assert second.shadow_comparison is not None
    priced = 100 * (first.shadow_comparison.live_ms / first.shadow_comparison.shadow_ms - 1)
    reverse = 100 * (second.shadow_comparison.shadow_ms / second.shadow_comparison.live_ms - 1)
    step = 100 * (step_ms(first) / step_ms(second) - 1)
    return {
        "batch_size": float(second.batch.mean()),
        "step_ms": step_ms(second),
        "price_error_pct": 100 * (second.shadow_comparison.live_ms / step_ms(second) - 1),
        "step_change_pct": step,
        "priced_first_live_pct": priced,
        "priced_second_live_pct": reverse,
        "share": (priced + reverse) / 2 / step,
    }


def shadow_simulated(
    trace: Annotated[
        Path | None,
        typer.Option(help="Calibration trace with routes.", show_default="a capture of --prompts"),
    ] = None,
    prompts: options.Prompts = options.PROMPTS,
    captured_prompts: options.CapturedRequests = 2400,
    work: options.Work = options.WORK,
    policies: options.TwoPolicies = "marginal-cost,shortest-queue",
    per_expert_us: Annotated[str, typer.Option(help="Costs of an active expert, us.")] = "2,15,100",
    workers: options.Workers = "2,8",
    in_flight: Annotated[int, typer.Option(min=1, help="Requests in flight per worker.")] = 16,
    per_worker: options.PerWorker = 500,
    output_tokens: options.MeanOutput = 80,
    seeds: Annotated[int, typer.Option(min=1, help="Simulations of each row, which is their mean.")] = 3,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Simulate two policies, each with the other as its shadow, in a closed and in an open loop."""
    names = options.two_policies(policies)
    observed = CalibrationTrace.load(trace) if trace else None
    observed = observed or load_or_capture(prompts, work, requests=captured_prompts, seed=seed).trace
    experts = Experts.from_trace(observed)
    rows = []
    for count, per_expert in product(map(int, workers.split(",")), map(float, per_expert_us.split(","))):
        cost = StepCost(per_expert_s=1e-6 * per_expert)
        cluster = Cluster(decode=Decode(workers=count, cost=cost), handover_fixed_s=_HANDOVER_S)
        rows_of_loops: dict[str, list[dict[str, Any]]] = {"closed": [], "open": []}
        for number in range(seed, seed + seeds):
            sent_requests = _requests(experts, count * per_worker, output_tokens, number)
            pair = _pair(names, sent_requests, cluster, experts, count * in_flight, number)
            rows_of_loops["closed"].append(row(*pair))
            rate = len(sent_requests) / float(np.ptp(pair[1].last_s))  # rate of the second policy
            sent_requests = _rescale_to_rate(sent_requests, rate, number)
            rows_of_loops["open"].append(row(*_pair(names, sent_requests, cluster, experts, None, number)))
        for loop, rows_of_loop in rows_of_loops.items():
            rows.append({"workers": count, "per_expert_us": per_expert, "loop": loop} | mean(rows_of_loop))
    publish(
        "shadow_simulated",
        rows,
        seed=seed,
        out=out,
        inputs={
            "trace": trace.name if trace else f"{captured_prompts} of {prompts.name}",
            "policies": policies,
            "in_flight": in_flight,
            "per_worker": per_worker,
            "output_tokens": output_tokens,
            "seeds": seeds,
        },
        notes="Simulated. Batch, step time and error are the second policy's. Changes are those of the first "
        "policy against the second.",
    )


def _pair(
    names: tuple[str, str],
    requests: Requests,
    cluster: Cluster,
    experts: Experts,
    in_flight: int | None,
    seed: int,
) -> tuple[Outcome, Outcome]:
    """Return the outcomes with the first and with the second policy live, the other one as its shadow."""

    def outcome(live: str, other: str) -> Outcome:
        policy = make_policy(live)
        policy.update_cost_model(cluster.decode.cost)
        return simulate(
            requests,
            policy,
            cluster,
            experts=experts,
            in_flight=in_flight,
            shadow=make_policy(other),
            seed=seed,
        )

    first, second = names
    return outcome(first, second), outcome(second, first)


def _requests(experts: Experts, number: int, tokens: int, seed: int) -> Requests:
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, len(experts.domains), number)
    output = rng.integers(tokens // 2, tokens + tokens // 2 + 1, number)
    return Requests(np.zeros(number), experts.count_tokens[kind], output, kind)


def _rescale_to_rate(work: Requests, rate_per_s: float, seed: int) -> Requests:
    gaps = np.random.default_rng(seed).exponential(1 / rate_per_s, len(work))
    return replace(work, arrival_s=np.cumsum(gaps))


if __name__ == "__main__":
    run(shadow_simulated)
