"""Random calls of all ranks, for the simulator."""

from __future__ import annotations

from hypothesis import strategies as st

from etha.groups import schedule
from etha.groups.schedule import LINE, CallShape, Kind, Variant
from etha.groups.simulator import SimulatedCall, shapes_of_all

KINDS = [kind for kind in Kind if kind not in schedule.POINT_TO_POINT]


def variants(shapes: tuple[CallShape, ...], window_bytes: int) -> list[Variant]:
    """The ways that a call can go."""
    found = [Variant.WINDOWS, Variant.IN_PLACE]
    if shapes[0].kind is Kind.ALLTOALL or schedule.staged_bytes(shapes[0], len(shapes)) > window_bytes // LINE * LINE:
        return found
    return [Variant.SMALL, *found]


@st.composite
def shapes(draw: st.DrawFn, size: int, itemsize: int, most: int, partial: int = 0) -> tuple[CallShape, ...]:
    """One call on all ranks, of at most `most` elements in a tensor. `partial`: bytes of an element of a host's sum."""
    kind = draw(st.sampled_from(KINDS))
    count = st.one_of(st.integers(0, most), st.sampled_from([0, 1, LINE // itemsize, most]))
    root, matrix, counts = -1, None, ()
    if kind in schedule.ROOTED:
        root = draw(st.integers(0, size - 1))
    if kind in (Kind.ALLREDUCE, Kind.REDUCE, Kind.BROADCAST):
        counts = tuple(draw(st.lists(count, max_size=4)))
    elif kind in (Kind.GATHER, Kind.SCATTER):
        counts = (draw(count),)
    elif kind in (Kind.ALLGATHER, Kind.REDUCE_SCATTER):
        tensors = draw(st.integers(0, 3))
        even = draw(st.booleans())
        counts = tuple(
            c
            for _ in range(tensors)
            for c in ([draw(count)] * size if even else draw(st.lists(count, min_size=size, max_size=size)))
        )
    elif kind is Kind.ALLTOALL:
        row = st.lists(count, min_size=size, max_size=size).map(tuple)
        matrix = tuple(draw(st.lists(row, min_size=size, max_size=size)))
    return shapes_of_all(kind, size, itemsize=itemsize, counts=counts, root=root, matrix=matrix, partial=partial)


@st.composite
def rows(draw: st.DrawFn, sizes: st.SearchStrategy[int], most: int = 100, calls: int = 4) -> list[SimulatedCall]:
    """Some calls of one group, one after the other."""
    size = draw(sizes)
    several = st.lists(st.integers(0, 3), min_size=size, max_size=size).map(tuple)
    hosts = draw(st.one_of(st.just(()), several) if size <= 16 else st.just(()))  # each rank mirrors all far windows
    found = []
    for _ in range(draw(st.integers(1, calls))):
        itemsize = draw(st.sampled_from([1, 2, 4, 8, 16]))
        call = draw(shapes(size, itemsize, most, draw(st.sampled_from([0, itemsize, 2 * itemsize]))))
        window = draw(st.integers(1, 5)) * LINE * max(1, size - 1)
        if call[0].partial:
            window = max(window, 3 * LINE)
        ways = [v for v in variants(call, window) if v is not Variant.IN_PLACE or len(set(hosts)) < 2]
        found.append(SimulatedCall.of(call, draw(st.sampled_from(ways)), window, hosts))
    return found
