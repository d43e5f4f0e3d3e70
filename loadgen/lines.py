"""Lines of text files, plain or gzip."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eldr_serve.command_errors import BadInput


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, line) of a file, which is gzip if its name ends in .gz.

    Raises:
        BadInput: the file cannot be read.
    """
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            yield from enumerate(lines, 1)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
