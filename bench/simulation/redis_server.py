"""One real Redis behind simulated connections: what agents write arrives later, and so does what it answers.

    agent --write--> latency --> the server's turn --> executed on the real server --> its network --> latency --> agent

The server runs one thing at a time. How long is measured: the processor time of its process. All simulated connections
share one real one, which is possible because nothing that Etha says depends on a connection, except subscriptions.
Those are kept here. A second real connection listens to everything, and a PING over it after each command that may
publish gives exactly the messages that were published until then.

Not real: the server's network stack (the real connection is a local socket), its cost of many sockets, and its clock.
Leases last longer than the benchmark, because they would end by real time.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import redis

from etha.store import connect
from simulation.virtual_time import Actor, VirtualLoop

#: Seconds of the server's processor for each message that it writes to a subscriber (measured on an EPYC: PUBLISH to 64
#: subscribers of a local socket, less PUBLISH to one, divided by 63), and for a change of subscriptions (assumed).
DELIVERY = 1.1e-6
SUBSCRIPTION = 2e-6
#: Round trips until a connection stands.
_TRIPS = 1
_MARK = b"simulation-mark"
_MARK_COMMAND = b"*2\r\n$4\r\nECHO\r\n$%d\r\n%s\r\n" % (len(_MARK), _MARK)
_MARK_ANSWER = b"$%d\r\n%s\r\n" % (len(_MARK), _MARK)
_PING = b"*1\r\n$4\r\nPING\r\n"
_PONG = b"*2\r\n$4\r\npong\r\n$0\r\n\r\n"
#: Commands after which messages may have been published.
_PUBLISHING = frozenset((b"PUBLISH", b"EVAL", b"EVALSHA", b"EXEC"))


class SimulatedRedis:
    """The server at ``url``. ``latency`` in seconds, one way; ``bandwidth`` of its network in bytes per second."""

    def __init__(self, loop: VirtualLoop, url: str, *, latency: float, bandwidth: float) -> None:
        self._loop, self._latency, self._bandwidth = loop, latency, bandwidth
        self.actor = Actor("redis", measured=False)
        self._socket = _connected(url)
        self._sniffer = _connected(url)
        self._sniffer.sendall(b"*2\r\n$10\r\nPSUBSCRIBE\r\n$1\r\n*\r\n")
        _read_until(self._sniffer, b":1\r\n")
        with redis.Redis.from_url(url) as client:
            pid = int(client.info("server")["process_id"])
        #: Linux's clock of the processor time of a process.
        self._clock = (~pid << 3) | 2
        self._subscribers: dict[bytes, dict[SimulatedConnection, None]] = defaultdict(dict)
        self._sending_until = 0.0
        #: For each kind of request, since the counters were cleared: how many there were, seconds of the server's
        #: processor, and bytes of answers.
        self.requests: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.answered: Counter[str] = Counter()
        loop.connector = self.connect

    async def connect(
        self, factory: Callable[[], asyncio.BaseProtocol], actor: Actor
    ) -> tuple[SimulatedConnection, asyncio.BaseProtocol]:
        """A connection of ``actor``, after the round trips that it takes."""
        await asyncio.sleep(2 * _TRIPS * self._latency)
        protocol = factory()
        connection = SimulatedConnection(self, actor, protocol)
        protocol.connection_made(connection)
        return connection, protocol

    def clear_counters(self) -> None:
        """Count anew."""
        for counter in (self.requests, self.seconds, self.answered):
            counter.clear()

    def close(self) -> None:
        """Close the real connections."""
        self._socket.close()
        self._sniffer.close()

    def send(self, connection: SimulatedConnection, data: bytes) -> None:
        """An agent writes."""
        connection.actor.account.asked += len(data)
        at = self._loop.time() + self._latency
        self._loop.call_at(at, self._arrived, connection, data, context=self.actor.context)

    # ---- the server's own turns ---------------------------------------------------------------

    def _arrived(self, connection: SimulatedConnection, data: bytes) -> None:
        connection.unread += data
        commands, rest = _commands(connection.unread)
        if connection.closed or not commands or _open_transaction(commands):
            return
        connection.unread = rest
        connection.actor.account.commands += len(commands)
        plain: list[tuple[list[bytes], bytes]] = []
        for command in commands:
            name = command[0][0].upper()
            if name in (b"SUBSCRIBE", b"UNSUBSCRIBE") or (name == b"PING" and connection.channels):
                self._execute(connection, plain)
                plain = []
                self._subscription(connection, name, command[0][1:])
            else:
                plain.append(command)
        self._execute(connection, plain)

    def _execute(self, connection: SimulatedConnection, commands: list[tuple[list[bytes], bytes]]) -> None:
        if not commands:
            return
        before = time.clock_gettime(self._clock)
        self._socket.sendall(b"".join(raw for _, raw in commands) + _MARK_COMMAND)
        answer = _read_until(self._socket, _MARK_ANSWER)
        took = time.clock_gettime(self._clock) - before
        self._loop.charge(took)
        label = _label(commands)
        self.requests[label] += 1
        self.seconds[label] += took
        self.answered[label] += len(answer)
        self._answer(connection, answer)
        if not _PUBLISHING.isdisjoint(parts[0].upper() for parts, _ in commands):
            self._publish()

    def _publish(self) -> None:
        self._sniffer.sendall(_PING)
        for parts in _replies(_read_until(self._sniffer, _PONG)):
            _, _, channel, text = parts
            for subscriber in list(self._subscribers.get(channel, ())):
                self._loop.charge(DELIVERY)
                self._answer(subscriber, _array(b"message", channel, text))

    def _subscription(self, connection: SimulatedConnection, name: bytes, channels: list[bytes]) -> None:
        self._loop.charge(SUBSCRIPTION)
        if name == b"PING":
            return self._answer(connection, _PONG)
        for channel in channels:
            if name == b"SUBSCRIBE":
                self._subscribers[channel][connection] = None
                connection.channels.add(channel)
            else:
                self._subscribers[channel].pop(connection, None)
                connection.channels.discard(channel)
            self._answer(connection, _array(name.lower(), channel, len(connection.channels)))

    def _answer(self, connection: SimulatedConnection, data: bytes) -> None:
        begins = max(self._loop.time(), self._sending_until)
        self._sending_until = begins + len(data) / self._bandwidth
        at = self._sending_until + self._latency
        self._loop.call_at(at, connection.deliver, data, context=connection.actor.context)

    def forget(self, connection: SimulatedConnection) -> None:
        """A connection was closed."""
        for channel in connection.channels:
            self._subscribers[channel].pop(connection, None)
        connection.channels.clear()


class SimulatedConnection(asyncio.Transport):
    """An agent's end of a connection, and what the server knows of it."""

    def __init__(self, server: SimulatedRedis, actor: Actor, protocol: asyncio.BaseProtocol) -> None:
        super().__init__()
        self._server, self.actor, self._protocol = server, actor, protocol
        self.unread = b""
        self.channels: set[bytes] = set()
        self.closed = False

    def write(self, data: Any) -> None:
        if not self.closed:
            self._server.send(self, bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._server.forget(self)
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    abort = close

    def deliver(self, data: bytes) -> None:
        """What the server has answered is here."""
        if not self.closed:
            self.actor.account.read += len(data)
            assert isinstance(self._protocol, asyncio.Protocol)
            self._protocol.data_received(data)


@cache
def _scripts() -> dict[bytes, str]:
    """The names of Etha's scripts, by what EVALSHA calls them."""
    names = [path.stem for path in Path(connect.__file__).parent.glob("*.lua")]
    texts = {name: connect.script_text(name) for name in names}
    return {hashlib.sha1(text.encode()).hexdigest().encode(): name for name, text in texts.items()}


def _label(commands: list[tuple[list[bytes], bytes]]) -> str:
    """What kind of request this is: a script's name, or its first command and the kind of its key."""
    words = next(words for words, _ in commands if words[0] != b"MULTI")
    if words[0].upper() == b"EVALSHA":
        return f"{_scripts().get(words[1].lower(), 'unknown')}.lua"
    key = b":".join(words[1].split(b":")[2:3]) if len(words) > 1 else b""
    return f"{words[0].decode()} {key.decode(errors='replace')}".strip()


# ---- the protocol of Redis --------------------------------------------------------------------


def _connected(url: str) -> socket.socket:
    """A blocking socket to the embedded server, which listens at a path."""
    path = url.removeprefix("unix://")
    assert path != url, f"a server at a path was expected, not {url}"
    opened = socket.socket(socket.AF_UNIX)
    opened.connect(path.partition("?")[0])
    return opened


def _read_until(source: socket.socket, end: bytes) -> bytes:
    """What comes before ``end``, which comes last."""
    parts: list[bytes] = []
    tail = b""
    while not tail.endswith(end):
        part = source.recv(1 << 20)
        if not part:
            raise ConnectionError("Redis has closed the benchmark's connection")
        parts.append(part)
        tail = (tail + part)[-len(end) :]
    return b"".join(parts)[: -len(end)]


def _commands(data: bytes) -> tuple[list[tuple[list[bytes], bytes]], bytes]:
    """The complete commands in ``data``, each as (its words, its bytes), and what is left."""
    found: list[tuple[list[bytes], bytes]] = []
    start = 0
    while start < len(data):
        words, end = _array_at(data, start)
        if words is None:
            break
        found.append((words, data[start:end]))
        start = end
    return found, data[start:]


def _array_at(data: bytes, at: int) -> tuple[list[bytes] | None, int]:
    """An array of texts that begins at ``at``, and where it ends; None if it is not complete."""
    line = data.find(b"\r\n", at)
    if line < 0:
        return None, at
    count, at = int(data[at + 1 : line]), line + 2
    words: list[bytes] = []
    for _ in range(count):
        line = data.find(b"\r\n", at)
        if line < 0:
            return None, at
        size, at = int(data[at + 1 : line]), line + 2
        if at + size + 2 > len(data):
            return None, at
        words.append(data[at : at + size])
        at += size + 2
    return words, at


def _replies(data: bytes) -> Iterator[list[bytes]]:
    return (words for words, _ in _commands(data)[0])


def _open_transaction(commands: list[tuple[list[bytes], bytes]]) -> bool:
    """Whether the end of a transaction is still on its way."""
    names = [words[0].upper() for words, _ in commands]
    return names.count(b"MULTI") > names.count(b"EXEC") + names.count(b"DISCARD")


def _array(*words: bytes | int) -> bytes:
    parts = [b"*%d\r\n" % len(words)]
    parts += [b":%d\r\n" % word if isinstance(word, int) else b"$%d\r\n%s\r\n" % (len(word), word) for word in words]
    return b"".join(parts)
