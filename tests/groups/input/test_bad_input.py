"""Bad input on one member: a clear error on all of them at once, which names ranks and calls, and nobody dies."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from etha.errors import EthaError, GroupAbortedError, GroupError, GroupLostError, GroupMismatchError, GroupTimeoutError
from etha.groups.base import ProcessGroup
from tests.groups.team import Member, together
from tests.processes import preload
from tests.seconds import within

preload("etha.groups.host.etha_group", "etha.groups.inprocess.torch_groups", "etha.groups.baby.baby_groups")

CLASSES = ["ProcessGroupEtha", "ProcessGroupGloo", "ProcessGroupBabyGloo"]
BABY = pytest.param(CLASSES[2], marks=pytest.mark.slow)
every_class = pytest.mark.parametrize("name", [*CLASSES[:2], BABY])
#: Long: whoever hears of an error hears it without a timeout.
TIMEOUT = 50.0


def made(name: str, timeout: float = TIMEOUT, errors: Any = "raise") -> ProcessGroup:
    from etha import groups

    group: ProcessGroup = getattr(groups, name)(timeout, errors)
    return group


def ready(member: Member, name: str, errors: Any = "raise", timeout: float = TIMEOUT) -> ProcessGroup:
    group = made(name, timeout, errors)
    group.configure(f"{member.address}/first", f"r{member.rank}", member.rank, member.size)
    return group


def error_of(call: Callable[[], Any]) -> EthaError:
    with pytest.raises(EthaError) as found:
        work = call()
        if work is not None:
            work.wait()
    return found.value


#: What cannot be right, and words of its error. The others call an allreduce of three elements.
WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "operation": (lambda g: g.allreduce([torch.ones(3)], dist.ReduceOp.BAND), "BAND is not defined for torch.float32"),
    "device": (lambda g: g.allreduce([torch.ones(3, device="meta")]), "is on meta, this group serves cpu tensors"),
    "sparse": (lambda g: g.allreduce([torch.ones(3).to_sparse()]), "must be dense"),
    "two dtypes": (
        lambda g: g.allreduce_coalesced([torch.ones(2), torch.ones(1).int()]),
        "tensors of torch.float32 and of torch.int32 in one call",
    ),
    "no tensor": (lambda g: g.allreduce([]), "needs at least one tensor"),
    "root": (lambda g: g.broadcast_one(torch.ones(3), 7), "root 7 is no rank of a group with 3 members"),
    "outputs": (
        lambda g: g.allgather([[torch.ones(1)] * 5], [torch.ones(1)]),
        "5 outputs, but the group has 3 members",
    ),
}


def refused(member: Member, name: str, what: str) -> tuple[str, dict[int, str], float]:
    """Rank 1 alone is wrong. All hear, and can be configured again."""
    group = ready(member, name)
    begun = time.monotonic()
    call, words = WRONG[what]
    if member.rank == 1:
        own = error_of(lambda: call(group))
        assert words in str(own), own
        error = error_of(group.barrier)  # what it calls next says what became of the group
    else:
        error = error_of(lambda: group.allreduce([torch.ones(3)]))
    took = time.monotonic() - begun
    assert isinstance(error, GroupMismatchError), error
    assert isinstance(group.errored(), GroupMismatchError)
    group.configure(f"{member.address}/again", f"r{member.rank}", member.rank, member.size)
    mine = torch.ones(4)
    group.allreduce([mine]).wait()
    assert (mine == member.size).all()
    group.shutdown()
    return str(error), error.calls, took


@every_class
@pytest.mark.parametrize("what", WRONG)
def test_arguments_that_one_rank_refuses_are_a_mismatch_on_all(name: str, what: str) -> None:
    if name != CLASSES[0] and what not in ("operation", "outputs"):
        pytest.skip("the check is the same code for all groups")
    found = together(3, refused, name, what)
    for text, calls, took in found.values():
        assert took < within(2.0), "nobody waits for a timeout"
        assert "rank 1: " in text and "with arguments that it refused" in text
        assert set(calls) == {0, 1, 2} and "refused" in calls[1] and "allreduce SUM of 3 float32" in calls[0]
        if name != "ProcessGroupBabyGloo":
            assert WRONG[what][1] in text, "the reason is shared"


def all_refuse(member: Member, name: str) -> None:
    group = ready(member, name)
    for _ in range(3):
        error = error_of(lambda: group.allreduce([torch.ones(3)], dist.ReduceOp.BOR))
        assert type(error) is GroupError
    mine = torch.ones(4)
    group.allreduce([mine]).wait()
    assert (mine == member.size).all() and group.errored() is None
    group.shutdown()


@every_class
def test_arguments_that_all_ranks_refuse_leave_the_group_as_it_is(name: str) -> None:
    together(3, all_refuse, name)


def refused_and_swallowed(member: Member) -> None:
    group = ready(member, "ProcessGroupEtha", "swallow")
    mine = torch.full((3,), float(member.rank))
    if member.rank == 1:
        with pytest.raises(GroupError, match="BAND is not defined"):
            group.allreduce([mine], dist.ReduceOp.BAND)
    group.allreduce([mine]).wait()
    assert (mine == member.rank).all(), "a reduction that was swallowed leaves its input"
    assert isinstance(group.errored(), GroupMismatchError) and "rank 1" in str(group.errored())
    group.shutdown()


def test_a_group_that_swallows_hears_of_it_too() -> None:
    together(2, refused_and_swallowed)


# ---- configure ------------------------------------------------------------------------------------------------------


def wrong_size(member: Member, name: str) -> tuple[str, float]:
    """Rank 1 thinks that there is one member more."""
    group = made(name, 20.0)
    begun = time.monotonic()
    size = member.size + (member.rank == 1)
    error = error_of(lambda: group.configure(f"{member.address}/first", "r", member.rank, size))
    assert isinstance(error, GroupMismatchError | GroupLostError), error
    group.shutdown()
    return str(error), time.monotonic() - begun


@every_class
def test_another_world_size_is_named_by_all(name: str) -> None:
    found = together(2, wrong_size, name)
    for text, took in found.values():
        assert "configured with world size" in text and "2" in text and "3" in text
        assert took < within(5.0)


def briefly(name: str) -> tuple[ProcessGroup, float]:
    """A group that waits for nobody long. The first one with a child starts a nursery, which imports torch."""
    seconds = 12.0 if "Baby" in name else 2.0
    return made(name, seconds), seconds


def twice(member: Member, name: str) -> str:
    """Both are rank 0."""
    group, seconds = briefly(name)
    begun = time.monotonic()
    error = error_of(lambda: group.configure(f"{member.address}/first", "r", 0, 2))
    assert time.monotonic() - begun < seconds + within(2.0)
    return f"{type(error).__name__}: {error}"


@every_class
def test_a_rank_twice_is_named(name: str) -> None:
    found = sorted(together(2, twice, name).values())
    assert found[0].startswith("GroupMismatchError") and "rank 0 was configured" in found[0], found
    assert found[1].startswith("GroupTimeoutError"), "the first one waits for rank 1, which does not come"


@every_class
def test_the_store_of_a_dead_process_is_named(name: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group, seconds = briefly(name)
    begun = time.monotonic()
    error = error_of(lambda: group.configure(f"127.0.0.1:{port}/x", "r", 0, 2))
    assert time.monotonic() - begun < seconds + within(3.0)
    assert isinstance(error, GroupError) and f"127.0.0.1:{port}" in str(error), error
    assert any(words in str(error) for words in ("is the process that serves it alive?", "its process may have ended"))
    group.shutdown()


def configured_while_it_runs(member: Member, name: str) -> str:
    group = ready(member, name)
    if member.rank == 1:
        member.hear()
        group.configure(f"{member.address}/again", "r", member.rank, member.size)
        group.allreduce([torch.ones(2)]).wait()
        group.shutdown()
        return ""
    running = group.allreduce([torch.ones(3)])
    other = threading.Thread(target=lambda: group.configure(f"{member.address}/again", "r", 0, member.size))
    other.start()
    member.say("configures")
    error = error_of(lambda: running)
    other.join()
    group.allreduce([torch.ones(2)]).wait()
    group.shutdown()
    return type(error).__name__


@every_class
def test_a_configure_while_a_call_runs_ends_the_call_and_forms_the_group(name: str) -> None:
    from tests.groups.team import team

    with team(2, configured_while_it_runs, name) as running:
        assert running.heard(0) == "configures"
        running.pipes[1].send("go")
        assert running.results()[0] == GroupAbortedError.__name__


# ---- who calls, and when --------------------------------------------------------------------------------------------


@every_class
def test_a_call_before_configure_says_what_to_do(name: str) -> None:
    error = error_of(lambda: made(name).allreduce([torch.ones(2)]))
    assert "allreduce" in str(error) and "not configured" in str(error) and "configure" in str(error)


def after_an_error(member: Member, name: str) -> None:
    group = ready(member, name)
    group.barrier().wait()
    if member.rank == 0:
        group.abort()
    begun = time.monotonic()
    first = error_of(group.barrier)
    for call in (
        group.barrier,
        lambda: group.send([torch.ones(1)], 1 - member.rank),
        lambda: group.allreduce([torch.ones(1)]),
    ):
        assert str(error_of(call)) == str(first), "every call fails with the first error"
    assert isinstance(first, GroupAbortedError if member.rank == 0 else GroupLostError | GroupTimeoutError)
    assert time.monotonic() - begun < within(3.0)
    group.shutdown()


@pytest.mark.parametrize("name", [CLASSES[0], BABY])
def test_calls_after_an_error_fail_at_once_with_the_first_one(name: str) -> None:
    together(2, after_an_error, name)


def from_threads(member: Member, name: str) -> None:
    """Each thread makes its calls in the order that the test gives, as all members do."""
    group = ready(member, name)
    found: list[float] = []
    for number in range(6):
        tensor = torch.full((5,), float(number))
        thread = threading.Thread(target=lambda tensor=tensor: group.allreduce([tensor]).wait())  # type: ignore[misc]
        thread.start()
        thread.join()
        found.append(tensor[0].item())
    assert found == [number * member.size for number in range(6)]
    group.shutdown()


@every_class
def test_calls_may_come_from_any_thread(name: str) -> None:
    together(2, from_threads, name)


def forks(member: Member, name: str) -> str:
    group = ready(member, name)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            group.allreduce([torch.ones(2)]).wait()
            text = "no error"
        except EthaError as error:
            text = str(error)
        os.write(write, text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    group.allreduce([torch.ones(2)]).wait()
    group.shutdown()
    return os.read(read, 1000).decode()


@every_class
def test_a_call_in_a_fork_after_configure_says_whose_the_group_is(name: str) -> None:
    for text in together(2, forks, name).values():
        assert "fork" in text and "configure" in text, text


CALLBACK = """
import threading, torch, etha
from torch._C._distributed_c10d import TCPStore
from torch.distributed.tensor import Replicate
from etha import groups
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
group = groups.ProcessGroupEtha(20.0)
group.configure(f"127.0.0.1:{store.port}/x", "r", 0, 1)
found = []
def commit():
    mine = torch.full((4,), 3.0)
    group.allreduce([mine]).wait()
    found.append(mine.tolist())
def side(name, other):
    with etha.TensorBusClient(timeout=60) as client:
        client.init_pair("p", name, other, device_mesh=(1,), placements=[Replicate()], rank=0)
        with client.register_tensors("b", {"w": torch.ones(4)}, pair_name="p", atomic=True) as batch:
            batch.transfer("send" if name == "a" else "recv", **({} if name == "a" else {"on_commit": commit}))
threads = [threading.Thread(target=side, args=each) for each in (("a", "b"), ("b", "a"))]
for each in threads: each.start()
for each in threads: each.join()
assert found == [[3.0] * 4], found
group.shutdown()
print("called")
"""


@pytest.mark.slow
def test_a_call_from_inside_on_commit_works(tmp_path: Any) -> None:
    """What a transfer calls at its commit runs on a thread of its own, so a group may be called there."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("ETHA_")}
    env |= {"ETHA_RUNTIME_DIR": str(tmp_path / "e"), "ETHA_IDLE": "1"}
    done = subprocess.run([sys.executable, "-c", CALLBACK], env=env, capture_output=True, text=True, timeout=120)
    subprocess.run([sys.executable, "-m", "etha", "stop"], env=env, capture_output=True, timeout=60)
    assert done.returncode == 0 and "called" in done.stdout, done.stdout + done.stderr
