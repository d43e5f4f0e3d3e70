"""Generate the tables of README.md and docs, from benchmarks/results and the policies' parameters.

    python -m benchmarks.lib.tables

A table stands between `<!-- table NAME column, column ... -->` and `<!-- end -->`, and is filled from
NAME.json. A column is a key of the rows, or `KEY [LOW HIGH]`, which prints a value and its interval;
`[_low _high]` appends to KEY. `KEY as OTHER` has the heading of OTHER. Each result of a GPU gets the page
that gpu_pages.yaml describes.

Three more blocks end with `<!-- end -->`. `<!-- claims NAME -->` begins that list of claims.yaml or
papers.yaml. `<!-- pages gpu -->` begins the list of pages with results of a GPU. `<!-- parameters NAME
[beyond OTHER] -->` begins the parameters of a policy; `beyond` leaves out those that OTHER has with the same
default.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import yaml

from eldr_serve.files import write_atomically
from eldr_serve.scheduling.parameters import kind_of
from eldr_serve.scheduling.policies.registry import policy_class
from loadgen.results import RESULTS, read_rows

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "docs/tables"
PAGES = (
    *(ROOT / "docs" / f"{name}.md" for name in ("gpu", "papers", "policies", "results", "simulation")),
    ROOT / "README.md",
    *sorted(TABLES.glob("*.md")),
)
PAPERS: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "benchmarks/papers.yaml").read_text())
CLAIMS: dict[str, dict[str, Any]] = PAPERS | yaml.safe_load((ROOT / "benchmarks/claims.yaml").read_text())
GPU_PAGES: dict[str, dict[str, str]] = yaml.safe_load((ROOT / "benchmarks/gpu_pages.yaml").read_text())
_ZERO = re.compile(r"(?<![\w.])[+-](0(?:\.0+)?)(?![\w.])")
_BLOCK = re.compile(r"(<!-- (table|claims|pages|parameters) (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
Rows = list[dict[str, Any]]
# Words of a key -> words of its heading
_HEADINGS = {
    "active experts all layers": "active experts, all layers",
    "arm": "policy or variant",
    "clock": "times",
    "engine time per token": "engine time per token, ms",
    "imbalance below JSQ": "imbalance, times below shortest-queue",
    "intermediate": "neurons per expert",
    "left": "disconnected",
    "moved vs base, %": "other ranks change, %",
    "moved vs blocks, %": "other ranks change to blocks, %",
    "ok": "answered",
    "paper moved, %": "paper other ranks change, %",
    "rate/s": "arrivals/s",
    "way": "way in",
}
_VALUES = {"clock": {"wall": "as measured", "normalised": "normalised"}}  # key -> value -> words of its cell
_UNITS = {"pct": "%", "ms": "ms", "us": "us", "s": "s", "mib": "MiB"}
_NAMES = {
    name.lower(): name for name in ("TPOT", "TTFT", "CPU", "GPUs", "KV", "EP", "TP", "EPLB", "JSQ", "vLLM")
}


def fill_blocks(page: str) -> str:
    """Return the page with every table regenerated."""

    def block(match: re.Match[str]) -> str:
        opening, kind, arguments, _, closing = match.groups()
        return opening + _KINDS[kind](arguments) + closing

    return _BLOCK.sub(block, page)


def _table(arguments: str) -> str:
    name, _, columns = arguments.partition(" ")
    rows = read_rows(name)
    parts = [column.strip().partition(" as ") for column in columns.split(",")]
    keys = [_keys(key) for key, _, _ in parts]
    if unknown := set(itertools.chain.from_iterable(keys)).difference(*rows):
        raise KeyError(f"no row of {name} has {', '.join(sorted(unknown))}")
    heads = [heading(other or key) for (key, *_), (_, _, other) in zip(keys, parts, strict=True)]
    return _markdown(heads, [[_value(row, *column) for column in keys] for row in rows])


def _keys(column: str) -> list[str]:
    """Return the key of a column, and those of its interval if it has one."""
    key, _, interval = column.partition(" [")
    bounds = interval.rstrip("]").split()
    return [key, *(key + bound if bound.startswith("_") else bound for bound in bounds)]


def _value(row: dict[str, Any], key: str, *interval: str) -> str:
    bounds, value = [row.get(bound) for bound in interval], row.get(key)
    if key in _VALUES:
        return _VALUES[key][str(value)]
    if not interval or None in bounds:
        return _number(value)
    return f"{_number(value)} [{', '.join(map(_number, bounds))}]"


def heading(key: str) -> str:
    """Return the words of a key, with its unit at the end."""
    words = re.sub(r"_(ms|us)(?=_(pooled_)?change)", "", key).replace("_a_", "_per_")
    *name, last = words.split("_")
    has_unit = last in _UNITS and name and name[-1] != "per" and not name[-1].isdigit()
    text = " ".join(_NAMES.get(word, word) for word in (name if has_unit else [*name, last]))
    text = text.removesuffix(" per s") + "/s" if text.endswith(" per s") else text.replace(" per s ", "/s ")
    text = text.replace("pooled change", "change against all balancers together").replace(
        "ms per token", "time per token"
    )
    text = f"{text}, {_UNITS[last]}" if has_unit else text
    return _HEADINGS.get(text, text)


def has_result(name: str) -> bool:
    """Return whether the result has been committed. Results of a GPU may be missing."""
    return (RESULTS / f"{name}.json").exists()


def _claims(name: str) -> str:
    """Return one line per claim, or per row of its result if the list says `line_per_row`.

    In a line per claim, a cell with fields repeats for each row of the claim's result.
    """
    claims = itertools.chain.from_iterable(map(_each, CLAIMS[name]["lines"]))
    if CLAIMS[name].get("line_per_row"):
        lines = list(itertools.chain.from_iterable(map(_lines_of_rows, claims)))
    else:
        lines = [[_cell(cell, claim) for cell in claim["cells"]] for claim in claims]
    return _markdown(CLAIMS[name]["columns"], lines)


def _lines_of_rows(claim: dict[str, Any]) -> list[list[str]]:
    """Return a line for each row of the claim's result. Only the first has the cells without fields."""
    rows = [row for row in read_rows(claim["result"]) if matches_claim(row, claim)]
    lines = [[_fill_in(cell, row) for cell in claim["cells"]] for row in rows]
    for line in lines[1:]:
        line[:] = ["" if "{" not in cell else value for cell, value in zip(claim["cells"], line, strict=True)]
    return lines


def _each(claim: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the claim, or one for each combination of the values that `each` has in the result's rows."""
    if "each" not in claim:
        return [claim]
    rows = [row for row in read_rows(claim["result"]) if matches_claim(row, claim)]
    combinations = dict.fromkeys(tuple(row[key] for key in claim["each"]) for row in rows)
    return [
        claim | {"where": claim["where"] | dict(zip(claim["each"], values, strict=True))}
        for values in combinations
    ]


def _cell(cell: str | dict[str, Any], claim: dict[str, Any]) -> str:
    if isinstance(cell, str) and "{" not in cell:
        return cell
    name = cell.get("result") if isinstance(cell, dict) else None
    rows = [row for row in read_rows(name or claim["result"]) if matches_claim(row, claim)]
    if isinstance(cell, str):
        return "; ".join(_fill_in(cell, row) for row in rows)
    (row,) = (row for row in rows if matches_claim(row, cell))
    return _fill_in(cell["text"], row)


def _fill_in(text: str, row: dict[str, Any]) -> str:
    """Fill in the row's values. A value that is rounded to zero has no sign."""
    return _ZERO.sub(r"\1", text.format(**row))


def matches_claim(row: dict[str, Any], claim: dict[str, Any]) -> bool:
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
    return f"{value:z.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _parameters(arguments: str) -> str:
    """Return one line per parameter of the policy, without those that it shares with another policy."""
    name, _, other = arguments.partition(" beyond ")
    other_fields = policy_class(other).Parameters.model_fields if other else {}
    lines = []
    for parameter, field in policy_class(name).Parameters.model_fields.items():
        if parameter in other_fields and other_fields[parameter].default == field.default:
            continue
        default = f"{field.default:g}" if isinstance(field.default, float) else json.dumps(field.default)
        lines.append([f"`{parameter}`", kind_of(field), default, str(field.description)])
    return _markdown(["parameter", "value", "default", "meaning"], lines)


def _pages(_: str) -> str:
    measured = [name for name in GPU_PAGES if has_result(name)]
    lines = [f"- [{GPU_PAGES[name]['title']}](tables/{name}.md)\n" for name in measured]
    return "".join(lines) or "No step has a result yet.\n"


def _gpu_page(name: str) -> str:
    """Return a page of a GPU's result, with an empty table."""
    return (
        f"# {GPU_PAGES[name]['title']}\n\n"
        f"From `benchmarks/results/{name}.json`, by `make tables`.\nExplained in: [on a GPU](../gpu.md).\n\n"
        f"<!-- table {name} {GPU_PAGES[name]['columns']} -->\n<!-- end -->\n"
    )


_KINDS = {"table": _table, "claims": _claims, "pages": _pages, "parameters": _parameters}


def main() -> None:
    """Rewrite the pages."""
    for page in PAGES:
        write_atomically(page, fill_blocks(page.read_text()))
    for name in filter(has_result, GPU_PAGES):
        write_atomically(TABLES / f"{name}.md", fill_blocks(_gpu_page(name)))


if __name__ == "__main__":
    main()
