"""A process that runs an ingress replica imports no engine."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest.mock import Mock, patch

import yaml
from ray import cloudpickle
from ray.serve._private.build_app import build_app as finalized
from shipped import ROOT

from eldr_serve.app import build_app
from eldr_serve.engine.vllm.backend import VllmBackend

_REPLICA = """
import asyncio, sys
from ray import cloudpickle

async def main():
    kind, arguments = map(cloudpickle.loads, cloudpickle.load(sys.stdin.buffer))
    import eldr_serve.replicas.request_router  # its handles choose replicas there
    made = kind.__new__(kind)
    kind.__mro__[1].__init__(made, **arguments)
    made._client.start()
    await made.stop()

asyncio.run(main())
engines = ("vllm", "ray.llm", "torch")
found = sorted(name for name in sys.modules if any(f"{name}.".startswith(f"{e}.") for e in engines))
print("imported:", *found[:5])
import os
sys.stdout.flush()
os._exit(0)  # skip the destructor, which Serve awaits
"""


def ingress_replica() -> bytes:
    """Return what Serve's controller sends to a node that will run an ingress replica."""
    document = yaml.safe_load((ROOT / "deployments/cpu_demo.yaml").read_text())
    resources = Mock(return_value={})  # without a Ray cluster
    with patch.object(VllmBackend, "deployment_options", resources):
        built = finalized(build_app(document["applications"][0]["args"]), name="app", default_runtime_env={})
    (ingress,) = (one for one in built.deployments if one.name == built.ingress_deployment_name)
    config = ingress._replica_config
    parts = (config.serialized_deployment_def, config.serialized_init_kwargs)
    return cloudpickle.dumps(parts)


def test_an_ingress_replica_imports_no_engine() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _REPLICA], input=ingress_replica(), capture_output=True, timeout=120, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().splitlines()[-1].strip() == "imported:"
