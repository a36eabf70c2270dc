"""Every collective of ProcessGroupEtha between real processes, compared with what it is defined to give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.groups.team import Member, together

#: Elements: nothing, one, below and above what goes the short way, more than a window, and not divisible by anything.
SIZES = (0, 1, 7, 4097, 16_411, 120_003)
#: Bytes of a window: the longest tensors take eight rounds and more.
WINDOW = 1 << 16
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")


def tensor_of(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers that differ by rank and place, so that sums are exact in every dtype."""
    line = torch.arange(numel, dtype=torch.int64)
    return ((line * 7 + rank * 3) % 5 + 1).to(dtype)


def reduced(op: str, numel: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a reduction over all ranks gives."""
    stack = torch.stack([tensor_of(rank, numel, torch.float64) for rank in range(size)])
    match op:
        case "SUM":
            found = stack.sum(0)
        case "AVG":
            found = stack.sum(0) / size
        case "PRODUCT":
            found = stack.prod(0)
        case "MIN":
            found = stack.amin(0) if numel else stack[0]
        case _:
            found = stack.amax(0) if numel else stack[0]
    return found.to(dtype)


def options(kind: type[Any], op: str, root: int = 0) -> Any:
    opts = kind()
    opts.reduceOp = getattr(dist.ReduceOp, op)
    if hasattr(opts, "rootRank"):
        opts.rootRank = root
    return opts


def rooted(kind: type[Any], root: int) -> Any:
    opts = kind()
    opts.rootRank = root
    return opts


def reduces(member: Member) -> None:
    group = member.configured(window=WINDOW)
    n, me = member.size, member.rank
    for numel in SIZES:
        for op in OPS:
            mine = tensor_of(me, numel)
            group.allreduce([mine], options(dist.AllreduceOptions, op)).wait()
            torch.testing.assert_close(mine, reduced(op, numel, n), rtol=1e-6, atol=0, msg=f"allreduce {op} {numel}")
        root = numel % n
        mine = tensor_of(me, numel)
        group.reduce([mine], options(dist.ReduceOptions, "SUM", root)).wait()
        assert torch.equal(mine, reduced("SUM", numel, n) if me == root else tensor_of(me, numel))
        pieces = [tensor_of(me * n + d, numel) for d in range(n)]
        out = torch.full((numel,), -1.0)
        group.reduce_scatter([out], [pieces]).wait()
        assert torch.equal(out, sum((tensor_of(s * n + me, numel) for s in range(n)), torch.zeros(numel)))
        flat = torch.cat(pieces)
        group._reduce_scatter_base(out, flat, options(dist.ReduceScatterOptions, "MAX")).wait()
        assert not numel or torch.equal(out, torch.stack([tensor_of(s * n + me, numel) for s in range(n)]).amax(0))
    several = [tensor_of(me, k) for k in (3, 0, 40_000, 17)]
    group.allreduce_coalesced(several).wait()
    for each in several:
        assert torch.equal(each, reduced("SUM", each.numel(), n))
    group.shutdown()


def moves(member: Member) -> None:
    group = member.configured(window=WINDOW)
    n, me = member.size, member.rank
    for numel in SIZES:
        outs = [torch.full((numel,), -1.0) for _ in range(n)]
        group.allgather([outs], [tensor_of(me, numel)]).wait()
        assert all(torch.equal(out, tensor_of(s, numel)) for s, out in enumerate(outs))
        flat = torch.full((n * numel,), -1.0)
        group._allgather_base(flat, tensor_of(me, numel)).wait()
        assert torch.equal(flat, torch.cat([tensor_of(s, numel) for s in range(n)]))
        root = (numel + 1) % n
        mine = tensor_of(me, numel)
        group.broadcast([mine], rooted(dist.BroadcastOptions, root)).wait()
        assert torch.equal(mine, tensor_of(root, numel))
        gathered = [torch.full((numel,), -1.0) for _ in range(n)] if me == root else []
        group.gather([gathered] if gathered else [], [tensor_of(me, numel)], rooted(dist.GatherOptions, root)).wait()
        assert all(torch.equal(out, tensor_of(s, numel)) for s, out in enumerate(gathered))
        out = torch.full((numel,), -1.0)
        pieces = [[tensor_of(d + 10, numel) for d in range(n)]] if me == root else []
        group.scatter([out], pieces, rooted(dist.ScatterOptions, root)).wait()
        assert torch.equal(out, tensor_of(me + 10, numel))
        outs = [torch.full((numel,), -1.0) for _ in range(n)]
        group.alltoall(outs, [tensor_of(me * n + d, numel) for d in range(n)]).wait()
        assert all(torch.equal(out, tensor_of(s * n + me, numel)) for s, out in enumerate(outs))
    group.barrier().wait()
    group.shutdown()


def uneven(member: Member) -> None:
    group = member.configured(window=WINDOW)
    n, me = member.size, member.rank
    sizes = [5, 0, 300_001, 1, 77][:n]
    outs = [torch.full((k,), -1.0) for k in sizes]
    group.allgather([outs], [tensor_of(me, sizes[me])]).wait()
    assert all(torch.equal(out, tensor_of(s, k)) for s, (out, k) in enumerate(zip(outs, sizes, strict=True)))
    splits = [[(s * 31 + d * 17) % 4 * (1 + 200_000 * (s == d)) for d in range(n)] for s in range(n)]
    gives, takes = splits[me], [splits[s][me] for s in range(n)]
    source = torch.cat([tensor_of(me * n + d, k) for d, k in enumerate(gives)])
    target = torch.full((sum(takes),), -1.0)
    group.alltoall_base(target, source, takes, gives, dist.AllToAllOptions()).wait()
    assert torch.equal(target, torch.cat([tensor_of(s * n + me, k) for s, k in enumerate(takes)]))
    line = torch.cat([tensor_of(me * n + d, 50_000) for d in range(n)])
    group.alltoall_base(line, line, [], [], dist.AllToAllOptions()).wait()
    assert torch.equal(line, torch.cat([tensor_of(s * n + me, 50_000) for s in range(n)]))
    pieces = [tensor_of(me * n + d, k) for d, k in enumerate(sizes)]
    out = torch.full((sizes[me],), -1.0)
    group.reduce_scatter([out], [pieces]).wait()
    assert torch.equal(out, sum((tensor_of(s * n + me, sizes[me]) for s in range(n)), torch.zeros(sizes[me])))
    group.shutdown()


def layouts(member: Member) -> None:
    """Strided, transposed, broadcast-from, complex, conjugated, and scalar tensors; parameters that need gradients."""
    group = member.configured(window=WINDOW)
    n, me = member.size, member.rank
    total = sum(range(1, n + 1))
    base = torch.zeros(6, 8)
    strided = base[::2, ::3]
    strided.fill_(me + 1)
    group.allreduce([strided]).wait()
    assert (strided == total).all() and base.sum() == total * strided.numel()
    turned = torch.full((300, 500), float(me + 1)).t()
    group.allreduce([turned]).wait()
    assert (turned == total).all() and turned.stride() == (1, 500)
    scalar = torch.tensor(float(me + 1))
    group.allreduce([scalar]).wait()
    assert scalar.item() == total
    number = torch.full((9,), complex(me + 1, -me - 1))
    group.allreduce([number]).wait()
    assert (number == complex(total, -total)).all()
    outs = [torch.zeros(4, 3).t() for _ in range(n)]
    group.allgather([outs], [torch.full((3, 4), float(me))]).wait()
    assert all((out == s).all() for s, out in enumerate(outs))
    outs = [torch.zeros(3, dtype=torch.complex64) for _ in range(n)]
    group.allgather([outs], [torch.full((3,), complex(me, 1)).conj()]).wait()
    assert all((out == complex(s, -1)).all() for s, out in enumerate(outs))
    parameter = torch.nn.Parameter(torch.full((5, 2), float(me)))
    group.broadcast([parameter.data.t()], rooted(dist.BroadcastOptions, 1 % n)).wait()
    assert (parameter == 1 % n).all()
    group.shutdown()


def dtypes(member: Member) -> None:
    group = member.configured(window=WINDOW)
    n = member.size
    for dtype in (
        *(torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    ):
        for numel in (5, 40_000):
            mine = tensor_of(member.rank, numel, dtype)
            group.allreduce([mine]).wait()
            assert torch.equal(mine.double(), reduced("SUM", numel, n, dtype).double()), dtype
    strided = torch.ones(6, 2).to(torch.float8_e5m2)[:, 0]
    out = torch.zeros(2).to(torch.float8_e5m2)
    group.allreduce([strided], options(dist.AllreduceOptions, "AVG")).wait()
    assert strided.float().tolist() == [1.0] * 6
    group.reduce_scatter_single(out, torch.ones(2 * n).to(torch.float8_e5m2), dist.ReduceScatterOptions()).wait()
    assert out.float().tolist() == [n, n]
    flag = torch.tensor([member.rank == 0, True, False])
    group.allreduce([flag], options(dist.AllreduceOptions, "BOR")).wait()
    assert flag.tolist() == [True, True, False]
    bits = torch.tensor([1 << member.rank])
    group.allreduce([bits], options(dist.AllreduceOptions, "BXOR")).wait()
    assert bits.item() == (1 << n) - 1
    for dtype in (torch.float8_e4m3fn, torch.complex128, torch.uint32):
        outs = [torch.zeros(3).to(dtype) for _ in range(n)]
        group.allgather([outs], [torch.full((3,), float(member.rank)).to(dtype)]).wait()
        assert [out.to(torch.complex128)[0].real.item() for out in outs] == list(range(n))
    group.shutdown()


def rounding(member: Member) -> list[Any]:
    """bf16 and fp16 sums are rounded once, and are the same bits on all ranks."""
    group = member.configured(window=WINDOW)
    bits: list[Any] = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        generator = torch.Generator().manual_seed(7)
        everyone = torch.randn(member.size, 70_001, generator=generator)
        mine = everyone[member.rank].to(dtype)
        group.allreduce([mine]).wait()
        if dtype is not torch.float32:
            exact = torch.zeros(70_001)
            for row in everyone.to(dtype):
                exact += row.float()
            assert torch.equal(mine, exact.to(dtype))
        bits.append(mine.view(torch.uint8).numpy().tobytes())
    group.shutdown()
    return bits


def premultiplied(member: Member) -> None:
    group = member.configured(window=WINDOW)
    opts = dist.AllreduceOptions()
    opts.reduceOp = dist._make_nccl_premul_sum(0.5)  # type: ignore[attr-defined]
    mine = torch.full((9,), float(member.rank + 1))
    group.allreduce([mine], opts).wait()
    assert (mine == 0.5 * sum(range(1, member.size + 1))).all()
    group.shutdown()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("body", [reduces, moves, uneven, layouts, dtypes], ids=lambda body: str(body.__name__))
def test_results(body: Any, size: int) -> None:
    together(size, body)


def windows_of_4_mib(member: Member) -> None:
    group = member.configured()
    mine = tensor_of(member.rank, 2_500_003)
    group.allreduce([mine]).wait()
    assert torch.equal(mine, reduced("SUM", 2_500_003, member.size))
    group.shutdown()


def test_a_tensor_longer_than_the_usual_windows() -> None:
    together(3, windows_of_4_mib)


def test_replicas_are_bitwise_equal_and_rounded_once() -> None:
    found = together(3, rounding)
    assert found[0] == found[1] == found[2]


def test_premul_sum() -> None:
    together(2, premultiplied)


def in_order(member: Member) -> None:
    """Calls that nobody has waited for yet are carried out in their order, also those of several threads."""
    group = member.configured(window=WINDOW)
    tensors = [torch.full((1 + k % 3 * 9000,), float(member.rank + k)) for k in range(200)]
    works = [group.allreduce([tensor]) for tensor in tensors]
    for k in (150, 3, 199, *range(200)):
        assert works[k].wait()
        expected = sum(rank + k for rank in range(member.size))
        assert (tensors[k] == expected).all()
    last = torch.ones(3)
    future = group.allreduce([last]).get_future()
    assert torch.equal(future.wait()[0], torch.full((3,), float(member.size)))
    group.shutdown()


def test_calls_run_in_order() -> None:
    together(2, in_order)
