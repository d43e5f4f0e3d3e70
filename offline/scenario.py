"""The input of `offline.simulate`: a cluster, a workload and policies, from YAML."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import yaml
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from eldr_serve.command_errors import BadInput
from eldr_serve.errors import sentence
from eldr_serve.experts.calibration_trace import CalibrationTrace
from eldr_serve.experts.fitting.table import fit_table
from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.scheduling import Policy, make_policy
from loadgen.traces import TraceRequest, read_trace
from offline.gptoss import read_gptoss
from offline.simulation.cluster import Cluster
from offline.simulation.requests import Experts, Requests


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Poisson(_Part):
    """Arrivals with exponential gaps and equal lengths."""

    kind: Literal["poisson"]
    rate_per_s: float = Field(gt=0, description="requests/s, over the whole cluster")
    requests: int = Field(ge=1, description="total requests")
    prompt_tokens: int | None = Field(
        default=None, ge=1, description="tokens of each prompt; None: as the request whose experts it has"
    )
    output_tokens: int = Field(default=64, ge=1, description="tokens of each answer")


class Trace(_Part):
    """Arrivals, lengths and prefix blocks of a recorded trace (Azure CSV or Mooncake JSON lines)."""

    kind: Literal["trace"]
    path: Path = Field(description=".csv, .jsonl, or either with .gz")
    speed: float = Field(default=1.0, gt=0, description="how much faster than recorded")
    limit: int | None = Field(default=None, ge=1, description="only the first requests; None: all")
    repeat: int = Field(default=1, ge=1, description="copies of the trace at once, each shifted in time")
    min_output_tokens: int = Field(default=1, ge=1, description="omit requests with shorter answers")
    share_prefixes: bool = Field(default=True, description="prompts share the trace's prefix blocks")


class Routes(_Part):
    """The experts that requests use, as observed."""

    kind: Literal["trace", "gpt-oss"] = Field(
        description="a CalibrationTrace with routes, or GPT-OSS-20B records"
    )
    path: Path
    sampled: bool = Field(
        default=False, description="draw steps from probabilities, rather than replay routes"
    )
    domains: tuple[str, ...] = Field(default=(), description="only these; empty: all")
    fit_share: float = Field(
        default=0.4, gt=0, lt=1, description="share that tables are fitted to; the rest is simulated"
    )


class PolicyChoice(_Part):
    """One policy to simulate."""

    name: str = Field(description="a name, or my_package.module:MyPolicy")
    parameters: dict[str, Any] = Field(default_factory=dict)
    label: str | None = Field(default=None, description="name in tables; None: the policy's name")

    @model_validator(mode="after")
    def _can_be_made(self) -> Self:
        make_policy(self.name, **self.parameters)
        return self

    @property
    def shown(self) -> str:
        return self.label or self.name


class Scenario(_Part):
    """All input of a simulation; each policy and seed is one run."""

    cluster: Cluster
    arrivals: Annotated[Poisson | Trace, Field(discriminator="kind")]
    experts: Routes | None = Field(default=None, description="None: a dense model")
    policies: tuple[PolicyChoice, ...] = Field(min_length=1)
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    band: float = Field(default=0.1, ge=0, le=2, description="band width of fitted tables, cosine similarity")


class Work:
    """A scenario's requests and experts for one seed."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.experts: Experts | None = None
        self.table: RoutingTable | None = None
        self.fitted_on = np.zeros(0, np.int64)  # observed requests behind the table, not simulated
        kinds: NDArray[np.int64] | None = None
        if scenario.experts is not None:
            trace = observed(scenario.experts)
            chosen = np.isin(trace.domains, scenario.experts.domains or trace.domains)
            if not chosen.any():
                raise BadInput(
                    f"{scenario.experts.path} holds no request of {', '.join(scenario.experts.domains)}"
                )
            order = self.rng.permutation(np.flatnonzero(chosen))
            cut = max(1, round(scenario.experts.fit_share * len(order)))
            self.fitted_on, kinds = order[:cut], order[cut:]
            if len(self.fitted_on) >= scenario.cluster.decode.workers:
                self.table, _ = fit_table(
                    trace.subset(self.fitted_on),
                    scenario.cluster.decode.workers,
                    band=scenario.band,
                    seed=seed,
                )
            self.experts = (
                Experts.sampled(
                    trace.prefill_counts, trace.prompt_tokens.astype(np.int64), trace.decode_probability,
                    trace.top_k, trace.domains, seed=seed,
                )
                if scenario.experts.sampled
                else Experts.replayed(trace)
            )  # fmt: skip
        self._capacity = scenario.cluster.decode.kv_tokens
        self.requests = self._requests(scenario.arrivals, kinds)

    def policy(self, choice: PolicyChoice, cluster: Cluster) -> Policy:
        """Return a new policy with the scenario's table and cost."""
        policy = make_policy(choice.name, **choice.parameters).with_table(self.table)
        policy.update_cost_model(cluster.decode.cost)
        return policy

    def _requests(self, arrivals: Poisson | Trace, kinds: NDArray[np.int64] | None) -> Requests:
        if isinstance(arrivals, Trace):
            return self._replayed(arrivals, kinds)
        n = arrivals.requests
        times = np.cumsum(self.rng.exponential(1 / arrivals.rate_per_s, n))
        kind = self._kinds(n, kinds)
        if arrivals.prompt_tokens is not None:
            prompt = np.full(n, arrivals.prompt_tokens)
        elif self.experts is not None:
            prompt = self.experts.count_tokens[kind]
        else:
            raise BadInput("arrivals.prompt_tokens is missing; without experts there is no other source")
        return Requests(times, prompt, np.full(n, arrivals.output_tokens), kind)

    def _replayed(self, arrivals: Trace, kinds: NDArray[np.int64] | None) -> Requests:
        everything = read_trace(arrivals.path)
        self._check_lengths(arrivals.path, everything)
        records = [r for r in everything if r.output_tokens >= arrivals.min_output_tokens][: arrivals.limit]
        if not records:
            raise BadInput(f"{arrivals.path} holds no answer of {arrivals.min_output_tokens} tokens or more")
        span = records[-1].due_s or 1.0
        rows = []
        for copy in range(arrivals.repeat):
            # Each copy begins at another point of the recording and wraps around.
            shift = copy * span / arrivals.repeat
            rows += [((r.due_s + shift) % span if copy else r.due_s, copy, r) for r in records]
        rows.sort(key=lambda row: row[0])
        shared = arrivals.share_prefixes and any(r.hash_ids for r in records)
        return Requests(
            np.array([at for at, _, _ in rows]) / arrivals.speed,
            np.array([r.prompt_tokens for _, _, r in rows]),
            np.array([r.output_tokens for _, _, r in rows]),
            self._kinds(len(rows), kinds),
            tuple(tuple(block * arrivals.repeat + copy for block in r.hash_ids) for _, copy, r in rows)
            if shared
            else (),
        )

    def _check_lengths(self, path: Path, records: list[TraceRequest]) -> None:
        header = ".csv" in path.suffixes
        for line, r in enumerate(records, 1 + header):
            if self._capacity is not None and r.prompt_tokens + r.output_tokens > self._capacity:
                raise BadInput(
                    f"{path}, line {line}: {r.prompt_tokens} + {r.output_tokens} tokens are more than the "
                    f"{self._capacity} KV tokens of a decode worker"
                )

    def _kinds(self, n: int, kinds: NDArray[np.int64] | None) -> NDArray[np.int64]:
        return np.zeros(0, np.int64) if kinds is None else self.rng.choice(kinds, n)


def read_scenario(path: Path) -> Scenario:
    """Read a scenario from a YAML file; paths in it are relative to the file.

    Raises:
        BadInput: no such file, or an invalid field, which the message names.
    """
    try:
        content = yaml.safe_load(path.read_text())
        for part in ("arrivals", "experts"):
            if isinstance(content, dict) and isinstance(content.get(part), dict) and "path" in content[part]:
                content[part]["path"] = path.parent / content[part]["path"]
        return Scenario.model_validate(content)
    except yaml.YAMLError as error:
        raise BadInput(f"{path} is not YAML ({error})") from error
    except ValidationError as error:
        raise BadInput(f"{path}, {sentence(error)}") from error


def routes_of(path: Path, *, domains: tuple[str, ...] = ()) -> Routes:
    """Return a calibration trace, or GPT-OSS-20B's records, by the file's name."""
    return Routes(kind="trace" if path.suffix == ".safetensors" else "gpt-oss", path=path, domains=domains)


def observed(routes: Routes) -> CalibrationTrace:
    """Return the file's requests with routes; the file is read once."""
    return _read_routes(routes.kind, routes.path)


@lru_cache(maxsize=1)
def _read_routes(kind: str, path: Path) -> CalibrationTrace:
    return CalibrationTrace.load(path) if kind == "trace" else read_gptoss(path)
