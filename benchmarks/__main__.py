"""Run every benchmark that needs no engine of its own: `make bench`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NAMES = sorted(
    p.stem for p in Path(__file__).parent.glob("*.py") if p.stem not in ("__init__", "__main__", "common")
)

if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        if name not in NAMES:
            sys.exit(f"benchmarks: there is no {name!r}; there are {', '.join(NAMES)}")
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
