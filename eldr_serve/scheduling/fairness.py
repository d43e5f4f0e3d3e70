"""Max-min fair shares of a scarce resource among tenants."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence


def next_share(in_use: int, priority: float) -> float:
    """Return a tenant's share with one unit more than `in_use`; the smallest share is served next."""
    return (in_use + 1) / priority


def fair_order(waiting: Sequence[tuple[str, float]], in_use: Mapping[str, int]) -> list[int]:
    """Return indices into `waiting` in the order in which fair shares serve them.

    The order assumes that nothing is released meanwhile. A tenant's requests keep their order; among equal
    shares the request that has waited longest is first.

    Args:
        waiting: (tenant, priority) of each request, in order of arrival; a tenant's first priority counts.
        in_use: number of units that each tenant has now.
    """
    queues: dict[str, list[int]] = {}
    for index, (tenant, _) in enumerate(waiting):
        queues.setdefault(tenant, []).append(index)
    heap = [
        (next_share(in_use.get(tenant, 0), waiting[queue[0]][1]), queue[0], 0, tenant)
        for tenant, queue in queues.items()
    ]
    heapq.heapify(heap)
    order = []
    while heap:
        _, index, served, tenant = heapq.heappop(heap)
        order.append(index)
        queue, served = queues[tenant], served + 1
        if served < len(queue):
            following = next_share(in_use.get(tenant, 0) + served, waiting[queue[0]][1])
            heapq.heappush(heap, (following, queue[served], served, tenant))
    return order
