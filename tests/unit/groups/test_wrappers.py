"""Groups around groups: calls are handed on, errors swallowed with defined outputs, faults come to order."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

from etha.errors import GroupError, GroupLostError, GroupTimeoutError
from etha.groups import (
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ManagedProcessGroup,
    ProcessGroup,
    ProcessGroupDummy,
    ProcessGroupWrapper,
    create_store_client,
    extend_device_mesh,
)

from .echo import EchoGroup

LOST = GroupLostError("rank 1 was killed", ranks=(1,), reason="was killed")


def wrapped(**more: Any) -> tuple[EchoGroup, ErrorSwallowingProcessGroupWrapper]:
    parent = EchoGroup(rank=1, size=3, **more)
    return parent, ErrorSwallowingProcessGroupWrapper(parent)


def swallowing(kind: str) -> tuple[EchoGroup, ProcessGroup]:
    if kind == "wrapper":
        return wrapped()
    group = EchoGroup(rank=1, size=3, errors="swallow")
    return group, group


def value(*numbers: float) -> torch.Tensor:
    return torch.tensor([float(number) for number in numbers])


def nines(count: int) -> torch.Tensor:
    return torch.full((count,), 9.0)


def pieces() -> list[torch.Tensor]:
    return [value(1), value(2), value(3)]


#: A call, and the outputs that it has when it failed or was skipped on rank 1 of 3.
CALLS = [
    ("allreduce", lambda: ([value(4)],), [[4]]),
    ("allreduce_coalesced", lambda: ([value(4), value(5)],), [[4], [5]]),
    ("broadcast", lambda: ([value(4)],), [[4]]),
    ("broadcast_one", lambda: (value(4), 2), [[4]]),
    ("reduce", lambda: ([value(4)],), [[4]]),
    ("allgather", lambda: ([[nines(1), nines(1), nines(1)]], [value(4)]), [[0], [4], [0]]),
    ("_allgather_base", lambda: (nines(3), value(4)), [[0, 4, 0]]),
    ("all_gather_single", lambda: (nines(3), value(4)), [[0, 4, 0]]),
    ("allgather_into_tensor_coalesced", lambda: ([nines(3)], [value(4)]), [[0, 4, 0]]),
    ("all_gather_single_coalesced", lambda: ([nines(3)], [value(4)]), [[0, 4, 0]]),
    ("allgather_coalesced", lambda: ([[nines(1)], [nines(1)], [nines(1)]], [value(4)]), [[0], [4], [0]]),
    ("gather", lambda: ([], [value(4)]), []),
    ("scatter", lambda: ([nines(1)], []), [[0]]),
    ("reduce_scatter", lambda: ([nines(1)], [pieces()]), [[2]]),
    ("_reduce_scatter_base", lambda: (nines(1), value(1, 2, 3)), [[2]]),
    ("reduce_scatter_single", lambda: (nines(1), value(1, 2, 3)), [[2]]),
    ("reduce_scatter_tensor_coalesced", lambda: ([nines(1)], [value(1, 2, 3)]), [[2]]),
    ("reduce_scatter_single_coalesced", lambda: ([nines(1)], [value(1, 2, 3)]), [[2]]),
    ("alltoall_base", lambda: (nines(3), value(1, 2, 3), [], []), [[0, 2, 0]]),
    ("all_to_all_single", lambda: (nines(3), value(1, 2, 3), [1, 1, 1], [1, 1, 1]), [[0, 2, 0]]),
    ("alltoall", lambda: ([nines(1), nines(1), nines(1)], pieces()), [[0], [2], [0]]),
    ("send", lambda: ([value(4)], 2, 0), [[4]]),
]


@pytest.mark.parametrize("kind", ["wrapper", "errors"])
@pytest.mark.parametrize(("method", "args", "expected"), CALLS, ids=[call[0] for call in CALLS])
def test_all_collectives_have_defined_outputs_after_an_error(
    kind: str, method: str, args: Any, expected: list[list[float]]
) -> None:
    parent, group = swallowing(kind)
    parent.fail_with(LOST)
    for skipped in (False, True):
        work = getattr(group, method)(*args())
        assert work.wait()
        assert [tensor.tolist() for tensor in work.get_future().wait()] == expected
        assert group.error() is LOST and group.errored() is LOST
        assert len(parent.calls) == 1, "after an error nothing is called" if skipped else ""


def test_the_future_alone_reports_the_error_too() -> None:
    parent, group = wrapped()
    parent.fail_with(LOST)
    outputs = nines(3)
    assert group.all_gather_single(outputs, value(4)).get_future().wait()[0].tolist() == [0, 4, 0]
    assert isinstance(group.error(), RuntimeError)


@pytest.mark.parametrize(
    "call", [lambda g: g.barrier(), lambda g: g.recv([value(1)], 0, 0), lambda g: g.recv_anysource([value(1)], 0)]
)
def test_barriers_and_receives_raise(call: Any) -> None:
    parent, group = wrapped()
    parent.fail_with(LOST)
    for _ in range(2):
        with pytest.raises(GroupLostError):
            call(group).wait()


def test_object_collectives_raise() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        parent, group = wrapped()
        group.register("objects")
        parent.fail_with(LOST)
        for _ in range(2):
            with pytest.raises(GroupLostError):
                dist.all_gather_object([None] * 3, "own", group=group)
        dist.all_reduce(value(1), group=group)
    finally:
        dist.destroy_process_group()


def test_arguments_that_cannot_be_right_raise() -> None:
    _, group = wrapped()
    with pytest.raises(GroupError, match="at least one tensor"):
        group.allreduce([])
    assert group.error() is None


def test_only_the_first_error_is_kept_and_configure_takes_it_back() -> None:
    parent, group = wrapped()
    group.report_error(LOST)
    group.report_error(RuntimeError("second"))
    group.allreduce([value(1)]).wait()
    assert group.error() is LOST and parent.calls == []
    group.configure("store:1/a", "replica", 0, 2)
    tensor = value(1)
    group.allreduce([tensor]).wait()
    assert group.error() is None and tensor.tolist() == [2] and group.size() == 2


def test_a_wrapper_hands_on_calls_to_a_backend_of_torch() -> None:
    backend = dist.ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=5))
    group = ProcessGroupWrapper(pg=backend)
    tensor, output = value(3), torch.zeros(1)
    group.allreduce([tensor], dist.AllreduceOptions()).wait()
    group.all_gather_single(output, tensor).wait()
    group._allgather_base(output, tensor).wait()
    assert output.tolist() == [3] and (group.size(), group.rank(), group.getBackendName()) == (1, 0, "gloo")
    with pytest.raises(GroupError, match="cannot be configured again"):
        group.configure("store:1/a", "replica", 0, 1)


def test_a_wrapper_without_a_group_says_so() -> None:
    with pytest.raises(GroupError, match="not configured"):
        ProcessGroupWrapper().allreduce([value(1)])


def test_a_dummy_discards_all_and_counts_configures() -> None:
    dummy = ProcessGroupDummy(0, 1)
    group = ProcessGroupWrapper(pg=dummy)
    group.configure("addr", "0", 0, 1)
    assert dummy.configure_count == 1
    assert repr(group) == "ProcessGroupWrapper(pg=ProcessGroupDummy())"
    output = nines(2)
    assert group.all_gather_single(output, value(1)).wait() and output.tolist() == [9, 9]
    assert group.barrier().get_future().wait() == []
    nn.parallel.DistributedDataParallel(nn.Linear(1, 1), process_group=dummy)(torch.ones(1, 1)).backward()


def test_faults_come_to_order() -> None:
    group = FakeProcessGroupWrapper(EchoGroup())
    late = GroupTimeoutError("late")
    group.report_future_error(LOST)
    work = group.allreduce([value(1)])
    with pytest.raises(GroupLostError):
        work.wait()
    with pytest.raises(RuntimeError, match="rank 1 was killed"):
        work.get_future().wait()
    group.inject(late, method="broadcast", when="call", after=1)
    group.allreduce([value(1)]).wait()
    group.broadcast_one(value(1), 0).wait()
    with pytest.raises(GroupTimeoutError):
        group.broadcast_one(value(1), 0)
    group.broadcast_one(value(1), 0).wait()


def test_a_mesh_has_a_dim_for_replicas() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
        group = EchoGroup(size=3)
        both = extend_device_mesh(mesh, group, "replicate")
        assert both.mesh_dim_names == ("replicate", "shard") and both.shape == (1, 1)
        assert both.get_group("replicate") is group
        with pytest.raises(GroupError, match="a dim 'shard' already"):
            extend_device_mesh(mesh, group, "shard")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("address", "host", "port", "prefix"),
    [
        ("localhost:1234/my/prefix", "localhost", 1234, "my/prefix"),
        ("::1:29521/a/b", "::1", 29521, "a/b"),
        ("[::1]:29521/a", "::1", 29521, "a"),
    ],
)
def test_addresses_of_stores(address: str, host: str, port: int, prefix: str) -> None:
    with (
        patch("etha.groups.store_client.TCPStore") as store,
        patch("etha.groups.store_client.PrefixStore") as prefixed,
    ):
        create_store_client(address, timeout=timedelta(seconds=1))
    assert (store.call_args.kwargs["host_name"], store.call_args.kwargs["port"]) == (host, port)
    assert prefixed.call_args.args[0] == prefix


@pytest.mark.parametrize("address", ["", "localhost", "localhost:x/a", ":1/a"])
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(GroupError, match="host:port/prefix"):
        create_store_client(address, timeout=timedelta(seconds=1))


class Manager:
    """What `ManagedProcessGroup` uses of a torchft Manager."""

    def __init__(self, group: ProcessGroup) -> None:
        self._pg, self.reported, self.reduced = group, [], 0

    def num_participants(self) -> int:
        return 5

    def errored(self) -> Exception | None:
        return self.reported[0] if self.reported else None

    def report_error(self, error: Exception) -> None:
        self.reported.append(error)

    def allreduce(self, tensor: torch.Tensor, *, reduce_op: Any) -> Any:
        self.reduced += 1
        return self._pg.allreduce([tensor], reduce_op)


def test_a_managed_group_takes_a_torchft_manager() -> None:
    parent = EchoGroup(rank=1, size=3)
    manager = Manager(parent)
    group = ManagedProcessGroup(manager)
    assert (group.size(), group.getSize(), group.rank()) == (5, 5, 1)
    for tensors in ([value(1)], [value(1), value(2)]):
        group.allreduce(tensors).wait()
    assert manager.reduced == 3
    parent.fail_with(LOST)
    tensor = value(4)
    group.broadcast_one(tensor, 0).wait()
    group.allreduce([tensor]).wait()
    assert manager.reported == [LOST] and tensor.tolist() == [4] and manager.reduced == 3
    manager.reported.clear()
    parent.configure("store:1/a", "replica", 1, 3)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [12]


def test_after_an_error_from_elsewhere_a_barrier_asks_the_group_itself() -> None:
    parent, group = wrapped()
    group.report_error(LOST)
    assert group.barrier().wait()
    parent.fail_with(LOST)
    with pytest.raises(GroupLostError):
        group.barrier().wait()
