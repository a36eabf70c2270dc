"""Packets with file descriptors on a plain AF_UNIX SOCK_SEQPACKET connection.

Descriptors arrive close-on-exec and limited in number. A packet that is too large, carries too many descriptors or
cannot be read ends the connection. ``server`` and ``link`` interpret the packets.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

#: Bytes and descriptors of one packet.
MAX_PACKET = 1 << 16
MAX_DESCRIPTORS = 64
_ROOM = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
# Not socket.recv_fds, because Python 3.11 ignores its flags.
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors that are not needed."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _descriptors(rights: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


class PacketConnection:
    """Calls ``on_packet(data, fds)``, which owns the fds, and ``on_end(text)`` once when the other end is gone.

    ``without``: a packet whose descriptors this process has no room for comes without any, and does not end the
    connection.
    """

    def __init__(
        self,
        connection: socket.socket,
        on_packet: Callable[[bytes, list[int]], None],
        on_end: Callable[[str], None],
        *,
        without: bool = False,
    ) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._on_packet = on_packet
        self._on_end = on_end
        self._without = without
        self._loop = asyncio.get_running_loop()
        self._room: asyncio.Future[None] | None = None
        self._loop.add_reader(connection.fileno(), self._ready)

    @property
    def closed(self) -> bool:
        return self._connection.fileno() < 0

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send one packet. BlockingIOError if the other end does not read, OSError if it is gone."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._connection.sendmsg([data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    async def send_when_room(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send one packet, and wait for room without a limit. OSError if the other end is gone."""
        while True:
            while self._room is not None:  # another task waits already, and a descriptor has one writer callback
                await asyncio.shield(self._room)
            try:
                return self.send(data, fds)
            except BlockingIOError:
                self._room = self._loop.create_future()
                self._loop.add_writer(self._connection.fileno(), self._has_room)

    def close(self) -> None:
        """End the connection for every process that holds it, including forked children. Idempotent."""
        if self.closed:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._connection.fileno())
            if self._room is not None:
                self._has_room()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _has_room(self) -> None:
        self._loop.remove_writer(self._connection.fileno())
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def _ready(self) -> None:
        while not self.closed:
            try:
                data, rights, flags, _ = self._connection.recvmsg(MAX_PACKET, _ROOM, _FLAGS)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                return self._end(str(error.strerror))
            fds = _descriptors(rights)
            if self._without and flags & socket.MSG_CTRUNC:
                close_all(fds)
                fds, flags = [], flags & ~socket.MSG_CTRUNC
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(fds) > MAX_DESCRIPTORS:
                close_all(fds)
                return self._end(f"a packet above {MAX_PACKET} bytes or {MAX_DESCRIPTORS} descriptors")
            if not data:
                close_all(fds)
                return self._end("")
            try:
                self._on_packet(data, fds)
            except Exception:
                log.exception("a packet could not be handled")

    def _end(self, text: str) -> None:
        self.close()
        self._on_end(text)
