"""Who copies, reduces and waits for what in one call of a group: pure, it touches no memory and knows no torch.

A call of all members becomes one program per rank. A rank writes only into its own windows and tensors. It *posts* a
phase when its part is in place and *waits* until others have posted it. A round fills one window; rounds alternate.

Between hosts the same programs hold. What a rank will read of a window of another host is sent to it right before the
POST for which it waits, and arrives in its mirror of that window; see native/streams.c. If each host has one rank, an
ALLREDUCE is sent straight from the tensors, because nobody reads the windows. If hosts have several, each is reduced
first.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from etha.native.structs import ALL, SOURCE, STEP, StepKind


class CallKind(enum.IntEnum):
    """What a call does. The values travel in descriptors: never renumber them."""

    ALLREDUCE = 1
    REDUCE = 2
    BROADCAST = 3
    ALLGATHER = 4
    REDUCE_SCATTER = 5
    ALLTOALL = 6
    GATHER = 7
    SCATTER = 8
    BARRIER = 9
    SEND = 10
    RECV = 11
    RECV_ANY = 12


#: The short name, as this package uses it.
Kind = CallKind

#: Calls between two members. They go over rings of their own and have no program.
POINT_TO_POINT = frozenset((Kind.SEND, Kind.RECV, Kind.RECV_ANY))
#: Calls with a root.
ROOTED = frozenset((Kind.REDUCE, Kind.BROADCAST, Kind.GATHER, Kind.SCATTER))
#: Calls that compute.
REDUCTIONS = frozenset((Kind.ALLREDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER))


class Variant(enum.Enum):
    """How the bytes of a call travel. All ranks of a call use the same."""

    SMALL = "small"  #: everything fits into one window: one phase, which also compares the descriptors
    WINDOWS = "windows"  #: round by round through two windows, after `match_program`
    IN_PLACE = "in_place"  #: all members can read each other's tensors: no window, after `match_program`


#: What one step does, as plain numbers, because a program has hundreds of steps and is built while its caller waits.
COPY, REDUCE, POST, WAIT, MATCH, SEND, FLUSH, PARTIAL, COMBINE, GROUPED = (
    StepKind.COPY.value,
    StepKind.REDUCE.value,
    StepKind.POST.value,
    StepKind.WAIT.value,
    StepKind.MATCH.value,
    StepKind.SEND.value,
    StepKind.FLUSH.value,
    StepKind.PARTIAL.value,
    StepKind.COMBINE.value,
    StepKind.GROUPED.value,
)
#: A window's parts begin at multiples of this, so that no two ranks write to one line of the cache.
LINE = 64
#: Bytes of a round if windows are larger: what a round stages is read while it is still in the caches. 64 MiB of two
#: members took 10.0 ms in rounds of 1 MiB and 13.3 ms in rounds of 4 MiB, of four members on 2 cores 32 and 41 ms.
ROUND_BYTES = 1024 * 1024
#: A call is SMALL if each rank reads at most so many bytes then. Two members and 256 KiB: 48 us, in WINDOWS 64 us.
SMALL_BYTES = 512 * 1024
#: Compiled programs that are kept.
KEPT_PROGRAMS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """All of a call that its schedule depends on. `inputs` and `outputs` hold elements per tensor, normalized.

    With n ranks: ALLREDUCE, REDUCE, BROADCAST: outputs[i] is input i. ALLGATHER: outputs[t * n + s] is input t of
    rank s. REDUCE_SCATTER: inputs[t * n + d] is for outputs[t] of rank d. ALLTOALL: inputs[d] to rank d, outputs[s]
    from rank s; `matrix[s][d]` has the elements from s to d. GATHER: one input, n outputs on the root. SCATTER: n
    inputs on the root, one output. All pieces of GATHER and SCATTER are equal. BARRIER: none.

    `partial`: bytes of an element of the sum of one host, before the hosts' sums are added; 0 if there is no such sum.
    """

    kind: Kind
    itemsize: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    root: int = -1
    matrix: tuple[tuple[int, ...], ...] | None = None
    partial: int = 0


class CallStep(NamedTuple):
    """One step of a program. Offsets are bytes in a numbered space (`Spaces`).

    COPY: `amount` bytes. REDUCE: `amount` elements of each of `sources`, (space, offset) in rank order; the destination
    may be one of the sources. PARTIAL: a REDUCE over one host, COMBINE: one over hosts, of what PARTIAL made. GROUPED:
    a REDUCE of sources of which those of one host stand together; `hosts` has the host of each. POST and WAIT: `amount`
    is the phase, from 1; WAIT: `src_space` is a rank or ALL.
    MATCH compares all members' descriptors. SEND: `amount` bytes of a window or a tensor go to `peer`, a rank
    of another host, as those of a window. FLUSH waits until all that was sent has been read.
    `round` counts window changes from 0; only the simulator reads it.
    """

    kind: int
    dst_space: int = 0
    src_space: int = 0
    dst: int = 0
    src: int = 0
    amount: int = 0
    sources: tuple[tuple[int, int], ...] = ()
    round: int = -1
    peer: int = 0
    hosts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spaces:
    """How the memory that a program names is numbered: own inputs, own outputs, two windows per rank, peers' inputs."""

    inputs: int
    outputs: int
    size: int
    peer_inputs: int  #: inputs that each rank publishes for a program that reads in place; otherwise 0

    def input(self, i: int) -> int:
        return i

    def output(self, i: int) -> int:
        return self.inputs + i

    def window(self, rank: int, w: int) -> int:
        return self.inputs + self.outputs + 2 * rank + w

    def peer_input(self, rank: int, i: int) -> int:
        return self.inputs + self.outputs + 2 * self.size + rank * self.peer_inputs + i

    @property
    def count(self) -> int:
        return self.inputs + self.outputs + self.size * (2 + self.peer_inputs)

    def parse(self, space: int) -> tuple[str, int, int]:
        """("input", -1, i), ("output", -1, i), ("window", rank, w) or ("peer_input", rank, i)."""
        if space < self.inputs:
            return ("input", -1, space)
        space -= self.inputs
        if space < self.outputs:
            return ("output", -1, space)
        space -= self.outputs
        if space < 2 * self.size:
            return ("window", *divmod(space, 2))
        return ("peer_input", *divmod(space - 2 * self.size, self.peer_inputs))


@dataclass(slots=True, kw_only=True, eq=False)
class CallProgram:
    """What one rank does in one call. `phases` and `rounds` are the same on all ranks of the call.

    Window w of a step is relative: the number of the round modulo 2. The engine swaps the pair if the rounds of all
    earlier calls are odd in sum.
    """

    steps: list[CallStep]
    spaces: Spaces
    phases: int
    rounds: int
    #: The other ranks, in the order in which this one reads from them.
    others: tuple[int, ...] = ()
    _compiled: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None = field(default=None, repr=False)

    def compile(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The steps and the table of their sources as read-only arrays of `STEP` and `SOURCE`; made once."""
        if self._compiled is None:
            rows: list[tuple[int, ...]] = []
            sources: list[tuple[int, int, int]] = []
            for step in self.steps:
                src = step.src
                if step.sources:
                    src = len(sources)
                    hosts = step.hosts or (0,) * len(step.sources)
                    sources += [(space, host, at) for (space, at), host in zip(step.sources, hosts, strict=True)]
                n = step.peer if step.kind == SEND else len(step.sources)
                rows.append((step.kind, n, step.dst_space, step.src_space, step.dst, src, step.amount))
            steps, table = np.array(rows, dtype=STEP), np.array(sources, dtype=SOURCE)
            steps.flags.writeable = table.flags.writeable = False
            self._compiled = (steps, table)
        return self._compiled


# ---- what a caller asks -----------------------------------------------------------------------


@lru_cache(maxsize=KEPT_PROGRAMS)
def program(
    shape: CallShape, *, rank: int, size: int, window_bytes: int, variant: Variant, hosts: tuple[int, ...] = ()
) -> CallProgram:
    """The program of one rank. WINDOWS and IN_PLACE programs run after `match_program`, in a phase count of their own.

    `hosts`: the number of each rank's host; () if all are on one. Sources are reduced host by host, the hosts in the
    order of their lowest ranks, unless `shape.partial` is 0: then rank by rank. Raises ValueError for a shape that no
    call can have, for SMALL if a rank stages more than a window holds, and for IN_PLACE over several hosts.
    """
    far = len(set(hosts)) > 1
    by_host = _numbered(hosts) if far and sums_per_host(shape, hosts) else ()
    whole = far and shape.kind is Kind.ALLREDUCE and variant is Variant.WINDOWS
    direct = whole and not by_host and hosts.count(hosts[rank]) == 1
    own = _program(
        shape, rank=rank, size=size, window_bytes=window_bytes, variant=variant, far=far, direct=direct, by_host=by_host
    )
    if not far:
        return own
    if variant is Variant.IN_PLACE:
        raise ValueError("ranks of several hosts cannot read each other's tensors in place")
    sends: dict[int, list[CallStep]] = {}
    for peer in own.others:
        if hosts[peer] != hosts[rank]:
            other = _program(
                shape_of(shape, peer, size), rank=peer, size=size, window_bytes=window_bytes, variant=variant, far=True,
                by_host=by_host,
            )  # fmt: skip
            for phase, window, offset, count, number in _reads(other, rank, shape):
                space = own.spaces.window(rank, window)
                sends.setdefault(phase, []).extend(
                    CallStep(SEND, space, source, at, start, length, (), number, peer)
                    for source, start, at, length in (
                        _tensor_pieces(own.spaces, shape, window_bytes, number, offset, count)
                        if direct
                        else [(space, offset, offset, count)]
                    )
                )
    steps: list[CallStep] = []
    for step in own.steps:
        if step.kind == POST:
            steps += sends.get(step.amount, ())
        steps.append(step)
    if direct and sends:
        steps.append(CallStep(FLUSH, round=max(0, own.rounds - 1)))
    return CallProgram(steps=steps, spaces=own.spaces, phases=own.phases, rounds=own.rounds, others=own.others)


def _tensor_pieces(
    spaces: Spaces, shape: CallShape, window_bytes: int, number: int, offset: int, count: int
) -> Iterator[tuple[int, int, int, int]]:
    """Where a part of a round's window lies in the tensors: (space, offset there, offset in the window, bytes)."""
    lo = number * (window_bytes // LINE * LINE)
    for tensor, start, place, length in _all(shape.inputs, shape.itemsize).pieces(lo + offset, lo + offset + count):
        yield spaces.output(tensor), start, place - lo, length


def sums_per_host(shape: CallShape, hosts: tuple[int, ...]) -> bool:
    """Whether several members of a host reduce among each other first."""
    return shape.kind in REDUCTIONS and bool(shape.partial) and 1 < len(set(hosts)) < len(hosts)


@lru_cache(maxsize=64)
def _numbered(hosts: tuple[int, ...]) -> tuple[int, ...]:
    """The hosts of ranks, numbered from 0 in the order of their lowest ranks."""
    order = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return tuple(order[host] for host in hosts)


def _reads(program: CallProgram, rank: int, shape: CallShape) -> list[tuple[int, int, int, int, int]]:
    """What a program reads of a rank's windows: (phase that the rank has posted then, window, offset, bytes, round)."""
    known = 0
    found: set[tuple[int, int, int, int, int]] = set()
    windows = {program.spaces.window(rank, w): w for w in (0, 1)}
    for step in program.steps:
        if step.kind == WAIT and step.src_space in (rank, ALL):
            known = step.amount
        elif step.kind == COPY and step.src_space in windows:
            found.add((known, step.round, windows[step.src_space], step.src, step.amount))
        elif step.sources:
            length = step.amount * (shape.partial if step.kind == COMBINE else shape.itemsize)
            for space, offset in step.sources:
                if space in windows:
                    found.add((known, step.round, windows[space], offset, length))
    merged: list[list[int]] = []
    for each in sorted(found):
        last = merged[-1] if merged else None
        if last is not None and last[:3] == list(each[:3]) and each[3] <= last[3] + last[4]:
            last[4] = max(last[4], each[3] + each[4] - last[3])
        else:
            merged.append(list(each))
    return [(phase, window, offset, count, number) for phase, number, window, offset, count in merged]


def shape_of(shape: CallShape, rank: int, size: int) -> CallShape:
    """The shape that the call has on another rank; `matrix` of an ALLTOALL is needed."""
    kind, inputs, outputs = shape.kind, shape.inputs, shape.outputs
    if kind is Kind.ALLGATHER:
        inputs = outputs[rank::size]
    elif kind is Kind.REDUCE_SCATTER:
        outputs = inputs[rank::size]
    elif kind is Kind.ALLTOALL:
        matrix = _matrix(shape)
        inputs, outputs = matrix[rank], tuple(row[rank] for row in matrix)
    elif kind is Kind.GATHER:
        outputs = inputs * size if rank == shape.root else ()
    elif kind is Kind.SCATTER:
        inputs = outputs * size if rank == shape.root else ()
    return replace(shape, inputs=inputs, outputs=outputs)


@lru_cache(maxsize=KEPT_PROGRAMS)
def _program(
    shape: CallShape,
    *,
    rank: int,
    size: int,
    window_bytes: int,
    variant: Variant,
    far: bool,
    direct: bool = False,
    by_host: tuple[int, ...] = (),
) -> CallProgram:
    """The program of one rank without what it sends; `far`: several hosts; `direct`: it sends from tensors; `by_host`:
    the host of each rank, if sources are reduced host by host."""
    _check(shape, rank, size, window_bytes, variant)
    if by_host and not host_round(window_bytes, shape.itemsize, shape.partial):
        raise ValueError(f"windows of {window_bytes} bytes are too small for the sums of a host")
    b = _Builder(shape, rank, size, window_bytes, match=variant is Variant.SMALL, by_host=by_host)
    if size == 1:
        _alone(b)
    elif shape.kind is Kind.BARRIER:
        if b.match:
            b.meet()
    elif variant is Variant.IN_PLACE:
        (_reduce_in_place if shape.kind in REDUCTIONS else _exchange_in_place)(b)
    elif shape.kind is Kind.REDUCE_SCATTER:
        _reduce_scatter(b)
    elif shape.kind not in REDUCTIONS:
        _exchange(b)
    elif variant is Variant.SMALL:
        _reduce_small(b)
    elif by_host and shape.kind is Kind.ALLREDUCE:
        _reduce_by_host(b)
    elif far and shape.kind is Kind.ALLREDUCE:
        _reduce_overlapped(b, direct=direct)
    else:
        _reduce_slices(b)
    return b.finish()


@lru_cache(maxsize=KEPT_PROGRAMS)
def match_program(size: int) -> CallProgram:
    """What precedes every call that is not SMALL: all have begun, and all mean the same call. One phase, no round."""
    shape = CallShape(kind=Kind.BARRIER, itemsize=1, inputs=(), outputs=())
    return program(shape, rank=0, size=size, window_bytes=LINE, variant=Variant.SMALL)


def is_small(shape: CallShape, size: int, limit: int = SMALL_BYTES) -> bool:
    """Whether a call goes the SMALL way. All ranks of a call that matches come to the same answer.

    An ALLTOALL never does, because a rank learns the others' splits from their descriptors only.
    """
    if shape.kind is Kind.ALLTOALL:
        return False
    readers = size if shape.kind in (Kind.ALLREDUCE, Kind.REDUCE) else 1  # there each rank reads all windows whole
    return staged_bytes(shape, size) * readers <= limit


def staged_bytes(shape: CallShape, size: int) -> int:
    """The most bytes of a window that a rank fills if the call is SMALL."""
    if shape.kind in (Kind.ALLREDUCE, Kind.REDUCE):
        return sum(shape.inputs) * shape.itemsize
    if shape.kind is Kind.REDUCE_SCATTER:
        return (size - 1) * _round_up(_longest_destination(shape, size))
    return max((sum(count for _, count in _staged(shape, s, size)) for s in range(size)), default=0) * shape.itemsize


# ---- building ---------------------------------------------------------------------------------


class TensorStream:
    """Tensors one behind the other: an offset in the stream is a place in one of them. All in bytes."""

    __slots__ = ("length", "starts", "tensors")

    def __init__(self, tensors: Sequence[tuple[int, int]]) -> None:
        self.tensors = [(index, count) for index, count in tensors if count]
        self.starts: list[int] = []
        self.length = 0
        for _, count in self.tensors:
            self.starts.append(self.length)
            self.length += count

    def pieces(self, lo: int, hi: int) -> Iterator[tuple[int, int, int, int]]:
        """(tensor, offset in it, offset in the stream, bytes) of what lies between lo and hi."""
        hi = min(hi, self.length)
        at = bisect_right(self.starts, lo) - 1
        while lo < hi:
            start = self.starts[at]
            index, count = self.tensors[at]
            end = min(start + count, hi)
            yield index, lo - start, lo, end - lo
            lo = end
            at += 1


class _Builder:
    """Collects the steps of one program."""

    def __init__(
        self, shape: CallShape, rank: int, size: int, window_bytes: int, *, match: bool, by_host: tuple[int, ...] = ()
    ) -> None:
        self.shape, self.rank, self.size, self.match, self.by_host = shape, rank, size, match, by_host
        #: All ranks, those of one host side by side, if that is how they are reduced.
        self._order = sorted(range(size), key=lambda r: by_host[r]) if by_host else []
        self.window_bytes = window_bytes // LINE * LINE
        self.itemsize = shape.itemsize
        self.others = [
            (rank + k) % size for k in range(1, size)
        ]  # begins behind oneself: not all read from rank 0 first
        self.steps: list[CallStep] = []
        self.phase = self.round = self.rounds = 0
        self.spaces = Spaces(inputs=len(shape.inputs), outputs=len(shape.outputs), size=size, peer_inputs=0)

    def publish_inputs(self, count: int) -> None:
        spaces = self.spaces
        self.spaces = Spaces(inputs=spaces.inputs, outputs=spaces.outputs, size=spaces.size, peer_inputs=count)

    def begin_round(self, number: int) -> None:
        self.round = number
        self.rounds = max(self.rounds, number + 1)

    def window(self, rank: int) -> int:
        return self.spaces.window(rank, self.round % 2)

    def copy(self, dst_space: int, dst: int, src_space: int, src: int, count: int) -> None:
        if count:
            self.steps.append(CallStep(COPY, dst_space, src_space, dst, src, count, (), self.round))

    def reduce(self, dst_space: int, dst: int, sources: Sequence[tuple[int, int]], count: int) -> None:
        """Reduce `sources`, one of each rank."""
        elements = count // self.itemsize
        if self.by_host:
            sources, hosts = [sources[r] for r in self._order], tuple(self.by_host[r] for r in self._order)
            step = CallStep(GROUPED, dst_space, 0, dst, 0, elements, tuple(sources), self.round, hosts=hosts)
        else:
            step = CallStep(REDUCE, dst_space, 0, dst, 0, elements, tuple(sources), self.round)
        self.steps.append(step)

    def half_reduce(self, kind: int, dst_space: int, dst: int, sources: Sequence[tuple[int, int]], count: int) -> None:
        """A PARTIAL or a COMBINE; `count`: bytes of so many elements of the call's type."""
        elements = count // self.itemsize
        self.steps.append(CallStep(kind, dst_space, 0, dst, 0, elements, tuple(sources), self.round))

    def post(self) -> None:
        self.phase += 1
        self.steps.append(CallStep(POST, amount=self.phase, round=self.round))

    def wait_for(self, phase: int, ranks: Sequence[int] = (ALL,)) -> None:
        """Wait for some ranks, or all others, for a phase that may be an earlier one."""
        for rank in ranks:
            self.steps.append(CallStep(WAIT, src_space=rank, amount=phase, round=self.round))

    def wait(self, rank: int = ALL) -> None:
        self.steps.append(CallStep(WAIT, src_space=rank, amount=self.phase, round=self.round))

    def meet(self) -> None:
        """Post, wait for all; in a SMALL call also compare descriptors, because nothing else has done so."""
        self.post()
        self.wait()
        if self.match:
            self.steps.append(CallStep(MATCH, round=self.round))

    def stage(self, stream: TensorStream, lo: int, hi: int, at: int) -> None:
        """Put a part of a stream of own inputs into the own window, `lo` at offset `at`."""
        own = self.window(self.rank)
        for tensor, offset, place, count in stream.pieces(lo, hi):
            self.copy(own, at + place - lo, self.spaces.input(tensor), offset, count)

    def finish(self) -> CallProgram:
        return CallProgram(
            steps=self.steps,
            spaces=self.spaces,
            phases=self.phase,
            rounds=self.rounds,
            others=tuple(self.others),
        )


def _round_up(count: int) -> int:
    return -(-count // LINE) * LINE


def _slice(length: int, rank: int, size: int) -> tuple[int, int]:
    """The part of `length` bytes that a rank reduces; all but the last are multiples of LINE."""
    step = _round_up(-(-length // size))
    return min(rank * step, length), min((rank + 1) * step, length)


def _all(sizes: Sequence[int], itemsize: int) -> TensorStream:
    return TensorStream([(i, count * itemsize) for i, count in enumerate(sizes)])


def _alone(b: _Builder) -> None:
    """A group of one. A reduction is still one, because it may scale."""
    for i, count in enumerate(b.shape.outputs):
        if b.shape.kind in REDUCTIONS and count:
            b.reduce(b.spaces.output(i), 0, [(b.spaces.input(i), 0)], count * b.itemsize)
        elif b.shape.kind is not Kind.BROADCAST:
            b.copy(b.spaces.output(i), 0, b.spaces.input(i), 0, count * b.itemsize)


# ---- reductions -------------------------------------------------------------------------------


def _reduce_small(b: _Builder) -> None:
    """Everybody stages everything, and whoever wants the result reduces all of it alone: two members need one phase."""
    stream = _all(b.shape.inputs, b.itemsize)
    b.begin_round(0)
    b.stage(stream, 0, stream.length, 0)
    b.meet()
    if b.shape.kind is Kind.REDUCE and b.rank != b.shape.root:
        return
    for tensor, offset, place, count in stream.pieces(0, stream.length):
        b.reduce(b.spaces.output(tensor), offset, [(b.window(k), place) for k in range(b.size)], count)


def _reduce_slices(b: _Builder) -> None:
    """ALLREDUCE and REDUCE: rank r reduces slice r of all windows into its own window, then results are fetched.

    Nobody else reads slice r of rank r's window before that, so it is not staged and may be overwritten in place.
    """
    stream = _all(b.shape.inputs, b.itemsize)
    for number, lo in enumerate(range(0, stream.length, b.window_bytes)):
        b.begin_round(number)
        hi = min(lo + b.window_bytes, stream.length)
        first, last = _slice(hi - lo, b.rank, b.size)
        b.stage(stream, lo, lo + first, 0)
        b.stage(stream, lo + last, hi, last)
        b.meet()
        _reduce_own_slice(b, stream, lo, first, last)


def _reduce_overlapped(b: _Builder, *, direct: bool) -> None:
    """ALLREDUCE between hosts: as `_reduce_slices`, but round k + 1 is on its way while round k is reduced and fetched.

    Staging round k + 1 needs that all have reduced round k - 1, which filled the same window, and reducing it that all
    have fetched round k - 1. The last round is posted after the one before has been fetched, so that the next call may
    fill the other window at once. A rank's slice is the same in all rounds, the shorter last one included: what arrives
    for one slice would otherwise fall on another one of round k - 1 that is still to be fetched.

    `direct`: nobody reads the own window, so nothing is staged in it, and the own slice is reduced where it lies. The
    bytes of a slice are overwritten only by its result, for which its owner has received them.
    """
    stream = _all(b.shape.inputs, b.itemsize)
    starts = list(range(0, stream.length, b.window_bytes))
    staged: dict[int, int] = {}  # round -> the phase that says so
    reduced: dict[int, int] = {}

    def part(number: int, rank: int) -> tuple[int, int]:
        length = min(b.window_bytes, stream.length - starts[number])
        first, last = _slice(min(b.window_bytes, stream.length), rank, b.size)
        return min(first, length), min(last, length)

    def stage(number: int) -> None:
        b.begin_round(number)
        lo = starts[number]
        hi = min(lo + b.window_bytes, stream.length)
        first, last = part(number, b.rank)
        if not direct:
            b.stage(stream, lo, lo + first, 0)
            b.stage(stream, lo + last, hi, last)
        b.post()
        staged[number] = b.phase

    def reduce(number: int) -> None:
        b.begin_round(number)
        lo = starts[number]
        own = b.window(b.rank)
        b.wait_for(staged[number])
        first, last = part(number, b.rank)
        for tensor, offset, place, count in stream.pieces(lo + first, lo + last):
            at = place - lo
            sources = [(b.spaces.input(tensor), offset) if k == b.rank else (b.window(k), at) for k in range(b.size)]
            if direct:
                b.reduce(b.spaces.output(tensor), offset, sources, count)
            else:
                b.reduce(own, at, sources, count)

    def fetch(number: int) -> None:
        b.begin_round(number)
        lo = starts[number]
        b.wait_for(reduced[number])
        for k in b.others if direct else (b.rank, *b.others):
            first, last = part(number, k)
            for tensor, offset, place, count in stream.pieces(lo + first, lo + last):
                b.copy(b.spaces.output(tensor), offset, b.window(k), place - lo, count)

    for number in range(min(2, len(starts))):
        stage(number)
    for number in range(len(starts)):
        last = number == len(starts) - 1
        reduce(number)
        if last and number:
            fetch(number - 1)
        b.begin_round(number)
        b.post()
        reduced[number] = b.phase
        if number and not last:
            fetch(number - 1)
            stage(number + 1)
    if starts:
        fetch(len(starts) - 1)


def host_round(window_bytes: int, itemsize: int, partial: int) -> int:
    """The bytes of a round in which hosts are reduced first: a window also holds the sums of one host."""
    return window_bytes * itemsize // (itemsize + partial) // LINE * LINE


def _reduce_by_host(b: _Builder) -> None:
    """ALLREDUCE between hosts that have several members: what a host sends does not grow with their number.

    A round has a part for each host, and in each part every member of any host has a share. Four steps, each posted:

    stage    what other members of the host will reduce is put into the own window
    sum      in all parts, the own share is reduced over the host: the host's sum, which goes to the part's host
    reduce   the own share of the own host's part is reduced over the hosts, and goes to all other hosts
    relay    the own share of the other hosts' parts has arrived, and is put into the own window

    Then results are fetched from the windows of the own host. A host sends each byte of a round once as its sum, but
    for its own part, and its own part once to each other host: as much as a ring of the hosts.

    While round k is fetched, the sums of round k + 1 are on their way, and while round k + 2 is staged and summed, the
    results of round k + 1. A round is reduced after the one before has been fetched, so that after the last one the
    next call may fill the other window at once.
    """
    hosts, itemsize, partial = b.by_host, b.itemsize, b.shape.partial
    members = [[r for r in range(b.size) if hosts[r] == host] for host in range(max(hosts) + 1)]
    mine = hosts[b.rank]
    local = members[mine]
    near = [r for r in b.others if hosts[r] == mine]
    away = [r for r in b.others if hosts[r] != mine]
    room = host_round(b.window_bytes, itemsize, partial)
    stream = _all(b.shape.inputs, itemsize)
    starts = list(range(0, stream.length, room))
    full = min(room, stream.length)

    def share(number: int, host: int, rank: int) -> tuple[int, int]:
        """Where a rank's share of a host's part of a round lies in the round. It is the same in all rounds, of which
        the last may end earlier."""
        length = min(room, stream.length - starts[number])
        lo, hi = _slice(full, host, len(members))
        own = members[hosts[rank]]
        first, last = _slice(hi - lo, own.index(rank), len(own))
        return min(lo + first, length), min(lo + last, length)

    def sum_at(at: int) -> int:
        return room + at // itemsize * partial

    def pieces(number: int, lo: int, hi: int) -> Iterator[tuple[int, int, int, int]]:
        """(tensor, offset in it, offset in the round, bytes)."""
        start = starts[number]
        for tensor, offset, place, count in stream.pieces(start + lo, start + hi):
            yield tensor, offset, place - start, count

    summed: dict[int, int] = {}  # round -> the phase that says so
    reduced: dict[int, int] = {}
    relayed: dict[int, int] = {}

    def stage_and_sum(number: int) -> None:
        b.begin_round(number)
        own, start = b.window(b.rank), starts[number]
        for host in range(len(members)):
            for other in near:
                first, last = share(number, host, other)
                b.stage(stream, start + first, start + last, first)
        b.post()
        b.wait_for(b.phase, near)
        for host in range(len(members)):
            for tensor, offset, at, count in pieces(number, *share(number, host, b.rank)):
                sources = [(b.spaces.input(tensor), offset) if r == b.rank else (b.window(r), at) for r in local]
                b.half_reduce(PARTIAL, own, sum_at(at), sources, count)
        b.post()
        summed[number] = b.phase

    def reduce(number: int) -> None:
        b.begin_round(number)
        own = b.window(b.rank)
        b.wait_for(summed[number], away)
        first, last = share(number, mine, b.rank)
        shares = {r: share(number, mine, r) for r in (b.rank, *away)}
        cuts = sorted({first, last, *(at for ends in shares.values() for at in ends if first < at < last)})
        for lo, hi in pairwise(cuts):
            owners = sorted((r for r, (start, end) in shares.items() if start <= lo < end), key=lambda r: hosts[r])
            b.half_reduce(COMBINE, own, lo, [(b.window(r), sum_at(lo)) for r in owners], hi - lo)
        b.post()
        reduced[number] = b.phase

    def relay(number: int) -> None:
        b.begin_round(number)
        b.wait_for(reduced[number], away)
        for r, lo, hi in arriving(number) if near else ():
            b.copy(b.window(b.rank), lo, b.window(r), lo, hi - lo)
        b.post()
        relayed[number] = b.phase

    def arriving(number: int) -> Iterator[tuple[int, int, int]]:
        """Whose results come here: (rank, from, to) of the round."""
        for r in away:
            (first, last), (start, end) = (share(number, hosts[r], each) for each in (b.rank, r))
            if max(first, start) < min(last, end):
                yield r, max(first, start), min(last, end)

    def fetch(number: int) -> None:
        b.begin_round(number)
        b.wait_for(relayed[number], near)
        found = [(r, *share(number, host, r)) for r in (b.rank, *near) for host in range(len(members))]
        if not near:  # nobody else reads what has arrived
            found = [(b.rank, *share(number, mine, b.rank)), *arriving(number)]
        for r, lo, hi in found:
            for tensor, offset, at, count in pieces(number, lo, hi):
                b.copy(b.spaces.output(tensor), offset, b.window(r), at, count)

    for number in range(min(2, len(starts))):
        stage_and_sum(number)
    if starts:
        reduce(0)
    for number in range(len(starts)):
        relay(number)
        fetch(number)
        if number + 1 < len(starts):
            reduce(number + 1)
        if number + 2 < len(starts):
            stage_and_sum(number + 2)


def _reduce_own_slice(b: _Builder, stream: TensorStream, lo: int, first: int, last: int) -> None:
    pieces = [(tensor, offset, place - lo, n) for tensor, offset, place, n in stream.pieces(lo + first, lo + last)]
    own, root = b.window(b.rank), b.shape.root
    fetches = b.shape.kind is Kind.ALLREDUCE or b.rank == root
    for tensor, offset, at, count in pieces:
        sources = [(b.spaces.input(tensor), offset) if k == b.rank else (b.window(k), at) for k in range(b.size)]
        if b.rank == root:
            b.reduce(b.spaces.output(tensor), offset, sources, count)
        else:
            b.reduce(own, at, sources, count)
    b.post()
    if not fetches:
        return
    if b.rank != root:
        for tensor, offset, at, count in pieces:  # after the post, because nobody waits for this copy
            b.copy(b.spaces.output(tensor), offset, own, at, count)
    b.wait()
    length = min(b.window_bytes, stream.length - lo)
    for k in b.others:
        first, last = _slice(length, k, b.size)
        for tensor, offset, place, count in stream.pieces(lo + first, lo + last):
            b.copy(b.spaces.output(tensor), offset, b.window(k), place - lo, count)


def _longest_destination(shape: CallShape, size: int) -> int:
    return max(sum(shape.inputs[d::size]) for d in range(size)) * shape.itemsize


def _reduce_scatter(b: _Builder) -> None:
    """A window has a slot for every other rank. Sums go straight to the outputs, so a round has one phase."""
    tensors, size = len(b.shape.outputs), b.size
    streams = [
        TensorStream([(t * size + d, b.shape.inputs[t * size + d] * b.itemsize) for t in range(tensors)])
        for d in range(size)
    ]
    longest = max(stream.length for stream in streams)
    slot = min(b.window_bytes // (size - 1) // LINE * LINE, _round_up(longest))
    for number, lo in enumerate(range(0, longest, slot or 1) if not b.match else (0,)):
        b.begin_round(number)
        for k, d in enumerate(b.others):
            b.stage(streams[d], lo, min(lo + slot, streams[d].length), k * slot)
        b.meet()
        for tensor, offset, place, count in streams[b.rank].pieces(lo, lo + slot):
            sources = [
                (b.spaces.input(tensor), offset)
                if k == b.rank
                else (b.window(k), (b.rank - k - 1) % size * slot + place - lo)
                for k in range(size)
            ]
            b.reduce(b.spaces.output(tensor // size), offset, sources, count)


def _reduce_in_place(b: _Builder) -> None:
    """Reads all peers' tensors. The last phase says that all have finished reading.

    ALLREDUCE: in parts of the size of a window, so that they are fetched while they are in the cache. Rank r reduces
    slice r into its own tensor, where nobody else reads that slice before, and fetches the others'. REDUCE: the root
    reduces everything, because the others' tensors may not change.
    """
    kind, size, rank = b.shape.kind, b.size, b.rank
    b.publish_inputs(len(b.shape.inputs))

    def reduce(tensor: int, output: int, offset: int, count: int) -> None:
        own, peer = (b.spaces.input(tensor), offset), b.spaces.peer_input
        sources = [own if k == rank else (peer(k, tensor), offset) for k in range(size)]
        b.reduce(b.spaces.output(output), offset, sources, count)

    if kind is Kind.REDUCE_SCATTER:
        for output, elements in enumerate(b.shape.outputs):
            if elements:
                reduce(output * size + rank, output, 0, elements * b.itemsize)
        b.meet()
        return
    stream = _all(b.shape.inputs, b.itemsize)
    if kind is Kind.REDUCE:
        if rank == b.shape.root:
            for tensor, offset, _, count in stream.pieces(0, stream.length):
                reduce(tensor, tensor, offset, count)
        b.post()
        if rank != b.shape.root:
            b.wait(b.shape.root)
        return
    for lo in range(0, stream.length, b.window_bytes):
        length = min(b.window_bytes, stream.length - lo)
        first, last = _slice(length, rank, size)
        for tensor, offset, _, count in stream.pieces(lo + first, lo + last):
            reduce(tensor, tensor, offset, count)
        b.meet()
        for k in b.others:
            first, last = _slice(length, k, size)
            for tensor, offset, _, count in stream.pieces(lo + first, lo + last):
                b.copy(b.spaces.output(tensor), offset, b.spaces.peer_input(k, tensor), offset, count)
    b.meet()


# ---- exchanges: calls that only move ----------------------------------------------------------


def _matrix(shape: CallShape) -> tuple[tuple[int, ...], ...]:
    if shape.matrix is None:
        raise ValueError("an ALLTOALL needs the matrix of all ranks' splits")
    return shape.matrix


def _staged(shape: CallShape, s: int, size: int) -> list[tuple[int, int]]:
    """(input, elements) of what rank s puts into its window for others, in order."""
    kind = shape.kind
    if kind is Kind.ALLGATHER:
        return list(enumerate(shape.outputs[s::size]))
    if kind is Kind.ALLTOALL:
        row = _matrix(shape)[s]
        return [((s + k) % size, row[(s + k) % size]) for k in range(1, size)]
    if kind is Kind.BROADCAST and s == shape.root:
        return list(enumerate(shape.inputs))
    if kind is Kind.GATHER and s != shape.root:
        return [(0, shape.inputs[0])]
    if kind is Kind.SCATTER and s == shape.root:
        return [((s + k) % size, shape.outputs[0]) for k in range(1, size)]
    return []


def _wanted(shape: CallShape, d: int, s: int, size: int) -> list[tuple[int, int, int, int]]:
    """(elements before it in s's window, input of s, output, elements) of what rank d takes from rank s."""
    kind, root = shape.kind, shape.root
    if kind is Kind.ALLGATHER or (kind is Kind.BROADCAST and s == root != d):
        found, before = [], 0
        for t, count in enumerate(shape.outputs[s::size] if kind is Kind.ALLGATHER else shape.outputs):
            found.append((before, t, t * size + s if kind is Kind.ALLGATHER else t, count))
            before += count
        return found
    if kind is Kind.ALLTOALL:
        row = _matrix(shape)[s]
        between = row[s + 1 : d] if d > s else row[s + 1 :] + row[:d]
        return [(sum(between), d, s, row[d])]
    if kind is Kind.GATHER and d == root:
        return [(0, 0, s, shape.inputs[0])]
    if kind is Kind.SCATTER and s == root:
        return [((d - s - 1) % size * shape.outputs[0], d, 0, shape.outputs[0])]
    return []


def _partner(b: _Builder) -> int:
    """Whom a rank waits for: whom it reads from, and who must have read from it before it overwrites."""
    return b.shape.root if b.shape.kind in ROOTED and b.rank != b.shape.root else ALL


def _copy_own(b: _Builder) -> None:
    for _, tensor, output, elements in _wanted(b.shape, b.rank, b.rank, b.size):
        b.copy(b.spaces.output(output), 0, b.spaces.input(tensor), 0, elements * b.itemsize)


def _exchange(b: _Builder) -> None:
    """Round by round, everybody stages a window of its stream and takes its pieces out of the others' windows.

    A rank waits in a round if it reads, or if it staged something in the round before: the phase says that the others
    have read that, and the window is filled again in the next round or in a SMALL call that follows.
    """
    shape, size = b.shape, b.size
    stream = TensorStream([(i, count * b.itemsize) for i, count in _staged(shape, b.rank, size)])
    longest = max(sum(count for _, count in _staged(shape, s, size)) for s in range(size)) * b.itemsize
    wanted = [(s, *each) for s in b.others for each in _wanted(shape, b.rank, s, size)]
    staged = False
    for number, lo in enumerate(range(0, longest, b.window_bytes) if not b.match else (0,)):
        b.begin_round(number)
        hi = min(lo + b.window_bytes, longest)
        staged_before, staged = staged, lo < stream.length
        b.stage(stream, lo, hi, 0)
        taken = list(_pieces_between(b, wanted, lo, hi))
        if b.match:
            b.meet()
        else:
            b.post()
        if number == 0:
            _copy_own(b)  # after the post, because nobody waits for it
        if not b.match and (taken or staged_before):
            b.wait(_partner(b))
        for output, offset, s, at, count in taken:
            b.copy(b.spaces.output(output), offset, b.window(s), at, count)
    if not b.rounds:
        _copy_own(b)


def _pieces_between(
    b: _Builder, wanted: Sequence[tuple[int, int, int, int, int]], lo: int, hi: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """(output, offset in it, source rank, offset in its window, bytes) of what lies in the windows of one round."""
    for s, before, _, output, elements in wanted:
        start, end = before * b.itemsize, (before + elements) * b.itemsize
        first, last = max(lo, start), min(hi, end)
        if first < last:
            yield output, first - start, s, first - lo, last - first


def _exchange_in_place(b: _Builder) -> None:
    """Everybody copies out of the others' tensors; the phase says that it has finished reading."""
    shape, size = b.shape, b.size
    b.publish_inputs(size if shape.kind in (Kind.ALLTOALL, Kind.SCATTER) else len(shape.inputs))
    for s in b.others:
        for _, tensor, output, elements in _wanted(shape, b.rank, s, size):
            b.copy(b.spaces.output(output), 0, b.spaces.peer_input(s, tensor), 0, elements * b.itemsize)
    b.post()
    _copy_own(b)
    if _staged(shape, b.rank, size):
        b.wait(_partner(b))


# ---- checks -----------------------------------------------------------------------------------


def _check(shape: CallShape, rank: int, size: int, window_bytes: int, variant: Variant) -> None:
    """A program for a shape that no call has would read what is not there."""
    if shape.kind in POINT_TO_POINT:
        raise ValueError(f"{shape.kind.name} goes over a ring between two members and has no program")
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in a group of {size}")
    if shape.itemsize < 1 or LINE % shape.itemsize:
        raise ValueError(f"elements of {shape.itemsize} bytes do not divide {LINE}")
    if (shape.kind in ROOTED) != (0 <= shape.root < size):
        raise ValueError(f"root {shape.root} of {shape.kind.name} in a group of {size}")
    if shape.partial and shape.partial < shape.itemsize:
        raise ValueError(f"sums of {shape.partial} bytes for elements of {shape.itemsize}")
    if window_bytes < LINE * (max(1, size - 1) if shape.kind is Kind.REDUCE_SCATTER else 1):
        raise ValueError(f"windows of {window_bytes} bytes are too small for a group of {size}")
    _check_tensors(shape, rank, size)
    if variant is Variant.SMALL:
        if shape.kind is Kind.ALLTOALL and size > 1:
            raise ValueError("an ALLTOALL is never SMALL: the others' splits are known after the match only")
        if (staged := staged_bytes(shape, size)) > window_bytes // LINE * LINE and size > 1:
            raise ValueError(f"{staged} bytes do not fit into a window of {window_bytes} bytes")


def _check_tensors(shape: CallShape, rank: int, size: int) -> None:
    kind, inputs, outputs = shape.kind, shape.inputs, shape.outputs
    if min((*inputs, *outputs), default=0) < 0:
        raise ValueError("a tensor has a negative number of elements")
    if kind in (Kind.ALLREDUCE, Kind.REDUCE, Kind.BROADCAST):
        good = inputs == outputs
    elif kind is Kind.ALLGATHER:
        good = len(outputs) == size * len(inputs) and outputs[rank::size] == inputs
    elif kind is Kind.REDUCE_SCATTER:
        good = len(inputs) == size * len(outputs) and inputs[rank::size] == outputs
    elif kind is Kind.ALLTOALL:
        m = _matrix(shape)
        good = len(m) == size and inputs == m[rank] and outputs == tuple(row[rank] for row in m)
    elif kind is Kind.GATHER:
        good = len(inputs) == 1 and outputs == (inputs * size if rank == shape.root else ())
    elif kind is Kind.SCATTER:
        good = len(outputs) == 1 and inputs == (outputs * size if rank == shape.root else ())
    else:
        good = not inputs and not outputs
    if not good:
        raise ValueError(
            f"{kind.name} of rank {rank} of {size} cannot have inputs {inputs[:8]} and outputs {outputs[:8]}"
        )
