"""Batches as the store holds them: the batch itself, and the roster of one registration; pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from etha.config import MAX_WORLD, NAME
from etha.store.reading import FieldReader

#: Most tensors of one manifest, and bytes of one layout. More are a mistake.
MAX_NAMES = 200_000
MAX_LAYOUT = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchView:
    """A batch on one pair.

    ``bytes`` counts all targets. ``last_seconds`` is the duration of the last transfer (0.0: none yet).
    """

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
        """From the hash at ``key``. ProtocolError names the field that is wrong."""
        read = FieldReader(key, values)
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
    """A version label in readable form. Text that could be taken for a number is quoted as JSON."""
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
        except (ValueError, RecursionError):
            return text
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) < 4000 else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """One registration: the record of each (side, rank), and for each agent the digest of the plan that it computed.

    ``newest`` is the generation of the batch now; 0 if Redis does not know the batch.
    """

    generation: int
    entries: Mapping[tuple[str, int], str]
    verdicts: Mapping[str, str]
    closed: frozenset[tuple[str, int]] = frozenset()
    newest: int = 0

    @classmethod
    def from_redis(cls, key: str, generation: int, values: Mapping[str, str], newest: int = 0) -> Roster:
        """From the hash at ``key``. ProtocolError names the field that is wrong."""
        read = FieldReader(key, values)
        entries, verdicts, closed = {}, {}, set()
        for name in values:
            kind, _, rest = name.rpartition(":")
            side, slash, rank = rest.partition("/")
            if kind == "agent":
                verdicts[rest] = read.text(name, most=1000)
            elif kind in ("", "closed") and slash:
                number = int(rank) if rank.isascii() and rank.isdigit() and len(rank) <= 20 else MAX_WORLD
                if NAME.fullmatch(side) is None or number >= MAX_WORLD:
                    raise read.wrong(name[:200], "a field named SIDE/RANK")
                if kind == "closed":
                    closed.add((side, number))
                else:
                    entries[side, number] = read.text(name)
        return cls(
            generation=generation,
            entries=dict(sorted(entries.items())),
            verdicts=verdicts,
            closed=frozenset(closed),
            newest=newest,
        )
