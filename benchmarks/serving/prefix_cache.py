"""Show that locality and the prefix cache add up (counterpart of the paper's Figure 17).

    python -m benchmarks.serving.prefix_cache

A few long prompts repeat, with the prefill engine's prefix cache on and then off. Each policy has the same
load, as in benchmarks/serving/live.py. The cache should lower TTFT for every policy, and leave the TPOT gain
of a policy unchanged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.lib import options
from benchmarks.lib.captured_routes import load_or_capture
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
from loadgen.plots import bars
from loadgen.results import publish
from loadgen.workload import balanced_sample, write_prompts

BENCHMARKS = {"prefix_cache": "all"}


def prefix_cache(
    prompts: options.Prompts = options.PROMPTS,
    distinct: Annotated[int, typer.Option(min=1, help="Distinct prompts; the longest are used.")] = 12,
    policies: options.Policies = "round-robin,locality-band,marginal-cost",
    in_flight: options.InFlight = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Trials of each policy and cache state.")] = 3,
    trial_seconds: Annotated[int, typer.Option(min=5, help="Measured part of a trial, s.")] = 25,
    warm_up_seconds: Annotated[int, typer.Option(min=1, help="Load before the measured part, s.")] = 15,
    burn_in_seconds: options.BurnIn = 120,
    deployment: options.Deployment = Path("deployments/cpu_demo.yaml"),
    intermediate: options.Intermediate = 1024,
    stream_interval: options.Interval = 16,
    output_tokens: options.MeanOutput = 64,
    max_prompt_tokens: options.Longest = 512,
    requests: options.CapturedRequests = 2400,
    port: options.Port = 8350,
    work: options.Work = options.WORK,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Compare policies with the prefix cache on and off."""
    unwind_on_sigterm()
    load: dict[str, Any] = {"policies": policies, "in-flight": in_flight, "rounds": rounds, "seed": seed}
    load |= length_options(output_tokens)
    load |= {"trial-seconds": trial_seconds, "warm-up-seconds": warm_up_seconds}
    load |= {"burn-in-seconds": burn_in_seconds}
    about: dict[str, Any] = {"prompts": prompts.name, "captured": requests, "distinct": distinct}
    about |= {"deployment": deployment.stem, "intermediate": intermediate, "stream_interval": stream_interval}
    about |= {"max_prompt_tokens": max_prompt_tokens}
    settings = load | about | {"prompts": prompts.resolve()}
    comparisons = {state: LiveComparison(work / f"prefix_cache_{state}", settings) for state in ("on", "off")}
    data = load_or_capture(prompts, work, requests=requests, seed=seed)
    fit, rest = data.split("all", 0.4, seed)
    held_out = select_prompts(prompts, [data.trace.ids[i] for i in rest], max_prompt_tokens)
    repeated = work / "prefix_cache_prompts.jsonl"
    longest = sorted(held_out, key=lambda prompt: -len(prompt.text))[: 8 * distinct]
    write_prompts(repeated, balanced_sample(longest, distinct, seed))
    arguments = wide_arguments(deployment, widen_model(intermediate, work), stream_interval)
    table, _ = fit_table(data.trace.subset_without_routes(fit), decode_replicas_of(arguments), seed=seed)
    rows: list[dict[str, Any]] = []
    for state, comparison in comparisons.items():
        arguments["prefill_config"]["engine_kwargs"] |= {"enable_prefix_caching": state == "on"}
        if comparison.result is None:
            with serve_shortest_queue_without_pool(arguments, port=port):
                comparison.measure(table, load | {"prompts": repeated}, port=port)
        rows += [{"prefix_cache": state, **row} for row in comparison.rows()]
    last = comparisons["off"].result or {}
    inputs = last["inputs"] | about
    path = publish("prefix_cache", rows, seed=seed, out=out, notes=last["notes"], inputs=inputs)
    normalised = [row for row in rows if row["clock"] == NORMALISED]
    plotted = [row | {"workload": f"prefix cache {row['prefix_cache']}"} for row in normalised]
    interval = ("tpot_p50_ms_low", "tpot_p50_ms_high")
    bars(plotted, "policy", "tpot_p50_ms", path.with_suffix(".png"), interval=interval)
    for comparison in comparisons.values():
        comparison.finish()


if __name__ == "__main__":
    run(prefix_cache)
