"""Starts N simulated agents with their workers, runs the phases, and returns what each agent has used.

Half of the agents serve the source, half the target, each on a host of its own. All workers call at the same moment. A
phase lasts until the last worker has its answer. What agents do in the half second after it counts to it, too, because
they answer workers before they have told Redis.

The garbage collector is off, because it would be charged to whoever runs by chance.
"""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import gc
import io
import ipaddress
import logging
import pstats
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed.tensor import Shard

from etha.agent.greeting import Greeting
from etha.agent.server import Agent
from etha.config import Settings
from etha.observe.ring import RingWriter
from etha.plan import Layout
from etha.store.registry import Store
from simulation.accounts import Account
from simulation.caches import own_caches
from simulation.data_plane import SimulatedLane, SimulatedPlane
from simulation.network import Costs, Network, SimulatedHub
from simulation.redis_server import SimulatedRedis
from simulation.virtual_time import Actor, VirtualLoop
from simulation.workers import SimulatedWorker

SIDES = ("source", "target")
#: The redistributions, by how many ranks of the other side a rank exchanges data with.
PATTERNS = ("one", "eight", "all")
PHASES = ("init_pair", "register_tensors", "first transfer", "transfer")
#: Simulated seconds of a phase after its last answer.
_REST = 0.5
#: What agents take for the URL of Redis. All connections are simulated.
_URL = "redis://redis.simulated:6379"
#: Seconds of the leases of agents. They would end by the real clock of Redis.
_LEASE = 1e6
_FIRST_HOST = ipaddress.IPv4Address("10.0.0.1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """``agents`` of both sides together, with ``ranks`` each. ``latency`` in seconds, one way. ``bandwidth`` of Redis's
    network in bytes per second. ``profile``: the number of an agent whose callbacks are profiled."""

    agents: int
    ranks: int
    pattern: str
    tensors: int
    latency: float
    bandwidth: float
    costs: Costs
    beats: bool
    timeout: float
    profile: int | None = None

    @property
    def world_size(self) -> int:
        """Ranks of one side."""
        return self.agents // 2 * self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """``seconds``: simulated, until the last answer. ``used``: what each agent has used. ``server``: seconds of Redis's
    processor.

    Of all agents: ``messages`` by kind, as (how many, bytes); ``requests`` to Redis by kind, those first that took it
    longest, as (how many, seconds, bytes of answers); and what they have warned of, and how often.
    """

    name: str
    seconds: float
    used: list[Account]
    server: float
    messages: dict[str, tuple[int, int]]
    requests: dict[str, tuple[int, float, int]]
    warnings: dict[str, int]
    profile: str


def layouts(pattern: str, world_size: int) -> tuple[Layout, Layout]:
    """The layouts of source and target. ValueError if there are too few ranks."""
    rows = Layout((world_size,), [Shard(0)])
    match pattern:
        case "one":
            return rows, rows
        case "all":
            return rows, Layout((world_size,), [Shard(1)])
        case "eight" if world_size % 8 == 0:
            return rows, Layout((world_size // 8, 8), [Shard(0), Shard(1)])
    raise ValueError(f"pattern {pattern!r} with {world_size} ranks a side: 'eight' needs a multiple of 8")


def measure(redis_url: str, directory: Path, options: Options) -> list[Phase]:
    """Run all phases. Raises what a worker's call raises."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    server = SimulatedRedis(loop, redis_url, latency=options.latency, bandwidth=options.bandwidth)
    network = Network(loop, latency=options.latency, costs=options.costs, beats=options.beats)
    with _simulated(network), own_caches(loop):
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            return loop.run_until_complete(_Fleet(loop, server, network, directory, options).run())
        finally:
            gc.enable()
            server.close()


@contextlib.contextmanager
def _simulated(network: Network) -> Iterator[None]:
    """Have agents use simulated parts, and leases that outlast the run."""

    def hub(listen: str, keys: Any, **options: Any) -> SimulatedHub:
        return SimulatedHub(network, listen, keys, **options)

    with contextlib.ExitStack() as stack:
        for where, what in (
            ("etha.agent.runtime.peers.Hub", hub),
            ("etha.agent.runtime.peers.DataPlane", SimulatedPlane),
            ("etha.agent.server.RingWriter", _NoRing),
            ("etha.store.connect.AGENT_LEASE", _LEASE),
            ("etha.store.session.AGENT_LEASE", _LEASE),
            ("etha.store.lease.AGENT_LEASE", _LEASE),
        ):
            stack.enter_context(mock.patch(where, what))
        yield


class _Warnings(logging.Handler):
    """Counts what agents warn of, by the text without its arguments, because a thousand agents may say the same.

    ``seen``: the first warning of each kind, and how many there were.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._first: dict[str, str] = {}
        self.seen: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Count it; and show where an error came from."""
        if record.msg not in self._first:
            self._first[record.msg] = record.getMessage()[:300]
            if record.exc_info:
                traceback.print_exception(record.exc_info[1])
        self.seen[self._first[record.msg]] += 1


class _NoRing(RingWriter):
    """Writes no files, for which each agent would have a thread."""

    def take(self, records: Sequence[Any]) -> None:
        """Forget them."""


class _Fleet:
    """All agents and workers of one run."""

    def __init__(
        self, loop: VirtualLoop, server: SimulatedRedis, network: Network, directory: Path, options: Options
    ) -> None:
        self._loop, self._server, self._network, self._options = loop, server, network, options
        self._directory = directory
        self._warnings = _Warnings()
        for name in ("etha", "simulation"):
            logging.getLogger(name).addHandler(self._warnings)
        self._actors = [Actor(f"agent {i}", measured=True) for i in range(options.agents)]
        self._agents: dict[int, Agent] = {}
        self._lives: list[asyncio.Task[None]] = []
        self._workers: list[SimulatedWorker] = []

    async def run(self) -> list[Phase]:
        """Start all, and run the phases."""
        await self._start()
        return [await self._phase(name) for name in PHASES]

    async def _phase(self, name: str) -> Phase:
        network, server = self._network, self._server
        for actor in (*self._actors, server.actor):
            actor.account = Account()
        network.clear_counters()
        server.clear_counters()
        profiler = self._profile()
        begun = self._loop.time()
        await self._all(
            [self._loop.create_task(self._call(name, one), context=one.actor.context) for one in self._workers]
        )
        seconds = self._loop.time() - begun
        await asyncio.sleep(_REST)
        for worker in self._workers:
            assert not worker.pushed, (worker.actor, worker.pushed)
        slowest = sorted(server.seconds, key=server.seconds.__getitem__, reverse=True)
        found = Phase(
            name=name,
            seconds=seconds,
            used=[actor.account for actor in self._actors],
            server=server.actor.account.assumed,
            messages={kind: (n, network.bytes[kind]) for kind, n in network.messages.most_common()},
            requests={kind: (server.requests[kind], server.seconds[kind], server.answered[kind]) for kind in slowest},
            warnings=dict(self._warnings.seen),
            profile=_table(profiler),
        )
        self._warnings.seen.clear()
        gc.collect()  # between two phases it is charged to nobody
        return found

    async def _call(self, name: str, worker: SimulatedWorker) -> None:
        match name:
            case "init_pair":
                await worker.init_pair(SIDES[1 - SIDES.index(worker.side)], self._options.world_size)
            case "register_tensors":
                await worker.register(self._options.tensors)
            case _:
                await worker.transfer()

    async def _start(self) -> None:
        options = self._options
        started = []
        for i, actor in enumerate(self._actors):
            up = self._loop.create_future()
            started.append(up)
            life = self._live(i, up)
            self._lives.append(self._loop.create_task(life, context=actor.context))
        await self._all(started)
        shape = (8 * options.world_size, 8 * options.world_size)
        sides = dict(zip(SIDES, layouts(options.pattern, options.world_size), strict=True))
        for i, actor in enumerate(self._actors):
            side = SIDES[i >= options.agents // 2]
            first = i % (options.agents // 2) * options.ranks
            for rank in range(first, first + options.ranks):
                worker = SimulatedWorker(self._loop, self._agents[i], actor, side, rank, sides[side], shape)
                self._loop.call_soon(worker.connect, context=actor.context)
                self._workers.append(worker)
        await asyncio.sleep(_REST)

    async def _live(self, number: int, up: asyncio.Future[None]) -> None:
        """One agent, from its start on, as ``etha.agent.__main__`` starts it."""
        base = Settings.from_env()
        settings = replace(
            base,
            host_id=f"host-{number}",
            listen=f"{_FIRST_HOST + number}:7000",
            runtime_dir=self._directory / f"agent-{number}",
            redis_url=_URL,
        )
        store = await Store.open(_URL, settings.namespace, timeout=60.0)
        greeting = Greeting(settings, "cpu", redis=_URL, store=store.url, temporary=False, log_file="-")
        lane: Any = SimulatedLane()
        agent = Agent(settings=settings, device="cpu", greeting=greeting, store=store, lane=lane, idle=None)
        async with agent.links, asyncio.TaskGroup() as group:
            running = group.create_task(agent.run(group))
            await agent.started.wait()
            self._agents[number] = agent
            up.set_result(None)
            await running

    async def _all(self, calls: Sequence[asyncio.Future[Any]]) -> None:
        """Wait for all, and raise the first error, also that of an agent."""
        whole = asyncio.gather(*calls)
        async with asyncio.timeout(self._options.timeout):
            await asyncio.wait({whole, *self._lives}, return_when=asyncio.FIRST_COMPLETED)
        for life in self._lives:
            if life.done():
                life.result()
        await whole

    def _profile(self) -> cProfile.Profile | None:
        if self._options.profile is None:
            return None
        self._loop.profiled = self._actors[self._options.profile]
        self._loop.profiler = cProfile.Profile(time.thread_time)
        return self._loop.profiler


#: Lines of a profile's tables.
_MOST = 30


def _table(profiler: cProfile.Profile | None) -> str:
    """The functions that took most, by their own time and with what they call."""
    if profiler is None:
        return ""
    out = io.StringIO()
    stats = pstats.Stats(profiler, stream=out)
    stats.sort_stats("tottime").print_stats(_MOST)
    stats.sort_stats("cumulative").print_stats(_MOST)
    return out.getvalue()
