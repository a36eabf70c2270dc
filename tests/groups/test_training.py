"""A training loop over replicas that are killed and start again: its weights are those of one process."""

from __future__ import annotations

import os
import queue
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.flow import nursery
from tests.flow.sites import private_directory
from tests.processes import CONTEXT, preload

preload(
    "torch", "etha.groups.host.etha_group", "etha.groups.members", "etha.groups.managed", "etha.groups.training.ddp"
)

#: More than a test takes: it ends when replica a is told so.
SAMPLES, BATCH = 200_000, 4

pytestmark = pytest.mark.usefixtures("agents")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    first: int  #: number of the step's first batch
    size: int
    committed: bool


def model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.BatchNorm1d(64), nn.Linear(64, 4)).double()


def loss(net: Any, samples: Any) -> Any:
    import torch

    data = torch.stack([torch.sin(torch.arange(8, dtype=torch.float64) * (int(k) + 1)) for k in samples])
    return net(data).pow(2).mean()


def digest(net: Any) -> list[float]:
    return [value for p in net.parameters() for value in p.detach().flatten().tolist()]


def train(pipe: Connection, name: str, workers: int) -> None:
    import torch

    from etha import groups

    torch.set_num_threads(1)
    members = groups.Members("dp", replica=name, timeout=30.0)
    group = groups.ManagedProcessGroup(members)
    net = model()
    ddp = groups.DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.002)
    optimizer = groups.Optimizer(members, torch.optim.SGD(net.parameters(), lr=0.05))
    members.state(net, optimizer)
    # Forked, as a user's are: those of a fork server would be its children and outlive a trainer that is killed.
    how = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    sampler = groups.Sampler(range(SAMPLES), members, batch_size=BATCH, **how)
    for samples in sampler:
        optimizer.zero_grad()
        quorum = optimizer.quorum
        assert quorum == sampler.quorum, "a step has one quorum"
        ends = torch.tensor([float(pipe.poll())])
        group.allreduce([ends]).wait()  # so that all end after the same step
        loss(ddp, samples).backward()
        optimizer.step()
        pipe.send(StepLog(first=quorum.batches_committed, size=quorum.size, committed=optimizer.committed))
        if optimizer.committed and ends.item() > 0:
            break
    members.leave()
    pipe.send(digest(net))


def run(pipe: Connection, name: str, workers: int, env: dict[str, str], agents: str | None) -> None:
    for variable in [each for each in os.environ if each.startswith("ETHA_") or each in ("RANK", "WORLD_SIZE")]:
        del os.environ[variable]
    os.environ.update(env)
    nursery.use(agents)
    try:
        train(pipe, name, workers)
    except BaseException:
        pipe.send(traceback.format_exc())


@dataclass(slots=True)
class Replica:
    process: BaseProcess
    pipe: Connection
    steps: list[StepLog] = field(default_factory=list)
    weights: list[float] | None = None
    said: queue.Queue[Any] = field(default_factory=queue.Queue)

    def listen(self) -> None:
        """Take everything out of the pipe, so that no replica waits for the test to read."""
        try:
            while True:
                self.said.put(self.pipe.recv())
        except (EOFError, OSError):
            self.said.put(None)

    def read(self, timeout: float = 60.0) -> StepLog | None:
        """The next step; None at the end."""
        said = self.said.get(timeout=timeout)
        if said is None:
            raise EOFError
        assert not isinstance(said, str), said
        if isinstance(said, StepLog):
            self.steps.append(said)
            return said
        self.weights = said
        return None

    def read_rest(self) -> None:
        """All that a killed process has said."""
        try:
            while self.read() is not None:
                pass
        except EOFError:
            self.said.put(None)  # for whoever clears up

    def until(self, size: int) -> None:
        """Read on to a committed step of so many replicas."""
        while (step := self.read()) is not None:
            if step.committed and step.size == size:
                return
        pytest.fail(f"the data ended before a step of {size} replicas")


class Job:
    def __init__(self, directory: Path, workers: int) -> None:
        self.env = {"ETHA_RUNTIME_DIR": str(directory), "ETHA_IDLE": "300"}
        self.workers = workers
        self.every: list[Replica] = []

    def start(self, name: str) -> Replica:
        here, there = CONTEXT.Pipe()
        # Not a daemon, because it starts workers of a DataLoader.
        process = CONTEXT.Process(target=run, args=(there, name, self.workers, self.env, nursery.address()))
        process.start()
        there.close()
        self.every.append(Replica(process, here))
        threading.Thread(target=self.every[-1].listen, daemon=True).start()
        return self.every[-1]


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    with private_directory() as directory:
        found = Job(directory, request.param)
        try:
            yield found
        finally:
            for replica in found.every:
                replica.process.kill()
                replica.process.join()
            for replica in found.every:
                while replica.said.get(timeout=60) is not None:
                    pass
                replica.pipe.close()


def one_process(steps: list[StepLog]) -> list[float]:
    """The weights after the same steps; running statistics of BatchNorm do not enter them."""
    import torch

    from etha.groups.training.sampler import Sampler

    class Nobody:
        rank, world_size = 0, 1

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    order = Sampler(range(SAMPLES), Nobody(), batch_size=BATCH)
    for step in steps:
        optimizer.zero_grad()
        numbers = range(step.first, step.first + step.size)
        torch.stack([loss(net, order.indices(number)) for number in numbers]).mean().backward()
        optimizer.step()
    return digest(net)


def history(*replicas: Replica) -> list[StepLog]:
    """The steps that these replicas committed, in order; a newcomer has seen the later ones only."""
    found = {step.first: step for replica in replicas for step in replica.steps if step.committed}
    assert {step for replica in replicas for step in replica.steps if step.committed} == set(found.values())
    return [found[first] for first in sorted(found)]


@pytest.mark.parametrize("job", [0, pytest.param(2, marks=pytest.mark.more)], indirect=True, ids=["plain", "workers"])
def test_a_replica_is_killed_and_a_new_process_takes_its_place(job: Job) -> None:
    a, b, c = (job.start(name) for name in "abc")
    for replica in (a, b, c):
        replica.until(3)
    b.process.kill()
    b.read_rest()
    a.until(2)
    again = job.start("b")
    for replica in (again, a):
        replica.until(3)
    a.pipe.send("end")
    for replica in (a, c, again):
        while replica.read() is not None:
            pass
    committed = history(a, c) or pytest.fail("nothing was committed")
    committed = [*[step for step in history(b) if step.first < committed[0].first], *committed]
    taken = [number for step in committed for number in range(step.first, step.first + step.size)]
    assert taken == list(range(len(taken))), "each batch in exactly one step"
    assert a.weights == c.weights == again.weights
    assert a.weights == pytest.approx(one_process(committed), rel=1e-9, abs=1e-12)
    lost = [step for step in a.steps if not step.committed]
    assert len(lost) <= 3, "a death and a join cost a step each"
