"""Where other agents connect to this one: a ROUTER behind the gate, on the ports of ``Ports``.

It knows connections, not agents' states. It passes each decoded message on with the agent that the gate named and with
its connection, and it answers on connections. The hub decides who may say what.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import zmq

from etha.bus.socket import LoopSocket
from etha.peer.front import Front, Private
from etha.peer.gate import DOMAIN, identify
from etha.peer.keys import Keys
from etha.peer.ports import Ports
from etha.peer.sockets import HANDSHAKE, link_socket
from etha.peer.wire import MAX_TOGETHER, Control, Envelope, Malformed, decode, encode

log = logging.getLogger(__name__)

#: (agent, its public key, connection, envelope or what was wrong with it)
OnEnvelope = Callable[[str, str, bytes, Envelope | Malformed], None]


class Listener:
    """Takes links that come in at the front of ``ports.links``. It is made after the gate and closed before it."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys, ports: Ports, on_envelope: OnEnvelope
    ) -> None:
        self._on_envelope = on_envelope
        private = Private()
        router = link_socket(context, zmq.ROUTER, keys, ipv6=":" in ports.host)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a gate nobody comes in, instead of everybody
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.USE_FD, private.listener.detach())  # ZeroMQ closes it
        router.bind("ipc://private")  # the name of a socket that is bound already
        self._socket = LoopSocket(router, self._frames)
        self._front = Front(ports.links, private, ports.address, HANDSHAKE / 1000)

    def answer(self, connection: bytes, message: Control) -> None:
        """Send ``message`` on a connection, without waiting for a peer that is gone or does not read."""
        if self._socket.closed:
            return
        try:
            self._socket.send(connection, encode(None, message))
        except zmq.ZMQError as error:
            log.debug("%s not answered: %s", type(message).__name__, error)

    def close(self) -> None:
        """Close the port and every connection. Idempotent."""
        self._front.close()
        self._socket.close()

    def _frames(self, frames: Sequence[zmq.Frame]) -> None:
        last = frames[-1]
        agent, key = identify(str(last.get("User-Id")))
        envelopes: list[Envelope | Malformed] = []
        try:
            if not 2 <= len(frames) <= 1 + MAX_TOGETHER:
                raise Malformed(f"a message of {len(frames)} parts instead of 2 to {1 + MAX_TOGETHER}")
            envelopes += (decode(frame.buffer) for frame in frames[1:])
        except Malformed as error:
            envelopes = [error]
        connection = frames[0].bytes
        for envelope in envelopes:
            self._on_envelope(agent, key, connection, envelope)
