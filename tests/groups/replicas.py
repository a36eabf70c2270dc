"""Replicas of a training job as real processes: each rank trains until the test says otherwise, and keeps a log."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.flow import nursery
from tests.processes import CONTEXT, preload

preload("torch", "etha.groups.host.etha_group", "etha.groups.members", "etha.groups.managed")

#: Elements of the model of these trainers.
SIZE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """One step of one rank. ``total``: what the all-reduce gave. ``weights``: the first weight afterwards."""

    at: float
    epoch: int
    step: int
    rank: int
    size: int
    committed: bool
    total: float
    weights: float

    @classmethod
    def of(cls, quorum: Any, committed: bool, *, total: float, weights: float) -> StepLog:
        """A step that has just ended."""
        place = {"epoch": quorum.epoch, "step": quorum.step, "rank": quorum.rank, "size": quorum.size}
        return cls(at=time.monotonic(), committed=committed, total=total, weights=weights, **place)


@dataclass(slots=True, kw_only=True)
class Trainer:
    """What the body of a rank gets."""

    name: str
    rank: int
    world: int
    options: dict[str, Any]
    pipe: Connection


def train(trainer: Trainer) -> None:
    """Train: each replica adds a number that depends on step and rank to every weight."""
    import torch

    from etha.groups.managed import ManagedProcessGroup
    from etha.groups.members import Members

    options = dict(trainer.options)
    via, pause = options.pop("via", "etha"), options.pop("pause", 0.0)
    fails_at, breaks_at = options.pop("fails_at", None), options.pop("breaks_at", None)
    members = Members("dp", replica=trainer.name, rank=trainer.rank, world_size=trainer.world, **options)
    group = ManagedProcessGroup(members, via=via)
    weights = torch.zeros(SIZE, dtype=torch.float64)
    while not (trainer.pipe.poll(pause) and trainer.pipe.recv() == "end"):
        quorum = members.begin()
        after = weights.clone()
        if quorum.changed:
            group.broadcast_one(after, 0).wait()
        gradient = torch.full((SIZE,), float(quorum.step + 1 + quorum.rank), dtype=torch.float64)
        fails = quorum.step == fails_at
        if fails:  # an error in forward: this rank makes none of the step's calls
            fails_at = None
        else:
            group.allreduce([gradient]).wait()
        after += gradient
        committed = members.commit(not fails)
        if committed:
            weights = after
        trainer.pipe.send(StepLog.of(quorum, committed, total=float(gradient[0]), weights=float(weights[0])))
        if committed and quorum.step == breaks_at and trainer.rank == 0:
            members._across.abort()  # type: ignore[attr-defined]  # as if this rank alone had noticed a death
    members.leave()


def never_commit(trainer: Trainer) -> None:
    """Begin steps and never commit one."""
    from etha.groups.members import Members

    with Members("dp", replica=trainer.name) as members:
        for _ in range(20):
            assert members.begin().step == 0


def come_twice(trainer: Trainer) -> None:
    """Commit a step and leave, and the same again, in one launch of a job."""
    from etha.groups.members import Members

    for _ in range(2):
        place = {"replica": trainer.name, "rank": trainer.rank, "world_size": trainer.world}
        with Members("dp", **place, launch="run-7.0", timeout=60) as members:
            members.begin()
            assert members.commit()


def learn(trainer: Trainer) -> None:
    """Train a real model, whose state a newcomer loads; the weights in the log are a checksum of everything."""
    import torch

    from etha.groups.managed import ManagedProcessGroup
    from etha.groups.members import Members

    torch.manual_seed(trainer.rank * 100 + len(trainer.name) * hash(trainer.name) % 1000)  # all begin differently
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 1))
    optimizer = torch.optim.Adam(model.parameters())
    seen: list[int] = []
    members = Members("dp", replica=trainer.name, rank=trainer.rank, world_size=trainer.world, **trainer.options)
    members.state(model, optimizer, extra=(lambda: {"seen": tuple(seen)}, lambda extra: _put(seen, extra["seen"])))
    group = ManagedProcessGroup(members)
    model(torch.zeros(2, 20)).sum().backward()
    while not (trainer.pipe.poll(0) and trainer.pipe.recv() == "end"):
        quorum = members.begin()
        optimizer.zero_grad()
        buffers = [buffer.clone() for buffer in model.buffers()]
        model(torch.full((4, 20), 0.1 * quorum.step) + torch.arange(4.0)[:, None]).square().sum().backward()
        works = [group.allreduce([parameter.grad]) for parameter in model.parameters()]
        for work in works:
            work.wait()
        committed = members.commit()
        if committed:
            optimizer.step()
            seen.append(quorum.step)
        else:
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        moments = [value.double().sum() for state in optimizer.state.values() for value in state.values()]
        values = [value.double().sum() for value in model.state_dict().values()]
        assert not committed or seen == list(range(len(seen))), "a newcomer has not the data position of the others"
        trainer.pipe.send(
            StepLog.of(quorum, committed, total=float(quorum.recovered), weights=float(sum(values + moments)))
        )
    members.leave()


def train_torchs_ddp(trainer: Trainer) -> None:
    """Train with torch's own DDP, which is made before the first step, or in it (``late``)."""
    import torch

    from etha.groups.managed import ManagedProcessGroup
    from etha.groups.members import Members

    late = trainer.options.pop("late", False)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    members = Members("dp", replica=trainer.name, **trainer.options)
    members.state(model, optimizer)
    group: Any = ManagedProcessGroup(members)
    ddp = None
    while not (trainer.pipe.poll(0) and trainer.pipe.recv() == "end"):
        if ddp is None and not late:
            ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        quorum = members.begin()
        if ddp is None:
            ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group, init_sync=False)
        optimizer.zero_grad()
        ddp(torch.randn(4, 8)).square().mean().backward()
        committed = members.commit()
        if committed:
            optimizer.step()
        trainer.pipe.send(
            StepLog.of(
                quorum,
                committed,
                total=0.0,
                weights=float(sum(parameter.double().sum() for parameter in model.parameters())),
            )
        )
    members.leave()


def _put(into: list[int], values: tuple[int, ...]) -> None:
    into[:] = values


class _WarningWords(logging.Handler):
    """Warnings of the rank's main thread are words of the rank, too. (Two threads cannot use a pipe at once.)"""

    def __init__(self, pipe: Connection) -> None:
        super().__init__(logging.WARNING)
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == threading.main_thread().ident:
            self._pipe.send(record.getMessage())


def _run(body: Callable[[Trainer], None], trainer: Trainer, env: dict[str, str], agents: str | None) -> None:
    for name in [name for name in os.environ if name.startswith("ETHA_") or name in ("RANK", "WORLD_SIZE")]:
        del os.environ[name]
    os.environ.update(env)
    faulthandler.register(signal.SIGUSR1)  # kill -USR1 shows where a rank that hangs is
    nursery.use(agents)
    logging.getLogger("etha.groups").addHandler(_WarningWords(trainer.pipe))
    try:
        body(trainer)
    except BaseException as error:
        trainer.pipe.send((type(error).__name__, traceback.format_exc()))
    else:
        trainer.pipe.send(("ended", ""))


@dataclass(slots=True)
class Rank:
    """One process, and what it has said so far. ``every``: all ranks of the test."""

    name: str
    process: BaseProcess
    pipe: Connection
    every: list[Rank]
    logs: list[Any] = field(default_factory=list)
    end: tuple[str, str] | None = None
    words: list[str] = field(default_factory=list)
    number: int = 0  #: its rank in the replica

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def read(self, timeout: float) -> bool:
        """Take what anybody has said, because a full pipe would stop a rank. False if nobody says anything."""
        speaking = {rank.pipe: rank for rank in self.every if rank.end is None}
        ready = wait(list(speaking), timeout)
        for pipe in ready:
            assert isinstance(pipe, Connection)
            speaking[pipe].take()
        return bool(ready)

    def take(self) -> None:
        try:
            message = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            message = ("killed", "")
        if isinstance(message, str):
            self.words.append(message)
        elif isinstance(message, tuple):
            self.end = message
        else:
            self.logs.append(message)

    def until(self, wanted: Callable[[Any], bool], timeout: float = 60.0) -> Any:
        """The next step for which ``wanted``."""
        deadline, seen = time.monotonic() + timeout, len(self.logs)
        while True:
            for log in self.logs[seen:]:
                if wanted(log):
                    return log
            seen = len(self.logs)
            left = deadline - time.monotonic()
            assert self.end is None and left > 0 and self.read(left), (
                f"{self.name}: {self.end or 'no such step'}; last {self.logs[-3:]}"
            )

    def says(self, word: str, timeout: float = 60.0, *, within: bool = False) -> None:
        """Wait until it has said ``word``, or something with ``word`` ``within``."""
        deadline = time.monotonic() + timeout
        while not (any(word in one for one in self.words) if within else word in self.words):
            left = deadline - time.monotonic()
            assert self.end is None and left > 0 and self.read(left), (
                f"{self.name}: {self.end or f'has not said {word}'}; but {self.words}"
            )

    def ends(self, timeout: float = 60.0) -> tuple[str, str]:
        """How it has ended: the name of its error, or "ended"; and the traceback."""
        deadline = time.monotonic() + timeout
        while self.end is None:
            left = deadline - time.monotonic()
            assert left > 0 and self.read(left), f"{self.name} goes on"
        return self.end


class Replicas:
    """All ranks of a test; ``every`` has also those that have ended."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.env = {"ETHA_RUNTIME_DIR": str(directory), "ETHA_IDLE": "300"}
        self.options = options
        self.every: list[Rank] = []

    def start(
        self,
        name: str,
        *,
        rank: int = 0,
        world: int = 1,
        body: Callable[[Trainer], None] = train,
        **options: Any,
    ) -> Rank:
        here, there = CONTEXT.Pipe()
        trainer = Trainer(name=name, rank=rank, world=world, options={**self.options, **options}, pipe=there)
        args = (body, trainer, self.env, nursery.address())
        process = CONTEXT.Process(target=_run, args=args, daemon=True)
        process.start()
        there.close()
        self.every.append(Rank(name, process, here, self.every, number=rank))
        return self.every[-1]

    def kill(self, rank: Rank) -> float:
        """SIGKILL; returns when."""
        at = time.monotonic()
        os.kill(rank.pid, signal.SIGKILL)
        rank.process.join()
        return at

    def end(self, *ranks: Rank) -> None:
        """Let ranks leave in order. The first that leaves ends its replica for the others."""
        for rank in ranks:
            rank.pipe.send("end")
        for number, rank in enumerate(ranks):
            end = rank.ends()
            torn = end[0] == "GroupLostError" and rank.name in {o.name for n, o in enumerate(ranks) if n != number}
            assert end[0] == "ended" or torn, end[1]

    def check(self) -> None:
        """No step mixes two memberships, and all members that commit a step have the same weights after it."""
        steps = defaultdict(list)
        for rank in self.every:
            for log in rank.logs:
                if log.committed:
                    steps[log.epoch, log.step].append(log)
        for (_, step), logs in steps.items():
            assert len({(log.size, log.total, log.weights) for log in logs}) == 1, logs
            counting = [log.rank for log in logs if log.rank < log.size]
            assert logs[0].total == sum(step + 1 + rank for rank in range(logs[0].size)), logs
            assert len(set(counting)) <= len(counting)


@contextlib.contextmanager
def replicas(directory: Path, **options: Any) -> Iterator[Replicas]:
    """Replicas that are killed at the end."""
    found = Replicas(directory, **options)
    try:
        yield found
    finally:
        for rank in found.every:
            rank.process.kill()
            rank.process.join()
            rank.pipe.close()
