"""The application of deployments/cpu_demo_eldr.yaml, until its input ends. Run as a script: port, admin key.

Its tables are refitted within seconds. Each line of its input is a number of decode replicas to deploy, or
`kill` for the actor of the signature pool, which Ray starts again.
"""

from __future__ import annotations

import copy
import sys

import yaml
from service import ROOT

from loadgen import application

if __name__ == "__main__":
    port, key = int(sys.argv[1]), sys.argv[2]
    deployment = ROOT / "deployments" / "cpu_demo_eldr.yaml"
    arguments = yaml.safe_load(deployment.read_text())["applications"][0]["args"]
    for role, base in (("prefill_config", 27000), ("decode_config", 28000)):
        arguments[role]["experimental_configs"] = {"NIXL_SIDE_CHANNEL_PORT_BASE": base}  # beside the suite's
    arguments["signatures"] |= {"window": 256, "rate": 50, "every_s": 3}
    try:
        application.start(arguments, port, key, dashboard=False, tell=lambda line: print(line, flush=True))
        print("ready", flush=True)
        import ray  # after `start` has set its environment

        from eldr_serve.serving.signatures.pool import find_pool

        for line in sys.stdin:
            if line.strip() == "kill":
                ray.kill(find_pool(application.NAME), no_restart=False)
                continue
            changed = copy.deepcopy(arguments)
            changed["decode_config"]["deployment_config"]["num_replicas"] = int(line)
            application.deploy(changed)
            print("deployed", flush=True)
    finally:
        application.stop()
