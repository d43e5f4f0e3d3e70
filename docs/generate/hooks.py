"""Hooks of mkdocs: pages made from the code, and the model card, which lies outside docs/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from docs.generate.reference import PAGES

ROOT = Path(__file__).parents[2]
_MODEL_CARD = "examples/demo_model/README.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for name, page in PAGES.items():
        files.append(File.generated(config, name, content=page()))
    card = (ROOT / _MODEL_CARD).read_text().replace("](../../docs/", "](")
    files.append(File.generated(config, "demo_model.md", content=card))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Point links to the model card to its page."""
    up = "../" * page.file.src_uri.count("/")
    return markdown.replace(f"](../{up}{_MODEL_CARD}", f"]({up}demo_model.md")
