"""Router and simulator make the recorded decisions for seeded traffic.

    python tests/unit/scheduling/test_equal_decisions.py            records them again

The decisions were recorded at commit 2458aa0, except those of marginal-cost and balance-band, and the
simulated ones of balance-route-horizon. The first two policies have changed since: if a request is assigned
again, they no longer learn it a second time. A simulation no longer tells policies the lengths of answers.
"""

import hashlib
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from eldr_serve.experts.routing_table import RoutingTable
from eldr_serve.router.state import RouterState
from eldr_serve.router_protocol.messages import LiveSettings, Restore
from eldr_serve.scheduling import PlacementRequest, StepCost, make_policy
from eldr_serve.scheduling.cost import StepSums
from eldr_serve.scheduling.types import Lease, LeaseState
from offline.simulation.cluster import Cluster, Decode, Prefill
from offline.simulation.requests import Requests
from offline.simulation.run import OperatorChange, simulate
from tests.support.fake_router import place
from tests.support.shipped import ROOT
from tests.support.tables import counts_for, request, unit_table
from tests.support.traces import observed_experts, random_routes

# Names of reasons when the decisions were recorded.
RECORDED_REASONS = {"no-counts": "no-signature", "bad-counts": "bad-signature"}
RECORD = ROOT / "tests/unit/recorded/decisions.json"
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "balance-band": ("balance-band", {"slots": 3}),
    "balance-route": ("balance-route", {}),
    "balance-route-horizon": ("balance-route-horizon", {"slots": 3}),
    "domain": ("domain", {}),
    "least-tokens": ("least-tokens", {}),
    "locality-band": ("locality-band", {"band": 0.3}),
    "locality-band, load bound": ("locality-band", {"max_load_ratio": 1.2}),
    "marginal-cost": ("marginal-cost", {"tail_power": 1}),  # the default when the decisions were recorded
} | {name: (name, {}) for name in ("power-of-two", "random", "round-robin", "shortest-queue")}
L, E, TOP_K = 2, 8, 2


class Traffic:
    """Two ingresses of a router, whose requests begin, progress, wait and end, and whose replicas change."""

    def __init__(self, policy: str, parameters: dict[str, Any], seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.now = 0.0
        self.policy, self.parameters, self.seed = policy, parameters, seed
        self.replicas = [f"r{w}" for w in range(4)]
        self.held: dict[str, dict[str, Lease]] = {"a": {}, "b": {}}
        self.waiting: dict[str, dict[str, PlacementRequest]] = {"a": {}, "b": {}}
        self.settings: LiveSettings | None = None
        self.placed: list[list[Any]] = []
        self.granted: list[Lease] = []
        self.start()

    def start(self) -> None:
        """Start a new router, to which the ingresses restore their leases."""
        self.state = RouterState(
            model_id="m",
            policy=self.policy,
            parameters=self.parameters,
            table=unit_table(4).to_bytes(),
            seed=self.seed,
            clock=lambda: self.now,
        )
        self.state.set_callbacks(on_granted=self.granted.extend)
        self.state.expect_counts(L, E)
        for ingress, leases in self.held.items():
            replicas = tuple(self.replicas) if ingress == "a" else None  # "b" reports none, so it reaches all
            self.state.restore_from_ingress(Restore(ingress, replicas, tuple(leases), self.settings))
            for lease in leases.values():
                self.state.leases.adopt_lease(replace(lease, ingress=ingress))
            self.exchange(ingress, tuple(self.waiting[ingress].values()))

    def request(self, name: str) -> PlacementRequest:
        rng = self.rng
        counts = counts_for(int(rng.integers(4)), L, E) + rng.integers(0, 3, (L, E)).astype(np.uint32)
        live = self.state.settings
        similarity = None
        if rng.random() < 0.9 and live.table is not None:
            similarity = RoutingTable.from_bytes(live.table).similarity(counts)
        placement_request = request(
            name,
            int(rng.integers(5, 300)),
            int(rng.integers(1, 80)),
            expert_counts=counts.astype(np.uint16) if similarity is not None else None,
            domain=[None, "domain1", "domain2", "elsewhere"][rng.integers(4)],
            similarity=similarity,
            table_version=live.table_version,
            counts_missing=similarity is None,
            exclude=(self.replicas[0],) if rng.random() < 0.05 else (),
            prompt_key=f"k{rng.integers(20)}",
            may_wait=bool(rng.random() < 0.8),
        )
        return replace(placement_request, worker_failed=bool(placement_request.exclude))

    def exchange(
        self,
        ingress: str,
        placements: tuple[PlacementRequest, ...],
        *,
        progress: Any = None,
        released: tuple[str, ...] = (),
        held: tuple[str, ...] = (),
    ) -> None:
        self.state.leases.set_generated_tokens(progress or {})
        for name in released:
            self.state.leases.finish(name)
        for name in held:  # the replica may be the same
            known = self.state.placer.running[name].request
            self.state.placer.adopt_lease(replace(self.held[ingress][name], request=known, ingress=ingress))
        answers = place(self.state, *placements, ingress=ingress)
        for answer in answers:
            if answer.state is LeaseState.QUEUED:
                self.waiting[ingress][answer.request_id] = answer.request
            elif answer.state is LeaseState.GRANTED:
                self.take(ingress, answer)
        answered = set(map(id, answers))
        for lease in sorted(self.granted, key=lambda lease: lease.ingress):
            if id(lease) not in answered:
                self.take(lease.ingress, lease)
        self.granted.clear()

    def take(self, ingress: str, placed: Lease) -> None:
        request = replace(placed.request, expert_counts=None, similarity=None, blocks=None)
        lease = replace(placed, request=request, queued_at_s=0.0)
        self.waiting[ingress].pop(lease.request_id, None)
        self.held[ingress][lease.request_id] = lease
        reason = RECORDED_REASONS.get(lease.reason, lease.reason)
        self.placed.append(
            [lease.request_id, lease.worker, lease.num_candidates, reason, bool(lease.is_most_similar)]
        )

    def run(self, steps: int) -> list[list[Any]]:
        for step in range(steps):
            self.now += float(self.rng.exponential(0.2))
            ingress = "ab"[self.rng.integers(2)]
            leases = self.held[ingress]
            released = [name for name in sorted(leases) if self.rng.random() < 0.12]
            for name in released:
                del leases[name]
            if self.waiting[ingress] and self.rng.random() < 0.1:
                name = sorted(self.waiting[ingress])[0]
                del self.waiting[ingress][name]
                released.append(name)
            progress = {name: int(self.rng.integers(1, 60)) for name in sorted(leases)[:3]}
            num_requests = int(self.rng.integers(0, 4))
            requests = tuple(self.request(f"{ingress}{step}-{n}") for n in range(num_requests))
            restored = ()
            if leases and self.rng.random() < 0.05:
                name = sorted(leases)[0]
                leases[name] = replace(leases[name], worker=self.replicas[-1])
                restored = (name,)
            self.exchange(ingress, requests, released=tuple(released), progress=progress, held=restored)
            if step % 40 == 17:
                self.state.observe_steps(self.steps())
            if step % 60 == 31:  # a replica is replaced
                self.replicas = [*self.replicas[1:], f"r{step}"]
                self.state.ingresses.set_reachable_workers("a", self.replicas)
                self.exchange(ingress, ())
            if step % 90 == 45:
                table = unit_table(4, band=0.05 + step / 1000)
                self.settings = self.state.live_settings.swap_table(table.to_bytes())
                self.exchange(ingress, ())
            if step % 110 == 70:
                for policy, parameters in (("shortest-queue", {}), (self.policy, self.parameters)):
                    self.settings = self.state.live_settings.set_policy(policy, parameters)
                    self.exchange(ingress, ())
            if step % 130 == 99:
                self.start()
        return self.placed

    def steps(self) -> StepSums:
        requests = self.rng.integers(1, 12, 60)
        kv, experts = requests * self.rng.integers(50, 90, 60), np.minimum(2 * requests, 16)
        seconds = 0.004 + 0.0002 * requests + 1e-6 * kv + 0.0004 * experts
        return StepSums.from_steps(requests.tolist(), kv.tolist(), experts.tolist(), seconds.tolist())


def simulate_policy(policy: str, parameters: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return workers and times of a simulation with prefill, a new table and a change of workers."""
    rng = np.random.default_rng(seed)
    kinds = 30
    routes = random_routes(rng, kinds, (3, 30), layers=L, experts=E, top_k=TOP_K)
    lengths = np.array([len(r) for r in routes])
    counts = np.stack([counts_for(int(rng.integers(4)), L, E) for _ in range(kinds)])
    prompt = rng.integers(10, 200, kinds)
    counts = counts + rng.integers(0, 3, counts.shape).astype(np.uint32)
    experts = observed_experts(counts, prompt, routes, [f"domain{n % 3}" for n in range(kinds)])
    kind = rng.integers(0, kinds, 300)
    requests = Requests(
        np.cumsum(rng.exponential(0.15, 300)),
        prompt[kind],
        lengths[kind],
        kind=kind,
        keys=[f"k{k}" for k in kind],
    )
    cost = StepCost(fixed_s=0.02, per_request_s=0.004, per_kv_token_s=1e-5, per_expert_s=0.003)
    cluster = Cluster(
        prefill=Prefill(workers=2, fixed_s=0.01, per_token_s=2e-4),
        decode=Decode(workers=4, cost=cost),
        queue_timeout_s=8.0,
    )
    outcome = simulate(
        requests,
        make_policy(policy, **parameters).set_table(unit_table(4)),
        cluster,
        experts=experts,
        changes=[
            OperatorChange(9.0, workers=3),
            OperatorChange(15.0, workers=4),
            OperatorChange(20.0, table=unit_table(4, band=0.4)),
        ],
        seed=seed,
    )
    workers = " ".join(map(str, outcome.worker))
    return {"workers": workers, "sum of ends, s": float(np.nansum(outcome.last_s))}


def place_traffic(policy: str, parameters: dict[str, Any], seed: int) -> dict[str, str]:
    """Return the replicas in order of placement, and a digest of all leases."""
    decisions = Traffic(policy, parameters, seed).run(400)
    digest = hashlib.sha256(json.dumps(decisions).encode()).hexdigest()
    return {"replicas": " ".join(replica for _, replica, *_ in decisions), "digest": digest}


def decisions(name: str) -> dict[str, Any]:
    """Return the decisions of the router and of the simulator for a name in POLICIES."""
    return {
        "placed": place_traffic(*POLICIES[name], seed=7),
        "simulated": simulate_policy(*POLICIES[name], seed=3),
    }


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_requests_go_to_the_same_workers(name: str) -> None:
    recorded, current = json.loads(RECORD.read_text())[name], decisions(name)
    assert current["placed"] == recorded["placed"]
    assert current["simulated"]["workers"] == recorded["simulated"]["workers"]
    assert current["simulated"]["sum of ends, s"] == pytest.approx(recorded["simulated"]["sum of ends, s"])


if __name__ == "__main__":
    RECORD.write_text(json.dumps({name: decisions(name) for name in POLICIES}, indent=1) + "\n")
