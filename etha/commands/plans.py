"""``etha plan | plot``: what a transfer would move, without processes, and what a registered batch moves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etha.commands.completion import batches, pairs
from etha.commands.terminal import out, progress
from etha.config import Settings

#: Seconds for an agent to count what a batch moves.
PICTURE_SECONDS = 60.0


def plan(
    source: Annotated[Path, typer.Argument(help="the source side as JSON", exists=True, dir_okay=False)],
    target: Annotated[Path, typer.Argument(help="the target side as JSON", exists=True, dir_okay=False)],
    plot: Annotated[
        Path | None, typer.Option(help="draw it, too; FILE ends in .svg, .png or .pdf", metavar="FILE")
    ] = None,
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
    from etha.picture import check_path

    if plot is not None:
        check_path(plot)
    with progress("importing torch") as bar:
        from etha.commands.planfile import read_plan
        from etha.plan import Links

        bar.at(0, None, "planning")
        built = read_plan(source, target)
        if check or built.violations:
            built.check(lambda done, total: bar.at(done, total, "checking classes of tensors"))
        bar.at(0, None, "counting")
        links = Links(nic=nic, host=host, local=local, latency=latency * 1e-6)
        text = built.explain(links)
        if plot is not None:
            bar.at(0, None, "drawing")
            built.plot(plot)
    if plot is not None:
        typer.echo(f"wrote {plot}", err=True)
    out.print(text, markup=False, highlight=False)
    if check:
        out.print("checked: every element of every target arrives exactly once, from where the source holds it")


def plot(
    pair: Annotated[str, typer.Argument(help="a pair of this host's agents", autocompletion=pairs)],
    batch: Annotated[str, typer.Argument(help="a batch that is registered on it", autocompletion=batches)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="FILE.svg, .png or .pdf; default: PAIR.BATCH.svg")
    ] = None,
    direction: Annotated[
        str | None, typer.Option(metavar="SIDE", help="the side that sends; default: as in the last transfer")
    ] = None,
) -> None:
    """Draw what a registered batch moves: who sends how much to whom, the busiest NICs, the bound."""
    import asyncio

    from etha.agent_session import picture
    from etha.picture import PlanPicture, check_path, draw

    settings = Settings.from_env()
    path = check_path(output or Path(f"{pair}.{batch}.svg"))
    with progress("asking the agent") as bar:
        found = asyncio.run(picture(settings, pair, batch, direction or "", timeout=PICTURE_SECONDS))
        bar.at(0, None, "drawing")
        draw(PlanPicture.from_plain(found), path)
    typer.echo(f"wrote {path}")
