"""The simulator against a plain implementation of its rules, and invariants of every run."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from eldr_serve.scheduling import Decision, Loads, PlacementRequest, QueuedPolicy, StepCost, make_policy
from loadgen.statistics import LatencyObjective
from offline.simulation.cluster import Cluster, Decode, Prefill, Whole
from offline.simulation.outcome import Outcome
from offline.simulation.placement_requests import PlacementRequestFactory
from offline.simulation.requests import Experts, Requests, SimulationError, rank_masks
from offline.simulation.run import OperatorChange, simulate
from tests.support.tables import counts_for, unit_table
from tests.support.traces import observed_experts, random_routes

COST = StepCost(fixed_s=1.0, per_request_s=0.1, per_kv_token_s=0.001, per_expert_s=0.01)
WITH_PREFILL = replace(COST, per_prompt_token_s=0.05)
L, E, TOP_K = 2, 70, 3


class Hoarding(QueuedPolicy):
    """A policy that lets requests wait until there are three or a worker is idle."""

    def select(self, request: PlacementRequest, loads: Loads, rng: np.random.Generator) -> Decision:
        return Decision(0, reason="now")

    def dispatch(
        self, waiting: Sequence[PlacementRequest], loads: Loads, rng: np.random.Generator
    ) -> list[tuple[int, Decision]]:
        idle = np.flatnonzero(loads.available & (loads.in_flight == 0)).tolist()
        if idle:
            return [(n, Decision(w, reason="idle")) for n, w in enumerate(idle[: len(waiting)])]
        least = int(loads.in_flight.argmin())
        return [(len(waiting) - 1, Decision(least, reason="third"))] if len(waiting) >= 3 else []


def random_requests(n: int, seed: int = 0, gap_s: float = 2.0) -> tuple[Requests, Experts, list[np.ndarray]]:
    """Return n requests, each with its own routes."""
    rng = np.random.default_rng(seed)
    routes = random_routes(rng, n, (1, 9), layers=L, experts=E, top_k=TOP_K)
    lengths = np.array([len(r) for r in routes])
    counts = rng.integers(0, 5, (n, L, E)).astype(np.uint32)
    prompt = np.arange(10, 10 + n)
    experts = observed_experts(counts, prompt, routes, [""] * n)
    arrival_s = np.cumsum(rng.exponential(gap_s, n))
    return Requests(arrival_s, prompt, lengths, kind=np.arange(n)), experts, routes


@pytest.mark.parametrize("cost", [COST, replace(COST, batch_s={1: 0.0, 2: 0.7})])
def test_a_worker_equals_a_simulation_by_hand(cost: StepCost) -> None:
    requests, experts, routes = random_requests(6)
    cluster = Cluster(decode=Decode(workers=1, max_batch=2, cost=cost))
    outcome = simulate(requests, make_policy("shortest-queue"), cluster, experts=experts)
    now, running, waiting, done = 0.0, [], list(range(6)), [0] * 6
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    while running or waiting:
        if not running:
            now = max(now, requests.arrival_s[waiting[0]])
        while waiting and len(running) < 2 and requests.arrival_s[waiting[0]] <= now:
            running.append(waiting.pop(0))
        active = sum(len({e for j in running for e in routes[j][done[j]][layer]}) for layer in range(L))
        now += cost.seconds(len(running), sum(10 + j + done[j] for j in running), active)
        for j in list(running):
            first.setdefault(j, now)
            last[j] = now
            done[j] += 1
            if done[j] == len(routes[j]):
                running.remove(j)
    assert outcome.first_s == pytest.approx([first[j] for j in range(6)])
    assert outcome.last_s == pytest.approx([last[j] for j in range(6)])


def test_a_step_under_expert_parallelism_costs_what_its_fullest_rank_costs() -> None:
    requests, experts, routes = random_requests(12, gap_s=0.5)
    ranks = np.random.default_rng(3).integers(0, 4, (L, E))
    cluster = Cluster(decode=Decode(workers=1, cost=COST))
    outcome = simulate(requests, make_policy("random"), cluster, experts=experts, ranks=ranks)
    # The first step has the first request alone.
    first = sum(max(np.bincount(ranks[layer, routes[0][0][layer]])) for layer in range(L))
    assert outcome.experts[0] == first
    plain = simulate(requests, make_policy("random"), cluster, experts=experts)
    same = simulate(requests, make_policy("random"), cluster, experts=experts, ranks=np.zeros((1, L, E), int))
    assert np.array_equal(plain.last_s, same.last_s)
    assert outcome.experts.mean() < plain.experts.mean()


@given(st.integers(1, 5), st.integers(1, 140), st.integers(0, 9))
def test_masks_divide_the_experts_between_ranks(layers: int, num_experts: int, seed: int) -> None:
    ranks = np.random.default_rng(seed).integers(0, 3, (layers, num_experts))
    masks = rank_masks(ranks)
    assert np.bitwise_count(masks).sum(axis=2).T.tolist() == [
        np.bincount(row, minlength=len(masks)).tolist() for row in ranks
    ]
    assert np.bitwise_count(np.bitwise_or.reduce(masks)).sum() == layers * num_experts


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(1, 40),
    decode=st.builds(
        Decode,
        workers=st.integers(1, 4),
        max_batch=st.integers(1, 6),
        kv_tokens=st.sampled_from([None, 70, 130]),
        barrier=st.booleans(),
        cost=st.just(COST),
        recompute_per_token_s=st.just(0.01),
    )
    | st.builds(
        Decode,
        workers=st.integers(1, 4),
        max_batch=st.integers(1, 6),
        barrier=st.booleans(),
        cost=st.just(WITH_PREFILL),
        whole=st.builds(Whole, step_tokens=st.integers(7, 40), cache_blocks=st.integers(0, 9)),
    ),
    prefill=st.sampled_from([None, Prefill(workers=2, fixed_s=0.5, per_token_s=0.01)]),
    handover_s=st.sampled_from([0.0, 0.7]),
    ttl=st.sampled_from([None, 1.0]),
    policy=st.sampled_from(["random", "least-tokens", "marginal-cost", "hoarding"]),
)
def test_every_request_ends_once_and_all_kv_is_freed(
    seed: int,
    n: int,
    decode: Decode,
    prefill: Prefill | None,
    handover_s: float,
    ttl: float | None,
    policy: str,
) -> None:
    requests, experts, _ = random_requests(n, seed, gap_s=0.4)
    if decode.whole is not None:
        prefill = None
    cluster = Cluster(decode=decode, prefill=prefill, handover_fixed_s=handover_s, queue_timeout_s=ttl)
    live_policy = Hoarding() if policy == "hoarding" else make_policy(policy)
    released: list[str] = []
    tell = live_policy.on_finished
    live_policy.on_finished = lambda request_id: (released.append(request_id), tell(request_id))[1]
    ended: list[int] = []
    outcome = simulate(requests, live_policy, cluster, experts=experts, seed=seed, on_finished=ended.append)
    done = outcome.finished
    assert sum(ended) == n
    has_expired = np.isnan(outcome.placed_s)
    assert set(released) == {str(j) for j in np.flatnonzero(done | has_expired)}
    if policy != "marginal-cost":  # marginal-cost calls its own on_finished during placement
        assert len(released) == done.sum() + has_expired.sum()
    assert policy == "hoarding" or done.all()
    assert np.isnan(outcome.last_s[~done]).all()
    assert (outcome.prefilled_s >= requests.arrival_s).all()
    times = (outcome.prefilled_s, outcome.placed_s, outcome.first_s, outcome.last_s)
    if decode.whole is not None:
        times = (requests.arrival_s, outcome.placed_s, outcome.prefilled_s, outcome.last_s)
        assert (outcome.first_s[done] == outcome.prefilled_s[done]).all()
    for earlier, later, min_gap_s in zip(times, times[1:], (0, handover_s, 0), strict=False):
        assert (later[done] >= earlier[done] + min_gap_s).all()
    assert outcome.batch.max() <= decode.max_batch
    # A preempted request generates its tokens once, so steps hold as many tokens as requested.
    assert outcome.batch.sum() == requests.output_tokens[done].sum()
    if decode.kv_tokens is None:
        assert outcome.preempted == 0


def test_a_full_worker_preempts_and_recomputes_the_youngest_request() -> None:
    requests = Requests(np.zeros(2), np.array([10, 10]), np.array([20, 20]))
    cost = StepCost(fixed_s=1.0, per_request_s=0, per_expert_s=0)
    decode = Decode(workers=1, kv_tokens=40, cost=cost, recompute_per_token_s=0.5)
    outcome = simulate(requests, make_policy("random"), Cluster(decode=decode))
    assert outcome.preempted == 1
    # The first generates a token alone, 9 beside the second (20 + 19 KV tokens), and the rest alone.
    assert outcome.last_s[0] == 20.0
    # The second recomputes 10 + 9 tokens at 0.5 s each, and generates its last 11.
    assert outcome.last_s[1] == 20.0 + 19 * 0.5 + 11


def test_a_barrier_makes_all_steps_as_long_as_the_slowest() -> None:
    requests = Requests(np.zeros(2), np.array([100, 900]), np.array([5, 5]))
    cost = StepCost(fixed_s=1.0, per_request_s=0, per_kv_token_s=0.01, per_expert_s=0)
    cluster = Cluster(decode=Decode(workers=2, barrier=True, cost=cost))
    outcome = simulate(requests, make_policy("round-robin"), cluster)
    together = [1 + 0.01 * (900 + t) for t in range(5)]
    assert outcome.last_s == pytest.approx([2 + sum(together[:4]), 2 + sum(together)])
    assert outcome.imbalance.tolist() == [100, 799, 799, 799, 799, 904]
    steady = outcome.select_steady(outcome.spread)
    assert outcome.summary()["spread_tokens"] == (steady.mean() if len(steady) else None)


def test_the_ranks_of_a_replica_step_together_and_divide_the_experts() -> None:
    requests, experts, routes = random_requests(4)
    requests = replace(requests, arrival_s=np.zeros(4))
    decode = Decode(workers=4, ranks=2, cost=COST)
    outcome = simulate(requests, make_policy("round-robin"), Cluster(decode=decode), experts=experts)
    for replica in range(2):
        jobs = np.flatnonzero(outcome.worker // 2 == replica).tolist()
        now, done = 0.0, [0] * 4
        running = jobs[:1]  # the first step begins before the second request is placed
        while running:
            own_s = max(COST.seconds(1, 10 + j + done[j], 0) for j in running)
            active = [{e for j in running for e in routes[j][done[j]][layer]} for layer in range(L)]
            now += own_s + COST.per_expert_s * sum(map(len, active)) / 2
            for j in running:
                done[j] += 1
                assert done[j] < len(routes[j]) or outcome.last_s[j] == pytest.approx(now)
            running = [j for j in jobs if done[j] < len(routes[j])]
        assert len(jobs) == 2


def test_a_barrier_makes_all_workers_ranks_of_one_replica() -> None:
    requests, experts, _ = random_requests(20, gap_s=0.3)
    ends = [
        simulate(requests, make_policy("marginal-cost"), Cluster(decode=decode), experts=experts).last_s
        for decode in (Decode(workers=4, barrier=True, cost=COST), Decode(workers=4, ranks=4, cost=COST))
    ]
    assert np.array_equal(*ends)
    for wrong in ({"ranks": 3}, {"ranks": 2, "barrier": True}):
        with pytest.raises(ValidationError):
            Decode(workers=4, cost=COST, **wrong)


def test_prefixes_are_cached_on_the_workers_of_their_prompts() -> None:
    lengths, blocks = np.array([1024, 1500, 400, 1024]), ((1, 2), (1, 2, 3), (9,), (1, 2))
    requests = Requests(np.arange(4) * 10.0, lengths, np.ones(4, np.int64), blocks=blocks)

    def outcome(cache_blocks: int) -> Outcome:
        prefill = Prefill(workers=1, per_token_s=0.001, cache_blocks=cache_blocks)
        cluster = Cluster(decode=Decode(workers=1, cost=COST), prefill=prefill)
        return simulate(requests, make_policy("random"), cluster)

    # Block 3, the last of its prompt, had to make room for block 9. A prompt's last token is always computed.
    assert outcome(3).cached_tokens.tolist() == [0, 1024, 0, 1023]
    assert outcome(2).cached_tokens.tolist() == [0, 1024, 0, 512]
    roomy = outcome(9)
    assert roomy.cached_tokens.tolist() == [0, 1024, 0, 1023]
    assert roomy.prefilled_s - requests.arrival_s == pytest.approx([1.024, 0.476, 0.4, 0.001])


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000), n=st.integers(1, 12), step_tokens=st.integers(4, 30), room=st.integers(0, 8)
)
def test_a_whole_replica_equals_a_simulation_by_hand(seed: int, n: int, step_tokens: int, room: int) -> None:
    requests, experts, routes = random_requests(n, seed, gap_s=0.6)
    rng, size = np.random.default_rng(seed), 4
    chains = [tuple(100 * int(first) + place for place in range(9)) for first in rng.integers(3, size=n)]
    requests = replace(requests, blocks=tuple(chains))
    whole = Whole(step_tokens=step_tokens, cache_blocks=room, block_tokens=size)
    decode = Decode(workers=1, max_batch=3, cost=WITH_PREFILL, whole=whole)
    outcome = simulate(requests, make_policy("marginal-cost"), Cluster(decode=decode), experts=experts)

    now, waiting, running, cached = 0.0, list(range(n)), list[int](), list[int]()  # cached: newest first
    lacks, generated, hits = dict[int, int](), [0] * n, [0] * n
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    while running or waiting:
        if not running:
            now = max(now, requests.arrival_s[waiting[0]])
        while waiting and len(running) < 3 and requests.arrival_s[waiting[0]] <= now:
            j = waiting.pop(0)
            running.append(j)
            blocks = chains[j][: (requests.prompt_tokens[j] - 1) // size]
            num_cached = next((i for i, block in enumerate(blocks) if block not in cached), len(blocks))
            hits[j] = num_cached * size
            lacks[j] = int(requests.prompt_tokens[j]) - hits[j]
            newest = list(blocks[:room])
            cached = (newest + [block for block in cached if block not in newest])[:room]
        answering = [j for j in running if not lacks[j]]
        tokens, touched = step_tokens - len(answering), 0
        tokens_left = tokens
        for j in running:
            if lacks[j] and tokens_left:
                take = min(lacks[j], tokens_left)
                lacks[j], tokens_left, touched = lacks[j] - take, tokens_left - take, touched + 1
        active = sum(
            len({e for j in answering for e in routes[j][generated[j]][layer]}) for layer in range(L)
        )
        kv = sum(int(requests.prompt_tokens[j]) + generated[j] for j in running)
        now += WITH_PREFILL.seconds(len(answering) + touched, kv, active, tokens - tokens_left - touched)
        for j in list(running):
            if not lacks[j]:
                first.setdefault(j, now)
                last[j] = now
                generated[j] += 1
                if generated[j] == len(routes[j]):
                    running.remove(j)
    assert outcome.first_s == pytest.approx([first[j] for j in range(n)])
    assert outcome.last_s == pytest.approx([last[j] for j in range(n)])
    assert outcome.cached_tokens.tolist() == hits


@pytest.mark.parametrize(
    "fields",
    [
        {"decode": {"workers": 1, "whole": {"step_tokens": 64}}},
        {"decode": {"workers": 1, "whole": {}, "kv_tokens": 99}},
        {"decode": {"workers": 1, "whole": {}}, "prefill": {"workers": 1}},
    ],
)
def test_impossible_whole_replicas_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="whole"):
        Cluster.model_validate(fields)


def test_a_removed_worker_gets_no_more_requests() -> None:
    requests, experts, _ = random_requests(60, gap_s=0.3)
    cluster = Cluster(decode=Decode(workers=3, cost=COST))
    changes = [OperatorChange(float(requests.arrival_s[30]), workers=1)]
    outcome = simulate(requests, make_policy("random"), cluster, experts=experts, changes=changes)
    assert set(outcome.worker[:30]) == {0, 1, 2}
    assert set(outcome.worker[31:]) == {0}


def test_the_same_seed_gives_the_same_run() -> None:
    requests, experts, _ = random_requests(80, seed=1, gap_s=0.3)
    cluster = Cluster(decode=Decode(workers=3, cost=COST))
    runs = [simulate(requests, make_policy("random"), cluster, experts=experts, seed=s) for s in (5, 5, 6)]
    assert np.array_equal(runs[0].last_s, runs[1].last_s)
    assert not np.array_equal(runs[0].last_s, runs[2].last_s)
    assert set(runs[0].worker) == {0, 1, 2}
    assert np.isnan(runs[0].tpot_s).sum() == (requests.output_tokens == 1).sum()


def test_a_router_makes_one_placement_after_the_other() -> None:
    arrival_s, ones = np.array([0.0, 0.0, 0.5, 9.0]), np.ones(4, int)
    cluster = Cluster(decode=Decode(workers=4, cost=COST), router_s=2.0, handover_fixed_s=0.25)
    outcome = simulate(Requests(arrival_s, ones, ones), make_policy("shortest-queue"), cluster)
    assert outcome.placed_s.tolist() == [2, 4, 6, 11]
    step_s = COST.seconds(1, 1, 0)
    assert outcome.ttft_s == pytest.approx(np.array([2, 4, 5.5, 2]) + 0.25 + step_s)


def test_good_requests_meet_both_objectives() -> None:
    cost = StepCost(fixed_s=0.5, per_request_s=0.5, per_kv_token_s=0, per_expert_s=0)
    arrival_s, prompt, output = np.array([0.0, 0.1, 90.0]), np.ones(3, int), np.array([3, 3, 1])
    outcome = simulate(
        Requests(arrival_s, prompt, output),
        make_policy("shortest-queue"),
        Cluster(decode=Decode(workers=1, cost=cost)),
    )
    # Steps end at 1 (the first alone), 2.5, 4 (both), 5 (the second alone), and 91.
    assert outcome.ttft_s.tolist() == pytest.approx([1, 2.4, 1])
    assert outcome.tpot_s[:2].tolist() == pytest.approx([1.5, 1.25])
    assert outcome.meets(LatencyObjective(2000, 1500)).tolist() == [True, False, True]
    assert outcome.meets(LatencyObjective(3000, 1400)).tolist() == [False, True, True]
    row = outcome.summary(LatencyObjective(3000, 1400))
    assert (row["good_pct"], row["goodput_per_s"]) == pytest.approx((200 / 3, 2 / 91))
    assert "good_pct" not in outcome.summary()


def test_similarities_are_those_of_the_predicted_then_of_the_measured_counts() -> None:
    routes = random_routes(np.random.default_rng(0), 1, (3, 4), layers=2, experts=8, top_k=2)
    experts = observed_experts(counts_for(0)[None], np.array([20]), routes, ["d"])
    experts = replace(experts, predicted=counts_for(1)[None])
    requests = Requests(np.zeros(1), np.array([20]), np.array([3]), np.zeros(1, np.int64))
    policy = make_policy("random").set_table(unit_table(2))
    factory = PlacementRequestFactory(requests, experts, policy, Whole(), reads_counts=True)
    placed = factory.make_request(0, ())
    assert placed.similarity.tolist() == pytest.approx([0, 1])
    counted = factory.replace_predicted_counts(0, placed)
    assert counted.similarity.tolist() == pytest.approx([1, 0])
    assert factory.make_request(0, ()).similarity.tolist() == pytest.approx([0, 1])
    prefilled = PlacementRequestFactory(requests, experts, policy, None, reads_counts=True)
    assert prefilled.make_request(0, ()).similarity.tolist() == pytest.approx([1, 0])


def test_a_policy_sees_only_the_limits_that_clients_have_set() -> None:
    requests, experts, _ = random_requests(5)
    limits = requests.output_tokens + np.arange(5)
    for whole in (None, Whole()):
        for sent, expected in ((requests, [0] * 5), (replace(requests, max_new_tokens=limits), limits)):
            factory = PlacementRequestFactory(sent, experts, make_policy("random"), whole, reads_counts=True)
            seen = [factory.make_request(index, ()).max_new_tokens for index in range(5)]
            assert seen == list(expected)


@pytest.mark.parametrize("policy", ["balance-route-horizon", "balance-band"])
def test_the_lengths_of_answers_do_not_influence_placements_before_an_end(policy: str) -> None:
    """With the lengths as limits, both predict that all answers of 2 tokens end within the horizon."""
    prompt = np.random.default_rng(0).integers(1, 1000, 12)
    cluster = Cluster(decode=Decode(workers=3, cost=COST))
    workers = []
    for tokens in (2, 50):
        requests = Requests(np.arange(12) * 1e-3, prompt, np.full(12, tokens))  # a step takes a second
        workers.append(simulate(requests, make_policy(policy), cluster).worker.tolist())
    assert workers[0] == workers[1]
    assert set(workers[0]) == {0, 1, 2}


def test_mixtures_decode_the_steps_of_requests_of_one_domain() -> None:
    _, experts, _ = random_requests(12)
    experts = replace(experts, domains=["even", "odd"] * 6)
    mixtures = experts.mix(np.arange(2, 12), 3, 40, np.random.default_rng(0))
    assert len(mixtures.domains) == len(mixtures.counts) == len(mixtures.offset) - 1 == 40
    steps = [experts.bits[a:b].tolist() for a, b in zip(experts.offset, experts.offset[1:], strict=False)]
    for n, domain in enumerate(mixtures.domains):
        remaining = mixtures.bits[mixtures.offset[n] : mixtures.offset[n + 1]].tolist()
        counts, tokens = np.zeros((L, E)), 0
        while remaining:
            (part,) = (j for j in range(2, 12) if remaining[: len(steps[j])] == steps[j])
            assert experts.domains[part] == domain
            counts, tokens = counts + experts.counts[part], tokens + experts.count_tokens[part]
            remaining = remaining[len(steps[part]) :]
        assert np.array_equal(mixtures.counts[n], counts)
        assert mixtures.count_tokens[n] == tokens
    assert len({row.tobytes() for row in mixtures.counts}) > 20


def test_sampled_steps_activate_top_k_experts_by_their_probability() -> None:
    probability = np.full((1, 1, 8), 0.01)
    probability[0, 0, :2] = 0.98
    counts, tokens = np.ones((1, 1, 8), np.uint32), np.ones(1, int)
    experts = Experts.from_probabilities(counts, tokens, probability, 2, [""], steps=400)
    assert set(np.bitwise_count(experts.bits).sum(axis=1)) == {2}
    assert np.mean(experts.bits[:, 0] == 3) > 0.85


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arrival_s": [1.0, 0.5]}, "not in order"),
        ({"arrival_s": [0.0, np.nan]}, "not in order"),
        ({"prompt_tokens": [1, 0]}, "request 1 has 0 prompt_tokens"),
        ({"output_tokens": [-3, 4]}, "request 0 has -3 output_tokens"),
        ({"output_tokens": [4]}, "2 requests have 1 output_tokens"),
        ({"kind": [4]}, "1 entries of kind"),
        ({"max_new_tokens": [4]}, "1 entries of max_new_tokens"),
        ({"max_new_tokens": [5, 1]}, "request 1 has 2 output_tokens, above its limit of 1"),
        ({"prompt_tokens": [3, 90], "output_tokens": [1, 20]}, "request 1 needs 110 KV tokens, more than"),
    ],
)
def test_impossible_requests_are_refused(change: dict[str, list[float]], message: str) -> None:
    fields = {"arrival_s": [0.0, 1.0], "prompt_tokens": [3, 4], "output_tokens": [1, 2]} | change
    cluster = Cluster(decode=Decode(workers=1, kv_tokens=100, cost=COST))
    with pytest.raises(SimulationError, match=message):
        simulate(Requests(**{k: np.array(v) for k, v in fields.items()}), make_policy("random"), cluster)
