"""Pages rendered by headless Chromium."""

from pathlib import Path
from typing import NamedTuple

from benchmarks.lib.screenshots import browser


class Rendered(NamedTuple):
    """A loaded page: its DOM, the widths of its images in px (0: a broken image), and a PNG of the page."""

    dom: str
    widths: list[int]
    picture: bytes


async def render(file: Path) -> Rendered:
    """Open a report, which may request nothing."""
    requested: list[str] = []
    async with browser() as chromium:
        page = await chromium.new_page(viewport={"width": 1400, "height": 2600})
        page.on("request", lambda request: requested.append(request.url))
        await page.goto(file.as_uri())
        widths = await page.evaluate("[...document.images].map(image => image.naturalWidth)")
        result = Rendered(await page.content(), widths, await page.screenshot())
    assert not [url for url in requested if not url.startswith("data:") and url != file.as_uri()]
    return result
