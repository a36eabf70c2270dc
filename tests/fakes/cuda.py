"""FakeDriver: a CUDA driver whose GPUs are memory of the CPU, and which is stricter than a real one.

Streams run on threads, memory and interprocess events are shared between real processes, and a broken contract raises
Broken and is kept for ``check()``. What a correct program must cope with (no memory left, a dead exporter, memory that
has no handle) raises DeviceError, as in CUDA. A second process with the same uuids has "the same GPUs", but sees
nothing of this one's memory except through IPC handles. No fork after the first call: forkserver or spawn.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import struct
import threading
import traceback
import uuid as uuids
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from etha.cuda.driver import Device, DeviceError, Driver, Extent, Unexportable
from etha.cuda.reaper import reaper
from etha.memory.process import ProcessMemory, start_time
from etha.memory.reach import WorkerGoneError
from tests.fakes.pages import PAGE, POISON, Pages
from tests.fakes.queues import Recordings, Stream, on_stream

GPU0 = "GPU-00000000-0000-4000-8000-000000000000"
GPU1 = "GPU-11111111-1111-4111-8111-111111111111"
#: torch's caching allocator: small tensors share segments of so many bytes, at multiples of 512.
SEGMENT, ALIGN = 2 << 20, 512
#: How long ``free`` and ``check`` wait for streams.
PATIENCE = 20.0
_MEMORY = struct.Struct("=4sIQIQQ16s12x")
_EVENT = struct.Struct("=4sIQIQ16s20x")


class Broken(AssertionError):
    """The program under test did what CUDA forbids."""


@dataclass(slots=True, eq=False)
class _Block:
    """Device memory. ``holders``: living tensors of ``empty``; None: of ``allocate``, or opened ``count`` times."""

    pages: Pages
    nbytes: int
    uuid: str
    serial: int
    exportable: bool = True
    holders: int | None = None
    used: int = 0
    handle: bytes = b""
    count: int = 0
    asleep: bool = False


@dataclass(slots=True, eq=False)
class _Event:
    uuid: str
    recordings: Recordings
    interprocess: bool = False
    process: ProcessMemory | None = None
    waiting: int = 0


class FakeDriver(Driver):
    """GPUs by uuid, of ``nbytes`` each. ``peers``: pairs that reach each other; None: all do.

    ``before_copy``, when set, is called with a copy's size in bytes on the stream's thread, as the copy begins.
    """

    def __init__(
        self, uuids: Sequence[str] = (GPU0,), *, nbytes: int = 1 << 30, peers: set[frozenset[str]] | None = None
    ) -> None:
        self._nbytes, self._peers = nbytes, peers
        self._devices = tuple(
            Device(ordinal=i, uuid=uuid, name="Fake GPU", nbytes=nbytes, capability=(9, 0))
            for i, uuid in enumerate(uuids)
        )
        self._freeing, self._frees = threading.Condition(), set[int]()
        self._lock = threading.RLock()  # a finalizer may run while this very thread holds it
        self._here = threading.local()
        self._numbers = itertools.count(0x100)
        self._blocks: dict[int, _Block] = {}
        self._mapped: dict[int, _Block] = {}
        self._pinned: dict[int, Pages] = {}
        self._given_back: list[tuple[str, Pages]] = []
        self._streams: dict[int, Stream] = {}
        self._dropped: list[Stream] = []  # what is queued on them still runs
        self._events: dict[int, _Event] = {}
        self._closed_events: list[_Event] = []
        self._next_errors: dict[str, list[DeviceError]] = {}
        self._spoilt: DeviceError | None = None
        self._closed = False
        self.failures: list[str] = []
        self.before_copy: Callable[[int], None] | None = None
        self.calls: Counter[str] = Counter()
        self._default = {device.uuid: self._new_stream(device.uuid) for device in self._devices}

    # -- for tests ----------------------------------------------------------------------------------------------

    def empty(
        self, uuid: str, shape: Sequence[int], dtype: torch.dtype = torch.float32, *, exportable: bool = True
    ) -> torch.Tensor:
        """A tensor as torch's caching allocator gives it: zeroed here, several in one allocation if small."""
        self._begin("empty", uuid)
        nbytes = max(1, math.prod(shape) * dtype.itemsize)
        size = -(-nbytes // ALIGN) * ALIGN
        with self._lock:
            block = next(
                (
                    b
                    for b in self._blocks.values()
                    if b.uuid == uuid and b.holders and b.exportable == exportable and b.used + size <= b.nbytes
                ),
                None,
            )
            if block is None:
                block = self._block(uuid, -(-size // SEGMENT) * SEGMENT, exportable=exportable)
                block.holders = 0
            address = block.pages.address + block.used
            block.used += size
            block.holders = (block.holders or 0) + 1
        buffer = (ctypes.c_uint8 * nbytes).from_address(address)
        weakref.finalize(buffer, self._leave, block).atexit = False
        storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape))

    def _leave(self, block: _Block) -> None:
        with self._lock:
            block.holders = (block.holders or 0) - 1

    def empty_cache(self) -> None:
        """As torch's: give back the allocations in which no tensor is left."""
        with self._lock:
            unused = [base for base, block in self._blocks.items() if block.holders == 0]
        for base in unused:
            self._give_back(base)

    def unmap(self, tensor: torch.Tensor, *, again: bool = False) -> None:
        """As a sleep mode does: take the memory under ``empty``'s tensors away, or give it ``again`` to them."""
        with self._lock:
            block = self._around(tensor.data_ptr())
            assert block is not None and block.holders
            if again and block.pages.spoilt():
                self._broken(f"{block.pages.address:#x} was written while it was unmapped")
            block.asleep = not again
        ctypes.memset(block.pages.address, 0 if again else POISON, block.nbytes)

    def allocate_unexportable(self, uuid: str, nbytes: int) -> int:
        """As ``allocate``, of memory that has no IPC handle."""
        self._begin("allocate_unexportable", uuid)
        return self._block(uuid, nbytes, exportable=False).pages.address

    def hold(self, stream: int) -> None:
        """Nothing that is queued there begins until ``release``."""
        self._stream(stream).hold(True)

    def release(self, stream: int) -> None:
        self._stream(stream).hold(False)

    def pending(self, stream: int) -> int:
        """Pieces of work that are queued there or at work."""
        return self._stream(stream).pending

    def drain(self, stream: int) -> None:
        """Wait until all that is queued there is done."""
        if not self._stream(stream).drain(PATIENCE):
            raise self._broken(f"stream {stream:#x} does not come to an end: held, or it waits for what never comes")

    @contextmanager
    def using(self, stream: int) -> Iterator[None]:
        """Make it this thread's current stream, as torch.cuda.stream does."""
        before, current = dict(self._current), self._current
        current[self._stream(stream).uuid] = stream
        try:
            yield
        finally:
            current.clear()
            current.update(before)

    def fail(self, method: str, error: DeviceError) -> None:
        """The next call of that method raises ``error``; a sticky one, every call from then on."""
        self._next_errors.setdefault(method, []).append(error)

    def forgive(self) -> None:
        """After a sticky error that a test has asked for: go on as if it had never been."""
        self._spoilt = None

    @property
    def mapped(self) -> dict[int, int]:
        """How often each address is open."""
        with self._lock:
            return {address: block.count for address, block in self._mapped.items()}

    def leaks(self) -> list[str]:
        """What the program under test has not given back; torch's own memory and streams apart."""
        with self._lock:
            default = set(self._default.values())
            return [
                *(f"memory {a:#x}, {b.nbytes} bytes" for a, b in self._blocks.items() if b.holders is None),
                *(f"mapping {a:#x}, {b.nbytes} bytes, open {b.count} times" for a, b in self._mapped.items()),
                *(f"pinned {a:#x}, {p.nbytes} bytes" for a, p in self._pinned.items()),
                *(f"stream {s:#x}" for s in self._streams if s not in default),
                *(f"event {e:#x}" for e in self._events),
            ]

    def check(self) -> None:
        """The end of a test: AssertionError for broken contracts, work that never ends, leaks; then ``shut``."""
        stuck = [stream.handle for stream in self._all_streams() if not stream.drain(PATIENCE)]
        reaper.drain(PATIENCE)  # what was let go of is no leak
        late = [f"{u}: {p.address:#x} was written after it was given back" for u, p in self._given_back if p.spoilt()]
        found = [
            *self.failures,
            *late,
            *(
                f"{b.pages.address:#x} was written while it was unmapped"
                for b in self._blocks.values()
                if b.asleep and b.pages.spoilt()
            ),
            *(f"stream {s:#x} never came to an end" for s in stuck),
            *(f"never given back: {leak}" for leak in self.leaks()),
        ]
        self.shut()
        assert not found, "\n".join(found)

    def shut(self) -> None:
        """End the threads and give back all memory but what tensors still look at; idempotent."""
        if self._closed:
            return
        self._closed = True
        for stream in self._all_streams():
            stream.stop()
        with self._lock:
            for block in (*self._blocks.values(), *self._mapped.values()):
                if not block.holders:
                    block.pages.unmap()
            for pages in (*self._pinned.values(), *(pages for _, pages in self._given_back)):
                pages.unmap()
            for event in (*self._events.values(), *self._closed_events):
                event.recordings.pages.unmap()
                if event.process is not None:
                    event.process.close()

    def _all_streams(self) -> list[Stream]:
        with self._lock:
            return [*self._streams.values(), *self._dropped]

    # -- devices ------------------------------------------------------------------------------------------------

    def versions(self) -> dict[str, str]:
        return {"driver": "13.0", "runtime": "13.0", "bindings": "none: a test's driver"}

    def devices(self) -> tuple[Device, ...]:
        return self._devices

    def peers(self, uuid: str, other: str) -> bool:
        self._begin("peers", uuid, other)
        return uuid == other or self._peers is None or frozenset((uuid, other)) in self._peers

    def holds(self, tensor: torch.Tensor) -> str | None:
        if tensor.device.type != "cpu":
            return None
        address = tensor.untyped_storage().data_ptr()
        with self._lock:
            found = self._around(address)
        return found.uuid if found is not None else None

    def tensor(self, uuid: str, address: int, nbytes: int) -> torch.Tensor:
        self._begin("tensor", uuid)
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        with self._lock:
            self._inside(address, nbytes, "tensor")
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)

    @property
    def _current(self) -> dict[str, int]:
        if not hasattr(self._here, "streams"):
            self._here.streams = {}
        current: dict[str, int] = self._here.streams
        return current

    def current_stream(self, uuid: str) -> int:
        self._begin("current_stream", uuid)
        return self._current.get(uuid, self._default[uuid])

    # -- memory -------------------------------------------------------------------------------------------------

    def _block(self, uuid: str, nbytes: int, *, exportable: bool) -> _Block:
        with self._lock:
            if nbytes <= 0:
                raise self._broken(f"allocation of {nbytes} bytes")
            used = sum(block.nbytes for block in self._blocks.values() if block.uuid == uuid)
            if used + nbytes > self._nbytes:
                free = self._nbytes - used
                raise DeviceError("cudaErrorMemoryAllocation", f"allocate {nbytes} bytes on {uuid}, {free} are free")
            # As cudaMalloc does, give the same address again where that is possible.
            again = next((one for one in self._given_back if one[0] == uuid and one[1].nbytes == nbytes), None)
            if again is not None:
                self._given_back.remove(again)
                if again[1].spoilt():
                    self._broken(f"{again[1].address:#x} was written after it was given back")
            pages = Pages.fresh(nbytes, shared=True, at=again[1] if again else None)
            block = _Block(pages, nbytes, uuid, next(self._numbers), exportable=exportable)
            self._blocks[pages.address] = block
            return block

    def _give_back(self, base: int) -> None:
        with self._lock:
            block = self._blocks[base]
        self._idle(block.uuid, f"free {base:#x}")
        with self._lock:
            del self._blocks[base]
            if block.pages.shared():
                self._broken(f"{base:#x} of {block.uuid} is freed while another process has it open")
            block.pages.poison()
            self._given_back.append((block.uuid, block.pages))

    def _idle(self, uuid: str, what: str) -> None:
        """Wait for all work of the device. As on a card, no other thread's call returns meanwhile."""
        with self._freeing:
            self._frees.add(threading.get_ident())
        try:
            for stream in self._all_streams():
                if stream.uuid == uuid and not stream.drain(PATIENCE):
                    end = f"stream {stream.handle:#x} never comes to an end"
                    raise self._broken(f"{what} waits for the device, and {end}")
        finally:
            with self._freeing:
                self._frees.discard(threading.get_ident())
                self._freeing.notify_all()

    def allocate(self, uuid: str, nbytes: int) -> int:
        self._begin("allocate", uuid)
        return self._block(uuid, nbytes, exportable=True).pages.address

    def free(self, address: int) -> None:
        self._begin("free")
        with self._lock:
            block = self._blocks.get(address)
        if block is None or block.holders is not None:
            raise self._broken(f"free {address:#x}: allocate did not give it, or it is freed already")
        self._give_back(address)

    def pin(self, nbytes: int) -> int:
        self._begin("pin")
        if nbytes <= 0:
            raise self._broken(f"pin {nbytes} bytes")
        pages = Pages.fresh(nbytes, shared=False)
        with self._lock:
            self._pinned[pages.address] = pages
        return pages.address

    def unpin(self, address: int) -> None:
        self._begin("unpin")
        for device in self._devices:
            self._idle(device.uuid, f"unpin {address:#x}")
        with self._lock:
            pages = self._pinned.pop(address, None)
            if pages is None:
                raise self._broken(f"unpin {address:#x}: pin did not give it, or it is unpinned already")
            pages.poison()
            self._given_back.append(("pinned", pages))

    def extent(self, address: int) -> Extent:
        self._begin("extent")
        with self._lock:
            block = self._around(address)
        if block is None:
            raise self._broken(f"extent: {address:#x} is no device memory")
        return Extent(block.pages.address, block.nbytes)

    def serial(self, address: int) -> int:
        self._begin("serial")
        with self._lock:
            block = self._around(address)
        if block is None:
            raise self._broken(f"serial: {address:#x} is no device memory")
        return block.serial

    def backed(self, address: int) -> bool:
        self._begin("backed")
        with self._lock:
            block = self._around(address)
        return block is not None and not block.asleep

    def export(self, base: int) -> bytes:
        self._begin("export")
        with self._lock:
            block = self._blocks.get(base)
            if block is None:
                raise self._broken(f"export {base:#x}: no allocation of this process begins there")
            if not block.exportable:
                raise Unexportable("cudaErrorInvalidValue", f"export {base:#x}: expandable segments, says the test")
            if not block.handle:
                pid, device = os.getpid(), uuids.UUID(block.uuid.removeprefix("GPU-")).bytes
                pages = block.pages
                block.handle = _MEMORY.pack(b"MEMO", pid, start_time(pid), pages.fd, pages.inode, block.nbytes, device)
            return block.handle

    def open(self, uuid: str, handle: bytes) -> int:
        self._begin("open", uuid)
        what = f"open memory of another process for {uuid}"
        pid, started, fd, inode, nbytes, device = self._unpack(_MEMORY, b"MEMO", handle, what)
        owner = f"GPU-{uuids.UUID(bytes=device)}"
        if pid == os.getpid():
            raise DeviceError("cudaErrorDeviceUninitialized", f"{what}: it is this process's own")
        if owner not in {d.uuid for d in self._devices} or not self.peers(uuid, owner):
            raise DeviceError("cudaErrorPeerAccessUnsupported", f"{what}: it is on {owner}")
        with self._lock:
            # CUDA counts: the same handle, the same address, and as many closes.
            for address, block in self._mapped.items():
                if block.handle == handle:
                    block.count += 1
                    return address
            try:
                if start_time(pid) != started:
                    raise FileNotFoundError(f"process {pid} is another one")
                pages = Pages.opened(f"/proc/{pid}/fd/{fd}", inode, nbytes)
            except (OSError, WorkerGoneError) as error:
                raise DeviceError("cudaErrorMapBufferObjectFailed", f"{what}: {error}") from None
            block = _Block(pages, nbytes, owner, next(self._numbers), handle=handle, count=1)
            self._mapped[pages.address] = block
            return pages.address

    def close(self, address: int) -> None:
        self._begin("close")
        with self._lock:
            block = self._mapped.get(address)
        if block is None:
            raise self._broken(f"close {address:#x}: open did not give it, or it is closed already")
        if block.count == 1:
            for device in self._devices:
                self._idle(device.uuid, f"close {address:#x}")
        with self._lock:
            block.count -= 1
            if not block.count:
                del self._mapped[address]
                block.pages.poison()
                self._given_back.append(("mapped", block.pages))

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._begin("copy")
        what = f"copy of {nbytes} bytes on stream {stream:#x}"
        if nbytes < 0:
            raise self._broken(what)

        def check() -> None:
            with self._lock:
                self._inside(target, nbytes, f"{what}, target")
                self._inside(source, nbytes, f"{what}, source")

        def work() -> None:
            if self.before_copy is not None:
                self.before_copy(nbytes)
            check()  # again: it must still be there when the copy runs
            ctypes.memmove(target, source, nbytes)

        if nbytes:
            check()
            self._stream(stream).put(work)

    # -- streams and events -------------------------------------------------------------------------------------

    def _new_stream(self, uuid: str) -> int:
        with self._lock:
            handle = next(self._numbers) << 4
            self._streams[handle] = Stream(handle, uuid, self._failed)
            return handle

    def stream(self, uuid: str) -> int:
        self._begin("stream", uuid)
        return self._new_stream(uuid)

    def drop_stream(self, stream: int) -> None:
        self._begin("drop_stream")
        if stream in self._default.values():
            raise self._broken(f"stream {stream:#x} is torch's own")
        dropped = self._stream(stream)
        with self._lock:
            self._streams.pop(stream, None)
            self._dropped.append(dropped)
        dropped.end()

    def event(self, uuid: str, *, interprocess: bool = False) -> int:
        self._begin("event", uuid)
        recordings = Recordings(Pages.fresh(PAGE, shared=interprocess), lambda: not self._closed)
        return self._add(_Event(uuid, recordings, interprocess))

    def _add(self, event: _Event) -> int:
        with self._lock:
            handle = (next(self._numbers) << 4) + 8
            self._events[handle] = event
            return handle

    def drop_event(self, event: int) -> None:
        self._begin("drop_event")
        with self._lock:
            dropped = self._event(event)
            if dropped.waiting:
                raise self._broken(f"event {event:#x} is destroyed while a thread waits for it")
            del self._events[event]
            self._closed_events.append(dropped)  # streams may go on waiting for it

    def record(self, event: int, stream: int) -> None:
        self._begin("record")
        recorded, on = self._event(event), self._stream(stream)
        if recorded.uuid != on.uuid:
            raise self._broken(f"event {event:#x} of {recorded.uuid} is recorded on a stream of {on.uuid}")
        if recorded.process is not None:
            raise self._broken(f"event {event:#x} is another process's: only that one records it here")
        number = recorded.recordings.begin()
        on.put(lambda: None, tell=lambda: recorded.recordings.finish(number))

    def wait(self, stream: int, event: int) -> None:
        self._begin("wait")
        recordings, on = self._event(event).recordings, self._stream(stream)
        number = recordings.newest  # as it is now, whatever is recorded later
        on.put(lambda: (recordings.wait(number, lambda: on.stopping), None)[1])

    def reached(self, event: int) -> bool:
        self._begin("reached")
        recordings = self._event(event).recordings
        return recordings.done(recordings.newest)

    def synchronize(self, event: int) -> None:
        self._begin("synchronize")
        with self._lock:
            one = self._event(event)
            one.waiting += 1
        try:
            recordings = one.recordings
            number = recordings.newest
            if not recordings.wait(number, lambda: self._closed or not recordings.alive()):
                raise self._broken(f"event {event:#x} is waited for for ever: the process that recorded it is dead")
        finally:
            with self._lock:
                one.waiting -= 1
        self._begin("synchronize")  # what went wrong on the device meanwhile is told here

    def settle(self, uuid: str) -> None:
        self._begin("settle", uuid)
        for stream in self._all_streams():
            while stream.uuid == uuid and not stream.drain(0.05):
                if self._closed:
                    raise self._broken(f"settle: the driver was shut while stream {stream.handle:#x} was behind")
        self._begin("settle", uuid)  # what went wrong on the device meanwhile is told here

    def export_event(self, event: int) -> bytes:
        self._begin("export_event")
        one = self._event(event)
        if not one.interprocess or one.process is not None:
            raise self._broken(f"event {event:#x} was not made with interprocess=True by this process")
        pid, pages = os.getpid(), one.recordings.pages
        device = uuids.UUID(one.uuid.removeprefix("GPU-")).bytes
        return _EVENT.pack(b"EVNT", pid, start_time(pid), pages.fd, pages.inode, device)

    def open_event(self, uuid: str, handle: bytes) -> int:
        self._begin("open_event", uuid)
        what = f"open another process's event for {uuid}"
        pid, started, fd, inode, device = self._unpack(_EVENT, b"EVNT", handle, what)
        if pid == os.getpid():
            raise DeviceError("cudaErrorDeviceUninitialized", f"{what}: it is this process's own")
        try:
            process = ProcessMemory(pid, started)
        except WorkerGoneError as error:
            raise DeviceError("cudaErrorMapBufferObjectFailed", f"{what}: {error}") from None
        try:
            pages = Pages.opened(f"/proc/{pid}/fd/{fd}", inode, PAGE)
        except OSError as error:
            process.close()
            raise DeviceError("cudaErrorMapBufferObjectFailed", f"{what}: {error}") from None
        owner = f"GPU-{uuids.UUID(bytes=device)}"
        return self._add(_Event(owner, Recordings(pages, process.alive), True, process))

    def launch(self, uuid: str, stream: int, work: Callable[[], None]) -> None:
        self._begin("launch", uuid)
        on = self._stream(stream)
        if on.uuid != uuid:
            raise self._broken(f"launch on {uuid} with stream {stream:#x} of {on.uuid}")

        def run() -> None:
            with self.using(stream):
                work()

        on.put(run)

    # -- how contracts are kept ---------------------------------------------------------------------------------

    def _begin(self, method: str, *named: str) -> None:
        self.calls[method] += 1
        if self._closed:
            raise self._broken(f"{method} after the driver was shut")
        with self._freeing:
            me = {threading.get_ident()}
            if not on_stream() and not self._freeing.wait_for(lambda: not self._frees - me, PATIENCE):
                raise self._broken(f"{method} waits for memory that is freed, which waits for the device")
        for uuid in named:
            if uuid not in {device.uuid for device in self._devices}:
                raise DeviceError("cudaErrorInvalidDevice", f"{uuid} is not visible to this process")
        if self._spoilt is not None:
            raise self._spoilt
        if errors := self._next_errors.get(method):
            error = errors.pop(0)
            if error.sticky:
                self._spoilt = error
            raise error

    def _broken(self, text: str) -> Broken:
        self.failures.append(text)
        return Broken(text)

    def _failed(self, stream: int, error: BaseException) -> None:
        """Work on a stream raised: the context is spoilt, as by a kernel's illegal address."""
        shown = "".join(traceback.format_exception(error))
        self.failures.append(f"work on stream {stream:#x} failed: {shown}")
        self._spoilt = DeviceError("cudaErrorIllegalAddress", f"stream {stream:#x}: {error}", sticky=True)

    def _around(self, address: int) -> _Block | None:
        for table in (self._blocks, self._mapped):
            for base, block in table.items():
                if base <= address < base + block.nbytes:
                    return block
        return None

    def _inside(self, address: int, nbytes: int, what: str) -> None:
        block = self._around(address)
        if block is not None:
            base, size = block.pages.address, block.nbytes
        else:
            found = [p for a, p in self._pinned.items() if a <= address < a + p.nbytes]
            if not found:
                raise self._broken(f"{what}: {address:#x} is in no living device or pinned memory")
            base, size = found[0].address, found[0].nbytes
        if address + nbytes > base + size:
            raise self._broken(f"{what}: {nbytes} bytes at {address:#x} end behind the {size} bytes at {base:#x}")

    def _stream(self, stream: int) -> Stream:
        with self._lock:
            found = self._streams.get(stream)
        if found is None:
            raise self._broken(f"{stream:#x} is no stream, or dropped already")
        return found

    def _event(self, event: int) -> _Event:
        with self._lock:
            found = self._events.get(event)
        if found is None:
            raise self._broken(f"{event:#x} is no event, or destroyed already")
        return found

    def _unpack(self, form: struct.Struct, magic: bytes, handle: bytes, what: str) -> tuple[Any, ...]:
        if len(handle) != form.size:
            raise self._broken(f"{what}: a handle has {form.size} bytes, not {len(handle)}")
        found, *rest = form.unpack(handle)
        if found != magic:
            raise DeviceError("cudaErrorInvalidValue", f"{what}: that is no handle")
        return tuple(rest)
