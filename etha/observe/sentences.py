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


def name_culprits(culprits: Sequence[Culprit]) -> str:
    """ "trainer rank 3 (host a, process 12), inference rank 0 and 5 more"."""
    named = ", ".join(map(str, culprits[:5]))
    return f"{named} and {len(culprits) - 5} more" if len(culprits) > 5 else named


def _where(pair: str, batch: str) -> str:
    return f"{pair}/{batch}" if batch else pair


def _time_spent(phases: Phases) -> str:
    if not phases.total:
        return ""
    longest = phases.longest
    return f"{seconds(dict(phases)[longest])} of it {_DOING[longest]}"


def _transfer(record: TransferRecord) -> str:
    payload, phases = record.payload, record.phases
    label = "" if record.version is None or record.version == record.seq else f" (version {record.version})"
    ways = "+".join(sorted(payload.ways)) + (", staged" if payload.staged else "")
    way = f"{record.source} to {record.target}" if record.source else ""
    what = f"transfer {record.seq}{label}" if record.seq is not None else f"a transfer{label}"
    who = ", ".join(f"{side} rank {rank}" for side, rank in record.ranks[:4])
    spent = _time_spent(phases)
    if record.outcome == "committed":
        moved = size(max(payload.sent, payload.received))
        return (
            f"{what} from {way} committed: {moved} ({ways or 'nothing to move'}) in {seconds(phases.total)}"
            f"{', ' + spent if spent else ''}"
        )
    if record.superseded:
        return f"the snapshot of {who} was superseded by a newer one"
    how = {
        "aborted": f"{what} from {way} was aborted",
        "unknown": f"{what} from {way} was committed or aborted, which of them is unknown here",
        "withdrawn": f"a call of {who or 'a worker'} ended before its transfer began",
    }[record.outcome]
    after = f" after {seconds(phases.total)}" if phases.total else ""
    parts = [f"{how}{after}: {record.reason} [{record.code}]"]
    if record.culprits:
        parts.append(f"because of {name_culprits(record.culprits)}")
    if spent:
        also = f" (before that, {spent})" if phases.longest != phases.last else ""
        parts.append(f"it ended while {_DOING[phases.last]}{also}")
    if record.torn:
        parts.append("targets may be half-written")
    return "; ".join(parts)


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


class _Fields(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return "?"


def event_sentence(event: Mapping[str, Any]) -> str:
    """What an entry of the stream of Redis says."""
    kind = str(event.get("kind", ""))
    if (text := event.get("text")) and kind not in _EVENTS:
        return str(text)
    fields = {str(name): str(value) for name, value in event.items()}
    if kind in _EVENTS:
        return _EVENTS[kind].format_map(_Fields(fields))
    rest = ", ".join(f"{name} {value}" for name, value in fields.items() if name not in ("id", "kind", "pair", "batch"))
    return f"{kind} {rest}".strip()
