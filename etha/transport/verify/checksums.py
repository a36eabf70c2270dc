"""Checksums of chunks in place: XXH3 of the bits that the target shall hold, read from either end.

    Reads(plan, routing, views).source(chunk), .sinks(chunk)  -->  Reader.sums(reads)     on a lane thread

One segment of mapped memory that needs no cast is summed in place. Everything else is gathered first, a few chunks at a
time, into memory that counts within the agent's staging.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import xxhash

from etha.memory.revocation import Guard
from etha.memory.views import CARRIERS, View
from etha.plan import Plan
from etha.plan.planner.rank_plan import Region
from etha.plan.proof.simulate import combine, finish, pack
from etha.transport.copy.cpu import Workspace
from etha.transport.copy.layout import scratch
from etha.transport.copy.program import Member
from etha.transport.copy.staging import Budget, CopySlot, StagingChunk, StagingMemory, dense_view
from etha.transport.geometry.bounds import clip
from etha.transport.geometry.boxes import Ints
from etha.transport.geometry.iovec import Op
from etha.transport.geometry.overlap import packed
from etha.transport.geometry.tiles import BOUNCE_BYTES
from etha.transport.verify.chunks import CheckChunk, Fold, Kind
from etha.transport.wire.compiler import MappedPiece, PieceMapper, Views
from etha.transport.wire.flows import span_memory
from etha.transport.wire.routing import Routing

#: Bytes that are gathered before they are summed.
GATHER = 2 << 20
#: Bytes that casts and reductions of one thread use besides.
_TEMPORARY = 4 << 20
#: Most bytes that one thread may use, its bounce buffers and one part of a reduced slot included.
READER = GATHER + _TEMPORARY + 2 * BOUNCE_BYTES + (4 << 20)
_ALIGN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """``numel`` elements to be read as ``dtype`` and summed as ``target``. ``lenient``: all NaNs count as the same."""

    laid: MappedPiece
    owner: Member
    numel: int
    dtype: torch.dtype
    target: torch.dtype
    lenient: bool = False

    @property
    def straight(self) -> memoryview | None:
        """The memory itself, if it holds what is summed; otherwise None."""
        view, _, place = self.laid
        if view is None or place is None or view.device or self.dtype is not self.target or self.lenient:
            return None
        return span_memory(view, view.address + place, self.numel * self.dtype.itemsize)


def checksum(flat: torch.Tensor, target: torch.dtype, lenient: bool) -> int:
    """XXH3 (64 bits) of ``flat``, dense, as ``target``."""
    flat = flat.to(target)
    carrier = CARRIERS[target.itemsize]
    if lenient and (target.is_floating_point or target.is_complex):
        nan = torch.isnan(flat)
        fill = complex(float("nan"), float("nan")) if carrier.is_complex else 255 if carrier is torch.uint8 else -1
        flat = flat.view(carrier).masked_fill(nan, fill)
    raw = memoryview(flat.contiguous().view(torch.uint8).numpy())  # type: ignore[arg-type, unused-ignore]
    return int(xxhash.xxh3_64_intdigest(raw))


class Reads(PieceMapper):
    """Where the chunks of one direction lie for one agent. Geometry is computed once per class of equal chunks."""

    def __init__(self, plan: Plan, routing: Routing, sources: Views, targets: Views) -> None:
        super().__init__(plan, routing, sources, targets)
        self._gathered: dict[object, MappedPiece] = {}

    def overwritten(self, chunk: CheckChunk) -> bool:
        """Whether a target is written where the chunk's source lies, so that it must be summed before anything is
        written."""
        tensor, product = chunk.subject.tensor, chunk.subject.sinks[0][1].product
        return any(self.aliased(self.view("source", rank, tensor, product)) for rank in self._givers(chunk))

    def source(self, chunk: CheckChunk) -> Read:
        """The read of the source's end of a MOVE or of a contribution."""
        subject = chunk.subject
        (_, rank), (_, region) = subject.source, subject.sinks[0]
        dtype, target = self._dtypes(subject.tensor)
        if subject.kind is Kind.GIVEN:
            laid = self.end("source", rank, subject.tensor, region, chunk.bounds, dtype, dense=False)
            return Read(laid=laid, owner=subject.source, numel=chunk.numel, dtype=dtype, target=dtype)
        lenient = dtype is not target
        wire = self.plan.wire_dtype(subject.tensor)
        if subject.source[0] == "target":  # which relays it
            wire = target
        laid = self.end(subject.source[0], rank, subject.tensor, region, chunk.bounds, wire, dense=True, read=True)
        return Read(
            laid=laid, owner=subject.source, numel=chunk.numel, dtype=wire, target=target, lenient=lenient
        )  # fmt: skip

    def sinks(self, chunk: CheckChunk) -> list[Read]:
        """The reads of the targets' ends, for this agent's targets."""
        subject = chunk.subject
        source, target = self._dtypes(subject.tensor)
        lenient = subject.kind is not Kind.MOVE or source is not target
        found = []
        for member, region in subject.sinks:
            dims = self.places(chunk, region)
            if dims is None:
                continue
            view = self.view("target", member[1], subject.tensor)
            self.check(region, view, 1)
            found.append(
                Read(
                    laid=self._gather(view, (id(region), chunk.bounds, subject.kind), dims, target),
                    owner=member,
                    numel=prod(int(runs[:, 2].sum()) for runs in dims),
                    dtype=target,
                    target=target,
                    lenient=lenient,
                )
            )
        return found

    def places(self, chunk: CheckChunk, region: Region) -> tuple[Ints, ...] | None:
        """Runs of (target offset, offset in the dense chunk, length) of one sink; None if it gets none of the chunk."""
        if chunk.subject.kind is Kind.MOVE:
            _, out = packed(region)
            return clip([runs[:, (1, 0, 2)] for runs in out], chunk.bounds, 1)
        dims = clip(region.dims, chunk.bounds, 0)
        if dims is None:
            return None
        _, out = packed(Region(dims=dims))
        return tuple(runs[:, (1, 0, 2)] for runs in out)

    def fold(self, chunk: CheckChunk) -> tuple[Fold, list[tuple[Member, list[Read]]], torch.dtype]:
        """The contributions to a slot's part, by index, and the wire dtype: the input of a reduction."""
        fold, tensor = chunk.subject.fold, chunk.subject.tensor
        assert fold is not None
        dtype, _ = self._dtypes(tensor)
        terms: list[tuple[Member, list[Read]]] = []
        shape = tuple(last - first for first, last in chunk.bounds)
        for _, rank, region in sorted(fold.given, key=lambda g: g[0]):
            view, owner = self.view("source", rank, tensor), ("source", rank)
            self.check(region, view, 0)
            dims = clip(region.dims, chunk.bounds, 1)
            assert dims is not None, "a contribution that does not fill its slot"
            steps = self.taken(dims, view, scratch(shape, dtype), 1)
            read = Read(laid=(view, steps, None), owner=owner, numel=chunk.numel, dtype=dtype, target=dtype)
            terms.append((owner, [read]))
        return fold, terms, self.plan.wire_dtype(tensor)

    def _givers(self, chunk: CheckChunk) -> set[int]:
        fold = chunk.subject.fold
        return {chunk.subject.source[1]} if fold is None else {rank for _, rank, _ in fold.given}

    def _dtypes(self, tensor: int) -> tuple[torch.dtype, torch.dtype]:
        name = self.plan.names[tensor]
        return self.plan.source[name].dtype, self.plan.target[name].dtype

    def _gather(self, view: View, key: object, dims: tuple[Ints, ...], dtype: torch.dtype) -> MappedPiece:
        where = (key, view.shape, view.strides, view.dtype, view.private)
        found = self._gathered.get(where)
        if found is None:
            dense = scratch(tuple(int(runs[:, 2].sum()) for runs in dims), dtype)
            found = (None, self.taken(dims, view, dense, 1), self.segment(dims, view, dense, 0))
            self._gathered[where] = found
        return view, found[1], found[2]


class ChecksumReader:
    """Computes checksums on one lane thread; ``number`` tells it apart in revocation pages. ``close`` frees its memory.

    ``guards`` are those of the calls whose memory is read next. ``work`` is the thread's own workspace, which the
    thread keeps; without it, the reader makes another.
    """

    def __init__(
        self,
        number: int,
        budget: Budget,
        guards: Mapping[Member, Guard],
        memory: StagingMemory | None = None,
        work: Workspace | None = None,
    ) -> None:
        self._desk = CopySlot(number, budget, memory, work)
        self._buffer = StagingChunk(budget, memory)
        self._budget, self.guards = budget, guards
        budget.take(_TEMPORARY)

    @property
    def nbytes(self) -> int:
        return self._desk.grown + _TEMPORARY + self._buffer.nbytes

    def close(self) -> int:
        """Free the memory and return its bytes."""
        own = self._desk.grown + _TEMPORARY
        gathered = self._buffer.nbytes
        self._buffer.release()
        self._desk.close()
        self._budget.take(-own)
        return own + gathered

    def sums(self, reads: Sequence[Read]) -> list[int]:
        """The checksum of each read. RevokedError if a call has returned, other ReachErrors as memory raises them."""
        found: list[int] = []
        for some in _batches(reads):
            found += self._batch(some)
        return found

    def _batch(self, reads: Sequence[Read]) -> list[int]:
        places, need = [], 0
        for read in reads:
            places.append(need)
            if read.straight is None:
                need += -(-read.numel * read.dtype.itemsize // _ALIGN) * _ALIGN
        if need:
            self._buffer.reserve(need)
        found = [0] * len(reads)
        gathered, ops = [], []
        with self._desk.inside(self.guards, sorted({read.owner for read in reads})):
            for i, (read, place) in enumerate(zip(reads, places, strict=True)):
                memory = read.straight
                if memory is not None:
                    found[i] = int(xxhash.xxh3_64_intdigest(memory))
                    continue
                dense, base = self._buffer.view(read.dtype), place // read.dtype.itemsize
                view, steps, _ = read.laid
                assert view is not None and dense.flat is not None, "a chunk that lies nowhere"
                ops += [Op(tile, view, dense, offset, base + at) for tile, offset, at in steps]
                gathered.append((i, read, dense.flat[base : base + read.numel]))
            self._desk.run(ops)
        with torch.no_grad():
            for i, read, flat in gathered:
                found[i] = checksum(flat, read.target, read.lenient)
        return found

    def folded(self, chunk: CheckChunk, reads: Reads, sinks: Sequence[Read]) -> list[int]:
        """Reduce a part of a slot again, as the program did, and sum what each of its targets shall hold."""
        fold, terms, wire = reads.fold(chunk)
        slot, source = fold.slot, terms[0][1][0].dtype
        need = chunk.numel * (source.itemsize + 3 * slot.accumulate.itemsize + wire.itemsize)
        self._budget.take(need)
        try:
            with torch.no_grad():
                total: torch.Tensor | None = None
                for owner, some in terms:
                    given = torch.empty(chunk.numel, dtype=source)
                    dense = dense_view(given)
                    with self._desk.inside(self.guards, [owner]):
                        self._desk.run(
                            [Op(t, r.laid[0], dense, o, at) for r in some if r.laid[0] for t, o, at in r.laid[1]]
                        )
                    term = given.to(slot.accumulate, copy=True)
                    if slot.op == "norm":
                        term = term**slot.p
                    total = term if total is None else combine(total, term, slot)
                assert total is not None, "a slot without contributions"
                value = finish(total, slot).to(wire)
                shape = tuple(last - first for first, last in chunk.bounds)
                dims = [clip(region.dims, chunk.bounds, 0) for _, region in chunk.subject.sinks]
                parts = [pack(value.view(shape), Region(dims=found), 0) for found in dims if found is not None]
                return [checksum(p.reshape(-1), r.target, True) for p, r in zip(parts, sinks, strict=True)]
        finally:
            self._budget.take(-need)


def _batches(reads: Sequence[Read]) -> Iterator[list[Read]]:
    some: list[Read] = []
    nbytes = 0
    for read in reads:
        size = read.numel * read.dtype.itemsize
        if some and nbytes + size > GATHER:
            yield some
            some, nbytes = [], 0
        some.append(read)
        nbytes += size
    if some:
        yield some
