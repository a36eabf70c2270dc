"""Agents and pairs as the store holds them, as values; pure. Batches are in ``rosters``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Literal

from etha.config import MAX_WORLD, NAME
from etha.errors import ProtocolError, note_of_log
from etha.store.reading import FieldReader

PairStatus = Literal["forming", "formed", "lost", "closed"]
Reason = Literal["relaunched", "closed", "died"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord:
    """One live agent. ``address`` is HOST:PORT of its links; empty if it takes none.

    ``data_address`` is that of its data port; "" stands for PORT+1. ``bound`` is HOST:PORT of its links for agents on
    its own host (data on PORT+1); "" stands for ``address``.
    """

    id: str
    host: str
    device: str
    pid: int
    address: str
    public_key: str
    started_at: float
    version: str
    data_address: str = ""
    bound: str = ""
    #: Name of its host, for people. ``host`` tells hosts apart.
    host_name: str = ""
    #: The file to which it logs; "-" for its terminal or its service, "" if it has not said so.
    log: str = ""
    #: HOST:PORT of its metrics, or why it has none; "" if nobody asked for them.
    metrics: str = ""
    #: Hex of the SHA-256 of the certificate that its data port shows; "" if data connections are not encrypted.
    certificate: str = ""

    @property
    def shown_host(self) -> str:
        """Name of its host in messages."""
        return self.host_name or self.host

    @property
    def log_note(self) -> str:
        """Where it logs, for the end of a message."""
        return note_of_log(self.log, self.shown_host)

    def to_redis(self) -> dict[str, str]:
        """The hash, without the id, which is in the key."""
        return {name: str(value) for name, value in asdict(self).items() if name != "id"}

    @classmethod
    def from_redis(cls, key: str, agent: str, values: Mapping[str, str]) -> AgentRecord:
        """From the hash at ``key``. ProtocolError names the field that is wrong."""
        read = FieldReader(key, {**values, "id": agent})
        return cls(
            id=read.name("id"),
            host=read.text("host", most=500),
            device=read.text("device", most=200),
            pid=read.integer("pid", least=1),
            address=read.text("address", most=500),
            public_key=read.text("public_key", most=500),
            started_at=read.seconds("started_at"),
            version=read.text("version", most=100),
            host_name=read.text("host_name", most=500, default=""),
            data_address=read.text("data_address", most=500) if "data_address" in values else "",
            bound=read.text("bound", most=500) if "bound" in values else "",
            log=read.text("log", most=5000, default=""),
            metrics=read.text("metrics", most=5000, default=""),
            certificate=read.text("certificate", most=64, default=""),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHolder:
    """A worker that holds a rank. ``start`` is in clock ticks after boot (see ``process``).

    The join sets ``launch`` and ``epoch`` (the one that it waits for or is in).
    """

    agent: str
    host: str
    pid: int
    start: int
    launch: str = ""
    epoch: int = 0
    #: Name of its host, for people.
    name: str = ""

    @property
    def shown_host(self) -> str:
        """Name of its host in messages."""
        return self.name or self.host

    def is_same(self, other: RankHolder | None) -> bool:
        """Whether it is the same process behind the same agent, whatever its launch and epoch."""
        return other is not None and self.holder() == other.holder()

    def holder(self) -> dict[str, Any]:
        """The fields that identify it, without launch and epoch."""
        return {"agent": self.agent, "host": self.host, "pid": self.pid, "start": self.start, "name": self.name}

    @classmethod
    @lru_cache(maxsize=1 << 16)  # a pair of many ranks is read often and changes little
    def from_json(cls, key: str, rank: str, text: str) -> RankHolder:
        """From one field of the side's hash at ``key``."""
        read = FieldReader(key, {rank: text}).json_object(rank)
        return cls(
            agent=read.name("agent"),
            host=read.text("host", most=500),
            pid=read.integer("pid", least=1),
            start=read.integer("start"),
            name=read.text("name", most=500, default=""),
            launch=read.text("launch", most=500),
            epoch=read.integer("epoch"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SideView:
    """One side of a pair. ``world_size`` and ``launch`` are None before its first rank has come."""

    world_size: int | None = None
    launch: str | None = None
    members: Mapping[int, RankHolder] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairState:
    """The cheap part of a pair. Read this at every wake-up, and the whole view only if it has changed."""

    name: str
    state: PairStatus
    epoch: int
    reason: Reason | None = None
    error: str = ""

    def same_as(self, other: PairState) -> bool:
        """Whether state, epoch and reason are the same; members are not compared."""
        return (self.state, self.epoch, self.reason) == (other.state, other.epoch, other.reason)

    @classmethod
    def from_redis(cls, key: str, name: str, values: Mapping[str, str]) -> PairState:
        """From the hash at ``key``. ProtocolError names the field that is wrong."""
        read = FieldReader(key, values)
        reason = read.one_of("reason", ("", "relaunched", "closed", "died"), "")
        return cls(
            name=name,
            state=read.one_of("state", ("forming", "formed", "lost", "closed")),  # type: ignore[arg-type]
            epoch=read.integer("epoch"),
            reason=reason or None,  # type: ignore[arg-type]
            error=read.text("error", default=""),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PairView(PairState):
    """A pair with its members. ``sides`` maps the two side names, sorted."""

    sides: Mapping[str, SideView] = field(default_factory=dict)
    #: Of a lost pair: the (side, rank) whose agents are gone, if that is why.
    culprits: tuple[tuple[str, int], ...] = ()

    def member(self, side: str, rank: int) -> RankHolder | None:
        """Who holds ``rank`` of ``side``, if anybody."""
        return self.sides[side].members.get(rank) if side in self.sides else None

    def lists_all(self) -> bool:
        """Whether each rank of both sides has a holder.

        A formed pair lacks some only after Redis has lost its data, until each agent has put its own ranks back.
        """
        return all(len(side.members) == side.world_size for side in self.sides.values())

    def missing(self) -> dict[str, tuple[int, ...]]:
        """Ranks for which the next epoch still waits. Rank 0 stands for a side of which nobody has come."""
        if self.state == "formed":
            return {}
        found = {}
        for name, side in self.sides.items():
            here = {rank for rank, member in side.members.items() if member.epoch == self.epoch + 1}
            ranks = tuple(rank for rank in range(side.world_size or 1) if rank not in here)
            if ranks:
                found[name] = ranks
        return found

    @classmethod
    def read(cls, key: str, name: str, values: Mapping[str, str], members: Mapping[str, Mapping[str, str]]) -> PairView:
        """From the pair's hash and, for each side, the side's hash."""
        state = PairState.from_redis(key, name, values)
        names = side_names(key, values)
        read = FieldReader(key, values)
        worlds, launches = read.json_object("world_sizes"), read.json_object("launches")
        sides = {}
        for side in names:
            known = side in worlds.values
            sides[side] = SideView(
                world_size=worlds.integer(side, least=1, most=MAX_WORLD) if known else None,
                launch=launches.text(side, most=500) if known else None,
                members=_members(f"{key}:{side}", members.get(side, {})),
            )
        return cls(
            name=name,
            state=state.state,
            epoch=state.epoch,
            reason=state.reason,
            error=state.error,
            sides=sides,
            culprits=_culprits(read),
        )


def side_names(key: str, values: Mapping[str, str]) -> tuple[str, ...]:
    """The two side names of a pair's hash, sorted."""
    read = FieldReader(key, values)
    names = read.json("sides", "[]")
    if (
        not isinstance(names, list)
        or len(names) != 2
        or not all(isinstance(n, str) and NAME.fullmatch(n) for n in names)
    ):
        raise read.wrong("sides", "a JSON list of two side names")
    return tuple(sorted(names))


def _culprits(read: FieldReader) -> tuple[tuple[str, int], ...]:
    found = read.json("culprits", "[]")
    match found:
        case [*members] if all(
            isinstance(m, list) and len(m) == 2 and isinstance(m[0], str) and type(m[1]) is int for m in members
        ):
            return tuple((side, rank) for side, rank in members)
    raise read.wrong("culprits", "a JSON list of [side, rank]")


def _members(key: str, values: Mapping[str, str]) -> dict[int, RankHolder]:
    if len(values) > MAX_WORLD:
        raise ProtocolError(f"Redis key {key!r} has {len(values)} fields, at most {MAX_WORLD} ranks are possible")
    found = {}
    for rank, text in values.items():
        number = FieldReader(key, {rank: rank}).integer(rank, most=MAX_WORLD - 1)
        found[number] = RankHolder.from_json(key, rank, text)
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """A group at one moment, without its members."""

    state: str
    epoch: int
    #: A replica of the epoch has left or died.
    broken: bool

    @classmethod
    def from_redis(cls, key: str, values: Mapping[str, str]) -> GroupState:
        read = FieldReader(key, values)
        return cls(
            state=read.one_of("state", ("forming", "formed", "changing")),
            epoch=read.integer("epoch"),
            broken=read.text("broken", most=1, default="0") == "1",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatedReplica:
    """One replica of an epoch. ``counts``: it is as far as the first, so it takes part; others only watch.

    ``last``: the last epoch whose state it has.
    """

    replica: str
    launch: str
    last: int
    step: int
    committed: int
    counts: bool
    processes: tuple[RankHolder, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Absentee:
    """A rank that the next epoch waits for. ``holder`` is None if nobody has come for it."""

    replica: str
    rank: int
    holder: RankHolder | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    """What a rank that enters is answered. ``members``: those of the epoch in the order of their ranks, if the rank is
    in it (``formed``).

    ``wait`` is the number of seconds after which the same question may be answered otherwise though nobody has come or
    left; 0 if never. ``apart``: the agents of the replicas that this one could not reach when it last tried.
    """

    epoch: int
    state: str
    launch: str
    formed: bool
    wait: float
    missing: tuple[Absentee, ...]
    members: tuple[SeatedReplica, ...]
    apart: tuple[str, ...]

    @classmethod
    def read(cls, key: str, answer: Mapping[str, Any]) -> Seating:
        """From the answer of ``enter.lua``. ProtocolError names what is wrong."""
        read = FieldReader(key, {**answer, "epoch": int(answer["epoch"])})
        members = read.json("members", "[]")
        # {}: an empty list of Lua's.
        missing, apart = (answer[name] if isinstance(answer[name], list) else [] for name in ("missing", "apart"))
        if not isinstance(members, list):
            raise read.wrong("members", "a JSON list")
        return cls(
            epoch=read.integer("epoch"),
            state=read.text("state", most=20),
            launch=read.text("launch", most=500),
            formed=bool(answer["formed"]),
            wait=float(answer["wait"]) / 1000,
            missing=tuple(_absentee(key, one) for one in missing),
            members=tuple(_seated(key, one) for one in members),
            apart=tuple(str(one) for one in apart),
        )


def _seated(key: str, values: Mapping[str, Any]) -> SeatedReplica:
    read = FieldReader(key, values)
    return SeatedReplica(
        replica=read.name("replica"),
        launch=read.text("launch", most=500),
        last=read.integer("last"),
        step=read.integer("step"),
        committed=read.integer("committed"),
        counts=values.get("counts") is True,
        processes=tuple(_holder(key, one) for one in values.get("at", ())),
    )


def _absentee(key: str, values: Mapping[str, Any]) -> Absentee:
    read = FieldReader(key, values)
    holder = _holder(key, values) if "agent" in values else None
    return Absentee(replica=read.name("replica"), rank=read.integer("rank", most=MAX_WORLD - 1), holder=holder)


def _holder(key: str, values: Mapping[str, Any]) -> RankHolder:
    read = FieldReader(key, values)
    return RankHolder(
        agent=read.name("agent"),
        host=read.text("host", most=500),
        pid=read.integer("pid", least=1),
        start=read.integer("start"),
        name=read.text("name", most=500, default=""),
    )
