"""What the agent holds for one session: pidfd, descriptor connection, the time left to attach."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from etha.bus.attachments import Attachment
from etha.bus.connections import Connection
from etha.bus.peer import Peer, Reason
from etha.bus.process import open_pidfd


class Session:
    """Tells ``on_end(session, reason)`` when its worker is gone; ``connection`` is the one that it came on."""

    def __init__(self, peer: Peer, connection: Connection, on_end: Callable[[Session, Reason], None]) -> None:
        self.peer = peer
        self.connection = connection
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._attachment: Attachment | None = None
        self._pidfd: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def attached(self) -> bool:
        """The worker has said on the descriptor socket whose it is: requests are taken."""
        return self._attachment is not None

    def watch(self, attach_timeout: float) -> None:
        """Hear of the process's death from now on, and give it ``attach_timeout`` seconds to attach."""
        self._timer = self._loop.call_later(attach_timeout, self._end, "closed")
        self._pidfd = open_pidfd(self.peer.pid)
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._end, "died")
        elif self.peer.pid:
            self._loop.call_soon(self._end, "died")

    def attach(self, attachment: Attachment, take: Callable[[Peer, dict[str, Any], list[int]], None]) -> None:
        """``take(peer, header, fds)`` gets the descriptors that come, and owns them."""
        self._attachment = attachment
        attachment.serve(lambda header, fds: take(self.peer, header, fds), self._disconnected)
        if self._timer is not None:
            self._timer.cancel()

    def release(self) -> None:
        """Let go of everything; nothing is told any more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        if self._attachment is not None:
            self._attachment.close()

    def _disconnected(self) -> None:
        # A client that was closed has said goodbye before. One that was dropped is as dead to its peers as a process.
        self._end("died")

    def _end(self, reason: Reason) -> None:
        self._on_end(self, reason)
