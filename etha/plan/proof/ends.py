"""What each end of every link says that travels there: the proof compares the two."""

from __future__ import annotations

from collections.abc import Iterator

from etha.plan.planner.rank_plan import CONTRIBUTE, DELIVER, FORWARD, Region, Template


def link_rows(
    template: Template, cache: dict[int, Region], side: str, rank: int
) -> Iterator[tuple[tuple[int, int, int, int], str, tuple[object, ...]]]:
    """((turn, kind, source, target), end, what travels) of each row, in order; own contributions from both ends."""
    columns = (
        template.kind, template.source, template.target, template.index, template.phase, template.nbytes,
        template.region, template.slot,
    )  # fmt: skip
    rows = zip(*(c.tolist() for c in columns), strict=True)
    bounds, turn = template.rows.tolist(), 0
    marks: dict[int, bytes] = {}
    for row, (kind, source, target, index, phase, nbytes, key, slot) in enumerate(rows):
        while row >= bounds[turn + 1]:
            turn += 1
        mark = marks.get(key)
        if mark is None:
            dims = template.region_of(key, cache).dims
            mark = marks[key] = b"".join(runs.tobytes() + b"|" for runs in dims)
        into = None
        if slot >= 0:
            made = template.make_slot(slot + int(template.slots[turn]), 0)
            into = (made.number, made.shape, made.owner)
        # Both ends of these are of one side, so a rank is the one that it is named as.
        ends = [side] if kind not in (CONTRIBUTE, FORWARD, DELIVER) else []
        ends = ends or ["source"] * (source == rank) + ["target"] * (target == rank)
        for end in ends:
            yield (turn, kind, source, target), end, (index, phase, nbytes, mark, into)
