"""``etha demo``: runs the main job on this machine, and shows how far it is."""

from __future__ import annotations

import signal
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.text import Text

from etha.commands.terminal import err, out
from etha.errors import ConfigError

if TYPE_CHECKING:
    from etha.demo.events import Event
    from etha.demo.hosts import DemoHosts
    from etha.demo.options import Options
    from etha.demo.report import DemoReport


T = TypeVar("T")


def demo(
    steps: Annotated[int, typer.Option(min=1, help="training steps")] = 160,
    every: Annotated[int, typer.Option(min=1, help="steps between two versions")] = 20,
    synthetic: Annotated[
        float | None, typer.Option(metavar="GIB", help="move this much random data in Llama-3 8B's proportions instead")
    ] = None,
    replicas: Annotated[
        int, typer.Option(min=0, metavar="N", help="publish to N replicas, some of which join late or are killed")
    ] = 0,
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

    With --replicas the trainer publishes its versions, and N replicas with different layouts follow in place of the
    inference job. Two of them join late and one is killed and starts again. Exit status 1 unless all of them end with
    the newest version, and every element of every version that one has received was right.
    """
    from etha.demo import launch, seats
    from etha.demo.hosts import DemoHost, DemoHosts
    from etha.demo.options import Options
    from etha.demo.report import DemoReport, table

    given = {"trainer": trainer, "inference": inference}
    try:
        options = Options(
            steps=steps,
            every=every,
            synthetic=synthetic,
            device=device,
            cards=seats.cards(device),
            replicas=replicas,
        )
        places = DemoHosts(places={job: DemoHost.parse(text) for job, text in given.items() if text}, redis=redis)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    started = time.monotonic()
    if options.replicas:
        run_replicas(options, places, started)
        return
    report = DemoReport(options)
    with demo_progress(report) as tell:
        run_to_its_end(launch.run(options, tell, places))
    out.print(table(report.rows, synthetic=synthetic is not None))
    if report.rows and report.rows[-1].sample:
        out.print(Text(f"version {report.rows[-1].number} writes:\n{report.rows[-1].sample}\n"))
    problems = report.verdict()
    for problem in problems:
        err.print(Text(problem, "red"))
    if problems:
        raise typer.Exit(1)
    out.print(f"{len(report.rows)} versions, every element equal, in {time.monotonic() - started:.0f} s")


def run_replicas(options: Options, places: DemoHosts, started: float) -> None:
    """The demo with replicas: a line for each event, and a table at the end. Exit status 1 if anything was wrong."""
    from etha.demo.fleet import run_fleet
    from etha.demo.fleet_report import fleet_table

    def tell(event: Event) -> None:
        if event.kind == "version":
            number = event.fields["number"]
            source = event.fields.get("source")
            done = f"has put version {number}" if source is None else f"holds version {number}, from {source}"
            say(f"{event.job} {done}")
        elif event.kind == "note":
            say(str(event.fields["text"]))

    def say(text: str) -> None:
        out.print(Text(f"{time.monotonic() - started:6.1f} s  {text}"))

    report = run_to_its_end(run_fleet(options, tell, places))
    out.print(fleet_table(report))
    problems = report.verdict()
    for problem in problems:
        err.print(Text(problem, "red"))
    if problems:
        raise typer.Exit(1)
    seconds = time.monotonic() - started
    last = options.versions[-1]
    out.print(f"{options.replicas} replicas hold version {last}, every element equal, in {seconds:.0f} s")


def run_to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns. Exit status 1 if the demo fails, and 143 after SIGTERM."""
    import asyncio

    from etha.demo import launch

    try:
        return asyncio.run(launch.run_until_signal(work))
    except launch.DemoError as error:
        err.print(Text(f"the demo failed: {error}", "red"))
        raise typer.Exit(1) from None
    except asyncio.CancelledError:
        raise typer.Exit(128 + signal.SIGTERM) from None


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
