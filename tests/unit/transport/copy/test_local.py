"""Programs against ``simulate``: any layouts, dtypes, strides, mapped and private memory, to the bit."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from etha.memory.handles import TensorHandle
from etha.memory.mapping import WorkerMemory
from etha.memory.process import start_time
from etha.memory.views import View, view_of
from etha.plan import Layout, Plan, TensorSpec, build_plan, simulate
from etha.transport.copy.cpu import Workspace
from etha.transport.copy.local import compile_local
from etha.transport.copy.program import PIECE, Program
from etha.transport.geometry.tiles import Path
from tests.examples import examples

Local = dict[int, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def me() -> Iterator[WorkerMemory]:
    """This process's own memory, reached the way another's is."""
    memory = WorkerMemory(os.getpid(), start_time(os.getpid()))
    yield memory
    memory.close()


def private(me: WorkerMemory, t: torch.Tensor) -> View:
    dtype = str(t.dtype).removeprefix("torch.")
    return me.resolve(
        TensorHandle(segment=None, offset=t.data_ptr(), shape=tuple(t.shape), strides=t.stride(), dtype=dtype)
    )


def local_plan(source: dict[str, TensorSpec], target: dict[str, TensorSpec], m: int, n: int) -> Plan:
    plan = build_plan(
        source,
        target,
        source_agents=["a"] * m,
        target_agents=["a"] * n,
        source_hosts=["h"] * m,
        target_hosts=["h"] * n,
    )
    return plan


def run(program: Program) -> int:
    work = Workspace()
    return sum(program.run(i, work) for i in range(len(program.pieces)))


def compiled(plan: Plan, source: Local, target: Local, me: WorkerMemory, s: bool, t: bool) -> Program:
    number = {name: i for i, name in enumerate(plan.names)}

    def views(local: Local, is_private: bool) -> dict[int, dict[int, View]]:
        return {
            r: {number[k]: private(me, x) if is_private else view_of(x) for k, x in held.items()}
            for r, held in local.items()
        }

    return compile_local(plan, views(source, s), views(target, t))


def bits(t: torch.Tensor) -> bytes:
    return t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def check(plan: Plan, source: Local, target: Local, me: WorkerMemory, s: bool, t: bool) -> Program:
    """Run on memory of these kinds and compare every bit with ``simulate``."""
    expected = {r: {k: x.clone() for k, x in held.items()} for r, held in target.items()}
    simulate(plan, {r: {k: x.clone() for k, x in held.items()} for r, held in source.items()}, expected)
    program = compiled(plan, source, target, me, s, t)
    assert run(program) == program.work
    for r, held in target.items():
        for k, x in held.items():
            assert bits(x) == bits(expected[r][k]), (k, r, plan.source[k], plan.target[k])
    return program


def allocate(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype, source: bool) -> torch.Tensor:
    """A tensor of any strides with random values; a source may repeat itself with stride 0."""
    kind = rng.choice(["plain", "turned", "gaps", "steps", "repeats"][: 5 if source else 4])
    if kind == "turned" and len(shape) > 1:
        t = torch.empty(tuple(reversed(shape)), dtype=dtype).permute(*reversed(range(len(shape))))
    elif kind == "gaps" and shape:
        t = torch.empty((*shape[:-1], shape[-1] + 3), dtype=dtype)[..., : shape[-1]]
    elif kind == "steps" and shape:
        t = torch.empty((*shape, 2), dtype=dtype)[..., 0]
    elif kind == "repeats" and shape and shape[0]:
        t = torch.empty((1, *shape[1:]), dtype=dtype).expand(shape)
    else:
        t = torch.empty(shape, dtype=dtype)
    base = t[:1] if kind == "repeats" and shape and shape[0] else t
    values = np.random.default_rng(rng.getrandbits(32)).normal(size=tuple(base.shape)) * 100
    base.copy_(torch.from_numpy(np.asarray(values)).to(dtype))
    return t


def layout(rng: random.Random, n: int, ndim: int, partial: bool) -> Layout:
    shapes = [(n,), (1, n), (n, 1)] + ([(2, n // 2), (n // 2, 2)] if n % 2 == 0 else [])
    shape = rng.choice(shapes)
    ranks = list(range(n))
    rng.shuffle(ranks)
    op = rng.choice(["sum", "avg", "max", "min", "product"])
    placements: list[Placement] = []
    for _ in shape:
        kind = rng.choice("R" + "SS" * (ndim > 0) + "P" * partial)
        placements.append(Replicate() if kind == "R" else Partial(op) if kind == "P" else Shard(rng.randrange(ndim)))
    if ndim and len(shape) == 2 and not partial and rng.random() < 0.2:
        d = rng.randrange(ndim)
        placements = [_StridedShard(d, split_factor=shape[1]), Shard(d)]
    return Layout(torch.tensor(ranks).view(shape), placements)


FLOATS = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float8_e4m3fn)


@pytest.mark.parametrize("seed", range(examples(60)))
def test_random_redistributions_equal_simulate(seed: int, me: WorkerMemory) -> None:
    rng = random.Random(seed)
    m, n = rng.choice([1, 2, 3, 4, 6]), rng.choice([1, 2, 3, 4])
    source, target = {}, {}
    for i in range(rng.randint(1, 4)):
        ndim, big = rng.randint(0, 3), rng.random() < 0.1
        shape = tuple(rng.choice([64, 100, 257] if big else [0, 1, 2, 3, 5, 7, 8, 16, 33]) for _ in range(ndim))
        a = rng.choice(FLOATS)
        b = rng.choice([a, a, *FLOATS[:4]])
        partial = rng.random() < 0.3 and a is not torch.float8_e4m3fn
        source[f"t{i}"] = TensorSpec(shape, a, layout(rng, m, ndim, partial))
        target[f"t{i}"] = TensorSpec(shape, b, layout(rng, n, ndim, False))
    plan = local_plan(source, target, m, n)
    assert not plan.violations

    def held(specs: dict[str, TensorSpec], ranks: int, is_source: bool) -> Local:
        return {
            r: {
                k: allocate(rng, shape, s.dtype, is_source)
                for k, s in specs.items()
                if (shape := s.local_shape(r)) is not None
            }
            for r in range(ranks)
        }

    here, there = held(source, m, True), held(target, n, False)
    check(plan, here, there, me, rng.random() < 0.6, rng.random() < 0.6)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_norms_equal_simulate(p: float, me: WorkerMemory) -> None:
    from torch.distributed.tensor._ops._math_ops import _NormPartial

    spec = TensorSpec((70, 333), torch.float32, Layout((4,), [_NormPartial(p)]))
    plan = local_plan({"n": spec}, {"n": TensorSpec((70, 333), torch.float32, Layout((2,), [Shard(1)]))}, 4, 2)
    source = {r: {"n": torch.rand(70, 333, generator=torch.Generator().manual_seed(r))} for r in range(4)}
    check(plan, source, {r: {"n": torch.zeros(70, n)} for r, n in ((0, 167), (1, 166))}, me, True, False)


@pytest.mark.slow
def test_large_partial_sums_are_cut_and_still_equal(me: WorkerMemory) -> None:
    shape = (600, 1000)
    spec = TensorSpec(shape, torch.bfloat16, Layout((2, 2), [Partial("sum"), Partial("avg")]))
    plan = local_plan({"g": spec}, {"g": TensorSpec(shape, torch.float32, Layout((3,), [Replicate()]))}, 4, 3)
    source = {r: {"g": torch.randn(shape, generator=torch.Generator().manual_seed(r)).bfloat16()} for r in range(4)}
    target = {r: {"g": torch.zeros(shape)} for r in range(3)}
    program = check(plan, source, target, me, True, True)
    assert len(program.pieces) > 4
    assert bits(target[0]["g"]) == bits(target[1]["g"]) == bits(target[2]["g"])


def square(m: int, n: int, shape: tuple[int, ...], to: int, dtype: torch.dtype = torch.float32) -> Plan:
    source = TensorSpec(shape, dtype, Layout((m,), [Shard(0)]))
    return local_plan({"t": source}, {"t": TensorSpec(shape, dtype, Layout((n,), [Shard(to)]))}, m, n)


def test_pieces_are_small_and_bytes_are_accounted_by_rank(me: WorkerMemory) -> None:
    plan = square(2, 2, (2048, 4096), 1)
    source = {r: {"t": torch.rand(1024, 4096)} for r in range(2)}
    target = {r: {"t": torch.zeros(2048, 2048)} for r in range(2)}
    program = check(plan, source, target, me, True, False)
    assert all(0 < piece.nbytes <= PIECE for piece in program.pieces)
    assert program.total == program.work == 32 << 20
    assert program.nbytes == {(side, r): 16 << 20 for side in ("source", "target") for r in range(2)}
    assert program.peers["source", 0] == (("target", 0), ("target", 1))
    assert {p.path for p in program.tiles} == {Path.READ}
    assert program.peak_staging(2) == 0


@pytest.mark.parametrize(
    ("columns", "path"), [(4096, Path.READ), (64, Path.BOUNCE)], ids=["long runs in place", "short runs through L2"]
)
def test_the_way_follows_the_runs(me: WorkerMemory, columns: int, path: Path) -> None:
    plan = square(2, 2, ((1 << 20) // columns, columns), 1)
    source = {r: {"t": torch.rand((1 << 19) // columns, columns)} for r in range(2)}
    target = {r: {"t": torch.zeros((1 << 20) // columns, columns // 2)} for r in range(2)}
    program = check(plan, source, target, me, True, False)
    assert {p.path for p in program.tiles} == {path}


def test_a_thousand_small_tensors_share_pieces(me: WorkerMemory) -> None:
    spec = TensorSpec((256,), torch.float32, Layout((1,), [Replicate()]))
    specs = {f"t{i:04}": spec for i in range(1000)}
    plan = local_plan(specs, specs, 1, 1)
    source, target = ({0: {k: torch.rand(256) for k in specs}} for _ in range(2))
    assert len(check(plan, source, target, me, True, False).pieces) <= 4


@pytest.mark.parametrize("is_private", [False, True])
def test_one_memory_as_source_and_target_is_read_before_it_is_written(is_private: bool, me: WorkerMemory) -> None:
    """Rows to columns in place: each rank's only tensor is both."""
    plan = square(2, 2, (64, 64), 1)
    memory = {r: torch.rand(64 * 32) for r in range(2)}
    source = {r: {"t": t.view(32, 64)} for r, t in memory.items()}
    program = check(plan, source, {r: {"t": t.view(64, 32)} for r, t in memory.items()}, me, is_private, is_private)
    assert program.barriers and program.staged == 64 * 64 * 4
    assert program.peak_staging(2) >= program.staged


def test_partial_sums_into_their_own_memory_are_reduced_first(me: WorkerMemory) -> None:
    shape = (40, 50)
    spec = TensorSpec(shape, torch.float32, Layout((3,), [Partial("sum")]))
    plan = local_plan({"g": spec}, {"g": TensorSpec(shape, torch.float32, Layout((3,), [Replicate()]))}, 3, 3)
    held = {r: {"g": torch.rand(shape, generator=torch.Generator().manual_seed(r))} for r in range(3)}
    assert check(plan, held, held, me, False, False).barriers


def test_a_tensor_sent_to_its_own_place_costs_nothing(me: WorkerMemory) -> None:
    plan = square(2, 2, (64, 64), 0)
    held = {r: {"t": torch.rand(32, 64)} for r in range(2)}
    program = check(plan, held, held, me, False, False)
    assert program.pieces == () and program.staged == 0 and program.total == 64 * 64 * 4


def test_opaque_bits_arrive_as_they_are(me: WorkerMemory) -> None:
    """NaN payloads and bytes that are no bool survive a copy without a cast."""
    plan = square(1, 2, (64, 66), 1, torch.float16)
    noise = torch.randint(-(1 << 15), 1 << 15, (64, 66), dtype=torch.int16)
    target = {r: {"t": torch.zeros(64, 33, dtype=torch.float16)} for r in range(2)}
    run(compiled(plan, {0: {"t": noise.view(torch.float16)}}, target, me, True, True))
    joined = torch.cat([target[0]["t"].view(torch.int16), target[1]["t"].view(torch.int16)], dim=1)
    assert torch.equal(joined, noise)


@pytest.mark.parametrize("is_private", [False, True])
def test_a_nan_that_is_cast_stays_one(is_private: bool, me: WorkerMemory) -> None:
    """Which of its bits survive is torch's own: its vectors and its single elements differ."""
    source = TensorSpec((64, 66), torch.float32, Layout((1,), [Shard(1)]))
    plan = local_plan({"t": source}, {"t": TensorSpec((64, 66), torch.bfloat16, Layout((2,), [Shard(1)]))}, 1, 2)
    noise = torch.randint(-(1 << 31), 1 << 31, (64, 66), dtype=torch.int64).to(torch.int32)
    noise[::3] = noise[::3] | 0x7F800001
    values = noise.view(torch.float32)
    target = {r: {"t": torch.zeros(64, 33, dtype=torch.bfloat16)} for r in range(2)}
    run(compiled(plan, {0: {"t": values}}, target, me, is_private, is_private))
    got, wanted = torch.cat([target[0]["t"], target[1]["t"]], dim=1), values.to(torch.bfloat16)
    assert torch.equal(got.isnan(), wanted.isnan()) and wanted.isnan().sum() >= 22 * 66
    assert torch.equal(got[~got.isnan()].view(torch.int16), wanted[~wanted.isnan()].view(torch.int16))


def test_a_view_smaller_than_planned_is_refused(me: WorkerMemory) -> None:
    plan = square(1, 1, (64, 64), 0)
    whole, short = {0: {"t": torch.rand(64, 64)}}, {0: {"t": torch.rand(63, 64)}}
    for source, target in ((short, whole), (whole, short)):
        with pytest.raises(ValueError, match="outside"):
            compiled(plan, source, target, me, False, False)
    with pytest.raises(ValueError, match="no memory for 't'"):
        compiled(plan, {0: {}}, whole, me, False, False)


def test_unaligned_private_elements_arrive(me: WorkerMemory) -> None:
    """A tensor over any byte offset of a buffer, as ``torch.frombuffer`` makes it."""
    raw = bytearray(os.urandom(1 + 4 * 64 * 64))
    t = torch.frombuffer(raw, dtype=torch.float32, offset=1, count=64 * 64).view(64, 64)
    plan = square(1, 4, (64, 64), 1)
    target = {r: {"t": torch.zeros(64, 16)} for r in range(4)}
    run(compiled(plan, {0: {"t": t}}, target, me, True, False))
    joined = torch.cat([target[r]["t"] for r in range(4)], dim=1)
    assert bits(joined) == bytes(raw[1:])


@pytest.mark.parametrize("private_end", ["source", "target"])
@pytest.mark.parametrize(("width", "kept"), [(16384, True), (64, False)])
def test_tables_of_long_rows_are_kept(width: int, kept: bool, private_end: str, me: WorkerMemory) -> None:
    """A second transfer makes no operations. Tables of short rows would take much memory, and are made again."""
    count = (4 << 20) // width
    source = {f"t{i}": torch.randint(0, 256, (width,), dtype=torch.uint8) for i in range(count)}
    # Rows with gaps between them, so that they do not join.
    target = {name: torch.zeros(2 * width, dtype=torch.uint8)[:width] for name in source}
    specs = {name: TensorSpec((width,), torch.uint8, Layout((1,), [Replicate()])) for name in source}
    plan = local_plan(specs, specs, 1, 1)
    program = compiled(plan, {0: source}, {0: target}, me, private_end == "source", private_end == "target")
    run(program)
    assert bool(program.tables) is kept
    for held in source.values():
        held.add_(1)
    if kept:
        object.__setattr__(program, "ops", lambda *_: pytest.fail("operations were made"))
    run(program)
    assert all(torch.equal(target[name], held) for name, held in source.items())
