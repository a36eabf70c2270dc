"""Walks every order of events in a small publication, by the rule that the scripts in Redis apply."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from etha.agent.protocol.sources import Hop, Sources


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How many of the events that have no natural end may still happen."""

    puts: int = 2
    failures: int = 1
    lapses: int = 1
    deaths: int = 1
    silences: int = 0
    publishers: int = 0


def clone(rule: Sources) -> Sources:
    """A copy that shares what never changes. copy.deepcopy takes thirty times as long."""
    other = Sources(serial=rule.serial, unfit=rule.unfit, lacking=rule.lacking)
    other.__dict__.update(rule.__dict__)
    other.holders = {
        name: replace(one, slots=[replace(slot, children=slot.children[:]) for slot in one.slots])
        for name, one in rule.holders.items()
    }
    other.subscribers = {name: replace(one) for name, one in rule.subscribers.items()}
    other.queue, other.hops, other.expired = rule.queue[:], dict(rule.hops), set(rule.expired)
    other.orphans, other.draining = rule.orphans[:], rule.draining[:]
    return other


@dataclass(slots=True)
class World:
    """A publication, the budget, and hops whose claim has ended though they go on.

    ``arrived``: hops whose agents have committed though Redis has not heard of it. ``lost``: those that have ended in
    another way. Only such hops are kept there as another one depends on.
    """

    sources: Sources
    budget: Budget
    options: dict[str, Any] = field(default_factory=dict)
    late: list[Hop] = field(default_factory=list)
    arrived: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()

    def copy(self) -> World:
        return World(clone(self.sources), self.budget, self.options, self.late[:], self.arrived, self.lost)

    @property
    def running(self) -> list[Hop]:
        return [*self.sources.hops.values(), *self.late]

    def may_commit(self, hop: Hop) -> bool:
        """The agents that pass a version on vote for it once they have all of it by a hop that has committed."""
        return hop.number not in self.lost and (not hop.upstream or hop.upstream in self.arrived)

    def forget(self) -> None:
        """Keep what matters to a hop that runs."""
        needed = {hop.upstream for hop in self.running} | {hop.number for hop in self.running}
        self.arrived, self.lost = self.arrived & needed, self.lost & needed

    def key(self) -> tuple[Any, ...]:
        """Equal for states that differ in nothing but how far the counters are."""
        rule = self.sources
        numbers = {one.serial for one in rule.holders.values()} | {one.serial for one in rule.subscribers.values()}
        numbers |= set(rule.hops) | {hop.number for hop in self.late} | {hop.serial for hop in self.late}
        numbers |= {hop.upstream for hop in self.running if hop.upstream}
        place = {number: index for index, number in enumerate(sorted(numbers))}

        def name(text: str) -> tuple[str, int]:
            side, _, serial = text.partition("/")
            return side, place.get(int(serial), -1) if serial else -1

        def hop(one: Hop) -> tuple[Any, ...]:
            over = rule.subscribers[one.subscriber].call if one.subscriber in rule.subscribers else 0
            return (place[one.number], one.call - over, one.subscriber, place[one.serial], name(one.holder), one.slot,
                    one.seq, one.protected, place.get(one.upstream, -1))  # fmt: skip

        return (
            self.budget,
            rule.seq,
            tuple(
                (
                    name(n),
                    one.served,
                    one.orphan,
                    one.draining,
                    tuple(
                        (
                            s.seq,
                            s.used,
                            tuple(map(name, s.children)),
                            name(s.origin),
                            s.arrival and (s.arrival.seq, place[s.arrival.claim], s.arrival.depth),
                        )
                        for s in one.slots
                    ),
                )
                for n, one in sorted(rule.holders.items())
            ),
            tuple(
                (n, place[s.serial], s.call - s.over, place.get(s.claim, -1), s.held, s.protect)
                for n, s in sorted(rule.subscribers.items())
            ),
            tuple((name(ask.name), ask.newer_than) for ask in rule.queue),
            tuple(hop(rule.hops[n]) for n in sorted(rule.hops)),
            tuple(sorted(hop(one) for one in self.late)),
            name(rule.publisher),
            None if rule.put is None else (rule.put.slot, rule.put.seq),
            tuple(map(name, rule.orphans)),
            tuple(map(name, rule.draining)),
            tuple(sorted(place[number] for number in self.arrived)),
            tuple(sorted(place[number] for number in self.lost)),
        )


Event = Callable[[World], None]


def ask(name: str) -> Event:
    def happen(world: World) -> None:
        mine = world.sources.subscribers[name]
        world.sources.claim(name, max(mine.call, mine.over) + 1, newer_than=mine.held)

    return happen


def end(number: int, *, committed: bool, late: bool) -> Event:
    def happen(world: World) -> None:
        [hop] = [hop for hop in (world.late if late else world.sources.hops.values()) if hop.number == number]
        world.late = [one for one in world.late if one.number != number]
        mine = world.sources.subscribers.get(hop.subscriber)
        before = mine.call if mine is not None else 0
        ended = dict(world.sources.hops)
        world.sources.release(hop, committed=committed)
        for one in ended.values():  # those to whom it was passed on have yet to hear of it
            if one.number not in world.sources.hops and one.number != number:
                assert not committed, "a hop that commits ends no other"
                world.late.append(one)
        passed = {one.number for one in world.running if one.upstream == number}
        if passed and committed:
            world.arrived |= {number}
        elif passed:
            fail(world, number)
        if committed and mine is not None and mine.serial == hop.serial and before == hop.call:
            assert mine.held == hop.seq, "a hop that has committed counts, also if its claim has lapsed"

    return happen


def fail(world: World, number: int) -> None:
    """A hop cannot commit any more, nor those to which its version is passed on."""
    world.lost |= {number}
    for one in world.running:
        if one.upstream == number and one.number not in world.lost:
            fail(world, one.number)


def arrive(number: int) -> Event:
    """A hop is committed; Redis has not heard of it."""

    def happen(world: World) -> None:
        world.arrived |= {number}

    return happen


def prepare(world: World) -> None:
    _, ready = world.sources.prepare()
    assert ready or len(world.sources.holders[world.sources.publisher].slots) == 1, "a put waits for readers"


def abandon(world: World) -> None:
    put, one = world.sources.put, world.sources.holders[world.sources.publisher]
    assert put is not None and put.seq > put.kept[0]
    world.sources.abandon()
    assert one.slots[put.slot].seq == put.kept[0], "nothing was written, so the version is there again"


def lapse(number: int) -> Event:
    def happen(world: World) -> None:
        before = dict(world.sources.hops)
        world.sources.expired.add(number)
        assert not world.sources.renew(number), "a claim that has lapsed cannot be renewed"
        # Those to whom its version is passed on may commit, too.
        world.late += [hop for hop in before.values() if hop.number not in world.sources.hops]

    return happen


def relaunch(name: str, places: int, kind: str, passes: bool) -> Event:
    def happen(world: World) -> None:
        mine = {hop.number for hop in world.running if hop.subscriber == name}
        before = dict(world.sources.hops)
        world.sources.subscribe(name, places=places, kind=kind, passes=passes)
        world.late += [hop for hop in before.values() if hop.number not in world.sources.hops]
        world.late = [hop for hop in world.late if hop.number not in mine]
        for number in mine - world.arrived:
            fail(world, number)

    return happen


def events(world: World) -> Iterator[tuple[str, Event, Budget]]:
    """What can happen next, and what is left of the budget after that."""
    rule, budget = world.sources, world.budget
    if rule.publisher:
        if rule.put is None:
            if budget.puts:
                yield "prepare", prepare, replace(budget, puts=budget.puts - 1)
        else:
            if not rule.holders[rule.publisher].slots[rule.put.slot].used:
                yield "announce", lambda w: w.sources.announce() and None, budget
            yield "abandon", abandon, budget
    if budget.publishers:
        less = replace(budget, publishers=budget.publishers - 1)
        if rule.publisher_side:
            yield "publisher dies", lambda w: w.sources.leave(w.sources.publisher_side), less
        options = world.options
        yield "publisher comes", lambda w: w.sources.publish("t", **options) and None, less
    for name, mine in rule.subscribers.items():
        if mine.call == mine.over:
            yield f"{name} asks", ask(name), budget
        if budget.deaths:
            less = replace(budget, deaths=budget.deaths - 1)
            yield f"{name} comes again", relaunch(name, mine.places, mine.kind, mine.passes), less
    for number, hop in rule.hops.items():
        if world.may_commit(hop):
            yield f"{number} commits", end(number, committed=True, late=False), budget
        elif number in world.lost:
            yield f"{number} is lost", end(number, committed=False, late=False), budget
        if budget.failures and number not in world.arrived:
            less = replace(budget, failures=budget.failures - 1)
            yield f"{number} fails", end(number, committed=False, late=False), less
        if budget.lapses:
            yield f"{number} lapses", lapse(number), replace(budget, lapses=budget.lapses - 1)
    for hop in world.late:
        for committed in (True, False):
            if world.may_commit(hop) if committed else hop.number not in world.arrived:
                yield f"{hop.number} ends late", end(hop.number, committed=committed, late=True), budget
    for hop in world.running:
        passed = any(one.upstream == hop.number for one in world.running)
        if passed and hop.number not in world.arrived and world.may_commit(hop):
            yield f"{hop.number} arrives", arrive(hop.number), budget
    if budget.silences:
        less = replace(budget, silences=budget.silences - 1)
        for name, one in rule.holders.items():
            if one.served and not one.publisher:
                yield f"the agent of {name} is silent", lambda w, n=name: silence(w, n), less


def silence(world: World, name: str) -> None:
    world.sources.holders[name].served = False


def settle(world: World) -> None:
    """From here on all hops commit and nothing else happens: everybody who waits for something that is there gets it.

    This is what "no starvation" means in a finite world: no state is a dead end.
    """
    rule = world.sources
    if rule.put is not None:
        hops = rule.hops
        while readers := [n for n in hops if hops[n].holder == rule.publisher and hops[n].slot == rule.put.slot]:
            rule.release(hops[readers[0]], committed=True)
        rule.announce()
    for name, mine in rule.subscribers.items():
        if mine.call == mine.over:
            rule.claim(name, mine.call + 1, newer_than=mine.held)
    for _ in range(100):
        if not rule.hops:
            break
        hop = rule.hops[min(rule.hops)]
        rule.release(hop, committed=hop.number not in world.lost)
        mine = rule.subscribers[hop.subscriber]
        rule.claim(hop.subscriber, mine.call + 1, newer_than=mine.held)
    assert not rule.hops, "hops go on for ever"
    rule.renew(0)
    for one in rule.queue:
        there = [
            holder.name
            for holder in rule.holders.values()
            if holder.served and holder.name != one.name and any(rule.fits(one, holder, slot) for slot in holder.slots)
        ]
        assert not there, f"{one.name} waits for more than {one.newer_than}, which {there} have"
    for holder in rule.holders.values():
        assert holder.used == 0, f"a place of {holder.name} is lost"
        assert not holder.draining, f"{holder.name} does not serve any more"


def walk(world: World, most: int = 2_000_000) -> int:
    """Visit all states; returns their number."""
    seen = {world.key()}
    todo: list[World] = [world]
    while todo:
        state = todo.pop()
        for text, happen, budget in events(state):
            after = state.copy()
            after.budget = budget
            before = {hop.number for hop in after.sources.hops.values()}
            serial = after.sources.serial
            happen(after)
            after.forget()
            assert all(number > serial for number in after.sources.hops.keys() - before), "claims are numbered"
            if (key := after.key()) in seen:
                continue
            seen.add(key)
            assert len(seen) <= most
            wrong = list(clone(after.sources).violations())
            assert not wrong, (text, wrong, after)
            settle(after.copy())
            todo.append(after)
    return len(seen)


def world(
    budget: Budget,
    subscribers: int = 2,
    serves: tuple[int, ...] = (1, 1, 1),
    kinds: tuple[str, ...] = ("a", "a", "a"),
    passes: tuple[bool, ...] = (False, False, False),
    **options: Any,
) -> World:
    """``kinds``: "part" holds some of the elements that "a" holds, and "rest" others."""
    rule = Sources(lacking=frozenset({("part", "a"), ("rest", "a"), ("part", "rest"), ("rest", "part")}))
    rule.publish("t", **options)
    for number in range(subscribers):
        rule.subscribe(f"r{number}", places=serves[number], kind=kinds[number], passes=passes[number])
    return World(rule, budget, options)
