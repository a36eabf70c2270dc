"""What torch sees of a group: its size and rank in Python and C++, its name, its errors; and what Dynamo sees."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, _resolve_process_group
from torch.distributed import _functional_collectives
from torch.distributed.distributed_c10d import _coalescing_manager

from etha.errors import GroupError, GroupLostError, GroupMismatchError
from etha.groups import ProcessGroup, ProcessGroupDummy

from .echo import EchoGroup

LOST = GroupLostError("rank 1 was killed", ranks=(1,), reason="was killed")


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    yield
    dist.destroy_process_group()


def ddp(group: ProcessGroup) -> nn.Module:
    torch.manual_seed(0)
    return nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False), process_group=group)


def gradient(model: nn.Module) -> list[float]:
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    return [float(x) for x in next(model.parameters()).grad.flatten()]


def test_size_and_rank_follow_configure() -> None:
    group = EchoGroup()
    group.configure("store:1/a", "replica", 2, 3)
    assert (group.rank(), group.size(), group.getRank(), group.getSize()) == (2, 3, 2, 3)
    group.configure("store:1/b", 1, 2)
    assert (group.rank(), group.size()) == (1, 2)


@pytest.mark.parametrize(
    ("rank", "size", "ranks", "words"),
    [
        (2, 2, None, "rank 2 is no rank of a group with 2 members"),
        (0, 0, None, "cannot have 0 members"),
        (0, 2, [5, 5], "are not 2 different ranks"),
        (0, 2, [5], "are not 2 different ranks"),
    ],
)
def test_a_membership_that_cannot_be_is_refused(rank: int, size: int, ranks: list[int] | None, words: str) -> None:
    with pytest.raises(GroupError, match=words):
        EchoGroup().configure("store:1/a", "replica", rank, size, global_ranks=ranks)


def test_cpp_divides_by_the_size_that_configure_gave() -> None:
    """DDP's reducer divides by getSize and then sums: equal members give their own gradient."""
    group = EchoGroup(size=3)
    model = ddp(group)
    assert gradient(model) == [1, 1]
    group.configure("store:1/a", "replica", 0, 2)
    assert gradient(model) == [1, 1]
    assert any(call.method == "allreduce" for call in group.calls)


def test_ddp_survives_a_call_that_fails() -> None:
    group = EchoGroup(size=2)
    model = ddp(group)
    group.fail_with(LOST)
    with pytest.raises(RuntimeError, match="rank 1 was killed"):
        gradient(model)
    group.configure("store:1/a", "replica", 0, 2)
    assert gradient(model) == [1, 1]
    assert gradient(model) == [1, 1]


def test_ddp_goes_on_over_a_group_that_swallows() -> None:
    group = EchoGroup(size=2, errors="swallow")
    model = ddp(group)
    group.fail_with(LOST)
    gradient(model)
    assert group.errored() is LOST
    group.configure("store:1/a", "replica", 0, 2)
    assert group.errored() is None and gradient(model) == [1, 1]


def test_errors_of_waits_keep_their_class_through_torch(world: None) -> None:
    group = EchoGroup(size=2).register("lost")
    group.fail_with(LOST)
    with pytest.raises(GroupLostError):
        dist.all_reduce(torch.ones(1), group=group)
    with pytest.raises(GroupLostError):
        tensor = torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", group.group_name)
        torch.ops._c10d_functional.wait_tensor(tensor)
    group.unregister()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_registered_group_is_found_by_its_name_and_has_its_own_rank(world: None) -> None:
    group = EchoGroup()
    assert group.register("replicas") is group
    try:
        assert _resolve_process_group(group.group_name) is group
        assert group.group_name == str(dist.get_pg_count() - 1)
        group.configure("store:1/a", "replica", 2, 3)
        assert (dist.get_rank(group), dist.get_world_size(group)) == (2, 3)
        found = _functional_collectives.all_gather_tensor(torch.ones(2), 0, group)
        assert found.tolist() == [1] * 6
        with pytest.raises(GroupError, match="registered already"):
            group.register("replicas")
    finally:
        group.unregister()
    assert group.register("replicas").group_name
    group.unregister()


def test_a_group_can_be_registered_without_torch_distributed() -> None:
    group = EchoGroup(size=2)
    group.register("alone")
    assert _resolve_process_group(group.group_name) is group
    summed = torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", group.group_name)
    assert torch.ops._c10d_functional.wait_tensor(summed).tolist() == [2, 2]
    group.unregister()
    with pytest.raises(RuntimeError):
        _resolve_process_group("etha:alone:0")


def test_torchs_functions_take_a_group(world: None) -> None:
    group = EchoGroup(size=2).register("functions")
    tensor, outputs = torch.ones(2), [torch.zeros(2), torch.zeros(2)]
    dist.all_reduce(tensor, group=group)
    dist.all_gather(outputs, tensor, group=group)
    assert [out.tolist() for out in outputs] == [[2, 2], [2, 2]]
    dist.barrier(group=group)
    objects: list[object] = [None, None]
    dist.all_gather_object(objects, {"a": 1}, group=group)
    assert objects == [{"a": 1}, {"a": 1}]
    with _coalescing_manager(group, async_ops=True) as manager:
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(tensor, group=group)
    manager.wait()
    group.unregister()


def test_the_default_group_keeps_its_size_and_takes_batches_of_messages() -> None:
    group = EchoGroup(size=2)
    dist.Backend.register_backend("echo-world", lambda *_: group, devices=["cpu"])
    dist.init_process_group("echo-world", rank=0, world_size=2, store=HashStore())
    try:
        assert dist.group.WORLD is group
        with pytest.raises(GroupError, match="fixed size"):
            group.configure("store:1/a", "replica", 0, 1)
        ops = [dist.P2POp(dist.irecv, torch.zeros(2), 1), dist.P2POp(dist.isend, torch.ones(2), 1)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert [call.method for call in group.calls] == ["recv", "send"]
        assert group._get_backend(torch.device("cpu")).supports_coalescing is False
    finally:
        dist.destroy_process_group()


def test_a_timeout_must_be_positive() -> None:
    with pytest.raises(GroupError, match="0 s has passed"):
        ProcessGroup(timeout=0)
    with pytest.raises(GroupError, match="-1 s has passed"):
        EchoGroup().set_timeout(-1)
    with pytest.raises(GroupError, match="errors must be"):
        ProcessGroup(errors="ignore")


def test_a_group_takes_no_tensor_of_another_device() -> None:
    with pytest.raises(GroupError, match="a tensor is on meta, this group serves cpu tensors"):
        EchoGroup().allreduce([torch.ones(1, device="meta")])


COMPILED = """
import sys, torch, torch.distributed as dist
from torch import nn
from etha.errors import GroupMismatchError
from tests.unit.groups.echo import EchoGroup

assert "torch._dynamo" not in sys.modules
group = EchoGroup(size=2).register("compiled")
group.allreduce([torch.ones(1)]).wait()
assert "torch._dynamo" not in sys.modules, "a call imports Dynamo"
import torch.distributed._functional_collectives as functional

@torch.compile(backend="eager", fullgraph=True)
def gathered(x):
    return functional.all_gather_tensor(x + 1, 0, group)

for size in (2, 3, 2, 5):
    group.configure("store:1/a", "replica", 0, size)
    assert gathered(torch.zeros(2)).tolist() == [1.0] * 2 * size, size

@torch.compile(backend="eager")
def eager(x):
    dist.all_reduce(x, group=group)
    return x * 2

assert eager(torch.ones(1)).tolist() == [10]

model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False), process_group=group)
compiled = torch.compile(model, backend="eager")
for _ in range(2):
    model.zero_grad()
    compiled(torch.ones(1, 2)).sum().backward()
    assert next(model.parameters()).grad.tolist() == [[1, 1]]
"""


@pytest.mark.slow
def test_compiled_code_follows_a_resize_and_dynamo_does_not_look_into_calls() -> None:
    """In a process of its own, because it looks at what is imported."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_an_output_of_another_size_is_refused() -> None:
    group = EchoGroup(size=3)
    with pytest.raises(GroupMismatchError, match="compiled for another number of members"):
        group.all_gather_single(torch.zeros(4), torch.ones(2))


def test_a_group_that_is_not_a_concrete_one_says_what_to_use() -> None:
    group = ProcessGroup()
    with pytest.raises(GroupError, match="use a concrete group"):
        group.configure("127.0.0.1:1/p", "r", 0, 1)
    with pytest.raises(GroupError, match="use a concrete group"):
        group.barrier()


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), "soon", None, -1, 0])
def test_a_timeout_is_a_finite_time(timeout: Any) -> None:
    with pytest.raises(GroupError, match="a timeout of"):
        ProcessGroupDummy(0, 1).set_timeout(timeout)
