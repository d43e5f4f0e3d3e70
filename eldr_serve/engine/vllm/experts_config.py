"""`additional_config["eldr_experts"]` of an engine: where its experts are, and which replica serves whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eldr_serve.engine.vllm.compat.checked import UnsupportedEngineError
from eldr_serve.experts.replica_choice import Rule

CONFIG_KEY = "eldr_experts"
Config = TypeVar("Config", bound=BaseModel)


class ExpertsConfig(BaseModel):
    """Of a GPU engine, under vLLM's own expert parallelism (engine/eplb.py).

    Attributes:
        placement: file of an ExpertPlacement (`offline.place --out`), its sidecar beside it.
        replica_choice: even: vLLM's own, by the token's position; metro: one replica a batch, so that no
            rank activates too many experts; local: the rank's own replica, else one of its node, else any.
    """

    model_config = ConfigDict(extra="forbid")

    placement: Path
    replica_choice: Literal["even", "metro", "local"] = "even"


class CpuExpertsConfig(BaseModel):
    """Of a CPU engine, under expert parallelism of ours (engine/ep); all may be left out.

    Attributes:
        placement: as above; None: experts in equal blocks, and the redundant slots empty.
        redundant_experts: slots of a layer beyond one an expert, over all ranks; None: the placement's.
        replica_choice: even, metro and local as above, weighted: GRACE-MoE's polling by load; a token's own
            rank is by its place in the batch. none: an expert's first replica, whatever others there are.
        moves_a_slice: experts that change slots between two steps, at most, when a placement is swapped.
    """

    model_config = ConfigDict(extra="forbid")

    placement: Path | None = None
    redundant_experts: int | None = Field(default=None, ge=0)
    replica_choice: Rule = "even"
    moves_a_slice: int = Field(default=8, ge=1)


def parse(config: type[Config], given: Any) -> Config:
    """The validated value of CONFIG_KEY; UnsupportedEngineError, with one sentence, if it does not fit."""
    try:
        return config.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UnsupportedEngineError(f"{CONFIG_KEY} does not fit, {where}: {first['msg']}") from error
