"""Every call of torch becomes one GroupCall, or an error that says what is wrong with it."""

from __future__ import annotations

import warnings
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, _make_nccl_premul_sum
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from etha.errors import GroupError, GroupMismatchError
from etha.groups import descriptor
from etha.groups.calls import GroupCall, normalize
from etha.groups.schedule import Kind

N = 3


def built(method: str, *args: Any, rank: int = 1, size: int = N, **more: Any) -> GroupCall:
    return normalize(method, args, rank=rank, size=size, **more)


def rooted(options: Any, root: int) -> Any:
    options.rootRank = root
    return options


def ones(*shape: int, **more: Any) -> torch.Tensor:
    return torch.ones(*shape, **more)


def test_an_allreduce_is_in_place_with_any_way_to_say_the_operation() -> None:
    tensor, options = ones(2, 3), dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    options.timeout = timedelta(seconds=5)
    call = built("allreduce", [tensor], options)
    assert (call.kind, call.op, call.timeout) == (Kind.ALLREDUCE, dist.ReduceOp.MAX, timedelta(seconds=5))
    assert call.inputs == call.outputs and call.inputs[0] is tensor and call.result() == [tensor]
    assert built("allreduce", tensor, dist.ReduceOp.MIN, timedelta(seconds=1)).timeout == timedelta(seconds=1)
    assert built("allreduce", [tensor]).op == dist.ReduceOp.SUM
    assert built("allreduce", [tensor], dist.AllreduceOptions()).timeout is None
    assert call.describe() == "allreduce MAX of float32[2, 3]"


def test_premul_sum_has_its_factor() -> None:
    number = built("allreduce", [ones(2)], _make_nccl_premul_sum(0.25))
    assert (number.op, number.factor) == (dist.ReduceOp.PREMUL_SUM, 0.25)
    tensor = built("allreduce", [ones(2)], _make_nccl_premul_sum(torch.tensor([0.5])))
    assert tensor.factor == torch.tensor([0.5])


def test_complex_tensors_are_summed_as_pairs_of_reals() -> None:
    tensor = torch.zeros(2, dtype=torch.complex64)
    call = built("allreduce", [tensor])
    call.outputs[0].fill_(1)
    assert call.result()[0] is tensor and tensor.tolist() == [1 + 1j, 1 + 1j]
    with pytest.raises(GroupError, match="MAX is not defined for torch"):
        built("allreduce", [tensor], dist.ReduceOp.MAX)


def test_roots_come_as_options_or_numbers() -> None:
    assert built("broadcast", [ones(2)], rooted(dist.BroadcastOptions(), 2)).root == 2
    assert built("broadcast", ones(2), 2).root == 2
    assert built("reduce", [ones(2)], rooted(dist.ReduceOptions(), 1)).root == 1
    assert built("reduce", ones(2), 1, dist.ReduceOp.MAX).op == dist.ReduceOp.MAX
    with pytest.raises(GroupError, match="root 3 is no rank of a group with 3 members"):
        built("broadcast", ones(2), 3)


@pytest.mark.parametrize("method", ["_allgather_base", "all_gather_single"])
def test_a_flat_gather_has_views_of_the_output(method: str) -> None:
    source, output = ones(2, 2), torch.zeros(6, 2)
    call = built(method, output, source, AllgatherOptions())
    for i, view in enumerate(call.outputs):
        view.fill_(i)
    assert (call.kind, call.inputs) == (Kind.ALLGATHER, [source])
    assert output.tolist() == [[i // 2, i // 2] for i in range(6)]
    assert call.result()[0] is output


@pytest.mark.parametrize("method", ["allgather_into_tensor_coalesced", "all_gather_single_coalesced"])
def test_coalesced_gathers_are_ordered_by_tensor_and_then_by_rank(method: str) -> None:
    outputs = [torch.zeros(3), torch.zeros(6)]
    call = built(method, outputs, [ones(1), ones(2)])
    assert [view.numel() for view in call.outputs] == [1, 1, 1, 2, 2, 2]
    lists = [[torch.zeros(1), torch.zeros(2)] for _ in range(N)]
    call = built("allgather_coalesced", lists, [ones(1), ones(2)])
    assert [view.numel() for view in call.outputs] == [1, 1, 1, 2, 2, 2]


def test_gathers_may_be_uneven_but_for_the_own_piece() -> None:
    outputs = [torch.zeros(5), torch.zeros(2), torch.zeros(0)]
    assert built("allgather", [outputs], [ones(2)]).outputs == outputs
    assert built("allgather", outputs, ones(2)).outputs == outputs
    with pytest.raises(GroupError, match="the output for rank 0 has 5 elements, the input 2"):
        built("allgather", [outputs], [ones(2)], rank=0)


@pytest.mark.parametrize("method", ["_reduce_scatter_base", "reduce_scatter_single"])
def test_a_flat_scatter_takes_strided_tensors_whose_first_dim_divides(method: str) -> None:
    source, options = torch.arange(12.0).reshape(2, 6).t(), dist.ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp.AVG
    call = built(method, torch.zeros(2, 2), source, options)
    assert call.op == dist.ReduceOp.AVG
    assert [view.tolist() for view in call.inputs] == [source[0:2].tolist(), source[2:4].tolist(), source[4:6].tolist()]
    with pytest.raises(GroupError, match="make it contiguous"):
        built(method, torch.zeros(4), torch.zeros(12).reshape(3, 4).t())


def test_reduce_scatters_of_lists() -> None:
    inputs = [[ones(2), ones(2), ones(2)], [ones(1), ones(1), ones(1)]]
    call = built("reduce_scatter", [ones(2), ones(1)], inputs, dist.ReduceScatterOptions())
    assert [tensor.numel() for tensor in call.inputs] == [2, 2, 2, 1, 1, 1]
    call = built("reduce_scatter_tensor_coalesced", [ones(2), ones(1)], [ones(6), ones(3)])
    assert [tensor.numel() for tensor in call.inputs] == [2, 2, 2, 1, 1, 1]


@pytest.mark.parametrize("method", ["alltoall_base", "all_to_all_single"])
def test_all_to_all_splits_along_the_first_dim(method: str) -> None:
    call = built(method, torch.zeros(6, 2), ones(6, 2), [3, 1, 2], [5, 1, 0])
    assert [view.shape[0] for view in call.outputs] == [3, 1, 2]
    assert [view.shape[0] for view in call.inputs] == [5, 1, 0]
    call = built(method, torch.zeros(6, 2), ones(6, 2), [], [], dist.AllToAllOptions())
    assert [view.shape[0] for view in call.inputs] == [2, 2, 2]
    with pytest.raises(GroupError, match="do not add up to 6"):
        built(method, torch.zeros(6), ones(6), [3, 1, 1], [])
    with pytest.raises(GroupMismatchError, match="cannot be divided by 3 members"):
        built(method, torch.zeros(4), ones(4), [], [])


def test_the_root_alone_has_lists() -> None:
    outputs = [torch.zeros(2) for _ in range(N)]
    options = rooted(dist.GatherOptions(), 1)
    assert built("gather", [outputs], [ones(2)], options).outputs == outputs
    assert built("gather", [], [ones(2)], options, rank=0).outputs == []
    assert built("gather", [[]], [ones(2)], options, rank=0).outputs == []
    with pytest.raises(GroupError, match="rank 0 is not root 1, but gives 3 outputs"):
        built("gather", [outputs], [ones(2)], options, rank=0)
    options = rooted(dist.ScatterOptions(), 1)
    assert built("scatter", [ones(2)], [outputs], options).inputs == outputs
    assert built("scatter", [ones(2)], [], options, rank=2).inputs == []


def test_messages_name_their_peer_and_tag() -> None:
    call = built("send", [ones(2)], 2, 7)
    assert (call.kind, call.root, call.tag, call.outputs) == (Kind.SEND, 2, 7, [])
    assert call.describe() == "send of float32[2] to rank 2"
    assert built("recv", [ones(2)], 0, 7).kind is Kind.RECV
    assert built("recv_anysource", [ones(2)], 7).kind is Kind.RECV_ANY
    with pytest.raises(GroupError, match="itself"):
        built("send", [ones(2)], 1, 0)


def test_a_barrier_takes_options_a_timeout_or_nothing() -> None:
    assert built("barrier").timeout is None
    assert built("barrier", dist.BarrierOptions()).kind is Kind.BARRIER
    assert built("barrier", timedelta(seconds=3)).timeout == timedelta(seconds=3)


@pytest.mark.parametrize(
    ("method", "args", "words"),
    [
        ("allreduce", ([],), "at least one tensor"),
        ("allreduce", ([1],), "not int"),
        ("allreduce", (), "wrong arguments for allreduce"),
        ("allreduce", ([ones(1), ones(1, dtype=torch.int32)],), "float32 and of torch.int32"),
        ("allreduce", ([ones(1), torch.ones(1, device="meta")],), "cpu and on meta"),
        ("allreduce", ([ones(2).to_sparse()],), "must be dense"),
        ("allreduce", ([ones(2)], dist.ReduceOp.BAND), "BAND is not defined for torch.float32"),
        ("allreduce", ([ones(2, dtype=torch.int32)], _make_nccl_premul_sum(0.5)), "PREMUL_SUM is not defined"),
        ("allreduce", ([ones(2)], "sum"), "'sum' is no reduce operation"),
        ("allgather", ([[ones(1)] * N], [ones(1), ones(1)]), "1 lists of outputs, it needs 2"),
        ("explode", (), "no method explode"),
    ],
)
def test_what_cannot_be_right_is_refused(method: str, args: tuple[Any, ...], words: str) -> None:
    with pytest.raises(GroupError, match=words):
        built(method, *args)


def test_a_tensor_on_another_device_is_refused() -> None:
    with pytest.raises(GroupError, match="a tensor is on meta, this group serves cpu tensors"):
        built("allreduce", [torch.ones(1, device="meta")], devices=("cpu",))


def test_what_fits_another_size_is_a_mismatch_that_names_it() -> None:
    with pytest.raises(GroupMismatchError, match="but the group has 3 members") as caught:
        built("all_gather_single", torch.zeros(4), ones(2))
    assert list(caught.value.calls) == [1]
    with pytest.raises(GroupMismatchError):
        built("allgather", [[ones(1)]], [ones(1)])


def test_defaults_of_gathers_are_the_own_piece_and_zeros() -> None:
    output = torch.full((6,), 9.0)
    built("all_gather_single", output, torch.tensor([1.0, 2.0])).fill_defaults(1)
    assert output.tolist() == [0, 0, 1, 2, 0, 0]
    output = torch.full((6,), 9.0)
    built("all_gather_single", output, output[2:4]).fill_defaults(1)
    assert output.tolist() == [0, 0, 9, 9, 0, 0]
    received = torch.full((3,), 9.0)
    built("all_to_all_single", received, torch.tensor([1.0, 2.0, 3.0]), [], []).fill_defaults(1)
    assert received.tolist() == [0, 2, 0]


def test_defaults_of_reductions_are_their_input() -> None:
    tensor = torch.tensor([4.0])
    built("allreduce", [tensor]).fill_defaults(1)
    assert tensor.tolist() == [4]
    output = torch.zeros(1)
    built("reduce_scatter_single", output, torch.tensor([1.0, 2.0, 3.0])).fill_defaults(1)
    assert output.tolist() == [2]
    output = torch.full((1,), 9.0)
    built("scatter", [output], [], rooted(dist.ScatterOptions(), 0)).fill_defaults(1)
    assert output.tolist() == [0]


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def nested() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # they are a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (freed, "has been freed"),
        (fake, "a FakeTensor has no memory of its own"),
        (lambda: TwoTensor(torch.ones(4), torch.ones(4)), "a TwoTensor has no memory of its own"),
        (nested, "nested|wrong arguments"),
    ],
)
@pytest.mark.parametrize("method", ["allreduce", "broadcast"])
def test_tensors_without_memory_are_refused(make: Any, text: str, method: str) -> None:
    with pytest.raises(GroupError, match=text):
        normalize(method, ([make()],), rank=0, size=2)
    normalize(method, ([torch.nn.Parameter(torch.ones(4)[1:])],), rank=0, size=2)


@pytest.mark.parametrize("root", ["a", 0.5])
def test_a_root_that_is_no_number_is_refused(root: Any) -> None:
    options = dist.BroadcastOptions()
    for given in (root, SimpleNamespace(rootRank=root)):
        with pytest.raises(GroupError, match="is no rank"):
            normalize("broadcast", ([torch.ones(4)], given), rank=0, size=2)
    assert normalize("broadcast", ([torch.ones(4)], options), rank=0, size=2).root == 0


def test_splits_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(GroupError, match="wrong arguments for alltoall_base"):
        normalize("alltoall_base", (torch.ones(4), torch.ones(4), ["x", 2], [2, 2]), rank=0, size=2)


def test_a_reduction_of_complex_numbers_is_not_one_of_real_numbers() -> None:
    pairs = normalize("allreduce", ([torch.ones(4, dtype=torch.complex64)],), rank=0, size=2)
    real = normalize("allreduce", ([torch.ones(8)],), rank=0, size=2)
    assert (pairs.tag, real.tag) == (descriptor.PAIRS, 0)
    common = descriptor.encode(pairs.kind, "float32", "SUM", counts=(8,), extra=pairs.tag)
    assert descriptor.decode(common) == "allreduce SUM of 4 complex64"
    moved = normalize("broadcast", ([torch.ones(4, dtype=torch.complex64)],), rank=0, size=2)
    assert moved.tag == 0


def test_an_expanded_output_is_refused() -> None:
    """Found when the result was copied back, it would end the group for all members."""
    expanded = torch.ones(1).expand(4)
    with pytest.raises(GroupError, match="was expanded"):
        normalize("broadcast", ([expanded],), rank=0, size=1)
    normalize("allgather", ([[torch.empty(4)]], [expanded]), rank=0, size=1)


def test_reductions_that_mean_nothing_are_refused() -> None:
    average = dist.AllreduceOptions()
    average.reduceOp = dist.ReduceOp.AVG
    with pytest.raises(GroupError, match="AVG is not defined for torch"):
        normalize("allreduce", ([torch.ones(3, dtype=torch.bool)], average), rank=0, size=2)
    with pytest.raises(GroupError, match="a conjugated view of torch"):
        normalize("allreduce", ([torch.ones(3, dtype=torch.complex64).conj()],), rank=0, size=2)


def test_a_tag_is_a_whole_number_from_0() -> None:
    for method in ("send", "recv"):
        with pytest.raises(GroupError, match="tag -5"):
            built(method, [torch.ones(1)], 0, -5)
