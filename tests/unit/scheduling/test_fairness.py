"""Fair shares between tenants, against brute force and in the decode queue."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eldr_serve.scheduling import PlacementRequest, make_policy
from eldr_serve.scheduling.fairness import fair_order
from eldr_serve.scheduling.placer import Placer
from eldr_serve.scheduling.types import Lease, LeaseState
from tests.support.tables import fail

PRIORITIES = {"a": 1.0, "b": 2.0, "c": 0.5}
tenants = st.lists(st.sampled_from("abc"), max_size=12)
holdings = st.dictionaries(st.sampled_from("abc"), st.integers(0, 6))


def expected_order(waiting: Sequence[str], held: Mapping[str, int]) -> list[int]:
    """Return the order in which the tenant with the smallest share by priority is always next."""
    has, candidates, order = Counter(held), list(range(len(waiting))), []
    while candidates:
        index = min(candidates, key=lambda i: ((has[waiting[i]] + 1) / PRIORITIES[waiting[i]], i))
        has[waiting[index]] += 1
        candidates.remove(index)
        order.append(index)
    return order


@given(tenants, holdings)
def test_the_smallest_share_is_always_next(waiting: list[str], held: dict[str, int]) -> None:
    order = fair_order([(tenant, PRIORITIES[tenant]) for tenant in waiting], held)
    assert order == expected_order(waiting, held)


@given(tenants)
def test_the_decode_queue_serves_the_tenant_with_the_smallest_share(waiting: list[str]) -> None:
    """All requests have one size and the policy has no preference, so fairness alone decides."""
    placer = Placer(make_policy("balance-route", slots=2, lookahead=1, candidates=1), on_policy_error=fail)
    placer.set_workers(["w0", "w1"])
    for number, tenant in enumerate("aaaa" + "".join(waiting)):
        request = PlacementRequest(
            str(number), 5, 0, may_wait=True, tenant=tenant, priority=PRIORITIES[tenant]
        )
        placement = Lease(request)
        placement.become(LeaseState.SENT)
        placer.submit([placement])
    rng = np.random.default_rng(0)
    while placer.queue.leases:
        queue = list(placer.queue.leases.values())
        ended = str(rng.choice(list(placer.running)))
        placer.finish(ended)
        leases_by_tenant = Counter(p.request.tenant for p in placer.running.values())
        following = queue[expected_order([p.request.tenant for p in queue], leases_by_tenant)[0]]
        assert [p.request_id for p in placer.dispatch()] == [following.request_id]


def test_requests_whose_ingress_lacks_a_worker_do_not_take_the_turns_of_others() -> None:
    """Two ingresses wait. One of them cannot reach w1, and all slots that become free are those of w0."""
    placer = Placer(make_policy("balance-route", slots=2, lookahead=1, candidates=1), on_policy_error=fail)
    placer.set_workers(["w0", "w1"], unreachable={"partial": {"w1"}})

    def submit(name: str, ingress: str, tenant: str) -> None:
        request = PlacementRequest(name, 5, 0, may_wait=True, tenant=tenant)
        placer.submit([Lease(request, LeaseState.SENT, ingress)])

    for number in range(4):
        submit(f"full{number}", "complete", "other")
    for name in ("a0", "a1", "a2"):
        submit(name, "partial", "a")
    for name in ("b0", "b1"):
        submit(name, "complete", "b")
    for name in [name for name, lease in placer.running.items() if lease.worker == "w0"]:
        placer.finish(name)
    assert [lease.request_id for lease in placer.dispatch()] == ["a0", "b0"]
    for name in ("full0", "full1", "full2", "full3"):
        placer.finish(name)
    assert {lease.request_id: lease.worker for lease in placer.dispatch()} == {"b1": "w1"}
    placer.finish("a0")
    assert [lease.request_id for lease in placer.dispatch()] == ["a1"]
