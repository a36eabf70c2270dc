"""etha.redistribute over gloo, on 3 and on 8 ranks: against enumerated truth, and beside DTensor's own.

Each world is launched once; its ranks run every section, and the tests look at what they found.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import etha
from etha.errors import ConfigError, EthaError, LayoutError
from etha.redistribute import request as requests
from etha.redistribute import route as routes
from etha.redistribute import stage as stages
from etha.redistribute.exchange import GroupExchange
from tests.flow.jobs import Job
from tests.flow.truth import cut
from tests.unit.plan.truth import Truth, contributions, take

R, P, A = Replicate(), Partial(), Partial("avg")
S0, S1, S2 = Shard(0), Shard(1), Shard(2)
SHAPE = (7, 5, 3)
PERMUTED = [5, 2, 7, 0, 3, 6, 1, 4]

ON_8 = [
    Truth((8,), list(range(8)), [R]),
    Truth((8,), list(range(8)), [S0]),
    Truth((8,), list(range(8)), [S1]),
    Truth((8,), list(range(8)), [_StridedShard(0, split_factor=3)]),  # no order of shards gives this
    Truth((8,), PERMUTED, [S0]),
    Truth((2, 4), list(range(8)), [S0, S0]),
    Truth((2, 4), list(range(8)), [S0, S1]),
    Truth((2, 4), list(range(8)), [R, S2]),
    Truth((2, 4), list(range(8)), [_StridedShard(0, split_factor=4), S0]),  # FSDP2 x TP
    Truth((2, 4), PERMUTED, [S0, R]),
    Truth((2, 4), PERMUTED, [S2, S0]),
    Truth((2, 4), PERMUTED, [R, R]),
    Truth((2, 2, 2), list(range(8)), [S0, R, S1]),
    Truth((2, 2, 2), list(range(8)), [S2, S0, S0]),
    Truth((2, 2, 2), PERMUTED, [_StridedShard(1, split_factor=2), R, S1]),
    Truth((2, 2, 2, 1), PERMUTED, [R, S0, R, S1]),
    Truth((3,), [1, 3, 4], [S0]),
    Truth((2, 2), [7, 0, 5, 2], [S0, S1]),
    Truth((4,), [0, 1, 2, 3], [R]),
    Truth((1,), [6], [S0]),
]
PARTIAL_8 = [
    Truth((8,), list(range(8)), [P]),
    Truth((2, 4), PERMUTED, [R, P]),
    Truth((2, 2, 2), PERMUTED, [P, R, P]),
    Truth((2, 2, 2), list(range(8)), [P, S0, A]),
    Truth((2, 4), list(range(8)), [Partial("max"), S1]),
    Truth((2, 2), [7, 0, 5, 2], [Partial("min"), S0]),
    Truth((3,), [1, 3, 4], [Partial("product")]),
]
ON_3 = [
    Truth((3,), [0, 1, 2], [R]),
    Truth((3,), [0, 1, 2], [S0]),
    Truth((3,), [0, 1, 2], [S1]),
    Truth((3,), [0, 1, 2], [S2]),
    Truth((3,), [0, 1, 2], [_StridedShard(0, split_factor=2)]),
    Truth((3,), [2, 0, 1], [S0]),
    Truth((3,), [2, 0, 1], [S1]),
    Truth((3,), [2, 0, 1], [R]),
    Truth((3, 1), [0, 1, 2], [S0, R]),
    Truth((3, 1), [0, 1, 2], [S1, S0]),
    Truth((1, 3), [1, 2, 0], [_StridedShard(0, split_factor=3), S0]),
    Truth((1, 3), [1, 2, 0], [R, S1]),
    Truth((1, 3, 1), [1, 2, 0], [S0, S0, S0]),
    Truth((2,), [0, 2], [S0]),
    Truth((2,), [0, 2], [S1]),
    Truth((2,), [0, 2], [R]),
    Truth((2,), [2, 1], [S0]),
    Truth((2, 1), [1, 0], [S2, S0]),
    Truth((1,), [1], [R]),
    Truth((1,), [0], [S1]),
]
PARTIAL_3 = [
    Truth((3,), [2, 0, 1], [P]),
    Truth((3, 1), [0, 1, 2], [A, P]),
    Truth((2,), [2, 1], [Partial("max")]),
    Truth((2, 1), [1, 0], [P, S0]),
]


@cache
def mesh_of(shape: tuple[int, ...], ranks: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks).reshape(shape))


def on(truth: Truth) -> DeviceMesh:
    return mesh_of(truth.mesh, tuple(truth.ranks))


def dtensor(truth: Truth, parts: list[torch.Tensor], rank: int) -> DTensor:
    """The DTensor that ``truth`` describes, also on a rank that is not in its mesh."""
    shape, local = tuple(parts[0].shape), parts[0].new_empty(0 if parts[0].ndim else ())
    if rank in truth.ranks:
        local = take(parts[truth.contribution(rank)], truth.indices(shape, rank))
    whole = torch.empty(shape, device="meta")
    return DTensor.from_local(local, on(truth), truth.placements, run_check=False, shape=shape, stride=whole.stride())


def forget_routes() -> None:
    """Plan all routes anew, with the limits as they are now."""
    routes.make_route.cache_clear()
    requests._route.cache_clear()


class Exchanges:
    """Counts what goes over the wire while the block runs: collectives and, as one, all messages of a stage."""

    def __enter__(self) -> Exchanges:
        self.count = 0
        self._saved = GroupExchange.exchange, GroupExchange.link
        for name, function in zip(("exchange", "link"), self._saved, strict=True):
            setattr(GroupExchange, name, self._counting(function))
        return self

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            # A group without messages falls back to a collective, which is counted then.
            self.count += function is self._saved[0] or found is not None
            return found

        return counted

    def __exit__(self, *exc: object) -> None:
        GroupExchange.exchange, GroupExchange.link = self._saved  # type: ignore[method-assign]


def difference(source: Truth, target: Truth, full: torch.Tensor, rank: int) -> str:
    """Redistribute ``full`` and say what is wrong with the result; empty when nothing is."""
    given = dtensor(source, contributions(source, full, random.Random(7)), rank)
    before = given._local_tensor.clone()
    with Exchanges() as wire:
        got = etha.redistribute(given, on(target), target.placements)
    local, wanted = got.to_local(), full.new_empty(0)
    if rank in target.ranks:
        wanted = take(full, target.indices(tuple(full.shape), rank))
    wrong = []
    if local.shape != wanted.shape or local.dtype != full.dtype or not torch.equal(local, wanted):
        wrong.append(f"holds {local}, not {wanted}")
    if (got.placements, got.device_mesh) != (tuple(target.placements), on(target)):
        wrong.append(f"says {got.placements} over {got.device_mesh}")
    if (got.shape, got.stride()) != (full.shape, full.stride()) or got.requires_grad:
        wrong.append(f"says {got.shape} {got.stride()}")
    if rank in target.ranks and not any(isinstance(p, _StridedShard) for p in target.placements):
        size, _ = compute_local_shape_and_global_offset(tuple(full.shape), on(target), target.placements)
        if tuple(local.shape) != tuple(size):
            wrong.append(f"torch expects {size}")
    if wire.count > 1 or not torch.equal(given._local_tensor, before):
        wrong.append(f"{wire.count} exchanges")
    return f"rank {rank}, {source} -> {target}: {'; '.join(wrong)}" if wrong else ""


def in_place(rank: int, *args: Any) -> tuple[int, list[str]]:
    """``every_pair`` with messages from and to the places where their elements lie, as for large tensors."""
    forget_routes()
    saved, stages.LARGE = stages.LARGE, 0
    try:
        return every_pair(rank, *args)
    finally:
        stages.LARGE = saved
        forget_routes()


def every_pair(rank: int, layouts: list[Truth], partial: list[Truth]) -> tuple[int, list[str]]:
    """All pairs, and Partial to some, on one shape that is even nowhere; (how many, what was wrong)."""
    full = torch.arange(7 * 5 * 3, dtype=torch.float32).reshape(SHAPE) % 23
    pairs = [*itertools.product(layouts, layouts), *itertools.product(partial, layouts[::4])]
    found = [difference(source, target, full, rank) for source, target in pairs]
    return len(pairs), [text for text in found if text][:5]


def odd_tensors(rank: int, layouts: list[Truth], partial: list[Truth]) -> list[str]:
    """Dtypes, empty tensors and a scalar, on some layouts."""
    found = []
    some = [*layouts[1::4], layouts[-1]]
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.complex128, torch.uint16):
        full = (torch.arange(SHAPE[0] * 15).reshape(SHAPE) % 13).to(dtype)
        found += [difference(a, b, full, rank) for a, b in itertools.product(some[:2], some)]
    for shape in ((0, 5, 3), (1, 0, 2)):
        found += [difference(a, b, torch.zeros(shape), rank) for a, b in itertools.product(some, some)]
    for source in (Truth((len(layouts[0].ranks),), layouts[0].ranks, [p]) for p in (R, P)):
        target = Truth((2,), [1, 0], [R])
        found.append(difference(source, target, torch.tensor(3.0), rank))
    wide = torch.arange(64 * 3 * 5, dtype=torch.int32).reshape(64, 15)
    many = Truth((2,), [1, 0], [_StridedShard(0, split_factor=32)], "auto")
    cross = Truth((2, 1), [0, 1], [_StridedShard(0, split_factor=21), R])
    found += [difference(a, b, wide, rank) for a, b in itertools.permutations([many, cross, layouts[1]], 2)]
    for source in partial:
        if source.placements[0] == P:
            full = torch.arange(7 * 15, dtype=torch.bfloat16).reshape(SHAPE) % 7
            found.append(difference(source, layouts[1], full, rank))
    return [text for text in found if text][:5]


def random_parts(count: int) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(11)
    return [torch.randn(128, 128, generator=gen) for _ in range(count)]


def replicas(rank: int) -> dict[str, Any]:
    """Done once in one exchange, once in two, once by DTensor: the bits that this replica holds."""
    cases = {"(2, 4)": Truth((2, 4), PERMUTED, [R, P]), "(2, 2, 2)": Truth((2, 2, 2), PERMUTED, [P, R, P])}
    found: dict[str, Any] = {}
    for name, truth in cases.items():
        given = dtensor(truth, random_parts(4), rank)
        wanted = [R] * len(truth.mesh)
        for limit, large in itertools.product((1 << 40, 0), (1 << 40, 0)):
            forget_routes()
            before = routes.MESSAGE, stages.LARGE
            routes.MESSAGE, stages.LARGE = limit, large
            with Exchanges() as wire:
                ours = etha.redistribute(given, placements=wanted)
            routes.MESSAGE, stages.LARGE = before
            way = "in place" if large == 0 else "packed"
            found[f"{name} ours in {wire.count} {way}"] = ours.to_local().numpy().tobytes()
        mesh = init_device_mesh("cpu", truth.mesh, mesh_dim_names=("a", "b", "c")[: len(truth.mesh)])
        mesh = DeviceMesh("cpu", torch.tensor(PERMUTED).reshape(truth.mesh), mesh_dim_names=mesh.mesh_dim_names)
        if len(truth.mesh) == 3:
            mesh["a", "c"]._flatten("ac")
        theirs = DTensor.from_local(given.to_local(), mesh, truth.placements, run_check=False).redistribute(
            placements=wanted
        )
        found[f"{name} DTensor"] = theirs.to_local().numpy().tobytes()
    forget_routes()
    return found


def sub_meshes(rank: int) -> list[str]:
    """Rows of a mesh on their own, rows as replicas, meshes with a group of their own, an order of shards."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    wrong = []
    row = torch.arange(18.0).reshape(9, 2) + 100 * (rank % 2)  # each row a tensor of its own
    dp, tp = mesh["dp"], mesh["tp"]
    norm = DTensor.from_local(cut(row, 0, 4, rank // 2), dp, [S0], run_check=False, shape=(9, 2), stride=(2, 1))
    with Exchanges() as wire:
        own = etha.redistribute(norm, placements=[R])
    if wire.count != 1 or not torch.equal(own.to_local(), row):
        wrong.append(f"row of its own: {own.to_local()}")
    full = torch.arange(18.0).reshape(9, 2)
    norm = DTensor.from_local(cut(full, 0, 4, rank // 2), dp, [S0], run_check=False, shape=(9, 2), stride=(2, 1))
    for target, placements, parts in ((tp, [S1], 2), (mesh, [R, S1], 2), (dp, [S1], 4)):
        where = rank // 2 if target is dp else rank % 2
        wanted = cut(full, 1, parts, where)
        got = etha.redistribute(norm, target, placements).to_local()
        if not torch.equal(got, wanted):
            wrong.append(f"dp -> {target}: {got}, not {wanted}")
    back = etha.redistribute(etha.redistribute(norm, tp, [S0]), dp, [S0])
    if not torch.equal(back.to_local(), cut(full, 0, 4, rank // 2)) or back.device_mesh != dp:
        wrong.append(f"tp -> dp: {back.to_local()}")
    half = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]] if rank < 4 else [[4, 5], [6, 7]]), _init_backend=False)
    if not torch.equal(_gathered(half, full, rank % 4), full):
        wrong.append("n-d mesh without a group")
    return wrong


def _gathered(half: DeviceMesh, full: torch.Tensor, place: int) -> torch.Tensor:
    local = cut(cut(full, 0, 2, place // 2), 0, 2, place % 2)
    given = DTensor.from_local(local, half, [S0, S0], run_check=False, shape=(9, 2), stride=(2, 1))
    return etha.redistribute(given, placements=[R, R]).to_local()


def strided_readings(rank: int) -> list[str]:
    """FSDP2(4) x TP(2) of 9 rows: what distribute_tensor makes, and what FSDP2 makes, each understood."""
    full = torch.arange(27.0).reshape(9, 3)
    mesh = mesh_of((4, 2), tuple(range(8)))
    placements: list[Placement] = [_StridedShard(0, split_factor=2), S0]
    wrong = []
    for reading in ("literal", "order"):
        truth = Truth((4, 2), list(range(8)), list(placements), reading)
        given = dtensor(truth, [full], rank)
        if reading == "literal":
            made = distribute_tensor(full, mesh, placements, src_data_rank=None)
            if not torch.equal(made.to_local(), given.to_local()):
                wrong.append("distribute_tensor reads otherwise")
        got = etha.redistribute(given, placements=[R, R])
        if not torch.equal(got.to_local(), full):
            wrong.append(f"{reading}: {got.to_local()}")
    return wrong


def details(rank: int) -> list[str]:
    """What else a result is: memory of its own, the order of dims in memory, Partial that stays."""
    wrong = []
    mesh = mesh_of((2, 4), tuple(range(8)))
    full = torch.arange(48.0).reshape(6, 8)
    given = distribute_tensor(full, mesh, [S0, S1], src_data_rank=None)
    same = etha.redistribute(given, placements=[S0, Shard(-1)])
    same.to_local().add_(1)
    if not torch.equal(given.to_local(), full.chunk(2)[rank // 4].chunk(4, 1)[rank % 4]):
        wrong.append("the result shares memory with what was given")
    with Exchanges() as wire:
        inside = etha.redistribute(etha.redistribute(given, placements=[R, R]), placements=[R, S0])
    if wire.count != 1 or inside.to_local().shape != ((2, 2, 2, 0)[rank % 4], 8):
        wrong.append(f"{wire.count} exchanges for one that is needed")
    turned = etha.redistribute(given.t(), placements=[R, S0])
    if turned.stride() != given.t().stride() or turned.to_local().stride() != (1, 2):
        wrong.append(f"turned: {turned.stride()}, {turned.to_local().stride()}")
    if not torch.equal(turned.full_tensor(), full.t()):
        wrong.append(f"turned: {turned.full_tensor()}")
    parts = Truth((2, 4), list(range(8)), [P, S0])
    held = dtensor(parts, [full, 10 * full], rank)
    stays = etha.redistribute(held, placements=[P, R])
    if stays.placements != (P, R) or not torch.equal(stays.to_local(), full * (1 if rank < 4 else 10)):
        wrong.append(f"what stays Partial: {stays.to_local()}")
    both = dtensor(Truth((2, 4), list(range(8)), [P, P]), [full * k for k in range(8)], rank)
    one = etha.redistribute(both, placements=[P, S1])
    mine = sum(full * k for k in range(4 * (rank // 4), 4 * (rank // 4) + 4))
    if not torch.equal(one.to_local(), mine.chunk(4, 1)[rank % 4]):
        wrong.append(f"one of two Partial axes: {one.to_local()}")
    waiting = given.redistribute(placements=[R, R], async_op=True)
    if not torch.equal(etha.redistribute(waiting, placements=[S1, S0]).full_tensor(), full):
        wrong.append("an unfinished collective")
    return wrong


def any_order(rank: int) -> list[str]:
    """``exact_order=False``: an all-reduce of the group where one does all of it, otherwise the usual route."""
    calls: list[str] = []
    saved = dist.all_reduce

    def reduced(*args: Any, **kwargs: Any) -> Any:
        calls.append(str(kwargs["group"].size()))
        return saved(*args, **kwargs)

    flat = DeviceMesh("cpu", torch.tensor(PERMUTED).reshape(2, 2, 2), mesh_dim_names=("a", "b", "c"))
    flat["a", "c"]._flatten("ac")
    plain = mesh_of((2, 2, 2), tuple(PERMUTED))
    uneven = mesh_of((2, 4), tuple(range(8)))
    wrong = []
    dist.all_reduce = reduced
    try:
        for mesh, source, target, groups in (
            (mesh_of((8,), tuple(range(8))), [P], [R], ["8"]),
            (uneven, [R, P], [R, R], ["4"]),
            (uneven, [P, S1], [R, S1], ["2"]),
            (uneven, [A, A], [R, R], ["8"]),
            (uneven, [Partial("max"), R], [R, R], []),  # gloo's loses a NaN
            (flat, [P, R, P], [R, R, R], ["4"]),
            (plain, [P, R, P], [R, R, R], []),  # no group has these ranks
            (plain, [P, A, R], [R, R, R], []),  # two kinds
            (uneven, [P, P], [R, S0], []),  # not an all-reduce
            (uneven, [P, S0], [R, R], []),
            (uneven, [S0, R], [R, R], []),
        ):
            truth = Truth(tuple(mesh.shape), [int(r) for r in mesh.mesh.flatten()], list(source))
            full = torch.arange(7 * 15, dtype=torch.float32).reshape(SHAPE) % 23
            made = dtensor(truth, contributions(truth, full, random.Random(5)), rank)
            given = DTensor.from_local(
                made.to_local(), mesh, source, run_check=False, shape=made.shape, stride=made.stride()
            )
            calls.clear()
            got = etha.redistribute(given, placements=target, exact_order=False)
            exact = etha.redistribute(given, placements=target)
            if calls != groups:
                wrong.append(f"{source} -> {target}: all-reduces over {calls}")
            # Small integers: every order gives the same.
            if got.placements != exact.placements or not torch.equal(got.to_local(), exact.to_local()):
                wrong.append(f"{source} -> {target}: {got} instead of {exact}")
        nan = math.nan if rank == 5 else float(rank)
        for dtype, op, value, groups, result in (
            (torch.float32, "max", nan, [], math.nan),
            (torch.float32, "min", nan, [], math.nan),
            (torch.float16, "avg", 40000.0, [], 40000.0),  # the sum is too large for it
            (torch.bfloat16, "sum", 1.0, [], 8.0),
            (torch.int32, "max", float(rank), ["8"], 7.0),
            (torch.float64, "sum", 1.0, ["8"], 8.0),
        ):
            calls.clear()
            local = torch.full((4,), value, dtype=dtype)
            given = DTensor.from_local(local, mesh_of((8,), tuple(range(8))), [Partial(op)], run_check=False)
            got = etha.redistribute(given, placements=[R], exact_order=False).to_local()
            if calls != groups or not torch.equal(got.nan_to_num(-1.0), torch.full_like(got, result).nan_to_num(-1.0)):
                wrong.append(f"{op} of {dtype}: {got} by all-reduces over {calls}")
    finally:
        dist.all_reduce = saved
    return wrong


def refused(rank: int) -> dict[str, str]:
    """What cannot be: each refused on all ranks, before anything is exchanged."""
    mesh = mesh_of((8,), tuple(range(8)))
    given = distribute_tensor(torch.zeros(8, 8), mesh, [S0], src_data_rank=None)
    partial = DTensor.from_local(torch.zeros(8, 8), mesh, [P], run_check=False)
    integers = DTensor.from_local(torch.zeros(8, dtype=torch.int32), mesh, [A], run_check=False)
    lying = DTensor.from_local(torch.zeros(3, 8), mesh, [S0], run_check=False, shape=(9, 8), stride=(8, 1))
    calls: dict[str, tuple[Any, ...]] = {
        "plain": (torch.zeros(3), mesh, [R]),
        "placements": (given, None, None),
        "one": (given, None, R),
        "count": (given, None, [R, R]),
        "dim": (given, None, [Shard(2)]),
        "partial": (given, None, [P]),
        "other": (partial, None, [Partial("max")]),
        "mean": (integers, None, [R]),
        "size": (lying, None, [R]),
        "mesh": (given, (8,), [R]),
        "order": (given, None, [R]),
    }
    options: dict[str, Any] = {"order": {"exact_order": "no"}}
    found = {}
    for name, args in calls.items():
        with Exchanges() as wire:
            try:
                etha.redistribute(*args, **options.get(name, {}))
            except EthaError as error:
                found[name] = f"{error.code}: {error.message}"
        assert wire.count == 0, name
    return found


def world(rank: int, size: int, store: str, sections: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """One rank of a world: what each section found."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    try:
        return {name: globals()[name](rank, *args) for name, args in sections.items()}
    finally:
        dist.destroy_process_group()


def launch(size: int, store: Path, sections: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    with Job({"GLOO_SOCKET_IFNAME": "lo"}) as job:
        return job.results([job.start(world, rank, size, str(store), sections) for rank in range(size)])


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    sections = {
        "every_pair": (ON_3, PARTIAL_3),
        "in_place": (ON_3, PARTIAL_3),
        "odd_tensors": (ON_3, PARTIAL_3),
    }
    yield launch(3, tmp_path_factory.mktemp("three") / "store", sections)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    sections: dict[str, tuple[Any, ...]] = {
        "odd_tensors": (ON_8, PARTIAL_8),
        **dict.fromkeys(("replicas", "sub_meshes", "strided_readings", "details", "any_order", "refused"), ()),
    }
    yield launch(8, tmp_path_factory.mktemp("eight") / "store", sections)


@pytest.fixture
def every_eight(tmp_path: Path) -> list[dict[str, Any]]:
    return launch(8, tmp_path / "store", dict.fromkeys(("every_pair", "in_place"), (ON_8, PARTIAL_8)))


@pytest.mark.parametrize(
    ("size", "layouts", "partial"),
    [("three", 20, 4), pytest.param("every_eight", 20, 7, id="eight-20-7", marks=pytest.mark.more)],
)
def test_every_pair_of_layouts(request: pytest.FixtureRequest, size: str, layouts: int, partial: int) -> None:
    for found in request.getfixturevalue(size):
        for section in ("every_pair", "in_place"):
            assert found[section] == (layouts * layouts + partial * layouts // 4, [])


@pytest.mark.parametrize("size", ["three", "eight"])
def test_any_dtype_and_shape(request: pytest.FixtureRequest, size: str) -> None:
    assert [found["odd_tensors"] for found in request.getfixturevalue(size)] == [[]] * {"three": 3, "eight": 8}[size]


@pytest.mark.parametrize("case", ["(2, 4)", "(2, 2, 2)"])
def test_replicas_are_equal_to_the_bit_where_those_of_dtensor_differ(eight: list[dict[str, Any]], case: str) -> None:
    parts = random_parts(4)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    fixed_order = total.numpy().tobytes()
    for ways in ("ours in 1 packed", "ours in 2 packed", "ours in 1 in place", "ours in 2 in place"):
        assert {found["replicas"][f"{case} {ways}"] for found in eight} == {fixed_order}
    assert len({found["replicas"][f"{case} DTensor"] for found in eight}) > 1


@pytest.mark.parametrize("section", ["sub_meshes", "strided_readings", "details", "any_order"])
def test_section(eight: list[dict[str, Any]], section: str) -> None:
    assert [found[section] for found in eight] == [[]] * 8


def test_what_cannot_be_is_refused(eight: list[dict[str, Any]]) -> None:
    says = {
        "plain": (LayoutError, "a Tensor has no layout"),
        "placements": (LayoutError, "not None"),
        "one": (LayoutError, "one placement for each mesh axis"),
        "count": (LayoutError, "2 placements for a mesh of 1 axes"),
        "dim": (LayoutError, "shards dim 2 of a tensor of 2 dims"),
        "partial": (LayoutError, "P\\(sum\\) on mesh axis 0, where it is S\\(0\\)"),
        "other": (LayoutError, "on mesh axis 0, where it is P\\(sum\\)"),
        "mean": (LayoutError, "Partial\\(avg\\) of int32"),
        "size": (LayoutError, "rank \\d holds \\(3, 8\\), but .* gives it"),
        "mesh": (ConfigError, "device_mesh is a DeviceMesh"),
        "order": (ConfigError, "exact_order='no' must be True or False"),
    }
    for rank, found in enumerate(eight):
        for name, (kind, text) in says.items():
            code, _, message = found["refused"][name].partition(": ")
            assert code == kind.code, (rank, name)
            assert re.search(text, message), (rank, name, message)
