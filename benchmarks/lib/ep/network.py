"""Simulated nodes: ranks of one machine, whose messages to other nodes are delayed by a sleep."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from eldr_serve.arrays import Ints
from eldr_serve.experts.expert_placement import Topology

TRAFFIC = ("near_messages", "near_bytes", "far_messages", "far_bytes")  # near: within a node


@dataclass(frozen=True)
class Network:
    """Nodes of equally many ranks. Each rank has a link of its own to the other nodes.

    Attributes:
        nodes: number of nodes.
        delay_s: delay of messages between nodes. Messages that a rank sends and receives at the same time are
            delayed once, because they travel at the same time.
        bytes_per_s: bandwidth of a rank's link, in each direction.
    """

    nodes: int = 1
    delay_s: float = 0.0
    bytes_per_s: float = math.inf


ONE_NODE = Network()


class RankTraffic:
    """The messages that one rank has sent to others.

    Attributes:
        counts: int[4], numbers and bytes of these messages, in the order of TRAFFIC.
    """

    def __init__(self, rank: int, ranks: int, network: Network) -> None:
        node_of = Topology(ranks=ranks, nodes=network.nodes).node_of
        self._is_far = node_of != node_of[rank]
        self._is_near = ~self._is_far & (np.arange(ranks) != rank)
        self._network = network
        self.counts = np.zeros(len(TRAFFIC), np.int64)

    def add(self, sent: Ints, received: Ints) -> None:
        """Count bytes sent[g] to rank g as one message, and sleep as long as those between nodes take."""
        near, far = sent[self._is_near], sent[self._is_far]
        self.counts += [np.count_nonzero(near), near.sum(), np.count_nonzero(far), far.sum()]
        if busiest := max(far.sum(), received[self._is_far].sum()):
            time.sleep(self._network.delay_s + busiest / self._network.bytes_per_s)
