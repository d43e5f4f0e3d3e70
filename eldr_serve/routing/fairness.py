"""Fair shares of what is scarce: whose request is next."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence


def share(held: int, priority: float) -> float:
    """A tenant's, once it has one more than `held`; the smallest is next: max-min fairness."""
    return (held + 1) / priority


def fair_order(waiting: Sequence[tuple[str, float]], held: Mapping[str, int]) -> list[int]:
    """Indices into `waiting` in the order in which fair shares serve them.

    As if nothing that is held were given back meanwhile. A tenant's own requests keep their order; equal
    shares go to whoever has waited longest.

    Args:
        waiting: (tenant, priority) of each request, first come first; a tenant's first priority counts.
        held: what each tenant has.
    """
    queues: dict[str, list[int]] = {}
    for index, (tenant, _) in enumerate(waiting):
        queues.setdefault(tenant, []).append(index)
    heap = [
        (share(held.get(tenant, 0), waiting[queue[0]][1]), queue[0], 0, tenant)
        for tenant, queue in queues.items()
    ]
    heapq.heapify(heap)
    order = []
    while heap:
        _, index, served, tenant = heapq.heappop(heap)
        order.append(index)
        queue, served = queues[tenant], served + 1
        if served < len(queue):
            following = share(held.get(tenant, 0) + served, waiting[queue[0]][1])
            heapq.heappush(heap, (following, queue[served], served, tenant))
    return order
