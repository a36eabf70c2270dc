"""Read shapes and tables of ranks from what users and peers give, and refuse what is not a mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from etha.errors import LayoutError

Ints = npt.NDArray[np.int64]
#: More ranks or larger meshes than this are taken for nonsense from an untrusted peer.
MAX_RANKS = 1 << 22
MAX_ELEMENTS = 1 << 60


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """``shape`` as a tuple of ints. LayoutError if it is not a shape."""
    try:
        sizes = tuple(int(n.__index__()) for n in shape)
    except (TypeError, AttributeError):
        raise LayoutError(f"{shape!r} is not a shape") from None
    if (
        len(sizes) > 64
        or any(n < 0 for n in sizes)
        or math.prod(sizes) > MAX_ELEMENTS
        or max(sizes, default=0) > MAX_ELEMENTS
    ):
        raise LayoutError(f"{sizes} is not a shape of at most 64 dims and {MAX_ELEMENTS} elements")
    return sizes


def read_mesh(mesh: Any) -> tuple[tuple[int, ...], Ints | None]:
    """(shape, table of ranks). The table is None for a shape tuple, which stands for ranks 0..n-1."""
    if isinstance(mesh, tuple) and all(isinstance(m, int) for m in mesh):
        return check_mesh_shape(mesh), None
    table = getattr(mesh, "mesh", mesh)
    if isinstance(table, torch.Tensor):
        table = table.detach().cpu().numpy()
    try:
        ranks = np.array(table)
    except ValueError as error:
        raise LayoutError(f"mesh is no table of ranks: {error}") from None
    if ranks.dtype.kind not in "iu" or ranks.size == 0:
        raise LayoutError(f"mesh is a shape tuple or a table of integer ranks, not {str(mesh)[:200]}")
    return ranks.shape, check_ranks(ranks.astype(np.int64))


def mesh_from_plain(plain: object) -> tuple[tuple[int, ...], Ints | None]:
    """(shape, table of ranks or None for 0..n-1) of {"shape": [...], "ranks": [...] | None}; untrusted input."""
    match plain:
        case {"shape": list() | tuple() as shape, "ranks": ranks, **more} if not more:
            sizes = check_mesh_shape(shape)
        case _:
            raise LayoutError(f"not the mesh of a layout: {str(plain)[:200]}")
    if ranks is None:
        return sizes, None
    if not isinstance(ranks, (list, tuple)) or not all(type(r) is int for r in ranks):
        raise LayoutError("the ranks of a mesh are a flat list of integers, or null for 0..n-1")
    if len(ranks) != math.prod(sizes) or not all(0 <= r < MAX_RANKS for r in ranks):
        raise LayoutError(f"{len(ranks)} ranks, in 0..{MAX_RANKS - 1}, do not fill a mesh of shape {sizes}")
    return sizes, check_ranks(np.array(ranks, dtype=np.int64).reshape(sizes))


def check_mesh_shape(shape: Sequence[Any]) -> tuple[int, ...]:
    """``shape`` as a tuple of positive ints. LayoutError otherwise."""
    if len(shape) > 32 or not all(type(m) is int and 0 < m <= MAX_RANKS for m in shape):
        raise LayoutError(f"mesh shape {tuple(shape)} has an axis that is not a positive size")
    if math.prod(shape) > MAX_RANKS:
        raise LayoutError(f"mesh shape {tuple(shape)} has more than {MAX_RANKS} ranks")
    return tuple(shape)


def check_ranks(ranks: Ints) -> Ints:
    """``ranks`` itself, made read-only. LayoutError if one is out of bounds or occurs twice."""
    if ranks.min() < 0 or ranks.max() >= MAX_RANKS:
        raise LayoutError(f"ranks of a mesh are 0..{MAX_RANKS - 1}, not {int(ranks.min())}..{int(ranks.max())}")
    if len(np.unique(ranks)) != ranks.size:
        raise LayoutError(f"mesh {str(ranks.tolist())[:200]} names a rank twice")
    ranks.flags.writeable = False
    return ranks
