"""`python -m offline.reproduce`: the command of `studies.reproduce`, where it has always been."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("studies.reproduce", run_name="__main__")
