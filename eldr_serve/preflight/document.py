"""A Serve file, read and validated as `serve run` does, without importing engine code."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.config import ProxyLocation
from ray.serve.schema import HTTPOptionsSchema, LoggingConfig, ServeApplicationSchema, ServeDeploySchema

from eldr_serve.config.application import EldrArgs, parse
from eldr_serve.errors import ConfigurationError
from eldr_serve.validation import did_you_mean, first_problem, format_value, unknown_name

APPLICATION = "eldr_serve.app:build_app"


@dataclass(frozen=True)
class Document:
    """A Serve file with one eldr-serve application.

    Attributes:
        content: the content of the file, as `serve deploy` reads it.
        application: the eldr-serve application in the file.
        where: the location of the application in the file, for example `applications.0`.
        args: the application's `args`; only names and simple values have been checked.
        ignored: one sentence for each key that Serve ignores.
    """

    content: dict[str, Any]
    application: dict[str, Any]
    where: str
    args: EldrArgs
    ignored: tuple[str, ...]

    @property
    def proxy(self) -> tuple[str, int] | None:
        """Return host and port of Serve's own HTTP proxy; None if there is none."""
        if self.content.get("proxy_location") in (ProxyLocation.Disabled.value, ProxyLocation.Disabled):
            return None
        options = HTTPOptionsSchema.model_validate(self.content.get("http_options") or {})
        return options.host, options.port


def read_document(path: Path) -> Document:
    """Read a Serve file.

    Raises:
        ConfigurationError: `serve run` or the application would refuse the file.
        OSError: the file cannot be read.
    """
    content = _load_yaml(path)
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} is not a mapping: a Serve file has a list `applications`")
    ignored = tuple(_list_ignored_keys(content))
    try:
        ServeDeploySchema.model_validate(content)
    except ValidationError as error:
        raise ConfigurationError(first_problem(error, content, model=ServeDeploySchema)) from error
    application, where = _find_application(path, content["applications"])
    prefix = application.get("route_prefix", "/")
    if prefix is not None and (
        not prefix.startswith("/") or prefix != prefix.rstrip("/") + "/" * (prefix == "/") or "{" in prefix
    ):
        raise ConfigurationError(
            f"{where}.route_prefix must begin with /, not end with / and have no wildcard, "
            f"got {format_value(prefix)}"
        )
    return Document(content, application, where, parse(application.get("args") or {}), ignored)


def _load_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not text: {error.reason} at byte {error.start}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        hint = ": YAML is indented with spaces, not tabs" if "\\t" in str(error.problem) else ""
        context = f"{error.context}, " if error.context else ""
        raise ConfigurationError(f"{path}{place}: {context}{error.problem}{hint}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: {' '.join(str(error).split())}") from error


def _find_application(path: Path, applications: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """Return the eldr-serve application and its location in the file.

    The import path is normalised to the form with a colon.
    """
    for application in applications:
        if application["import_path"] == APPLICATION.replace(":", "."):
            application["import_path"] = APPLICATION
    numbers = [n for n, application in enumerate(applications) if application["import_path"] == APPLICATION]
    if len(numbers) == 1:
        return applications[numbers[0]], f"applications.{numbers[0]}"
    if numbers:
        raise ConfigurationError(
            f"{path} has {len(numbers)} applications {APPLICATION}: give each its own file"
        )
    if not applications:
        raise ConfigurationError(f"applications is empty: it needs one with import_path {APPLICATION}")
    import_path = format_value(applications[0]["import_path"])
    raise ConfigurationError(f"applications.0.import_path must be {APPLICATION}, got {import_path}")


def _list_ignored_keys(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each key that Serve ignores.

    Raises:
        ConfigurationError: a key looks misspelt.
    """
    yield from _list_unknown_keys("", content, ServeDeploySchema)
    yield from _list_unknown_keys("http_options", content.get("http_options"), HTTPOptionsSchema)
    yield from _list_unknown_keys("logging_config", content.get("logging_config"), LoggingConfig)
    applications = content.get("applications")
    for number, application in enumerate(applications if isinstance(applications, list) else ()):
        yield from _list_unknown_keys(f"applications.{number}", application, ServeApplicationSchema)


def _list_unknown_keys(where: str, mapping: Any, model: type[BaseModel]) -> Iterator[str]:
    for name in mapping if isinstance(mapping, Mapping) else ():
        if name in model.model_fields:
            continue
        if difflib.get_close_matches(str(name), model.model_fields, n=1):
            raise ConfigurationError(unknown_name(where, name, model.model_fields))
        yield f"Serve ignores the key {f'{where}.{name}' if where else name}: leave it out"


def check_overrides(document: Document, names: tuple[str, ...]) -> Iterator[str]:
    """Yield a sentence for each deployment whose options the file overrides; the check ignores overrides.

    Raises:
        ConfigurationError: the application has no deployment of that name.
    """
    for number, options in enumerate(document.application.get("deployments") or ()):
        where, name = f"{document.where}.deployments.{number}", options["name"]
        if name not in names:
            hint = did_you_mean(name, names)
            raise ConfigurationError(f"{where}.name is {format_value(name)}: unknown deployment, {hint}")
        yield f"{where} overrides options of {name}, which this check ignores: set them in args"
