"""The streams of a group to its members on other hosts: sockets, one thread that serves them all, and how each ended.

The thread runs in the native library (native/streams.c) without the interpreter's lock. A stream that has ended makes
an eventfd readable, which the group's monitor watches like the pidfd of a member of this host.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Mapping

from etha import native
from etha.native import StreamEnd, StreamTable

#: Milliseconds between two words to another host. A member of which nothing has come for three times as long is lost.
BEAT_MS = 1000
#: Seconds in which rank 0 must say whose cause was the first. A member that does not hear it reports its own.
_CLAIM_SECONDS = 1.0


class Streams:
    """Takes ``sockets`` over, which are connected and to which nobody else writes; ``deaths`` stay the caller's."""

    def __init__(
        self,
        library: native.NativeLibrary,
        memory: native.GroupMemory,
        sockets: Mapping[int, int],
        deaths: Mapping[int, int],
        *,
        cause_offset: int,
        cause_bytes: int,
    ) -> None:
        self._library = library
        self._deaths = dict(deaths)
        self._table = StreamTable(
            memory,
            dict(sockets),
            dict(deaths),
            cause_offset=cause_offset,
            cause_bytes=cause_bytes,
            beat_ms=BEAT_MS,
        )
        library.open_streams(self._table)
        self._thread = threading.Thread(target=self._serve, name="etha-group-streams", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self._library.serve_streams(self._table)

    def describe_end(self, rank: int) -> str:
        """How the stream to a rank ended, for an error; "" if it stands."""
        why, error = self._library.stream_end(self._table, rank)
        match why:
            case StreamEnd.END_OF_STREAM:
                return "its process has ended: it closed its connection"
            case StreamEnd.BROKEN:
                return f"its process or its connection has ended ({os.strerror(error)})"
            case StreamEnd.SILENT:
                seconds = 3 * BEAT_MS / 1000
                return f"nothing has come from it for {seconds:g} s: it is stopped, or its host is cut off"
            case StreamEnd.NONSENSE:
                return f"it sent what makes no sense (kind {error}): do all members run the same version of Etha?"
            case _:
                return ""

    def tell_cause(self) -> None:
        """Send the cause in the own block to all members of other hosts, and claim the group's first cause by it."""
        self._library.tell_cause(self._table)

    def withdraw(self) -> None:
        """A call has failed: when this returns, no tensor is read to be sent any more."""
        self._library.withdraw(self._table)

    def wait_for_claim(self) -> None:
        """Wait until rank 0 has said whose cause was first, its stream has ended, or a second is over."""
        poll = select.poll()
        poll.register(self._table.claim_fd, select.POLLIN)
        poll.register(self._deaths[0], select.POLLIN)
        poll.poll(_CLAIM_SECONDS * 1000)

    def close(self) -> None:
        """Send the last words and close the connections; at most one beat."""
        self._library.close_streams(self._table)
        self._thread.join()
        self._table.close()

    def disown(self) -> None:
        """In a forked child: close the sockets, or they would outlive the parent."""
        for fd in (*self._library.open_sockets(self._table), self._table.wake_fd, self._table.claim_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
