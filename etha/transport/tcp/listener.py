"""The data port: connections show a token first, and nothing else is read until it is accepted.

    opener    token (fixed size), opening (8 bytes), purpose ...        <- one byte: welcome
    here      admit(token) -> the agent that it was given to, or None: closed, one log line

Tokens are given over the authenticated link. Whoever gave a token judges it, in constant time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from etha import limits
from etha.errors import EthaError, ProtocolError, TransferError
from etha.transport.base import StreamLost
from etha.transport.tcp.tls import DESCRIPTORS, Identity, Secured

log = logging.getLogger(__name__)

#: Seconds that a connection has to show its token, and that an opener waits to be let in.
PATIENCE = 3.0
OPENING_BYTES = 8
_WELCOME = b"\x01"

_WRONG_TOKEN = (
    "closed a data connection from %s: this agent gave nobody the token that it showed, or it was used or is too old"
)
#: Which agent a token was given to; None if it is wrong, used or too old.
Admit = Callable[[bytes], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAddress:
    """How to reach the data port of a peer. ``tokens(n)`` asks it, over the link, for n fresh tokens.

    ``fingerprint`` is that of its certificate, as the link told it: connections are encrypted. None: they are not.
    """

    host: str
    port: int
    tokens: Callable[[int], Awaitable[Sequence[bytes]]]
    fingerprint: bytes | None = None


class _Newcomer:
    """A connection that has shown no token yet."""

    def __init__(self, conn: socket.socket, address: str) -> None:
        conn.setblocking(False)
        self.conn, self.address = conn, address
        self.spoke = self.let_in = False

    def speak(self) -> None:
        self.spoke = True


class DataListener:
    """Accepts connections at a listening, non-blocking socket, and closes that socket at the end."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        token_bytes: int,
        admit: Admit,
        entered: Callable[[socket.socket, str, bytes], None],
        patience: float = PATIENCE,
        identity: Identity | None = None,
    ) -> None:
        self._identity = identity
        self._listener, self._token_bytes, self._admit, self._entered = listener, token_bytes, admit, entered
        self._patience = patience
        #: Connections that have shown no token yet, in the order of their arrival.
        self._waiting: dict[asyncio.Task[None], _Newcomer] = {}
        self._strangers = limits.WarningLimit(log)

    async def run(self) -> None:
        """Accept until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as admissions:
                while True:
                    try:
                        conn, address = await loop.sock_accept(self._listener)
                    except OSError as error:
                        log.error("the data port cannot accept: %s", error)
                        await asyncio.sleep(0.1)  # out of descriptors: new connections stay in the backlog
                        continue
                    if limits.in_reserve(conn.fileno()):
                        self._strangers.warn("closed a data connection: no file descriptors are left")
                        conn.close()
                        self._evict()
                        continue
                    if len(self._waiting) >= limits.max_unproven():
                        self._strangers.warn("closed a data connection: too many show no token")
                        self._evict()
                    newcomer = _Newcomer(conn, f"{address[0]}:{address[1]}")
                    task = admissions.create_task(self._let_in(newcomer))
                    self._waiting[task] = newcomer
                    task.add_done_callback(self._over)
        finally:
            self._listener.close()
            self._strangers.close()

    def _evict(self) -> None:
        """Make room: close the oldest connection, preferring those that have sent nothing."""
        oldest = next((task for task, newcomer in self._waiting.items() if not newcomer.spoke), None)
        oldest = oldest or next(iter(self._waiting), None)
        if oldest is not None:
            self._waiting.pop(oldest).conn.close()
            oldest.cancel()

    def _over(self, task: asyncio.Task[None]) -> None:
        newcomer = self._waiting.pop(task, None)
        if newcomer is not None and not newcomer.let_in:
            newcomer.conn.close()

    async def _let_in(self, newcomer: _Newcomer) -> None:
        conn, address = newcomer.conn, newcomer.address
        try:
            async with asyncio.timeout(self._patience):
                if self._identity is not None:
                    return await self._secured(newcomer, self._identity)
                token = await read_exactly(conn, self._token_bytes, newcomer.speak)
                agent = self._admit(token)
                if agent is None:
                    self._strangers.warn(_WRONG_TOKEN, address)
                    return
                opening = await read_exactly(conn, OPENING_BYTES)
                await asyncio.get_running_loop().sock_sendall(conn, _WELCOME)
            self._entered(conn, agent, opening)
            newcomer.let_in = True
        except TimeoutError:
            self._strangers.warn("closed a data connection from %s: no token in %.1f s", address, self._patience)
        except (OSError, EOFError, EthaError) as error:
            why = str(error) or "it ended before its token"
            if not newcomer.spoke and not isinstance(error, EthaError):
                log.debug("a data connection from %s was closed before it said a word, as by `etha doctor`", address)
                return
            self._strangers.warn("closed a data connection from %s: %s", address, why)

    async def _secured(self, newcomer: _Newcomer, identity: Identity) -> None:
        """The rest of ``_let_in``, inside TLS."""
        secured = await Secured.accepted(newcomer.conn, identity)
        try:
            newcomer.speak()
            token = await secured.read_exactly(self._token_bytes)
            agent = self._admit(token)
            if agent is None:
                self._strangers.warn(_WRONG_TOKEN, newcomer.address)
                return secured.close()
            opening = await secured.read_exactly(OPENING_BYTES)
            await secured.send_all(_WELCOME)
        except BaseException:
            secured.close()
            raise
        self._entered(secured.inward(), agent, opening)
        newcomer.let_in = True


async def read_exactly(conn: socket.socket, nbytes: int, spoke: Callable[[], None] = lambda: None) -> bytes:
    """Read ``nbytes`` from a non-blocking socket; EOFError if it ends before. Calls ``spoke()`` after each read."""
    data = b""
    while len(data) < nbytes:
        more = await asyncio.get_running_loop().sock_recv(conn, nbytes - len(data))
        if not more:
            raise EOFError
        spoke()
        data += more
    return data


async def connect(agent: str, address: DataAddress, opening: bytes, count: int) -> list[socket.socket]:
    """Open ``count`` connections to an agent's data port. StreamLost if it does not let us in."""
    if (short := limits.shortage(count * (1 if address.fingerprint is None else DESCRIPTORS))) is not None:
        raise TransferError(f"no data streams to agent {agent}: this agent is full: {short}")
    tokens = await address.tokens(count)
    if len(tokens) != count:
        raise ProtocolError(f"agent {agent} gave {len(tokens)} tokens, {count} were asked for")
    opened: list[socket.socket] = []

    async def enter(token: bytes) -> None:
        opened.append(await _enter(address, token + opening))

    try:
        async with asyncio.TaskGroup() as group:  # concurrently, because each takes two round trips
            for token in tokens:
                group.create_task(enter(token))
    except BaseException as raised:
        for conn in opened:
            conn.close()
        error = raised.exceptions[0] if isinstance(raised, BaseExceptionGroup) else raised
        if not isinstance(error, OSError | EOFError | TimeoutError):
            raise
        where = f"{address.host}:{address.port}"
        why = str(error)
        if isinstance(error, EOFError | ConnectionResetError):
            why = "it closed the connection instead of letting it in; its log says why"
        elif isinstance(error, TimeoutError):
            why = "it does not answer"
        raise StreamLost(f"the data port of agent {agent} at {where}: {why}", reason="died") from None
    return opened


async def _enter(address: DataAddress, words: bytes) -> socket.socket:
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    conn = socket.socket(family, socket.SOCK_STREAM)
    conn.setblocking(False)
    try:
        async with asyncio.timeout(PATIENCE):
            await loop.sock_connect(conn, (address.host, address.port))
            if address.fingerprint is not None:
                return await _enter_secured(conn, address.fingerprint, words)
            await loop.sock_sendall(conn, words)
            await read_exactly(conn, len(_WELCOME))
    except BaseException:
        conn.close()
        raise
    return conn


async def _enter_secured(conn: socket.socket, fingerprint: bytes, words: bytes) -> socket.socket:
    secured = await Secured.opened(conn, fingerprint)
    try:
        await secured.send_all(words)
        await secured.read_exactly(len(_WELCOME))
    except BaseException:
        secured.close()
        raise
    return secured.outward()
