"""The RayService of each shipped deployment: valid for KubeRay, and its pods hold what they should."""

from __future__ import annotations

import copy
import gzip
import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from in_process import sentence
from shipped import ROOT
from typer.testing import CliRunner

from eldr_serve.cli import app
from eldr_serve.kubernetes.groups import SIZES
from eldr_serve.kubernetes.manifest import Options, rayservice, text
from eldr_serve.preflight.deployment import Deployment, read_deployment
from eldr_serve.preflight.machine import ACCELERATOR, Pool, read_cluster
from eldr_serve.preflight.placement import place, total
from eldr_serve.ray_settings import QUIET
from tools.crd import faults

SHIPPED = sorted((ROOT / "deployments").glob("*.yaml"))
GPU = [path for path in SHIPPED if not path.stem.startswith("cpu_")]
DEFINITIONS = sorted(Path(__file__).parent.glob("rayservice_crd_*.json.gz"))  # see README.md beside them
PLAIN = Options("eldr", "image:1", "eldr", "eldr-models", {"gpu": "H200"}, SIZES["gpu"])
Edit = Callable[[dict[str, Any]], None]


def defined(path: Path) -> dict[str, Any]:
    """A CustomResourceDefinition."""
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


@pytest.fixture(scope="module")
def deployments() -> dict[str, Deployment]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return {path.stem: read_deployment(path) for path in SHIPPED}


@pytest.fixture(params=[path.stem for path in SHIPPED])
def case(request: Any, deployments: dict[str, Deployment]) -> tuple[Deployment, dict[str, Any]]:
    """A shipped deployment and its manifest, read again from its text."""
    deployment = deployments[request.param]
    sizes = SIZES[deployment.engines[0].spec.device]
    made = rayservice(deployment, Options(**(vars(PLAIN) | {"sizes": sizes})))
    return deployment, yaml.safe_load(text(made))


def cluster_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"]["rayClusterConfig"]


def pods(manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(name of its group, pod, container), the head first."""
    cluster = cluster_of(manifest)
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        yield group.get("groupName", "head"), pod, container


def mib(quantity: str) -> int:
    assert quantity.endswith("Mi")
    return int(quantity.removesuffix("Mi"))


def pools(manifest: dict[str, Any], count: str) -> list[Pool]:
    """What Ray finds in the pods of each group."""
    found = []
    for group in cluster_of(manifest)["workerGroupSpecs"]:
        asked = group["template"]["spec"]["containers"][0]["resources"]
        resources = {"CPU": int(asked["requests"]["cpu"].removesuffix("m")) / 1000}
        resources |= {"GPU": float(asked["limits"].get("nvidia.com/gpu", 0))}
        resources |= {name: float(amount) for name, amount in group.get("resources", {}).items()}
        found.append(Pool(group["groupName"], group[count], resources))
    return found


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda path: path.name)
def test_it_is_valid_by_kuberays_definition(
    definition: Path, case: tuple[Deployment, dict[str, Any]]
) -> None:
    known = defined(definition)
    assert list(faults(known, case[1])) == []
    wrong = copy.deepcopy(case[1])
    wrong["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["container"] = []
    wrong["spec"]["rayClusterDeletionDelaySeconds"] = "600"
    assert len(list(faults(known, wrong))) == 2


def test_all_replicas_fit_and_each_engine_on_a_gpu_has_its_own_pod(
    case: tuple[Deployment, dict[str, Any]],
) -> None:
    deployment, manifest = case
    wanted = [*(engines.replicas for engines in deployment.engines), deployment.ingress]
    placed = place(pools(manifest, "maxReplicas"), wanted)
    assert not placed.missing
    assert not placed.spread
    assert all(node.held for node in placed.nodes)
    if deployment.engines[0].spec.device == "gpu":
        assert all(len(node.held) == 1 for node in placed.nodes)
        counts = {group["groupName"]: group for group in cluster_of(manifest)["workerGroupSpecs"]}
        for engines in deployment.engines:
            group = counts[engines.role]
            assert [group[f"{key}eplicas"] for key in ("minR", "r", "maxR")] == [
                engines.least, engines.initial, engines.most,
            ]  # fmt: skip
            asked = group["template"]["spec"]["containers"][0]["resources"]["limits"]
            assert int(asked["nvidia.com/gpu"]) == engines.spec.ranks == total(engines.bundles)["GPU"]


def test_no_replica_comes_to_the_head(case: tuple[Deployment, dict[str, Any]]) -> None:
    deployment, manifest = case
    head = cluster_of(manifest)["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert "resources" not in head
    for replicas in (*(engines.replicas for engines in deployment.engines), deployment.ingress):
        assert total(replicas.bundles)["CPU"] > 0


def test_the_application_is_the_files_but_for_where_it_listens(
    case: tuple[Deployment, dict[str, Any]],
) -> None:
    deployment, manifest = case
    made = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    (application,) = made["applications"]
    assert application["args"]["ingress"]["host"] == "0.0.0.0"
    expected = copy.deepcopy(deployment.document)
    expected["proxy_location"] = "HeadOnly"
    expected["applications"][0]["args"]["ingress"]["host"] = "0.0.0.0"
    assert made == expected


def test_the_service_leads_to_the_ingress_once_it_says_that_it_is_ready(
    case: tuple[Deployment, dict[str, Any]],
) -> None:
    deployment, manifest = case
    port = deployment.args.ingress.port
    listed = {name: container.get("ports", []) for name, _, container in pods(manifest)}
    assert {"name": "serve", "containerPort": port} in listed["head"]  # by which KubeRay makes the Service
    numbers = [entry["containerPort"] for entry in listed["head"]]
    assert len(set(numbers)) == len(numbers)
    answering = [
        (name, container) for name, pod, container in pods(manifest) if not pod.get("readinessGates")
    ][1:]
    device = deployment.engines[0].spec.device
    assert [name for name, _ in answering] == ["ingress" if device == "gpu" else "all"]
    for _, container in answering:
        assert container["readinessProbe"]["httpGet"] == {"path": "/eldr/ready", "port": port}


def test_nothing_waits_for_an_application_that_waits_for_it(case: tuple[Deployment, dict[str, Any]]) -> None:
    """KubeRay submits the application once the head is ready, and probes it by itself."""
    _, manifest = case
    assert manifest["spec"]["excludeHeadPodFromServeSvc"]
    for name, _, container in pods(manifest):
        assert not {"livenessProbe", "startupProbe"} & container.keys()
        if name == "head":
            assert "readinessProbe" not in container
        elif container["readinessProbe"]["httpGet"]["path"] != "/eldr/ready":
            assert container["readinessProbe"]["httpGet"] == {"path": "/api/healthz", "port": 52365}


def test_keys_are_read_from_a_secret(case: tuple[Deployment, dict[str, Any]]) -> None:
    for _, _, container in pods(case[1]):
        environment = {entry["name"]: entry for entry in container["env"]}
        admin = environment["ELDR_ADMIN_KEY"]["valueFrom"]["secretKeyRef"]
        assert admin == {"name": "eldr", "key": "admin-key"}
        secrets = [name for name in environment if name.endswith(("KEY", "TOKEN"))]
        assert not [name for name in secrets if "value" in environment[name]]
    assert cluster_of(case[1])["authOptions"] == {"mode": "token"}
    assert "admin_key" not in case[1]["spec"]["serveConfigV2"]


def test_rays_settings_memory_and_models_are_in_all_pods(case: tuple[Deployment, dict[str, Any]]) -> None:
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


@pytest.mark.parametrize("path", GPU, ids=lambda path: path.stem)
def test_pods_name_resources_that_a_cluster_for_ray_up_has_too(
    path: Path, deployments: dict[str, Deployment]
) -> None:
    offered = {name for pool in read_cluster(ROOT / "ray_cluster.yaml") for name in pool.resources}
    manifest = rayservice(deployments[path.stem], PLAIN)
    named = {name for pool in pools(manifest, "maxReplicas") for name in pool.resources}
    assert named <= offered
    kinds = {name for name in named if name.startswith(ACCELERATOR)}
    assert kinds == ({"accelerator_type:H200"} if path.stem == "qwen3_235b_2p8d" else set())
    for name, pod, container in pods(manifest):
        on_gpu = "nvidia.com/gpu" in container["resources"]["limits"]
        assert pod.get("nodeSelector") == ({"gpu": "H200"} if on_gpu else None), name
        assert bool(pod.get("tolerations")) == on_gpu


def test_an_old_clusters_streams_end_before_it_is_deleted(deployments: dict[str, Deployment]) -> None:
    spec = rayservice(deployments["qwen3_30b_8p16d"], PLAIN)["spec"]
    assert spec["rayClusterDeletionDelaySeconds"] == 600
    cluster = spec["rayClusterConfig"]
    assert cluster["enableInTreeAutoscaling"]
    assert "enableInTreeAutoscaling" not in cluster_of(rayservice(deployments["cpu_demo"], PLAIN))


def test_a_file_of_inference_keys_is_mounted_where_the_ingress_reads_it(tmp_path: Path) -> None:
    manifest = rayservice(
        edited(tmp_path, lambda args: args["ingress"].update(keys_file="/etc/eldr/keys.json")), PLAIN
    )
    for _, pod, container in pods(manifest):
        (volume,) = [volume for volume in pod["volumes"] if "secret" in volume]
        assert volume["secret"] == {
            "secretName": "eldr", "items": [{"key": "keys.json", "path": "keys.json"}],
        }  # fmt: skip
        mount = {"name": volume["name"], "mountPath": "/etc/eldr", "readOnly": True}
        assert mount in container["volumeMounts"]
    assert not list(faults(defined(DEFINITIONS[-1]), manifest))


def edited(folder: Path, edit: Edit, shipped: str = "qwen3_30b_8p16d") -> Deployment:
    """A shipped deployment with other args."""
    document = json.loads(json.dumps(yaml.safe_load((ROOT / f"deployments/{shipped}.yaml").read_text())))
    edit(document["applications"][0]["args"])
    (folder / "models").symlink_to(ROOT / "deployments/models")
    (folder / "edited.yaml").write_text(yaml.safe_dump(document))
    return read_deployment(folder / "edited.yaml")


def without_own_resource(args: dict[str, Any]) -> None:
    args["prefill_config"]["placement_group_config"] = {"bundle_per_worker": {"GPU": 1}}


def two_homes(args: dict[str, Any]) -> None:
    args["decode_config"]["runtime_env"] = {"env_vars": {"HF_HOME": "/mnt/others"}}


@pytest.mark.parametrize(
    ("edit", "options", "said"),
    [
        (lambda args: args.update(admin_key="x"), {}, "admin_key is in the file"),
        (lambda args: args["ingress"].pop("port"), {}, "ingress.port is not set"),
        (without_own_resource, {}, "prefill replicas name no resource of their own"),
        (
            lambda args: args["ingress_deployment_config"].pop("ray_actor_options"),
            {},
            "ingress replicas name no",
        ),
        (lambda args: args["ingress"].update(keys_file="keys.json"), {}, "keys.json has no folder"),
        (two_homes, {}, "HF_HOME to /mnt/models and /mnt/others"),
        (
            lambda args: args["decode_config"].update(accelerator_type="H200"),
            {"node_selector": {}},
            "accelerator_type H200",
        ),
        (lambda args: None, {"name": "8p16d"}, "'8p16d' cannot name a RayService"),
        (lambda args: None, {"name": "a" * 48}, "at most 47"),
    ],
)
def test_what_kubernetes_would_not_serve_is_one_sentence(
    edit: Edit, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        rayservice(edited(tmp_path, edit), Options(**(vars(PLAIN) | options)))
    assert "\n" not in str(refused.value)


def test_the_command_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = ["kubernetes", "deployments/cpu_demo.yaml", "--image", "i:2", "--shm-gib", "3"]
    done = CliRunner().invoke(app, words, prog_name="eldr")
    assert done.exit_code == 0, done.stderr
    found = yaml.safe_load(done.stdout)
    assert found["metadata"]["name"] == "cpu-demo"
    for _, pod, container in pods(found):
        assert container["image"] == "i:2"
        assert pod["volumes"][0]["emptyDir"]["sizeLimit"] == "3072Mi"
    out = tmp_path / "cpu_demo.yaml"
    assert CliRunner().invoke(app, [*words, "--out", str(out)], prog_name="eldr").stdout == ""
    assert out.read_text() == done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["deployments/cpu_demo.yaml", "--node-selector", "gpu"], "KEY=VALUE"),
        (["Makefile"], "Makefile"),
        (["nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_bad_input_of_the_command_is_one_sentence(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert said in sentence(CliRunner().invoke(app, ["kubernetes", *words], prog_name="eldr"))


def test_the_image_is_made_of_what_the_wheel_is_made_of() -> None:
    """It was never built, so names are all that can be checked."""
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
