"""Location of deployments and demo model: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

_DATA = Path(__file__).with_name("data")  # only a wheel has it, with the structure of the repository
ROOT = _DATA if _DATA.is_dir() else Path(__file__).parents[1]


def model_folder(source: str) -> str | None:
    """Return the folder `source` in the working directory, or else in ROOT; None if neither exists."""
    folders = (path.resolve() for path in (Path(source), ROOT / source) if path.is_dir())
    return next(map(str, folders), None)
