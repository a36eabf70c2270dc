"""Programs run on a lane as tests want it: to their end, with the payload or the error."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from etha.agent.runtime.lane import Lane, Running
from etha.agent.runtime.run import Execution
from etha.transport.base import Progress, TransportPeer


class LaneTransport:
    """The lane as a Transport: a bucket is an Execution; there are no peers to open."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._running: set[Running] = set()
        self._cause: BaseException | None = None

    async def open(self, peers: Sequence[TransportPeer]) -> None:
        """Nothing to do: both ends are on this agent."""

    async def run(self, bucket: Execution, on_progress: Progress | None = None) -> int:
        """Run a program on the lane and return its payload in bytes; cancelling it aborts it and waits."""
        if self._cause is not None:
            raise self._cause
        loop = asyncio.get_running_loop()
        over: asyncio.Future[BaseException | None] = loop.create_future()
        running = self._lane.submit(bucket, on_progress=on_progress, on_done=over.set_result)
        self._running.add(running)
        try:
            error = await asyncio.shield(over)
        except asyncio.CancelledError as cancelled:
            running.abort(cancelled)
            while not over.done():
                try:
                    await asyncio.shield(over)
                except asyncio.CancelledError:
                    continue  # cancelled again: the memory is still in use
            raise
        finally:
            self._running.discard(running)
        if error is not None:
            raise error
        return bucket.program.total

    def abort(self, cause: BaseException) -> None:
        """End what runs with ``cause``, and refuse more."""
        self._cause = self._cause or cause
        for running in self._running:
            running.abort(cause)

    async def close(self) -> None:
        """End what runs."""
        self.abort(RuntimeError("the transport is closed"))
