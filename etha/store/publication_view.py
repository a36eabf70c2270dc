"""A publication with its subscribers, holders and hops, as Redis has it, for whoever looks at it; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from etha.config import MAX_WORLD
from etha.store.publication_records import (
    HeldVersion,
    HolderState,
    PublishedTensor,
    SourceClaim,
    TensorTable,
    items,
    label,
    whole,
)
from etha.store.reading import FieldReader
from etha.store.records import RankHolder


def read_table(key: str, fields: Mapping[str, str], sets: Mapping[str, str]) -> TensorTable:
    """The table in the hash at ``key``. ``sets``: texts of sets of elements by digest."""
    return TensorTable({name: PublishedTensor.from_text(key, name, text) for name, text in fields.items()}, sets)


def read_holder(key: str, name: str, text: str) -> HolderState:
    """One field of the hash of holders. ProtocolError names what is wrong."""
    read = FieldReader(key, {name: text}).json_object(name)
    agents = read.values.get("agents")
    if not isinstance(agents, list) or not all(isinstance(one, str) for one in agents):
        raise read.wrong("agents", "a list of names")
    slots = {}
    for number, one in enumerate(items(read.key, read.values.get("slots"))):
        if seq := whole(one, "seq"):
            slots[number] = HeldVersion(
                slot=number, seq=seq, version=label(one, "version"), description=one.text("description", most=100)
            )
    return HolderState(
        side=read.name("side"),
        serial=whole(read, "serial"),
        launch=read.text("launch", most=500),
        world=whole(read, "world"),
        publisher=read.values.get("publisher") is True,
        orphan=read.values.get("orphan") is True,
        places=whole(read, "places"),
        used=whole(read, "used"),
        agents=tuple(agents),
        slots=slots,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriberView:
    """One subscriber. ``state``: "forming" (ranks are missing), "receiving", "waiting" (for a place at a holder),
    "current" (it holds the newest version), "behind" (it has not asked for it), "lost" (an agent of it is silent).

    ``lag`` is in versions; ``lag_seconds`` is how long there has been a newer one. ``source``: whom the running hop
    reads from, or the last one. ``readers``: who reads from it. ``seconds``: what its last hop took.
    """

    name: str
    serial: int
    world: int
    ranks: Mapping[int, RankHolder]
    seq: int
    version: int | str | None
    lag: int
    lag_seconds: float
    state: str
    source: str
    places: int
    readers: tuple[str, ...]
    error: str
    seconds: float

    def line(self) -> dict[str, Any]:
        """For ``etha publications --json``."""
        return {
            "subscriber": self.name,
            "state": self.state,
            "seq": self.seq,
            "version": self.version,
            "lag": self.lag,
            "lag_seconds": round(self.lag_seconds, 3),
            "source": self.source,
            "seconds": self.seconds,
            "places": self.places,
            "readers": list(self.readers),
            "world_size": self.world,
            "ranks": [{"rank": n, "host": one.shown_host, "pid": one.pid} for n, one in sorted(self.ranks.items())],
            "error": self.error,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationView:
    """A publication. ``publisher`` is the side that has published last; ``state`` "open", "closed" once it has left in
    order, or "lost" if it has died or its agent does not answer.

    ``age``: seconds since the newest version was announced, None before the first.
    """

    name: str
    state: str
    publisher: str
    launch: str
    seq: int
    version: int | str | None
    age: float | None
    description: str
    subscribers: tuple[SubscriberView, ...]
    holders: tuple[HolderState, ...]
    claims: tuple[SourceClaim, ...]
    queue: tuple[str, ...]
    publisher_ranks: Mapping[int, RankHolder]

    @classmethod
    def read(
        cls,
        key: str,
        name: str,
        values: Mapping[str, str],
        parts: Mapping[str, Mapping[str, str]],
        queue: Sequence[str],
        sides: Mapping[str, Mapping[str, str]],
        now: int,
    ) -> PublicationView:
        """From the publication's hash, those of its ``parts``, its queue and its sides. ``now``: ms since 1970.

        ProtocolError names what is wrong.
        """
        read = FieldReader(key, values)
        holders = tuple(read_holder(f"{key}:holders", n, text) for n, text in sorted(parts["holders"].items()))
        found = []
        for number in sorted(parts["claims"], key=lambda text: int(text) if text.isdigit() else 0):
            one = FieldReader(f"{key}:claims", parts["claims"]).json_object(number)
            found.append(SourceClaim.read(one.key, name, one.values))
        at = {
            int(seq): FieldReader(f"{key}:versions", parts["versions"]).json_object(seq).integer("at")
            for seq in parts["versions"]
            if seq.isdigit()
        }
        seq = read.integer("seq", default=0)
        publisher = read.text("publisher", most=100, default="")
        subscribers: list[SubscriberView] = []
        ranks: dict[int, RankHolder] = {}
        for side, fields in sorted(sides.items()):
            if not fields:
                continue
            if fields.get("role") == "publisher":
                ranks = _ranks(f"{key}:side:{side}", fields) if side == publisher else ranks
            else:
                subscribers.append(_subscriber(f"{key}:side:{side}", side, fields, found, queue, seq, at, now))
        return cls(
            name=name,
            state=read.one_of("state", ("open", "closed", "lost")),
            publisher=publisher,
            launch=read.text("launch", most=500, default=""),
            seq=seq,
            version=label(read, "version") if "version" in values else None,
            age=max(0, now - at[seq]) / 1000 if seq in at else None,
            description=read.text("description", most=100, default=""),
            subscribers=tuple(subscribers),
            holders=holders,
            claims=tuple(found),
            queue=tuple(queue),
            publisher_ranks=ranks,
        )

    def agents(self) -> set[str]:
        """The agents of all sides."""
        found = {one.agent for one in self.publisher_ranks.values()}
        return found.union(*({one.agent for one in side.ranks.values()} for side in self.subscribers))

    def silenced(self, agents: set[str]) -> PublicationView:
        """The same, with the subscribers marked as lost that have ranks at ``agents``, which do not answer."""
        marked = tuple(
            replace(one, state="lost") if any(rank.agent in agents for rank in one.ranks.values()) else one
            for one in self.subscribers
        )
        silent = bool(self.publisher_ranks) and any(one.agent in agents for one in self.publisher_ranks.values())
        return replace(self, subscribers=marked, state="lost" if silent and self.state == "open" else self.state)

    def line(self) -> dict[str, Any]:
        """For ``etha publications --json``."""
        return {
            "publication": self.name,
            "state": self.state,
            "publisher": self.publisher,
            "seq": self.seq,
            "version": self.version,
            "age": self.age,
            "subscribers": [one.line() for one in self.subscribers],
            "holders": [
                {
                    "holder": one.name,
                    "publisher": one.publisher,
                    "orphan": one.orphan,
                    "places": one.places,
                    "used": one.used,
                    "slots": [
                        {"slot": held.slot, "seq": held.seq, "version": held.version} for held in one.slots.values()
                    ],
                }
                for one in self.holders
            ],
            "hops": [
                {
                    "claim": one.number,
                    "source": one.holder,
                    "subscriber": one.subscriber,
                    "seq": one.seq,
                    "version": one.version,
                }
                for one in self.claims
            ],
            "queue": list(self.queue),
        }


def _ranks(key: str, fields: Mapping[str, str]) -> dict[int, RankHolder]:
    found = {}
    for name, text in fields.items():
        if name.isdigit():
            number = FieldReader(key, {name: name}).integer(name, most=MAX_WORLD - 1)
            read = FieldReader(key, {name: text}).json_object(name)
            found[number] = RankHolder(
                agent=read.name("agent"),
                host=read.text("host", most=500),
                pid=whole(read, "pid"),
                start=whole(read, "start"),
                name=read.text("name", most=500, default=""),
            )
    return found


def _subscriber(
    key: str,
    side: str,
    fields: Mapping[str, str],
    claims: Sequence[SourceClaim],
    queue: Sequence[str],
    newest: int,
    at: Mapping[int, int],
    now: int,
) -> SubscriberView:
    read = FieldReader(key, fields)
    serial, held = read.integer("serial"), read.integer("held", default=0)
    ranks, world = _ranks(key, fields), read.integer("world", least=1, most=MAX_WORLD)
    holder = f"{side}/{serial}"
    receives = [one for one in claims if (one.subscriber, one.serial) == (side, serial)]
    lag = max(0, newest - held)
    # The first version that it lacks, or the oldest of those that are remembered.
    newer = [when for seq, when in at.items() if seq > held]
    if len(ranks) < world:
        state = "forming"
    elif receives:
        state = "receiving"
    elif newest and held >= newest:
        state = "current"
    else:
        state = "waiting" if holder in queue else "behind"
    return SubscriberView(
        name=side,
        serial=serial,
        world=world,
        ranks=ranks,
        seq=held,
        version=label(read, "version") if "version" in fields else None,
        lag=lag,
        lag_seconds=max(0, now - min(newer)) / 1000 if lag and newer else 0.0,
        state=state,
        source=receives[0].holder if receives else read.text("source", most=300, default=""),
        places=read.integer("places", default=0),
        readers=tuple(one.subscriber for one in claims if one.holder == holder),
        error=read.text("unfit", default="") or read.text("error", default=""),
        seconds=read.seconds("seconds", default=0.0),
    )
