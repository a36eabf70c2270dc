"""NCCL in child processes, over a played GPU: its memory and events really go between processes, NCCL does not run."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from etha.cuda.select import install_driver
from etha.errors import GroupError, GroupLostError, GroupMismatchError
from etha.groups import ProcessGroupBabyNCCL
from etha.groups.baby import nursery
from etha.groups.inprocess import nccl
from tests.fakes.cuda import GPU0, FakeDriver
from tests.unit.groups.ranks import Ranks, options, ranks

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def nurseries() -> Iterator[None]:
    before = nursery.PROGRAM
    nursery.close_all()
    nursery.PROGRAM = "tests.groups.baby.played_nursery"
    yield
    nursery.close_all()
    nursery.PROGRAM = before


@pytest.fixture
def gpu() -> Iterator[FakeDriver]:
    fake = FakeDriver((GPU0,))
    install_driver(fake)
    yield fake
    install_driver(None)
    fake.check()


@pytest.fixture
def two(nurseries: None, gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Two members that share the GPU."""
    monkeypatch.setattr(nccl._c10d, "ProcessGroupNCCL", object, raising=False)
    monkeypatch.setattr(ProcessGroupBabyNCCL, "DEVICES", ())
    with ranks(lambda: ProcessGroupBabyNCCL(timeout=60), 2) as found:
        yield found
    for thread in threading.enumerate():
        if thread.name == "etha-group-child":
            thread.join(30)


def on(gpu: FakeDriver, *values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return gpu.empty(GPU0, (len(values),), dtype).copy_(torch.tensor(values, dtype=dtype))


def test_all_kinds_of_calls_work_in_the_trainers_memory(two: Ranks, gpu: FakeDriver) -> None:
    def call(rank: int, group: Any) -> None:
        tensor, other = on(gpu, 1.0, 2.0 + rank), on(gpu, 4, 5 + rank, dtype=torch.float64)
        group.allreduce([tensor]).wait()
        group.allreduce([other], options(dist.AllreduceOptions, reduceOp=dist.ReduceOp.MAX)).wait()
        assert tensor.tolist() == [2, 5] and other.tolist() == [4, 6]
        sent = on(gpu, 7.0 + rank)
        group.broadcast([sent], options(dist.BroadcastOptions, rootRank=1)).wait()
        group.reduce([tensor], options(dist.ReduceOptions, rootRank=0)).wait()
        assert sent.tolist() == [8] and (rank or tensor.tolist() == [4, 10])
        gathered = on(gpu, 0, 0, 0, 0)
        group.all_gather_single(gathered, on(gpu, 1.0 + rank, 2.0 + rank)).wait()
        assert gathered.tolist() == [1, 2, 2, 3]
        scattered = on(gpu, 0)
        group.reduce_scatter_single(scattered, on(gpu, 1.0 + rank, 3.0)).wait()
        assert scattered.tolist() == [[3], [6]][rank]
        taken = on(gpu, 0, 0)
        group.all_to_all_single(taken, on(gpu, 10.0 * rank, 10.0 * rank + 1), [1, 1], [1, 1]).wait()
        assert taken.tolist() == [[0, 10], [1, 11]][rank]
        outputs = [[on(gpu, 0), on(gpu, 0)]] if rank == 0 else []
        group.gather(outputs, [on(gpu, 5.0 + rank)], options(dist.GatherOptions, rootRank=0)).wait()
        assert [t.item() for each in outputs for t in each] == [[5, 6], []][rank]
        part = on(gpu, 0)
        inputs = [[on(gpu, 1), on(gpu, 2)]] if rank == 0 else []
        group.scatter([part], inputs, options(dist.ScatterOptions, rootRank=0)).wait()
        assert part.item() == 1 + rank
        if rank:
            group.recv([part], 0, 3).wait()
            assert part.tolist() == [9]
        else:
            group.send([on(gpu, 9)], 1, 3).wait()
        group.barrier().wait()

    two.run(call)
    assert gpu.failures == []


def test_a_call_begins_when_the_trainers_stream_has_come_to_it(two: Ranks, gpu: FakeDriver) -> None:
    stream = gpu.stream(GPU0)
    tensors = [on(gpu, 1.0), on(gpu, 1.0)]
    gpu.hold(stream)
    gpu.launch(GPU0, stream, lambda: tensors[0].fill_(5))
    with gpu.using(stream):
        first = two.groups[0].allreduce([tensors[0]])
    second = two.groups[1].allreduce([tensors[1]])
    with pytest.raises(AssertionError):
        until(first.is_completed, 0.5)
    gpu.release(stream)
    first.wait()
    second.wait()
    assert [tensor.tolist() for tensor in tensors] == [[6], [6]]
    gpu.drop_stream(stream)


def until(condition: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        os.sched_yield()


def test_a_mismatch_is_an_error_of_all(two: Ranks, gpu: FakeDriver) -> None:
    errors = two.errors(lambda rank, group: group.allreduce([on(gpu, *range(2 + rank))]).wait())
    assert [type(error) for error in errors] == [GroupMismatchError] * 2


def test_a_child_that_is_killed_leaves_nothing_of_a_call_and_the_group_forms_again(two: Ranks, gpu: FakeDriver) -> None:
    tensor = on(gpu, 1.0)
    pids = [group.child_pid() for group in two.groups]
    work = two.groups[0].allreduce([tensor])
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(GroupLostError, match=f"child process {pids[0]}"):
        work.wait()
    with pytest.raises(GroupLostError):
        two.groups[1].allreduce([on(gpu, 1.0)]).wait()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    two.configure()
    two.run(lambda rank, group: group.allreduce([on(gpu, 1.0)]).wait())
    for group in two.groups:
        group.shutdown()
    until(lambda: gpu.leaks() == [], 30)


def test_tensors_that_the_child_cannot_open_are_refused_and_the_group_goes_on(two: Ranks, gpu: FakeDriver) -> None:
    group = two.groups[0]
    wrong = {
        "a tensor is on the CPU": torch.ones(2),
        "contiguous tensors only": on(gpu, 1, 2, 3, 4).view(2, 2).t(),
        "unset expandable_segments": gpu.empty(GPU0, (4,), exportable=False),
    }
    for words, tensor in wrong.items():
        with pytest.raises(GroupError, match=words):
            group.allreduce([tensor])
    assert group.num_active_work() == 0 and group.errored() is None
    two.run(lambda rank, group: group.barrier().wait())


def test_a_torch_without_nccl_is_refused_before_a_child_is_forked() -> None:
    if hasattr(nccl._c10d, "ProcessGroupNCCL"):
        pytest.skip("this torch has NCCL")
    with pytest.raises(GroupError, match="this torch has no NCCL"):
        ProcessGroupBabyNCCL().configure(HashStore(), "replica", 0, 1)
