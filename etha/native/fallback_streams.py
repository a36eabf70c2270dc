"""Does what streams.c does in Python: it speaks the same language, and its comments stand there."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from etha.native.structs import CLAIM, GAVE_UP, POSTED, RING_LINES, SLEEPING, GroupMemory, StreamEnd, StreamTable

HEAD = struct.Struct("<IIQ")
_BATCH, _READ = 32, 1 << 18


class FrameKind(enum.IntEnum):
    BYTES = 1
    RING = 2
    TO_POST = 3
    TO_GIVE_UP = 4
    TO_TAIL = 5
    TO_CAUSE = 6
    TO_CLAIM = 7
    BEAT = 8


class StreamLibrary(Protocol):
    """What the streams need of the Python library."""

    def ring(self, page: int) -> None: ...
    def fence(self) -> None: ...
    def claim_cause(self, page0: int, rank: int) -> int | None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Stream:
    """The stream to one member. ``taken``: how many ranges of the queue have become frames."""

    fd: int
    death_fd: int
    ended: StreamEnd = StreamEnd.OPEN
    error: int = 0
    queue: deque[tuple[int, int, int]] = field(default_factory=deque)
    posted: int = 0
    gave_up: int = 0
    head: int = 0
    tail: int = 0
    cause: bool = False
    claim: bool = False
    heard: float = 0.0
    spoke: float = 0.0
    full: bool = False
    finished: bool = False
    outgoing: list[memoryview] = field(default_factory=list)
    #: Copies of what is still to be sent of a call that has failed.
    kept: list[bytes] = field(default_factory=list)
    #: The frame that is being received: kind, bytes, at; where its payload goes (0: nowhere), how much of it has come.
    frame: tuple[int, int, int] | None = None
    target: int = 0
    done: int = 0
    aside: bytes = b""


def _get(address: int) -> int:
    return int(ctypes.c_uint64.from_address(address).value)


def _set(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value


def _address_of(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def _bytes_at(address: int, count: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * count).from_address(address)).cast("B")


class PythonStreams:
    """All streams of one member; one thread calls ``serve``, the one that carries out calls ``push``."""

    def __init__(self, library: StreamLibrary, table: StreamTable) -> None:
        self.library, self.table, self.memory = library, table, table.memory
        self.pages = [int(page) for page in table.memory.pages]
        self.own = self.pages[table.memory.rank]
        self.ring_bytes = int(table.memory.struct.ring_bytes)
        self.streams = {r: _Stream(fd=fd, death_fd=table.deaths[r]) for r, fd in table.sockets.items()}
        #: Held while what is to be sent is read or changed.
        self.lock = threading.Lock()

    def push(self, peer: int, data: int, at: int, nbytes: int) -> None:
        """Have bytes at an address sent as those at an offset of the own memfd."""
        self.streams[peer].queue.append((data, at, nbytes))

    def unsent(self) -> list[int]:
        """The members that have not ended and for which the kernel does not have everything."""
        return [r for r, t in self.streams.items() if t.ended is StreamEnd.OPEN and (t.queue or t.outgoing)]

    def withdraw(self) -> None:
        """Copy what is still to be sent, because after this nothing of a tensor is read any more."""
        with self.lock:
            for t in self.streams.values():
                t.kept = [bytes(_bytes_at(data, nbytes)) for data, _, nbytes in t.queue]
                t.queue = deque(
                    (_address_of(copy), at, nbytes) for copy, (_, at, nbytes) in zip(t.kept, t.queue, strict=True)
                )
                t.outgoing = [memoryview(bytes(part)) for part in t.outgoing]

    def wake(self) -> None:
        """Wake the thread of the streams, if it sleeps. The caller has had a fence since it wrote what to send."""
        if self.table.struct.asleep:
            os.eventfd_write(self.table.wake_fd, 1)

    # -- sending

    def _ring_of(self, owner: int, destination: int) -> int:
        at = int(self.memory.struct.ring_offset) + destination * (RING_LINES + self.ring_bytes)
        return self.pages[owner] + at

    def _cause(self, page: int) -> memoryview:
        at = page + int(self.table.struct.cause_offset)
        length = min(int(ctypes.c_uint32.from_address(at).value), int(self.table.struct.cause_bytes) - 4)
        return _bytes_at(at, 4 + length)

    def _news(self, r: int, t: _Stream) -> Iterator[tuple[FrameKind, int, memoryview | None]]:
        """What the member does not know yet, and now does. Words are read in the opposite order of that of sending."""
        gave_up, posted = _get(self.own + GAVE_UP), _get(self.own + POSTED)
        self.library.fence()
        waiting = len(t.queue)
        for _ in range(min(waiting, _BATCH)):
            data, at, nbytes = t.queue.popleft()
            yield FrameKind.BYTES, at, _bytes_at(data, nbytes)
        if waiting > _BATCH:
            return
        if posted > t.posted:
            t.posted = posted
            yield FrameKind.TO_POST, posted, None
        out = self._ring_of(self.memory.rank, r)
        head = _get(out)
        self.library.fence()
        while head > t.head:
            begin = t.head % self.ring_bytes
            n = min(head - t.head, self.ring_bytes - begin)
            yield FrameKind.RING, t.head, _bytes_at(out + RING_LINES + begin, n)
            t.head += n
        tail = _get(self._ring_of(r, self.memory.rank) + 64)
        if tail != t.tail:
            t.tail = tail
            yield FrameKind.TO_TAIL, tail, None
        if not t.cause and self.table.struct.cause_ready:
            t.cause = True
            yield FrameKind.TO_CAUSE, 0, self._cause(self.own)
        claim = 0 if self.memory.rank else _get(self.own + CLAIM)
        if not t.claim and 0 < claim <= self.memory.size:
            t.claim = True
            yield FrameKind.TO_CLAIM, claim, self._cause(self.pages[claim - 1])
        if gave_up and not t.gave_up:
            t.gave_up = gave_up
            yield FrameKind.TO_GIVE_UP, gave_up, None

    def _compose(self, r: int, t: _Stream, now: float) -> None:
        t.outgoing = []
        for kind, at, payload in self._news(r, t):
            t.outgoing.append(memoryview(HEAD.pack(kind, len(payload or b""), at)))
            if payload:
                t.outgoing.append(payload)
        closing = bool(self.table.struct.closing)
        if not t.outgoing and not closing and now - t.spoke >= self.beat:
            t.outgoing = [memoryview(HEAD.pack(FrameKind.BEAT, 0, 0))]
        if not t.outgoing and closing and not t.finished:
            t.finished = True
            other = socket.socket(fileno=os.dup(t.fd))
            with other, contextlib.suppress(OSError):
                other.shutdown(socket.SHUT_WR)

    def _speak(self, r: int, t: _Stream, now: float) -> bool:
        """Send until there is nothing more or the connection is full; whether something was sent."""
        t.full = spoke = False
        while True:
            if not t.outgoing:
                self._compose(r, t, now)
                if not t.outgoing:
                    return spoke
            try:
                n = os.writev(t.fd, t.outgoing[:64])
            except BlockingIOError:
                t.full = True
                return spoke
            except OSError:
                t.full = t.finished = True  # what the other one has sent before is still read; then the stream ends
                return spoke
            t.spoke, spoke = now, True
            while t.outgoing and n >= len(t.outgoing[0]):
                n -= len(t.outgoing.pop(0))
            if n:
                t.outgoing[0] = t.outgoing[0][n:]

    # -- receiving

    def _target(self, r: int, kind: int, nbytes: int, at: int) -> int | None:
        """Where the payload of a frame goes, 0 for nowhere; None if the member may not send such a frame now."""
        group, table, page = self.memory.struct, self.table.struct, self.pages[r]
        match kind:
            case FrameKind.BYTES:
                return page + at if group.descriptor_offset <= at and at + nbytes <= group.ring_offset else None
            case FrameKind.RING:
                ring, begin = self._ring_of(r, self.memory.rank), at % self.ring_bytes
                room = self.ring_bytes - (_get(ring) - _get(ring + 64))
                fits = at == _get(ring) and nbytes <= min(room, self.ring_bytes - begin)
                return ring + RING_LINES + begin if fits else None
            case FrameKind.TO_CAUSE:
                return page + int(table.cause_offset) if nbytes <= table.cause_bytes else None
            case FrameKind.TO_CLAIM:
                if r or not 0 < at <= self.memory.size or nbytes > table.cause_bytes:
                    return None
                return self.pages[at - 1] + int(table.cause_offset) if self.table.far[at - 1] else 0
            case FrameKind.TO_POST:
                return 0 if not nbytes and at >= _get(page + POSTED) else None
            case FrameKind.TO_GIVE_UP | FrameKind.TO_TAIL | FrameKind.BEAT:
                return None if nbytes else 0
        return None

    def _apply(self, r: int, kind: int, nbytes: int, at: int) -> None:
        self.library.fence()
        match kind:
            case FrameKind.RING:
                _set(self._ring_of(r, self.memory.rank), at + nbytes)
            case FrameKind.TO_POST:
                _set(self.pages[r] + POSTED, at)
            case FrameKind.TO_GIVE_UP:
                _set(self.pages[r] + GAVE_UP, at)
            case FrameKind.TO_TAIL:
                _set(self._ring_of(self.memory.rank, r) + 64, at)
            case FrameKind.TO_CAUSE:
                while not self.memory.rank and self.library.claim_cause(self.own, r) is None:
                    os.sched_yield()
            case FrameKind.TO_CLAIM:
                _set(self.pages[0] + CLAIM, at)
                os.eventfd_write(self.table.claim_fd, 1)

    def _take(self, r: int, t: _Stream, data: bytes) -> bool:
        """Take what has been read. False: it makes no sense."""
        data, used, news = t.aside + data, 0, False
        while True:
            if t.frame is None:
                if len(data) - used < HEAD.size:
                    break
                t.frame, t.done = HEAD.unpack_from(data, used), 0
                used += HEAD.size
                target = self._target(r, *t.frame)
                if target is None:
                    t.error = t.frame[0]
                    return False
                t.target = target
            n = min(t.frame[1] - t.done, len(data) - used)
            if n and t.target:
                ctypes.memmove(t.target + t.done, data[used : used + n], n)
            t.done, used = t.done + n, used + n
            if t.done < t.frame[1]:
                break
            self._apply(r, *t.frame)
            news = news or t.frame[0] not in (FrameKind.BYTES, FrameKind.BEAT)
            t.frame = None
        t.aside = data[used:]
        if news:
            self._ring_if_asleep()
        return True

    def _hear(self, r: int, t: _Stream, now: float) -> None:
        try:
            data = os.read(t.fd, _READ)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(t, StreamEnd.BROKEN, error.errno or 0)
            return
        if not data:
            self._end(t, StreamEnd.END_OF_STREAM)
            return
        t.heard = now
        if not self._take(r, t, data):
            self._end(t, StreamEnd.NONSENSE, t.error)

    def _ring_if_asleep(self) -> None:
        self.library.fence()
        if ctypes.c_uint32.from_address(self.own + SLEEPING).value:
            self.library.ring(self.own)

    def _end(self, t: _Stream, why: StreamEnd, error: int = 0) -> None:
        if t.fd < 0:
            return
        fd, t.fd = t.fd, -1
        os.close(fd)
        t.error, t.ended = error, StreamEnd.LEFT if self.table.struct.closing else why
        os.eventfd_write(t.death_fd, 1)
        self.library.ring(self.own)

    # -- the thread

    @property
    def beat(self) -> float:
        return float(self.table.struct.beat_ms) / 1000

    def _has_news(self) -> bool:
        posted, gave_up, rank = _get(self.own + POSTED), _get(self.own + GAVE_UP), self.memory.rank
        claim = 0 if rank else _get(self.own + CLAIM)
        struct = self.table.struct
        return any(
            t.queue
            or posted > t.posted
            or _get(self._ring_of(rank, r)) != t.head
            or _get(self._ring_of(r, rank) + 64) != t.tail
            or (gave_up and not t.gave_up)
            or (struct.cause_ready and not t.cause)
            or (claim and not t.claim)
            or (struct.closing and not t.finished)
            for r, t in self.streams.items()
            if t.fd >= 0 and not t.full
        )

    def serve(self) -> None:
        """Until the table is closing and all have been told the last words, or a beat has passed."""
        now = time.monotonic()
        closing_since = 0.0
        for t in self.streams.values():
            t.heard = t.spoke = now
        while True:
            now = time.monotonic()
            if self.table.struct.closing and not closing_since:
                closing_since = now
            for r, t in self.streams.items():
                if t.fd >= 0:
                    with self.lock:
                        spoke = self._speak(r, t, now)
                    if spoke:
                        self._ring_if_asleep()  # somebody may wait until everything is sent
            live = {t.fd: (r, t) for r, t in self.streams.items() if t.fd >= 0}
            if closing_since and (not live or now - closing_since >= self.beat):
                break
            self._sleep(live, now, closing_since)
        for t in self.streams.values():
            self._end(t, StreamEnd.LEFT)

    def _sleep(self, live: dict[int, tuple[int, _Stream]], now: float, closing_since: float) -> None:
        """Until there is something to send, something has come, or somebody has been silent for too long."""
        poll = select.poll()
        until = [closing_since + self.beat] if closing_since else []
        for fd, (_, t) in live.items():
            poll.register(fd, select.POLLIN | (select.POLLOUT if t.full and not t.finished else 0))
            until += [t.heard + 3 * self.beat] if t.full else [t.heard + 3 * self.beat, t.spoke + self.beat]
        poll.register(self.table.wake_fd, select.POLLIN)
        self.table.struct.asleep = 1
        self.library.fence()
        news = self._has_news() or (self.table.struct.closing and not closing_since)
        left = 0.0 if news else max(0.0, min(until) - now) if until else None
        ready = poll.poll(None if left is None else left * 1000 + (left > 0))
        self.table.struct.asleep = 0
        now = time.monotonic()
        heard = {fd for fd, events in ready if events & ~select.POLLOUT}
        if self.table.wake_fd in heard:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.table.wake_fd)
        for fd, (r, t) in live.items():
            if fd in heard:
                self._hear(r, t, now)
            elif now - t.heard >= 3 * self.beat:
                self._end(t, StreamEnd.SILENT)


def streams_of(memory: GroupMemory) -> PythonStreams:
    """The streams of a member that has some."""
    assert memory.streams is not None
    found = memory.streams.private
    assert isinstance(found, PythonStreams)
    return found
