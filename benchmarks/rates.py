"""TPOT and first-token time against the request rate (counterpart of the paper's Figures 11 and 12).

    python -m benchmarks.rates --prompts DIR

The rates are those at which a worker's mean batch would be `--batch` requests. What is measured and
what is simulated: see benchmarks/harness/replay.py. There is no prefill in it: `first_token` is the time
from the hand-over to the end of the first decode step.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.replay import Arm
from benchmarks.harness.replay_command import Rows, against, replay_command
from loadgen.figures import BASELINES
from tools.cli import run
from tools.plots import lines

ARMS = [Arm(name, name) for name in (*BASELINES, "domain", "locality-band", "marginal-cost")]


def by_rate(rows: Rows, path: Path) -> None:
    """Median TPOT over the rate, a curve a policy."""
    lines(rows, "rate_per_s", ["tpot_p50_ms"], path, by="arm", xlabel="requests/s")


rates = replay_command("rates", ARMS, against(BASELINES, draw=by_rate), default_batch="4,8,16,24")

if __name__ == "__main__":
    run(rates)
