"""tcp: bytes between agents on different hosts, over several streams per pair of agents and direction.

A batch uses its agent's data plane:  open(peers) -> run(WireRun) ... -> close()
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from etha.errors import PeerLostError, ProtocolError
from etha.transport.base import Progress, TransportPeer, WireRun
from etha.transport.tcp.data_plane import DataPlane, StreamSet
from etha.transport.tcp.listener import DataAddress
from etha.transport.tcp.run import TcpRun
from etha.transport.wire.flows import WireProgram


class TcpTransport:
    """One batch's exchange with its peers over a data plane: a ``Transport[WireRun]``."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._addresses: dict[str, DataAddress] = {}
        self._running: set[TcpRun] = set()
        self._opening: set[asyncio.Timeout] = set()
        self._cause: BaseException | None = None
        self._stops = 0
        #: Streams of the last run, until its transfer is settled.
        self._last: list[StreamSet] = []
        self._closed = False

    async def open(self, peers: Sequence[TransportPeer]) -> None:
        """Open streams to these peers, to which the program sends; their ``address`` is a DataAddress.

        Peers that only send to this agent need not be among them. PeerLostError if one does not let us in.
        """
        for peer in peers:
            if not isinstance(peer.address, DataAddress):
                raise ProtocolError(f"agent {peer.agent} has no data address but {peer.address!r}")
            self._addresses[peer.agent] = peer.address
            await self._plane.connect(peer.agent, peer.address)

    async def prepare(self, run: WireRun) -> None:
        """Copy what must be read before anything is written, once per run."""
        await self._plane.prepare(run)

    async def run(self, bucket: WireRun, on_progress: Progress | None = None) -> int:
        """Exchange everything of one transfer. Returns its payload in bytes, sent and received.

        The other ends may be ahead or behind. Cancelling aborts the run and waits until no thread touches memory.
        Raises PeerLostError, ProtocolError (the two ends have different plans), and ReachErrors with ``owner``.
        """
        program = bucket.program
        if missing := program.sends.keys() - self._addresses.keys():
            raise ProtocolError(f"streams to {sorted(missing)} were not opened, only to {sorted(self._addresses)}")
        stops = self._stops
        self.settled()
        sets: dict[str, StreamSet] = {}
        try:
            await self._lease(program, sets)
            await self._plane.prepare(bucket)
            if self._cause is not None and (self._closed or self._stops != stops):
                raise self._cause
            if program.empty:
                return 0
            begun = time.monotonic()
            run = self._plane.begin(bucket, sets, on_progress)
        except BaseException:
            self._plane.release(sets.values())  # nothing was sent over them
            raise
        self._running.add(run)
        try:
            await self._over(run)
            if run.unfinished:
                await self._rest(run)
        finally:
            self._running.discard(run)
            self._plane.finish(run)
            bucket.touched, bucket.wired = run.touched, run.wired
        if run.error is not None:
            self._plane.discard(sets.values())
            raise run.error
        self._plane.note(run, time.monotonic() - begun)
        self._last = list(sets.values())
        return run.done

    async def _lease(self, program: WireProgram, sets: dict[str, StreamSet]) -> None:
        try:
            async with asyncio.timeout(None) as scope:  # stop() brings the deadline forward
                self._opening.add(scope)
                for peer in program.sends:
                    sets[peer] = await self._plane.lease(peer, self._addresses[peer])
        except TimeoutError:
            return  # run() raises the cause
        finally:
            self._opening.discard(scope)

    async def _over(self, run: TcpRun) -> None:
        try:
            await asyncio.shield(run.over)
        except asyncio.CancelledError as cancelled:
            run.fail(cancelled)
            while not run.over.done():
                try:
                    await asyncio.shield(run.over)
                except asyncio.CancelledError:
                    continue  # cancelled again: wait on, because the memory is still in use
            raise

    async def _rest(self, run: TcpRun) -> None:
        rest = asyncio.get_running_loop().run_in_executor(None, run.rest)
        cancelled: asyncio.CancelledError | None = None
        while not rest.done():
            try:
                await asyncio.shield(rest)
            except asyncio.CancelledError as error:
                cancelled = error  # wait on, because the memory is still in use
        if cancelled is not None:
            raise cancelled

    def settled(self) -> None:
        """The transfer is committed, so others may use its streams. Idempotent."""
        last, self._last = self._last, []
        self._plane.release(last)

    def stop(self, cause: BaseException) -> None:
        """The transfer is aborted: end what runs with ``cause``. Returns at once; idempotent.

        Call it even if this agent's part is done, because its streams may hold bytes that nobody will read. Later runs
        open new streams.
        """
        if not self._closed:
            self._cause = cause
        self._stops += 1
        for scope in self._opening:
            scope.reschedule(asyncio.get_running_loop().time())
        for run in list(self._running):
            run.fail(cause)
        last, self._last = self._last, []
        self._plane.discard(last)

    def abort(self, cause: BaseException) -> None:
        """Stop, and refuse further runs."""
        self.stop(cause)
        self._closed = True

    async def close(self) -> None:
        """End what runs and refuse further runs. The streams stay, because others may use them."""
        self.abort(PeerLostError("this transport is closed", reason="died"))
        for run in list(self._running):
            await asyncio.shield(run.over)
