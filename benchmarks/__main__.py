"""Run the benchmarks of some minutes in all: `make bench`; the others by name, or `all`.

Those that read prompts take them from the folder in ELDR_PROMPTS, or else the demo's. The tables and
plots of README.md and docs follow at the end.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NAMES = sorted(
    p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in ("__init__", "__main__", "common")
)
SERVING = {
    "capture_overhead",
    "handover",
    "live",
    "peers",
    "prefix_cache",
    "streams",
}  # minutes each, engines or Ray Serve
REPLAYS = {  # one engine for up to an hour each
    "balanced_clusters",
    "band_width",
    "decode_replay",
    "expert_weight",
    "pool_size",
    "rates",
    "signature_transforms",
    "simulator_validation",
}

if __name__ == "__main__":
    chosen = sys.argv[1:] or [name for name in NAMES if name not in SERVING | REPLAYS]
    for name in NAMES if chosen == ["all"] else chosen:
        if name not in NAMES:
            sys.exit(f"benchmarks: there is no {name!r}; there are {', '.join(NAMES)}")
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
    for made in ("tables", "plots"):
        subprocess.run([sys.executable, "-m", f"benchmarks.rig.{made}"], check=True)
