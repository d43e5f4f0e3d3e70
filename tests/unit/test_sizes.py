"""No file of Python outside the tests has more than 400 lines, and no function more than 60."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "eldr_serve", "examples", "loadgen", "offline", "docs")
MAX_LINES, MAX_LINES_OF_A_FUNCTION = 400, 60


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the outermost functions and the methods. A nested function is part of the one around it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from functions(child)


def offenders(name: str, source: str) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of lines of the file and of functions that are too long."""
    if (lines := len(source.splitlines())) > MAX_LINES:
        yield name, lines
    for function in functions(ast.parse(source)):
        if (lines := function.end_lineno - function.lineno + 1) > MAX_LINES_OF_A_FUNCTION:
            yield f"{name}: {function.name}", lines


def test_files_and_functions_are_short() -> None:
    too_long = {
        place: lines
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for place, lines in offenders(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))
    }
    long = [f"{place} has {lines} lines" for place, lines in too_long.items()]
    assert not long, f"split by concern: {'; '.join(long)}"


def test_a_nested_function_counts_as_part_of_the_outer_one() -> None:
    def source(nested: int) -> str:
        return "class A:\n    def outer(self):\n        def inner():\n" + "            pass\n" * nested

    assert [*offenders("a.py", source(58))] == []
    assert [*offenders("a.py", source(59))] == [("a.py: outer", 61)]
    assert [*offenders("b.py", "pass\n" * 401)] == [("b.py", 401)]
