"""What a member sends to another host straight from a tensor, and what wakes a member that waits."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from etha.native import ALL, NativeLibrary, RunArguments, RunResult, StepKind, StreamEnd, StreamTable, run_arguments
from etha.native.fallback_streams import HEAD, FrameKind
from etha.native.structs import BELL, SLEEPING
from tests.unit.native.pages import Pages, post, sources, spaces, steps, wait

WINDOW, ROOM = 8192, 4 << 20
FLUSH = (StepKind.FLUSH, 0, 0, 0, 0, 0, 0)
SEND = (StepKind.SEND, 1, 1, 0, 0, 0, ROOM)


class Side:
    """Rank 0, and the socket of a rank 1 that the test plays."""

    def __init__(self, library: NativeLibrary) -> None:
        self.library, self.pages = library, Pages(2, WINDOW + ROOM + (1 << 16))
        self.memory = self.pages.member(0, ring_offset=WINDOW + ROOM, ring_bytes=4096)
        ours, self.peer = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)
        ours.setblocking(False)
        self.death = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.table = StreamTable(self.memory, {1: ours.detach()}, {1: self.death}, cause_offset=256, cause_bytes=1024)
        library.open_streams(self.table)
        self.thread = threading.Thread(target=library.serve_streams, args=(self.table,), daemon=True)
        self.thread.start()
        self.tensor = np.full(ROOM, 7, np.uint8)

    def arguments(self, *rows: tuple[int, ...], seconds: float) -> RunArguments:
        window = self.pages.at[0] + WINDOW
        deadline = time.monotonic_ns() + int(seconds * 1e9)
        table = spaces(self.tensor, window)
        return run_arguments(
            self.memory, steps(*rows), sources(), table, phase_base=0, call_number=1, deadline_ns=deadline
        )

    def half(self, rank: int, at: int) -> int:
        return int(ctypes.c_uint32.from_address(self.pages.at[rank] + at).value)

    def received(self) -> bytes:
        """The payload of what rank 0 has sent of its tensor; its post must follow."""
        kind, nbytes, at = HEAD.unpack(self._read(HEAD.size))
        assert (kind, nbytes, at) == (FrameKind.BYTES, ROOM, WINDOW)
        data = self._read(nbytes)
        assert HEAD.unpack(self._read(HEAD.size)) == (FrameKind.TO_POST, 0, 1)
        return data

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self.peer.recv(min(1 << 16, count - len(data)))
            assert part
            data += part
        return bytes(data)

    def close(self) -> None:
        self.library.close_streams(self.table)
        self.peer.close()
        self.thread.join()
        self.table.close()
        os.close(self.death)


@pytest.fixture
def side(library: NativeLibrary) -> Iterator[Side]:
    made = Side(library)
    with contextlib.closing(made):
        yield made


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_flush_ends_when_the_tensor_may_change(side: Side) -> None:
    args = side.arguments(SEND, post(1), FLUSH, seconds=0.05)
    assert side.library.run(args) is RunResult.TIMEOUT
    assert (args.failed_rank, args.failed_ranks.tolist()) == (1, [0, 1])
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(side.received()))
    reader.start()
    assert side.library.run(side.arguments(FLUSH, seconds=10)) is RunResult.DONE
    side.tensor[:] = 9
    reader.join()
    assert got == [bytes([7]) * ROOM]


def test_closing_is_heard_while_the_last_stream_ends(library: NativeLibrary) -> None:
    """The thread that serves the streams has just looked whether it closes, and has nobody left to wait for."""
    for turn in range(300):
        side = Side(library)
        side.peer.close()
        until(lambda side=side: library.stream_end(side.table, 1)[0] is not StreamEnd.OPEN)
        library.withdraw(side.table)  # returns when the thread is about to sleep
        library.close_streams(side.table)
        side.thread.join(20)
        assert not side.thread.is_alive(), turn
        side.close()


def test_a_flush_waits_for_nobody_who_has_ended(side: Side) -> None:
    args = side.arguments(SEND, post(1), FLUSH, seconds=10)

    def end() -> None:
        side.peer.recv(1)
        side.peer.close()

    ending = threading.Thread(target=end)
    ending.start()
    assert side.library.run(args) is RunResult.DONE
    ending.join()


def test_after_a_withdraw_the_tensor_is_not_read_and_the_frame_is_whole(side: Side) -> None:
    args = side.arguments(SEND, post(1), wait(1), seconds=0.05)
    assert side.library.run(args) is RunResult.TIMEOUT and args.failed_rank == 1
    side.library.withdraw(side.table)
    side.tensor[:] = 9
    assert side.received() == bytes([7]) * ROOM
    side.library.withdraw(side.table)


def test_a_withdraw_ends_where_the_streams_have_ended(library: NativeLibrary) -> None:
    side = Side(library)
    side.close()
    side.library.withdraw(side.table)


def test_bytes_alone_wake_nobody(side: Side) -> None:
    """Their post does. A large call was woken for every piece of it that a system call read."""
    result: list[RunResult] = []
    args = side.arguments(wait(1, ALL), seconds=10)
    waiting = threading.Thread(target=lambda: result.append(side.library.run(args)))
    waiting.start()
    until(lambda: side.half(0, SLEEPING) == 1)
    side.peer.sendall(HEAD.pack(FrameKind.BYTES, ROOM, WINDOW) + bytes([5]) * ROOM)
    until(lambda: side.pages.maps[1][WINDOW + ROOM - 1] == 5)
    side.peer.sendall(HEAD.pack(FrameKind.BEAT, 0, 0))
    assert side.half(0, BELL) == 0 and side.half(0, SLEEPING) == 1
    side.peer.sendall(HEAD.pack(FrameKind.TO_POST, 0, 1))
    waiting.join(10)
    assert result == [RunResult.DONE] and side.half(0, BELL) == 1
