"""Runs all ranks' programs step by step in any order and fails on whatever a schedule may never do.

Every byte remembers in vector clocks who wrote it when, and who read it. A POST publishes what a rank has done, and a
WAIT learns it. So an access that nothing orders after another rank's is found in every order of the steps, not only in
the order in which it does harm. Values are symbolic: the result of a reduction depends on the order of its sources.

What a rank of another host reads of a window is a mirror of it. The bytes of a SEND are taken out of the window or
tensor as late as they can be, when the receiver learns of the phase that follows them or the sender's FLUSH ends, but
may arrive at once: both must do no harm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from etha.groups.schedule import (
    COMBINE,
    COPY,
    FLUSH,
    GROUPED,
    MATCH,
    PARTIAL,
    POST,
    SEND,
    WAIT,
    CallProgram,
    CallShape,
    CallStep,
    Kind,
    Spaces,
    Variant,
    match_program,
    program,
    sums_per_host,
)
from etha.native.structs import ALL

Ints = NDArray[np.int64]

#: Kinds whose outputs are their inputs.
IN_ONE_TENSOR = frozenset((Kind.ALLREDUCE, Kind.REDUCE, Kind.BROADCAST))
#: What a member's user has put into its tensors after the call.
OVERWRITTEN = -1


class ScheduleViolation(Exception):
    """A program did what no program may do; the text says which rank, call and step."""


# ---- calls ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCall:
    """One call of all ranks: its shapes and the programs that each rank runs one after the other."""

    shapes: tuple[CallShape, ...]
    programs: tuple[tuple[CallProgram, ...], ...]
    window_bytes: int
    hosts: tuple[int, ...] = ()  #: the number of each rank's host; () if all are on one

    @classmethod
    def of(
        cls, shapes: tuple[CallShape, ...], variant: Variant, window_bytes: int, hosts: tuple[int, ...] = ()
    ) -> SimulatedCall:
        size = len(shapes)
        before = () if variant is Variant.SMALL else (match_program(size),)
        programs = tuple(
            (*before, program(shape, rank=rank, size=size, window_bytes=window_bytes, variant=variant, hosts=hosts))
            for rank, shape in enumerate(shapes)
        )
        return cls(shapes=shapes, programs=programs, window_bytes=window_bytes, hosts=hosts)

    @property
    def kind(self) -> Kind:
        return self.shapes[0].kind


def shapes_of_all(
    kind: Kind,
    size: int,
    *,
    itemsize: int = 1,
    counts: tuple[int, ...] = (),
    root: int = -1,
    matrix: tuple[tuple[int, ...], ...] | None = None,
    partial: int = 0,
) -> tuple[CallShape, ...]:
    """The shapes of one call on all ranks. `counts`: ALLREDUCE, REDUCE, BROADCAST: of each tensor; ALLGATHER,
    REDUCE_SCATTER: [t * size + r] of tensor t of rank r; GATHER, SCATTER: one number, the elements of a piece."""

    def shape(rank: int) -> CallShape:
        inputs, outputs = counts, counts
        if kind is Kind.ALLGATHER:
            inputs = counts[rank::size]
        elif kind is Kind.REDUCE_SCATTER:
            outputs = counts[rank::size]
        elif kind is Kind.ALLTOALL:
            assert matrix is not None
            inputs, outputs = matrix[rank], tuple(row[rank] for row in matrix)
        elif kind is Kind.GATHER:
            outputs = counts * size if rank == root else ()
        elif kind is Kind.SCATTER:
            inputs = counts * size if rank == root else ()
        return CallShape(
            kind=kind, itemsize=itemsize, inputs=inputs, outputs=outputs, root=root, matrix=matrix, partial=partial
        )

    return tuple(shape(rank) for rank in range(size))


# ---- the reference ----------------------------------------------------------------------------


def input_bytes(call: int, rank: int, tensor: int, length: int) -> Ints:
    """The bytes of one input: no other byte of any call has the same value."""
    start = ((call * 64 + rank) * 4096 + tensor + 1) << 24
    return np.arange(start, start + length, dtype=np.int64)


def accumulate(sources: Iterable[Ints]) -> Ints:
    """A reduction that shows the order of its sources and how many there were."""
    total: Ints | None = None
    for source in sources:
        total = source * 3 if total is None else total * 1_000_003 + source
    assert total is not None
    return total


def widen(data: Ints, itemsize: int, partial: int) -> Ints:
    """A host's sum: elements of `itemsize` bytes become longer ones. The bytes behind follow from the first."""
    elements = data.reshape(-1, itemsize)
    columns = [elements[:, i % itemsize] + i // itemsize for i in range(partial)]
    return np.stack(columns, axis=1).reshape(-1)


def narrow(data: Ints, itemsize: int, partial: int) -> Ints | None:
    """What `widen` made longer; None for anything else."""
    found: Ints = data.reshape(-1, partial)[:, :itemsize].reshape(-1)
    return found if np.array_equal(widen(found, itemsize, partial), data) else None


def reference(number: int, call: SimulatedCall, rank: int) -> list[Ints]:
    """What the outputs of a rank hold after the call, straight from the meaning of each kind."""
    size, shape = len(call.shapes), call.shapes[rank]

    def given(r: int, tensor: int) -> Ints:
        return input_bytes(number, r, tensor, call.shapes[r].inputs[tensor] * shape.itemsize)

    def reduced(tensor: int) -> Ints:
        if not sums_per_host(shape, call.hosts):
            return accumulate(given(r, tensor) for r in range(size))
        sums = [
            accumulate(given(r, tensor) for r in range(size) if call.hosts[r] == host)
            for host in dict.fromkeys(call.hosts)
        ]
        return accumulate(sums)

    outputs, root = range(len(shape.outputs)), shape.root
    match shape.kind:
        case Kind.ALLREDUCE:
            return [reduced(i) for i in outputs]
        case Kind.REDUCE:
            return [reduced(i) if rank == root else given(rank, i) for i in outputs]
        case Kind.BROADCAST:
            return [given(root, i) for i in outputs]
        case Kind.ALLGATHER:
            return [given(i % size, i // size) for i in outputs]
        case Kind.REDUCE_SCATTER:
            return [reduced(i * size + rank) for i in outputs]
        case Kind.ALLTOALL:
            return [given(s, rank) for s in outputs]
        case Kind.GATHER:
            return [given(s, 0) for s in outputs]
        case Kind.SCATTER:
            return [given(root, rank)]
        case _:
            return []


def _times_written(shape: CallShape, rank: int) -> int:
    """How often each byte of an output is written."""
    if shape.kind is Kind.REDUCE:
        return int(rank == shape.root)
    return int(not (shape.kind is Kind.BROADCAST and rank == shape.root))


# ---- the machine ------------------------------------------------------------------------------


class _Operation(NamedTuple):
    """What a rank does next: a step, or the begin or the end of a call."""

    call: int
    step: CallStep | None = None
    spaces: Spaces | None = None
    phase_base: int = 0
    round_base: int = 0
    ends: bool = False  # phase_base: what every rank has posted by then


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sending:
    """Bytes on their way: the phase that follows them, where they lie, mirror and round; `taken` by a FLUSH."""

    phase: int
    source: int
    mirror: int
    length: int
    round: int
    in_tensor: bool
    taken: tuple[int, ...] | None = None


class Simulation:
    """All ranks in the middle of a row of calls. `step(rank)` lets one of them go on; `copy()` keeps a state."""

    def __init__(self, calls: list[SimulatedCall]) -> None:
        self.calls = calls
        self.size = len(calls[0].shapes)
        self.hosts = calls[0].hosts or (0,) * self.size
        self.regions: dict[tuple[Any, ...], tuple[int, int]] = {}
        self.operations = [list(self._operations_of(rank)) for rank in range(self.size)]
        total = self._lay_out()
        size = self.size
        self.position = [0] * size
        self.posted = [0] * size
        self.gave_up: list[int | None] = [None] * size
        self.matched = [-1] * size  # the last call of which a rank has compared the descriptors
        self.tainted: set[tuple[int, int]] = set()  # (rank, call) that read what its owner's user had back
        self.published: dict[tuple[int, int], Ints] = {}  # (rank, phase): the clock that the post published
        #: What is on its way, by (sender, receiver).
        self.sent: dict[tuple[int, int], tuple[_Sending, ...]] = {}
        self.clock = np.zeros((size, size), dtype=np.int64)
        self.value = np.full(total, OVERWRITTEN, dtype=np.int64)
        self.writer = np.zeros(total, dtype=np.int64)
        self.written_at = np.zeros(total, dtype=np.int64)
        self.read_at = np.zeros((size, total), dtype=np.int64)
        self.round_of = np.full(total, -1, dtype=np.int64)
        self.writes = np.zeros(total, dtype=np.int64)
        self.given_back = np.zeros(total, dtype=np.bool_)

    def _operations_of(self, rank: int) -> Iterator[_Operation]:
        phase = rounds = 0
        for number, call in enumerate(self.calls):
            yield _Operation(number)
            for k, own in enumerate(call.programs[rank]):
                for other in call.programs:
                    if (other[k].phases, other[k].rounds) != (own.phases, own.rounds):
                        raise ScheduleViolation(f"call {number}: ranks differ in their phases or rounds")
                for step in own.steps:
                    yield _Operation(number, step, own.spaces, phase, rounds)
                phase += own.phases
                rounds += own.rounds
            yield _Operation(number, phase_base=phase, ends=True)

    def _lay_out(self) -> int:
        """Give every window, tensor and descriptor a place in the flat memory; tensors of each call are fresh."""
        window = max(call.window_bytes for call in self.calls)
        total = 0

        def add(length: int, *key: Any) -> None:
            nonlocal total
            self.regions[key] = (total, length)
            total += length

        for rank in range(self.size):
            for half in range(2):
                add(window, "window", rank, half)
                for other in range(self.size):
                    if self.hosts[other] != self.hosts[rank]:
                        add(window, "mirror", other, rank, half)  # in the memory of the other one
                add(1, "descriptor", rank, half)
            for number, call in enumerate(self.calls):
                shape = call.shapes[rank]
                for i, count in enumerate(shape.inputs):
                    add(count * shape.itemsize, "input", number, rank, i)
                for i, count in enumerate(shape.outputs):
                    if shape.kind in IN_ONE_TENSOR:
                        self.regions["output", number, rank, i] = self.regions["input", number, rank, i]
                    else:
                        add(count * shape.itemsize, "output", number, rank, i)
        return total

    def copy(self) -> Simulation:
        other = object.__new__(Simulation)
        other.calls, other.size, other.regions, other.operations = self.calls, self.size, self.regions, self.operations
        other.hosts, other.sent = self.hosts, dict(self.sent)
        other.position, other.posted, other.gave_up = self.position[:], self.posted[:], self.gave_up[:]
        other.matched, other.tainted, other.published = self.matched[:], set(self.tainted), dict(self.published)
        for name in ("clock", "value", "writer", "written_at", "read_at", "round_of", "writes", "given_back"):
            setattr(other, name, getattr(self, name).copy())
        return other

    def key(self) -> tuple[Any, ...]:
        """Equal for two states from which the same can follow."""
        return (*self.position, *self.gave_up, *sorted(self.tainted), self.value.tobytes())

    # -- who can go on

    def ended(self, rank: int) -> bool:
        return self.gave_up[rank] is not None or self.position[rank] == len(self.operations[rank])

    def ready(self) -> list[int]:
        """The ranks that can do something. Empty before all have ended: they wait for each other for ever."""
        found = [rank for rank in range(self.size) if not self.ended(rank) and not self._blocked(rank)]
        if not found and not all(self.ended(rank) for rank in range(self.size)):
            raise ScheduleViolation(f"everybody waits: {', '.join(self._where(r) for r in range(self.size))}")
        return found

    def _targets(self, rank: int, step: CallStep) -> list[int]:
        return [k for k in range(self.size) if k != rank] if step.src_space == ALL else [step.src_space]

    def _missing(self, rank: int) -> list[int]:
        """Whom the rank still waits for."""
        now = self.operations[rank][self.position[rank]]
        if now.step is None or now.step.kind != WAIT:
            return []
        return [k for k in self._targets(rank, now.step) if self.posted[k] < now.phase_base + now.step.amount]

    def _blocked(self, rank: int) -> bool:
        call = self.operations[rank][self.position[rank]].call
        missing = self._missing(rank)
        return bool(missing) and not any(self._gave_up_before(k, call) for k in missing)

    def _gave_up_before(self, rank: int, call: int) -> bool:
        gave_up = self.gave_up[rank]
        return gave_up is not None and gave_up <= call

    # -- going on

    def step(self, rank: int) -> None:
        """Let a rank that is ready do its next operation."""
        now = self.operations[rank][self.position[rank]]
        self.clock[rank, rank] += 1
        if self._missing(rank) or (now.ends and any(self._gave_up_before(k, now.call) for k in range(self.size))):
            self.give_up(rank)
            return
        if now.step is not None:
            self._run(rank, now, now.step)
        elif now.ends:
            self._end(rank, now.call, now.phase_base)
        else:
            self._begin(rank, now.call)
        self.position[rank] += 1

    def give_up(self, rank: int) -> None:
        """A rank takes no more part, from the call on in which it is. Its user gets the tensors back."""
        call = self.operations[rank][self.position[rank]].call
        self.gave_up[rank] = call
        if self.operations[rank][self.position[rank]] != _Operation(call):
            for start, length in self._tensors(rank, call):
                self.value[start : start + length] = OVERWRITTEN
                self.given_back[start : start + length] = True

    def run(self, choices: Iterator[int]) -> None:
        """Go on to the end; each choice, modulo, says which of the ready ranks goes next."""
        while ready := self.ready():
            self.step(ready[next(choices, 0) % len(ready)])

    def _begin(self, rank: int, number: int) -> None:
        shape = self.calls[number].shapes[rank]
        for i, count in enumerate(shape.inputs):
            start, length = self.regions["input", number, rank, i]
            self._write(rank, start, input_bytes(number, rank, i, count * shape.itemsize))
            self.writes[start : start + length] = 0
        start, _ = self.regions["descriptor", rank, number % 2]
        self._write(rank, start, np.array([number], dtype=np.int64))

    def _end(self, rank: int, number: int, phase: int) -> None:
        call = self.calls[number]
        if self.posted[rank] != phase:
            self._fail(rank, f"has posted phase {self.posted[rank]} of {phase}")
        self._check_matched(rank, number)
        if (rank, number) in self.tainted:
            self._fail(rank, "succeeds with bytes of a tensor whose owner had given up")
        for i, wanted in enumerate(reference(number, call, rank)):
            start, length = self.regions["output", number, rank, i]
            if set(self.writes[start : start + length]) - {_times_written(call.shapes[rank], rank)}:
                self._fail(rank, f"bytes of output {i} are written twice or never")
            if not np.array_equal(self.value[start : start + length], wanted):
                self._fail(rank, f"output {i} is wrong")
        for start, length in self._tensors(rank, number):
            self._write(rank, start, np.full(length, OVERWRITTEN, dtype=np.int64))

    def _tensors(self, rank: int, number: int) -> list[tuple[int, int]]:
        own = [(k[0], place) for k, place in self.regions.items() if k[1:3] == (number, rank)]
        return list(dict.fromkeys(place for name, place in own if name in ("input", "output")))

    def _run(self, rank: int, now: _Operation, step: CallStep) -> None:
        if step.kind == POST:
            self._post(rank, now.phase_base + step.amount)
        elif step.kind == WAIT:
            for k in self._targets(rank, step):
                self._learn(rank, k, now.phase_base + step.amount)
        elif step.kind == SEND:
            self._send(rank, now, step)
        elif step.kind == FLUSH:
            self._flush(rank)
        elif step.kind == MATCH:
            for k in range(self.size):
                start, _ = self.regions["descriptor", k, now.call % 2]
                if self._read(rank, start, 1)[0] != now.call:
                    self._fail(rank, f"reads the descriptor of another call of rank {k}")
            self.matched[rank] = now.call
        elif step.kind == COPY:
            data = self._read(rank, *self._source(rank, now, step.src_space, step.src, step.amount))
            self._write(rank, self._target(rank, now, step.dst_space, step.dst, step.amount), data)
        elif step.sources:
            self._reduce(rank, now, step)

    def _reduce(self, rank: int, now: _Operation, step: CallStep) -> None:
        shape = self.calls[now.call].shapes[rank]
        length = step.amount * (shape.partial if step.kind == COMBINE else shape.itemsize)
        places = [self._source(rank, now, space, offset, length) for space, offset in step.sources]
        given = [self._read(rank, *place) for place in places]
        if step.kind == COMBINE:
            sums = [narrow(each, shape.itemsize, shape.partial) for each in given]
            if any(each is None for each in sums):
                self._fail(rank, "adds what is no sum of a host")
            data = accumulate(each for each in sums if each is not None)
        elif step.kind == GROUPED:
            groups = [
                [x for x, h in zip(given, step.hosts, strict=True) if h == host] for host in sorted(set(step.hosts))
            ]
            data = accumulate(map(accumulate, groups))
        else:
            data = accumulate(given)
        if step.kind == PARTIAL:
            data = widen(data, shape.itemsize, shape.partial)
        self._write(rank, self._target(rank, now, step.dst_space, step.dst, len(data)), data)

    def _post(self, rank: int, phase: int) -> None:
        if phase != self.posted[rank] + 1:
            self._fail(rank, f"posts phase {phase} after {self.posted[rank]}")
        self.posted[rank] = phase
        self.published[rank, phase] = self.clock[rank].copy()

    def _learn(self, rank: int, other: int, phase: int) -> None:
        """Acquire no more than the first post that ends the wait."""
        first = min(p for r, p in self.published if r == other and p >= phase)
        np.maximum(self.clock[rank], self.published[other, first], out=self.clock[rank])
        self._arrive(rank, other, first)

    # -- between hosts

    def _send(self, rank: int, now: _Operation, step: CallStep) -> None:
        key, own = self._region(rank, now, step.dst_space)
        source_key, source_own = self._region(rank, now, step.src_space)
        in_tensor = source_key[0] == "output"
        if not own or key[0] != "window" or not source_own:
            self._fail(rank, "sends what is no part of its own window")
        if not in_tensor and (step.src_space, step.src) != (step.dst_space, step.dst):
            self._fail(rank, "sends a part of its window as another one")
        if self.hosts[step.peer] == self.hosts[rank]:
            self._fail(rank, f"sends to rank {step.peer} of its own host")
        source, _ = self._source(rank, now, step.src_space, step.src, step.amount)
        mirror = self._place(rank, ("mirror", step.peer, rank, key[2]), step.dst, step.amount)
        if np.any(self.read_at[step.peer, mirror : mirror + step.amount] > self.clock[rank, step.peer]):
            self._fail(rank, f"sends what may arrive while rank {step.peer} is still reading what was there")
        sending = _Sending(
            phase=self.posted[rank] + 1,
            source=source,
            mirror=mirror,
            length=step.amount,
            round=step.round + now.round_base if in_tensor else -1,
            in_tensor=in_tensor,
        )
        self.sent[rank, step.peer] = (*self.sent.get((rank, step.peer), ()), sending)

    def _arrive(self, rank: int, sender: int, phase: int) -> None:
        """Take what was sent before a phase out of the sender's memory, and put it into the mirror."""
        waiting = self.sent.get((sender, rank), ())
        for each in waiting:
            if each.phase > phase:
                continue
            source, target = slice(each.source, each.source + each.length), each.mirror
            rounds = each.round if each.in_tensor else self.round_of[source]
            self.round_of[target : target + each.length] = rounds
            taken = None if each.taken is None else np.array(each.taken, dtype=np.int64)
            self._write(rank, target, self._read(rank, each.source, each.length) if taken is None else taken)
        self.sent[sender, rank] = tuple(each for each in waiting if each.phase > phase)

    def _flush(self, rank: int) -> None:
        """Take all that is still to be sent. From here on nobody reads the tensors, whoever has read them before."""
        for pair, waiting in self.sent.items():
            if pair[0] == rank:
                self.sent[pair] = tuple(
                    replace(each, taken=tuple(self.value[each.source : each.source + each.length].tolist()))
                    if each.taken is None
                    else each
                    for each in waiting
                )
        call = self.operations[rank][self.position[rank]].call
        for start, length in self._tensors(rank, call):
            read_at = self.read_at[:, start : start + length]
            np.minimum(read_at, self.clock[rank][:, None], out=read_at)

    # -- memory

    def _region(self, rank: int, now: _Operation, space: int) -> tuple[tuple[Any, ...], bool]:
        """The region of a numbered space and whether it is the rank's own."""
        assert now.spaces is not None
        name, owner, i = now.spaces.parse(space)
        if name == "window":
            half = (i + now.round_base) % 2
            if self.hosts[owner] != self.hosts[rank]:
                return ("mirror", rank, owner, half), False
            return ("window", owner, half), owner == rank
        owner = rank if owner < 0 else owner
        return (name.removeprefix("peer_"), now.call, owner, i), owner == rank

    def _place(self, rank: int, key: tuple[Any, ...], offset: int, length: int) -> int:
        if key not in self.regions:
            self._fail(rank, f"names {key}, which is not there")
        start, room = self.regions[key]
        if offset < 0 or offset + length > room:
            self._fail(rank, f"reaches {offset + length} of {room} bytes of {key}")
        return start + offset

    def _source(self, rank: int, now: _Operation, space: int, offset: int, length: int) -> tuple[int, int]:
        """Where a source begins and its length. What a window holds must be of this round."""
        assert now.step is not None
        key, own = self._region(rank, now, space)
        if not own:
            self._check_matched(rank, now.call)
        start = self._place(rank, key, offset, length)
        wanted = now.step.round + now.round_base
        if key[0] in ("window", "mirror") and np.any(self.round_of[start : start + length] != wanted):
            self._fail(rank, f"reads bytes of {key} that are not of round {wanted}")
        return start, length

    def _target(self, rank: int, now: _Operation, space: int, offset: int, length: int) -> int:
        assert now.step is not None
        key, own = self._region(rank, now, space)
        if not own or key[0] == "input":
            self._fail(rank, f"writes into {key}")
        start = self._place(rank, key, offset, length)
        if key[0] == "output":
            self._check_matched(rank, now.call)
        if key[0] == "window":
            self.round_of[start : start + length] = now.step.round + now.round_base
        return start

    def _check_matched(self, rank: int, call: int) -> None:
        if self.size > 1 and self.matched[rank] != call:
            self._fail(rank, "goes on before the descriptors are compared")

    def _read(self, rank: int, start: int, length: int) -> Ints:
        part = slice(start, start + length)
        if np.any(self.given_back[part]):
            self.tainted.add((rank, self.operations[rank][self.position[rank]].call))
        elif np.any(self.written_at[part] > self.clock[rank][self.writer[part]]):
            self._fail(rank, "reads what another rank may still be writing")
        self.read_at[rank, part] = self.clock[rank, rank]
        return self.value[part].copy()

    def _write(self, rank: int, start: int, data: Ints) -> None:
        part = slice(start, start + len(data))
        if np.any(self.read_at[:, part] > self.clock[rank][:, None]) or self._is_on_its_way(rank, start, len(data)):
            self._fail(rank, "writes what another rank may still be reading")
        if np.any(self.written_at[part] > self.clock[rank][self.writer[part]]):
            self._fail(rank, "writes what another rank may still be writing")
        self.value[part] = data
        self.writer[part] = rank
        self.written_at[part] = self.clock[rank, rank]
        self.writes[part] += 1

    def _is_on_its_way(self, rank: int, start: int, length: int) -> bool:
        """Whether a part of these bytes has been sent and may still be read by the sending."""
        for (sender, _), waiting in self.sent.items():
            if sender == rank:
                for each in waiting:
                    if each.taken is None and each.source < start + length and start < each.source + each.length:
                        return True
        return False

    def _where(self, rank: int) -> str:
        if self.ended(rank):
            return f"rank {rank} has ended"
        now = self.operations[rank][self.position[rank]]
        doing = "its end" if now.ends else "its begin" if now.step is None else str(now.step)
        return f"rank {rank} in call {now.call} ({self.calls[now.call].kind.name}) at {doing}"

    def _fail(self, rank: int, text: str) -> None:
        raise ScheduleViolation(f"{self._where(rank)}: {text}")


# ---- every order ------------------------------------------------------------------------------


def walk(calls: list[SimulatedCall], *, stops: int = 0) -> int:
    """Every order of all ranks' steps, in which up to `stops` ranks give up anywhere. Returns the number of states."""
    first = Simulation(calls)
    seen = {(*first.key(), stops)}
    todo = [(first, stops)]
    while todo:
        state, left = todo.pop()
        successors = [(rank, False) for rank in state.ready()]
        if left:
            successors += [(rank, True) for rank in range(state.size) if not state.ended(rank)]
        for rank, gives_up in successors:
            after = state.copy()
            if gives_up:
                after.give_up(rank)
            else:
                after.step(rank)
            key = (*after.key(), left - gives_up)
            if key not in seen:
                seen.add(key)
                todo.append((after, left - gives_up))
    return len(seen)
