"""Run the application of deployments/cpu_demo_eldr.yaml until stdin closes. Arguments: port, admin key.

Tables are refitted within seconds, and many concurrent requests start a third decode engine. Each line on
stdin kills the actor of the signature pool, which Ray then restarts.
"""

from __future__ import annotations

import os
import sys

import yaml
from service import ROOT, with_small_caches

from loadgen import application

# With more than 20 requests in flight it scales up to three engines, and does not scale down.
_SCALING = {
    "min_replicas": 2, "initial_replicas": 2, "max_replicas": 3, "target_ongoing_requests": 10,
    "upscale_delay_s": 1, "downscale_delay_s": 600, "look_back_period_s": 2, "metrics_interval_s": 0.5,
}  # fmt: skip

if __name__ == "__main__":
    port, key = int(sys.argv[1]), sys.argv[2]
    os.environ |= {"RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1"}
    deployment = ROOT / "deployments" / "cpu_demo_eldr.yaml"
    arguments = yaml.safe_load(deployment.read_text())["applications"][0]["args"]
    for role, base in (("prefill_config", 27000), ("decode_config", 28000)):
        arguments[role]["experimental_configs"] = {"NIXL_SIDE_CHANNEL_PORT_BASE": base}  # not the suite's
    with_small_caches(arguments)
    engines = arguments["decode_config"]["deployment_config"]
    del engines["num_replicas"]
    engines["autoscaling_config"] = _SCALING
    arguments["signatures"] |= {"window": 256, "rate": 50, "every_s": 3}
    try:
        application.start(arguments, port, key, dashboard=False, tell=lambda line: print(line, flush=True))
        print("ready", flush=True)
        import ray  # only after `start` has set Ray's environment

        from eldr_serve.serving.signatures.pool import find_pool

        for _ in sys.stdin:
            ray.kill(find_pool(application.NAME), no_restart=False)
    finally:
        application.stop()
