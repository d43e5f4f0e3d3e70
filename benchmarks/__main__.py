"""Run every benchmark that starts no serving application: `make bench`; the others by name, or `all`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NAMES = sorted(
    p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in ("__init__", "__main__", "common")
)
SERVING = {"capture_overhead", "handover", "peers", "streams"}  # minutes each, engines or Ray Serve

if __name__ == "__main__":
    chosen = sys.argv[1:] or [name for name in NAMES if name not in SERVING]
    for name in NAMES if chosen == ["all"] else chosen:
        if name not in NAMES:
            sys.exit(f"benchmarks: there is no {name!r}; there are {', '.join(NAMES)}")
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
