"""Pages that are one file each and fetch nothing from elsewhere, and the look that they share."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

__all__ = ["SELF_CONTAINED", "live_page", "style"]

# The policy under which a browser shows a page: all is in it, and it talks to its own host alone.
SELF_CONTAINED = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def style() -> str:
    """The style sheet of all pages."""
    return _content("style.css")


@cache
def live_page() -> str:
    """The live page, whole."""
    return _content("live.html").replace("/* style */", style()).replace("/* script */", _content("live.js"))


def _content(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
