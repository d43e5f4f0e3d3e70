"""Pages stay short, narrow and linked."""

import re
from pathlib import Path

import pytest

from tests.support.pages import FENCED, PAGES, code_lines
from tests.support.shipped import ROOT

README = ROOT / "README.md"
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_NUMBER = re.compile(r"^ *(?:#+ )?\d+\. ")
_TWO_SENTENCES = re.compile(r"[.?!] +(?=[A-Z`*\[])")


def test_code_is_found_in_lists_and_without_a_fence(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("- so:\n\n  ```\n  eldr a\n  ```\n\nor\n\n    eldr b \\\n        --c\n\nthen\n")
    assert [line.split() for line in code_lines(page)] == [["eldr", "a"], ["eldr", "b", "--c"]]


def _anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of headings, which are never in code blocks."""
    heads = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_a_comment_in_a_code_block_is_no_anchor(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```bash\n# a comment\n```\n\n## A `part`\n\n- so:\n\n  ```\n# more\n  ```\n")
    assert _anchors(page) == {"a-page", "a-part"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_narrow_and_their_links_are_valid(page: Path) -> None:
    text = page.read_text()
    free = () if page == README else ("|", "<!--")
    assert not [line for line in text.splitlines() if len(line) > 110 and not line.startswith(free)]
    prose = [_NUMBER.sub("", line) for line in FENCED.sub("", text).splitlines() if not line.startswith("|")]
    assert not [line for line in prose if _TWO_SENTENCES.search(line)]
    for link in _LINK.findall(text):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def test_the_readme_its_table_and_the_glossary_are_short() -> None:
    assert len(README.read_text().splitlines()) <= 120
    tables = re.findall(r"<!-- claims .*? -->(.*?)<!-- end -->", README.read_text(), re.DOTALL)
    assert [table.count("\n|") <= 2 + 9 for table in tables] == [True]
    assert not [cell for table in tables for cell in table.split("|") if ";" in cell]  # one value per cell
    assert (ROOT / "docs/glossary.md").read_text().count("\n|") <= 2 + 10


def test_every_result_table_is_linked_and_plots_are_small() -> None:
    prose = "".join(page.read_text() for page in PAGES if page.parent.name != "tables")
    assert not [
        page.name for page in (ROOT / "docs/tables").glob("*.md") if f"tables/{page.name}" not in prose
    ]
    plots = list((ROOT / "docs/plots").glob("*.png"))
    assert plots
    assert not [plot.name for plot in plots if plot.stat().st_size > 100_000 or plot.name not in prose]
