"""TensorSpec: a tensor of one side, and its layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch

from etha.errors import LayoutError
from etha.plan.layouts import dtypes
from etha.plan.layouts.layout import Layout
from etha.plan.layouts.mesh import check_shape


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a side: global ``shape``, ``dtype`` and ``layout``.

    ``layout`` is one Layout, or several over disjoint sets of ranks. Each of them holds the whole tensor or a region of
    it. ``present`` are the ranks that really hold their part; None means all ranks of the layouts.

    ``products``: what ranks of a source hold beside it. Each is one more region of the same tensor in a local tensor of
    its own (``part_name``), because a rank may hold a list of products.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | Sequence[Layout]
    present: frozenset[int] | None = None
    products: tuple[TensorSpec, ...] = ()
    layouts: tuple[Layout, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", check_shape(self.shape))
        dtypes.name_of(self.dtype)
        single = isinstance(self.layout, Layout)
        layouts = cast("tuple[Layout, ...]", (self.layout,) if single else tuple(cast("Sequence[Layout]", self.layout)))
        if not layouts or not all(isinstance(part, Layout) for part in layouts):
            raise LayoutError(f"layout is a Layout or several of them, not {self.layout!r}")
        if not single:
            object.__setattr__(self, "layout", layouts)
            _check_disjoint(layouts)
        for part in layouts:
            part.check(self.shape)
        object.__setattr__(self, "layouts", layouts)
        if self.present is not None:
            object.__setattr__(self, "present", frozenset(self.present))
        for more in self.products:
            if (more.shape, more.dtype) != (self.shape, self.dtype) or more.products:
                raise LayoutError(
                    f"a product of another tensor: shape {more.shape} of {more.dtype}, not {self.shape} of {self.dtype}"
                )

    def holders(self) -> list[int]:
        """The ranks that hold a local tensor (maybe an empty one), ascending."""
        return sorted(self.ranks().union(*(more.ranks() for more in self.products)))

    def ranks(self) -> set[int]:
        """The ranks that hold a local tensor, without those of further products."""
        ranks = {r for part in self.layouts for r in part.ranks.reshape(-1).tolist()}
        return ranks if self.present is None else ranks & self.present

    def product(self, number: int) -> TensorSpec:
        """The spec of product ``number``: 0 is this one."""
        return self.products[number - 1] if number else self

    def local_shape(self, rank: int) -> tuple[int, ...] | None:
        """Shape of the local tensor of ``rank``; None if it holds none."""
        if self.present is not None and rank not in self.present:
            return None
        for part in self.layouts:
            if rank in part:
                return part.local_shape(self.shape, rank)
        return None


def _check_disjoint(layouts: Sequence[Layout]) -> None:
    table = np.concatenate([part.ranks.reshape(-1) for part in layouts])
    values, counts = np.unique(table, return_counts=True)
    if (counts > 1).any():
        raise LayoutError(
            f"several layouts of one tensor must be over disjoint ranks; ranks {values[counts > 1].tolist()[:20]} "
            f"are in more than one"
        )
