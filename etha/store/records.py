"""What the store holds, as values; pure.

Redis is shared with people and other programs, so whatever is read is checked like a stranger's: a value that
is not what the key table says raises ProtocolError naming the key and the field. Sizes are bounded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from etha.config import NAME
from etha.errors import ProtocolError

#: Ranks of one side, tensors of one manifest, bytes of one field: more is somebody's mistake.
MAX_WORLD = 1 << 20
MAX_NAMES = 200_000
MAX_FIELD = 64 << 10
MAX_LAYOUT = 16 << 20

PairStatus = Literal["forming", "formed", "lost"]
Reason = Literal["relaunched", "closed", "died"]
_MAX_INT = (1 << 63) - 1


class _Reader:
    """One hash, or one JSON object inside it, read field by field with checks."""

    def __init__(self, key: str, values: Mapping[str, Any]) -> None:
        self.key, self.values = key, values

    def wrong(self, name: str, expected: str) -> ProtocolError:
        found = repr(self.values.get(name))
        found = found if len(found) <= 80 else found[:77] + "..."
        return ProtocolError(f"Redis key {self.key!r}: field {name!r} is {found}, expected {expected}")

    def text(self, name: str, *, most: int = MAX_FIELD, default: str | None = None) -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str) or len(value) > most:
            raise self.wrong(name, f"text of at most {most} characters")
        return value

    def name(self, name: str) -> str:
        value = self.text(name)
        if NAME.fullmatch(value) is None:
            raise self.wrong(name, "1 to 100 of A-Z a-z 0-9 . _ -")
        return value

    def integer(self, name: str, *, least: int = 0, most: int = _MAX_INT, default: int | None = None) -> int:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, str) and value.isascii() and value.lstrip("-").isdigit() and len(value) <= 20:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(name, f"a whole number from {least} to {most}")
        return value

    def seconds(self, name: str, *, default: float | None = None) -> float:
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        try:
            number = float(self.text(name, most=40))
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf:
            raise self.wrong(name, "a number of seconds")
        return number

    def one_of(self, name: str, choices: tuple[str, ...], default: str | None = None) -> str:
        value = self.values.get(name, default)
        if value not in choices:
            raise self.wrong(name, "one of " + ", ".join(map(repr, choices)))
        return str(value)

    def json(self, name: str, default: str) -> Any:
        try:
            return json.loads(self.text(name, default=default))
        except ValueError:
            raise self.wrong(name, "JSON") from None

    def json_object(self, name: str) -> _Reader:
        value = self.json(name, "{}")
        if not isinstance(value, dict):
            raise self.wrong(name, "a JSON object")
        return _Reader(f"{self.key} {name}", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord:
    """One live agent; ``address`` is HOST:PORT of its links, empty when it takes none."""

    id: str
    host: str
    device: str
    pid: int
    address: str
    public_key: str
    started_at: float
    version: str

    def to_redis(self) -> dict[str, str]:
        return {name: str(value) for name, value in asdict(self).items() if name != "id"}

    @classmethod
    def from_redis(cls, key: str, agent: str, values: Mapping[str, str]) -> AgentRecord:
        read = _Reader(key, {**values, "id": agent})
        return cls(
            id=read.name("id"),
            host=read.text("host", most=500),
            device=read.text("device", most=200),
            pid=read.integer("pid", least=1),
            address=read.text("address", most=500),
            public_key=read.text("public_key", most=500),
            started_at=read.seconds("started_at"),
            version=read.text("version", most=100),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A worker that holds a rank. ``start`` is in clock ticks after boot (see ``process``).

    ``launch`` and ``epoch`` (which one it waits for or is in) are given by the join.
    """

    agent: str
    host: str
    pid: int
    start: int
    launch: str = ""
    epoch: int = 0

    def is_same(self, other: Member | None) -> bool:
        """The same process behind the same agent, whatever launch and epoch."""
        return other is not None and self.holder() == other.holder()

    def holder(self) -> dict[str, Any]:
        """Who it is, without launch and epoch."""
        return {"agent": self.agent, "host": self.host, "pid": self.pid, "start": self.start}

    @classmethod
    def from_json(cls, key: str, rank: str, text: str) -> Member:
        read = _Reader(key, {rank: text}).json_object(rank)
        return cls(
            agent=read.name("agent"),
            host=read.text("host", most=500),
            pid=read.integer("pid", least=1),
            start=read.integer("start"),
            launch=read.text("launch", most=500),
            epoch=read.integer("epoch"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SideView:
    """One side of a pair; ``world_size`` and ``launch`` are None before its first rank came."""

    world_size: int | None = None
    launch: str | None = None
    members: Mapping[int, Member] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairState:
    """The cheap part of a pair: read this on every nudge, and the whole view when it has changed."""

    name: str
    state: PairStatus
    epoch: int
    reason: Reason | None = None
    error: str = ""

    @classmethod
    def from_redis(cls, key: str, name: str, values: Mapping[str, str]) -> PairState:
        read = _Reader(key, values)
        reason = read.one_of("reason", ("", "relaunched", "closed", "died"), "")
        return cls(
            name=name,
            state=read.one_of("state", ("forming", "formed", "lost")),  # type: ignore[arg-type]
            epoch=read.integer("epoch"),
            reason=reason or None,  # type: ignore[arg-type]
            error=read.text("error", default=""),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PairView(PairState):
    """A pair with its members; ``sides`` maps the two side names, sorted."""

    sides: Mapping[str, SideView] = field(default_factory=dict)

    def member(self, side: str, rank: int) -> Member | None:
        return self.sides[side].members.get(rank) if side in self.sides else None

    def missing(self) -> dict[str, tuple[int, ...]]:
        """Ranks that the next epoch still waits for; rank 0 stands for a side of which nobody has come."""
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
        """From the pair's hash and, per side, the side's hash."""
        state = PairState.from_redis(key, name, values)
        names = side_names(key, values)
        read = _Reader(key, values)
        worlds, launches = read.json_object("world_sizes"), read.json_object("launches")
        sides = {}
        for side in names:
            known = side in worlds.values
            sides[side] = SideView(
                world_size=worlds.integer(side, least=1, most=MAX_WORLD) if known else None,
                launch=launches.text(side, most=500) if known else None,
                members=_members(f"{key}:{side}", members.get(side, {})),
            )
        return cls(name=name, state=state.state, epoch=state.epoch, reason=state.reason, error=state.error, sides=sides)


def side_names(key: str, values: Mapping[str, str]) -> tuple[str, ...]:
    """The two side names of a pair's hash, sorted."""
    read = _Reader(key, values)
    names = read.json("sides", "[]")
    if (
        not isinstance(names, list)
        or len(names) != 2
        or not all(isinstance(n, str) and NAME.fullmatch(n) for n in names)
    ):
        raise read.wrong("sides", "a JSON list of two side names")
    return tuple(sorted(names))


def _members(key: str, values: Mapping[str, str]) -> dict[int, Member]:
    if len(values) > MAX_WORLD:
        raise ProtocolError(f"Redis key {key!r} has {len(values)} fields, at most {MAX_WORLD} ranks are possible")
    found = {}
    for rank, text in values.items():
        number = _Reader(key, {rank: rank}).integer(rank, most=MAX_WORLD - 1)
        found[number] = Member.from_json(key, rank, text)
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchView:
    """A batch on one pair; ``bytes`` of all targets, ``last_seconds`` of the last transfer (0.0: none yet)."""

    pair: str
    batch: str
    state: str
    generation: int
    epoch: int
    seq: int = 0
    version: int | str | None = None
    tensors: int = 0
    bytes: int = 0
    digest: str = ""
    transport: str = ""
    last_seconds: float = 0.0
    last_error: str = ""

    @classmethod
    def from_redis(cls, key: str, pair: str, batch: str, values: Mapping[str, str]) -> BatchView:
        read = _Reader(key, values)
        return cls(
            pair=pair,
            batch=batch,
            state=read.one_of("state", BATCH_STATES),
            generation=read.integer("generation"),
            epoch=read.integer("epoch"),
            seq=read.integer("seq", default=0),
            version=version_from_text(read.text("version", default="")),
            tensors=read.integer("tensors", default=0),
            bytes=read.integer("bytes", default=0),
            digest=read.text("digest", most=200, default=""),
            transport=read.text("transport", most=200, default=""),
            last_seconds=read.seconds("last_seconds", default=0.0),
            last_error=read.text("last_error", default=""),
        )


BATCH_STATES = ("registering", "registered", "moving", "refused", "closed")
BATCH_FIELDS = frozenset(BatchView.__dataclass_fields__) - {"pair", "batch"}


def version_to_text(version: int | str | None) -> str:
    """A version label as people read it; text that could be taken for a number is quoted as JSON."""
    if version is None:
        return ""
    if isinstance(version, int):
        return str(version)
    plain = version and version[0] != '"' and not version.lstrip("-").isdigit()
    return version if plain else json.dumps(version)


def version_from_text(text: str) -> int | str | None:
    """The inverse of ``version_to_text``."""
    if not text:
        return None
    if text[0] == '"':
        try:
            return str(json.loads(text))
        except ValueError:
            return text
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) < 4000 else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """One registration: per (side, rank) its record, per agent the digest of the plan that it computed."""

    generation: int
    entries: Mapping[tuple[str, int], str]
    verdicts: Mapping[str, str]
    closed: frozenset[tuple[str, int]] = frozenset()

    @classmethod
    def from_redis(cls, key: str, generation: int, values: Mapping[str, str]) -> Roster:
        read = _Reader(key, values)
        entries, verdicts, closed = {}, {}, set()
        for name in values:
            kind, _, rest = name.rpartition(":")
            side, slash, rank = rest.partition("/")
            if kind == "agent":
                verdicts[rest] = read.text(name, most=1000)
            elif kind in ("", "closed") and slash:
                if (
                    NAME.fullmatch(side) is None
                    or not (rank.isascii() and rank.isdigit())
                    or int(rank[:20]) >= MAX_WORLD
                ):
                    raise read.wrong(name, "a field named SIDE/RANK")
                if kind == "closed":
                    closed.add((side, int(rank)))
                else:
                    entries[side, int(rank)] = read.text(name)
        return cls(
            generation=generation, entries=dict(sorted(entries.items())), verdicts=verdicts, closed=frozenset(closed)
        )
