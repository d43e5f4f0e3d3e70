"""Take screenshots of a running service's live page and of a report, for the docs.

python -m benchmarks.lib.screenshots --help
"""

from __future__ import annotations

import asyncio
import io
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image
from playwright.async_api import Browser, async_playwright

from eldr_serve.commands.run import run
from eldr_serve.files import write_atomically

_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
_REPORT_PX = 1500  # height: answers, figures and the first plots
_COLOURS = 128  # colours of the pictures' palette, as a page has few
VIEWS = {"live_page": (1100, False), "live_page_dark": (1100, True), "live_page_phone": (390, False)}


def screenshots(
    out: Annotated[Path, typer.Option(help="Folder for the PNGs.")],
    url: Annotated[str, typer.Option(help="URL of the service.")] = "http://127.0.0.1:8000",
    admin_key: Annotated[str | None, typer.Option(envvar="ELDR_ADMIN_KEY", help="The admin key.")] = None,
    report: Annotated[Path | None, typer.Option(help="Also show this report.html of `eldr compare`.")] = None,
) -> None:
    """Write live_page.png, live_page_dark.png and live_page_phone.png of a running service."""
    pictures = asyncio.run(take_screenshots(f"{url.rstrip('/')}/eldr/", admin_key))
    if report is not None:
        pictures["report"] = asyncio.run(screenshot_of_report(report))
    out.mkdir(parents=True, exist_ok=True)
    for name, content in pictures.items():
        write_atomically(out / f"{name}.png", content)


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """Run the machine's Chromium. Raise FileNotFoundError, with what to install, if there is none."""
    executable = next(filter(None, map(shutil.which, _CHROMIUM)), None)
    if executable is None:
        raise FileNotFoundError(
            "no Chromium: run `make browser` as root, or install the Debian package chromium"
        )
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=executable)
        yield chromium
        await chromium.close()


async def take_screenshots(url: str, admin_key: str | None) -> dict[str, bytes]:
    """Return each view of VIEWS as PNG."""
    async with browser() as chromium:
        page = await chromium.new_page()
        await page.goto(url)
        if admin_key is not None:
            await page.locator("#key").wait_for()
            await page.evaluate(f"adminKey = {admin_key!r}")
        pictures = {}
        for name, (width, dark) in VIEWS.items():
            await page.set_viewport_size({"width": width, "height": 900})
            await page.emulate_media(color_scheme="dark" if dark else "light")
            await page.evaluate("refresh()")
            await page.locator("main").wait_for()
            pictures[name] = _small(await page.screenshot(full_page=True))
    return pictures


async def screenshot_of_report(report: Path) -> bytes:
    """Return the top of a comparison's page as PNG. Raise FileNotFoundError if there is none."""
    address = report.resolve(strict=True).as_uri()
    async with browser() as chromium:
        page = await chromium.new_page(viewport={"width": 1100, "height": 900})
        await page.goto(address)
        height = await page.evaluate("document.documentElement.scrollHeight")
        await page.set_viewport_size({"width": 1100, "height": min(height, _REPORT_PX)})
        return _small(await page.screenshot())


def _small(png: bytes) -> bytes:
    """Return the picture with a palette, a third as large."""
    content = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(_COLOURS).save(content, "png", optimize=True)
    return content.getvalue()


if __name__ == "__main__":
    run(screenshots)
