"""Every reason why a set of tensors cannot be planned, found without planning it.

Registration lists these; ``check()`` adds what only a plan's rows can show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from etha.errors import Violation
from etha.plan.layouts import dtypes
from etha.plan.layouts.region import DimRuns
from etha.plan.layouts.tensor_spec import TensorSpec
from etha.plan.planner.chunks import TensorClass
from etha.plan.planner.reduction import reduce_op

SOURCE, TARGET = "source", "target"
#: Most regions of a source times pieces into which they cut a tensor. A model's loaders stay far below it.
MAX_ENTRIES = 1 << 24


@dataclass(frozen=True, slots=True)
class Problem:
    """A violation of a whole class of equal tensors, before it has a tensor's name."""

    code: str
    side: str
    rank: int | None
    text: str

    def of(self, name: str) -> Violation:
        return Violation(code=self.code, name=name, side=self.side, rank=self.rank, text=self.text)


def spec_problems(source: TensorSpec, target: TensorSpec) -> list[Problem]:
    """What prevents moving a tensor from ``source`` to ``target``, judged by the two specs alone."""
    found = []
    if source.shape != target.shape:
        text = f"shape {source.shape} on the source, {target.shape} on the target"
        found.append(Problem("shape_mismatch", TARGET, None, text))
    reason = dtypes.castable(source.dtype, target.dtype)
    if reason is not None:
        found.append(Problem("dtype", TARGET, None, reason))
    if any(axis.partial for part in target.layouts for axis in part.axes):
        text = "the target layout is Partial: nobody can say how a value is to be split into contributions"
        found.append(Problem("target_partial", TARGET, None, f"{text}; give Replicate or Shard"))
    contributes = [any(axis.partial for axis in part.axes) for part in source.layouts]
    if all(sums or part.kept is not None for sums, part in zip(contributes, source.layouts, strict=True)):
        for part in source.layouts if any(contributes) else ():
            if part.kept is not None:
                text = "it holds a region of what others hold Partial contributions of: reduce these first"
                found += [Problem("unsupported", SOURCE, rank, text) for rank in part.ranks.reshape(-1).tolist()]
    for part in source.layouts:
        partial = part.grid(len(source.shape)).partial
        if partial:
            how = reduce_op(partial)
            reason = how if isinstance(how, str) else dtypes.reducible(source.dtype, how[0])
            if reason is not None:
                found.append(Problem("unsupported", SOURCE, None, reason))
    return found


def coverage_problems(klass: TensorClass) -> list[Problem]:
    """Target ranks that need elements which no present source rank holds."""
    if not klass.m2m.gaps and all((h.count > 0).all() for h in klass.m2m.source):
        return []
    found = []
    if klass.m2m.gaps:
        grids = len(klass.m2m.source)
        most = max((block.pieces for block in klass.blocks), default=0)
        if most * grids > MAX_ENTRIES:
            text = f"its {grids} regions cut it into {most} pieces: at most {MAX_ENTRIES // grids} can be planned"
            return [
                Problem("unsupported", SOURCE, None, f"{text}; register fewer runs, or let ranks hold equal regions")
            ]
    width = klass.m2m.replicas if klass.reduction is None else 1
    for block in klass.blocks:
        wanted, lost = (np.zeros(len(block.target.count), dtype=np.int64) for _ in range(2))
        first: dict[int, str] = {}
        for pieces in block.all(width):
            if klass.reduction is not None:
                count = klass.reduction.holding.count[klass.reduction.split(pieces.cells[0])[0]]
            else:
                held = zip(klass.m2m.source, pieces.cells, strict=True)
                count = np.sum([np.where(c < 0, 0, h.count[c]) for h, c in held], axis=0)
            np.add.at(wanted, pieces.copies, pieces.size)
            missing = np.flatnonzero((count == 0) & (pieces.size > 0) & (block.target.count[pieces.copies] > 0))
            np.add.at(lost, pieces.copies[missing], pieces.size[missing])
            some, at = np.unique(pieces.copies[missing], return_index=True)
            for cell, piece in zip(some.tolist(), missing[at].tolist(), strict=True):
                first.setdefault(cell, _box(block.bounds(pieces, piece)))
        for cell, where in sorted(first.items()):
            holders = block.target.ranks[cell, 0, : block.target.count[cell]].tolist()
            text = f"{lost[cell]} of {wanted[cell]} elements are held by no source rank that registered it"
            found += [Problem("uncovered", TARGET, rank, f"{text}, among them {where}") for rank in holders]
    return found


def _box(runs: Sequence[DimRuns]) -> str:
    """Elements of a tensor, as people read them: [0:2,5:9 x 0:64]."""
    return f"[{' x '.join(_some(kept) for kept in runs)}]"


def _some(kept: DimRuns) -> str:
    return f"{DimRuns(kept.runs[:4])}{',...' if len(kept.runs) > 4 else ''}"


def name_violations(source: Mapping[str, TensorSpec], target: Mapping[str, TensorSpec]) -> Iterator[Violation]:
    """Names that only one side has: ``unknown_name`` if only the source has it, ``missing_name`` if only the target."""
    for name in sorted(source.keys() - target.keys()):
        text = "the source has it, the target does not: register it on both sides under one name"
        yield Violation(code="unknown_name", name=name, side=SOURCE, rank=None, text=text)
    for name in sorted(target.keys() - source.keys()):
        text = "the target has it, the source does not: register it on both sides under one name"
        yield Violation(code="missing_name", name=name, side=SOURCE, rank=None, text=text)
