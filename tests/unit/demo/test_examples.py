"""What the launchers of examples share: a table, an environment of its own, an end that leaves nothing."""

from __future__ import annotations

import asyncio
import io
import os
from pathlib import Path

from etha.demo.examples import ExampleFailed, LiveTable, end_ranks, run_example, start_rank
from etha.demo.launch import environment


class Terminal(io.StringIO):
    """A stream that says that it is one."""

    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_lines_of_events_alone() -> None:
    out = io.StringIO()
    table = LiveTable(("side", "version"), lambda: [("trainer", "7")], out)
    table.draw()
    table.note("a kill")
    assert out.getvalue() == "   0.0 s  a kill\n"


def test_a_terminal_gets_the_table_below_the_last_event() -> None:
    out = Terminal()
    table = LiveTable(("side", "version"), lambda: [("trainer", "7"), ("r", "12")], out)
    table.note("first")
    drawn = "side     version\ntrainer  7\nr        12\n"
    assert out.getvalue() == "   0.0 s  first\n" + drawn
    table.draw()  # too soon
    assert out.getvalue() == "   0.0 s  first\n" + drawn
    table.note("second")
    assert out.getvalue().endswith(drawn + "\x1b[3A\x1b[J   0.0 s  second\n" + drawn)


def test_a_failure_shows_the_logs_and_leaves_nothing(tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(
        "import sys; print('lost', file=sys.stderr, flush=True); print('{}', flush=True); sys.stdin.read()"
    )
    pids, places = [], []

    async def work(directory: Path) -> None:
        places.append(directory)
        rank = await start_rank(program, environment(directory, os.environ), directory / "rank.log")
        pids.append(rank.process.pid)
        assert rank.process.stdout is not None
        assert await rank.process.stdout.readline() == b"{}\n"
        try:
            async with asyncio.TaskGroup():
                raise ExampleFailed("wrong elements")
        finally:
            await end_ranks([rank])

    said: list[str] = []
    assert run_example(work, 60, said.append) == 1
    assert said == ["--- rank.log\nlost\nExampleFailed: wrong elements"]
    assert not Path(f"/proc/{pids[0]}").exists() and not places[0].exists()


def test_it_ends_when_its_time_is_over() -> None:
    async def work(directory: Path) -> None:
        await asyncio.Event().wait()

    said: list[str] = []
    assert run_example(work, 0.05, said.append) == 1
    assert said[0].startswith("TimeoutError")
