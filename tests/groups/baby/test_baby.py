"""Gloo in child processes: all calls, and children and nurseries that are killed or stopped, which no trainer feels."""

from __future__ import annotations

import gc
import os
import random
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
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import etha
from etha.errors import GroupAbortedError, GroupError, GroupLostError, GroupMismatchError, GroupTimeoutError
from etha.groups import ProcessGroupBabyGloo
from etha.groups.baby import nursery
from etha.memory.process import Beacon
from tests.processes import send_signal
from tests.unit.groups.ranks import REDUCTIONS, Ranks, all_calls, filled, operation, ranks, reduced, unusual_tensors

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True, scope="module")
def no_nursery_afterwards() -> Iterator[None]:
    yield
    nursery.close_all()


@pytest.fixture
def two() -> Iterator[Ranks]:
    with ranks(lambda: ProcessGroupBabyGloo(timeout=60), 2) as found:
        yield found


def alive(pid: int) -> bool:
    """Whether there is a process, a zombie included."""
    return Path(f"/proc/{pid}").exists()


def wait_for_spare() -> nursery.Nursery:
    until = time.monotonic() + 60
    while (found := nursery.spare()) is None or found.lost:
        assert time.monotonic() < until
        os.sched_yield()
    return found


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_allreduce_is_right_in_every_piece(two: Ranks, dtype: torch.dtype) -> None:
    """Private tensors, mapped ones and strided ones, of which many share a piece and one has several."""

    def call(rank: int, group: Any) -> None:
        lengths = [3, 2_500_000, 0, 700_001, 1, 1_600_000]
        made = [etha.empty((n,), dtype=dtype) if i % 2 else torch.empty(n, dtype=dtype) for i, n in enumerate(lengths)]
        tensors = [*made, torch.empty(1000, 900, dtype=dtype).t()]
        for i, tensor in enumerate(tensors):
            values = torch.arange(tensor.numel()).remainder(61).add(i + 1).mul(rank + 1)
            tensor.copy_(values.view(tensor.shape))
        addresses = [tensor.data_ptr() for tensor in tensors]
        group.allreduce_coalesced(tensors).wait()
        assert addresses == [tensor.data_ptr() for tensor in tensors]
        for i, tensor in enumerate(tensors):
            expected = torch.arange(tensor.numel()).remainder(61).add(i + 1).mul(3)
            assert torch.equal(tensor, expected.view(tensor.shape).to(dtype)), i

    two.run(call)


def test_tensors_of_etha_empty_are_worked_on_where_they_lie_and_inputs_stay_as_they_are(two: Ranks) -> None:
    def made(*values: float) -> torch.Tensor:
        return etha.empty((1000 * len(values),)).copy_(torch.tensor(values).repeat_interleave(1000))

    def call(rank: int, group: Any) -> None:
        opts = dist.ReduceOptions()
        reduced, scattered, given = made(rank + 1.0), made(0.0), made(1.0 + rank, 3.0 + rank)
        opts.rootRank = 1
        group.reduce([reduced], opts).wait()
        assert reduced.unique().tolist() == [[1.0], [3.0]][rank]
        group.reduce_scatter_single(scattered, given).wait()
        assert scattered.unique().tolist() == [[3.0], [7.0]][rank] and torch.equal(given, made(1.0 + rank, 3.0 + rank))
        gathered, own = made(0.0, 0.0), made(5.0 + rank)
        for _ in range(2):
            group.all_gather_single(gathered, own).wait()
            assert torch.equal(gathered, made(5.0, 6.0)) and torch.equal(own, made(5.0 + rank))
            own.add_(0.0)
        exchanged = made(0.0, 0.0)
        group.all_to_all_single(exchanged, given, [1000, 1000], [1000, 1000]).wait()
        assert torch.equal(exchanged, made(1.0 + 2 * rank, 2.0 + 2 * rank))
        assert torch.equal(given, made(1.0 + rank, 3.0 + rank))

    two.run(call)


def test_answers_are_heard_by_those_who_wait_and_by_those_who_do_not(two: Ranks) -> None:
    """One thread waits for a late call while others wait for early ones, and futures are heard without a wait."""

    def call(rank: int, group: Any) -> None:
        for _ in range(50):
            works = [group.allreduce([torch.ones(4)]) for _ in range(6)]
            done = [work.get_future() for work in works[:2]]
            waiters = [threading.Thread(target=work.wait) for work in (works[5], works[2], works[3])]
            for waiter in waiters:
                waiter.start()
            for future in done:
                future.wait()
            for waiter in waiters:
                waiter.join()
            assert works[4].wait() and all(work.is_success() for work in works)

    two.run(call)


def test_a_callback_may_call_the_group_and_wait(two: Ranks) -> None:
    def call(rank: int, group: Any) -> None:
        again = torch.ones(3)
        work = group.allreduce([torch.ones(2)])
        inner = work.get_future().then(lambda _: group.allreduce([again]).wait())
        assert work.wait() and inner.wait() and again.tolist() == [2.0] * 3

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
        "print(group.child_pid(), nursery.prepare().pid, flush=True)\n"
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
    send_signal(pid, signal.SIGSTOP)
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
    spare = wait_for_spare()
    os.kill(lost.pid, sent)
    if sent == signal.SIGKILL:
        errors = two.errors(until_it_fails)  # the kernel kills the children too
        assert [type(error) for error in errors] == [GroupLostError] * 2
    two.configure()
    two.run(all_calls)
    assert nursery.prepare() is spare
    assert wait_for_spare() is not spare
    assert not alive(lost.pid)  # also that which was stopped, once its children are no more


def test_abort_ends_a_configure_that_waits_for_its_first_nursery() -> None:
    nursery.close_all()
    group = ProcessGroupBabyGloo(timeout=60)
    found = nursery.prepare()
    while not found.pid:
        os.sched_yield()
    send_signal(found.pid, signal.SIGSTOP)  # it imports torch
    errors: list[Exception] = []

    def configure() -> None:
        try:
            group.configure(HashStore(), "r", 0, 1)
        except GroupAbortedError as error:
            errors.append(error)

    thread = threading.Thread(target=configure)
    thread.start()
    while group._link is None:
        os.sched_yield()
    begun = time.monotonic()
    group.abort()
    thread.join()
    assert errors
    assert time.monotonic() - begun < 20
    os.kill(found.pid, signal.SIGCONT)
    group.configure(HashStore(), "r", 0, 1)
    group.barrier().wait()
    group.shutdown()


def test_a_nursery_may_be_closed_at_the_moment_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    found = nursery.prepare()
    wait_for_spare()
    ended, closed, wait = threading.Event(), threading.Event(), os.waitpid

    def held(pid: int, options: int) -> tuple[int, int]:
        result = wait(pid, options)
        if pid == found.pid:  # it is no zombie any more, and its family has not noted that yet
            ended.set()
            closed.wait(60)
        return result

    monkeypatch.setattr(os, "waitpid", held)
    os.kill(found.pid, signal.SIGKILL)
    assert ended.wait(60)
    try:
        found.close()
    finally:
        closed.set()
    assert nursery.prepare() is not found


def test_a_fork_of_the_trainer_holds_none_of_its_sockets(two: Ranks) -> None:
    """Otherwise a DataLoader's worker would keep the connections of a trainer open that has died."""
    lanes = [lane for group in two.groups for lane in (group._link._control, group._link._calls)]
    links = [lane.ours.fileno() for lane in lanes]
    pid = os.fork()
    if pid == 0:
        os._exit(sum(Path(f"/proc/self/fd/{fd}").exists() for fd in links))
    assert os.waitpid(pid, 0)[1] == 0
    assert all(Path(f"/proc/self/fd/{fd}").exists() for fd in links)
    two.run(barriers)


def test_many_configures_leave_nothing() -> None:
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
        assert no_more_than(before)


def join_threads() -> None:
    for thread in threading.enumerate():
        if thread.name in ("etha-group-child", "etha-group-store"):
            thread.join(30)


def test_the_death_of_another_members_child_is_heard_without_a_call(two: Ranks) -> None:
    pid = two.groups[0].child_pid()
    os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 30
    while two.groups[1].errored() is None:
        assert time.monotonic() < until
        os.sched_yield()
    error = two.groups[1].errored()
    assert isinstance(error, GroupLostError) and error.ranks == (0,) and f"child process {pid} of rank 0" in str(error)


#: Signals at random moments that the suite sends, and `make soak`.
_FEW, _MANY = 10, 200


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param(_FEW, marks=pytest.mark.slow),
        pytest.param(_MANY, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
    ],
)
def test_a_child_that_is_killed_or_stopped_at_any_moment_costs_a_step_and_nothing_else(
    two: Ranks, moments: int
) -> None:
    """The moments lie anywhere in calls of three sizes and between them."""
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    draw = random.Random(seed)
    two.configure()
    two.groups[0].abort()
    two.groups[1].abort()
    join_threads()
    before = counts()
    failed, slowest = 0, 0.0
    for moment in range(moments):
        sent = draw.choice([signal.SIGKILL, signal.SIGSTOP])
        for group in two.groups:
            group.set_timeout(60)
        two.configure()
        pid = two.groups[moment % 2].child_pid()
        if sent == signal.SIGSTOP:
            for group in two.groups:
                group.set_timeout(0.5)
        killer = threading.Timer(draw.random() * 0.05, os.kill, (pid, sent))
        killer.start()
        start = time.monotonic()
        errors = two.errors(steps_until_one_fails)
        slowest = max(slowest, time.monotonic() - start)
        killer.join()
        expected = (GroupLostError,) if sent == signal.SIGKILL else (GroupLostError, GroupTimeoutError)
        assert all(isinstance(error, expected) for error in errors), (moment, sent, errors)
        assert not alive(pid)
        errors.clear()  # their tracebacks hold tensors
        failed += 1
    print(f"{failed} steps lost after {moments} signals; the slowest ended after {slowest:.2f} s")
    two.configure()
    two.run(barriers)
    for group in two.groups:
        group.abort()
    join_threads()
    assert no_more_than(before)


def steps_until_one_fails(rank: int, group: Any) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        small, large, mapped = torch.full((4,), 1.0), torch.full((2_000_000,), 1.0), etha.empty((300_000,)).fill_(1.0)
        works = [group.allreduce([each]) for each in (small, large, mapped)]
        for work in works:
            work.wait()
        assert all(each.eq(2).all() for each in (small, large, mapped))


def no_more_than(before: tuple[int, ...]) -> bool:
    """Nothing is left: what a nursery of an earlier test has given back meanwhile does not count."""
    found = counts()
    return all(now <= then for now, then in zip(found, before, strict=True)) or pytest.fail(f"{before} -> {found}")


def counts() -> tuple[int, int, int, int]:
    """Descriptors, threads, memfds and children, zombies included, of this process and its nursery."""
    gc.collect()
    fds = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    pid = nursery.prepare().pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    memfds = sum("memfd:" in line for line in fds)
    return len(fds), threading.active_count(), memfds, len(children)


def test_the_answer_to_a_question_that_was_interrupted_is_not_taken_for_the_next_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A nursery is asked for a child, and Ctrl-C comes before it has answered."""
    group = ProcessGroupBabyGloo(timeout=60)
    group.configure(HashStore(), "r", 0, 1)
    wait = nursery.Nursery._wait_for_answer
    interrupted: list[int] = []

    def wait_and_be_interrupted(self: nursery.Nursery, until: float) -> None:
        wait(self, until)
        if not interrupted:
            interrupted.append(self.pid)
            raise KeyboardInterrupt

    monkeypatch.setattr(nursery.Nursery, "_wait_for_answer", wait_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        group.configure(HashStore(), "r", 0, 1)
    for _ in range(2):
        group.configure(HashStore(), "r", 0, 1)
        group.barrier().wait()
        parent = int(Path(f"/proc/{group.child_pid()}/stat").read_text().rpartition(")")[2].split()[1])
        assert parent != interrupted[0], "a child of a nursery that may still answer"
    group.shutdown()
