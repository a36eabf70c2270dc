"""What both ends of a link share: socket options, and the monitor that turns events into calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from etha.bus.socket import LoopSocket
from etha.peer.keys import Keys
from etha.peer.wire import MAX_MESSAGE

#: Most messages that may wait for one agent that does not read, and from one agent.
HIGH_WATER = 10_000
#: Milliseconds in which a connection has to prove its key.
HANDSHAKE = 5_000
_BAD_HANDSHAKE = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
)
EVENTS = (
    _BAD_HANDSHAKE
    | zmq.Event.ACCEPTED
    | zmq.Event.CONNECTED
    | zmq.Event.CLOSED
    | zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.DISCONNECTED
)
_numbers = itertools.count(1)


def link_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: zmq.SocketType, keys: Keys, *, ipv6: bool
) -> zmq.Socket[bytes]:
    """A socket of ``kind`` with the identity ``keys``, bounded in everything."""
    socket = context.socket(kind)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.SNDHWM, HIGH_WATER),
        (zmq.RCVHWM, HIGH_WATER),
        (zmq.MAXMSGSIZE, MAX_MESSAGE),
        (zmq.HANDSHAKE_IVL, HANDSHAKE),
        (zmq.IPV6, int(ipv6)),
        # The connections of a host that vanished must not stay for ever. Beats report it much sooner.
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 15),
        (zmq.TCP_KEEPALIVE_INTVL, 5),
        (zmq.TCP_KEEPALIVE_CNT, 3),
    ):
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    return socket


class Monitor:
    """Calls ``on_event(event, value)`` for each of EVENTS of ``socket``, in order, on the loop's thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        on_event: Callable[[zmq.Event, int], None],
    ) -> None:
        self._watched = socket
        self._on_event = on_event
        # Not pyzmq's own get_monitor_socket, because it reuses names before ZeroMQ has forgotten them.
        endpoint = f"inproc://monitor-{next(_numbers)}"
        socket.monitor(endpoint, EVENTS)
        pair = context.socket(zmq.PAIR)
        pair.setsockopt(zmq.LINGER, 0)
        pair.connect(endpoint)
        self._socket = LoopSocket(pair, self._frames)

    def close(self) -> None:
        """Stop watching, before the watched socket is closed. Idempotent."""
        if not self._socket.closed:
            self._watched.disable_monitor()
            self._socket.close()

    def _frames(self, frames: Sequence[zmq.Frame]) -> None:
        reported = parse_monitor_message([frame.bytes for frame in frames])
        self._on_event(zmq.Event(reported["event"]), int(reported["value"]))
