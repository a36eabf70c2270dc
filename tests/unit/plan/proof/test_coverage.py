"""check() is a proof: it finds whatever is broken in the rows of a plan that was right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.distributed.tensor.placement_types import Partial, Shard

from etha.errors import PlanError
from etha.plan import CONTRIBUTE, Layout, Plan, Region, TensorSpec, build_plan
from etha.plan.planner.rank_plan import Template

MOVES = (Layout((4,), [Shard(0)]), Layout((3,), [Shard(1)]))
SUMS = (Layout((2, 2), [Partial(), Shard(0)]), Layout((3,), [Shard(1)]))


def plan_of(pair: tuple[Layout, Layout], shape: tuple[int, ...] = (64, 60)) -> Plan:
    here, there = (TensorSpec(shape, torch.float32, layout) for layout in pair)
    return build_plan({"w": here, "v": here}, {"w": there, "v": there})


def broken(plan: Plan, side: str, rank: int, change: Callable[[Template], Template]) -> list[str]:
    """Codes of what check() finds after ``change`` of one rank's template."""
    plan.check()
    template, _ = plan.template(0, side, rank)
    assert template is not None
    plan._templates[side, rank, 0] = (change(template), {})
    with pytest.raises(PlanError) as caught:
        plan.check()
    assert {v.name for v in caught.value.violations} == {"v", "w"}
    return sorted({v.code for v in caught.value.violations})


def rows(template: Template, keep: list[int]) -> Template:
    """Only these rows, in this order; of a class with one turn."""
    columns = ("kind", "phase", "source", "target", "slot", "index", "region", "nbytes", "depends")
    picked = {name: getattr(template, name)[keep] for name in columns}
    return dataclasses.replace(template, **picked, rows=np.array([0, len(keep)]))


def test_right_plans_pass() -> None:
    for pair in (MOVES, SUMS):
        plan_of(pair).check()


def test_a_lost_row_is_uncovered() -> None:
    codes = broken(plan_of(MOVES), "target", 1, lambda t: rows(t, list(range(1, len(t.kind)))))
    assert codes == ["plan_mismatch", "uncovered"]


def test_a_repeated_row_is_a_double_write() -> None:
    codes = broken(plan_of(MOVES), "target", 1, lambda t: rows(t, [0, *range(len(t.kind))]))
    assert codes == ["double_write", "plan_mismatch"]


def test_a_wrong_sender_reads_outside_of_what_it_owns() -> None:
    codes = broken(plan_of(MOVES), "target", 1, lambda t: dataclasses.replace(t, source=t.source[::-1].copy()))
    assert "out_of_source" in codes and "plan_mismatch" in codes


def moved(template: Template, at: int, by: int) -> Template:
    def make(key: int) -> Region:
        dims = list(template.make_region(key).dims)
        dims[-1] = dims[-1] + np.array([by if i == at else 0 for i in range(3)])
        return Region(dims=tuple(dims))

    return dataclasses.replace(template, make_region=make)


def test_a_shifted_read_takes_other_elements() -> None:
    assert "out_of_source" in broken(plan_of(MOVES), "target", 0, lambda t: moved(t, 0, 1))


def test_a_shifted_write_leaves_a_hole_and_leaves_the_tensor() -> None:
    codes = broken(plan_of(MOVES), "target", 0, lambda t: moved(t, 1, 1))
    assert "uncovered" in codes and "double_write" in codes


def test_a_longer_run_is_found() -> None:
    assert "double_write" in broken(plan_of(MOVES), "target", 2, lambda t: moved(t, 2, 1))


def test_a_sender_that_does_not_send_is_a_mismatch() -> None:
    assert broken(plan_of(MOVES), "source", 0, lambda t: rows(t, list(range(1, len(t.kind))))) == ["plan_mismatch"]


def test_another_order_at_one_end_is_a_mismatch() -> None:
    """Three replicas share two copies in slices, so that rank 0 sends two slices to one target rank."""
    plan = plan_of((Layout.replicated(3), Layout.replicated(2)))
    rp = plan.for_rank("source", 0)
    assert rp.target.tolist() == [0, 0, 0, 0] and rp.tensor.tolist() == [0, 0, 1, 1]

    def swap(t: Template) -> Template:
        return dataclasses.replace(t, region=t.region[[1, 0]])

    assert broken(plan, "source", 0, swap) == ["plan_mismatch"]


def test_a_missing_contribution_is_uncovered() -> None:
    plan = plan_of(SUMS)

    def lose(t: Template) -> Template:
        dropped = int(np.flatnonzero((t.kind == CONTRIBUTE) & (t.index == 1) & (t.target == 0))[0])
        return rows(t, [i for i in range(len(t.kind)) if i != dropped])

    assert "uncovered" in broken(plan, "source", 0, lose)


def test_contributions_out_of_order_are_found() -> None:
    plan = plan_of(SUMS)

    def swap(t: Template) -> Template:
        index = t.index.copy()
        mine = np.flatnonzero((t.kind == CONTRIBUTE) & (t.target == 0))
        index[mine] = index[mine][::-1]
        return dataclasses.replace(t, index=index)

    assert "out_of_source" in broken(plan, "source", 0, swap)


def test_a_contribution_of_other_elements_is_found() -> None:
    plan = plan_of(SUMS)

    def shift(t: Template) -> Template:
        wrong = int(t.region[np.flatnonzero((t.kind == CONTRIBUTE) & (t.index == 1) & (t.target == 0))[0]])

        def make(key: int) -> Region:
            region = t.make_region(key % t.regions)
            return moved(t, 0, 1).make_region(wrong) if key >= t.regions else region

        region = t.region.copy()
        region[(t.kind == CONTRIBUTE) & (t.index == 1) & (t.target == 0)] += t.regions
        return dataclasses.replace(t, region=region, make_region=make, regions=2 * t.regions)

    assert "out_of_source" in broken(plan, "source", 0, shift)


def test_a_result_taken_from_another_rank_is_found() -> None:
    assert "out_of_source" in broken(
        plan_of(SUMS), "target", 0, lambda t: dataclasses.replace(t, source=t.source[::-1].copy())
    )


def test_two_owners_of_one_slot_reduce_it_twice() -> None:
    plan = plan_of(SUMS)
    theirs, cache = plan.template(0, "source", 2)
    assert theirs is not None
    here = np.flatnonzero((theirs.kind == CONTRIBUTE) & (theirs.target == 2))

    def make_slot(which: int, tensor: int) -> object:
        slot = theirs.make_slot(which, tensor)
        return dataclasses.replace(slot, number=0) if slot.owner == 2 else slot

    plan.check()
    assert len(here)
    plan._templates["source", 2, 0] = (dataclasses.replace(theirs, make_slot=make_slot), cache)
    with pytest.raises(PlanError) as caught:
        plan.check()
    assert "double_write" in {v.code for v in caught.value.violations}


def test_wrong_bytes_are_a_mismatch() -> None:
    assert broken(plan_of(MOVES), "target", 0, lambda t: dataclasses.replace(t, nbytes=t.nbytes + 4)) == [
        "plan_mismatch"
    ]
