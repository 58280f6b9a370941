"""Draws docs/figures/server.png: the server's page after a completion, in headless Chromium.

  python docs/tools/make_page.py

It starts ``python -m infer.serve`` on the embedded pair and ``chromium``, which must be installed.
It drives the browser over its debugging protocol.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from tornado.websocket import WebSocketClientConnection, websocket_connect

PICTURE = Path(__file__).parents[1] / "figures" / "server.png"
SIZE = "--window-size=900,900"
SECONDS = 300
DONE = "!at('run').disabled && (at('same').textContent || at('error').textContent)"


def chromium() -> str | None:
    """The browser's program, if one is installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """A browser's page, driven over the debugging protocol."""

    def __init__(self, socket: WebSocketClientConnection):
        self._socket, self._calls = socket, 0

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """One command of the debugging protocol, and its result."""
        self._calls += 1
        said = {"id": self._calls, "method": method, "params": arguments}
        await self._socket.write_message(json.dumps(said))
        while True:
            answer = json.loads(await self._socket.read_message())
            if answer.get("id") == self._calls:
                assert "error" not in answer, answer
                return answer["result"]

    async def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, script: str) -> Any:
        """Waits until an expression is true, and gives its value."""
        for _ in range(10 * SECONDS):
            with contextlib.suppress(AssertionError):  # the page may not be there yet
                if value := await self.evaluate(script):
                    return value
            await asyncio.sleep(0.1)
        raise TimeoutError(script)

    async def picture(self) -> bytes:
        """The whole page as a PNG."""
        captured = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(captured["data"])


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[Page]:
    """Opens ``url`` in a new browser, and yields its page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        command = [chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", SIZE]
        command += ["--remote-debugging-port=0", f"--user-data-dir={home}", url]
        browser = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            lines = iter(browser.stderr.readline, "")
            port = next(m[1] for line in lines if (m := re.search(r"ws://[\d.]+:(\d+)/", line)))
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as pages:
                found = [page for page in json.load(pages) if page["type"] == "page"]
            socket = await websocket_connect(
                found[0]["webSocketDebuggerUrl"], max_message_size=2**26
            )
            yield Page(socket)
            socket.close()
        finally:
            browser.terminate()
            browser.wait()


async def draw(url: str) -> bytes:
    """Completes the page's prompt, and takes a picture."""
    async with opened(url) as page:
        await page.until("document.readyState === 'complete' && at('model').textContent")
        await page.evaluate("at('run').click()")
        await page.until(DONE)
        return await page.picture()


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Starts a server with the embedded pair, and yields its address."""
    command = [sys.executable, "-m", "infer.serve", "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield server.stderr.readline().split()[-1]
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    with serving() as url:
        PICTURE.write_bytes(asyncio.run(draw(url)))
    print(PICTURE)
