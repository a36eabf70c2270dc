"""Trainers with a state, of which each replica has its own sharding; and where one of them dies while it is loaded."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.flow.sites import started_in
from tests.groups.replicas import StepLog, Trainer
from tests.processes import preload

preload("torch.distributed.tensor", "etha.groups.recovery.handover", "etha.integrations.fsdp")

#: Rows and columns of the weight; no number of ranks divides them.
ROWS, COLUMNS = 13, 11
#: What a source does in a load, in order: each name is a moment before a message or a copy.
OF_SOURCE = ("announce", "hear", "meet", "register", "copy", "copied")
#: What a newcomer does.
OF_NEWCOMER = ("heard", "answer", "meet", "register", "receive", "received", "loaded")


def train(trainer: Trainer) -> None:
    """Train a weight that the replica shards as ``placement`` says ("rows", "columns", "whole", "plain"), by Adam.

    The log's ``weights`` is a checksum of weight, both moments, the average that ``extra`` has, a buffer, and the
    generator of this rank. ``directory``: where the ranks of a replica meet. ``act``: what happens at which moment of a
    load. The test's words: ("act", moment, what) sets it later, "end" ends the training.
    """
    import torch
    from torch import nn
    from torch.distributed.tensor import distribute_tensor

    from etha.groups.managed import ManagedProcessGroup
    from etha.groups.members import Members

    options = dict(trainer.options)
    placement, directory, act = (options.pop(name, None) for name in ("placement", "directory", "act"))
    shape = (options.pop("rows", ROWS), COLUMNS)
    mesh = _mesh(trainer, directory) if trainer.world > 1 else None
    torch.manual_seed(len(trainer.name))  # ranks of a replica that hold the same tensor hold the same values
    place = {"rows": 0, "columns": 1, "whole": None}.get(placement)

    def placed(tensor: Any) -> Any:
        from torch.distributed.tensor import Replicate, Shard

        if mesh is None or placement == "plain":
            return tensor
        return distribute_tensor(tensor, mesh, [Replicate() if place is None else Shard(place)], src_data_rank=None)

    model = nn.Module()
    model.weight = nn.Parameter(placed(torch.randn(shape, dtype=torch.float64)))
    model.register_buffer("seen", torch.zeros((), dtype=torch.int64))
    model.register_buffer("own", torch.full((3,), float(os.getpid()) + trainer.rank))
    torch.manual_seed(os.getpid())
    average: list[Any] = [placed(torch.zeros(shape, dtype=torch.float64))]
    make = getattr(torch.optim, options.pop("optimizer", "Adam"))
    optimizer = make(model.parameters(), lr=0.01, foreach=False)
    members = Members("dp", replica=trainer.name, rank=trainer.rank, world_size=trainer.world, **options)

    def put(extra: Any) -> None:
        average[0] = extra["average"]
        torch.set_rng_state(extra["random"])

    def get() -> dict[str, Any]:
        odd = {"odd": {1}} if moments.act == ("take", "odd") else {}
        return {"average": average[0], "random": torch.get_rng_state(), **odd}

    members.state(model, optimizer, extra=(get, put))
    group = ManagedProcessGroup(members)
    moments = Moments(trainer, members, act)
    while (word := trainer.pipe.recv() if trainer.pipe.poll(0) else None) != "end":
        if word is not None:
            moments.act = word[1:]
            trainer.pipe.send("armed")
        quorum = members.begin()
        if quorum.changed:
            trainer.pipe.send(f"begun {quorum.epoch}")
        before = torch.get_rng_state()
        drawn = torch.rand(1, dtype=torch.float64)
        gradient = torch.sin(torch.arange(ROWS * COLUMNS, dtype=torch.float64) + quorum.step).view(ROWS, COLUMNS)
        if quorum.changed:
            trainer.pipe.send(f"computed {quorum.epoch}")
        group.allreduce([gradient]).wait()
        committed = members.commit()
        if committed:
            model.weight.grad = placed(gradient)
            optimizer.step()
            model.seen += 1
            average[0] = average[0] * 0.5 + model.weight.detach() * 0.5
        else:
            torch.set_rng_state(before)
        log = StepLog(
            at=time.monotonic(),
            epoch=quorum.epoch,
            step=quorum.step,
            rank=quorum.rank,
            size=quorum.size,
            committed=committed,
            total=float(quorum.recovered),
            weights=_checksum(model, optimizer, average[0]) + float(drawn),
        )
        trainer.pipe.send(log)
    members.leave()


def _mesh(trainer: Trainer, directory: str) -> Any:
    """The mesh of a replica's ranks, which meet in a file of this launch."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore
    from torch.distributed.device_mesh import init_device_mesh

    import etha.groups  # noqa: F401 (registers the backend)

    store = FileStore(str(Path(directory) / f"{trainer.name}.meet"), trainer.world)
    dist.init_process_group("etha", store=store, rank=trainer.rank, world_size=trainer.world)
    return init_device_mesh("cpu", (trainer.world,))


def _checksum(model: Any, optimizer: Any, average: Any) -> float:
    """A number in which every element of the state counts, on every rank of the replica."""
    import torch
    from torch.distributed.tensor import DTensor

    found = 0.0
    state = optimizer.state[model.weight]
    for number, tensor in enumerate((model.weight.detach(), state["exp_avg"], state["exp_avg_sq"], average)):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        weights = torch.arange(1, whole.numel() + 1, dtype=torch.float64) * (number + 1)
        found += float((whole.flatten() * weights).sum())
    return found + float(state["step"]) + float(model.seen) + float(model.own.sum())


class Moments:
    """Calls what happens in this process at a moment of a load for the replica "new"."""

    def __init__(self, trainer: Trainer, members: Any, act: tuple[str, str] | None) -> None:
        from etha.client.aio import AsyncTensorBusClient
        from etha.groups.members import Members
        from etha.groups.recovery.handover import StateHandover
        from etha.groups.recovery.state import MemberState

        self.act = act
        self._trainer, self._members = trainer, members
        new = trainer.name == "new"
        if new:
            self._around(Members, "_receive_bytes", after="heard")
            self._around(Members, "_send_bytes", before="answer")
            self._around(MemberState, "load", after="loaded")
        else:
            self._around(Members, "_send_bytes", before="announce")
            self._around(Members, "_receive_bytes", before="hear")
        self._around_async(AsyncTensorBusClient, "init_pair", before="meet")
        self._around_async(AsyncTensorBusClient, "register_tensors", before="register")
        self._around_async(StateHandover, "begin_send", before="copy", after="copied")
        self._around_async(StateHandover, "receive", before="receive", after="received")

    def _reached(self, moment: str | None) -> None:
        if self.act is None or moment != self.act[0] or not self._for_new():
            return
        what, self.act = self.act[1], None
        match what:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                self._trainer.pipe.send("stops")
                os.kill(os.getpid(), signal.SIGSTOP)
            case "kill agents":
                kill_agents(os.environ["ETHA_RUNTIME_DIR"])
            case "fail":
                raise MemoryError("no memory for the state, because the test says so")
            case "wait":
                self._trainer.pipe.send("waits")
                assert self._trainer.pipe.recv() == "go on"

    def _for_new(self) -> bool:
        names = [seat.replica for seat in self._members._seats]
        return "new" in names and not self._members._seats[names.index("new")].counts

    def _around(self, owner: type, name: str, *, before: str | None = None, after: str | None = None) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def around(*args: Any, **options: Any) -> Any:
            self._reached(before)
            result = inner(*args, **options)
            self._reached(after)
            return result

        setattr(owner, name, around)

    def _around_async(self, owner: type, name: str, *, before: str | None = None, after: str | None = None) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        async def around(*args: Any, **options: Any) -> Any:
            self._reached(before)
            result = await inner(*args, **options)
            self._reached(after)
            return result

        setattr(owner, name, around)


def kill_agents(directory: str) -> None:
    """SIGKILL to the agents of a runtime directory."""
    for pid, command in started_in(directory).items():
        if "etha.agent" in command:
            os.kill(pid, signal.SIGKILL)
