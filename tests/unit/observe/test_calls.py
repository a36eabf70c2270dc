"""Calls as spans of OpenTelemetry: names, parents from the caller, phases, errors; nothing without a provider."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.tensor import Replicate

import etha
from etha.observe import calls
from etha.phases import Phases
from etha.testing import AsyncDummyTensorBusClient, DummyTensorBusClient

otel = pytest.importorskip("opentelemetry.trace")
sdk = pytest.importorskip("opentelemetry.sdk.trace")

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

LAYOUT = {"device_mesh": (1,), "placements": [Replicate()]}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """The process has a tracer provider, and these are the spans that have ended."""
    provider, exporter = sdk.TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(otel, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(otel, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def named(spans: InMemorySpanExporter, name: str) -> ReadableSpan:
    found = [span for span in spans.get_finished_spans() if span.name == name]
    assert len(found) == 1, [span.name for span in spans.get_finished_spans()]
    return found[0]


def test_the_blocking_clients_spans_belong_to_the_calling_threads(spans: InMemorySpanExporter) -> None:
    with otel.get_tracer("training").start_as_current_span("step") as step, DummyTensorBusClient() as client:
        client.init_pair("p", "trainer", "inference", **LAYOUT)
        handle = client.register_tensors("b", {"w": torch.zeros(4)}, pair_name="p")
        handle.transfer("send", version="v1")
        handle.transfer("send", version="v2", blocking=False).result()
    for name in ("init_pair", "register_tensors"):
        assert named(spans, name).parent.span_id == step.get_span_context().span_id
    one, two = [span for span in spans.get_finished_spans() if span.name == "transfer"]
    assert one.parent.span_id == two.parent.span_id == step.get_span_context().span_id
    said = dict(one.attributes)
    assert (said["etha.pair"], said["etha.batch"], said["etha.verb"]) == ("p", "b", "send")
    assert (said["etha.seq"], said["etha.version"], said["etha.side"], said["etha.rank"]) == (1, "v1", "trainer", 0)


async def test_the_async_clients_spans_belong_to_the_task(spans: InMemorySpanExporter) -> None:
    async with AsyncDummyTensorBusClient() as client:
        await client.init_pair("p", "trainer", "inference", **LAYOUT)
        handle = await client.register_tensors("b", {"w": torch.zeros(4)}, pair_name="p")

        async def step(number: int) -> int:
            with otel.get_tracer("training").start_as_current_span(f"step {number}") as span:
                await handle.transfer("send", version=number)
                return span.get_span_context().span_id

        parents = await asyncio.gather(step(1), step(2))
    transfers = [span for span in spans.get_finished_spans() if span.name == "transfer"]
    assert {span.attributes["etha.version"]: span.parent.span_id for span in transfers} == {
        1: parents[0],
        2: parents[1],
    }


@pytest.mark.parametrize("on_error", ["raise", "report"])
def test_a_failure_is_the_spans_status(spans: InMemorySpanExporter, on_error: str) -> None:
    with DummyTensorBusClient(on_error=on_error) as client:
        client.init_pair("p", "trainer", "inference", **LAYOUT)
        handle = client.register_tensors("b", {"w": torch.zeros(4)}, pair_name="p")
        client.fail_next(etha.TransferAbortedError("somebody has failed"))
        try:
            assert handle.transfer("send").error is not None
        except etha.TransferAbortedError:
            assert on_error == "raise"
    span = named(spans, "transfer")
    assert span.status.status_code is otel.StatusCode.ERROR
    assert "somebody has failed" in span.status.description
    assert [event.name for event in span.events] == ["exception"]
    assert span.attributes["etha.outcome"] == "aborted"


def test_phases_are_children(spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = calls.spans_of_process()
    assert watcher is not None

    class Result:
        error, seq, version, bytes = None, 3, None, 8
        phases = (("copy_in", 0.001), ("wait", 0.0), ("move", 0.002), ("copy_out", 0.001))

    async def work() -> Result:
        await asyncio.sleep(0.01)
        return Result()

    asyncio.run(watcher.watch("transfer", work(), {}))
    transfer = named(spans, "transfer")
    children = [span for span in spans.get_finished_spans() if span is not transfer]
    assert [span.name for span in children] == ["copy_in", "move", "copy_out"]
    for child in children:
        assert child.parent.span_id == transfer.context.span_id
        assert transfer.start_time <= child.start_time <= child.end_time <= transfer.end_time


def test_nothing_without_a_provider() -> None:
    assert calls.spans_of_process() is None
    with DummyTensorBusClient() as client:
        assert client._aio._spans is None


def test_nothing_imports_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    assert calls.spans_of_process() is None
    assert "opentelemetry.trace" not in sys.modules


class Broken(SpanProcessor):
    """An exporter with a bug, or one whose server is away."""

    def __init__(self, when: str) -> None:
        self.when = when

    def on_start(self, span: object, parent_context: object = None) -> None:
        if self.when == "on_start":
            raise RuntimeError("the exporter is down")

    def on_end(self, span: object) -> None:
        if self.when == "on_end":
            raise RuntimeError("the exporter is down")


@pytest.mark.parametrize("when", ["on_start", "on_end"])
async def test_a_span_processor_that_fails_fails_no_call(
    when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    provider = sdk.TracerProvider()
    provider.add_span_processor(Broken(when))
    monkeypatch.setattr(otel, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(otel, "get_tracer", provider.get_tracer)
    async with AsyncDummyTensorBusClient() as client:
        await client.init_pair("p", "trainer", "inference", **LAYOUT)
        handle = await client.register_tensors("b", {"w": torch.zeros(4)}, pair_name="p")
        for version in (1, 2):
            assert (await handle.transfer("send", version=version)).version == version
    assert [record.getMessage() for record in caplog.records].count(
        "OpenTelemetry failed, calls go on without their spans"
    ) == 1


def test_a_skipped_call_has_no_phases_of_the_call_that_failed(spans: InMemorySpanExporter) -> None:
    watcher = calls.CallSpans(None, otel)

    async def skipped() -> etha.TransferResult:
        error = etha.TransferTimeoutError("too late")
        error.phases = Phases(copy_in=1.0, wait=2.0)
        return etha.TransferResult.failed("send", error, skipped=True)

    assert asyncio.run(watcher.watch("transfer", skipped(), {})).skipped
    assert [span.name for span in spans.get_finished_spans()] == ["transfer"]
