"""Error sentences for wrong input: field, value and remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import ValidationError

_MANY = 20  # maximum number of names to list
_LONGEST = 80  # maximum number of characters to show of a value
_SECRET = re.compile(r"(^|_)(key|token|password|secret)$", re.IGNORECASE)
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_MUST_BE = {
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text: put it in quotes",
    "path_type": "must be the path of a file",
    "dict_type": "must be a mapping of names to values",
    "mapping_type": "must be a mapping of names to values",
    "model_type": "must be a mapping of names to values",
    "model_attributes_type": "must be a mapping of names to values",
    "dataclass_type": "must be a mapping of names to values",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
}


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return "did you mean 'x'?" for a misspelt word; else list the known words, if they are few."""
    names = sorted(set(known))
    near = difflib.get_close_matches(str(word), names, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"there are {', '.join(names)}" if 0 < len(names) <= _MANY else ""


def shown(value: Any, name: object = "") -> str:
    """Format a value for a sentence: in YAML's notation, shortened, with secrets hidden."""
    if _SECRET.search(str(name)):
        return ""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple | set):
        return "a list"
    text = repr(value) if isinstance(value, str | bytes) else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def unknown_name(where: str, name: object, known: Iterable[str], what: str = "key") -> str:
    """Return an error sentence for an unknown name in a mapping."""
    hint = did_you_mean(name, known)
    message = f"unknown {what} {name!r}" + (f": {hint}" if hint else "")
    return f"{where}: {message}" if where else message


def problem(error: ValidationError, given: Any = None, *, where: str = "", model: type | None = None) -> str:
    """Return one sentence about the first problem in a pydantic error.

    Args:
        error: the pydantic error.
        given: the validated input. If given, parts of a location that are not names in it are left out.
        where: location of the input, a prefix of the fields' names.
        model: the class that validated the input; it provides the known names.
    """
    found = error.errors(include_url=False)
    first = next((e for e in found if e["type"] in _UNKNOWN), found[0])
    cause = _cause(first)
    loc = [part for part in first["loc"] if part != "__root__"]
    if cause is not None:
        inner = _inside(given, loc)
        return problem(cause, inner, where=_joined(where, _path(loc, given)), model=_class_at(model, loc))
    if first["type"] in _UNKNOWN:
        known = _fields(_class_at(model, _path(loc[:-1], given)))
        return unknown_name(_joined(where, _path(loc[:-1], given)), loc[-1], known)
    if first["type"] in ("missing", "missing_argument"):
        return f"{_joined(where, [*_path(loc[:-1], given), loc[-1]])} is missing: it must be given"
    names, value, text = _path(loc, given), first["input"], _must_be(first)
    if hasattr(value, "kwargs"):  # the input of a dataclass is pydantic's ArgsKwargs
        value = value.kwargs or {}
    if isinstance(value, Mapping):
        name = first["ctx"]["discriminator"].strip("'") if first["type"] == "union_tag_invalid" else ""
        name = name or text.partition(" must ")[0]  # a validator of the whole input may name a field
        if name in value:
            names, value, text = [*names, name], value[name], text.removeprefix(f"{name} ")
    path = _joined(where, names)
    given_value = shown(value, path.rpartition(".")[2])
    whole = isinstance(value, Mapping | list) and first["type"] in ("value_error", "assertion_error")
    named = path and given_value and not whole
    return f"{path} is {given_value}: {text}" if named else f"{path}: {text}".removeprefix(": ")


def _must_be(found: Any) -> str:
    context = found.get("ctx") or {}
    if found["type"] in _MUST_BE:
        bounds = {name: f"{value:g}" for name, value in context.items() if isinstance(value, int | float)}
        return _MUST_BE[found["type"]].format(**bounds)
    if found["type"] == "union_tag_invalid":
        return f"must be one of {context['expected_tags']}"
    if found["type"] in ("literal_error", "enum"):
        expected = str(context.get("expected", ""))
        names = re.findall(r"'([^']*)'", expected)
        near = did_you_mean(found["input"], names)
        return f"unknown, {near}" if near.startswith("did") else f"must be {expected}"
    raised = context.get("error")
    text = str(raised) if isinstance(raised, Exception) else found["msg"]
    text = " ".join(text.split()).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return re.sub("^Input should", "must", text)


def _cause(found: Any) -> ValidationError | None:
    """Return the pydantic error behind a validator's error; None if the validator's own text suffices."""
    raised = (found.get("ctx") or {}).get("error")
    cause = raised.__cause__ if type(raised) is ValueError else raised
    return cause if isinstance(cause, ValidationError) else None


def _path(loc: Sequence[Any], given: Any) -> list[Any]:
    """Return the parts of a location, without pydantic's names of union members."""
    if given is None:
        return list(loc)
    path, here = [], given
    for part in loc:
        if part in here if isinstance(here, Mapping) else _is_index(part, here):
            path.append(part)
            here = here[part]
    return path


def _is_index(part: Any, of: Any) -> bool:
    return isinstance(of, list | tuple) and isinstance(part, int) and part < len(of)


def _inside(given: Any, loc: Sequence[Any]) -> Any:
    for part in _path(loc, given) if given is not None else ():
        given = given[part]
    return given


def _joined(where: str, path: Sequence[Any]) -> str:
    return ".".join(str(part) for part in (where, *path) if part != "")


def _class_at(model: type | None, loc: Sequence[Any]) -> type | None:
    for part in loc:
        if isinstance(part, int):
            continue
        field = _fields(model).get(part)
        model = next(_classes(getattr(field, "annotation", None)), None) if field is not None else None
    return model


def _classes(annotation: Any) -> Iterator[Any]:
    if isinstance(annotation, type) and _fields(annotation):
        yield annotation
    for argument in get_args(annotation):
        yield from _classes(argument)


def _fields(model: type | None) -> Mapping[str, Any]:
    found = getattr(model, "model_fields", None) or getattr(model, "__pydantic_fields__", None)
    return found if isinstance(found, Mapping) else {}
