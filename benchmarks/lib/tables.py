"""Generate the tables of README.md and docs, from benchmarks/results and the policies' parameters.

    python -m benchmarks.lib.tables

A table stands between `<!-- table NAME column, column ... -->` and `<!-- end -->`, and is filled from
NAME.json; if the result of a GPU (gpu_*) is missing, the table stays empty. A column is a key of the rows, or
`KEY [LOW HIGH]`, which prints a value and its interval; `[_low _high]` appends to KEY.

Between `<!-- claims NAME -->` and `<!-- end -->` is that list of claims.yaml, and between
`<!-- parameters NAME [beyond OTHER] -->` and `<!-- end -->` the parameters of a policy;
`beyond` leaves out those that OTHER has with the same default.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import yaml

from eldr_serve.files import write_whole
from eldr_serve.scheduling.parameters import kind_of
from eldr_serve.scheduling.policies.registry import policy_class
from loadgen.results import RESULTS, read_rows

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs/placement.md", *sorted((ROOT / "docs/tables").glob("*.md")))
CLAIMS: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "benchmarks/claims.yaml").read_text())
_BLOCK = re.compile(r"(<!-- (table|claims|parameters) (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
Rows = list[dict[str, Any]]
_UNITS = {"pct": "%", "ms": "ms", "us": "us", "s": "s", "mib": "MiB"}
_NAMES = {
    name.lower(): name for name in ("TPOT", "TTFT", "CPU", "GPUs", "KV", "EP", "TP", "EPLB", "JSQ", "vLLM")
}


def filled(page: str) -> str:
    """Return the page with every table regenerated."""

    def block(match: re.Match[str]) -> str:
        opening, kind, arguments, _, closing = match.groups()
        return opening + _KINDS[kind](arguments) + closing

    return _BLOCK.sub(block, page)


def _table(arguments: str) -> str:
    name, _, columns = arguments.partition(" ")
    if not there(name):
        return ""
    rows = read_rows(name)
    keys = [_keys(column.strip()) for column in columns.split(",")]
    if unknown := set(itertools.chain.from_iterable(keys)).difference(*rows):
        raise KeyError(f"no row of {name} has {', '.join(sorted(unknown))}")
    heads = [heading(key) for key, *_ in keys]
    return _markdown(heads, [[_value(row, *column) for column in keys] for row in rows])


def _keys(column: str) -> list[str]:
    """Return the key of a column, and those of its interval if it has one."""
    key, _, interval = column.partition(" [")
    bounds = interval.rstrip("]").split()
    return [key, *(key + bound if bound.startswith("_") else bound for bound in bounds)]


def _value(row: dict[str, Any], key: str, *interval: str) -> str:
    bounds = [row.get(bound) for bound in interval]
    if not interval or None in bounds:
        return _number(row.get(key))
    return f"{_number(row.get(key))} [{', '.join(map(_number, bounds))}]"


def heading(key: str) -> str:
    """Return the words of a key, with its unit at the end."""
    words = re.sub(r"_(ms|us)(?=_(pooled_)?change)", "", key).replace("_a_", "_per_")
    *name, last = words.split("_")
    has_unit = last in _UNITS and name and name[-1] != "per" and not name[-1].isdigit()
    text = " ".join(_NAMES.get(word, word) for word in (name if has_unit else [*name, last]))
    return f"{text}, {_UNITS[last]}" if has_unit else text


def there(name: str) -> bool:
    """Return whether to fill a table: only a GPU's result may be missing."""
    return not name.startswith("gpu_") or (RESULTS / f"{name}.json").exists()


def _claims(name: str) -> str:
    """Return one line per claim; a cell with fields repeats for each row of the claim's result."""
    lines = []
    for claim in CLAIMS[name]["lines"]:
        rows = read_rows(claim["result"])
        lines.append([_cell(cell, [row for row in rows if selected(row, claim)]) for cell in claim["cells"]])
    return _markdown(CLAIMS[name]["columns"], lines)


def _cell(cell: str | dict[str, Any], rows: Rows) -> str:
    if isinstance(cell, dict):
        (row,) = (row for row in rows if selected(row, cell))
        return str(cell["text"].format(**row))
    return "; ".join(cell.format(**row) for row in rows) if "{" in cell else cell


def selected(row: dict[str, Any], claim: dict[str, Any]) -> bool:
    """Return whether the row has the values that the claim names, or one of each list."""
    return all(
        row[key] in (value if isinstance(value, list) else [value]) for key, value in claim["where"].items()
    )


def _markdown(heads: list[str], cells: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in [heads, ["---"] * len(heads), *cells])


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _parameters(arguments: str) -> str:
    """Return one line per parameter of the policy, without those that it shares with another policy."""
    name, _, beyond = arguments.partition(" beyond ")
    known = policy_class(beyond).Parameters.model_fields if beyond else {}
    lines = []
    for parameter, field in policy_class(name).Parameters.model_fields.items():
        if parameter in known and known[parameter].default == field.default:
            continue
        default = f"{field.default:g}" if isinstance(field.default, float) else json.dumps(field.default)
        lines.append([f"`{parameter}`", kind_of(field), default, str(field.description)])
    return _markdown(["parameter", "value", "default", "meaning"], lines)


_KINDS = {"table": _table, "claims": _claims, "parameters": _parameters}


def main() -> None:
    """Rewrite the pages."""
    for page in PAGES:
        write_whole(page, filled(page.read_text()))


if __name__ == "__main__":
    main()
