"""The truth, written down again: what each rank owns, by enumerating indices one by one.

Plain lists and loops after the definitions, no code of the planner. Also random cases to hold it against.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

from etha.plan import Layout, TensorSpec


def chunk(length: int, parts: int, c: int) -> range:
    """torch.chunk: 5 over 4 is 2, 2, 1, 0."""
    k = -(-length // parts) if length else 0
    return range(min(length, c * k), min(length, (c + 1) * k))


def strided(length: int, factor: int, parts: int, c: int) -> list[int]:
    """Cut into ``factor`` blocks, each block into ``parts``, and take part c of every block."""
    k = -(-length // factor) if length else 0
    kept = []
    for j in range(min(factor, length)):
        block = list(range(length))[j * k : (j + 1) * k]
        kept += [block[i] for i in chunk(len(block), parts, c)]
    return kept


def decode(cuts: list[tuple[int, int]]) -> list[int] | None:
    """Shard order of (size, factor) in mesh order, from right to left; None when not decodable."""
    order: list[int] = []
    for i in reversed(range(len(cuts))):
        fits = [at for at in range(len(order) + 1) if math.prod(cuts[j][0] for j in order[:at]) == cuts[i][1]]
        if not fits:
            return None
        order.insert(fits[0], i)
    return order


@dataclass
class Truth:
    """A layout as a test describes it: rank table as nested coordinates, placements as torch's own."""

    mesh: tuple[int, ...]
    ranks: list[int]  # C-order over the mesh
    placements: list[Any]
    reading: str = "auto"

    def layout(self) -> Layout:
        table = torch.tensor(self.ranks).reshape(self.mesh)
        return Layout(table, self.placements, strided=self.reading)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        return list(itertools.product(*(range(m) for m in self.mesh)))[self.ranks.index(rank)]

    def indices(self, shape: Sequence[int], rank: int) -> list[list[int]]:
        """Per tensor dim the global indices that ``rank`` owns, in local order."""
        where, owned = self.coordinates(rank), []
        for dim, n in enumerate(shape):
            axes = [a for a, p in enumerate(self.placements) if hasattr(p, "dim") and p.dim % len(shape) == dim]
            cuts = [(self.mesh[a], getattr(self.placements[a], "split_factor", 1)) for a in axes]
            order = None if self.reading == "literal" else decode(cuts)
            kept = list(range(n))
            if order is None:
                for a, (size, factor) in zip(axes, cuts, strict=True):
                    taken = (
                        strided(len(kept), factor, size, where[a]) if factor > 1 else chunk(len(kept), size, where[a])
                    )
                    kept = [kept[i] for i in taken]
            else:
                for i in order:
                    kept = [kept[j] for j in chunk(len(kept), cuts[i][0], where[axes[i]])]
            owned.append(kept)
        return owned

    def partial(self) -> list[int]:
        return [a for a, p in enumerate(self.placements) if isinstance(p, Partial)]

    def contribution(self, rank: int) -> int:
        """C-order coordinate over the Partial axes."""
        where, index = self.coordinates(rank), 0
        for a in self.partial():
            index = index * self.mesh[a] + where[a]
        return index


@dataclass
class Loaded(Truth):
    """What a loader takes: ``kept`` are, per tensor dim, the indices of all ranks of this region, ascending."""

    kept: list[list[int]] = field(default_factory=list)

    def layout(self) -> Layout:
        return Layout.region([runs_of(dim) for dim in self.kept], self.ranks)

    def indices(self, shape: Sequence[int], rank: int) -> list[list[int]]:
        assert rank in self.ranks and len(shape) == len(self.kept)
        return self.kept


def runs_of(indices: list[int]) -> list[tuple[int, int]]:
    """(start, stop) of indices that follow each other."""
    runs: list[tuple[int, int]] = []
    for i in indices:
        if runs and runs[-1][1] == i:
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((i, i + 1))
    return runs


def random_dim(rng: random.Random, n: int) -> list[int]:
    """Some of the indices of one dim: all, none, a window, or several runs with gaps."""
    how = rng.random()
    if how < 0.2 or n == 0:
        return list(range(n))
    if how < 0.25:
        return []
    if how < 0.55:
        lo = rng.randrange(n)
        return list(range(lo, rng.randrange(lo, n) + 1))
    if how < 0.8:
        step = rng.choice([2, 3, 5])
        return [i for i in range(n) if i // step % 2 == rng.choice([0, 0, 0, 1])]
    return [i for i in range(n) if rng.random() < 0.6]


def random_regions(rng: random.Random, shape: tuple[int, ...], ranks: list[int]) -> list[Truth]:
    """Each rank keeps something of its own, what another one keeps, or nothing; overlaps and gaps as they fall."""
    found: list[Truth] = []
    for rank in ranks:
        if found and rng.random() < 0.2:
            like = rng.choice(found)
            assert isinstance(like, Loaded)
            if rng.random() < 0.5:
                like.ranks.append(rank)
                like.mesh = (len(like.ranks),)
            else:  # equal, but told apart
                found.append(Loaded((1,), [rank], [Replicate()], kept=like.kept))
            continue
        kept = [random_dim(rng, n) for n in shape]
        found.append(Loaded((1,), [rank], [Replicate()], kept=kept))
    return found


def cells_of(shape: Sequence[int], truths: Sequence[Truth]) -> set[tuple[int, ...]]:
    """The global indices of all elements that any rank of these layouts holds, one by one."""
    return {
        index for truth in truths for rank in truth.ranks for index in itertools.product(*truth.indices(shape, rank))
    }


def random_source_regions(
    rng: random.Random, shape: tuple[int, ...], ranks: list[int], target: list[Truth]
) -> tuple[list[Truth], list[list[Truth]]]:
    """Regions that hold together what ``target`` wants, and further products of some ranks."""
    found = random_regions(rng, shape, ranks)
    products: list[list[Truth]] = []
    while rng.random() < 0.3:
        some = rng.sample(ranks, rng.randrange(1, len(ranks) + 1))
        products.append(random_regions(rng, shape, some))
    lacking = cells_of(shape, target) - cells_of(shape, [*found, *(one for some in products for one in some)])
    if lacking:  # a rank holds the least product of all that nobody holds, in place of its own or beside it
        hull = [sorted({index[d] for index in lacking}) for d in range(len(shape))]
        products.append([Loaded((1,), [rng.choice(ranks)], [Replicate()], kept=hull)])
        if rng.random() < 0.5:
            rank = max(ranks) + 1
            found.append(Loaded((1,), [rank], [Replicate()], kept=hull))
            products.pop()
    return found, products


def take(full: torch.Tensor, indices: list[list[int]]) -> torch.Tensor:
    """The local tensor with these global indices."""
    for dim, kept in enumerate(indices):
        full = full.index_select(dim, torch.tensor(kept, dtype=torch.long))
    return full.clone()


@dataclass
class Case:
    """Two sides, some tensors of equal spec, and where the ranks live."""

    shape: tuple[int, ...]
    source: list[Truth]
    target: list[Truth]
    dtypes: tuple[torch.dtype, torch.dtype]
    names: list[str]
    kwargs: dict[str, list[str] | None]
    present: frozenset[int] | None = None
    seed: int = 0
    notes: dict[str, object] = field(default_factory=dict)
    #: What ranks of the source hold beside it: for each further product, the regions of some ranks.
    products: list[list[Truth]] = field(default_factory=list)

    def specs(self) -> tuple[TensorSpec, TensorSpec]:
        here, there = [t.layout() for t in self.source], [t.layout() for t in self.target]
        more = tuple(TensorSpec(self.shape, self.dtypes[0], [t.layout() for t in some]) for some in self.products)
        return (
            TensorSpec(self.shape, self.dtypes[0], here[0] if len(here) == 1 else here, self.present, more),
            TensorSpec(self.shape, self.dtypes[1], there[0] if len(there) == 1 else there),
        )

    def fulls(self) -> dict[str, torch.Tensor]:
        gen = torch.Generator().manual_seed(self.seed)
        small = any(t.partial() for t in self.source) or self.dtypes[0].itemsize < 4 or self.dtypes[1].itemsize < 4
        top = 9 if small else 1 << 20
        return {n: torch.randint(0, top, self.shape, generator=gen).to(self.dtypes[0]) for n in self.names}

    def sources(self, fulls: dict[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
        out: dict[int, dict[str, torch.Tensor]] = {}
        for truth in self.source:
            for n in self.names:
                parts = contributions(truth, fulls[n], random.Random(self.seed))
                for rank in truth.ranks:
                    if self.present is None or rank in self.present:
                        local = take(parts[truth.contribution(rank)], truth.indices(self.shape, rank))
                        out.setdefault(rank, {})[n] = view_of(local, random.Random(rank))
        for number, truths in enumerate(self.products, 1):
            for one, rank, n in ((t, r, n) for t in truths for r in t.ranks for n in self.names):
                local = take(fulls[n], one.indices(self.shape, rank))
                out.setdefault(rank, {})[f"{n} [product {number}]"] = view_of(local, random.Random(rank))
        return out

    def targets(self) -> dict[int, dict[str, torch.Tensor]]:
        out: dict[int, dict[str, torch.Tensor]] = {}
        for truth in self.target:
            for rank in truth.ranks:
                shape = [len(kept) for kept in truth.indices(self.shape, rank)]
                blank = torch.full(shape, 77, dtype=self.dtypes[1])
                out[rank] = {n: view_of(blank, random.Random(rank + 1)) for n in self.names}
        return out

    def expected(self, fulls: dict[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
        return {
            rank: {n: take(fulls[n], truth.indices(self.shape, rank)).to(self.dtypes[1]) for n in self.names}
            for truth in self.target
            for rank in truth.ranks
        }


def view_of(local: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """The same values at other strides, now and then: transposed storage, or every second element."""
    if local.ndim >= 2 and rng.random() < 0.3:
        return local.transpose(0, 1).clone(memory_format=torch.contiguous_format).transpose(0, 1)
    if local.ndim >= 1 and rng.random() < 0.3:
        wide = torch.stack([local, local], dim=-1)
        return wide[..., 0]
    return local.clone()


def contributions(truth: Truth, full: torch.Tensor, rng: random.Random) -> list[torch.Tensor]:
    """K tensors that reduce to ``full`` exactly, whatever the order."""
    axes = truth.partial()
    count = math.prod(truth.mesh[a] for a in axes)
    if not axes:
        return [full]
    kinds = [truth.placements[a] for a in axes]
    gen = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def noise() -> torch.Tensor:
        return torch.randint(0, 4, full.shape, generator=gen).to(full.dtype)

    if any(type(k).__name__ == "_NormPartial" for k in kinds):
        where = torch.randint(0, count, full.shape, generator=gen)
        return [torch.where(where == k, full, torch.zeros_like(full)) for k in range(count)]
    ops = {k.reduce_op for k in kinds}
    if ops <= {"sum", "avg"}:
        divisor = math.prod(truth.mesh[a] for a in axes if truth.placements[a].reduce_op == "avg")
        parts = [noise() for _ in range(count - 1)]
        return [*parts, full * divisor - sum(parts, torch.zeros_like(full))]
    if ops == {"product"}:
        signs = [1 - 2 * torch.randint(0, 2, full.shape, generator=gen).to(full.dtype) for _ in range(count - 1)]
        total = full
        for sign in signs:
            total = total * sign
        return [*signs, total]
    where = torch.randint(0, count, full.shape, generator=gen)
    sign = -1 if ops == {"max"} else 1
    return [torch.where(where == k, full, full + sign * noise()) for k in range(count)]


def random_truth(rng: random.Random, ranks: list[int], ndim: int, partial: list[Any] | None) -> Truth:
    """A random mesh over all of ``ranks`` with random placements."""
    left, mesh = len(ranks), []
    while left > 1 and len(mesh) < 4:
        divisors = [d for d in range(2, left + 1) if left % d == 0]
        mesh.append(rng.choice(divisors))
        left //= mesh[-1]
    mesh.append(left)
    if left == 1 and len(mesh) > 1 and rng.random() < 0.7:
        mesh.pop()
    rng.shuffle(mesh)
    placements: list[Any] = []
    for _ in mesh:
        kind = rng.random()
        if partial and kind < 0.35:
            placements.append(rng.choice(partial))
        elif ndim and kind < 0.65:
            placements.append(Shard(rng.randrange(-ndim, ndim)))
        elif ndim and kind < 0.82:
            products = [math.prod(mesh[:i]) for i in range(1, len(mesh) + 1)] + mesh + [1, 2, 3, 5]
            placements.append(_StridedShard(rng.randrange(ndim), split_factor=rng.choice(products)))
        else:
            placements.append(Replicate())
    return Truth(tuple(mesh), ranks, placements, rng.choice(["auto", "order", "literal"]))


def random_side(rng: random.Random, ndim: int, partial: list[Any] | None) -> tuple[list[Truth], int]:
    """One or several layouts over some of the ranks of a side; and its world size."""
    count = rng.choice([1, 2, 2, 3, 4, 4, 5, 6, 8, 8, 9, 12, 16])
    world = count + rng.choice([0, 0, 0, 1, 3])
    ranks = list(range(world))
    if rng.random() < 0.5:
        rng.shuffle(ranks)
    ranks = ranks[:count]
    if count > 1 and rng.random() < 0.25:
        if count % 2 == 0 and rng.random() < 0.5:  # rows of a mesh: the same cuts on disjoint ranks
            one = random_truth(rng, ranks[: count // 2], ndim, partial)
            return [one, Truth(one.mesh, ranks[count // 2 :], one.placements, one.reading)], world
        at = rng.randrange(1, count)
        return [random_truth(rng, part, ndim, partial) for part in (ranks[:at], ranks[at:])], world
    return [random_truth(rng, ranks, ndim, partial)], world


def random_case(seed: int, rng: random.Random | None = None) -> Case:
    """A whole random redistribution; the same for the same seed, or as ``rng`` draws."""
    rng = random.Random(seed) if rng is None else rng
    ndim = rng.choice([1, 1, 2, 2, 2, 3, 3, 0])
    shape = tuple(rng.choice([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16]) for _ in range(ndim))
    if rng.random() < 0.7:
        shape = tuple(n or 5 for n in shape)
    if rng.random() < 0.1 and ndim:
        shape = (257, *shape[1:])
    partial = None
    if rng.random() < 0.3:
        from torch.distributed.tensor._ops._math_ops import _NormPartial

        partial = rng.choice(
            [[Partial("sum")], [Partial("avg")], [Partial("sum"), Partial("avg")], [Partial("max")], [Partial("min")],
             [Partial("product")], [_NormPartial(2)]]
        )  # fmt: skip
    source, here = random_side(rng, ndim, partial)
    target, there = random_side(rng, ndim, None)
    f32, bf16, f64, i32, i64 = torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64
    dtypes = rng.choice([(f32, f32), (f32, f32), (f32, bf16), (bf16, f32), (bf16, torch.float16), (f64, f32)])
    if partial is None and rng.random() < 0.2:
        dtypes = rng.choice([(i32, i64), (torch.bool, torch.bool), (torch.complex64, torch.complex64)])
    if partial is not None and dtypes[0] is bf16:
        dtypes = (f32, dtypes[1])
    kwargs: dict[str, list[str] | None] = {}
    if rng.random() < 0.8:
        for what in ("hosts", "agents"):
            names = [f"{what}{i}" for i in range(rng.choice([1, 1, 2, 4]))]
            both = [f"source_{what}", f"target_{what}"]
            if rng.random() < 0.8:
                for key, world in zip(both, (here, there), strict=True):
                    kwargs[key] = [rng.choice(names) for _ in range(world)]
    names = rng.sample(["a", "b", "c.weight", "ä", "z/0"], rng.choice([1, 1, 2, 3, 5]))
    if rng.random() < 0.3:  # what loaders take; now and then beside ordinary layouts
        plain = target.pop() if len(target) > 1 and rng.random() < 0.5 else None
        target = random_regions(rng, shape, [r for truth in target for r in truth.ranks])
        target += [] if plain is None else [plain]
    products: list[list[Truth]] = []
    if partial is None and rng.random() < 0.35:  # now and then beside an ordinary layout, which holds everything
        plain = source.pop() if len(source) > 1 and rng.random() < 0.3 else None
        ranks = [r for truth in source for r in truth.ranks]
        source, products = random_source_regions(rng, shape, ranks, [] if plain is not None else target)
        source += [] if plain is None else [plain]
        world = 1 + max(r for truth in source for r in truth.ranks)
        for what in ("hosts", "agents"):
            given = kwargs.get(f"source_{what}")
            if given is not None:
                kwargs[f"source_{what}"] = [*given, *rng.choices(given, k=max(0, world - len(given)))]
    return Case(shape, source, target, dtypes, names, kwargs, seed=seed, products=products)
