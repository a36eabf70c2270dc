"""One rank of an elastic job under DDP with BatchNorm, and what one process computes from the same batches.

DDP gives all members the first one's buffers before each forward; then each member's BatchNorm takes its own batch into
them. So a member's buffers after a step depend on its rank in it.
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

preload("torch", "etha.groups", "tests.groups.elastic.ddp")

BATCH, WIDTH = 4, 6


def model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)).double()


def optimizer_of(net: Any) -> Any:
    import torch

    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5)


def loss(net: Any, batch: int) -> Any:
    import torch

    data = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(batch), dtype=torch.float64)
    return (net(data) - 1).pow(2).mean()


def load_buffers(net: Any, values: list[Any]) -> None:
    for buffer, value in zip(net.buffers(), values, strict=True):
        buffer.copy_(value)


def buffers_of(net: Any) -> list[Any]:
    return [buffer.clone() for buffer in net.buffers()]


def gradients(net: Any, batches: list[int], base: list[Any]) -> tuple[list[Any], list[list[Any]]]:
    """The mean gradients of the batches, and the buffers that each of them leaves; all begin with ``base``."""
    import torch

    every, left = [], []
    for batch in batches:
        load_buffers(net, base)
        every.append(torch.autograd.grad(loss(net, batch), list(net.parameters())))
        left.append(buffers_of(net))
    return [sum(parts) / len(batches) for parts in zip(*every, strict=True)], left  # type: ignore[arg-type]


def one_process(steps: list[CommittedStep]) -> tuple[list[Any], dict[str, list[Any]]]:
    """The weights after these steps, and the buffers of each member of the last one."""
    net = model()
    optimizer = optimizer_of(net)
    buffers: dict[str, list[Any]] = {steps[0].members[0]: buffers_of(net)}
    for step in steps:
        mean, left = gradients(net, list(step.batches), buffers[step.members[0]])
        buffers = dict(zip(step.members, left, strict=True))
        for parameter, gradient in zip(net.parameters(), mean, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()], buffers


def train_replicated(trainer: Trainer) -> None:
    """``options``: "launch", its number; "directory" for the log, the weights, and each step in which one is behind."""
    import torch

    from etha import groups

    torch.set_num_threads(1)
    launch, directory = trainer.options["launch"], Path(trainer.options["directory"])
    members = groups.Members("dp", replica=trainer.name, timeout=30.0)
    group = groups.ManagedProcessGroup(members)
    net = model()
    optimizer = optimizer_of(net)
    members.state(net, optimizer)
    ddp = groups.DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.001)
    with (directory / f"{trainer.name}-{launch}-{trainer.rank}.log").open("w") as stream:
        while True:
            quorum = members.begin()
            optimizer.zero_grad()
            weights, buffers = [parameter.detach().clone() for parameter in net.parameters()], buffers_of(net)
            ends = torch.tensor([float(trainer.pipe.poll())])
            group.allreduce([ends]).wait()  # so that all end after the same step
            watches = quorum.rank >= quorum.size
            loss(ddp, quorum.batches_committed + quorum.rank).backward()
            found = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
            after = buffers_of(net)
            names = tuple(seat.replica for seat in members._seats)
            committed = members.commit()
            if committed:
                optimizer.step()
            else:
                load_buffers(net, buffers)
            if committed and quorum.size < len(names):
                seen = {"weights": weights, "buffers": buffers, "gradients": found, "after": after}
                torch.save(seen, directory / f"behind-{quorum.step}-{trainer.name}.pt")
            if committed or not watches:
                digest = hashlib.sha256()
                for tensor in [*net.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values())]:
                    digest.update(tensor.detach().numpy().tobytes())
                log = RankStep(
                    replica=trainer.name,
                    launch=launch,
                    rank=trainer.rank,
                    epoch=quorum.epoch,
                    members=names[: quorum.size],
                    step=quorum.step,
                    first=quorum.batches_committed,
                    committed=committed,
                    digest=digest.hexdigest()[:16],
                    loaded=quorum.recovered or watches,
                    watches=watches,
                )
                stream.write(json.dumps(asdict(log)) + "\n")
                stream.flush()
                trainer.pipe.send(log)
            if committed and ends.item() > 0:
                break
    whole = {"weights": [parameter.detach() for parameter in net.parameters()], "buffers": buffers_of(net)}
    torch.save(whole, directory / f"{trainer.name}.whole")
    members.leave()
