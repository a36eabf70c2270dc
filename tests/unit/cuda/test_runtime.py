"""The real driver: over stand-ins whose functions have the wheel's own parameters, and over the wheel without a GPU."""

from __future__ import annotations

import ctypes
import inspect
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from etha.cuda.answers import STICKY, runtime_name
from etha.cuda.driver import DeviceError, Unexportable
from etha.cuda.runtime import Runtime
from etha.errors import ConfigError
from tests.fakes import bindings
from tests.fakes.bindings import Machine, real_driver, real_runtime

GPU0, GPU1 = "GPU-00000000-0000-0000-0000-000000000000", "GPU-01010101-0101-0101-0101-010101010101"


class Rig:
    """A Runtime over stand-ins; ``said`` are its calls since it was asked last, what makes a device current apart."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.cuda = Runtime((bindings.Driver(self.machine), bindings.Runtime(self.machine)))
        self.cuda.devices()

    def said(self) -> list[tuple[object, ...]]:
        assert self.machine.contexts == [], "a context was left current"
        calls = [(name, on, *rest) for name, on, rest in self.machine.calls if name not in bindings.ANYWHERE]
        self.machine.calls.clear()
        return calls


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_the_stand_ins_take_what_the_wheel_takes() -> None:
    compared = 0
    for stand_in, real in ((bindings.Driver, real_driver), (bindings.Runtime, real_runtime)):
        for name, function in vars(stand_in).items():
            if name.startswith("cu") and inspect.isfunction(function):
                names = list(inspect.signature(function).parameters)[1:]
                assert names == list(inspect.signature(getattr(real, name)).parameters), name
                compared += 1
    assert compared == 31
    # Every error that counts as sticky is one, and the driver's word for it is the same error.
    for name in STICKY:
        assert hasattr(real_runtime.cudaError_t, name)
    same = {runtime_name(e.name): int(e) for e in real_driver.CUresult if e}
    shared = {n: v for n, v in same.items() if n in STICKY}
    assert len(shared) > 10
    assert all(v == int(getattr(real_runtime.cudaError_t, n)) for n, v in shared.items())


def test_devices_are_found_by_uuid(rig: Rig) -> None:
    first, second = rig.cuda.devices()
    assert (first.uuid, second.uuid, second.ordinal) == (GPU0, GPU1, 1)
    assert (first.name, first.nbytes, first.capability) == ("Stub GPU", 1 << 34, (9, 0))
    assert rig.cuda.versions()["driver"] == "13.1" and rig.cuda.versions()["runtime"] == "13.2"
    assert rig.cuda.peers(GPU0, GPU1) and not rig.cuda.peers(GPU1, GPU0) and rig.cuda.peers(GPU1, GPU1)
    with pytest.raises(DeviceError, match=f"GPU-x is not visible to this process .it sees {GPU0}, {GPU1}"):
        rig.cuda.allocate("GPU-x", 8)
    assert rig.cuda.holds(torch.empty(2)) is None
    on_second = SimpleNamespace(device=SimpleNamespace(type="cuda", index=1))
    assert rig.cuda.holds(on_second) == GPU1  # type: ignore[arg-type]


def test_memory_is_asked_for_on_its_own_device(rig: Rig) -> None:
    address = rig.cuda.allocate(GPU1, 4096)
    assert rig.said() == [("cudaMalloc", 1, 4096)]
    assert rig.cuda.extent(address + 100) == (address, 4096) and rig.cuda.serial(address + 1) == address + 1
    assert rig.cuda.export(address) == b"memory".ljust(64, b"-")
    assert [call[:2] for call in rig.said()] == [("cuMemGetAddressRange", 1), ("cudaIpcGetMemHandle", 1)]
    stream = rig.cuda.stream(GPU0)
    rig.cuda.copy(address, 0x5000, 7, stream)
    rig.cuda.copy(address, 0x5000, 7, 0)
    kind = real_runtime.cudaMemcpyKind.cudaMemcpyDefault
    assert rig.said() == [
        ("cudaStreamCreateWithFlags", 0, real_runtime.cudaStreamNonBlocking),
        ("cudaMemcpyAsync", 0, address, 0x5000, 7, kind, stream),
        ("cudaMemcpyAsync", 1, address, 0x5000, 7, kind, 0),
    ]
    rig.cuda.drop_stream(stream)
    rig.cuda.free(address)
    assert rig.said() == [("cudaStreamDestroy", 0, stream), ("cudaFree", 1, address)]


def test_pinned_memory_makes_no_context_on_another_device(rig: Rig) -> None:
    rig.cuda.event(GPU1)
    address = rig.cuda.pin(64)
    rig.cuda.unpin(address)
    flags = real_runtime.cudaHostAllocPortable | real_runtime.cudaHostAllocMapped
    assert rig.said()[1:] == [("cudaHostAlloc", 1, 64, flags), ("cudaFreeHost", 1, address)]
    assert rig.machine.retained == [1]


def test_memory_and_events_of_other_processes(rig: Rig) -> None:
    handle = bytes(range(64))
    address, event = rig.cuda.open(GPU1, handle), rig.cuda.open_event(GPU1, handle)
    rig.cuda.close(address)
    rig.cuda.drop_event(event)
    assert rig.said() == [
        ("cudaIpcOpenMemHandle", 1, handle, real_runtime.cudaIpcMemLazyEnablePeerAccess),
        ("cudaIpcOpenEventHandle", 1, handle),
        ("cudaIpcCloseMemHandle", 1, address),
        ("cudaEventDestroy", 1, event),
    ]
    for wrong in (b"", handle + b"x"):
        with pytest.raises(DeviceError, match="64 bytes"):
            rig.cuda.open(GPU0, wrong)
        with pytest.raises(DeviceError, match="64 bytes"):
            rig.cuda.open_event(GPU0, wrong)


def test_events_and_streams(rig: Rig) -> None:
    event, shared = rig.cuda.event(GPU1), rig.cuda.event(GPU0, interprocess=True)
    stream = rig.cuda.stream(GPU0)
    timeless = real_runtime.cudaEventDisableTiming | real_runtime.cudaEventBlockingSync
    assert rig.said()[:2] == [
        ("cudaEventCreateWithFlags", 1, timeless),
        ("cudaEventCreateWithFlags", 0, timeless | real_runtime.cudaEventInterprocess),
    ]
    rig.cuda.record(event, 0)
    rig.cuda.wait(stream, event)
    rig.cuda.wait(0, event)
    rig.cuda.synchronize(event)
    assert rig.said() == [
        ("cudaEventRecord", 1, event, 0),  # the default stream of the event's device
        ("cudaStreamWaitEvent", 0, stream, event, 0),
        ("cudaStreamWaitEvent", 1, 0, event, 0),
        ("cudaEventSynchronize", 1, event),
    ]
    assert rig.cuda.reached(event)
    rig.machine.pending.add(event)
    assert not rig.cuda.reached(event)
    assert rig.cuda.export_event(shared) == b"event".ljust(64, b"-")


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("cudaMalloc", lambda c: c.allocate(GPU0, 8)),
        ("cudaFree", lambda c: c.free(c.allocate(GPU0, 8))),
        ("cudaHostAlloc", lambda c: c.pin(8)),
        ("cudaFreeHost", lambda c: c.unpin(c.pin(8))),
        ("cudaIpcGetMemHandle", lambda c: c.export(c.allocate(GPU0, 8))),
        ("cudaIpcOpenMemHandle", lambda c: c.open(GPU0, bytes(64))),
        ("cudaIpcCloseMemHandle", lambda c: c.close(c.open(GPU0, bytes(64)))),
        ("cudaStreamCreateWithFlags", lambda c: c.stream(GPU0)),
        ("cudaStreamDestroy", lambda c: c.drop_stream(c.stream(GPU0))),
        ("cudaEventCreateWithFlags", lambda c: c.event(GPU0)),
        ("cudaEventDestroy", lambda c: c.drop_event(c.event(GPU0))),
        ("cudaEventRecord", lambda c: c.record(c.event(GPU0), 0)),
        ("cudaStreamWaitEvent", lambda c: c.wait(0, c.event(GPU0))),
        ("cudaEventQuery", lambda c: c.reached(c.event(GPU0))),
        ("cudaEventSynchronize", lambda c: c.synchronize(c.event(GPU0))),
        ("cudaIpcGetEventHandle", lambda c: c.export_event(c.event(GPU0))),
        ("cudaIpcOpenEventHandle", lambda c: c.open_event(GPU0, bytes(64))),
        ("cudaMemcpyAsync", lambda c: c.copy(1, 2, 3, c.stream(GPU0))),
        ("cudaDeviceCanAccessPeer", lambda c: c.peers(GPU0, GPU1)),
    ],
)
def test_each_call_tells_of_its_failure(function: str, call: Callable[[Runtime], object]) -> None:
    for error, sticky in (("cudaErrorIllegalAddress", True), ("cudaErrorMemoryAllocation", False)):
        rig = Rig()
        rig.machine.errors[function] = error
        with pytest.raises(DeviceError, match=error) as caught:
            call(rig.cuda)
        assert (caught.value.name, caught.value.sticky) == (error, sticky)
        assert not isinstance(caught.value, Unexportable)
        rig.said()


@pytest.mark.parametrize(
    ("function", "call"),
    [
        ("cuMemGetAddressRange", lambda c: c.extent(c.allocate(GPU0, 8))),
        ("cuPointerGetAttribute", lambda c: c.serial(c.allocate(GPU0, 8))),
        ("cuDevicePrimaryCtxRetain", lambda c: c.event(GPU0)),
        ("cuDeviceGet", lambda c: c.event(GPU0)),
        ("cuInit", lambda c: c.event(GPU0)),
    ],
)
def test_the_drivers_errors_have_the_runtimes_names(function: str, call: Callable[[Runtime], object]) -> None:
    rig = Rig()
    rig.machine.errors[function] = "CUDA_ERROR_ECC_UNCORRECTABLE"
    with pytest.raises(DeviceError, match="cudaErrorECCUncorrectable") as caught:
        call(rig.cuda)
    assert caught.value.sticky


def test_memory_that_has_no_handle_is_recognised(rig: Rig) -> None:
    address = rig.cuda.allocate(GPU0, 8)
    for error in ("cudaErrorInvalidValue", "cudaErrorNotSupported"):
        rig.machine.errors["cudaIpcGetMemHandle"] = error
        with pytest.raises(Unexportable, match=r"expandable_segments:True.*cudaMallocAsync.*sleep mode") as caught:
            rig.cuda.export(address)
        assert caught.value.name == error
    rig.said()
    rig.machine.memory[address] = 0, 8, False
    with pytest.raises(Unexportable, match="expandable_segments:True"):
        rig.cuda.export(address)
    assert rig.said() == []  # it was not even asked for


@pytest.mark.parametrize("call", ["free", "close", "drop_stream", "drop_event", "reached", "synchronize"])
def test_what_is_not_known_is_not_handed_to_cuda(rig: Rig, call: str) -> None:
    with pytest.raises(DeviceError, match=r"0x123.*no longer") as caught:
        getattr(rig.cuda, call)(0x123)
    assert caught.value.name == "cudaErrorInvalidResourceHandle" and rig.said() == []


def test_what_was_given_back_is_forgotten(rig: Rig) -> None:
    event, stream, address = rig.cuda.event(GPU0), rig.cuda.stream(GPU0), rig.cuda.allocate(GPU0, 8)
    for drop, what in ((rig.cuda.drop_event, event), (rig.cuda.drop_stream, stream), (rig.cuda.free, address)):
        drop(what)
        with pytest.raises(DeviceError, match="no longer"):
            drop(what)


def test_tensors_are_made_of_addresses(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, asked = torch.device("cpu"), []

    def device(kind: str, ordinal: int) -> torch.device:
        asked.append((kind, ordinal))
        return cpu

    memory = bytearray(range(32))
    address = ctypes.addressof((ctypes.c_char * 32).from_buffer(memory))
    monkeypatch.setattr(torch, "device", device)
    flat = rig.cuda.tensor(GPU1, address + 2, 8)
    assert flat.tolist() == list(range(2, 10)) and flat.data_ptr() == address + 2 and flat.dtype == torch.uint8
    flat.fill_(77)
    assert memory[1:11] == bytes([1, *[77] * 8, 10])
    assert rig.cuda.tensor(GPU0, 0, 0).shape == (0,)
    assert asked == [("cuda", 1), ("cuda", 0)]


class Torch:
    """What torch's own ``device`` and ``stream`` contexts do to the devices, as its C++ does it.

    cudaSetDevice makes a context; ``maybe`` goes only where one is. ``current`` are the streams, by device.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.contexts: set[int] = set()
        self.device = 0
        self.current = {0: 10, 1: 11}
        patch.setattr(torch.cuda, "ExternalStream", lambda pointer, device: self.stream(pointer, device.index))
        patch.setattr(torch.cuda, "current_stream", self.current_stream)
        patch.setattr(torch.cuda, "_get_device_index", self.index)
        patch.setattr(torch.cuda, "_exchange_device", self.exchange)
        patch.setattr(torch.cuda, "_maybe_exchange_device", self.maybe)
        patch.setattr(torch.cuda, "_set_stream_by_id", self.set_stream)

    def stream(self, number: int, ordinal: int) -> SimpleNamespace:
        device = torch.device("cuda", ordinal)
        return SimpleNamespace(stream_id=number, device_index=ordinal, device_type=1, device=device)

    def index(self, device: object, optional: bool = False) -> int:
        if device is None:
            return self.device
        return device.index if isinstance(device, torch.device) else int(str(device))

    def current_stream(self, device: object) -> SimpleNamespace:
        return self.stream(self.current[self.index(device)], self.index(device))

    def exchange(self, ordinal: int) -> int:
        self.contexts.add(ordinal)
        before, self.device = self.device, ordinal
        return before

    def maybe(self, ordinal: int) -> int:
        return self.exchange(ordinal) if ordinal in self.contexts else ordinal

    def set_stream(self, stream_id: int, device_index: int, device_type: int) -> None:
        if device_index != self.device:
            self.exchange(device_index)
        self.current[device_index] = stream_id


def test_work_runs_on_the_stream_that_is_named_and_only_its_device_is_touched(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Torch(monkeypatch)
    seen: list[object] = []
    rig.cuda.launch(GPU1, 0x99, lambda: seen.append((fake.device, fake.current[1])))
    assert seen == [(1, 0x99)]
    assert fake.current == {0: 10, 1: 11}
    assert fake.contexts == {1}, "a context on GPU 0, for which nobody has asked"


ILLEGAL = "an illegal memory access was encountered"


@pytest.mark.parametrize(
    ("error", "name", "sticky"),
    [
        (torch.AcceleratorError(f"CUDA error: {ILLEGAL}"), "cudaErrorIllegalAddress", True),
        (torch.OutOfMemoryError("CUDA out of memory."), "cudaErrorMemoryAllocation", False),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "cudaErrorMemoryAllocation", False),
        (RuntimeError(f"Triton Error [CUDA]: {ILLEGAL}"), "cudaErrorIllegalAddress", True),
        (RuntimeError("PassManager::run failed"), "RuntimeError", False),
        (type("OutOfResources", (Exception,), {"__module__": "triton.runtime"})("shared"), "OutOfResources", False),
    ],
)
def test_what_torch_and_triton_raise_is_the_devices_failure(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception, name: str, sticky: bool
) -> None:
    fake = Torch(monkeypatch)
    if isinstance(error, torch.AcceleratorError):
        error.error_code = 700  # type: ignore[attr-defined]

    def fails() -> None:
        raise error

    with pytest.raises(DeviceError, match=f"launch on {GPU1}: ") as caught:
        rig.cuda.launch(GPU1, 0x99, fails)
    assert (caught.value.name, caught.value.sticky) == (name, sticky)
    assert str(error) in str(caught.value) and fake.current == {0: 10, 1: 11}


def test_a_mistake_of_ours_is_not_the_devices(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    Torch(monkeypatch)
    with pytest.raises(ZeroDivisionError):
        rig.cuda.launch(GPU1, 0x99, lambda: print(1 // 0))


def test_the_current_stream_is_torchs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda ordinal: SimpleNamespace(cuda_stream=100 + ordinal))
    assert rig.cuda.current_stream(GPU1) == 101


@pytest.mark.parametrize("error", ["cudaErrorNoDevice", "cudaErrorInsufficientDriver", "cudaErrorStubLibrary"])
def test_a_machine_without_a_gpu_has_none(error: str) -> None:
    machine = Machine()
    cuda = Runtime((bindings.Driver(machine), bindings.Runtime(machine)))
    machine.errors["cudaGetDeviceCount"] = error
    assert cuda.devices() == ()
    machine.errors["cudaGetDeviceCount"] = "cudaErrorInitializationError"
    with pytest.raises(DeviceError, match="the number of devices: cudaErrorInitializationError"):
        cuda.devices()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_wheel_itself_without_a_gpu() -> None:
    cuda = Runtime()
    assert cuda.devices() == ()
    versions = cuda.versions()
    assert versions["runtime"].startswith("13.") and versions["bindings"].startswith("13.")
    assert versions["driver"].startswith(("13.", "none: libcuda.so.1"))
    with pytest.raises(DeviceError, match=f"{GPU0} is not visible to this process .it sees none"):
        cuda.event(GPU0)


def test_a_missing_package_is_told_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(ConfigError, match=r"pip install 'sub-etha\[nccl\]'"):
        Runtime()


@pytest.mark.slow
@pytest.mark.parametrize(
    "doing",
    [
        "import etha",
        "import etha.agent.__main__, etha.client.aio, etha.memory.cuda, etha.cuda.driver",
        "import torch, etha; etha.empty((4,))",
        "from etha.config import Settings; import etha.doctor.machine as m; m.check_device(Settings.from_env())",
    ],
)
def test_without_a_gpu_nothing_of_cuda_is_loaded(doing: str) -> None:
    # torch itself loads cuda-bindings where it finds them, so they are hidden: whoever else wants them fails.
    program = f"""
import sys
sys.modules.update(dict.fromkeys(("cuda", "nccl", "triton")))
{doing}
print([name for name in sys.modules if name in ("etha.cuda.runtime", "etha.cuda.answers", "etha.cuda.nccl4py")])
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (answer.stdout.strip(), answer.returncode) == ("[]", 0), answer.stderr
