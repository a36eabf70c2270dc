"""GPU memory and events between a worker and its agent, over the fake GPU: in one process and between two."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch

from etha.cuda.driver import DeviceError, Extent, Unexportable
from etha.errors import RegistrationError
from etha.memory.cuda import Exports, Mappings, Signals, Waits
from etha.memory.process import start_time
from etha.memory.signals import MOST_EVENTS
from tests.fakes.cuda import GPU0, GPU1, FakeDriver
from tests.processes import CONTEXT, preload

preload("tests.fakes.cuda", "etha.memory.cuda")


@pytest.fixture
def gpu() -> Iterator[FakeDriver]:
    """Two GPUs; at the end nothing is left open."""
    fake = FakeDriver((GPU0, GPU1))
    yield fake
    fake.check()


# -- the worker's exports -------------------------------------------------------------------------------------------


def test_tensors_of_one_allocation_are_exported_once(gpu: FakeDriver) -> None:
    exports = Exports(gpu)
    a, b = gpu.empty(GPU0, (4, 4)), gpu.empty(GPU0, (100,), torch.int8)
    (one, at), (two, behind) = exports.find(a), exports.find(b)
    assert one == two and at == 0 and behind == b.data_ptr() - a.data_ptr() > 0
    assert exports.find(a[2:]) == (one, 32)
    assert gpu.calls["export"] == 1
    other, _ = exports.find(gpu.empty(GPU1, (4,)))
    assert other != one and exports.header(other)["device"] == GPU1
    header = exports.header(one)
    base, nbytes = gpu.extent(a.data_ptr())
    assert header == {"segment": one, "nbytes": nbytes, "device": GPU0, "handle": gpu.export(base).hex()}
    header["nbytes"] = 0
    assert exports.header(one)["nbytes"] == nbytes


def test_memory_made_again_at_the_same_address_is_another_segment(
    gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    exports = Exports(gpu)
    # A driver may well give the same handle for the same address again.
    monkeypatch.setattr(gpu, "export", lambda base: b"\7" * 64)
    monkeypatch.setattr(gpu, "holds", lambda tensor: GPU0)
    ids, addresses = [], []
    for _ in range(3):
        address = gpu.allocate(GPU0, 4096)
        ids.append(exports.find(gpu.tensor(GPU0, address, 4096))[0])
        addresses.append(address)
        gpu.free(address)
    assert len(set(addresses)) == 1 and len(set(ids)) == 3
    with pytest.raises(RegistrationError, match=f"segment {ids[0]} is gone"):
        exports.header(ids[0])
    assert exports.header(ids[2])["segment"] == ids[2]


def test_memory_without_a_handle_is_told_each_time(gpu: FakeDriver) -> None:
    exports = Exports(gpu)
    tensor = gpu.empty(GPU0, (4,), exportable=False)
    for _ in range(2):
        with pytest.raises(Unexportable):
            exports.find(tensor)
    for wrong in (torch.empty(3), gpu.empty(GPU0, (0, 3))):
        with pytest.raises(ValueError, match="lies in no GPU's memory"):
            exports.find(wrong)


def test_two_processes_never_have_one_id(gpu: FakeDriver) -> None:
    tensor = gpu.empty(GPU0, (4,))
    assert Exports(gpu).find(tensor) != Exports(gpu).find(tensor)


# -- a worker in another process ------------------------------------------------------------------------------------


def _worker(pipe: Connection) -> None:
    """One tensor on each GPU, 7 and 8; then what it is told."""
    gpu = FakeDriver((GPU0, GPU1))
    exports, signals = Exports(gpu), Signals(gpu, GPU0)
    tensors = [gpu.empty(GPU0, (1000,), torch.uint8).fill_(7), gpu.empty(GPU1, (1000,), torch.uint8).fill_(8)]
    pipe.send([exports.header(exports.find(tensor)[0]) for tensor in tensors])
    stream, events = gpu.stream(GPU0), list[tuple[int, bytes]]()
    while (word := pipe.recv()) != "end":
        answer: Any = None
        match word:
            case "hold":
                gpu.hold(stream)
            case "release":
                gpu.release(stream)
            case "record":
                with gpu.using(stream):
                    gpu.launch(GPU0, stream, lambda: tensors[0].fill_(9))
                    events.append(signals.record())
                    answer = events[-1][1]
            case "record elsewhere":
                events.append(signals.record())
                answer = events[-1][1]
            case "ended":
                signals.release(events.pop(0)[0])
            case "events":
                answer = gpu.calls["event"]
        pipe.send(answer)
    signals.close()
    gpu.shut()


class Worker:
    """The other process; ``headers`` of its two tensors."""

    def __init__(self) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self.process: BaseProcess = CONTEXT.Process(target=_worker, args=(theirs,))
        self.process.start()
        theirs.close()
        self.headers: list[dict[str, Any]] = self._pipe.recv()
        assert self.process.pid is not None
        self.pid = self.process.pid
        self.started = start_time(self.pid)

    def tell(self, word: str) -> Any:
        self._pipe.send(word)
        return self._pipe.recv()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.process.join()

    def end(self) -> None:
        if self.process.is_alive():
            self._pipe.send("end")
        self.process.join()
        self.process.close()
        self._pipe.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    one = Worker()
    yield one
    one.end()


def byte(address: int) -> int:
    return ctypes.string_at(address, 1)[0]


@pytest.mark.slow
def test_an_allocation_is_open_once_and_until_its_last_holder_closes(gpu: FakeDriver, worker: Worker) -> None:
    mappings = Mappings(gpu, GPU0)
    one, two = (mappings.attach(worker.pid, worker.started, worker.headers[0]) for _ in range(2))
    assert gpu.calls["open"] == 1 and len(mappings) == 1
    assert one.address == two.address and one.space == two.space and byte(one.address) == 7
    assert (one.device, one.nbytes, one.header) == (GPU0, worker.headers[0]["nbytes"], worker.headers[0])
    other = mappings.attach(worker.pid, worker.started, worker.headers[1])
    assert other.device == GPU1 and other.space != one.space and byte(other.address) == 8
    one.close()
    one.close()
    assert byte(two.address) == 7 and gpu.calls["close"] == 0
    two.close()
    assert gpu.calls["close"] == 1 and len(mappings) == 1
    again = mappings.attach(worker.pid, worker.started, worker.headers[0])
    assert gpu.calls["open"] == 3 and byte(again.address) == 7
    again.close()
    other.close()


@pytest.mark.slow
def test_a_killed_worker_is_closed_without_an_error(gpu: FakeDriver, worker: Worker) -> None:
    mappings = Mappings(gpu, GPU0)
    one, two = (mappings.attach(worker.pid, worker.started, worker.headers[i]) for i in (0, 1))
    worker.kill()
    assert byte(one.address) == 7
    one.close()
    assert len(mappings) == 1
    mappings.forget(worker.pid, worker.started)
    assert len(mappings) == 0
    two.close()  # its holder comes later
    with pytest.raises(RegistrationError, match=f"of process {worker.pid} on {GPU0} cannot be mapped"):
        mappings.attach(worker.pid, worker.started, worker.headers[0])


@pytest.mark.slow
def test_an_error_at_closing_is_logged_and_a_sticky_one_told(
    gpu: FakeDriver, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    reported: list[DeviceError] = []
    mappings = Mappings(gpu, GPU0, on_sticky=reported.append)
    one, two = (mappings.attach(worker.pid, worker.started, worker.headers[i]) for i in (0, 1))
    gpu.fail("close", DeviceError("cudaErrorInvalidValue", "close"))
    with caplog.at_level(logging.WARNING):
        one.close()
    assert "unmapping" in caplog.text and "cudaErrorInvalidValue" in caplog.text and reported == []
    spoilt = DeviceError("cudaErrorIllegalAddress", "close", sticky=True)
    gpu.fail("close", spoilt)
    two.close()
    assert reported == [spoilt]
    gpu.forgive()
    for left in list(gpu.mapped):
        gpu.close(left)


@pytest.mark.slow
def test_all_is_unmapped_at_the_end(gpu: FakeDriver, worker: Worker) -> None:
    mappings = Mappings(gpu, GPU0)
    held = mappings.attach(worker.pid, worker.started, worker.headers[0])
    mappings.close()
    mappings.close()
    held.close()
    assert gpu.calls["close"] == 1


GOOD = {"segment": "ab", "nbytes": 4096, "device": GPU0, "handle": "00" * 64}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"segment": ""}, "segment is ''"),
        ({"segment": "xyz"}, "segment is 'xyz'"),
        ({"segment": 5}, "segment is '5'"),
        ({"segment": "a" * 65}, "segment is"),
        ({"device": "cuda:0"}, "device is 'cuda:0', not a GPU's uuid"),
        ({"device": None}, "device is 'None'"),
        ({"handle": "00" * 63}, "handle is .*128 hex digits"),
        ({"handle": "0G" * 64}, "handle is"),
        ({"handle": b"0" * 128}, "handle is"),
        ({"nbytes": 0}, "nbytes is '0'"),
        ({"nbytes": -1}, "nbytes is '-1'"),
        ({"nbytes": True}, "nbytes is 'True'"),
        ({"nbytes": 4096.0}, "nbytes is '4096.0'"),
        ({"nbytes": 1 << 60}, "nbytes is"),
        ({}, "cannot be mapped .*that is no handle"),
    ],
)
def test_a_header_is_believed_by_nobody(gpu: FakeDriver, change: dict[str, Any], match: str) -> None:
    with pytest.raises(RegistrationError, match=match):
        Mappings(gpu, GPU0).attach(os.getpid(), 1, {**GOOD, **change})
    for name in GOOD:
        with pytest.raises(RegistrationError, match=name):
            Mappings(gpu, GPU0).attach(os.getpid(), 1, {n: v for n, v in GOOD.items() if n != name})
    assert gpu.calls["close"] == 0


@pytest.mark.slow
def test_an_allocation_in_the_midst_of_what_is_mapped_is_good(
    gpu: FakeDriver, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = worker.headers[0]
    extent = gpu.extent
    behind = 0

    def block(address: int) -> Extent:
        return Extent(extent(address).base - 4096, 4096 + header["nbytes"] + behind)

    monkeypatch.setattr(gpu, "extent", block)
    mappings = Mappings(gpu, GPU0)
    mapping = mappings.attach(worker.pid, worker.started, header)
    assert mapping.nbytes == header["nbytes"]
    mapping.close()
    behind = -1
    with pytest.raises(RegistrationError, match=f"only {header['nbytes'] - 1} bytes are mapped"):
        mappings.attach(worker.pid, worker.started, header)
    assert not gpu.mapped


@pytest.mark.slow
def test_a_size_beyond_what_is_mapped_is_refused(gpu: FakeDriver, worker: Worker) -> None:
    header = worker.headers[0]
    mappings = Mappings(gpu, GPU0)
    with pytest.raises(RegistrationError, match=f"only {header['nbytes']} bytes are mapped"):
        mappings.attach(worker.pid, worker.started, {**header, "nbytes": header["nbytes"] + 1})
    assert gpu.calls["close"] == 1 and len(mappings) == 0
    gpu.fail("extent", DeviceError("cudaErrorInvalidValue", "extent"))
    with pytest.raises(RegistrationError, match="have no size here"):
        mappings.attach(worker.pid, worker.started, header)
    held = mappings.attach(worker.pid, worker.started, header)
    with pytest.raises(RegistrationError, match="was attached as"):
        mappings.attach(worker.pid, worker.started, {**header, "nbytes": 1})
    held.close()


@pytest.mark.slow
def test_memory_of_a_gpu_that_is_out_of_reach_is_refused(worker: Worker) -> None:
    gpu = FakeDriver((GPU0, GPU1), peers=set())
    mappings = Mappings(gpu, GPU0)
    with pytest.raises(RegistrationError, match=f"{GPU0} has no peer access to {GPU1}"):
        mappings.attach(worker.pid, worker.started, worker.headers[1])
    unseen = Mappings(FakeDriver((GPU0,)), GPU0)
    with pytest.raises(RegistrationError, match="no peer access"):
        unseen.attach(worker.pid, worker.started, worker.headers[1])
    mappings.attach(worker.pid, worker.started, worker.headers[0]).close()
    gpu.check()


# -- events ---------------------------------------------------------------------------------------------------------


def test_a_call_has_an_event_of_its_own_until_it_ends(gpu: FakeDriver) -> None:
    signals, stream = Signals(gpu, GPU0), gpu.stream(GPU0)
    first = signals.record()
    gpu.hold(stream)
    gpu.launch(GPU0, stream, lambda: None)
    with gpu.using(stream):
        second, third = signals.record(), signals.record()
    assert len({first, second, third}) == 3
    assert signals.wait(first[0], threading.Event())  # whatever was recorded after it
    signals.release(first[0])
    signals.release(third[0])
    assert signals.record() == third  # so that few exist
    assert signals.record() == first and gpu.calls["event"] == 3 and gpu.calls["record"] == 5
    gpu.release(stream)
    gpu.drain(stream)
    gpu.drop_stream(stream)
    for event, _ in (first, second):
        signals.release(event)
    signals.close()
    signals.close()
    assert gpu.calls["drop_event"] == 2
    signals.release(third[0])  # a call that ends later
    assert gpu.calls["drop_event"] == 3


def test_whoever_waits_for_work_that_never_ends_can_be_stopped(gpu: FakeDriver) -> None:
    signals, stream = Signals(gpu, GPU0), gpu.stream(GPU0)
    gpu.hold(stream)
    gpu.launch(GPU0, stream, lambda: None)
    with gpu.using(stream):
        event, _ = signals.record()
    stop, said = threading.Event(), list[bool]()
    thread = threading.Thread(target=lambda: said.append(signals.wait(event, stop)))
    thread.start()
    until(lambda: gpu.calls["reached"] > 3)
    stop.set()
    thread.join()
    assert said == [False]
    gpu.release(stream)
    assert signals.wait(event, threading.Event())
    signals.release(event)
    signals.close()
    gpu.drop_stream(stream)


def test_events_that_an_agent_may_still_look_at_are_kept(gpu: FakeDriver) -> None:
    signals = Signals(gpu, GPU0)
    events = [signals.record()[0] for _ in range(2)]
    signals.release(events[0])
    signals.close(keep=True)
    signals.close()
    signals.release(events[1])
    assert gpu.calls["drop_event"] == 0
    for event in events:
        gpu.drop_event(event)


def test_an_event_that_cannot_be_recorded_is_not_lost(gpu: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    signals = Signals(gpu, GPU0)
    for method in ("export_event", "record"):
        gpu.fail(method, DeviceError("cudaErrorInvalidValue", method))
        with pytest.raises(DeviceError):
            signals.record()
    event, _ = signals.record()
    assert gpu.calls["event"] == 2
    signals.release(event)
    gpu.fail("drop_event", DeviceError("cudaErrorInvalidValue", "drop_event"))
    signals.close()
    assert "destroying an event" in caplog.text
    gpu.drop_event(event)


@pytest.mark.slow
def test_the_agent_waits_for_what_the_workers_stream_had_queued(gpu: FakeDriver, worker: Worker) -> None:
    waits, mappings = Waits(gpu, GPU0), Mappings(gpu, GPU0)
    memory = mappings.attach(worker.pid, worker.started, worker.headers[0])
    worker.tell("hold")
    handle = worker.tell("record")
    assert not waits.reached(worker.pid, worker.started, handle)
    assert waits.open(worker.pid, worker.started, handle) == waits.open(worker.pid, worker.started, handle)
    seen: list[int] = []

    def wait() -> None:
        waits.wait(worker.pid, worker.started, handle)
        seen.append(byte(memory.address))

    thread = threading.Thread(target=wait)
    thread.start()
    elsewhere = worker.tell("record elsewhere")
    waits.wait(worker.pid, worker.started, elsewhere)
    assert seen == [] and elsewhere != handle and len(waits) == 2
    worker.tell("release")
    thread.join()
    assert seen == [9] and waits.reached(worker.pid, worker.started, handle)
    worker.tell("ended")
    assert worker.tell("record") == handle and worker.tell("events") == 2
    assert gpu.calls["open_event"] == 2
    waits.release(worker.pid, worker.started)
    assert len(waits) == 0 and gpu.calls["drop_event"] == 2
    memory.close()


@pytest.mark.slow
def test_who_waits_for_a_killed_worker_is_told(gpu: FakeDriver, worker: Worker) -> None:
    waits = Waits(gpu, GPU0)
    worker.tell("hold")
    handle = worker.tell("record")
    errors: list[DeviceError] = []

    def wait() -> None:
        try:
            waits.wait(worker.pid, worker.started, handle)
        except DeviceError as error:
            errors.append(error)

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: gpu.calls["reached"] > 4)
    worker.kill()
    assert not waits.reached(worker.pid, worker.started, handle)
    waits.release(worker.pid, worker.started)
    for thread in threads:
        thread.join()
    assert [str(error).count(f"process {worker.pid} went") for error in errors] == [1, 1]
    assert gpu.calls["drop_event"] == 1
    with pytest.raises(RegistrationError, match=f"event of process {worker.pid} cannot be opened"):
        waits.open(worker.pid, worker.started, handle)
    waits.close()


def until(true: Callable[[], bool]) -> None:
    while not true():
        pass


@pytest.mark.parametrize("handle", [b"", b"x" * 63, b"x" * 65, "x" * 64, None, 5])
def test_an_events_handle_is_believed_by_nobody(gpu: FakeDriver, handle: Any) -> None:
    waits = Waits(gpu, GPU0)
    for call in (waits.open, waits.reached, waits.wait):
        with pytest.raises(RegistrationError, match="is not 64 bytes"):
            call(1, 1, handle)
    with pytest.raises(RegistrationError, match="cannot be opened"):
        waits.open(1, 1, b"x" * 64)


def test_a_worker_cannot_make_the_agent_open_events_without_end(
    gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "open_event", lambda uuid, handle: 1)
    monkeypatch.setattr(gpu, "drop_event", lambda event: None)
    waits = Waits(gpu, GPU0)
    for i in range(MOST_EVENTS):
        waits.open(1, 1, i.to_bytes(64, "big"))
    waits.open(1, 1, bytes(64))
    waits.open(1, 2, bytes(64))
    with pytest.raises(RegistrationError, match=f"more than {MOST_EVENTS} events"):
        waits.open(1, 1, b"\1" * 64)
    waits.close()
    assert len(waits) == 0


@pytest.mark.slow
def test_sticky_errors_of_events_are_told(gpu: FakeDriver, worker: Worker) -> None:
    reported: list[DeviceError] = []
    waits = Waits(gpu, GPU0, on_sticky=reported.append)
    handle = worker.tell("record")
    event = waits.open(worker.pid, worker.started, handle)
    spoilt = DeviceError("cudaErrorLaunchFailure", "reached", sticky=True)
    gpu.fail("reached", spoilt)
    with pytest.raises(DeviceError):
        waits.reached(worker.pid, worker.started, handle)
    waits.release(worker.pid, worker.started)  # cannot even be closed
    assert reported == [spoilt, spoilt]
    gpu.forgive()
    gpu.drop_event(event)
