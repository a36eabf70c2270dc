"""FSDP2, HSDP, functional collectives and DCP over groups of Etha: results of one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.groups.team import Member, together
from tests.processes import preload

preload("etha.groups", "torch.distributed.fsdp", "torch.distributed.tensor")
STEPS = 4


def world(member: Member) -> None:
    import etha.groups  # noqa: F401 (registers the backend)

    host, port = member.address.split(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    dist.init_process_group("etha", store=store, rank=member.rank, world_size=member.size)


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 5)).double()


def data(step: int, part: int, parts: int) -> torch.Tensor:
    """A part of a step's batch; all parts are the batch."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 6, generator=generator, dtype=torch.float64).chunk(parts)[part]


def one_process() -> list[torch.Tensor]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        net(data(step, 0, 1)).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def sharded(member: Member, replicas: int) -> None:
    """Each layer sharded by itself, with gradients clipped over all ranks; 2 x 2 with replicas."""
    world(member)
    shape, names = (member.size // replicas,), ("shard",)
    if replicas > 1:
        shape, names = (replicas, *shape), ("replicate", *names)  # type: ignore[assignment]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    net: Any = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    for step in range(STEPS):
        optimizer.zero_grad()
        net(data(step, member.rank, member.size)).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    for parameter, expected in zip(net.parameters(), one_process(), strict=True):
        assert isinstance(parameter, DTensor)
        # The order of sums differs from one process's, by some units in the last place of float64.
        torch.testing.assert_close(parameter.full_tensor(), expected, rtol=1e-11, atol=1e-13)
    dist.barrier()
    dist.destroy_process_group()


def functions(member: Member) -> None:
    world(member)
    n, me = member.size, member.rank
    group = dist.group.WORLD
    assert group is not None

    def work(x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(x, "sum", group)
        gathered = functional.all_gather_tensor(x, 0, group)
        return functional.reduce_scatter_tensor(gathered + total.repeat(n), "sum", 0, group)

    x = torch.arange(4.0) + me
    every = torch.stack([torch.arange(4.0) + r for r in range(n)])
    expected = n * (every[me] + every.sum(0))
    assert torch.equal(work(x), expected)
    assert torch.equal(torch.compile(work, fullgraph=True, backend="aot_eager")(x), expected)
    mesh = init_device_mesh("cpu", (n,))
    whole = torch.arange(5.0 * n * 3).reshape(5 * n, 3)
    tensor = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(tensor.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()]).to_local(), whole)
    total: Any = tensor.sum()
    assert total.full_tensor() == whole.sum()
    dist.barrier()
    dist.destroy_process_group()


def test_fsdp2_equals_one_process() -> None:
    together(3, sharded, 1)


def test_hsdp_equals_one_process() -> None:
    together(4, sharded, 2)


def test_functional_collectives_compiled_too_and_dtensor() -> None:
    together(3, functions)
