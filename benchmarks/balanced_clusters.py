"""Balanced against vanilla K-means (counterpart of the paper's Figure 15).

    python -m benchmarks.balanced_clusters --prompts DIR

What is measured and what is simulated: see benchmarks/harness/replay.py.
"""

from __future__ import annotations

from benchmarks.harness.replay import Arm
from benchmarks.harness.replay_command import against, replay_command
from tools.cli import run

ARMS = [
    Arm("round-robin", "round-robin"),
    Arm("balanced", "locality-band", {"band": 0.1}),
    Arm("vanilla", "locality-band", {"band": 0.1}, balanced=False),
]

balanced_clusters = replay_command("balanced_clusters", ARMS, against(["round-robin"]), default_workers="8")

if __name__ == "__main__":
    run(balanced_clusters)
