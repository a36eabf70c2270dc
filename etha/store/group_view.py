"""An elastic group with its replicas, as Redis has it, for whoever looks at it; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from etha.config import MAX_WORLD, NAME
from etha.store.reading import FieldReader
from etha.store.records import RankHolder

#: Most replicas of a group that are read.
_MOST_REPLICAS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRank:
    """One rank of a replica. ``epoch``: the last that it was admitted to. ``wants``: it has asked for the next one."""

    rank: int
    holder: RankHolder
    epoch: int
    step: int
    least: int
    wants: bool

    @classmethod
    def read(cls, key: str, name: str, text: str) -> GroupRank:
        """From one field of a replica's hash."""
        number = FieldReader(key, {name: name}).integer(name, most=MAX_WORLD - 1)
        read = FieldReader(key, {name: text}).json_object(name)
        holder = RankHolder(
            agent=read.name("agent"),
            host=read.text("host", most=500),
            pid=read.integer("pid", least=1),
            start=read.integer("start"),
            name=read.text("name", most=500, default=""),
        )
        return cls(
            rank=number,
            holder=holder,
            epoch=read.integer("epoch"),
            step=read.integer("step"),
            least=read.integer("least", default=1),
            wants=read.values.get("wants") is True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReplica:
    """One replica. ``place``: its rank in the last epoch, None if it is in none; ``counts``: it was not behind then.

    ``served``: the agents of all its ranks answer.
    """

    name: str
    place: int | None
    counts: bool
    ranks: tuple[GroupRank, ...]
    served: bool = True

    @property
    def step(self) -> int:
        """The step that all its ranks had committed when they last asked for an epoch."""
        return min((one.step for one in self.ranks), default=0)

    def line(self) -> dict[str, Any]:
        """For ``etha status --json``."""
        return {
            "replica": self.name,
            "step": self.step,
            "served": self.served,
            "ranks": [_process(one.rank, one.holder) for one in self.ranks],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A group. ``world``: ranks of each replica. ``waits``: seconds since the first has asked for the next epoch."""

    name: str
    state: str
    epoch: int
    world: int
    step: int
    broken: bool
    waits: float | None
    replicas: tuple[GroupReplica, ...]

    @staticmethod
    def replica_names(key: str, values: Mapping[str, str]) -> tuple[str, ...]:
        """The names of a group's replicas."""
        read = FieldReader(key, values)
        names = read.json("replicas", "[]")
        if not isinstance(names, list) or not all(isinstance(n, str) and NAME.fullmatch(n) for n in names):
            raise read.wrong("replicas", "a JSON list of names")
        return tuple(names[:_MOST_REPLICAS])

    @classmethod
    def read(
        cls, key: str, name: str, values: Mapping[str, str], replicas: Mapping[str, Mapping[str, str]], now: int
    ) -> GroupView:
        """From the group's hash and its replicas'. ``now``: ms since 1970. ProtocolError names what is wrong."""
        read = FieldReader(key, values)
        epoch, opened = read.integer("epoch"), read.integer("opened", default=0)
        seated = read.json("members", "[]")
        if not isinstance(seated, list) or not all(isinstance(one, dict) for one in seated):
            raise read.wrong("members", "a JSON list of objects")
        places = {one.get("replica"): (number, one.get("counts") is True) for number, one in enumerate(seated)}
        found = []
        for replica, fields in sorted(replicas.items()):
            at = f"{key}:{replica}"
            ranks = sorted(
                (GroupRank.read(at, field, text) for field, text in fields.items() if field.isdigit()),
                key=lambda one: one.rank,
            )
            in_epoch = epoch > 0 and any(one.epoch == epoch for one in ranks)
            place, counts = places.get(replica, (None, False)) if in_epoch else (None, False)
            if ranks:
                found.append(GroupReplica(name=replica, place=place, counts=counts, ranks=tuple(ranks)))
        steps = [FieldReader(key, one).integer("step", default=0) for one in seated]
        return cls(
            name=name,
            state=read.one_of("state", ("forming", "formed", "changing")),
            epoch=epoch,
            world=read.integer("world", least=1, most=MAX_WORLD, default=1),
            step=max(steps, default=0),
            broken=read.text("broken", most=1, default="0") == "1",
            waits=max(0, now - opened) / 1000 if opened else None,
            replicas=tuple(found),
        )

    def ranks(self) -> Iterator[GroupRank]:
        """All ranks of all replicas."""
        for one in self.replicas:
            yield from one.ranks

    def silenced(self, agents: set[str]) -> GroupView:
        """The same, with the replicas marked that have ranks at ``agents``, which do not answer."""
        marked = tuple(
            replace(one, served=not any(rank.holder.agent in agents for rank in one.ranks)) for one in self.replicas
        )
        return replace(self, replicas=marked)

    def missing(self) -> list[dict[str, Any]]:
        """The ranks that have not asked for the next epoch though somebody of their replica, or of the epoch, has.

        ``pid`` is None if nobody has come for a rank.
        """
        opened = self.waits is not None
        found = []
        for one in self.replicas:
            if not (any(rank.wants for rank in one.ranks) or (opened and one.place is not None)):
                continue
            here = {rank.rank: rank for rank in one.ranks}
            for number in range(self.world):
                rank = here.get(number)
                if rank is None or not rank.wants:
                    holder = None if rank is None else rank.holder
                    found.append({"replica": one.name, **_process(number, holder)})
        return found

    def line(self) -> dict[str, Any]:
        """For ``etha status --json``, but for the steps of members since the epoch has formed."""
        inside = sorted((one for one in self.replicas if one.place is not None), key=lambda one: one.place or 0)
        complete = [one for one in self.replicas if len(one.ranks) == self.world and all(r.wants for r in one.ranks)]
        return {
            "group": self.name,
            "state": self.state,
            "epoch": self.epoch,
            "step": self.step,
            "world_size": self.world,
            "broken": self.broken,
            "members": [{**one.line(), "rank": one.place, "counts": one.counts} for one in inside],
            "joining": [one.line() for one in self.replicas if one.place is None],
            "waits": self.waits,
            "waiting_for": self.missing(),
            "min_replicas": max((rank.least for rank in self.ranks() if rank.wants), default=1),
            "complete": len(complete),
        }


def _process(rank: int, holder: RankHolder | None) -> dict[str, Any]:
    if holder is None:
        return {"rank": rank, "host": "", "pid": None}
    return {"rank": rank, "host": holder.shown_host, "pid": holder.pid}
