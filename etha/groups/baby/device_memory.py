"""The trainer's CUDA tensors in a child, by CUDA IPC: their allocations' handles, and an event of the trainer's stream.

    trainer: OfferedMemory  tensors -> places, handles, event --(with each call)--> child: MappedMemory -> tensors

The child waits for the event before it touches a tensor, and answers when its work on the device is done. It closes all
handles before it answers, because memory that is freed while another process has it open is undefined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from etha.cuda.driver import DeviceError, Driver, Unexportable
from etha.errors import GroupError, GroupLostError, RegistrationError
from etha.groups.baby.messages import MakeCall, SharedTensor
from etha.memory.cuda import Exports, Mappings
from etha.memory.signals import Signals, Waits


class OfferedMemory:
    """In the trainer: what a call says of its tensors. All lie on the GPU that was current at configure."""

    def __init__(self, driver: Driver) -> None:
        ordinal = torch.cuda.current_device() if torch.cuda.is_available() else 0
        self._driver = driver
        self.uuid = driver.devices()[ordinal].uuid
        self._exports, self._signals = Exports(driver), Signals(driver, self.uuid)

    def offer(self, what: str, tensors: Sequence[Tensor]) -> tuple[list[SharedTensor], list[dict[str, Any]]]:
        """Places of tensors, and the headers of the allocations that they lie in. GroupError says what cannot be."""
        places, headers = [], {}
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise GroupError(f"{what}: NCCL takes contiguous tensors only: give a copy")
            segment, offset = "", 0
            if tensor.numel():
                segment, offset = self._find(what, tensor)
                headers[segment] = self._exports.header(segment)
            dtype = str(tensor.dtype).removeprefix("torch.")
            shape = tuple(tensor.shape)
            places.append(SharedTensor(address=offset, dtype=dtype, shape=shape, segment=segment.encode()))
        return places, list(headers.values())

    def _find(self, what: str, tensor: Tensor) -> tuple[str, int]:
        uuid = self._driver.holds(tensor)
        if uuid != self.uuid:
            raise GroupError(f"{what}: a tensor is on {uuid or 'the CPU'}, the group was configured on {self.uuid}")
        try:
            return self._exports.find(tensor)
        except Unexportable as error:
            raise GroupError(
                f"{what}: the child cannot open this memory ({error}): unset expandable_segments and "
                f"cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF, or use ProcessGroupNCCL in this process"
            ) from error
        except DeviceError as error:
            raise GroupError(f"{what}: {error}") from error

    def record(self) -> tuple[int, bytes]:
        """An event behind what the current stream has queued, and its handle. ``release`` it after the call."""
        try:
            return self._signals.record()
        except DeviceError as error:
            raise GroupError(f"no event could be recorded on {self.uuid}: {error}") from error

    def release(self, event: int) -> None:
        """The call of an event has ended."""
        self._signals.release(event)

    def close(self) -> None:
        """Destroy the events of calls that have ended, and the others with their calls."""
        self._signals.close()


class MappedMemory:
    """In the child: the trainer's tensors of one call after the other."""

    def __init__(self, driver: Driver, uuid: str, trainer: int, started: int) -> None:
        self._driver, self._uuid, self._trainer = driver, uuid, (trainer, started)
        self._mappings, self._waits = Mappings(driver, uuid), Waits(driver, uuid)
        if torch.cuda.is_available():
            torch.cuda.set_device(next(each.ordinal for each in driver.devices() if each.uuid == uuid))

    @contextmanager
    def tensors(self, asked: MakeCall) -> Iterator[list[Tensor]]:
        """The call's tensors, once the trainer's stream has come to it; unmapped when the device is done with them."""
        with ExitStack() as stack:
            try:
                if asked.event:
                    self._waits.wait(*self._trainer, asked.event)
                addresses = {b"": 0}
                for header in asked.headers:
                    mapping = self._mappings.attach(*self._trainer, header)
                    stack.callback(mapping.close)
                    addresses[mapping.header["segment"].encode()] = mapping.address
                yield [self._tensor(addresses[each.segment], each) for each in asked.tensors]
                self._driver.settle(self._uuid)
            except (DeviceError, RegistrationError) as error:
                reason = f"the child cannot use the trainer's memory on {self._uuid}: {error}"
                raise GroupLostError(reason, reason=reason) from error

    def _tensor(self, base: int, place: SharedTensor) -> Tensor:
        dtype = getattr(torch, place.dtype)
        nbytes = torch.Size(place.shape).numel() * dtype.itemsize
        flat = self._driver.tensor(self._uuid, base + place.address if nbytes else 0, nbytes)
        return flat.view(dtype).view(place.shape)
