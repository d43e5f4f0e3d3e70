"""Lines of text files, plain or gzip."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eldr_serve.errors import UserInputError


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, line) of a file, which is gzip if its name ends in .gz.

    Raises:
        UserInputError: the file cannot be read. The message has the last line that could be read.
    """
    opener: Any = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                yield number, line
    except EOFError as error:
        raise UserInputError(f"{path} is cut short after line {number}: get the whole file again") from error
    except (OSError, UnicodeDecodeError, zlib.error) as error:
        after = f" after line {number}" if number else ""
        raise UserInputError(f"{path} cannot be read{after}: {error}") from error
