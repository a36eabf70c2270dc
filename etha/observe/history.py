"""What happened in a namespace, from agents' files and the stream of events in Redis, merged by time; pure.

Files are the better source: they have each transfer. So an entry that an agent wrote to Redis is left out if that
agent's files were read. Names of hosts do not decide, because two hosts or users may have the same one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from etha.observe.records import Record, TransferRecord, is_time
from etha.observe.sentences import event_sentence, name_places, sentence, transfer_sentence, where


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """One line of ``etha events``. ``where`` is "pair/batch" or a pair, "group/replica" or a group; ``details`` is what
    ``--json`` adds."""

    at: float
    host: str
    device: str
    where: str
    text: str
    failed: bool
    details: Mapping[str, Any] = field(compare=False, hash=False)
    #: The places of all agents that tell it, if there are several.
    places: tuple[str, ...] = ()
    #: The transfer that one agent tells; None for anything else.
    transfer: TransferRecord | None = field(default=None, compare=False, hash=False)

    @property
    def place(self) -> str:
        """Who tells it: "host/device", or "redis"."""
        return name_places(self.places) or "/".join(filter(None, [self.host, self.device])) or "redis"

    def fits(self, only: str, *, failed: bool = False) -> bool:
        """Whether it is about the pair, batch, group or replica ``only``, or about pair/batch or group/replica ("":
        anything), and with ``failed`` a failure."""
        about = not only or self.where == only or self.where.startswith(f"{only}/") or self.where.endswith(f"/{only}")
        return about and (self.failed or not failed)

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        mine = {"at": self.at, "host": self.host, "device": self.device, "text": self.text}
        return {**mine, **{name: value for name, value in self.details.items() if name not in mine}}


def of_record(record: Record, host: str, device: str) -> Happening:
    """A line of an agent's file."""
    details: dict[str, Any] = msgspec.to_builtins(record)
    return Happening(
        at=record.at,
        host=host,
        device=device,
        where=where(record),
        text=sentence(record),
        failed=record.failed,
        details=details,
        transfer=record if isinstance(record, TransferRecord) else None,
    )


#: Seconds within which agents record one transfer, the clocks' difference included.
_ONE_TRANSFER = 60.0


def one_per_transfer(happenings: Iterable[Happening]) -> list[Happening]:
    """``happenings``, oldest first, with one line for a transfer that several agents tell: see ``transfer_sentence``.

    A transfer's number is given once, unless Redis has lost its data. So what one agent tells twice, or another one
    much later, is another transfer.
    """
    groups = list[list[Happening]]()
    newest = dict[tuple[str, int, str], list[Happening]]()
    for one in happenings:
        if one.transfer is None or one.transfer.seq is None:
            groups.append([one])
            continue
        key = (one.where, one.transfer.seq, one.transfer.source)
        group = newest.get(key)
        if group is None or one.at - group[0].at > _ONE_TRANSFER or one.place in {other.place for other in group}:
            group = newest[key] = []
            groups.append(group)
        group.append(one)
    return [group[0] if len(group) == 1 else _together(group) for group in groups]


def _together(group: list[Happening]) -> Happening:
    reports = [(one.place, one.transfer) for one in group if one.transfer is not None]
    return replace(
        group[0],
        text=transfer_sentence(reports),
        failed=any(one.failed for one in group),
        places=tuple(one.place for one in group),
    )


def of_event(event: Mapping[str, Any]) -> Happening:
    """An entry of the stream of Redis, with its ``id``."""
    milliseconds = str(event.get("id", "")).partition("-")[0]
    at = float(milliseconds) / 1000 if milliseconds.isdecimal() else 0.0
    about = _about(event)
    stamp = event.get("at")
    return Happening(
        at=float(stamp) if stamp is not None and _is_time(stamp) else at,
        host=str(event.get("on", "")),
        device=str(event.get("device", "")) if stamp is not None else "",
        where="/".join(filter(None, about)),
        text=event_sentence(event),
        failed="failed" in event
        or (event.get("kind") == "lost" and event.get("reason") != "closed")
        or ("group" in event and event.get("reason") in ("died", "torn"))
        or ("publication" in event and (event.get("reason") == "died" or event.get("kind") in _PUBLICATION_FAILURES)),
        details=dict(event),
    )


#: Events of a publication that somebody should look at.
_PUBLICATION_FAILURES = ("holder_lost", "claim_lapsed")


def _about(event: Mapping[str, Any]) -> list[str]:
    """Pair and batch, group and replica, or publication and side."""
    if "publication" in event:
        side = next((str(event[name]) for name in ("side", "subscriber", "holder") if name in event), "")
        return [str(event["publication"]), side.partition("/")[0]]
    names = ("group", "replica") if "group" in event else ("pair", "batch")
    return [str(event.get(name, "")) for name in names]


def _is_time(value: Any) -> bool:
    try:
        return is_time(float(value))
    except (TypeError, ValueError):
        return False


def in_files(event: Mapping[str, Any], agents: Collection[str]) -> bool:
    """Whether files that were read say this entry of Redis, too: those of ``agents`` (ids)."""
    return "at" in event and event.get("agent") in agents


def merge(
    records: Iterable[Happening], events: Iterable[Mapping[str, Any]], agents: Collection[str]
) -> list[Happening]:
    """All of them once, oldest first. ``agents``: ids of those whose files were read."""
    found = dict.fromkeys(records)
    for event in events:
        if not in_files(event, agents):
            found[of_event(event)] = None
    return sorted(found, key=lambda one: one.at)
