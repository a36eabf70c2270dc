"""Our end of one link: the DEALER on which this agent sends to one other, and how it ends.

    we: Hello --> they: Welcome      we: messages, Beat n --> they: Beat n      either: Bye

The link is authenticated both ways before Hello: we know their key, and their gate knows ours. It never reconnects. A
connection that closes is an event, and what comes after it is another link.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from enum import Enum

import zmq

from etha.addresses import format_address, parse_address
from etha.bus.socket import LoopSocket
from etha.errors import ProtocolError
from etha.observe import trace
from etha.peer.keys import Keys, check_public_key
from etha.peer.sockets import HIGH_WATER, Monitor, link_socket
from etha.peer.wire import Beat, Bye, Control, Hello, Malformed, Said, Scope, Welcome, decode, encode

log = logging.getLogger(__name__)

#: Both ends of a link note the beats whose number is a multiple of this in their traces. So many go out, one after the
#: other, when the link is open.
TRACED_BEATS = 8


class State(Enum):
    """The state of a link. It only moves forward."""

    OPENING = "opening"
    OPEN = "open"
    CLOSED = "closed"


class Link:
    """One connection to ``agent``. ``on_open`` and ``on_end(text)`` are called at most once each.

    ``opened`` is done when the link is open (None) or has failed (the reason as text).
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: Keys,
        hello: Hello,
        *,
        agent: str,
        address: str,
        public_key: str,
        on_open: Callable[[Link], None],
        on_end: Callable[[Link, str], None],
    ) -> None:
        """Start to connect. ConfigError for a bad ``address``, ProtocolError for a bad key."""
        host, port = parse_address(address)
        self.agent, self.address, self.public_key = agent, address, check_public_key(public_key)
        self.state = State.OPENING
        #: How many losses of links between the two this agent knew of when it began this one.
        self.losses = hello.losses
        self._hello, self._on_open, self._on_end = hello, on_open, on_end
        self._loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[str | None] = self._loop.create_future()
        #: Set when the owner has dealt with the end of this link.
        self.over = asyncio.Event()
        #: Number of openers that wait for ``opened``.
        self.waiting = 0
        self.since = self.heard = self._loop.time()
        #: Whether anything came from there at all.
        self.answered = False
        self.missed = self.sent = self._beats = 0
        self._beat_sent = 0.0
        self.round_trip: float | None = None
        #: While a trace is written: when the last beat was sent, in ns, and how many more go out at once.
        self._traced_at = 0
        self._hurried = TRACED_BEATS
        if trace.active is not None:
            # Numbers that no other link has had, because both ends note a beat by its number.
            self._beats = secrets.randbits(40) * TRACED_BEATS
        dealer = link_socket(context, zmq.DEALER, keys, ipv6=":" in host)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, self.public_key.encode())
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        self._dealer = dealer
        self._monitor = Monitor(context, dealer, self._event)
        self._socket = LoopSocket(dealer, self._frames)
        dealer.connect(f"tcp://{format_address(host, port)}")

    def __repr__(self) -> str:
        return f"link to agent {self.agent} at {self.address}"

    def send(self, scope: Scope, *messages: Said) -> bool:
        """Send in order, in one piece (at most ``MAX_TOGETHER``). False if the link is not open. ProtocolError for what
        cannot be encoded."""
        data = [encode(scope, message) for message in messages]
        return self.state is State.OPEN and self._post(*data)

    def beat(self, misses: int) -> None:
        """Called once per beat: count the silence, end the link after ``misses`` beats of it, otherwise send another
        beat.

        Silence is counted in beats sent, not in seconds. An agent that was stopped itself and wakes up has heard nobody
        for long, and yet must not take all others for dead.
        """
        if self.state is not State.OPEN:
            return
        if self.missed >= misses:
            seconds = self._loop.time() - self.heard
            why = "is it stopped, its host down, or the network cut?"
            return self.end(f"it missed {self.missed} beats, silent for {seconds:.1f} s: {why}")
        self.missed += 1
        self._post_beat(self._beats + 1)

    def _post_beat(self, number: int) -> None:
        self._beats = number
        self._beat_sent = self._loop.time()
        if trace.active is not None:
            self._traced_at = time.monotonic_ns()
        self._post(encode(None, Beat(number=number)))

    def leave(self, text: str) -> None:
        """Say Bye after everything that was sent. The other end answers with its own, which ends the link."""
        if self.state is State.OPEN:
            self._post(encode(None, Bye(text=text)))

    def end(self, text: str) -> None:
        """End the link, whatever the reason. Idempotent."""
        if self.state is State.CLOSED:
            return
        self.close()
        log.debug("%r ended: %s", self, text)
        if not self.opened.done():
            self.opened.set_result(text)
        self._on_end(self, text)

    def close(self) -> None:
        """Close at once, without an event. Idempotent."""
        self.state = State.CLOSED
        self._monitor.close()
        self._socket.close()

    def _post(self, *data: bytes) -> bool:
        try:
            self._socket.send(*data)
        except zmq.ZMQError as error:  # Again: its pipe is full, or gone with the connection
            self.end(f"it takes no messages, up to {HIGH_WATER} wait: {error}")
            return False
        self.sent += len(data)
        return True

    def _trace(self, tracer: trace.Tracer, number: int) -> None:
        """Note a beat that is back. When a link is open, some go out one after the other, because a trace may be over
        before the second regular one."""
        tracer.beat_returned(self.agent, number, self._traced_at, time.monotonic_ns())
        if self._hurried:
            self._hurried -= 1
            self._post_beat(number + TRACED_BEATS)

    def _event(self, event: zmq.Event, value: int) -> None:
        if self.state is State.CLOSED:
            return
        match event:
            case zmq.Event.HANDSHAKE_SUCCEEDED:
                # Asking for the events also makes libzmq notice the new connection; a send alone may not.
                self._dealer.getsockopt(zmq.EVENTS)
                self._post(encode(None, self._hello))
            case zmq.Event.HANDSHAKE_FAILED_AUTH:
                self.end("it refused this agent's key: do both use the same namespace and the same Redis?")
            case zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
                self.end(
                    "the connection closed before both had proven their keys: another program is there, "
                    "or the agent is ending or out of file descriptors, which its log says"
                )
            case zmq.Event.CLOSED:
                self.end("nothing listens there, or it cannot be reached")
            case zmq.Event.DISCONNECTED:
                self.end("the connection closed: its process ended, or the way to it")

    def _frames(self, frames: Sequence[zmq.Frame]) -> None:
        if self.state is State.CLOSED:
            return
        self.answered = True
        try:
            if len(frames) != 1:
                raise Malformed(f"a message of {len(frames)} parts instead of 1")
            self._answer(decode(frames[0].buffer).message)
        except ProtocolError as error:
            log.warning("dropped on the %r: %s", self, error)
            self.end(f"it broke the protocol: {error}")

    def _answer(self, message: Said | Control) -> None:
        self.heard, self.missed = self._loop.time(), 0
        match message:
            case Welcome() if self.state is State.OPENING:
                self.state = State.OPEN
                self.opened.set_result(None)
                self._on_open(self)
                if trace.active is not None and self.state is State.OPEN:
                    self._post_beat(self._beats + TRACED_BEATS)
            case Beat(number=number) if self.state is State.OPEN:
                if number == self._beats:
                    self.round_trip = self.heard - self._beat_sent
                    if (tracer := trace.active) is not None and self._traced_at and number % TRACED_BEATS == 0:
                        self._trace(tracer, number)
            case Bye(text=text):
                self.end(text)
            case _:
                raise Malformed(f"a {type(message).__name__} on a link that is {self.state.value}")
