"""Error sentences for wrong input: field, value and remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import ValidationError

_MAX_NAMES = 20  # maximum number of names to list
_MAX_CHARACTERS = 80  # maximum number of characters to show of a value
_SECRET = re.compile(r"(^|_)(key|token|password|secret)$", re.IGNORECASE)
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_BY_VALIDATOR = ("value_error", "assertion_error")
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


def did_you_mean(word: object, known_words: Iterable[str]) -> str:
    """Return "did you mean 'x'?" for a misspelt word; else list the known words, if they are few."""
    names = sorted(set(known_words))
    near = difflib.get_close_matches(str(word), names, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"there are {', '.join(names)}" if 0 < len(names) <= _MAX_NAMES else ""


def format_value(value: Any, name: object = "") -> str:
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
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


def unknown_name(where: str, name: object, known_names: Iterable[str], what: str = "key") -> str:
    """Return an error sentence for an unknown name in a mapping."""
    hint = did_you_mean(name, known_names)
    message = f"unknown {what} {name!r}" + (f": {hint}" if hint else "")
    return f"{where}: {message}" if where else message


def invalid_value(where: str, value: str, problem: str) -> str:
    """Return an error sentence for a value: "port must be at least 1, got 0".

    Args:
        where: name of the field or option.
        value: the formatted value; empty if it is not shown.
        problem: "must <condition>", perhaps with ": <remedy>"; or another text, which follows "port is 0: ".
    """
    if not problem.startswith("must "):
        return f"{where} is {value}: {problem}" if value else f"{where}: {problem}"
    condition, colon, remedy = problem.partition(": ")
    got = f", got {value}" if value else ""
    return f"{where} {condition.rstrip('.')}{got}{colon}{remedy}"


def first_problem(
    error: ValidationError, content: Any = None, *, where: str = "", model: type | None = None
) -> str:
    """Return one sentence about the first problem in a pydantic error.

    Problems with unknown names precede all others, since a misspelt name often causes the others.

    | input | sentence |
    | --- | --- |
    | `port: 0` | port must be at least 1, got 0 |
    | `prot: 1` | unknown key 'prot': did you mean 'port'? |
    | a required field is absent | name is missing: it must be given |
    | `admin_key: 5`, a secret | admin_key must be text: put it in quotes |
    | `kind: c` selects one of several classes | kind must be one of 'a', 'b', got 'c' |
    | a validator of a whole mapping raises "low must be below high" | low must be below high, got 3 |
    | such a validator names no field, as in "give a or b" | give a or b |

    Args:
        error: the pydantic error.
        content: the validated input. Parts of a location that are not names in it are left out. None: all
            parts are shown.
        where: location of the input, a prefix of the fields' names.
        model: the class that validated the input; it provides the known names.
    """
    problems = error.errors(include_url=False)
    problem = next((each for each in problems if each["type"] in _UNKNOWN), problems[0])
    location = [part for part in problem["loc"] if part != "__root__"]
    path, parent = _path(location, content), _path(location[:-1], content)
    cause = _cause(problem)
    if cause is not None:
        nested = _find_part(content, location)
        return first_problem(cause, nested, where=_join(where, path), model=_class_at(model, location))
    if problem["type"] in _UNKNOWN:
        return unknown_name(_join(where, parent), location[-1], _fields(_class_at(model, parent)))
    if problem["type"] in ("missing", "missing_argument"):
        return f"{_join(where, [*parent, location[-1]])} is missing: it must be given"
    value, must_be = problem["input"], _must_be(problem)
    if hasattr(value, "kwargs"):  # the input of a dataclass is pydantic's ArgsKwargs
        value = value.kwargs or {}
    if isinstance(value, Mapping):
        field = _field_at_fault(problem, must_be)
        if field in value:
            path, value, must_be = [*path, field], value[field], must_be.removeprefix(f"{field} ")
    place = _join(where, path)
    is_refused_as_a_whole = isinstance(value, Mapping | list) and problem["type"] in _BY_VALIDATOR
    formatted = "" if is_refused_as_a_whole else format_value(value, place.rpartition(".")[2])
    return invalid_value(place, formatted, must_be) if place else must_be


def _field_at_fault(problem: Any, must_be: str) -> str:
    """Return the field of a mapping that its problem is about, if the problem names one without its value."""
    if problem["type"] == "union_tag_invalid":
        discriminator: str = problem["ctx"]["discriminator"].strip("'")
        return discriminator
    if ", got " in must_be:
        return ""
    return must_be.partition(" must ")[0]  # a validator of the whole mapping may begin with the field


def _must_be(problem: Any) -> str:
    """Return what the value must be, "must ..." if possible."""
    context = problem.get("ctx") or {}
    if problem["type"] in _MUST_BE:
        bounds = {name: f"{value:g}" for name, value in context.items() if isinstance(value, int | float)}
        return _MUST_BE[problem["type"]].format(**bounds)
    if problem["type"] == "union_tag_invalid":
        return f"must be one of {context['expected_tags']}"
    if problem["type"] in ("literal_error", "enum"):
        expected = str(context.get("expected", ""))
        names = re.findall(r"'([^']*)'", expected)
        near = did_you_mean(problem["input"], names)
        return f"unknown, {near}" if near.startswith("did") else f"must be {expected}"
    error = context.get("error")
    text = str(error) if isinstance(error, Exception) else problem["msg"]
    text = " ".join(text.split()).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return re.sub("^Input should", "must", text)


def _cause(problem: Any) -> ValidationError | None:
    """Return the pydantic error behind a validator's error; None if the validator's own text suffices."""
    error = (problem.get("ctx") or {}).get("error")
    cause = error.__cause__ if type(error) is ValueError else error
    return cause if isinstance(cause, ValidationError) else None


def _path(location: Sequence[Any], content: Any) -> list[Any]:
    """Return the parts of a location, without pydantic's names of union members."""
    if content is None:
        return list(location)
    path, value = [], content
    for part in location:
        if part in value if isinstance(value, Mapping) else _is_index(part, value):
            path.append(part)
            value = value[part]
    return path


def _is_index(part: Any, values: Any) -> bool:
    return isinstance(values, list | tuple) and isinstance(part, int) and part < len(values)


def _find_part(content: Any, location: Sequence[Any]) -> Any:
    """Return the part of the input at a location."""
    for part in _path(location, content) if content is not None else ():
        content = content[part]
    return content


def _join(where: str, path: Sequence[Any]) -> str:
    return ".".join(str(part) for part in (where, *path) if part != "")


def _class_at(model: type | None, location: Sequence[Any]) -> type | None:
    """Return the class that validates the input at a location; None if it is not known."""
    for part in location:
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
    fields = getattr(model, "model_fields", None) or getattr(model, "__pydantic_fields__", None)
    return fields if isinstance(fields, Mapping) else {}
