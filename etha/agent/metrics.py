"""This agent's metrics (docs/metrics.md): what they are read from, and the server that shows them, if it has one.

Only an agent with ETHA_METRICS or ``--metrics`` imports this.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from enum import Enum
from types import TracebackType
from typing import Protocol, Self

from etha.addresses import format_address, parse_address
from etha.agent.protocol.pair import PairPhase
from etha.agent.protocol.registration import RegistrationState
from etha.agent.runtime.lane import Lane
from etha.agent.runtime.peers import PeerLinks
from etha.agent.runtime.sessions import WorkerSession
from etha.agent.services.publications import PublicationService
from etha.agent.services.registration import RegistrationService
from etha.agent.services.rendezvous import RendezvousService
from etha.agent.services.transfers import TransferService
from etha.config import Settings
from etha.observe.metrics import AgentGauges, TransferTotals
from etha.observe.metrics_server import MetricsServer
from etha.observe.recorder import Recorder
from etha.peer.link import State
from etha.store.registry import Store

log = logging.getLogger(__name__)


class MeasuredAgent(Protocol):
    """What is read of the agent (``agent.server.Agent``)."""

    settings: Settings
    device: str
    store: Store
    metrics: str
    sessions: dict[str, WorkerSession]
    lane: Lane
    links: PeerLinks
    recorder: Recorder
    rendezvous: RendezvousService
    registrations: RegistrationService
    transfers: TransferService
    publications: PublicationService


class AgentMetrics:
    """Entered while the agent serves. A port that cannot be had is a warning, because transfers matter more."""

    def __init__(self, agent: MeasuredAgent, address: str) -> None:
        self._agent, self._address = agent, address
        self._totals = TransferTotals()
        self._server: MetricsServer | None = None

    async def __aenter__(self) -> Self:
        host, _, port = self._address.rpartition(":")
        try:
            self._server = MetricsServer(host.strip("[]"), int(port), self._read)
        except (OSError, OverflowError) as error:
            self._agent.metrics = f"none: {self._address} cannot be listened on ({error})"
            log.warning("this agent has no metrics: %s cannot be listened on: %s", self._address, error)
            return self
        self._agent.recorder.subscribe(self._totals.take)
        self._agent.metrics = self._server.address
        log.info("metrics at http://%s/metrics", self._server.address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            await self._server.close()

    def _read(self, lag: float) -> tuple[TransferTotals, AgentGauges]:
        """The numbers of this moment, on the agent's loop."""
        return self._totals.copy(), gauges(self._agent, lag)


def gauges(agent: MeasuredAgent, lag: float = 0.0) -> AgentGauges:
    """What the agent is and has now."""
    peers, budget, lags = agent.links.hub.peers(), agent.links.plane.budget, agent.publications.lags()
    return AgentGauges(
        device=agent.device,
        namespace=agent.settings.namespace,
        sessions=len(agent.sessions),
        running=agent.transfers.idle_tracker.running,
        pairs=_count(PairPhase, (machine.state.name for machine, ended in agent.rendezvous.shown() if not ended)),
        batches=_count(RegistrationState, (one.machine.state.name for one in agent.registrations.known.values())),
        links=_count(State, (peer.state for peer in peers)),
        heartbeat_age=max((peer.silent for peer in peers), default=0.0),
        staging_used=budget.used,
        staging_peak=budget.peak,
        staging_limit=budget.limit,
        lane_busy=agent.lane.busy,
        lane_threads=agent.lane.threads,
        redis_up=agent.store.agents.up,
        subscribers=len(lags),
        subscribers_behind=sum(lag > 0 for lag in lags),
        subscriber_lag=max(lags, default=0.0),
        lag=lag,
    )


def _count(states: type[Enum], found: Iterable[str]) -> dict[str, int]:
    """How often each state was found, in small letters; also those that were not."""
    counts = Counter(map(str.lower, found))
    return {state.name.lower(): counts[state.name.lower()] for state in states}


def own_address(wanted: str, ordinal: int | None) -> str:
    """HOST:PORT of the agent of ``cuda:ordinal`` where ETHA_METRICS is ``wanted``; ``ordinal`` None: the CPU's.

    Each has a port that does not depend on the others.
    """
    host, port = parse_address(wanted, 65535)
    return wanted if ordinal is None or not port else format_address(host, port + 1 + ordinal)
