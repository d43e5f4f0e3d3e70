"""Check PromQL without Prometheus: names of metrics, labels and functions, and uses by kind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from eldr_serve.metrics import COUNTER, GAUGE, HISTOGRAM, METRICS, PREFIX


@dataclass(frozen=True)
class Foreign:
    """A metric of Ray or vLLM on our dashboards; the installed file `source` contains the text `literal`."""

    name: str
    kind: str
    labels: tuple[str, ...]
    source: str
    literal: str


_VLLM = "vllm/v1/metrics/loggers.py"
FOREIGN = {
    foreign.name: foreign
    for foreign in (
        Foreign(
            "ray_vllm_num_preemptions_total", COUNTER, ("model_name", "engine", "ReplicaId"), _VLLM,
            'name="vllm:num_preemptions"',
        ),
        Foreign(
            "ray_vllm_num_requests_waiting", GAUGE, ("model_name", "engine", "ReplicaId"), _VLLM,
            'name="vllm:num_requests_waiting"',
        ),
        Foreign(
            "ray_serve_deployment_replica_healthy", GAUGE, ("deployment", "application"),
            "ray/serve/_private/deployment_state.py", '"serve_deployment_replica_healthy"',
        ),
        Foreign(
            "ray_node_mem_used", GAUGE, ("ip",), "ray/dashboard/modules/reporter/reporter_agent.py",
            '"node_mem_used"',
        ),
        Foreign(
            "ray_node_mem_total", GAUGE, ("ip",), "ray/dashboard/modules/reporter/reporter_agent.py",
            '"node_mem_total"',
        ),
    )
}  # fmt: skip

_RANGED = {"rate", "increase"}
_FUNCTIONS = {*_RANGED, "histogram_quantile", "absent", "clamp_min"}
_AGGREGATIONS = {"sum", "min", "max", "avg", "count"}
_GROUPING = {"by", "without", "on", "ignoring"}
_OPERATORS = {"and", "or", "unless", "offset", "bool"}
_EVERYWHERE = {"instance", "job", "WorkerId"}  # labels that Prometheus and Ray add to every series
_PARTS = ("_bucket", "_count", "_sum")  # of a histogram
_TOKEN = re.compile(
    r"""\s*(?:(?P<text>"[^"\\]*")|(?P<number>\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.]))|(?P<duration>\d+[smhdw]\b)
    |(?P<name>[a-zA-Z_:][\w:]*)|(?P<sign>==|!=|>=|<=|=~|!~|[-+*/%^<>=(){}\[\],]))""",
    re.VERBOSE,
)
_CLOSES = {")": "(", "}": "{", "]": "["}


def problems(expr: str) -> list[str]:
    """Return what is wrong with an expression over our metrics and FOREIGN, one sentence each."""
    try:
        tokens = list(_tokens(expr))
    except ValueError as error:
        return [str(error)]
    found: list[str] = []
    used: set[str] = set()
    opened: list[tuple[str, str]] = []  # open brackets, each with the token before it
    grouped: set[str] = set()
    for at, (kind, token) in enumerate(tokens):
        before = tokens[at - 1][1] if at else ""
        after = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        within = opened[-1] if opened else ("", "")
        if token in "({[":
            opened.append((token, before))
        elif token in _CLOSES:
            if within[0] != _CLOSES[token]:
                return [*found, f"{token} closes nothing"]
            opened.pop()
        elif kind == "duration" and within[0] != "[" and before != "offset":
            found.append(f"{token} is no range of a metric")
        elif kind == "name" and within[0] == "(" and within[1] in _GROUPING:
            grouped.add(token)
        elif kind == "name" and within[0] == "{":
            if token not in _labels(within[1]):
                found.append(f"{within[1]} has no label {token}")
        elif kind == "name" and after == "(" and token not in _GROUPING:
            if token not in _FUNCTIONS | _AGGREGATIONS:
                found.append(f"{token} is no function that we use")
        elif kind == "name" and token not in _AGGREGATIONS | _GROUPING | _OPERATORS:
            used.add(token)
            ranged = within[1] if within[0] == "(" else ""
            found += _misused(token, ranged, _ranged(tokens, at))
    if opened:
        found.append(f"{opened[-1][0]} is not closed")
    if not used:
        found.append("it names no metric")
    known = set[str]().union(*(_labels(name) for name in used))
    return found + [f"no metric of it has a label {label}" for label in sorted(grouped - known)]


def _tokens(expr: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(expr.rstrip()):
        match = _TOKEN.match(expr, at)
        if match is None:
            raise ValueError(f"this is no PromQL: {expr[at:].strip()}")
        yield str(match.lastgroup), str(match[match.lastgroup or 0])
        at = match.end()


def _ranged(tokens: list[tuple[str, str]], at: int) -> bool:
    """Return whether the metric there, with its labels, is followed by a range."""
    at += 1
    if tokens[at : at + 1] == [("sign", "{")]:
        while at < len(tokens) and tokens[at][1] != "}":
            at += 1
        at += 1
    return tokens[at : at + 1] == [("sign", "[")]


def _misused(name: str, function: str, ranged: bool) -> Iterator[str]:
    known = _known(name)
    if known is None:
        yield f"there is no metric {name}"
        return
    kind, _ = known
    if ranged != (function in _RANGED):
        yield f"{name} needs a range within rate or increase, and there alone"
    elif (kind == COUNTER) != ranged and function != "absent":
        yield f"rate and increase are for counters, and counters for them: {name}"


def _known(name: str) -> tuple[str, set[str]] | None:
    """Return kind and labels of a Prometheus series; a histogram's parts are counters."""
    if name in FOREIGN:
        return FOREIGN[name].kind, {*FOREIGN[name].labels}
    own = name.removeprefix(PREFIX)
    base = next((own.removesuffix(part) for part in _PARTS if own.endswith(part)), "")
    if not name.startswith(PREFIX):
        return None
    if own in METRICS and METRICS[own].kind != HISTOGRAM:
        return METRICS[own].kind, {*METRICS[own].labels}
    if base in METRICS and METRICS[base].kind == HISTOGRAM:
        return COUNTER, {*METRICS[base].labels} | ({"le"} if own.endswith("_bucket") else set())
    return None


def _labels(name: str) -> set[str]:
    known = _known(name)
    return _EVERYWHERE | (known[1] if known else set())
