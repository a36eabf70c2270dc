"""``etha events``: what happened in the namespace, and why."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from etha.commands.terminal import closed_pipe_ends, err, print_json, reader_watched, stopped_by_ctrl_c
from etha.config import Settings
from etha.printable import one_line

if TYPE_CHECKING:
    from etha.observe.history import Happening

#: Seconds for agents, also those of other hosts, to answer.
SECONDS = 5.0


def events(
    only: Annotated[
        str,
        typer.Argument(
            help="only what is about this PAIR, GROUP or PUBLICATION, or a part of it: PAIR/BATCH, GROUP/REPLICA"
        ),
    ] = "",
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

    with stopped_by_ctrl_c(), closed_pipe_ends():
        asyncio.run(show(Settings.from_env(), only, since, failed=failed, as_json=as_json, on=follow))


async def show(settings: Settings, only: str, since: str, *, failed: bool, as_json: bool, on: bool) -> None:
    """Print what has happened, and with ``on`` what happens from now on."""
    from etha.events import Follower, gather, line, parse_since
    from etha.observe.history import one_per_transfer

    begin = parse_since(since, time.time())
    with Follower(settings) if on else nullcontext() as follower:
        gathered = await gather(settings, since=begin, failed=failed, timeout=SECONDS)
        entries = gathered.happenings if as_json else one_per_transfer(gathered.happenings)
        shown = [one for one in entries if one.fits(only, failed=failed)]
        for happening in shown:
            print_json(happening.as_json()) if as_json else typer.echo(line(happening))
        notes = gathered.notes if shown else [*gathered.notes, nothing(entries, only, since, failed=failed)]
        for note in notes:
            err.print(Text(f"note: {one_line(note)}", "yellow"))
        sys.stdout.flush()
        if follower is not None:
            with reader_watched(follower.end):
                async with aclosing(follower.follow(gathered)) as news:
                    async for happening in news:
                        if happening.fits(only, failed=failed):
                            print_json(happening.as_json()) if as_json else echo(line(happening))


def nothing(entries: Sequence[Happening], only: str, since: str, *, failed: bool) -> str:
    """Why nothing is shown, and what is recorded instead: names like the one that was asked for, then the latest."""
    import difflib

    what = "no failure is recorded" if failed else "nothing is recorded"
    latest = dict.fromkeys(one.where for one in reversed(entries) if one.where and (one.failed or not failed))
    places = list(dict.fromkeys([*difflib.get_close_matches(only, latest, 5), *latest]))
    if not only or not places:
        return f"{what}{f' about {only}' if only else ''} since {since}; --since 7d looks further back"
    more = f" and {len(places) - 10} more" if len(places) > 10 else ""
    return f"{what} about {only} since {since}, but about {', '.join(places[:10])}{more}"


def echo(text: str) -> None:
    """Print one line and flush it, so that the reader of a pipe gets it at once."""
    typer.echo(text)
    sys.stdout.flush()
