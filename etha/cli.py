"""The command line, ``etha`` or ``python -m etha``: its commands, its help, and how an error ends it.

What a command does is in ``etha/commands``. Only these files print, and only this one configures logging.
"""

from __future__ import annotations

import logging
from typing import Annotated

import typer
from rich.text import Text

from etha.commands import agents, dashboard, demo, doctor, events, logs, plans, publications, publish, traces
from etha.commands.terminal import err
from etha.config import ENVIRONMENT, LogSettings
from etha.errors import EthaError
from etha.observe.logs import AgentLog, levels
from etha.printable import printable
from etha.version import __version__

# Heavy imports (torch, the client, the demo, asyncio) stay inside the commands, so that --help answers at once.

#: Shown under ``etha --help``; typer wants an empty line between paragraphs.
EXPLAINED = "\n\n".join(["Environment:", *(f"{name}: {meaning}" for name, meaning in ENVIRONMENT.items())])
#: Shown under every command's --help.
EPILOG = f"Environment (`etha --help` says what each is): {', '.join(ENVIRONMENT)}"

app = typer.Typer(
    help="Moves tensors between two PyTorch jobs that were launched separately, from any DTensor layout to any other.",
    epilog=EXPLAINED,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the ``etha`` command. Etha's own errors become one line and status 1."""
    try:
        app(prog_name="etha")
    except EthaError as error:
        err.print(Text(printable(f"{error.code}: {error.message}"), "red"))
        for violation in getattr(error, "violations", ()):
            err.print(Text(printable(str(violation)), "red"))
        raise SystemExit(1) from None
    except OSError as error:
        err.print(Text(f"{error}", "red"))
        raise SystemExit(1) from None


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"etha {__version__}")
        raise typer.Exit


@app.callback()
def configure(
    context: typer.Context,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="log debug lines too, as ETHA_LOG=debug does, to standard error")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="print the version and exit")
    ] = False,
) -> None:
    """Set up logging for every command, as ETHA_LOG and ETHA_LOG_FORMAT say."""
    context.obj = verbose
    wanted = LogSettings.from_env()
    handler: logging.Handler
    if wanted.format == "json":
        handler = AgentLog("json")
    else:
        from rich.logging import RichHandler

        handler = RichHandler(console=err, show_path=False, markup=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    root, own = levels("debug" if verbose else wanted.level)
    logging.basicConfig(level=root, handlers=[handler])
    logging.getLogger("etha").setLevel(own)
    logging.getLogger("matplotlib").setLevel(max(root, logging.WARNING))  # it tells that it has looked at fonts


COMMANDS = (
    agents.agent,
    agents.status,
    agents.stop,
    publications.publications,
    publish.publish,
    events.events,
    dashboard.dashboard,
    logs.logs,
    traces.trace,
    plans.plan,
    plans.plot,
    demo.demo,
    doctor.doctor,
)
for command in COMMANDS:
    app.command(epilog=EPILOG)(command)
