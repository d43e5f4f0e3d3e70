"""Steps of a model on a GPU, as plain data read from NVIDIA's package (see `kernel_times`)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from eldr_serve.errors import UserInputError

Routing = Literal["even", "skewed"]


@dataclass(frozen=True)
class Setting:
    """A model on GPUs.

    Attributes:
        model: a name that NVIDIA's package knows, or the path of a config.json or its folder.
        gpu: the name of the GPU in NVIDIA's package, such as h100_sxm.
        tp: tensor-parallel size.
        ep: expert-parallel size: 1, or a divisor of `tp`.
        dtype: kind of the weights, one of kernel_times.DTYPES; None: as the model's config says.
    """

    model: str
    gpu: str
    tp: int = 1
    ep: int = 1
    dtype: str | None = None


@dataclass(frozen=True)
class Shape:
    """The MoE layers of a model.

    Attributes:
        experts: experts of a layer.
        top_k: experts that a token uses in a layer.
        layers: MoE layers.
        ranks: expert-parallel ranks.
        skew: exponent of the power law by which NVIDIA's package loads experts in its own steps.
        dtype: kind of the experts' weights.
    """

    experts: int
    top_k: int
    layers: int
    ranks: int
    skew: float
    dtype: str


@dataclass(frozen=True)
class StepReading:
    """The time of a decode step.

    Attributes:
        requests: number of requests, of one token each.
        context: KV tokens of each request.
        routing: "even": the requests use as many experts as possible, equally; "skewed": the power
            law by which NVIDIA's package prices its own steps.
        seconds: time of the step, s.
    """

    requests: int
    context: int
    routing: Routing
    seconds: float


@dataclass(frozen=True)
class PromptStep:
    """A step that also computes prompt tokens; its routing is skewed."""

    requests: int
    context: int
    prompt_tokens: int
    seconds: float


@dataclass(frozen=True)
class Readings:
    """Steps of a model on a GPU.

    Attributes:
        source: NVIDIA's package and the measured kernels, with versions.
        steps, prompt_steps: at least one of each.

    Raises:
        UserInputError: there are no steps, or none with prompts.
    """

    setting: Setting
    source: str
    shape: Shape
    steps: tuple[StepReading, ...]
    prompt_steps: tuple[PromptStep, ...]

    def __post_init__(self) -> None:
        for name in ("steps", "prompt_steps"):
            if not getattr(self, name):
                raise UserInputError(f"{name} of {self.setting.model} is empty: give at least one step")

    def as_json(self) -> str:
        """Return the readings as JSON, which `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Readings:
        """Read the result of `as_json`."""
        fields: dict[str, Any] = json.loads(text)
        return cls(
            Setting(**fields["setting"]),
            fields["source"],
            Shape(**fields["shape"]),
            _build_rows(StepReading, fields["steps"]),
            _build_rows(PromptStep, fields["prompt_steps"]),
        )


def _build_rows(kind: type[Any], rows: Iterable[dict[str, Any]]) -> tuple[Any, ...]:
    return tuple(kind(**row) for row in rows)
