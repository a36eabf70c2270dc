"""``etha plan``: what a transfer would move, without processes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etha.commands.terminal import out


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
