"""The command line: ``etha agent | status | stop | plan | demo | doctor``, or ``python -m etha``.

Only this file prints and configures logging. What a command does is in the file that it calls.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from etha.config import CUDA_AGENT, ENVIRONMENT, Settings, agent_path, check_device, check_name
from etha.errors import AgentUnavailableError, ConfigError, EthaError
from etha.status import events_table, status_tables, whole
from etha.version import __version__

if TYPE_CHECKING:
    from etha.demo.events import Event
    from etha.demo.report import DemoReport

# Heavy imports (torch, the client, the demo, asyncio) stay inside the commands, so that --help answers at once.

#: Shown under ``etha --help``; typer wants an empty line between paragraphs.
EXPLAINED = "\n\n".join(["Environment:", *(f"{name}: {meaning}" for name, meaning in ENVIRONMENT.items())])
#: Shown under every command's --help.
EPILOG = f"Environment (`etha --help` says what each is): {', '.join(ENVIRONMENT)}"
#: Seconds for a status call. An agent that takes longer is frozen.
STATUS_SECONDS = 5.0
#: Seconds for an agent to stop. Its running transfers have half a minute.
STOP_SECONDS = 40.0
#: Number of events that --watch shows.
EVENTS_SHOWN = 10
NOTHING: dict[str, Any] = {"agent": None, "pairs": [], "batches": []}
#: Colours of the doctor's verdicts.
COLOURS = {"ok": "green", "note": "yellow", "fails": "red"}
#: Columns if the output is not a terminal.
PLAIN_WIDTH = 132

app = typer.Typer(
    help="Moves tensors between two PyTorch jobs that were launched separately, from any DTensor layout to any other.",
    epilog=EXPLAINED,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
err = Console(stderr=True, width=None if sys.stderr.isatty() else PLAIN_WIDTH)


def main() -> None:
    """Entry point of the ``etha`` command. Etha's own errors become one line and status 1."""
    try:
        app()
    except EthaError as error:
        err.print(Text(f"{error.code}: {error.message}", "red"))
        for violation in getattr(error, "violations", ()):
            err.print(Text(str(violation), "red"))
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
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="log debug lines too, to standard error")] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="print the version and exit")
    ] = False,
) -> None:
    """Set up logging for every command."""
    handler = RichHandler(console=err, show_path=False, markup=False)
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, format="%(message)s", handlers=[handler])


@app.command(epilog=EPILOG)
def agent(
    device: Annotated[str, typer.Option(help="cpu, cuda:N, or all")] = "cpu",
    redis: Annotated[str | None, typer.Option(help="URL of Redis; default: $ETHA_REDIS_URL, else embedded")] = None,
    namespace: Annotated[str | None, typer.Option(help="default: $ETHA_NAMESPACE, else 'default'")] = None,
    listen: Annotated[
        str | None, typer.Option(help="HOST:PORT for links, data on PORT+1; default: $ETHA_LISTEN, else loopback")
    ] = None,
    staging: Annotated[
        str | None, typer.Option(help="most memory besides the workers' own; default: $ETHA_STAGING, else 256MiB")
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
    }
    raise typer.Exit(daemon.main([word for option, value in given.items() if value for word in (option, value)]))


@app.command(epilog=EPILOG)
def status(
    as_json: Annotated[bool, typer.Option("--json", help="the same as JSON")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="again every second, with events, until Ctrl-C")] = False,
) -> None:
    """Show this host's agents, their pairs and batches, versions, last transfers and who waits for whom.

    With --watch also what happens in the namespace: who came, joined, registered, left, and why. It waits for agents
    where none is running.
    """
    import asyncio

    from etha.observer import look

    settings = Settings.from_env()
    if watch:
        with stopped_by_ctrl_c():
            asyncio.run(watch_status(settings, as_json))
    found = asyncio.run(look(settings, timeout=STATUS_SECONDS))
    if not found:
        raise AgentUnavailableError(none_runs(settings))
    if as_json:
        typer.echo(json.dumps(whole(found)))
    else:
        out.print(status_tables(whole(found)))


@app.command(epilog=EPILOG)
def stop(
    device: Annotated[str | None, typer.Option(help="cpu or cuda:N; default: all agents of the namespace")] = None,
    now: Annotated[
        bool, typer.Option("--now", help="do not wait for running transfers; kill what does not end")
    ] = False,
) -> None:
    """Stop this host's agents of the namespace: running transfers finish, then the workers' next calls fail.

    An idle agent that `init_pair` has started leaves by itself after ETHA_IDLE seconds, and so does the embedded Redis.
    """
    import asyncio

    from etha.observer import addresses, stop

    settings = Settings.from_env()
    if device is None:
        paths = [agent_path(address) for address in addresses(settings)]
    else:
        paths = [settings.socket_path(name_of_agent(device))]
    stopped = [pid for path in paths if (pid := asyncio.run(stop(path, now=now, timeout=STOP_SECONDS))) is not None]
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

    from etha.observer import Watch

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


def none_runs(settings: Settings) -> str:
    """The message if no agent answers."""
    return f"no agent is running at {place(settings)}; a client starts one, and so does 'etha agent'"


def place(settings: Settings) -> str:
    """Where agents of the namespace are looked for."""
    return settings.agent or str(settings.runtime_dir / settings.namespace)


def print_json(value: dict[str, Any]) -> None:
    """Print one line of JSON and flush it, so that the reader of a pipe gets it at once."""
    typer.echo(json.dumps(value))
    sys.stdout.flush()


@app.command(epilog=EPILOG)
def plan(
    source: Annotated[Path, typer.Argument(help="the source side as JSON", exists=True, dir_okay=False)],
    target: Annotated[Path, typer.Argument(help="the target side as JSON", exists=True, dir_okay=False)],
    plot: Annotated[Path | None, typer.Option(help="write a picture to this file, too")] = None,
    nic: Annotated[float, typer.Option(min=0.001, help="GB/s of a NIC, each way")] = 50.0,
    host: Annotated[float, typer.Option(min=0.001, help="GB/s of a rank's copies inside its host")] = 400.0,
    local: Annotated[float, typer.Option(min=0.001, help="GB/s of a rank's copies inside its agent")] = 1500.0,
    latency: Annotated[float, typer.Option(min=0, help="microseconds for each peer of a rank")] = 20.0,
    check: Annotated[bool, typer.Option("--check", help="prove every element, too; minutes for large plans")] = False,
) -> None:
    """Explain how tensors would move from one layout to another; no processes are started.

    A side is {"mesh": [2, 2], "placements": ["S(0)", "R"], "tensors": {"w": {"shape": [8, 8], "dtype": "float32"}}};
    a tensor may have "mesh" and "placements" of its own or a "layout" from "layouts", and a nested mesh lists ranks.
    Placements are S(dim), R, P(sum) and _S(dim, split_factor); w.{0..31} is 32 tensors; "hosts": {"name": "node{}",
    "ranks": 8} puts eight ranks on each host. A target without "tensors" takes the source's.

    Predicted: the longest of bytes of the busiest NIC / NIC, of the busiest rank inside its host / HOST and inside
    its agent / LOCAL; and LATENCY for each of its peers.
    """
    from etha.plan import Links
    from etha.planfile import read_plan

    built = read_plan(source, target)
    if check or built.violations:
        built.check()
    links = Links(nic=nic, host=host, local=local, latency=latency * 1e-6)
    out.print(built.explain(links), markup=False, highlight=False)
    if check:
        out.print("checked: every element of every target arrives exactly once, from where the source holds it")
    if plot is not None:
        built.plot(plot)


@app.command(epilog=EPILOG)
def demo(
    steps: Annotated[int, typer.Option(min=1, help="training steps")] = 160,
    every: Annotated[int, typer.Option(min=1, help="steps between two versions")] = 20,
    synthetic: Annotated[
        float | None, typer.Option(metavar="GIB", help="move this much random data in Llama-3 8B's proportions instead")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda: both jobs on the GPUs, ranks round robin")] = "cpu",
    redis: Annotated[str | None, typer.Option(help="URL of a Redis that both jobs reach; default: embedded")] = None,
    trainer: Annotated[
        str | None, typer.Option(metavar="NETNS,ADDRESS", help="run the trainer in this network namespace, as a host")
    ] = None,
    inference: Annotated[
        str | None, typer.Option(metavar="NETNS,ADDRESS", help="run the inference job in this network namespace")
    ] = None,
) -> None:
    """Run the main job here: a trainer and an inference job, launched independently, compared element by element.

    The trainer trains a character GPT on Shakespeare with FSDP2 x TP in 4 processes and sends a version every few
    steps; the inference job, 2 tensor-parallel asyncio processes, evaluates it on the same held-out text. Exit status
    1 when an element or a loss differs, or the loss does not fall below 2.4 nats per character in 160 steps.
    """
    import asyncio

    from etha.demo import launch, seats
    from etha.demo.hosts import DemoHost, DemoHosts
    from etha.demo.options import Options
    from etha.demo.report import DemoReport, table

    given = {"trainer": trainer, "inference": inference}
    try:
        options = Options(steps=steps, every=every, synthetic=synthetic, device=device, cards=seats.cards(device))
        places = DemoHosts(places={job: DemoHost.parse(text) for job, text in given.items() if text}, redis=redis)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    report = DemoReport(options)
    started = time.monotonic()
    with demo_progress(report) as tell:
        try:
            asyncio.run(launch.run_until_signal(options, tell, places))
        except launch.DemoError as error:
            err.print(Text(f"the demo failed: {error}", "red"))
            raise typer.Exit(1) from None
    out.print(table(report.rows, synthetic=synthetic is not None))
    if report.rows and report.rows[-1].sample:
        out.print(Text(f"version {report.rows[-1].number} writes:\n{report.rows[-1].sample}\n"))
    problems = report.verdict()
    for problem in problems:
        err.print(Text(problem, "red"))
    if problems:
        raise typer.Exit(1)
    out.print(f"{len(report.rows)} versions, every element equal, in {time.monotonic() - started:.0f} s")


@contextmanager
def demo_progress(report: DemoReport) -> Iterator[Any]:
    """A bar on a terminal, a line for each version elsewhere. Yields the function that takes the events."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, disable=not out.is_terminal, transient=True) as bars:
        moving = bars.add_task("starting both jobs", total=None)

        def tell(event: Event) -> None:
            row = report.take(event)
            if row is not None:
                loss = "" if row.received_loss is None else f", loss {row.received_loss:.4f}"
                equal = row.problems[0] if row.problems else f"{row.tensors} tensors equal"
                bars.console.print(
                    f"version {row.number}: {row.nbytes:,} bytes at {row.gb_per_s:.2f} GB/s{loss}, {equal}"
                )
            elif event.kind == "progress":
                done, total = (
                    event.fields[k] for k in (("step", "steps") if "step" in event.fields else ("bytes", "total"))
                )
                bars.update(moving, description=event.job, completed=done, total=total)

        yield tell


@contextmanager
def stopped_by_ctrl_c() -> Iterator[None]:
    """End the command without a traceback on Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


@app.command(epilog=EPILOG)
def doctor(
    redis: Annotated[
        str | None, typer.Option(help="URL of Redis: also try whether its agents can be reached from this host")
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="default: $ETHA_NAMESPACE, else 'default'")] = None,
) -> None:
    """Try what this machine must be able to do, and say how to mend what fails; exit status 1 if anything does.

    With --redis: would another host and this one reach each other? It connects to every live agent of the namespace
    and says which address of this host an agent could listen on. Run it on both hosts.
    """
    from etha.doctor import examine

    settings = Settings.from_env()
    if redis is not None:
        settings = replace(settings, redis_url=redis)
    if namespace is not None:
        settings = replace(settings, namespace=check_name("namespace", namespace))
    findings = examine(settings, between_hosts=redis is not None)
    table = Table()
    for heading in ("check", "", "found"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(finding.name, Text(finding.verdict, COLOURS[finding.verdict]), Text(finding.text))
    out.print(table)
    for finding in findings:
        if finding.mend:
            out.print(Text(f"{finding.name}: {finding.mend}", COLOURS[finding.verdict]))
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)
