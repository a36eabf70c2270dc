"""The report of ``client.status()`` and ``etha status --json`` about one agent, as plain data; pure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from etha.addresses import is_loopback, parse_address
from etha.agent.protocol.pair import PairMachine
from etha.agent.runtime.peers import PeerLinks
from etha.agent.runtime.sessions import WorkerSession
from etha.agent.services.batch_state import LocalRegistration
from etha.agent.services.registration import RegistrationService
from etha.agent.services.rendezvous import RendezvousService
from etha.agent.services.transfers import TransferService
from etha.config import Settings
from etha.errors import ConfigError
from etha.store.records import AgentRecord
from etha.store.registry import Store
from etha.version import __version__


class ReportedAgent(Protocol):
    """What a report reads of the agent (``agent.server.Agent``, which imports this file)."""

    id: str
    settings: Settings
    device: str
    store: Store
    started_at: float
    log: str
    metrics: str
    sessions: dict[str, WorkerSession]
    links: PeerLinks
    rendezvous: RendezvousService
    registrations: RegistrationService
    transfers: TransferService


def report(
    agent: ReportedAgent,
    stale: str = "",
    seen: Sequence[tuple[AgentRecord, float | None]] = (),
    hints: Mapping[str, str] | None = None,
    groups: Sequence[Mapping[str, Any]] = (),
    publications: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """{"agent": {...}, "agents": [...], "pairs": [...], "batches": [...], "groups": [...], "publications": [...]},
    plain data only.

    ``stale``: why the pairs and groups could not be read again and may be outdated; "" if they were. ``seen``: the
    agents that Redis knows or knew, and the seconds since each has renewed its lease. ``hints``: by pair, others that
    may be meant. ``groups`` and ``publications``: their lines.
    """
    waits, hints = agent.rendezvous.waits(), hints or {}
    return {
        "agent": {
            "id": agent.id,
            "pid": os.getpid(),
            "host": agent.settings.host_name,
            "host_id": agent.settings.host_id,
            "device": agent.device,
            "namespace": agent.settings.namespace,
            "redis": agent.store.url,
            "version": __version__,
            "started_at": agent.started_at,
            "log": agent.log,
            "metrics": agent.metrics,
            "workers": [
                {
                    "pid": session.holder.pid,
                    "memory": session.reach,
                    "segments": len(session.memory.segments),
                    "ranks": [f"{seat.pair}: {seat.side} {seat.rank}" for _, seat in sorted(session.seats.items())],
                }
                for session in agent.sessions.values()
            ],
            "running": agent.transfers.idle_tracker.running,
            **agent.links.published,
            "encrypted": agent.links.encrypts,
            "staging": {"limit": agent.links.plane.budget.limit, "used": agent.links.plane.budget.used},
            "links": _links(agent),
            "stale": stale,
        },
        "agents": _agents(agent, seen),
        "pairs": [
            {
                **_pair(machine, ended, waited_for=machine.pair in waits),
                "waits": round(waits[machine.pair], 3) if machine.pair in waits else None,
                "hint": hints.get(machine.pair, ""),
            }
            for machine, ended in agent.rendezvous.shown()
        ],
        "batches": [line for registration in agent.registrations.known.values() for line in _batch(registration)],
        "groups": [dict(line) for line in groups],
        "publications": [dict(line) for line in publications],
    }


def _pair(machine: PairMachine, ended: bool, *, waited_for: bool) -> dict[str, Any]:
    """One line. ``ended``: no worker here belongs to the pair any more, so only Redis knows its state. ``waited_for``:
    a worker here waits for the next epoch, so how the last one ended ("last_error") is no error any more."""
    view, lost = machine.view, machine.lost
    state, epoch, error = machine.state.name.lower(), machine.epoch, lost.message if lost is not None else ""
    if view is not None and ended:
        state, epoch, error = view.state, view.epoch, error if view.epoch == epoch else view.error
    if view is not None and view.state == "closed" and state == "lost":
        state = "closed"  # everybody of both sides has left in order
    over = state == "closed"
    if waited_for and state in ("lost", "closed"):
        state, over = "forming", False
    return {
        "pair": machine.pair,
        "state": state,
        "epoch": epoch,
        "sides": {
            name: {"world_size": side.world_size, "ranks": sorted(side.members)}
            for name, side in (view.sides.items() if view is not None else ())
        },
        "waiting_for": {} if view is None or over else view.missing(),
        "error": "" if over or waited_for else error,
        "last_error": error,
    }


def _agents(agent: ReportedAgent, seen: Sequence[tuple[AgentRecord, float | None]]) -> list[dict[str, Any]]:
    """One line for each agent that Redis knows, this one's host first, with the state of this agent's link to it.

    ``link`` is "self", "open", "opening", "failed" (``trouble`` says why), "hub" (there is none, and both are in an
    epoch in which hubs pass on what they say), "missing" (a pair of both is formed, and yet there is no link) or "none"
    (no pair needs one). ``pairs``: the formed pairs of this agent in which it takes part. ``heartbeat``: seconds since
    it renewed its lease in Redis; None if Redis does not list it now.
    """
    linked = {peer.agent: peer for peer in agent.links.hub.peers()}
    needed: dict[str, list[str]] = {}
    for machine, ended in agent.rendezvous.shown():
        view = machine.view
        if view is not None and view.state == "formed" and not ended:
            for other in {holder.agent for side in view.sides.values() for holder in side.members.values()}:
                needed.setdefault(other, []).append(machine.pair)
    lines = []
    for record, heartbeat in sorted(seen, key=lambda one: (one[0].host != agent.settings.host_id, one[0].shown_host)):
        peer, trouble = linked.get(record.id), agent.links.trouble(record.id)
        if record.id == agent.id:
            link, why = "self", ""
        elif peer is not None:
            link, why = peer.state, ""
        elif trouble:
            link, why = "failed", trouble
        elif agent.links.reach(record.id) is not None:
            link, why = "hub", ""
        else:
            link, why = "missing" if record.id in needed else "none", _unreachable(record, agent.settings.host_id)
        lines.append(
            {
                "id": record.id,
                "host": record.shown_host,
                "host_id": record.host,
                "device": record.device,
                "pid": record.pid,
                "version": record.version,
                "address": record.address,
                "metrics": record.metrics,
                "started_at": record.started_at,
                "heartbeat": None if heartbeat is None else round(heartbeat, 1),
                "pairs": sorted(needed.get(record.id, ())),
                "links": [
                    {
                        "from": agent.device,
                        "link": link,
                        "silent": None if peer is None else round(peer.silent, 3),
                        "round_trip": None if peer is None or peer.round_trip is None else round(peer.round_trip, 6),
                        "trouble": why,
                    }
                ],
            }
        )
    return lines


def _unreachable(record: AgentRecord, host_id: str) -> str:
    """Why no agent of this host can link to it; "" if nothing speaks against it."""
    if record.host == host_id:
        return ""
    if not record.address:
        return "it takes no links: it needs ETHA_LISTEN=HOST:PORT"
    try:
        host, _ = parse_address(record.address)
    except ConfigError:
        return f"its address {record.address!r} cannot be read: no agent of Etha wrote it"
    if is_loopback(host):
        return f"its address {record.address} is loopback, which leads from here to this host: it needs ETHA_LISTEN"
    return ""


def _links(agent: ReportedAgent) -> list[dict[str, Any]]:
    """One line for each linked agent: seconds since its last message, last round trip, missed heartbeats, payload
    bytes."""
    lines = []
    for peer in agent.links.hub.peers():
        record, traffic = agent.links.record(peer.agent), agent.links.plane.traffic.get(peer.agent)
        lines.append(
            {
                "agent": peer.agent,
                "host": record.shown_host if record is not None else "",
                "address": peer.address,
                "state": peer.state,
                "silent": round(peer.silent, 3),
                "round_trip": None if peer.round_trip is None else round(peer.round_trip, 6),
                "missed": peer.missed,
                "reads": peer.agent in agent.links.reads,
                "bytes_sent": traffic.sent if traffic is not None else 0,
                "bytes_received": traffic.received if traffic is not None else 0,
            }
        )
    return lines


def _batch(registration: LocalRegistration) -> list[dict[str, Any]]:
    state = registration.machine.state.name.lower()
    waiting: list[str] = [f"{side} rank {rank}" for side, rank in sorted(registration.machine.absent)]
    seq, nbytes = 0, 0
    batch = registration.registered
    if batch is not None:
        seq = batch.participant.seq
        nbytes = batch.nbytes
        if batch.current is not None:
            state = "moving"
        elif batch.asks:
            state = "waiting"
            waiting = [f"{side} rank {rank}" for side, rank in batch.missing]
    return [
        {
            "pair": pair,
            "batch": registration.name,
            "state": state,
            "seq": seq,
            "version": batch.version if batch is not None else None,
            "bytes": nbytes,
            "transport": batch.transports if batch is not None else "",
            "waiting_for": waiting,
            "last_seconds": batch.last_seconds if batch is not None else None,
            "last_error": batch.last_error.message if batch is not None and batch.last_error is not None else "",
        }
        for pair in registration.pairs
    ]
