"""Where jobs, demo model and deployments are: beside this package in a checkout, inside of it in a wheel."""

from __future__ import annotations

from pathlib import Path

BUNDLE = Path(__file__).with_name("bundle")  # of a wheel, in the repository's structure
ROOT = BUNDLE if BUNDLE.is_dir() else Path(__file__).parents[1]


def model_folder(source: str) -> str | None:
    """The folder that a `model_source` names, from the working directory, else from ROOT; None: no folder."""
    found = (path.resolve() for path in (Path(source), ROOT / source) if path.is_dir())
    return next(map(str, found), None)
