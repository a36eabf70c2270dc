"""Fused copies as torch operations: one strided ``copy_`` per descriptor, with torch's casts."""

from __future__ import annotations

import torch

from etha.cuda.driver import Driver
from etha.cuda.kernels import COUNTS, RANK, RUN, SOURCE, SOURCE_STEPS, TARGET, TARGET_STEPS, WIDTH, Fused

#: A dtype of each width, by its log2.
_CARRIERS = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex128)


class TorchKernels:
    """See the module."""

    name = "torch"

    def launch(self, driver: Driver, uuid: str, stream: int, fused: Fused) -> None:
        def work() -> None:
            with torch.no_grad():
                for row in fused.rows.tolist():
                    _copy(driver, uuid, row, fused.source, fused.target)

        driver.launch(uuid, stream, work)


def _copy(driver: Driver, uuid: str, row: list[int], source: torch.dtype | None, target: torch.dtype | None) -> None:
    rank = row[RANK]
    counts = (*row[COUNTS : COUNTS + rank][::-1], row[RUN])
    ends = []
    for column, steps, dtype in ((SOURCE, SOURCE_STEPS, source), (TARGET, TARGET_STEPS, target)):
        dtype = dtype or _CARRIERS[row[WIDTH]]
        item = int(dtype.itemsize)
        strides = (*(step // item for step in row[steps : steps + rank][::-1]), 1)
        extent = 1 + sum((n - 1) * s for n, s in zip(counts, strides, strict=True))
        memory = driver.tensor(uuid, row[column], extent * item)
        ends.append(memory.view(dtype).as_strided(counts, strides))
    ends[1].copy_(ends[0])
