"""The command of `benchmarks.papers.reproduce` under its old name: `python -m offline.reproduce`."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("benchmarks.papers.reproduce", run_name="__main__")
