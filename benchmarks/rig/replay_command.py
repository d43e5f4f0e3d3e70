"""A benchmark that is a comparison by replay and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.rig.options import (
    PROMPTS,
    WORK,
    BatchOption,
    CapturedOption,
    GroupsOption,
    IntermediateOption,
    OutOption,
    OutputOption,
    PerWorkerOption,
    PromptsOption,
    SeedOption,
    WorkersOption,
    WorkOption,
)
from benchmarks.rig.replay import Arm, Bench, loads_of, rows_of
from offline.plots import bars
from offline.results import publish


def replay_command(
    name: str,
    arms: Sequence[Arm],
    *,
    baselines: Sequence[str],
    default_workers: str = "8",
    default_groups: str = "language,task",
    default_batch: str = "16",
) -> Callable[..., None]:
    """The command `name`: `arms` on each load, against the best of `baselines`."""

    def command(
        prompts: PromptsOption = PROMPTS,
        workers: WorkersOption = default_workers,
        groups: GroupsOption = default_groups,
        per_worker: PerWorkerOption = 40,
        batch: BatchOption = default_batch,
        output_tokens: OutputOption = 64,
        intermediate: IntermediateOption = 1024,
        requests: CapturedOption = 2400,
        work: WorkOption = WORK,
        seed: SeedOption = 0,
        out: OutOption = None,
    ) -> None:
        """Place requests in each arm and replay every worker's schedule on one engine."""
        loads = loads_of(groups, workers, batch, per_worker)
        bench = Bench(
            prompts,
            requests=requests,
            output_tokens=output_tokens,
            intermediate=intermediate,
            work=work,
            seed=seed,
        )
        rows = [row for case in bench.compare(loads, arms) for row in rows_of(case, baselines, seed)]
        path = publish(
            name, rows, inputs=bench.inputs | {"per_worker": per_worker, "batch": batch}, seed=seed, out=out,
            notes="placed in simulation, steps measured on one real engine, one worker at a time; changes "
            f"against {' or '.join(baselines)}, 95 % intervals by bootstrap over requests",
        )  # fmt: skip
        bars(
            rows, "arm", "p50_change_pct", path.with_suffix(".png"), interval=("p50_low_pct", "p50_high_pct")
        )

    return command
