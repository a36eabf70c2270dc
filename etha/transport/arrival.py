"""A version that memory of this agent is receiving, and what of it has come: that may be sent on. Any thread.

    a receiving run: begin --> come, finish (as bytes are in place) --> end(whole)
    a sending run:   listen --> ready(view, offset) ... --> whole | lost

Memory is named by a view's space and place, which are the same in every mapping of a segment. What is unpacked does not
lie in a row, so of that a tensor counts once all of it has come.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable

from etha.memory.views import View
from etha.transport.wire.flows import End, Place, Span, WireProgram, count_pieces, landed, place_of


class ArrivingVersion:
    """What hop ``claim`` brings to a side's memory on one agent: version ``seq``, which people call ``label``.

    ``changed()`` is called when it begins and when it ends, by whoever says so. ``earlier``: what a hop has brought
    that was to bring the same version to the same memory, and has failed. Nobody may have written to that since.
    """

    def __init__(
        self,
        claim: int,
        seq: int,
        changed: Callable[[], None] = lambda: None,
        *,
        label: object = None,
        earlier: ArrivingVersion | None = None,
    ) -> None:
        self.claim, self.seq, self.label, self._tell = claim, seq, label, changed
        self.begun = self.whole = self.lost = False
        #: Whether its run is over, so that nothing writes to the memory any more.
        self.still = False
        self._lock = threading.Lock()
        #: space -> starts and ends of what has come, in order and apart from each other.
        self._come: dict[Hashable, tuple[list[int], list[int]]] = {}
        #: Bytes that have yet to come for each tensor.
        self._left: dict[Place, int] = {}
        #: Tensors that an earlier hop has brought whole.
        self._kept = frozenset[Place]()
        self._listeners: tuple[Callable[[], None], ...] = ()
        if earlier is not None:
            with earlier._lock:
                self._come = {space: (list(a), list(b)) for space, (a, b) in earlier._come.items()}
                self._kept = earlier._kept | {place for place, left in earlier._left.items() if left == 0}
        #: Whether something of it was there before its run began.
        self.resumed = bool(self._come or self._kept)

    @property
    def over(self) -> bool:
        """Whether its hop has ended."""
        return self.whole or self.lost

    # ---- the run that receives ------------------------------------------------------------------

    def begin(self, program: WireProgram) -> None:
        """The run that brings it has begun; all of it comes over streams."""
        with self._lock:
            if self.over or self.begun:
                return
            self._left.update(program.landing)
            self.begun = True
        self._tell()

    def come(self, view: View, offset: int, nbytes: int) -> None:
        """So many bytes of a tensor are in place, from ``offset`` bytes after its start."""
        with self._lock:
            self._add(view.space, view.place + offset, view.place + offset + nbytes)
        self._notify()

    def finish(self, span: Span) -> None:
        """All of a span is in place."""
        with self._lock:
            for cut in span.cuts:
                start = cut.view.place + cut.offset
                self._add(cut.view.space, start, start + cut.nbytes)
            for place, nbytes in landed(span):
                self._left[place] = self._left.get(place, 0) - nbytes
        self._notify()

    def settle(self, *, whole: bool) -> None:
        """Its run is over, and the hop has committed, or has ended without that."""
        self.still = True
        self.end(whole=whole)

    def end(self, *, whole: bool) -> None:
        """The hop has committed, or has ended without that. Only the first word counts."""
        with self._lock:
            if self.over:
                return
            self.whole, self.lost = whole, not whole
        self._notify()
        self._tell()

    # ---- the runs that send it on ---------------------------------------------------------------

    @property
    def followed(self) -> bool:
        """Whether anybody waits for what comes."""
        return bool(self._listeners)

    def listen(self, heard: Callable[[], None]) -> None:
        """Call ``heard()`` after every change, from any thread."""
        with self._lock:
            self._listeners = (*self._listeners, heard)

    def ignore(self, heard: Callable[[], None]) -> None:
        """Call it no more."""
        with self._lock:
            self._listeners = tuple(one for one in self._listeners if one != heard)

    def ready(self, view: View, offset: int, most: int) -> int:
        """How many of ``most`` bytes of a tensor may be sent, from ``offset`` bytes after its start."""
        with self._lock:
            if self.whole or self._left.get(place_of(view)) == 0 or place_of(view) in self._kept:
                return most
            starts, ends = self._come.get(view.space, ((), ()))
            start = view.place + offset
            found = bisect_right(starts, start) - 1
            return min(most, max(0, ends[found] - start)) if found >= 0 else 0

    def has(self, end: End) -> bool:
        """Whether all that an end of a piece reads is in place."""
        return end.view is not None and self._covers(end, end.view, target=False)

    # ---- what an earlier hop has brought --------------------------------------------------------

    def goes_on(self, seq: int, label: object) -> bool:
        """Whether a later hop of that version may keep what this one has brought: it has failed, and nothing of it
        writes any more."""
        return self.lost and (self.still or not self.begun) and (self.seq, self.label) == (seq, label)

    def kept(self, span: Span) -> list[bool]:
        """For each piece of a span, whether all that it is to bring was in place before. Contributions, and what is
        forwarded or carried, always travel."""
        if not self.resumed or span.index >= 0 or span.arrivals or span.carried:
            return [False] * count_pieces(span)
        if span.cuts:
            return [self.ready(cut.view, cut.offset, cut.nbytes) >= cut.nbytes for cut in span.cuts]
        return [
            all(end.view is not None and self._covers(end, end.view, target=True) for end in piece.ends)
            for _, piece in span.pieces
        ]

    # ---- inside -------------------------------------------------------------------------------------

    def _covers(self, end: End, view: View, *, target: bool) -> bool:
        """Whether all bytes from the first to the last of each step of an end are in place; ``target``: which the end
        writes, else which it reads."""
        size = view.dtype.itemsize
        for tile, offset, _ in end.steps:
            strides = tile.target_strides if target else tile.source_strides
            last = sum((count - 1) * stride for count, stride in zip(tile.counts, strides, strict=True))
            if self.ready(view, offset * size, (last + 1) * size) < (last + 1) * size:
                return False
        return True

    def _add(self, space: Hashable, start: int, end: int) -> None:
        starts, ends = self._come.setdefault(space, ([], []))
        first, last = bisect_left(ends, start), bisect_right(starts, end)
        if first < last:
            start, end = min(start, starts[first]), max(end, ends[last - 1])
        starts[first:last], ends[first:last] = [start], [end]

    def _notify(self) -> None:
        for heard in self._listeners:
            heard()


def may_arrive(program: WireProgram) -> bool:
    """Whether what a run of this program brings can be sent on before it has ended: it reduces nothing."""
    return bool(program.receives) and not program.parts and not program.aliased
