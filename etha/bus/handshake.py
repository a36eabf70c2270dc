"""The first and the last words of a session, and what goes over the descriptor socket beside the bus.

worker -> agent   Hello -> Welcome, then on the descriptor socket Attach -> Done: the session stands
worker -> agent   Descriptors (with file descriptors, descriptor socket) -> Done;  Goodbye -> Done
agent -> worker   Goodbye, pushed, when the agent leaves
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from etha.bus.codec import Bounds, message


@message("hello")
@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who a worker is. ``redis``: the URL it asks for, None for the embedded server (or any).

    An ``observer`` is no worker: it may ask for status and events, is not listed, and does not keep an agent alive.
    ``pid`` and ``start`` are what the worker sees of itself: in another pid namespace the kernel's
    word, ``Peer.pid``, differs.
    """

    version: str
    namespace: str
    redis: str | None
    host: str
    pid: int
    start: int
    observer: bool = False
    #: Settings by variable that it would give an agent that it starts, and whether it would start one.
    wants: dict[str, str] = field(default_factory=dict)
    starts: bool = False


@message("welcome")
@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """What the agent is. ``session`` is filled in by the server and opens the descriptor socket.

    ``leaving``: why it takes no worker any more and ends the session soon. ``differs``: which of the worker's wishes
    it does not meet, for messages.
    """

    version: str
    namespace: str
    device: str
    redis: str | None
    pid: int
    session: str = ""
    leaving: str = ""
    differs: str = ""


@message("attach")
@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """This descriptor connection belongs to ``session``; its end is the session's end. -> Done."""

    session: Annotated[str, Bounds(max=64)]


@message("descriptors")
@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptors:
    """The file descriptors of this packet, described by ``header``. -> Done."""

    header: dict[str, Any]


@message("goodbye")
@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The sender leaves; from a worker a request (-> Done), from an agent a push."""

    text: str


@message("done")
@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """It is done."""
