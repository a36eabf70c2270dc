"""What the scripts of publications take and answer, as values that check themselves; pure.

A *side* is the publisher or one subscriber. Each launch of a side has a number, its ``serial``, and SIDE/SERIAL names a
*holder*: the buffers in which that launch keeps versions. Times are seconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from etha.config import MAX_TENSOR_NAME, MAX_WORLD, MAX_ZONE, check_name
from etha.errors import ConfigError
from etha.store.reading import FieldReader

Role = Literal["publisher", "subscriber"]
#: All elements of a tensor, as ``element_set`` writes it.
WHOLE = "*"
#: Longer texts of element sets are not kept: such a side feeds only those that have the same, and is fed by those that
#: have all.
MAX_ELEMENT_SET = 1 << 16
#: Most slots of one side.
MAX_SLOTS = 16
_MOST_TENSORS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTensor:
    """One tensor of a side: torch's dtype without "torch.", global shape, and the part that its ranks have together.

    ``covers`` is "*" for all of it, else the digest of the set of elements: two sides with equal digests have the same.
    ``tied``: "" if it has memory of its own, else a mark that all tensors have which share its memory.
    """

    dtype: str
    shape: tuple[int, ...]
    covers: str = WHOLE
    tied: str = ""

    def text(self) -> str:
        """As one field of the table's hash: DTYPE, SHAPE, COVERS and, if it has one, TIED, separated by spaces."""
        return f"{self.dtype} [{','.join(map(str, self.shape))}] {self.covers} {self.tied}".rstrip()

    @classmethod
    def from_text(cls, key: str, name: str, text: str) -> PublishedTensor:
        """From one field of the hash at ``key``. ProtocolError names the field."""
        wrong = FieldReader(key, {name: text}).wrong(name, "DTYPE [SIZE,...] COVERS [TIED]")
        dtype, _, rest = text.partition(" [")
        sizes, _, rest = rest.partition("] ")
        covers, _, tied = rest.partition(" ")
        if not dtype or not covers or not all(one.isdigit() for one in sizes.split(",") if sizes):
            raise wrong
        return cls(dtype=dtype, shape=tuple(int(one) for one in sizes.split(",") if sizes), covers=covers, tied=tied)


@dataclass(frozen=True, slots=True)
class TensorTable:
    """The tensors of a side by name. The publisher's table is the description of its versions.

    ``sets``: the text of each set of elements by its digest, as ``element_set`` writes it.
    """

    tensors: Mapping[str, PublishedTensor]
    sets: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < len(self.tensors) <= _MOST_TENSORS:
            raise ConfigError(f"{len(self.tensors)} tensors: 1 to {_MOST_TENSORS} can be published")
        for name in self.tensors:
            if not 0 < len(name) <= MAX_TENSOR_NAME:
                raise ConfigError(f"tensor name of {len(name)} characters: 1 to {MAX_TENSOR_NAME} are allowed")

    def to_redis(self) -> dict[str, str]:
        """The hash."""
        return {name: one.text() for name, one in sorted(self.tensors.items())}

    def elements(self, name: str) -> str | None:
        """The set of elements that the side has of a tensor, as ``element_set`` writes it; None if it is not kept."""
        covers = self.tensors[name].covers
        return covers if covers == WHOLE else self.sets.get(covers)

    @property
    def digest(self) -> str:
        """Equal for equal tables."""
        return hashlib.sha256(json.dumps(self.to_redis()).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRank:
    """A rank of a side that waits for the others before it enters. ``manifest`` is the digest of what it has
    registered, ``launch`` "" if it has no name.

    ``token``: another one each time that a rank comes. ``company``: what ``company_of`` says of the ranks that it has
    seen together; "" before it has seen all.
    """

    world: int
    launch: str
    manifest: str
    pid: int
    token: str
    company: str = ""


def company_of(ranks: Mapping[int, WaitingRank]) -> str:
    """A digest of which ranks these are. Equal on two ranks only if each has seen what the other waits with now: a rank
    that was killed while it waited may be listed still, and never answers."""
    text = ",".join(f"{rank}:{ranks[rank].token}" for rank in sorted(ranks))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationRank:
    """One rank of a side that enters a publication. All ranks of a launch give the same values, but for ``rank``.

    ``places``: how many subscribers it serves at once (the publisher's ``fan_out``; 0: it does not serve). ``slots``:
    versions that it keeps at once. ``passes``: whether a subscriber's agents pass on what it is still receiving.
    ``copies``: of the publisher, how many copies of one version it gives while another holder has that version; None
    for no limit. ``serial`` is 0, or what an agent puts back after Redis has lost it. ``run``: torchrun's run id, if
    ``launch`` is made of it; it replaces a launch of another run that lives only with ``takeover``.
    """

    publication: str
    side: str
    role: Role
    rank: int
    world: int
    tensors: TensorTable
    launch: str | None = None
    run: str | None = None
    takeover: bool = False
    zone: str = ""
    slots: int = 1
    places: int = 1
    passes: bool = False
    copies: int | None = None
    serial: int = 0

    def __post_init__(self) -> None:
        check_name("publication", self.publication)
        check_name(self.role, self.side)
        where = f"publication {self.publication}, {self.role} {self.side}"
        if not 1 <= self.world <= MAX_WORLD or not 0 <= self.rank < self.world:
            raise ConfigError(f"{where}: rank {self.rank} is no rank of a side of {self.world} ranks")
        if self.launch is not None and not 0 < len(self.launch) <= 500:
            raise ConfigError(f"{where}: launch id of {len(self.launch)} characters: 1 to 500 are allowed")
        if not 1 <= self.slots <= MAX_SLOTS:
            raise ConfigError(f"{where}: slots={self.slots}: 1 to {MAX_SLOTS} are allowed")
        if not 0 <= self.places <= MAX_WORLD or (self.role == "publisher" and self.places < 1):
            least = "fan_out" if self.role == "publisher" else "places"
            raise ConfigError(f"{where}: {least}={self.places} is not {int(self.role == 'publisher')} to {MAX_WORLD}")
        if self.copies is not None and self.copies < 1:
            raise ConfigError(f"{where}: copies={self.copies}: give at least 1, or None for no limit")
        if len(self.zone) > MAX_ZONE:
            raise ConfigError(f"{where}: zone of {len(self.zone)} characters: at most {MAX_ZONE} are allowed")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationSide:
    """What a rank that enters is answered. ``complete``: all ranks of its side are there.

    ``puts``: versions that this launch has announced. ``held``: seq of the version that the side holds, 0 for none.
    ``seq`` and ``version``: the newest of the publication, 0 and None before the first.
    """

    serial: int
    launch: str
    complete: bool
    puts: int
    held: int
    seq: int
    version: int | str | None
    description: str

    @classmethod
    def read(cls, key: str, answer: Mapping[str, Any]) -> PublicationSide:
        """From a script's answer. ProtocolError names what is wrong."""
        read = FieldReader(key, answer)
        return cls(
            serial=whole(read, "serial"),
            launch=read.text("launch", most=500),
            complete=answer.get("complete") is True,
            puts=whole(read, "puts"),
            held=whole(read, "held"),
            seq=whole(read, "seq"),
            version=label(read, "version"),
            description=read.text("description", most=100),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A claim that reads a buffer which somebody wants to overwrite. ``protected``: it was ended once by a put, so it
    is not ended again."""

    claim: int
    subscriber: str
    protected: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PutSlot:
    """Where version ``seq`` is set aside. The slot may be written once ``ready``; until then its older version is
    forgotten, so nobody new reads it, and ``readers`` still do.

    ``behind``: ranks have not come to the put before. ``wait``: seconds after which a lease lapses that may change the
    answer; 0 if only a wake-up of the side's key does.
    """

    slot: int
    seq: int
    ready: bool
    behind: bool
    readers: tuple[Reader, ...]
    wait: float

    @classmethod
    def read(cls, key: str, answer: Mapping[str, Any]) -> PutSlot:
        """From a script's answer."""
        read = FieldReader(key, answer)
        return cls(
            slot=whole(read, "slot"),
            seq=whole(read, "seq"),
            ready=answer.get("ready") is True,
            behind=answer.get("behind") is True,
            readers=tuple(
                Reader(
                    claim=whole(one, "claim"),
                    subscriber=one.name("subscriber"),
                    protected=one.values.get("protected") is True,
                )
                for one in items(key, answer.get("readers"))
            ),
            wait=whole(read, "wait") / 1000,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRequest:
    """A subscriber asks for a version. All its ranks ask with the same ``call``, which grows with each question.

    ``newer_than``: only versions with a greater seq. ``version``: only the one with this label (pinned, maybe older).
    ``links``: holders with which a link and a plan exist. ``avoid``: holders from which nothing may come, because they
    have just failed.
    """

    publication: str
    subscriber: str
    serial: int
    call: int
    newer_than: int = 0
    version: int | str | None = None
    links: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name("publication", self.publication)
        check_name("subscriber", self.subscriber)
        where = f"publication {self.publication}, subscriber {self.subscriber}"
        if self.call < 1:
            raise ConfigError(f"{where}: call {self.call}: calls count from 1")
        if self.newer_than < 0:
            raise ConfigError(f"{where}: newer_than={self.newer_than}: give a seq of at least 0")

    @property
    def holder(self) -> str:
        """The subscriber as a holder."""
        return f"{self.subscriber}/{self.serial}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceClaim:
    """A place at a holder for one hop, leased. ``number`` is never given twice.

    The hop reads slot ``slot`` of launch ``source_serial`` of side ``source``, which has ``source_world`` ranks, and
    brings version ``seq``. ``protected``: a put waits for it as long as it takes. ``description``: digest of the table
    of the publisher that made the version. ``upstream``: the source is still receiving it, by the claim of this number;
    0: it had the version whole.
    """

    publication: str
    number: int
    call: int
    subscriber: str
    serial: int
    source: str
    source_serial: int
    source_world: int
    source_launch: str
    slot: int
    seq: int
    version: int | str | None
    description: str
    protected: bool = False
    upstream: int = 0

    @property
    def holder(self) -> str:
        """The source as a holder."""
        return f"{self.source}/{self.source_serial}"

    @property
    def reader(self) -> str:
        """The subscriber as a holder."""
        return f"{self.subscriber}/{self.serial}"

    @classmethod
    def read(cls, key: str, publication: str, values: Mapping[str, Any]) -> SourceClaim:
        """From a script's answer or one field of the hash of claims."""
        read = FieldReader(key, values)
        return cls(
            publication=publication,
            number=whole(read, "number"),
            call=whole(read, "call"),
            subscriber=read.name("subscriber"),
            serial=whole(read, "serial"),
            source=read.name("source"),
            source_serial=whole(read, "source_serial"),
            source_world=whole(read, "source_world"),
            source_launch=read.text("source_launch", most=500),
            slot=whole(read, "slot"),
            seq=whole(read, "seq"),
            version=label(read, "version"),
            description=read.text("description", most=100),
            protected=values.get("protected") is True,
            upstream=whole(read, "upstream") if "upstream" in values else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimAnswer:
    """``claim`` is None while the subscriber waits; a wake-up of its side's key says that it may have one.

    ``over``: the call has ended already (another rank has released its claim, or asked a later question). ``last``: the
    side's last call. ``wait``: seconds after which a lease lapses that may change the answer, 0 if none does. ``seq``:
    newest of the publication. ``held``: what the subscriber holds.
    ``unfit``: why no holder of a newer version can feed it; empty if one can. ``differs``: another rank has asked for
    another version in the same call, and has not taken that back yet; empty if none has. Nothing else holds then.
    """

    claim: SourceClaim | None
    over: bool
    last: int
    wait: float
    seq: int
    held: int
    unfit: str = ""
    differs: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldVersion:
    """A version that a buffer holds whole: what an agent puts back after Redis has lost it."""

    slot: int
    seq: int
    version: int | str | None
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderState:
    """A holder as others see it: its ``slots`` by number, serving ``places``, how many are ``used``.

    ``orphan``: its workers have ended, and its agents keep the newest version until somebody else serves it.
    """

    side: str
    serial: int
    launch: str
    world: int
    publisher: bool
    orphan: bool
    places: int
    used: int
    agents: tuple[str, ...]
    slots: Mapping[int, HeldVersion] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """SIDE/SERIAL."""
        return f"{self.side}/{self.serial}"


def set_digest(text: str) -> str:
    """The digest of a set of elements; "*" for all of them."""
    return text if text == WHOLE else hashlib.sha256(text.encode()).hexdigest()[:32]


def whole(read: FieldReader, name: str) -> int:
    """A whole number, which Lua may have written as a float."""
    value = read.values.get(name)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return read.integer(name)


def label(read: FieldReader, name: str) -> int | str | None:
    """A version's label, which scripts keep as JSON text; empty for none."""
    text = read.text(name)
    if not text:
        return None
    value = read.json(name, "null")
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise read.wrong(name, "a number or text as JSON")
    return value


def label_text(version: int | str | None) -> str:
    """A version's label as scripts keep it."""
    return "" if version is None else json.dumps(version)


def items(key: str, value: Any) -> list[FieldReader]:
    """Readers of a list of objects in an answer. An empty list of Lua's is an empty object."""
    if value is None or value == {}:
        return []
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise FieldReader(key, {"list": value}).wrong("list", "a list of objects")
    return [FieldReader(key, one) for one in value]
