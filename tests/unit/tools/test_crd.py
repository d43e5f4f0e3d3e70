"""Manifests against a custom resource's definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from in_process import command, sentence

from tools.crd import faults

TRUCK: dict[str, Any] = {
    "kind": "CustomResourceDefinition",
    "spec": {
        "group": "x.io",
        "names": {"kind": "Truck"},
        "versions": [
            {
                "name": "v1",
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "required": ["spec"],
                        "properties": {
                            "apiVersion": {"type": "string"},
                            "kind": {"type": "string"},
                            "metadata": {"type": "object"},
                            "spec": {
                                "type": "object",
                                "properties": {
                                    "wheels": {"type": "integer", "minimum": 4},
                                    "load": {
                                        "anyOf": [{"type": "integer"}, {"type": "string"}],
                                        "x-kubernetes-int-or-string": True,
                                    },
                                    "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                                },
                            },
                        },
                    }
                },
            }
        ],
    },
}


@pytest.mark.parametrize(
    ("spec", "wrong"),
    [
        ({"wheels": 4, "load": "3t", "labels": {"a": "b"}}, []),
        ({"load": 3}, []),
        ({"wheels": 3}, ["$.spec.wheels"]),
        ({"weels": 4}, ["$.spec"]),
        ({"wheels": "4", "labels": {"a": 1}}, ["$.spec.labels.a", "$.spec.wheels"]),
    ],
)
def test_fields_have_the_schemas_names_and_types(spec: dict[str, Any], wrong: list[str]) -> None:
    found = faults(TRUCK, {"apiVersion": "x.io/v1", "kind": "Truck", "metadata": {"name": "t"}, "spec": spec})
    assert [fault.partition(":")[0] for fault in found] == wrong


@pytest.mark.parametrize(("version", "kind"), [("x.io/v2", "Truck"), ("v1", "Truck"), ("x.io/v1", "Car")])
def test_another_kind_is_refused(version: str, kind: str) -> None:
    (fault,) = faults(TRUCK, {"apiVersion": version, "kind": kind, "spec": {}})
    assert kind in fault
    assert version in fault


def test_the_command_says_which_file_is_wrong(tmp_path: Path) -> None:
    definition, good, bad = (tmp_path / f"{name}.yaml" for name in ("definition", "good", "bad"))
    definition.write_text(yaml.safe_dump(TRUCK))
    good.write_text("{apiVersion: x.io/v1, kind: Truck, spec: {wheels: 6}}")
    bad.write_text("{apiVersion: x.io/v1, kind: Truck, spec: {wheels: 2}}")
    assert command("tools.crd", definition, good).exit_code == 0
    done = command("tools.crd", definition, good, bad)
    assert done.exit_code == 1
    assert done.stdout.splitlines()[0] == f"{good}: valid"
    assert done.stdout.splitlines()[-1] == f"{bad}: refused"
    assert "not a CustomResourceDefinition" in sentence(command("tools.crd", good, bad))
    bad.write_text("a: [")
    assert "is not YAML" in sentence(command("tools.crd", definition, bad))
