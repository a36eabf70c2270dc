"""The M2M map: the part of a plan that does not depend on shapes, made once per pair of layouts.

It says who holds each cell on both sides, on which host and agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from etha.errors import LayoutError
from etha.plan.layouts import cells
from etha.plan.layouts.layout import Layout
from etha.plan.layouts.placement import Axis, Cut
from etha.plan.layouts.region import DimRuns, Product
from etha.plan.layouts.tensor_spec import TensorSpec

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: A piece is not striped over replicas, nor a reduction divided over peers, below this many bytes each.
MIN_SLICE = 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Topology:
    """Host and agent of each rank, as numbers that are equal if the names are.

    A rank whose host or agent has no name is alone on it. ``source_order`` and ``target_order`` are the places of a
    side's ranks when sorted by (host, rank). ``host_names`` and ``agent_names`` are the names of the first numbers; the
    others have none.
    """

    source_host: Ints
    target_host: Ints
    source_agent: Ints
    target_agent: Ints
    source_order: Ints
    target_order: Ints
    one_agent: bool
    apart: bool  # no source rank shares an agent or a host with any target rank
    host_names: tuple[str, ...] = ()
    agent_names: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        world_sizes: tuple[int, int],
        hosts: tuple[Sequence[str] | None, Sequence[str] | None],
        agents: tuple[Sequence[str] | None, Sequence[str] | None],
    ) -> Topology:
        """Build it from the names of (source, target) ranks. LayoutError if some rank of a side has none."""
        for side, names in (("source_hosts", hosts[0]), ("target_hosts", hosts[1])):
            _check_names(side, names, world_sizes[side == "target_hosts"])
        for side, names in (("source_agents", agents[0]), ("target_agents", agents[1])):
            _check_names(side, names, world_sizes[side == "target_agents"])
        host_names, (sh, th) = _numbered(hosts, world_sizes)
        agent_names, (sa, ta) = _numbered(agents, world_sizes)
        both = np.concatenate([sa, ta])
        return cls(
            source_host=sh,
            target_host=th,
            source_agent=sa,
            target_agent=ta,
            source_order=_order(sh),
            target_order=_order(th),
            one_agent=bool(len(both) and (both == both[0]).all()),
            apart=not (np.intersect1d(sh, th).size or np.intersect1d(sa, ta).size),
            host_names=host_names,
            agent_names=agent_names,
        )


def _check_names(what: str, names: Sequence[str] | None, world_size: int) -> None:
    if names is not None and (isinstance(names, str) or len(names) < world_size):
        raise LayoutError(
            f"{what} names {len(names)} ranks, but the layouts reach rank {world_size - 1}: name each rank"
        )


def _numbered(
    names: tuple[Sequence[str] | None, Sequence[str] | None], sizes: tuple[int, int]
) -> tuple[tuple[str, ...], tuple[Ints, Ints]]:
    """The names in the order of their numbers, and the number of each rank of both sides."""
    known = {name: i for i, name in enumerate(sorted({n for side in names if side is not None for n in side}))}
    out, fresh = [], len(known)
    for side, size in zip(names, sizes, strict=True):
        if side is None:
            out.append(np.arange(fresh, fresh + size, dtype=np.int64))
            fresh += size
        else:
            out.append(np.array([known[n] for n in side], dtype=np.int64))
    return tuple(known), (out[0], out[1])


def _order(host: Ints) -> Ints:
    """Place of each rank when sorted by (host, rank)."""
    order = np.argsort(host, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return place


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Holding:
    """The holders of one grid: ``ranks`` (cells, K, P), -1 for an absent one, real replicas first.

    ``count`` (cells,) is the number of complete replicas of each cell, with all K contributions present. ``product``
    says which of their products the ranks hold, 0 unless regions are lists of products.
    """

    splits: tuple[Cut, ...]
    ranks: Ints
    count: Ints
    partial: tuple[tuple[Axis, int], ...]
    product: int = 0

    @property
    def gaps(self) -> bool:
        """Whether it is a region, which may leave gaps."""
        return any(isinstance(cut, DimRuns) for cut in self.splits)

    def find(self, rank: int) -> tuple[int, int, int] | None:
        """(flat cell, contribution, replica) of a rank; None if it holds nothing."""
        at = np.flatnonzero(self.ranks.reshape(-1) == rank)
        if not len(at):
            return None
        cell, k, p = np.unravel_index(int(at[0]), self.ranks.shape)
        return int(cell), int(k), int(p)

    @property
    def cells(self) -> tuple[int, ...]:
        """Number of cells of each dim."""
        return tuple(cells.count(s) for s in self.splits)


def all_holdings(spec: TensorSpec, order: Ints) -> list[Holding]:
    """The holders of one name, further products included."""
    ndim = len(spec.shape)
    found = holdings(spec.layouts, spec.present, ndim, order)
    for number, more in enumerate(spec.products, 1):
        found += holdings(more.layouts, more.present, ndim, order, number)
    return found


def held_products(spec: TensorSpec) -> list[Product] | None:
    """The products that present ranks hold together, contributions only if all are there. None if that is all."""
    found: list[Product] = []
    ranks = 1 + max((r for part in (spec, *spec.products) for r in part.ranks()), default=0)
    for held in all_holdings(spec, np.arange(ranks)):
        if not held.gaps and (held.count > 0).all():
            return None
        for cell in np.flatnonzero(held.count > 0).tolist():
            dims = []
            for n, cut, c in zip(spec.shape, held.splits, cells.coordinate(cell, held.cells), strict=True):
                table = cells.table(n, cut)
                rows = table.rows_of(c)
                dims.append(DimRuns(tuple(zip(table.start[rows].tolist(), table.stop[rows].tolist(), strict=True))))
            found.append(tuple(dims))
    return found


def holdings(
    layouts: Sequence[Layout], present: frozenset[int] | None, ndim: int, order: Ints, product: int = 0
) -> list[Holding]:
    """The layouts of one name as holders. Layouts with the same cuts become one, with their ranks as replicas."""
    groups: dict[tuple[tuple[Cut, ...], tuple[tuple[Axis, int], ...]], list[Ints]] = {}
    for layout in sorted(layouts, key=lambda part: int(part.ranks.min())):
        grid = layout.grid(ndim)
        groups.setdefault((grid.splits, grid.partial), []).append(grid.ranks)
    found = []
    for (splits, partial), tables in groups.items():
        ranks = tables[0] if len(tables) == 1 else np.concatenate(tables, axis=2)
        if present is not None:
            ranks = np.where(np.isin(ranks, np.fromiter(present, dtype=np.int64)), ranks, -1)
        missing: Bools = np.any(ranks < 0, axis=1)  # (cells, P): a replica without all its contributions is none
        ranks = np.where(missing[:, None, :], -1, ranks)
        place = np.where(missing, np.iinfo(np.int64).max, order[np.maximum(ranks[:, 0, :], 0)])
        by_place = np.argsort(place, axis=1, kind="stable")
        ranks = np.take_along_axis(ranks, by_place[:, None, :], axis=2)
        found.append(
            Holding(
                splits=splits,
                ranks=ranks,
                count=(~missing).sum(axis=1),
                partial=partial,
                product=product,
            )
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class M2M:
    """Holders of both sides of a pair of layouts. Several source grids are replicas of each other where they overlap:
    everywhere, or if they are regions (``gaps``), here and there."""

    source: tuple[Holding, ...]
    target: tuple[Holding, ...]
    topology: Topology
    replicas: int = field(init=False)
    gaps: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "replicas", sum(h.ranks.shape[2] for h in self.source))
        object.__setattr__(self, "gaps", any(h.gaps for h in self.source))

    def sources(self, cells: Sequence[Ints]) -> tuple[Ints, Ints, Ints]:
        """Holders of joint cells: ranks (M, P) by (host, rank), their grid (M, P), and how many there are (M,).

        A cell of -1 is a gap of its grid. P is the most that any of the cells has.
        """
        parts = [h.ranks[c, 0, :] for h, c in zip(self.source, cells, strict=True)]
        if self.gaps:
            parts = [np.where((c < 0)[:, None], -1, p) for p, c in zip(parts, cells, strict=True)]
        elif len(parts) == 1:
            return parts[0], np.zeros_like(parts[0]), self.source[0].count[cells[0]]
        ranks = np.concatenate(parts, axis=1)
        grid = np.repeat(np.arange(len(parts)), [p.shape[1] for p in parts])
        place = np.where(ranks < 0, np.iinfo(np.int64).max, self.topology.source_order[np.maximum(ranks, 0)])
        order = np.argsort(place, axis=1, kind="stable")
        count = (ranks >= 0).sum(axis=1)
        if self.gaps:  # most of many regions have nothing to do with these cells
            order = order[:, : max(int(count.max(initial=0)), 1)]
        return np.take_along_axis(ranks, order, axis=1), grid[order], count
