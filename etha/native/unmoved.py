"""The compiled check that tensors lie where they did (unmoved.c): their table, and the call that compares it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from etha.native.opened import opened

#: Most axes of a tensor in the table.
AXES = 16
#: ``etha_place`` of unmoved.c.
PLACE = np.dtype([("tensor", np.uint64), ("near", np.uint64, 2), ("row", np.uint64)])


class PlaceTable:
    """Where plain tensors lay when it was made. It keeps them allocated."""

    def __init__(self, library: UnmovedLibrary, tensors: Sequence[torch.Tensor]) -> None:
        """ValueError for a tensor that it cannot describe."""
        self._library, self._tensors = library, tuple(tensors)
        self._places = np.zeros(len(tensors), PLACE)
        self._places["tensor"] = list(map(id, tensors))
        self._places["near"][:, 0] = [tensor._cdata for tensor in tensors]
        self._places["near"][:, 1] = [tensor.untyped_storage()._cdata for tensor in tensors]
        self._rows = library.note(self._places)

    def unmoved(self) -> bool:
        """Whether all of them have the address, shape, strides and dtype that they had."""
        return self._library.first_moved(self._places, self._rows) == len(self._places)


class UnmovedLibrary:
    """Looks at tensors by the C functions of DLPack. The interpreter's lock is held, 0.1 us for each tensor."""

    def __init__(self, path: str) -> None:
        """AttributeError if this torch gives no such functions."""
        library = ctypes.PyDLL(path)
        self._note, self._first = library.etha_note_places, library.etha_first_moved
        self._note.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_int64]
        self._first.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int64]
        self._note.restype = self._first.restype = ctypes.c_int64
        library.etha_place_bytes.restype = ctypes.c_uint64
        #: Size of the struct as it was compiled.
        self.struct_bytes = int(library.etha_place_bytes())
        pointer = ctypes.pythonapi["PyCapsule_GetPointer"]
        pointer.argtypes, pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
        self._functions = pointer(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")

    def note(self, places: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
        """The rows of all ``places``, whose own ``row`` it sets. ValueError if a tensor cannot be described."""
        rows = np.empty(len(places) * 2 * (AXES + 1), np.int64)
        try:
            end = self._note(self._functions, places.ctypes.data, rows.ctypes.data, len(places), AXES)
        except (RuntimeError, BufferError) as error:  # DLPack has no name for its dtype, or its device
            raise ValueError(str(error)) from error
        if len(places) and not end:
            raise ValueError("the functions are of another version, or a tensor has too many axes")
        return rows[:end].copy()

    def first_moved(self, places: npt.NDArray[np.void], rows: npt.NDArray[np.int64]) -> int:
        """The index of the first tensor that is elsewhere than ``rows`` say; ``len(places)`` if there is none."""
        try:
            return int(self._first(self._functions, places.ctypes.data, rows.ctypes.data, len(places)))
        except (RuntimeError, BufferError):  # one of them has no memory any more
            return -1


@cache
def load_unmoved() -> UnmovedLibrary | None:
    """The compiled library; None where there is none, ``ETHA_NATIVE=0`` forbids it, or torch lacks the functions."""
    return opened(UnmovedLibrary)
