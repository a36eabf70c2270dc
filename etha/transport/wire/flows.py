"""Flows: what one agent sends to, or receives from, one other in a transfer, as spans dealt to streams. Data only.

    flow = lanes (one per stream) of spans
    span = straight to or from a tensor | pieces through a chunk | a contribution | a carried piece

The bytes on the wire are the pieces in order, each dense in C-order of its dims and padded to PAD. So each end may
choose on its own which pieces go straight to memory. The streams of ``tcp`` move them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np
import torch

from etha.memory.views import View
from etha.transport.copy.program import PIECE, Member
from etha.transport.geometry.tiles import Tile
from etha.transport.wire.carrying import CARRIED, RingPlace
from etha.transport.wire.crossings import SlotPart

#: Each piece is padded to a multiple of this many bytes, so that elements in chunks are aligned.
PAD = 16
#: Largest piece, and size of the chunk that a stream packs into or receives into.
CHUNK = 1 << 20
#: Streams per pair of agents and direction, and most bytes that one stream carries before the next stream's turn.
STREAMS = 4
BUCKET = 4 << 20
#: The view space of what is staged on a device before anything is written. Addresses count from 0 there.
EARLY = "early"
#: What may travel in any order is sorted by route, so that a stream has few routes and one worker can move much of it
#: at a time (``worker_rows``). That is done in turns of at least SHARE for each stream and route, but of whole tensors
#: and in TURNS turns or fewer, because whoever passes on what arrives needs tensor after tensor.
SHARE, TURNS = 1 << 20, 16
#: Flows are cut finer than BUCKET if that lets all streams take part, but not below this size.
MIN_BUCKET = 256 << 10


#: What names a tensor's memory in every mapping of it: space, place, bytes.
Place = tuple[Hashable, int, int]


class End(NamedTuple):
    """Copies between a view and the dense bytes of a piece: (tile, offset in the view, offset in the piece).

    ``view`` None stands for the value of the piece's part, reduced at this agent.
    """

    view: View | None
    steps: tuple[tuple[Tile, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlowPiece:
    """Dense bytes that cross. ``ends`` is where they come from (one) or go to (any number).

    ``straight`` is the memory itself, if the piece is one segment of one mapped tensor and nothing is cast. ``direct``:
    the same on a device, at ``address``. ``index``: at the receiver, the index of the contribution to ``part`` that
    this is; -1 for anything else. ``arrival``: the number by which pieces to other agents wait (``after``) until this
    one is in place; -1 if none does. ``route``: the source rank and the target ranks of a piece that may travel in any
    order; () for others. ``ring``: at its carrier, where it lies until it is handed on.
    """

    stage: int
    tensor: int
    nbytes: int
    dtype: torch.dtype
    owners: tuple[Member, ...]
    ends: tuple[End, ...] = ()
    straight: memoryview | None = None
    direct: bool = False
    address: int = 0
    part: SlotPart | None = None
    index: int = -1
    arrival: int = -1
    after: tuple[int, ...] = ()
    route: tuple[int, ...] = ()
    ring: RingPlace | None = None

    @property
    def padded(self) -> int:
        """Bytes on the wire."""
        return -(-self.nbytes // PAD) * PAD


class Cut(NamedTuple):
    """A piece within a span that goes straight to or from memory. ``offset``: bytes from the view's address."""

    view: View
    offset: int
    nbytes: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Span:
    """What a stream does in one go: ``memory``, or a contribution, or pieces at their places in a chunk.

    Sending waits for ``parts`` (whose results it sends), and for the ``arrivals`` of other spans in ``after``.
    ``nbytes`` is payload, ``wire`` the bytes that travel. On a device, ``address`` takes the place of ``memory`` (0: it
    is packed), and ``key`` names the group that both ends put it in (``nccl_messages``). ``cuts`` are the pieces of
    ``memory``, in order. ``carried``: a carrier takes it or hands it on, and there its pieces lie at ``ring``.
    """

    nbytes: int
    wire: int
    owners: tuple[Member, ...]
    memory: memoryview | None = None
    pieces: tuple[tuple[int, FlowPiece], ...] = ()
    parts: tuple[SlotPart, ...] = ()
    index: int = -1
    arrivals: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    address: int = 0
    key: tuple[int, ...] = ()
    cuts: tuple[Cut, ...] = ()
    carried: bool = False
    ring: tuple[RingPlace, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """What goes one way between two agents.

    ``digest`` covers the plan, the direction, every piece, and how pieces are dealt to lanes.
    """

    peer: str
    digest: bytes
    nbytes: int
    lanes: tuple[tuple[Span, ...], ...]

    @property
    def wire(self) -> tuple[int, ...]:
        """Bytes of each lane."""
        return tuple(sum(span.wire for span in lane) for lane in self.lanes)

    @property
    def forwards(self) -> bool:
        """Whether some of it comes from other agents in the same transfer."""
        return any(span.after for lane in self.lanes for span in lane)


class FlowObserver(Protocol):
    """Observes reductions while they are made (``ReductionSums``). Called from any thread."""

    def given(self, part: SlotPart, index: int, flat: torch.Tensor) -> None:
        """Called with a contribution as it enters the reduction."""
        ...

    def value(self, part: SlotPart, flat: torch.Tensor) -> None:
        """Called with the reduced value, in the wire dtype."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class WireProgram:
    """Everything that this agent exchanges with others in one transfer of one batch. One transfer at a time may run it.

    ``early`` are copies out of memory that source and target share, to be made before anything is written. With
    ``aliased``, the lane's program must run first, too. ``slabs``: bytes of the even and of the odd waves. ``scratch``
    is the most that one reduction takes while it runs, ``staged`` what ``early`` fills, ``chunk`` the most that a
    stream packs or unpacks at once, and ``ring`` what is carried at once. ``passed`` of the bytes sent are forwarded or
    handed on: received from others before. ``sends``
    is in the order of the plan's rounds. ``observer`` is shown every reduction. On a device, ``members`` are the agents
    of the communicator, and ``early`` puts its copies into ``staged`` bytes of the view space EARLY. ``differs``: its
    streams may send the difference to what the targets hold (``differences``), and have memory for that.
    """

    sends: Mapping[str, Flow]
    receives: Mapping[str, Flow]
    parts: tuple[SlotPart, ...] = ()
    values: Mapping[int, PartWork] = field(default_factory=dict)
    early: tuple[tuple[End, View, tuple[Member, ...]], ...] = ()
    aliased: bool = False
    staged: int = 0
    scratch: int = 0
    slabs: tuple[int, int] = (0, 0)
    chunk: int = 0
    ring: int = 0
    passed: int = 0
    observer: FlowObserver | None = None
    members: tuple[str, ...] = ()
    differs: bool = False

    @property
    def total(self) -> int:
        """Payload sent and received, in bytes."""
        return sum(f.nbytes for flows in (self.sends, self.receives) for f in flows.values())

    @cached_property
    def landing(self) -> Mapping[Place, int]:
        """How many bytes come over streams for each tensor."""
        found: dict[Place, int] = {}
        for flow in self.receives.values():
            for lane in flow.lanes:
                for span in lane:
                    for place, nbytes in landed(span):
                        found[place] = found.get(place, 0) + nbytes
        return found

    @property
    def packed(self) -> int:
        """Number of stream lanes that pack or unpack, each through a chunk of ``chunk`` bytes."""
        flows = (*self.sends.values(), *self.receives.values())
        return sum(any(span.pieces for span in lane) for flow in flows for lane in flow.lanes)

    @property
    def lanes(self) -> int:
        """Number of stream lanes."""
        return sum(len(flow.lanes) for flow in (*self.sends.values(), *self.receives.values()))

    @property
    def empty(self) -> bool:
        """Whether nothing crosses."""
        return not self.sends and not self.receives


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartWork:
    """How a part is reduced here: the contributions read here, by index, and the targets of this agent."""

    near: Mapping[int, End]
    results: tuple[End, ...]
    owners: tuple[Member, ...]
    source: torch.dtype
    wire: torch.dtype
    sends: int = 0


def make_flow(
    *, peer: str, names: tuple[str, str], mark: str, pieces: Sequence[FlowPiece], streams: int, bucket: int
) -> Flow:
    """Deal pieces, which are in order, to the streams.

    ``names`` is (sender, receiver), ``mark`` the plan's digest.
    """
    table = np.array([(p.stage, p.tensor, p.nbytes, p.index) for p in pieces], "<i8").reshape(-1, 4)
    total = int(table[:, 2].sum())
    bucket = min(bucket, max(MIN_BUCKET, total // (2 * streams)))
    h = hashlib.sha256(f"etha-flow-2 {mark} {names} {streams} {bucket}".encode())
    # Only the receiver marks contributions, so their indices are left out.
    h.update(np.ascontiguousarray(table[:, :3]).tobytes())
    lanes: list[list[FlowPiece]] = [[] for _ in range(streams)]
    for _, some in groupby(pieces, key=lambda p: p.stage):
        staged = list(some)
        routed = [p for p in staged if p.route]
        nbytes = sum(p.padded for p in routed)
        if nbytes < streams * SHARE:
            routed = []
        in_turn = [p for p in staged if not p.route] if routed else staged
        for number, pieces_of in enumerate(_buckets(in_turn, bucket)):
            lanes[number % streams] += pieces_of
        for lane, share in zip(lanes, _shares(routed, streams), strict=True):
            lane += share
    routes = sorted({p.route for p in pieces})
    number_of = {route: number for number, route in enumerate(routes)}
    h.update(f"{routes} {[len(lane) for lane in lanes]}".encode())
    h.update(np.array([(p.tensor, number_of[p.route]) for lane in lanes for p in lane], "<i8").tobytes())
    dealt = tuple(tuple(spans(lane)) for lane in lanes if lane)
    return Flow(peer=peer, digest=h.digest(), nbytes=total, lanes=dealt)


def _shares(pieces: Sequence[FlowPiece], streams: int) -> list[list[FlowPiece]]:
    """Share pieces of one stage among streams, turn by turn: each takes neighbours in the order of their routes, until
    it has as much as the others of all turns so far."""
    least = max(sum(p.padded for p in pieces) // TURNS, max(streams, len({p.route for p in pieces})) * SHARE)
    shares: list[list[FlowPiece]] = [[] for _ in range(streams)]
    loads = [0] * streams
    given = 0
    for turn in _turns(pieces, least):
        given += sum(p.padded for p in turn)
        at = 0
        for piece in sorted(turn, key=lambda p: p.route):
            # On to the next stream once less than half of the piece has room here.
            while at < streams - 1 and 2 * (given - streams * loads[at]) < streams * piece.padded:
                at += 1
            shares[at].append(piece)
            loads[at] += piece.padded
    return shares


def _turns(pieces: Iterable[FlowPiece], least: int) -> Iterator[list[FlowPiece]]:
    """Group the pieces of neighbouring tensors, in groups of at least so many bytes but for the last."""
    some: list[FlowPiece] = []
    nbytes = 0
    for _, of_one in groupby(pieces, key=lambda p: p.tensor):
        if nbytes >= least:
            yield some
            some, nbytes = [], 0
        for piece in of_one:
            some.append(piece)
            nbytes += piece.padded
    if some:
        yield some


def _buckets(pieces: Iterable[FlowPiece], limit: int) -> Iterator[list[FlowPiece]]:
    """Group neighbours. A bucket is closed before the piece that would take it above ``limit``."""
    some: list[FlowPiece] = []
    nbytes = 0
    for piece in pieces:
        if some and nbytes + piece.padded > limit:
            yield some
            some, nbytes = [], 0
        some.append(piece)
        nbytes += piece.padded
    if some:
        yield some


def spans(pieces: Iterable[FlowPiece]) -> Iterator[Span]:
    """Join the pieces of a stream: neighbours in memory up to PIECE, small ones up to CHUNK, never across stages."""
    run: list[FlowPiece] = []
    wire = 0
    for piece in pieces:
        if run and not _joins(run[-1], wire, piece):
            yield _span(run)
            run, wire = [], 0
        run.append(piece)
        wire += piece.padded
    if run:
        yield _span(run)


def _joins(last: FlowPiece, wire: int, piece: FlowPiece) -> bool:
    """Whether ``piece`` continues a span of ``wire`` bytes that ends with ``last``."""
    if last.index >= 0 or piece.index >= 0 or piece.stage != last.stage:
        return False
    if last.straight is None or piece.straight is None:
        return last.straight is piece.straight and wire + piece.padded <= CHUNK
    # Forwarded data goes in small steps, so that every hop is soon at work.
    most = CHUNK if piece.after or piece.arrival >= 0 or last.arrival >= 0 else PIECE
    return (
        piece.address == last.address + last.nbytes
        and last.padded == last.nbytes
        and wire + piece.padded <= most
        and piece.ends[0].view is last.ends[0].view
    )


def _span(run: list[FlowPiece]) -> Span:
    first = run[0]
    arrivals = tuple(sorted({p.arrival for p in run if p.arrival >= 0}))
    after = tuple(sorted({number for p in run for number in p.after}))
    nbytes, wire = sum(p.nbytes for p in run), sum(p.padded for p in run)
    owners = tuple(sorted({owner for p in run for owner in p.owners}))
    carried = first.stage >= CARRIED
    if first.ring is not None:
        places = tuple(p.ring for p in run if p.ring is not None)
        return Span(nbytes=nbytes, wire=wire, owners=owners, carried=carried, ring=places)
    if first.index >= 0:
        assert first.part is not None
        return Span(nbytes=nbytes, wire=wire, owners=owners, parts=(first.part,), index=first.index)
    if first.straight is not None:
        view = first.ends[0].view
        assert view is not None
        memory = first.straight if len(run) == 1 else span_memory(view, first.address, nbytes)
        cuts = tuple(Cut(view, p.address - view.address, p.nbytes, p.dtype) for p in run)
        return Span(
            nbytes=nbytes, wire=wire, owners=owners, memory=memory, arrivals=arrivals, after=after, cuts=cuts,
            carried=carried,
        )  # fmt: skip
    packed, at = [], 0
    for piece in run:
        packed.append((at, piece))
        at += piece.padded
    parts = {p.part.number: p.part for p in run if p.part is not None}
    return Span(
        nbytes=nbytes, wire=wire, owners=owners, pieces=tuple(packed), parts=tuple(parts.values()), arrivals=arrivals,
        after=after, carried=carried,
    )  # fmt: skip


def place_of(view: View) -> Place:
    """What names its memory."""
    return view.space, view.place, view.nbytes


def landed(span: Span) -> Iterator[tuple[Place, int]]:
    """How many bytes of which tensors a span brings."""
    for cut in span.cuts:
        yield place_of(cut.view), cut.nbytes
    for _, piece in span.pieces:
        for end in piece.ends:
            if end.view is not None:
                yield place_of(end.view), sum(tile.numel for tile, _, _ in end.steps) * end.view.dtype.itemsize


def count_pieces(span: Span) -> int:
    """How many pieces it carries: both ends of a stream have the same pieces, each in spans of its own."""
    return len(span.cuts) or len(span.pieces) or len(span.ring) or 1


def divide(span: Span, kept: Sequence[bool]) -> tuple[list[Span], list[Span]]:
    """Spans of those pieces that are not ``kept``, and of those that are."""
    if not any(kept):
        return [span], []
    if all(kept):
        return [], [span]
    found: tuple[list[Span], list[Span]] = [], []
    if span.memory is None:
        for which in (False, True):
            places, at = [], 0
            for (_, piece), had in zip(span.pieces, kept, strict=True):
                if had is which:
                    places.append((at, piece))
                    at += piece.padded
            nbytes = sum(piece.nbytes for _, piece in places)
            found[which].append(replace(span, nbytes=nbytes, wire=at, pieces=tuple(places)))
        return found
    at = 0
    for had, some in groupby(zip(span.cuts, kept, strict=True), key=lambda pair: pair[1]):
        cuts = tuple(cut for cut, _ in some)
        nbytes = sum(cut.nbytes for cut in cuts)
        padding = span.wire - span.nbytes if at + nbytes == span.nbytes else 0
        memory = span.memory[at : at + nbytes]
        found[had].append(replace(span, nbytes=nbytes, wire=nbytes + padding, memory=memory, cuts=cuts))
        at += nbytes
    return found


def join(run: list[FlowPiece]) -> Span:
    """Join pieces that travel to or from a device as one message. Its size depends on their sizes alone."""
    first = run[0]
    span = _span(run)
    if len(run) > 1:
        return span
    return replace(span, wire=first.nbytes, address=first.address if first.direct else 0)


def span_memory(view: View, address: int, nbytes: int) -> memoryview:
    """``nbytes`` of a mapped view at an address of this process. The result keeps the mapping alive."""
    assert view.raw is not None, "a private view has no memory here"
    start = address - view.address
    raw = view.raw if view.raw.dtype is torch.uint8 else view.raw.view(torch.uint8)
    return memoryview(raw.numpy())[start : start + nbytes]  # type: ignore[arg-type, unused-ignore]
