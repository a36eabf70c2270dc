"""The ZeroMQ context of this process. All its sockets share the context, which lives as long as the process.

Terminating a context waits for its sockets, and pyzmq terminates a context that is collected. So a client that was
never closed would block the program in a finalizer. Therefore nobody terminates this context. A forked child makes its
own.
"""

from __future__ import annotations

import os

import zmq

#: Maximum number of sockets. libzmq's default of 1023 would limit the number of clients.
MAX_SOCKETS = 65_000

#: By process. A child keeps its parent's context, because a context that is never collected is never terminated.
_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}


def process_context() -> zmq.Context[zmq.Socket[bytes]]:
    """The context of this process; made by the first call."""
    found = _contexts.get(os.getpid())
    if found is None:
        made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        made.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        made.set(zmq.BLOCKY, 0)
        found = _contexts.setdefault(os.getpid(), made)
    return found
