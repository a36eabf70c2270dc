"""The worker's sockets to one agent: DEALER and descriptor connection, and the pidfd that watches the agent.

It carries envelopes and reports once that the agent is gone. ``link`` handles requests and their futures.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from etha.bus.codec import MAX_MESSAGE, Envelope, Malformed, Push, decode, encode
from etha.bus.context import process_context
from etha.bus.packets import PacketConnection, close_all
from etha.bus.process import Credentials, is_exiting, open_pidfd
from etha.bus.socket import LoopSocket
from etha.config import check_socket_path
from etha.errors import AgentLostError, AgentUnavailableError, ConfigError

#: Messages that may wait on either side if the agent or the worker does not read.
HIGH_WATER = 10_000


def dial(path: Path) -> socket.socket:
    """Connect to the descriptor socket of the agent at ``path`` (``.../cpu.sock``), non-blocking.

    Raises AgentUnavailableError at once if nobody listens.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        connection.connect(os.fspath(check_socket_path(path.with_suffix(".fds"))))
    except OSError as error:
        connection.close()
        why = {
            errno.ENOENT: "nothing is there",
            errno.ECONNREFUSED: "the agent that was there is gone",
            errno.EACCES: "it belongs to another user",
            errno.EAGAIN: "it takes no connections, is it stopped?",
        }.get(error.errno or 0, str(error.strerror))
        raise AgentUnavailableError(f"no agent answers at {path}: {why}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def listens(path: Path) -> bool:
    """Whether an agent listens at ``path`` (``.../cpu.sock``) and is not exiting."""
    try:
        with dial(path) as connection:
            pid = Credentials.of_socket(connection).pid
    except AgentUnavailableError:
        return False
    return not (pid and is_exiting(pid))  # a killed process accepts connections until its descriptors close


def another_user(path: Path, uid: int) -> ConfigError:
    """That the agent at ``path`` is another user's."""
    return ConfigError(
        f"the agent at {path} runs as uid {uid}, this process as uid {os.geteuid()}: "
        f"set ETHA_RUNTIME_DIR to a directory of your own"
    )


class Channel:
    """Connects in its constructor. Calls ``on_envelope``, and ``on_end(text)`` once when the agent is gone or broke the
    protocol.

    ``pid`` is the agent's pid as the kernel reports it, 0 if it is not visible in this pid namespace.
    """

    def __init__(
        self, path: Path, on_envelope: Callable[[Envelope | Malformed], None], on_end: Callable[[str], None]
    ) -> None:
        """Connect both sockets. AgentUnavailableError if nobody listens, ConfigError for another user's agent."""
        self._on_envelope = on_envelope
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._address: str | None = None
        self._pidfd: int | None = None
        self._dead = False
        self._dying: weakref.finalize[Any, Any] | None = None
        self._dying_pidfd = -1
        connection = dial(path)
        credentials = Credentials.of_socket(connection)
        if credentials.uid != os.geteuid():
            connection.close()
            raise another_user(path, credentials.uid)
        self.pid = credentials.pid
        self._packets = PacketConnection(connection, self._packet, self._disconnected, without=True)
        dealer = process_context().socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IMMEDIATE, 1),
            (zmq.RECONNECT_IVL, -1),  # another agent on the same path does not know us
            (zmq.SNDHWM, HIGH_WATER),
            (zmq.RCVHWM, HIGH_WATER),
            (zmq.MAXMSGSIZE, MAX_MESSAGE),
        ):
            dealer.setsockopt(option, value)
        dealer.connect(f"ipc://{path}")
        self._socket = LoopSocket(dealer, self._frames)
        self._pidfd = open_pidfd(self.pid)
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._died)
            # Closes the descriptor if the channel is collected unclosed, together with its loop.
            self._unclosed = weakref.finalize(self, os.close, self._pidfd)

    @property
    def agent(self) -> str:
        """The agent, as messages name it."""
        return f"the agent (process {self.pid})" if self.pid else "the agent"

    @property
    def agent_died(self) -> bool:
        """Whether the agent's process has ended or is exiting, which the event loop may not have heard yet."""
        return self.pid != 0 and is_exiting(self.pid)

    async def ready(self) -> None:
        """Return once messages can be sent, or the channel is closed."""
        await self._socket.writable()

    def post(self, envelope: Envelope) -> None:
        """Send on the bus. AgentLostError if the agent takes no more messages: it has not got this one."""
        try:
            self._socket.send(encode(envelope))
        except zmq.Again:
            stopped = f"{self.agent} takes no messages, {HIGH_WATER} wait: is it stopped?"
            text = f"{self.agent} died" if self.agent_died else stopped
            raise AgentLostError(text, outcome="withdrawn") from None

    async def pack(self, envelope: Envelope, fds: Sequence[int] = ()) -> None:
        """Send on the descriptor connection, and wait for room without a limit."""
        try:
            await self._packets.send_when_room(encode(envelope), fds)
        except OSError as error:
            raise AgentLostError(f"{self.agent} cannot be given descriptors: {error.strerror}") from error

    def close(self) -> None:
        """Close everything at once, even if the loop is closed. Idempotent; ``on_end`` is not called."""
        if self._socket.closed:
            return
        if self._pidfd is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._pidfd)
            self._unclosed.detach()
            self._bury(self._pidfd)
        self._packets.close()
        self._socket.close()

    def _bury(self, pidfd: int) -> None:
        """Record whether the agent's process has ended. Keep the pidfd of one that is exiting, so that ``ended`` can
        wait."""
        if not _readable(pidfd) and is_exiting(self.pid):
            self._dying = weakref.finalize(self, os.close, pidfd)
            self._dying_pidfd = pidfd
            return
        self._dead = _readable(pidfd)
        os.close(pidfd)

    async def ended(self, within: float) -> bool:
        """Whether the agent's process has ended, all its threads: it writes nowhere any more. Once closed."""
        if self._dying is None or not self._dying.alive:
            return self._dead
        pidfd, agent_died = self._dying_pidfd, asyncio.Event()
        self._loop.add_reader(pidfd, agent_died.set)
        try:
            async with asyncio.timeout(within):
                await agent_died.wait()
        except TimeoutError:
            return False
        finally:
            self._loop.remove_reader(pidfd)
        self._dead = True
        self._dying()
        return True

    def _died(self) -> None:
        self._on_end(f"{self.agent} died")

    def _disconnected(self, text: str) -> None:
        if self.pid and is_exiting(self.pid):  # descriptors close before the pidfd becomes readable
            return self._died()
        self._on_end(f"{self.agent} ended the session" + (f": {text}" if text else ""))

    def _frames(self, frames: Sequence[zmq.Frame]) -> None:
        address = str(frames[0].get("Peer-Address"))
        if address != self._address:
            if Credentials.of_address(address).pid != self.pid:
                return self._on_end(f"another process than {self.agent} answers on its bus")
            self._address = address
        self._on_envelope(_decoded(frames[0].buffer))

    def _packet(self, data: bytes, fds: list[int]) -> None:
        envelope = _decoded(data)
        if isinstance(envelope, Push):
            envelope = replace(envelope, fds=tuple(fds))
        else:
            close_all(fds)
        self._on_envelope(envelope)


def _decoded(data: bytes | memoryview) -> Envelope | Malformed:
    try:
        return decode(data)
    except Malformed as error:
        return error
