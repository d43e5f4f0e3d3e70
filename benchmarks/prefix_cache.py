"""Locality and the prefix cache add up (counterpart of the paper's Figure 17).

    python -m benchmarks.prefix_cache

Few long prompts, asked again and again, with the prefill engine's prefix cache on and then off; each
policy under the same load, as in benchmarks/live.py. The cache should lower TTFT for every policy and
leave what a policy gains in TPOT as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness.capture import captured
from benchmarks.harness.cluster import unwind_on_sigterm
from benchmarks.harness.live import (
    BurnInOption,
    DeploymentOption,
    InFlightOption,
    IntervalOption,
    LongestOption,
    by_both_clocks,
    claimed,
    compared,
    finish,
    fitting,
    lengths,
    serving,
    wide_arguments,
    workers_of,
)
from benchmarks.harness.options import (
    PROMPTS,
    WORK,
    CapturedOption,
    IntermediateOption,
    MeanOutputOption,
    OutOption,
    PromptsOption,
    SeedOption,
    WorkOption,
)
from benchmarks.harness.replay import widened
from eldr_serve.fitting import fit_table
from loadgen.workload import balanced_sample, write_prompts
from tools.cli import run
from tools.plots import bars
from tools.results import publish


def prefix_cache(
    prompts: PromptsOption = PROMPTS,
    distinct: Annotated[int, typer.Option(min=1, help="Distinct prompts, of the longest.")] = 12,
    policies: Annotated[
        str, typer.Option(help="Policies, with commas.")
    ] = "round-robin,locality-band,marginal-cost",
    in_flight: InFlightOption = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Blocks of each policy and cache state.")] = 3,
    trial_seconds: Annotated[int, typer.Option(min=5, help="Measured part of a block, s.")] = 25,
    warm_up_seconds: Annotated[int, typer.Option(min=1, help="Load before it, s.")] = 15,
    burn_in_seconds: BurnInOption = 120,
    deployment: DeploymentOption = Path("deployments/cpu_demo.yaml"),
    intermediate: IntermediateOption = 1024,
    stream_interval: IntervalOption = 16,
    output_tokens: MeanOutputOption = 64,
    max_prompt_tokens: LongestOption = 512,
    requests: CapturedOption = 2400,
    port: Annotated[int, typer.Option(help="HTTP port.")] = 8350,
    work: WorkOption = WORK,
    seed: SeedOption = 0,
    out: OutOption = None,
) -> None:
    """Compare policies with the prefix cache on and off."""
    unwind_on_sigterm()
    folders = {state: work / f"prefix_cache_{state}" for state in ("on", "off")}
    options = {
        "policies": policies, "in-flight": in_flight, "rounds": rounds, "seed": seed,
        "trial-seconds": trial_seconds, "warm-up-seconds": warm_up_seconds,
        "burn-in-seconds": burn_in_seconds, **lengths(output_tokens),
    }  # fmt: skip
    about = {
        "prompts": prompts.name,
        "captured": requests,
        "distinct": distinct,
        "deployment": deployment.stem,
        "intermediate": intermediate,
        "stream_interval": stream_interval,
        "max_prompt_tokens": max_prompt_tokens,
    }
    asked = options | about | {"prompts": prompts.resolve()}
    known = {state: claimed(folder, asked) for state, folder in folders.items()}
    data = captured(prompts, work, requests=requests, seed=seed)
    fit, rest = data.split("all", 0.4, seed)
    held_out = fitting(prompts, [data.trace.ids[i] for i in rest], max_prompt_tokens)
    longest = sorted(held_out, key=lambda p: -len(p.text))[: 8 * distinct]
    repeated = work / "prefix_cache_prompts.jsonl"
    write_prompts(repeated, balanced_sample(longest, distinct, seed))
    model = widened(intermediate, work)
    workers = workers_of(wide_arguments(deployment, model, stream_interval))
    table, _ = fit_table(data.trace.subset(fit), workers, seed=seed)
    rows: list[dict[str, Any]] = []
    for state, folder in folders.items():
        arguments = wide_arguments(deployment, model, stream_interval)
        arguments["prefill_config"]["engine_kwargs"] |= {"enable_prefix_caching": state == "on"}
        kept = known[state]
        if kept is not None:
            result = kept
        else:
            with serving(arguments, port=port):
                result = compared(table, options | {"prompts": repeated}, port=port, folder=folder)
        rows += [{"prefix_cache": state, **row} for row in by_both_clocks(result, folder)]
    path = publish(
        "prefix_cache", rows, seed=seed, out=out, notes=result["notes"], inputs=result["inputs"] | about
    )
    named = [
        row | {"workload": f"prefix cache {row['prefix_cache']}"} for row in rows if row["clock"] == "even"
    ]
    value = "tpot_p50_ms"
    bars(named, "policy", value, path.with_suffix(".png"), interval=(f"{value}_low", f"{value}_high"))
    for folder in folders.values():
        finish(folder)


if __name__ == "__main__":
    run(prefix_cache)
