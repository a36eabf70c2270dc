"""The groups of a program with addresses, and its copies as launches; made once, used by every transfer.

They refer to one ring's memory. ``generation`` says whether that memory is still the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from etha.memory.views import View
from etha.plan.proof.simulate import combine, finish
from etha.transport.copy.device import Copier, Launch
from etha.transport.copy.device_memory import PinnedMemory, reaching
from etha.transport.copy.device_warmup import kinds, rehearse
from etha.transport.geometry.iovec import Op
from etha.transport.nccl.schedule import Message, MessageGroup, NcclSchedule
from etha.transport.nccl.staging_ring import GIVEN, VALUE, StagingRing
from etha.transport.nccl.thread import Task
from etha.transport.wire.crossings import ALIGN, SlotPart
from etha.transport.wire.flows import End, FlowObserver, FlowPiece, PartWork, WireProgram
from etha.transport.wire.nccl_messages import DEPTH

#: (rank, address, bytes) of one send or receive.
Operation = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReductionLaunch:
    """How a part is reduced. ``far`` are addresses of contributions, by index; ``near`` launches fetch the others to
    GIVEN.

    ``shown`` is host memory to which contributions and value are copied for the observer, which sees them later.
    """

    part: SlotPart
    work: PartWork
    far: Mapping[int, int]
    near: Mapping[int, Launch]
    value: int
    results: Launch | None
    shown: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """Bytes of one contribution's place in ``shown``."""
        return -(-self.part.numel * self.work.source.itemsize // ALIGN) * ALIGN

    @property
    def shows(self) -> int:
        """Bytes of ``shown``."""
        value = -(-self.part.numel * self.work.wire.itemsize // ALIGN) * ALIGN
        return self.part.slot.count * self.width + value

    def tell(self, observer: FlowObserver) -> None:
        """Show the observer what was reduced, once the device has passed it."""
        if self.shown is None:
            return
        part, source, wire = self.part, self.work.source, self.work.wire
        for index in range(part.slot.count):
            at = index * self.width
            observer.given(part, index, self.shown[at : at + part.numel * source.itemsize].view(source))
        at = part.slot.count * self.width
        observer.value(part, self.shown[at : at + part.numel * wire.itemsize].view(wire))

    def _show(self, ring: StagingRing, place: int, address: int, nbytes: int) -> None:
        if self.shown is not None:
            ring.driver.copy(self.shown.data_ptr() + place * self.width, address, nbytes, ring.unpack)

    def enqueue(self, ring: StagingRing, copier: Copier) -> None:
        """Queue it on the unpack stream, with the arithmetic of ``etha.plan.proof.simulate``: in index order, rounded
        once."""
        numel, source = self.part.numel, self.work.source
        totals: list[torch.Tensor] = []
        for index in range(self.part.slot.count):
            address = self.far.get(index)
            if address is None:
                copier.enqueue(self.near[index], ring.unpack)
                address = ring.address(GIVEN)
            self._show(ring, index, address, numel * source.itemsize)
            self._queue(ring, partial(self._add, ring, totals, address, numel * source.itemsize))
        self._queue(ring, partial(self._finish, ring, totals))
        self._show(ring, self.part.slot.count, self.value, numel * self.work.wire.itemsize)
        if self.results is not None:
            copier.enqueue(self.results, ring.unpack)

    def _queue(self, ring: StagingRing, work: Callable[[], None]) -> None:
        ring.driver.launch(ring.uuid, ring.unpack, work)

    def _add(self, ring: StagingRing, totals: list[torch.Tensor], address: int, nbytes: int) -> None:
        slot = self.part.slot
        with torch.no_grad():
            given = ring.driver.tensor(ring.uuid, address, nbytes).view(self.work.source)
            term = given.to(slot.accumulate, copy=True)
            if slot.op == "norm":
                term = term**slot.p
            totals[:] = [combine(totals[0], term, slot) if totals else term]

    def _finish(self, ring: StagingRing, totals: list[torch.Tensor]) -> None:
        wire = self.work.wire
        with torch.no_grad():
            value = finish(totals[0], self.part.slot).to(wire)
            room = ring.driver.tensor(ring.uuid, self.value, self.part.numel * wire.itemsize)
            room.view(wire).copy_(value)
        totals.clear()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaunchStep:
    """One group. ``pack`` fills its ring slot and ``unpack`` empties it; None if nothing goes through the slot."""

    group: MessageGroup
    sends: tuple[Operation, ...]
    receives: tuple[Operation, ...]
    pack: Launch | None
    unpack: Launch | None
    makes: tuple[ReductionLaunch, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaunchProgram:
    """All steps of a program. ``early`` must be done before anything is written."""

    program: WireProgram
    steps: tuple[LaunchStep, ...]
    early: Launch | None
    generation: int
    shown: PinnedMemory | None = None

    def release(self) -> None:
        """Free the launches' tables, once the device is done with them."""
        for launch in _launches(self.steps):
            launch.release()
        if self.early is not None:
            self.early.release()
        if self.shown is not None:
            self.shown.release()


def _launches(steps: Sequence[LaunchStep]) -> list[Launch]:
    """All launches but the early one."""
    found = [launch for step in steps for launch in (step.pack, step.unpack)]
    for one in (one for step in steps for one in step.makes):
        found += [*one.near.values(), one.results]
    return [launch for launch in found if launch is not None]


def make_steps(program: WireProgram, rounds: NcclSchedule, ring: StagingRing, copier: Copier) -> Task[LaunchProgram]:
    """Compile a program for a ring that has its memory (``provide``), a group at a time. It waits only for its own
    work."""
    maker = _Maker(program, ring, copier)
    early: list[Op] = []
    for end, stage, _ in program.early:
        assert end.view is not None
        placed = ring.placed(stage)
        early += [Op(tile, end.view, placed, offset, at) for tile, offset, at in end.steps]
    steps = []
    for number, group in enumerate(rounds.groups):
        steps.append(maker.step(number, group))
        yield True
    before = copier.compile(early) if early else None
    yield from maker.rehearse([*_launches(steps), *([before] if before else ())])
    shown = None
    most = max((sum(one.shows for one in step.makes) for step in steps), default=0)
    if program.observer is not None and most:
        # One place for each group that is in use at once. This is page-locked host memory, none of the card's.
        shown = PinnedMemory(ring.driver, ring.uuid, DEPTH * most)
        steps = [_witnessed(step, shown.flat[number % DEPTH * most :]) for number, step in enumerate(steps)]
    return LaunchProgram(
        program=program,
        steps=tuple(steps),
        early=before,
        generation=ring.generation,
        shown=shown,
    )


def _witnessed(step: LaunchStep, room: torch.Tensor) -> LaunchStep:
    makes, at = [], 0
    for one in step.makes:
        makes.append(replace(one, shown=room[at : at + one.shows]))
        at += one.shows
    return replace(step, makes=tuple(makes))


class _Maker:
    def __init__(self, program: WireProgram, ring: StagingRing, copier: Copier) -> None:
        self._program, self._ring, self._copier = program, ring, copier
        self._ranks = {name: rank for rank, name in enumerate(program.members)}

    def step(self, number: int, group: MessageGroup) -> LaunchStep:
        """A group's addresses and launches."""
        slot = self._ring.slot(number)
        packs = [op for m in group.sends if m.at >= 0 for op in self._pack(m, slot + m.at)]
        unpacks = [op for m in group.receives if m.at >= 0 for op in self._unpack(m, slot + m.at)]
        return LaunchStep(
            group=group,
            sends=tuple(self._operation(m, slot) for m in group.sends),
            receives=tuple(self._operation(m, slot) for m in group.receives),
            pack=self._copier.compile(packs) if packs else None,
            unpack=self._copier.compile(unpacks) if unpacks else None,
            makes=tuple(map(self._reduction, group.makes)),
        )

    def rehearse(self, launches: Sequence[Launch]) -> Task[None]:
        """Launch each kind of copy once, make each kind of reduction once with arbitrary data, and wait until all is
        done.

        Afterwards kernels are loaded, and torch has the memory that it needs. Both may wait for the device. Later that
        could mean waiting for another host, and then nobody here could abort it.
        """
        rehearse(self._copier, kinds(launches))
        with reaching(self._ring.uuid):
            self._reductions()
            driver, event = self._ring.driver, self._ring.done[0]
            driver.record(event, self._ring.unpack)
            while not driver.reached(event):
                yield False

    def _reductions(self) -> None:
        ring, seen = self._ring, set[object]()
        for part in self._program.parts:
            work, slot = self._program.values[part.number], part.slot
            kind = (part.numel, work.source, work.wire, slot.accumulate, slot.op)
            if kind not in seen:
                seen.add(kind)
                given = ring.address(GIVEN)
                far = dict.fromkeys(range(slot.count), given)
                value = ring.address(VALUE)
                one = ReductionLaunch(part=part, work=work, far=far, near={}, value=value, results=None)
                one.enqueue(ring, self._copier)

    def _operation(self, message: Message, slot: int) -> Operation:
        span = message.span
        if message.at >= 0:
            address = slot + message.at
        elif span.address:
            address = span.address
        else:
            part = span.parts[0]
            address = self._room(part, part.far.index(span.index))
        return self._ranks[message.peer], address, span.wire

    def _room(self, part: SlotPart, place: int) -> int:
        return self._ring.slab(part.wave) + part.places[place]

    def _pack(self, message: Message, base: int) -> list[Op]:
        ops = []
        for place, piece in message.span.pieces:
            end = piece.ends[0]
            source = self._value(piece) if end.view is None else self._ring.placed(end.view)
            dense = self._dense(piece, base + place)
            ops += [Op(tile, source, dense, offset, at) for tile, offset, at in end.steps]
        return ops

    def _unpack(self, message: Message, base: int) -> list[Op]:
        ops = []
        for place, piece in message.span.pieces:
            dense = self._dense(piece, base + place)
            for end in piece.ends:
                assert end.view is not None, "a target that lies nowhere"
                ops += [Op(tile, dense, end.view, at, offset) for tile, offset, at in end.steps]
        return ops

    def _dense(self, piece: FlowPiece, address: int) -> View:
        return self._ring.view(address, (piece.nbytes // piece.dtype.itemsize,), piece.dtype)

    def _value(self, piece: FlowPiece) -> View:
        part = piece.part
        assert part is not None, "a piece without a source"
        return self._ring.view(self._room(part, len(part.far)), (part.numel,), piece.dtype)

    def _reduction(self, part: SlotPart) -> ReductionLaunch:
        work, ring = self._program.values[part.number], self._ring
        value = self._room(part, len(part.far)) if work.sends else ring.address(VALUE)
        into = ring.view(ring.address(GIVEN), (part.numel,), work.source)
        made = ring.view(value, (part.numel,), work.wire)
        results = [
            Op(tile, made, end.view, at, offset) for end in work.results if end.view for tile, offset, at in end.steps
        ]
        return ReductionLaunch(
            part=part,
            work=work,
            far={index: self._room(part, place) for place, index in enumerate(part.far)},
            near={index: self._copier.compile(self._near(end, into)) for index, end in work.near.items()},
            value=value,
            results=self._copier.compile(results) if results else None,
        )

    def _near(self, end: End, into: View) -> list[Op]:
        assert end.view is not None, "a contribution that lies nowhere"
        source = self._ring.placed(end.view)
        return [Op(tile, source, into, offset, at) for tile, offset, at in end.steps]
