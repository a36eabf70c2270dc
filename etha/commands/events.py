"""``etha events``: what happened in the namespace, and why."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from typing import Annotated

import typer
from rich.text import Text

from etha.commands.terminal import err, print_json, stopped_by_ctrl_c
from etha.config import Settings
from etha.printable import one_line

#: Seconds for agents, also those of other hosts, to answer.
SECONDS = 5.0


def events(
    only: Annotated[str, typer.Argument(help="only what is about this PAIR, BATCH or PAIR/BATCH")] = "",
    since: Annotated[str, typer.Option(help="30s, 10m, 2h, 1d ago, or a time like 14:00 or 2026-01-31T14:00")] = "1d",
    failed: Annotated[bool, typer.Option("--failed", help="only what went wrong")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line, with all that is known")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on with what happens, until Ctrl-C")] = False,
) -> None:
    """Show what happened: transfers and where their time went, failures with cause and culprit, who came and left.

    Each agent keeps the last hours of its transfers, and its failures for much longer, in files beside its socket, also
    after it has left. Agents of other hosts are asked if they are linked to one of this host. A transfer is one
    line; --json and --follow show what each agent that took part tells of it.
    """
    import asyncio

    with stopped_by_ctrl_c():
        asyncio.run(show(Settings.from_env(), only, since, failed=failed, as_json=as_json, on=follow))


async def show(settings: Settings, only: str, since: str, *, failed: bool, as_json: bool, on: bool) -> None:
    """Print what has happened, and with ``on`` what happens from now on."""
    from etha.events import Follower, gather, line, parse_since
    from etha.observe.history import one_per_transfer

    begin = parse_since(since, time.time())
    with Follower(settings) if on else nullcontext() as follower:
        gathered = await gather(settings, since=begin, failed=failed, timeout=SECONDS)
        for happening in gathered.happenings if as_json else one_per_transfer(gathered.happenings):
            if happening.fits(only, failed=failed):
                print_json(happening.as_json()) if as_json else typer.echo(line(happening))
        for note in gathered.notes:
            err.print(Text(f"note: {one_line(note)}", "yellow"))
        if follower is not None:
            async for happening in follower.follow(gathered):
                if happening.fits(only, failed=failed):
                    print_json(happening.as_json()) if as_json else echo(line(happening))


def echo(text: str) -> None:
    """Print one line and flush it, so that the reader of a pipe gets it at once."""
    typer.echo(text)
    sys.stdout.flush()
