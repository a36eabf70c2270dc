"""The first and the last messages of a session, and those of the descriptor socket.

worker -> agent   Hello -> Welcome, then on the descriptor socket Attach -> Done: the session is open
worker -> agent   JoinSession on a further bus connection -> Done: requests that come on it are answered on it
worker -> agent   Descriptors (with file descriptors, descriptor socket) -> Done;  Goodbye -> Done
agent -> worker   Goodbye, pushed, when the agent leaves
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from etha.bus.codec import make_decoders, message
from etha.bus.schema import MAX_ITEMS, JsonObject, StrictStruct, Text


@message("hello")
class WorkerHello(StrictStruct, frozen=True, kw_only=True):
    """Who a worker is. ``redis``: the URL that it asks for, None for the embedded server (or any).

    An ``observer`` is not a worker: it may ask for status and events, is not listed, and does not keep an agent alive.
    ``pid`` and ``start`` are the worker's own view. In another pid namespace the kernel's, ``Peer.pid``, differs.
    """

    version: Text
    namespace: Text
    redis: Text | None
    host: Text
    pid: int
    start: int
    observer: bool = False
    #: The settings, by variable, that it would give an agent that it starts; and whether it would start one.
    wants: Annotated[dict[Text, Text], Meta(max_length=MAX_ITEMS)] = field(default_factory=dict)
    starts: bool = False


@message("welcome")
class WorkerWelcome(StrictStruct, frozen=True, kw_only=True):
    """What the agent is. The server fills in ``session``, which opens the descriptor socket.

    ``log``: the file to which it logs, "-" for its terminal or its service. ``leaving``: why the agent takes no worker
    any more and will end the session soon. ``differs``: which of the worker's wishes it does not meet, as text for
    messages.
    """

    version: Text
    namespace: Text
    device: Text
    redis: Text | None
    pid: int
    session: Text = ""
    leaving: Text = ""
    differs: Text = ""
    log: Text = ""


@message("attach")
class Attach(StrictStruct, frozen=True, kw_only=True):
    """This descriptor connection belongs to ``session``. When it ends, the session ends. -> Done."""

    session: Annotated[str, Meta(max_length=64)]


@message("join")
class JoinSession(StrictStruct, frozen=True, kw_only=True):
    """This bus connection belongs to ``session``, too. When it ends, the session stays. -> Done."""

    session: Annotated[str, Meta(max_length=64)]


@message("descriptors")
class Descriptors(StrictStruct, frozen=True, kw_only=True):
    """The file descriptors of this packet, described by ``header``. -> Done."""

    header: JsonObject


@message("goodbye")
class Goodbye(StrictStruct, frozen=True, kw_only=True):
    """The sender leaves. A request from a worker (-> Done), a push from an agent."""

    text: Text


@message("done")
class HandshakeDone(StrictStruct, frozen=True, kw_only=True):
    """The request was carried out."""


make_decoders()
