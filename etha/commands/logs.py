"""``etha logs``: what this host's agents have logged."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from etha.commands.agents import name_of_agent
from etha.commands.terminal import closed_pipe_ends, err, stopped_by_ctrl_c
from etha.config import Settings
from etha.errors import AgentUnavailableError, ConfigError

if TYPE_CHECKING:
    from etha.observe.logfiles import LogView


def logs(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on with what is added, until Ctrl-C")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda:N; default: all agents of the namespace")] = None,
    lines: Annotated[int | None, typer.Option("--lines", "-n", min=0, help="only the last N; default: all")] = None,
) -> None:
    """Show the logs of this host's agents, also of those that have left: merged by time, with the device before it.

    ETHA_LOG and ETHA_LOG_FORMAT say what agents log. An agent that was not started by a client logs to its standard
    error; it is shown if that is a file.
    """
    from etha.agent_session import LogFinder, place
    from etha.observe.logfiles import LogView

    settings = Settings.from_env()
    finder = LogFinder(settings, None if device is None else log_name(device, settings))
    with closing(LogView(finder.find)) as view, stopped_by_ctrl_c(), closed_pipe_ends():
        if follow:
            settings.ensure_runtime_dir()
            view.follow(settings.runtime_dir / settings.namespace)
        found = print_logs(view, lines, whole=not follow)
        for text in finder.elsewhere:
            err.print(Text(text, "yellow"))
        if not found and not finder.elsewhere and not follow:
            raise AgentUnavailableError(f"no agent has logged at {place(settings)}")
        while follow and view.wait(sys.stdout.fileno()):
            settings.ensure_runtime_dir()  # it may have been removed meanwhile
            view.follow(settings.runtime_dir / settings.namespace)
            print_logs(view, None, whole=False)


def log_name(device: str, settings: Settings) -> str:
    """The name of a device's agent, as its log has it. It is the GPU's uuid, so a driver that is broken cannot tell it:
    then that of the only GPU that has a log. ConfigError names those of several."""
    from etha.observe.logfiles import logs_in

    try:
        return name_of_agent(device)
    except ConfigError as error:
        from etha.agent.runtime.device import any_visible

        names = [name for name in logs_in(settings.runtime_dir / settings.namespace).values() if name != "cpu"]
        if not device.startswith("cuda") or not names or any_visible():
            raise
        if len(names) > 1:
            text = f"{error.message}; there are logs of the agents of GPUs: --device {' or '.join(names)}"
            raise ConfigError(text) from None
        err.print(Text(f"note: {error.message}; these are the logs of {names[0]}", "yellow"), soft_wrap=True)
        return names[0]


def print_logs(view: LogView, most: int | None, *, whole: bool) -> bool:
    """Print what is new, the last ``most`` lines of it. Returns whether there are any logs."""
    lines = [(entry.device, line) for entry in view.read(whole=whole) for line in entry.lines]
    several = len(view.devices) > 1
    for device, line in lines if most is None else lines[max(0, len(lines) - most) :]:
        # a line of JSON has its device inside, and stays JSON
        typer.echo(f"{device} | {line}" if several and not line.startswith("{") else line)
    sys.stdout.flush()
    return bool(view.devices)
