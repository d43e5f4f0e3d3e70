"""Atomic writing of files, and a check that they can be written."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from eldr_serve.errors import UserInputError


def require_folders(*paths: Path | None) -> None:
    """Raise UserInputError unless the folders of these files exist; None is no file."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise UserInputError(f"the folder {path.parent} does not exist")


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write to a temporary file beside `path`, then rename it; an OSError leaves the old file unchanged."""
    write_all({path: content})


def write_all(contents: Mapping[Path, bytes | str]) -> None:
    """Write several files like `write_atomically`; none is renamed before all are on disk.

    A file that exists keeps its mode; a new one can be read by all users.
    """
    temporaries: dict[Path, str] = {}
    try:
        for path, content in contents.items():
            data = content.encode() if isinstance(content, str) else content
            descriptor, temporaries[path] = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporaries[path], stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644)
        for path, temporary in temporaries.items():
            os.replace(temporary, path)
    except BaseException:
        for temporary in temporaries.values():
            Path(temporary).unlink(missing_ok=True)
        raise
