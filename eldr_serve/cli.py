"""The command `eldr`: jobs, imported on demand, and operation of a running service."""

from __future__ import annotations

import json
import secrets
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from eldr_serve.home import ROOT

_JOBS = "Jobs"
_REPOSITORY = "In a checkout of the repository"
_SERVICE = "A running service"
_DEPLOYMENT = "A deployment"
# Name -> panel of `eldr --help`, summary; `_imported` has the functions.
_LAZY = {
    "check": (_DEPLOYMENT, "Check whether a deployment would start on a described cluster."),
    "demo": (_JOBS, "Serve the demo model and show what placement changes, policy by policy."),
    "calibrate": (_JOBS, "Record which experts prompts use, on one engine."),
    "fit": (_JOBS, "Fit a routing table on a calibration trace."),
    "fit-predictor": (
        _JOBS,
        "Fit a predictor of a prompt's experts from its tokens, on a calibration trace.",
    ),
    "refit": (_JOBS, "Fit a table to recent traffic or to a trace, and swap it in."),
    "place": (_JOBS, "Place experts on the ranks of an expert-parallel engine."),
    "simulate": (_JOBS, "Run a scenario's policies in simulation."),
    "compare": (_JOBS, "Compare policies on a running service, with intervals."),
    "reproduce": (_REPOSITORY, "Draw a paper's figure in simulation."),
    "bench": (_REPOSITORY, "Run benchmarks; results in benchmarks/results."),
}


def _imported(name: str) -> Any:
    """Import the function of a subcommand of `_LAZY`."""
    command: Any
    match name:
        case "check":
            from eldr_serve.preflight.command import check as command
        case "demo":
            from offline.demo import demo as command
        case "calibrate":
            from offline.calibrate import calibrate as command
        case "fit":
            from offline.fit import fit as command
        case "fit-predictor":
            from offline.fit_predictor import fit_predictor as command
        case "refit":
            from offline.refit import refit as command
        case "place":
            from offline.place import place as command
        case "simulate":
            from offline.simulate import simulate as command
        case "compare":
            from loadgen.compare import compare as command
        case "reproduce":
            from benchmarks.papers.reproduce import reproduce as command
        case "bench":
            from benchmarks.__main__ import bench as command
    return command


class _Lazy(TyperCommand):
    """A command that is imported when it is run, completed or shows its help."""

    def __init__(self, name: str, panel: str, summary: str) -> None:
        super().__init__(name, help=summary, rich_help_panel=panel)

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Return the context of the imported command."""
        return self.loaded().make_context(info_name, args, parent, **extra)

    def loaded(self) -> Any:
        """Import the command; raise ValueError, one sentence, if a requirement is not installed."""
        assert self.name is not None
        app = typer.Typer(add_completion=False)
        try:
            app.command(self.name)(_imported(self.name))
        except ModuleNotFoundError as error:
            missing = str(error.name).partition(".")[0]
            if missing == "benchmarks":
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
    """All subcommands; a refusal prints one sentence and exits with status 2."""

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
    typer.Option(envvar="ELDR_ADMIN_KEY", help="The service's admin key.", show_default=False),
]
_URL = "http://127.0.0.1:8000"


def loaded(command: Any) -> Any:
    """Return the subcommand with its arguments and options; import it if necessary."""
    return command.loaded() if isinstance(command, _Lazy) else command


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"eldr-serve {version('eldr-serve')}")
        raise typer.Exit


@app.callback()
def _eldr(
    show: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Expert-locality-aware serving of mixture-of-experts models: jobs, studies and operation."""


@app.command(rich_help_panel=_SERVICE)
def status(
    url: Url = _URL,
    admin_key: AdminKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the service's answer as JSON.")] = False,
) -> None:
    """Show workers and their loads, policy, table and counters; details need the admin key."""
    from eldr_serve.status_text import show_status

    found = _client(url, admin_key).status()
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        show_status(found)


@app.command(rich_help_panel=_SERVICE)
def policy(
    name: Annotated[str | None, typer.Argument(help="Policy to set; without it, show the live one.")] = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Parameter of the policy; repeatable."),
    ] = None,
    url: Url = _URL,
    admin_key: AdminKey = None,
) -> None:
    """Show the live policy, or set another one for all ingresses at once."""
    from eldr_serve.client import parse_parameters

    if name is None and parameters:
        raise ValueError("--set needs the name of a policy")
    client = _client(url, admin_key)
    if name is None:
        found = client.status()
        _print_json({key: found.get(key) for key in ("policy", "parameters", "settings_version")})
    else:
        _print_json(client.set_policy(name, parse_parameters(parameters or ())))


@app.command(rich_help_panel=_SERVICE)
def table(
    file: Annotated[
        Path | None, typer.Argument(help="RoutingTable to swap in; without it, show the live one.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Save the live table to this file instead.")] = None,
    url: Url = _URL,
    admin_key: AdminKey = None,
) -> None:
    """Show or save the live routing table, or swap in another one; requests in flight keep their workers."""
    from eldr_serve.files import write_whole

    if file is not None and out is not None:
        raise ValueError("give either a file to swap in or --out")
    client = _client(url, admin_key)
    if out is not None:
        write_whole(out, client.table())
        typer.echo(f"wrote {out}")
        return
    _print_json(client.status().get("table") if file is None else client.swap_table(file.read_bytes()))


@app.command(rich_help_panel=_SERVICE)
def trace(
    out: Annotated[Path, typer.Option(help="CalibrationTrace file to write (safetensors).")],
    url: Url = _URL,
    admin_key: AdminKey = None,
) -> None:
    """Save the expert counts of recent requests for fits, simulations and predictors.

    The file holds the prompts' token ids, unless the deployment says `keep_token_ids: false`.
    """
    from eldr_serve.files import write_whole

    file = _client(url, admin_key).trace()
    write_whole(out, file)
    typer.echo(f"wrote {out}: {len(file) / 2**20:.1f} MiB")


@app.command(rich_help_panel=_SERVICE)
def predictor(
    file: Annotated[
        Path | None, typer.Argument(help="SignaturePredictor to swap in; without it, show the live one.")
    ] = None,
    url: Url = _URL,
    admin_key: AdminKey = None,
) -> None:
    """Show how well signatures are predicted, or swap in a predictor of `eldr fit-predictor`."""
    client = _client(url, admin_key)
    _print_json(
        client.status().get("predictor") if file is None else client.swap_predictor(file.read_bytes())
    )


@app.command(rich_help_panel=_SERVICE)
def experts(
    file: Annotated[
        Path | None,
        typer.Argument(help="ExpertPlacement of `eldr place` to swap in; without it, show the live one."),
    ] = None,
    replica: Annotated[
        list[str] | None, typer.Option(help="Decode replica; repeatable; default: all.")
    ] = None,
    url: Url = _URL,
    admin_key: AdminKey = None,
) -> None:
    """Show where expert-parallel decode engines hold their experts, or move them while they serve."""
    client = _client(url, admin_key)
    if file is None:
        _print_json(client.status().get("ingress", {}).get("experts"))
        return
    described = file.with_suffix(".meta.json")
    _print_json(client.place_experts(file.read_bytes(), described.read_bytes(), replica))


@app.command(rich_help_panel=_DEPLOYMENT)
def deployments(
    name: Annotated[str | None, typer.Argument(help="File to show; without it, list all.")] = None,
    copy: Annotated[Path | None, typer.Option(help="Copy it to this new file instead.")] = None,
) -> None:
    """List the included deployment files, show one, or copy one for editing."""
    folder = ROOT / "deployments"
    paths = sorted(folder.glob("*.yaml")) + sorted(folder.glob("kubernetes/*.yaml"))
    files = {str(path.relative_to(folder)): path for path in paths}
    if name is None:
        if copy is not None:
            raise ValueError("--copy needs the name of a file")
        typer.echo("\n".join(files))
        return
    if name not in files:
        raise ValueError(f"there is no {name!r}: {', '.join(files)}")
    content = files[name].read_text()
    if copy is None:
        typer.echo(content, nl=False)
        return
    with copy.open("x") as file:  # never overwrite a file
        file.write(content)


keys = typer.Typer(no_args_is_help=True)
app.add_typer(keys, name="keys", help="The file of inference keys and tenants.", rich_help_panel=_DEPLOYMENT)
KeysFile = Annotated[Path, typer.Option("--file", help="The deployment's ingress.keys_file.")]
_KEYS_FILE = Path("keys.json")


@keys.command()
def add(
    tenant: Annotated[str, typer.Argument(help="Owner of the key; a new name creates a tenant.")],
    file: KeysFile = _KEYS_FILE,
    priority: Annotated[
        float | None, typer.Option(help="Weight of the tenant's fair share while requests wait; default 1.")
    ] = None,
    requests_per_minute: Annotated[
        float | None, typer.Option(help="Limit for all keys of the tenant.")
    ] = None,
    tokens_per_minute: Annotated[
        float | None, typer.Option(help="Prompt and generated tokens, limit for all the tenant's keys.")
    ] = None,
) -> None:
    """Create a key and print it once; the file stores its SHA-256. Given limits replace the tenant's."""
    from eldr_serve.limits.keys import Keys, add_key, read_keys, write_keys

    given = {
        "priority": priority,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
    }
    key = f"eldr-{secrets.token_urlsafe(32)}"
    limits = {name: value for name, value in given.items() if value is not None}
    write_keys(file, add_key(read_keys(file) if file.exists() else Keys(), tenant, key, limits))
    typer.echo(key)


@keys.command("list")
def list_keys(file: KeysFile = _KEYS_FILE) -> None:
    """Show tenants, their limits and the first digits of their keys' SHA-256."""
    from eldr_serve.limits.keys import read_keys

    found = read_keys(file)
    _print_json(
        {
            name: limits.model_dump(exclude_none=True)
            | {"keys": {k.sha256[:12]: str(k.created) for k in found.keys if k.tenant == name}}
            for name, limits in found.tenants.items()
        }
    )


@keys.command()
def revoke(
    sha256: Annotated[str, typer.Argument(help="First digits of the key's SHA-256, see `eldr keys list`.")],
    file: KeysFile = _KEYS_FILE,
) -> None:
    """Remove a key from the file; the service refuses it within seconds."""
    from eldr_serve.limits.keys import read_keys, revoke_key, write_keys

    write_keys(file, revoke_key(read_keys(file), sha256))


def main() -> None:
    """Run the command; the entry point."""
    app(prog_name="eldr")


def _client(url: str, admin_key: str | None = None) -> Any:
    from eldr_serve.client import Client  # `eldr --help` needs no HTTP client

    return Client(url, admin_key)


def _print_json(found: Any) -> None:
    typer.echo(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
