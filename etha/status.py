"""Formats the agents' answers for ``etha status``: one status of several, and tables for rich. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text


def whole(agents: list[dict[str, Any]]) -> dict[str, Any]:
    """One agent's status unchanged; of several, all pairs and batches together, and each agent alone under "agents"."""
    if len(agents) == 1:
        return agents[0]
    return {
        "agent": agents[0]["agent"],
        "pairs": [pair for one in agents for pair in one["pairs"]],
        "batches": [batch for one in agents for batch in one["batches"]],
        "agents": agents,
    }


def status_tables(found: dict[str, Any]) -> Group:
    """Agents, their links, pairs and batches, one table each. The JSON has what is left out here."""
    agents = [one["agent"] for one in found.get("agents", [found])]
    links = [link for agent in agents for link in agent.get("links", ())]
    link = ["agent", "host", "address", "state", "silent", "round_trip", "missed", "bytes_sent", "bytes_received"]
    batch = ["pair", "batch", "state", "seq", "version", "bytes", "transport", "waiting_for", "last_error"]
    stale = [agent["stale"] for agent in agents if agent.get("stale")]
    agent = ["device", "namespace", "pid", "workers", "running", "encrypted", "redis", "version"]
    agent += ["metrics"] if any(one.get("metrics") for one in agents) else []
    return Group(
        dict_table("agents", agents, agent),
        *([dict_table("links", links, link)] if links else []),
        dict_table("pairs", found["pairs"], ["pair", "state", "epoch", "sides", "error"]),
        dict_table("batches", found["batches"], batch),
        *(Text(f"pairs as they were last known: {why}") for why in stale),
    )


def events_table(events: list[dict[str, Any]], why: str = "") -> Table:
    """What happened, oldest first, in local time. ``why`` says why there is nothing newer."""
    table = Table(title="events", title_justify="left", caption=why or None, caption_justify="left")
    for column in ("time", "event", ""):
        table.add_column(column, overflow="fold")
    for event in events:
        milliseconds = str(event.get("id", "")).partition("-")[0]
        at = datetime.fromtimestamp(int(milliseconds) / 1000) if milliseconds.isdecimal() else None
        rest = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("id", "kind"))
        table.add_row(Text(f"{at:%H:%M:%S}" if at else "-"), Text(str(event.get("kind", "-"))), Text(rest))
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
    """One worker of an agent: its pid and its ranks."""
    return f"{worker.get('pid')} {', '.join(worker.get('ranks', ()))}".rstrip()
