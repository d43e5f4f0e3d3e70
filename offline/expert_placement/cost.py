"""Cost of an MoE layer under expert parallelism (EP): one model for placement, routing and simulation.

A layer ends when its slowest rank does. A rank pays for each expert replica that it activates (weights to
read), for each token that it computes, and for each byte that it receives from other ranks, which takes
longer from other nodes (METRO, section III; GRACE-MoE, section 3; DIRECTOR, section VI).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from scipy.optimize import nnls

from eldr_serve.arrays import Floats
from eldr_serve.errors import UserInputError
from eldr_serve.experts.expert_placement import Topology
from eldr_serve.files import write_atomically
from eldr_serve.validation import first_problem

Seconds = Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class LayerWork:
    """Work of a batch on each rank in a layer; leading axes (batches, layers) are independent.

    Attributes:
        activated: [..., G] expert replicas that have tokens.
        tokens: [..., G] pairs of a token and an expert, computed on the rank.
        near_bytes: [..., G] bytes that the rank receives from other ranks of its node.
        far_bytes: [..., G] bytes that the rank receives from other nodes.
    """

    activated: Floats
    tokens: Floats
    near_bytes: Floats
    far_bytes: Floats

    @classmethod
    def from_gathered(cls, served: ArrayLike) -> LayerWork:
        """Count `served` [..., E, G] tokens of each expert on each rank under all-gather dispatch.

        All tokens are on all ranks before the layer, so traffic does not depend on the choice of replicas.
        """
        pairs = np.asarray(served, np.float64)
        nothing = np.zeros((*pairs.shape[:-2], pairs.shape[-1]))
        return cls((pairs > 0).sum(axis=-2).astype(np.float64), pairs.sum(axis=-2), nothing, nothing)

    @classmethod
    def from_dispatched(
        cls,
        experts: ArrayLike,
        ranks: ArrayLike,
        source: ArrayLike,
        topology: Topology,
        *,
        num_experts: int,
        token_bytes: float,
    ) -> LayerWork:
        """Return the work of a batch in which token t, on rank source[t], sends its state to ranks[t, :].

        A token goes once to each rank that serves it, however many of its experts are there (all-to-all
        dispatch), and comes back as often. Only the bytes of the dispatch are counted.

        Args:
            experts: int[T, k] of one layer.
            ranks: int[T, k], the rank that serves each.
            source: int[T].
            num_experts: E.
            token_bytes: bytes of a hidden state.
        """
        chosen, served = np.asarray(experts), np.asarray(ranks)
        home = np.asarray(source)
        size = topology.ranks
        pairs = np.bincount((chosen * size + served).reshape(-1), minlength=num_experts * size)
        pairs = pairs.reshape(num_experts, size)
        visits = np.zeros((len(home), size), bool)
        visits[np.arange(len(home))[:, None], served] = True
        visits[np.arange(len(home)), home] = False
        same_node = topology.node_of[home][:, None] == topology.node_of[None, :]
        return cls(
            (pairs > 0).sum(axis=0).astype(np.float64),
            pairs.sum(axis=0).astype(np.float64),
            token_bytes * (visits & same_node).sum(axis=0),
            token_bytes * (visits & ~same_node).sum(axis=0),
        )


class LayerFit(BaseModel):
    """Source of a fitted cost, and its errors on held-out layers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    measurements: int = Field(ge=1, description="timed calls behind the fit")
    held_out_median_relative_error: float = Field(description="median of |predicted - measured| / measured")
    held_out_mean_relative_error: float = Field(description="mean of (predicted - measured) / measured")
    source: str = Field(description="what was measured, and where")


class LayerCost(BaseModel):
    """Time of an MoE layer under EP, s, which is the time of the slowest rank."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fixed_s: Seconds = Field(description="time of every layer, s")
    per_expert_s: Seconds = Field(description="time for each activated expert replica of the rank, s")
    per_token_s: Seconds = Field(description="time for each pair of token and expert on the rank, s")
    near_byte_s: Seconds = Field(default=0.0, description="time for each byte from a rank of the node, s")
    far_byte_s: Seconds = Field(default=0.0, description="time for each byte from another node, s")
    fit: LayerFit | None = Field(default=None, description="null: assumed, not measured")

    def save(self, path: Path | str) -> None:
        """Write the file (JSON) atomically."""
        write_atomically(Path(path), self.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: Path | str) -> LayerCost:
        """Read a file.

        Raises:
            UserInputError: the file is not a layer cost. The message names the first invalid field.
            OSError: the file cannot be read.
        """
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except ValidationError as error:
            raise UserInputError(f"{path} is not a layer cost: {first_problem(error, model=cls)}") from error

    @classmethod
    def fit_ranks(cls, activated: ArrayLike, tokens: ArrayLike, seconds: ArrayLike) -> LayerCost:
        """Fit a cost to ranks that were timed alone, without messages, by least squares of relative errors.

        No term is negative.

        Args:
            activated: [N] expert replicas that had tokens.
            tokens: [N] pairs of a token and an expert.
            seconds: [N], above 0.
        """
        measured = np.asarray(seconds, np.float64)
        work = np.stack([np.ones_like(measured), activated, tokens], axis=1)
        fixed, per_expert, per_token = nnls(work / measured[:, None], np.ones_like(measured))[0].tolist()
        return cls(fixed_s=fixed, per_expert_s=per_expert, per_token_s=per_token)

    def rank_s(self, work: LayerWork) -> Floats:
        """Return float[..., G], the time of each rank without the fixed part, s."""
        return (
            self.per_expert_s * work.activated
            + self.per_token_s * work.tokens
            + self.near_byte_s * work.near_bytes
            + self.far_byte_s * work.far_bytes
        )

    def layer_s(self, work: LayerWork) -> Floats:
        """Return float[...], the time of the layer, s."""
        slowest: Floats = self.fixed_s + self.rank_s(work).max(axis=-1)
        return slowest
