"""Who plays in the cells of one way: Redis, the agents, two workers a side. Survivors play on in the next cell."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterable
from contextlib import ExitStack

from tests.flow.jobs import Job, Worker, wait_gone
from tests.flow.puppets import Puppet, perform
from tests.flow.sites import Site, private_directory, started_in, stop_all
from tests.flow.ways import Way
from tests.unit.store.server import Server, served

from . import acts
from .agents import ask, run_agent

Member = tuple[str, int]
MEMBERS: tuple[Member, ...] = tuple((side, rank) for side in ("trainer", "inference") for rank in (0, 1))
_numbers = itertools.count(1)


class Cast:
    """Everything of one way, private; ``close`` ends all of it."""

    def __init__(self, way: Way) -> None:
        self.way, self.stack = way, ExitStack()
        directory = self.stack.enter_context(private_directory())
        self.server: Server | None = None
        if way is not Way.LOCAL:
            self.server = self.stack.enter_context(served(directory))
        self.site = Site(way, directory, self.server.url if self.server else None)
        self.stack.callback(stop_all, str(directory))
        self.job = self.stack.enter_context(Job(self.site.env))
        self.stack.callback(self._dismiss)
        self.agents: dict[str, Worker] = {}
        self.puppets: dict[Member, Puppet] = {}
        self.name = ""

    def close(self) -> None:
        """End everybody."""
        self.stack.close()

    def _dismiss(self) -> None:
        """Agents take back what they have written, so workers end first, then they, then Redis."""
        for puppet in self.puppets.values():
            puppet.worker.end()
            self.job.workers.remove(puppet.worker)
        for agent in self.agents.values():
            agent.kill(signal.SIGCONT)
            agent.kill(signal.SIGTERM)
            agent.result()

    # ---- who is where -------------------------------------------------------------------------

    def place(self, member: Member) -> str:
        return self.way.place(*member)

    def at(self, place: str) -> list[Member]:
        """The workers of an agent."""
        return [member for member in MEMBERS if self.place(member) == place]

    @property
    def coordinator(self) -> Worker:
        """The agent that decides: that of source rank 0."""
        return self.agents[self.place(MEMBERS[0])]

    # ---- a cell begins ------------------------------------------------------------------------

    def prepare(self) -> None:
        """Everybody is there, and of a pair that nobody has met in; agents that have stayed are heard through."""
        self.name = f"cell{next(_numbers)}"
        for place in sorted({self.place(member) for member in MEMBERS}):
            if place in self.agents:
                ask(self.agents[place], "ping")
        self.fill()
        self.all(acts.begin, self.name)

    def fill(self, *, agents: bool = True) -> list[Member]:
        """Start whoever is missing, agents first where they are wanted; the workers that are new."""
        for place in sorted({self.place(member) for member in MEMBERS} - self.agents.keys()) if agents else ():
            self.agents[place] = self.job.start(run_agent, at=self.at(place)[0])
            self.agents[place].expect("ready")
        new = [member for member in MEMBERS if member not in self.puppets]
        for side, rank in new:
            seat = {"side": side, "rank": rank, "world": 2, "pair": self.name}
            seat["remote"] = {"trainer": "inference", "inference": "trainer"}[side]
            self.puppets[side, rank] = Puppet(self.job.start(perform, seat, at=(side, rank)))
        return new

    def all(self, act: acts.Act, *args: object, members: Iterable[Member] = MEMBERS) -> None:
        """The same step in several workers at once; it succeeds."""
        members = list(members)
        for member in members:
            self.puppets[member].begin(act, *args)
        for member in members:
            self.puppets[member].ends()

    def heard(self, kind: str, name: str, members: Iterable[Member]) -> None:
        """The agents of these workers have taken in one request of each."""
        for member in members:
            self.agents[self.place(member)].expect(f"{kind} {name}")

    # ---- the victim ---------------------------------------------------------------------------

    def redis_pid(self) -> int:
        """The server's, whoever has started it."""
        if self.server is not None:
            assert self.server._process is not None
            return self.server._process.pid
        [pid] = [
            pid
            for pid, command in started_in(str(self.site.directory)).items()
            if "-server" in command and "supervisor" not in command
        ]
        return pid

    def bury(self, worker: Worker) -> None:
        """A worker or agent that was told to end has ended."""
        worker._process.join(40)
        assert worker._process.exitcode is not None, f"{worker.name} has not ended"
        self.job.workers.remove(worker)
        worker.end()

    def revive_redis(self, pid: int) -> None:
        """Redis is back, empty; the embedded one is brought back by whoever needs it."""
        wait_gone(pid)
        if self.server is not None:
            self.server.restart()
