"""Mutations planted in the rows of right plans, one by one: check() catches every one that could do harm.

Each changes an index, an owner or a bound in the rows of one rank, at one end alone or at both. What check() lets
pass is run: it must be another valid choice (of a sender, mostly), and these are counted apart.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from etha.errors import EthaError
from etha.plan import (
    CARRY,
    CONTRIBUTE,
    DELIVER,
    FORWARD,
    MOVE,
    RESULT,
    Layout,
    Plan,
    Region,
    Slot,
    TensorSpec,
    build_plan,
    simulate,
)
from etha.plan.planner.rank_plan import Template

SHAPE = (48, 10)
Change = Callable[[Template, int, random.Random], Template | None]


def hosts(name: str, ranks: int, each: int) -> list[str]:
    return [f"{name}{rank // each}" for rank in range(ranks)]


def plans() -> Iterator[Plan]:
    """Moves, moves from replicas in slices, sums, regions, chains of hosts, sums that are passed on, carried moves, and
    moves from regions."""
    rows, columns, all_ = Layout((4,), [Shard(0)]), Layout((3,), [Shard(1)]), Layout.replicated(6)
    same = Layout.region([[(0, 5), (7, 11), (13, 18)], [(1, 4), (6, 9)]], [0, 1, 2, 3])
    kept = [same, Layout.region([[(3, 20)], [(0, 2), (5, 6), (8, 10)]], [4, 5])]
    sums, twice = Layout((2, 2), [Partial(), Shard(0)]), Layout((2, 2), [Replicate(), Shard(0)])
    for source, target, relay in (
        (rows, columns, 0), (twice, columns, 0), (sums, columns, 0),
        (sums, kept, 0), (twice, kept, 2),
        (rows, all_, 2), (twice, all_, 2), (sums, all_, 2), (rows, columns, 3), (twice, columns, 3),
    ):  # fmt: skip
        where = {"source_hosts": hosts("s", 4, 2), "target_hosts": hosts("t", 6, relay)} if relay else {}
        here, there = (TensorSpec(SHAPE, torch.float32, layout) for layout in (source, target))
        yield build_plan({"w": here}, {"w": there}, relay_bytes=0, **where)  # type: ignore[arg-type]
    # Ranks that overlap, of which two hold a further product.
    here = [Layout.region([[(0, 20), (30, 40)], [(0, 10)]], [0]), Layout.region([[(12, 48)], [(0, 7)]], [1, 2])]
    more = [Layout.region([[(20, 30)], [(0, 10)]], [0]), Layout.region([[(40, 48)], [(5, 10)]], [1])]
    further = (TensorSpec(SHAPE, torch.float32, more),)
    source_spec = TensorSpec(SHAPE, torch.float32, here, products=further)
    yield build_plan({"w": source_spec}, {"w": TensorSpec(SHAPE, torch.float32, columns)})


def column(name: str, by: int, *kinds: int) -> Change:
    def change(t: Template, row: int, _rng: random.Random) -> Template | None:
        if kinds and t.kind[row] not in kinds:
            return None
        values = getattr(t, name).copy()
        values[row] += by
        return dataclasses.replace(t, **{name: values}) if values[row] >= 0 else None

    return change


def region(end: int, by: int, dim: int) -> Change:
    def change(t: Template, row: int, _rng: random.Random) -> Template | None:
        key = int(t.region[row])
        right = t.make_region(key)
        wrong = [runs.copy() for runs in right.dims]
        if not len(wrong[dim]):
            return None
        wrong[dim][0, end] += by
        keys = t.region.copy()
        keys[row] = t.regions

        def make(asked: int) -> Region:
            return dataclasses.replace(right, dims=tuple(wrong)) if asked == t.regions else t.make_region(asked)

        return dataclasses.replace(t, region=keys, make_region=make, regions=t.regions + 1)

    return change


def other_product(t: Template, row: int, _rng: random.Random) -> Template | None:
    """The same offsets in another of the products that the rank holds."""
    right = t.make_region(int(t.region[row]))
    keys = t.region.copy()
    keys[row] = t.regions

    def make(asked: int) -> Region:
        return dataclasses.replace(right, product=1 - right.product) if asked == t.regions else t.make_region(asked)

    return dataclasses.replace(t, region=keys, make_region=make, regions=t.regions + 1) if t.kind[row] == MOVE else None


def picked(t: Template, keep: list[int]) -> Template:
    names = ("kind", "phase", "source", "target", "slot", "index", "region", "nbytes", "depends")
    return dataclasses.replace(
        t, **{name: getattr(t, name)[keep] for name in names}, rows=np.array([0, len(keep)], dtype=np.int64)
    )


def lost(t: Template, row: int, _rng: random.Random) -> Template | None:
    return picked(t, [i for i in range(len(t.kind)) if i != row])


def twice(t: Template, row: int, _rng: random.Random) -> Template | None:
    return picked(t, [*range(row + 1), *range(row, len(t.kind))])


def swapped(t: Template, row: int, _rng: random.Random) -> Template | None:
    """Two neighbours of one link change places."""
    if row + 1 >= len(t.kind) or (t.source[row], t.target[row]) != (t.source[row + 1], t.target[row + 1]):
        return None
    keys = t.region.copy()
    keys[[row, row + 1]] = keys[[row + 1, row]]
    return dataclasses.replace(t, region=keys)


def other_region(t: Template, row: int, rng: random.Random) -> Template | None:
    keys = t.region.copy()
    keys[row] = rng.choice(t.region.tolist())
    return dataclasses.replace(t, region=keys) if keys[row] != t.region[row] else None


def slot_of(**wrong: Callable[[Slot], object]) -> Change:
    """The slot that a row names, another one."""

    def change(t: Template, row: int, _rng: random.Random) -> Template | None:
        if t.kind[row] not in (CONTRIBUTE, RESULT):
            return None

        def make(which: int, tensor: int) -> Slot:
            slot = t.make_slot(which, tensor)
            values = {name: make_value(slot) for name, make_value in wrong.items()}
            return dataclasses.replace(slot, **values) if which == t.slot[row] else slot  # type: ignore[arg-type]

        return dataclasses.replace(t, make_slot=make)

    return change


MUTATIONS: dict[str, Change] = {
    "sender + 1": column("source", 1), "sender - 1": column("source", -1),
    "receiver + 1": column("target", 1), "receiver - 1": column("target", -1),
    "phase + 1": column("phase", 1), "phase - 1": column("phase", -1),
    "bytes + 4": column("nbytes", 4), "bytes - 4": column("nbytes", -4),
    "contribution + 1": column("index", 1, CONTRIBUTE), "contribution - 1": column("index", -1, CONTRIBUTE),
    "slot + 1": column("slot", 1, RESULT), "slot - 1": column("slot", -1, RESULT),
    "brought by the next": column("depends", 1, FORWARD, DELIVER),
    "brought by the one before": column("depends", -1, FORWARD, DELIVER),
    "a move passed on": column("kind", FORWARD - MOVE, MOVE),
    "passed on as a move": column("kind", MOVE - FORWARD, FORWARD),
    "a move carried": column("kind", CARRY - MOVE, MOVE), "carried as a move": column("kind", MOVE - CARRY, CARRY),
    "handed on as passed on": column("kind", FORWARD - DELIVER, DELIVER),
    "a result passed on": column("kind", FORWARD - RESULT, RESULT),
    **{f"{what} {by:+d} in dim {dim}": region(end, by, dim) for dim in (0, 1)
       for end, what in enumerate(("read", "write", "length")) for by in (1, -1)},
    "lost": lost, "twice": twice, "swapped": swapped, "another region": other_region,
    "another product": other_product,
    "slot number + 1": slot_of(number=lambda s: s.number + 1),
    "slot one longer": slot_of(shape=lambda s: (s.shape[0] + 1, *s.shape[1:])),
}  # fmt: skip


def take(full: torch.Tensor, spec: TensorSpec, rank: int) -> torch.Tensor:
    """What a rank holds of the tensor."""
    rows, columns = next(part.owned(SHAPE, rank) for part in spec.layouts if rank in part) or ((), ())
    return full[[i for a, b in rows for i in range(a, b)]][:, [i for a, b in columns for i in range(a, b)]]


def harmless(plan: Plan) -> bool:
    """Whether the mutated plan still moves the right values, by running it."""
    full = torch.arange(480, dtype=torch.float32).reshape(SHAPE)
    source, target = ({r: {"w": torch.zeros(spec.local_shape(r) or ())} for r in spec.holders()}
                      for spec in (plan.source["w"], plan.target["w"]))  # fmt: skip
    for rank in plan.source["w"].products[0].ranks() if plan.source["w"].products else ():
        source[rank]["w [product 1]"] = take(full, plan.source["w"].products[0], rank)
    for side, tensors in (("source", source), ("target", target)):
        spec = plan.source["w"] if side == "source" else plan.target["w"]
        for rank, held in tensors.items():
            part = take(full, spec, rank)
            held["w"] = part.clone() if side == "source" else torch.full_like(part, -1)
            held["right"] = part * (2 if any(axis.partial for axis in plan.source["w"].layouts[0].axes) else 1)
    try:
        simulate(plan, source, target)
    except (EthaError, IndexError, RuntimeError, KeyError):
        return False
    return all(torch.equal(held["w"], held["right"]) for held in target.values())


@pytest.mark.slow
def test_check_catches_every_mutation_that_could_do_harm() -> None:
    rng = random.Random(1)
    caught, other = Counter[str](), Counter[str]()
    for number, plan in enumerate(plans()):
        plan.check()
        assert harmless(plan), number
        for side, ranks in (("source", plan.source["w"].holders()), ("target", plan.target["w"].holders())):
            for rank in ranks[:3]:
                key = (side, rank, 0)
                right = plan.template(0, side, rank)
                assert right[0] is not None
                for row in rng.sample(range(len(right[0].kind)), min(4, len(right[0].kind))):
                    for name, change in MUTATIONS.items():
                        wrong = change(right[0], row, rng)
                        if wrong is None:
                            continue
                        plan._templates[key] = (wrong, {})
                        plan._sheets.clear()
                        try:
                            plan.check()
                        except (EthaError, IndexError):
                            caught[name] += 1
                        else:
                            assert harmless(plan), f"plan {number}, {side} rank {rank}, row {row}: {name}"
                            other[name] += 1
                        plan._templates[key] = right
                        plan._sheets.clear()
    assert set(caught) == set(MUTATIONS) and caught.total() > 1000, set(MUTATIONS) - set(caught)
    assert other.total() < caught.total() / 50, other
    print(f"{caught.total()} mutations of {len(caught)} kinds caught; {other.total()} other valid choices: {other}")


def test_another_valid_sender_at_both_ends_is_no_mistake() -> None:
    """Two replicas hold all: whichever sends is right, and check() says so."""
    here, there = (TensorSpec(SHAPE, torch.float32, Layout.replicated(n)) for n in (2, 1))
    plan = build_plan({"w": here}, {"w": there})
    gets, _ = plan.template(0, "target", 0)
    assert gets is not None and gets.source.tolist() == [0]
    other = dataclasses.replace(gets, source=gets.source + 1)
    plan._templates["target", 0, 0] = plan._templates["source", 1, 0] = (other, {})
    plan._templates["source", 0, 0] = (picked(gets, []), {})
    plan.check()
    assert harmless(plan)
