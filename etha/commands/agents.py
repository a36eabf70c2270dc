"""``etha agent | status | stop``: run agents, look at them, end them."""

from __future__ import annotations

import json
import sys
from collections import deque
from contextlib import nullcontext
from typing import Annotated, Any

import typer
from rich.text import Text

from etha.commands.completion import devices
from etha.commands.terminal import closed_pipe_ends, err, out, print_json, progress, stopped_by_ctrl_c
from etha.config import CUDA_AGENT, Settings, agent_path, check_device
from etha.errors import AgentUnavailableError

#: Seconds for a status call. An agent that takes longer is frozen.
STATUS_SECONDS = 5.0
#: Seconds for an agent to stop. Its running transfers have half a minute.
STOP_SECONDS = 40.0
#: Number of events that --watch shows.
EVENTS_SHOWN = 10
NOTHING: dict[str, Any] = {"agent": None, "agents": [], "pairs": [], "batches": [], "groups": [], "publications": []}


def agent(
    context: typer.Context,
    device: Annotated[str, typer.Option(help="cpu, cuda:N, or all")] = "cpu",
    redis: Annotated[str | None, typer.Option(help="URL of Redis; default: $ETHA_REDIS_URL, else embedded")] = None,
    namespace: Annotated[str | None, typer.Option(help="default: $ETHA_NAMESPACE, else 'default'")] = None,
    listen: Annotated[
        str | None, typer.Option(help="HOST:PORT for links, data on PORT+1; default: $ETHA_LISTEN, else loopback")
    ] = None,
    staging: Annotated[
        str | None, typer.Option(help="most memory besides the workers' own; default: $ETHA_STAGING, else 256MiB")
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(help="HOST:PORT where Prometheus gets metrics (all: PORT, PORT+1, ...); default: $ETHA_METRICS"),
    ] = None,
) -> None:
    """Run an agent in the foreground; SIGTERM lets running transfers finish and leaves cleanly."""
    from etha.agent import __main__ as daemon

    given = {
        "--device": device,
        "--redis": redis,
        "--namespace": namespace,
        "--listen": listen,
        "--staging": staging,
        "--metrics": metrics,
    }
    words = [word for option, value in given.items() if value for word in (option, value)]
    raise typer.Exit(daemon.main([*words, *(["--verbose"] if context.obj else [])]))


def status(
    as_json: Annotated[bool, typer.Option("--json", help="the same as JSON")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="again every second, with events, until Ctrl-C")] = False,
) -> None:
    """Show this host's agents, their pairs and batches, versions, last transfers and who waits for whom.

    Also the namespace's elastic groups: epoch, step, members with their hosts and processes, and whom the next epoch
    waits for. A member of another host is shown at the step at which the epoch formed, if no member is on this host.

    With --watch also what happens in the namespace: who came, joined, registered, left, and why. It waits for agents
    where none is running. Without --watch that is the error agent_unavailable, and nothing on standard output, also if
    Redis still knows pairs.
    """
    import asyncio

    from etha.agent_session import look, none_runs
    from etha.status import status_tables, whole

    settings = Settings.from_env()
    if watch:
        with stopped_by_ctrl_c(), closed_pipe_ends():
            asyncio.run(watch_status(settings, as_json))
    silent = list[str]()
    found = asyncio.run(look(settings, timeout=STATUS_SECONDS, silent=silent))
    if not found:
        raise AgentUnavailableError("; ".join(silent) or none_runs(settings))
    for text in silent:
        err.print(Text(f"note: {text}", "yellow"))
    if as_json:
        typer.echo(json.dumps(whole(found)))
    else:
        out.print(status_tables(whole(found)))


def stop(
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda:N; default: all agents of the namespace", autocompletion=devices)
    ] = None,
    now: Annotated[
        bool, typer.Option("--now", help="do not wait for running transfers; kill what does not end")
    ] = False,
) -> None:
    """Stop this host's agents of the namespace: running transfers finish, then the workers' next calls fail.

    An idle agent that `init_pair` has started leaves by itself after ETHA_IDLE seconds, and so does the embedded Redis.
    """
    import asyncio

    from etha.agent_session import addresses, place, stop

    def say_waits(text: str) -> None:
        err.print(Text(text, "yellow"))

    settings = Settings.from_env()
    if device is None:
        paths = [agent_path(address) for address in addresses(settings)]
    else:
        paths = [settings.socket_path(name_of_agent(device))]
    stopped = []
    with progress("waiting for running transfers to end") as bar:
        for number, path in enumerate(paths):
            bar.at(number, len(paths))
            if (pid := asyncio.run(stop(path, now=now, timeout=STOP_SECONDS, waits=say_waits))) is not None:
                stopped.append(pid)
    if not stopped:
        where = ", ".join(map(str, paths)) or place(settings)
        raise AgentUnavailableError(f"nothing to stop: no agent is running at {where}")
    for pid in stopped:
        typer.echo(f"stopped the agent that was process {pid}")


def name_of_agent(device: str) -> str:
    """The name of a device's agent. ConfigError for a GPU that is not here, and for what is no device."""
    if check_device(device) == "cpu" or device.startswith(CUDA_AGENT):
        return device
    from etha.agent.runtime.device import name_of

    return name_of(device)


async def watch_status(settings: Settings, as_json: bool) -> None:
    """Show status and events every second until cancelled. As JSON, print one line each time, with the new events."""
    import asyncio

    from rich.console import Group
    from rich.live import Live

    from etha.agent_session import Watch, none_runs
    from etha.status import events_table, status_tables, whole

    watch, lines = Watch(settings, timeout=STATUS_SECONDS), deque[dict[str, Any]](maxlen=EVENTS_SHOWN)
    # A terminal shows one picture that changes; a pipe or a file gets one after the other.
    with Live(console=out, auto_refresh=False) if out.is_terminal and not as_json else nullcontext() as live:
        while True:
            found, events, why = await watch.look(EVENTS_SHOWN)
            lines.extend(events)
            if as_json:
                print_json({**(whole(found) if found else NOTHING), "events": events})
            else:
                tables = status_tables(whole(found)) if found else Text(none_runs(settings))
                picture = Group(tables, events_table(list(lines), why))
                if live is not None:
                    live.update(picture, refresh=True)
                else:
                    out.print(picture)
                    sys.stdout.flush()
            await asyncio.sleep(1)
