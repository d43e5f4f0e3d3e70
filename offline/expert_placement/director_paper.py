"""DIRECTOR's Algorithm 1 as the paper writes it (sections VI-C, VII), to compare `director_placement` with.

One LP covers all layers under a latency budget, which a bisection lowers. The time of a layer is the slowest
rank's computation plus the slowest sender's communication, and an expert has one replica. Rounding is a
random walk in macro-iterations, whose steps are scaled by each variable's distance to a whole number.

The paper leaves two things open. Here a step that would leave [0, 1] ends at the bound, so that the
constraints of experts and of slots hold exactly. If the walk has no direction left, or if a macro-iteration
makes no variable whole, the next macro-iteration has no scales. The remaining variables then form a
transportation polytope, which has whole vertices.

Arrays: L layers, E experts, G ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import null_space
from scipy.optimize import linprog
from scipy.sparse import block_diag, csr_array, eye_array, hstack, kron, vstack

from eldr_serve.arrays import Floats, Ints
from eldr_serve.experts.expert_placement import Topology, hosts_of
from offline.expert_placement.cost import LayerCost
from offline.expert_placement.packing import fill_empty_ranks, repeat_in_empty_slots
from offline.expert_placement.workload import check_slots, placed_work, price_experts, split_by_source

_SEARCH_WIDTH = 0.01  # relative width of the budget's last interval, the paper's epsilon
_STEP_LENGTH = 0.1  # gamma: length of a step, relative to the scales
_MACRO_STEPS = 200  # T_micro, steps of a macro-iteration
_MAX_SCALES = 2.0  # alpha: a variable stays within alpha times its scale of the whole number next to it
_WHOLE_TOLERANCE = 1e-7

OnSolve = Callable[[float, bool], None]  # called after each LP with its budget, s, and whether it is feasible


@dataclass(frozen=True)
class DirectorPaperReport:
    """Latencies that the search and the rounding reached: the paper's two maxima, summed over layers, s.

    Attributes:
        infeasible_s: largest budget found without a fractional placement, a lower bound of every placement.
        budget_s: least budget found with a fractional placement.
        reached_s: latency of the whole placement.
        theorem_s: latency that Theorem 2 allows for the length and the number of steps here.
        lp_solves: number of LPs that were solved.
    """

    infeasible_s: float
    budget_s: float
    reached_s: float
    theorem_s: float
    lp_solves: int

    @property
    def above_budget(self) -> float:
        """Return how far rounding ended above the budget. 0.01 is 1 % (epsilon of Theorem 2)."""
        return self.reached_s / self.budget_s - 1 if self.budget_s else 0.0


@dataclass(frozen=True)
class _Latency:
    """The latency of a layer as linear functions of x[E, G].

    Attributes:
        compute_s: [E], time that each expert takes on any rank.
        send_s: [G, E, G], time that each source rank takes to send an expert's tokens to each rank.
    """

    compute_s: Floats
    send_s: Floats

    def seconds(self, x: Floats) -> float:
        """Return the slowest rank's computation plus the slowest sender's communication (2, 4)."""
        sent = np.einsum("jek,ek->j", self.send_s, x)
        return float((self.compute_s @ x).max() + sent.max())


def director_paper_placement(
    workload: ArrayLike,
    *,
    topology: Topology,
    slots: int,
    cost: LayerCost,
    token_bytes: float = 0.0,
    seed: int = 0,
    on_solve: OnSolve = lambda budget_s, feasible: None,
) -> tuple[Ints, DirectorPaperReport]:
    """Return the placement int[L, P], rank-major, of Algorithm 1 for a pending batch.

    Spare slots repeat an expert of their rank, so each expert is on one rank. A rank without an expert gets
    the expert with the least work too.

    Args:
        workload, topology, slots, cost, token_bytes: as for `director_placement`.
        seed: seed of the random walk.
        on_solve: called after each LP.

    Raises:
        UserInputError: the workload is invalid, or slots are fewer than experts.
    """
    tokens = split_by_source(workload, topology)
    experts, ranks = tokens.shape[2], topology.ranks
    check_slots(ranks, slots, experts)
    latencies = [_latency(layer, topology, cost, token_bytes) for layer in tokens]
    low_s, budget_s, shares, solves = search_budget(latencies, slots, on_solve)
    rng = np.random.default_rng(seed)
    chosen = np.stack([round_with_scales(x, slots, rng) for x in shares])  # [L, E]
    whole = (chosen[..., None] == np.arange(ranks)).astype(np.float64)
    reached_s = sum(latency.seconds(x) for latency, x in zip(latencies, whole, strict=True))
    filled = np.full((len(tokens), ranks, slots), experts)
    for layer, row in enumerate(chosen):
        for rank in range(ranks):
            members = np.flatnonzero(row == rank)
            filled[layer, rank, : len(members)] = members
    token_s, active_s = price_experts(tokens, topology, cost, token_bytes)
    fill_empty_ranks(filled, token_s, active_s, np.zeros(len(tokens)))
    largest_s = max(max(latency.compute_s.max(), latency.send_s.max()) for latency in latencies)
    theorem_s = budget_s + theorem_slack_s(largest_s, int(_is_fractional(_snap(shares)).sum()))
    report = DirectorPaperReport(low_s, budget_s, reached_s, theorem_s, solves)
    return repeat_in_empty_slots(filled, experts).reshape(len(tokens), -1), report


def theorem_slack_s(largest_s: float, fractional: int) -> float:
    """Return how far the proof of Theorem 2 lets rounding end above the budget (Equation 10), s.

    The proof leaves C_1 and delta open. Here C_1 is the root of T_micro, which it includes, and C_2 is
    c_max^2 / 4 (Claim 1.1). Of the sum over macro-iterations only the first term counts. A larger C_1 or
    further terms allow more.

    Args:
        largest_s: largest coefficient of a latency constraint, c_max.
        fractional: number of fractional variables of the LP's solution, f_0.
    """
    return _STEP_LENGTH * math.sqrt(_MACRO_STEPS * fractional) * largest_s / 2


def two_maxima_s(
    workload: ArrayLike,
    placement: ArrayLike,
    *,
    topology: Topology,
    cost: LayerCost,
    token_bytes: float = 0.0,
) -> float:
    """Return the paper's latency of any placement, s: (2) plus (4), summed over layers.

    The replicas of an expert get equal shares of each rank's tokens, and each of them reads the weights.
    The optimum of the LP (6) is a lower bound with replicas too.
    """
    tokens = split_by_source(workload, topology)
    hosts = hosts_of(placement, tokens.shape[2], topology.ranks)
    work = placed_work(tokens, hosts, topology=topology)
    compute_s = cost.per_expert_s * work.activated + cost.per_token_s * work.tokens  # [L, G]
    pairs = tokens @ (hosts / hosts.sum(axis=2, keepdims=True))  # [L, source, rank]
    send_s = token_bytes * (pairs * _byte_s(topology, cost)).sum(axis=2)
    return float((compute_s.max(axis=1) + send_s.max(axis=1)).sum())


def _latency(tokens: Floats, topology: Topology, cost: LayerCost, token_bytes: float) -> _Latency:
    """Return the latency of a layer with tokens[G, E]."""
    expert_tokens = tokens.sum(axis=0)
    return _Latency(
        cost.per_token_s * expert_tokens + cost.per_expert_s * (expert_tokens > 0),
        token_bytes * tokens[:, :, None] * _byte_s(topology, cost)[:, None, :],
    )


def _byte_s(topology: Topology, cost: LayerCost) -> Floats:
    """Return float[G, G], the time of a byte from a source rank to another rank."""
    same_node = topology.node_of[:, None] == topology.node_of
    byte_s: Floats = np.where(same_node, cost.near_byte_s, cost.far_byte_s)
    np.fill_diagonal(byte_s, 0)
    return byte_s


def search_budget(
    latencies: list[_Latency], slots: int, on_solve: OnSolve
) -> tuple[float, float, Floats, int]:
    """Bisect for the least budget whose LP (6) is feasible, from the latency of even shares downwards.

    Returns:
        The largest infeasible and the least feasible budget in seconds, the latter's fractional placement
        [L, E, G], and the number of LPs solved.
    """
    experts, ranks = latencies[0].send_s.shape[1:]
    shares = np.full((len(latencies), experts, ranks), 1 / ranks)  # they satisfy all constraints
    high = sum(latency.seconds(x) for latency, x in zip(latencies, shares, strict=True))
    low, solves = 0.0, 0
    if ranks == 1 or not high:
        return low, high, shares, solves
    scale = high / len(latencies)
    limits, sums, at_most = _constraints(latencies, slots, scale)
    budget = high  # first, since the even shares are no vertex: rounding them takes far longer
    while high - low > _SEARCH_WIDTH * high:
        solution = _solve_feasible(limits, sums, at_most, budget / scale, shares.shape)
        solves += 1
        on_solve(budget, solution is not None)
        if solution is None:
            low = budget
        else:
            high, shares = budget, solution
        budget = (low + high) / 2
    return low, high, shares, solves


def _constraints(latencies: list[_Latency], slots: int, scale: float) -> tuple[csr_array, csr_array, Floats]:
    """Return the LP's inequalities, last the budget's, its equalities, and the inequalities' right sides.

    Variables of each layer: x[E, G], then its computation and its communication, in units of `scale`.
    """
    experts, ranks = latencies[0].send_s.shape[1:]
    per_rank, per_expert = eye_array(ranks), eye_array(experts)
    capacity = hstack([kron(np.ones((1, experts)), per_rank), csr_array((ranks, 2))])
    minus, zero = csr_array(-np.ones((ranks, 1))), csr_array((ranks, 1))
    layers = [
        vstack(
            [
                hstack([kron(latency.compute_s[None] / scale, per_rank), minus, zero]),
                hstack([csr_array(latency.send_s.reshape(ranks, -1) / scale), zero, minus]),
                capacity,
            ]
        )
        for latency in latencies
    ]
    budget = np.tile(np.append(np.zeros(experts * ranks), [1.0, 1.0]), len(layers))
    once = hstack([kron(per_expert, np.ones((1, ranks))), csr_array((experts, 2))])
    right = np.tile(np.repeat([0.0, 0.0, slots], ranks), len(layers))
    return (
        csr_array(vstack([block_diag(layers), csr_array(budget[None])])),
        csr_array(block_diag([once] * len(layers))),
        right,
    )


def _solve_feasible(
    limits: csr_array, sums: csr_array, at_most: Floats, budget: float, shape: tuple[int, ...]
) -> Floats | None:
    """Solve the LP with a budget; return x[L, E, G], or None if it is infeasible.

    Each expert's shares sum to 1. The paper permits more than 1, which costs more and places no better.
    """
    layers, experts, ranks = shape
    upper = np.tile(np.append(np.ones(experts * ranks), [np.inf, np.inf]), layers)
    result = linprog(  # type: ignore[call-overload]  # its stubs know no sparse constraints
        np.zeros(limits.shape[1]),
        A_ub=limits,
        b_ub=np.append(at_most, budget),
        A_eq=sums,
        b_eq=np.ones(sums.shape[0]),
        bounds=np.stack([np.zeros(len(upper)), upper], axis=1),
        method="highs",
    )
    if not result.success:
        return None
    x: Floats = result.x.reshape(layers, -1)[:, :-2].reshape(shape)
    return np.clip(x, 0, 1)


def round_with_scales(share: Floats, slots: int, rng: np.random.Generator) -> Ints:
    """Round a layer's x[E, G] to the rank of each expert, int[E], by macro-iterations of a random walk.

    Args:
        share: rows that sum to 1, columns of at most `slots`.
        slots: slots of each rank.
    """
    x = _snap(share)
    scaled = True
    while len(cells := np.argwhere(_is_fractional(x))):
        after = _macro_iteration(x, cells, slots, rng, scaled=scaled)
        fewer = int(_is_fractional(after).sum()) < len(cells)
        if not (fewer or scaled):  # a vertex: only rounding errors are left
            break
        x, scaled = after, fewer
    ranks: Ints = x.argmax(axis=1)
    return ranks


def _macro_iteration(x: Floats, cells: Ints, slots: int, rng: np.random.Generator, *, scaled: bool) -> Floats:
    """Return x after a walk of its fractional variables, int[n, 2] `cells`.

    With scales, a step is `_STEP_LENGTH` times a random direction in units of the scales s. The sum of the
    variables of each scale does not change (7), and a variable stays within alpha * s of its whole number.
    Without scales, a step goes as far as the constraints allow.
    """
    expert, rank = cells.T
    value = x[expert, rank]
    distance = np.minimum(value, 1 - value)
    scale = 0.5 ** np.floor(-np.log2(distance)) if scaled else np.ones(len(value))
    low = np.where(value <= 0.5, 0.0, np.maximum(1 - _MAX_SCALES * scale, 0))
    high = np.where(value <= 0.5, np.minimum(_MAX_SCALES * scale, 1), 1.0)
    rows = [group == member for group in (expert, scale)[: 1 + scaled] for member in np.unique(group)]
    rank_members = (rank == np.arange(x.shape[1])[:, None]).astype(np.float64)
    moving = np.ones(len(value), bool)
    basis: Floats | None = None
    for _ in range(_MACRO_STEPS if scaled else len(value) + x.shape[1]):
        room = slots - x.sum(axis=0)
        if basis is None:
            tight = np.vstack([*rows, rank_members[room < _WHOLE_TOLERANCE]]).astype(np.float64)
            basis = null_space(tight[:, moving] * scale[moving])
        if not basis.shape[1]:
            break
        step = np.zeros(len(value))
        step[moving] = scale[moving] * (basis @ rng.standard_normal(basis.shape[1]))
        reach = _reach(value, low, high, step, room, rank_members @ step)
        value = value + min(reach, _STEP_LENGTH if scaled else np.inf) * step
        value = np.where(abs(value - np.round(value)) < _WHOLE_TOLERANCE, np.round(value), value)
        x = x.copy()
        x[expert, rank] = value
        stopped = moving & ((value <= low + _WHOLE_TOLERANCE) | (value >= high - _WHOLE_TOLERANCE))
        if stopped.any() or reach <= _STEP_LENGTH or not scaled:
            moving &= ~stopped
            basis = None
        if not moving.any():
            break
    return x


def _reach(value: Floats, low: Floats, high: Floats, step: Floats, room: Floats, filled: Floats) -> float:
    """Return how many steps the variables can go within their bounds and the ranks' room."""
    with np.errstate(divide="ignore", invalid="ignore"):
        to_bound = np.where(step > 0, (high - value) / step, np.where(step < 0, (low - value) / step, np.inf))
        to_full = np.where(filled > 1e-12, np.maximum(room, 0) / filled, np.inf)
    return float(max(0.0, min(to_bound[step != 0].min(initial=np.inf), to_full.min())))


def _snap(x: Floats) -> Floats:
    return np.where(abs(x - np.round(x)) < _WHOLE_TOLERANCE, np.round(x), x)


def _is_fractional(x: Floats) -> NDArray[np.bool_]:
    return (x > 0) & (x < 1)
