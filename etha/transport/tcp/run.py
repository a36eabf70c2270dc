"""One run of a wire program over TCP, and what its streams' threads share: the first error, reductions, progress.

    begin(stream) .. end(stream) around a stream's part;  fail(cause) closes the streams of the run
    admit(part) -> receive contributions -> arrived(part) -> value(part) -> send results -> sent(part)
    receive -> laid(numbers) -> await_laid(numbers) -> forward
    room_in_ring(places) -> receive -> came(places) -> carried(places) -> hand on -> went(places)

``over`` is set on the event loop once no thread touches the run's memory any more, however the run ended.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from etha.errors import TransferError
from etha.memory.revocation import Guard
from etha.memory.views import View
from etha.plan.proof.simulate import combine, finish
from etha.transport.arrival import ArrivingVersion
from etha.transport.base import Progress
from etha.transport.copy.program import Member
from etha.transport.copy.staging import Budget, CopySlot, CopySlots, StagingChunk, dense_view
from etha.transport.geometry.iovec import Op
from etha.transport.loan import Lender, Loan
from etha.transport.rate_limit import RateLimit
from etha.transport.wire.carrying import RingPlace, RingProgress
from etha.transport.wire.crossings import SlotPart
from etha.transport.wire.differences import BaseVersion
from etha.transport.wire.flows import Span, WireProgram
from etha.transport.wire.forwarding import ForwardingProgress

#: Why a run fails that passes a version on.
NOT_COME = "the version that was passed on has not come as a whole"
#: Most carried pieces of one system call; Linux takes 1,024.
MOST_PARTS = 512
#: Least seconds between two progress callbacks of one run.
PROGRESS_EVERY = 0.1


class Shuttable(Protocol):
    """A stream, as far as its shutdown is concerned."""

    def shut(self) -> None:
        """Wake its thread for the last time. Idempotent; returns at once."""
        ...


class Ended(Exception):
    """The run has failed elsewhere, so this thread has no error of its own to report."""


class _State:
    """State of a part in this run: how many contributions are missing, and whether its value is made."""

    __slots__ = ("begun", "missing", "ready")

    def __init__(self, missing: int) -> None:
        self.missing = missing
        self.begun = self.ready = False


class TcpRun:
    """See the module. ``label`` is (key, seq), by which the other ends name this run."""

    def __init__(
        self,
        program: WireProgram,
        guards: Mapping[Member, Guard],
        label: tuple[bytes, int],
        *,
        copy_slots: CopySlots,
        budget: Budget,
        slabs: Sequence[StagingChunk],
        bases: Mapping[str, BaseVersion],
        held: int,
        on_progress: Progress | None,
        on_fail: Callable[[], None],
        limit: RateLimit | None = None,
        arriving: ArrivingVersion | None = None,
        passed: ArrivingVersion | None = None,
        resumed: frozenset[str] = frozenset(),
        lender: Lender | None = None,
    ) -> None:
        #: Who lends streams to workers.
        self.lender = lender
        self.program, self.guards, self.label = program, guards, label
        #: How fast this agent may send.
        self.limit = limit
        #: What is told of all that comes, and what is sent while it is still arriving here.
        self.arriving, self.passed = arriving, passed
        #: The agents that are asked what they have of it, before any of it is sent. Not about what is reduced here.
        self.resumed = frozenset[str]() if program.parts else resumed
        self.error: BaseException | None = None
        #: Versions with which what is sent is compared, by the agent that holds them; and the one that is held here.
        self.bases, self.held = bases, held
        #: Whether targets may have been written, and bytes that have come over the wire.
        self.touched, self.wired = False, 0
        self.loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self.loop.create_future()
        self._copy_slots, self._budget, self.slabs = copy_slots, budget, slabs
        self._on_progress, self._on_fail = on_progress, on_fail
        self._changed = threading.Condition(threading.Lock())
        self._streams: set[Shuttable] = set()
        self._planned = sum(len(f.lanes) for flows in (program.sends, program.receives) for f in flows.values())
        self._ended = self.done = 0
        self._finished = False
        self._progress_at = 0.0
        self._ledger = ForwardingProgress()
        self._ring = RingProgress()
        self._states = {p.number: _State(len(p.far)) for p in program.parts}
        #: For each wave, values to make and results to send. The wave is over when none is left.
        self._left: dict[int, int] = defaultdict(int)
        #: Parts of slots for which nothing comes over the wire and nothing is sent; nobody waits for them.
        self._own = [p for p in program.parts if not p.far and not program.values[p.number].sends]
        for part in program.parts:
            self._left[part.wave] += 0 if part in self._own else 1 + program.values[part.number].sends
        self._wave = 0
        self._pass_waves()
        if passed is not None:
            passed.listen(self.wake)

    # ---- life ---------------------------------------------------------------------------------

    def begin(self, stream: Shuttable) -> bool:
        """Add a stream whose thread takes part from now on. False if the run is over already."""
        with self._changed:
            if self.error is not None or self._finished:
                return False
            self._streams.add(stream)
            return True

    def end(self, stream: Shuttable, error: BaseException | None = None) -> None:
        """End the stream's part; its thread touches nothing of the run any more."""
        if error is not None:
            self.fail(error)
        with self._changed:
            self._streams.discard(stream)
            self._ended += error is None
            self._settle()

    def fail(self, cause: BaseException) -> None:
        """End the run with ``cause`` unless it has ended; wakes all of its threads. Returns at once."""
        with self._changed:
            if self.error is not None or self._finished:
                return
            self.error = cause
            self._changed.notify_all()
            streams = list(self._streams)
        for stream in streams:
            stream.shut()
        self._on_fail()
        with self._changed:
            self._settle()

    def _settle(self) -> None:
        whole = self._ended == self._planned
        if self._finished or self._streams or not (whole or self.error is not None):
            return
        self._finished = True
        self._call(self._set_over)

    def _set_over(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def _call(self, callback: Callable[..., None], *args: int) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(callback, *args)

    def moved(self, nbytes: int, wired: int = 0) -> None:
        """Count payload, sent or received, and report progress at most ten times a second. ``wired``: bytes that have
        come over the wire for it."""
        with self._changed:
            self.done += nbytes
            self.wired += wired
            now = time.monotonic()
            if self._on_progress is not None and now - self._progress_at >= PROGRESS_EVERY:
                self._progress_at = now
                self._call(self._on_progress, self.done)

    @contextmanager
    def writing(self, copy_slot: CopySlot) -> Iterator[None]:
        """Wraps the copies of a copy slot into targets, and records whether they wrote anything."""
        copy_slot.work.wrote = False
        try:
            yield
        finally:
            self.touched = self.touched or copy_slot.work.wrote

    def check(self) -> None:
        """Raise ``Ended`` once the run has failed."""
        with self._changed:
            self._check()

    # ---- what is passed on --------------------------------------------------------------------

    def laid(self, numbers: Sequence[int]) -> None:
        """Record that these pieces are in place."""
        with self._changed:
            self._ledger.lay(numbers)
            self._changed.notify_all()

    def await_laid(self, numbers: Sequence[int]) -> None:
        """Wait until all of these pieces are in place."""
        with self._changed:
            while self.error is None and not self._ledger.ready(numbers):
                self._changed.wait()
            self._check()

    # ---- what is carried ------------------------------------------------------------------------

    def room_in_ring(self, places: Sequence[RingPlace]) -> list[memoryview]:
        """Memory for the first of these pieces that this agent carries, to receive them. Waits for the first one's."""
        return self._in_ring(places, self._ring.free)

    def came(self, places: Iterable[RingPlace]) -> None:
        """Record that carried pieces are in the ring."""
        with self._changed:
            self._ring.came(places)
            self._changed.notify_all()

    def carried(self, places: Sequence[RingPlace]) -> list[memoryview]:
        """The memory of the first of these pieces, to hand them on. Waits until the first one has come."""
        return self._in_ring(places, self._ring.ready)

    def went(self, places: Iterable[RingPlace]) -> None:
        """Record that carried pieces have been handed on, and their memory is free."""
        with self._changed:
            if self._ring.went(places):
                self._changed.notify_all()

    def _in_ring(self, places: Sequence[RingPlace], may: Callable[[RingPlace], bool]) -> list[memoryview]:
        with self._changed:
            while self.error is None and not may(places[0]):
                self._changed.wait()
            self._check()
            found = list(itertools.takewhile(may, places[:MOST_PARTS]))
        memory = self.slabs[2].reserve(self.program.ring)
        return [memory[place.at : place.at + place.nbytes] for place in found]

    # ---- what is still arriving ------------------------------------------------------------------

    def await_bytes(self, view: View, offset: int, least: int, most: int) -> int:
        """How many of ``most`` bytes of a tensor may be sent now. Waits until ``least`` have come."""
        if self.passed is None:
            return most
        with self._changed:
            while (found := self.passed.ready(view, offset, most)) < least:
                self._check_passed(self.passed)
                self._changed.wait()
        return found

    def await_span(self, span: Span) -> None:
        """Wait until all that a packed span reads has come."""
        if self.passed is None:
            return
        with self._changed:
            while not all(self.passed.has(end) for _, piece in span.pieces for end in piece.ends[:1]):
                self._check_passed(self.passed)
                self._changed.wait()

    def _check_passed(self, passed: ArrivingVersion) -> None:
        self._check()
        if passed.lost:
            raise TransferError(NOT_COME)

    def wake(self) -> None:
        """Have those that wait look again."""
        with self._changed:
            self._changed.notify_all()

    def leave(self) -> None:
        """It is over, and hears of nothing any more."""
        if self.passed is not None:
            self.passed.ignore(self.wake)

    # ---- what workers move ---------------------------------------------------------------------

    def await_loan(self, loan: Loan) -> None:
        """Wait until more bytes of a loan have travelled, or it is over."""
        with self._changed:
            done = loan.done
            while self.error is None and not loan.over and loan.done == done:
                self._changed.wait()
            self._check()

    # ---- the rate ------------------------------------------------------------------------------

    def room_to_send(self, most: int) -> int:
        """How many of ``most`` bytes may be sent now. Waits until some may."""
        if self.limit is None:
            return most
        with self._changed:
            while self.error is None and (left := self.limit.delay()) > 0:
                self._changed.wait(left)
            self._check()
        return min(most, self.limit.quantum)

    def spend(self, nbytes: int) -> None:
        """So many bytes were sent."""
        if self.limit is not None:
            self.limit.spend(nbytes)

    # ---- reductions ---------------------------------------------------------------------------

    def admit(self, part: SlotPart) -> None:
        """Wait until the part's wave has its memory, that is, until all waves but the one before it are over."""
        with self._changed:
            while self.error is None and part.wave > self._wave + 1:
                self._changed.wait()
            self._check()

    def room(self, part: SlotPart, place: int, nbytes: int) -> torch.Tensor:
        """The bytes of the part's memory at ``part.places[place]``."""
        at = part.places[place]
        return self.slabs[part.wave % 2].flat[at : at + nbytes]

    def arrived(self, part: SlotPart) -> None:
        """Record that a contribution is in place. The thread that brings the last one reduces the part."""
        state = self._states[part.number]
        with self._changed:
            state.missing -= 1
            last = state.missing == 0
            state.begun = state.begun or last
        if last:
            self._make(part)

    def value(self, part: SlotPart) -> torch.Tensor:
        """The part's value, flat. Waits for it, or makes it if no contribution comes over the wire."""
        state = self._states[part.number]
        self.admit(part)
        with self._changed:
            mine = not state.begun and state.missing == 0
            state.begun = state.begun or mine
        if mine:
            self._make(part)
        with self._changed:
            while self.error is None and not state.ready:
                self._changed.wait()
            self._check()
        return self._result(part)

    def rest(self) -> None:
        """Make the parts that no stream waits for, once all streams are done. A failure fails the run."""
        try:
            for part in self._own:
                self._make(part)
        except Exception as error:
            self.error = self.error or error

    def sent(self, part: SlotPart) -> None:
        """Record that one of the part's results has been sent, so that its value is needed once less."""
        with self._changed:
            self._release(part)

    def _result(self, part: SlotPart) -> torch.Tensor:
        wire = self.program.values[part.number].wire
        return self.room(part, len(part.far), part.numel * wire.itemsize).view(wire)

    def _make(self, part: SlotPart) -> None:
        with self._copy_slots.one() as copy_slot:
            work = self.program.values[part.number]
            with copy_slot.inside(self.guards, work.owners):
                self._budget.take(self.program.scratch)
                try:
                    self._reduce(part, copy_slot)
                finally:
                    self._budget.take(-self.program.scratch)
        with self._changed:
            self._states[part.number].ready = True
            if part not in self._own:
                self._release(part)
            self._changed.notify_all()

    def _reduce(self, part: SlotPart, copy_slot: CopySlot) -> None:
        """Reduce as ``etha.plan.proof.simulate`` does: contributions in index order, rounded once. Then write every
        target here."""
        slot, work = part.slot, self.program.values[part.number]
        places = {index: place for place, index in enumerate(part.far)}
        total: torch.Tensor | None = None
        observer = self.program.observer
        with torch.no_grad():
            for index in range(slot.count):
                if index in places:
                    given = self.room(part, places[index], part.numel * work.source.itemsize).view(work.source)
                else:
                    given = torch.empty(part.numel, dtype=work.source)
                    end, dense = work.near[index], dense_view(given)
                    assert end.view is not None, "a contribution that lies nowhere"
                    copy_slot.run([Op(tile, end.view, dense, offset, at) for tile, offset, at in end.steps])
                if observer is not None:
                    observer.given(part, index, given)
                term = given.to(slot.accumulate, copy=True)
                if slot.op == "norm":
                    term = term**slot.p
                total = term if total is None else combine(total, term, slot)
            assert total is not None, "a slot without contributions"
            value = finish(total, slot).to(work.wire)
            if observer is not None:
                observer.value(part, value)
        if work.sends:
            self._result(part).copy_(value)
        done = dense_view(value)
        with self.writing(copy_slot):
            copy_slot.run(
                [Op(t, done, e.view, at, offset) for e in work.results if e.view for t, offset, at in e.steps]
            )

    def _release(self, part: SlotPart) -> None:
        self._left[part.wave] -= 1
        self._pass_waves()
        self._changed.notify_all()

    def _pass_waves(self) -> None:
        while self._left.get(self._wave) == 0:
            self._wave += 1

    @property
    def unfinished(self) -> bool:
        """Whether ``rest`` has something to do."""
        return bool(self._own) and self.error is None

    def _check(self) -> None:
        if self.error is not None:
            raise Ended
