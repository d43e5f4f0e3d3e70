"""The pages of the documentation and the code on them."""

import re
from pathlib import Path

from tests.support.shipped import ROOT

PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "examples/demo_model/README.md",
]
FENCED = re.compile(r"^ *```[a-z]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n)+")


def code_lines(page: Path) -> list[str]:
    """Return the lines of code blocks, fenced or indented by four. A continued command is one line."""
    text = page.read_text()
    blocks = [*FENCED.findall(text), *_INDENTED.findall(FENCED.sub("", text))]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip()]
