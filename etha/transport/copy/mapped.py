"""Copies between mapped tensors in compiled loops: many in one call, without the interpreter's lock.

Casts that compiled code has not are left to torch (cpu.py), and so are short runs, which its own loops copy faster.
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

#: Shortest run in bytes that the compiled loops copy, and that they cast.
MIN_RUN, MIN_CAST_RUN = 16, 256
#: Copies of at least so many bytes in all are written past the processor's caches, which could not hold them.
STREAMED = 8 << 20


def compiled(tile: Tile) -> bool:
    """Whether the compiled loops copy this tile."""
    steps = tile.steps
    if steps is None or len(steps.counts) > AXES:
        return False
    return steps.run >= (MIN_CAST_RUN if steps.cast else MIN_RUN)


class MappedCopies:
    """Copies of ``tiles[tile[i]]`` from address ``source[i]`` to address ``target[i]``, which are ``nbytes`` in all.

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
        nbytes: int,
    ) -> None:
        self._streamed = nbytes >= STREAMED
        table = np.zeros(len(tiles), TILE)
        extents = np.zeros((len(tiles), 2), np.uint64)
        for row, extent, one in zip(table, extents, tiles, strict=True):
            steps = one.steps
            if steps is None or not compiled(one):
                continue
            axes = len(steps.counts)
            row["axes"], row["cast"], row["run"] = axes, steps.cast, steps.run
            row["counts"][:axes], row["source"][:axes], row["target"][:axes] = steps.counts, steps.source, steps.target
            extent[:] = steps.source_nbytes, steps.target_nbytes
        stop = np.stack([source, target], 1) + extents[tile]
        if (spans[:, (0, 2)] > np.stack([source, target], 1)).any() or (stop > spans[:, (1, 3)]).any():
            raise ReachError(
                "a copy would reach outside of the tensors' memory, so it was not begun: this is a fault in Etha, "
                "please report it"
            )
        self._copy = library.prepare(table, tile, source, target)

    def run(self, first: int, last: int) -> None:
        """Copy numbers ``first`` to ``last`` - 1."""
        self._copy(first, last, self._streamed)


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
        nbytes = sum(op.tile.nbytes for op in chosen)
        MappedCopies(library, list(tiles.values()), tile, source, target, spans, nbytes).run(0, len(chosen))
    return [op for op in ops if not compiled(op.tile)]
