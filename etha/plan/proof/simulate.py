"""simulate: run all ranks of a plan in one process, in place; the reference that executors must equal.

It executes the rows that agents execute, on torch tensors of any strides, without regard to speed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch

from etha.errors import ConfigError, PlanError, Violation
from etha.plan.layouts.arguments import check_locals
from etha.plan.layouts.region import part_name
from etha.plan.layouts.tensor_spec import TensorSpec
from etha.plan.planner.plan import BasePlan
from etha.plan.planner.rank_plan import CARRY, CONTRIBUTE, DELIVER, FORWARD, RESULT, Region, Slot

Tensors = Mapping[int, Mapping[str, torch.Tensor]]


def simulate(plan: BasePlan, source: Tensors, target: Tensors) -> None:
    """Run ``plan`` from ``source[rank][name]`` into ``target[rank][name]``, local tensors, in place.

    A source's further products have the names that ``part_name`` gives them.

    Source and target may share memory, because everything is read from the sources before the first write. What targets
    forward comes after that, phase by phase. PlanError if the plan has violations, or if a tensor is missing or has
    another shape or dtype than planned. ConfigError for an argument of a wrong kind.
    """
    if not isinstance(plan, BasePlan):
        raise ConfigError(f"plan is a {type(plan).__name__}, not a Plan such as build_plan returns")
    check_locals("source", source)
    check_locals("target", target)
    found = [*plan.violations, *_mismatches(plan, source, target)]
    if found:
        raise PlanError(f"cannot simulate: {len(found)} violations, first {found[0]}", violations=found)
    receivers = sorted({r for name in plan.names for r in plan.target[name].holders()})
    owners = sorted({r for name in plan.names for r in plan.source[name].holders()})
    with torch.no_grad():
        slots = _reduce(plan, owners, source)
        taken: dict[tuple[int, int], torch.Tensor] = {}
        passed: list[tuple[int, int, int, int, Region]] = []
        moved: list[list[tuple[torch.Tensor, Region, torch.Tensor]]] = [[] for _ in plan.names]
        for rank in receivers:
            rp = plan.for_rank("target", rank)
            for row in range(len(rp)):
                region, tensor = rp.region(row), int(rp.tensor[row])
                name = plan.names[tensor]
                if rp.kind[row] == CARRY:
                    here = source[int(rp.source[row])][part_name(name, region.product)]
                    taken[rank, row] = pack(here, region, 0).to(plan.wire_dtype(tensor))
                    continue
                if rp.kind[row] == DELIVER:
                    if rp.source[row] == rank:
                        dense = taken[rank, int(rp.depends[row])]
                        moved[tensor].append((target[int(rp.target[row])][name], region, dense))
                    continue
                if rp.kind[row] == FORWARD:
                    if rp.target[row] == rank:
                        passed.append((int(rp.phase[row]), tensor, int(rp.source[row]), rank, region))
                    continue
                if rp.kind[row] == RESULT:
                    here = slots[tensor, rp.slots[rp.slot[row]].number]
                else:
                    here = source[int(rp.source[row])][part_name(name, region.product)]
                dense = pack(here, region, 0).to(plan.wire_dtype(tensor))
                moved[tensor].append((target[rank][name], region, dense))
        for writes in moved:
            for there, region, dense in writes:
                unpack(there, region, dense)
        for _, tensor, sender, rank, region in sorted(passed, key=lambda row: row[:4]):
            name = plan.names[tensor]
            dense = pack(target[sender][name], region, 0).to(plan.wire_dtype(tensor))
            unpack(target[rank][name], region, dense)


def _mismatches(plan: BasePlan, source: Tensors, target: Tensors) -> list[Violation]:
    found = []
    sides: tuple[tuple[str, Mapping[str, TensorSpec], Tensors], ...] = (
        ("source", plan.source, source),
        ("target", plan.target, target),
    )
    for side, specs, tensors in sides:
        for name in plan.names:
            parts = enumerate((specs[name], *specs[name].products))
            for local, spec, rank in (
                (part_name(name, i), part, rank) for i, part in parts for rank in sorted(part.ranks())
            ):
                given, shape = tensors.get(rank, {}).get(local), spec.local_shape(rank)
                if given is None:
                    text, code = f"no tensor is given, {shape} is planned", "missing_name"
                elif tuple(given.shape) != shape:
                    text, code = f"its local shape is {tuple(given.shape)}, {shape} is planned", "shape_mismatch"
                elif given.dtype != spec.dtype:
                    text, code = f"its dtype is {given.dtype}, {spec.dtype} is planned", "dtype"
                else:
                    continue
                found.append(Violation(code=code, name=name, side=side, rank=rank, text=text))
    return found


def _reduce(plan: BasePlan, ranks: list[int], source: Tensors) -> dict[tuple[int, int], torch.Tensor]:
    """Every slot's value at the wire dtype, by (tensor, number)."""
    totals: dict[tuple[int, int], torch.Tensor] = {}
    done: dict[tuple[int, int], torch.Tensor] = {}
    for rank in ranks:
        rp = plan.for_rank("source", rank)
        for row in range(len(rp)):
            if rp.kind[row] != CONTRIBUTE or rp.target[row] != rank:
                continue
            slot, index = rp.slots[rp.slot[row]], int(rp.index[row])
            name, key = plan.names[slot.tensor], (slot.tensor, slot.number)
            part = pack(source[int(rp.source[row])][name], rp.region(row), 0).to(slot.accumulate)
            if slot.op == "norm":
                part = part**slot.p
            totals[key] = part if index == 0 else combine(totals[key], part, slot)
            if index == slot.count - 1:
                done[key] = finish(totals.pop(key), slot).to(plan.wire_dtype(slot.tensor))
    return done


def finish(total: torch.Tensor, slot: Slot) -> torch.Tensor:
    """The value of a slot from all contributions, still in the accumulate dtype."""
    if slot.op == "avg":
        return total / slot.divisor
    return total ** (1.0 / slot.p) if slot.op == "norm" else total


def pack(tensor: torch.Tensor, region: Region, end: int) -> torch.Tensor:
    """The elements of a region as a dense tensor; ``end`` 0 reads at source offsets, 1 at target offsets."""
    dense = torch.empty(region.shape, dtype=tensor.dtype)
    for where, part in _boxes(region, end):
        dense[where] = tensor[part]
    return dense


def unpack(tensor: torch.Tensor, region: Region, dense: torch.Tensor) -> None:
    """Write a dense region at its target offsets."""
    for where, part in _boxes(region, 1):
        tensor[part] = dense[where].to(tensor.dtype)


def _boxes(region: Region, end: int) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Boxes of a region: (slices of the packed region, slices of the local tensor)."""
    per_dim = []
    for runs in region.dims:
        rows, at = [], 0
        for run in runs.tolist():
            rows.append((slice(at, at + run[2]), slice(run[end], run[end] + run[2])))
            at += run[2]
        per_dim.append(rows)
    for box in itertools.product(*per_dim):
        yield tuple(b[0] for b in box), tuple(b[1] for b in box)


def combine(total: torch.Tensor, part: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Combine one more contribution; both are in the accumulate dtype."""
    match slot.op:
        case "max":
            return torch.maximum(total, part)
        case "min":
            return torch.minimum(total, part)
        case "product":
            return total * part
    return total + part
