"""A client's home on a GPU: tensors shown by CUDA IPC, calls ordered by events, stages in plain device memory."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import finalize

import torch

from etha.client.homes import Mark, Stage, home_name
from etha.config import CUDA_AGENT
from etha.cuda.driver import DeviceError, Driver, Unexportable
from etha.errors import ConfigError
from etha.memory.cuda import Exports
from etha.memory.handles import TensorHandle
from etha.memory.signals import Signals

log = logging.getLogger(__name__)

#: Staged tensors begin at multiples of so many bytes, as cudaMalloc's own do.
ALIGN = 512


class _Allocation:
    """Device memory of one stage; goes back to the home's pool with the last reference."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes


class GpuHome:
    """One GPU, by uuid. Stages' memory is kept for the next stage, for the agent has it mapped until ``close``."""

    def __init__(self, driver: Driver, uuid: str) -> None:
        self.name, self.agent = uuid, f"{CUDA_AGENT}{uuid}"
        self._driver = driver
        if uuid not in {device.uuid for device in driver.devices()}:
            raise ConfigError(
                f"the agent serves {uuid}, which this process does not see: check CUDA_VISIBLE_DEVICES, "
                f"or give device= for another agent"
            )
        self._exports, self._signals = Exports(driver), Signals(driver, uuid)
        self._lock = threading.RLock()  # a finalizer may run while this very thread holds it
        self._copying = threading.Lock()
        self._pool: dict[int, list[int]] = defaultdict(list)
        self._all: list[int] = []
        self._stream = self._event = 0
        self._refused: dict[int, str] = {}
        self._closed = self._kept = False

    @property
    def refused(self) -> str:
        """Why some registered memory cannot be mapped by an agent, and is copied through plain memory; or nothing."""
        return next(iter(self._refused.values()), "")

    def holds(self, tensor: torch.Tensor) -> bool:
        """As of any home."""
        return home_name(tensor) == self.name

    def describe(self, tensor: torch.Tensor) -> TensorHandle:
        """Its allocation, exported; memory that has no IPC handle gets no segment, and is staged."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        segment: str | None = None
        offset = tensor.data_ptr()
        if tensor.numel():
            try:
                segment, offset = self._exports.find(tensor)
            except Unexportable as error:
                self._refused[tensor.data_ptr()] = str(error)
        return TensorHandle(segment=segment, offset=offset, shape=shape, strides=strides, dtype=dtype)

    def show(self, segment: str) -> tuple[dict[str, Any], list[int]]:
        """The allocation's IPC handle; no descriptors."""
        return self._exports.header(segment), []

    def stage(self, tensors: Sequence[torch.Tensor], chosen: Sequence[bool]) -> Stage:
        """One allocation for all of them, by cudaMalloc, which every agent can map."""
        places, end = [], 0
        for tensor, take in zip(tensors, chosen, strict=True):
            places.append(end)
            end += -(-tensor.numel() * tensor.itemsize // ALIGN) * ALIGN if take else 0
        if not any(chosen):
            return Stage(home=self, tensors=[None] * len(tensors))
        memory = self._allocate(max(end, ALIGN))
        made: list[torch.Tensor | None] = [
            self._driver.tensor(self.name, memory.address + at, t.numel() * t.itemsize).view(t.dtype).view(t.shape)
            if take
            else None
            for t, at, take in zip(tensors, places, chosen, strict=True)
        ]
        return Stage(home=self, tensors=made, memory=memory)

    def _allocate(self, nbytes: int) -> _Allocation:
        with self._lock:
            free = self._pool[nbytes]
            if free:
                address = free.pop()
            else:
                try:
                    address = self._driver.allocate(self.name, nbytes)
                except DeviceError as error:
                    raise ConfigError(
                        f"{nbytes} bytes on {self.name} for what is received or set aside: {error}"
                    ) from error
                self._all.append(address)
        memory = _Allocation(address, nbytes)
        finalize(memory, partial(self._give_back, address, nbytes)).atexit = False
        return memory

    def _give_back(self, address: int, nbytes: int) -> None:
        with self._lock:
            if self._kept:
                return
            if self._closed:
                self._driver.free(address)
            else:
                self._pool[nbytes].append(address)

    def mark(self) -> Mark:
        """Records this thread's current stream; the agent waits for it before the call counts as made."""
        if self._closed:  # the call is about to say so
            return Mark()
        event, handle = self._signals.record()
        return Mark(handle=handle, event=event)

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Mark) -> None:
        """On a stream of this home's own; waits for the device, with the GIL free."""
        if not pairs:
            return

        def work() -> None:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

        with self._copying:
            if not self._stream:
                self._stream, self._event = self._driver.stream(self.name), self._driver.event(self.name)
            if after.event:
                self._driver.wait(self._stream, after.event)
            self._driver.launch(self.name, self._stream, work)
            self._driver.record(self._event, self._stream)
            self._driver.synchronize(self._event)

    def quick(self, nbytes: int) -> bool:
        """Never: a device may be busy with other work."""
        return False

    @property
    def lends(self) -> bool:
        """What is freed while another process has it open is undefined."""
        return True

    def close(self, *, released: bool) -> None:
        """Free what no stage uses; the rest goes with its stage, or where ``released`` is not, with the process."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not released:
                log.warning("the agent of %s has not let go of this process's memory: it is kept", self.name)
                self._kept = True
                self._pool.clear()
            for some in self._pool.values():
                for address in some:
                    self._driver.free(address)
            self._pool.clear()
            if self._stream:
                self._driver.drop_stream(self._stream)
                self._driver.drop_event(self._event)
            self._signals.close()
