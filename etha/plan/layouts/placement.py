"""PyTorch's placements as plain values, and the two readings of ``_StridedShard``.

An *axis* belongs to the mesh, a *dim* to the tensor. ``Axis`` is one placement, for one mesh axis. ``Splits`` is how
one tensor dim is cut, in the order in which the cuts apply.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from etha.errors import LayoutError
from etha.plan.layouts.region import DimRuns
from etha.torch_types import placement_class

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

#: One cut of a tensor dim: (parts, split factor, place among the dim's axes in mesh order).
#: Factor 1 is torch.chunk, above 1 ``_StridedShard``, 0 an even cut (torch.tensor_split).
Split = tuple[int, int, int]
Splits = tuple[Split, ...]
#: How one tensor dim is divided: cut up among all cells, or kept in part by one.
Cut = Splits | DimRuns

#: The reductions that Partial supports. torch's other names are read, and refused by the check.
REDUCIBLE = ("sum", "avg", "max", "min", "product")
#: Orders of norms that torch excludes from its own norm placement, and the reduction that stands for each.
_NO_NORMS = {math.inf: "max", -math.inf: "min", 0.0: "sum"}
_OPS = (*REDUCIBLE, "band", "bor", "bxor", "premul_sum")


@dataclass(frozen=True, slots=True)
class Axis:
    """One placement. Its kind is "S", "SS" (strided), "R", "P" (partial), "NP" (norm) or "MP" (mask, refused)."""

    kind: str
    dim: int = 0
    factor: int = 1
    op: str = ""
    p: float = 0.0

    @property
    def sharded(self) -> bool:
        return self.kind in ("S", "SS")

    @property
    def partial(self) -> bool:
        return self.kind in ("P", "NP", "MP")

    def to_plain(self) -> list[Any]:
        """["S", dim], ["SS", dim, factor], ["R"], ["P", op], ["NP", p] or ["MP"]."""
        match self.kind:
            case "S":
                return ["S", self.dim]
            case "SS":
                return ["SS", self.dim, self.factor]
            case "P":
                return ["P", self.op]
            case "NP":
                return ["NP", self.p]
        return [self.kind]

    @classmethod
    def from_plain(cls, plain: object) -> Axis:
        """The inverse of ``to_plain``. Strict: LayoutError for anything else."""
        match plain:
            case ["S", int(dim)] if _small(dim):
                return cls("S", dim=dim)
            case ["SS", int(dim), int(factor)] if _small(dim) and not isinstance(factor, bool) and 0 < factor < 2**62:
                return cls("SS", dim=dim, factor=factor)
            case ["R"]:
                return cls("R")
            case ["P", str(op)] if op in _OPS:
                return cls("P", op=op)
            case ["NP", int(p) | float(p)] if not isinstance(p, bool) and p != 0 and math.isfinite(p):
                return cls("NP", p=float(p))
            case ["MP"]:
                return cls("MP")
        raise LayoutError(f"{plain!r} is not a placement")

    @classmethod
    def from_placement(cls, placement: Any) -> Axis:
        """Read torch's own placement. Kinds are told apart by type, because ``_NormPartial`` calls its operation
        "sum"."""
        # First, because _StridedShard is a subclass of Shard in torch 2.11, but not in 2.13.
        if isinstance(placement, placement_class("_StridedShard")):
            return cls.from_plain(["SS", placement.dim, placement.split_factor])
        if isinstance(placement, placement_class("Shard")):
            return cls.from_plain(["S", placement.dim])
        if isinstance(placement, placement_class("Replicate")):
            return cls("R")
        if isinstance(placement, placement_class("Partial")):
            names = {c.__name__ for c in type(placement).__mro__}
            if "_NormPartial" in names:
                return cls._norm(getattr(placement, "norm_type", None))
            if "_MaskPartial" in names:
                return cls("MP")
            return cls.from_plain(["P", str(placement.reduce_op)])
        raise LayoutError(
            f"{placement!r} is not a placement that Etha knows: give torch's own, such as Shard(0) or Replicate() of "
            f"torch.distributed.tensor"
        )

    @classmethod
    def _norm(cls, p: Any) -> Axis:
        """A norm of order ``p``. LayoutError for orders that are not a sum of powers."""
        if p in (*_NO_NORMS, "inf", "-inf"):
            instead = _NO_NORMS[float(p)]
            raise LayoutError(
                f"_NormPartial({p}) cannot be reduced: torch itself excludes the orders inf, -inf and 0, which are no "
                f"sums of powers; give Partial({instead!r}), which reduces what it stands for"
            )
        return cls.from_plain(["NP", p])

    def to_placement(self) -> Placement:
        """torch's own placement. LayoutError for a mask, whose content is not in plain data."""
        # Here, because agents and planning need no object of torch's.
        from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

        match self.kind:
            case "S":
                return Shard(self.dim)
            case "SS":
                return _StridedShard(self.dim, split_factor=self.factor)
            case "R":
                return Replicate()
            case "P":
                return Partial(self.op)
            case "NP":
                from torch.distributed.tensor._ops._math_ops import _NormPartial

                return _NormPartial(self.p)
        raise LayoutError("_MaskPartial cannot be rebuilt from plain data")

    def __str__(self) -> str:
        args = ", ".join(str(v) for v in self.to_plain()[1:])
        name = "_S" if self.kind == "SS" else self.kind  # as torch prints a _StridedShard
        return f"{name}({args})" if args else name


def _small(dim: int) -> bool:
    return not isinstance(dim, bool) and -64 <= dim < 64


def shard_order(axes: Sequence[tuple[int, int]]) -> list[int] | None:
    """Order in which the cuts of one tensor dim apply if DTensor made them; None if it cannot have made them.

    ``axes`` are (size, factor) in mesh order, factor 1 for a plain Shard. From right to left, each axis goes to the
    first position at which the product of the sizes before it equals its factor.
    """
    order: list[int] = []
    for place in range(len(axes) - 1, -1, -1):
        product, factor = 1, axes[place][1]
        for position in range(len(order) + 1):
            if product == factor:
                order.insert(position, place)
                break
            if position < len(order):
                product *= axes[order[position]][0]
        else:
            return None
    return order


def splits_of(axes: Sequence[tuple[int, int]], *, literal: bool) -> Splits:
    """How ``axes``, (size, factor) in mesh order, cut one tensor dim. Axes of size 1 cut nothing."""
    order = None if literal else shard_order(axes)
    if order is None:
        cuts = [(size, factor, place) for place, (size, factor) in enumerate(axes)]
    else:
        cuts = [(axes[place][0], 1, place) for place in order]
    kept = [cut for cut in cuts if cut[0] > 1]
    places = {place: i for i, place in enumerate(sorted(cut[2] for cut in kept))}
    return tuple((size, factor, places[place]) for size, factor, place in kept)
