"""Serves the page, its script and style, and the stream of its data; nothing can be changed through it.

    browser --GET /TOKEN/--> page.html, page.js, page.css;  --GET /TOKEN/stream--> server-sent events

Whoever has the address with its token may look. It is plain HTTP: it listens on the loopback unless told otherwise.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from urllib.parse import quote

from aiohttp import web
from aiohttp.typedefs import Handler

from etha.addresses import format_address
from etha.config import Settings
from etha.dashboard.collector import Collector
from etha.errors import ConfigError

#: Browsers that may look at once.
MAX_STREAMS = 32
#: Seconds for streams to end when the server does.
CLOSE_SECONDS = 2.0
#: File -> its type; "" is the page.
FILES = {
    "": ("page.html", "text/html"),
    "page.js": ("page.js", "text/javascript"),
    "page.css": ("page.css", "text/css"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}
#: The page loads what this server has and nothing else, runs no inline script, and is in no frame.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Server": "etha",
}


@asynccontextmanager
async def serving(settings: Settings, *, host: str, port: int) -> AsyncIterator[str]:
    """Serve in this context; its value is the page's URL, token included. ConfigError if nobody can listen there."""
    token = secrets.token_urlsafe(24)
    listener = _listen(host, port)
    async with Collector(settings) as collector:
        runner = web.AppRunner(_application(token, collector), access_log=None, shutdown_timeout=CLOSE_SECONDS)
        await runner.setup()
        try:
            await web.SockSite(runner, listener).start()
            yield f"http://{format_address(host, listener.getsockname()[1])}/{quote(token)}/"
        finally:
            await runner.cleanup()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"the dashboard cannot listen on {format_address(host, port)} ({error}): give another --port, or --port 0 "
            "for any that is free"
        ) from None


def _application(token: str, collector: Collector) -> web.Application:
    texts = {name: (_read(file), kind) for name, (file, kind) in FILES.items()}
    streams = 0

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.path.split("/")[1]
        if not hmac.compare_digest(given.encode(errors="replace"), token.encode()):
            raise web.HTTPNotFound(text="404: this is no address of the dashboard; take the one that it printed\n")
        return await handler(request)

    async def prepare(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(HEADERS)

    async def static(request: web.Request) -> web.Response:
        name = request.match_info.get("name", "")
        if name not in texts:
            raise web.HTTPNotFound
        text, kind = texts[name]
        return web.Response(text=text, content_type=kind, charset="utf-8")

    async def stream(request: web.Request) -> web.StreamResponse:
        nonlocal streams
        if streams >= MAX_STREAMS:
            raise web.HTTPServiceUnavailable(text=f"503: {MAX_STREAMS} browsers look already\n")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        streams += 1
        try:
            await response.prepare(request)
            await response.write(b"retry: 1000\n\n")
            async with collector.watching() as pages:
                async for text in pages:
                    await response.write(f"data: {text}\n\n".encode())
        except OSError:
            pass  # the browser has left
        finally:
            streams -= 1
        return response

    async def end(application: web.Application) -> None:
        await collector.end()

    application = web.Application(middlewares=[check])
    application.on_response_prepare.append(prepare)
    application.on_shutdown.append(end)
    application.router.add_get("/{token}/stream", stream)
    application.router.add_get("/{token}/{name}", static)
    application.router.add_get("/{token}/", static)
    return application


def _read(file: str) -> str:
    return files("etha.dashboard").joinpath(file).read_text(encoding="utf-8")
