"""The tables of policies' parameters in a page, made from the models that declare them.

    python -m offline.describe --write docs/placement.md

A table stands between `<!-- parameters NAME [beyond OTHER] -->` and `<!-- end -->`; `beyond` leaves out what
OTHER has too, with the same default.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from eldr_serve.files import write_whole
from eldr_serve.routing.parameters import kind_of
from eldr_serve.routing.registry import policy_class

_BLOCK = re.compile(r"(<!-- parameters (\S+)(?: beyond (\S+))? -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def policy_table(name: str, beyond: str | None = None) -> str:
    """Markdown: a line for each parameter of the policy, without those that it shares with `beyond`."""
    fields = policy_class(name).Parameters.model_fields
    known = {} if beyond is None else policy_class(beyond).Parameters.model_fields
    lines = ["| parameter | value | default | meaning |", "| --- | --- | --- | --- |"]
    for parameter, field in fields.items():
        if parameter in known and known[parameter].default == field.default:
            continue
        default = f"{field.default:g}" if isinstance(field.default, float) else json.dumps(field.default)
        lines.append(f"| `{parameter}` | {kind_of(field)} | {default} | {field.description} |")
    return "\n".join(lines) + "\n"


def filled(page: str) -> str:
    """The page with every table made anew."""
    return _BLOCK.sub(lambda block: block[1] + policy_table(block[2], block[3]) + block[5], page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, required=True, help="Markdown page, filled in place.")
    page: Path = parser.parse_args().write
    write_whole(page, filled(page.read_text()))


if __name__ == "__main__":
    main()
