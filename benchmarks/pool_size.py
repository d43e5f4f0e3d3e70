"""Size of the decode pool (counterpart of the paper's Table 2).

    python -m benchmarks.pool_size --prompts DIR

What is measured and what is simulated: see benchmarks/harness/replay.py.
"""

from __future__ import annotations

from benchmarks.harness.replay import Arm
from benchmarks.harness.replay_command import against, replay_command
from tools.cli import run

ARMS = [
    Arm("round-robin", "round-robin"),
    Arm("locality-band", "locality-band"),
    Arm("marginal-cost", "marginal-cost"),
]

pool_size = replay_command("pool_size", ARMS, against(["round-robin"]), default_workers="4,8,16")

if __name__ == "__main__":
    run(pool_size)
