"""A fleet under attack: ranks and agents are killed and stopped at random, replicas leave and join, versions go on.

    with open_site(Way.TCP) as site, Job(site.env) as job:
        attack = Attack(site, job, replicas=4, seed=1)
        attack.run(seconds=40)
        print(attack.report())

Every element of a version is its number, so each rank sees a mixture at once: after every update, and an atomic one
also while the next version comes in. A roll call puts a version and waits until every replica holds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import multiprocessing.connection
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import redis
import torch
from torch.distributed.tensor import Replicate, Shard

import etha
from etha.store.keys import REGISTRATION_LEASE
from tests.flow.endurance.footprint import Footprint
from tests.flow.jobs import Job, Worker, tell, wait_for
from tests.flow.sites import Site, started_in
from tests.processes import send_signal

NAME = "policy"
#: Two agents on each of two hosts for the replicas, and two for the trainer.
TRAINER_PLACES, PLACES = ("a", "a2"), ("b", "b2", "c", "c2")
SHAPES: dict[str, tuple[int, ...]] = {"w": (1 << 16,), "odd": (37, 5), "b": (3,)}
RANKS = 2
#: Seconds within which every replica holds a version that was put in a roll call, and within which whoever was left by
#: a death has its error: a lost agent's lease (10 s), a source that does not come (20 s), and a busy machine.
BOUND = 60.0
#: Seconds for which a rank waits for the others of its launch, one of which may have died before it came.
MEETING = 30.0


#: By how much more than a quarter a count of an agent may differ. ``private`` is in KiB.
_SLACK = {"private": 16384, "fds": 20, "sockets": 40, "memfds": 20, "mapped": 20, "threads": 16}


# ---- the processes ------------------------------------------------------------------------------


def _layout(rank: int, world: int, dims: dict[str, int | None]) -> dict[str, Any]:
    return {
        "expected_world_size": world,
        "rank": rank,
        "device_mesh": (world,),
        "placements": {name: [Replicate() if dims[name] is None else Shard(dims[name])] for name in SHAPES},
        "shapes": dict(SHAPES),
        "timeout": MEETING,
    }


def _parts(rank: int, world: int, dims: dict[str, int | None], make: Callable[..., torch.Tensor]) -> dict[str, Any]:
    found = {}
    for name, shape in SHAPES.items():
        dim = dims[name]
        chunks = torch.empty(shape, device="meta").chunk(world, dim) if dim is not None else ()
        size = list(shape)
        if dim is not None:
            size[dim] = chunks[rank].shape[dim] if rank < len(chunks) else 0
        found[name] = make(tuple(size), dtype=torch.float32)
    return found


def trainer(rank: int, world: int, slots: int) -> None:
    """Puts each version that the driver gives; ends when it is given none, or when its launch is over."""
    dims = {"w": 0, "odd": 1, "b": None}
    with etha.TensorBusClient(timeout=BOUND) as client:
        tensors = _parts(rank, world, dims, torch.zeros)
        publication = client.publish(NAME, tensors, slots=slots, **_layout(rank, world, dims))
        tell("published", publication.seq)
        while (version := wait_for("put")) is not None:
            for tensor in tensors.values():
                tensor.fill_(version)
            put = publication.put(version)
            for tensor in tensors.values():
                tensor.fill_(-1)
            tell("put", put.seq)
        publication.close()


def replica(subscriber: str, rank: int, atomic: bool, dims: dict[str, int | None]) -> str:
    """Follows until SIGTERM, and tells each version that it holds. Returns why it has ended."""
    try:
        return asyncio.run(_follow(subscriber, rank, atomic, dims))
    except (etha.PeerLostError, etha.AgentLostError, etha.RendezvousTimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    except etha.ConfigError as error:
        # The agent of the launch before is stopped, and has not seen its end yet. Whoever starts replicas tries again.
        if "which is alive" not in str(error):
            raise
        return f"{type(error).__name__}: {error}"


async def _follow(subscriber: str, rank: int, atomic: bool, dims: dict[str, int | None]) -> str:
    leaving = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leaving.set)
    async with etha.AsyncTensorBusClient(timeout=BOUND) as client:
        tensors = _parts(rank, RANKS, dims, torch.zeros if atomic else etha.empty)
        for tensor in tensors.values():
            tensor.fill_(0)
        held = 0

        def check() -> None:
            values = {value for tensor in tensors.values() for value in tensor.unique().tolist()}
            assert values == {held}, f"{subscriber} rank {rank} should hold version {held} and holds {values}"

        def unchanged(done: int, total: int) -> None:
            check()

        more: dict[str, Any] = {"on_commit": check, "progress": unchanged} if atomic else {}
        async with await client.subscribe(
            NAME, tensors, subscriber=subscriber, atomic=atomic, **_layout(rank, RANKS, dims)
        ) as subscription:
            tell("subscribed")
            stop = asyncio.ensure_future(leaving.wait())
            while not leaving.is_set():
                following = asyncio.ensure_future(subscription.next(timeout=10 * BOUND, **more))
                await asyncio.wait({following, stop}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    following.cancel()
                    await asyncio.wait({following})
                if following.cancelled():
                    break
                update = following.result()
                assert isinstance(update.version, int)
                held = update.version
                check()
                tell("held", (update.seq, update.version, update.source))
    return "left"


# ---- the driver -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Side:
    """One launch of a side. ``held``: the newest version of each rank. ``stopped``: ranks that are stopped now.
    ``ending``: when a rank of it has ended first."""

    name: str
    workers: list[Worker]
    held: list[int] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)
    ending: float | None = None


class Attack:
    """``run`` attacks for so many seconds; roll calls come before, in between and after."""

    def __init__(self, site: Site, job: Job, *, replicas: int, seed: int) -> None:
        self._site, self._job, self._count = site, job, replicas
        self._chance = random.Random(seed)
        self._names = 0
        self._version = 0
        self._replicas: list[Side] = []
        self._trainer = Side("trainer", [])
        #: (when, number, what to do then).
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        #: What roll calls took, and from the first to the last end of a replica's ranks.
        self.seconds: list[float] = []
        self.seconds_to_end: list[float] = []
        #: After each roll call: what each agent holds, by place and pid, and the number of keys in Redis that stay
        #: longer than an hour. Those of an agent that was killed stay for a week.
        self.footprints: list[dict[str, Footprint]] = []
        self.keys: list[Counter[str]] = []
        self.done: Counter[str] = Counter()
        self.updates: Counter[str] = Counter()

    def run(self, seconds: float, between: float = 15.0) -> None:
        """Attack, and then let all leave in order."""
        for _ in range(self._count):
            self._join()
        self._launch_trainer()
        self.roll_call()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            calm = min(until, time.monotonic() + between)
            while (now := time.monotonic()) < calm:
                self._attack()
                self._watch(now + self._chance.uniform(0.05, 1.0))
            self._calm()
            self.roll_call()

    def end(self) -> None:
        """All leave in order."""
        for side in self._replicas:
            for worker in side.workers:
                worker.kill(signal.SIGTERM)
        for worker in self._trainer.workers:
            worker.go("put", None)
        for side in [*self._replicas, self._trainer]:
            for worker in side.workers:
                ended = worker.result(BOUND)
                assert ended in (None, "left"), ended

    def roll_call(self) -> float:
        """Put a version; every replica holds it within ``BOUND``. Returns the seconds that the last one took."""
        began = time.monotonic()
        version = self._put()
        while behind := self._behind(version):
            left = began + BOUND - time.monotonic()
            assert left > 0, f"{behind} do not hold version {version} after {BOUND} s; so far {self.report()}"
            self._watch(time.monotonic() + left, once=True)
        self.seconds.append(time.monotonic() - began)
        self._note_footprints()
        with redis.Redis.from_url(str(self._site.redis)) as server:
            kept = [key for key in server.scan_iter() if not 0 < int(server.ttl(key)) <= REGISTRATION_LEASE]  # type: ignore[arg-type]
            self.keys.append(Counter(map(_kind, kept)))
        return self.seconds[-1]

    def _behind(self, version: int) -> list[str]:
        return [side.name for side in self._replicas if side.ending or min(side.held) < version]

    def _note_footprints(self) -> None:
        found = {f"{place}/{pid}": Footprint.of(pid) for place in self._places() for pid in self._agents(place)}
        self.footprints.append(found)

    def _places(self) -> tuple[str, ...]:
        return (*TRAINER_PLACES, *PLACES)

    def _unattended(self) -> tuple[str, ...]:
        """Places for whose agents the driver itself never waits."""
        return PLACES

    def grown(self) -> list[str]:
        """What has grown. Of agents that have lived through ten roll calls the first half of these is compared with the
        second, because what an agent holds depends on which replicas it has at the moment."""
        found = []
        for name in sorted({name for one in self.footprints for name in one}):
            seen = [one[name].all() for one in self.footprints if name in one]
            for what, slack in _SLACK.items():
                found += _grown(f"{what} of {name}", [one[what] for one in seen], slack)
        return found

    def report(self) -> str:
        """What was done, and how long roll calls took."""
        acts = ", ".join(f"{count} x {what}" for what, count in sorted(self.done.items()))
        sources = ", ".join(f"{count} from {source}" for source, count in sorted(self.updates.items()))
        worst = max(self.seconds, default=0.0)
        middle = sorted(self.seconds)[len(self.seconds) // 2] if self.seconds else 0.0
        return (
            f"{self._version} versions; {acts or 'nothing done'}; updates: {sources}; "
            f"{len(self.seconds)} roll calls, median {middle:.2f} s, worst {worst:.2f} s of {BOUND:g} s; a replica's "
            f"ranks ended within {max(self.seconds_to_end, default=0.0):.1f} s of each other; keys in Redis: "
            f"{_shown(self.keys)}"
        )

    # ---- sides --------------------------------------------------------------------------------

    def _start(self, place: str, function: Callable[..., Any], *args: Any) -> Worker:
        return self._job.start(function, *args, at=("", 0), env=self._site.at(place))

    def _join(self, name: str = "") -> None:
        """A replica starts, with a layout and places of its own."""
        if not name:
            self._names += 1
            name = f"replica-{self._names}"
        atomic = self._chance.random() < 0.5
        dims = {key: self._chance.choice((None, *range(len(shape)))) for key, shape in SHAPES.items()}
        workers = [self._start(self._chance.choice(PLACES), replica, name, rank, atomic, dims) for rank in range(RANKS)]
        self._replicas.append(Side(name, workers, [0] * RANKS))

    def _launch_trainer(self) -> None:
        world = self._chance.choice((1, 2))
        slots = self._chance.choice((1, 2, 3))
        workers = [self._start(TRAINER_PLACES[rank], trainer, rank, world, slots) for rank in range(world)]
        self._trainer = Side("trainer", workers)
        for worker in workers:
            worker.expect("published", BOUND)

    def _put(self) -> int:
        """The next version. A trainer that has died is launched again."""
        self._version += 1
        while True:
            try:
                for worker in self._trainer.workers:
                    worker.go("put", self._version)
                for worker in self._trainer.workers:
                    worker.expect("put", BOUND)
                return self._version
            except (AssertionError, OSError):  # killed, or its agent was
                self._end(self._trainer)
                self.done["trainer launched again"] += 1
                self._launch_trainer()

    def _end(self, side: Side) -> None:
        for worker in side.workers:
            worker.end()
            self._job.workers.remove(worker)

    # ---- acts -----------------------------------------------------------------------------------

    def _attack(self) -> None:
        acts = self._acts()
        (act,) = self._chance.choices(list(acts), list(acts.values()))
        if what := act():
            self.done[what] += 1

    def _acts(self) -> dict[Callable[[], str], int]:
        """What may be done, and how often each is compared with the others."""
        return {
            self._new_version: 8,
            self._kill_rank: 3,
            self._stop_rank: 4,
            self._leave: 2,
            self._kill_trainer: 1,
            self._stop_trainer: 1,
            self._kill_agent: 1,
            self._stop_agent: 1,
        }

    def _new_version(self) -> str:
        if self._trainer.stopped:
            return ""
        self._put()
        return "put"

    def _some(self) -> tuple[Side, int]:
        return self._chance.choice(self._replicas), self._chance.randrange(RANKS)

    def _kill_rank(self) -> str:
        side, rank = self._some()
        self._resume(side)
        side.workers[rank].kill()
        return "rank killed"

    def _stop(self, side: Side, rank: int) -> None:
        side.workers[rank].kill(signal.SIGSTOP)
        side.stopped.add(rank)
        self._after(self._chance.uniform(0.2, 4.0), lambda: self._resume(side))

    def _resume(self, side: Side) -> None:
        for rank in side.stopped:
            side.workers[rank].kill(signal.SIGCONT)
        side.stopped.clear()

    def _stop_rank(self) -> str:
        side, rank = self._some()
        if side.stopped:
            return ""
        self._stop(side, rank)
        return "rank stopped"

    def _leave(self) -> str:
        """A replica leaves in order, in whatever call it is; another one joins for it."""
        side, _ = self._some()
        self._resume(side)
        for worker in side.workers:
            worker.kill(signal.SIGTERM)
        return "replica asked to leave"

    def _kill_trainer(self) -> str:
        self._resume(self._trainer)
        self._chance.choice(self._trainer.workers).kill()
        return "trainer killed"

    def _stop_trainer(self) -> str:
        if self._trainer.stopped:
            return ""
        self._stop(self._trainer, self._chance.randrange(len(self._trainer.workers)))
        return "trainer stopped"

    def _agents(self, place: str) -> list[int]:
        found = started_in(str(self._site.directory / place))
        return [pid for pid, command in found.items() if "etha.agent" in command]

    def _kill_agent(self) -> str:
        for pid in self._agents(self._chance.choice(self._places())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return "agent killed"

    def _stop_agent(self) -> str:
        for pid in self._agents(self._chance.choice(self._unattended())):
            with contextlib.suppress(ProcessLookupError):
                send_signal(pid, signal.SIGSTOP)
            self._after(self._chance.uniform(0.2, 3.0), lambda pid=pid: _continue(pid))  # type: ignore[misc]
        return "agent stopped"

    # ---- what happens ---------------------------------------------------------------------------

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, len(self._later), act))

    def _calm(self) -> None:
        """Whoever is stopped goes on."""
        while self._later:
            heapq.heappop(self._later)[2]()

    def _watch(self, until: float, *, once: bool = False) -> None:
        """Hear workers, launch again what has ended, and let those go on whose time has come, until then. ``once``:
        only until somebody has said something."""
        while (now := time.monotonic()) < until:
            while self._later and self._later[0][0] <= now:
                heapq.heappop(self._later)[2]()
            wake = min([until, now + 5.0, *(when for when, _, _ in self._later[:1])])
            heard = multiprocessing.connection.wait(self._links(), max(0.0, wake - now))
            self._hear_all()
            if heard and once:
                return

    def _links(self) -> list[Any]:
        return [worker._link for side in self._replicas for worker in side.workers if worker._end is None]

    def _hear_all(self) -> None:
        for side in list(self._replicas):
            self._hear(side)

    def _hear(self, side: Side) -> None:
        for rank, worker in enumerate(side.workers):
            while worker.has_told("held"):
                _, version, source = worker.expect("held")
                assert version > side.held[rank], f"{side.name} rank {rank}: {version} after {side.held[rank]}"
                side.held[rank] = version
                self.updates["trainer" if source == "trainer" else "replicas"] += 1
        running = [worker for worker in side.workers if worker._end is None]
        if len(running) == len(side.workers):
            return
        self._resume(side)
        side.ending = side.ending or time.monotonic()
        waited = time.monotonic() - side.ending
        assert waited < BOUND, f"{[one.name for one in running]} go on {waited:.0f} s after another rank has ended"
        if not running:
            self._succeed(side)

    def _succeed(self, side: Side) -> None:
        """All ranks of a replica have ended: it is launched again, or another one joins for it."""
        reasons: list[Any] = []
        for worker in side.workers:
            try:
                reasons.append(worker.result(BOUND))
            except AssertionError as error:
                assert str(error).endswith("died"), f"{side.name}: {error}"
                reasons.append(None)
        self.seconds_to_end.append(time.monotonic() - (side.ending or 0.0))
        self._end(side)
        self._replicas.remove(side)
        left = all(reason in (None, "left") for reason in reasons) and "left" in reasons
        self._join("" if left else side.name)


def _kind(key: bytes) -> str:
    """``agent``, ``publication``, ``publication:side`` and the like."""
    words = key.decode().partition("}:")[2].split(":")
    return ":".join(words[::2][:2]) if words[0] == "publication" else words[0]


def _shown(keys: list[Counter[str]]) -> str:
    """How many there were of each kind, at the first, the middle and the last roll call."""
    if not keys:
        return "not counted"
    seen = [keys[0], keys[len(keys) // 2], keys[-1]]
    kinds = sorted(set().union(*seen))
    return ", ".join(f"{kind} {' / '.join(str(one[kind]) for one in seen)}" for kind in kinds)


def _grown(what: str, counts: list[int], slack: int) -> list[str]:
    if len(counts) < 10:
        return []
    early, late = max(counts[: len(counts) // 2]), max(counts[len(counts) // 2 :])
    return [f"{what}: at most {early}, later {late}"] if late > early * 1.25 + slack else []


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
