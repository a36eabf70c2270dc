"""Gloo in this process: all calls, and faults that must neither end the process nor write into anybody's tensors."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from etha.errors import GroupAbortedError, GroupError, GroupLostError, GroupMismatchError, GroupTimeoutError
from etha.groups import ProcessGroupGloo

from .ranks import REDUCTIONS, Ranks, all_calls, filled, operation, ranks, reduced, threads_of_groups, unusual_tensors


@pytest.fixture
def three() -> Iterator[Ranks]:
    with ranks(lambda: ProcessGroupGloo(timeout=30), 3) as found:
        yield found
    wait_for_threads()


#: Elements that each rank gives: the last one gives what the others do not take.
GIVE = ([1, 1, 1], [1, 1, 1], [2, 0, 1])


def wait_for_threads() -> None:
    """Threads end by themselves; the pool's other end is what joins them."""
    until = time.monotonic() + 30
    while threads_of_groups() and time.monotonic() < until:
        for thread in threading.enumerate():
            if thread.name.startswith("etha-group"):
                thread.join(timeout=1)
    assert threads_of_groups() == [] and ProcessGroupGloo.num_abandoned() == 0


@pytest.mark.parametrize("n", [1, 2, 3])
def test_all_calls(n: int) -> None:
    with ranks(lambda: ProcessGroupGloo(timeout=30), n) as found:
        found.run(all_calls)


def test_tensors_that_are_not_plain(three: Ranks) -> None:
    three.run(unusual_tensors)


def test_all_reductions_of_all_dtypes(three: Ranks) -> None:
    def check(rank: int, group: Any) -> None:
        for op, dtype in REDUCTIONS:
            tensor = filled(rank, 5, dtype=dtype)
            group.allreduce([tensor], operation(op)).wait()
            expected = reduced(op, [filled(r, 5, dtype=dtype) for r in range(3)])
            assert torch.allclose(tensor.double(), expected.double(), rtol=1e-6), (op, dtype, tensor, expected)

    three.run(check)


def test_it_is_configured_again_and_again_with_other_sizes(three: Ranks) -> None:
    for n in (2, 3, 1):
        three.configure(n)
        three.run(all_calls, n)


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (lambda r, g: g.allreduce([torch.ones(2 + (r == 1))]), "rank 1: allreduce SUM of 3 float32"),
        (lambda r, g: g.allreduce([torch.ones(2, dtype=torch.float64 if r else torch.float32)]), "2 float64"),
        (lambda r, g: g.allreduce([torch.ones(2)], operation("MAX" if r else "SUM")), "allreduce MAX"),
        (lambda r, g: g.broadcast_one(torch.ones(2), r % 2), "from rank 1"),
        (lambda r, g: g.barrier() if r else g.allreduce([torch.ones(2)]), "rank 1: barrier"),
        (lambda r, g: g.all_to_all_single(torch.ones(3), torch.ones(3), [1] * 3, GIVE[r]), "gives 0 elements"),
    ],
)
def test_a_mismatch_is_an_error_of_all_and_ends_no_process(three: Ranks, calls: Any, words: str) -> None:
    errors = three.errors(lambda rank, group: calls(rank, group).wait())
    assert [type(error) for error in errors] == [GroupMismatchError] * 3
    assert len({str(error) for error in errors}) == 1 and words in str(errors[0])
    three.configure()
    three.run(lambda rank, group: group.barrier().wait())


def test_a_message_of_another_size_is_a_mismatch_on_both(three: Ranks) -> None:
    def call(rank: int, group: Any) -> None:
        if rank == 0:
            group.send([torch.ones(2)], 1, 3).wait()
        elif rank == 1:
            group.recv([torch.ones(5)], 0, 3).wait()

    errors = three.errors(call)
    assert [type(error) for error in errors] == [GroupMismatchError, GroupMismatchError, type(None)]


def test_a_call_that_nobody_joins_times_out_and_writes_nothing_later(three: Ranks) -> None:
    three.groups[0].set_timeout(0.2)
    tensor = torch.ones(4)
    with pytest.raises(GroupTimeoutError, match=r"allreduce SUM of float32\[4\] timed out after 0.2 seconds"):
        three.groups[0].allreduce([tensor]).wait()
    assert isinstance(three.groups[0].errored(), GroupTimeoutError)
    for group in three.groups[1:]:
        group.set_timeout(0.5)
    three.errors(lambda rank, group: group.allreduce([torch.ones(4)]).wait() if rank else None)
    three.configure()
    assert tensor.tolist() == [1] * 4


def test_an_abort_ends_waits_at_once(three: Ranks) -> None:
    group = three.groups[0]
    works = [group.allreduce([torch.ones(2)]), group.barrier()]
    begun = time.monotonic()
    group.abort()
    for work in works:
        with pytest.raises(GroupAbortedError, match="aborted until the next configure"):
            work.wait()
        with pytest.raises(RuntimeError, match="abort"):
            work.get_future().wait()
    with pytest.raises(GroupAbortedError):
        group.barrier().wait()
    assert time.monotonic() - begun < 5
    assert isinstance(group.errored(), GroupAbortedError) and group.num_abandoned() >= 1
    three.groups[1].set_timeout(0.5)
    three.groups[2].set_timeout(0.5)
    three.errors(lambda rank, group: group.barrier().wait() if rank else None)


def test_a_wait_that_times_out_ends_the_group_of_its_member(three: Ranks) -> None:
    group = three.groups[0]
    with pytest.raises(GroupTimeoutError, match=r"timed out after 0.01 seconds of wait"):
        group.barrier().wait(timedelta(milliseconds=10))
    with pytest.raises(GroupTimeoutError):
        group.allreduce([torch.ones(1)]).wait()
    for other in three.groups[1:]:
        other.set_timeout(0.5)
    three.errors(lambda rank, group: group.barrier().wait() if rank else None)


def test_a_member_that_leaves_is_lost(three: Ranks) -> None:
    three.groups[2].shutdown()
    errors = three.errors(lambda rank, group: group.allreduce([torch.ones(2)]).wait(), 2)
    assert all(isinstance(error, GroupLostError | GroupTimeoutError) for error in errors), errors
    assert errors[0].epoch == 1 and "aborted" in str(errors[0]) and "gloo/transport" not in str(errors[0])
    three.configure(2)
    three.run(all_calls, 2)


def test_configure_names_who_is_missing() -> None:
    group = ProcessGroupGloo(timeout=0.3)
    with pytest.raises(GroupTimeoutError, match=r"timeout after 300ms; rank 1, 2 has not come") as caught:
        group.configure(HashStore(), "replica", 0, 3)
    assert caught.value.waiting_for == (1, 2)
    with pytest.raises(GroupTimeoutError):
        group.barrier().wait()
    wait_for_threads()


def test_configure_ends_the_calls_of_before(three: Ranks) -> None:
    work = three.groups[0].barrier()
    for other in three.groups[1:]:
        other.set_timeout(0.5)
    late = three.begin(lambda rank, group: group.barrier().wait() if rank == 1 else None)
    for future in late:
        future.exception()
    three.configure()
    with pytest.raises(GroupAbortedError, match="configure was called again"):
        work.wait()
    three.run(lambda rank, group: group.barrier().wait())


def test_a_call_before_configure_is_refused() -> None:
    with pytest.raises(GroupError, match="is not configured"):
        ProcessGroupGloo().barrier()


def test_a_fault_in_ddp_of_two_members_is_survived() -> None:
    def model(rank: int, group: Any) -> Any:
        torch.manual_seed(0)
        net = torch.nn.Linear(2, 1, bias=False)
        return torch.nn.parallel.DistributedDataParallel(net, process_group=group)

    def gradient(model: Any, rank: int) -> list[float]:
        model.zero_grad()
        model(torch.full((1, 2), float(rank + 1))).sum().backward()
        return [float(x) for x in next(model.parameters()).grad.flatten()]

    with ranks(lambda: ProcessGroupGloo(timeout=20), 2) as found:
        models = found.run(model)
        assert found.run(lambda rank, group: gradient(models[rank], rank)) == [[1.5, 1.5]] * 2
        found.groups[1].shutdown()
        errors = found.errors(lambda rank, group: gradient(models[rank], rank))
        assert all(isinstance(error, RuntimeError) for error in errors)
        found.configure()
        assert found.run(lambda rank, group: gradient(models[rank], rank)) == [[1.5, 1.5]] * 2
        found.configure(1)
        assert gradient(models[0], 0) == [1, 1]
    wait_for_threads()


def test_a_fork_of_a_member_is_refused(three: Ranks) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            three.groups[0].barrier()
        except GroupError as error:
            os._exit(0 if "this fork" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    three.run(lambda rank, group: group.barrier().wait())


def test_objects_and_messages_of_torch_work(three: Ranks) -> None:
    """Registered groups are torch's of one process, so this looks at one member only."""
    group = three.groups[0]
    three.configure(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        group.register("objects")
        found: list[Any] = [None]
        dist.all_gather_object(found, {"a": 1}, group=group)
        assert found == [{"a": 1}]
    finally:
        dist.destroy_process_group()
