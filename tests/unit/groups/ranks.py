"""Several members of one group as threads of one process, and what every kind of call must give them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    HashStore,
    PrefixStore,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    _make_nccl_premul_sum,
)

from etha.groups import ProcessGroup


class Ranks:
    """``n`` groups of one kind, each used from a thread of its own."""

    def __init__(self, kind: Callable[[], ProcessGroup], n: int) -> None:
        self.groups = [kind() for _ in range(n)]
        self.store = HashStore()
        self.formed = 0
        self._pool = ThreadPoolExecutor(n)

    def configure(self, n: int | None = None, store: Any = None) -> None:
        self.formed += 1
        n = n or len(self.groups)
        store = store or PrefixStore(f"formed-{self.formed}", self.store)
        self.run(lambda rank, group: group.configure(store, "replica", rank, n, self.formed), n)

    def run(self, work: Callable[[int, ProcessGroup], Any], n: int | None = None) -> list[Any]:
        """``work`` on the first n ranks at once; their results or the first error."""
        return [future.result() for future in self.begin(work, n)]

    def begin(self, work: Callable[[int, ProcessGroup], Any], n: int | None = None) -> list[Any]:
        return [self._pool.submit(work, rank, group) for rank, group in enumerate(self.groups[: n or len(self.groups)])]

    def errors(self, work: Callable[[int, ProcessGroup], Any], n: int | None = None) -> list[BaseException | None]:
        return [future.exception() for future in self.begin(work, n)]

    def close(self) -> None:
        for group in self.groups:
            group.shutdown()
        self._pool.shutdown()


@contextmanager
def ranks(kind: Callable[[], ProcessGroup], n: int) -> Iterator[Ranks]:
    all_ = Ranks(kind, n)
    try:
        all_.configure()
        yield all_
    finally:
        all_.close()


def threads_of_groups() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("etha-group")]


def options(kind: Any, **fields: Any) -> Any:
    found = kind()
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def filled(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small numbers that differ between ranks and places."""
    numel = torch.Size(shape).numel()
    return ((torch.arange(numel) * 3 + rank * 5) % 7 + 1).reshape(shape).to(dtype)


def reduced(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The reference: one after the other, in a wide type."""
    dtype = tensors[0].dtype
    first, *rest = [t.to(torch.float64) if dtype.is_floating_point else t.to(torch.int64) for t in tensors]
    for each in rest:
        first = {
            "SUM": lambda a, b: a + b,
            "AVG": lambda a, b: a + b,
            "PRODUCT": lambda a, b: a * b,
            "MIN": torch.minimum,
            "MAX": torch.maximum,
            "BAND": lambda a, b: a & b,
            "BOR": lambda a, b: a | b,
            "BXOR": lambda a, b: a ^ b,
        }[op](first, each)
    if op == "AVG":
        first = first / len(tensors) if dtype.is_floating_point else first.div(len(tensors), rounding_mode="trunc")
    return (first != 0) if dtype is torch.bool else first.to(dtype)


def operation(op: str) -> Any:
    return getattr(dist.ReduceOp, op)


def all_calls(rank: int, group: ProcessGroup) -> None:
    """Every kind of call under both generations of names, checked on this rank."""
    n = group.size()
    reductions(rank, group, n)
    gathers(rank, group, n)
    scatters(rank, group, n)
    exchanges(rank, group, n)
    group.barrier().wait()


def reductions(rank: int, group: ProcessGroup, n: int) -> None:
    everyone = [filled(r, 3, 5) for r in range(n)]
    tensor = filled(rank, 3, 5)
    assert group.allreduce([tensor], options(AllreduceOptions, reduceOp=dist.ReduceOp.SUM)).wait()
    assert torch.equal(tensor, reduced("SUM", everyone))
    strided = filled(rank, 5, 3).t()
    assert group.allreduce([strided], dist.ReduceOp.MAX).get_future().wait()[0] is not None
    assert torch.equal(strided, reduced("MAX", [filled(r, 5, 3) for r in range(n)]).t())
    both = [filled(rank, 3), filled(rank + 1, 4)]
    group.allreduce_coalesced(both).wait()
    assert torch.equal(both[1], reduced("SUM", [filled(r + 1, 4) for r in range(n)]))
    scaled = filled(rank, 4)
    group.allreduce([scaled], _make_nccl_premul_sum(0.5)).wait()
    assert torch.equal(scaled, reduced("SUM", [filled(r, 4) * 0.5 for r in range(n)]))
    root = n - 1
    tensor = filled(rank, 3, 5)
    group.reduce([tensor], options(ReduceOptions, reduceOp=dist.ReduceOp.SUM, rootRank=root)).wait()
    assert torch.equal(tensor, reduced("SUM", everyone) if rank == root else filled(rank, 3, 5))
    tensor = filled(rank, 3, 5)
    group.broadcast([tensor], options(BroadcastOptions, rootRank=root)).wait()
    assert torch.equal(tensor, everyone[root])
    tensor = filled(rank, 2)
    group.broadcast_one(tensor, 0).wait()
    assert torch.equal(tensor, filled(0, 2))


def gathers(rank: int, group: ProcessGroup, n: int) -> None:
    source = filled(rank, 2, 3)
    everyone = torch.stack([filled(r, 2, 3) for r in range(n)])
    outputs = [torch.zeros(2, 3) for _ in range(n)]
    group.allgather([outputs], [source]).wait()
    assert torch.equal(torch.stack(outputs), everyone)
    for method in (group.all_gather_single, group._allgather_base):
        flat = torch.zeros(2 * n, 3)
        method(flat, source).wait()
        assert torch.equal(flat.view(n, 2, 3), everyone)
    for method in (group.all_gather_single_coalesced, group.allgather_into_tensor_coalesced):
        flats = [torch.zeros(n, 2, 3), torch.zeros(n)]
        method(flats, [source, filled(rank, 1)]).wait()
        assert torch.equal(flats[0], everyone)
        assert flats[1].tolist() == [filled(r, 1).item() for r in range(n)]
    uneven = [torch.zeros(r) for r in range(n)]
    group.allgather([uneven], [filled(rank, rank)]).wait()
    assert all(torch.equal(uneven[r], filled(r, r)) for r in range(n))
    root = n - 1
    outputs = [torch.zeros(2, 3) for _ in range(n)] if rank == root else []
    group.gather([outputs] if outputs else [], [source], options(GatherOptions, rootRank=root)).wait()
    assert not outputs or torch.equal(torch.stack(outputs), everyone)


def scatters(rank: int, group: ProcessGroup, n: int) -> None:
    everyone = [filled(r, n, 3) for r in range(n)]
    expected = reduced("SUM", everyone)[rank]
    output = torch.zeros(3)
    group.reduce_scatter([output], [list(everyone[rank])], options(ReduceScatterOptions)).wait()
    assert torch.equal(output, expected)
    for method in (group.reduce_scatter_single, group._reduce_scatter_base):
        output = torch.zeros(3)
        method(output, everyone[rank], options(ReduceScatterOptions, reduceOp=dist.ReduceOp.AVG)).wait()
        assert torch.equal(output, reduced("AVG", everyone)[rank])
    for method in (group.reduce_scatter_single_coalesced, group.reduce_scatter_tensor_coalesced):
        outputs = [torch.zeros(3), torch.zeros(1)]
        method(outputs, [everyone[rank], filled(rank, n)]).wait()
        assert torch.equal(outputs[0], expected)
        assert torch.equal(outputs[1], reduced("SUM", [filled(r, n) for r in range(n)])[rank : rank + 1])
    output = torch.zeros(3)
    inputs = list(everyone[0]) if rank == 0 else []
    group.scatter([output], [inputs] if inputs else [], options(ScatterOptions, rootRank=0)).wait()
    assert torch.equal(output, everyone[0][rank])


def exchanges(rank: int, group: ProcessGroup, n: int) -> None:
    for method in (group.all_to_all_single, group.alltoall_base):
        output = torch.zeros(n, 2)
        method(output, filled(rank, n, 2), [], []).wait()
        assert torch.equal(output, torch.stack([filled(r, n, 2)[rank] for r in range(n)]))
    outputs = [torch.zeros(source) for source in range(n)]
    group.alltoall(outputs, [filled(rank + d, rank) for d in range(n)]).wait()
    assert all(torch.equal(outputs[s], filled(s + rank, s)) for s in range(n))
    if n == 1:
        return
    to, source = (rank + 1) % n, (rank - 1) % n
    received, other = torch.zeros(4), torch.zeros(1)
    works = [group.recv([received], source, 5), group.recv([other], source, 6)]
    works += [group.send([filled(rank, 1)], to, 6), group.send([filled(rank, 4)], to, 5)]
    for work in works:
        work.wait()
    assert torch.equal(received, filled(source, 4)) and torch.equal(other, filled(source, 1))
    if rank == 0:
        for _ in range(n - 1):
            anyone = torch.zeros(3)
            work = group.recv_anysource([anyone], 9)
            work.wait()
            assert torch.equal(anyone, filled(work._source_rank(), 3))
    else:
        group.send([filled(rank, 3)], 0, 9).wait()


#: (operation, dtype) that every group reduces.
REDUCTIONS = [
    *((op, dtype) for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX") for dtype in (torch.float32, torch.float64)),
    *((op, dtype) for op in ("SUM", "AVG", "MIN") for dtype in (torch.float16, torch.bfloat16)),
    *((op, dtype) for op in ("SUM", "AVG", "MAX") for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)),
    *((op, torch.int64) for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")),
    *((op, dtype) for op in ("SUM", "MAX", "BXOR") for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32)),
    *((op, torch.bool) for op in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")),
]


def unusual_tensors(rank: int, group: ProcessGroup) -> None:
    """Tensors that are not plain: leaves of autograd, views, complex, empty, of dtypes that can only be moved."""
    n = group.size()
    for tensor in (torch.nn.Parameter(torch.ones(3)), torch.tensor(1.0), torch.ones(8)[::2], torch.ones(2, 3).t()):
        group.allreduce([tensor]).wait()
        assert tensor.eq(n).all()
    group.allreduce([torch.empty(0)]).wait()
    with torch.inference_mode():
        inference = torch.ones(2)
        columns = torch.ones(2, 3)
    group.allreduce([inference]).wait()
    assert inference.tolist() == [n, n]
    group.allreduce([columns[:, 1]]).wait()
    assert columns.tolist() == [[1, n, 1]] * 2
    stepped = torch.full((8,), float(rank))
    group.broadcast([stepped[::2]], options(BroadcastOptions, rootRank=1 % n)).wait()
    assert stepped.tolist() == [float(1 % n), float(rank)] * 4
    halves = [torch.zeros(4)[::2] for _ in range(n)]
    group.allgather([halves], [stepped[1::2][:2]]).wait()
    assert [half.tolist() for half in halves] == [[float(r)] * 2 for r in range(n)]
    pairs = torch.full((2,), 1 + 1j)
    group.allreduce([pairs]).wait()
    assert pairs.tolist() == [n + n * 1j] * 2
    conjugated, gathered = torch.full((1,), 1 + 1j * rank).conj(), torch.zeros(n, dtype=torch.complex64)
    group.all_gather_single(gathered, conjugated).wait()
    assert gathered.tolist() == [1 - 1j * r for r in range(n)]
    for dtype in (torch.float8_e4m3fn, torch.uint16):
        moved = torch.zeros(n, dtype=torch.float32).to(dtype)
        group.all_gather_single(moved, torch.ones(1).to(dtype)).wait()
        assert moved.float().tolist() == [1] * n
    output = torch.zeros(2 * n)
    own = output[2 * rank : 2 * rank + 2].fill_(rank)
    group.all_gather_single(output, own).wait()
    assert output.tolist() == [r for r in range(n) for _ in range(2)]
