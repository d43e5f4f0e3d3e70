"""Whole replicas, whose steps also compute prompts: requests placed by load, prefix, experts or all three.

Every policy serves the same requests on workers with prefix caches. Requests use the experts of observed ones
(a calibration trace with routes and token ids). `marginal-cost` gets predicted counts for a request's tokens,
from a predictor fitted to CALIBRATION prompts that no request uses, and the true counts after prefill. A
prompt longer than the observed one begins with other prompts of its domain, the same for all requests of a
session or an application, so its counts say less about the experts of its answer. There are three workloads:

- many domains: prompts of all domains without common prefixes, at Poisson arrivals.
- sessions: Mooncake's conversation trace with its arrivals and prefix blocks. Prompts are divided by SHRINK,
  so that one of the trace's blocks is one block of an engine. A session has one domain.
- system prompts: applications, a few of them popular, each with a long system prompt and one domain, at
  Poisson arrivals.

Costs are those of the `eldr` figures, including a prompt token's. The prefix map of sent prompts nearly
equals the content of the simulated caches, since these evict only by size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib.active_experts import active_experts
from benchmarks.papers.figures.common import (
    Options,
    Rows,
    bar_plot,
    change_pct,
    each_seed,
    mean,
    own_figure,
    summarise_seeds,
)
from benchmarks.papers.figures.eldr import BALANCERS, COST, PREFILL
from benchmarks.papers.prefix_policies import LongestPrefix, SessionHash
from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.signature_predictor import SignaturePredictor
from eldr_serve.scheduling import Policy, StepCost, make_policy
from loadgen.traces import BLOCK_TOKENS, RecordedArrival, read_arrival_trace
from offline.predictor import fit_signature_predictor
from offline.scenario import read_calibration_trace
from offline.simulation.cluster import Cluster, Decode, Whole
from offline.simulation.requests import Experts, Requests
from offline.simulation.run import simulate

WORKERS = (8, 16)
BATCH = 16  # target batch size of the arrivals, without cached prefixes
LOAD = 0.9  # load relative to BATCH
PER_WORKER = 200  # requests per worker
CALIBRATION = 300  # prompts to fit the predictor
SHRINK = 16  # divisor of a trace's prompt lengths
SHRINK_ANSWERS = 4
BLOCK = BLOCK_TOKENS // SHRINK  # tokens, as in the deployments on CPU
CACHE_BLOCKS = 2000  # 64,000 tokens
APPLICATIONS, SYSTEM_BLOCKS = 96, 32  # their prompts are together more than a worker's cache
OUR_COST = replace(COST, per_prompt_token_s=PREFILL.per_token_s)
METRICS = ("tpot_p50_ms", "tpot_p99_ms", "ttft_p50_ms", "ttft_p99_ms")

BASELINES: dict[str, Callable[[], Policy]] = {
    **{name: partial(make_policy, name) for name in BALANCERS},
    "session-hash": SessionHash,
    "longest-prefix": LongestPrefix,
}
OURS = "marginal-cost"
DECODE_ALONE, TRUE_COUNTS = f"{OURS}, of decode alone", f"{OURS}, with true counts"
Index = NDArray[np.int64]


@dataclass(frozen=True)
class Inputs:
    """Inputs of a study: observed requests, their experts, recorded arrivals, and the step cost."""

    trace: CalibrationTrace
    experts: Experts
    records: list[RecordedArrival]
    cost: StepCost

    @classmethod
    def read(cls, routes_path: Path, trace_path: Path, cost: StepCost) -> Inputs:
        """Read routes with token ids and a trace of arrivals with prefix blocks.

        Raises:
            UserInputError: a file or the cost lacks what the study needs.
        """
        trace, records = read_calibration_trace(routes_path), read_arrival_trace(trace_path)
        if not all(record.hash_ids for record in records):
            raise UserInputError(f"{trace_path} has no prefix blocks; give Mooncake's conversation trace")
        if trace.token_ids is None:
            raise UserInputError(f"{routes_path} has no token ids; make it with offline.calibrate --routes")
        if len(trace.ids) <= 2 * CALIBRATION:
            raise UserInputError(
                f"{routes_path} has {len(trace.ids)} prompts; give more than {2 * CALIBRATION}"
            )
        if not cost.per_prompt_token_s:
            raise UserInputError("the step cost has no prompt tokens; fit it to whole replicas")
        return cls(trace, Experts.from_trace(trace), records, cost)


class WholeCase:
    """The requests of a workload and a seed, which `outcome` simulates under a policy.

    Args:
        number: total requests; None: PER_WORKER for each worker.

    Attributes:
        own: each request's experts, with predicted counts.
    """

    def __init__(self, inputs: Inputs, name: str, workers: int, number: int | None, seed: int) -> None:
        rng = np.random.default_rng([seed, workers])
        trace, number = inputs.trace, number or PER_WORKER * workers
        fit, members = np.split(np.random.default_rng(seed).permutation(len(trace.ids)), [CALIBRATION])
        predictor, _ = fit_signature_predictor(trace.subset_without_routes(fit))
        requests = {
            "many domains": lambda: _many_domains(trace, members, number, rng),
            "sessions": lambda: _sessions(trace, members, inputs.records, number, rng),
            "system prompts": lambda: _system_prompts(trace, members, number, rng),
        }[name]()
        requests = _rescale_to_load(requests, inputs.experts, inputs.cost, workers)
        self.own = _own_experts(trace, inputs.experts, requests, members, predictor, seed)
        self._requests = replace(requests, kind=np.arange(number))
        whole = Whole(cache_blocks=CACHE_BLOCKS, block_tokens=BLOCK)
        self._cluster = Cluster(decode=Decode(workers=workers, cost=inputs.cost, whole=whole))
        self._seed = seed

    def outcome(
        self, policy: Policy, step_cost: StepCost | None = None, known: Experts | None = None
    ) -> dict[str, float]:
        """Return the figures under a new policy, by default with the true step cost and predicted counts."""
        requests = self._requests
        policy.update_cost_model(step_cost or self._cluster.decode.cost)
        simulated = simulate(requests, policy, self._cluster, experts=known or self.own, seed=self._seed)
        summary = simulated.summary()
        cached = 100 * float(simulated.cached_tokens.sum() / requests.prompt_tokens.sum())
        keys = (*METRICS, "output_tokens_per_s", "active_experts", "batch_size")
        per_s = len(requests) / float(np.nanmax(simulated.last_s) - requests.arrival_s[0])
        return {key: summary[key] for key in keys} | {"cached_pct": cached, "requests_per_s": per_s}


def policies(options: Options) -> Rows:
    """Compare policies by workload and workers: times, and changes against each seed's best balancer."""
    routes_path, trace_path = options.two_traces()
    inputs = Inputs.read(routes_path, trace_path, options.cost or OUR_COST)
    needed = options.requests or PER_WORKER * max(WORKERS)
    if needed > len(inputs.records):
        raise UserInputError(f"{trace_path} has {len(inputs.records)} requests, but {needed} are needed")

    def run(case: tuple[str, int], seed: int) -> dict[str, dict[str, Any]]:
        prepared_case = WholeCase(inputs, *case, options.requests, seed)
        figures = {name: prepared_case.outcome(make()) for name, make in BASELINES.items()}
        figures[DECODE_ALONE] = prepared_case.outcome(
            make_policy(OURS), replace(inputs.cost, per_prompt_token_s=0.0)
        )
        figures[OURS] = prepared_case.outcome(make_policy(OURS))
        figures[TRUE_COUNTS] = prepared_case.outcome(
            make_policy(OURS), known=replace(prepared_case.own, predicted=None)
        )
        return figures

    rows: Rows = []
    for (name, workers), runs in each_seed(options, product(WORKLOADS, WORKERS), run):
        for policy in runs[0]:
            row = {"workload": name, "workers": workers, "policy": policy}
            row |= mean([outcomes[policy] for outcomes in runs])
            for metric in METRICS:
                best = [min(outcomes[balancer][metric] for balancer in BASELINES) for outcomes in runs]
                changes = [
                    change_pct(outcomes[policy][metric], it) for outcomes, it in zip(runs, best, strict=True)
                ]
                row |= summarise_seeds(metric.replace("_ms", "_change_pct"), changes)
            rows.append(row)
    return rows


def _own_experts(
    trace: CalibrationTrace,
    experts: Experts,
    requests: Requests,
    members: Index,
    predictor: SignaturePredictor,
    seed: int,
) -> Experts:
    """Return each request's experts: counts of its whole prompt, predicted counts, and routes of its kind."""
    domains, rng = np.array(trace.domains), np.random.default_rng(seed)
    before: dict[str, Index] = {}  # session or application -> prompts at the beginning of its prompts
    counts = np.zeros((len(requests), *trace.prefill_counts.shape[1:]), np.float32)
    predicted = np.zeros_like(counts)
    prompts = trace.prompts
    for j, (kind, tokens) in enumerate(zip(requests.kind, requests.prompt_tokens.tolist(), strict=True)):
        key = requests.keys[j] if requests.keys else str(j)
        if key not in before:
            same_domain = np.setdiff1d(members[domains[members] == domains[kind]], [kind])
            before[key] = rng.permutation(same_domain if len(same_domain) else members)
        parts = _parts(trace.prompt_tokens, int(kind), before[key], tokens)
        for part, num_tokens in parts:
            counts[j] += trace.prefill_counts[part] * np.float32(num_tokens / trace.prompt_tokens[part])
        predicted[j] = predictor.predict(
            np.concatenate([prompts[part][:num_tokens] for part, num_tokens in parts])
        )
    steps = np.diff(experts.offset)[requests.kind]
    offset = np.concatenate([[0], np.cumsum(steps)])
    rows = np.arange(offset[-1]) + np.repeat(experts.offset[requests.kind] - offset[:-1], steps)
    names = domains[requests.kind].tolist()
    return Experts(counts, requests.prompt_tokens, experts.bits[rows], offset, names, predicted)


def _parts(
    lengths: NDArray[Any], kind: int, before: Sequence[int] | Index, tokens: int
) -> list[tuple[int, int]]:
    """Compose a prompt of `tokens` from `before`, then `kind`: (prompt, number of its tokens) of each."""
    own_tokens = min(int(lengths[kind]), tokens)
    missing_tokens, parts = tokens - own_tokens, []
    for part in cycle(before):
        if not missing_tokens:
            break
        num_tokens = min(missing_tokens, int(lengths[part]))
        parts.append((int(part), num_tokens))
        missing_tokens -= num_tokens
    return [*parts, (kind, own_tokens)]


def _poisson(
    kinds: NDArray[np.int64], trace: CalibrationTrace, rng: np.random.Generator, **fields: Any
) -> Requests:
    """Return requests with prompts and answers as long as observed."""
    prompt, output = (tokens[kinds].astype(np.int64) for tokens in (trace.prompt_tokens, trace.decode_steps))
    return Requests(np.cumsum(rng.exponential(1.0, len(kinds))), prompt, output, kinds, **fields)


def _many_domains(trace: CalibrationTrace, members: Index, number: int, rng: np.random.Generator) -> Requests:
    return _poisson(rng.choice(members, number), trace, rng)


def _sessions(
    trace: CalibrationTrace,
    members: Index,
    records: list[RecordedArrival],
    number: int,
    rng: np.random.Generator,
) -> Requests:
    """Return a stretch of the trace. The first block, which all share, does not identify a session."""
    start = int(rng.integers(len(records) - number + 1))
    played = records[start : start + number]
    sessions = [str(r.hash_ids[:2]) for r in played]
    kind = dict(zip(dict.fromkeys(sessions), rng.choice(members, number), strict=False))
    prompt, output = (np.array([getattr(r, f"{n}_tokens") for r in played]) for n in ("prompt", "output"))
    return Requests(
        np.array([r.due_s - played[0].due_s for r in played]),
        np.maximum(prompt // SHRINK, 1),
        np.maximum(output // SHRINK_ANSWERS, 2),
        np.array([kind[session] for session in sessions]),
        tuple(r.hash_ids for r in played),
        tuple(sessions),
    )


def _system_prompts(
    trace: CalibrationTrace, members: Index, number: int, rng: np.random.Generator
) -> Requests:
    popularity = 1 / np.arange(1, APPLICATIONS + 1)
    application = rng.choice(APPLICATIONS, number, p=popularity / popularity.sum())
    domains = np.array(trace.domains)[members]
    of_application = domains[rng.integers(len(domains), size=APPLICATIONS)]
    kinds = np.array([rng.choice(members[domains == of_application[a]]) for a in application])
    # The system prompt's blocks, then unique blocks.
    own = APPLICATIONS * SYSTEM_BLOCKS + np.cumsum(trace.prompt_tokens[kinds] // BLOCK + 1)
    blocks = tuple(
        (*range(a * SYSTEM_BLOCKS, (a + 1) * SYSTEM_BLOCKS), *range(int(end - tokens // BLOCK), int(end)))
        for a, tokens, end in zip(application.tolist(), trace.prompt_tokens[kinds].tolist(), own, strict=True)
    )
    requests = _poisson(kinds, trace, rng, blocks=blocks, keys=tuple(map(str, application)))
    return replace(requests, prompt_tokens=requests.prompt_tokens + SYSTEM_BLOCKS * BLOCK)


WORKLOADS = ("many domains", "sessions", "system prompts")


def _rescale_to_load(requests: Requests, experts: Experts, cost: StepCost, workers: int) -> Requests:
    """Rescale the arrivals to LOAD of the workers' capacity with batches of BATCH and empty caches."""
    active = active_experts(experts, requests.kind, BATCH, np.random.default_rng(0))
    prompt, output = float(requests.prompt_tokens.mean()), float(requests.output_tokens.mean())
    step_s = float(cost.seconds(BATCH, BATCH * (prompt + output / 2), active))
    busy_s = prompt * cost.per_prompt_token_s + output * step_s / BATCH
    wanted_s = len(requests) * busy_s / (LOAD * workers)
    return replace(requests, arrival_s=requests.arrival_s * (wanted_s / requests.arrival_s[-1]))


FIGURES = {
    "policies": own_figure(
        "Whole replicas: TPOT and TTFT by load, prefix and experts, for domains, sessions and system prompts",
        policies,
        bar_plot("{workers} workers: {policy}", "tpot_p50_change_pct"),
    )
}
