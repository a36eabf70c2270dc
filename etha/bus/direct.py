"""A worker's second connection to its agent, for one blocked thread: a request and its answer without an event loop.

    thread   begin(request) -> next() ... the answer -> finish()
             anything else (a signal, a deadline, the end of the connection): the thread hands the request over
    loop     follow(on_envelope): from now on the loop hears what comes, until ``close``

A request of a blocking client passes three threads on its way, and three back: the caller's, the loop's and libzmq's.
Here it passes one. What has come is kept until it is handled, so that it can be handed over at any moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from etha.bus.codec import Envelope, Failure, Malformed, Push, Request, decode, encode
from etha.bus.handshake import HandshakeDone, JoinSession
from etha.bus.process import Credentials
from etha.bus.zmtp import NotZmtp, Parser, frame, frame_at, opening
from etha.config import check_socket_path
from etha.errors import AgentLostError
from etha.native.direct import DirectLibrary, DirectStruct, Exchanged, load_direct

#: Bytes that can come before the buffer grows. An answer to a transfer has some hundred.
_ROOM = 1 << 14
_READ = 1 << 16


class DirectConnection:
    """Made by ``connect``. ``lock`` is held by the thread that uses it; ``busy`` while a request is under way.

    It is an RLock, because only that knows itself whose it is after an interrupt, and a handler of a signal may come
    here, too.
    """

    def __init__(self, connection: socket.socket, library: DirectLibrary) -> None:
        self.lock = threading.RLock()
        self.busy = self.closed = self.retired = False
        self._connection, self._library = connection, library
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._struct = DirectStruct(fd=connection.fileno(), wake=self._wake, also=-1)
        self._out, self._said = b"", False
        self._read = self._next = 0
        self._resize(_ROOM)
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    async def connect(cls, path: Path, session: str, agent: int) -> DirectConnection | None:
        """Join ``session`` of the agent at ``path``, process ``agent``. None if this process has no compiled library.

        OSError or AgentLostError if the agent takes no further connection.
        """
        library = load_direct()
        if library is None:
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, os.fspath(check_socket_path(path)))
            if Credentials.of_socket(connection).pid != agent:
                raise AgentLostError(f"another process than {agent} answers at {path}")
            join = encode(Request(1, None, JoinSession(session=session)))
            await loop.sock_sendall(connection, opening(b"DEALER") + frame(join))
            parser, answers = Parser(_READ), list[list[bytes]]()
            while not answers:
                data = await loop.sock_recv(connection, _READ)
                if not data:
                    raise AgentLostError("the agent has closed the connection")
                try:
                    answers = list(parser.feed(data))
                except NotZmtp as error:
                    raise AgentLostError(str(error)) from None
            answer = decode(answers[0][0])
            if isinstance(answer, Failure):
                raise AgentLostError(answer.error.message)
            if not isinstance(getattr(answer, "message", None), HandshakeDone):
                raise AgentLostError(f"the agent answered JoinSession with {answer}")
            return cls(connection, library)
        except BaseException:
            connection.close()
            raise

    # ---- the blocked thread -------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """Set the request that the next ``exchange`` sends. Nothing of an earlier one may be under way."""
        self._read, self._struct.got, self._said = 0, 0, False
        self._send(frame(encode(request)))

    def say(self, message: Any) -> None:
        """Have the next ``exchange`` send what needs no answer, too."""
        self._said = self.begun
        self._send(self._out[self._struct.sent :] + frame(encode(Push(0, message))))

    def _send(self, data: bytes) -> None:
        self._out, self._struct.sent = data, 0
        self._struct.out = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p)
        self._struct.out_bytes = len(data)

    @property
    def begun(self) -> bool:
        """Whether anything of the request was sent."""
        return self._said or bool(self._struct.sent)

    def exchange(self, seconds: float, also: int = -1) -> Exchanged:
        """Send what is left to send, then wait for bytes, at most ``seconds`` and, at a signal, less. WOKEN: also when
        the descriptor ``also`` is readable."""
        self._struct.slice_ms, self._struct.also = max(0, min(1 << 30, int(seconds * 1000 + 0.999))), also
        result = self._library.exchange(self._struct)
        if result is Exchanged.WOKEN:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        return result

    def peek(self) -> Envelope | Malformed | None:
        """The next message that has come; None if there is none. It stays the next one until ``take``."""
        try:
            found = frame_at(memoryview(self._in)[: self._struct.got], self._read)
            if found is not None:
                self._next = found[1]
                return decode(found[0])
        except NotZmtp as error:
            self._next = self._struct.got
            return Malformed(str(error))
        except Malformed as error:
            return error
        if self._struct.got == len(self._in):
            self._resize(2 * len(self._in))
        return None

    def take(self) -> None:
        """Go on to the message after the one that ``peek`` gave last."""
        self._read = self._next

    def wake(self) -> None:
        """Make ``exchange`` return. From any thread."""
        if not self.closed:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._wake, 1)

    # ---- the event loop -----------------------------------------------------------------------

    def follow(self, on_envelope: Callable[[Envelope | Malformed], None]) -> None:
        """Give what has come, and what comes, to ``on_envelope``, on the running loop. The thread is done with it."""
        self._loop = asyncio.get_running_loop()

        def give() -> None:
            while not self.closed and (envelope := self.peek()) is not None:
                self.take()
                on_envelope(envelope)

        def readable() -> None:
            if self.exchange(0) is Exchanged.ENDED and self._loop is not None:
                self._loop.remove_reader(self._connection.fileno())  # the session's own connection tells the rest
                self._loop = None
            give()

        if not self.closed:
            self._loop.add_reader(self._connection.fileno(), readable)
        give()

    def retire(self) -> None:
        """Use it for no further request: a thread that waits hears of its end. Closed at once unless a thread uses it,
        which calls this again when it does not any more. Idempotent."""
        self.retired = True
        if not self.closed:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        if self.lock.acquire(blocking=False):
            try:
                if not self.busy:
                    self.close()
            finally:
                self.lock.release()

    def close(self) -> None:
        """Close at once, also for forked children, which hold it, too. Idempotent. Not while a thread uses it."""
        if self.closed:
            return
        self.closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._connection.fileno())
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        os.close(self._wake)

    def _resize(self, nbytes: int) -> None:
        self._in, before = bytearray(nbytes), getattr(self, "_in", b"")
        self._in[: len(before)] = before
        self._keep = (ctypes.c_char * nbytes).from_buffer(self._in)
        self._struct.into, self._struct.in_bytes = ctypes.addressof(self._keep), nbytes
