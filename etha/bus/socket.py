"""A plain ZeroMQ socket on an asyncio loop: one reader that drains it, and sends that never block.

ZMQ_FD is edge-triggered, and a send can swallow its edge. So the reader reads until EAGAIN, and looks again after each
send. Nothing awaits a read, so no cancellation can lose a message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import zmq

log = logging.getLogger(__name__)

#: Messages read until the loop runs other callbacks.
BURST = 128
# Plain ints: enum arithmetic costs as much as the calls that use it.
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_POLLOUT = int(zmq.POLLOUT)


class LoopSocket:
    """Calls ``on_frames`` with the frames of each message; owns ``socket``. Loop thread only."""

    def __init__(self, socket: zmq.Socket[bytes], on_frames: Callable[[Sequence[zmq.Frame]], None]) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._draining = False
        self._again: asyncio.Handle | None = None
        self._writable: asyncio.Future[None] | None = None
        self._loop.add_reader(self._fd, self._ready)
        self._soon()

    @property
    def closed(self) -> bool:
        return bool(self._socket.closed)

    def send(self, *parts: bytes) -> None:
        """Queue one message. zmq.Again if its pipe is full or gone, EHOSTUNREACH for an unknown peer."""
        try:
            for part in parts[:-1]:
                self._socket.send(part, _MORE)
            self._socket.send(parts[-1], _NOBLOCK)
        finally:
            if not self._draining and self._events() & _POLLIN:
                self._soon()

    async def writable(self) -> None:
        """Return once a message could be sent (with IMMEDIATE set: once connected) or the socket is closed."""
        self._writable = waiter = self._loop.create_future()
        self._look()
        await waiter

    def close(self) -> None:
        """Stop reading and close at once; idempotent."""
        if self._socket.closed:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
            if self._again is not None:
                self._again.cancel()
            if self._writable is not None and not self._writable.done():
                self._writable.set_result(None)
        self._writable = None
        self._socket.close(0)

    def _events(self) -> int:
        return int(self._socket.getsockopt(_EVENTS))

    def _soon(self) -> None:
        if self._again is None:
            self._again = self._loop.call_soon(self._ready)

    def _ready(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None
        self._draining = True
        try:
            for _ in range(BURST):
                if not self._events() & _POLLIN:  # cheaper than an EAGAIN
                    break
                frames = [self._socket.recv(_NOBLOCK, copy=False)]
                while frames[-1].more:
                    frames.append(self._socket.recv(_NOBLOCK, copy=False))
                try:
                    self._on_frames(frames)
                except Exception:
                    log.exception("a message could not be handled")
                if self._socket.closed:
                    return
            else:
                self._soon()
        finally:
            self._draining = False
        if self._writable is not None:
            self._look()

    def _look(self) -> None:
        events = self._events()
        if events & _POLLIN:
            self._soon()
        if events & _POLLOUT and self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
            self._writable = None
