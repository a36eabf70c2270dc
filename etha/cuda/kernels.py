"""Fused copies on a device: what a kernel is given, as one Protocol of its implementations.

A **descriptor** is one strided copy, a row of COLUMNS int64 in a table in device memory. One load and one store move a
**unit**: 16, 8, 4, 2 or 1 bytes if nothing is cast, otherwise one element. A **piece** is at most UNITS units of one
descriptor, the work of one CUDA block, as ``row << 32 | number``.

    triton_kernels.py    one launch for any number of descriptors
    torch_kernels.py     a torch copy for each descriptor: if Triton is missing, and for casts in which Triton may
                         not produce the bits that torch produces
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from etha.cuda.driver import Driver

#: Most strides besides the innermost run that one descriptor nests.
DEPTH = 4
#: Columns of a descriptor: addresses of both ends, number of units, units of the innermost run, number of strides, log2
#: of a unit's bytes (0 in a cast), then, from the innermost stride outwards, counts, source steps and target steps in
#: bytes.
SOURCE, TARGET, TOTAL, RUN, RANK, WIDTH, COUNTS, SOURCE_STEPS, TARGET_STEPS = 0, 1, 2, 3, 4, 5, 6, 10, 14
COLUMNS = TARGET_STEPS + DEPTH
#: Units of one piece: 64 KiB of 16-byte units, enough to hide a block's start, and few enough to share out evenly.
UNITS = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fused:
    """The copies of one dtype class.

    ``rows`` is the table on the host, ``table`` and ``pieces`` are device addresses, ``count`` is the number of pieces.
    Both dtypes are None if bits are copied.
    """

    source: torch.dtype | None
    target: torch.dtype | None
    rows: npt.NDArray[np.int64]
    table: int
    pieces: int
    count: int


class Kernels(Protocol):
    @property
    def name(self) -> str:
        """Its name in ``status``: "triton" or "torch"."""
        ...

    def launch(self, driver: Driver, uuid: str, stream: int, fused: Fused) -> None:
        """Queue all copies of ``fused``. DeviceError as for ``driver.launch``."""
        ...
