"""The first and the last words of a session, and what goes over the descriptor socket beside the bus.

worker -> agent   Hello -> Welcome, then on the descriptor socket Attach -> Done: the session stands
worker -> agent   Descriptors (with file descriptors, descriptor socket) -> Done;  Goodbye -> Done
agent -> worker   Goodbye, pushed, when the agent leaves
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from etha.bus.codec import message
from etha.bus.schema import MAX_ITEMS, JsonObject, StrictStruct, Text


@message("hello")
class WorkerHello(StrictStruct, frozen=True, kw_only=True):
    """Who a worker is. ``redis``: the URL it asks for, None for the embedded server (or any).

    An ``observer`` is no worker: it may ask for status and events, is not listed, and does not keep an agent alive.
    ``pid`` and ``start`` are what the worker sees of itself: in another pid namespace the kernel's
    word, ``Peer.pid``, differs.
    """

    version: Text
    namespace: Text
    redis: Text | None
    host: Text
    pid: int
    start: int
    observer: bool = False
    #: Settings by variable that it would give an agent that it starts, and whether it would start one.
    wants: Annotated[dict[Text, Text], Meta(max_length=MAX_ITEMS)] = field(default_factory=dict)
    starts: bool = False


@message("welcome")
class WorkerWelcome(StrictStruct, frozen=True, kw_only=True):
    """What the agent is. ``session`` is filled in by the server and opens the descriptor socket.

    ``leaving``: why it takes no worker any more and ends the session soon. ``differs``: which of the worker's wishes
    it does not meet, for messages.
    """

    version: Text
    namespace: Text
    device: Text
    redis: Text | None
    pid: int
    session: Text = ""
    leaving: Text = ""
    differs: Text = ""


@message("attach")
class Attach(StrictStruct, frozen=True, kw_only=True):
    """This descriptor connection belongs to ``session``; its end is the session's end. -> Done."""

    session: Annotated[str, Meta(max_length=64)]


@message("descriptors")
class Descriptors(StrictStruct, frozen=True, kw_only=True):
    """The file descriptors of this packet, described by ``header``. -> Done."""

    header: JsonObject


@message("goodbye")
class Goodbye(StrictStruct, frozen=True, kw_only=True):
    """The sender leaves; from a worker a request (-> Done), from an agent a push."""

    text: Text


@message("done")
class HandshakeDone(StrictStruct, frozen=True, kw_only=True):
    """It is done."""
