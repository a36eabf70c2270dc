"""``etha trace``: what ETHA_TRACE has recorded, as one file for Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from etha.commands.terminal import err, out, progress


def trace(
    places: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR", help="directories of ETHA_TRACE, one of each host; or files of them", exists=True
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", dir_okay=False, help="the file for Perfetto, replaced if it is there; .gz compresses it"
        ),
    ] = Path("trace.json"),
) -> None:
    """Merge what ETHA_TRACE has recorded on all hosts into one file, which ui.perfetto.dev shows.

    Clocks of hosts are put on one, by what was measured on the links between their agents.
    """
    from etha.observe.trace_merge import merge
    from etha.printable import one_line

    with progress("merging") as bar:
        merged = merge(places, output, bar.at)
    for path, why in merged.strangers:
        err.print(Text(one_line(f"{path}: {why}, left out"), "yellow"), soft_wrap=True)
    for line in merged.warnings:
        err.print(Text(one_line(line), "yellow"), soft_wrap=True)
    out.print(Text(one_line(merged.text)), soft_wrap=True)
    out.print(Text(f"{output}: open it at https://ui.perfetto.dev (Open trace file)"), soft_wrap=True)
