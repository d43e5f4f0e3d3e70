"""The input of `offline.simulate`: a cluster, a workload and policies, from YAML."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.fitting.table import fit_table
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.scheduling import Policy, make_policy
from eldr_serve.validation import first_problem
from loadgen.traces import RecordedArrival, read_arrival_trace
from offline.route_files import read_trace_of_routes
from offline.simulation.cluster import Cluster, ScenarioPart
from offline.simulation.requests import Experts, Requests


class Poisson(ScenarioPart):
    """Arrivals with exponential gaps and equal lengths."""

    kind: Literal["poisson"]
    rate_per_s: float = Field(gt=0, description="requests/s, over the whole cluster")
    requests: int = Field(ge=1, description="total requests")
    prompt_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens of each prompt; null: the prompt length recorded for the request",
    )
    output_tokens: int = Field(default=64, ge=1, description="tokens of each answer")


class ArrivalTrace(ScenarioPart):
    """Arrivals, lengths and prefix blocks of recorded traffic (Azure CSV or Mooncake JSON lines)."""

    kind: Literal["trace"]
    path: Path = Field(description=".csv, .jsonl, or either with .gz")
    speed: float = Field(default=1.0, gt=0, description="how much faster than recorded")
    limit: int | None = Field(default=None, ge=1, description="requests from the trace's start; null: all")
    repeat: int = Field(default=1, ge=1, description="copies of the trace at once, each shifted in time")
    rate_per_s: float | None = Field(
        default=None,
        gt=0,
        description="mean requests/s over the whole cluster, in place of speed, limit and repeat; needs "
        "`requests`",
    )
    requests: int | None = Field(
        default=None,
        ge=1,
        description="total requests, drawn from the whole trace, whose time is scaled to "
        "requests / rate_per_s seconds",
    )
    min_output_tokens: int = Field(default=1, ge=1, description="omit requests with shorter answers")
    share_prefixes: bool = Field(
        default=True, description="prompts share the trace's prefix blocks; never with rate_per_s"
    )

    @model_validator(mode="after")
    def _check_scaling(self) -> Self:
        if (self.rate_per_s is None) != (self.requests is None):
            raise ValueError("rate_per_s and requests go together: give both or neither")
        if self.rate_per_s is not None and (self.speed, self.limit, self.repeat) != (1.0, None, 1):
            raise ValueError("rate_per_s replaces speed, limit and repeat: omit them")
        return self


class Routes(ScenarioPart):
    """The experts that observed requests used."""

    kind: Literal["trace", "routes", "gpt-oss"] = Field(
        description="format of the file: trace is a CalibrationTrace with routes, routes are the published "
        "ones of a known model, gpt-oss are those of GPT-OSS-20B"
    )
    path: Path
    fit_path: Path | None = Field(
        default=None,
        description="trace of the same model to fit tables to; all of `path` is then simulated; "
        "null: tables are fitted to fit_share of `path`",
    )
    sampled: bool = Field(
        default=False, description="draw steps from probabilities, rather than replay routes"
    )
    domains: tuple[str, ...] = Field(default=(), description="domains to simulate; an empty list means all")
    fit_share: float = Field(
        default=0.4, gt=0, lt=1, description="share that tables are fitted to; the rest is simulated"
    )
    centroids: int | None = Field(
        default=None,
        ge=1,
        description="number of centroids of a table, at most one for each request that it is fitted to; if "
        "there are more workers, they share centroids; null: one for each worker, and no table if there are "
        "fewer requests",
    )
    parts: int = Field(
        default=1,
        ge=1,
        description="number of observed requests of one domain that are mixed into a simulated one; 1: a "
        "simulated request copies an observed one, so that many workers run the same request; above 1: "
        "requests are drawn from `mixtures` distinct mixtures",
    )
    mixtures: int = Field(default=2048, ge=1, description="number of distinct mixtures of `parts` requests")


class Objectives(ScenarioPart):
    """Service-level objectives. A request is good if it meets both."""

    ttft_ms: float = Field(gt=0, description="maximum time from arrival to the end of the first decode step")
    tpot_ms: float = Field(gt=0, description="maximum time per output token after the first")


class PolicyChoice(ScenarioPart):
    """One policy to simulate."""

    name: str = Field(description="a name, or my_package.module:MyPolicy")
    parameters: dict[str, Any] = Field(default_factory=dict)
    label: str | None = Field(default=None, description="name in tables; null: the policy's name")

    @model_validator(mode="after")
    def _check_policies(self) -> Self:
        make_policy(self.name, **self.parameters)
        return self

    @property
    def display_name(self) -> str:
        return self.label or self.name


class Scenario(ScenarioPart):
    """All input of a simulation. Each policy and seed is one run."""

    cluster: Cluster
    arrivals: Annotated[Poisson | ArrivalTrace, Field(discriminator="kind")]
    experts: Routes | None = Field(default=None, description="null: a dense model")
    policies: tuple[PolicyChoice, ...] = Field(min_length=1)
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    band: float = Field(default=0.1, ge=0, le=2, description="band width of fitted tables, cosine similarity")
    objectives: Objectives | None = Field(
        default=None, description="objectives by which rows report goodput; null: no goodput"
    )


class ScenarioInputs:
    """A scenario's requests and experts for one seed."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.experts: Experts | None = None
        self.table: RoutingTable | None = None
        self.fitted_on = np.zeros(0, np.int64)  # observed requests of the table, not simulated
        self.mix: dict[str, float] = {}  # requests of each domain that the table is fitted to
        kinds: NDArray[np.int64] | None = None
        if scenario.experts is not None:
            routes = scenario.experts
            trace = read_calibration_trace(routes.path, routes.kind)
            kinds = self.rng.permutation(_positions_of_domains(trace, routes.path, routes.domains))
            if routes.fit_path is None:
                cut = max(1, round(routes.fit_share * len(kinds)))
                self.fitted_on, kinds = kinds[:cut], kinds[cut:]
                fit_trace = trace.subset_without_routes(self.fitted_on)
            else:
                fit_trace = _trace_to_fit(routes, routes.fit_path, trace)
            self.mix = {name: float(n) for name, n in Counter(fit_trace.domains).items()}
            self.table = _fit_table(scenario, routes.centroids, fit_trace, seed)
            self.experts = _make_experts(routes, trace, seed)
            if routes.parts > 1:
                self.experts = self.experts.mix(kinds, routes.parts, routes.mixtures, self.rng)
                kinds = np.arange(routes.mixtures)
        self._capacity = scenario.cluster.decode.kv_tokens
        self.requests = self._make_requests(scenario.arrivals, kinds)

    def require_domains(self) -> list[str]:
        """Return the domain of each kind of request. Raise UserInputError if the model is dense."""
        if self.experts is None:
            raise UserInputError("requests have no domains without `experts`: name a trace there")
        return self.experts.domains

    @property
    def domains(self) -> list[str]:
        """Return the domain of each request. Raise UserInputError if the model is dense."""
        by_kind = self.require_domains()
        return [by_kind[kind] for kind in self.requests.kind]

    def policy(self, choice: PolicyChoice, cluster: Cluster) -> Policy:
        """Return a new policy with the scenario's table and cost."""
        policy = make_policy(choice.name, **choice.parameters).set_table(self.table)
        policy.update_cost_model(cluster.decode.cost)
        return policy

    def _make_requests(self, arrivals: Poisson | ArrivalTrace, kinds: NDArray[np.int64] | None) -> Requests:
        if isinstance(arrivals, ArrivalTrace):
            resampled = arrivals.rate_per_s is not None
            return self._resample(arrivals, kinds) if resampled else self._replay(arrivals, kinds)
        n = arrivals.requests
        times = np.cumsum(self.rng.exponential(1 / arrivals.rate_per_s, n))
        kind = self._draw_kinds(n, kinds)
        if arrivals.prompt_tokens is not None:
            prompt = np.full(n, arrivals.prompt_tokens)
        elif self.experts is not None:
            prompt = self.experts.count_tokens[kind]
        else:
            raise UserInputError(
                "arrivals.prompt_tokens is missing; without experts there is no other source"
            )
        return Requests(times, prompt, np.full(n, arrivals.output_tokens), kind)

    def _replay(self, arrivals: ArrivalTrace, kinds: NDArray[np.int64] | None) -> Requests:
        records = self._read_records(arrivals)
        span = records[-1].due_s or 1.0
        rows = []
        for copy in range(arrivals.repeat):
            # Each copy begins at another point of the recording and wraps around.
            shift = copy * span / arrivals.repeat
            rows += [((r.due_s + shift) % span if copy else r.due_s, copy, r) for r in records]
        rows.sort(key=lambda row: row[0])
        shared = arrivals.share_prefixes and any(r.hash_ids for r in records)
        return Requests(
            np.array([due_s for due_s, _, _ in rows]) / arrivals.speed,
            np.array([r.prompt_tokens for _, _, r in rows]),
            np.array([r.output_tokens for _, _, r in rows]),
            self._draw_kinds(len(rows), kinds),
            tuple(tuple(block * arrivals.repeat + copy for block in r.hash_ids) for _, copy, r in rows)
            if shared
            else (),
        )

    def _resample(self, arrivals: ArrivalTrace, kinds: NDArray[np.int64] | None) -> Requests:
        """Return requests drawn uniformly from the whole recording, at the rate of the scenario.

        Each record occurs n / records times, rounded up or down at random. Copies are spread evenly between
        their record and the next later one, so that the load rises and falls as recorded.
        """
        records = self._read_records(arrivals)
        n, rate = arrivals.requests, arrivals.rate_per_s
        assert n is not None
        assert rate is not None
        times = np.array([r.due_s for r in records])
        later = np.unique(times)
        ends = np.append(later, 2 * later[-1] - later[-2] if len(later) > 1 else later[-1] + 1.0)
        copies, rest = divmod(n, len(records))
        chosen = np.concatenate(
            [np.tile(np.arange(len(records)), copies), self.rng.choice(len(records), rest, replace=False)]
        )
        gaps = ends[np.searchsorted(later, times[chosen]) + 1] - times[chosen]
        arrival_s = times[chosen] + gaps * self.rng.uniform(size=n) - times[0]
        order = np.argsort(arrival_s, kind="stable")
        chosen, arrival_s = chosen[order], arrival_s[order] * (n / rate / (ends[-1] - times[0]))
        prompt, output = np.array([(r.prompt_tokens, r.output_tokens) for r in records])[chosen].T
        return Requests(arrival_s, prompt, output, self._draw_kinds(n, kinds))

    def _read_records(self, arrivals: ArrivalTrace) -> list[RecordedArrival]:
        all_records = read_arrival_trace(arrivals.path)
        self._check_lengths(arrivals.path, all_records)
        records = [r for r in all_records if r.output_tokens >= arrivals.min_output_tokens][: arrivals.limit]
        if not records:
            raise UserInputError(
                f"{arrivals.path} holds no answer of {arrivals.min_output_tokens} tokens or more"
            )
        return records

    def _check_lengths(self, path: Path, records: list[RecordedArrival]) -> None:
        header = ".csv" in path.suffixes
        for line, r in enumerate(records, 1 + header):
            if self._capacity is not None and r.prompt_tokens + r.output_tokens > self._capacity:
                raise UserInputError(
                    f"{path}, line {line}: {r.prompt_tokens} + {r.output_tokens} tokens are more than the "
                    f"{self._capacity} KV tokens of a decode worker"
                )

    def _draw_kinds(self, n: int, kinds: NDArray[np.int64] | None) -> NDArray[np.int64]:
        return np.zeros(0, np.int64) if kinds is None else self.rng.choice(kinds, n)


def read_scenario(path: Path) -> Scenario:
    """Read a scenario from a YAML file; paths in it are relative to the file.

    Raises:
        UserInputError: no such file, or an invalid field, which the message names.
    """
    try:
        content = yaml.safe_load(path.read_text())
        for part, name in (("arrivals", "path"), ("experts", "path"), ("experts", "fit_path")):
            fields = content.get(part) if isinstance(content, dict) else None
            if isinstance(fields, dict) and fields.get(name) is not None:
                fields[name] = path.parent / fields[name]
        return Scenario.model_validate(content)
    except yaml.YAMLError as error:
        raise UserInputError(f"{path} is not YAML ({error})") from error
    except ValidationError as error:
        raise UserInputError(f"{path}: {first_problem(error, content)}") from error


def _positions_of_domains(trace: CalibrationTrace, path: Path, domains: tuple[str, ...]) -> NDArray[np.int64]:
    """Return the positions of requests from these domains, or of all; raise UserInputError without any."""
    positions = np.flatnonzero(np.isin(trace.domains, domains or trace.domains))
    if not len(positions):
        raise UserInputError(f"{path} holds no request of {', '.join(domains)}")
    return positions


def _fit_table(
    scenario: Scenario, centroids: int | None, fit_trace: CalibrationTrace, seed: int
) -> RoutingTable | None:
    """Return a table fitted to the requests; None if by default there are too few of them (see `Routes`)."""
    workers = scenario.cluster.decode.workers
    number = min(centroids or workers, len(fit_trace.ids))
    if not centroids and number < workers:
        return None
    table, _ = fit_table(fit_trace, number, band=scenario.band, seed=seed)
    return table


def _make_experts(routes: Routes, trace: CalibrationTrace, seed: int) -> Experts:
    """Return the experts that the requests of a trace use, drawn from probabilities or replayed."""
    if not routes.sampled:
        return Experts.from_trace(trace)
    return Experts.from_probabilities(
        trace.prefill_counts,
        trace.prompt_tokens.astype(np.int64),
        trace.decode_probability,
        trace.top_k,
        trace.domains,
        seed=seed,
    )


def _trace_to_fit(experts: Routes, path: Path, simulated: CalibrationTrace) -> CalibrationTrace:
    """Return the requests of another trace that tables are fitted to, of the same domains."""
    fit_trace = read_calibration_trace(path)
    shapes = [(trace.model, *trace.prefill_counts.shape[1:]) for trace in (fit_trace, simulated)]
    if shapes[0] != shapes[1]:
        (model, *size), (own, *own_size) = shapes
        raise UserInputError(
            f"{path} is of {model} with {size[0]} x {size[1]} experts, but {experts.path} is of {own} with "
            f"{own_size[0]} x {own_size[1]}"
        )
    return fit_trace.subset_without_routes(_positions_of_domains(fit_trace, path, experts.domains))


def routes_of(path: Path, *, domains: tuple[str, ...] = ()) -> Routes:
    """Return a calibration trace, or published routes of a known model, by the file's name."""
    return Routes(kind="trace" if path.suffix == ".safetensors" else "routes", path=path, domains=domains)


def read_calibration_trace(path: Path, kind: str | None = None) -> CalibrationTrace:
    """Return the requests of a file, with routes; the file is read once.

    Args:
        kind: see `Routes`; None: by the file's name.
    """
    return _read_routes(kind or routes_of(path).kind, path)


@lru_cache(maxsize=2)  # one trace to simulate, and one to fit to
def _read_routes(kind: str, path: Path) -> CalibrationTrace:
    if kind == "trace":
        return CalibrationTrace.load(path)
    return read_trace_of_routes(path, "gpt-oss-20b" if kind == "gpt-oss" else None)
