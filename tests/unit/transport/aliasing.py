"""Random cargo whose tensors share memory in every way that is allowed, and the truth by enumeration.

   tied      several names over one local tensor, cut differently at the other end
   windows   names that are any strided views, over each other, of one memory a rank
   bits      windows of several dtypes over the same bytes
   several   layouts over disjoint ranks that each hold the whole tensor; regions that each rank picks for itself
   in place  targets that lie in the windows' memory of the source rank of the same number

The truth is plain indexing: who owns which element comes from ``tests/unit/plan/truth.py``, and nothing of the
planner or of the data plane is used.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard, _StridedShard

from etha.plan import TensorSpec
from tests.unit.plan.truth import Loaded, Truth, contributions, random_regions, take

Local = dict[int, dict[str, torch.Tensor]]
#: ``alloc(side, rank, nbytes)``: bytes of a worker's memory.
Alloc = Callable[[str, int, int], torch.Tensor]

FLOATS = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
CASTS = [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.float32),
         (torch.float64, torch.float32), (torch.int16, torch.int64)]  # fmt: skip
BITS = (torch.uint8, torch.int16, torch.float16, torch.float32, torch.int64)
SIZES = (1, 1, 2, 3, 5, 7, 8, 9, 16, 17, 33, 40)


@dataclass(frozen=True)
class Group:
    """Ranks of one side with a mesh of their own."""

    ranks: tuple[int, ...]
    mesh: tuple[int, ...]


@dataclass
class Item:
    """One name: its layouts on both sides. ``tied``: the name whose source memory it is, too (``tied_target``: and
    whose target memory)."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, torch.dtype]
    source: list[Truth]
    target: list[Truth]
    tied: str | None = None
    tied_target: bool = False
    window: str | None = None
    full: torch.Tensor | None = None

    def specs(self) -> tuple[TensorSpec, TensorSpec]:
        """What the planner is told."""
        here, there = ([t.layout() for t in side] for side in (self.source, self.target))
        return TensorSpec(self.shape, self.dtypes[0], here), TensorSpec(self.shape, self.dtypes[1], there)


def groups_of(rng: random.Random, world: int, most: int = 3) -> list[Group]:
    """All ranks of a side, in one group or in several, each with a mesh of one or two axes."""
    ranks = list(range(world))
    if rng.random() < 0.4:
        rng.shuffle(ranks)
    found: list[Group] = []
    while ranks:
        n = len(ranks) if rng.random() < 0.6 or len(found) + 1 == most else rng.randint(1, len(ranks))
        axes = [d for d in range(1, n + 1) if n % d == 0]
        first = rng.choice(axes)
        mesh = (n,) if rng.random() < 0.6 else (first, n // first)
        found.append(Group(tuple(ranks[:n]), mesh))
        ranks = ranks[n:]
    return found


def truth_of(rng: random.Random, group: Group, ndim: int, kinds: str = "RSS") -> Truth:
    """A random layout over a group: (R)eplicated, (S)harded, (P)artial axes."""
    if ndim and len(group.mesh) == 2 and "S" in kinds and rng.random() < 0.2:
        d = rng.randrange(ndim)
        placements: list[object] = [_StridedShard(d, split_factor=group.mesh[1]), Shard(d)]
        return Truth(group.mesh, list(group.ranks), placements)
    placements = []
    for _ in group.mesh:
        kind = rng.choice(kinds)
        if kind == "S" and ndim:
            placements.append(Shard(rng.randrange(-ndim, ndim)))
        else:
            placements.append(Partial("sum") if kind == "P" else Replicate())
    return Truth(group.mesh, list(group.ranks), placements)


@dataclass
class Cargo:
    """Tensors of both sides, made once, and filled as often as one likes."""

    items: dict[str, Item]
    #: Of each memory that windows look into, by rank; and whether all ranks' contents are equal.
    arenas: dict[str, tuple[bool, dict[int, torch.Tensor]]] = field(default_factory=dict)
    in_place: bool = False
    source: Local = field(default_factory=dict)
    target: Local = field(default_factory=dict)
    expected: Local = field(default_factory=dict)

    def fill(self, seed: int) -> None:
        """New contents at the source, and what the targets shall hold; what they hold now is neither."""
        rng = random.Random(f"fill {seed}")
        for name, (common, memory) in self.arenas.items():
            first = torch.Generator().manual_seed(rng.getrandbits(40))
            kinds = {item.dtypes[0] for item in self.items.values() if item.window == name}
            for i, flat in enumerate(memory.values()):
                if common and i:
                    flat.copy_(next(iter(memory.values())))
                elif name.startswith("bits"):
                    flat.copy_(torch.randint(0, 256, flat.shape, generator=first, dtype=torch.uint8))
                else:
                    (dtype,) = kinds
                    typed = flat.view(dtype)
                    typed.copy_(torch.randint(-100, 100, typed.shape, generator=first).to(dtype))
        for name, item in self.items.items():
            if item.window is not None:
                full = torch.zeros(item.shape, dtype=item.dtypes[0])
                for truth in item.source:
                    for rank in truth.ranks:
                        _put(full, truth.indices(item.shape, rank), self.source[rank][name])
                item.full = full
                continue
            if item.tied is None:
                generator = torch.Generator().manual_seed(rng.getrandbits(40))
                item.full = torch.randint(0, 100, item.shape, generator=generator).to(item.dtypes[0])
            else:
                item.full = self.items[item.tied].full
            for truth in item.source:
                parts = contributions(truth, item.full, random.Random(f"{seed} {name}"))
                for rank in truth.ranks if item.tied is None else ():
                    mine = take(parts[truth.contribution(rank)], truth.indices(item.shape, rank))
                    self.source[rank][name].copy_(mine)
        self.expected = {}
        for name, item in self.items.items():
            assert item.full is not None
            for truth in item.target:
                for rank in truth.ranks:
                    wanted = take(item.full, truth.indices(item.shape, rank)).to(item.dtypes[1])
                    self.expected.setdefault(rank, {})[name] = wanted
                    if not self.in_place:
                        self.target[rank][name].fill_(77)

    def wrong(self) -> list[str]:
        """What of the targets is not what it shall be, bit by bit."""
        found = []
        for rank, held in self.expected.items():
            for name, wanted in held.items():
                got = bits_of(self.target[rank][name])
                if not torch.equal(got, bits_of(wanted)):
                    count = int((got != bits_of(wanted)).sum())
                    found.append(f"{name} at target rank {rank}: {count} of {got.numel()} bytes; {self.items[name]}")
        return found


def _put(full: torch.Tensor, indices: list[list[int]], local: torch.Tensor) -> None:
    if not indices:
        full.copy_(local)
    elif full.numel() and all(indices):
        full[torch.meshgrid(*(torch.tensor(i, dtype=torch.long) for i in indices), indexing="ij")] = local


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, dense: NaNs compare too."""
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def random_cargo(
    rng: random.Random,
    source: list[Group],
    target: list[Group],
    alloc: Alloc,
    *,
    most: int = 6,
    partial: bool = True,
    in_place: bool = False,
    ties: bool = False,
) -> Cargo:
    """Some names over these groups; the same for the same ``rng``. ``fill`` before use."""
    cargo = Cargo({}, in_place=in_place)
    while len(cargo.items) < rng.randint(1, most):
        kind = rng.choice(["tied", "tied", "windows", "windows", "bits", "plain"])
        if kind == "tied":
            _tied(rng, cargo, source, target, partial, ties)
        elif kind == "plain":
            _plain(rng, cargo, source, target, partial)
        else:
            _windows(rng, cargo, rng.choice(source), target, kind)
    _lay_sources(rng, cargo, alloc)
    _lay_targets(rng, cargo, _under_windows(cargo, alloc) if in_place else alloc)
    return cargo


def _shape(rng: random.Random) -> tuple[int, ...]:
    if rng.random() < 0.04:
        return (rng.choice([130, 257]), rng.choice([64, 300]))
    shape = tuple(rng.choice(SIZES) for _ in range(rng.choice([0, 1, 1, 2, 2, 2, 3])))
    return tuple(0 if rng.random() < 0.02 else n for n in shape)


def _ends(rng: random.Random, target: list[Group], shape: tuple[int, ...]) -> list[Truth]:
    """The layouts of one name at the target: on some of the groups, or regions of some ranks."""
    some = rng.sample(target, rng.randint(1, len(target)))
    if rng.random() < 0.25:
        ranks = [rank for group in some for rank in group.ranks]
        return random_regions(rng, shape, ranks)
    return [truth_of(rng, group, len(shape)) for group in some]


def _dtypes(rng: random.Random) -> tuple[torch.dtype, torch.dtype]:
    if rng.random() < 0.25:
        return rng.choice(CASTS)
    dtype = rng.choice(FLOATS)
    return dtype, dtype


def _plain(rng: random.Random, cargo: Cargo, source: list[Group], target: list[Group], partial: bool) -> str:
    name, shape = f"w{len(cargo.items)}", _shape(rng)
    if partial and rng.random() < 0.2:
        here = [truth_of(rng, rng.choice(source), len(shape), "RSP")]
    else:
        here = [truth_of(rng, group, len(shape)) for group in rng.sample(source, rng.randint(1, len(source)))]
    dtypes = _dtypes(rng)
    if any(truth.partial() for truth in here):
        dtypes = torch.float32, rng.choice([torch.float32, torch.bfloat16])
    cargo.items[name] = Item(shape, dtypes, here, _ends(rng, target, shape))
    return name


def _tied(
    rng: random.Random, cargo: Cargo, source: list[Group], target: list[Group], partial: bool, ties: bool
) -> None:
    first = _plain(rng, cargo, source, target, partial)
    one = cargo.items[first]
    for _ in range(rng.randint(1, 2)):
        there = rng.choice([one.dtypes[1], one.dtypes[0]])
        name = f"w{len(cargo.items)}"
        if ties and rng.random() < 0.3:
            cargo.items[name] = Item(one.shape, one.dtypes, one.source, one.target, tied=first, tied_target=True)
            continue
        cargo.items[name] = Item(
            one.shape, (one.dtypes[0], there), one.source, _ends(rng, target, one.shape), tied=first
        )


def _windows(rng: random.Random, cargo: Cargo, group: Group, target: list[Group], kind: str) -> None:
    arena, common = f"{kind}{len(cargo.arenas)}", rng.random() < 0.5
    one = _dtypes(rng)
    cargo.arenas[arena] = (common, {})
    for _ in range(rng.randint(2, 4)):
        shape = _shape(rng)
        if not shape and not common and len(group.ranks) > 1:
            shape = (rng.choice(SIZES),)  # a scalar is the same on all ranks
        # Replicas are equal only where all ranks' memories are.
        here = truth_of(rng, group, len(shape), "RSS" if common else "S")
        dtypes = one if kind == "windows" else (rng.choice(BITS),) * 2
        name = f"w{len(cargo.items)}"
        cargo.items[name] = Item(shape, dtypes, [here], _ends(rng, target, shape), window=arena)


def _lay_sources(rng: random.Random, cargo: Cargo, alloc: Alloc) -> None:
    seed = rng.getrandbits(32)
    for arena, (_, memory) in cargo.arenas.items():
        items = {name: item for name, item in cargo.items.items() if item.window == arena}
        nbytes = max(_most(item) * item.dtypes[0].itemsize for item in items.values())
        nbytes = -(-(nbytes * 2 + rng.choice([0, 64, 4096])) // 64) * 64 + 64
        for rank in next(iter(items.values())).source[0].ranks:
            memory[rank] = alloc("source", rank, nbytes)
        for name, item in items.items():
            for rank in item.source[0].ranks:
                shape = tuple(map(len, item.source[0].indices(item.shape, rank)))
                # Equal for equal shapes, so that replicas see equal values.
                dice = random.Random(f"{seed} {name} {shape}")
                flat = memory[rank].view(item.dtypes[0])
                cargo.source.setdefault(rank, {})[name] = _window(dice, flat, shape)
    for name, item in cargo.items.items():
        for truth in item.source if item.window is None else ():
            for rank in truth.ranks:
                shape = tuple(map(len, truth.indices(item.shape, rank)))
                held = cargo.source.setdefault(rank, {})
                held[name] = (
                    held[item.tied] if item.tied else _strided(rng, "source", rank, shape, item.dtypes[0], alloc)
                )


def _under_windows(cargo: Cargo, alloc: Alloc) -> Alloc:
    """Pieces of what windows look into, as long as there are any."""
    left = {rank: flat for _, memory in cargo.arenas.values() for rank, flat in memory.items()}

    def piece(side: str, rank: int, nbytes: int) -> torch.Tensor:
        rounded = -(-nbytes // 16) * 16
        if rank not in left or left[rank].numel() < rounded:
            return alloc(side, rank, nbytes)
        found, left[rank] = left[rank][:nbytes], left[rank][rounded:]
        return found

    return piece


def _most(item: Item) -> int:
    return max(torch.Size(map(len, item.source[0].indices(item.shape, r))).numel() for r in item.source[0].ranks)


def _window(dice: random.Random, flat: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Any strides that fit, elements over each other included."""
    room = flat.numel()
    for _ in range(5):
        strides, at = [0] * len(shape), 1
        for d in dice.sample(range(len(shape)), len(shape)):
            strides[d] = dice.choice([at, at, at, at + 1, at + dice.randint(1, 9), dice.choice([0, 1, 2, 3])])
            at = max(at, strides[d] * shape[d])
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
        if extent <= room:
            return flat.as_strided(shape, strides, flat.storage_offset() + dice.randint(0, room - extent))
    return flat[: torch.Size(shape).numel()].view(shape)


def _strided(
    rng: random.Random, side: str, rank: int, shape: tuple[int, ...], dtype: torch.dtype, alloc: Alloc
) -> torch.Tensor:
    """A tensor of its own memory: dense, turned, with gaps between rows, or every second or third element."""
    kind = rng.choice(["dense", "dense", "turned", "gaps", "steps"])
    if kind == "turned" and len(shape) > 1:
        order = rng.sample(range(len(shape)), len(shape))
        back = [order.index(d) for d in range(len(shape))]
        return _dense(side, rank, tuple(shape[d] for d in order), dtype, alloc).permute(back)
    if kind == "gaps" and shape:
        return _dense(side, rank, (*shape[:-1], shape[-1] + rng.randint(1, 5)), dtype, alloc)[..., : shape[-1]]
    if kind == "steps" and shape:
        step = rng.randint(2, 3)
        return _dense(side, rank, (*shape, step), dtype, alloc)[..., rng.randrange(step)]
    return _dense(side, rank, shape, dtype, alloc)


def _dense(side: str, rank: int, shape: tuple[int, ...], dtype: torch.dtype, alloc: Alloc) -> torch.Tensor:
    n = torch.Size(shape).numel()
    return alloc(side, rank, max(1, n) * dtype.itemsize).view(dtype)[:n].view(shape)


def _lay_targets(rng: random.Random, cargo: Cargo, alloc: Alloc) -> None:
    """Each name a memory of its own; now and then two of one shape take turns in one, element by element."""
    waiting: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}
    for name, item in cargo.items.items():
        for truth in item.target:
            for rank in truth.ranks:
                shape = tuple(map(len, truth.indices(item.shape, rank)))
                key = (rank, shape, item.dtypes[1])
                held = cargo.target.setdefault(rank, {})
                if item.tied_target:
                    assert item.tied is not None
                    held[name] = held[item.tied]
                elif key in waiting:
                    held[name] = waiting.pop(key)
                elif shape and rng.random() < 0.15:
                    both = _dense("target", rank, (*shape, 2), item.dtypes[1], alloc)
                    held[name], waiting[key] = both[..., 0], both[..., 1]
                else:
                    held[name] = _strided(rng, "target", rank, shape, item.dtypes[1], alloc)


def is_region(item: Item) -> bool:
    """Whether its targets picked what they keep."""
    return any(isinstance(truth, Loaded) for truth in item.target)
