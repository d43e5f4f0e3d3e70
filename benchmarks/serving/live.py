"""Measure TPOT, TTFT and active experts of every policy on real engines that run together (Figures 11 to 13).

    python -m benchmarks.serving.live

The load meets the whole product, 1 prefill and 4 decode engines behind the real ingress. The order of the
policies is random in each round (loadgen.compare). Each workload is a comparison of its own: its table is
fitted to 40 % of its captured prompts, and its load comes from the others. The same options resume a stopped
run.

With fewer cores than engines, engines wait for each other: work that a policy saves anywhere shortens every
step, and load balance matters less. So the loop is closed, and an answer comes in chunks of several tokens
(vLLM's `stream_interval`); otherwise a token's cost between engine and client would outweigh the cost of
experts. Answers are longer than prompts, so that engines mostly decode, which is what placement affects. A
trial begins with a policy without history; marginal-cost needs about 100 requests to specialise its workers,
and the warm-up has more. decode_replay measures the same without contention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.lib import options
from benchmarks.lib.captured_routes import groups_of, load_or_capture
from benchmarks.lib.cluster import unwind_on_sigterm
from benchmarks.lib.live import (
    LiveComparison,
    decode_replicas_of,
    length_options,
    select_prompts,
    serve_shortest_queue_without_pool,
    wide_arguments,
)
from benchmarks.lib.normalised_time import NORMALISED
from benchmarks.lib.replay.schedule import widen_model
from eldr_serve.commands.run import run
from eldr_serve.experts.fitting.table import fit_table
from loadgen.figures import BASELINES
from loadgen.plots import bars
from loadgen.results import publish
from loadgen.workload import write_prompts

BENCHMARKS = {"live": "all"}
POLICIES = ",".join((*BASELINES, "locality-band", "marginal-cost"))


def live(
    prompts: options.Prompts = options.PROMPTS,
    groups: options.Groups = "all,language,task",
    policies: options.Policies = POLICIES,
    in_flight: options.InFlight = 64,
    rate: Annotated[float, typer.Option(min=0, help="Requests/s, Poisson arrivals; 0: closed loop.")] = 0.0,
    rounds: Annotated[int, typer.Option(min=1, help="Trials of each policy.")] = 2,
    trial_seconds: Annotated[int, typer.Option(min=5, help="Measured part of a trial, s.")] = 30,
    warm_up_seconds: Annotated[int, typer.Option(min=1, help="Load before the measured part, s.")] = 35,
    burn_in_seconds: options.BurnIn = 60,
    deployment: options.Deployment = Path("deployments/cpu_demo_4d.yaml"),
    intermediate: options.Intermediate = 1536,
    stream_interval: options.Interval = 16,
    output_tokens: options.MeanOutput = 160,
    max_prompt_tokens: options.Longest = 128,
    requests: options.CapturedRequests = 2400,
    port: options.Port = 8340,
    work: options.Work = options.WORK,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Fit a table, serve, and compare policies under the same load."""
    unwind_on_sigterm()
    load: dict[str, Any] = {"policies": policies, "rounds": rounds, "seed": seed}
    load |= length_options(output_tokens)
    load |= {"rate": rate} if rate else {"in-flight": in_flight}
    load |= {"trial-seconds": trial_seconds, "warm-up-seconds": warm_up_seconds}
    load |= {"burn-in-seconds": burn_in_seconds}
    about: dict[str, Any] = {"prompts": prompts.name, "captured": requests, "deployment": deployment.stem}
    about |= {"intermediate": intermediate, "stream_interval": stream_interval}
    about["max_prompt_tokens"] = max_prompt_tokens
    settings = load | about | {"prompts": prompts.resolve()}
    comparisons = {group: LiveComparison(work / f"live_{group}", settings) for group in groups_of(groups)}
    data = load_or_capture(prompts, work, requests=requests, seed=seed)
    fit_in = select_prompts(prompts, data.trace.ids, max_prompt_tokens)
    arguments = wide_arguments(deployment, widen_model(intermediate, work), stream_interval)
    if unfinished := {group: c for group, c in comparisons.items() if c.result is None}:
        with serve_shortest_queue_without_pool(arguments, port=port):
            for group, comparison in unfinished.items():
                fit, rest = data.split(group, 0.4, seed)
                held_out = {data.trace.ids[i] for i in rest}
                prompts_file = work / f"live_{group}_prompts.jsonl"
                write_prompts(prompts_file, (p for p in fit_in if p.id in held_out))
                table, _ = fit_table(
                    data.trace.subset_without_routes(fit), decode_replicas_of(arguments), seed=seed
                )
                comparison.measure(table, load | {"prompts": prompts_file}, port=port)
    rows: list[Any] = [{"workload": group, **row} for group, c in comparisons.items() for row in c.rows()]
    # All workloads have the same inputs except the prompts, which are parts of one sample.
    last = list(comparisons.values())[-1].result or {}
    inputs = {k: v for k, v in last["inputs"].items() if not k.startswith("prompts")}
    path = publish("live", rows, seed=seed, out=out, notes=last["notes"], inputs=inputs | about)
    value = "tpot_p50_ms_change_pct"
    interval = (f"{value}_low", f"{value}_high")
    unchanged = dict.fromkeys((value, *interval), 0.0)  # the best balancer
    plotted = [unchanged | row for row in rows if row["clock"] == NORMALISED]
    bars(plotted, "policy", value, path.with_suffix(".png"), interval=interval)
    for comparison in comparisons.values():
        comparison.finish()


if __name__ == "__main__":
    run(live)
