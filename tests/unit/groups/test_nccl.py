"""NCCL in this process, over a played backend: errors abort the communicator and keep the group's classes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from etha.errors import GroupAbortedError, GroupError, GroupLostError, GroupMismatchError, GroupTimeoutError
from etha.groups import ProcessGroupNCCL
from etha.groups.inprocess import nccl
from etha.groups.work import DummyWork

from .ranks import Ranks, ranks


class PlayedWork(DummyWork):
    def __init__(self, result: Any, error: str | None) -> None:
        super().__init__(result)
        self.error = error

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return True


class Played:
    """torch's ProcessGroupNCCL: ``error`` is raised by the works' waits, ``refused`` by the calls."""

    class Options:
        _timeout: timedelta

    error: str | None = None
    refused: str | None = None
    made: list[Played] = []  # noqa: RUF012

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        if self.refused:
            raise RuntimeError(self.refused)
        self.aborted, self.called = False, 0
        self.made.append(self)

    def allreduce(self, tensors: Any, opts: Any = None) -> PlayedWork:
        if self.refused:
            raise RuntimeError(self.refused)
        self.called += 1
        return PlayedWork(tensors, self.error)

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> ProcessGroupNCCL:
    monkeypatch.setattr(nccl._c10d, "ProcessGroupNCCL", Played, raising=False)
    monkeypatch.setattr(Played, "made", [])
    monkeypatch.setattr(ProcessGroupNCCL, "DEVICES", ())
    found = ProcessGroupNCCL(timeout=5)
    found.configure(HashStore(), "replica", 0, 1, 7)
    return found


def test_a_call_goes_to_the_backend(group: ProcessGroupNCCL) -> None:
    tensor = torch.ones(1)
    work = group.allreduce([tensor])
    assert work.wait() and work.get_future().wait() == [tensor] and work.is_completed()


@pytest.mark.parametrize(
    ("words", "kind"), [("NCCL communicator was aborted", GroupLostError), ("Watchdog timeout", GroupTimeoutError)]
)
def test_a_call_that_fails_aborts_the_communicator(
    group: ProcessGroupNCCL, monkeypatch: pytest.MonkeyPatch, words: str, kind: type[Exception]
) -> None:
    monkeypatch.setattr(Played, "error", words)
    with pytest.raises(kind, match=r"allreduce SUM of float32\[1\]"):
        group.allreduce([torch.ones(1)]).wait()
    assert Played.made[0].aborted and isinstance(group.errored(), kind)
    with pytest.raises(kind):
        group.allreduce([torch.ones(1)]).wait()
    monkeypatch.setattr(Played, "error", None)
    group.configure(HashStore(), "replica", 0, 1)
    assert group.allreduce([torch.ones(1)]).wait() and group.errored() is None


def test_a_call_that_the_backend_refuses_fails_in_its_wait(
    group: ProcessGroupNCCL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Played, "refused", "no")
    work = group.allreduce([torch.ones(1)])
    with pytest.raises(GroupLostError):
        work.wait()
    with pytest.raises(GroupLostError, match="configure failed"):
        group.configure(HashStore(), "replica", 0, 1)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(nccl._c10d, "ProcessGroupNCCL", Played, raising=False)
    monkeypatch.setattr(Played, "made", [])
    monkeypatch.setattr(ProcessGroupNCCL, "DEVICES", ())
    with ranks(lambda: ProcessGroupNCCL(timeout=30), 2) as found:
        yield found


def test_a_mismatch_is_found_before_nccl_begins(two: Ranks) -> None:
    started = [played.called for played in Played.made]
    errors = two.errors(lambda rank, group: group.allreduce([torch.ones(2 + rank)]).wait())
    assert [type(error) for error in errors] == [GroupMismatchError] * 2
    assert errors[0].calls == {0: "allreduce SUM of 2 float32", 1: "allreduce SUM of 3 float32"}  # type: ignore[union-attr]
    assert [played.called for played in Played.made] == started and all(played.aborted for played in Played.made)


def test_arguments_that_one_member_refuses_are_a_mismatch_on_both(two: Ranks) -> None:
    def call(rank: int, group: ProcessGroupNCCL) -> None:
        if rank == 1:
            with pytest.raises(GroupError, match="needs at least one tensor"):
                group.allreduce([])
        group.allreduce([torch.ones(2)]).wait()

    errors = two.errors(call)
    assert [type(error) for error in errors] == [GroupMismatchError] * 2
    assert errors[0].calls[1] == "allreduce with arguments that it refused"  # type: ignore[union-attr]


def test_arguments_that_all_members_refuse_leave_the_group_as_it_is(two: Ranks) -> None:
    def call(rank: int, group: ProcessGroupNCCL) -> None:
        with pytest.raises(GroupError, match="needs at least one tensor"):
            group.allreduce([])
        group.allreduce([torch.ones(2)]).wait()

    two.run(call)


def test_a_collective_that_a_member_does_not_make_names_it(two: Ranks) -> None:
    two.groups[0].set_timeout(0.1)
    with pytest.raises(GroupTimeoutError, match=r"rank 1 has not made it") as caught:
        two.groups[0].allreduce([torch.ones(2)]).wait()
    assert caught.value.waiting_for == (1,)


def test_what_was_said_of_calls_is_deleted_from_the_store(two: Ranks) -> None:
    for _ in range(5):
        two.run(lambda rank, group: group.allreduce([torch.ones(2)]).wait())
    # Of each member only what it said of the last call is left.
    kept = two.store.num_keys()
    two.run(lambda rank, group: group.allreduce([torch.ones(2)]).wait())
    assert two.store.num_keys() == kept


def test_an_abort_fails_calls_until_configure(group: ProcessGroupNCCL) -> None:
    work = group.allreduce([torch.ones(1)])
    group.abort()
    for each in (work, group.allreduce([torch.ones(1)])):
        with pytest.raises(GroupAbortedError):
            each.wait()


def test_it_takes_cuda_tensors_only_and_needs_nccl() -> None:
    group = ProcessGroupNCCL()
    with pytest.raises(GroupError, match="this group serves cuda tensors"):
        group.allreduce([torch.ones(1)])
    if not hasattr(nccl._c10d, "ProcessGroupNCCL"):
        with pytest.raises(GroupError, match="this torch has no NCCL"):
            group.configure(HashStore(), "replica", 0, 1)
