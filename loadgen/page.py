"""Self-contained HTML pages: tables and pictures, nothing fetched."""

from __future__ import annotations

import base64
import html
import io
from typing import Any

_STYLE = (
    "body{font:15px sans-serif;max-width:75em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}img{max-width:100%}"
    "td,th{padding:.3em .8em;text-align:right;border-bottom:1px solid #ccc}"
    "td{white-space:pre-line}td:first-child,th:first-child{text-align:left;white-space:nowrap}.bad{color:#b00020;font-weight:bold}"
)


def page(title: str, *parts: str) -> str:
    """A whole document; the parts are HTML."""
    head = f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>"
    body = "\n".join(parts)
    return f"{head}<style>{_STYLE}</style><body><h1>{html.escape(title)}</h1>\n{body}\n</body></html>\n"


def paragraph(text: str, kind: str = "") -> str:
    """Text as a paragraph; kind "bad" stands out."""
    return f"<p class='{kind}'>{html.escape(text)}</p>"


def table(rows: list[dict[str, Any]]) -> str:
    """Rows with the keys of the first as columns."""
    heads = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in rows[0])
    lines = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell(row.get(name)))}</td>" for name in rows[0]) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{heads}</tr>{lines}</table>"


def cell(value: Any) -> str:
    """A figure as a person reads it; a dash where there is none."""
    if value is None:
        return "–"  # noqa: RUF001
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def picture(title: str, figure: Any, alt: str) -> str:
    """A matplotlib figure under a heading."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    data = base64.b64encode(content.getvalue()).decode()
    return f"<h2>{html.escape(title)}</h2><img alt='{html.escape(alt)}' src='data:image/png;base64,{data}'>"
