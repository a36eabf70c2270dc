"""A client's home on a GPU: tensors shared by CUDA IPC, calls ordered by events, stages in plain device memory."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import finalize

import torch

from etha.client.memory.base import Mark, StagedTensors, home_name
from etha.config import CUDA_AGENT
from etha.cuda.driver import DeviceError, Driver, Unexportable
from etha.cuda.reaper import reaper
from etha.errors import ConfigError, EthaError, RegistrationError, TransferError
from etha.memory.cuda import Exports
from etha.memory.handles import TensorHandle
from etha.memory.signals import Signals

log = logging.getLogger(__name__)

#: Stages use whole blocks, because smaller allocations may share one, and an IPC handle shares all of it.
BLOCK = 2 << 20
#: Staged tensors are aligned to this many bytes, as cudaMalloc's own are.
ALIGN = 512


#: The error of a call that no other agent knows of.
_withdrawn = partial(TransferError, outcome="withdrawn")


class _Allocation:
    """Device memory of one stage. It returns to the home's pool with the last reference."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes


class GpuMemory:
    """One GPU, by uuid. It keeps a stage's memory for the next stage, because the agent has it mapped until
    ``close``."""

    def __init__(self, driver: Driver, uuid: str) -> None:
        self.name, self.agent = uuid, f"{CUDA_AGENT}{uuid}"
        self._driver = driver
        if uuid not in {device.uuid for device in driver.devices()}:
            raise ConfigError(
                f"the agent serves {uuid}, which this process does not see: check CUDA_VISIBLE_DEVICES, "
                f"or give device= for another agent"
            )
        self._exports, self._signals = Exports(driver), Signals(driver, uuid)
        self._lock = threading.RLock()  # a finalizer may run while the same thread holds it
        self._copying = threading.Lock()
        self._pool: dict[int, list[int]] = defaultdict(list)
        self._stream = self._event = 0
        self._refused: dict[int, str] = {}
        self._closed = self._kept = False

    @property
    def refused(self) -> str:
        """Why some registered memory cannot be mapped by an agent and is staged; "" if there is none."""
        return next(iter(self._refused.values()), "")

    def holds(self, tensor: torch.Tensor) -> bool:
        return home_name(tensor) == self.name

    def describe(self, tensor: torch.Tensor) -> TensorHandle:
        """The tensor's allocation, exported. Memory without an IPC handle gets no segment, and is staged."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        segment: str | None = None
        offset = tensor.data_ptr()
        if tensor.numel():
            try:
                with self._told(RegistrationError, f"a tensor of shape {shape} is not shown to an agent"):
                    segment, offset = self._exports.find(tensor)
            except RegistrationError as error:
                if not isinstance(error.__cause__, Unexportable):
                    raise
                self._refused[tensor.data_ptr()] = str(error.__cause__)
        return TensorHandle(segment=segment, offset=offset, shape=shape, strides=strides, dtype=dtype)

    def show(self, segment: str) -> tuple[dict[str, Any], list[int]]:
        """The allocation's IPC handle; no descriptors."""
        with self._told(RegistrationError, f"segment {segment} is not shown to an agent"):
            return self._exports.header(segment), []

    def stage(self, tensors: Sequence[torch.Tensor], chosen: Sequence[bool]) -> StagedTensors:
        """One allocation for all of them, by cudaMalloc, which every agent can map."""
        places, end = [], 0
        for tensor, take in zip(tensors, chosen, strict=True):
            places.append(end)
            end += -(-tensor.numel() * tensor.itemsize // ALIGN) * ALIGN if take else 0
        if not any(chosen):
            return StagedTensors(home=self, tensors=[None] * len(tensors))
        with self._told(ConfigError, f"{end} bytes for what is received or set aside"):
            memory = self._allocate(max(end, ALIGN))
            made: list[torch.Tensor | None] = [
                self._driver.tensor(self.name, memory.address + at, t.numel() * t.itemsize).view(t.dtype).view(t.shape)
                if take
                else None
                for t, at, take in zip(tensors, places, chosen, strict=True)
            ]
        return StagedTensors(home=self, tensors=made, memory=memory)

    def _allocate(self, nbytes: int) -> _Allocation:
        nbytes = -(-nbytes // BLOCK) * BLOCK
        with self._lock:
            free = self._pool[nbytes]
            address = free.pop() if free else self._driver.allocate(self.name, nbytes)
        memory = _Allocation(address, nbytes)
        finalize(memory, partial(self._give_back, address, nbytes)).atexit = False
        return memory

    def _give_back(self, address: int, nbytes: int) -> None:
        with self._lock:
            if self._kept:
                return
            if self._closed:
                self._free(address)
            else:
                self._pool[nbytes].append(address)

    def mark(self) -> Mark:
        """Record this thread's current stream. The agent waits for it before the call counts as made."""
        if self._closed:  # the call will raise that
            return Mark()
        try:
            with self._told(_withdrawn, "the work before a transfer is not known"):
                event, handle = self._signals.record()
        except TransferError as error:
            return Mark(failed=error)
        mark = Mark(handle=handle, event=event)
        end = finalize(mark, self._signals.release, event)
        mark.end, end.atexit = end, False
        return mark

    def reach(self, mark: Mark, stop: threading.Event) -> bool:
        """Poll the mark's event."""
        with self._told(_withdrawn, "the work before a transfer has failed"):
            return not mark.event or self._signals.wait(mark.event, stop)

    def backed(self, tensor: torch.Tensor) -> bool:
        """False while a sleep mode has unmapped its memory, which leaves the tensor its address."""
        first = tensor.data_ptr()
        last = first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) * tensor.itemsize
        with self._told(RegistrationError, f"a tensor of shape {tuple(tensor.shape)} is not found"):
            return not tensor.numel() or (self._driver.backed(first) and self._driver.backed(last))

    def writable(self, tensor: torch.Tensor) -> bool:
        """True: a copy into memory that may not be written is an error of the device, which ends no process."""
        return True

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, live: bool) -> None:
        """Copy on a stream of this home's own, and wait for the device with the GIL released."""
        if not pairs:
            return

        def work() -> None:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

        what = "committed, but what was received is not in its place" if live else "nothing is set aside"
        failed = partial(TransferError, outcome="unknown", torn=True) if live else _withdrawn
        try:
            with self._told(failed, what):
                if live:
                    # Kernels that any stream has queued since the call still read the old values.
                    self._driver.settle(self.name)
                with self._copying:
                    if not self._stream:
                        self._stream, self._event = self._driver.stream(self.name), self._driver.event(self.name)
                    self._driver.launch(self.name, self._stream, work)
                    self._driver.record(self._event, self._stream)
                    self._driver.synchronize(self._event)
        finally:
            self._retire()

    def quick(self, nbytes: int) -> bool:
        """False, because the device may be busy with other work."""
        return False

    @property
    def lends(self) -> bool:
        """True: freeing memory that another process has open is undefined."""
        return True

    def close(self, *, released: bool) -> None:
        """Free what no stage uses. The rest is freed with its stage, or, if not ``released``, with the process."""
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
                    self._free(address)
            self._pool.clear()
            self._signals.close(keep=self._kept)
        self._retire()

    def _retire(self) -> None:
        """Drop the stream after ``close``. Does not wait for a running copy, which comes here when it is done."""
        if self._closed and self._copying.acquire(blocking=False):
            try:
                if self._stream:
                    stream, event, self._stream = self._stream, self._event, 0
                    self._driver.drop_stream(stream)
                    self._driver.drop_event(event)
            except DeviceError as error:  # a lost context; the process's end frees it
                log.warning("leaving %s: %s", self.name, error)
            finally:
                self._copying.release()

    def _free(self, address: int) -> None:
        # Not here: freeing waits for all work of the device, and this may be any thread.
        reaper.begin()
        reaper.hand(partial(_free, self._driver, self.name, address))

    @contextmanager
    def _told(self, kind: Callable[[str], EthaError], what: str) -> Iterator[None]:
        """Raise a driver's error as Etha's."""
        try:
            yield
        except DeviceError as error:
            advice = "the context is lost, start this process again" if error.sticky else "`etha doctor` says more"
            raise kind(f"{self.name}: {what}: {error}; {advice}") from error


def exportable(driver: Driver, zeros: torch.Tensor) -> torch.Tensor:
    """``zeros``, or such a tensor of cudaMalloc's memory if its own has no IPC handle. DeviceError if there is none."""
    uuid = driver.holds(zeros)
    assert uuid is not None
    try:
        driver.export(driver.extent(zeros.data_ptr()).base)
        return zeros
    except Unexportable:
        extent = 1 + sum((n - 1) * s for n, s in zip(zeros.shape, zeros.stride(), strict=True))
        nbytes = -(-extent * zeros.itemsize // BLOCK) * BLOCK
    reaper.begin()
    address = driver.allocate(uuid, nbytes)
    flat = driver.tensor(uuid, address, nbytes)
    # A storage that still has a tensor keeps its Python object, whoever forgets it.
    finalize(flat.untyped_storage(), reaper.hand, partial(_free, driver, uuid, address)).atexit = False
    flat.zero_()
    return torch.empty(0, dtype=zeros.dtype, device=flat.device).set_(
        flat.untyped_storage(), 0, tuple(zeros.shape), zeros.stride()
    )


def _free(driver: Driver, uuid: str, address: int) -> None:
    try:
        driver.free(address)
    except DeviceError as error:
        log.warning("leaving %s: %s", uuid, error)
