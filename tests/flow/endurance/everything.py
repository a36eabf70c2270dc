"""All of Etha at once, under attack: an elastic trainer publishes, a fleet follows it, and two pairs move tensors.

    host one   member-0, member-1 of the trainer, senders of both pairs
    ----cut----
    host two   member-2, replicas of two ranks, receivers of both pairs           one Redis, which keeps its data

Ranks and agents are killed and stopped, replicas leave and join, the link between the hosts is cut, and Redis is
killed and started again. The weights of the trainer after step n are n everywhere, and version n is published by
whoever is the first of the epoch, so that a mixture is seen at once. Of a pair every transfer has a number of its own.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

import etha
from etha import groups
from etha.config import Settings
from etha.events import gather
from etha.observe.history import Happening
from tests.flow.endurance.footprint import Footprint
from tests.flow.jobs import Job, Worker, tell
from tests.flow.networks.namespaces import Hosts
from tests.flow.networks.tun import enter
from tests.flow.publishing import attack
from tests.flow.publishing.attack import BOUND, NAME, SHAPES, Attack, Side
from tests.flow.sites import Site, environment
from tests.unit.store.server import Server

GROUP = "trainer"
#: Where members and ranks live: places of host one, then of host two. None is the beginning of another.
ONE, TWO = ("a1", "a2"), ("b1", "b2")
MEMBERS = (("a1", "member-0"), ("a2", "member-1"), ("b1", "member-2"))
PAIRS = ("left", "right")
WORLD = 2
#: Seconds that a member may compute in a step, and a pair between two transfers.
STEP = 0.2
#: What a fault may raise in whoever is near it; anything else is a fault of Etha.
EXPECTED = (
    etha.PeerLostError,
    etha.AgentLostError,
    etha.AgentUnavailableError,
    etha.RendezvousTimeoutError,
    etha.RedisUnavailableError,
    etha.TransferAbortedError,
    etha.TransferTimeoutError,
    groups.GroupError,
)


# ---- the processes ------------------------------------------------------------------------------


def on_host(namespace: str, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` on a host. Its agent starts there."""
    enter(namespace)
    return function(*args)


class Weights(torch.nn.Module):
    """After step n every element is n."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_buffer(name, torch.zeros(shape))


def member(name: str) -> str:
    """One replica of the trainer: trains until it is told to end, and publishes while it is the first of the epoch."""
    try:
        with groups.Members(GROUP, replica=name, rank=0, world_size=1, timeout=BOUND / 2) as members:
            return _train(members)
    except EXPECTED as error:
        return f"{type(error).__name__}: {error}"


def _train(members: groups.Members) -> str:
    group = groups.ManagedProcessGroup(members)
    weights = Weights()
    members.state(weights)
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ending.append(number))
    with etha.TensorBusClient(timeout=BOUND / 2) as client:
        publisher = _Publisher(client, weights)
        while not ending:
            quorum = members.begin()
            gradients = [torch.ones_like(tensor) for tensor in weights.buffers()]
            time.sleep(STEP)  # computes
            for gradient in gradients:
                group.allreduce([gradient], torch.distributed.ReduceOp.AVG).wait()
            if not members.commit():
                continue
            step = quorum.step + 1
            for tensor, gradient in zip(weights.buffers(), gradients, strict=True):
                tensor += gradient
                assert (tensor == step).all(), f"step {step} of epoch {quorum.epoch} has {tensor.unique().tolist()}"
            published = publisher.put(step) if quorum.rank == 0 else publisher.close()
            tell("step", (quorum.epoch, step, quorum.size, published))
        publisher.close()
    return "left"


class _Publisher:
    """A publication as long as this member is the first one."""

    def __init__(self, client: etha.TensorBusClient, weights: Weights) -> None:
        self._client, self._weights = client, weights
        self._publication: etha.Publication | None = None

    def put(self, step: int) -> bool:
        """Whether the version is there. The publisher before may not have been given up yet."""
        try:
            if self._publication is None:
                tensors = dict(self._weights.named_buffers())
                self._publication = self._client.publish(
                    NAME,
                    tensors,
                    expected_world_size=1,
                    rank=0,
                    device_mesh=(1,),
                    placements={name: [Replicate()] for name in tensors},
                )
            self._publication.put(step)
        except EXPECTED as error:
            tell("lost", f"{type(error).__name__}: {error}")
            self.close()
        except etha.ConfigError as error:
            if "alive" not in str(error):
                raise
        else:
            return True
        return False

    def close(self) -> bool:
        publication, self._publication = self._publication, None
        if publication is not None:
            try:
                publication.close()
            except EXPECTED as error:
                tell("lost", f"{type(error).__name__}: {error}")
        return False


def follower(subscriber: str, rank: int, atomic: bool, dims: dict[str, int | None]) -> str:
    """A rank of a replica, which is started again after whatever a fault may raise."""
    try:
        return attack.replica(subscriber, rank, atomic, dims)
    except EXPECTED as error:
        return f"{type(error).__name__}: {error}"


def mover(pair: str, side: str, rank: int) -> str:
    """A rank of a pair: meets the others, moves numbers until something fails, and meets them again."""
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ending.append(number))
    local = torch.zeros((64, 4096) if side == "source" else (128, 2048), dtype=torch.int64)
    with etha.TensorBusClient(timeout=BOUND / 2) as client:
        while not ending:
            try:
                _move(client, pair, side, rank, local, ending)
            except EXPECTED as error:
                tell("lost", f"{type(error).__name__}: {error}")
    return "left"


def _move(
    client: etha.TensorBusClient, pair: str, side: str, rank: int, local: torch.Tensor, ending: Sequence[int]
) -> None:
    other = {"source": "target", "target": "source"}[side]
    bond = client.init_pair(pair, side, other, WORLD, (WORLD,), rank=rank)
    handle = client.register_tensors(
        "numbers",
        {"n": local},
        pair_name=pair,
        placements={"n": [Shard(0 if side == "source" else 1)]},
        shapes={"n": (128, 4096)},
        atomic=side == "target",
    )
    number = held = bond.epoch << 20
    local.fill_(number)
    while not ending:
        time.sleep(STEP * torch.rand(()).item())  # computes
        if side == "source":
            number += 1
            local.fill_(number)
            handle.transfer("send", version=number)
        else:
            try:
                held = int(handle.transfer("recv").version or 0)
            finally:
                values = local.unique().tolist()
                assert len(values) == 1, f"rank {rank} of {pair} holds a mixture: {values}"
            assert values == [held], f"rank {rank} of {pair} holds {values}, and was given {held}"
            tell("moved", held)


# ---- the driver -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Rank:
    """A process that is started again whenever it ends: a member of the trainer, or a rank of a pair."""

    name: str
    place: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    worker: Worker
    lives: int = 1
    stopped: bool = False
    #: The newest step, or the number moved last.
    newest: int = 0


@dataclass
class Memory:
    """What a process has held, after each roll call in which it lived."""

    name: str
    seen: list[Footprint] = field(default_factory=list)

    def row(self) -> str:
        """At its start, in the middle and at the end."""
        cells = []
        for what in ("rss", "private", "fds", "sockets", "memfds", "threads"):
            counts = [one.all()[what] for one in self.seen]
            cells.append(f"{counts[0]} / {counts[len(counts) // 2]} / {counts[-1]}")
        return f"| {self.name} | {len(self.seen)} | {' | '.join(cells)} |"


class Everything(Attack):
    """``run`` attacks for so many seconds."""

    def __init__(self, site: Site, job: Job, net: Hosts, server: Server, *, replicas: int, seed: int) -> None:
        super().__init__(site, job, replicas=replicas, seed=seed)
        self._net, self._server = net, server
        self._ranks: list[Rank] = []
        self._cut = self._away = False
        self.memory: dict[str, Memory] = {}
        #: What faults have raised, by kind; and each of which ``etha events`` was not yet asked, with its time.
        self.errors: Counter[str] = Counter()
        self.lost: list[tuple[float, str, str]] = []
        self.unexplained: list[str] = []
        self.explained = 0
        self.moved: Counter[str] = Counter()

    # ---- who lives where

    def _start(self, place: str, function: Callable[..., Any], *args: Any) -> Worker:
        if function is attack.replica:
            place, function = self._chance.choice(TWO), follower
        host = 1 if place in ONE else 2
        namespace = self._net.one if host == 1 else self._net.two
        env = self._site.at(place) | {"ETHA_LISTEN": f"10.211.1.{host}:0"}
        return self._job.start(on_host, namespace, function, *args, at=("", 0), env=env)

    def _launch_trainer(self) -> None:
        for place, name in MEMBERS:
            self._begin(name, place, member, name)
        for pair in PAIRS:
            for rank in range(WORLD):
                for side, places in (("source", ONE), ("target", TWO)):
                    self._begin(f"{pair} {side} {rank}", places[rank], mover, pair, side, rank)

    def _begin(self, name: str, place: str, function: Callable[..., Any], *args: Any) -> None:
        self._ranks.append(Rank(name, place, function, args, self._start(place, function, *args)))

    @property
    def _members(self) -> list[Rank]:
        return [one for one in self._ranks if one.function is member]

    # ---- roll calls

    def _put(self) -> int:
        """The trainer puts by itself. A roll call is for a version that is newer than whatever is there when it begins,
        and is over when all pairs have moved, too."""
        self._moved_before = {one.name: one.newest for one in self._ranks}
        self._version = max([self._version, *(one.newest for one in self._members)]) + 1
        return self._version

    def _behind(self, version: int) -> list[str]:
        late = [one.name for one in self._ranks if one.newest <= self._moved_before[one.name]]
        return super()._behind(version) + [name for name in late if "source" not in name]

    def _note_footprints(self) -> None:
        super()._note_footprints()
        found = {f"agent {name}": one for name, one in self.footprints[-1].items()}
        for one in self._ranks:
            found[f"{one.name}/{one.worker.pid}"] = Footprint.of(one.worker.pid)
        for side in self._replicas:
            for rank, worker in enumerate(side.workers):
                found[f"{side.name} rank {rank}/{worker.pid}"] = Footprint.of(worker.pid)
        pid = self._server.pid
        found[f"Redis/{pid}"] = Footprint.of(pid)
        self.footprints[-1] = found
        for name, footprint in found.items():
            self.memory.setdefault(name, Memory(name)).seen.append(footprint)

    def _places(self) -> tuple[str, ...]:
        return (*ONE, *TWO)

    def _unattended(self) -> tuple[str, ...]:
        return self._places()

    # ---- acts

    def _acts(self) -> dict[Callable[[], str], int]:
        return {
            self._kill_rank: 3,
            self._stop_rank: 3,
            self._leave: 2,
            self._kill_other: 3,
            self._stop_other: 3,
            self._kill_agent: 1,
            self._stop_agent: 1,
            self._cut_link: 1,
            self._end_redis: 1,
            self._rest: 8,
        }

    def _rest(self) -> str:
        return ""

    def _other(self) -> Rank | None:
        """A member or a rank of a pair. A member only while the others are as far: who is cut off, or new,
        does not know the newest weights."""
        one = self._chance.choice(self._ranks)
        if one.function is member:
            newest = max(other.newest for other in self._members)
            train = [other for other in self._members if other is not one and not other.stopped]
            if not newest or any(other.newest < newest for other in train) or len(train) < len(MEMBERS) - 1:
                return None
        return one

    def _kill_other(self) -> str:
        one = self._other()
        if one is None:
            return ""
        self._thaw(one)
        if one.function is member:
            one.newest = 0  # until it trains again
        one.worker.kill()
        return "member killed" if one.function is member else "rank of a pair killed"

    def _stop_other(self) -> str:
        one = self._other()
        if one is None or one.stopped:
            return ""
        one.worker.kill(signal.SIGSTOP)
        one.stopped = True
        self._after(self._chance.uniform(0.2, 8.0), lambda: self._thaw(one))
        return "member stopped" if one.function is member else "rank of a pair stopped"

    def _thaw(self, one: Rank) -> None:
        if one.stopped:
            one.worker.kill(signal.SIGCONT)
            one.stopped = False

    def _cut_link(self) -> str:
        if self._cut:
            return ""
        self._net.cut()
        self._cut = True
        self._after(self._chance.uniform(0.2, 20.0), self._mend_link)
        return "link cut"

    def _mend_link(self) -> None:
        self._net.mend()
        self._cut = False

    def _end_redis(self) -> str:
        if self._away:
            return ""
        self._server.stop()
        self._away = True
        self._after(self._chance.uniform(0.1, 8.0), self._start_redis)
        return "Redis killed"

    def _start_redis(self) -> None:
        if self._away:
            self._server.start()
            self._away = False

    # ---- what happens

    def _links(self) -> list[Any]:
        return super()._links() + [one.worker._link for one in self._ranks]

    def _hear_all(self) -> None:
        super()._hear_all()
        for one in self._ranks:
            self._listen(one)

    def _listen(self, one: Rank) -> None:
        worker = one.worker
        while worker.has_told("lost"):
            self._note_lost(one.name, worker.expect("lost"))
        while worker.has_told("step"):
            _, step, _, published = worker.expect("step")
            assert step > one.newest or one.newest == 0, f"{one.name}: step {step} after {one.newest}"
            one.newest = step
            self.updates["put"] += published
        while worker.has_told("moved"):
            number = worker.expect("moved")
            assert number > one.newest, f"{one.name}: {number} after {one.newest}"
            one.newest = number
            self.moved[one.name] += 1
        if worker._end is None:
            return
        self._thaw(one)
        try:
            self._note_lost(one.name, worker.result(BOUND))
        except AssertionError as error:
            assert str(error).endswith("died"), f"{one.name}: {error}"
        worker.end()
        self._job.workers.remove(worker)
        one.worker = self._start(one.place, one.function, *one.args)
        one.lives += 1
        self.done["member launched again" if one.function is member else "rank of a pair launched again"] += 1

    def _note_lost(self, who: str, text: str) -> None:
        self.errors[text.partition(":")[0]] += 1
        self.lost.append((time.time(), who, text))

    def _succeed(self, side: Side) -> None:
        for worker in side.workers:
            if worker._end is not None and worker._end[0] == "done" and worker._end[1] != "left":
                self._note_lost(side.name, str(worker._end[1]))
        super()._succeed(side)

    def roll_call(self) -> float:
        """Also ask ``etha events`` at once about the errors since the last one, because it keeps only the newest."""
        seconds = super().roll_call()
        self._explain()
        return seconds

    def happenings(self, since: float) -> Sequence[Happening]:
        """What ``etha events`` tells of all that was done since then."""
        self._start_redis()
        with environment(self._site.at(ONE[0])):
            gathered = asyncio.run(
                gather(Settings.from_env(), since=since, failed=False, timeout=BOUND),
            )
        return gathered.happenings

    def _explain(self) -> None:
        """Note errors of pairs for which ``etha events`` has nothing that went wrong with that pair at the time. One
        that is younger than ``BOUND`` is asked about again at the next roll call."""
        lost = [one for one in self.lost if one[1].split()[0] in PAIRS]
        self.lost = []
        if not lost:
            return
        happenings, now = self.happenings(min(at for at, _, _ in lost) - BOUND), time.time()
        for at, who, text in lost:
            pair = who.split()[0]
            if any(one.fits(pair, failed=True) and at - BOUND < one.at < at + BOUND for one in happenings):
                self.explained += 1
            elif now < at + BOUND:
                self.lost.append((at, who, text))
            else:
                self.unexplained.append(f"{who}: {text}")

    def end(self) -> None:
        """All leave in order. A rank may hear that another one of its side has left before it is told itself."""
        leaving = [worker for side in self._replicas for worker in side.workers]
        for worker in leaving:
            worker.kill(signal.SIGTERM)
        for worker in leaving:
            ended = worker.result(BOUND)
            assert ended == "left" or (ended.startswith("PeerLostError") and "has left" in ended), ended
        for one in self._ranks:
            one.worker.kill(signal.SIGTERM)
        for one in self._ranks:
            ended = one.worker.result(2 * BOUND)
            assert ended == "left" or one.function is member, ended
        self._explain()
        self.unexplained += [f"{who}: {text}" for _, who, text in self.lost]

    def report(self) -> str:
        """What was done, what it has raised, and what each process held."""
        errors = ", ".join(f"{count} x {kind}" for kind, count in sorted(self.errors.items()))
        long = sorted((one for one in self.memory.values() if len(one.seen) > 2), key=lambda one: -len(one.seen))
        return "\n".join(
            [
                super().report(),
                f"errors that workers had: {errors or 'none'}; `etha events` explains {self.explained} of pairs, and "
                f"{len(self.unexplained)} not",
                f"transfers of pairs: {dict(sorted(self.moved.items()))}",
                "",
                "Held at the first roll call of a process, in the middle, and at the last; rss and private in KiB:",
                "",
                "| process | roll calls | rss | private | fds | sockets | memfds | threads |",
                "|---|--:|--:|--:|--:|--:|--:|--:|",
                *(one.row() for one in long),
            ]
        )
