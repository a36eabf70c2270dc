"""A headless Chromium that a test drives: it opens pages, waits for texts, takes pictures, and keeps every complaint.

async with chromium() as browser:
    page = await browser.open(url, width=400, dark=True)
    await page.shows("transfer waits")
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

#: It speaks to nobody but to the page's server, and keeps nothing.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0"),
    *("--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--no-first-run", "--disable-default-apps", "--disable-breakpad", "--disable-crash-reporter"),
)
SECONDS = 30.0

#: A promise that is kept once the page is so, or rejected with its text after some milliseconds.
_BECOMES = """new Promise((found, late) => {
  const holds = () => %s;
  const look = () => { if (holds()) { watch.disconnect(); found(true); } };
  const watch = new MutationObserver(look);
  watch.observe(document, {subtree: true, childList: true, characterData: true, attributes: true});
  setTimeout(() => late(new Error("not so: " + holds + "\\n" + document.body.innerText)), %d);
  look();
})"""


class Page:
    """One tab. ``complaints``: errors and warnings of its console, and exceptions of its scripts."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.complaints: list[str] = []
        self.loaded = asyncio.Event()

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return await self._browser.call(method, self._session, **parameters)

    async def evaluate(self, code: str) -> Any:
        """The value of JavaScript, awaited; what it throws is an AssertionError."""
        found = await self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"]["exception"].get("description", found))
        return found["result"].get("value")

    async def shows(self, *words: str) -> None:
        """Wait until its text has all ``words``."""
        await self.becomes(f"{json.dumps(words)}.every((word) => document.body.innerText.includes(word))")

    async def becomes(self, condition: str) -> None:
        """Wait until this JavaScript is true, which is tried whenever the page changes."""
        await self.evaluate(_BECOMES % (condition, SECONDS * 1000))

    async def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(found["data"]))


class Browser:
    """Made by ``chromium``."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}

    async def read(self) -> None:
        """Take what the browser says, until it ends."""
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                answer = self._answers.pop(said["id"])
                if "error" in said:
                    answer.set_exception(AssertionError(said["error"]))
                else:
                    answer.set_result(said["result"])
                continue
            page, event = self._pages.get(said.get("sessionId", "")), said.get("params", {})
            if page is None:
                continue
            if said["method"] == "Page.loadEventFired":
                page.loaded.set()
            elif said["method"] == "Runtime.exceptionThrown":
                page.complaints.append(str(event["exceptionDetails"]))
            elif said["method"] == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
                page.complaints.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")
            elif said["method"] == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
                page.complaints.append(str(event["args"]))

    async def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        request = {"id": number, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        await self._socket.send_json(request)
        async with asyncio.timeout(SECONDS + 10):
            return await answer

    async def open(self, url: str, *, width: int = 1280, height: int = 1000, dark: bool = False) -> Page:
        """A new tab of this size that has loaded ``url``."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            await page.call(f"{domain}.enable")
        await page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.loaded.clear()
        await page.call("Page.navigate", url=url)
        async with asyncio.timeout(SECONDS):
            await page.loaded.wait()
        return page


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A new browser with a profile of its own; it, its children and its profile are gone at the end."""
    program = shutil.which("chromium")
    assert program is not None
    profile = tempfile.mkdtemp(prefix="etha-chromium-")
    # A home of its own: else it writes into the user's. A session of its own: its children end with it.
    process = await asyncio.create_subprocess_exec(
        program,
        *FLAGS,
        f"--user-data-dir={profile}",
        env={**os.environ, "HOME": profile, "XDG_CONFIG_HOME": profile, "XDG_CACHE_HOME": profile},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(SECONDS):
            address, drain = await _address(process)
        async with aiohttp.ClientSession() as client, client.ws_connect(address, max_msg_size=1 << 28) as socket:
            browser = Browser(socket)
            reading = asyncio.ensure_future(browser.read())
            try:
                yield browser
            finally:
                with contextlib.suppress(AssertionError, OSError, TimeoutError):
                    await browser.call("Browser.close")
                reading.cancel()
                await asyncio.wait([reading])
        drain.cancel()
        await asyncio.wait([drain])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await asyncio.to_thread(shutil.rmtree, profile, ignore_errors=True)


async def _address(process: asyncio.subprocess.Process) -> tuple[str, asyncio.Task[bytes]]:
    """Where it listens, and a task that reads what else it writes."""
    assert process.stderr is not None
    said = b""
    while line := await process.stderr.readline():
        said += line
        if found := re.search(rb"DevTools listening on (ws://\S+)", line):
            return found[1].decode(), asyncio.create_task(process.stderr.read())
    raise AssertionError(said.decode(errors="replace"))
