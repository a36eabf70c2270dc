"""One cell: reach the moment, send the signal, take in how every call ends, relaunch, transfer.

reach    --> the calls of a cell are open        by what agents and workers tell, never by time
strike   --> the victim has its signal
frozen   --> calls end while it is frozen        those that the table does not call "after"
thaw     --> it goes on; the rest ends
relaunch --> whoever died comes again; one transfer is exact everywhere
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable

from tests.flow.jobs import Worker, wait_gone
from tests.flow.puppets import Failure
from tests.seconds import within

from . import acts
from .agents import ask
from .cast import MEMBERS, Cast, Member
from .table import Cell, Ending

_SIGNALS = {"KILL": signal.SIGKILL, "TERM": signal.SIGTERM, "STOP": signal.SIGSTOP}


class Play:
    """One cell, played by a cast."""

    def __init__(self, cast: Cast, cell: Cell) -> None:
        self.cast, self.cell = cast, cell
        self.batch = f"b.{cast.name}"
        self.open: set[Member] = set()
        self.struck = 0.0
        self.agent: Worker | None = None
        self.agent_place = ""
        #: Clients have started an agent by themselves.
        self.followed = False
        self.worker: Member | None = None
        match cell.victim.split():
            case ["source" | "target", "worker"]:
                self.worker = (cell.side, 1)
                self.pid = cast.puppets[self.worker].pid
            case [*_, "agent"]:
                self.agent_place = cast.place((cell.side, 0))
                self.agent = cast.agents[self.agent_place]
                self.pid = self.agent.pid
            case _:
                self.pid = cast.redis_pid()

    def ending(self, member: Member) -> Ending:
        """What the table says of the call of a worker."""
        own = member == self.worker or (self.agent is not None and self.cast.place(member) == self.agent_place)
        return self.cell.own if own else self.cell.same if member[0] == self.cell.side else self.cell.other

    def run(self) -> None:
        self.reach()
        self.strike()
        self.end()
        self.relaunch()

    # ---- the moment ---------------------------------------------------------------------------

    def reach(self) -> None:
        """All calls that the moment is made of are open."""
        cast, moment = self.cast, self.cell.moment
        side = [member for member in MEMBERS if member[0] == self.cell.side]
        if moment == "rendezvous":
            self.begin(side, acts.meet)
            cast.heard("InitPair", cast.name, side)
            return
        cast.all(acts.meet)
        cast.all(acts.register, self.batch, moment == "moving")
        if moment == "READY":
            self.begin(side, acts.move)
            cast.heard("Transfer", self.batch, side)
        elif moment == "moving":
            self.begin(MEMBERS, acts.move)
            cast.puppets["trainer", 0].worker.expect("moving")
        elif moment == "voted":
            ask(cast.coordinator, "hold")
            self.begin(MEMBERS, acts.move)
            cast.coordinator.expect("voted")

    def begin(self, members: Iterable[Member], act: acts.Act) -> None:
        """Calls that will end later."""
        for member in members:
            self.cast.puppets[member].begin(act)
            self.open.add(member)

    # ---- the signal, and how calls end --------------------------------------------------------

    def strike(self) -> None:
        """The victim gets its signal; votes are counted again where that is not the victim's own affair."""
        self.struck = time.monotonic()
        os.kill(self.pid, _SIGNALS[self.cell.signal])
        freed = self.agent is None if self.cell.signal == "STOP" else self.worker is None
        if self.cell.moment == "voted" and freed and not (self.agent and self.cell.signal == "KILL"):
            ask(self.cast.coordinator, "release")

    def end(self) -> None:
        """Every call ends as the table says."""
        frozen = self.cell.signal == "STOP"
        self.call([member for member in MEMBERS if not (frozen and member == self.worker)])
        self.take(after=False)
        if not frozen:
            return
        self.struck = time.monotonic()
        os.kill(self.pid, signal.SIGCONT)
        if self.agent is not None and self.cell.moment == "voted":
            ask(self.cast.coordinator, "release")
        if self.worker is not None:
            self.call([self.worker])
        self.take(after=True)

    def call(self, members: Iterable[Member]) -> None:
        """The next call of whoever is in none, once it has been told that the pair is lost, where it will be."""
        if self.cell.moment == "rendezvous":
            return
        for member in members:
            ending, puppet = self.ending(member), self.cast.puppets[member]
            if member in self.open or ending.what in ("none", "gone"):
                continue
            if ending.is_error and not ending.after:
                reason, at = puppet.do(acts.lost)
                assert reason in ending.reasons, f"{member}: pair.lost says {reason}"
                self.in_time(member, at)
            self.begin([member], acts.move)

    def take(self, *, after: bool) -> None:
        """The ends of the calls that end before, or after a frozen victim goes on."""
        for member in sorted(self.open):
            ending = self.ending(member)
            if ending.after is not after or ending.what in ("waits", "none"):
                continue
            self.open.discard(member)
            if ending.what == "gone":
                continue
            ended = self.cast.puppets[member].worker.expect("step", acts.PATIENCE)
            if ending.what == "result":
                assert not isinstance(ended, Failure), f"{member}: {ended}"
                at, holds = ended
                assert holds == "new", f"{member} has a result and holds what is {holds}"
            else:
                assert isinstance(ended, Failure), f"{member} has a result: {ended}"
                assert ended.kind == ending.what and ended.data["outcome"] in ending.outcomes, f"{member}: {ended}"
                assert ending.reason is None or ended.reason in ending.reasons, f"{member}: {ended}"
                at = ended.at
                self.names_the_victim(ended)
            self.in_time(member, at)

    def in_time(self, member: Member, at: float) -> None:
        seconds = at - self.struck
        assert seconds < within(self.cell.within), f"{member}: {seconds:.2f} s"

    def names_the_victim(self, failure: Failure) -> None:
        """A lost peer is named by side and rank, with what to do."""
        if failure.kind != "PeerLostError" or failure.data["outcome"] == "unknown":
            return
        assert "init_pair" in failure.text and self.cast.name in failure.text, failure.text
        if self.cell.signal != "STOP":
            assert self.cell.side in failure.text, failure.text
            assert "missed" not in failure.text, f"a death ends a connection, nobody waits for beats: {failure.text}"

    # ---- afterwards ---------------------------------------------------------------------------

    def relaunch(self) -> None:
        """Whoever died comes again; then all meet, where the pair is lost, and a transfer is exact."""
        cast, cell = self.cast, self.cell
        died = cell.signal != "STOP"
        if died and self.worker is not None:
            cast.bury(cast.puppets.pop(self.worker).worker)
        elif died and self.agent is not None:
            if cell.signal == "TERM":
                self.agent.result()
            cast.bury(cast.agents.pop(self.agent_place))
            self.followed = cell.own.what == "waits"
            if cell.moment != "rendezvous":
                cast.all(acts.lost)
        elif died:
            cast.revive_redis(self.pid)
        for member in cast.fill(agents=not self.followed):
            cast.puppets[member].do(acts.begin, cast.name)
        standing = [cast.puppets[member].do(acts.stands) for member in set(MEMBERS) - self.open]
        if not all(standing):
            cast.all(acts.meet, members=[member for member in MEMBERS if member not in self.open])
        for member in self.open:
            cast.puppets[member].ends()
        cast.all(acts.register, f"after.{cast.name}", False)
        for member in MEMBERS:
            cast.puppets[member].begin(acts.move)
        for member in MEMBERS:
            assert cast.puppets[member].ends()[1] == "new", member
        if self.followed:
            pid = cast.puppets[cast.at(self.agent_place)[0]].do(acts.agent_pid)
            os.kill(pid, signal.SIGTERM)
            wait_gone(pid)
