"""One rank of a replica that is sharded by FSDP2, in an elastic job: trains, keeps a log, ends with a checkpoint.

The buffers of the model are averaged over all ranks of all replicas in each step. What a step that was not committed
did to them is taken back by the trainer, as docs/groups.md says that it must be.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.groups.elastic.history import CommittedStep, RankStep
from tests.groups.replicas import Trainer
from tests.processes import preload

preload("torch", "torch.distributed.fsdp", "torch.distributed.tensor", "etha.groups", "tests.groups.elastic.trainer")

#: Samples of a batch; ranks of a replica; what goes in.
BATCH, SHARDS, WIDTH = 4, 2, 6


def model() -> Any:
    """Float64, with a buffer that each step changes."""
    import torch
    from torch import nn

    class Centered(nn.Module):
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
            return x - x.mean(0)

    torch.manual_seed(1)
    return nn.Sequential(Centered(), nn.Linear(WIDTH, 11), nn.Tanh(), nn.Linear(11, 5)).double()


def optimizer_of(net: Any) -> Any:
    import torch

    return torch.optim.AdamW(net.parameters(), lr=0.01)


def piece(batch: int, shard: int) -> Any:
    """The part of a batch that one rank of a replica takes."""
    import torch

    generator = torch.Generator().manual_seed(batch)
    return torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64).chunk(SHARDS)[shard]


def loss(net: Any, data: Any) -> Any:
    return (net(data) - 1).pow(2).mean()


def one_process(steps: list[CommittedStep]) -> dict[str, Any]:
    """Weights and buffers of one process after the same batches."""
    import torch

    net = model()
    optimizer = optimizer_of(net)
    for step in steps:
        optimizer.zero_grad()
        before = net[0].mean.clone()
        means, losses = [], []
        for batch in step.batches:
            for shard in range(SHARDS):
                with torch.no_grad():
                    net[0].mean.copy_(before)
                losses.append(loss(net, piece(batch, shard)))
                means.append(net[0].mean.clone())
        torch.stack(losses).mean().backward()
        optimizer.step()
        net[0].mean.copy_(torch.stack(means).mean(0))
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def _digest(net: Any, optimizer: Any) -> str:
    """Of the own shards of everything."""
    from torch import Tensor

    found = hashlib.sha256()
    tensors = [*net.state_dict().values(), *(v for state in optimizer.state.values() for v in state.values())]
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            found.update(_local(tensor).contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def _local(tensor: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def _save(path: Path, net: Any, optimizer: Any, members: Any) -> None:
    import torch

    states = [
        {name: _local(value) for name, value in optimizer.state[parameter].items()} for parameter in net.parameters()
    ]
    net_state = {name: _local(value) for name, value in net.state_dict().items()}
    torch.save({"net": net_state, "optimizer": states, "members": members.state_dict()}, path)


def _resume(path: Path, net: Any, optimizer: Any, members: Any) -> None:
    import torch

    saved = torch.load(path)
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            _local(tensor).copy_(saved["net"][name])
        for parameter, state in zip(net.parameters(), saved["optimizer"], strict=True):
            for name, value in state.items():
                like = value
                if value.shape == _local(parameter).shape:
                    like = torch.zeros_like(parameter)
                    _local(like).copy_(value)
                optimizer.state[parameter][name] = like
    members.load_state_dict(saved["members"])


def train_sharded(trainer: Trainer) -> None:
    """``options``: "store", the port of the store in which the ranks of a launch meet; "launch", its number;
    "directory" for logs and checkpoints; "resume", whether to begin from a checkpoint."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from etha import groups

    torch.set_num_threads(1)
    options = trainer.options
    launch, directory = options["launch"], Path(options["directory"])
    store = PrefixStore(
        f"{trainer.name}-{launch}", TCPStore("127.0.0.1", options["store"], is_master=False, wait_for_workers=False)
    )
    dist.init_process_group("etha", store=store, rank=trainer.rank, world_size=trainer.world)
    members = groups.Members("dp", replica=trainer.name, timeout=options.get("timeout", 30.0))
    group = groups.ManagedProcessGroup(members)
    shards = init_device_mesh("cpu", (trainer.world,), mesh_dim_names=("shard",))
    mesh = groups.extend_device_mesh(shards, group, "replicate")
    net = model()
    for layer in (net[1], net[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = optimizer_of(net)
    checkpoint = directory / f"{trainer.name}-{trainer.rank}.pt"
    if options.get("resume"):
        _resume(checkpoint, net, optimizer, members)
    members.state(net, optimizer)
    with (directory / f"{trainer.name}-{launch}-{trainer.rank}.log").open("w") as stream:
        while True:
            quorum = members.begin()
            optimizer.zero_grad()
            buffers = [buffer.clone() for buffer in net.buffers()]
            # All that end do so after the same step.
            ends = torch.tensor([float(trainer.pipe.poll())])
            group.allreduce([ends]).wait()
            dist.all_reduce(ends)
            batch = quorum.batches_committed + min(quorum.rank, quorum.size - 1)
            loss(net, piece(batch, trainer.rank)).backward()
            for buffer in net.buffers():
                dist.all_reduce(buffer, op=dist.ReduceOp.AVG)
                group.allreduce([buffer], dist.ReduceOp.AVG).wait()
            committed = members.commit()
            if committed:
                optimizer.step()
            else:
                for buffer, before in zip(net.buffers(), buffers, strict=True):
                    buffer.copy_(before)
            watches = quorum.rank >= quorum.size
            # What a member that is behind has while its step does not count is nobody's state.
            if committed or not watches:
                log = RankStep(
                    replica=trainer.name,
                    launch=launch,
                    rank=trainer.rank,
                    epoch=quorum.epoch,
                    members=tuple(seat.replica for seat in members._seats[: quorum.size]),
                    step=quorum.step,
                    first=quorum.batches_committed,
                    committed=committed,
                    digest=_digest(net, optimizer),
                    loaded=quorum.recovered or watches,
                    watches=watches,
                )
                stream.write(json.dumps(asdict(log)) + "\n")
                stream.flush()
                trainer.pipe.send(log)
            if committed and ends.item() > 0:
                break
    _save(checkpoint, net, optimizer, members)
    whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in net.state_dict().items()}
    torch.save({name: tensor.detach() for name, tensor in whole.items()}, checkpoint.with_suffix(".whole"))
    dist.barrier()
    members.leave()
    dist.destroy_process_group()
