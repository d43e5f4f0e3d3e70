"""The measurements of a long run, stored so that it can be stopped and resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from eldr_serve.errors import UserInputError
from eldr_serve.files import write_atomically

_SETTINGS = "settings"  # key of the first line


class Journal:
    """A file of JSON lines: the settings of a run, then its measurements, one per line, by key.

    Args:
        settings: everything that the measurements depend on. Any path in them is kept as text.
        varying: settings that may differ between runs, since each measurement's key contains those on which
            it depends.

    Raises:
        UserInputError: the file has measurements of another run, or is not a journal.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], varying: Collection[str] = ()) -> None:
        self._path = path
        new_settings = json.loads(json.dumps(settings, default=str))
        stored_settings, self._entries = _read(path) if path.exists() else ({}, {})
        names = {**stored_settings, **new_settings}
        different = [
            name
            for name in names
            if name not in varying and stored_settings.get(name) != new_settings.get(name)
        ]
        if self._entries and different:
            raise UserInputError(
                f"{path} was recorded with different settings ({', '.join(different)}): use the same "
                "settings, or delete the file"
            )
        self._first_line = "" if self._entries else json.dumps([_SETTINGS, new_settings])

    @staticmethod
    def read(path: Path) -> dict[str, Any]:
        """Return the entries of a journal with any settings.

        Raises:
            UserInputError: the file does not exist or is not a journal.
        """
        return _read(path)[1]

    @property
    def entries(self) -> Mapping[str, Any]:
        """Return all entries by key, in the order of the first puts."""
        return self._entries

    def get(self, key: str) -> Any:
        """Return the key's last value, None if it has none."""
        return self._entries.get(key)

    def get_or_put(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the key's last value. If it has none, store and return the result of `make`."""
        if self.get(key) is None:
            self.put(key, make())
        return self.get(key)

    def put(self, key: str, value: Any) -> None:
        """Store the value. It is on disk when this returns."""
        self._entries[key] = value
        if self._first_line:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, self._first_line)
        with self._path.open("a") as file:
            # Each line begins with its line end, so that one that was cut off ends there.
            file.write("\n" + json.dumps([key, value]))
            file.flush()
            os.fsync(file.fileno())
        self._first_line = ""

    def remove(self) -> None:
        """Remove the file after the run has published its results."""
        self._path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return settings and entries. A line that was cut off is dropped, so it is measured again."""
    try:
        lines = [_parse(line) for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserInputError(f"{path} cannot be read: {error}") from error
    entries: dict[str, Any] = dict(entry for entry in lines if isinstance(entry, list) and len(entry) == 2)
    if next(iter(entries), None) != _SETTINGS:
        raise UserInputError(f"{path} is not a journal of this version: remove it or name another place")
    return entries.pop(_SETTINGS), entries


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
