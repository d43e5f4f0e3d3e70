"""Locality and the prefix cache add up (counterpart of the paper's Figure 17).

    python -m benchmarks.prefix_cache

Few prompts, asked again and again, with the prefill engine's prefix cache on and then off; each policy
under the same load, as in benchmarks/live.py. The cache should lower TTFT for every policy and leave
TPOT as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.live import finish, served, workers_of
from benchmarks.rig.capture import captured
from benchmarks.rig.cluster import unwind_on_sigterm
from benchmarks.rig.engines import our_arguments
from benchmarks.rig.options import (
    PROMPTS,
    WORK,
    CapturedOption,
    OutOption,
    PromptsOption,
    SeedOption,
    WorkOption,
)
from benchmarks.rig.replay import widened
from eldr_serve.fitting import fit_table
from loadgen.workload import balanced_sample, read_prompts, write_prompts
from offline.cli import run
from offline.results import publish

POLICIES = "round-robin,locality-band,marginal-cost"


def prefix_cache(
    prompts: PromptsOption = PROMPTS,
    distinct: Annotated[int, typer.Option(min=1, help="Distinct prompts, the longest of a sample.")] = 48,
    policies: Annotated[
        str, typer.Option(help="Policies, with commas.")
    ] = "round-robin,locality-band,marginal-cost",
    rate: Annotated[float, typer.Option(min=0.1, help="Requests/s, Poisson arrivals.")] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, help="Blocks of each policy and cache state.")] = 4,
    block_seconds: Annotated[int, typer.Option(min=5, help="Measured part of a block, s.")] = 25,
    deployment: Annotated[Path, typer.Option(help="Deployment YAML.")] = Path("deployments/cpu_demo.yaml"),
    intermediate: Annotated[int, typer.Option(min=32, help="Neurons an expert.")] = 512,
    requests: CapturedOption = 2400,
    port: Annotated[int, typer.Option(help="HTTP port; the next one is for metrics.")] = 8350,
    work: WorkOption = WORK,
    seed: SeedOption = 0,
    out: OutOption = None,
) -> None:
    """Compare policies with the prefix cache on and off."""
    unwind_on_sigterm()
    data = captured(prompts, work, requests=requests, seed=seed)
    sample = balanced_sample(read_prompts([prompts]), 8 * distinct, seed)
    longest = sorted((p for p in sample if len(p.text) < 3000), key=lambda p: -len(p.text))[:distinct]
    repeated = work / "prefix_cache_prompts.jsonl"
    write_prompts(repeated, longest)
    model = widened(intermediate, work)
    table, _ = fit_table(data.trace, workers_of(our_arguments(deployment, model)), seed=seed)
    rows: list[dict[str, Any]] = []
    folders = {state: work / f"prefix_cache_{state}" for state in ("on", "off")}
    for state in folders:
        arguments = our_arguments(deployment, model)
        arguments["prefill_config"]["engine_kwargs"] |= {"enable_prefix_caching": state == "on"}
        options = {
            "policies": policies, "prompts": repeated, "rate": rate, "rounds": rounds, "seed": seed,
            "block-seconds": block_seconds, "warm-up-seconds": 8,
        }  # fmt: skip
        result = served(arguments, table, options, port=port, folder=folders[state])
        rows += [{"prefix_cache": state, **row} for row in result["rows"]]
    publish(
        "prefix_cache", rows, seed=seed, out=out, notes=result["notes"],
        inputs=result["inputs"]
        | {"distinct": distinct, "deployment": deployment.stem, "intermediate": intermediate},
    )  # fmt: skip
    for folder in folders.values():
        finish(folder)


if __name__ == "__main__":
    run(prefix_cache)
