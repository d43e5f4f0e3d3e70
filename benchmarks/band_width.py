"""Width of the locality band (counterpart of the paper's Figure 16).

    python -m benchmarks.band_width --prompts DIR

What is measured and what is simulated: see benchmarks/harness/replay.py.
"""

from __future__ import annotations

from benchmarks.harness.replay import Arm
from benchmarks.harness.replay_command import against, replay_command
from tools.cli import run

ARMS = [
    Arm("round-robin", "round-robin"),
    *(Arm(f"band {tau}", "locality-band", {"band": tau}) for tau in (0.0, 0.1, 0.2, 0.3)),
]

band_width = replay_command("band_width", ARMS, against(["round-robin"]), default_workers="8")

if __name__ == "__main__":
    run(band_width)
