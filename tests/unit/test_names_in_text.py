"""Docstrings and pages name only what exists, and docstrings of modules and classes are no imperatives."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from tests.support.pages import PAGES
from tests.support.shipped import PACKAGES, ROOT, modules

_DOTTED = re.compile(r"(?<![\w./-])(?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*(?![\w/.-]*/)")
_FOLDERS = (*PACKAGES, "tests", "deployments", "examples")
_PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(_FOLDERS)})/[\w./-]*\.(?:json|md|py|yaml)\b")
_FILES = (".json", ".md", ".py", ".yaml")
_WITHOUT_ATTRIBUTES = {"ABC", "Exception", "Generic", "NamedTuple", "Protocol", "object"}
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_IMPERATIVE = re.compile(
    r"(?:Accumulate|Admit|Apply|Carry|Choose|Collect|Compute|Configure|Create|Decide|Define|Derive|Describe|"
    r"Draw|Eject|Extend|Find|Gather|Generate|Get|Give|Hold|Implement|Keep|Make|Measure|Move|Parse|"
    r"Publish|Put|Receive|Register|Replace|Restore|Return|Run|Select|Send|Serialize|Serve|Tokenise|Track|Use|"
    r"Wake)\s"
)


def _bound(node: ast.AST) -> Iterator[str]:
    """Yield all names that are bound in the node, attributes of `self` and nested names included."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield inner.name
        elif isinstance(inner, ast.alias):
            yield (inner.asname or inner.name).split(".")[0]
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id
        elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            yield inner.attr


class _Known:
    """The modules and classes of some sources, and what they define."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.trees = {name: ast.parse(source) for name, source in sources.items()}
        self.members: dict[str, set[str]] = defaultdict(set)
        for name, tree in self.trees.items():
            self.members[name].update(_bound(tree))
            while name:
                name, _, last = name.rpartition(".")
                self.members[name].add(last)
        self.attributes: dict[str, set[str]] = defaultdict(set)
        self.bases: dict[str, set[str]] = defaultdict(set)
        for tree in self.trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self.attributes[node.name].update(_bound(node))
                    names = (ast.unparse(base).partition("[")[0] for base in node.bases)
                    self.bases[node.name].update(name.rpartition(".")[2] for name in names)

    def has(self, owner: str, attribute: str) -> bool:
        """Return whether the class has the attribute, or may inherit it from a foreign class."""
        if owner not in self.attributes:
            return owner not in _WITHOUT_ATTRIBUTES
        return attribute in self.attributes[owner] or any(
            base == owner or self.has(base, attribute) for base in self.bases[owner]
        )

    def missing(self, text: str) -> Iterator[str]:
        """Yield the dotted names in a text that do not exist."""
        for match in _DOTTED.finditer(text):
            parts = match[0].split(".")
            if any(owner in self.attributes and not self.has(owner, name) for owner, name in pairwise(parts)):
                yield match[0]
            elif parts[0] in PACKAGES and not match[0].endswith(_FILES):
                module = next(
                    m for n in range(len(parts), 0, -1) if (m := ".".join(parts[:n])) in self.members
                )
                rest = match[0][len(module) + 1 :].split(".")[0]
                if rest and rest not in self.members[module]:
                    yield match[0]

    def missing_in_docstrings(self) -> Iterator[str]:
        """Yield the module and the name for each name that does not exist."""
        for module, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, _Documented):
                    text = ast.get_docstring(node) or ""
                    for name in (*self.missing(text), *missing_files(text)):
                        yield f"{module}: {name}"


def missing_files(text: str) -> Iterator[str]:
    """Yield the paths in a text that do not exist in the repository. A path with capitals is a pattern."""
    for path in _PATH.findall(text):
        if re.search("[A-Z]{2}", path) is None and not (ROOT / path).exists():
            yield path


KNOWN = _Known({name: path.read_text("utf-8") for name, path in modules()})


def test_docstrings_name_what_exists() -> None:
    assert not [*KNOWN.missing_in_docstrings()]


def test_docstrings_of_modules_and_classes_are_no_imperatives() -> None:
    offenders = [
        f"{module}: {getattr(node, 'name', 'the module')}"
        for module, tree in KNOWN.trees.items()
        if module.split(".")[0] == "eldr_serve"
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef) and _IMPERATIVE.match(ast.get_docstring(node) or "")
    ]
    assert not offenders, "begin with what the module or class is (a noun) or does (Ejects)"


def test_descriptions_of_fields_call_an_unset_value_null_as_yaml_does() -> None:
    offenders = [
        f"{module}: {text.value}"
        for module, tree in KNOWN.trees.items()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "Field"
        for keyword in call.keywords
        if keyword.arg == "description"
        for text in ast.walk(keyword.value)
        if isinstance(text, ast.Constant) and re.search(r"\b[Nn]one:", str(text.value))
    ]
    assert not offenders, "write null:, which a user can type"


def test_pages_name_what_exists() -> None:
    current = [page for page in PAGES if "decisions" not in page.parts and page.name != "CHANGELOG.md"]
    missing_names = {
        page.relative_to(ROOT).as_posix(): [*KNOWN.missing(text), *missing_files(text)]
        for page in current
        if (text := page.read_text())
    }
    assert not {page: names for page, names in missing_names.items() if names}


def test_names_that_do_not_exist_are_found() -> None:
    names = _Known(
        {
            "eldr_serve.a": "class Old:\n    def __init__(self):\n        self.seen = 1\n",
            "eldr_serve.b": "class New(Old):\n    made: int\nclass Foreign(vllm.Engine): ...\n",
        }
    )
    good = (
        "New.made, New.seen, Foreign.any, `eldr_serve.b.New`, eldr_serve.a, Other.name and eldr_serve/a.py."
    )
    assert not [*names.missing(good)]
    bad = ["New.gone", "eldr_serve.b.New.gone", "eldr_serve.c", "eldr_serve.a.New"]
    assert [*names.missing(" ".join(bad))] == bad


def test_paths_of_files_that_do_not_exist_are_found() -> None:
    good = "eldr_serve/metrics/router.py, benchmarks/results/NAME.json"
    text = f"`eldr_serve/metrics.py`, {good} and tests/gone.py"
    assert [*missing_files(text)] == ["eldr_serve/metrics.py", "tests/gone.py"]
