"""BalanceRoute's proxy beside the queues of this service, in simulation (paper, sections 5, D.1 and D.3).

In both, prefilled requests wait for a free slot in one queue, from which BR-H chooses, a prompt's KV stays on
its prefill worker until the hand-over, and a prefill worker gets no new prompt while its KV usage is above a
threshold. They differ in how long a request may wait for a prefill worker and then in the queue. The paper's
waits have no bound (the TTL of its pool is not stated). The waits here end after the defaults of `path`.
Refused and expired requests are not sent again.
"""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.papers.figures import balanceroute
from benchmarks.papers.figures.common import Options, PaperFigure, Rows, each_seed, summarise_runs
from benchmarks.papers.figures.traffic import Traffic
from eldr_serve.pipeline.path_options import PathOptions, PrefillRouterOptions
from eldr_serve.scheduling import Policy, make_policy
from loadgen.statistics import paired_ratio_percent
from offline.simulation.cluster import Cluster, Decode, Prefill
from offline.simulation.outcome import Outcome
from offline.simulation.requests import Requests
from offline.simulation.run import simulate

WORKERS = balanceroute.PAPER_WORKERS
LOADS = (0.9, 1.2)  # relative to the capacity of all slots
REQUESTS = 6000
PREFILL_FIXED_S, PREFILL_PER_TOKEN_S = 5e-3, 1e-4
PREFILL_BUSY = 0.6  # share of their time in which prefill workers compute, at a load of 1
PREFILL_KV_TOKENS = 65_536  # of a prefill worker; about the most that a decode worker's requests need
HANDOVER_S = 5e-3
PAPER, OURS = "the paper's", "ours"
_COLUMNS = ("tpot_p50_ms", "tpot_p99_ms", "ttft_p50_ms", "ttft_p99_ms", "output_tokens_per_s")
_ALSO = ("spread_tokens", "imbalance_tokens", "largest_kv_tokens")


def proxy(options: Options) -> Rows:
    """Compare the paper's proxy with the queues here, on the same requests under the same policy."""
    paths = options.all_traces("one or more request traces (Azure CSV or Mooncake JSON lines)")
    traffics = {path: Traffic(path) for path in paths}

    def run(case: tuple[Path, float], seed: int) -> dict[str, dict[str, float]]:
        traffic, load = traffics[case[0]], case[1]
        number = options.requests or REQUESTS
        requests = balanceroute.requests_at_load(traffic, WORKERS, load, number, options, seed)
        return {
            name: _summarise(simulate(requests, _policy(traffic), cluster, seed=seed))
            for name, cluster in clusters(requests, load, options).items()
        }

    rows: Rows = []
    for (path, load), runs in each_seed(options, product(traffics, LOADS), run):
        for name in (PAPER, OURS):
            row: dict[str, Any] = {"trace": path.name, "load": load, "proxy": name}
            row |= summarise_runs([run[name] for run in runs])
            for key in _COLUMNS:
                values, base = ([run[side][key] for run in runs] for side in (name, PAPER))
                names = (f"{key.removesuffix('_ms')}_change{end}_pct" for end in ("", "_low", "_high"))
                row |= zip(names, paired_ratio_percent(values, base), strict=True)
            rows.append(row)
    return rows


def clusters(requests: Requests, load: float, options: Options) -> dict[str, Cluster]:
    """Return the same cluster with the paper's proxy and with the queues here, at their default bounds."""
    rate = len(requests) / float(requests.arrival_s[-1])
    prompt_s = PREFILL_FIXED_S + PREFILL_PER_TOKEN_S * float(requests.prompt_tokens.mean())
    decode = Decode(
        workers=WORKERS,
        max_batch=balanceroute.SLOTS,
        barrier=True,
        cost=options.cost or balanceroute.COST,
    )
    prefill = Prefill(
        workers=math.ceil(rate / load * prompt_s / PREFILL_BUSY),
        fixed_s=PREFILL_FIXED_S,
        per_token_s=PREFILL_PER_TOKEN_S,
        kv_tokens=PREFILL_KV_TOKENS,
        max_kv_usage=PrefillRouterOptions().max_kv_usage,
    )
    path = PathOptions()
    bounded = prefill.model_copy(update={"max_wait_s": path.replica_wait_s})
    return {
        PAPER: Cluster(decode=decode, prefill=prefill, handover_fixed_s=HANDOVER_S),
        OURS: Cluster(
            decode=decode,
            prefill=bounded,
            handover_fixed_s=HANDOVER_S,
            queue_timeout_s=path.queue_timeout_s,
        ),
    }


def _policy(traffic: Traffic) -> Policy:
    """Return BR-H with a predictor that has learnt the past."""
    policy: Any = make_policy("balance-route-horizon", slots=balanceroute.SLOTS)
    traffic.teach(policy.length_predictor)
    typed: Policy = policy
    return typed


def _summarise(outcome: Outcome) -> dict[str, float]:
    """Return the figures of a run. Latencies are those of answered requests."""
    summary, number = outcome.summary(), len(outcome.arrival_s)
    figures = {key: float(summary[key]) for key in (*_COLUMNS, *_ALSO)}
    figures |= {f"{key}_pct": 100 * summary[key] / number for key in ("held_back", "refused", "expired")}
    figures["largest_prefill_kv_pct"] = 100 * summary["largest_prefill_kv_tokens"] / PREFILL_KV_TOKENS
    return figures


FIGURES = {
    "proxy": PaperFigure(
        "The paper's proxy beside the queues here: waits without and with bounds",
        "a pool of prefilled prompts, and a threshold of KV usage above which a prefill worker gets no "
        "prompt; their values are not stated",
        proxy,
    ),
}
