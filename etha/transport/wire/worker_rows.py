"""Which parts of a flow's lanes a worker can move itself, and the rows of its memory that travel then. Data only.

A worker moves what lies in its private memory as it travels: nothing is cast, reduced, passed on, carried or ordered
after other data, and it belongs to one rank. The agent would copy each such byte once more, through a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from etha.memory.process import IoVec
from etha.transport.copy.program import Member
from etha.transport.geometry import boxes
from etha.transport.wire.flows import Flow, FlowPiece, Span, WireProgram

#: Smallest stretch: for less, handing over the stream takes longer than copying in the agent.
MIN_STRETCH = 512 << 10
#: Shortest rows on average. Shorter ones are packed more quickly than the kernel follows a table of them.
MIN_ROW = 256
#: Most stretches that one worker may be asked to move at once, each on a thread of its own.
MAX_STRETCHES = 32

#: (peer, whether this agent sends, lane)
StreamLane = tuple[str, bool, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Stretch:
    """Neighbouring spans of a lane that ``member``'s worker can move. ``number`` is unique within the program."""

    number: int
    member: Member
    sends: bool
    spans: Sequence[Span]

    @property
    def wire(self) -> int:
        """Bytes that travel."""
        return sum(span.wire for span in self.spans)

    @property
    def nbytes(self) -> int:
        """Payload in bytes."""
        return sum(span.nbytes for span in self.spans)

    @cached_property
    def rows(self) -> IoVec:
        """(address in the worker, bytes) in the order in which they travel; padding has address 0."""
        parts: list[IoVec] = []
        for span in self.spans:
            for _, piece in span.pieces:
                parts.append(_piece_rows(piece, 0 if self.sends else 1))
                if piece.padded > piece.nbytes:
                    parts.append(np.array([(0, piece.padded - piece.nbytes)], np.uint64))
        rows = _joined(np.concatenate(parts))
        assert int(rows[:, 1].sum()) == self.wire, "rows that do not fill their spans"
        return rows


def worker_stretches(program: WireProgram) -> Mapping[StreamLane, Mapping[int, Stretch]]:
    """The stretches of each lane, by the number of their first span. Empty if nothing is worth it, or if order
    matters."""
    if program.early or program.aliased or program.observer is not None:
        return {}
    found: dict[StreamLane, dict[int, Stretch]] = {}
    many: dict[Member, int] = {}
    number = 0
    for sends, flows in ((True, program.sends), (False, program.receives)):
        for peer, flow in flows.items():
            for lane, first, member, spans in _candidates(flow):
                if many.setdefault(member, 0) < MAX_STRETCHES:
                    many[member] += 1
                    stretch = Stretch(number=number, member=member, sends=sends, spans=spans)
                    found.setdefault((peer, sends, lane), {})[first] = stretch
                    number += 1
    return found


def _candidates(flow: Flow) -> list[tuple[int, int, Member, Sequence[Span]]]:
    found: list[tuple[int, int, Member, Sequence[Span]]] = []
    for lane, spans in enumerate(flow.lanes):
        numbered = [(i, _mover(span)) for i, span in enumerate(spans)]
        for member, some in groupby(numbered, key=lambda each: each[1]):
            numbers = [i for i, _ in some]
            stretch = spans[numbers[0] : numbers[-1] + 1]
            if member is not None and sum(span.wire for span in stretch) >= MIN_STRETCH:
                found.append((lane, numbers[0], member, stretch))
    return found


def _mover(span: Span) -> Member | None:
    """Whose worker can move a span; None if only the agent can."""
    plain = span.memory is None and bool(span.pieces) and len(span.owners) == 1
    if not plain or span.index >= 0 or span.parts or span.arrivals or span.after or span.carried:
        return None
    rows = 0
    for _, piece in span.pieces:
        if len(piece.ends) != 1 or piece.part is not None:
            return None
        end = piece.ends[0]
        if end.view is None or not end.view.private or end.view.device is not None:
            return None
        for tile, _, _ in end.steps:
            if tile.ends.casts:
                return None
            rows += boxes.numel(tile.axes) // _common_length(tile.axes)
    return span.owners[0] if rows * MIN_ROW <= span.nbytes else None


def _common_length(axes: boxes.Axes) -> int:
    """Elements of each run of ``boxes.common_runs``."""
    length = 1
    for axis in reversed(axes):
        if (axis.source, axis.target) != (length, length):
            break
        length *= axis.steps
    return length


def _piece_rows(piece: FlowPiece, end: int) -> IoVec:
    """The rows of one piece in the view at ``end`` (0: source, 1: target), in the order of its dense bytes."""
    view, steps = piece.ends[0]
    assert view is not None
    there: list[tuple[boxes.Ints, boxes.Ints, int]] = []
    for tile, offset, at in steps:
        source, target, length = boxes.common_runs(tile.axes)
        mine, bytes_of = (target, source) if end else (source, target)
        item = tile.ends.source.itemsize
        there.append(((mine + offset) * item, (bytes_of + at) * item, length * item))
    addresses = np.concatenate([part[0] for part in there]).astype(np.uint64) + np.uint64(view.address)
    dense = np.concatenate([part[1] for part in there])
    nbytes = np.repeat(np.array([part[2] for part in there], np.uint64), [len(part[0]) for part in there])
    order = np.argsort(dense, kind="stable")
    rows = np.empty((len(order), 2), np.uint64)
    rows[:, 0], rows[:, 1] = addresses[order], nbytes[order]
    begin = dense[order]
    whole = np.concatenate([begin[1:], [piece.nbytes]]) == begin + rows[:, 1].astype(np.int64)
    assert begin[0] == 0 and whole.all(), "rows that do not fill a piece"
    return _joined(rows)


def _joined(rows: IoVec) -> IoVec:
    """Rows of which none continues the one before it."""
    if len(rows) < 2:
        return rows
    first = np.append(True, rows[1:, 0] != rows[:-1, 0] + rows[:-1, 1])
    first[1:] |= rows[:-1, 0] == 0
    starts = np.flatnonzero(first)
    joined = np.empty((len(starts), 2), np.uint64)
    joined[:, 0], joined[:, 1] = rows[starts, 0], np.add.reduceat(rows[:, 1], starts)
    return joined
