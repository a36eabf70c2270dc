"""The metrics of an agent for Prometheus: counters that add up what is recorded, and a page made when it is asked for.

    recorder --> TransferTotals (plain numbers) --+
    live agent --> AgentGauges, on its loop ------+--> families --> the page (metrics_server)

docs/metrics.md says what each means. Labels have few values, which are known in advance: Prometheus keeps one series
for each value that it has ever seen, so names of pairs and batches, versions and peers are in the events and not here.
"""

from __future__ import annotations

import platform
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from etha.errors import CODES
from etha.observe.records import Incident, Record, TransferRecord
from etha.version import __version__

#: Upper bounds of the histograms' buckets, in seconds: a small transfer takes 1e-4, a large one 10.
BUCKETS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
#: Phases of a transfer that pass in an agent. The others pass in workers.
PHASES = ("wait", "book", "compile", "move", "verify", "commit")
OUTCOMES = ("committed", "aborted", "unknown", "withdrawn")


class Histogram:
    """Counts of values by ``BUCKETS``, and their sum."""

    __slots__ = ("counts", "total")

    def __init__(self, counts: Sequence[int] = (), total: float = 0.0) -> None:
        self.counts, self.total = list(counts) or [0] * (len(BUCKETS) + 1), total

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds

    @property
    def cumulative(self) -> list[tuple[str, float]]:
        """As Prometheus wants them: how many values were at most each bound."""
        found, so_far = [], 0
        for bound, count in zip([*map(str, BUCKETS), "+Inf"], self.counts, strict=True):
            so_far += count
            found.append((bound, float(so_far)))
        return found


class TransferTotals:
    """What an agent's records add up to. ``take`` is a consumer of them; it costs some microseconds for each."""

    def __init__(self) -> None:
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        # From the beginning, because Prometheus sees no increase in a counter whose first value is 1.
        self.failures = dict.fromkeys(CODES, 0)
        self.incidents: dict[str, int] = {}
        self.ways: dict[str, int] = {}
        self.sent = self.received = 0
        self.seconds = Histogram()
        self.phases = {phase: Histogram() for phase in PHASES}

    def copy(self) -> TransferTotals:
        """The numbers as they are now, for another thread."""
        found = copy(self)
        found.outcomes, found.failures = dict(self.outcomes), dict(self.failures)
        found.incidents, found.ways = dict(self.incidents), dict(self.ways)
        found.seconds = Histogram(self.seconds.counts, self.seconds.total)
        found.phases = {phase: Histogram(one.counts, one.total) for phase, one in self.phases.items()}
        return found

    def take(self, records: Sequence[Record]) -> None:
        """Add these."""
        for record in records:
            if isinstance(record, TransferRecord):
                self._transfer(record)
            elif isinstance(record, Incident):
                self.incidents[record.what] = self.incidents.get(record.what, 0) + 1

    def _transfer(self, record: TransferRecord) -> None:
        self.outcomes[record.outcome] += 1
        if record.failed:
            self.failures[record.code] = self.failures.get(record.code, 0) + 1
        if record.outcome != "committed":
            return
        self.sent += record.payload.sent
        self.received += record.payload.received
        for way, nbytes in record.payload.ways.items():
            self.ways[way] = self.ways.get(way, 0) + nbytes
        self.seconds.add(record.seconds)
        for phase, histogram in self.phases.items():
            histogram.add(getattr(record.phases, phase))


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentGauges:
    """What an agent is and has at one moment."""

    device: str
    namespace: str
    sessions: int
    running: int
    pairs: Mapping[str, int] = field(default_factory=dict)
    batches: Mapping[str, int] = field(default_factory=dict)
    links: Mapping[str, int] = field(default_factory=dict)
    #: Seconds since the linked agent that has been silent longest was heard.
    heartbeat_age: float = 0.0
    staging_used: int
    staging_peak: int
    staging_limit: int
    lane_busy: float
    lane_threads: int
    redis_up: bool
    subscribers: int = 0
    subscribers_behind: int = 0
    #: Seconds for which the subscriber that has been behind longest has been so.
    subscriber_lag: float = 0.0
    #: Seconds that the event loop took to come to this.
    lag: float = 0.0


class AgentCollector(Collector):
    """The families of one page."""

    def __init__(self, totals: TransferTotals, gauges: AgentGauges) -> None:
        self._totals, self._gauges = totals, gauges

    def collect(self) -> Iterable[Metric]:
        """All of them, each with all the values that its labels may have."""
        yield from self._about()
        yield from self._transfers()
        yield from self._now()

    def _about(self) -> Iterator[Metric]:
        build = GaugeMetricFamily("etha_build_info", "Which Etha on which Python; 1.", labels=["version", "python"])
        build.add_metric([__version__, platform.python_version()], 1)
        yield build
        agent = GaugeMetricFamily("etha_agent_info", "Which agent; 1.", labels=["device", "namespace"])
        agent.add_metric([self._gauges.device, self._gauges.namespace], 1)
        yield agent

    def _transfers(self) -> Iterator[Metric]:
        totals = self._totals
        yield _counters("etha_transfers", "Transfers and calls that ended, by outcome.", "outcome", totals.outcomes)
        yield _counters(
            "etha_transfer_failures",
            "Transfers and calls that failed, by the code of their error.",
            "code",
            totals.failures,
        )
        yield _counters(
            "etha_incidents", "What else was recorded, such as a refused link, by kind.", "kind", totals.incidents
        )
        yield CounterMetricFamily(
            "etha_sent_bytes", "Payload that workers of this agent sent in transfers.", totals.sent
        )
        yield CounterMetricFamily(
            "etha_received_bytes",
            "Payload that workers of this agent received in transfers.",
            totals.received,
        )
        yield _counters(
            "etha_moved_bytes", "Bytes that this agent moved in committed transfers, by way.", "way", totals.ways
        )
        seconds = HistogramMetricFamily("etha_transfer_seconds", "Committed transfers, from GO to the end.")
        seconds.add_metric([], totals.seconds.cumulative, totals.seconds.total)
        yield seconds
        phases = HistogramMetricFamily(
            "etha_transfer_phase_seconds", "Phases of committed transfers in this agent.", labels=["phase"]
        )
        for phase, histogram in totals.phases.items():
            phases.add_metric([phase], histogram.cumulative, histogram.total)
        yield phases

    def _now(self) -> Iterator[Metric]:
        now = self._gauges
        yield GaugeMetricFamily("etha_transfers_running", "Transfers that move now.", now.running)
        yield GaugeMetricFamily("etha_sessions", "Workers that are connected.", now.sessions)
        yield _gauges("etha_pairs", "Pairs of connected workers, by state.", "state", now.pairs)
        yield _gauges("etha_batches", "Batches of connected workers, by state.", "state", now.batches)
        yield _gauges("etha_links", "Links to other agents, by state.", "state", now.links)
        yield GaugeMetricFamily(
            "etha_link_oldest_heartbeat_age_seconds",
            "Time since the linked agent that has been silent longest was heard; 0 without links.",
            now.heartbeat_age,
        )
        yield GaugeMetricFamily("etha_staging_used_bytes", "Staging memory in use.", now.staging_used)
        yield GaugeMetricFamily(
            "etha_staging_peak_bytes", "Most staging memory in use at once since the agent began.", now.staging_peak
        )
        yield GaugeMetricFamily("etha_staging_limit_bytes", "Most staging memory that may be used.", now.staging_limit)
        yield CounterMetricFamily(
            "etha_lane_busy_seconds", "Time that lane threads spent copying, all together.", now.lane_busy
        )
        yield GaugeMetricFamily("etha_lane_threads", "Lane threads.", now.lane_threads)
        yield GaugeMetricFamily(
            "etha_redis_up", "Whether the last renewal of the agent's lease in Redis succeeded.", float(now.redis_up)
        )
        yield GaugeMetricFamily("etha_subscribers", "Subscribers with workers here.", now.subscribers)
        yield GaugeMetricFamily(
            "etha_subscribers_behind", "Those that do not hold the newest version.", now.subscribers_behind
        )
        yield GaugeMetricFamily(
            "etha_subscriber_oldest_lag_seconds",
            "For how long the one that has been behind longest has been so; 0 if none is.",
            now.subscriber_lag,
        )
        yield GaugeMetricFamily(
            "etha_event_loop_lag_seconds", "Time until the agent's event loop came to this request.", now.lag
        )


def _counters(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    found = CounterMetricFamily(name, text, labels=[label])
    for value, count in sorted(values.items()):
        found.add_metric([value], count)
    return found


def _gauges(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    found = GaugeMetricFamily(name, text, labels=[label])
    for value, count in sorted(values.items()):
        found.add_metric([value], count)
    return found


def registry_of(totals: TransferTotals, gauges: AgentGauges) -> CollectorRegistry:
    """A registry for one page. Its ``process_*`` metrics are those of every Prometheus client."""
    registry = CollectorRegistry()
    registry.register(AgentCollector(totals, gauges))
    ProcessCollector(registry=registry)
    return registry
