"""What the page shows, made of agents' reports and of what happened; pure.

    reports of ``etha status`` + happenings of ``etha events`` --> page() --> plain data --JSON--> page.js

The page draws what it is given: which link is broken, who is waited for and how long a phase took is decided here.
Markup in texts stays as it is, because page.js makes text nodes of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from etha.observe.history import Happening, one_per_transfer
from etha.phases import PHASES
from etha.printable import in_all_texts, one_line
from etha.status import BROKEN, group_line, pair_line, whole
from etha.units import size

#: Transfers and other events that are shown, the newest first.
TRANSFERS, EVENTS = 40, 120
#: Ranks, or names, that one cell lists.
LISTED = 8
#: What the page has places of its own for; other lists of a report become tables with their keys as columns.
_PLACED = frozenset({"agent", "agents", "pairs", "batches", "groups", "publications", "local"})
#: Seconds between the records of one transfer by several agents, at most.
_ONE_TRANSFER = 60.0


class WaitClock:
    """Since when each call waits, for reports that do not say it: since it was first seen waiting."""

    def __init__(self) -> None:
        self._since: dict[tuple[Any, ...], float] = {}

    def seconds(self, waiting: Collection[tuple[Any, ...]], now: float) -> dict[tuple[Any, ...], float]:
        """For how long each has been seen waiting. Those that are not in ``waiting`` are forgotten."""
        self._since = {one: self._since.get(one, now) for one in waiting}
        return {one: now - since for one, since in self._since.items()}


def page(
    reports: Sequence[dict[str, Any]],
    happenings: Iterable[Happening],
    *,
    now: float,
    clock: WaitClock,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Everything that the page shows, as plain data for JSON. ``notes`` say what is missing, and why.

    Without reports (no agent runs here) there is still what has happened.
    """
    found = whole(list(reports)) if reports else {"pairs": [], "batches": [], "groups": [], "agents": []}
    local = [one["agent"] for one in reports]
    events = sorted(happenings, key=lambda one: one.at)
    waiting = _waiting(found, now, clock)
    shown = {
        "at": now,
        "agents": _agents(found.get("agents", ()), local),
        "links": _links(found.get("agents", ()), local),
        "pairs": [_pair(line) for line in found["pairs"]],
        "batches": [_batch(line) for line in found["batches"]],
        "groups": [_group(line) for line in found.get("groups", ())],
        "publications": [_publication(line) for line in found.get("publications", ())],
        "more": {name: _rows(lines) for name, lines in found.items() if name not in _PLACED and _is_table(lines)},
        "waiting": waiting,
        "transfers": _transfers(events),
        "events": [_event(one) for one in reversed(events) if one.transfer is None][:EVENTS],
        "failures": sum(one.failed for one in one_per_transfer(events)),
        "notes": [*notes, *(f"pairs and groups as last known: {one['stale']}" for one in local if one.get("stale"))],
        "phases": list(PHASES),
    }
    plain: dict[str, Any] = in_all_texts(one_line, shown)
    return plain


def _agents(agents: Iterable[Mapping[str, Any]], local: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All that Redis knows, and of those of this host what they say of themselves."""
    here = {one["id"]: one for one in local}
    lines = []
    for line in agents:
        mine = here.get(line["id"], {})
        staging = mine.get("staging")
        lines.append(
            {
                "agent": f"{line['host']}/{line['device']}",
                "pid": line["pid"],
                "version": line["version"],
                "here": bool(mine),
                "address": line["address"],
                "lease": line["heartbeat"],
                "workers": len(mine["workers"]) if "workers" in mine else None,
                "running": mine.get("running"),
                "staging": f"{size(staging['used'])} of {size(staging['limit'])}" if staging else "",
                "metrics": line.get("metrics", ""),
            }
        )
    return lines


def _links(agents: Sequence[Mapping[str, Any]], local: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The matrix: a row for each agent of this host, a column for each that Redis knows."""
    rows = []
    for one in local:
        traffic = {link["agent"]: link for link in one.get("links", ())}
        cells = []
        for line in agents:
            link: Mapping[str, Any] = next(
                (each for each in line["links"] if each["from"] == one["device"]), {"link": "none", "trouble": ""}
            )
            # Every agent of this host has a line about itself, and only there is the link "self".
            state = "self" if line["id"] == one["id"] else link["link"]
            bytes_of = traffic.get(line["id"], {})
            cells.append(
                {
                    "state": state,
                    "broken": state in BROKEN,
                    "trip": link.get("round_trip"),
                    "sent": bytes_of.get("bytes_sent", 0),
                    "received": bytes_of.get("bytes_received", 0),
                    "pairs": line["pairs"],
                    "trouble": link.get("trouble", ""),
                }
            )
        rows.append({"agent": f"{one['host']}/{one['device']}", "cells": cells})
    return {"columns": [f"{line['host']}/{line['device']}" for line in agents], "rows": rows}


def _pair(line: Mapping[str, Any]) -> dict[str, Any]:
    sides = [
        f"{name} {len(side['ranks'])}/{'?' if side['world_size'] is None else side['world_size']}"
        for name, side in line["sides"].items()
    ]
    said = pair_line(dict(line)).get("error", "")
    return {"pair": line["pair"], "state": line["state"], "epoch": line["epoch"], "sides": sides, "error": said}


def _batch(line: Mapping[str, Any]) -> dict[str, Any]:
    seconds = line["last_seconds"]
    return {
        **{name: line[name] for name in ("pair", "batch", "state", "seq", "version", "bytes", "transport")},
        "seconds": seconds,
        "rate": line["bytes"] / seconds if seconds else None,
        "waiting_for": _some(line["waiting_for"]),
        "error": line["last_error"],
    }


def _group(line: Mapping[str, Any]) -> dict[str, Any]:
    """A group with a line for each replica: its rank in the epoch, its processes, its step, whether it is behind."""
    replicas = [
        {
            "rank": one.get("rank"),
            "replica": one["replica"],
            "where": [f"{rank['host']} pid {rank['pid']}" for rank in one["ranks"]],
            "step": one["step"],
            "state": _replica_state(one),
        }
        for one in [*line["members"], *line["joining"]]
    ]
    return {
        **{name: line[name] for name in ("group", "epoch", "step", "broken")},
        "state": group_line(dict(line))["state"],
        "replicas": replicas,
        "waits_for": group_line(dict(line))["waits for"],
    }


def _publication(line: Mapping[str, Any]) -> dict[str, Any]:
    """A publication with a line for each subscriber: what it holds, how far it is behind, and who feeds it."""
    publishers = [one for one in line["holders"] if one["publisher"]]
    return {
        **{name: line[name] for name in ("publication", "state", "publisher", "seq", "version", "age")},
        "kept": [_label(slot) for one in publishers for slot in sorted(one["slots"], key=lambda slot: -slot["seq"])],
        "places": f"{sum(one['used'] for one in publishers)} of {sum(one['places'] for one in publishers)}",
        "subscribers": [
            {
                "subscriber": one["subscriber"],
                "state": one["state"],
                "version": _label(one),
                "lag": one["lag"],
                "lag_seconds": one["lag_seconds"],
                "source": one["source"].partition("/")[0],
                "seconds": one["seconds"] or None,
                "feeds": _some(one["readers"]),
                "where": _some([f"{rank['host']} pid {rank['pid']}" for rank in one["ranks"]]),
                "error": one["error"],
            }
            for one in line["subscribers"]
        ],
    }


def _label(held: Mapping[str, Any]) -> str:
    """A version as people know it: its label and its number, or its number alone."""
    if not held["seq"]:
        return ""
    own = held["version"] is not None and held["version"] != held["seq"]
    return f"{held['version']} (number {held['seq']})" if own else str(held["seq"])


def _replica_state(one: Mapping[str, Any]) -> str:
    if not one["served"]:
        return "agent silent"
    if "rank" not in one:
        return "joins"
    return "member" if one["counts"] else "behind"


def _waiting(found: Mapping[str, Any], now: float, clock: WaitClock) -> list[dict[str, Any]]:
    """Everybody who waits, the longest first: for what, for whom, and for how long."""
    calls = {
        (line["pair"], line["batch"], line["state"], line["seq"]): line
        for line in found["batches"]
        if line["waiting_for"] and line["state"] != "closed"
    }
    waited = clock.seconds(calls, now)
    doing = {"waiting": "a transfer waits for calls of", "moving": "a transfer waits for"}
    lines = [
        {
            "where": f"{line['pair']}/{line['batch']}",
            "what": doing.get(line["state"], "the registration waits for"),
            "whom": _some(line["waiting_for"]),
            "seconds": waited[key],
            "hint": "",
        }
        for key, line in calls.items()
    ]
    for line in found["pairs"]:
        if line.get("waits") is None:
            continue
        whom = [
            f"{side} rank {rank}" if line["sides"].get(side, {}).get("ranks") else f"side {side}, which nobody joined"
            for side, ranks in line["waiting_for"].items()
            for rank in (ranks if line["sides"].get(side, {}).get("ranks") else ranks[:1])
        ]
        lines.append(
            {
                "where": line["pair"],
                "what": "a rendezvous waits for",
                "whom": _some(whom),
                "seconds": line["waits"],
                "hint": line.get("hint", ""),
            }
        )
    for line in found.get("groups", ()):
        if line["waits"] is None:
            continue
        whom = [
            f"rank {one['rank']} of {one['replica']}"
            + (", which has not come" if one["pid"] is None else f" (pid {one['pid']} on {one['host']})")
            for one in line["waiting_for"]
        ]
        if line["complete"] < line["min_replicas"]:
            whom.append(f"at least {line['min_replicas']} replicas, {line['complete']} of them there")
        lines.append(
            {
                "where": line["group"],
                "what": "the next epoch waits for",
                "whom": _some(whom),
                "seconds": line["waits"],
                "hint": "",
            }
        )
    return sorted(lines, key=lambda line: -line["seconds"])


def _some(names: Sequence[str]) -> list[str]:
    """The first ``LISTED``, and how many more there are."""
    return [*names[:LISTED], *([f"and {len(names) - LISTED} more"] if len(names) > LISTED else [])]


def _transfers(events: Sequence[Happening]) -> list[dict[str, Any]]:
    """The last transfers, the newest first, each once, with the phases of the agent at which it took longest."""
    reports: dict[tuple[str, Any, str], list[Happening]] = {}
    for one in events:
        if one.transfer is not None and one.transfer.seq is not None:
            reports.setdefault((one.where, one.transfer.seq, one.transfer.source), []).append(one)
    lines = []
    for one in reversed(one_per_transfer(events)):
        record = one.transfer
        if record is None:
            continue
        same = [
            other.transfer
            for other in reports.get((one.where, record.seq, record.source), ())
            if other.transfer is not None and abs(other.at - one.at) <= _ONE_TRANSFER
        ] or [record]
        slowest = max(same, key=lambda each: each.phases.total)
        moved = max(sum(each.payload.sent for each in same), sum(each.payload.received for each in same))
        lines.append(
            {
                "at": one.at,
                "where": one.where,
                "seq": record.seq,
                "version": record.version,
                "way": f"{record.source} to {record.target}" if record.source else "",
                "outcome": record.outcome,
                "failed": one.failed,
                "bytes": moved,
                "seconds": slowest.phases.total,
                "phases": [seconds for _, seconds in slowest.phases],
                "place": one.place,
                "text": one.text,
            }
        )
        if len(lines) == TRANSFERS:
            break
    return lines


def _event(one: Happening) -> dict[str, Any]:
    return {"at": one.at, "place": one.place, "where": one.where, "text": one.text, "failed": one.failed}


def _is_table(lines: Any) -> bool:
    return isinstance(lines, list) and bool(lines) and all(isinstance(line, dict) for line in lines)


def _rows(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A table of any plain data: the keys of all lines as columns, each value as text."""
    columns = list(dict.fromkeys(str(name) for line in lines for name in line))
    return {"columns": columns, "rows": [[_text(line.get(name)) for name in columns] for line in lines]}


def _text(value: Any) -> str:
    if value is None or value in ("", [], {}):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(inner)}".rstrip() for name, inner in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(_some([_text(inner) for inner in value]))
    return f"{value:,}" if isinstance(value, int) and value >= 1_000_000 else str(value)
