"""What a program needs on a device before its first run: scratch memory, tables, and kernels that are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from etha.transport.copy.device_warmup import Kind, kinds, kinds_between, rehearse
from etha.transport.geometry.tiles import Path

if TYPE_CHECKING:
    from etha.transport.copy.device import Copier, Launch
    from etha.transport.copy.program import Program


def prepare(program: Program, copier: Copier) -> None:
    """As of ``Program.prepare``."""
    works = [piece.other for piece in program.pieces if piece.other is not None and piece.other.room]
    if works:  # the most at once: what is compiled lies over it
        copier.scratch(max(work.room for work in works))
    for work in works:
        work.prepare(copier)
    launches: list[Launch] = []
    needed: set[Kind] = set()
    bounced = False
    for index, piece in enumerate(program.pieces):
        if piece.other is not None or program.tiles[program.tile[piece.first]].path is not Path.DEVICE:
            continue
        if (launch := program.launch(index, copier)) is not None:
            launches.append(launch)
            continue
        bounced = True
        for tile in np.unique(program.tile[piece.first : piece.last]).tolist():
            ends = program.tiles[tile].ends
            needed |= kinds_between(ends.source, ends.target)
    rehearse(copier, needed | kinds(launches))
    if bounced:
        copier.provide_bounce()
