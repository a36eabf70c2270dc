"""``etha publish``: a directory of safetensors as the first holder of a publication."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from etha.commands.terminal import closed_pipe_ends, out, progress
from etha.config import parse_bytes
from etha.printable import printable
from etha.units import counted, size

if TYPE_CHECKING:
    from etha import SubscriberState
    from etha.publishing.directory import PublishedDirectory


def publish(
    name: Annotated[str, typer.Argument(help="the publication, as subscribers name it")],
    directory: Annotated[
        Path, typer.Argument(help="has safetensors files: one, or several with other tensors each or an index")
    ],
    version: Annotated[
        str | None,
        typer.Option(help="the version's label, a whole number or a text; default: the one that the files have"),
    ] = None,
    publisher: Annotated[str, typer.Option(help="the name of this side")] = "checkpoint",
    until: Annotated[
        int | None, typer.Option(min=1, help="leave once so many subscribers have received it; default: stay")
    ] = None,
    fan_out: Annotated[
        int | None, typer.Option(min=1, help="subscribers that are served from here at once; default: 2")
    ] = None,
    max_rate: Annotated[
        str | None,
        typer.Option(help="bytes per second that are sent to other hosts, as 500MiB or 1GiB; default: no limit"),
    ] = None,
    redis: Annotated[str | None, typer.Option(help="URL of Redis; default: $ETHA_REDIS_URL, else embedded")] = None,
    namespace: Annotated[str | None, typer.Option(help="default: $ETHA_NAMESPACE, else 'default'")] = None,
    timeout: Annotated[float, typer.Option(min=0, help="seconds for publishing")] = 600.0,
) -> None:
    """Publish a directory of safetensors, so that a fleet starts without a trainer. Subscribers feed each other on.

    It tells which subscribers have received the version, and stays until Ctrl-C or SIGTERM. This host's agent then
    keeps the version until somebody else holds it, but one that a client has started leaves a minute after its last
    worker.

    A publication has one publisher. While a trainer publishes under this name the command is refused, and while the
    command runs a trainer is. A trainer that starts afterwards goes on with the next number.
    """
    import asyncio
    import re

    with progress("importing torch") as bar:
        from etha import AsyncTensorBusClient
        from etha.publishing.directory import DirectoryOptions, publish_directory

        bar.at(0, None, f"publishing {directory}")
        options = DirectoryOptions(
            name=name,
            directory=directory,
            version=int(version) if version is not None and re.fullmatch(r"-?[0-9]{1,18}", version) else version,
            publisher=publisher,
            fan_out=fan_out,
            max_rate=None if max_rate is None else parse_bytes("--max-rate", max_rate),
            until=until,
            timeout=timeout,
        )

    async def run() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        async with AsyncTensorBusClient(device="cpu", redis_url=redis, namespace=namespace) as client:
            await publish_directory(client, options, tell_published, tell_holder)

    with closed_pipe_ends():
        try:
            asyncio.run(run())
        except asyncio.CancelledError:
            say("stopped: this host's agent keeps the version until somebody else holds it")
        else:
            say(f"{counted(options.until or 0, 'subscriber')} or more have received it")


def tell_published(what: PublishedDirectory) -> None:
    files, put = what.files, what.put
    label = "" if put.version is None else f", version {put.version}"
    say(
        f"published {what.options.name}: {counted(len(files.tensors), 'tensor')} of {size(files.nbytes)} from "
        f"{counted(files.files, 'file')} of {files.directory}, seq {put.seq}{label}"
    )


def tell_holder(name: str, state: SubscriberState | None) -> None:
    if state is None:
        say(f"{name} has received it, and has left")
        return
    source = f", from {state.source}" if state.source else ""
    say(f"{name} ({counted(state.ranks, 'rank')}) holds seq {state.seq}{source}")


def say(text: str) -> None:
    """One line, which a pipe gets at once."""
    out.print(Text(printable(text)), soft_wrap=True)
    out.file.flush()
