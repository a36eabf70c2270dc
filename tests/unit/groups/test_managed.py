"""A managed group before its first epoch, and in steps in which members are behind; over a group that only notes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from etha.errors import ConfigError, GroupError, GroupMismatchError
from etha.groups.managed import ManagedProcessGroup
from etha.groups.members import Members
from etha.groups.work import DummyWork


class Crew:
    """What a managed group asks of its Members."""

    timeout = 5.0

    def manage(self, group: Any) -> None:
        self.group = group


class Parent:
    """A carrier of three members, of which the two others contribute 10 and 100 to each sum, and gather so."""

    def __init__(self, timeout: float) -> None:
        self.given: list[torch.Tensor] = []
        self.adds: Any = 110

    def configure(self, *_: Any) -> None: ...
    def set_timeout(self, _: timedelta) -> None: ...
    def errored(self) -> None: ...
    def getBackendName(self) -> str:
        return "etha"

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> DummyWork:
        self.given += [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            if opts.reduceOp == dist.ReduceOp.SUM:
                tensor += self.adds
        return DummyWork(tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> DummyWork:
        for output, value in zip(outputs[0], (0, 10, 100), strict=True):
            output.fill_(value)
        return DummyWork(outputs[0])

    def broadcast(self, tensors: list[torch.Tensor], *_: Any) -> DummyWork:
        return DummyWork(tensors)


def managed(rank: int, count: int) -> ManagedProcessGroup:
    group = ManagedProcessGroup(Crew(), via=Parent)
    group.enter_epoch(None, "x", rank, 3, 1)
    group.set_participants(count)
    return group


def test_before_the_first_epoch_it_is_a_group_of_one() -> None:
    group = ManagedProcessGroup(Crew(), via=Parent)
    assert (group.size(), group.rank()) == (1, 0)
    tensor, gathered = torch.ones(2), [torch.zeros(2)]
    group.allreduce([tensor]).wait()
    group.allgather([gathered], [tensor]).wait()
    assert tensor.tolist() == gathered[0].tolist() == [1, 1]
    with pytest.raises(GroupError, match=r"configured by members.begin\(\)"):
        group.configure("store", 0, 1)


def test_who_is_behind_contributes_nothing_and_receives_everything() -> None:
    group = managed(rank=2, count=2)
    assert (group.size(), group.rank()) == (2, 1)
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait()
    assert group.parent.given[0].tolist() == [0, 0]
    assert tensor.tolist() == [110, 110]
    gathered = [torch.zeros(2), torch.zeros(2)]
    group.allgather([gathered], [torch.ones(2)]).wait()
    assert [one[0].item() for one in gathered] == [0, 10]


def test_an_average_is_one_of_those_that_count() -> None:
    group = managed(rank=0, count=2)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    tensor = torch.ones(2)
    future = group.allreduce([tensor], options).get_future()
    assert future.wait()[0].tolist() == [55.5, 55.5]
    assert tensor.tolist() == [55.5, 55.5]


@pytest.mark.parametrize(
    ("op", "dtype", "expected"),
    [
        (dist.ReduceOp.MIN, torch.float32, float("inf")),
        (dist.ReduceOp.MAX, torch.bfloat16, float("-inf")),
        (dist.ReduceOp.MIN, torch.float8_e4m3fn, 448.0),
        (dist.ReduceOp.MAX, torch.float8_e5m2, float("-inf")),
        (dist.ReduceOp.MIN, torch.float8_e5m2, float("inf")),
        (dist.ReduceOp.MAX, torch.int8, -128),
        (dist.ReduceOp.PRODUCT, torch.int64, 1),
        (dist.ReduceOp.BAND, torch.uint8, 255),
        (dist.ReduceOp.BAND, torch.int32, -1),
        (dist.ReduceOp.BOR, torch.int32, 0),
        (dist.ReduceOp.MIN, torch.bool, True),
        (dist.ReduceOp.MAX, torch.bool, False),
    ],
)
def test_what_a_member_behind_contributes_changes_nothing(op: Any, dtype: torch.dtype, expected: float) -> None:
    group = managed(rank=2, count=2)
    options = dist.AllreduceOptions()
    options.reduceOp = op
    group.allreduce([torch.ones(2).to(dtype)], options).wait()
    assert group.parent.given[0].tolist() == [expected, expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_a_sum_of_negative_zeros_stays_one_while_a_member_is_behind(dtype: torch.dtype) -> None:
    group = managed(rank=2, count=2)
    group.allreduce([torch.ones(2).to(dtype)]).wait()
    assert torch.signbit(group.parent.given[0]).all()


@pytest.mark.parametrize(("dtype", "values"), [(torch.int8, [100, -100]), (torch.uint8, [200, 255])])
def test_an_average_does_not_wrap_while_a_member_is_behind(dtype: torch.dtype, values: list[int]) -> None:
    group = managed(rank=0, count=2)
    group.parent.adds = torch.tensor(values)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    tensor = torch.tensor(values, dtype=dtype)
    group.allreduce([tensor], options).wait()
    assert tensor.tolist() == values


def test_a_work_is_completed_without_a_wait_while_a_member_is_behind() -> None:
    group = managed(rank=0, count=2)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.AVG
    tensor, output = torch.ones(2), torch.zeros(2)
    work = group.allreduce([tensor], options)
    assert work.is_completed() and tensor.tolist() == [55.5, 55.5]
    assert group.reduce_scatter_single(output, torch.ones(4)).is_completed() and output[0] == 111


def test_a_member_behind_sends_nothing_and_receives_no_message() -> None:
    group = managed(rank=2, count=2)
    assert group.send([torch.ones(1)], 0).wait()
    with pytest.raises(GroupMismatchError, match="a member that is behind receives no messages"):
        group.recv([torch.ones(1)], 0).wait()


@pytest.mark.parametrize(
    "wrong",
    [
        *({"timeout": value} for value in (float("nan"), float("inf"), -1.0, "9")),
        *({"grace": value} for value in (-3.0, None)),
        *({"min_replicas": value} for value in (0, "2")),
        *({"max_failures": value} for value in (-1, 0.5)),
    ],
)
def test_settings_of_members_that_mean_nothing_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Members("dp", replica="a", rank=0, world_size=1, **wrong)


def test_a_managed_group_needs_members() -> None:
    with pytest.raises(GroupError, match=r"ManagedProcessGroup\(None\)"):
        ManagedProcessGroup(None)


def test_counts_of_a_checkpoint_are_named() -> None:
    members = Members("dp", replica="a", rank=0, world_size=1)
    with pytest.raises(ConfigError, match="batches_committed are needed"):
        members.load_state_dict({})
    with pytest.raises(ConfigError, match="timeout"):
        members.begin("a")  # type: ignore[arg-type]
    members.leave()
