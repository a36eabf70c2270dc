"""What the commands share: where they print, and how they end on Ctrl-C. Imports nothing that takes long."""

from __future__ import annotations

import json
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from rich.progress import Progress

#: Seconds after which a command that has not ended shows how far it is.
PROGRESS_AFTER = 1.0
#: Columns if the output is not a terminal.
PLAIN_WIDTH = 132

out = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
err = Console(stderr=True, width=None if sys.stderr.isatty() else PLAIN_WIDTH)


def print_json(value: dict[str, Any]) -> None:
    """Print one line of JSON and flush it, so that the reader of a pipe gets it at once."""
    typer.echo(json.dumps(value))
    sys.stdout.flush()


@contextmanager
def stopped_by_ctrl_c() -> Iterator[None]:
    """End the command without a traceback on Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


@contextmanager
def closed_pipe_ends() -> Iterator[None]:
    """End the command without a word once nobody reads its output any more."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
        raise typer.Exit(0) from None


@contextmanager
def reader_watched(on_left: Callable[[], None]) -> Iterator[None]:
    """Call ``on_left`` once nobody reads standard output any more. Inside an event loop, which need not print anything.

    A file has no reader, and is not watched.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    with select.epoll() as poll:

        def left() -> None:
            loop.remove_reader(poll.fileno())
            on_left()

        try:
            poll.register(sys.stdout.fileno(), 0)  # errors and hang-ups come unasked
        except OSError:
            yield
            return
        loop.add_reader(poll.fileno(), left)
        try:
            yield
        finally:
            loop.remove_reader(poll.fileno())


class Bar:
    """How far a command is; ``progress`` shows it."""

    def __init__(self, shown: Progress | None, what: str) -> None:
        self._shown = shown
        self._task = None if shown is None else shown.add_task(what, total=None, steps="")

    def at(self, done: int, total: int | None, what: str | None = None) -> None:
        """``done`` of ``total`` steps are done; without a total the bar only moves. ``what`` comes next."""
        if self._shown is not None and self._task is not None:
            steps = "" if total is None else f"{done}/{total}"
            self._shown.update(self._task, completed=done, total=total, description=what, steps=steps)


@contextmanager
def progress(what: str) -> Iterator[Bar]:
    """Show a bar on standard error if this takes more than a second, and nothing if that is no terminal."""
    if not err.is_terminal:
        yield Bar(None, what)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[steps]}"), TimeElapsedColumn())
    shown = Progress(*columns, console=err, transient=True)
    timer = threading.Timer(PROGRESS_AFTER, shown.start)
    timer.daemon = True
    timer.start()
    try:
        yield Bar(shown, what)
    finally:
        timer.cancel()
        timer.join()  # else it could start the bar after it was stopped
        shown.stop()
