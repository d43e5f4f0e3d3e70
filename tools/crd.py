"""Check manifests against a custom resource's definition: `python -m tools.crd CRD.yaml MANIFEST...`.

Like `kubectl apply --validate=strict`, it refuses fields that the schema does not have. It does not check
rules in CEL (`x-kubernetes-validations`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import typer
import yaml

from eldr_serve.command_errors import BadInput, run

_KEPT = ("additionalProperties", "x-kubernetes-preserve-unknown-fields")


def faults(definition: dict[str, Any], manifest: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a manifest, one line each, with its location.

    Args:
        definition: the CustomResourceDefinition.
        manifest: a resource in one of its versions.
    """
    spec = definition["spec"]
    schemas = {
        (f"{spec['group']}/{served['name']}", spec["names"]["kind"]): served["schema"]["openAPIV3Schema"]
        for served in spec["versions"]
    }
    kind = manifest.get("apiVersion"), manifest.get("kind")
    if kind not in schemas:
        yield f"it is {kind}, and the definition is of {' and '.join(map(str, schemas))}"
        return
    checker = jsonschema.Draft202012Validator(_strict(schemas[kind]))
    for error in sorted(checker.iter_errors(manifest), key=lambda error: error.json_path):
        yield f"{error.json_path}: {error.message}"


def _strict(schema: Any) -> Any:
    """Return the schema with additional fields forbidden in its objects."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _strict(part) for key, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and not any(key in schema for key in _KEPT):
        closed["additionalProperties"] = False
    return closed


def crd(
    definition: Annotated[Path, typer.Argument(help="CustomResourceDefinition, YAML.")],
    manifests: Annotated[list[Path], typer.Argument(help="Manifests, YAML.")],
) -> None:
    """Check manifests against a custom resource's definition; exit status 1 if one is wrong."""
    known = _read(definition)
    if known.get("kind") != "CustomResourceDefinition":
        raise BadInput(f"{definition} is not a CustomResourceDefinition")
    wrong = 0
    for path in manifests:
        found = list(faults(known, _read(path)))
        wrong += bool(found)
        for fault in found:
            typer.echo(f"{path}: {fault}")
        typer.echo(f"{path}: {'refused' if found else 'valid'}")
    if wrong:
        raise typer.Exit(1)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise BadInput(f"{path} is not YAML: {error}") from error
    if not isinstance(found, dict):
        raise BadInput(f"{path} has no manifest")
    return found


if __name__ == "__main__":
    run(crd)
