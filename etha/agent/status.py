"""The report of ``client.status()`` and ``etha status --json`` about one agent, as plain data; pure."""

from __future__ import annotations

import os
from typing import Any, Protocol

from etha.agent.protocol.pair import PairMachine
from etha.agent.runtime.peers import PeerLinks
from etha.agent.runtime.sessions import WorkerSession
from etha.agent.services.batch_state import LocalRegistration
from etha.agent.services.registration import RegistrationService
from etha.agent.services.rendezvous import RendezvousService
from etha.agent.services.transfers import TransferService
from etha.config import Settings
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


def report(agent: ReportedAgent, stale: str = "") -> dict[str, Any]:
    """{"agent": {...}, "pairs": [...], "batches": [...]}, of numbers, texts and lists only.

    ``stale``: why the pairs could not be read again and may be outdated; "" if they were.
    """
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
        "pairs": [_pair(machine, ended) for machine, ended in agent.rendezvous.shown()],
        "batches": [line for registration in agent.registrations.known.values() for line in _batch(registration)],
    }


def _pair(machine: PairMachine, ended: bool) -> dict[str, Any]:
    """One line. ``ended``: no worker here belongs to the pair any more, so only Redis knows its state."""
    view, lost = machine.view, machine.lost
    state, epoch, error = machine.state.name.lower(), machine.epoch, lost.message if lost is not None else ""
    if view is not None and ended:
        state, epoch, error = view.state, view.epoch, error if view.epoch == epoch else view.error
    if view is not None and view.state == "closed" and state == "lost":
        state = "closed"  # everybody of both sides has left in order
    over = state == "closed"
    return {
        "pair": machine.pair,
        "state": state,
        "epoch": epoch,
        "sides": {
            name: {"world_size": side.world_size, "ranks": sorted(side.members)}
            for name, side in (view.sides.items() if view is not None else ())
        },
        "waiting_for": {} if view is None or over else view.missing(),
        "error": "" if over else error,
    }


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
        nbytes = max(batch.evaluation.nbytes(side) for side in batch.evaluation.sides)
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
