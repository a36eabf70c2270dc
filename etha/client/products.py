"""Regions of plain tensors: a product of runs lies as it is, a list of products one after another in a flat tensor.

Etha moves products. So each product of a list is registered by itself, as a view of the flat tensor, under a name
that says whose part it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from etha.errors import ConfigError, LayoutError
from etha.plan import Layout

#: Per tensor dim the (start, stop) that this rank's tensor holds of the global one, or a list of such products.
Runs = Sequence[Sequence[tuple[int, int]]] | Sequence[Sequence[Sequence[tuple[int, int]]]]
Part = tuple[str, str | None, torch.Tensor, Layout]


def parts_of(name: str, tensor: torch.Tensor, runs: Runs, rank: int) -> list[Part]:
    """(name, the tensor's own name if it is another part of it, local tensor, layout) of what ``rank`` registers.

    LayoutError names the tensor where runs are none, or where a list of products does not fill a flat tensor.
    """
    products = _listed(runs)
    try:
        if products is None:
            return [(name, None, tensor, Layout.region(cast("Any", runs), [rank]))]
        layouts = [Layout.region(product, [rank]) for product in products]
    except LayoutError as error:
        raise LayoutError(f"tensor {name!r}: {error.message}") from None
    shapes = [tuple(kept.size for kept in layout.kept or ()) for layout in layouts]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    if tensor.ndim != 1 or not tensor.is_contiguous() or len(tensor) != sum(sizes):
        raise LayoutError(
            f"tensor {name!r}: a list of {len(products)} products lies in one flat contiguous tensor, one after "
            f"another, here of shape ({sum(sizes)},); this one has shape {tuple(tensor.shape)}"
        )
    return [
        (part_name(name, i) if i else name, name if i else None, flat.view(shape), layout)
        for i, (flat, shape, layout) in enumerate(zip(torch.split(tensor, sizes), shapes, layouts, strict=True))
    ]


def part_name(name: str, number: int) -> str:
    """What product ``number`` of a tensor is called where tensors go by name; the first has the tensor's own."""
    return f"{name} [product {number}]"


def _listed(runs: Any) -> list[Any] | None:
    """The products, where ``runs`` nest one deeper than a product does; one without any run is a product."""
    if not isinstance(runs, Sequence):
        return None
    for product in runs:
        for dim in product if isinstance(product, Sequence) else ():
            for run in dim if isinstance(dim, Sequence) else ():
                return list(runs) if isinstance(run, Sequence) else None
    return None


def check_region(
    name: str,
    tensor: torch.Tensor,
    placements: Mapping[str, Sequence[Placement]] | None,
    shapes: Mapping[str, Sequence[int]] | None,
) -> None:
    """ConfigError and LayoutError for a region that does not go with what else is said of the tensor."""
    if isinstance(tensor, DTensor):
        raise ConfigError(f"regions[{name!r}]: the tensor is a DTensor and brings its own layout; register a plain one")
    if placements and name in placements:
        raise ConfigError(f"tensor {name!r} has both regions[...] and placements[...]: give one of them")
    if not shapes or name not in shapes:
        raise LayoutError(
            f"tensor {name!r} holds a region of a global tensor whose shape it does not tell: "
            f"give shapes={{{name!r}: (...)}}, the shape of the whole tensor"
        )
