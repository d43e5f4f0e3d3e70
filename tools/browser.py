"""Headless Chromium, driven by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_TIMEOUT_S = 30.0


def chromium() -> str:
    """Return the path of Chromium; raise FileNotFoundError, with what to install, if there is none."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        raise FileNotFoundError(
            "no Chromium: run `make browser` as root, or install the Debian package chromium"
        )
    return found


class Page:
    """One page of a running browser.

    Attributes:
        errors: errors of its scripts and its console.
        requested: addresses that it has requested.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count()
        self.errors: list[str] = []
        self.requested: list[str] = []

    async def open(self, url: str) -> None:
        """Load the page."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self._call(f"{domain}.enable")
        await self._call("Page.navigate", url=url)

    async def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression, awaited if it is a promise."""
        found = await self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true; raise TimeoutError after 30 s."""
        async with asyncio.timeout(_TIMEOUT_S):
            while not await self.evaluate(f"Boolean({condition})"):
                await asyncio.sleep(0.05)

    async def choose_file(self, selector: str, file: Path) -> None:
        """Choose a file in a file input, as the user would."""
        root = (await self._call("DOM.getDocument"))["root"]["nodeId"]
        node = await self._call("DOM.querySelector", nodeId=root, selector=selector)
        await self._call(
            "DOM.setFileInputFiles", nodeId=node["nodeId"], files=[str(file.resolve(strict=True))]
        )

    async def look(self, *, width: int, dark: bool = False) -> None:
        """Set the width, px, and the colour scheme."""
        await self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1,
            mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self._call("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self) -> bytes:
        """Return the whole page as PNG."""
        found = await self._call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        return base64.b64decode(found["data"])

    async def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(_TIMEOUT_S):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == number:
                    if "error" in message:
                        raise RuntimeError(f"{method}: {message['error']['message']}")
                    found: dict[str, Any] = message["result"]
                    return found
                self._record(message)

    def _record(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif message.get("method") == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])


@asynccontextmanager
async def browser(scratch: Path) -> AsyncIterator[Page]:
    """Start a browser, yield its page, and end it; `scratch` is a folder for its profile."""
    profile = scratch / "profile"
    process = await asyncio.create_subprocess_exec(
        chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port = await _port(profile / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            pages = await (await session.get(f"http://127.0.0.1:{port}/json/list")).json()
            where = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
            async with session.ws_connect(where, max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _port(message: Path) -> int:
    """Wait for the file with the port of the DevTools and return the port."""
    async with asyncio.timeout(_TIMEOUT_S):
        while not (message.exists() and "\n" in message.read_text()):
            await asyncio.sleep(0.05)
    return int(message.read_text().split()[0])
