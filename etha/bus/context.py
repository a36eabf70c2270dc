"""The ZeroMQ context of this process, which all its sockets share and which lives as long as the process.

Terminating a context waits for its sockets, and pyzmq terminates one that is collected: a client that was
never closed would stop the program in a finalizer. So nobody terminates this one. A forked child makes its own.
"""

from __future__ import annotations

import os

import zmq

#: Sockets at most: libzmq's default of 1023 would be a limit on clients.
MAX_SOCKETS = 65_000

#: By process. A child keeps its parent's: what is never collected is never terminated.
_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}


def process_context() -> zmq.Context[zmq.Socket[bytes]]:
    """The context of this process; made when first asked for."""
    found = _contexts.get(os.getpid())
    if found is None:
        made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        made.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        made.set(zmq.BLOCKY, 0)
        found = _contexts.setdefault(os.getpid(), made)
    return found
