"""What a long run has measured so far, so that it can be stopped and go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer


class Journal:
    """A file of JSON lines: what run it is, then one measurement a line, each by its key.

    A run with the same header goes on where the last one stopped; any other starts the file anew.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        lines = path.read_text().splitlines() if path.exists() else []
        if not lines or _read(lines[0]) != header:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(header) + "\n")
            return
        # A line that was cut off by the end of its run is measured again.
        whole = [entry for entry in map(_read, lines[1:]) if isinstance(entry, list)]
        self._known = {key: value for key, value in whole}
        with path.open("a") as file:
            file.write("\n")
        typer.echo(
            f"going on from {path}: {len(self._known)} measurements are there; delete it to start anew"
        )

    def get(self, key: str) -> Any:
        """What was put under the key, None if nothing was."""
        return self._known.get(key)

    def put(self, key: str, value: Any) -> None:
        """Keep the value; it is on disk when this returns."""
        self._known[key] = value
        with self._path.open("a") as file:
            file.write(json.dumps([key, value]) + "\n")

    def remove(self) -> None:
        """The run has ended and said what it found."""
        self._path.unlink(missing_ok=True)


def _read(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
