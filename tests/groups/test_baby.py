"""Gloo in child processes: all calls, and children and nurseries that are killed or stopped, which no trainer feels."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from etha.errors import GroupAbortedError, GroupError, GroupLostError, GroupMismatchError, GroupTimeoutError
from etha.groups import ProcessGroupBabyGloo, ProcessGroupBabyNCCL
from etha.groups.baby import nursery
from etha.memory.process import Beacon
from tests.unit.groups.ranks import REDUCTIONS, Ranks, all_calls, filled, operation, ranks, reduced, unusual_tensors

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True, scope="module")
def no_nursery_afterwards() -> Iterator[None]:
    yield
    nursery.prepare().close()


@pytest.fixture
def two() -> Iterator[Ranks]:
    with ranks(lambda: ProcessGroupBabyGloo(timeout=60), 2) as found:
        yield found


def alive(pid: int) -> bool:
    """Whether there is a process, a zombie included."""
    return Path(f"/proc/{pid}").exists()


def barriers(rank: int, group: Any) -> None:
    group.barrier().wait()


def until_it_fails(rank: int, group: Any) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        tensor = torch.full((20000,), 1.0)
        group.allreduce([tensor]).wait()
        assert tensor.eq(2).all()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_all_calls(n: int) -> None:
    with ranks(lambda: ProcessGroupBabyGloo(timeout=60), n) as found:
        found.run(all_calls)
        assert [group.num_active_work() for group in found.groups] == [0] * n


def test_tensors_that_are_not_plain(two: Ranks) -> None:
    two.run(unusual_tensors)


def test_all_reductions_of_all_dtypes(two: Ranks) -> None:
    def check(rank: int, group: Any) -> None:
        for op, dtype in REDUCTIONS:
            tensor = filled(rank, 5, dtype=dtype)
            group.allreduce([tensor], operation(op)).wait()
            expected = reduced(op, [filled(r, 5, dtype=dtype) for r in range(2)])
            assert torch.allclose(tensor.double(), expected.double(), rtol=1e-6), (op, dtype, tensor, expected)

    two.run(check)


def test_calls_that_are_not_waited_for_run_in_order(two: Ranks) -> None:
    def call(rank: int, group: Any) -> None:
        tensor, gathered = torch.ones(1000), torch.zeros(2000)
        works = [group.allreduce([tensor]) for _ in range(5)]
        works.append(group.all_gather_single(gathered, tensor))
        works[-1].get_future().wait()
        assert gathered.tolist() == [32.0] * 2000

    two.run(call)


def test_storage_never_moves_and_strides_are_kept(two: Ranks) -> None:
    def call(rank: int, group: Any) -> None:
        tensor = torch.ones(6, 4)
        address, view = tensor.data_ptr(), tensor.numpy()
        group.allreduce([tensor.t()[1:3]]).wait()
        assert tensor.data_ptr() == address
        assert view.sum(axis=0).tolist() == [6, 12, 12, 6]

    two.run(call)


@pytest.mark.parametrize("n", [1, 3])
def test_all_calls_where_the_kernel_forbids_the_trainers_memory(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's probe finds other bytes than it looks for."""
    monkeypatch.setattr(Beacon, "address", property(lambda beacon: 8))
    with ranks(lambda: ProcessGroupBabyGloo(timeout=60), n) as found:
        assert not any(group._link.reach for group in found.groups)
        found.run(all_calls)
        found.run(lambda rank, group: in_order(group, torch.ones(4, 6)))


def in_order(group: Any, tensor: torch.Tensor) -> None:
    """Calls over one tensor that nobody waits for between them, also as strided views of it."""
    works = [group.allreduce([each]) for each in (tensor, tensor.t()[:2], tensor[:, :2], tensor)]
    for work in works:
        work.wait()
    n = float(group.size())
    assert tensor[0].tolist() == [n**4] * 2 + [n**2] * 4, tensor


def test_strided_and_plain_calls_over_one_tensor_keep_their_order(two: Ranks) -> None:
    two.run(lambda rank, group: in_order(group, torch.ones(4, 6)))


def test_a_trainer_that_is_killed_takes_its_nursery_and_children_with_it() -> None:
    program = (
        "import signal, torch\n"
        "from torch._C._distributed_c10d import HashStore\n"
        "from etha.groups import ProcessGroupBabyGloo\n"
        "from etha.groups.baby import nursery\n"
        "group = ProcessGroupBabyGloo(timeout=60)\n"
        "group.configure(HashStore(), 'replica', 0, 1)\n"
        "print(group.child_pid(), nursery.prepare()._process.pid, flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        fds = [os.pidfd_open(int(pid)) for pid in trainer.stdout.readline().split()]
        trainer.kill()
    for fd in fds:
        assert select.select([fd], [], [], 60)[0]
        os.close(fd)


def test_a_call_may_have_thousands_of_tensors(two: Ranks) -> None:
    def call(rank: int, group: Any) -> None:
        tensors = [torch.full((1,), float(i)) for i in range(4000)]
        group.allreduce_coalesced(tensors).wait()
        assert [tensor.item() for tensor in tensors] == [2.0 * i for i in range(4000)]

    two.run(call)


def test_a_child_that_is_killed_is_reaped_before_the_error_is_returned(two: Ranks) -> None:
    group, pids = two.groups[0], [group.child_pid() for group in two.groups]
    work = group.allreduce([torch.ones(4)])
    future = work.get_future()
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(GroupLostError, match=rf"child process {pids[0]} of rank 0 died"):
        work.wait()
    assert not alive(pids[0])
    with pytest.raises(RuntimeError, match="child process"):
        future.wait()
    with pytest.raises(GroupLostError):
        group.barrier().wait()
    with pytest.raises(GroupLostError):
        two.groups[1].barrier().wait()
    assert not alive(pids[1]) and [type(g.errored()) for g in two.groups] == [GroupLostError] * 2
    two.configure()
    two.run(barriers)


def test_a_child_that_is_stopped_is_killed_at_the_deadline(two: Ranks) -> None:
    group, pid = two.groups[0], two.groups[0].child_pid()
    os.kill(pid, signal.SIGSTOP)
    group.set_timeout(0.3)
    with pytest.raises(GroupLostError, match="does not answer: barrier is late"):
        group.barrier().wait()
    assert not alive(pid)
    two.groups[1].abort()
    two.configure()
    two.run(barriers)


def test_a_member_that_does_not_come_is_a_timeout(two: Ranks) -> None:
    group, pid = two.groups[0], two.groups[0].child_pid()
    group.set_timeout(0.2)
    tensor = torch.ones(3)
    with pytest.raises(GroupTimeoutError, match=r"allreduce SUM of float32\[3\] timed out after 0.2 seconds"):
        group.allreduce([tensor]).wait()
    assert not alive(pid) and tensor.tolist() == [1] * 3
    with pytest.raises(GroupLostError):
        two.groups[1].barrier().wait()


def test_an_abort_ends_waits_and_the_other_members_hear_of_it(two: Ranks) -> None:
    works = [two.groups[0].allreduce([torch.ones(2)]), two.groups[0].recv([torch.ones(2)], 1, 0)]
    pid = two.groups[0].child_pid()
    two.groups[0].abort()
    assert not alive(pid)
    for work in works:
        with pytest.raises(GroupAbortedError):
            work.wait()
    with pytest.raises(GroupLostError):
        two.groups[1].barrier().wait()


def test_a_wait_that_times_out_kills_the_child(two: Ranks) -> None:
    pid = two.groups[0].child_pid()
    with pytest.raises(GroupTimeoutError, match=r"timed out after 0.01 seconds of wait"):
        two.groups[0].barrier().wait(timedelta(milliseconds=10))
    assert not alive(pid)


def test_a_mismatch_is_an_error_of_all(two: Ranks) -> None:
    errors = two.errors(lambda rank, group: group.allreduce([torch.ones(2 + rank)]).wait())
    assert [type(error) for error in errors] == [GroupMismatchError] * 2
    assert errors[0].calls == {0: "allreduce SUM of 2 float32", 1: "allreduce SUM of 3 float32"}


def test_after_shutdown_calls_raise_what_torchft_raises(two: Ranks) -> None:
    two.groups[0].shutdown()
    with pytest.raises(OSError, match="handle is closed"):
        two.groups[0].allreduce([torch.ones(1)]).wait()
    with pytest.raises(GroupError, match="is not configured"):
        ProcessGroupBabyGloo().barrier()


def test_nccl_in_a_child_is_refused_with_what_to_use_instead() -> None:
    with pytest.raises(GroupError, match="use ProcessGroupNCCL"):
        ProcessGroupBabyNCCL().configure(HashStore(), "replica", 0, 1)


def test_configure_ends_in_time() -> None:
    group = ProcessGroupBabyGloo(timeout=0.5)
    with pytest.raises(TimeoutError, match=r"timed out after 0.5 seconds"):
        group.configure(HashStore(), "replica", 0, 2)
    group.set_timeout(30)
    group.configure(HashStore(), "replica", 0, 1)
    group.barrier().wait()
    group.shutdown()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_nursery_that_is_lost_is_replaced(two: Ranks, sent: signal.Signals) -> None:
    lost = nursery.prepare()
    assert lost._process is not None
    os.kill(lost._process.pid, sent)
    if sent == signal.SIGKILL:
        errors = two.errors(until_it_fails)  # the kernel kills the children too
        assert [type(error) for error in errors] == [GroupLostError] * 2
    two.configure()
    two.run(all_calls)
    assert nursery.prepare() is not lost
    lost.close()


def test_a_fork_of_the_trainer_holds_none_of_its_sockets(two: Ranks) -> None:
    """Otherwise a DataLoader's worker would keep the connections of a trainer open that has died."""
    links = [group._link._socket.fileno() for group in two.groups]
    pid = os.fork()
    if pid == 0:
        os._exit(sum(Path(f"/proc/self/fd/{fd}").exists() for fd in links))
    assert os.waitpid(pid, 0)[1] == 0
    assert all(Path(f"/proc/self/fd/{fd}").exists() for fd in links)
    two.run(barriers)


def test_many_configures_leave_nothing() -> None:
    def counts() -> tuple[int, int, int]:
        lost = nursery.prepare()
        assert lost._process is not None
        children = Path(f"/proc/{lost._process.pid}/task/{lost._process.pid}/children").read_text().split()
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), len(children)

    with ranks(lambda: ProcessGroupBabyGloo(timeout=60), 1) as found:
        for _ in range(3):
            found.configure()
        found.groups[0].abort()
        join_threads()
        before = counts()
        for _ in range(20):
            found.configure()
            found.run(barriers)
        found.groups[0].abort()
        join_threads()
        assert counts() == before


def join_threads() -> None:
    for thread in threading.enumerate():
        if thread.name in ("etha-group-child", "etha-group-store"):
            thread.join(30)


def test_a_kill_at_any_moment_costs_a_call_and_nothing_else(two: Ranks) -> None:
    for moment in range(10):
        group = two.groups[moment % 2]
        pid = group.child_pid()
        killer = threading.Timer(moment * 0.002, lambda pid=pid: os.kill(pid, signal.SIGKILL))

        killer.start()
        errors = two.errors(until_it_fails)
        killer.join()
        assert [type(error) for error in errors] == [GroupLostError] * 2, errors
        two.configure()
    two.run(barriers)
