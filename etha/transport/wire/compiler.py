"""compile_wire: compile what crosses between agents into flows of pieces over the memory of this agent's ranks.

A sender reads a piece in place if it is one segment there. A receiver receives it in place if it has one target and is
one segment there. Everything else is packed, unpacked, and cast on the way. ``PieceMapper`` decides this for each
piece; the checksums of ``verify/`` map the same pieces, for reading only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np
import torch

from etha.config import STAGING
from etha.errors import ConfigError
from etha.memory.views import View, view_of
from etha.plan import Plan
from etha.plan.planner.rank_plan import Region
from etha.transport.copy.layout import TileCache, check, scratch
from etha.transport.copy.program import Columns, Member
from etha.transport.geometry import boxes, iovec
from etha.transport.geometry.bounds import Bounds, blocks, clip
from etha.transport.geometry.boxes import BoxAxis, Ints
from etha.transport.geometry.iovec import Op
from etha.transport.geometry.overlap import Written, packed
from etha.transport.geometry.tiles import Tile
from etha.transport.wire.carrying import CARRIED, HANDED, Carriage, Given, places, ring_bytes
from etha.transport.wire.crossings import ALIGN, CrossingMove, Crossings, SlotPart
from etha.transport.wire.flows import (
    BUCKET,
    CHUNK,
    EARLY,
    STREAMS,
    End,
    Flow,
    FlowPiece,
    PartWork,
    WireProgram,
    make_flow,
    span_memory,
)
from etha.transport.wire.forwarding import Arrivals, Pass, hull
from etha.transport.wire.nccl_messages import MessageCut, message_flow, waves
from etha.transport.wire.routing import Routing

Views = Mapping[int, Mapping[int, View]]
#: A view, its steps, and the byte offset at which all of it is one segment of the view (None if it is not).
MappedPiece = tuple[View | None, tuple[tuple[Tile, int, int], ...], int | None]
#: Smaller segments share a chunk with their neighbours, because a system call costs more than copying them.
STRAIGHT = 64 << 10


class PieceMapper:
    """Maps the pieces of one program to views. ``early`` and ``staged`` collect the reads of memory that is also
    written."""

    def __init__(self, plan: Plan, routing: Routing, sources: Views, targets: Views, straight: int = STRAIGHT) -> None:
        self.plan, self.routing = plan, routing
        self._views: dict[str, Views] = {"source": sources, "target": targets}
        self._geometry = TileCache(Columns())
        self._written = Written(v for views in targets.values() for v in views.values())
        self._laid: dict[object, tuple[tuple[tuple[Tile, int, int], ...], int | None]] = {}
        self._checked: set[tuple[int, int, tuple[int, ...]]] = set()
        self._kept: list[Region] = []  # keeps them alive, because their ids are in keys
        self._straight = straight
        self.early: list[tuple[End, View, tuple[Member, ...]]] = []
        self.staged = 0
        #: Whether any source lies where a target is written.
        self.shares = any(self._written.overlaps(v) for views in sources.values() for v in views.values())

    def end(
        self,
        side: str,
        rank: int,
        tensor: int,
        region: Region,
        bounds: Bounds,
        wire: torch.dtype,
        *,
        dense: bool,
        read: bool | None = None,
    ) -> MappedPiece:
        """Map the part of a region within ``bounds`` between a tensor and dense bytes.

        ``dense``: bounds count in the packed region; otherwise in the slot at the region's other end. ``read``: copy
        from the tensor to the bytes; by default a source is read and a target written.
        """
        view = self.view(side, rank, tensor, region.product if side == "source" else 0)
        end = 0 if (side == "source" if read is None else read) else 1
        self.check(region, view, end)
        key = (id(region), bounds, end, dense, wire, view.shape, view.strides, view.dtype, view.private)
        found = self._laid.get(key)
        if found is None:
            dims: Sequence[Ints] = region.dims
            if dense:
                dims = packed(region)[end]
            clipped = clip(dims, bounds, 1 - end)
            shape = tuple(last - first for first, last in bounds)
            if clipped is None or tuple(int(runs[:, 2].sum()) for runs in clipped) != shape:
                raise ValueError(f"{self.plan.names[tensor]!r}: a chunk does not fill its part of a slot")
            other = scratch(shape, wire)
            here, there = (view, other) if end == 0 else (other, view)
            found = self._laid[key] = (
                self.taken(clipped, here, there, 1 - end),
                self.segment(clipped, here, there, end),
            )
        return view, found[0], found[1]

    def taken(self, dims: Sequence[Ints], here: View, there: View, dense: int) -> tuple[tuple[Tile, int, int], ...]:
        """Steps (tile, offset in the view, offset in the dense bytes); ``dense`` says which end (0, 1) the dense bytes
        are."""
        found, source, target = self._geometry.block(dims, here, there)
        steps: list[tuple[Tile, int, int]] = []
        for tile, _, at, to in found:
            for a, b in zip((at + source).tolist(), (to + target).tolist(), strict=True):
                steps.append((tile, b, a) if dense == 0 else (tile, a, b))
        return tuple(steps)

    def segment(self, dims: Sequence[Ints], here: View, there: View, end: int) -> int | None:
        """Byte offset at which all of it is one segment of the mapped view at ``end``; None if it is not one
        segment."""
        view = there if end else here
        if view.private or here.dtype is not there.dtype:
            return None
        placed = boxes.boxes(dims, here.strides, there.strides)
        if len(placed) != 1:
            return None
        axes = boxes.ordered(placed[0].axes, "target")
        if axes and (len(axes) > 1 or axes[0] != BoxAxis(axes[0].steps, 1, 1)):
            return None
        return (placed[0].target if end else placed[0].source) * view.dtype.itemsize

    def piece(
        self,
        stage: int,
        tensor: int,
        wire: torch.dtype,
        bounds: Bounds,
        owners: tuple[Member, ...],
        laid: Sequence[MappedPiece],
        part: SlotPart | None = None,
    ) -> FlowPiece:
        """The piece between the dense bytes of ``bounds`` and these ends. A source that is also written is staged
        early."""
        numel = prod(last - first for first, last in bounds)
        nbytes = numel * wire.itemsize
        if owners and owners[0][0] == "source" and self.aliased(laid[0][0]):
            laid, owners = [self.stage(laid[0], numel, wire, owners)], ()
        view, _, place = laid[0]
        straight, direct = None, False
        if len(laid) == 1 and place is not None and view is not None and nbytes >= self._straight:
            if view.device is None:
                straight = span_memory(view, view.address + place, nbytes)
            else:  # a staged piece has no address yet
                direct = view.space != EARLY
        return FlowPiece(
            stage=stage,
            tensor=tensor,
            nbytes=nbytes,
            dtype=wire,
            owners=owners,
            ends=tuple(End(v, steps) for v, steps, _ in laid),
            straight=straight,
            direct=direct,
            address=0 if view is None or place is None else view.address + place,
            part=part,
        )

    def aliased(self, view: View | None) -> bool:
        return view is not None and self._written.overlaps(view)

    def stage(self, laid: MappedPiece, numel: int, dtype: torch.dtype, owners: tuple[Member, ...]) -> MappedPiece:
        """Stage the piece before anything is written, because a target overlaps it."""
        view, steps, _ = laid
        if view is not None and view.device is not None:
            stage = replace(
                scratch((numel,), dtype), address=self.staged, space=EARLY, place=self.staged, device=view.device
            )
            self.staged += -(-stage.nbytes // ALIGN) * ALIGN
        else:
            stage = view_of(torch.empty(numel, dtype=dtype))
            self.staged += stage.nbytes
        self.early.append((End(view, steps), stage, owners))
        whole = [np.array([[0, 0, numel]], np.int64)]
        return stage, self.taken(whole, stage, scratch((numel,), dtype), 1), 0

    def view(self, side: str, rank: int, tensor: int, product: int = 0) -> View:
        """The view of a rank's tensor. ValueError if none was given."""
        try:
            return self._views[side][rank][self.plan.local_number(tensor, product)]
        except KeyError:
            raise ValueError(f"{side} rank {rank} gave no memory for {self.plan.names[tensor]!r}") from None

    def check(self, region: Region, view: View, end: int) -> None:
        """Raise ValueError unless a region lies inside a view; each pair is checked once."""
        key = (id(region), end, view.shape)
        if key not in self._checked:
            check(region.dims, view, end)
            self._checked.add(key)
            self._kept.append(region)


def compile_wire(
    plan: Plan,
    routing: Routing,
    sources: Views,
    targets: Views,
    *,
    staging: int = STAGING,
    bucket_size: int = BUCKET,
    streams: int = STREAMS,
    cut: MessageCut | None = None,
) -> WireProgram:
    """Compile what this agent sends and receives, from ``sources[rank][tensor]`` to ``targets[rank][tensor]``.

    Both hold this agent's ranks; ``sources`` also holds those whose memory it reads on its host. Tensors are indices
    into ``plan.names``, and for further products of a source ``plan.local_number``. ``staging`` (the least of all
    agents of the batch), ``bucket_size`` and ``streams`` must be the same on all agents, because they decide the cuts.
    With a ``cut`` (``device_cut``) the program is for NCCL: all views lie on one device, and bucket size and streams do
    not matter. ValueError if a view is missing or smaller than planned, ConfigError if staging is too small.
    """
    if bucket_size <= 0 or streams <= 0:
        raise ConfigError(f"bucket size {bucket_size} and {streams} streams: both must be positive")
    if cut is not None and not {*routing.source, *routing.target} & {routing.me} <= {*cut.members}:
        raise ConfigError(f"agent {routing.me} is not one of the communicator's: {', '.join(cut.members)}")
    return _Compiler(plan, routing, sources, targets, staging, cut).program(bucket_size, streams)


def wire_crossings(plan: Plan, routing: Routing, staging: int, cut: MessageCut | None = None) -> Crossings:
    """What crosses, in waves of an eighth of the staging. All agents of a batch cut it the same way."""
    if cut is None:
        return Crossings(plan, routing, staging // 8)
    return Crossings(plan, routing, staging // 8, cut.part, fit=True)


class _Compiler(PieceMapper):
    def __init__(
        self, plan: Plan, routing: Routing, sources: Views, targets: Views, staging: int, cut: MessageCut | None = None
    ) -> None:
        super().__init__(plan, routing, sources, targets, STRAIGHT if cut is None else cut.straight)
        self._staging, self._cut = staging, cut
        specs = [plan.source[name] for name in plan.names] if cut is not None else []
        self._waves = waves([prod(s.shape) * s.dtype.itemsize for s in specs], cut) if cut is not None else ()
        self._chunk = CHUNK if cut is None else cut.chunk
        self._crossings = wire_crossings(plan, routing, staging, cut)
        self._relays, self._carrying = self._crossings.relays, self._crossings.carrying
        if cut is not None and not self._carrying.empty:
            raise ValueError("agents carry nothing for each other over NCCL: plan with carry=False")
        #: What this agent carries, piece by piece: from which agent to which.
        self._ring: tuple[tuple[str, str, FlowPiece], ...] = ()
        self._ring_bytes = 0
        self._arrivals = Arrivals(self._relays.origins)
        self._passed = 0

    def program(self, bucket: int, streams: int) -> WireProgram:
        """The whole program."""
        me, crossings = self.routing.me, self._crossings
        self._ring = tuple(self._ring_pieces())
        # Receives first, because forwarded pieces depend on them.
        receives = self._flows(False, crossings.received, bucket, streams)
        if missing := self._relays.roots - self._arrivals.seen:
            names = sorted({self.plan.names[place.tensor] for place in missing})
            raise ValueError(f"{names}: passed on, but not received from another agent")
        sends = self._flows(True, crossings.sent, bucket, streams)
        mine = tuple(crossings.parts(me)) if me in crossings.owners else ()
        sent: dict[int, int] = defaultdict(int)
        for flow in sends.values():
            for lane in flow.lanes:
                for part in (part for span in lane for part in span.parts):
                    sent[part.number] += 1
        values = {part.number: replace(self._work(part), sends=sent[part.number]) for part in mine}
        if self.staged > self._staging // 4:
            raise ConfigError(
                f"source and target share memory: {self.staged} bytes must be staged before the first is written, "
                f"a quarter of {self._staging} bytes of staging may be: give the agents more staging memory"
            )
        widths = [(p.numel, values[p.number], p.slot.accumulate.itemsize) for p in mine]
        even, odd = (max((p.end for p in mine if p.wave % 2 == i), default=0) for i in (0, 1))
        _prove(sends.values(), self.early, values.values())
        return WireProgram(
            sends=sends,
            receives=receives,
            parts=mine,
            values=values,
            early=tuple(self.early),
            aliased=self.shares,
            staged=self.staged,
            scratch=max((n * (w.source.itemsize + 3 * a + w.wire.itemsize) for n, w, a in widths), default=0),
            slabs=(even, odd),
            ring=self._ring_bytes,
            passed=self._passed,
            members=() if self._cut is None else self._cut.members,
            chunk=max(
                (s.wire for f in (*sends.values(), *receives.values()) for n in f.lanes for s in n if s.pieces),
                default=0,
            ),
        )

    def _flows(
        self, sending: bool, moves: Mapping[str, Sequence[CrossingMove]], bucket: int, streams: int
    ) -> dict[str, Flow]:
        me = self.routing.me
        pieces: dict[str, list[FlowPiece]] = defaultdict(list)
        for peer, some in moves.items():
            for move in some:
                pieces[peer] += self._move(move, sending)
        for agent in self._crossings.owners:
            for part in self._crossings.parts(agent):
                # Contributions go to the owner's agent; results come from it.
                crossing = self._contributions(part) if sending == (agent != me) else self._results(part, sending)
                for peer, piece in crossing:
                    pieces[peer].append(piece)
        for peer, passes in (self._relays.given if sending else self._relays.taken).items():
            for one in passes:
                pieces[peer] += self._pass(one, sending)
        for peer, piece in self._carry(sending):
            pieces[peer].append(piece)
        flows = {}
        turns = self._crossings.rounds
        for peer in sorted((p for p, found in pieces.items() if found), key=lambda p: (turns.get(p, 0), p)):
            names = (me, peer) if sending else (peer, me)
            mark = self.plan.digest()
            if self._cut is not None:
                flows[peer] = message_flow(
                    peer=peer, names=names, mark=mark, pieces=pieces[peer], cut=self._cut, waves=self._waves
                )
                continue
            pieces[peer].sort(key=lambda p: p.stage)
            flows[peer] = make_flow(
                peer=peer, names=names, mark=mark, pieces=pieces[peer], streams=streams, bucket=bucket
            )
        return flows

    # ---- tensor to tensor ---------------------------------------------------------------------

    def _move(self, move: CrossingMove, sending: bool) -> Iterator[FlowPiece]:
        wire = self.plan.wire_dtype(move.tensor)
        owners: tuple[Member, ...] = (("source", move.source),)
        if not sending:
            owners = tuple(sorted(("target", rank) for rank, _ in move.sinks))
        # What targets forward stays in the plan's order, so that every hop is soon at work.
        route = () if self.plan.passed_on(move.tensor) else (move.source, *(rank for rank, _ in move.sinks))
        for bounds in blocks(move.region.shape, self._chunk // wire.itemsize):
            if sending:
                ends = [self.end("source", move.source, move.tensor, move.region, bounds, wire, dense=True)]
            else:
                ends = [self.end("target", rank, move.tensor, r, bounds, wire, dense=True) for rank, r in move.sinks]
            piece = replace(self.piece(1, move.tensor, wire, bounds, owners, ends), route=route)
            yield piece if sending else self._marked(piece, move.tensor, move.sinks, bounds)

    # ---- from target to target ----------------------------------------------------------------

    def _pass(self, one: Pass, sending: bool) -> Iterator[FlowPiece]:
        tensor, wire = one.tensor, self.plan.wire_dtype(one.tensor)
        for bounds in blocks(one.region.shape, self._chunk // wire.itemsize):
            if sending:
                laid = self.end("target", one.rank, tensor, one.region, bounds, wire, dense=True, read=True)
                piece = self.piece(one.stage, tensor, wire, bounds, (("target", one.rank),), [laid])
                self._passed += piece.nbytes
                yield replace(piece, after=self._arrivals.before(one.origin, bounds))
                continue
            owners: tuple[Member, ...] = tuple(sorted(("target", rank) for rank, _ in one.sinks))
            ends = [self.end("target", rank, tensor, r, bounds, wire, dense=True) for rank, r in one.sinks]
            yield self._marked(self.piece(one.stage, tensor, wire, bounds, owners, ends), tensor, one.sinks, bounds)

    # ---- through a carrier ---------------------------------------------------------------------

    def _carry(self, sending: bool) -> Iterator[tuple[str, FlowPiece]]:
        """What goes to carriers and what they hand on, at all of its ends, with the agent at the other end."""
        for giver, taker, piece in self._ring:
            yield (taker, replace(piece, stage=HANDED)) if sending else (giver, piece)
            self._passed += piece.nbytes * sending
        if sending:
            for peer, some in self._carrying.given.items():
                for one in some:
                    yield from ((peer, piece) for piece in self._end_of(one, "source", one.source))
        else:
            for peer, got in self._carrying.handed.items():
                for each in got:
                    yield from ((peer, piece) for piece in self._end_of(each, "target", each.holder))

    def _end_of(self, one: Given | Carriage, side: str, rank: int) -> Iterator[FlowPiece]:
        wire, stage = self.plan.wire_dtype(one.tensor), CARRIED if side == "source" else HANDED
        for bounds in blocks(one.region.shape, self._chunk // wire.itemsize):
            laid = self.end(side, rank, one.tensor, one.region, bounds, wire, dense=True)
            yield self.piece(stage, one.tensor, wire, bounds, ((side, rank),), [laid])

    def _ring_pieces(self) -> Iterator[tuple[str, str, FlowPiece]]:
        """What this agent carries, in its order: (agent of the source, agent of the holder, piece)."""
        found: list[tuple[str, str, FlowPiece]] = []
        for one in self._carrying.carried:
            wire = self.plan.wire_dtype(one.tensor)
            for bounds in blocks(one.region.shape, self._chunk // wire.itemsize):
                nbytes = prod(last - first for first, last in bounds) * wire.itemsize
                piece = FlowPiece(stage=CARRIED, tensor=one.tensor, nbytes=nbytes, dtype=wire, owners=())
                found.append((self.routing.source[one.source], self.routing.target[one.holder], piece))
        sizes = [piece.padded for _, _, piece in found]
        self._ring_bytes = ring_bytes(sizes, self._staging)
        for (giver, taker, piece), place in zip(found, places(sizes, self._ring_bytes), strict=True):
            yield giver, taker, replace(piece, ring=place)

    def _marked(self, piece: FlowPiece, tensor: int, sinks: Sequence[tuple[int, Region]], bounds: Bounds) -> FlowPiece:
        """The piece with an arrival number if this agent forwards what it brings."""
        if not self._relays.roots:
            return piece
        number = self._arrivals.mark((self._relays.place(tensor, rank, r), bounds) for rank, r in sinks)
        return replace(piece, arrival=number)

    # ---- reductions ---------------------------------------------------------------------------

    def _contributions(self, part: SlotPart) -> Iterator[tuple[str, FlowPiece]]:
        """Contributions: those to send for a part that another agent reduces, those to receive for an own part."""
        me, tensor = self.routing.me, part.slot.tensor
        dtype = self.plan.source[self.plan.names[tensor]].dtype
        nbytes = part.numel * dtype.itemsize
        for index, source, region in part.given:
            agent = self.routing.source[source]
            if index not in part.far or me not in (agent, part.at):
                continue
            if agent == me:
                end = self.end("source", source, tensor, region, part.bounds, dtype, dense=False)
                yield part.at, self.piece(3 * part.wave, tensor, dtype, part.bounds, (("source", source),), [end])
            else:
                yield (
                    agent,
                    FlowPiece(
                        stage=3 * part.wave,
                        tensor=tensor,
                        nbytes=nbytes,
                        dtype=dtype,
                        owners=(),
                        part=part,
                        index=index,
                    ),
                )

    def _results(self, part: SlotPart, sending: bool) -> Iterator[tuple[str, FlowPiece]]:
        """Results: those to send of an own part, those to receive of another agent's. Equal results cross once."""
        me, tensor = self.routing.me, part.slot.tensor
        wire = self.plan.wire_dtype(tensor)
        found: dict[tuple[str, tuple[bytes, ...]], tuple[tuple[Ints, ...], list[tuple[int, Region]]]] = {}
        for target, region in part.wanted:
            agent = self.routing.target[target]
            if agent == part.at or me not in (agent, part.at):
                continue
            dims = clip(region.dims, part.bounds, 0)
            if dims is not None and all(runs[:, 2].any() for runs in dims):
                key = (agent, tuple(np.ascontiguousarray(runs[:, (0, 2)]).tobytes() for runs in dims))
                found.setdefault(key, (dims, []))[1].append((target, region))
        for (agent, _), (dims, sinks) in found.items():
            shape = tuple(int(runs[:, 2].sum()) for runs in dims)
            whole = tuple((0, n) for n in shape)
            into, _ = packed(Region(dims=dims))
            if sending:
                steps = self.taken(into, scratch(part.shape, wire), scratch(shape, wire), 1)
                piece = self.piece(3 * part.wave + 2, tensor, wire, whole, (), [(None, steps, None)], part)
                yield agent, piece
                continue
            sinks += [fellow for rank, region in sinks for fellow in self._relays.fellows(tensor, rank, region)]
            owners = tuple(sorted({("target", rank) for rank, _ in sinks}))
            ends = [self._sink(rank, tensor, region, part, wire) for rank, region in sinks]
            piece = self.piece(3 * part.wave + 2, tensor, wire, whole, owners, ends)
            if self._relays.roots:
                brought = ((self._relays.place(tensor, r, reg), hull(reg, part.bounds)) for r, reg in sinks)
                piece = replace(piece, arrival=self._arrivals.mark(brought))
            yield part.at, piece

    def _sink(self, rank: int, tensor: int, region: Region, part: SlotPart, wire: torch.dtype) -> MappedPiece:
        """Map the dense bytes of a result's piece to a target."""
        view = self.view("target", rank, tensor)
        self.check(region, view, 1)
        dims = clip(region.dims, part.bounds, 0)
        assert dims is not None
        _, out = packed(Region(dims=dims))
        shape = tuple(int(runs[:, 2].sum()) for runs in dims)
        dense = scratch(shape, wire)
        place = self.segment(out, dense, view, 1)
        return view, self.taken(out, dense, view, 0), place

    def _work(self, part: SlotPart) -> PartWork:
        """How an own part is reduced: the contributions read here, and the targets of this agent."""
        me, tensor = self.routing.me, part.slot.tensor
        dtype, wire = self.plan.source[self.plan.names[tensor]].dtype, self.plan.wire_dtype(tensor)
        near: dict[int, End] = {}
        owners: set[Member] = set()
        for index, source, region in part.given:
            if index not in part.far:
                laid = self.end("source", source, tensor, region, part.bounds, dtype, dense=False)
                owner: Member = ("source", source)
                if self.aliased(laid[0]):
                    laid = self.stage(laid, part.numel, dtype, (owner,))
                else:
                    owners.add(owner)
                near[index] = End(laid[0], laid[1])
        results = []
        for target, region in part.wanted:
            dims = clip(region.dims, part.bounds, 0)
            if self.routing.target[target] == me and dims is not None:
                view = self.view("target", target, tensor)
                self.check(region, view, 1)
                results.append(End(view, self.taken(dims, scratch(part.shape, wire), view, 0)))
                owners.add(("target", target))
        return PartWork(near=near, results=tuple(results), owners=tuple(sorted(owners)), source=dtype, wire=wire)


def _prove(
    sends: Iterable[Flow], early: Iterable[tuple[End, View, tuple[Member, ...]]], values: Iterable[PartWork]
) -> None:
    """Raise RuntimeError unless reads of workers' memory fit the buffers and do not overlap there."""
    for flow in sends:
        for span in (span for lane in flow.lanes for span in lane if span.memory is None):
            _prove_reads([piece.ends[0] for _, piece in span.pieces])
    for end, _, _ in early:
        _prove_reads([end])
    for work in values:
        for end in work.near.values():
            _prove_reads([end])


def _prove_reads(ends: Sequence[End]) -> None:
    ops = []
    for view, steps in ends:
        if view is not None and view.private:
            ops += [Op(tile, view, scratch((tile.numel,), tile.ends.target), offset, 0) for tile, offset, _ in steps]
    for group in iovec.kinds(ops):
        iovec.prove(group)
