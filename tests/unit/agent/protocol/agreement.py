"""A batch on several agents in memory: ordered links, any interleaving, for walks of ``Participant``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from etha.agent.protocol.effects import (
    BeginLane,
    Fail,
    FreeLane,
    HoldLane,
    InDoubt,
    Settled,
    StartMove,
    StopMove,
    Tell,
    WantLane,
)
from etha.agent.protocol.lane_queue import LANE, Granted, LaneQueue, Need, Recalled
from etha.agent.protocol.participant import Call, Participant
from etha.errors import EthaError, TransferError
from etha.peer.messages import Message, Verb


@dataclass
class World:
    """``agents``: side -> agent of each rank. Outcomes are kept by call.

    ``lanes``: agent -> its bookings, shared by the worlds of several batches; ``worlds``: those, by batch. ``held``:
    what is free is booked with READY. ``need`` of each agent, of which there is ``limit``.
    """

    agents: dict[str, tuple[str, ...]]
    atomic: bool = False
    batch: str = "b"
    now: Callable[[], int] = lambda: 0
    held: bool = False
    need: Need = field(default_factory=lambda: LANE)
    limit: Callable[[str], int] = lambda resource: 1
    lanes: dict[str, LaneQueue] = field(default_factory=dict)
    worlds: dict[str, World] = field(default_factory=dict)
    machines: dict[str, Participant] = field(default_factory=dict)
    links: dict[tuple[str, str], deque[Message]] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)
    stopping: set[str] = field(default_factory=set)
    results: dict[tuple[str, int], int] = field(default_factory=dict)
    errors: dict[tuple[str, int], Any] = field(default_factory=dict)
    calls: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)
    waiting: set[tuple[str, int]] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    doubts: set[tuple[str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        names = sorted({a for ranks in self.agents.values() for a in ranks})
        for name in names:
            lane = self.lanes.setdefault(name, LaneQueue(self.limit))
            self.machines[name] = Participant(
                self.batch,
                me=name,
                agents=self.agents,
                digests={},
                seq=0,
                atomic=self.atomic,
                now=self.now,
                can_hold=lambda source, lane=lane: self.held and lane.can_hold(self.batch, self.need),
            )
            for other in names:
                self.links[name, other] = deque()
        self.worlds[self.batch] = self

    def agent(self, member: tuple[str, int]) -> str:
        return self.agents[member[0]][member[1]]

    def verbs(self) -> list[tuple[tuple[str, int], Verb]]:
        """Each rank with what it calls for a transfer from the first side to the second."""
        first, second = self.agents
        sends = [((first, rank), "send") for rank in range(len(self.agents[first]))]
        return [*sends, *(((second, rank), "recv") for rank in range(len(self.agents[second])))]

    def call(
        self,
        member: tuple[str, int],
        verb: Verb,
        version: int | None = None,
        edition: str = "",
        expects: int | None = None,
    ) -> tuple[str, int]:
        key = (f"{member[0]}{member[1]}", len(self.calls))
        self.calls[key] = member
        self.waiting.add(key)
        me = self.agent(member)
        call = Call(key=key, member=member, verb=verb, version=version, edition=edition, expects=expects)
        self.perform(me, self.machines[me].wait(call))
        return key

    def supersede(self, member: tuple[str, int]) -> None:
        me = self.agent(member)
        self.perform(me, self.machines[me].supersede(member))

    def end(self, key: tuple[str, int], *, expired: bool) -> None:
        me = self.agent(self.calls[key])
        self.perform(me, self.machines[me].end(key, expired=expired))

    def deliver(self, source: str, target: str) -> None:
        message = self.links[source, target].popleft()
        if target not in self.dead:
            self.perform(target, self.machines[target].hear(source, message))
        self.consistent()

    def moved(self, agent: str, error: EthaError | None = None) -> None:
        seq = self.running.pop(agent)
        self.stopping.discard(agent)
        self.perform(agent, self.machines[agent].moved(seq, error))

    def perform(self, me: str, effects: list) -> None:
        self.machines[me].validate()
        for effect in effects:
            match effect:
                case Tell(agent=agent, message=message):
                    self.links[me, agent].append(message)
                case StartMove(seq=seq):
                    assert me not in self.running
                    self.running[me] = seq
                    self.within(me)
                case StopMove(seq=seq):
                    assert self.running[me] == seq
                    self.stopping.add(me)
                case Fail(call=key, error=error):
                    assert key in self.waiting, f"{key} answered twice"
                    self.waiting.discard(key)
                    self.errors[key] = error
                case InDoubt(seq=seq):
                    self.doubts.add((me, seq))
                case HoldLane():
                    assert self.lanes[me].hold(self.batch, self.need)
                case WantLane(ticket=ticket):
                    self.route(me, self.lanes[me].want(self.batch, ticket, self.need))
                case BeginLane():
                    self.route(me, self.lanes[me].begin(self.batch))
                    assert self.batch in self.lanes[me].holders
                case FreeLane():
                    self.route(me, self.lanes[me].free(self.batch))
                case Settled(seq=seq, error=None, calls=calls):
                    for key in calls.values():
                        assert key in self.waiting, f"{key} answered twice"
                        self.waiting.discard(key)
                        self.results[key] = seq
        self.consistent()

    def route(self, me: str, notices: list[Granted | Recalled]) -> None:
        for notice in notices:
            world = self.worlds[notice.key]
            machine = world.machines[me]
            world.perform(me, machine.granted() if isinstance(notice, Granted) else machine.recalled())

    def within(self, me: str) -> None:
        """What moves at ``me`` needs no more than there is."""
        used: dict[str, int] = {}
        for world in self.worlds.values():
            if me in world.running and len(world.machines) > 1:
                for name, amount in world.need.items():
                    used[name] = used.get(name, 0) + amount
        assert all(amount <= self.limit(name) for name, amount in used.items()), f"{me} has booked too much: {used}"

    def lose(self, me: str, lost_agent: str) -> None:
        """``me`` hears that its link to ``gone`` is closed: what is on it is lost."""
        self.links[lost_agent, me].clear()
        self.perform(me, self.machines[me].on_agent_lost(lost_agent))

    def undecided(self, me: str, seq: int) -> None:
        self.doubts.discard((me, seq))
        self.perform(me, self.machines[me].undecided(seq))

    def consistent(self) -> None:
        """Nobody has a result of a transfer that somebody else was told is aborted."""
        for error in self.errors.values():
            if isinstance(error, TransferError) and error.outcome == "aborted":
                seq = int(error.message.split(" seq ")[1].split()[0])
                assert seq not in self.results.values(), f"{seq} committed and aborted: {error}"

    def busy(self) -> list[tuple[str, str]]:
        return [link for link, queue in self.links.items() if queue]

    def drain(self) -> None:
        """Deliver and finish all there is, in a fixed order."""
        while True:
            if links := self.busy():
                self.deliver(*links[0])
            elif self.running:
                self.moved(next(iter(self.running)))
            else:
                return
