"""Reference pages made from the code: deployment YAML, commands, HTTP endpoints, metrics."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import typer
from typer.cli import get_docs_for_click
from typer.main import get_command

from eldr_serve.cli import app
from eldr_serve.commands.lazy import resolve
from eldr_serve.commands.run import app_of
from eldr_serve.config.application import EldrArgs
from eldr_serve.data_root import ROOT
from eldr_serve.engine.active_backend import BACKEND
from eldr_serve.ingress.http_application import application
from eldr_serve.ingress.openapi import openapi_document
from eldr_serve.metrics import ENGINE, INGRESS, PREFIX, PROCESS, REPLICA, ROUTER, Metric

# Modules that are commands beside `eldr`, and their functions
MODULES = {
    "tests.faults": ("simulate", "mutate", "chaos"),
    "tests.fuzz": ("hostile",),
    "benchmarks.lib.screenshots": ("screenshots",),
}
_KINDS = {
    "boolean": "true or false",
    "integer": "a whole number",
    "null": "null",
    "number": "a number",
    "object": "a map",
    "string": "text",
}
_BOUNDS = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}"}


def yaml_page() -> str:
    """Return all keys under `args` of an application in a deployment YAML, and of a simulation's scenario."""
    schema = EldrArgs.model_json_schema()
    parts = [
        "# YAML\n\n# Deployment\n\nThe keys under `args` of an application; [deployments](../deployments.md) "
        "explains the file around them.\n",
        _section("args", schema),
    ]
    parts += [_section(name, part) for name, part in schema["$defs"].items()]
    scenario = importlib.import_module("offline.scenario").Scenario.model_json_schema()
    parts += ["# Scenario of a simulation\n", _section("Scenario", scenario)]
    parts += [_section(name, part) for name, part in scenario["$defs"].items()]
    return "\n".join(parts)


def commands_page() -> str:
    """Return the `--help` of `eldr`, of the modules that are commands, and of locust."""
    group = get_command(app)
    context = typer.Context(group, info_name="eldr")
    parts = ["# Commands\n"]
    for name in group.list_commands(context):  # type: ignore[attr-defined]
        command = resolve(group.get_command(context, name))  # type: ignore[attr-defined]
        parts.append(
            get_docs_for_click(
                obj=command, ctx=typer.Context(command, parent=context), indent=1, name=f"eldr {name}"
            )
        )
    for name in MODULES:
        command = get_command(module_app(name))
        parts.append(
            get_docs_for_click(obj=command, ctx=typer.Context(command), indent=1, name=f"python -m {name}")
        )
    parts.append(f"## `locust -f loadgen/locustfile.py`\n\n```text\n{locust_help()}```\n")
    return "\n".join(parts)


def module_app(name: str) -> typer.Typer:
    """Return the command of one of MODULES, as `python -m` runs it."""
    package = (ROOT / name.replace(".", "/")).is_dir()
    module = importlib.import_module(f"{name}.__main__" if package else name)
    return app_of(*(getattr(module, command) for command in MODULES[name]))


def locust_help() -> str:
    """Return our options of locust and its own; a subprocess, since locust patches its process."""
    code = (
        "import sys; from argparse import ArgumentParser; from loadgen.locustfile import add_options; "
        "from locust.argument_parser import get_parser; "
        "parser = ArgumentParser(prog='locust', add_help=False); "
        "add_options(parser); print(parser.format_help()); print(get_parser().format_help())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        env=os.environ | {"COLUMNS": "100"},
    )
    return done.stdout


def http_page() -> str:
    """Return every route of an ingress replica, and the fields of its request bodies."""
    document = openapi_document(BACKEND.request_types())
    parts = [
        "# HTTP\n\nThe endpoints of an ingress replica.\nFields of requests are vLLM's; engines validate "
        "them, and the ingress reads only what placement needs.\nRefused requests and their status: "
        "[HTTP API](../http_api.md#what-is-refused-before-prefill).\n"
    ]
    for route in application().routes:
        for method in sorted(route.methods - {"HEAD"}):  # type: ignore[attr-defined]
            path = route.path.replace(":path}", "}")  # type: ignore[attr-defined]
            about = inspect.getdoc(route.endpoint) or ""  # type: ignore[attr-defined]
            parts.append(f"## {method} {path}\n\n{about}\n")
            parts += _bodies(document, path, method)
    return "\n".join(parts)


def metrics_page() -> str:
    """Return all our metrics, by the process that exports them."""
    parts = [
        "# Metrics\n\nNames as in Prometheus, with Ray's prefix.\nTheir use: "
        "[watching](../watching.md).\nAll except those of engines also have the label `application`.\n"
        "The key is that of the same value in `GET /eldr/status`, in the unit of the key's suffix, such as "
        "`_ms` or `_pct`.\n"
    ]
    for title, metrics in (
        ("The router", ROUTER),
        ("Each ingress replica", INGRESS),
        ("Each engine", ENGINE),
        ("Each engine replica", REPLICA),
        ("Each of these processes", PROCESS),
    ):
        lines = ["| metric | kind | unit | meaning | labels | key |", "| --- | --- | --- | --- | --- | --- |"]
        lines += [_metric(metric) for metric in metrics.values()]
        parts.append(f"## {title}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


PAGES = {
    "reference/yaml.md": yaml_page,
    "reference/commands.md": commands_page,
    "reference/http.md": http_page,
    "reference/metrics.md": metrics_page,
}


def _bodies(document: dict[str, Any], path: str, method: str) -> Iterator[str]:
    operation = document["paths"].get(path, {}).get(method.lower(), {})
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    for part in body.get("anyOf", [body]):
        if "$ref" in part:
            name = part["$ref"].rpartition("/")[2]
            yield _table(document["components"]["schemas"][name], linked=False)


def _metric(metric: Metric) -> str:
    only = f" ({metric.only})" if metric.only else ""
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    key = f"`{metric.status}`" if metric.status else ""
    about = f"{_cell(metric.about)}{only}"
    return f"| `{PREFIX}{metric.name}` | {metric.kind} | {metric.unit} | {about} | {labels} | {key} |"


def _section(title: str, schema: dict[str, Any]) -> str:
    return f"## {title}\n\n{_cell(schema.get('description', ''))}\n\n{_table(schema, linked=True)}"


def _table(schema: dict[str, Any], *, linked: bool) -> str:
    required = schema.get("required", [])
    lines = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for key, field in schema.get("properties", {}).items():
        default = "required" if key in required else _default(field)
        meaning = _cell(field.get("description", ""))
        lines.append(f"| `{key}` | {_kind(field, linked)} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def _default(field: dict[str, Any]) -> str:
    return f"`{_cell(json.dumps(field['default']))}`" if "default" in field else ""


def _kind(schema: dict[str, Any], linked: bool) -> str:
    """Describe a schema in words: "a whole number ≥ 1 or null"."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})" if linked else name
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(_kind(part, linked) for part in schema[several]))
    if "const" in schema or "enum" in schema:
        return " or ".join(f"`{_cell(json.dumps(v))}`" for v in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"a list of {_kind(schema.get('items', {}), linked)}"
    bounds = [text.format(schema[name]) for name, text in _BOUNDS.items() if name in schema]
    return " ".join([_KINDS.get(kind, "any"), " and ".join(bounds)]).strip()


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
