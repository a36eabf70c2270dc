"""compile_wire: what crosses, laid over the memory of this agent's ranks, as flows of pieces.

A sender's piece is read where it lies if it is one segment there, a receiver's is received where it shall
lie if it has one target and is one segment there; everything else is packed and unpacked, and cast on the way.
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
from etha.memory.views import View
from etha.plan import Plan
from etha.plan.planner.rank_plan import Region
from etha.transport.copy.layout import scratch
from etha.transport.copy.program import Member
from etha.transport.geometry import iovec
from etha.transport.geometry.bounds import Bounds, blocks, clip
from etha.transport.geometry.boxes import Ints
from etha.transport.geometry.iovec import Op
from etha.transport.geometry.overlap import packed
from etha.transport.wire.crossings import Crossings, Move, Part
from etha.transport.wire.flows import BUCKET, CHUNK, STREAMS, End, Flow, PartWork, Piece, WireProgram, make_flow
from etha.transport.wire.forwarding import Arrivals, Pass, hull
from etha.transport.wire.laying import STRAIGHT, Laid, Laying, Views
from etha.transport.wire.nccl_messages import Cut, message_flow, waves
from etha.transport.wire.routing import Ways


def compile_wire(
    plan: Plan,
    ways: Ways,
    sources: Views,
    targets: Views,
    *,
    staging: int = STAGING,
    bucket_size: int = BUCKET,
    streams: int = STREAMS,
    cut: Cut | None = None,
) -> WireProgram:
    """What this agent sends and receives over a wire, from ``sources[rank][tensor]`` to ``targets[rank][tensor]``.

    Both hold this agent's ranks, ``sources`` also those whose memory it reads on its host; tensors are
    numbers in ``plan.names``. ``staging`` (the least of all agents of the batch), ``bucket_size`` and
    ``streams`` must be the same on all of them: they decide the cuts. With a ``cut`` (``device_cut``) it is
    for NCCL: all views lie on one device, and neither bucket size nor streams count. ValueError for a view that is
    missing or smaller than planned, ConfigError where staging is too small.
    """
    if bucket_size <= 0 or streams <= 0:
        raise ConfigError(f"bucket size {bucket_size} and {streams} streams: both must be positive")
    if cut is not None and not {*ways.source, *ways.target} & {ways.me} <= {*cut.members}:
        raise ConfigError(f"agent {ways.me} is not one of the communicator's: {', '.join(cut.members)}")
    return _Compiler(plan, ways, sources, targets, staging, cut).program(bucket_size, streams)


def wire_crossings(plan: Plan, ways: Ways, staging: int, cut: Cut | None = None) -> Crossings:
    """What crosses, with waves of an eighth of the staging; all agents of a batch cut it alike."""
    if cut is None:
        return Crossings(plan, ways, staging // 8)
    return Crossings(plan, ways, staging // 8, cut.part, fit=True)


class _Compiler(Laying):
    def __init__(
        self, plan: Plan, ways: Ways, sources: Views, targets: Views, staging: int, cut: Cut | None = None
    ) -> None:
        super().__init__(plan, ways, sources, targets, STRAIGHT if cut is None else cut.straight)
        self._staging, self._cut = staging, cut
        specs = [plan.source[name] for name in plan.names] if cut is not None else []
        self._waves = waves([prod(s.shape) * s.dtype.itemsize for s in specs], cut) if cut is not None else ()
        self._chunk = CHUNK if cut is None else cut.chunk
        self._crossings = wire_crossings(plan, ways, staging, cut)
        self._relays = self._crossings.relays
        self._arrivals = Arrivals(self._relays.origins)
        self._passed = 0

    def program(self, bucket: int, streams: int) -> WireProgram:
        """All of it."""
        me, crossings = self.ways.me, self._crossings
        # First what comes in: what is passed on hangs on it.
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
            passed=self._passed,
            members=() if self._cut is None else self._cut.members,
            chunk=max(
                (s.wire for f in (*sends.values(), *receives.values()) for n in f.lanes for s in n if s.pieces),
                default=0,
            ),
        )

    def _flows(self, sending: bool, moves: Mapping[str, Sequence[Move]], bucket: int, streams: int) -> dict[str, Flow]:
        me = self.ways.me
        pieces: dict[str, list[Piece]] = defaultdict(list)
        for peer, some in moves.items():
            for move in some:
                pieces[peer] += self._move(move, sending)
        for agent in self._crossings.owners:
            for part in self._crossings.parts(agent):
                # Contributions go to the owner's agent, results come from it.
                crossing = self._contributions(part) if sending == (agent != me) else self._results(part, sending)
                for peer, piece in crossing:
                    pieces[peer].append(piece)
        for peer, passes in (self._relays.given if sending else self._relays.taken).items():
            for one in passes:
                pieces[peer] += self._pass(one, sending)
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

    def _move(self, move: Move, sending: bool) -> Iterator[Piece]:
        wire = self.plan.wire_dtype(move.tensor)
        owners: tuple[Member, ...] = (("source", move.source),)
        if not sending:
            owners = tuple(sorted(("target", rank) for rank, _ in move.sinks))
        for bounds in blocks(move.region.shape, self._chunk // wire.itemsize):
            if sending:
                ends = [self.end("source", move.source, move.tensor, move.region, bounds, wire, dense=True)]
            else:
                ends = [self.end("target", rank, move.tensor, r, bounds, wire, dense=True) for rank, r in move.sinks]
            piece = self.piece(1, move.tensor, wire, bounds, owners, ends)
            yield piece if sending else self._marked(piece, move.tensor, move.sinks, bounds)

    # ---- from target to target ----------------------------------------------------------------

    def _pass(self, one: Pass, sending: bool) -> Iterator[Piece]:
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

    def _marked(self, piece: Piece, tensor: int, sinks: Sequence[tuple[int, Region]], bounds: Bounds) -> Piece:
        """The piece with a number, where this agent passes on what it brings."""
        if not self._relays.roots:
            return piece
        number = self._arrivals.mark((self._relays.place(tensor, rank, r), bounds) for rank, r in sinks)
        return replace(piece, arrival=number)

    # ---- reductions ---------------------------------------------------------------------------

    def _contributions(self, part: Part) -> Iterator[tuple[str, Piece]]:
        """Of a part that another agent reduces: what is sent; of an own one: what is received."""
        me, tensor = self.ways.me, part.slot.tensor
        dtype = self.plan.source[self.plan.names[tensor]].dtype
        nbytes = part.numel * dtype.itemsize
        for index, source, region in part.given:
            agent = self.ways.source[source]
            if index not in part.far or me not in (agent, part.at):
                continue
            if agent == me:
                end = self.end("source", source, tensor, region, part.bounds, dtype, dense=False)
                yield part.at, self.piece(3 * part.wave, tensor, dtype, part.bounds, (("source", source),), [end])
            else:
                yield (
                    agent,
                    Piece(
                        stage=3 * part.wave,
                        tensor=tensor,
                        nbytes=nbytes,
                        dtype=dtype,
                        owners=(),
                        part=part,
                        index=index,
                    ),
                )

    def _results(self, part: Part, sending: bool) -> Iterator[tuple[str, Piece]]:
        """Of an own part: what is sent; of another agent's: what is received. Equal results cross once."""
        me, tensor = self.ways.me, part.slot.tensor
        wire = self.plan.wire_dtype(tensor)
        found: dict[tuple[str, tuple[bytes, ...]], tuple[tuple[Ints, ...], list[tuple[int, Region]]]] = {}
        for target, region in part.wanted:
            agent = self.ways.target[target]
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

    def _sink(self, rank: int, tensor: int, region: Region, part: Part, wire: torch.dtype) -> Laid:
        """From the dense bytes of a result's piece to a target."""
        view = self.view("target", rank, tensor)
        self.check(region, view, 1)
        dims = clip(region.dims, part.bounds, 0)
        assert dims is not None
        _, out = packed(Region(dims=dims))
        shape = tuple(int(runs[:, 2].sum()) for runs in dims)
        dense = scratch(shape, wire)
        place = self.segment(out, dense, view, 1)
        return view, self.taken(out, dense, view, 0), place

    def _work(self, part: Part) -> PartWork:
        """How an own part is reduced: near contributions, and the targets of this agent."""
        me, tensor = self.ways.me, part.slot.tensor
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
            if self.ways.target[target] == me and dims is not None:
                view = self.view("target", target, tensor)
                self.check(region, view, 1)
                results.append(End(view, self.taken(dims, scratch(part.shape, wire), view, 0)))
                owners.add(("target", target))
        return PartWork(near=near, results=tuple(results), owners=tuple(sorted(owners)), source=dtype, wire=wire)


def _prove(
    sends: Iterable[Flow], early: Iterable[tuple[End, View, tuple[Member, ...]]], values: Iterable[PartWork]
) -> None:
    """RuntimeError unless what is read of workers' memory fits the buffers and stays apart there."""
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
