"""Formats the agents' answers for ``etha status``: one status of several, and tables for rich. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from etha.observe.history import of_event
from etha.printable import in_all_texts, one_line

#: Ranks that the next epoch of a group waits for: so many are named.
MISSING_SHOWN = 8
#: Links that an operator must see to, by what they are called in the status.
BROKEN = ("failed", "missing", "opening")


def whole(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One agent's report unchanged; of several, their pairs and batches together, and each report under "local".

    "agents" are all that Redis knows, each once, with the links that the agents of this host have to it.
    """
    if len(reports) == 1:
        return reports[0]
    agents: dict[str, dict[str, Any]] = {}
    for line in (line for one in reports for line in one.get("agents", ())):
        known = agents.setdefault(line["id"], {**line, "links": [], "pairs": []})
        known["links"] += line["links"]
        known["pairs"] = sorted({*known["pairs"], *line["pairs"]})
    return {
        "agent": reports[0]["agent"],
        "agents": list(agents.values()),
        "pairs": [pair for one in reports for pair in one["pairs"]],
        "batches": [batch for one in reports for batch in one["batches"]],
        "groups": _groups(reports),
        # All agents read the same from Redis, but one that could not read has nothing.
        "publications": max((one.get("publications", []) for one in reports), key=len),
        "local": reports,
    }


def _groups(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All groups, each once, from the agent that knows most of its steps: that of a member."""
    found: dict[str, dict[str, Any]] = {}
    for line in (line for one in reports for line in one.get("groups", ())):
        known = found.get(line["group"])
        if known is None or (line["epoch"], line["step"]) > (known["epoch"], known["step"]):
            found[line["group"]] = line
    return list(found.values())


def status_tables(found: dict[str, Any]) -> Group:
    """This host's agents, all that Redis knows, pairs, batches and elastic groups, one table each, and which links are
    not as they should be. The JSON has what is left out here."""
    found = in_all_texts(one_line, found)
    reports = [one["agent"] for one in found.get("local", [found])]
    batch = ["pair", "batch", "state", "seq", "version", "bytes", "transport", "waiting_for", "last_error"]
    stale = [one["stale"] for one in reports if one.get("stale")]
    agent = ["device", "namespace", "pid", "workers", "running", "encrypted", "redis", "version"]
    agent += ["metrics"] if any(one.get("metrics") for one in reports) else []
    agents = found.get("agents", [])
    known: list[Table | Text] = []
    if len(agents) > len(reports):
        known = [agents_table(agents, reports), *map(Text, linked_lines(agents))]
    groups = [group_line(line) for line in found.get("groups", ())]
    columns = ["group", "state", "epoch", "step", "members", "waits for"]
    return Group(
        dict_table("agents of this host", reports, agent),
        *known,
        dict_table("pairs", [pair_line(pair) for pair in found["pairs"]], ["pair", "state", "epoch", "sides", "error"]),
        dict_table("batches", found["batches"], batch),
        *([dict_table("elastic groups", groups, columns)] if groups else []),
        *(Text(f"pairs and groups as they were last known: {why}") for why in stale),
    )


def publication_tables(publications: list[dict[str, Any]]) -> Group:
    """For each publication its newest version, its subscribers, and who else holds what. The JSON has what is left out
    here."""
    tables: list[Table | Text] = []
    for one in in_all_texts(one_line, publications):
        subscribers = [subscriber_line(line) for line in one["subscribers"]]
        columns = ["subscriber", "state", "version", "lag", "source", "feeds", "ranks", "error"]
        others = [holder_text(line) for line in one["holders"] if line["publisher"]]
        tables += [
            dict_table(publication_text(one), subscribers, columns),
            *(Text(text) for text in others),
        ]
    return Group(*tables) if tables else Group(Text("no publications"))


def publication_text(one: dict[str, Any]) -> str:
    """ "policy: version 12, 3 s old, published by trainer"."""
    if not one["seq"]:
        what = "no version yet"
    else:
        age = "" if one["age"] is None else f", {one['age']:.0f} s old"
        label = str(one["version"])
        what = f"version {label}{'' if label == str(one['seq']) else ' (seq ' + str(one['seq']) + ')'}{age}"
    ended = {"open": "", "closed": ", which has left", "lost": ", which does not answer or has died"}[one["state"]]
    return f"{one['publication']}: {what}, published by {one['publisher'] or 'nobody'}{ended}"


def subscriber_line(line: dict[str, Any]) -> dict[str, Any]:
    """One subscriber as a row."""
    lag = f"{line['lag']} version{'s' if line['lag'] != 1 else ''}, {line['lag_seconds']:.1f} s" if line["lag"] else "-"
    return {
        **line,
        "version": line["version"] if line["seq"] else None,
        "lag": lag,
        "source": line["source"].partition("/")[0],
        "feeds": ", ".join(line["readers"]) if line["places"] else "does not serve",
        "ranks": _processes(line["ranks"]),
    }


def holder_text(line: dict[str, Any]) -> str:
    """ "trainer: slot 0 version 4, slot 1 version 5; serves 1 of at most 2"."""
    slots = ", ".join(f"slot {one['slot']} version {one['version']}" for one in line["slots"]) or "no version"
    kept = " (has ended; its agents keep this until another holder has it)" if line["orphan"] else ""
    return f"{line['holder'].partition('/')[0]}: {slots}{kept}; serves {line['used']} of at most {line['places']}"


def agents_table(agents: list[dict[str, Any]], reports: list[dict[str, Any]]) -> Table:
    """Every agent that Redis knows, its lease, and how it is linked with those of this host."""
    traffic = [{link["agent"]: link for link in one.get("links", ())} for one in reports]
    lines = [
        {
            **line,
            "lease renewed": "not in Redis" if line["heartbeat"] is None else f"{line['heartbeat']:.0f} s ago",
            "link": [link_text(link, alone=len(line["links"]) == 1) for link in line["links"]],
            "sent": sum(links[line["id"]]["bytes_sent"] for links in traffic if line["id"] in links),
            "received": sum(links[line["id"]]["bytes_received"] for links in traffic if line["id"] in links),
        }
        for line in agents
    ]
    columns = ["host", "device", "pid", "version", "address", "lease renewed", "link", "pairs", "sent", "received"]
    columns += ["metrics"] if any(line.get("metrics") for line in agents) else []
    return dict_table("agents that Redis knows", lines, columns)


def link_text(link: dict[str, Any], *, alone: bool) -> str:
    """ "open, heard 0.4 s ago, 0.3 ms"; with the agent from which it leads unless that is the only one here."""
    known = {"self": "this one", "none": "none, not needed", "hub": "through a hub"}
    text = known.get(link["link"], link["link"])
    if link["silent"] is not None:
        text += f", heard {link['silent']:.1f} s ago"
    if link["round_trip"] is not None:
        text += f", {link['round_trip'] * 1e3:.1f} ms"
    return text if alone else f"{link['from']}: {text}"


def linked_lines(agents: list[dict[str, Any]]) -> list[str]:
    """Whether every link is there that a pair needs; otherwise, and for what cannot be reached, one line for each."""
    links = [(line, link) for line in agents for link in line["links"]]
    needed = [link for line, link in links if line["pairs"] and link["link"] not in ("self", "none")]
    broken = [(line, link) for line, link in links if link["link"] in BROKEN or link["trouble"]]
    lines = []
    if needed and not any(link["link"] in BROKEN for link in needed):
        through_hubs = sum(link["link"] == "hub" for link in needed)
        others = f", {through_hubs} more agents are told through hubs" if through_hubs else ""
        lines.append(f"linked: all {len(needed) - through_hubs} links that formed pairs need are open{others}")
    for line, link in broken:
        what = f"{link['from']} -> {line['device']} of host {line['host']}"
        need = f", needed by {', '.join(line['pairs'])}" if line["pairs"] else ""
        lines.append(f"not linked: {what} ({link['link']}{need}){': ' if link['trouble'] else ''}{link['trouble']}")
    return lines


def pair_line(pair: dict[str, Any]) -> dict[str, Any]:
    """A pair's row. Of one that forms, "error" says who waits for whom, and which other name may be meant."""
    if pair.get("error") or pair.get("waits") is None:
        return pair
    missing = [_missing(side, ranks, pair) for side, ranks in pair.get("waiting_for", {}).items()]
    text = f"waits {pair['waits']:.0f} s" + (f" for {' and '.join(missing)}" if missing else "")
    return {**pair, "error": f"{text}. {pair['hint']}" if pair.get("hint") else text}


def group_line(group: dict[str, Any]) -> dict[str, Any]:
    """A group's row: its members in the order of their ranks, those that join, and whom the next epoch waits for."""
    members = [
        f"{one['rank']}: {_replica(one, group)}{'' if one['counts'] else ', behind'}" for one in group["members"]
    ]
    members += [f"joins: {_replica(one, group)}" for one in group["joining"]]
    missing = [
        f"rank {one['rank']} of {one['replica']}"
        + (", which has not come" if one["pid"] is None else f", pid {one['pid']} on {one['host']}")
        for one in group["waiting_for"]
    ]
    if len(missing) > MISSING_SHOWN:
        missing = [*missing[:MISSING_SHOWN], f"and {len(missing) - MISSING_SHOWN} more ranks"]
    if group["complete"] and group["complete"] < group["min_replicas"]:
        missing.append(f"at least {group['min_replicas']} replicas, {group['complete']} of them there")
    if missing and group["waits"] is not None:
        missing[0] = f"{group['waits']:.0f} s for {missing[0]}"
    state = f"{group['state']}, has lost a replica" if group["broken"] else group["state"]
    return {**group, "state": state, "members": members, "waits for": missing}


def _processes(ranks: list[dict[str, Any]]) -> str:
    """ "pids 10, 11 on n0; pid 12 on n1"."""
    hosts: dict[str, list[str]] = {}
    for rank in ranks:
        hosts.setdefault(rank["host"], []).append(str(rank["pid"]))
    return "; ".join(
        f"{'pid' if len(pids) == 1 else 'pids'} {', '.join(pids)} on {host}" for host, pids in hosts.items()
    )


def _replica(one: dict[str, Any], group: dict[str, Any]) -> str:
    """A replica with its processes, host by host. Its step only if that is not the group's."""
    text = f"{one['replica']}, {_processes(one['ranks'])}"
    text += "" if one["served"] else ", agent silent"
    return text if one["step"] == group["step"] else f"{text}, step {one['step']}"


def _missing(side: str, ranks: list[int], pair: dict[str, Any]) -> str:
    if not pair["sides"].get(side, {}).get("ranks"):
        return f"side {side}, of which nobody has come"
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"{side} {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:8]))}{more}"


def events_table(events: list[dict[str, Any]], why: str = "") -> Table:
    """What happened, oldest first, in local time and in the words of ``etha events``.

    ``why`` says why there is nothing newer.
    """
    table = Table(title="events", title_justify="left", caption=one_line(why) or None, caption_justify="left")
    for column in ("time", "pair", "event"):
        table.add_column(column, overflow="fold")
    for one in map(of_event, events):
        at = f"{datetime.fromtimestamp(one.at):%H:%M:%S}" if 0 < one.at < 1e11 else "-"
        table.add_row(at, Text(one_line(one.where) or "-"), Text(one_line(one.text)))
    return table


def dict_table(title: str, rows: list[dict[str, Any]], columns: list[str]) -> Table:
    """A table of plain data, with its keys as columns."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(cell(row.get(column)) for column in columns))
    return table


def cell(value: Any) -> Text:
    """A value in readable form, never taken for markup."""
    if value is None or value in ("", [], {}):
        return Text("-")
    if isinstance(value, bool):
        return Text("yes" if value else "no")
    if isinstance(value, int):
        return Text(f"{value:,}" if value >= 1_000_000 else str(value))
    if isinstance(value, dict):
        return Text("\n".join(f"{key}: {ranks_text(item)}" for key, item in value.items()))
    if isinstance(value, list):
        return Text("\n".join(worker_text(item) if isinstance(item, dict) else str(item) for item in value))
    return Text(str(value))


def ranks_text(side: Any) -> str:
    """How many ranks of a side are there, or the plain value."""
    if isinstance(side, dict) and "world_size" in side:
        size = "?" if side["world_size"] is None else side["world_size"]
        return f"{len(side.get('ranks', ()))} of {size} ranks"
    return str(side)


def worker_text(worker: dict[str, Any]) -> str:
    """One worker of an agent: its pid, its ranks, and "staged" if the agent copies its tensors through other memory."""
    text = f"{worker.get('pid')} {', '.join(worker.get('ranks', ()))}".rstrip()
    return f"{text}, staged" if str(worker.get("memory", "")).startswith("staged") else text
