"""What ``client.status()`` and ``etha status --json`` show of one agent, as plain data; pure."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from etha.agent.live import Live
from etha.agent.pair import Pair, Standing
from etha.version import __version__

if TYPE_CHECKING:
    from etha.agent.service import Agent


def report(agent: Agent) -> dict[str, Any]:
    """{"agent": {...}, "pairs": [...], "batches": [...]}, see CONTRACT: numbers, texts, lists only."""
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
            "workers": [
                {
                    "pid": session.holder.pid,
                    "memory": session.reach,
                    "segments": len(session.memory.segments),
                    "ranks": [f"{seat.pair}: {seat.side} {seat.rank}" for _, seat in sorted(session.seats.items())],
                }
                for session in agent.sessions.values()
            ],
            "running": agent.movers.rest.running,
            **agent.links.published,
            "encrypted": agent.links.encrypts,
            "staging": {"limit": agent.links.plane.budget.limit, "used": agent.links.plane.budget.used},
            "links": _links(agent),
        },
        "pairs": [
            {
                "pair": machine.pair,
                "state": "closed" if _is_closed(machine) else machine.state.name.lower(),
                "epoch": machine.epoch,
                "sides": {
                    name: {"world_size": side.world_size, "ranks": sorted(side.members)}
                    for name, side in (machine.view.sides.items() if machine.view is not None else ())
                },
                "waiting_for": machine.view.missing() if machine.view is not None else {},
                "error": machine.lost.message if machine.lost is not None and not _is_closed(machine) else "",
            }
            for machine in agent.pairs.machines()
        ],
        "batches": [line for live in agent.batches.live.values() for line in _batch(live)],
    }


def _is_closed(machine: Pair) -> bool:
    """Whether everybody of both sides has left in order."""
    return machine.state is Standing.LOST and machine.view is not None and machine.view.state == "closed"


def _links(agent: Agent) -> list[dict[str, Any]]:
    """One line a linked agent: seconds since it was heard, its last round trip, beats it missed, payload bytes."""
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


def _batch(live: Live) -> list[dict[str, Any]]:
    state = live.machine.state.name.lower()
    waiting: list[str] = [f"{side} rank {rank}" for side, rank in sorted(live.machine.absent)]
    seq, nbytes = 0, 0
    if live.transfers is not None and live.evaluation is not None:
        seq = live.transfers.seq
        nbytes = max(live.evaluation.nbytes(side) for side in live.evaluation.sides)
        if live.current is not None:
            state = "moving"
        elif live.asks:
            state = "waiting"
            waiting = [f"{side} rank {rank}" for side, rank in live.missing]
    return [
        {
            "pair": pair,
            "batch": live.name,
            "state": state,
            "seq": seq,
            "version": live.version,
            "bytes": nbytes,
            "transport": live.transports if live.transfers is not None else "",
            "waiting_for": waiting,
            "last_seconds": live.last_seconds,
            "last_error": live.last_error.message if live.last_error is not None else "",
        }
        for pair in live.pairs
    ]
