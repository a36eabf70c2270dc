"""Stand-ins for cuda.bindings.driver and cuda.bindings.runtime: two devices, real enums and structs, and a log.

Their functions have the parameters of the real ones; a test compares them with the wheel's. Each takes note of the
device that was current. ``errors``: what the next call of a function answers.
"""

from __future__ import annotations

import ctypes
import itertools
from types import SimpleNamespace
from typing import Any

from cuda.bindings import driver as real_driver
from cuda.bindings import runtime as real_runtime

#: Calls that need no device.
ANYWHERE = {"cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuCtxPopCurrent"} | {
    *("cuPointerGetAttribute", "cudaGetDeviceCount", "cudaGetDeviceProperties", "cudaDeviceCanAccessPeer"),
    *("cudaRuntimeGetVersion", "cudaDriverGetVersion"),
}


class Machine:
    """What both modules see: contexts pushed, calls made, errors to come."""

    def __init__(self) -> None:
        self.contexts: list[int] = []
        self.calls: list[tuple[str, int | None, tuple[Any, ...]]] = []
        self.errors: dict[str, str] = {}
        self.numbers = itertools.count(0x7000)
        #: address -> (ordinal, nbytes, has an IPC handle)
        self.memory: dict[int, tuple[int, int, bool]] = {}
        self.pending: set[int] = set()
        self.retained: list[int] = []

    def call(self, name: str, *arguments: Any) -> Any:
        """Log a call; success, or the error that the test has asked for."""
        current = self.contexts[-1] if self.contexts else None
        assert name in ANYWHERE or current is not None, f"{name} without a device"
        self.calls.append((name, current, arguments))
        kind = real_runtime.cudaError_t if name.startswith("cuda") else real_driver.CUresult
        return getattr(kind, self.errors.pop(name)) if name in self.errors else kind(0)


class Driver:
    """cuda.bindings.driver, as much as is used of it."""

    CUpointer_attribute = real_driver.CUpointer_attribute

    def __init__(self, machine: Machine) -> None:
        self._m = machine

    def cuInit(self, Flags: int) -> Any:
        return (self._m.call("cuInit", Flags),)

    def cuDeviceGet(self, ordinal: int) -> Any:
        return self._m.call("cuDeviceGet", ordinal), real_driver.CUdevice(ordinal)

    def cuDevicePrimaryCtxRetain(self, dev: Any) -> Any:
        self._m.retained.append(int(dev))
        return self._m.call("cuDevicePrimaryCtxRetain", dev), int(dev)

    def cuCtxPushCurrent(self, ctx: Any) -> Any:
        self._m.contexts.append(int(ctx))
        return (self._m.call("cuCtxPushCurrent", ctx),)

    def cuCtxPopCurrent(self) -> Any:
        return self._m.call("cuCtxPopCurrent"), self._m.contexts.pop()

    def cuMemGetAddressRange(self, dptr: int) -> Any:
        error = self._m.call("cuMemGetAddressRange", dptr)
        base, (_, nbytes, _) = self._around(dptr)
        return error, real_driver.CUdeviceptr(base), nbytes

    def cuPointerGetAttribute(self, attribute: Any, ptr: int) -> Any:
        error = self._m.call("cuPointerGetAttribute", attribute, ptr)
        kinds = real_driver.CUpointer_attribute
        base, (ordinal, _, capable) = self._around(ptr)
        values = {
            kinds.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: ordinal,
            kinds.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: capable,
            kinds.CU_POINTER_ATTRIBUTE_BUFFER_ID: base + 1,
        }
        return error, values[attribute]

    def _around(self, address: int) -> tuple[int, tuple[int, int, bool]]:
        return next((b, found) for b, found in self._m.memory.items() if b <= address < b + found[1])


class Runtime:
    """cuda.bindings.runtime, as much as is used of it."""

    cudaError_t = real_runtime.cudaError_t
    cudaMemcpyKind = real_runtime.cudaMemcpyKind
    cudaIpcMemHandle_t = real_runtime.cudaIpcMemHandle_t
    cudaIpcEventHandle_t = real_runtime.cudaIpcEventHandle_t
    cudaHostAllocPortable = real_runtime.cudaHostAllocPortable
    cudaHostAllocMapped = real_runtime.cudaHostAllocMapped
    cudaIpcMemLazyEnablePeerAccess = real_runtime.cudaIpcMemLazyEnablePeerAccess
    cudaStreamNonBlocking = real_runtime.cudaStreamNonBlocking
    cudaEventDisableTiming = real_runtime.cudaEventDisableTiming
    cudaEventBlockingSync = real_runtime.cudaEventBlockingSync
    cudaEventInterprocess = real_runtime.cudaEventInterprocess

    def __init__(self, machine: Machine) -> None:
        self._m = machine

    def _made(self, name: str, kind: Any, *arguments: Any) -> Any:
        error = self._m.call(name, *arguments)
        return (error, None) if error else (error, kind(next(self._m.numbers)))

    def cudaGetErrorString(self, error: Any) -> Any:
        return real_runtime.cudaGetErrorString(error)

    def cudaRuntimeGetVersion(self) -> Any:
        return self._m.call("cudaRuntimeGetVersion"), 13020

    def cudaDriverGetVersion(self) -> Any:
        return self._m.call("cudaDriverGetVersion"), 13010

    def cudaGetDeviceCount(self) -> Any:
        return self._m.call("cudaGetDeviceCount"), 2

    def cudaGetDeviceProperties(self, device: int) -> Any:
        uuid = SimpleNamespace(bytes=bytes([device] * 16))
        found = SimpleNamespace(uuid=uuid, name=b"Stub GPU\0\0", totalGlobalMem=1 << 34, major=9, minor=0)
        return self._m.call("cudaGetDeviceProperties", device), found

    def cudaDeviceCanAccessPeer(self, device: int, peerDevice: int) -> Any:
        return self._m.call("cudaDeviceCanAccessPeer", device, peerDevice), int(device < peerDevice)

    def cudaMalloc(self, size: int) -> Any:
        error = self._m.call("cudaMalloc", size)
        if error:
            return error, None
        address = next(self._m.numbers) << 20
        self._m.memory[address] = self._m.contexts[-1], size, True
        return error, address

    def cudaFree(self, devPtr: int) -> Any:
        return (self._m.call("cudaFree", devPtr),)

    def cudaHostAlloc(self, size: int, flags: int) -> Any:
        return self._made("cudaHostAlloc", int, size, flags)

    def cudaFreeHost(self, ptr: int) -> Any:
        return (self._m.call("cudaFreeHost", ptr),)

    def cudaIpcGetMemHandle(self, devPtr: int) -> Any:
        error = self._m.call("cudaIpcGetMemHandle", devPtr)
        if error:
            return error, None
        handle = real_runtime.cudaIpcMemHandle_t()
        ctypes.memmove(handle.getPtr(), b"memory".ljust(64, b"-"), 64)
        return error, handle

    def cudaIpcOpenMemHandle(self, handle: Any, flags: int) -> Any:
        return self._made("cudaIpcOpenMemHandle", int, ctypes.string_at(handle.getPtr(), 64), flags)

    def cudaIpcCloseMemHandle(self, devPtr: int) -> Any:
        return (self._m.call("cudaIpcCloseMemHandle", devPtr),)

    def cudaMemcpyAsync(self, dst: int, src: int, count: int, kind: Any, stream: int) -> Any:
        return (self._m.call("cudaMemcpyAsync", dst, src, count, kind, stream),)

    def cudaStreamCreateWithFlags(self, flags: int) -> Any:
        return self._made("cudaStreamCreateWithFlags", real_runtime.cudaStream_t, flags)

    def cudaStreamDestroy(self, stream: int) -> Any:
        return (self._m.call("cudaStreamDestroy", stream),)

    def cudaStreamWaitEvent(self, stream: int, event: int, flags: int) -> Any:
        return (self._m.call("cudaStreamWaitEvent", stream, event, flags),)

    def cudaEventCreateWithFlags(self, flags: int) -> Any:
        return self._made("cudaEventCreateWithFlags", real_runtime.cudaEvent_t, flags)

    def cudaEventDestroy(self, event: int) -> Any:
        return (self._m.call("cudaEventDestroy", event),)

    def cudaEventRecord(self, event: int, stream: int) -> Any:
        return (self._m.call("cudaEventRecord", event, stream),)

    def cudaEventQuery(self, event: int) -> Any:
        error = self._m.call("cudaEventQuery", event)
        return (self.cudaError_t.cudaErrorNotReady if event in self._m.pending else error,)

    def cudaEventSynchronize(self, event: int) -> Any:
        return (self._m.call("cudaEventSynchronize", event),)

    def cudaIpcGetEventHandle(self, event: int) -> Any:
        error = self._m.call("cudaIpcGetEventHandle", event)
        if error:
            return error, None
        handle = real_runtime.cudaIpcEventHandle_t()
        ctypes.memmove(handle.getPtr(), b"event".ljust(64, b"-"), 64)
        return error, handle

    def cudaIpcOpenEventHandle(self, handle: Any) -> Any:
        content = ctypes.string_at(handle.getPtr(), 64)
        return self._made("cudaIpcOpenEventHandle", real_runtime.cudaEvent_t, content)
