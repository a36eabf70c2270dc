"""Who is in the next epoch of an elastic group: the rule, without Redis and without a clock; pure.

``etha/store/group.lua`` applies this rule to what Redis holds, and a test plays both against each other. It is written
down here so that every order of events can be walked. ``GroupRoster`` is what Redis knows, and times are milliseconds.

1. An epoch consists of whole replicas. A replica is in the next one if all its ranks have asked for it.
2. It forms once no replica is missing: one of the last epoch that may still come (until ``timeout`` if its agent
   answers and nobody has waited for it in vain before, until ``grace`` otherwise), or one of which only some ranks have
   come (until ``grace``). And at least as many replicas must be there as any of them wants.
3. It has an heir of the last epoch, unless nobody of that epoch is left: a replica that counted in it, or has loaded
   its state since. A commit needs every member of its epoch, and who has entered the next epoch votes no more in the
   last. So two epochs never commit side by side, though nobody has a majority; and a newcomer that could not load does
   not begin anew while somebody lives who has the weights.
4. It has a replica with the state with which the last epoch began, or a later one, unless nobody who was ever in an
   epoch is left.
5. The most advanced come first: by the last epoch whose state they have, then by step, then by who came first. Those
   that are as far as the first count. Steps of different epochs are never compared, because a member that was left out
   may have the same number of steps and other weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEntry:
    """One rank: the epoch to which it was admitted, whose state it has, its step, and whether it wants the next."""

    epoch: int = 0
    last: int = 0
    step: int = 0
    least: int = 1
    wants: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEntry:
    """One launch of a replica. ``served``: the agents of all its ranks answer. ``since``: which launch it is."""

    since: int
    ranks: Mapping[int, RankEntry]
    served: bool = True
    not_before: int = 0
    pause: int = 0

    def complete(self, world: int) -> bool:
        """Whether all its ranks are there and want the next epoch."""
        return all(rank in self.ranks and self.ranks[rank].wants for rank in range(world))

    @property
    def admitted(self) -> bool:
        """Whether it was ever in an epoch, and so may have a state."""
        return any(r.epoch > 0 for r in self.ranks.values())

    @property
    def progress(self) -> tuple[int, int]:
        """How far it is: the last epoch whose state all its ranks have, and the step that all have reached."""
        return min(r.last for r in self.ranks.values()), min(r.step for r in self.ranks.values())

    def torn(self, others: bool) -> bool:
        """Whether ranks stand at different steps, so that nothing can be done with it.

        With ``others`` to load from, only if they have the same epoch's state: a load that was cut off can be repeated.
        """
        first = self.ranks[0]
        return any(r.step != first.step and (r.last == first.last or not others) for r in self.ranks.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatedMember:
    """A replica of an epoch. ``counts``: it is as far as the first."""

    replica: str
    step: int
    counts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRoster:
    """What Redis knows of a group: ``members`` are those of the last epoch in the order of their ranks."""

    world: int = 1
    timeout: int = 60_000
    grace: int = 3_000
    lease: int = 10_000
    epoch: int = 0
    serial: int = 0
    opened: int = 0
    #: The epoch whose state the first member of the last epoch brought.
    base: int = 0
    replicas: Mapping[str, ReplicaEntry] = field(default_factory=dict)
    suspects: frozenset[str] = frozenset()
    members: tuple[SeatedMember, ...] = ()

    @property
    def state(self) -> str:
        return "changing" if self.opened else "formed" if self.epoch else "forming"

    def enter(
        self,
        replica: str,
        rank: int,
        entry: RankEntry,
        now: int,
        *,
        suspects: frozenset[str] = frozenset(),
        unmet: frozenset[str] = frozenset(),
    ) -> GroupRoster:
        """A rank asks for the next epoch, or says that it is there (not ``entry.wants``)."""
        replicas, serial, said = dict(self.replicas), self.serial, entry.epoch
        mine = replicas.get(replica)
        if mine is None:
            serial += 1
            mine = ReplicaEntry(since=serial, ranks={})
        held = mine.ranks.get(rank)
        if held is not None:
            if entry.step > held.step:  # its groups have stood since
                mine = replace(mine, pause=0)
            entry = replace(entry, epoch=max(entry.epoch, held.epoch))
        mine = replace(mine, ranks={**mine.ranks, rank: entry})
        replicas[replica] = mine
        suspected = self.suspects - {replica}
        before = replace(self, replicas=replicas)
        if entry.wants:
            suspected |= (suspects & replicas.keys()) - {replica}
            for name in sorted((unmet & replicas.keys()) - {replica}):
                # The one that has the weights goes on; of two that have them, the older one.
                loser = max((replica, name), key=lambda one: (not before._counted(one), before.replicas[one].since))
                replicas[loser] = _paused(replicas[loser], now)
        found = replace(self, replicas=replicas, serial=serial, suspects=suspected)
        if said > self.epoch:  # Redis has lost that epoch
            found = replace(found, epoch=said, members=())
        elif said == self.epoch > 0 and self.members and all(one.replica != replica for one in self.members):
            # An empty Redis has given the number again: all who were ever in an epoch meet, and nobody goes on alone.
            found = replace(found, epoch=said + 1, base=said + 1, members=())
        return found.form(now)

    def depart(self, replica: str, now: int) -> GroupRoster:
        """A rank has left or died, and its replica with it, because the others lack its part."""
        return self.without(replica).form(now)

    def without(self, replica: str) -> GroupRoster:
        """The roster without a replica; nobody has looked whether the next epoch can form."""
        left = {name: one for name, one in self.replicas.items() if name != replica}
        return replace(self, replicas=left, suspects=self.suspects - {replica})

    def serve(self, replica: str, served: bool) -> GroupRoster:
        """The agents of a replica answer, or do not. Redis learns it by their leases, not by an event."""
        return replace(self, replicas={**self.replicas, replica: replace(self.replicas[replica], served=served)})

    def previous(self, name: str) -> bool:
        """Whether a replica was in the last epoch."""
        return self.epoch > 0 and any(r.epoch == self.epoch for r in self.replicas[name].ranks.values())

    def _counted(self, name: str) -> bool:
        """Whether a replica was in the last epoch, and as far as the first."""
        return self.previous(name) and any(one.replica == name and one.counts for one in self.members)

    def _heir(self, name: str) -> bool:
        """Whether a replica has what the last epoch has committed, but for a step."""
        return self._counted(name) or self.replicas[name].progress[0] == self.epoch > 0

    def _wants(self, name: str) -> bool:
        return any(r.wants for r in self.replicas[name].ranks.values())

    def _complete(self, name: str) -> bool:
        return self.replicas[name].complete(self.world)

    def _first_wish(self, now: int) -> bool:
        return any(
            (self._complete(name) and one.not_before <= now) or (self.previous(name) and self._wants(name))
            for name, one in self.replicas.items()
        )

    def _deadline(self, name: str) -> int:
        patient = self.previous(name) and self.replicas[name].served and name not in self.suspects
        return self.opened + (self.timeout if patient else self.grace)

    def form(self, now: int) -> GroupRoster:
        """The roster after the next epoch has formed, if the rule allows it; otherwise it waits."""
        found = self
        for name, one in self.replicas.items():
            if one.complete(self.world) and one.torn(True):
                found = found.without(name)
        if not found._first_wish(now):
            return replace(found, opened=0)
        found = replace(found, opened=found.opened or now)
        chosen, waits = found.ready(now), found.missing(now)
        least = max((found.replicas[name].ranks[0].least for name in chosen), default=1)
        if waits or len(chosen) < max(1, least):
            return found
        if found.replicas[chosen[0]].torn(False):
            return found.without(chosen[0]).form(now)
        return found._formed(chosen).form(now)

    def ready(self, now: int) -> list[str]:
        """The replicas that the next epoch may have, the most advanced first."""
        names = [
            name
            for name, one in self.replicas.items()
            if one.complete(self.world) and one.served and one.not_before <= now
        ]
        return sorted(names, key=lambda n: (*(-x for x in self.replicas[n].progress), self.replicas[n].since))

    def missing(self, now: int) -> list[str]:
        """The replicas that the next epoch waits for."""
        ready = self.ready(now)
        absent = [n for n in self.replicas if n not in ready]
        waits = [
            n
            for n in absent
            if self.replicas[n].not_before <= now and (self.previous(n) or self._wants(n)) and now < self._deadline(n)
        ]
        if waits:
            return waits
        # A Redis that was away knows of no agent until that has renewed its lease.
        silent = self.opened + self.grace + self.lease
        may_come = [n for n in absent if self.replicas[n].served or now < silent]
        if not any(self._heir(name) for name in ready):  # rule 3
            waits = [n for n in may_come if self.previous(n)]
        if not waits and ready and self.replicas[ready[0]].progress[0] < self.base:  # rule 4
            waits = [n for n in may_come if self.replicas[n].admitted]
        return waits

    def _formed(self, chosen: list[str]) -> GroupRoster:
        epoch, top = self.epoch + 1, self.replicas[chosen[0]].progress
        replicas = dict(self.replicas)
        members = []
        for name in chosen:
            one = replicas[name]
            members.append(SeatedMember(replica=name, step=one.progress[1], counts=one.progress == top))
            ranks = {rank: replace(entry, epoch=epoch, wants=False) for rank, entry in one.ranks.items()}
            replicas[name] = replace(one, ranks=ranks)
        return replace(
            self, epoch=epoch, opened=0, base=top[0], suspects=frozenset(), replicas=replicas, members=tuple(members)
        )


def _paused(one: ReplicaEntry, now: int) -> ReplicaEntry:
    """A replica that could not reach an older one waits, longer each time."""
    if one.not_before > now:
        return one
    pause = min(60_000, max(5_000, 2 * one.pause))
    return replace(one, pause=pause, not_before=now + pause)
