"""Every state that the agents of one batch can reach, for proofs by exhaustion.

A state is a row of numbers: one for each agent (its machine, its calls and what they were told, its lane, its
timer), one for each link (what is on its way), one for what has happened so far to the world (``Spent``). What an
agent does next depends on its own number alone, so that every step of a machine is run once and remembered, and
the walk itself is only looking up. A link keeps its order, two links keep none among each other.

A lost link is what each end hears of it: ``lose(a, b)`` can come between any two messages from b, and takes those
that are still on their way. So a crash, a cut and a frozen agent (it still hears what came before, sends to those
that have not lost it yet, and then loses them all) need no model of their own beyond who may lose whom.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

import msgspec

from etha.agent.protocol.effects import BeginLane, Fail, FreeLane, HoldLane, InDoubt, Settled, StartMove, Tell, WantLane
from etha.agent.protocol.participant import Call, Participant
from etha.errors import EthaError, PeerLostError, TransferError
from etha.peer.messages import Question, VerdictAnswer

#: Of a machine: what never changes, or is told and not decided upon.
CONSTANT = {
    "name",
    "history",
    "agents",
    "digests",
    "members",
    "other",
    "now",
    "batch",
    "wanted",
    "peers",
    "me",
    "atomic",
    "_can_hold",
    "_heard",
    "_came",
    "_withdrew",
    "_of_side",  # the queues once more
    "_directing",
    "_coordinators",
    "_others",
    "gave_up",
}


def frozen(value: Any) -> Hashable:
    """``value`` as something that is equal and hashes alike when it behaves alike; of errors only the kind."""
    match value:
        case None | bool() | int() | str() | float():
            return value
        case Enum():
            return value.name
        case EthaError():
            return type(value).__name__
        case dict():
            return frozenset((frozen(k), frozen(v)) for k, v in value.items())
        case set() | frozenset():
            return frozenset(map(frozen, value))
    if isinstance(value, msgspec.Struct):
        return (type(value).__name__, *map(frozen, msgspec.structs.astuple(value)))
    if is_dataclass(value):
        return (type(value).__name__, *(frozen(getattr(value, f.name)) for f in fields(value) if f.compare))
    if hasattr(value, "__dict__"):
        named = vars(value)
        return (type(value).__name__, *(frozen(named[k]) for k in named if k not in CONSTANT))
    return tuple(map(frozen, value))


class Numbers:
    """Things <-> small numbers, in the order they are first seen."""

    def __init__(self) -> None:
        self.of: dict[Hashable, int] = {}
        self.things: list[Any] = []

    def number(self, key: Hashable, thing: Any = None) -> int:
        found = self.of.get(key)
        if found is None:
            found = self.of[key] = len(self.things)
            self.things.append(key if thing is None else thing)
        return found


@dataclass(frozen=True)
class Told:
    """What a call was told of transfer ``seq``: "result", "aborted", "unknown"; "withdrawn" is of none."""

    outcome: str
    seq: int


@dataclass
class Agent:
    """One agent at one moment. ``calls``: position -> "unmade", "waiting", "ended" (its deadline is over), Told."""

    machine: Participant
    calls: dict[int, str | Told]
    running: int = 0
    timer: int = 0
    lane: str = "free"  # wanted, granted, recalled, begun
    lost: frozenset[str] = frozenset()
    broken: bool = False
    dead: bool = False

    def key(self) -> Hashable:
        rest = (tuple(self.calls.items()), self.running, self.timer, self.lane, self.lost, self.broken, self.dead)
        return (frozen(self.machine), *rest)


@dataclass(frozen=True)
class Spent:
    """What has happened to the world, so that only so much of it happens."""

    ends: int = 0
    fails: int = 0
    recalls: int = 0
    breaks: int = 0
    crashed: str = ""


class Violation(AssertionError):
    """The agreement is broken; the message tells the way to it."""


Event = tuple[Any, ...]


@dataclass
class Walk:
    """All states of a batch over ``agents`` (side -> agent of each rank), whose ranks call once each.

    At most so many ``ends`` (deadlines, each call once), failing moves, lanes recalled; ``crash``: agents that may
    crash (one of them does); ``cuts``: links that may be lost; ``breaks``: how many agents may be told that the pair
    is lost at any time, or anyone after it has lost somebody. ``eager``: timers go off whenever they like, else
    only when nothing else is left to happen. ``made``: all calls wait from the beginning; ``moved``: all agents
    have just moved their part, and their votes are on the way. ``held``: a free lane is held when READY is said.
    """

    agents: dict[str, tuple[str, ...]]
    source: str = "t"
    ends: int = 0
    fails: int = 0
    recalls: int = 0
    held: bool = False
    breaks: int = 0
    crash: tuple[str, ...] = ()
    cuts: tuple[tuple[str, str], ...] = ()
    eager: bool = True
    made: bool = False
    moved: bool = False
    calls_each: int = 1
    states: int = 0
    outcomes: set[tuple[str, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.names = sorted({a for ranks in self.agents.values() for a in ranks})
        self.index = {name: i for i, name in enumerate(self.names)}
        self.pairs = [(a, b) for a in self.names for b in self.names if a != b]
        self.link = {pair: len(self.names) + i for i, pair in enumerate(self.pairs)}
        self.target = {number: pair[1] for pair, number in self.link.items()}
        members = [(side, rank) for side, ranks in self.agents.items() for rank in range(len(ranks))]
        self.members = members * self.calls_each
        self.at = {name: Numbers() for name in self.names}
        self.messages, self.queues, self.spent = Numbers(), Numbers(), Numbers()
        self.steps: dict[tuple[str, int, Event], tuple[int, tuple[tuple[int, int], ...]]] = {}
        self.possible: dict[tuple[str, int], tuple[tuple[Event, ...], tuple[Event, ...]]] = {}
        self.summaries: dict[tuple[str, int], tuple[frozenset[int], frozenset[int]]] = {}

    # ---- one agent ----------------------------------------------------------------------------

    def begin(self) -> tuple[int, ...]:
        state = []
        for name in self.names:
            machine = Participant("b", me=name, agents=self.agents, digests={}, seq=0, atomic=False, now=lambda: 0)
            mine = [i for i, (side, rank) in enumerate(self.members) if self.agents[side][rank] == name]
            agent = Agent(machine, dict.fromkeys(mine, "unmade"))
            state.append(self.at[name].number(agent.key(), agent))
        empty = self.queues.number(())
        state += [empty] * len(self.pairs)
        state.append(self.spent.number(Spent()))
        if not self.made and not self.moved:
            return tuple(state)
        for i in range(len(self.members)):
            side, rank = self.members[i]
            state = list(self.step(tuple(state), self.agents[side][rank], ("call", i)))
        while self.moved:
            follow = [(e, after) for must, e, after in self.nexts(tuple(state)) if must]
            if all(event[1] == "moved" for event, _ in follow):
                break
            state = list(next(after for event, after in follow if event[1] != "moved"))
        for name in self.names if self.moved else ():
            state = list(self.step(tuple(state), name, ("moved", True)))
        return tuple(state)

    def step(self, state: tuple[int, ...], name: str, event: Event, spent: int | None = None) -> tuple[int, ...]:
        """The state after ``event`` at agent ``name``."""
        found = self.stepped(state, name, event)
        after = list(state)
        after[self.index[name]] = found[0]
        for link, message in found[1]:
            target: Agent = self.at[self.target[link]].things[state[self.index[self.target[link]]]]
            if target.dead or name in target.lost:
                continue  # nobody hears it any more
            after[link] = self.queues.number((*self.queues.things[after[link]], message))
        if spent is not None:
            after[-1] = spent
        return tuple(after)

    def stepped(self, state: tuple[int, ...], name: str, event: Event) -> tuple[int, tuple[tuple[int, int], ...]]:
        """The agent's number after ``event``, and what it says on which link; remembered."""
        at = state[self.index[name]]
        found = self.steps.get((name, at, event))
        if found is None:
            found = self.steps[name, at, event] = self.run(name, at, event)
        return found

    def hears(self, state: tuple[int, ...], a: str, b: str, item: Any) -> tuple[Event, tuple[int, ...]]:
        """What happens, and the state after it, when ``item`` comes off the link from ``a`` to ``b``."""
        return (b, "hear", a, item), self.step(state, b, ("hear", a, item))

    def far(self, a: str, b: str) -> bool:
        """Whether two agents have no link."""
        return False

    def linked(self) -> Iterable[tuple[str, str]]:
        """Each two agents with a link, in both orders: the second hears the first."""
        return self.pairs

    def run(self, name: str, number: int, event: Event) -> tuple[int, tuple[tuple[int, int], ...]]:
        """One event at one agent, for the first time."""
        agent: Agent = copy.deepcopy(self.at[name].things[number])
        machine = agent.machine
        machine._can_hold = lambda source: self.held and agent.lane == "free"
        sent: list[tuple[int, int]] = []
        match event:
            case ("call", i):
                agent.calls[i] = "waiting"
                side = self.members[i][0]
                verb = "send" if side == self.source else "recv"
                effects = machine.wait(Call(key=("c", i), member=self.members[i], verb=verb))
            case ("end", i):
                agent.calls[i] = "ended"
                effects = machine.end(("c", i), expired=True)
            case ("hear", other, message):
                effects = machine.hear(other, copy.deepcopy(self.messages.things[message]))
            case ("moved", ok):
                seq, agent.running = agent.running, 0
                effects = machine.moved(seq, None if ok else TransferError("disk on fire"))
            case ("lose", other):
                agent.lost |= {other}
                effects = machine.on_agent_lost(other, by_word=self.far(name, other))
            case ("break",):
                agent.broken = True
                effects = machine.break_up(PeerLostError("the pair is lost", reason="closed"))
            case ("timer",):
                seq, agent.timer = agent.timer, 0
                effects = machine.undecided(seq)
            case ("granted",):
                agent.lane = "granted"
                effects = machine.granted()
            case ("recalled",):
                agent.lane = "recalled"
                effects = machine.recalled()
            case ("crash",):
                agent.dead, agent.running, agent.timer = True, 0, 0
                effects = []
        self.perform(name, agent, event, effects, sent)
        return self.at[name].number(agent.key(), agent), tuple(sent)

    def perform(self, name: str, agent: Agent, event: Event, effects: list[Any], sent: list[tuple[int, int]]) -> None:
        agent.machine.validate()
        for effect in effects:
            match effect:
                case Tell(agent=other, message=message):
                    if other in agent.lost and not self.far(name, other):
                        raise Violation(f"{name} speaks to {other}, which it has lost: {message}")
                    sent.append((self.link[name, other], self.messages.number(frozen(message), message)))
                case StartMove(seq=seq):
                    assert agent.running == 0 and agent.lane == ("begun" if len(self.names) > 1 else "free")
                    agent.running = seq
                case Fail(call=(_, i), error=error):
                    assert isinstance(error, TransferError)
                    outcome, seq = error.outcome, 0
                    if outcome != "withdrawn":
                        seq = int(error.message.split(" seq ")[1].split()[0])
                    self.tell(agent, i, Told(outcome, seq))
                    if outcome == "unknown" and not agent.lost and event != ("timer",):
                        raise Violation(f"{name} says unknown and has lost nobody")
                case Settled(seq=seq, error=None, calls=calls):
                    for _, i in calls.values():
                        self.tell(agent, i, Told("result", seq))
                case InDoubt(seq=seq):
                    agent.timer = seq
                case HoldLane():
                    assert agent.lane == "free"
                    agent.lane = "granted"
                case WantLane():
                    assert agent.lane == "free"
                    agent.lane = "wanted"
                    if not self.recalls:
                        agent.lane = "granted"
                        self.perform(name, agent, ("granted",), agent.machine.granted(), sent)
                case BeginLane():
                    assert agent.lane in ("granted", "recalled")
                    agent.lane = "begun"
                case FreeLane():
                    assert agent.lane != "free"
                    agent.lane = "free"

    def tell(self, agent: Agent, i: int, reported: Told) -> None:
        if agent.calls[i] not in ("waiting", "ended"):
            raise Violation(f"call {i} is told {reported} after {agent.calls[i]}")
        agent.calls[i] = reported

    # ---- what can happen ----------------------------------------------------------------------

    def own(self, name: str, number: int) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
        """What can happen at an agent by itself: what must happen in the end, and what may."""
        found = self.possible.get((name, number))
        if found is not None:
            return found
        agent: Agent = self.at[name].things[number]
        must: list[Event] = []
        may: list[Event] = []
        if not agent.dead:
            if agent.running:
                must.append(("moved", True))
                may.append(("moved", False))
            if agent.lane == "wanted":
                must.append(("granted",))
            if agent.lane == "granted":
                may.append(("recalled",))
            if agent.timer:
                must.append(("timer",))
            before: set[tuple[str, int]] = set()
            for i, status in agent.calls.items():
                if status == "unmade" and self.members[i] not in before:
                    may.append(("call", i))
                    before.add(self.members[i])
                if status == "waiting":
                    may.append(("end", i))
            if not agent.broken:
                may.append(("break",))
        found = self.possible[name, number] = tuple(must), tuple(may)
        return found

    def spend(self, spent: Spent, name: str, event: Event, agent: Agent) -> int | None:
        """The number of what is spent after ``event``; None if it is too much."""
        match event:
            case ("end", _) if spent.ends < self.ends:
                return self.spent.number(Spent(**{**vars(spent), "ends": spent.ends + 1}))
            case ("moved", False) if spent.fails < self.fails:
                return self.spent.number(Spent(**{**vars(spent), "fails": spent.fails + 1}))
            case ("recalled",) if spent.recalls < self.recalls:
                return self.spent.number(Spent(**{**vars(spent), "recalls": spent.recalls + 1}))
            case ("break",) if self.breaks and agent.lost:
                return self.spent.number(spent)
            case ("break",) if spent.breaks < self.breaks:
                return self.spent.number(Spent(**{**vars(spent), "breaks": spent.breaks + 1}))
            case ("crash",) if not spent.crashed and name in self.crash:
                return self.spent.number(Spent(**{**vars(spent), "crashed": name}))
            case ("call", _):
                return self.spent.number(spent)
        return None

    def nexts(self, state: tuple[int, ...]) -> Iterator[tuple[bool, Event, tuple[int, ...]]]:
        """(whether it has to happen in the end, what, the state after it)."""
        spent: Spent = self.spent.things[state[-1]]
        now = [self.at[name].things[state[i]] for i, name in enumerate(self.names)]
        timers: list[tuple[str, Event]] = []
        busy = False
        for name, agent in zip(self.names, now, strict=True):
            must, may = self.own(name, state[self.index[name]])
            for event in must:
                if event == ("timer",) and not self.eager:
                    timers.append((name, event))
                    continue
                busy = True
                yield True, (name, *event), self.step(state, name, event)
            for event in may if agent.dead else (*may, ("crash",)):
                if (after := self.spend(spent, name, event, agent)) is not None:
                    result = self.step(state, name, event, after)
                    if event == ("crash",):
                        result = self.silence(result, [(a, b) for a, b in self.pairs if b == name])
                    yield False, (name, *event), result
        for pair in self.linked():
            a, b = pair
            if now[self.index[b]].dead or a in now[self.index[b]].lost:
                continue
            queue = self.queues.things[state[self.link[pair]]]
            if queue:
                busy = True
                shorter = list(state)
                shorter[self.link[pair]] = self.queues.number(queue[1:])
                yield True, *self.hears(tuple(shorter), a, b, queue[0])
            crashed, torn = spent.crashed == a, b in now[self.index[a]].lost
            if crashed or torn or pair in self.cuts or (b, a) in self.cuts:
                must_lose = crashed or torn
                busy |= must_lose
                # What b sends until a has lost it too is on its way; what a had sent is lost with the link.
                silent = self.silence(state, [pair])
                yield must_lose, (b, "lose", a), self.step(silent, b, ("lose", a))
        if not busy:
            for name, event in timers:
                yield True, (name, *event), self.step(state, name, event)

    def silence(self, state: tuple[int, ...], pairs: Iterable[tuple[str, str]]) -> tuple[int, ...]:
        """Nothing is on these links any more."""
        after = list(state)
        for pair in pairs:
            after[self.link[pair]] = self.queues.of[()]
        return tuple(after)

    # ---- the walk -----------------------------------------------------------------------------

    def summary(self, name: str, number: int) -> tuple[frozenset[int], frozenset[int]]:
        """The transfers of which an agent's calls have a result, and were told that they are aborted."""
        found = self.summaries.get((name, number))
        if found is None:
            reported = [t for t in self.at[name].things[number].calls.values() if isinstance(t, Told)]
            found = self.summaries[name, number] = (
                frozenset(t.seq for t in reported if t.outcome == "result"),
                frozenset(t.seq for t in reported if t.outcome == "aborted"),
            )
        return found

    def consistent(self, state: tuple[int, ...]) -> None:
        """No result beside an abort of the same transfer, on any agent, dead ones included."""
        reported = [self.summary(name, state[i]) for i, name in enumerate(self.names)]
        if any(result & aborted for result, _ in reported for _, aborted in reported):
            raise Violation("a result, and elsewhere aborted")

    def quiet(self, state: tuple[int, ...]) -> None:
        """Nothing has to happen any more: nobody may be left waiting for what has begun or ended."""
        for i, name in enumerate(self.names):
            agent: Agent = self.at[name].things[state[i]]
            if agent.dead:
                continue
            if agent.machine.current is not None:
                raise Violation(f"{name} is left in a transfer: {agent.machine.history}")
            if "ended" in agent.calls.values():
                raise Violation(f"a call of {name} hangs past its deadline: {agent.calls}")
            held = agent.machine.booking is not None and agent.machine.booking.ready is not None
            if agent.lane != "free" and not (held and agent.lane == "granted"):  # READY holds it until it is recalled
                raise Violation(f"the lane of {name} is {agent.lane} for ever")
            if agent.broken and "waiting" in agent.calls.values():
                raise Violation(f"a call of {name} waits in a batch that is broken")

    def go(self, limit: int = 2_000_000) -> Walk:
        """Visit every state; Violation tells the way to the first that is wrong."""
        gc.disable()  # nothing here is a cycle, and looking for one again and again takes half of the time
        try:
            return self.visit(limit)
        finally:
            gc.enable()

    def visit(self, limit: int) -> Walk:
        first = self.begin()
        came: dict[tuple[int, ...], tuple[tuple[int, ...], Event] | None] = {first: None}
        stack = [first]
        try:
            while stack:
                state = stack.pop()
                last = state
                self.consistent(state)
                must_go_on = False
                for must, event, after in self.nexts(state):
                    must_go_on |= must
                    if after not in came:
                        came[after] = (state, event)
                        stack.append(after)
                        assert len(came) < limit, "the walk is larger than it was thought to be"
                if not must_go_on:
                    self.quiet(state)
                    self.ended(state)
        except AssertionError as wrong:
            raise Violation(f"{wrong}\n{self.story(came, last)}") from wrong
        self.states = len(came)
        return self

    def ended(self, state: tuple[int, ...]) -> None:
        reported = []
        for i, name in enumerate(self.names):
            agent = self.at[name].things[state[i]]
            for t in agent.calls.values():
                reported.append("dead" if agent.dead and not isinstance(t, Told) else getattr(t, "outcome", t))
        self.outcomes.add(tuple(reported))

    def story(self, came: dict[Any, Any], state: tuple[int, ...]) -> str:
        steps = []
        at: Any = state
        while came.get(at) is not None:
            at, event = came[at]
            shown = [
                repr(self.messages.things[x]) if event[1] == "hear" and k == 3 else str(x) for k, x in enumerate(event)
            ]
            steps.append(" ".join(shown))
        return "\n".join(reversed(steps))


# ---- agents that are not all linked -------------------------------------------------------------


@dataclass(frozen=True)
class Passing:
    """On a link: what ``origin`` says to ``to``, through a hub. ``message`` is its number."""

    origin: str
    to: str
    message: int


@dataclass(frozen=True)
class LossNews:
    """On a link: a hub has lost ``agent``."""

    agent: str


@dataclass
class HubWalk(Walk):
    """``hubs``: who is linked with everybody. ``through_all``: whether survivors ask each other through all of them."""

    hubs: tuple[str, ...] = ()
    through_all: bool = True

    def far(self, a: str, b: str) -> bool:
        """Whether two agents have no link."""
        return a not in self.hubs and b not in self.hubs

    def step(self, state: tuple[int, ...], name: str, event: Event, spent: int | None = None) -> tuple[int, ...]:
        found = self.stepped(state, name, event)
        after = list(state)
        after[self.index[name]] = found[0]
        if spent is not None:
            after[-1] = spent
        known = self.at[name].things[found[0]].lost
        for link, message in found[1]:
            to = self.target[link]
            if not self.far(name, to):
                self.put(after, name, to, message)
                continue
            asks = isinstance(self.messages.things[message], Question | VerdictAnswer)
            hubs = [hub for hub in self.hubs if hub not in known]
            for hub in hubs if asks and self.through_all else hubs[:1]:
                self.put(after, name, hub, Passing(name, to, message))
        if event[0] == "lose" and name in self.hubs:
            for other in self.names:
                if other not in (name, event[1]) and self.far(other, event[1]):
                    self.put(after, name, other, LossNews(event[1]))
        return tuple(after)

    def put(self, state: list[int], a: str, b: str, item: Any) -> None:
        """Send on a link, unless nobody hears it any more."""
        target = self.at[b].things[state[self.index[b]]]
        if target.dead or a in target.lost:
            return
        link = self.link[a, b]
        state[link] = self.queues.number((*self.queues.things[state[link]], item))

    def hears(self, state: tuple[int, ...], a: str, b: str, item: Any) -> tuple[Event, tuple[int, ...]]:
        match item:
            case LossNews(agent=lost):
                known = lost in self.at[b].things[state[self.index[b]]].lost
                return (b, "hears of", lost), state if known else self.step(state, b, ("lose", lost))
            case Passing(origin=origin, to=to, message=message) if to == b:
                return (b, "hear", origin, message), self.step(state, b, ("hear", origin, message))
            case Passing(to=to):
                after = list(state)
                if to not in self.at[b].things[state[self.index[b]]].lost:
                    self.put(after, b, to, item)
                return (b, "passes on", item), tuple(after)
        return super().hears(state, a, b, item)

    def linked(self) -> Iterator[tuple[str, str]]:
        return (pair for pair in self.pairs if not self.far(*pair))
