"""Where other agents speak to this one: a ROUTER behind the gate, on the ports of ``Ports``.

Knows connections, not agents' states: hands on each decoded message with whom the gate said it is from
and the connection that it came on, and answers on connections. Who may say what is the hub's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import zmq

from etha.bus.socket import LoopSocket
from etha.peer.gate import DOMAIN, identify
from etha.peer.keys import Keys
from etha.peer.ports import Ports, format_address
from etha.peer.sockets import Monitor, link_socket
from etha.peer.wire import Control, Envelope, Malformed, decode, encode

log = logging.getLogger(__name__)

#: (agent, its public key, connection, envelope or what was wrong with it)
OnEnvelope = Callable[[str, str, bytes, Envelope | Malformed], None]


class Listener:
    """Takes links on ``ports.links``; made after the gate and closed before it."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys, ports: Ports, on_envelope: OnEnvelope
    ) -> None:
        self._on_envelope = on_envelope
        self._address = ports.address
        #: Accepted connections, by descriptor, that have said nothing yet.
        self._mute: set[int] = set()
        self._failed = False
        router = link_socket(context, zmq.ROUTER, keys, ipv6=":" in ports.host)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no gate: nobody comes in, instead of everybody
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.USE_FD, ports.links.detach())  # ZeroMQ closes it
        self._monitor = Monitor(context, router, self._event)
        router.bind(f"tcp://{format_address(ports.host, ports.port)}")
        self._socket = LoopSocket(router, self._frames)

    def answer(self, connection: bytes, message: Control) -> None:
        """Say ``message`` on a connection; one that is gone or does not read is not waited for."""
        if self._socket.closed:
            return
        try:
            self._socket.send(connection, encode(None, message))
        except zmq.ZMQError as error:
            log.debug("%s not answered: %s", type(message).__name__, error)

    def close(self) -> None:
        """Close the port and every connection; idempotent."""
        self._monitor.close()
        self._socket.close()

    def _frames(self, frames: Sequence[zmq.Frame]) -> None:
        last = frames[-1]
        agent, key = identify(str(last.get("User-Id")))
        self._mute.discard(int(last.get(zmq.SRCFD)))
        try:
            if len(frames) != 2:
                raise Malformed(f"a message of {len(frames)} parts instead of 2")
            envelope: Envelope | Malformed = decode(last.buffer)
        except Malformed as error:
            envelope = error
        self._on_envelope(agent, key, frames[0].bytes, envelope)

    def _event(self, event: zmq.Event, value: int) -> None:
        """One line for each connection that ends before it has said anything; the gate has told of wrong keys."""
        match event:
            case zmq.Event.ACCEPTED:
                self._mute.add(value)
            case zmq.Event.HANDSHAKE_FAILED_AUTH:
                self._failed = True
            case zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
                self._failed = True
                log.warning("dropped a connection to %s that holds no key of an agent", self._address)
            case zmq.Event.DISCONNECTED:
                # A failed handshake is told in two events in a row: the failure, then the end of its connection.
                if value in self._mute and not self._failed:
                    log.warning("dropped a connection to %s that does not speak as agents do", self._address)
                self._mute.discard(value)
                self._failed = False
