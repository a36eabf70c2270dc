"""GPUs: which there are, driver and NCCL, which reach each other, and whether memory passes between processes.

this process: cudaMalloc, fill, export --handle--> child: open, compare, invert, close --> this process: compare
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection

import torch

from etha.config import Settings
from etha.cuda.driver import Device, DeviceError, Driver, Unexportable
from etha.cuda.nccl import NcclError
from etha.cuda.select import driver, nccl
from etha.doctor.finding import Failing
from etha.errors import ConfigError

NBYTES = 1 << 20
#: Long, because a child loads torch and makes a context on the card.
SECONDS = 60.0
_GIB = 1 << 30
_CONTEXT = multiprocessing.get_context("spawn")  # not fork, because CUDA does not survive it
_NAMESPACES = (
    "run both jobs and their agents in one IPC and PID namespace (docker: --ipc=host --pid=host), as one user, "
    "and give the agent's container all GPUs"
)


def check_cuda(settings: Settings, make: Callable[[], Driver] = driver) -> str:
    """The cards and what they can do. ``make`` gives this process and the child their drivers.

    A machine without a GPU passes, because it moves tensors of the CPU.
    """
    try:
        cuda = make()
    except ConfigError as error:
        if torch.cuda.is_available():
            raise Failing(f"torch has a GPU, Etha cannot use it: {error.message}", "install what is missing") from None
        return "no GPU is visible, and cuda-bindings are not installed: tensors of the CPU only"
    try:
        found = cuda.devices()
        versions = cuda.versions()
        passed = _round_trip(cuda, make, found) if found else ""
        peers = _peers(cuda, found)
    except DeviceError as error:
        mend = "nvidia-smi shows whether the card and its driver are well; `dmesg | grep -i xid` what happened to it"
        raise Failing(f"CUDA does not work: {error}", mend) from None
    text = f"CUDA driver {versions['driver']}, runtime {versions['runtime']}, bindings {versions['bindings']}"
    if not found:
        if torch.cuda.is_available():
            mend = "the driver is too old for these bindings: update it, or take bindings of its CUDA version"
            raise Failing(f"torch has a GPU, cuda-bindings find none: {text}", mend)
        return f"no GPU is visible: tensors of the CPU only (what a GPU would need: {text})"
    return "; ".join([*map(_card, found), text, _nccl(), *peers, passed])


def _card(device: Device) -> str:
    major, minor = device.capability
    return f"cuda:{device.ordinal} {device.name}, {device.nbytes / _GIB:.0f} GiB, sm_{major}{minor}, {device.uuid}"


def _nccl() -> str:
    try:
        return f"NCCL {nccl().version()}"
    except (ConfigError, NcclError) as error:
        return f"no NCCL, which GPUs of different hosts need: {error}"


def _peers(cuda: Driver, devices: tuple[Device, ...]) -> list[str]:
    """If there are several cards, for each those whose memory it reaches directly."""
    lines = []
    for one in devices:
        others = [other for other in devices if other is not one]
        reached = [f"cuda:{other.ordinal}" for other in others if cuda.peers(one.uuid, other.uuid)]
        lines.append(f"cuda:{one.ordinal} reaches {', '.join(reached) or 'no other'}")
    return lines if len(devices) > 1 else []


def _round_trip(cuda: Driver, make: Callable[[], Driver], devices: tuple[Device, ...]) -> str:
    """Pass 1 MiB of each card to a child and back. Failing if it does not come back as expected."""
    content = os.urandom(NBYTES)
    with ExitStack() as stack:
        bases, handles = [], []
        for device in devices:
            base = cuda.allocate(device.uuid, NBYTES)
            stack.callback(cuda.free, base)
            _write(cuda, device.uuid, base, content)
            try:
                handles.append(cuda.export(base))
            except Unexportable as error:
                text = f"cuda:{device.ordinal}: memory of cudaMalloc has no IPC handle ({error})"
                raise Failing(text, _NAMESPACES) from None
            bases.append(base)
        problem = _ask_child(make, [device.uuid for device in devices], handles, content)
        if problem:
            raise Failing(f"a card's memory does not pass between two processes: {problem}", _NAMESPACES)
        for device, base in zip(devices, bases, strict=True):
            if _read(cuda, device.uuid, base) != _inverted(content):
                raise Failing(f"cuda:{device.ordinal}: what another process wrote by IPC is not there", _NAMESPACES)
    return "1 MiB of each passed to another process and back by CUDA IPC"


def _ask_child(make: Callable[[], Driver], uuids: list[str], handles: list[bytes], content: bytes) -> str:
    """What went wrong in a process that opened ``handles``; empty if nothing."""
    ours, theirs = _CONTEXT.Pipe()
    child = _CONTEXT.Process(target=_child, args=(theirs, make, uuids, handles), daemon=True)
    child.start()
    theirs.close()
    try:
        ours.send_bytes(content)
        answer = ours.recv_bytes().decode() if ours.poll(SECONDS) else f"no answer in {SECONDS:g} s"
    except (EOFError, OSError):
        answer = "that process died"
    finally:
        ours.close()
        child.kill()
        child.join()
        child.close()
    return answer


def _child(pipe: Connection, make: Callable[[], Driver], uuids: list[str], handles: list[bytes]) -> None:
    content, problems = pipe.recv_bytes(), []
    try:
        cuda = make()
        for uuid, handle in zip(uuids, handles, strict=True):
            address = cuda.open(uuid, handle)
            if _read(cuda, uuid, address) != content:
                problems.append(f"it sees other bytes of {uuid}")
            _write(cuda, uuid, address, _inverted(content))
            cuda.close(address)
    except (DeviceError, ConfigError) as error:
        problems.append(str(error))
    pipe.send_bytes("; ".join(problems).encode())


def _inverted(content: bytes) -> bytes:
    return content.translate(bytes(255 - i for i in range(256)))


def _read(cuda: Driver, uuid: str, base: int) -> bytes:
    with ExitStack() as stack:
        pinned = cuda.pin(NBYTES)
        stack.callback(cuda.unpin, pinned)
        _copy(cuda, uuid, pinned, base)
        return ctypes.string_at(pinned, NBYTES)


def _write(cuda: Driver, uuid: str, base: int, content: bytes) -> None:
    with ExitStack() as stack:
        pinned = cuda.pin(NBYTES)
        stack.callback(cuda.unpin, pinned)
        ctypes.memmove(pinned, content, NBYTES)
        _copy(cuda, uuid, base, pinned)


def _copy(cuda: Driver, uuid: str, target: int, source: int) -> None:
    with ExitStack() as stack:
        stream = cuda.stream(uuid)
        stack.callback(cuda.drop_stream, stream)
        event = cuda.event(uuid)
        stack.callback(cuda.drop_event, event)
        cuda.copy(target, source, NBYTES, stream)
        cuda.record(event, stream)
        cuda.synchronize(event)
