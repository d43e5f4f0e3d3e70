"""Two whole engines behind one ingress, until SIGTERM. Run as a script: port, admin key."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import yaml
from service import with_small_caches

from benchmarks.harness.cluster import ROOT, local_ray, unwind_on_sigterm, wait_ready

if __name__ == "__main__":
    unwind_on_sigterm()
    port, key = int(sys.argv[1]), sys.argv[2]
    deployment: Path = ROOT / "deployments" / "cpu_demo_whole.yaml"
    args = yaml.safe_load(deployment.read_text())["applications"][0]["args"]
    args |= {"admin_key": key, "ingress": {"port": port}, "name": "whole"}
    with_small_caches(args)
    engines = args["decode_config"]
    engines["deployment_config"]["num_replicas"] = 2
    engines["experimental_configs"] = {"NIXL_SIDE_CHANNEL_PORT_BASE": 24000}  # beside the suite's own engines
    with local_ray(http_port=port + 1):
        from ray import serve

        from eldr_serve.serving.app import build_app

        serve.run(build_app(args), name="whole", route_prefix="/")
        wait_ready(f"http://127.0.0.1:{port}", 200)
        print("ready", flush=True)
        signal.pause()
