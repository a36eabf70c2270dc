"""``etha publications``: which versions there are, who holds them, and who is fed by whom."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import Annotated, Any

import typer
from rich.text import Text

from etha.commands import completion
from etha.commands.terminal import closed_pipe_ends, err, out, print_json, stopped_by_ctrl_c
from etha.config import Settings
from etha.errors import AgentUnavailableError, ConfigError

#: Seconds for an agent to answer. One that takes longer is frozen.
SECONDS = 5.0


def publications(
    name: Annotated[
        str | None, typer.Argument(help="only this publication; default: all", autocompletion=completion.publications)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the same as JSON")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="again every second, until Ctrl-C")] = False,
) -> None:
    """Show the namespace's publications: the newest version, who holds which, who is fed by whom, and who lags.

    A subscriber is current, receiving, waiting for a place at a holder, behind (it has not asked for the newest
    version), forming (some of its ranks have not come), or lost (its agent does not answer).

    An agent of this host reads it from Redis. With --watch the command waits for one, and for the publication; without,
    that there is none is the error agent_unavailable, or config for the publication.
    """
    import asyncio

    settings = Settings.from_env()
    with stopped_by_ctrl_c(), closed_pipe_ends():
        asyncio.run(show(settings, name, as_json=as_json, watch=watch))


async def show(settings: Settings, name: str | None, *, as_json: bool, watch: bool) -> None:
    """Print the publications, or the one of that name; with ``watch`` again every second until cancelled, as JSON one
    line each time."""
    import asyncio

    from rich.live import Live

    from etha.agent_session import look, none_runs
    from etha.status import publication_tables, whole

    with Live(console=out, auto_refresh=False) if watch and out.is_terminal and not as_json else nullcontext() as live:
        while True:
            silent = list[str]()
            reports = await look(settings, timeout=SECONDS, silent=silent)
            if not reports and not watch:
                raise AgentUnavailableError("; ".join(silent) or none_runs(settings))
            known: list[dict[str, Any]] = whole(reports)["publications"] if reports else []
            found = [one for one in known if name in (None, one["publication"])]
            if name is not None and not found and not watch:
                others = ", ".join(sorted(one["publication"] for one in known)) or "none at all"
                raise ConfigError(f"namespace {settings.namespace!r} has no publication {name!r}; it has {others}")
            stale = [one["agent"]["stale"] for one in reports if one["agent"].get("stale")]
            if as_json and watch:
                print_json({"publications": found})
            elif as_json:
                typer.echo(json.dumps({"publications": found}))
            else:
                picture = publication_tables(found) if reports else Text(none_runs(settings))
                live.update(picture, refresh=True) if live is not None else out.print(picture)
                sys.stdout.flush()
            for text in [*silent, *stale] if not watch else ():
                err.print(Text(f"note: {text}", "yellow"))
            if not watch:
                return
            await asyncio.sleep(1)
