"""Take screenshots of a running service's live page and of a report, for the docs.

python -m tools.screenshots --help
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from eldr_serve.command_errors import run
from eldr_serve.files import write_whole
from tools.browser import browser
from tools.small_png import small_png

_REPORT_PX = 1500  # height: answers, figures and the first plots
VIEWS = {"live_page": (1100, False), "live_page_dark": (1100, True), "live_page_phone": (390, False)}


def screenshots(
    out: Annotated[Path, typer.Option(help="Folder for the PNGs.")],
    url: Annotated[str, typer.Option(help="URL of the service.")] = "http://127.0.0.1:8000",
    admin_key: Annotated[str | None, typer.Option(envvar="ELDR_ADMIN_KEY", help="Its admin key.")] = None,
    report: Annotated[Path | None, typer.Option(help="Also a report.html of `eldr compare`.")] = None,
) -> None:
    """Write live_page.png, live_page_dark.png and live_page_phone.png of a running service."""
    pictures = asyncio.run(taken(f"{url.rstrip('/')}/eldr/", admin_key))
    if report is not None:
        pictures["report"] = asyncio.run(of_report(report))
    out.mkdir(parents=True, exist_ok=True)
    for name, content in pictures.items():
        write_whole(out / f"{name}.png", content)


async def taken(url: str, admin_key: str | None) -> dict[str, bytes]:
    """Return each view of VIEWS as PNG."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        async with browser(Path(scratch)) as page:
            await page.open(url)
            await page.until("document.readyState === 'complete'")
            if admin_key is not None:
                await page.until("!document.getElementById('key').hidden")
                await page.evaluate(f"adminKey = {admin_key!r}")
            found = {}
            for name, (width, dark) in VIEWS.items():
                await page.look(width=width, dark=dark)
                await page.evaluate("look()")
                await page.until("!document.querySelector('main').hidden")
                found[name] = small_png(await page.screenshot())
    return found


async def of_report(report: Path) -> bytes:
    """Return the top of a comparison's page as PNG; FileNotFoundError if there is none."""
    address = report.resolve(strict=True).as_uri()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        async with browser(Path(scratch)) as page:
            await page.open(address)
            await page.until(f"document.readyState === 'complete' && location.href === {address!r}")
            await page.look(width=1100)
            return small_png(await page.screenshot(), _REPORT_PX)


if __name__ == "__main__":
    run(screenshots)
