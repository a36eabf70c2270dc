"""What the members of a ProcessGroupEtha hear when one of them dies, stops, aborts, or calls something else."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from etha.errors import (
    EthaError,
    GroupAbortedError,
    GroupError,
    GroupLostError,
    GroupMismatchError,
    GroupTimeoutError,
)
from etha.native import RunResult
from tests.groups.team import Member, team, together


def error_of(work: Any) -> GroupError:
    """The error of a work that must fail."""
    with pytest.raises(GroupError) as raised:
        work.wait()
    return raised.value


def ready(member: Member, **options: Any) -> Any:
    """A configured group that has made a call."""
    group = member.configured(**options)
    group.allreduce([torch.ones(3)]).wait()
    return group


# ---- mismatches -------------------------------------------------------------------------------

MISMATCHES = {
    "numel": lambda g, odd: g.allreduce([torch.ones(5 + odd)]),
    "long": lambda g, odd: g.allreduce([torch.ones(500_000 + odd)]),
    "dtype": lambda g, odd: g.allreduce([torch.ones(5, dtype=torch.float64 if odd else torch.float32)]),
    "complex": lambda g, odd: g.allreduce([torch.ones(4, dtype=torch.complex64) if odd else torch.ones(8)]),
    "complex pieces": lambda g, odd: g.reduce_scatter_single(
        *(
            [torch.ones(1, dtype=torch.complex64), torch.ones(3, dtype=torch.complex64)]
            if odd
            else [torch.ones(2), torch.ones(6)]
        )
    ),
    "op": lambda g, odd: g.allreduce([torch.ones(5)], dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
    "root": lambda g, odd: g.broadcast_one(torch.ones(5), int(odd)),
    "call": lambda g, odd: g.barrier() if odd else g.allreduce([torch.ones(5)]),
    "short or long": lambda g, odd: g.allreduce([torch.ones(900_000 if odd else 3)]),
    "splits": lambda g, odd: g.alltoall_base(
        torch.ones(3), torch.ones(3), [1, 1, 1], [2, 1, 0] if odd else [1, 1, 1], dist.AllToAllOptions()
    ),
}


def mismatch(member: Member, what: str) -> tuple[str, dict[int, str]]:
    group = ready(member)
    error = error_of(MISMATCHES[what](group, member.rank == 1))
    assert isinstance(error, GroupMismatchError) and isinstance(error, RuntimeError)
    assert group.errored() is error
    assert isinstance(error_of(group.barrier()), GroupMismatchError)
    group.configure(f"{member.address}/again", "r", member.rank, member.size)
    assert group.errored() is None
    mine = torch.ones(4)
    group.allreduce([mine]).wait()
    assert (mine == member.size).all()
    group.shutdown()
    return str(error), error.calls


@pytest.mark.parametrize("what", MISMATCHES)
def test_all_ranks_hear_who_called_what(what: str) -> None:
    found = together(3, mismatch, what)
    assert found[0] == found[1] == found[2]
    assert set(found[0][1]) == {0, 1, 2}
    assert "rank 1" in found[0][0]


# ---- deaths, stops, ends ----------------------------------------------------------------------

LONG = 30_000_000


def waits(member: Member, numel: int) -> tuple[str, tuple[int, ...]]:
    """Rank 1 never calls; the others wait for it."""
    group = ready(member)
    member.say("ready")
    if member.rank == 1:
        member.hear()
    tensor = torch.ones(numel)
    error = error_of(group.allreduce([tensor]))
    end = time.monotonic()
    assert isinstance(error, GroupLostError), error
    assert isinstance(error_of(group.barrier()), GroupLostError)
    group.shutdown()
    return str(error), (*error.ranks, end)  # type: ignore[arg-type]


@pytest.mark.parametrize("numel", [3, LONG])
def test_a_killed_member_ends_the_waits_of_the_others(numel: int) -> None:
    with team(3, waits, numel) as running:
        for rank in range(3):
            running.heard(rank)
        running.signal(1, signal.SIGKILL)
        found = running.results()
    assert {text for text, _ in found.values()} == {found[0][0]}
    assert found[0][1][0] == 1 and "died" in found[0][0]


def killed_in_a_call(member: Member) -> str:
    group = ready(member)
    member.say("ready")
    tensor = torch.ones(LONG)
    with pytest.raises(GroupLostError) as raised:
        while True:
            group.allreduce([tensor]).wait()
    group.shutdown()
    return str(raised.value)


def test_a_member_killed_while_bytes_move() -> None:
    with team(2, killed_in_a_call) as running:
        for rank in range(2):
            running.heard(rank)
        running.signal(1, signal.SIGKILL)
        assert "rank 1" in running.results()[0]


def stopped(member: Member) -> str:
    group = ready(member)
    group.set_timeout(2.0)
    member.say("ready")
    member.hear()
    error = error_of(group.allreduce([torch.ones(LONG)]))
    text = f"{type(error).__name__} {error}"
    group.set_timeout(30)
    group.configure(f"{member.address}/again", "r", member.rank, member.size)
    mine = torch.ones(3)
    group.allreduce([mine]).wait()
    assert (mine == 2).all()
    group.shutdown()
    return text


def test_a_stopped_member_is_named_and_comes_back() -> None:
    with team(2, stopped) as running:
        for rank in range(2):
            running.heard(rank)
        running.signal(1, signal.SIGSTOP)
        running.tell("go")
        # The other one is in configure again when it has timed out; only then is this one woken.
        wait_for_key(running.address, "again/0")
        running.signal(1, signal.SIGCONT)
        found = running.results()
    assert found[0].startswith("GroupTimeoutError") and "rank 1" in found[0]
    assert found[1].startswith("GroupTimeoutError") and found[1].endswith(found[0].removeprefix("GroupTimeoutError "))


def wait_for_key(address: str, key: str) -> None:
    host, port = address.split(":")
    client = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    client.wait([key])


def calls_back(member: Member, what: str, numel: int) -> str:
    """A future's callback makes a call of its own and waits for it, or ends the group."""
    group = ready(member, timeout=20.0)
    mine, again, done = torch.ones(numel), torch.ones(3), threading.Event()
    found: list[str] = []

    def back(_: Any) -> None:
        try:
            match what:
                case "wait":
                    group.allreduce([again]).wait()
                    found.append(str(int(again[0])))
                case "collect":
                    gc.collect()
                    found.append(str(member.size))
                case _:
                    getattr(group, what)()
                    found.append(str(member.size))
        finally:
            done.set()

    other = member.configured("other") if what == "collect" else None
    if other is not None:  # a group in a cycle is shut down by whoever collects it
        other.itself = other
        del other
    group.allreduce([mine]).get_future().then(back)
    assert done.wait(10), "the callback does not end"
    if what in ("wait", "collect"):
        group.barrier().wait()
    group.shutdown()
    return found[0]


@pytest.mark.parametrize("numel", [3, 500_000])
@pytest.mark.parametrize("what", ["wait", "abort", "shutdown", "collect"])
def test_a_callback_may_wait_for_a_call_or_end_the_group(what: str, numel: int) -> None:
    assert together(2, calls_back, what, numel) == {0: "2", 1: "2"}


def lets_go(member: Member, swallows: bool) -> bool:
    """Whether a failed call's tensor is freed without the collector, once the group has been configured again."""
    from etha.groups import ErrorSwallowingProcessGroupWrapper

    gc.disable()
    inner = ready(member)
    group = ErrorSwallowingProcessGroupWrapper(inner) if swallows else inner
    mine = torch.ones(1000 + member.rank)
    freed = weakref.ref(mine)
    work = group.allreduce([mine])
    with contextlib.suppress(GroupError):
        work.wait()
    with contextlib.suppress(GroupError):
        group.allreduce([torch.ones(3)]).wait()
    assert group.error() is not None if swallows else group.errored() is not None
    del work, mine
    group.configure(f"{member.address}/again", "r", member.rank, member.size)
    group.allreduce([torch.ones(3)]).wait()
    group.shutdown()
    return freed() is None


@pytest.mark.parametrize("swallows", [False, True])
def test_the_tensor_of_a_failed_call_is_not_kept(swallows: bool) -> None:
    assert together(2, lets_go, swallows) == {0: True, 1: True}


def aborts(member: Member, from_thread: bool) -> str:
    group = ready(member)
    if member.rank:
        member.hear()
        return str(error_of(group.allreduce([torch.ones(LONG)])))
    work = group.allreduce([torch.ones(LONG)])
    while group._engine._posted(0) < 3:  # the meeting, the first call, and now this one
        os.sched_yield()
    if from_thread:
        helper = threading.Thread(target=group.abort)
        helper.start()
        error = error_of(work)
        helper.join()
    else:
        group.abort()
        error = error_of(work)
    assert isinstance(error, GroupAbortedError), error
    assert isinstance(group.errored(), GroupAbortedError)
    member.say("aborted")
    group.shutdown()
    return str(error)


@pytest.mark.parametrize("from_thread", [False, True])
def test_abort_ends_the_call_here_and_elsewhere(from_thread: bool) -> None:
    with team(2, aborts, from_thread) as running:
        assert running.heard(0) == "aborted"
        running.pipes[1].send("go")
        found = running.results()
    assert "rank 0" in found[0] and found[0] == found[1]


def leaves_a_call_that_no_thread_has_begun(member: Member) -> str:
    group = ready(member)
    if member.rank:
        begun = time.monotonic()
        error = error_of(group.allreduce([torch.ones(3)]))
        assert time.monotonic() - begun < 15  # of the 30 s of its timeout
        return type(error).__name__
    with group._engine._turn:  # the engine's own thread would begin with the call
        work = group.allreduce([torch.ones(3)])
        group._engine.abort("abort() was called")
    return type(error_of(work)).__name__


def test_an_abort_before_a_call_has_begun_ends_it_elsewhere() -> None:
    found = together(2, leaves_a_call_that_no_thread_has_begun)
    assert found == {0: "GroupAbortedError", 1: "GroupLostError"}


def waits_shortly(member: Member) -> str:
    group = ready(member)
    if member.rank:
        member.hear()
        if member.host:  # what rank 0 had sent may arrive before the news that it has given up
            with contextlib.suppress(GroupError):
                group.allreduce([torch.ones(3)]).wait()
        error = error_of(group.allreduce([torch.ones(3)]))
        return f"{type(error).__name__} {error}"
    work = group.allreduce([torch.ones(3)])
    with pytest.raises(GroupTimeoutError):
        work.wait(timedelta(milliseconds=50))
    member.say("timed out")
    return f"{type(group.errored()).__name__} {group.errored()}"


def test_the_timeout_of_a_wait_ends_the_group() -> None:
    with team(2, waits_shortly) as running:
        running.heard(0)
        running.pipes[1].send("go")
        found = running.results()
    text = found[0].removeprefix("GroupTimeoutError ")
    assert text != found[0] and found[1] == f"GroupLostError {text}"


class SlowToStop:
    """The library, which goes on for a while after it was stopped, as in the middle of a piece that it copies."""

    def __init__(self, group: Any) -> None:
        self._real, self.stopped, self.go = group._engine._library, threading.Event(), threading.Event()
        group._engine._library = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def run(self, args: Any) -> Any:
        result = self._real.run(args)
        if result is RunResult.STOPPED:
            self.stopped.set()
            assert self.go.wait(60)
        return result


def ends_early(member: Member, how: str) -> list[bool]:
    """Whether a wait, or an abort, has returned before the library has stopped, and after it."""
    group = ready(member)
    if member.rank:
        member.hear()
        return []
    library, ended = SlowToStop(group), threading.Event()
    work = group.allreduce([torch.ones(300_000)])
    while group._engine._running < 0:  # until the group's own thread has the call
        os.sched_yield()

    def end() -> None:
        if how == "abort":
            group.abort()
        else:
            with pytest.raises(GroupTimeoutError):
                work.wait(timedelta(milliseconds=50))
        ended.set()

    thread = threading.Thread(target=end)
    thread.start()
    assert library.stopped.wait(60)
    found = [ended.wait(0.3)]
    library.go.set()
    thread.join(60)
    member.say("ended")
    return [*found, ended.is_set()]


@pytest.mark.parametrize("how", ["wait", "abort"])
def test_nothing_touches_a_tensor_once_a_wait_or_an_abort_has_returned(how: str) -> None:
    with team(2, ends_early, how) as running:
        running.heard(0)
        running.pipes[1].send("go")
        assert running.results()[0] == [False, True]


def test_ctrl_c_ends_a_call() -> None:
    with team(2, held_back) as running:
        running.heard(1)
        running.signal(0, signal.SIGINT)
        assert running.heard(0) == "interrupted"
        running.pipes[1].send("go")
        assert running.results()[1] == "GroupLostError"


def held_back(member: Member) -> str:
    """Rank 0 waits in a call until Ctrl-C; rank 1 calls only then."""
    group = ready(member)
    if member.rank:
        while group._engine._posted(0) < 3:  # the meeting, the first call, and now the second
            os.sched_yield()
        member.say("rank 0 waits")
        member.hear()
        return type(error_of(group.allreduce([torch.ones(5)]))).__name__
    with pytest.raises(KeyboardInterrupt):
        group.allreduce([torch.ones(5)], synchronous()).wait()
    assert isinstance(group.errored(), GroupAbortedError)
    member.say("interrupted")
    group.shutdown()
    return "done"


def synchronous() -> Any:
    opts = dist.AllreduceOptions()
    opts.asyncOp = False
    return opts


def ends_after_a_call(member: Member) -> bool:
    """Rank 1 ends right after its last call, which has succeeded for both."""
    group = ready(member)
    tensor = torch.ones(3_000_000)
    group.allreduce([tensor], synchronous()).wait()
    if member.rank:
        member.pipe.send(("done", True))
        os._exit(0)
    return bool((tensor == 2).all())


def test_a_member_that_ends_after_its_last_call_takes_nothing_from_the_others() -> None:
    for _ in range(5):
        assert together(2, ends_after_a_call) == {0: True, 1: True}


def shuts_down(member: Member) -> str:
    group = ready(member)
    if member.rank:
        group.shutdown()
        return ""
    error = error_of(group.allreduce([torch.ones(3)]))
    assert isinstance(error, GroupLostError) and error.ranks == (1,) and error.reason == "closed"
    return str(error)


def test_a_member_that_shuts_down_is_lost_for_the_others() -> None:
    assert "shut" in together(2, shuts_down)[0]


def swallows(member: Member) -> None:
    group = ready(member, errors="swallow")
    member.say("ready")
    if member.rank == 1:
        member.hear()
    mine = torch.full((3,), 7.0)
    group.allreduce([mine]).wait()
    assert (mine == 7).all() and isinstance(group.error(), GroupLostError)
    pieces = [torch.ones(2), torch.ones(2)]
    group.allgather([pieces], [torch.full((2,), 5.0)]).wait()
    assert (pieces[0] == 5).all() and (pieces[1] == 0).all()
    with pytest.raises(GroupLostError):
        group.barrier().wait()
    group.configure(f"{member.address}/alone", "r", 0, 1)
    assert group.error() is None
    group.allreduce([mine]).wait()
    assert (mine == 7).all() and group.error() is None
    group.shutdown()


def test_errors_are_swallowed_until_the_next_configure() -> None:
    with team(2, swallows) as running:
        for rank in range(2):
            running.heard(rank)
        running.signal(1, signal.SIGKILL)
        running.results()


# ---- configure --------------------------------------------------------------------------------


def configures(member: Member, rank: int | None, size: int, timeout: float) -> tuple[str, str, Any]:
    from etha.groups.host.etha_group import ProcessGroupEtha

    group = ProcessGroupEtha(timeout)
    try:
        group.configure(f"{member.address}/p", "r", member.rank if rank is None else rank, size + (member.rank == 1))
    except EthaError as error:
        return type(error).__name__, str(error), getattr(error, "waiting_for", ())
    group.barrier().wait()
    group.shutdown()
    return "configured", "", ()


def test_another_world_size_is_named() -> None:
    found = together(2, configures, None, 2, 20.0)
    assert found[0][0] == found[1][0] == "GroupMismatchError"
    assert "rank 1 was configured with world size 3, rank 0 with 2" in found[0][1]


def test_whoever_does_not_come_is_named() -> None:
    name, text, missing = together(1, configures, 0, 3, 0.5)[0]
    assert (name, missing) == ("GroupTimeoutError", (1, 2)) and "ranks 1, 2 did not come" in text


def the_first_and_the_last(member: Member) -> Any:
    """Of three ranks, 1 never comes."""
    return configures(member, 2 * member.rank, 3 - member.rank, 1.0)  # the second of a test says one more


def test_who_comes_after_one_that_does_not_is_not_blamed() -> None:
    for name, text, missing in together(2, the_first_and_the_last).values():
        assert (name, missing) == ("GroupTimeoutError", (1,)) and "rank 1 did not come" in text


def waits_in_configure(member: Member, where: str) -> str:
    """Rank 0 waits for rank 1, which comes into the store or not, and never calls."""
    from etha.groups.host import meeting
    from etha.groups.host.etha_group import ProcessGroupEtha

    group = ProcessGroupEtha(60.0)
    if member.rank:
        if where == "the call":
            meeting._Meeting._call_on = lambda self, record: member.hear()  # type: ignore[method-assign]
        else:
            member.hear()
        with contextlib.suppress(GroupError):
            group.configure(f"{member.address}/p", "r", 1, 2)
        return ""

    def hear() -> None:
        member.hear()
        group.abort()

    if where == "the call":
        records = meeting._Meeting._receive_calls

        def receive(self: Any) -> None:
            member.say("waits")
            records(self)

        meeting._Meeting._receive_calls = receive  # type: ignore[method-assign]
    else:
        arrived = meeting._Meeting._arrived

        def look(self: Any, ranks: list[int]) -> Any:
            member.say("waits")
            return arrived(self, ranks)

        meeting._Meeting._arrived = look  # type: ignore[method-assign]
    helper = threading.Thread(target=hear)
    helper.start()
    begun = time.monotonic()
    with pytest.raises(GroupAbortedError) as raised:
        group.configure(f"{member.address}/p", "r", 0, 2)
    helper.join()
    assert time.monotonic() - begun < 30
    assert counted()[2] == 0
    return str(raised.value)


@pytest.mark.parametrize("where", ["the store", "the call"])
def test_abort_ends_a_configure(where: str) -> None:
    with team(2, waits_in_configure, where) as running:
        running.heard(0)
        running.pipes[0].send("abort")
        kind, text = running.pipes[0].recv()
        assert kind == "done" and "abort()" in text, text
        running.killed.add(1)
        running.processes[1].kill()


def configures_after_an_abort(member: Member, kind: str) -> str:
    """Over one client of a store that this process serves: the wait of the first must not keep the second waiting."""
    from etha import groups

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = getattr(groups, kind)(timeout=60)
    ended = threading.Event()

    def abort() -> None:
        while not ended.is_set():
            group.abort()
            os.sched_yield()

    helper = threading.Thread(target=abort)
    helper.start()
    with pytest.raises(GroupAbortedError):
        group.configure(PrefixStore("first", store), "r", 0, 2)
    ended.set()
    helper.join()
    begun = time.monotonic()
    group.configure(PrefixStore("second", store), "r", 0, 1)
    group.barrier().wait()
    group.shutdown()
    assert time.monotonic() - begun < 40
    return kind


@pytest.mark.parametrize("kind", ["ProcessGroupEtha", "ProcessGroupGloo", "ProcessGroupBabyGloo"])
def test_after_an_aborted_configure_the_store_answers_at_once(kind: str) -> None:
    assert together(1, configures_after_an_abort, kind) == {0: kind}


def aborted_at_a_silent_store(member: Member) -> None:
    from etha.groups.host.etha_group import ProcessGroupEtha

    group = ProcessGroupEtha(60.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()

        def abort() -> None:
            silent.accept()[0].recv(1)  # the group asks
            group.abort()

        helper = threading.Thread(target=abort)
        helper.start()
        begun = time.monotonic()
        with pytest.raises(GroupAbortedError):
            group.configure(f"127.0.0.1:{silent.getsockname()[1]}/p", "r", 0, 2)
        helper.join()
    assert time.monotonic() - begun < 30


def test_abort_ends_a_configure_whose_store_never_answers() -> None:
    together(1, aborted_at_a_silent_store)


def test_a_process_may_end_after_an_aborted_configure() -> None:
    """A thread that the interpreter's end meets in torch's store aborts the process."""
    script = (
        "import threading\n"
        "from torch.distributed import TCPStore\n"
        "from etha import groups\n"
        "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "group = groups.ProcessGroupEtha(timeout=60)\n"
        "timer = threading.Timer(0.2, group.abort)\n"
        "timer.start()\n"
        "try:\n"
        "    group.configure(f'127.0.0.1:{store.port}/p', 'r', 0, 2)\n"
        "except groups.GroupAbortedError:\n"
        "    print('aborted', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "aborted\n"), done.stderr


def twice(member: Member) -> str:
    from etha.groups.host.etha_group import ProcessGroupEtha

    group = ProcessGroupEtha(3.0)
    with pytest.raises(GroupError) as raised:
        group.configure(f"{member.address}/p", "r", 0, 2)
    return type(raised.value).__name__


def test_a_rank_twice_is_named() -> None:
    assert sorted(together(2, twice).values()) == ["GroupMismatchError", "GroupTimeoutError"]


def no_store(member: Member) -> str:
    from etha.groups.host.etha_group import ProcessGroupEtha

    with pytest.raises(GroupError) as raised:
        ProcessGroupEtha(2.0).configure("127.0.0.1:1/p", "r", 0, 2)
    return str(raised.value)


def test_a_store_that_is_not_there_is_named() -> None:
    assert "127.0.0.1:1" in together(1, no_store)[0]


def before_configure(member: Member) -> str:
    from etha.groups.host.etha_group import ProcessGroupEtha

    return str(error_of(ProcessGroupEtha().barrier()))


def test_a_call_before_configure_says_so() -> None:
    assert "configure()" in together(1, before_configure)[0]


def counted() -> tuple[int, int, int]:
    """Descriptors, threads and mappings of groups of this process."""
    maps = Path("/proc/self/maps").read_text(encoding="ascii")
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), maps.count("memfd:etha-group")


def again_and_again(member: Member) -> None:
    group = member.configured("0")
    group.allreduce([torch.ones(2)]).wait()
    before = None
    for turn in range(1, 60):
        group.configure(f"{member.address}/{turn}", "r", member.rank, member.size)
        mine = torch.ones(2)
        group.allreduce([mine]).wait()
        assert (mine == member.size).all()
        group.barrier().wait()
        if turn == 3:
            before = counted()
    assert before is not None
    # A connection that a member of another host has just closed is noticed a moment later, so one count may be higher.
    deadline = time.monotonic() + 5.0
    while any(now > was for now, was in zip(counted(), before, strict=True)):
        assert time.monotonic() < deadline, (counted(), before)
        os.sched_yield()
    group.shutdown()
    assert counted()[2] == 0


def test_nothing_of_many_configures_is_left() -> None:
    together(2, again_and_again)


def forks(member: Member) -> None:
    """A child, such as a DataLoader's worker, cannot call; it holds nothing of the group; the parent goes on."""
    group = ready(member)
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            error = error_of(group.allreduce([torch.ones(2)]))
            os.write(there, f"{counted()[2]} {error}".encode())
        finally:
            os._exit(0)
    os.close(there)
    with os.fdopen(here, "rb") as stream:
        text = stream.read().decode()
    os.waitpid(pid, 0)
    assert text.startswith("0 ") and "forked" in text
    mine = torch.ones(2)
    group.allreduce([mine]).wait()
    assert (mine == member.size).all()
    group.shutdown()


def test_a_forked_child_holds_nothing_and_cannot_call() -> None:
    together(2, forks)


def forks_and_ends(member: Member) -> None:
    """A child may do with the group what its program does at its end; the parent's calls go on."""
    group = ready(member)
    pid = os.fork()
    if pid == 0:
        group.abort()
        group.shutdown()
        atexit._run_exitfuncs()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    mine = torch.ones(2)
    group.allreduce([mine]).wait()
    assert (mine == member.size).all()
    group.shutdown()


def test_a_forked_child_ends_nothing_of_its_parents() -> None:
    together(2, forks_and_ends)


def drops(member: Member) -> str:
    group = ready(member)
    if member.rank:
        del group
        gc.collect()
        assert counted()[2] == 0
        member.say("dropped")
        member.hear()
        return ""
    member.hear()
    error = error_of(group.barrier())
    assert isinstance(error, GroupLostError) and error.reason == "closed"
    member.say("seen")
    group.shutdown()
    return str(error)


def test_a_group_that_is_dropped_is_shut_down() -> None:
    with team(2, drops) as running:
        running.heard(1)
        running.pipes[0].send("go")
        running.heard(0)
        running.pipes[1].send("go")
        assert "shut" in running.results()[0]


def world(member: Member) -> None:
    import etha.groups  # noqa: F401 (registers the backend)

    host, port = member.address.split(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    dist.init_process_group("etha", store=store, rank=member.rank, world_size=member.size)
    n, me = member.size, member.rank
    mine = torch.full((4,), float(me))
    dist.all_reduce(mine)
    assert (mine == sum(range(n))).all()
    found: list[Any] = [None] * n
    dist.all_gather_object(found, {"rank": me})
    assert found == [{"rank": r} for r in range(n)]
    box = [me]
    dist.broadcast_object_list(box, src=1)
    assert box == [1]
    pair = dist.new_group([0, 1])
    if me < 2:
        two = torch.ones(2)
        dist.all_reduce(two, group=pair)
        assert (two == 2).all()
    work = dist.all_reduce(mine, async_op=True)
    work.wait()
    model = torch.nn.Linear(3, 2)
    torch.manual_seed(me)
    replicated = torch.nn.parallel.DistributedDataParallel(model)
    for _ in range(3):
        replicated(torch.full((2, 3), float(me + 1))).sum().backward()
    dist.all_gather_object(found, [p.grad.tolist() for p in model.parameters() if p.grad is not None])
    assert all(each == found[0] for each in found)
    with pytest.raises(GroupError, match="fixed size"):
        dist.group.WORLD.configure("x", "r", 0, 1)  # type: ignore[union-attr]
    dist.barrier()
    dist.destroy_process_group()


def test_world_is_a_group_of_etha() -> None:
    together(3, world)
