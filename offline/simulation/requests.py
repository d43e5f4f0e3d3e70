"""Simulated requests: times, lengths, and the experts that they use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eldr_serve.errors import UserInputError
from eldr_serve.experts.calibration_trace import CalibrationTrace


class SimulationError(UserInputError):
    """The input cannot be simulated. The message is one sentence."""


@dataclass(frozen=True)
class Requests:
    """N requests, in order of arrival.

    Attributes:
        arrival_s: float64[N], ascending.
        prompt_tokens, output_tokens: int64[N], 1 or more.
        kind: int64[N], for each request the index in `Experts` of the request whose experts it uses. Empty
            without experts.
        blocks: ids of each prompt's prefix blocks, in order. Equal leading ids are an equal prefix.
            Empty if prompts share nothing.
        keys: equal for prompts that a prompt-keyed predictor treats as one. Empty: equal for
            prompts with equal blocks.
        max_new_tokens: int64[N], each client's limit of an answer, which policies see. Empty: no request has
            a limit, so that no policy knows the length of an answer in advance.
    """

    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    kind: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    blocks: tuple[tuple[int, ...], ...] = ()
    keys: tuple[str, ...] = ()
    max_new_tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        n = len(self.arrival_s)
        for name in ("prompt_tokens", "output_tokens"):
            values = getattr(self, name)
            if len(values) != n:
                raise SimulationError(f"{n} requests have {len(values)} {name}")
            if n and values.min() < 1:
                raise SimulationError(f"request {int(values.argmin())} has {int(values.min())} {name}")
        if n and not (np.isfinite(self.arrival_s).all() and (np.diff(self.arrival_s) >= 0).all()):
            raise SimulationError("arrival times are not in order")
        for name in ("kind", "blocks", "keys", "max_new_tokens"):
            if len(getattr(self, name)) not in (0, n):
                raise SimulationError(f"{n} requests have {len(getattr(self, name))} entries of {name}")
        limits, lengths = self.max_new_tokens, self.output_tokens
        if len(limits) and (lengths > limits).any():
            first = int((lengths > limits).argmax())
            raise SimulationError(
                f"request {first} has {int(lengths[first])} output_tokens, above its limit of "
                f"{int(limits[first])}: raise its max_new_tokens"
            )

    def __len__(self) -> int:
        return len(self.arrival_s)


@dataclass(frozen=True)
class Experts:
    """The experts of S observed requests, which the simulated ones repeat.

    Attributes:
        counts: [S,L,E], the prompts' expert counts, measured or expected: the signature.
        count_tokens: int64[S], prompt tokens behind the counts.
        bits: uint64[T, L*words], the experts of each decode step (`expert_bits`), one request after
            the other.
        offset: int64[S+1], start of each request's steps. A longer simulated request repeats them.
        domains: S names.
        predicted: [S,L,E], predicted expert counts of the prompts, which placement before prefill uses;
            None: their counts.
    """

    counts: NDArray[Any]
    count_tokens: NDArray[np.int64]
    bits: NDArray[np.uint64]
    offset: NDArray[np.int64]
    domains: list[str]
    predicted: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        if (np.diff(self.offset) < 1).any():
            raise SimulationError(f"request {int(np.diff(self.offset).argmin())} has no decode step")

    def expert_counts(self, kind: int, prompt_tokens: int) -> NDArray[Any]:
        """Return a prompt's counts at that length: [L,E]."""
        return self._scale(self.counts[kind], kind, prompt_tokens)

    def predicted_counts(self, kind: int, prompt_tokens: int) -> NDArray[Any]:
        """Return a prompt's predicted counts at that length: [L,E]."""
        assert self.predicted is not None
        return self._scale(self.predicted[kind], kind, prompt_tokens)

    def _scale(self, counts: NDArray[Any], kind: int, prompt_tokens: int) -> NDArray[Any]:
        tokens = int(self.count_tokens[kind])
        if tokens == prompt_tokens:
            return counts
        scaled: NDArray[np.uint32] = np.rint(counts * (prompt_tokens / tokens)).astype(np.uint32)
        return scaled

    def mix(self, kinds: NDArray[np.int64], parts: int, number: int, rng: np.random.Generator) -> Experts:
        """Return the experts of new requests, each made of observed ones of the same domain.

        A new request decodes the steps of its parts one after the other, and its counts are their sum. So no
        two of them are copies, and what they share is only what requests of the domain share.

        Args:
            kinds: observed requests to draw from, with replacement.
            parts: observed requests in each new one.
            number: new requests.
        """
        domains = np.array(self.domains)
        first = rng.choice(kinds, number)
        kinds_by_domain = {name: kinds[domains[kinds] == name] for name in np.unique(domains[first])}
        others = np.stack([rng.choice(kinds_by_domain[domains[kind]], parts - 1) for kind in first])
        members = np.column_stack([first, others])  # [number, parts]
        steps = np.diff(self.offset)[members]
        flat, lengths = members.ravel(), steps.ravel()
        starts = np.cumsum(lengths) - lengths
        rows = np.arange(lengths.sum()) + np.repeat(self.offset[flat] - starts, lengths)
        return Experts(
            self.counts[members].sum(axis=1),
            self.count_tokens[members].sum(axis=1),
            self.bits[rows],
            np.concatenate([[0], np.cumsum(steps.sum(axis=1))]),
            domains[first].tolist(),
        )

    @classmethod
    def from_trace(
        cls, trace: CalibrationTrace, *, max_steps: int | None = None, true_decode: bool = False
    ) -> Experts:
        """Return the routes of a calibration trace.

        Args:
            max_steps: maximum steps of each request.
            true_decode: use the experts of decode as signatures, the upper bound of any prediction.

        Raises:
            SimulationError: the trace was made without routes.
        """
        if trace.routes is None or trace.route_offsets is None:
            raise SimulationError("the trace has no routes; make it with `eldr calibrate --routes`")
        steps = trace.decode_steps.astype(np.int64)
        num_steps = steps if max_steps is None else np.minimum(steps, max_steps)
        offset = np.concatenate([[0], np.cumsum(num_steps)])
        rows = np.arange(offset[-1]) + np.repeat(trace.route_offsets[:-1] - offset[:-1], num_steps)
        bits = expert_bits(trace.routes[rows], trace.prefill_counts.shape[2])
        counts = trace.decode_counts if true_decode else trace.prefill_counts
        tokens = trace.decode_steps if true_decode else trace.prompt_tokens
        return cls(counts, tokens.astype(np.int64), bits, offset, trace.domains)

    @classmethod
    def from_probabilities(
        cls,
        counts: NDArray[np.unsignedinteger],
        count_tokens: NDArray[np.int64],
        probability: NDArray[np.floating],
        top_k: int,
        domains: list[str],
        *,
        steps: int = 64,
        seed: int = 0,
    ) -> Experts:
        """Draw steps from activation probabilities: top_k experts per layer, without replacement.

        Args:
            counts, count_tokens: as in the class.
            probability: float[S,L,E], share of decode steps that choose the expert.
            steps: number drawn for each of the S requests; longer requests repeat them.
        """
        rng = np.random.default_rng(seed)
        requests, layers, experts = probability.shape
        weights = np.log(np.maximum(probability, 1e-9)).astype(np.float32)
        bits = []
        for s in range(requests):
            # The largest values of log p plus Gumbel noise are a draw without replacement by p.
            noise = rng.gumbel(size=(steps, layers, experts)).astype(np.float32)
            routes = np.argpartition(weights[s] + noise, -top_k, axis=2)[:, :, -top_k:]
            bits.append(expert_bits(routes, experts))
        return cls(counts, count_tokens, np.concatenate(bits), np.arange(requests + 1) * steps, domains)


def expert_bits(routes: NDArray[np.integer], num_experts: int) -> NDArray[np.uint64]:
    """Return uint64[T, L * ceil(E/64)] bitsets of routes[T, L, k], expert ids below `num_experts`."""
    steps, layers, _ = routes.shape
    words = -(-num_experts // 64)
    bits = np.zeros((steps, layers, words), np.uint64)
    ids = routes.astype(np.uint64)
    one = np.uint64(1)
    for rank in range(routes.shape[2]):
        chosen = ids[:, :, rank]
        np.bitwise_or.at(
            bits,
            (np.arange(steps)[:, None], np.arange(layers)[None, :], (chosen // 64).astype(np.int64)),
            one << (chosen % np.uint64(64)),
        )
    return bits.reshape(steps, -1)


def rank_masks(ranks: NDArray[np.integer]) -> NDArray[np.uint64]:
    """Return uint64[G, L, words], the experts of each EP rank, from ranks int[L,E]."""
    layers, experts = ranks.shape
    masks = np.zeros((int(ranks.max()) + 1, layers, -(-experts // 64)), np.uint64)
    expert = np.arange(experts)
    for layer in range(layers):
        bit = np.uint64(1) << (expert % 64).astype(np.uint64)
        np.bitwise_or.at(masks, (ranks[layer], np.full(experts, layer), expert // 64), bit)
    return masks
