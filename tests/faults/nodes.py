"""Several Ray nodes on this machine, each with an ingress and with a proxy of Ray Serve.

Serve runs one proxy on each node that has a replica. All proxies listen at one port, and so do the ingresses:
the kernel spreads connections over the processes that listen there, and gives none to a dead one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from loadgen.application import CPUS, OBJECT_STORE_BYTES

_INGRESS = "ingress"  # a resource of which each node has 1
# Serve stops the proxy of a node without a replica after this time, s; a lost ingress may be away for long.
_DRAINING = {"RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "600"}
INGRESS_ACTOR = {"num_cpus": 0, "resources": {_INGRESS: 1}}  # options of an ingress, so that a node has one


@contextmanager
def separate_nodes(number: int) -> Iterator[Callable[[], Any]]:
    """Yield a function that starts the nodes, connects to the first and returns Ray's context.

    All engines run on the first node, since the others have no CPUs. On exit the nodes stop; by then Ray must
    be disconnected.
    """
    clusters: list[Any] = []

    def start() -> Any:
        import ray
        from ray.cluster_utils import Cluster

        first = {
            "num_cpus": CPUS,
            "resources": {_INGRESS: 1.0},
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
        }
        os.environ |= _DRAINING
        cluster = Cluster(initialize_head=True, head_node_args=first)
        clusters.append(cluster)
        for _ in range(number - 1):
            cluster.add_node(num_cpus=0, resources={_INGRESS: 1.0})
        return ray.init(address=cluster.address, log_to_driver=False, logging_level="error")

    try:
        yield start
    finally:
        for cluster in clusters:
            cluster.shutdown()
