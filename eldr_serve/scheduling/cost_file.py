"""The file of a fitted step cost."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eldr_serve.errors import UserInputError
from eldr_serve.files import write_atomically
from eldr_serve.scheduling.cost import StepCost
from eldr_serve.validation import first_problem


class FittedCost(BaseModel):
    """A fitted cost, the number of its steps, and its error on them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_: Literal["eldr.step_cost/1"] = Field(default="eldr.step_cost/1", alias="schema")
    cost: StepCost
    steps: int = Field(ge=1, description="steps behind the fit")
    rms_relative_error: float = Field(description="root mean square of (fitted - real) / real over steps")
    median_relative_error: float | None = Field(description="median of |fitted - real| / real over steps")
    source: str = Field(description="file and fingerprint of the steps, or where they were read from")

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        write_atomically(path, self.model_dump_json(indent=1, by_alias=True) + "\n")

    @classmethod
    def load(cls, path: Path) -> FittedCost:
        """Read a file.

        Raises:
            UserInputError: the file is not a fitted step cost.
            OSError: it cannot be read.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise UserInputError(
                f"{path} is not a fitted step cost: {first_problem(error, model=cls)}"
            ) from error
