"""The compiled copies of tiles of mapped memory (tiles.c): their table, and the call that carries them out."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from etha.native.opened import opened

#: Most axes of a tile in the table.
AXES = 8
#: ``etha_tile`` of tiles.c: a ``Cast``, counts, outermost axis first, strides, and the source's innermost run in bytes.
TILE = np.dtype(
    [
        ("axes", np.uint32),
        ("cast", np.uint32),
        ("run", np.uint64),
        ("counts", np.uint64, AXES),
        ("source", np.int64, AXES),
        ("target", np.int64, AXES),
    ]
)


class TileLibrary:
    """Copies tiles without the interpreter's lock."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self._copy = library.etha_copy_tiles
        self._copy.argtypes, self._copy.restype = [ctypes.c_void_p] * 4 + [ctypes.c_uint64, ctypes.c_int], None
        library.etha_tile_bytes.restype = ctypes.c_uint64
        #: Size of the struct as it was compiled.
        self.struct_bytes = int(library.etha_tile_bytes())

    def prepare(
        self,
        tiles: npt.NDArray[np.void],
        tile: npt.NDArray[np.int32],
        source: npt.NDArray[np.uint64],
        target: npt.NDArray[np.uint64],
    ) -> Callable[[int, int, bool], None]:
        """A call that copies tile ``tiles[tile[i]]`` from address ``source[i]`` to address ``target[i]``, for each i.

        It takes the first i and the one after the last, and whether long runs are written past the processor's caches.
        ValueError unless arrays are contiguous. The caller has checked that all of it lies inside of what is mapped.
        """
        arrays = (tiles, tile, source, target)
        if not all(array.flags.c_contiguous for array in arrays) or not len(tile) == len(source) == len(target):
            raise ValueError(
                f"{len(tile)} tiles, {len(source)} sources, {len(target)} targets: as many, and contiguous"
            )
        # Asked for once, because each of these takes a few microseconds, as long as a small copy.
        table, number, begin, into = (array.ctypes.data for array in arrays)

        def copy(first: int, last: int, streamed: bool, arrays: object = arrays) -> None:
            count = last - first
            self._copy(table, number + 4 * first, begin + 8 * first, into + 8 * first, count, streamed)

        return copy


@cache
def load_tiles() -> TileLibrary | None:
    """The compiled library; None where there is none, or ``ETHA_NATIVE=0`` forbids it."""
    return opened(TileLibrary)
