"""``etha dashboard``: a page in the browser that shows what goes on in the namespace."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from etha.commands.terminal import err, stopped_by_ctrl_c
from etha.config import Settings
from etha.errors import ConfigError

#: Where the page is served unless ``--port`` says otherwise.
PORT = 8470


def dashboard(
    port: Annotated[int, typer.Option(min=0, max=65535, help="port of the page; 0 takes any that is free")] = PORT,
    host: Annotated[
        str, typer.Option(help="address to listen on; anything but the loopback lets others on the network look")
    ] = "127.0.0.1",
) -> None:
    """Serve a page that shows agents, links, pairs, batches, groups, transfers and events, and who waits for whom.

    It prints the address, which has a token: whoever knows it may look, and nobody can change anything. The page is
    live, and asks agents only while somebody looks. It shows what `etha status` and `etha events` show on this host.
    `ssh -L 8470:127.0.0.1:8470 HOST` brings it to your machine. It needs aiohttp: pip install 'sub-etha[dashboard]'.
    """
    import asyncio

    with stopped_by_ctrl_c():
        asyncio.run(serve(Settings.from_env(), host, port))


async def serve(settings: Settings, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM."""
    import asyncio
    import signal
    import sys

    from etha.addresses import is_loopback

    try:
        from etha.dashboard.server import serving
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise ConfigError("the dashboard needs aiohttp: pip install 'sub-etha[dashboard]'") from None
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    async with serving(settings, host=host, port=port) as url:
        typer.echo(url)
        sys.stdout.flush()
        if not is_loopback(host):
            text = f"note: everybody who reaches {host} and sees this address may look, and it travels unencrypted"
            err.print(Text(text, "yellow"))
        await ended.wait()
