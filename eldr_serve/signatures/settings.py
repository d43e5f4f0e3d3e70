"""Settings of the signature pool: `signatures` of a deployment YAML, and internal start arguments."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import BaseModel, Field


class SignatureOptions(BaseModel, frozen=True, extra="forbid"):
    """Settings for sampling live traffic and fitting routing tables to it."""

    actors: int = Field(
        default=1, ge=0, le=64, description="number of actors of the pool; 0: no sampling and no table"
    )
    window: int = Field(
        default=2048, ge=16, description="number of newest samples that the pool keeps, over all actors"
    )
    window_mib: int = Field(
        default=256, ge=1, description="maximum memory of these samples, over all actors, MiB"
    )
    rate: float = Field(
        default=2.0,
        gt=0,
        description="requests to sample once there is a table, over all actors, 1/s; before, all are sampled",
    )
    first_table: int = Field(
        default=192,
        ge=16,
        description="number of samples for the first table; at least 8 for each decode replica",
    )
    every_s: float = Field(default=60.0, gt=0, description="time between two tests for drift, s")
    min_gain: float = Field(
        default=0.02,
        ge=0,
        description="increase of the mean cosine on held-out requests that a refit must reach",
    )
    keep_token_ids: bool = Field(
        default=True,
        description="keep the token ids of sampled prompts for `eldr trace`; false: traces have none",
    )


@dataclass(frozen=True)
class PoolSettings:
    """Start arguments of a pool's actors.

    Attributes:
        application: name of the application, part of the actors' names.
        router: name of the DecodeRouter actor that uses the tables.
    """

    application: str
    router: str
    model_id: str = ""
    options: SignatureOptions = field(default_factory=SignatureOptions)


def pool_actor_name(application: str, index: int) -> str:
    """Return the name of one actor of the application's pool."""
    return f"signature-pool:{application}:{index}"
