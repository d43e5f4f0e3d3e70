"""The demo's application with two ingresses, until its input ends. Run as a script: port, admin key.

Each line of its input is JSON of the application's `args`: it is deployed anew with these in place of what it
had.
"""

from __future__ import annotations

import json
import os
import sys

import yaml
from service import ROOT, with_small_caches

from loadgen import application

# Above three requests in flight there are two engines soon.
_SCALING = {
    "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 3,
    "upscale_delay_s": 1, "downscale_delay_s": 3, "look_back_period_s": 2, "metrics_interval_s": 0.5,
}  # fmt: skip

if __name__ == "__main__":
    port, key = int(sys.argv[1]), sys.argv[2]
    os.environ |= {"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1"}
    deployment = ROOT / "deployments" / "cpu_demo.yaml"
    arguments = yaml.safe_load(deployment.read_text())["applications"][0]["args"]
    for role, base in (("prefill_config", 25000), ("decode_config", 26000)):
        arguments[role]["experimental_configs"] = {"NIXL_SIDE_CHANNEL_PORT_BASE": base}  # beside the suite's
    with_small_caches(arguments)
    engines = arguments["decode_config"]["deployment_config"]
    del engines["num_replicas"]
    engines["autoscaling_config"] = _SCALING
    arguments["ingress_deployment_config"] |= {"num_replicas": 2}
    try:
        application.start(arguments, port, key, dashboard=False, tell=lambda line: print(line, flush=True))
        print("ready", flush=True)
        for line in sys.stdin:
            application.deploy(arguments | json.loads(line))
            print("deployed", flush=True)
    finally:
        application.stop()
