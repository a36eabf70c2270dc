"""Reading the answers of cuda-bindings: values or a DeviceError, handles as bytes, one name per error of either API.

Also errors that torch and Triton raise when the device refuses something.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import torch

from etha.cuda.driver import DeviceError
from etha.errors import ConfigError

#: After one of these, every call of the process fails.
STICKY = frozenset(
    f"cudaError{name}"
    for name in (
        *("IllegalAddress", "LaunchFailure", "LaunchTimeout", "ECCUncorrectable", "NvlinkUncorrectable", "Assert"),
        *("HardwareStackError", "IllegalInstruction", "MisalignedAddress", "InvalidAddressSpace", "InvalidPc"),
        *("ContextIsDestroyed", "MpsClientTerminated", "TensorMemoryLeak", "ExternalDevice", "Contained", "Unknown"),
    )
)
#: Errors that the runtime names differently from the driver.
_OTHERWISE = {
    "LaunchFailed": "LaunchFailure",
    "OutOfMemory": "MemoryAllocation",
    "InvalidHandle": "InvalidResourceHandle",
}
_HANDLE = 64
#: Appended to errors about memory that cannot be exported.
NO_HANDLE = (
    "this memory has no IPC handle: was it made with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True or "
    "backend:cudaMallocAsync, or by a sleep mode's allocator?"
)


def load() -> tuple[Any, Any]:
    """The two binding modules, driver and runtime. ConfigError if the package is missing."""
    try:
        return importlib.import_module("cuda.bindings.driver"), importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise ConfigError(f"a GPU needs cuda-bindings ({error}): pip install 'sub-etha[nccl]'") from None


def runtime_name(name: str) -> str:
    """The runtime's name for a driver's error: "CUDA_ERROR_ILLEGAL_ADDRESS" is "cudaErrorIllegalAddress"."""
    if not name.startswith("CUDA_ERROR_"):
        return name
    words = name.removeprefix("CUDA_ERROR_").split("_")
    text = "".join(word if word == "ECC" else word.capitalize() for word in words)
    return f"cudaError{_OTHERWISE.get(text, text)}"


def ask(what: str, answer: tuple[Any, ...]) -> Any:
    """What came back besides "success": nothing, one value, or a tuple of several. DeviceError, naming ``what``,
    otherwise."""
    error, *values = answer
    if int(error):
        name = runtime_name(error.name)
        raise DeviceError(name, what, sticky=name in STICKY)
    return values[0] if len(values) == 1 else tuple(values)


def failed(what: str, error: Exception, runtime: Any) -> DeviceError | None:
    """The device failure that torch or Triton raised as ``error``; None if it is the caller's mistake.

    Triton reports the driver's errors only by their descriptions; those of the bindings ``runtime`` are the same.
    """
    text = f"{what}: {error}"
    if isinstance(error, torch.AcceleratorError):
        name = runtime.cudaError_t(getattr(error, "error_code", 999)).name
    elif isinstance(error, torch.OutOfMemoryError):
        name = "cudaErrorMemoryAllocation"
    elif isinstance(error, RuntimeError) or type(error).__module__.startswith("triton."):
        named = {runtime.cudaGetErrorString(one)[1].decode(): one.name for one in runtime.cudaError_t if int(one)}
        name = next((n for said, n in named.items() if str(error).endswith(said)), type(error).__name__)
    else:
        return None
    return DeviceError(name, text, sticky=name in STICKY)


def bytes_of(handle: Any) -> bytes:
    """A handle's 64 bytes. They are read directly, because its members' names change from release to release."""
    return ctypes.string_at(handle.getPtr(), _HANDLE)


def filled(handle: Any, content: bytes, what: str) -> Any:
    if len(content) != _HANDLE:
        raise DeviceError("cudaErrorInvalidValue", f"{what}: a handle has {_HANDLE} bytes, not {len(content)}")
    ctypes.memmove(handle.getPtr(), content, _HANDLE)
    return handle


def version(number: int) -> str:
    """The version as text: 13050 is "13.5"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def known(table: dict[int, int], key: int, what: str) -> int:
    """The device of memory, a stream or an event by its ``key``. DeviceError if it is unknown (by now)."""
    if key not in table:
        raise DeviceError("cudaErrorInvalidResourceHandle", f"{what}: it is not one of this driver's, or no longer")
    return table[key]
