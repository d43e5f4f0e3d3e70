"""The command `eldr`: the repository's commands, loaded when asked for, and a running service's operation."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

_REPOSITORY = "In a checkout of the repository"
_SERVICE = "A running service"
_DEPLOYMENT = "A deployment"
# Name -> where its function is, and what it does.
_LAZY = {
    "check": (
        "eldr_serve.check.command:check",
        "Say whether a deployment would start on a described cluster.",
    ),
    "demo": ("offline.demo:demo", "Serve the demo model, calibrate, fit and compare policies on it."),
    "calibrate": ("offline.calibrate:calibrate", "Record which experts prompts use, on one engine."),
    "fit": ("offline.fit:fit", "Fit a routing table on a calibration trace."),
    "fit-predictor": (
        "offline.fit_predictor:fit_predictor",
        "Fit what foretells a prompt's experts from its tokens, on a calibration trace.",
    ),
    "refit": ("offline.refit:refit", "Fit a table for the decode replicas that serve now, and swap it in."),
    "place": ("offline.place:place", "Place experts on the ranks of an expert-parallel engine."),
    "simulate": ("offline.simulate:simulate", "Run a scenario's policies in simulation."),
    "compare": ("loadgen.compare:compare", "Compare policies on a running service, with intervals."),
    "reproduce": ("studies.reproduce:reproduce", "Draw a paper's figure in simulation."),
    "bench": ("benchmarks.__main__:bench", "Run benchmarks; results in benchmarks/results."),
}


class _Lazy(TyperCommand):
    """A command that is imported when it is run, completed or asked for its help."""

    def __init__(self, name: str, where: str, summary: str) -> None:
        panel = _DEPLOYMENT if where.startswith("eldr_serve.") else _REPOSITORY
        super().__init__(name, help=summary, rich_help_panel=panel)
        self._where = where

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Of the command itself."""
        return self._loaded().make_context(info_name, args, parent, **extra)

    def _loaded(self) -> Any:
        module, _, function = self._where.partition(":")
        app = typer.Typer(add_completion=False)
        try:
            app.command(self.name)(getattr(importlib.import_module(module), function))
        except ModuleNotFoundError as error:
            missing = str(error.name).partition(".")[0]
            if missing == module.partition(".")[0]:
                raise ValueError(
                    f"it is part of the repository, not of the installed package: clone the repository, run "
                    f"`make setup` in it, then `.venv/bin/eldr {self.name}`"
                ) from None
            raise ValueError(
                f"it needs the Python package {missing}, which is not installed: install "
                "eldr-serve[cpu] or eldr-serve[gpu]"
            ) from None
        return get_command(app)


class _Group(TyperGroup):
    """All subcommands; what they refuse is one sentence and exit status 2."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        lazy = {name: _Lazy(name, *where) for name, where in _LAZY.items()}
        self.commands = lazy | dict(self.commands)

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            print(f"eldr {ctx.invoked_subcommand}: {' '.join(str(error).split())}", file=sys.stderr)
            raise typer.Exit(2) from None


app = typer.Typer(cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False)
Url = Annotated[str, typer.Option(help="Where the service's ingress listens.")]
AdminKey = Annotated[
    str | None,
    typer.Option(envvar="ELDR_ADMIN_KEY", help="Key for changes of the service.", show_default=False),
]
_URL = "http://127.0.0.1:8000"


@app.callback()
def _eldr() -> None:
    """Expert-locality-aware serving of mixture-of-experts models: jobs, studies and operation."""


@app.command(rich_help_panel=_SERVICE)
def status(
    url: Url = _URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the service answers, as JSON.")] = False,
) -> None:
    """Show workers, their load in requests and tokens, policy, table and counters."""
    found = _client(url).status()
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        _show(found)


@app.command(rich_help_panel=_SERVICE)
def policy(
    name: Annotated[str | None, typer.Argument(help="Policy to set; none shows the live one.")] = None,
    parameters: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Parameter of it; repeatable.")
    ] = None,
    url: Url = _URL,
    admin_key: AdminKey = None,
) -> None:
    """Show the live policy, or set another one, at once for every ingress."""
    from eldr_serve.client import parse_parameters

    if name is None and parameters:
        raise ValueError("--set goes with the name of a policy")
    client = _client(url, admin_key)
    if name is None:
        found = client.status()
        _print_json({key: found.get(key) for key in ("policy", "parameters", "settings_version")})
    else:
        _print_json(client.set_policy(name, parse_parameters(parameters or ())))


@app.command(rich_help_panel=_SERVICE)
def table(
    file: Annotated[
        Path | None, typer.Argument(help="RoutingTable to swap in; none shows the live one.")
    ] = None,
    url: Url = _URL,
    admin_key: AdminKey = None,
) -> None:
    """Show the live routing table, or swap in another one; requests in flight keep their workers."""
    client = _client(url, admin_key)
    _print_json(client.status().get("table") if file is None else client.swap_table(file.read_bytes()))


def main() -> None:
    """The entry point."""
    app(prog_name="eldr")


def _client(url: str, admin_key: str | None = None) -> Any:
    from eldr_serve.client import Client  # `eldr --help` needs no HTTP client

    return Client(url, admin_key)


def _print_json(found: Any) -> None:
    typer.echo(json.dumps(found, indent=1))


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for name in ("model", "router", "policy", "table", "leases", "pool", "step_cost", "decode_totals"):
        if found.get(name) is not None:
            grid.add_row(name, _line(found[name] if name != "policy" else _policy(found)))
    grid.add_row("ingress", _line(found.get("ingress", {})))
    grid.add_row("counters", _line(found.get("counters", {})))
    workers = Table("worker", "replica", "requests in flight", "KV tokens", "cluster's domain")
    for row in found.get("workers", []):
        keys = ("worker", "replica", "in_flight", "kv_tokens", "cluster_domain")
        workers.add_row(*(str(row.get(key) if row.get(key) is not None else "-") for key in keys))
    console = Console(markup=False)
    console.print(grid)
    console.print(workers)


def _policy(found: dict[str, Any]) -> str:
    return f"{found['policy']} ({_line(found.get('parameters', {}))})"


def _line(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(
        f"{key} {f'({_line(item)})' if isinstance(item, dict) else item}" for key, item in value.items()
    )


if __name__ == "__main__":
    main()
