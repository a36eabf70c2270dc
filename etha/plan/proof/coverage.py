"""check: the coverage proof, from the rows alone, against what the layouts say each rank owns.

For every class and turn:

- Each target element of each holder is written exactly once, with the element of the same global index, which the
  sender owns.
- Each slot takes every contribution once, in order, and no element is reduced twice.
- What a target rank forwards, it got by an earlier row of an earlier phase.
- Both ends of every link have the same rows in the same order.

It uses none of the code that made the rows, only the layouts' own tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from etha.errors import PlanError, Violation
from etha.plan.layouts import cells, dtypes
from etha.plan.layouts.layout import Layout
from etha.plan.layouts.tensor_spec import TensorSpec
from etha.plan.planner.plan import BasePlan
from etha.plan.planner.rank_plan import CARRY, CONTRIBUTE, DELIVER, FORWARD, RESULT, Region, Template
from etha.plan.planner.violations import Problem

Ints = npt.NDArray[np.int64]
#: (turn, kind, source, target) -> what each end says travels there, in order.
_Rows = dict[tuple[int, int, int, int], dict[str, list[tuple[object, ...]]]]
_WAYS = {CONTRIBUTE: "one contributes", FORWARD: "one passes on", DELIVER: "one hands on"}


def check(plan: BasePlan, progress: Callable[[int, int], None] | None = None) -> None:
    """Raise PlanError with every violation of ``plan``; return if it is proven.

    ``progress(done, total)`` is told the number of classes.
    """
    found = list(plan.violations)
    for at in range(len(plan.classes)):
        if progress is not None:
            progress(at, len(plan.classes))
        members = np.flatnonzero(plan.class_of == at)
        for turn, problem in _Proof(plan, at, plan.names[int(members[0])]).problems():
            for tensor in members[plan.turn_of[members] == turn].tolist():
                violation: Violation = problem.of(plan.names[tensor])
                found.append(violation)
    if found:
        raise PlanError(f"the plan has {len(found)} violations, the first: {found[0]}", violations=found)


class _Proof:
    """The proof of one class of equal tensors; ``name`` is any of them."""

    def __init__(self, plan: BasePlan, klass: int, name: str) -> None:
        self.plan, self.klass = plan, klass
        self.source, self.target = plan.source[name], plan.target[name]
        self.shape = self.source.shape
        wire = dtypes.wire_dtype(self.source.dtype, self.target.dtype)
        self.itemsize = dtypes.itemsize(wire)
        self.turns = plan.classes[klass].turns
        #: By side, rank and product.
        self.runs: dict[tuple[str, int, int], list[tuple[Ints, Ints, int]] | None] = {}
        #: Answers by content, because replicas, and ranks with equal cells, ask the same questions.
        self.same: dict[tuple[bytes, int, int], tuple[str, str] | None] = {}
        self.covers = CoverCache()
        self.numbers: dict[tuple[bytes, bytes, int], int] = {}
        self.number_of: dict[tuple[str, int, int], list[int]] = {}
        self.held: dict[tuple[int, int], bool] = {}
        #: (turn, slot number) -> (owner, first index per dim in its local tensor)
        self.slots: dict[tuple[int, int], tuple[int, list[int]]] = {}

    def problems(self) -> Iterator[tuple[int, Problem]]:
        """(turn, problem) of everything that is wrong in the class."""
        sources, targets = self.source.holders(), self.target.holders()
        through = self.plan.classes[self.klass].carriers
        everybody = sorted({*targets, *(through.donors if through is not None else ())})
        for rank in sources:
            yield from self._slots_of(rank)
        yield from self._reduced_once()
        for rank in targets:
            yield from self._written(rank)
        for rank in everybody:
            yield from self._passed_on(rank)
        yield from self._links(sources, everybody)

    def _template(self, side: str, rank: int) -> tuple[Template, dict[int, Region]] | None:
        template, cache = self.plan.template(self.klass, side, rank)
        return None if template is None else (template, cache)

    def _owned(self, side: str, rank: int, product: int = 0) -> list[tuple[Ints, Ints, int]] | None:
        """Per dim (local offsets, global starts, local size) of the runs of a rank, from its layout."""
        key = (side, rank, product)
        if key not in self.runs:
            spec = self.source.product(product) if side == "source" else self.target
            self.runs[key] = found = owned(spec, rank)
            self.number_of[key] = [
                self.numbers.setdefault((offsets.tobytes(), starts.tobytes(), size), len(self.numbers))
                for offsets, starts, size in found or ()
            ]
        return self.runs[key]

    def _written(self, rank: int) -> Iterator[tuple[int, Problem]]:
        """The rows of a target rank fill its local tensor exactly once, each from where it may read."""
        shape = self.target.local_shape(rank)
        assert shape is not None
        found = self._template("target", rank)
        for turn in range(self.turns):
            regions = []
            if found is not None:
                template, cache = found
                for row in range(int(template.rows[turn]), int(template.rows[turn + 1])):
                    if template.target[row] != rank or template.kind[row] == CARRY:
                        continue
                    region = template.region_of(int(template.region[row]), cache)
                    regions.append(region)
                    sender = int(template.source[row])
                    origin = None
                    passed = template.kind[row] == FORWARD
                    if template.kind[row] == RESULT:
                        number = template.make_slot(int(template.slot[row] + template.slots[turn]), 0).number
                        owner, origin = self.slots.get((turn, number), (-1, None))
                        if owner != sender:
                            text = f"slot {number} is not reduced by rank {sender}, from which it is taken"
                            yield turn, Problem("out_of_source", "target", rank, text)
                            continue
                    # A delivered row is compared with the sender's tensor where its carrier hands it on.
                    for problem in (
                        ()
                        if template.kind[row] == DELIVER
                        else self._reads("target" if passed else "source", sender, rank, region, origin)
                    ):
                        yield turn, problem
                    if int(np.prod(region.shape, dtype=np.int64)) * self.itemsize != template.nbytes[row]:
                        text = f"row {row} says {template.nbytes[row]} bytes of a region of shape {region.shape}"
                        yield turn, Problem("plan_mismatch", "target", rank, text)
                    if template.depends[row] != -1:
                        yield (
                            turn,
                            Problem("plan_mismatch", "target", rank, f"row {row} waits for its own rank"),
                        )
            missing, doubled = self.covers.of(shape, regions)
            if missing:
                yield turn, Problem("uncovered", "target", rank, f"{missing} elements are not written")
            if doubled:
                yield turn, Problem("double_write", "target", rank, f"{doubled} elements are written more than once")

    def _passed_on(self, rank: int) -> Iterator[tuple[int, Problem]]:
        """``rank`` has received what it forwards, all of it by the row that the forwarding row depends on."""
        found = self._template("target", rank)
        if found is None:
            return
        template, cache = found
        sent = np.flatnonzero(template.target != rank)
        turn_of = np.searchsorted(template.rows, sent, "right") - 1
        for row, turn in zip(sent.tolist(), turn_of.tolist(), strict=True):
            to, before = int(template.target[row]), int(template.depends[row])
            first = int(template.rows[turn]) + before
            delivered = template.kind[row] == DELIVER
            if template.kind[row] not in (FORWARD, DELIVER) or template.source[row] != rank:
                yield turn, Problem("plan_mismatch", "target", rank, f"row {row} is not between it and another rank")
            elif (
                before < 0
                or first >= row
                or template.target[first] != rank
                or (delivered != (template.kind[first] == CARRY))
            ):
                yield turn, Problem("out_of_source", "target", rank, f"no row brings what it passes on to rank {to}")
            elif template.phase[first] >= template.phase[row]:
                yield turn, Problem("out_of_source", "target", rank, f"passes on to rank {to} before it receives")
            elif delivered:
                for problem in self._delivered(template, cache, first, row):
                    yield turn, problem
            else:
                regions = (template.region_of(int(template.region[r]), cache) for r in (row, first))
                for d, (given, got) in enumerate(zip(*(r.dims for r in regions), strict=True)):
                    key = (id(given), id(got))
                    if key not in self.held:
                        self.held[key] = within(given, got)
                    if not self.held[key]:
                        text = f"passes on to rank {to} what row {first} does not bring, dim {d}"
                        yield turn, Problem("out_of_source", "target", rank, text)

    def _delivered(self, template: Template, cache: dict[int, Region], first: int, row: int) -> Iterator[Problem]:
        """A carrier hands on what it received, and the two rows together take the right elements from sender to
        holder."""
        taken, given = (template.region_of(int(template.region[r]), cache) for r in (first, row))
        rank, to = int(template.source[row]), int(template.target[row])
        for got, sent in zip(taken.dims, given.dims, strict=True):
            dense = np.cumsum(got[:, 2]) - got[:, 2]
            if not (np.array_equal(got[:, 1:], sent[:, [0, 2]]) and np.array_equal(got[:, 1], dense)):
                text = f"hands on to rank {to} something else than row {first} brings"
                yield Problem("out_of_source", "target", rank, text)
                return
        if template.nbytes[first] != template.nbytes[row]:
            yield Problem("plan_mismatch", "target", rank, f"rows {first} and {row} say different bytes")
        whole = tuple(
            np.stack([g[:, 0], s[:, 1], g[:, 2]], axis=1) for g, s in zip(taken.dims, given.dims, strict=True)
        )
        region = Region(dims=whole, product=taken.product)
        yield from self._reads("source", int(template.source[first]), to, region, [0] * len(whole))

    def _reads(self, side: str, sender: int, rank: int, region: Region, origin: list[int] | None) -> Iterator[Problem]:
        """Each run of a row takes elements that the sender owns to the same global indices of the receiver."""
        if region.product not in range(1 + len(self.source.products) * (side == "source")):
            yield Problem(
                "out_of_source", "target", rank, f"rank {sender} has no product {region.product} of it to read"
            )
            return
        here, there = self._owned(side, sender, region.product), self._owned("target", rank)
        if here is None or there is None:
            yield Problem("out_of_source", "target", rank, f"rank {sender} holds nothing of it to read")
            return
        numbers = self.number_of[side, sender, region.product], self.number_of["target", rank, 0]
        for d, (runs, mine, theirs) in enumerate(zip(region.dims, *numbers, strict=True)):
            moved = runs if origin is None else runs + np.array([origin[d], 0, 0])
            key = (moved.tobytes(), mine, theirs)
            if key not in self.same:
                self.same[key] = same_elements(moved, here[d], there[d])
            wrong = self.same[key]
            if wrong is not None:
                code, text = wrong
                yield Problem(code, "target", rank, f"from rank {sender}, dim {d}: {text}")

    def _slots_of(self, rank: int) -> Iterator[tuple[int, Problem]]:
        """The slots that ``rank`` owns take contributions 0, 1, ... K-1 of one replica row, of the same elements."""
        found = self._template("source", rank)
        if found is None or not (found[0].kind == CONTRIBUTE).any():
            return
        template, cache = found
        mine = np.flatnonzero((template.kind == CONTRIBUTE) & (template.target == rank))
        turn_of = np.searchsorted(template.rows, mine, "right") - 1
        expected = row_of(self.source, rank)
        seen: dict[tuple[int, int], list[int]] = {}
        for row, turn in zip(mine.tolist(), turn_of.tolist(), strict=True):
            slot = template.make_slot(int(template.slot[row] + template.slots[turn]), 0)
            key = (turn, slot.number)
            order = seen.setdefault(key, [])
            order.append(int(template.index[row]))
            region = template.region_of(int(template.region[row]), cache)
            dense = [
                runs.tolist() == [[int(runs[0, 0]), 0, size]]
                for runs, size in zip(region.dims, slot.shape, strict=True)
            ]
            origin = [int(runs[0, 0]) for runs in region.dims]
            sender = int(template.source[row])
            size = int(np.prod(region.shape, dtype=np.int64)) * dtypes.itemsize(self.source.dtype)
            if template.phase[row] or template.nbytes[row] != size:
                text = f"contribution of rank {sender} in phase {template.phase[row]} says {template.nbytes[row]} bytes"
                yield turn, Problem("plan_mismatch", "source", rank, text)
            if not all(dense):
                yield (
                    turn,
                    Problem("uncovered", "source", rank, f"contribution of rank {sender} does not fill its slot"),
                )
            elif len(order) == 1:
                if key in self.slots:
                    yield turn, Problem("double_write", "source", rank, f"slot {slot.number} has two owners")
                self.slots[key] = (rank, origin)
            elif self.slots.get(key, (rank, origin))[1] != origin:
                yield turn, Problem("out_of_source", "source", rank, f"rank {sender} contributes other elements")
            if order[-1] >= len(expected) or expected[order[-1]] != sender:
                text = f"contribution {order[-1]} comes from rank {sender}, not from its replica row {expected}"
                yield turn, Problem("out_of_source", "source", rank, text)
        for (turn, number), order in seen.items():
            if order != list(range(len(expected))):
                text = f"slot {number} takes contributions {order} of {len(expected)}"
                yield turn, Problem("uncovered", "source", rank, text)

    def _reduced_once(self) -> Iterator[tuple[int, Problem]]:
        """Slots of one cell do not overlap."""
        groups: dict[tuple[int, bytes], list[tuple[int, list[int], int]]] = {}
        shapes: dict[tuple[int, int], tuple[int, ...]] = {}
        for (turn, number), (owner, origin) in self.slots.items():
            found = self._template("source", owner)
            assert found is not None
            template = found[0]
            for which in range(int(template.slots[turn]), int(template.slots[turn + 1])):
                slot = template.make_slot(which, 0)
                if slot.number == number:
                    shapes[turn, number] = slot.shape
            here = self._owned("source", owner)
            assert here is not None
            cell = b"".join(starts.tobytes() + b"|" for _, starts, _ in here)
            groups.setdefault((turn, cell), []).append((number, origin, owner))
        for (turn, _), slots in groups.items():
            owner = slots[0][2]
            local = self.source.local_shape(owner)
            assert local is not None
            boxes = [
                Region(dims=tuple(np.array([[0, lo, n]]) for lo, n in zip(origin, shapes[turn, number], strict=True)))
                for number, origin, _ in slots
            ]
            doubled = cover(local, boxes)[1]
            if doubled:
                yield turn, Problem("double_write", "source", owner, f"{doubled} elements are reduced more than once")

    def _links(self, sources: list[int], targets: list[int]) -> Iterator[tuple[int, Problem]]:
        """Both ends of every link have the same rows in the same order."""
        links: _Rows = {}
        for side, ranks in (("source", sources), ("target", targets)):
            for rank in ranks:
                found = self._template(side, rank)
                if found is None:
                    continue
                for key, end, row in link_rows(*found, side, rank):
                    links.setdefault(key, {}).setdefault(end, []).append(row)
        for (turn, kind, a, b), ends in sorted(links.items(), key=lambda link: link[0]):
            if ends.get("source") != ends.get("target"):
                text = f"ranks {a} and {b} disagree on what {_WAYS.get(kind, 'goes from one')} to the other"
                side = "source" if kind == CONTRIBUTE else "target"
                yield turn, Problem("plan_mismatch", side, b, text)


def cover(shape: tuple[int, ...], regions: Sequence[Region]) -> tuple[int, int]:
    """(elements written by no region, elements written more than once) at the regions' target offsets.

    They are counted on the grid of all run bounds, whose size depends on the runs, never on the tensor. Elements
    outside the shape count as written twice, because they belong to something else.
    """
    if not shape:
        return max(0, 1 - len(regions)), int(len(regions) > 1)
    bounds = [
        np.unique(
            np.concatenate(
                [[0, n], *((r.dims[d][:, 1], r.dims[d][:, 1] + r.dims[d][:, 2]) for r in regions)], axis=None
            )
        )
        for d, n in enumerate(shape)
    ]
    count = np.zeros([len(b) - 1 for b in bounds], dtype=np.int32)
    for region in regions:
        per_dim = []
        for runs, b in zip(region.dims, bounds, strict=True):
            first = np.searchsorted(b, runs[:, 1])
            last = np.searchsorted(b, runs[:, 1] + runs[:, 2])
            inside = np.zeros(len(b) - 1, dtype=np.int32)
            for lo, hi in zip(first.tolist(), last.tolist(), strict=True):
                inside[lo:hi] += 1
            per_dim.append(inside)
        box = per_dim[0]
        for inside in per_dim[1:]:
            box = box[..., None] * inside
        count += box
    expected = np.ones((1,) * len(shape), dtype=np.int32)
    for d, (b, n) in enumerate(zip(bounds, shape, strict=True)):
        real = ((b[:-1] >= 0) & (b[1:] <= n)).astype(np.int32)
        expected = expected * real.reshape([-1 if i == d else 1 for i in range(len(shape))])
    if np.array_equal(count, expected):
        return 0, 0
    sizes = [np.diff(b) for b in bounds]
    volume = sizes[0].astype(np.float64)
    for size in sizes[1:]:
        volume = volume[..., None] * size
    return int(volume[count < expected].sum()), int(volume[count > expected].sum())


class CoverCache:
    """Caches ``cover`` for equal regions of equal shapes, because replicas ask the same."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[int, int]] = {}

    def of(self, shape: tuple[int, ...], regions: Sequence[Region]) -> tuple[int, int]:
        key = (shape, *sorted(tuple(runs[:, 1:].tobytes() for runs in region.dims) for region in regions))
        if key not in self._known:
            self._known[key] = cover(shape, regions)
        return self._known[key]


def same_elements(runs: Ints, here: tuple[Ints, Ints, int], there: tuple[Ints, Ints, int]) -> tuple[str, str] | None:
    """None if every run takes local elements ``here`` to the same global indices as ``there``, otherwise (code, why).

    ``here`` and ``there`` are (local offsets, global starts, local size) of the two ends' runs. A run may cross several
    of them if both ends jump alike.
    """
    for end, code, (_, _, size) in ((0, "out_of_source", here), (1, "double_write", there)):
        lo, hi = int(runs[:, end].min(initial=0)), int((runs[:, end] + runs[:, 2]).max(initial=0))
        if lo < 0 or hi > size or (runs[:, 2] < 0).any():
            return code, f"elements {lo}..{hi} of a local dim of {size}"
    for source, target, length in runs.tolist():
        if not length:
            continue
        cuts = np.unique(np.concatenate([[0], _inside(here[0], source, length), _inside(there[0], target, length)]))
        a, b = _globals(here, source + cuts), _globals(there, target + cuts)
        if not np.array_equal(a, b):
            at = int(np.flatnonzero(a != b)[0])
            return "out_of_source", f"reads global index {int(a[at])} for {int(b[at])}"
    return None


def within(given: Ints, got: Ints) -> bool:
    """Whether the runs ``given`` read (source offsets) only what the runs ``got`` have written (target offsets)."""
    have = got[np.argsort(got[:, 1], kind="stable")]
    begin, end = have[:, 1], have[:, 1] + have[:, 2]
    fresh = np.append(True, begin[1:] > end[:-1])[: len(begin)]
    first = np.flatnonzero(fresh)
    begin, end = begin[first], np.maximum.reduceat(end, first) if len(first) else end
    read = given[given[:, 2] > 0]
    at = np.searchsorted(begin, read[:, 0], "right") - 1
    if (at < 0).any():
        return False
    return bool((read[:, 0] + read[:, 2] <= end[at]).all())


def _inside(offsets: Ints, start: int, length: int) -> Ints:
    """Where the owner's runs begin inside [start, start + length), counted from start."""
    first, last = np.searchsorted(offsets, [start, start + length])
    return offsets[first:last] - start


def _globals(owned: tuple[Ints, Ints, int], local: Ints) -> Ints:
    offsets, starts, _ = owned
    at = np.searchsorted(offsets, local, "right") - 1
    return starts[at] + local - offsets[at]


def owned(spec: TensorSpec, rank: int) -> list[tuple[Ints, Ints, int]] | None:
    """Per dim (local offsets, global starts, local size) of the runs of a rank; None if it holds nothing."""
    if spec.present is not None and rank not in spec.present:
        return None
    for layout in spec.layouts:
        where = layout.cell(len(spec.shape), rank)
        if where is not None:
            tables = [cells.table(n, s) for n, s in zip(spec.shape, layout.grid(len(spec.shape)).splits, strict=True)]
            rows = [t.rows_of(c) for t, c in zip(tables, where, strict=True)]
            return [(t.offset[r], t.start[r], int(t.sizes[c])) for t, r, c in zip(tables, rows, where, strict=True)]
    return None


def row_of(spec: TensorSpec, rank: int) -> list[int]:
    """The ranks whose contributions are reduced with those of ``rank``, by number; read from the mesh itself."""
    layout: Layout = next(part for part in spec.layouts if rank in part)
    place = tuple(np.argwhere(layout.ranks == rank)[0])
    index = tuple(slice(None) if axis.partial else at for axis, at in zip(layout.axes, place, strict=True))
    row: list[int] = layout.ranks[index].reshape(-1).tolist()
    return row


def link_rows(
    template: Template, cache: dict[int, Region], side: str, rank: int
) -> Iterator[tuple[tuple[int, int, int, int], str, tuple[object, ...]]]:
    """((turn, kind, source, target), end, what travels) of each row, in order. Own contributions come from both
    ends."""
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
            region = template.region_of(key, cache)
            mark = marks[key] = b"%d|" % region.product + b"".join(runs.tobytes() + b"|" for runs in region.dims)
        into = None
        if slot >= 0:
            made = template.make_slot(slot + int(template.slots[turn]), 0)
            into = (made.number, made.shape, made.owner)
        # Both ends of these kinds are on one side, so the rank may be either end.
        ends = [side] if kind not in (CONTRIBUTE, FORWARD, DELIVER) else []
        ends = ends or ["source"] * (source == rank) + ["target"] * (target == rank)
        for end in ends:
            yield (turn, kind, source, target), end, (index, phase, nbytes, mark, into)
