"""What a signature is made of, end to end (counterpart of the paper's Figure 14).

    python -m benchmarks.signature_transforms --prompts DIR

What is measured and what is simulated: see benchmarks/harness/replay.py.
"""

from __future__ import annotations

from benchmarks.harness.replay import Arm
from benchmarks.harness.replay_command import against, replay_command
from tools.cli import run

ARMS = [
    Arm("round-robin", "round-robin"),
    *(
        Arm(t, "locality-band", {"band": 0.1}, transform=t)
        for t in ("count-idf", "count", "sqrt-count", "binary", "gate-prob")
    ),
]

signature_transforms = replay_command(
    "signature_transforms", ARMS, against(["round-robin"]), default_workers="8"
)

if __name__ == "__main__":
    run(signature_transforms)
