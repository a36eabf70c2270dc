"""Copies between mapped tensors in compiled loops: many in one call, without the interpreter's lock.

Casts are left to torch (cpu.py), and so are short runs, which its own loops copy faster.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from etha.memory.reach import ReachError
from etha.native.tiles import AXES, TILE, TileLibrary, load_tiles
from etha.transport.geometry.iovec import Op
from etha.transport.geometry.tiles import Tile

Addresses = npt.NDArray[np.uint64]

#: Shortest run in bytes that the compiled loops copy.
MIN_RUN = 16


def compiled(tile: Tile) -> bool:
    """Whether the compiled loops copy this tile."""
    steps = tile.steps
    return steps is not None and steps.run >= MIN_RUN and len(steps.counts) <= AXES


class MappedCopies:
    """Copies of ``tiles[tile[i]]`` from address ``source[i]`` to address ``target[i]``.

    ``spans`` are the (first, one past the last) addresses of what is mapped, of the source and of the target of each
    copy. ReachError if a copy reaches outside of them, because the compiled loops would write there.
    """

    def __init__(
        self,
        library: TileLibrary,
        tiles: Sequence[Tile],
        tile: npt.NDArray[np.int32],
        source: Addresses,
        target: Addresses,
        spans: npt.NDArray[np.uint64],
    ) -> None:
        self._library, self._tile, self._source, self._target = library, tile, source, target
        self._table = np.zeros(len(tiles), TILE)
        extents = np.zeros((len(tiles), 2), np.uint64)
        for row, extent, one in zip(self._table, extents, tiles, strict=True):
            steps = one.steps
            if steps is None or not compiled(one):
                continue
            axes = len(steps.counts)
            row["axes"], row["run"] = axes, steps.run
            row["counts"][:axes], row["source"][:axes], row["target"][:axes] = steps.counts, steps.source, steps.target
            extent[:] = steps.source_nbytes, steps.target_nbytes
        stop = np.stack([source, target], 1) + extents[tile]
        if (spans[:, (0, 2)] > np.stack([source, target], 1)).any() or (stop > spans[:, (1, 3)]).any():
            raise ReachError(
                "a copy would reach outside of the tensors' memory, so it was not begun: this is a fault in Etha, "
                "please report it"
            )

    def run(self, first: int, last: int) -> None:
        """Copy numbers ``first`` to ``last`` - 1."""
        rows = slice(first, last)
        self._library.copy(self._table, self._tile[rows], self._source[rows], self._target[rows])


def copy_compiled(ops: Sequence[Op]) -> list[Op]:
    """Carry out those of the mapped operations that the compiled loops copy, and return the others."""
    library = load_tiles()
    if library is None:
        return list(ops)
    chosen = [op for op in ops if compiled(op.tile)]
    if chosen:
        tiles = {id(op.tile): op.tile for op in chosen}
        numbers = {key: number for number, key in enumerate(tiles)}
        tile = np.array([numbers[id(op.tile)] for op in chosen], np.int32)
        source = np.array([op.source_address for op in chosen], np.uint64)
        target = np.array([op.target_address for op in chosen], np.uint64)
        ends = [(v.address, v.address + v.nbytes) for op in chosen for v in (op.source, op.target)]
        spans = np.array(ends, np.uint64).reshape(-1, 4)
        MappedCopies(library, list(tiles.values()), tile, source, target, spans).run(0, len(chosen))
    return [op for op in ops if not compiled(op.tile)]
