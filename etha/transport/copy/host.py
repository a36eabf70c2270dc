"""host: the memory of another agent's workers on this host, opened by the agent that receives.

    claim(beacon) --link--> prove(claim)        once per pair of agents: can I read your memory?
    Exhibit.of(...) --link--> HostMemory(...)   once per worker: its tensors as views of mine

Nothing that the other agent says is trusted. Processes are compared by start time, segments by device, inode, size and
seals, and the kernel decides about private memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from etha.memory.cuda import Mappings
from etha.memory.handles import TensorHandle
from etha.memory.mapping import WorkerMemory
from etha.memory.process import Beacon, ProcessMemory, start_time
from etha.memory.reach import AccessError, ReachError, WorkerGoneError
from etha.memory.views import View


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """An agent's claim that its process, hence its host and process namespace, is this one; plain data."""

    pid: int
    started: int
    address: int
    token: bytes


def claim(beacon: Beacon) -> Claim:
    """The claim of this process. Keep the beacon while others may probe; they need ``allow_reading()`` here."""
    pid = os.getpid()
    return Claim(pid=pid, started=start_time(pid), address=beacon.address, token=beacon.token)


def prove(claim: Claim) -> None:
    """Find the token in the other agent's memory and write it back. ReachError says why that memory is out of reach."""
    process = ProcessMemory(claim.pid, claim.started)
    try:
        process.probe(claim.address, claim.token)
    finally:
        process.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentClaim:
    """A sealed memfd of a worker: its id, size, and device and inode on this host.

    Or an allocation of a GPU: its uuid, and its IPC handle in hex.
    """

    id: str
    nbytes: int
    device: int = 0
    inode: int = 0
    gpu: str = ""
    handle: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhibit:
    """Where a worker's tensors lie, for another agent on its host; plain data."""

    pid: int
    started: int
    segments: tuple[SegmentClaim, ...]
    tensors: Mapping[str, TensorHandle]

    @classmethod
    def of(cls, memory: WorkerMemory, tensors: Mapping[str, TensorHandle]) -> Exhibit:
        """The exhibit of a worker of this agent, which has the segments of ``tensors`` mapped."""
        used: dict[str, View] = {}
        found: list[SegmentClaim] = []
        for handle in tensors.values():
            view = memory.resolve(handle)
            if handle.segment is None or not view.nbytes or handle.segment in used:
                continue
            used[handle.segment] = view
            if (header := memory.header(handle.segment)) is not None:
                segment = SegmentClaim(
                    id=handle.segment, nbytes=header["nbytes"], gpu=header["device"], handle=header["handle"]
                )
                found.append(segment)
        used = {name: view for name, view in used.items() if view.device is None}
        lines = _maps() if used else []
        for name, view in sorted(used.items()):
            begin = view.address - view.place
            found += [SegmentClaim(id=name, nbytes=n, device=d, inode=i) for start, n, d, i in lines if start == begin]
        process = memory.process
        return cls(pid=process.pid, started=process.started, segments=tuple(found), tensors=dict(tensors))


def _maps() -> list[tuple[int, int, int, int]]:
    """(address, bytes, device, inode) of every mapping of this process."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, device, inode, *_ = line.split()
        first, last = (int(x, 16) for x in span.split("-"))
        major, minor = (int(x, 16) for x in device.split(":"))
        found.append((first, last - first, os.makedev(major, minor), int(inode)))
    return found


class HostMemory:
    """The memory of another agent's worker, opened by this agent. Views stay valid until ``close``."""

    def __init__(self, exhibit: Exhibit, mappings: Mappings | None = None) -> None:
        """Open and check it. ReachError if this agent cannot reach it, RegistrationError for a wrong claim.

        ``mappings`` are those of a GPU's agent, which opens memory on GPUs, too.
        """
        on_gpu = [segment for segment in exhibit.segments if segment.gpu]
        self._memory = WorkerMemory(exhibit.pid, exhibit.started, mappings=mappings if on_gpu else None)
        try:
            for segment in on_gpu:
                header = {"segment": segment.id, "nbytes": segment.nbytes}
                self._memory.attach_allocation(header | {"device": segment.gpu, "handle": segment.handle})
            if len(on_gpu) < len(exhibit.segments):
                self._attach(exhibit)
            self._tensors = {name: self._memory.resolve(handle) for name, handle in exhibit.tensors.items()}
            self._try_private()
        except BaseException:
            self.close()
            raise

    def _attach(self, exhibit: Exhibit) -> None:
        wanted = {(s.device, s.inode): s for s in exhibit.segments if not s.gpu}
        folder = Path(f"/proc/{exhibit.pid}/fd")
        try:
            descriptors = list(folder.iterdir())
        except FileNotFoundError:
            raise WorkerGoneError(f"process {exhibit.pid} is gone", pid=exhibit.pid) from None
        except PermissionError:
            raise AccessError(
                f"the descriptors of process {exhibit.pid} are not ours to open", pid=exhibit.pid
            ) from None
        for path in descriptors:
            try:
                info = path.stat()
                if (info.st_dev, info.st_ino) not in wanted:
                    continue
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                continue  # closed meanwhile; whatever is missing at the end raises below
            info = os.fstat(fd)  # the number may have been reused for another file
            segment = wanted.pop((info.st_dev, info.st_ino), None)
            if segment is None:
                os.close(fd)
            else:
                self._memory.attach(segment.id, fd, segment.nbytes)
        if wanted:
            ids = ", ".join(s.id for s in wanted.values())
            raise ReachError(f"process {exhibit.pid} has no descriptor of its segments {ids}", pid=exhibit.pid)
        if not self._memory.process.alive() or start_time(exhibit.pid) != exhibit.started:
            raise WorkerGoneError(f"process {exhibit.pid} is gone", pid=exhibit.pid)

    def _try_private(self) -> None:
        """Read one byte of private memory, to find out early whether the kernel forbids it."""
        view = next((v for v in self._tensors.values() if v.private), None)
        if view is not None:
            byte = np.zeros(1, np.uint8)
            here = np.array([[byte.ctypes.data, 1]], np.uint64)
            self._memory.process.read(here, np.array([[view.address, 1]], np.uint64))

    def all_views(self) -> tuple[View, ...]:
        """Views of all tensors."""
        return tuple(self._tensors.values())

    def views(self, names: Sequence[str]) -> dict[int, View]:
        """Views of those tensors that are in ``names``, by their index there."""
        return {i: self._tensors[name] for i, name in enumerate(names) if name in self._tensors}

    def close(self) -> None:
        """Release the process and the segments. Idempotent. No lane may be using them any more."""
        self._memory.close()
