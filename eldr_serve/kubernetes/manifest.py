"""Write a deployment as a RayService, with the fields of KubeRay 1.7.0.

Readiness: KubeRay submits the application once the head is ready, so the head keeps KubeRay's own probe,
which does not depend on the application. KubeRay's Service routes to every ready worker pod. A pod with an
ingress is ready when the ingress is; a pod without one is never ready, although its containers are, because
of a readiness gate that nothing opens.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import yaml

from eldr_serve.kubernetes.groups import Group, Sizes, accelerators, groups
from eldr_serve.preflight.deployment import Deployment
from eldr_serve.preflight.document import APPLICATION
from eldr_serve.ray_settings import QUIET

# Copied from KubeRay 1.7.0.
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?")
_SERVE_PORT = "serve"  # name of the port that KubeRay's Service routes to
_AGENT_PORT = 52365
_HEAD_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080}

_GATE = "eldr-serve/answers-http"
_OBJECT_STORE_BYTES = 512 * 2**20  # Ray would take nearly all of /dev/shm, which vLLM and UCX share
_IDLE_S = 900  # as in ray_cluster.yaml
_ADMIN_KEY, _HF_TOKEN = "admin-key", "hf-token"  # in the Secret, beside the file of inference keys


@dataclass(frozen=True)
class Options:
    """Settings that the deployment's file does not contain.

    Attributes:
        name: name of the RayService.
        image: container image of all pods.
        secret: name of the Secret with the keys.
        models_claim: PersistentVolumeClaim with the models, for engines that set HF_HOME.
        node_selector: labels of nodes for pods with GPUs.
        sizes: cores and memory of replicas and the head.
    """

    name: str
    image: str
    secret: str
    models_claim: str
    node_selector: Mapping[str, str]
    sizes: Sizes


def rayservice(deployment: Deployment, options: Options) -> dict[str, Any]:
    """Return the manifest as JSON types.

    Raises:
        ValueError: KubeRay would refuse the manifest, or would not serve the deployment as configured.
    """
    if not _NAME.fullmatch(options.name):
        raise ValueError(
            f"{options.name!r} cannot name a RayService: at most 47 small letters, digits and dashes, "
            "a letter first; give another --name"
        )
    if deployment.args.admin_key is not None:
        raise ValueError(
            f"admin_key is in the file: take it out, and put it into the Secret {options.secret} "
            f"under {_ADMIN_KEY}"
        )
    port = deployment.args.ingress.port
    if port is None:
        raise ValueError(
            "ingress.port is not set, and Serve's own proxy does not know when pairs of engines are warm: "
            "set it, for example to 8001"
        )
    found = groups(deployment, options.sizes)
    kinds = list(accelerators(found))
    if kinds and not options.node_selector:
        raise ValueError(
            f"engines need accelerator_type {' and '.join(kinds)}: give the label of such nodes with "
            "--node-selector KEY=VALUE"
        )
    pods = _Pods(deployment, options, port)
    replicas = [deployment.args.ingress_deployment_config]
    replicas += [engines.spec.deployment_config for engines in deployment.engines]
    drain_s = max(int(given["graceful_shutdown_timeout_s"]) for given in replicas)
    scaled = any(group.least < group.most for group in found)
    cluster = {
        "rayVersion": version("ray"),
        "authOptions": {"mode": "token"},
        **({"enableInTreeAutoscaling": True} if scaled else {}),
        **({"autoscalerOptions": {"idleTimeoutSeconds": _IDLE_S}} if scaled else {}),
        "headGroupSpec": pods.head(),
        "workerGroupSpecs": [pods.workers(group) for group in found],
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": options.name},
        "spec": {
            "excludeHeadPodFromServeSvc": True,
            "rayClusterDeletionDelaySeconds": drain_s,  # lets an old cluster's streams end
            "serveConfigV2": text(_serve_config(deployment)),
            "rayClusterConfig": cluster,
        },
    }


def text(document: Any) -> str:
    """Return a document as YAML, with literal blocks for multi-line strings and without aliases."""
    return str(yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=110))


def _serve_config(deployment: Deployment) -> dict[str, Any]:
    """Return the deployment's file with an ingress that a Service can reach and a proxy only on the head."""
    document = copy.deepcopy(deployment.document)
    document["proxy_location"] = "HeadOnly"
    for application in document["applications"]:
        if application["import_path"] == APPLICATION:
            application["args"]["ingress"] = {**application["args"]["ingress"], "host": "0.0.0.0"}
    return document


class _Pods:
    """Builds the pods: equal image, environment and volumes; different sizes and readiness probes."""

    def __init__(self, deployment: Deployment, options: Options, port: int) -> None:
        self._options, self._port = options, port
        self._keys_file = deployment.args.ingress.keys_file
        if self._keys_file is not None and len(self._keys_file.parts) < 3:
            raise ValueError(
                f"ingress.keys_file {self._keys_file} has no folder of its own, where the Secret could be "
                "mounted: use a path such as /etc/eldr/keys.json"
            )
        homes = {e.spec.environment["HF_HOME"] for e in deployment.engines if "HF_HOME" in e.spec.environment}
        if len(homes) > 1:
            raise ValueError(f"engines set HF_HOME to {' and '.join(sorted(homes))}: use one folder for all")
        self._hf_home = next(iter(homes), None)

    def head(self) -> dict[str, Any]:
        """Return the head group, which runs only Ray's own processes."""
        sizes = self._options.sizes
        container = self._container("ray-head", sizes.head_cpus, sizes.head_gib + sizes.shm_gib, 0)
        # KubeRay makes the Service from the head's ports, so the serve port must be named here.
        ports = _HEAD_PORTS | {_SERVE_PORT: self._port}
        container["ports"] = [{"name": name, "containerPort": port} for name, port in ports.items()]
        return {
            "rayStartParams": {"num-cpus": "0", "object-store-memory": str(_OBJECT_STORE_BYTES)},
            "template": {"spec": {"containers": [container], "volumes": self._volumes()}},
        }

    def workers(self, group: Group) -> dict[str, Any]:
        """Return a worker group."""
        container = self._container("ray-worker", group.cpus, group.memory_gib, group.gpus)
        pod: dict[str, Any] = {"containers": [container], "volumes": self._volumes()}
        if group.answers:
            container["ports"] = [{"name": _SERVE_PORT, "containerPort": self._port}]
            container["readinessProbe"] = _probe("/eldr/ready", self._port)
        else:
            container["readinessProbe"] = _probe("/api/healthz", _AGENT_PORT)
            pod["readinessGates"] = [{"conditionType": _GATE}]
        if group.gpus:
            pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
            if self._options.node_selector:
                pod["nodeSelector"] = dict(self._options.node_selector)
        resources = {name: str(amount) for name, amount in group.resources.items()}
        return {
            "groupName": group.name,
            "replicas": group.initial,
            "minReplicas": group.least,
            "maxReplicas": group.most,
            "rayStartParams": {"object-store-memory": str(_OBJECT_STORE_BYTES)},
            **({"resources": resources} if resources else {}),
            "template": {"spec": pod},
        }

    def _container(self, name: str, cpus: float, memory_gib: float, gpus: int) -> dict[str, Any]:
        # No limit on cores: pods may use idle ones.
        fixed = {"memory": f"{round(1024 * memory_gib)}Mi", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
        return {
            "name": name,
            "image": self._options.image,
            "env": self._environment(),
            "resources": {"requests": {"cpu": f"{round(1000 * cpus)}m", **fixed}, "limits": fixed},
            "volumeMounts": [
                {"name": "shm", "mountPath": "/dev/shm"},
                *([{"name": "models", "mountPath": self._hf_home}] if self._hf_home else []),
                *(
                    [{"name": "keys", "mountPath": str(self._keys_file.parent), "readOnly": True}]
                    if self._keys_file
                    else []
                ),
            ],
        }

    def _environment(self) -> list[dict[str, Any]]:
        plain = QUIET | ({"HF_HOME": self._hf_home} if self._hf_home else {})
        return [
            *({"name": name, "value": value} for name, value in plain.items()),
            self._from_secret("ELDR_ADMIN_KEY", _ADMIN_KEY),
            *([self._from_secret("HF_TOKEN", _HF_TOKEN, optional=True)] if self._hf_home else []),
        ]

    def _from_secret(self, name: str, key: str, *, optional: bool = False) -> dict[str, Any]:
        reference = {"name": self._options.secret, "key": key, **({"optional": True} if optional else {})}
        return {"name": name, "valueFrom": {"secretKeyRef": reference}}

    def _volumes(self) -> list[dict[str, Any]]:
        shm = {"medium": "Memory", "sizeLimit": f"{round(1024 * self._options.sizes.shm_gib)}Mi"}
        volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": shm}]
        if self._hf_home:
            claim = {"claimName": self._options.models_claim}
            volumes.append({"name": "models", "persistentVolumeClaim": claim})
        if self._keys_file:
            item = {"key": self._keys_file.name, "path": self._keys_file.name}
            volumes.append({"name": "keys", "secret": {"secretName": self._options.secret, "items": [item]}})
        return volumes


def _probe(path: str, port: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": 5,
        "timeoutSeconds": 5,
        "failureThreshold": 2,
    }


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _string)
