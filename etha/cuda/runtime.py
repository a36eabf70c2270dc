"""The real driver, over NVIDIA's cuda-bindings. Nothing else imports them, and this only once a device is asked for.

A call that needs a device pushes that device's primary context (which torch uses, too) and pops it again. So the
caller's current device does not change, and no context is made on a device that nobody named. All bindings release the
GIL in a call. Their runtime is linked statically, so an error here never shows up as torch's last error.
"""

from __future__ import annotations

import importlib
import uuid as uuids
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from etha.cuda.answers import NO_HANDLE, ask, bytes_of, failed, filled, known, load, version
from etha.cuda.driver import Device, DeviceError, Driver, Extent, Unexportable

#: Answers to "how many devices?" of a machine without a GPU, or without a driver that is recent enough.
_NONE = frozenset({"cudaErrorNoDevice", "cudaErrorInsufficientDriver", "cudaErrorStubLibrary"})
_REFUSED = frozenset({"cudaErrorInvalidValue", "cudaErrorNotSupported"})


class Runtime(Driver):
    """``bindings``: the modules cuda.bindings.driver and cuda.bindings.runtime, or stand-ins."""

    def __init__(self, bindings: tuple[Any, Any] | None = None) -> None:
        self._cu, self._rt = bindings or load()
        self._devices: tuple[Device, ...] = ()
        self._ordinals: dict[str, int] = {}
        self._contexts: dict[int, Any] = {}
        # The device to which each of our addresses, streams and events belongs.
        self._memory: dict[int, int] = {}
        self._mapped: dict[int, int] = {}
        self._streams: dict[int, int] = {}
        self._events: dict[int, int] = {}

    # -- devices ------------------------------------------------------------------------------------------------

    def versions(self) -> dict[str, str]:
        """CUDA versions of driver and runtime. The driver's text says so if there is none."""
        driver = int(ask("the driver's version", self._rt.cudaDriverGetVersion()))
        runtime = int(ask("the runtime's version", self._rt.cudaRuntimeGetVersion()))
        bindings = importlib.import_module("cuda.bindings").__version__
        missing = "none: libcuda.so.1 was not found, install NVIDIA's driver"
        return {"driver": version(driver) if driver else missing, "runtime": version(runtime), "bindings": bindings}

    def devices(self) -> tuple[Device, ...]:
        """From cudaGetDeviceProperties; cached once there are any."""
        if self._devices:
            return self._devices
        answer = self._rt.cudaGetDeviceCount()
        if answer[0].name in _NONE:
            return ()
        count = int(ask("the number of devices", answer))
        if count:
            ask("begin", self._cu.cuInit(0))
        self._devices = tuple(self._device(ordinal) for ordinal in range(count))
        self._ordinals = {device.uuid: device.ordinal for device in self._devices}
        return self._devices

    def _device(self, ordinal: int) -> Device:
        found = ask(f"properties of device {ordinal}", self._rt.cudaGetDeviceProperties(ordinal))
        return Device(
            ordinal=ordinal,
            uuid=f"GPU-{uuids.UUID(bytes=bytes(found.uuid.bytes))}",
            name=found.name.rstrip(b"\0").decode(),
            nbytes=int(found.totalGlobalMem),
            capability=(int(found.major), int(found.minor)),
        )

    def _ordinal(self, uuid: str) -> int:
        if not self._ordinals:
            self.devices()
        if uuid not in self._ordinals:
            here = ", ".join(self._ordinals) or "none"
            raise DeviceError("cudaErrorInvalidDevice", f"{uuid} is not visible to this process (it sees {here})")
        return self._ordinals[uuid]

    def peers(self, uuid: str, other: str) -> bool:
        one, two = self._ordinal(uuid), self._ordinal(other)
        return one == two or bool(ask(f"peers {uuid}, {other}", self._rt.cudaDeviceCanAccessPeer(one, two)))

    def holds(self, tensor: torch.Tensor) -> str | None:
        return self.devices()[tensor.device.index].uuid if tensor.device.type == "cuda" else None

    def tensor(self, uuid: str, address: int, nbytes: int) -> torch.Tensor:
        """A tensor of a storage over the address. torch neither asks to which device it belongs nor frees it."""
        device = torch.device("cuda", self._ordinal(uuid))
        flat = torch.empty(0, dtype=torch.uint8, device=device)
        if nbytes == 0:
            return flat
        # Not by __cuda_array_interface__, because torch then asks the driver for the memory's device, and a peer's
        # mapped memory becomes a tensor of the peer's device, or a copy.
        storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
        return flat.set_(storage, 0, (nbytes,), (1,))

    def current_stream(self, uuid: str) -> int:
        return int(torch.cuda.current_stream(self._ordinal(uuid)).cuda_stream)

    # -- memory -------------------------------------------------------------------------------------------------

    def allocate(self, uuid: str, nbytes: int) -> int:
        ordinal = self._ordinal(uuid)
        with self._current(ordinal):
            address = int(ask(f"allocate {nbytes} bytes on {uuid}", self._rt.cudaMalloc(nbytes)))
        self._memory[address] = ordinal
        return address

    def free(self, address: int) -> None:
        with self._current(known(self._memory, address, f"free {address:#x}")):
            ask(f"free {address:#x}", self._rt.cudaFree(address))
        del self._memory[address]

    def pin(self, nbytes: int) -> int:
        """cudaHostAlloc, portable and mapped, in a context that exists already, so that no other device gets one."""
        flags = self._rt.cudaHostAllocPortable | self._rt.cudaHostAllocMapped  # portable: whichever context makes it
        with self._current(next(iter(self._contexts), 0)):
            return int(ask(f"pin {nbytes} bytes", self._rt.cudaHostAlloc(nbytes, flags)))

    def unpin(self, address: int) -> None:
        with self._current(next(iter(self._contexts), 0)):
            ask(f"unpin {address:#x}", self._rt.cudaFreeHost(address))

    def extent(self, address: int) -> Extent:
        with self._current(self._place(address)):
            found = self._cu.cuMemGetAddressRange(address)
        base, nbytes = ask(f"the allocation around {address:#x}", found)
        return Extent(int(base), int(nbytes))

    def serial(self, address: int) -> int:
        attribute = self._cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
        return int(ask(f"the allocation at {address:#x}", self._cu.cuPointerGetAttribute(attribute, address)))

    def backed(self, address: int) -> bool:
        """CU_POINTER_ATTRIBUTE_MAPPED. CUDA may refuse it for an address that is not allocated, or only reserved."""
        attribute = self._cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MAPPED
        answer = self._cu.cuPointerGetAttribute(attribute, address)
        return answer[0].name != "CUDA_ERROR_INVALID_VALUE" and bool(ask(f"memory at {address:#x}", answer))

    def export(self, base: int) -> bytes:
        """cudaIpcGetMemHandle, if the memory is said to have a handle."""
        what = f"export {base:#x}"
        capable = self._cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        with self._current(self._place(base)):
            if not ask(what, self._cu.cuPointerGetAttribute(capable, base)):
                raise Unexportable("cudaErrorInvalidValue", f"{what}: {NO_HANDLE}")
            try:
                return bytes_of(ask(what, self._rt.cudaIpcGetMemHandle(base)))
            except DeviceError as error:
                if error.name in _REFUSED:
                    raise Unexportable(error.name, f"{what}: {NO_HANDLE}") from None
                raise

    def open(self, uuid: str, handle: bytes) -> int:
        """cudaIpcOpenMemHandle, with peer access as needed."""
        ordinal, what = self._ordinal(uuid), f"open memory of another process for {uuid}"
        flags = self._rt.cudaIpcMemLazyEnablePeerAccess
        with self._current(ordinal):
            wire = filled(self._rt.cudaIpcMemHandle_t(), handle, what)
            address = int(ask(what, self._rt.cudaIpcOpenMemHandle(wire, flags)))
        self._mapped[address] = ordinal
        return address

    def close(self, address: int) -> None:
        what = f"close {address:#x}, memory of another process"
        with self._current(known(self._mapped, address, what)):
            ask(what, self._rt.cudaIpcCloseMemHandle(address))

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """cudaMemcpyAsync, which takes the direction from the addresses."""
        ordinal = self._streams.get(stream)
        what = f"copy {nbytes} bytes from {source:#x} to {target:#x}"
        kind = self._rt.cudaMemcpyKind.cudaMemcpyDefault
        with self._current(self._place(target) if ordinal is None else ordinal):
            ask(what, self._rt.cudaMemcpyAsync(target, source, nbytes, kind, stream))

    # -- streams and events -------------------------------------------------------------------------------------

    def stream(self, uuid: str) -> int:
        """cudaStreamCreateWithFlags, non-blocking."""
        ordinal = self._ordinal(uuid)
        with self._current(ordinal):
            made = self._rt.cudaStreamCreateWithFlags(self._rt.cudaStreamNonBlocking)
            stream = int(ask(f"a stream on {uuid}", made))
        self._streams[stream] = ordinal
        return stream

    def drop_stream(self, stream: int) -> None:
        """cudaStreamDestroy, which returns before the work is done."""
        what = f"destroy stream {stream:#x}"
        with self._current(known(self._streams, stream, what)):
            ask(what, self._rt.cudaStreamDestroy(stream))
        del self._streams[stream]

    def event(self, uuid: str, *, interprocess: bool = False) -> int:
        ordinal = self._ordinal(uuid)
        # A waiting thread sleeps. Waking up takes about 50 us, and a small transfer waits once or twice within its 1.5
        # ms. A spinning thread would take a core from the job beside it: eight lanes through a long copy, a call
        # through a training step.
        flags = self._rt.cudaEventDisableTiming | self._rt.cudaEventBlockingSync
        flags |= self._rt.cudaEventInterprocess if interprocess else 0
        with self._current(ordinal):
            event = int(ask(f"an event on {uuid}", self._rt.cudaEventCreateWithFlags(flags)))
        self._events[event] = ordinal
        return event

    def drop_event(self, event: int) -> None:
        what = f"destroy event {event:#x}"
        with self._current(known(self._events, event, what)):
            ask(what, self._rt.cudaEventDestroy(event))
        del self._events[event]

    def record(self, event: int, stream: int) -> None:
        what = f"record event {event:#x} on stream {stream:#x}"
        # Stream 0 is the default stream of the current device: the event's.
        with self._current(known(self._events, event, what)):
            ask(what, self._rt.cudaEventRecord(event, stream))

    def wait(self, stream: int, event: int) -> None:
        what = f"wait on stream {stream:#x} for event {event:#x}"
        ordinal = known(self._events, event, what)
        with self._current(self._streams.get(stream, ordinal)):
            ask(what, self._rt.cudaStreamWaitEvent(stream, event, 0))

    def reached(self, event: int) -> bool:
        what = f"query event {event:#x}"
        with self._current(known(self._events, event, what)):
            answer = self._rt.cudaEventQuery(event)
        if answer[0].name == "cudaErrorNotReady":
            return False
        ask(what, answer)
        return True

    def synchronize(self, event: int) -> None:
        what = f"wait for event {event:#x}"
        with self._current(known(self._events, event, what)):
            ask(what, self._rt.cudaEventSynchronize(event))

    def settle(self, uuid: str) -> None:
        with self._current(self._ordinal(uuid)):
            ask(f"wait for all work on {uuid}", self._cu.cuCtxSynchronize())

    def export_event(self, event: int) -> bytes:
        what = f"export event {event:#x}"
        with self._current(known(self._events, event, what)):
            return bytes_of(ask(what, self._rt.cudaIpcGetEventHandle(event)))

    def open_event(self, uuid: str, handle: bytes) -> int:
        ordinal, what = self._ordinal(uuid), f"open another process's event for {uuid}"
        with self._current(ordinal):
            wire = filled(self._rt.cudaIpcEventHandle_t(), handle, what)
            event = int(ask(what, self._rt.cudaIpcOpenEventHandle(wire)))
        self._events[event] = ordinal
        return event

    def launch(self, uuid: str, stream: int, work: Callable[[], None]) -> None:
        """``work`` runs now, in this thread; what it asks of the device is queued."""
        ordinal = self._ordinal(uuid)
        device = torch.device("cuda", ordinal)
        external: Any = torch.cuda.ExternalStream
        # ExternalStream(0) is not the default stream, but a new one that is not ordered with it.
        queue = external(stream, device=device) if stream else torch.cuda.default_stream(device)
        try:
            # The device first: torch.cuda.stream alone returns to the former device's stream by cudaSetDevice, which
            # makes a context there (on GPU 0 for every agent of another GPU). torch.cuda.device returns without one.
            with torch.cuda.device(ordinal), torch.cuda.stream(queue):
                work()
        except Exception as error:
            if (failure := failed(f"launch on {uuid}", error, self._rt)) is None:
                raise
            raise failure from error

    # -- how a call is made -------------------------------------------------------------------------------------

    @contextmanager
    def _current(self, ordinal: int) -> Iterator[None]:
        """Make that device current for the calling thread in this context, whatever context it has."""
        what = f"make device {ordinal} current"
        if (context := self._contexts.get(ordinal)) is None:
            ask(what, self._cu.cuInit(0))
            device = ask(what, self._cu.cuDeviceGet(ordinal))
            # Retained for the process, because torch's allocator lives in it.
            context = self._contexts[ordinal] = ask(what, self._cu.cuDevicePrimaryCtxRetain(device))
        ask(what, self._cu.cuCtxPushCurrent(context))
        try:
            yield
        finally:
            self._cu.cuCtxPopCurrent()  # fails only with an earlier error, which was raised

    def _place(self, address: int) -> int:
        """The device of an address of the unified space."""
        ordinal = self._cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        return int(ask(f"the device of {address:#x}", self._cu.cuPointerGetAttribute(ordinal, address)))
