"""RayService manifests are valid for KubeRay and true to their deployments, and all replicas have room."""

import copy
import gzip
import json
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from eldr_serve.config.ray_settings import QUIET
from eldr_serve.preflight.deployment import Deployment, build_deployment
from eldr_serve.preflight.document import read_document
from eldr_serve.preflight.machine import ACCELERATOR, NodePool, read_cluster
from eldr_serve.preflight.node_assignment import assign_nodes, total_resources
from tests.support.shipped import ROOT

MANIFESTS = sorted((ROOT / "deployments/kubernetes").glob("*.yaml"))
DEFINITIONS = sorted(Path(__file__).parent.glob("rayservice_crd_*.json.gz"))  # see README.md beside them
Case = tuple[Deployment, dict[str, Any]]
_OPEN = ("additionalProperties", "x-kubernetes-preserve-unknown-fields")


def strict(schema: Any) -> Any:
    """Return the schema with additional fields forbidden, as `kubectl apply --validate=strict` does."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(part) for key, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and not any(key in schema for key in _OPEN):
        closed["additionalProperties"] = False
    return closed


@pytest.fixture(scope="module", params=DEFINITIONS, ids=lambda path: path.name)
def kuberay(request: Any) -> jsonschema.Draft202012Validator:
    """Provide the schema of KubeRay's RayService, without its rules in CEL (`x-kubernetes-validations`)."""
    definition = json.loads(gzip.decompress(request.param.read_bytes()))
    (served,) = definition["spec"]["versions"]
    assert (definition["spec"]["group"], served["name"]) == ("ray.io", "v1")
    return jsonschema.Draft202012Validator(strict(served["schema"]["openAPIV3Schema"]))


@pytest.fixture(scope="module", params=MANIFESTS, ids=lambda path: path.stem)
def case(request: Any) -> Case:
    """Provide a deployment and its manifest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        path = Path("deployments") / request.param.name
        deployment = build_deployment(path, read_document(path))
    return deployment, yaml.safe_load(request.param.read_text())


def cluster_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"]["rayClusterConfig"]


def pods(manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield (name of its group, pod, container), the head first."""
    cluster = cluster_of(manifest)
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        yield group.get("groupName", "head"), pod, container


def mib(quantity: str) -> int:
    assert quantity.endswith("Mi")
    return int(quantity.removesuffix("Mi"))


def pools(manifest: dict[str, Any], count: str) -> list[NodePool]:
    """Return the resources that Ray finds in the pods of each group."""
    node_pools = []
    for group in cluster_of(manifest)["workerGroupSpecs"]:
        asked = group["template"]["spec"]["containers"][0]["resources"]
        resources = {"CPU": int(asked["requests"]["cpu"].removesuffix("m")) / 1000}
        resources |= {"GPU": float(asked["limits"].get("nvidia.com/gpu", 0))}
        resources |= {name: float(amount) for name, amount in group.get("resources", {}).items()}
        node_pools.append(NodePool(group["groupName"], group[count], resources))
    return node_pools


def test_the_manifest_is_valid_by_kuberays_schema(
    kuberay: jsonschema.Draft202012Validator, case: Case
) -> None:
    manifest = case[1]
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    assert [f"{error.json_path}: {error.message}" for error in kuberay.iter_errors(manifest)] == []
    wrong = copy.deepcopy(manifest)
    wrong["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["container"] = []
    wrong["spec"]["rayClusterDeletionDelaySeconds"] = "600"
    assert len(list(kuberay.iter_errors(wrong))) == 2


def test_all_replicas_fit_and_each_engine_on_a_gpu_has_its_own_pod(case: Case) -> None:
    deployment, manifest = case
    demands = [*(engines.replicas for engines in deployment.engines), deployment.ingress]
    placement = assign_nodes(pools(manifest, "maxReplicas"), demands)
    assert not placement.missing
    assert not placement.spread
    assert all(node.replicas for node in placement.nodes)
    if deployment.engines[0].spec.device == "gpu":
        assert all(len(node.replicas) == 1 for node in placement.nodes)
        counts = {group["groupName"]: group for group in cluster_of(manifest)["workerGroupSpecs"]}
        for engines in deployment.engines:
            group = counts[engines.role]
            assert [group[f"{key}eplicas"] for key in ("minR", "r", "maxR")] == [
                engines.min_replicas,
                engines.initial_replicas,
                engines.max_replicas,
            ]
            limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
            assert (
                int(limits["nvidia.com/gpu"]) == engines.spec.ranks == total_resources(engines.bundles)["GPU"]
            )


def test_no_replica_runs_on_the_head(case: Case) -> None:
    deployment, manifest = case
    head = cluster_of(manifest)["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert "resources" not in head
    for replicas in (*(engines.replicas for engines in deployment.engines), deployment.ingress):
        assert total_resources(replicas.bundles)["CPU"] > 0


def test_the_application_equals_the_deployment_except_for_its_address(case: Case, tmp_path: Path) -> None:
    deployment, manifest = case
    file = tmp_path / "serve.yaml"
    file.write_text(manifest["spec"]["serveConfigV2"])
    document = read_document(file)  # `eldr check` reads it so
    assert not document.ignored
    expected = copy.deepcopy(deployment.document)
    expected["applications"][0]["args"]["ingress"]["host"] = "0.0.0.0"
    assert document.content == expected
    assert manifest["spec"]["rayClusterConfig"]["rayVersion"] == version("ray")
    replicas = [deployment.args.ingress_deployment_config]
    replicas += [engines.spec.deployment_config for engines in deployment.engines]
    drain_s = [config["graceful_shutdown_timeout_s"] for config in replicas]
    assert manifest["spec"]["rayClusterDeletionDelaySeconds"] >= max(drain_s)


def test_the_service_targets_ready_ingresses(case: Case) -> None:
    deployment, manifest = case
    port = deployment.args.ingress.port
    listed = {name: container.get("ports", []) for name, _, container in pods(manifest)}
    assert {"name": "serve", "containerPort": port} in listed["head"]  # KubeRay makes the Service from it
    numbers = [entry["containerPort"] for entry in listed["head"]]
    assert len(set(numbers)) == len(numbers)
    answering = [
        (name, container) for name, pod, container in pods(manifest) if not pod.get("readinessGates")
    ][1:]
    device = deployment.engines[0].spec.device
    assert [name for name, _ in answering] == ["ingress" if device == "gpu" else "all"]
    for _, container in answering:
        assert container["readinessProbe"]["httpGet"] == {"path": "/eldr/ready", "port": port}


def test_no_readiness_probe_depends_on_the_application(case: Case) -> None:
    """KubeRay submits the application once the head is ready, and probes it by itself."""
    _, manifest = case
    assert manifest["spec"]["excludeHeadPodFromServeSvc"]
    for name, _, container in pods(manifest):
        assert not {"livenessProbe", "startupProbe"} & container.keys()
        if name == "head":
            assert "readinessProbe" not in container
        elif container["readinessProbe"]["httpGet"]["path"] != "/eldr/ready":
            assert container["readinessProbe"]["httpGet"] == {"path": "/api/healthz", "port": 52365}


def test_keys_are_read_from_a_secret(case: Case) -> None:
    for _, _, container in pods(case[1]):
        environment = {entry["name"]: entry for entry in container["env"]}
        admin = environment["ELDR_ADMIN_KEY"]["valueFrom"]["secretKeyRef"]
        assert admin == {"name": "eldr", "key": "admin-key"}
        secrets = [name for name in environment if name.endswith(("KEY", "TOKEN"))]
        assert not [name for name in secrets if "value" in environment[name]]
    assert cluster_of(case[1])["authOptions"] == {"mode": "token"}
    assert "admin_key" not in case[1]["spec"]["serveConfigV2"]


def test_all_pods_have_rays_settings_memory_and_models(case: Case) -> None:
    deployment, manifest = case
    homes = {engines.spec.environment.get("HF_HOME") for engines in deployment.engines} - {None}
    for _, pod, container in pods(manifest):
        environment = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert QUIET.items() <= environment.items()
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        shm = volumes[mounts["/dev/shm"]]["emptyDir"]
        limit = mib(container["resources"]["limits"]["memory"])
        assert shm["medium"] == "Memory"
        assert 2**29 < mib(shm["sizeLimit"]) * 2**20 < limit * 2**20
        assert homes == {environment[name] for name in environment if name == "HF_HOME"}
        assert {volumes[mounts[home]]["persistentVolumeClaim"]["claimName"] for home in homes} <= {
            "eldr-models"
        }


def test_pods_and_the_ray_up_cluster_have_the_same_resources(case: Case) -> None:
    deployment, manifest = case
    offered = {name for pool in read_cluster(ROOT / "ray_cluster.yaml") for name in pool.resources}
    named = {name for pool in pools(manifest, "maxReplicas") for name in pool.resources}
    assert named <= offered | {"CPU"}
    resource_names = {name for engines in deployment.engines for name in total_resources(engines.bundles)}
    kinds = {name for name in resource_names if name.startswith(ACCELERATOR)}
    assert {name for name in named if name.startswith(ACCELERATOR)} == kinds
    for name, pod, container in pods(manifest):
        on_gpu = "nvidia.com/gpu" in container["resources"]["limits"]
        assert ("nvidia.com/gpu.product" in pod.get("nodeSelector", {})) == on_gpu, name
        assert bool(pod.get("tolerations")) == on_gpu
    scaled = any(engines.is_autoscaled for engines in deployment.engines)
    assert cluster_of(manifest).get("enableInTreeAutoscaling", False) == scaled


def test_the_image_copies_the_files_of_the_wheel() -> None:
    """Check names only, since the image has never been built."""
    lines = (ROOT / "Containerfile").read_text().replace("\\\n", " ").splitlines()
    copied = {word.rstrip("/") for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert not [name for name in copied if not (ROOT / name).exists()]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    sources = {name.partition("/")[0] for name in (*wheel["packages"], *wheel["force-include"])}
    needed = {*sources, "pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert needed <= copied
    (extra,) = [line.partition("=")[2] for line in lines if line.startswith("ARG EXTRA")]
    assert extra in project["project"]["optional-dependencies"]
    assert lines[-2] == "USER 1000"
