"""NcclPipeline: one run of a program's steps over NCCL, as a task of the NCCL thread.

    pack  k+1 |#####|     |#####|          Up to DEPTH groups are queued. When the device has passed ``done`` of a
    wire  k      |########|########|       group, its slot is reused, and the guards of the calls whose memory it
    unpack k-1            |####|           touched are left.

Once the task is over, nothing touches memory any more: after a failure the communicator is aborted, which ends what is
queued, and the streams are waited for. If they do not end within ABORTING seconds, the error says so, and the guards
stay entered, so that every worker whose memory it is can see it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from etha.cuda.driver import DeviceError
from etha.cuda.nccl import NcclError
from etha.cuda.reaper import reaper
from etha.errors import PeerLostError, TransferError
from etha.memory.revocation import Guard
from etha.observe import trace
from etha.transport.copy.device import Copier
from etha.transport.copy.device_memory import reaching
from etha.transport.copy.program import Member
from etha.transport.copy.staging import Budget, CopySlot
from etha.transport.nccl.communicator import Communicator
from etha.transport.nccl.launches import LaunchProgram, LaunchStep
from etha.transport.nccl.staging_ring import StagingRing
from etha.transport.nccl.thread import Task
from etha.transport.wire.nccl_messages import DEPTH

#: Seconds that an abort may take until nothing is queued any more.
ABORTING = 5.0
#: Least seconds between two progress callbacks of one run.
PROGRESS_EVERY = 0.1

Count = Callable[[str, int, int], None]


class QuiesceTimeout(TransferError):
    """Queued device work did not end in time, so it may still read and write the workers' memory."""


@contextmanager
def translated(members: Sequence[str]) -> Iterator[None]:
    """Raise NCCL's failures as a peer's, which is all that NCCL tells."""
    try:
        yield
    except NcclError as error:
        raise PeerLostError(f"NCCL between {', '.join(members)}: {error}", reason="died") from error


class NcclPipeline:
    """See the module. ``stop`` is thread-safe; call everything else on the NCCL thread.

    ``numbers`` (DEPTH of them) tell its groups apart in revocation pages.
    """

    def __init__(
        self,
        steps: LaunchProgram,
        ring: StagingRing,
        copier: Copier,
        guards: Mapping[Member, Guard],
        *,
        numbers: Sequence[int],
        budget: Budget,
        count: Count,
        progress: Callable[[int], None] | None = None,
        label: tuple[bytes, int] = (b"", 0),
    ) -> None:
        """``label`` is (key, seq), as the trace names the run."""
        self._label = label
        self.steps, self.ring, self.copier, self.guards = steps, ring, copier, guards
        self.cause: BaseException | None = None
        self.done = 0
        self._budget, self._count, self._progress = budget, count, progress
        self._copy_slots = [CopySlot(number, budget) for number in numbers[:DEPTH]]
        #: (number, group, guards, when it was begun if a trace is written).
        self._flight: deque[tuple[int, LaunchStep, ExitStack, int]] = deque()
        self._progress_at = 0.0

    def stop(self, cause: BaseException) -> None:
        """End it with ``cause``, unless it ends before. Returns at once."""
        if self.cause is None:
            self.cause = cause

    def run(self, comm: Communicator) -> Task[int]:
        """Run all groups over ``comm``. Returns the payload in bytes. Any error aborts the communicator."""
        scratch = self.steps.program.scratch
        self._budget.take(scratch)
        comm.busy += 1
        reaper.hold()
        held = True
        try:
            with translated(comm.members), reaching(self.ring.uuid):
                for number, step in enumerate(self.steps.steps):
                    while len(self._flight) >= DEPTH:
                        yield self._landed(comm)
                    yield from self._issue(comm, number, step)
                    yield True
                while self._flight:
                    yield self._landed(comm)
        except BaseException as error:
            held = False  # for good if the abort fails: whoever freed memory would wait for what still runs
            yield from self._abort(comm, error)
            held = True
            raise
        finally:
            if held:
                reaper.let_go()
            comm.busy -= 1
            self._budget.take(-scratch)
        return self.done

    def copy_early(self) -> Task[None]:
        """Read memory that targets overlap, before anything is written. Needs no communicator."""
        if self.steps.early is None:
            return
        ring, driver = self.ring, self.ring.driver
        owners = sorted({owner for _, _, some in self.steps.program.early for owner in some})
        with ExitStack() as guarded:
            guarded.enter_context(self._copy_slots[0].inside(self.guards, owners))
            with reaching(ring.uuid):
                self.copier.enqueue(self.steps.early, ring.pack)
                driver.record(ring.packed[0], ring.pack)
                # A stop waits for this, because copies within one card always end.
                while not driver.reached(ring.packed[0]):
                    yield False
        if self.cause is not None:
            raise self.cause

    # ---- groups -------------------------------------------------------------------------------

    def _check(self, comm: Communicator) -> bool:
        """Whether NCCL is done with its last call. Raises what has gone wrong."""
        if self.cause is not None:
            raise self.cause
        return comm.ready()

    def _issue(self, comm: Communicator, number: int, step: LaunchStep) -> Task[None]:
        ring, driver, slot = self.ring, self.ring.driver, number % DEPTH
        self._check(comm)
        guarded = ExitStack()
        guarded.enter_context(self._copy_slots[slot].inside(self.guards, step.group.owners))
        self._flight.append((number, step, guarded, 0 if trace.active is None else time.monotonic_ns()))
        # ``done`` events come in the order of the groups, so a younger one stands for those whose events are reused.
        after = max(step.group.after, number - DEPTH)
        if after >= 0:
            driver.wait(ring.pack, ring.done[after % DEPTH])
        if step.pack is not None:
            self.copier.enqueue(step.pack, ring.pack)
        driver.record(ring.packed[slot], ring.pack)
        driver.wait(ring.wire, ring.packed[slot])
        if step.sends or step.receives:
            self._group(comm, step)
            while not self._check(comm):
                yield False
        driver.record(ring.wired[slot], ring.wire)
        driver.wait(ring.unpack, ring.wired[slot])
        if step.unpack is not None:
            self.copier.enqueue(step.unpack, ring.unpack)
        for one in step.makes:
            one.enqueue(ring, self.copier)
        driver.record(ring.done[slot], ring.unpack)

    def _group(self, comm: Communicator, step: LaunchStep) -> None:
        nccl, wire = comm.nccl, self.ring.wire
        nccl.group_start()
        try:
            for rank, address, nbytes in step.sends:
                nccl.send(comm.handle, address, nbytes, rank, wire)
            for rank, address, nbytes in step.receives:
                nccl.receive(comm.handle, address, nbytes, rank, wire)
        finally:
            nccl.group_end(comm.handle)

    def _landed(self, comm: Communicator) -> bool:
        """Release the oldest group if the device has passed it."""
        number, step, guarded, begun = self._flight[0]
        if not self.ring.driver.reached(self.ring.done[number % DEPTH]):
            self._check(comm)
            return False
        observer = self.steps.program.observer
        if observer is not None:
            for one in step.makes:
                one.tell(observer)
        self._flight.popleft()
        guarded.close()
        for messages, sent in ((step.group.sends, True), (step.group.receives, False)):
            for message in messages:
                nbytes = message.span.nbytes
                self._count(message.peer, nbytes if sent else 0, 0 if sent else nbytes)
        self.done += step.group.nbytes
        if (tracer := trace.active) is not None:
            key, seq = self._label
            about = {"key": key.hex(), "seq": seq, "group": number, "bytes": step.group.nbytes}
            tracer.span("nccl", "group", begun, time.monotonic_ns(), about)
        now = time.monotonic()
        if self._progress is not None and now - self._progress_at >= PROGRESS_EVERY:
            self._progress_at = now
            self._progress(self.done)
        return True

    # ---- the end ------------------------------------------------------------------------------

    def _abort(self, comm: Communicator, error: BaseException) -> Task[None]:
        comm.abort(error)
        ring, driver = self.ring, self.ring.driver
        until = time.monotonic() + ABORTING
        try:
            for event, stream in zip(ring.done, (ring.pack, ring.wire, ring.unpack), strict=True):
                driver.record(event, stream)
            while not all(map(driver.reached, ring.done)):
                if time.monotonic() >= until:
                    raise QuiesceTimeout(
                        f"NCCL between {', '.join(comm.members)} was aborted ({error}), and the device was not done "
                        f"{ABORTING:g} s later: restart this agent before its workers' memory is used again",
                        quiesced=False,
                    ) from error
                yield False
        except DeviceError as lost:
            if not lost.sticky:  # a lost context runs nothing any more
                raise
        while self._flight:
            self._flight.popleft()[2].close()
