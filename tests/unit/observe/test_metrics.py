"""The metrics of an agent: what they add up, the rules of Prometheus, and docs/metrics.md."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_page
from prometheus_client.parser import text_string_to_metric_families

from etha.errors import CODES
from etha.observe.metrics import BUCKETS, PHASES, AgentGauges, Histogram, TransferTotals, registry_of
from etha.observe.records import Incident, Payload, TransferRecord
from etha.phases import Phases

DOCS = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"

GAUGES = AgentGauges(
    device="cpu",
    namespace="default",
    sessions=2,
    running=1,
    pairs={"formed": 1},
    batches={"registered": 3},
    links={"open": 2, "opening": 1},
    heartbeat_age=0.5,
    staging_used=1,
    staging_peak=2,
    staging_limit=3,
    lane_busy=4.5,
    lane_threads=2,
    redis_up=True,
    lag=0.001,
)


def transfer(**fields: object) -> TransferRecord:
    return TransferRecord(**{"at": 1.0, "pairs": ("p",), "batch": "b", "outcome": "committed", **fields})


def totals(*records: TransferRecord | Incident) -> TransferTotals:
    found = TransferTotals()
    found.take(records)
    return found


FULL = totals(
    transfer(
        payload=Payload(sent=10, received=20, ways={"mapped": 5, "tcp": 7}),
        seconds=0.5,
        phases=Phases(wait=2.0, move=0.25),
    ),
    transfer(payload=Payload(sent=1, ways={"tcp": 1}), seconds=1000.0),
    transfer(outcome="aborted", code="peer_lost", payload=Payload(sent=99, ways={"tcp": 99}), seconds=9.0),
    transfer(outcome="withdrawn", superseded=True, code="transfer_aborted"),
    Incident(at=1.0, what="link_refused", reason="x"),
)


def page(found: TransferTotals = FULL) -> str:
    return generate_latest(registry_of(found, GAUGES)).decode()


def families(found: TransferTotals = FULL) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(page(found))}


def value(name: str, found: TransferTotals = FULL, **labels: str) -> float:
    samples = [one for family in families(found).values() for one in family.samples]
    (only,) = (one.value for one in samples if one.name == name and one.labels == labels)
    return float(only)


def test_only_what_was_committed_counts_as_moved() -> None:
    assert {
        one: value("etha_transfers_total", outcome=one) for one in ("committed", "aborted", "withdrawn", "unknown")
    } == {
        "committed": 2,
        "aborted": 1,
        "withdrawn": 1,
        "unknown": 0,
    }
    assert (value("etha_sent_bytes_total"), value("etha_received_bytes_total")) == (11, 20)
    assert (value("etha_moved_bytes_total", way="mapped"), value("etha_moved_bytes_total", way="tcp")) == (5, 8)
    assert value("etha_transfer_failures_total", code="peer_lost") == 1
    assert value("etha_transfer_failures_total", code="transfer_aborted") == 0, "a newer snapshot is no failure"
    assert value("etha_incidents_total", kind="link_refused") == 1


def test_histograms_count_each_transfer_once_in_every_bucket_that_is_not_below_it() -> None:
    assert value("etha_transfer_seconds_count") == 2 and value("etha_transfer_seconds_sum") == 1000.5
    found = {bound: value("etha_transfer_seconds_bucket", le=str(bound)) for bound in BUCKETS}
    assert found == {bound: float(bound >= 0.5) for bound in BUCKETS}
    assert value("etha_transfer_seconds_bucket", le="+Inf") == 2
    assert value("etha_transfer_phase_seconds_sum", phase="wait") == 2.0
    assert value("etha_transfer_phase_seconds_count", phase="verify") == 2
    one = Histogram()
    one.add(BUCKETS[3])
    assert dict(one.cumulative)[str(BUCKETS[3])] == 1 and dict(one.cumulative)[str(BUCKETS[2])] == 0


def test_a_copy_does_not_change_any_more() -> None:
    found = totals(transfer(seconds=1.0))
    before, copied = page(found), found.copy()
    found.take([transfer(seconds=1.0, outcome="unknown", code="peer_lost"), transfer(payload=Payload(ways={"tcp": 1}))])
    kept = [line for line in page(copied).splitlines() if "etha_" in line]
    assert kept == [line for line in before.splitlines() if "etha_" in line]


UNITS = ("seconds", "bytes", "info", "total", "up", "fds")


def test_the_page_keeps_the_conventions_of_prometheus() -> None:
    """Those that promtool checks, and base units in names."""
    for name, family in families().items():
        assert family.documentation and family.type in ("counter", "gauge", "histogram"), name
        assert re.fullmatch(r"(etha|process)(_[a-z]+)+", name), name
        assert not re.search(r"_(counter|gauge|histogram|count|sum|bucket|total|ms|us|mb|kb|minutes)$", name), name
        for sample in family.samples:
            if name.startswith("etha_") and family.type == "counter":
                assert sample.name == f"{name}_total"
            assert sample.name.startswith(name) and not math.isnan(sample.value)
            assert len(sample.labels) <= 2 and all(re.fullmatch("[a-z]+", label) for label in sample.labels)
            assert set(sample.labels) <= {"outcome", "code", "kind", "way", "phase", "state", "le"} or name.endswith(
                "info"
            )


def test_a_page_without_anything_that_happened_has_every_family() -> None:
    empty, full = families(TransferTotals()), families()
    assert set(empty) == set(full)


def test_the_page_is_openmetrics_too() -> None:
    text = openmetrics_page(registry_of(FULL, GAUGES)).decode()
    found = {family.name for family in openmetrics.text_string_to_metric_families(text)}
    assert {"etha_transfers", "etha_transfer_seconds", "etha_redis_up"} <= found


@pytest.mark.needs("promtool")
def test_promtool_finds_nothing(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    assert promtool is not None
    shown = subprocess.run([promtool, "check", "metrics"], input=page(), capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "", "")


def documented() -> dict[str, tuple[str, str]]:
    """The table of docs/metrics.md: name -> (type, labels)."""
    rows = re.findall(r"^\| `((?:etha|process)_[a-z_]+)` \| (\w+) \|(.*?)\| .+ \|$", DOCS.read_text(), re.MULTILINE)
    return {name: (kind, labels) for name, kind, labels in rows}


def test_the_page_and_the_docs_have_the_same_metrics() -> None:
    served = {_served_name(family): family.type for family in families().values()}
    assert {name: kind for name, (kind, _) in documented().items()} == served
    for family in families().values():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        listed = re.findall(r"`(\w+)`", documented()[_served_name(family)][1].partition(":")[0])
        assert set(listed) == labels, family.name


def _served_name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def test_labels_have_the_values_that_the_docs_name() -> None:
    text = DOCS.read_text()
    for phase in PHASES:
        assert f"`{phase}`" in documented()["etha_transfer_phase_seconds"][1]
    for name in set(re.findall(r"etha_[a-z_]+[a-z]", text)) - set(documented()):
        assert any(name.startswith(known) or known.startswith(name) for known in documented()), f"{name} is no metric"


def test_every_code_is_there_from_the_beginning() -> None:
    """A first failure is an increase only if the counter was there before."""
    assert {value("etha_transfer_failures_total", TransferTotals(), code=code) for code in CODES} == {0}
