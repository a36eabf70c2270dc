"""What the launchers in examples/ share: ranks as processes that say lines of JSON, a table that changes, the end.

A launcher starts everything in a private directory and adopts what its ranks start. So nothing is left, whatever
happens.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from etha.demo.launch import private_directory, stop, tails
from etha.demo.process import adopting

#: Least seconds between two drawings of a table.
_PAUSE = 0.1


class ExampleFailed(Exception):
    """What an example promises did not happen."""


@dataclass(slots=True)
class ExampleRank:
    """One process, the last line that it has said, and the last digest in any of them."""

    process: asyncio.subprocess.Process
    said: dict[str, Any] = field(default_factory=dict)
    digest: str = ""


async def start_rank(program: Path, env: dict[str, str], log: Path) -> ExampleRank:
    """Start a rank, whose standard output and input are pipes, and whose errors go to a file."""
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(program),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=env,
            start_new_session=True,
        )
    return ExampleRank(process)


async def end_ranks(ranks: Iterable[ExampleRank]) -> None:
    """Kill the ranks that still run, and reap them."""
    for rank in ranks:
        if rank.process.returncode is None:
            rank.process.kill()
            await rank.process.wait()


class LiveTable:
    """A table on a terminal, drawn again in place below the lines of events. A pipe or a file gets those alone.

    ``rows()`` are its lines now, each with as many cells as there are ``columns``.
    """

    def __init__(self, columns: Sequence[str], rows: Callable[[], Iterable[Sequence[str]]], out: TextIO) -> None:
        self._columns, self._rows, self._out, self._live = columns, rows, out, out.isatty()
        self._lines, self._drawn, self._begun = 0, 0.0, time.monotonic()

    def note(self, text: str) -> None:
        """Something happened: a line above the table, with the seconds since it was made."""
        self._erase()
        self._out.write(f"{time.monotonic() - self._begun:6.1f} s  {text}\n")
        self._out.flush()
        self._drawn = 0.0
        self.draw()

    def draw(self) -> None:
        """Show it as it is now, at most ten times a second."""
        if not self._live or time.monotonic() - self._drawn < _PAUSE:
            return
        self._erase()
        rows = [self._columns, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(self._columns))]
        most = shutil.get_terminal_size().columns - 1  # a line that wraps would be two
        for row in rows:
            line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            self._out.write(line[:most] + "\n")
        self._out.flush()
        self._lines, self._drawn = len(rows), time.monotonic()

    def _erase(self) -> None:
        if self._lines:
            self._out.write(f"\x1b[{self._lines}A\x1b[J")  # up, and clear to the end of the screen
            self._lines = 0


def run_example(work: Callable[[Path], Coroutine[Any, Any, None]], seconds: float, tell: Callable[[str], None]) -> int:
    """Run ``work`` in a private directory, for at most so many seconds; the exit status.

    0 if it returns, 130 after Ctrl-C or SIGTERM, else 1: ``tell`` gets its error below the ends of the logs.
    """
    try:
        return asyncio.run(_run(work, seconds, tell))
    except asyncio.CancelledError:
        return 130


async def _run(work: Callable[[Path], Coroutine[Any, Any, None]], seconds: float, tell: Callable[[str], None]) -> int:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with private_directory() as directory, adopting() as before:
        try:
            async with asyncio.timeout(seconds):
                await work(directory)
        except Exception as error:
            cause: BaseException = error
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            tell("\n".join([*tails(directory), f"{type(cause).__name__}: {cause}"]))
            return 1
        finally:
            stop(before)
    return 0
