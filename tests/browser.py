"""Render pages with headless Chromium."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import tools.browser

_PROBE = (
    "<script>addEventListener('load', () => {document.body.dataset.images = "
    "[...document.images].map(i => i.naturalWidth).join(' ')})</script>"
)


def chromium(page: Path, scratch: Path, *options: str) -> str:
    """Return the output of headless Chromium for the page; `scratch` is a folder for its profile."""
    done = subprocess.run(
        [tools.browser.chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         f"--user-data-dir={scratch / 'profile'}", "--window-size=1400,2600", *options, page.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def rendered(page: Path, scratch: Path) -> tuple[str, list[int]]:
    """Return the loaded page's DOM, and the widths of its images, pixels; 0: a broken image."""
    probed = scratch / "probed.html"
    probed.write_text(page.read_text() + _PROBE)
    seen = chromium(probed, scratch, "--dump-dom")
    widths = re.search('data-images="([^"]*)"', seen)
    assert widths
    assert not re.search(r"(src|href)=.https?:", seen), "a report must not fetch anything"
    return seen, [int(width) for width in widths[1].split()]
