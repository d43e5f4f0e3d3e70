"""The engine setting `additional_config["eldr_experts"]`: expert placement and replica choice.

Workers read it when they load the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eldr_serve.engine.vllm.compat.checked import UnsupportedEngineError
from eldr_serve.engine.vllm.config import CONFIG_KEY
from eldr_serve.errors import one_line_message
from eldr_serve.experts.parallel.replica_choice import Rule

Config = TypeVar("Config", bound=BaseModel)


class ExpertsConfig(BaseModel):
    """The setting of a GPU engine, with vLLM's own expert parallelism (eplb.py).

    Attributes:
        placement: file of an ExpertPlacement (`eldr place --out`), with its sidecar file beside it; null:
            vLLM's own order, experts in equal blocks and replicas of the first ones.
        replica_choice: the rule that chooses the replica for a token:

            - even: vLLM's own rule, by the token's position.
            - metro: one replica per batch, so that no rank activates too many experts.
            - metro-paper: like metro, but with METRO's Algorithm 1 exactly as the paper has it.
            - local: the rank's own replica, else one on its node, else any.
            - weighted: replicas in turn, in proportion to one over the expected load of their ranks.
        layers_per_slice: maximum number of layers whose experts move between two steps during a swap.
    """

    model_config = ConfigDict(extra="forbid")

    placement: Path | None = None
    replica_choice: Literal["even", "metro", "metro-paper", "local", "weighted"] = "even"
    layers_per_slice: int = Field(default=8, ge=1)


class CpuExpertsConfig(BaseModel):
    """The setting of a CPU engine, with eldr_serve's expert parallelism (ep/); all fields are optional.

    Attributes:
        placement: as in ExpertsConfig; null: experts in equal blocks.
        fill_redundant: without a placement, start with replicas of the next rank's experts in the redundant
            slots; false: they are empty until a placement is loaded.
        redundant_experts: slots of a layer beyond one per expert, over all ranks; null: the placement's.
        replica_choice: a rule of ExpertsConfig, where a token's own rank follows from its position in the
            batch, or `none` (an expert's first replica).
        prefill_replica_choice: the rule for steps that prefill. They have more tokens than the ranks can
            decode at once (`max_num_seqs` each). null: `replica_choice`.
        gather: when each data-parallel rank sends its tokens to all ranks:

            - after-top-k: after the rank has chosen the tokens' experts, which it sends too.
            - before-top-k: before any choice, so that every rank chooses the experts of all tokens (METRO).
        moves_per_slice: maximum number of experts that move between two steps during a swap.
    """

    model_config = ConfigDict(extra="forbid")

    placement: Path | None = None
    fill_redundant: bool = False
    redundant_experts: int | None = Field(default=None, ge=0)
    replica_choice: Rule = "even"
    prefill_replica_choice: Rule | None = None
    gather: Literal["after-top-k", "before-top-k"] = "after-top-k"
    moves_per_slice: int = Field(default=8, ge=1)


def parse_experts_config(config: type[Config], value: Any) -> Config:
    """Validate the value of CONFIG_KEY.

    Raises:
        UnsupportedEngineError: the value is invalid.
    """
    try:
        return config.model_validate(value)
    except ValidationError as error:
        message = one_line_message(error)
        raise UnsupportedEngineError(f"{CONFIG_KEY} has the invalid value {value!r}: {message}") from error
