"""The compiled copies of tiles of mapped memory (tiles.c): their table, and the call that carries them out."""

from __future__ import annotations

import ctypes
from functools import cache

import numpy as np
import numpy.typing as npt

from etha.native.opened import opened

#: Most axes of a tile in the table.
AXES = 8
#: ``etha_tile`` of tiles.c: counts, outermost axis first, and strides and the innermost run in bytes.
TILE = np.dtype(
    [
        ("axes", np.uint32),
        ("pad", np.uint32),
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
        self._copy.argtypes, self._copy.restype = [ctypes.c_void_p] * 4 + [ctypes.c_uint64], None
        library.etha_tile_bytes.restype = ctypes.c_uint64
        #: Size of the struct as it was compiled.
        self.struct_bytes = int(library.etha_tile_bytes())

    def copy(
        self,
        tiles: npt.NDArray[np.void],
        tile: npt.NDArray[np.int32],
        source: npt.NDArray[np.uint64],
        target: npt.NDArray[np.uint64],
    ) -> None:
        """Copy tile ``tiles[tile[i]]`` from address ``source[i]`` to address ``target[i]``, for each i.

        Arrays are contiguous. The caller has checked that all of it lies inside of what is mapped.
        """
        self._copy(tiles.ctypes.data, tile.ctypes.data, source.ctypes.data, target.ctypes.data, len(tile))


@cache
def load_tiles() -> TileLibrary | None:
    """The compiled library; None where there is none, or ``ETHA_NATIVE=0`` forbids it."""
    return opened(TileLibrary)
