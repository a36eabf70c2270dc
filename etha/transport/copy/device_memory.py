"""Memory that the agent itself allocates on a device or pins on the host, and views of it.

It is freed with its object, or earlier by ``release``. Neither waits, because the reaper (reaper.py) frees it once the
device is done.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod

import torch

from etha.cuda.driver import DeviceError, Driver
from etha.cuda.reaper import reaper
from etha.memory.reach import ReachError
from etha.memory.views import CARRIERS, View

log = logging.getLogger(__name__)


class CardError(ReachError):
    """A device refused or failed. ``sticky``: it will do nothing more for this process."""

    def __init__(self, message: str, *, sticky: bool) -> None:
        super().__init__(message)
        self.sticky = sticky


@contextmanager
def reaching(uuid: str) -> Iterator[None]:
    """Raise DeviceErrors of this context as CardErrors that name the device."""
    try:
        yield
    except DeviceError as error:
        raise CardError(f"device {uuid}: {error}", sticky=error.sticky) from error


class DeviceMemory:
    """``nbytes`` > 0 of one device's memory, at ``address``."""

    def __init__(self, driver: Driver, uuid: str, nbytes: int) -> None:
        """CardError if the device does not have that much."""
        self.uuid, self.nbytes = uuid, nbytes
        with reaching(uuid):
            self.address = _taken(partial(driver.allocate, uuid, nbytes))
        self._free = weakref.finalize(self, reaper.hand, partial(_give_back, driver.free, self.address))
        self._free.atexit = False  # the process's end frees all

    def release(self) -> None:
        """Free it once queued work is done. Returns at once. Idempotent. Nothing else may use it any more."""
        self._free()


class PinnedMemory:
    """``nbytes`` > 0 of page-locked host memory at ``address``; the CPU sees it as ``flat``, of dtype uint8."""

    def __init__(self, driver: Driver, uuid: str, nbytes: int) -> None:
        """CardError if the host does not have that much."""
        self.nbytes = nbytes
        with reaching(uuid):
            self.address = _taken(partial(driver.pin, nbytes))
        self._free = weakref.finalize(self, reaper.hand, partial(_give_back, driver.unpin, self.address))
        self._free.atexit = False
        pages = (ctypes.c_uint8 * nbytes).from_address(self.address)
        self.flat = torch.frombuffer(pages, dtype=torch.uint8)

    def view(self, dtype: torch.dtype) -> View:
        """All of it as a flat tensor of ``dtype``, which CPU and devices reach."""
        flat = self.flat[: self.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
        return View(
            shape=(flat.numel(),),
            strides=(1,),
            dtype=dtype,
            address=self.address,
            space=("pinned", self.address),
            place=0,
            nbytes=flat.numel() * dtype.itemsize,
            flat=flat,
            raw=flat.view(CARRIERS[dtype.itemsize]),
            pinned=True,
            keep=self,
        )

    def release(self) -> None:
        """Free it once queued work is done, as for DeviceMemory. Nobody may look at ``flat`` any more."""
        self._free()


def _taken(take: Callable[[], int]) -> int:
    reaper.begin()
    try:
        return take()
    except DeviceError as error:
        # There may be room once memory that was released is freed.
        if error.name != "cudaErrorMemoryAllocation" or not reaper.drain():
            raise
        return take()


def _give_back(free: Callable[[int], None], address: int) -> None:
    try:
        free(address)
    except DeviceError as error:  # a lost context has freed everything
        log.log(logging.DEBUG if error.sticky else logging.WARNING, "memory of a device was not given back: %s", error)


def dense_on(memory: DeviceMemory, shape: tuple[int, ...], dtype: torch.dtype, place: int = 0) -> View:
    """A dense tensor in device memory, ``place`` bytes after its start. The view keeps the memory alive."""
    strides = tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
    return View(
        shape=shape,
        strides=strides,
        dtype=dtype,
        address=memory.address + place,
        space=("device", memory.uuid, memory.address),
        place=place,
        nbytes=prod(shape) * dtype.itemsize,
        device=memory.uuid,
        keep=memory,
    )
