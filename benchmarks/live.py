"""TPOT, TTFT and active experts of every policy on real engines that run together (Figures 11 to 13).

    python -m benchmarks.live

The whole product under load: 1 prefill and 4 decode engines behind the real ingress, policies in random
order in every round (loadgen.compare). Each workload has a comparison of its own, with a table fitted on
40 % of its captured prompts and load from the others. Stopped and started again with the same options, it
goes on where it was.

On a machine with fewer cores than engines they wait for each other; then the work that a policy saves
anywhere shortens everybody's steps, and load balance matters less than it would. Hence a closed loop, and
answers in chunks of several tokens (vLLM's `stream_interval`): otherwise what the cores do for each token
between engine and client outweighs the experts. Each block begins with a policy that has seen nothing;
marginal-cost needs about 100 requests until its workers have parted, which the warm-up holds. See
decode_replay for the same without contention.

Shared machines are faster in one block than in the next. So there are two rows of each policy: `clock` wall,
and even, where time is told by the work that the cores could do in it (benchmarks/rig/pace.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from benchmarks.rig.capture import captured, groups_of
from benchmarks.rig.cluster import local_ray, unwind_on_sigterm
from benchmarks.rig.engines import WEIGHTS, our_arguments
from benchmarks.rig.options import (
    PROMPTS,
    WORK,
    CapturedOption,
    GroupsOption,
    IntermediateOption,
    MeanOutputOption,
    OutOption,
    PromptsOption,
    SeedOption,
    WorkOption,
)
from benchmarks.rig.pace import EvenClock, evened, probed
from benchmarks.rig.replay import widened
from benchmarks.streams import wait_ready
from eldr_serve.artifacts import RoutingTable
from eldr_serve.fitting import fit_table
from loadgen.figures import BASELINES, rows_of
from loadgen.plan import read_blocks
from loadgen.stats import Slo
from loadgen.workload import Prompt, read_prompts, write_prompts
from offline.calibrate import prompt_tokens
from offline.cli import BadInput, run
from offline.plots import bars
from offline.results import publish

_KEY = "live"
_KV_BYTES = 2**28  # an engine; wide experts take the rest of the memory
InFlightOption = Annotated[int, typer.Option(min=1, help="Requests in flight, closed loop.")]
DeploymentOption = Annotated[Path, typer.Option(help="Deployment YAML.")]
IntervalOption = Annotated[int, typer.Option(min=1, help="Tokens a chunk of an answer.")]
BurnInOption = Annotated[
    int, typer.Option(min=0, help="Load on engines that have just started, in no figure, s.")
]
LongestOption = Annotated[int, typer.Option(min=1, help="Longer prompts are left out, tokens.")]
POLICIES = ",".join((*BASELINES, "locality-band", "marginal-cost"))


def live(
    prompts: PromptsOption = PROMPTS,
    groups: GroupsOption = "all,language,task",
    policies: Annotated[str, typer.Option(help="Policies, with commas.")] = POLICIES,
    in_flight: InFlightOption = 64,
    rate: Annotated[float, typer.Option(min=0, help="Requests/s, Poisson arrivals; 0: closed loop.")] = 0.0,
    rounds: Annotated[int, typer.Option(min=1, help="Blocks of each policy.")] = 2,
    block_seconds: Annotated[int, typer.Option(min=5, help="Measured part of a block, s.")] = 40,
    warm_up_seconds: Annotated[int, typer.Option(min=1, help="Load before it, s.")] = 45,
    burn_in_seconds: BurnInOption = 120,
    deployment: DeploymentOption = Path("deployments/cpu_demo_4d.yaml"),
    intermediate: IntermediateOption = 1536,
    stream_interval: IntervalOption = 16,
    output_tokens: MeanOutputOption = 64,
    max_prompt_tokens: LongestOption = 256,
    requests: CapturedOption = 2400,
    port: Annotated[int, typer.Option(help="HTTP port; the next one is for metrics.")] = 8340,
    work: WorkOption = WORK,
    seed: SeedOption = 0,
    out: OutOption = None,
) -> None:
    """Serve, fit, and compare policies under the same load."""
    folders = {group: work / f"live_{group}" for group in groups_of(groups)}
    unwind_on_sigterm()
    data = captured(prompts, work, requests=requests, seed=seed)
    fit_in = fitting(prompts, data.trace.ids, max_prompt_tokens)
    arguments = wide_arguments(deployment, widened(intermediate, work), stream_interval)
    known = {group: result_of(folder) for group, folder in folders.items()}
    results = {group: result for group, result in known.items() if result is not None}
    if missing := [group for group in folders if group not in results]:
        with serving(arguments, port=port):
            for group in missing:
                fit, rest = data.split(group, 0.4, seed)
                held_out, load = {data.trace.ids[i] for i in rest}, folders[group] / "prompts.jsonl"
                load.parent.mkdir(parents=True, exist_ok=True)
                write_prompts(load, (p for p in fit_in if p.id in held_out))
                options = {
                    "policies": policies, "prompts": load, "rounds": rounds, "seed": seed,
                    **({"rate": rate} if rate else {"in-flight": in_flight}),
                    "block-seconds": block_seconds, "warm-up-seconds": warm_up_seconds,
                    "burn-in-seconds": burn_in_seconds, **lengths(output_tokens),
                }  # fmt: skip
                table, _ = fit_table(data.trace.subset(fit), workers_of(arguments), seed=seed)
                results[group] = compared(table, options, port=port, folder=folders[group])
    rows = [
        {"workload": group, **row}
        for group, folder in folders.items()
        for row in by_both_clocks(results[group], folder)
    ]
    # Of the last workload, and alike for all but for the prompts: parts of one sample.
    last = results[list(folders)[-1]]
    inputs = {k: v for k, v in last["inputs"].items() if not k.startswith("prompts")}
    path = publish(
        "live", rows, seed=seed, out=out, notes=last["notes"],
        inputs=inputs
        | {
            "prompts": str(prompts),
            "captured": requests,
            "deployment": deployment.stem,
            "intermediate": intermediate,
            "stream_interval": stream_interval,
            "max_prompt_tokens": max_prompt_tokens,
        },
    )  # fmt: skip
    value = "tpot_p50_ms_change_pct"
    low, high = f"{value}_low", f"{value}_high"
    against_itself = {value: 0.0, low: 0.0, high: 0.0}  # the best balancer
    plotted = [against_itself | row for row in rows if row["clock"] == "even"]
    bars(plotted, "policy", value, path.with_suffix(".png"), interval=(low, high))
    for folder in folders.values():
        finish(folder)


def lengths(mean: int) -> dict[str, int]:
    """Options of loadgen.compare. Answers of one length keep a closed loop in waves: all start, all end."""
    return {"min-tokens": mean // 2, "max-tokens": mean + mean // 2}


def workers_of(arguments: dict[str, Any]) -> int:
    """Decode workers of a deployment's `args`."""
    return int(arguments["decode_config"]["deployment_config"]["num_replicas"])


def wide_arguments(deployment: Path, model: Path, stream_interval: int) -> dict[str, Any]:
    """`args` of a deployment for a widened model, whose engines spend their time on experts."""
    arguments = our_arguments(deployment, model)
    for role in ("prefill_config", "decode_config"):
        arguments[role]["runtime_env"]["env_vars"].pop("VLLM_CPU_KVCACHE_SPACE", None)
        arguments[role]["engine_kwargs"] |= {
            "kv_cache_memory_bytes": _KV_BYTES,
            "stream_interval": stream_interval,
        }
    return arguments


def fitting(prompts: Path, ids: Iterable[str], most_tokens: int) -> list[Prompt]:
    """Those of the ids, without the longer ones."""
    from transformers import AutoTokenizer

    wanted, tokenizer = set(ids), AutoTokenizer.from_pretrained(WEIGHTS)
    return [
        p
        for p in read_prompts([prompts])
        if p.id in wanted and len(prompt_tokens(tokenizer, p.text, chat=True)) <= most_tokens
    ]


@contextmanager
def serving(arguments: dict[str, Any], *, port: int) -> Iterator[None]:
    """The application with these `args`, ready; metrics are at the next port."""
    arguments |= {"router": {"policy": "shortest-queue"}, "admin_key": _KEY}
    with local_ray(http_port=port, metrics_port=port + 1):
        from ray import serve

        from eldr_serve.serving.app import build_app

        serve.run(build_app(arguments), name="eldr", route_prefix="/")
        wait_ready(f"http://127.0.0.1:{port}", 300)
        yield


def compared(table: RoutingTable, options: dict[str, Any], *, port: int, folder: Path) -> dict[str, Any]:
    """Swap the table into what serves there; what loadgen.compare then says. One in the folder goes on."""
    url = f"http://127.0.0.1:{port}"
    folder.mkdir(parents=True, exist_ok=True)
    table_file, comparison = folder / "table.safetensors", folder / "comparison"
    table.save(table_file)
    key = {"authorization": f"Bearer {_KEY}"}
    answer = httpx.put(f"{url}/eldr/table", content=table_file.read_bytes(), headers=key, timeout=60)
    answer.raise_for_status()
    options |= {"host": url, "out": comparison, "metrics": f"http://127.0.0.1:{port + 1}/metrics"}
    with probed(folder / "pace"):
        done = subprocess.run(
            [sys.executable, "-m", "loadgen.compare", *(f"--{k}={v}" for k, v in options.items())],
            env=os.environ | {"ELDR_ADMIN_KEY": _KEY},
            check=False,
        )
    if done.returncode:
        (comparison / "compare.json").unlink(missing_ok=True)
        raise BadInput(f"the comparison ended with status {done.returncode}; see {comparison}")
    result = result_of(folder)
    assert result is not None
    return result


def result_of(folder: Path) -> dict[str, Any] | None:
    """What the comparison in the folder said, until `finish`; None if it has not ended."""
    file = folder / "comparison" / "compare.json"
    if not file.exists():
        return None
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def by_both_clocks(result: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Rows of the folder's `result_of` by the wall's clock, and by one that goes as fast as the cores."""
    asked, clock = result["inputs"], EvenClock.read(folder / "pace")
    even = rows_of(
        asked["policies"],
        [evened(block, clock) for block in read_blocks(folder / "comparison")],
        warm_up_s=asked["warm_up_s"],
        seconds=asked["seconds"],
        slo=Slo(asked["slo_ttft_ms"], asked["slo_tpot_ms"]),
        seed=asked["seed"],
    )
    by_clock = {"wall": result["rows"], "even": even}
    return [{"clock": name, **row} for name, rows in by_clock.items() for row in rows]


def finish(folder: Path) -> None:
    """The comparison's figures are published: the next run is another. Its report stays."""
    shutil.rmtree(folder / "pace", ignore_errors=True)
    shutil.rmtree(folder / "published", ignore_errors=True)
    (folder / "comparison").rename(folder / "published")


if __name__ == "__main__":
    run(live)
