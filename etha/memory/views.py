"""A view: one local tensor as an agent can reach it, mapped here or in a worker's private memory."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from etha.memory.process import ProcessMemory

#: Bits travel as integers if nothing is cast, so that no kernel interprets them.
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One tensor's memory. Whoever made it has checked that it lies inside what is mapped.

    Mapped: ``flat`` is a 1-D tensor over the whole extent and keeps the mapping alive; ``address`` is in this process.
    Private: ``process`` is set, ``flat`` is None, and ``address`` is the worker's. On a device: ``device`` is its uuid,
    ``address`` is this process's, and there is no ``flat``. ``pinned``: host memory that devices reach, too, at the
    same address. ``space`` and ``place`` (bytes) tell views of the same memory from views of others. ``keep`` keeps it
    mapped.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    address: int
    space: Hashable
    place: int
    nbytes: int
    process: ProcessMemory | None = None
    flat: torch.Tensor | None = None
    raw: torch.Tensor | None = None
    device: str | None = None
    pinned: bool = False
    keep: object = None

    @property
    def private(self) -> bool:
        """Whether the bytes are reached by system calls instead of a mapping."""
        return self.process is not None

    @property
    def reachable(self) -> bool:
        """Whether a device's kernels and copies may use ``address``."""
        return self.device is not None or self.pinned


def view_of(tensor: torch.Tensor) -> View:
    """A mapped view of a tensor of this process (staging, tests). It keeps the tensor alive."""
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    extent = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    flat = tensor.detach().as_strided((extent,), (1,))
    return View(
        shape=shape,
        strides=strides,
        dtype=tensor.dtype,
        address=tensor.data_ptr(),
        space="here",
        place=tensor.data_ptr(),
        nbytes=extent * tensor.itemsize,
        flat=flat,
        raw=flat.view(CARRIERS[tensor.itemsize]),
    )
