"""Self-contained HTML pages and their common style sheet."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

__all__ = ["SELF_CONTAINED", "live_page", "style"]

# Content security policy of a page: it contains everything, and connects only to its own host.
SELF_CONTAINED = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def style() -> str:
    """Return the style sheet of all pages."""
    return _content("style.css")


@cache
def live_page() -> str:
    """Return the live page as one HTML document."""
    return _content("live.html").replace("/* style */", style()).replace("/* script */", _content("live.js"))


def _content(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
