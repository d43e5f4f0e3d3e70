"""The tables of README.md and of pages in docs, made from benchmarks/results.

    python -m benchmarks.harness.tables

A table stands between `<!-- table NAME column, column ... [where key=value] -->` and `<!-- end -->`; this
fills it in from NAME.json. `<!-- summary -->` is the table of README.md: a line for each claim.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eldr_serve.files import write_whole
from tools.results import read_rows

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("evidence", "reproduced", "expert_parallel_testbed")),
)
_BLOCK = re.compile(r"(<!-- (table|summary) ?(.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
Rows = list[dict[str, Any]]


def filled(page: str) -> str:
    """The page with every table made anew."""

    def table(match: re.Match[str]) -> str:
        opening, kind, arguments, _, closing = match.groups()
        return opening + (_summary() if kind == "summary" else _table(arguments)) + closing

    return _BLOCK.sub(table, page)


def _table(arguments: str) -> str:
    name, _, rest = arguments.partition(" ")
    columns, _, condition = rest.partition(" where ")
    rows = read_rows(name)
    if condition:
        key, _, value = condition.partition("=")
        rows = [row for row in rows if str(row[key]) == value]
    names = [column.strip() for column in columns.split(",")]
    if unknown := set(names).difference(*rows):
        raise KeyError(f"no row of {name} has {', '.join(sorted(unknown))}")
    return _markdown(names, [[_number(row.get(column)) for column in names] for row in rows])


def _markdown(names: list[str], cells: list[list[str]]) -> str:
    lines = [[name.replace("_", " ") for name in names], ["---"] * len(names), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _summary() -> str:
    lines = [
        [claim.what, claim.measured(), f"`python -m {claim.command or f'benchmarks.{claim.name}'}`"]
        for claim in CLAIMS
    ]
    return _markdown(["what", "measured", "by"], lines)


@dataclass(frozen=True)
class Claim:
    """A line of the summary: `form` of each row of a result that has these values, or one of a tuple's."""

    what: str
    name: str
    form: str
    where: dict[str, Any]
    command: str | None = None  # None: benchmarks.NAME

    def measured(self) -> str:
        """The rows in words."""
        rows = [row for row in read_rows(self.name) if all(self._fits(row[key], key) for key in self.where)]
        return "; ".join(self.form.format(**row) for row in rows)

    def _fits(self, value: Any, key: str) -> bool:
        wanted = self.where[key]
        return value in wanted if isinstance(wanted, tuple) else value == wanted


_CHANGE = "{workload} K={workers}: {p50_change_pct:+z.0f} / {p99_change_pct:+z.0f} %"
_LIVE = "{workload}: {tpot_p50_ms_change_pct:+z.0f} / {tpot_p99_ms_change_pct:+z.0f} %"
_EXPERTS = "{batch_size}: {same_domain:.1f} / {mixed:.1f} of 64 ({change_pct:+z.0f} %)"
_RATE = "{policy}: {tpot_p50_ms:.1f} ms, {output_tokens_per_s:.0f} tokens/s"
_TIME = "{policy}: p50 {p50_us:.0f} us, p99 {p99_us:.0f} us"
# The plainest balancer, and every rule of ours and of the papers that knows experts.
_RATED = ("shortest-queue", "locality-band", "marginal-cost", "balance-band")
CLAIMS = [
    Claim(
        "TPOT p50 / p99 of `marginal-cost` against the best load balancer, replayed without contention",
        "decode_replay",
        _CHANGE,
        {"arm": "marginal-cost"},
    ),
    Claim(
        "the same of `locality-band`, the paper's rule", "decode_replay", _CHANGE, {"arm": "locality-band"}
    ),
    Claim(
        "the same of `marginal-cost` with `affinity` 0: workers do not specialise",
        "decode_replay",
        _CHANGE,
        {"arm": ("marginal-cost, affinity 0", "marginal-cost, home 0")},
    ),
    Claim(
        "the same of `domain`, which is told each request's domain",
        "decode_replay",
        _CHANGE,
        {"arm": "domain"},
    ),
    Claim(
        "the same live, 1 prefill + 4 decode engines on the 2 cores, time by their pace "
        "([what it says](docs/evidence.md#the-policies-live-figures-11-to-13)): `marginal-cost`",
        "live",
        _LIVE,
        {"policy": "marginal-cost", "clock": "even"},
    ),
    Claim("the same live of `locality-band`", "live", _LIVE, {"policy": "locality-band", "clock": "even"}),
    Claim(
        "active experts of a batch of 16 and of 64: one language / mixed",
        "same_domain",
        _EXPERTS,
        {"workload": "language", "batch_size": (16, 64)},
    ),
    Claim(
        "the same: one task / mixed", "same_domain", _EXPERTS, {"workload": "task", "batch_size": (16, 64)}
    ),
    Claim("one decision at 48 x 128 experts, K=16", "route_decision", _TIME, {"workers": 16}),
    Claim("the same, K=1024", "route_decision", _TIME, {"workers": 1024}),
    Claim(
        "placement through the router actor beyond a bare actor call, K=16",
        "router_actor",
        "p50 {added_p50_ms:.2f} ms; {placements_per_s:.0f} placements/s",
        {"workers": 16, "in_flight": 1},
    ),
    Claim(
        "the serving layer, 1 prefill + 1 decode engine, 8 requests in flight: TTFT, TPOT, requests/s "
        "([what the rows are](docs/evidence.md#the-serving-layer-beside-its-peers))",
        "peers",
        "{system}: {ttft_p50_ms:.0f} ms, {tpot_p50_ms:.0f} ms, {requests_per_s:.1f}",
        {"in_flight": 8},
    ),
    Claim(
        "2,000 streams at once through one ingress on these cores, engines that compute nothing, by Ray "
        "Serve's mode",
        "streams",
        "{serve}: {failures} failed, {tokens_per_s:.0f} tokens/s of {offered_tokens_per_s:.0f} offered",
        {"streams": 2000},
    ),
    Claim("fit of 1,000 requests at 48 x 128, K=16", "fit_time", "{fit_p50_s:.1f} s", {"workers": 16}),
    Claim(
        "simulated against measured TPOT, `marginal-cost`, p50 / p99 ([every policy](docs/evidence.md))",
        "simulator_validation",
        "{workload}: {p50_error_pct:+z.1f} / {p99_error_pct:+z.1f} %",
        {"policy": "marginal-cost"},
    ),
    Claim(
        "KV imbalance of 16 workers in lockstep, times below shortest-queue's, Azure traces, simulated: "
        "`balance-route`",
        "balanceroute_table1",
        "{trace}: {imbalance_below_jsq:.1f}",
        {"method": "balance-route"},
        "offline.reproduce balanceroute table1",
    ),
    Claim(
        "the same: `balance-route-horizon`, survival predictor",
        "balanceroute_table1",
        "{trace}: {imbalance_below_jsq:.1f}",
        {"method": "balance-route-horizon, survival"},
        "offline.reproduce balanceroute table1",
    ),
    Claim(
        "TPOT p50 and throughput at 1.2 times what 16 workers' slots take, simulated on GPT-OSS-20B's routes "
        "and Azure's lengths",
        "together_policies",
        _RATE,
        {"workload": "load 1.2, no barrier", "policy": _RATED},
        "offline.reproduce together policies",
    ),
    Claim(
        "the same where all workers step together",
        "together_policies",
        _RATE,
        {"workload": "load 1.2, barrier", "policy": _RATED},
        "offline.reproduce together policies",
    ),
    Claim(
        "most activated experts on one of 8 ranks, above the optimum: METRO's choice (EPLB's), batch 32, "
        "replicas 1.5 times",
        "metro_fig8",
        "{model}: {metro_above_optimum_pct:.1f} % ({even_above_optimum_pct:.0f} %)",
        {"batch_size": 32, "replication": 1.5},
        "offline.reproduce metro fig8",
    ),
    Claim(
        "placement of 48 x 128 experts on 32 ranks for a pending batch: above the LP's bound, time",
        "director_fig11",
        "{above_lp_pct:.1f} %, {solve_p50_s:.2f} s",
        {"workload": "synthetic, on 32 H200", "method": "LP rounding"},
        "offline.reproduce director fig11",
    ),
    Claim(
        "experts' time of a layer on 2 real ranks, METRO's choice against an even spread, replicas 2 times; "
        "the whole layer's",
        "ep_layer",
        "{experts_change_pct:.0f} % ({experts_low_pct:.0f} to {experts_high_pct:.0f}); "
        "{layer_change_pct:.0f} %",
        {"how": "2 ranks together, cpu", "replication": 2.0, "routing": "metro"},
    ),
    Claim(
        "signature cache / KV cache, blocks of 16 tokens, by deployment",
        "cache_memory",
        "{deployment}: {share_of_kv_pct:.2f} %",
        {"block_size_tokens": 16},
    ),
]


def main() -> None:
    """Rewrite the pages."""
    for page in PAGES:
        write_whole(page, filled(page.read_text()))


if __name__ == "__main__":
    main()
