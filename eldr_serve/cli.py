"""The command `eldr`: jobs, imported on demand, and operation of a running service."""

from __future__ import annotations

import json
import secrets
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from eldr_serve.commands.errors import EXPECTED_ERRORS, exit_status
from eldr_serve.commands.lazy import LazyCommand
from eldr_serve.data_root import ROOT
from eldr_serve.errors import UserInputError
from eldr_serve.validation import unknown_name

_SERVICE = "A running service"
_DEPLOYMENT = "A deployment"


class _Group(TyperGroup):
    """All subcommands; an expected error prints one sentence and exits with its status."""

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except EXPECTED_ERRORS as error:
            print(f"eldr {ctx.invoked_subcommand}: {' '.join(str(error).split())}", file=sys.stderr)
            raise typer.Exit(exit_status(error)) from None


app = typer.Typer(cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False)
Url = Annotated[str, typer.Option(help="URL of the service's ingress.")]
AdminKey = Annotated[
    str | None,
    typer.Option(envvar="ELDR_ADMIN_KEY", help="The service's admin key.", show_default=False),
]
_URL = "http://127.0.0.1:8000"


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"eldr-serve {version('eldr-serve')}")
        raise typer.Exit


@app.callback()
def _eldr(
    show: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Expert-locality-aware serving of mixture-of-experts models: jobs, studies and operation."""


# The functions of commands that are imported when they run, and their lines in `eldr --help`.
_COMMANDS = {
    "eldr_serve.preflight.command.check": "Check whether a deployment would start on a described cluster.",
    "offline.demo.demo": "Serve the demo model and show what placement changes, policy by policy.",
    "offline.calibrate.calibrate": "Record which experts prompts use, on one or more engines.",
    "offline.fit.fit": "Fit a routing table on a calibration trace.",
    "offline.fit_predictor.fit_predictor": (
        "Fit a predictor of a prompt's experts from its tokens, on a calibration trace."
    ),
    "offline.refit.refit": "Fit a table to recent traffic or to a trace, and swap it in.",
    "offline.place.place": "Place experts on the ranks of an expert-parallel engine.",
    "offline.cost.cost": "Write what a decode step of a model costs on a GPU, from measured kernel times.",
    "offline.routes.routes": "Convert published expert choices of a real model to a calibration trace.",
    "offline.simulate.simulate": "Run a scenario's policies in simulation.",
    "loadgen.compare.compare": "Compare policies on a running service, with intervals.",
    "benchmarks.papers.reproduce.reproduce": "Simulate a paper's experiment and draw its figure.",
    "benchmarks.__main__.bench": "Run benchmarks; results in benchmarks/results.",
}
_PANELS = {"eldr_serve": _DEPLOYMENT, "benchmarks": "In a checkout of the repository"}


def _add(path: str, about: str) -> None:
    module, _, function = path.rpartition(".")

    def load() -> Any:
        return getattr(import_module(module), function)

    panel = _PANELS.get(path.partition(".")[0], "Jobs")
    app.command(function.replace("_", "-"), cls=LazyCommand, help=about, rich_help_panel=panel)(load)


for _path, _about in _COMMANDS.items():
    _add(_path, _about)


@app.command(rich_help_panel=_SERVICE)
def status(
    url: Url = _URL,
    admin_key: AdminKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the service's answer as JSON.")] = False,
) -> None:
    """Show workers and their loads, policy, table and counters; details need the admin key."""
    from eldr_serve.commands.status_text import show_status

    answer = _client(url, admin_key).status()
    if as_json:
        _print_json(answer)
    else:
        show_status(answer)


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
    from eldr_serve.commands.client import parse_parameters

    if name is None and parameters:
        raise UserInputError("--set needs the name of a policy")
    client = _client(url, admin_key)
    if name is None:
        answer = client.status()
        _print_json({key: answer.get(key) for key in ("policy", "parameters", "settings_version")})
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
    from eldr_serve.files import write_atomically

    if file is not None and out is not None:
        raise UserInputError("give either a file to swap in or --out")
    client = _client(url, admin_key)
    if out is not None:
        write_atomically(out, client.table())
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

    The file holds the prompts' token ids, unless the deployment sets `keep_token_ids: false`.
    """
    from eldr_serve.files import write_atomically

    file = _client(url, admin_key).trace()
    write_atomically(out, file)
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
        list[str] | None, typer.Option(help="Decode replica whose experts migrate; repeatable; default: all.")
    ] = None,
    url: Url = _URL,
    admin_key: AdminKey = None,
) -> None:
    """Show where expert-parallel decode engines hold their experts, or migrate the experts as they serve."""
    client = _client(url, admin_key)
    if file is None:
        _print_json(client.status().get("ingress", {}).get("experts"))
        return
    sidecar = file.with_suffix(".meta.json")
    _print_json(client.place_experts(file.read_bytes(), sidecar.read_bytes(), replica))


@app.command(rich_help_panel=_SERVICE)
def drain(
    replica: Annotated[str, typer.Argument(help="Decode replica, as in `eldr status`.")],
    wait: Annotated[float, typer.Option(min=0, help="Maximum wait until no request is left, s.")] = 60.0,
    url: Url = _URL,
    admin_key: AdminKey = None,
) -> None:
    """Move the answers of a decode replica to other replicas, and send it no further requests."""
    _print_json(_client(url, admin_key).drain(replica, wait))


@app.command(rich_help_panel=_DEPLOYMENT)
def deployments(
    name: Annotated[str | None, typer.Argument(help="File to show; without it, list all.")] = None,
    copy: Annotated[Path | None, typer.Option(help="Copy the file to this new path instead.")] = None,
) -> None:
    """List the included deployment files, show one, or copy one for editing."""
    folder = ROOT / "deployments"
    paths = sorted(folder.glob("*.yaml")) + sorted(folder.glob("kubernetes/*.yaml"))
    files = {str(path.relative_to(folder)): path for path in paths}
    if name is None:
        if copy is not None:
            raise UserInputError("--copy needs the name of a file")
        typer.echo("\n".join(files))
        return
    if name not in files:
        raise UserInputError(unknown_name("", name, files, "deployment"))
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
        float | None, typer.Option(help="Requests per minute, for all the tenant's keys.")
    ] = None,
    tokens_per_minute: Annotated[
        float | None,
        typer.Option(help="Prompt and generated tokens per minute, for all the tenant's keys."),
    ] = None,
    ttft_ms: Annotated[float | None, typer.Option(help="Default TTFT objective of the tenant, ms.")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="Default TPOT objective of the tenant, ms.")] = None,
) -> None:
    """Create a key and print it once; the file stores its SHA-256. Given limits replace the tenant's."""
    from eldr_serve.limits.keys import Keys, add_key, read_keys, write_keys

    options = {
        "priority": priority,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "ttft_ms": ttft_ms,
        "tpot_ms": tpot_ms,
    }
    key = f"eldr-{secrets.token_urlsafe(32)}"
    limits = {name: value for name, value in options.items() if value is not None}
    write_keys(file, add_key(read_keys(file) if file.exists() else Keys(), tenant, key, limits))
    typer.echo(key)


@keys.command("list")
def list_keys(file: KeysFile = _KEYS_FILE) -> None:
    """Show tenants, their limits and the first digits of their keys' SHA-256."""
    from eldr_serve.limits.keys import read_keys

    content = read_keys(file)
    _print_json(
        {
            name: limits.model_dump(exclude_none=True)
            | {"keys": {k.sha256[:12]: str(k.created) for k in content.keys if k.tenant == name}}
            for name, limits in content.tenants.items()
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
    from eldr_serve.commands.client import OperatorClient  # `eldr --help` needs no HTTP client

    return OperatorClient(url, admin_key)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1))


if __name__ == "__main__":
    main()
