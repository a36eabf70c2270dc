"""One rank of one replica: FSDP2 inside the replica, and replicas that come and go around it.

launch.py starts all ranks. In a cluster, a replica is one torchrun job with ETHA_REPLICA set to its name:

    ETHA_REPLICA=replica-0 torchrun --nproc-per-node 2 trainer.py
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

from etha import groups

#: Replicas end after a step that counts once this file is there.
END = os.environ.get("ELASTIC_END", "")
EPOCHS = 1000


class Regression(TensorDataset):
    """Points of a function that the model learns; the same in all processes."""

    def __init__(self) -> None:
        x = torch.randn(4096, 16, generator=torch.Generator().manual_seed(1))
        super().__init__(x, torch.sin(x).sum(dim=1, keepdim=True))


def build_model(mesh: object) -> nn.Module:
    """The same weights on all ranks, then sharded layer by layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main() -> None:
    # 1. The shard group of this replica: WORLD, of fixed size. If it loses a rank, the others get an error at once.
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("etha")
    else:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("etha", init_method=os.environ["ELASTIC_STORE"], rank=rank, world_size=size)
    # 2. The replicas: a group that follows the membership, as one more dim of the mesh.
    members = groups.Members("elastic-hsdp", timeout=60)
    replicas = groups.ManagedProcessGroup(members)
    shards = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    model = build_model(groups.extend_device_mesh(shards, replicas, "replicate"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # 3. What a replica that comes later loads from one that is there.
    members.state(model, optimizer)

    for x, y in groups.Sampler(Regression(), members, batch_size=32, epochs=EPOCHS):
        quorum = members.begin()  # the Sampler has begun the step; this is the same quorum
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()  # reduces over the shards, then over the replicas; a replica that dies is swallowed here
        # The mean loss, and whether anybody wants to end, over the replicas and over the shards: equal on all ranks.
        said = torch.tensor([loss.item(), float(Path(END).exists() if END else 0)])
        replicas.allreduce([said], dist.ReduceOp.AVG).wait()
        dist.all_reduce(said, dist.ReduceOp.AVG)
        committed = members.commit()  # one vote over all ranks of all replicas
        if committed:
            optimizer.step()
        report(
            epoch=quorum.epoch,
            step=quorum.step + committed,
            place=quorum.rank,
            size=quorum.size,
            committed=committed,
            recovered=quorum.recovered,
            loss=said[0].item(),
        )
        if committed and said[1] > 0:
            break
    report(digest=digest(model, optimizer))
    members.leave()
    dist.destroy_process_group()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A hash of this rank's shards of weights and optimizer state."""
    found = hashlib.sha256()
    values = [*model.state_dict().values()]
    values += [value for state in optimizer.state.values() for value in state.values()]
    for value in values:
        local = value.to_local() if isinstance(value, DTensor) else value
        found.update(local.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def report(**what: object) -> None:
    """One line for the launcher."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
