"""Measure BalanceRoute's policies where ranks wait for each other in every step (BalanceRoute, section 6).

    python -m benchmarks.serving.barrier --trace azure_conv.csv.gz --trace azure_code.csv.gz

One prefill engine serves one decode engine, whose data-parallel ranks are the workers. The policies take
turns on the running service, in a random order in each round, with the same requests in a round. The load is
a closed loop with more requests in flight than slots, as in the paper, so that requests wait and policies
choose among them. Each rank writes its KV tokens in each step. Requests that still wait at the end are not
measured. With many of them and short trials, a policy that postpones long prompts would look faster; column
`kv_tokens` would show that.

Prompts have the lengths of the trace, scaled to a mean, and are beginnings of a few texts that the prefill
engine has in its prefix cache. So prefill takes little of the cores that it shares with the ranks. The paper
has separate machines for it. The demo model gets attention heads of zeros, so that KV tokens cost a large
part of a step, as in larger models. Decode engines cache no prefixes: each request has its own KV. Answers
have exactly `max_tokens` tokens, which the router knows. So `balance-route-horizon` knows which requests end
within its horizon, as with the paper's oracle.

Policy `vllm` is vLLM's own balancer. The router then places requests as under `shortest-queue`, but decode
engines ignore the rank (`benchmarks/lib/barrier/any_rank.py`), and vLLM chooses it from the number of
requests that it counts on each rank. Neither policy has a decode queue. Under both, all requests in flight
are therefore at the engine after their prefill. Those beyond the slots wait for a slot of their rank, as in
plain vLLM.

The simulator predicts each trial, with the time of steps and hand-overs fitted to the trials of the other
policies. It has no experts, so its `balance-band` acts as `balance-route-horizon`. It does not predict
`vllm`, whose columns are empty, and whose trials no prediction uses.

The same options resume a stopped run. With `--keep` the trials stay after the result is written, and the same
options with more policies add those. Policies that are added take turns only with each other.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.lib import options
from benchmarks.lib.barrier.any_rank import HEADER as ANY_RANK
from benchmarks.lib.barrier.predicted import BarrierPrediction, fit_cost, fit_handover_s, predict
from benchmarks.lib.barrier.requests import (
    TraceScale,
    order_for_round,
    read_stems,
    request_bodies,
    request_body,
)
from benchmarks.lib.barrier.rows import BASE, policy_rows
from benchmarks.lib.barrier.steps import RECORD_FOLDER_ENV, read_steps
from benchmarks.lib.barrier.trial import BarrierTrial, ClosedLoop, timed_loop
from benchmarks.lib.client import Send, closed_loop, completion_sender, count_failures, open_session
from benchmarks.lib.cluster import unwind_on_sigterm
from benchmarks.lib.engines import our_arguments
from benchmarks.lib.ep.engine_options import Minutes
from benchmarks.lib.ep.turns import measure_in_turns
from benchmarks.lib.live import serve_shortest_queue_without_pool
from benchmarks.lib.replay.schedule import widen_model
from eldr_serve.arrays import Ints
from eldr_serve.commands.client import OperatorClient
from eldr_serve.commands.run import run
from eldr_serve.errors import UserInputError
from eldr_serve.scheduling import Policy, make_policy
from eldr_serve.scheduling.policies.base import QueuedPolicy
from eldr_serve.scheduling.policies.registry import policy_class
from loadgen.journal import Journal
from loadgen.results import column_notes, publish
from loadgen.traces import read_arrival_trace
from loadgen.trial import parse_policy, schedule_trials
from offline.simulation.cluster import Cluster, Decode

BENCHMARKS = {"barrier": "named"}
POLICIES = f"{BASE},balance-route,balance-route-horizon,balance-band"
VLLM = "vllm"  # vLLM's own balancer
_INTERMEDIATE = 32  # neurons per expert of the demo model itself
_LONG_WAITS = {"kv_lease_s": 150.0, "queue_timeout_s": 110.0, "slot_wait_s": 110.0, "prefill_queue_s": 110.0}
_NOT_INPUTS = ("minutes", "keep", "port", "work", "out")
_NOTES = column_notes(
    "Figures of KV tokens are means over steps. Changes are against shortest-queue.",
    {
        "spread": "Difference between the ranks with the most and the fewest KV tokens in a step.",
        "imbalance": "Number of ranks times the KV tokens of the fullest, less the sum over all ranks.",
        "below": "How many times smaller the figure is than that of shortest-queue.",
        "error": "Deviation of the simulated value from the measured one.",
    },
)
Key = tuple[str, int, str]  # trace, round, policy


def policy_and_parameters(text: str, slots: int) -> tuple[str, dict[str, Any]]:
    """Return name and parameters of the router's policy, with the ranks' slots if the policy uses them.

    Args:
        text: `name:parameter=value`, or VLLM.
        slots: requests that a rank runs at once.
    """
    if text == VLLM:
        return BASE, {}
    name, parameters = parse_policy(text)
    has_slots = "slots" in policy_class(name).Parameters.model_fields
    return name, ({"slots": slots} if has_slots else {}) | parameters


def barrier_arguments(
    deployment: Path, model: Path, *, ranks: int, slots: int, context: int, stream_interval: int, folder: Path
) -> dict[str, Any]:
    """Return a deployment's `args` with `ranks` ranks, whose schedulers write their steps to `folder`."""
    arguments = our_arguments(deployment, model)
    shared = {"max_model_len": context, "max_num_batched_tokens": context, "stream_interval": stream_interval}
    for role in ("prefill_config", "decode_config"):
        arguments[role]["engine_kwargs"] |= shared
    arguments["decode_config"]["engine_kwargs"] |= {
        "data_parallel_size": ranks,
        "max_num_seqs": slots,
        "enable_prefix_caching": False,
        "scheduler_cls": "benchmarks.lib.barrier.recording.RecordingScheduler",
    }
    arguments["decode_config"]["runtime_env"]["env_vars"] |= {
        RECORD_FOLDER_ENV: str(folder.resolve()),
        "ELDR_ENGINE_BACKEND": "benchmarks.lib.barrier.any_rank:AnyRankBackend",
    }
    return arguments | {"path": _LONG_WAITS}


def schedule(traces: list[str], policies: list[str], rounds: int, seed: int) -> list[Key]:
    """Return the trials: in each round each trace with each policy, in a random order."""
    trials = schedule_trials(policies, rounds * len(traces), seed)
    return [(traces[each.round % len(traces)], each.round // len(traces), each.policy) for each in trials]


@contextmanager
def _service(
    arguments: dict[str, Any], folder: Path, stems: list[list[int]], port: int
) -> Iterator[OperatorClient]:
    """Run the application. The prefill engine has all stems in its prefix cache."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with serve_shortest_queue_without_pool(arguments, port=port) as service:
        asyncio.run(
            _send_one_by_one(completion_sender(service.url), [request_body(stem, 2) for stem in stems])
        )
        yield service


async def _send_one_by_one(send: Send, bodies: list[dict[str, Any]]) -> None:
    async with open_session() as http:
        answers = await closed_loop(
            lambda number: send(http, bodies[number]), requests=len(bodies), in_flight=1
        )
    if failures := count_failures(answers):
        raise UserInputError(f"the service does not answer: {failures}")


def _measure(
    service: OperatorClient,
    key: Key,
    *,
    lengths: dict[str, Ints],
    stems: list[list[int]],
    load: ClosedLoop,
    folder: Path,
    ranks: int,
    rounds: int,
    seed: int,
) -> dict[str, Any]:
    """Measure a trial, and return it as JSON."""
    trace, number, policy = key
    service.wait_idle()
    service.set_policy(*policy_and_parameters(policy, load.slots))
    bodies = request_bodies(order_for_round(lengths[trace], number, rounds), stems, 1000 * seed + number)
    seconds = load.warm_up_s + load.seconds
    send = completion_sender(service.url, {ANY_RANK: "1"} if policy == VLLM else None)
    loop = timed_loop(send, bodies, in_flight=load.in_flight, seconds=seconds)
    trial = BarrierTrial.from_answers(load, *asyncio.run(loop), read_steps(folder, ranks))
    spread, p99 = trial.steps.spread.mean(), np.nanquantile(trial.tpot_ms, 0.99)
    typer.echo(f"{trace}, round {number + 1}, {policy}: spread {spread:.0f}, TPOT p99 {p99:.1f} ms", err=True)
    return trial.to_json()


def trials_of(
    trace: str, policies: list[str], rounds: int, measured: dict[Key, Any]
) -> dict[str, list[BarrierTrial]]:
    """Return the trials of a trace by policy, round by round."""
    return {
        policy: [BarrierTrial.from_json(measured[trace, number, policy]) for number in range(rounds)]
        for policy in policies
    }


def _has_queue(policy: Policy) -> bool:
    return isinstance(policy, QueuedPolicy) and policy.has_queue


def predictions_of(
    trials: dict[str, list[BarrierTrial]], lengths: Ints, load: ClosedLoop, seed: int
) -> dict[str, list[BarrierPrediction]]:
    """Return the predictions of a trace's trials by policy, without VLLM.

    The cost of a step is fitted to the other policies' trials. The hand-over is fitted to the trials of all
    policies with a decode queue.
    """
    trials = {policy: rounds for policy, rounds in trials.items() if policy != VLLM}
    makers: dict[str, Callable[[], Policy]] = {}
    for policy in trials:
        name, parameters = policy_and_parameters(policy, load.slots)
        makers[policy] = partial(make_policy, name, **parameters)
    steps = {policy: [trial.steps for trial in policy_trials] for policy, policy_trials in trials.items()}
    queued = chain.from_iterable(steps[policy] for policy, make in makers.items() if _has_queue(make()))
    handover_s = fit_handover_s([*queued], load.slots, float(lengths[:, 1].mean()))
    ranks = next(iter(steps.values()))[0].kv_tokens.shape[1]
    predictions = {}
    for policy, policy_trials in trials.items():
        others = chain.from_iterable(steps[other] for other in steps if other != policy)
        decode = Decode(
            workers=ranks, max_batch=load.slots, barrier=True, cost=fit_cost([*others] or steps[policy])
        )
        cluster = Cluster(decode=decode, handover_fixed_s=handover_s)
        predictions[policy] = [
            predict(
                makers[policy],
                order_for_round(lengths, number, len(policy_trials)),
                load,
                cluster,
                2 * trial.sent,
                seed,
            )
            for number, trial in enumerate(policy_trials)
        ]
    return predictions


def _named_policies(policies: str) -> list[str]:
    """Return the policies. Raise UserInputError unless each is valid and BASE is one of them."""
    names = policies.split(",")
    for text in names:
        name, parameters = policy_and_parameters(text, slots=1)
        make_policy(name, **parameters)
    if BASE not in names or len(set(names)) < len(names):
        raise UserInputError(f"--policies are {policies}: each must be named once, and {BASE} among them")
    return names


def barrier(
    trace: Annotated[list[Path], typer.Option(help="Request trace whose lengths are used; repeatable.")],
    prompts: options.Prompts = options.PROMPTS,
    policies: Annotated[
        str, typer.Option(help=f"Policies or {VLLM}, comma-separated; parameters: name:parameter=value.")
    ] = POLICIES,
    ranks: Annotated[int, typer.Option(min=2, help="Data-parallel ranks; each wants a core.")] = 2,
    slots: Annotated[int, typer.Option(min=1, help="Requests that a rank runs at once.")] = 8,
    in_flight: options.InFlight = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Trials of each policy and trace.")] = 4,
    trial_seconds: Annotated[float, typer.Option(min=2, help="Measured part of a trial, s.")] = 45.0,
    warm_up_seconds: Annotated[float, typer.Option(min=1, help="Load before the measured part, s.")] = 15.0,
    prompt_tokens: Annotated[float, typer.Option(min=1, help="Mean tokens of a prompt.")] = 1200.0,
    output_tokens: Annotated[float, typer.Option(min=2, help="Mean tokens of an answer.")] = 96.0,
    longest_output: Annotated[int, typer.Option(min=2, help="Maximum tokens of an answer.")] = 384,
    context: Annotated[int, typer.Option(min=64, help="Maximum tokens of prompt and answer.")] = 4096,
    heads: Annotated[int, typer.Option(min=3, help="Attention heads; those beyond 3 are zero.")] = 24,
    minutes: Minutes = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the trials, to add policies.")] = False,
    deployment: options.Deployment = Path("deployments/cpu_demo_wide_ep.yaml"),
    stream_interval: options.Interval = 8,
    port: options.Port = 8380,
    work: options.Work = options.WORK,
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Compare policies on ranks that step together: imbalance, TPOT and the simulator's prediction."""
    unwind_on_sigterm()
    inputs: dict[str, Any] = {key: value for key, value in locals().items() if key not in _NOT_INPUTS}
    inputs |= {"trace": [path.name for path in trace]}
    inputs |= {"prompts": prompts.name, "deployment": deployment.stem}
    names, load = _named_policies(policies), ClosedLoop(slots, in_flight, warm_up_seconds, trial_seconds)
    scale = TraceScale(prompt_tokens, output_tokens, longest_output, context)
    lengths = {path.name.partition(".")[0]: scale.lengths(read_arrival_trace(path)) for path in trace}
    stems, folder = read_stems(prompts, scale.longest_prompt), work / "barrier_steps"
    sizes: dict[str, Any] = {"ranks": ranks, "slots": slots, "context": context}
    sizes |= {"stream_interval": stream_interval, "folder": folder}
    settings: dict[str, Any] = {"lengths": lengths, "stems": stems, "load": load, "folder": folder}
    measure = partial(_measure, **settings, ranks=ranks, rounds=rounds, seed=seed)
    journal = Journal(work / "barrier.jsonl", inputs, varying=("policies",))

    def start() -> AbstractContextManager[OperatorClient]:
        model = widen_model(_INTERMEDIATE, work, heads=heads)
        return _service(barrier_arguments(deployment, model, **sizes), folder, stems, port)

    measured = measure_in_turns(journal, schedule([*lengths], names, rounds, seed), start, measure, minutes)
    rows: list[dict[str, Any]] = []
    for name, of_trace in lengths.items():
        trials = trials_of(name, names, rounds, measured)
        rows += policy_rows(name, trials, predictions_of(trials, of_trace, load, seed), seed)
    publish("barrier", rows, inputs=inputs, seed=seed, out=out, notes=_NOTES)
    if not keep:
        journal.remove()


if __name__ == "__main__":
    run(barrier)
