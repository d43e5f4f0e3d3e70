"""How much an active expert should count in marginal-cost, on a real engine.

    python -m benchmarks.expert_weight --prompts DIR

What is measured and what is simulated: see benchmarks/harness/replay.py.
"""

from __future__ import annotations

from benchmarks.harness.replay import Arm
from benchmarks.harness.replay_command import against, replay_command
from tools.cli import run

ARMS = [
    Arm("shortest-queue", "shortest-queue"),
    Arm("locality-band", "locality-band"),
    *(Arm(f"marginal-cost, weight {w}", "marginal-cost", {"expert_weight": w}) for w in (1, 2, 4)),
]

expert_weight = replay_command(
    "expert_weight", ARMS, against(["shortest-queue"]), default_groups="all,language,task"
)

if __name__ == "__main__":
    run(expert_weight)
