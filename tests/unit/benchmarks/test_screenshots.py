"""Screenshots of reports."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.lib.screenshots import screenshot_of_report


@pytest.mark.benchmarks
@pytest.mark.parametrize(("height", "shown"), [(1200, 1200), (4000, 1500)])
async def test_a_screenshot_shows_the_page_from_its_top(tmp_path: Path, height: int, shown: int) -> None:
    page = tmp_path / "report.html"
    page.write_text(f'<body style="margin:0"><div style="height:{height}px;background:#008000"></div></body>')
    pixels = np.asarray(Image.open(io.BytesIO(await screenshot_of_report(page))).convert("RGB"))
    assert pixels.shape == (shown, 1100, 3)
    assert (pixels == (0, 128, 0)).all()


async def test_a_missing_report_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"report\.html"):
        await screenshot_of_report(tmp_path / "report.html")
