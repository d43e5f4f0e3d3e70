"""Compare the saving that the live page's shadow policy predicts with the measured saving.

    python -m benchmarks.serving.shadow

Two policies take turns under the same load, each with the other as its shadow. `change_pct` is the change
from the second to the first policy. Figures:

    priced, ... live   the shadow's price, while that policy is live
    step               decode step time per token, as the engines measured it, which the shadow prices
                       (step ms per token in `eldr compare`)
    engine             time of all decode steps over their tokens
    tpot               mean TPOT at the client, including transport and contention for the cores
    experts            active experts of a decode step (no time)

`off_pct` is the change minus the change of `step`, in points. On CPUs `step` and `engine` are CPU times of
the engine's thread, so contention affects only `tpot`. Intervals resample rounds, whose trials all have the
same requests. Requests that begin before the measured part or end after it do not count. The same options
resume a stopped run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from benchmarks.lib import options
from benchmarks.lib.cluster import unwind_on_sigterm
from benchmarks.lib.live import length_options, serve_shortest_queue_without_pool, wide_arguments
from benchmarks.lib.prompts import MODEL, no_longer_than
from benchmarks.lib.replay.schedule import widen_model
from eldr_serve.commands.client import OperatorClient
from eldr_serve.commands.run import run
from eldr_serve.errors import ServiceFailedError, UserInputError
from loadgen.journal import Journal
from loadgen.results import publish
from loadgen.statistics import interval, resampled_counts
from loadgen.trial import LoadSpec, ScheduledTrial, parse_policy, run_trial, schedule_trials
from loadgen.workload import read_prompts, write_prompts

BENCHMARKS = {"shadow": "all"}
_SUMS = ("tokens", "live", "shadow", "steps", "requests", "active_experts", "seconds", "token_seconds")
_STARTS_S = 4.0  # start of the load generator, whose clock is behind a trial's by this time


@dataclass(frozen=True)
class Part:
    """Sums of the measured part of one trial. From `steps` on they are OperatorClient.decode_totals."""

    tokens: float  # tokens that were priced
    live: float  # price of these tokens under the live policy, s
    shadow: float  # price of these tokens under the shadow policy, s
    steps: float
    requests: float
    active_experts: float
    seconds: float
    token_seconds: float
    tpot: float  # mean of the requests that ended in this part
    step_cost: dict[str, float]  # the cost fitted at the end of the part


def read_sums(status: dict[str, Any]) -> NDArray[np.float64]:
    """Read float64[8] from a status, in the order of _SUMS."""
    now, totals = status["comparison"]["now"], status["decode_totals"]
    tokens = now.get("tokens") or 0
    priced = [tokens, *(tokens * (now.get(name) or 0.0) / 1e3 for name in ("live_ms", "shadow_ms"))]
    return np.array([*priced, *(totals[name] for name in _SUMS[3:])])


def make_rows(policies: tuple[str, str], parts: dict[str, list[Part]], seed: int) -> list[dict[str, Any]]:
    """Make one row per figure of the module's list, from each policy's trials by round."""
    first, second = policies
    a, b = parts[first], parts[second]
    pairs = {
        f"priced, {first} live": ([p.live / p.tokens for p in a], [p.shadow / p.tokens for p in a]),
        f"priced, {second} live": ([p.shadow / p.tokens for p in b], [p.live / p.tokens for p in b]),
        "step": ([p.token_seconds / p.requests for p in a], [p.token_seconds / p.requests for p in b]),
        "engine": ([p.seconds / p.requests for p in a], [p.seconds / p.requests for p in b]),
        "tpot": ([p.tpot for p in a], [p.tpot for p in b]),
        "experts": ([p.active_experts / p.steps for p in a], [p.active_experts / p.steps for p in b]),
    }
    counts = resampled_counts(np.arange(len(a)), seed=seed, whole_rounds=True)
    step, step_draws = _change(pairs["step"], counts)
    result = []
    for name, pair in pairs.items():
        change, draws = _change(pair, counts)
        unit = 1.0 if name == "experts" else 1e3
        row: dict[str, Any] = {"figure": name, "rounds": len(a)}
        row |= zip((first, second), (unit * float(np.mean(values)) for values in pair), strict=True)
        row |= zip(("change_pct", "low_pct", "high_pct"), interval(change, draws), strict=True)
        off = interval(change - step, draws - step_draws)
        timed = name not in ("step", "experts")
        names = ("off_pct", "off_low_pct", "off_high_pct")
        result.append(row | {key: value if timed else None for key, value in zip(names, off, strict=True)})
    return result


def _change(
    pair: tuple[list[float], list[float]], counts: NDArray[np.int32]
) -> tuple[float, NDArray[np.float64]]:
    """Return the change of the first mean against the second in percent, and that of each resample."""
    values, base_values = (np.array(values) for values in pair)
    return float(100 * (values.mean() / base_values.mean() - 1)), 100 * (
        (counts @ values) / (counts @ base_values) - 1
    )


def _measure(
    service: OperatorClient, step: ScheduledTrial, shadow: str, load: LoadSpec, scratch: Path
) -> Part:
    service.set_shadow(*parse_policy(shadow))
    ends: list[NDArray[np.float64]] = []
    marks_s = (load.warm_up_s + _STARTS_S, load.warm_up_s + load.seconds)
    costs: dict[str, float] = {}

    def tick(elapsed_s: float) -> None:
        if len(ends) < len(marks_s) and elapsed_s >= marks_s[len(ends)]:
            status = service.status()
            ends.append(read_sums(status))
            costs.update(status["step_cost"])

    trial = run_trial(service, step, load, scratch=scratch, tick=tick)
    if failed := sum("error" in record for record in trial.requests):
        raise ServiceFailedError(f"{failed} requests of {step.key} failed")
    tpot = [record["tpot_s"] for record in trial.measured_requests(load.warm_up_s, load.seconds)]
    tpot_s = [value for value in tpot if value is not None]
    if len(ends) < len(marks_s) or not tpot_s or (ends[1] - ends[0])[[0, 4]].min() <= 0:
        raise UserInputError(f"{step.key} measured nothing: make trials longer")
    first, last = ends
    between: dict[str, Any] = dict(zip(_SUMS, (last - first).tolist(), strict=True))
    return Part(**between, tpot=float(np.mean(tpot_s)), step_cost=costs)


def shadow(
    policies: options.TwoPolicies = "marginal-cost,shortest-queue",
    intermediate: Annotated[str, typer.Option(help="Neurons per expert; 1024 are 0.98 MB.")] = "64,1536",
    prompts: options.Prompts = options.PROMPTS,
    in_flight: options.InFlight = 32,
    rounds: Annotated[int, typer.Option(min=2, help="Trials of each policy.")] = 4,
    trial_seconds: Annotated[int, typer.Option(min=10, help="Measured part of a trial, s.")] = 24,
    warm_up_seconds: Annotated[int, typer.Option(min=1, help="Load before the measured part, s.")] = 12,
    deployment: options.Deployment = Path("deployments/cpu_demo.yaml"),
    stream_interval: options.Interval = 8,
    output_tokens: options.MeanOutput = 80,
    max_prompt_tokens: options.Longest = 128,
    port: options.Port = 8360,
    work: options.Work = options.WORK,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Measure the saving that the shadow predicts, with each of two policies live in turn."""
    unwind_on_sigterm()
    names, widths = options.two_policies(policies), _widths(intermediate)
    inputs: dict[str, Any] = {"policies": policies, "intermediate": intermediate, "prompts": prompts.name}
    inputs |= {"in_flight": in_flight, "rounds": rounds, "trial_seconds": trial_seconds}
    inputs |= {"warm_up_seconds": warm_up_seconds, "deployment": deployment.stem}
    inputs |= {"stream_interval": stream_interval, "output_tokens": output_tokens}
    inputs |= {"max_prompt_tokens": max_prompt_tokens, "seed": seed}
    journal = Journal(work / "shadow.jsonl", inputs)
    steps = schedule_trials([*names], rounds, seed)
    prompts_file, lengths = work / "shadow_prompts.jsonl", length_options(output_tokens)
    work.mkdir(parents=True, exist_ok=True)
    write_prompts(prompts_file, no_longer_than(read_prompts([prompts]), max_prompt_tokens, chat=True))
    most, least = lengths["max-tokens"], lengths["min-tokens"]
    load = LoadSpec(
        str(prompts_file), MODEL, 0.0, trial_seconds, warm_up_seconds, in_flight, most, 0.8, least
    )
    all_rows = []
    for width in widths:
        key = partial("{}, {}".format, width)
        if missing := [step for step in steps if journal.get(key(step.key)) is None]:
            arguments = wide_arguments(deployment, widen_model(width, work), stream_interval)
            with serve_shortest_queue_without_pool(arguments, port=port) as service:
                for step in missing:
                    (other_policy,) = {*names} - {step.policy}
                    typer.echo(f"experts of {width}: {step.policy}, round {step.round + 1}", err=True)
                    journal.put(key(step.key), asdict(_measure(service, step, other_policy, load, work)))
        parts = {
            name: [Part(**journal.get(key(step.key))) for step in steps if step.policy == name]
            for name in names
        }
        all_rows += [{"intermediate": width, **row} for row in make_rows(names, parts, seed)]
    publish(
        "shadow",
        all_rows,
        inputs=inputs,
        seed=seed,
        out=out,
        notes="Values are in ms, except for experts. off_pct is the change minus the change of step, in "
        "percentage points. The 95 % intervals are by bootstrap over few rounds.",
    )
    journal.remove()


def _widths(text: str) -> list[int]:
    widths = options.numbers("--intermediate", text)
    if min(widths) < 32 or len(set(widths)) < len(widths):
        raise UserInputError(
            f"--intermediate must be different comma-separated numbers, 32 or more, got {text!r}"
        )
    return widths


if __name__ == "__main__":
    run(shadow)
