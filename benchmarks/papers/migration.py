"""Migration from one placement to the next while the engine runs (DIRECTOR, section V-B).

Weights are sent only in compute windows, when no all-to-all uses the links, so transfers are scheduled in
"idle time", a clock that stops outside of the windows. At any time a rank sends at most one expert and
receives at most one. An expert is sent directly to its slot or, while that slot is still to be read, to a
staging buffer.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict, Field

from eldr_serve.arrays import Floats, Ints
from eldr_serve.errors import UserInputError
from eldr_serve.experts.expert_placement import Topology
from eldr_serve.experts.parallel.moves import parse_placements
from offline.expert_placement.cost import Seconds


class Links(BaseModel):
    """Costs of moving an expert."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    expert_bytes: float = Field(gt=0, description="weights of an expert in one layer")
    near_byte_s: Seconds = Field(description="each byte between ranks of a node, s")
    far_byte_s: Seconds = Field(description="each byte between nodes, s")
    commit_s: Seconds = Field(default=0.0, description="time on the critical path to activate an expert, s")


@dataclass(frozen=True)
class ScheduledMove:
    """A move of an expert between two slots of the placement (0 to P - 1). Times are idle time."""

    layer: int
    expert: int
    source: int
    slot: int
    start_s: float
    end_s: float
    ready_s: float  # time at which the slot has the expert, after `end_s` if that waits in staging


@dataclass(frozen=True)
class MigrationPlan:
    """A schedule of moves. Layers whose moves would not pay keep their placement."""

    placement: Ints  # [L, P], after the plan
    moves: list[ScheduledMove]  # moves in order of start time, layer by layer
    ready_s: Floats  # [L], idle time from which a layer runs with its new placement; 0 if nothing moves
    windows_s: Floats  # [W], compute windows of a step, which repeat
    cost_s: float  # time on the critical path, all layers

    @property
    def ready_steps(self) -> Ints:
        """Return int[L]: the first step in which each layer runs with its new placement."""
        return _first_steps(self.ready_s, self.windows_s)


def plan_migration(
    old: ArrayLike,
    new: ArrayLike,
    *,
    topology: Topology,
    links: Links,
    windows_s: ArrayLike,
    gain_s: ArrayLike | None = None,
    steps: int | None = None,
) -> MigrationPlan:
    """Schedule the moves, first of the layers with the largest gain per byte. Layers that would not pay stay.

    Args:
        old, new: int[L, P], the new one from minimise_moves.
        windows_s: [W] compute windows of one step in seconds.
        gain_s: [L] seconds that the new placement saves per step; None: move everything, whatever it saves.
        steps: expected number of steps of the batch; required with `gain_s`.

    Raises:
        ValueError: shapes do not agree, there is no window, or no rank holds an expert.
    """
    before, after = parse_placements(old, new, topology.ranks)
    windows = np.asarray(windows_s, np.float64)
    if windows.ndim != 1 or not windows.size or not np.isfinite(windows).all() or windows.min() < 0:
        raise UserInputError("compute windows must be a list of times, 0 s or more")
    if not windows.sum():
        raise UserInputError("there is no compute window to move experts in")
    layers = len(before)
    num_moves = (before != after).sum(axis=1)
    gain = np.full(layers, np.inf) if gain_s is None else np.asarray(gain_s, np.float64)
    if gain.shape != (layers,) or (gain_s is None) != (steps is None):
        raise UserInputError(f"gain_s must have {layers} numbers, and steps must be given with it")
    timetable = _Timetable(topology, links)
    placement, ready, moves = before.copy(), np.zeros(layers), []
    for layer in np.argsort(-gain / np.maximum(num_moves, 1), kind="stable"):
        if not num_moves[layer]:
            placement[layer] = after[layer]
            continue
        trial = timetable.copy()
        moves_of_layer = trial.layer_moves(int(layer), before[layer], after[layer])
        end = max(move.ready_s for move in moves_of_layer)
        if steps is not None:
            runs = steps - int(_first_steps(np.array([end]), windows)[0])
            if gain[layer] * runs <= links.commit_s * len(moves_of_layer):
                continue
        timetable = trial
        placement[layer], ready[layer] = after[layer], end
        moves += moves_of_layer
    return MigrationPlan(placement, moves, ready, windows, links.commit_s * len(moves))


class _Timetable:
    """The idle times at which each rank's links and staging buffer become free."""

    def __init__(self, topology: Topology, links: Links) -> None:
        self._node, self._links = topology.node_of, links
        self._free_at_s = np.zeros((3, topology.ranks))  # sending, receiving, staging

    def copy(self) -> _Timetable:
        other = copy(self)
        other._free_at_s = self._free_at_s.copy()  # noqa: SLF001 - of the same class
        return other

    def layer_moves(self, layer: int, old: Ints, new: Ints) -> list[ScheduledMove]:
        """Return a layer's moves: a slot is read before it is written, except for one move per cycle."""
        size = len(old) // len(self._node)
        sources = self._sources(layer, old, new, size)
        readers: dict[int, list[int]] = {slot: [] for slot in sources}  # moves are identified by their slots
        for slot, source in sources.items():
            if source in readers and source != slot:
                readers[source].append(slot)
        blocked = {slot: len(waiting_slots) for slot, waiting_slots in readers.items()}
        free = [slot for slot, number in blocked.items() if not number]
        times: dict[int, tuple[float, float]] = {}
        staged: int | None = None
        while len(times) < len(sources):
            if not free:  # only cycles are left: open one
                staged = next(slot for slot in sources if slot not in times)
                free.append(staged)
            slot = free.pop()
            sender, rank = sources[slot] // size, slot // size
            after = (
                self._free_at_s[2, rank]
                if slot == staged
                else max((times[r][1] for r in readers[slot]), default=0)
            )
            times[slot] = self._transfer(sender, rank, after)
            if sources[slot] in blocked:
                blocked[sources[slot]] -= 1
                if not blocked[sources[slot]] and sources[slot] not in times:
                    free.append(sources[slot])
            if staged is not None and not blocked[staged]:
                self._free_at_s[2, staged // size] = max(times[r][1] for r in readers[staged])
                staged = None
        moves = [
            ScheduledMove(
                layer,
                int(new[slot]),
                sources[slot],
                slot,
                start,
                end,
                max([end, *(times[r][1] for r in readers[slot])]),
            )
            for slot, (start, end) in times.items()
        ]
        return sorted(moves, key=lambda move: move.start_s)

    def _sources(self, layer: int, old: Ints, new: Ints, size: int) -> dict[int, int]:
        """Return the source of each slot to be written: same rank, else same node, else the idlest rank."""
        sources: dict[int, int] = {}
        sends = self._free_at_s[0].copy()
        for slot in np.flatnonzero(old != new).tolist():
            holders = np.flatnonzero(old == new[slot])
            if not len(holders):
                raise ValueError(f"expert {new[slot]} of layer {layer} is on no rank")
            rank = slot // size
            cost = np.array([self._transfer_s(int(h) // size, rank) for h in holders])
            best = int(np.lexsort((sends[holders // size], cost))[0])
            sources[slot] = int(holders[best])
            sends[holders[best] // size] += cost[best]
        return sources

    def _transfer(self, sender: int, rank: int, after: float) -> tuple[float, float]:
        """Reserve a transfer and return (start, end). A copy within a rank uses no link."""
        if sender == rank:
            return after, after
        start = float(max(after, self._free_at_s[0, sender], self._free_at_s[1, rank]))
        end = start + self._transfer_s(sender, rank)
        self._free_at_s[0, sender] = self._free_at_s[1, rank] = end
        return start, end

    def _transfer_s(self, source: int, rank: int) -> float:
        if source == rank:
            return 0.0
        near = self._node[source] == self._node[rank]
        return self._links.expert_bytes * (self._links.near_byte_s if near else self._links.far_byte_s)


def _first_steps(idle_s: Floats, windows_s: Floats) -> Ints:
    return np.asarray(np.ceil(idle_s / windows_s.sum() - 1e-9).astype(np.int64))
