"""Declaration and validation of policy parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from reprlib import repr as shortened
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from eldr_serve.scheduling.types import PolicyError
from eldr_serve.validation import first_problem, invalid_value, unknown_name

MAX_COUNT = 2**31 - 1  # maximum of any count, so that sums fit into int64
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Weight = Annotated[float, Field(ge=0, le=1e6)]

_KINDS: dict[Any, str] = {
    bool: "true or false",
    float: "a number",
    int: "a whole number",
    str: "a name",
    dict[str, float]: "a map from names to numbers",
}


class PolicyParameters(BaseModel):
    """Base class of policy parameters; each field declares its default, range, unit and meaning."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


Declared = TypeVar("Declared", bound=PolicyParameters)


def validate(declared: type[Declared], policy: str, values: Mapping[str, Any]) -> Declared:
    """Return a policy's parameters; raise PolicyError for the first invalid one."""
    try:
        return declared(**values)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # a validator of all parameters has raised it
            raise PolicyError(f"policy {policy!r}: {first_problem(error)}") from error
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            names = declared.model_fields
            raise PolicyError(unknown_name(f"policy {policy!r}", name, names, "parameter")) from error
        kind = kind_of(declared.model_fields[name])
        if name not in values:
            raise PolicyError(f"{name} is missing: policy {policy!r} needs {kind}") from error
        cause = first["ctx"]["error"] if first["type"] == "value_error" else None
        if isinstance(cause, PolicyError):  # its sentence names the parameter and the value
            raise cause from error
        problem = f"must be {kind}" if cause is None else str(cause)
        raise PolicyError(invalid_value(name, shortened(values[name]), problem)) from error


def kind_of(field: FieldInfo) -> str:
    """Describe the valid values of a parameter: "a whole number from 1 to 12"."""
    kinds = get_args(field.annotation) or (field.annotation,)
    kind = next(kind for kind in kinds if kind is not type(None))
    low, high = _bound(field, "ge", "gt"), _bound(field, "le", "lt")
    text = _KINDS.get(kind, getattr(kind, "__name__", str(kind)))
    if is_dataclass(kind):
        names = [
            f"{term.name} (a map by batch)" if str(term.type).startswith("dict") else term.name
            for term in fields(kind)
        ]
        text = f"a map from {', '.join(names)} to numbers, 0 or more"
    if low is not None:
        text += f" from {_number(low)}" if high is not None else f", {_number(low)} or more"
    if high is not None:
        text += f" to {_number(high)}"
    return text + (", or null" if type(None) in kinds else "")


def _bound(field: FieldInfo, *names: str) -> Any:
    bounds = (getattr(constraint, name, None) for constraint in field.metadata for name in names)
    return next((bound for bound in bounds if bound is not None), None)


def _number(value: Any) -> str:
    return "2^31 - 1" if value == MAX_COUNT else f"{value:.15g}"
