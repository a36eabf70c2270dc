"""nccl: bytes between the cards of different hosts, in groups of NCCL sends and receives on three streams.

Once per agent, when its device is known:

    plane = NcclPlane("agent-b", device, driver=driver(), nccl=nccl(), staging=settings.staging)

On each of the agents that exchange bytes in an epoch (``members`` are their names, ``staging`` the least of all):

    unique_id = await plane.communicators.unique_id()               on the least agent, told to all others
    comm = await plane.communicators.get(scope, members, unique_id, seconds=60)
    cut = device_cut(members, staging)
    program = compile_wire(plan, routing, sources, targets, staging=staging, cut=cut)      views with ``device`` set
    transport = NcclTransport(plane, comm)
    await transport.open([TransportPeer(agent=name) for name in peers])
    await transport.prepare(run)                                    if program.aliased, before the lane writes
    nbytes = await transport.run(WireRun(program=program, guards=guards, seq=seq), progress)

After ``stop``, an error of ``run``, or ``communicators.drop(scope)``, the communicator is unusable
(``transport.usable``). Get a new one, with a new id, on all of its agents, and a new transport over it. An agent that
failed or was stopped leaves the others hanging until they are stopped, too, because NCCL tells nobody. At the end,
``await plane.close()``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from etha.errors import PeerLostError, ProtocolError
from etha.transport.base import Progress, TransportPeer, WireRun
from etha.transport.nccl.communicator import Communicator
from etha.transport.nccl.plane import NcclJob, NcclPlane
from etha.transport.nccl.thread import Task
from etha.transport.wire.flows import WireProgram
from etha.transport.wire.nccl_messages import device_cut

__all__ = ["NcclPlane", "NcclTransport", "device_cut"]

log = logging.getLogger(__name__)


class NcclTransport:
    """One batch's exchange with its peers over a communicator: a ``Transport[WireRun]``."""

    def __init__(self, plane: NcclPlane, communicator: Communicator) -> None:
        self._plane, self._communicator = plane, communicator
        self._running: set[NcclJob] = set()
        self._refused: BaseException | None = None
        self._programs: set[WireProgram] = set()

    @property
    def usable(self) -> bool:
        """Whether ``run`` may succeed. False once a run was stopped or has failed; then get a new communicator."""
        return self._communicator.usable and self._plane.stuck is None and self._refused is None

    async def open(self, peers: Sequence[TransportPeer]) -> None:
        """Check that the communicator reaches these peers, or raise ProtocolError. Addresses are not used."""
        if strange := {peer.agent for peer in peers} - set(self._communicator.members):
            raise ProtocolError(f"the communicator of {self._communicator.members} does not reach {sorted(strange)}")

    async def prepare(self, run: WireRun) -> None:
        """Compile the program for the card, and copy what must be read before anything is written, once per run."""
        await self._run_job(run, None, move=False)

    async def run(self, bucket: WireRun, on_progress: Progress | None = None) -> int:
        """Exchange everything of one transfer. Returns its payload in bytes, sent and received.

        All agents of the communicator run theirs, at any time. Cancelling aborts the run. Once it returns or raises,
        nothing touches memory any more, except after a TransferError whose ``quiesced`` is False. Raises PeerLostError
        if NCCL fails, RevokedError with ``owner``, and CardError if the device fails; all of them end the communicator.
        """
        if bucket.program.empty:
            return 0
        return await self._run_job(bucket, on_progress, move=True)

    async def _run_job(self, run: WireRun, on_progress: Progress | None, *, move: bool) -> int:
        comm = self._communicator
        if run.program.members and run.program.members != comm.members:
            raise ProtocolError(f"a program for {run.program.members}, a communicator of {comm.members}")
        self._programs.add(run.program)
        job = NcclJob(self._plane)
        self._running.add(job)
        try:
            async with self._plane.turn:
                for cause in (self._plane.stuck, self._refused, job.cause, comm.cause if move else None):
                    if cause is not None:
                        raise cause
                loop = asyncio.get_running_loop()
                tell = None if on_progress is None else partial(_tell, loop, on_progress)
                return await job.over(self._go(job, run, comm, tell, move))
        except BaseException as error:
            # The others' groups wait for this agent's, so it must not remain a member that never issues them.
            if move:
                self._plane.communicators.discard(comm, error)
            raise
        finally:
            self._running.discard(job)

    def _go(
        self, job: NcclJob, run: WireRun, comm: Communicator, tell: Callable[[int], None] | None, move: bool
    ) -> Task[int]:
        yield True
        try:
            pipeline = yield from job.until_stopped(self._plane.pipeline(run, tell))
            job.begun(pipeline)
            if not run.prepared:
                yield from pipeline.copy_early()
                run.prepared = True
        except BaseException as error:
            if move:
                comm.abort(error)
            raise
        if not move:
            return 0
        run.touched = run.touched or bool(run.program.receives)
        return (yield from pipeline.run(comm))

    def stop(self, cause: BaseException) -> None:
        """The transfer is aborted: end what runs with ``cause``, and the communicator. Returns at once; idempotent.

        Call it even if this agent's part is done, because others may have aborted theirs, and a later group would wait
        for them for ever.
        """
        for job in self._running:
            job.stop(cause)
        if not self._running:
            self._plane.communicators.discard(self._communicator, cause)

    def abort(self, cause: BaseException) -> None:
        """Stop, and refuse further runs."""
        self._refused = self._refused or cause
        self.stop(cause)

    async def close(self) -> None:
        """End what runs, refuse more, and free what is kept of its programs. The communicator belongs to its epoch."""
        self.abort(PeerLostError("this transport is closed", reason="died"))
        # A run has the turn until nothing touches memory.
        await self._plane.forget(self._programs)
        self._programs.clear()


def _tell(loop: asyncio.AbstractEventLoop, progress: Progress, done: int) -> None:
    try:
        loop.call_soon_threadsafe(progress, done)
    except RuntimeError:
        log.debug("the loop was closed before %d bytes were told of", done)
