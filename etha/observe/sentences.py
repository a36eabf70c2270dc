"""Records and events of Redis as lines in plain English; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etha.observe.records import Culprit, Incident, Record, TransferRecord
from etha.phases import Phases
from etha.units import seconds, size

#: Phases as verbs, for "of which 1.2 s waiting for the others".
_DOING = {
    "copy_in": "copying tensors in the worker",
    "wait": "waiting for the others to call",
    "book": "waiting for memory, a way or the card",
    "compile": "compiling",
    "move": "moving bytes",
    "verify": "verifying",
    "commit": "waiting for the commit",
    "copy_out": "copying tensors in the worker",
}


def name_culprits(*reports: Sequence[Culprit]) -> str:
    """ "trainer rank 3 (host a, process 12), inference rank 0 and 5 more": of each that tells some, its first five."""
    best = dict[tuple[str, int | None, str], Culprit]()
    for culprit in (culprit for culprits in reports for culprit in culprits):
        known = best.setdefault((culprit.side, culprit.rank, culprit.agent), culprit)
        if len(str(culprit)) > len(str(known)):  # it says the host and the process, too
            best[culprit.side, culprit.rank, culprit.agent] = culprit
    shown = dict.fromkeys((one.side, one.rank, one.agent) for culprits in reports for one in culprits[:5])
    named = ", ".join(str(best[who]) for who in shown)
    return f"{named} and {len(best) - len(shown)} more" if len(best) > len(shown) else named


def _where(pair: str, batch: str) -> str:
    return f"{pair}/{batch}" if batch else pair


def _time_spent(phases: Phases, late: tuple[str, int] | None = None) -> str:
    if not phases.total:
        return ""
    longest = phases.longest
    doing = f"waiting for {late[0]} rank {late[1]} to call" if longest == "wait" and late else _DOING[longest]
    return f"{seconds(dict(phases)[longest])} of it {doing}"


def _late(records: Sequence[TransferRecord], slowest: TransferRecord) -> tuple[str, int] | None:
    """The rank for whose call ``slowest`` waited, if that is most of its wait; ``records`` are those of all agents."""
    wait, later = slowest.phases.wait, min(records, key=lambda one: one.phases.wait)
    if slowest.last is not None and slowest.late > wait / 2:
        return slowest.last
    if later.phases.wait < wait / 2:  # the last rank to call is another agent's
        return later.last or next(iter(later.ranks), None)
    return None


def _transfer(record: TransferRecord) -> str:
    if record.outcome == "committed":
        return _committed([("", record)])
    return _failed(record, (record.culprits,), record.torn)


def _failed(record: TransferRecord, culprits: Sequence[Sequence[Culprit]], torn: bool) -> str:
    """What ``record`` says of a failure, with the culprits of all that tell it."""
    phases, what = record.phases, _name(record)
    who = ", ".join(f"{side} rank {rank}" for side, rank in record.ranks[:4])
    if record.superseded:
        return f"the snapshot of {who} was superseded by a newer one"
    if record.outcome == "withdrawn":
        what = f"a call of {who or 'a worker'} ended before its transfer began"
    spent = _time_spent(phases)
    after = f" after {seconds(phases.total)}" if phases.total else ""
    parts = [f"{_ended(what, record)}{after}: {record.reason} [{record.code}]"]
    if any(culprits):
        parts.append(f"because of {name_culprits(*culprits)}")
    if spent:
        ended_in = record.ended_in if record.ended_in in _DOING else phases.last
        also = f" (before that, {spent})" if phases.longest != ended_in else ""
        parts.append(f"it ended while {_DOING[ended_in]}{also}")
    if torn:
        parts.append("targets may be half-written")
    return "; ".join(parts)


def _name(record: TransferRecord) -> str:
    label = "" if record.version is None or record.version == record.seq else f" (version {record.version})"
    way = f" from {record.source} to {record.target}" if record.source else ""
    return f"a transfer{label}" if record.seq is None else f"transfer {record.seq}{label}{way}"


def _ended(what: str, record: TransferRecord) -> str:
    how = {
        "committed": " committed",
        "aborted": " was aborted",
        "unknown": " was committed or aborted, which of them is unknown here",
        "withdrawn": "",
    }
    return f"{what}{how[record.outcome]}"


def _committed(reports: Sequence[tuple[str, TransferRecord]]) -> str:
    """The bytes of all agents that tell it, and the time of the slowest."""
    records = [record for _, record in reports]
    moved = max(sum(one.payload.sent for one in records), sum(one.payload.received for one in records))
    ways = "+".join(sorted({way for one in records for way in one.payload.ways}))
    staged = ", staged" if any(one.payload.staged for one in records) else ""
    place, slowest = max(reports, key=lambda one: one[1].phases.total)
    late = _late(records, slowest)
    spent = _time_spent(slowest.phases, late)
    at = f" on {place}" if len(reports) > 1 and spent else ""
    return (
        f"{_name(slowest)} committed: {size(moved)} ({ways + staged if ways else 'nothing to move' + staged}) in "
        f"{seconds(slowest.phases.total)}{', ' + spent if spent else ''}{at}"
    )


def transfer_sentence(reports: Sequence[tuple[str, TransferRecord]]) -> str:
    """One transfer as several agents tell it, the earliest first: (the agent's place, its record).

    Of a failure the first cause leads. Culprits are those of all; another agent's cause or outcome follows with its
    place.
    """
    failed = [(place, record) for place, record in reports if record.failed]
    if not failed:
        return _committed(reports)
    first = failed[0][1]
    parts = [_failed(first, [record.culprits for _, record in failed], any(record.torn for _, record in reports))]
    others = dict[str, list[str]]()
    for other, record in reports:
        if (record.outcome, record.code, record.reason) == (first.outcome, first.code, first.reason):
            continue
        why = f": {record.reason} [{record.code}]" if record.failed else ""
        others.setdefault(f"{_ended('it', record)}{why}", []).append(other)
    parts += [f"on {name_places(places)} {text}" for text, places in list(others.items())[:5]]
    return "; ".join(parts)


def name_places(places: Sequence[str]) -> str:
    """ "a/cpu, b/cpu and 30 more"."""
    named = ", ".join(places[:3])
    return f"{named} and {len(places) - 3} more" if len(places) > 3 else named


def where(record: Record) -> str:
    """The pair and batch that a record is about, "weights/model"; empty if none."""
    if isinstance(record, Incident):
        return _where(record.pair, record.batch)
    return _where(record.pairs[0] if record.pairs else "", record.batch)


def sentence(record: Record) -> str:
    """What happened, without its time and place."""
    if isinstance(record, TransferRecord):
        return _transfer(record)
    code = f" [{record.code}]" if record.code else ""
    # Who is missing is named in the reason, and need not be to blame: the waiting side's name may be the wrong one.
    named = record.failed and record.culprits and record.code != "rendezvous_timeout"
    because = f"; because of {name_culprits(record.culprits)}" if named else ""
    return f"{record.reason}{code}{because}"


#: Kinds of the stream of Redis, as sentences with their fields.
_EVENTS = {
    "agent_came": "the agent {agent} of {device} on host {host} came",
    "agent_left": "the agent {agent} left",
    "joined": "{side} rank {rank} joined (process {pid} on host {host})",
    "left": "{side} rank {rank} left: {reason}",
    "formed": "both sides are complete: epoch {epoch} is formed",
    "lost": "epoch {epoch} is over: {text}",
    "relaunched": "{side} was launched again",
    "registering": "the first rank registers (generation {generation})",
    "registered": "all ranks have registered (generation {generation})",
    "withdrawn": "{side} rank {rank} took its registration back",
    "closed": "no rank holds the batch any more",
    "restored": "Redis had lost the pair, and agents wrote it again",
}
#: Those of them that are about an elastic group.
_GROUP_EVENTS = {
    "left": "the replica is over: {text}",
    "formed": "epoch {epoch} is formed: {text}",
}
#: Those that are about a publication.
_PUBLICATION_EVENTS = {
    "left": "this launch of {side} is over: {text}",
    "published": "version {version} is announced (seq {seq})",
    "hop_failed": "{subscriber} did not get seq {seq} from {source}: {text}",
    "claim_lapsed": "{subscriber} has not renewed its claim of {source}, which has lapsed (seq {seq})",
    "holder_lost": "{holder} serves nobody any more: {text}",
}


class _Fields(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return "?"


def event_sentence(event: Mapping[str, Any]) -> str:
    """What an entry of the stream of Redis says."""
    kind = str(event.get("kind", ""))
    if "group" in event and kind in _GROUP_EVENTS:
        text = event.get("text") or event.get("reason", "")
        return _GROUP_EVENTS[kind].format_map(
            _Fields({**{str(n): str(v) for n, v in event.items()}, "text": str(text)})
        )
    fields = {str(name): str(value) for name, value in event.items()}
    if "publication" in event and kind in _PUBLICATION_EVENTS:
        return _PUBLICATION_EVENTS[kind].format_map(
            _Fields({**fields, "text": fields.get("text") or fields.get("reason", "")})
        )
    if (text := event.get("text")) and kind not in _EVENTS:
        return str(text)
    if kind in _EVENTS:
        return _EVENTS[kind].format_map(_Fields(fields))
    rest = ", ".join(f"{name} {value}" for name, value in fields.items() if name not in ("id", "kind", "pair", "batch"))
    return f"{kind} {rest}".strip()
