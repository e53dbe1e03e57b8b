"""A headless Chromium driven by its DevTools protocol: open pages, press keys, evaluate scripts, take screenshots."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_S = 60.0
CLIPPED = """[...document.querySelectorAll('svg.plot text')].filter((node) => {
  const box = node.getBBox(), svg = node.ownerSVGElement.viewBox.baseVal;
  return box.x < -0.5 || box.x + box.width > svg.width + 0.5 || box.y < 0 || box.y + box.height > svg.height;
}).map((node) => node.textContent)"""
"""Texts of curves that are cut at an edge, as an expression of the page."""


def find_browser() -> str | None:
    """The program named by PA_NPU_BROWSER, or the first that is installed."""
    return os.environ.get("PA_NPU_BROWSER") or next(
        (actual for name in NAMES if (actual := shutil.which(name))), None
    )


class Browser:
    """One browser with one page.

    Owner closes it. problems: errors and refused loads; requests: all addresses asked for.
    """

    def __init__(self, program: str) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._directory = tempfile.mkdtemp(prefix="browser-")
        self._process = subprocess.Popen(
            [
                program,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--mute-audio",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-extensions",
                "--hide-scrollbars",
                "--force-device-scale-factor=1",
                "--remote-debugging-port=0",
                f"--user-data-dir={self._directory}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._loop = asyncio.new_event_loop()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self._page: str | None = None
        self._loop.run_until_complete(self._connect())

    def close(self) -> None:
        self._loop.run_until_complete(self._disconnect())
        self._loop.close()
        self._process.kill()
        self._process.wait(10)
        shutil.rmtree(self._directory, ignore_errors=True)

    def open(self, url: str) -> None:
        """Loads a page of the viewer and waits until it is drawn."""
        self.problems.clear()
        self.requests.clear()
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.wait_for("document.documentElement?.dataset.ready === 'yes'")

    def look(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = "dark" if dark else "light"
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def evaluate(self, script: str) -> Any:
        """The value of an expression, awaited; raises what it raises."""
        actual = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in actual:
            raise AssertionError(f"{script}: {json.dumps(actual['exceptionDetails'])[:600]}")
        return actual["result"].get("value")

    def wait_for(self, condition: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < deadline, (
                f"{condition} did not come true; problems: {self.problems}"
            )

    def press(self, *keys: str) -> None:
        """Keys by their DOM names: ArrowRight, Enter, a letter."""
        codes = {
            "Enter": 13,
            "Tab": 9,
            "Escape": 27,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
        }
        for key in keys:
            code = codes.get(key, ord(key[0].upper()) if len(key) == 1 else 0)
            text = (
                {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
            )
            self.call(
                "Input.dispatchKeyEvent",
                type="keyDown",
                key=key,
                windowsVirtualKeyCode=code,
                **text,
            )
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def write(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        """Writes the visible part of the page, or the whole of it, as a PNG or, by the file's name,
        a much smaller WebP.
        """
        options: dict[str, Any] = {"format": "png"}
        if file.suffix == ".webp":
            options = {"format": "webp", "quality": 82}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            options |= {"captureBeyondViewport": True, "clip": clip}
        picture = self.call("Page.captureScreenshot", **options)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(picture["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._loop.run_until_complete(self._call(method, parameters))

    async def _connect(self) -> None:
        port_file = Path(self._directory) / "DevToolsActivePort"
        deadline = time.monotonic() + WAIT_S
        while not port_file.exists() or len(port_file.read_text().splitlines()) < 2:
            assert self._process.poll() is None and time.monotonic() < deadline, (
                "the browser did not start"
            )
            await asyncio.sleep(0.05)
        port, path = port_file.read_text().splitlines()[:2]
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(
            f"ws://127.0.0.1:{port}{path}", max_msg_size=0
        )
        self._reader = self._loop.create_task(self._read())
        target = await self._call("Target.createTarget", {"url": "about:blank"})
        attached = await self._call(
            "Target.attachToTarget", {"targetId": target["targetId"], "flatten": True}
        )
        self._page = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self._call(f"{domain}.enable", {})

    async def _disconnect(self) -> None:
        self._reader.cancel()
        await self._socket.close()
        await self._session.close()

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        future: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._answers[self._number] = future
        message = {"id": self._number, "method": method, "params": parameters}
        await self._socket.send_json(message | ({"sessionId": self._page} if self._page else {}))
        return await asyncio.wait_for(future, WAIT_S)

    async def _read(self) -> None:
        async for received in self._socket:
            message = json.loads(received.data)
            if "id" in message:
                future = self._answers.pop(message["id"])
                if "error" in message:
                    future.set_exception(AssertionError(message["error"]["message"]))
                else:
                    future.set_result(message["result"])
            elif message["method"] == "Runtime.exceptionThrown":
                details = message["params"]["exceptionDetails"]
                self.problems.append(
                    details.get("exception", {}).get("description") or details["text"]
                )
            elif (
                message["method"] == "Log.entryAdded"
                and message["params"]["entry"]["level"] == "error"
            ):
                self.problems.append(message["params"]["entry"]["text"])
            elif message["method"] == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])


IN_A_BROWSER = [
    pytest.mark.integration,
    pytest.mark.nightly,
    pytest.mark.skipif(
        find_browser() is None,
        reason="no Chromium here; install chromium, or name it in PA_NPU_BROWSER",
    ),
]
"""Marks of a module whose tests need a browser."""
