"""The fake GPU keeps CUDA's contracts: each is broken once here and noticed, also between real processes."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
import torch

from etha.cuda.driver import DeviceError, Unexportable
from etha.cuda.select import driver, install_driver, installed_driver
from tests.fakes.cuda import GPU0, GPU1, SEGMENT, Broken, FakeDriver
from tests.fakes.queues import Recordings
from tests.processes import CONTEXT, preload

preload("tests.fakes.cuda")


@pytest.fixture
def gpu() -> Iterator[FakeDriver]:
    """Two GPUs; whatever a test has broken on purpose it takes out of ``failures``."""
    fake = FakeDriver((GPU0, GPU1))
    yield fake
    fake.check()


def forgive(fake: FakeDriver) -> None:
    assert fake.failures
    fake.failures.clear()


def put(address: int, content: bytes) -> None:
    ctypes.memmove(address, content, len(content))


def get(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


def test_a_held_stream_has_not_run_and_a_released_one_runs_in_order(gpu: FakeDriver) -> None:
    a, b, stream = gpu.allocate(GPU0, 4), gpu.allocate(GPU0, 4), gpu.stream(GPU0)
    put(a, b"same")
    put(b, b"????")
    gpu.hold(stream)
    gpu.copy(b, a, 4, stream)
    seen: list[int] = []
    gpu.launch(GPU0, stream, lambda: seen.append(gpu.current_stream(GPU0)))
    assert (get(b, 4), seen, gpu.pending(stream)) == (b"????", [], 2)
    put(a, b"late")
    gpu.release(stream)
    gpu.drain(stream)
    assert (get(b, 4), seen, gpu.pending(stream)) == (b"late", [stream], 0)
    assert gpu.current_stream(GPU0) != stream
    gpu.drop_stream(stream)
    gpu.free(a)
    gpu.free(b)


def test_whoever_has_waited_for_an_event_finds_nothing_pending(
    gpu: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the stream goes on after it has told that the event is done."""
    asked, finish = threading.Event(), Recordings.finish

    def tell(recordings: Recordings, number: int) -> None:
        finish(recordings, number)
        asked.wait(0.2)

    monkeypatch.setattr(Recordings, "finish", tell)
    stream, event = gpu.stream(GPU0), gpu.event(GPU0)
    gpu.record(event, stream)
    gpu.synchronize(event)
    assert gpu.pending(stream) == 0
    asked.set()
    gpu.drop_event(event)
    gpu.drop_stream(stream)


def test_an_event_is_its_newest_recording_and_done_before_the_first(gpu: FakeDriver) -> None:
    one, two, event = gpu.stream(GPU0), gpu.stream(GPU0), gpu.event(GPU0)
    assert gpu.reached(event)
    gpu.synchronize(event)
    gpu.hold(one)
    gpu.record(event, one)
    assert not gpu.reached(event)
    gpu.record(event, two)
    gpu.drain(two)
    assert gpu.reached(event)  # the recording on the held stream is forgotten
    gpu.release(one)
    gpu.drop_event(event)
    gpu.drop_stream(one)
    gpu.drop_stream(two)


def test_a_wait_is_for_the_recording_that_is_newest_when_it_is_called(gpu: FakeDriver) -> None:
    first, second, waiter = gpu.stream(GPU0), gpu.stream(GPU0), gpu.stream(GPU1)
    event = gpu.event(GPU0)
    gpu.hold(first)
    gpu.hold(second)
    ran: list[str] = []
    gpu.wait(waiter, event)
    gpu.launch(GPU1, waiter, lambda: ran.append("never recorded: no wait"))
    gpu.drain(waiter)
    gpu.record(event, first)
    gpu.wait(waiter, event)
    gpu.launch(GPU1, waiter, lambda: ran.append("after the first"))
    gpu.record(event, second)
    assert len(ran) == 1
    gpu.release(first)
    gpu.drain(waiter)
    assert ran[1:] == ["after the first"] and not gpu.reached(event)
    gpu.release(second)
    gpu.synchronize(event)
    for stream in (first, second, waiter):
        gpu.drop_stream(stream)
    gpu.drop_event(event)


def test_tensors_share_allocations_and_keep_them(gpu: FakeDriver) -> None:
    a, b = gpu.empty(GPU0, (3, 5)), gpu.empty(GPU0, (7,), torch.bfloat16)
    other = gpu.empty(GPU1, (2, 2))
    assert gpu.holds(a) == gpu.holds(a[1:]) == gpu.holds(b) == GPU0 and gpu.holds(other) == GPU1
    assert gpu.holds(torch.empty(3)) is None and gpu.holds(gpu.empty(GPU0, (0, 4))) == GPU0
    assert gpu.extent(a.data_ptr()) == gpu.extent(b.data_ptr()) == (a.data_ptr(), SEGMENT)
    flat = gpu.tensor(GPU0, a.data_ptr(), 60)
    a.fill_(1.5)
    assert flat.view(torch.float32).tolist() == [1.5] * 15 and gpu.tensor(GPU0, 0, 0).numel() == 0
    gpu.empty_cache()
    a.add_(1)
    base = a.data_ptr()
    del a, b, flat
    gc.collect()
    gpu.empty_cache()
    with pytest.raises(Broken):
        gpu.extent(base)
    forgive(gpu)


def test_memory_ends_and_comes_again_at_the_same_address_with_another_serial() -> None:
    gpu = FakeDriver(nbytes=4096)
    address = gpu.allocate(GPU0, 4096)
    before = gpu.serial(address), gpu.export(address)
    with pytest.raises(DeviceError, match="cudaErrorMemoryAllocation"):
        gpu.allocate(GPU0, 1)
    gpu.free(address)
    again = gpu.allocate(GPU0, 4096)
    assert again == address and gpu.serial(again) != before[0] and gpu.export(again) != before[1]
    gpu.free(again)
    gpu.check()


def both(break_it: Callable[[FakeDriver], None], match: str) -> None:
    """The contract is broken: it raises, and ``check`` remembers it even if that is swallowed."""
    gpu = FakeDriver((GPU0, GPU1))
    with pytest.raises(Broken, match=match):
        break_it(gpu)
    with pytest.raises(AssertionError, match=match):
        gpu.check()


def _copy_outside(gpu: FakeDriver) -> None:
    address = gpu.allocate(GPU0, 100)
    gpu.copy(address, address + 50, 51, gpu.stream(GPU0))


def _copy_plain_memory(gpu: FakeDriver) -> None:
    gpu.copy(gpu.allocate(GPU0, 8), torch.zeros(8).data_ptr(), 8, gpu.stream(GPU0))


def _copy_freed(gpu: FakeDriver) -> None:
    a, b = gpu.allocate(GPU0, 8), gpu.pin(8)
    gpu.free(a)
    gpu.copy(b, a, 8, gpu.stream(GPU0))


def _free_twice(gpu: FakeDriver) -> None:
    address = gpu.allocate(GPU0, 8)
    gpu.free(address)
    gpu.free(address)


def _unpin_twice(gpu: FakeDriver) -> None:
    address = gpu.pin(8)
    gpu.unpin(address)
    gpu.unpin(address)


def _drop_stream_twice(gpu: FakeDriver) -> None:
    stream = gpu.stream(GPU0)
    gpu.drop_stream(stream)
    gpu.drop_stream(stream)


def _drop_event_twice(gpu: FakeDriver) -> None:
    event = gpu.event(GPU0)
    gpu.drop_event(event)
    gpu.drop_event(event)


def _record_elsewhere(gpu: FakeDriver) -> None:
    gpu.record(gpu.event(GPU0), gpu.stream(GPU1))


def _launch_elsewhere(gpu: FakeDriver) -> None:
    gpu.launch(GPU0, gpu.stream(GPU1), lambda: None)


@pytest.mark.parametrize(
    ("break_it", "match"),
    [
        (_copy_outside, "end behind the 100 bytes"),
        (_copy_plain_memory, "no living device or pinned memory"),
        (_copy_freed, "no living device or pinned memory"),
        (_free_twice, "freed already"),
        (lambda gpu: gpu.free(gpu.empty(GPU0, (4,)).data_ptr()), "allocate did not give it"),
        (_unpin_twice, "unpinned already"),
        (lambda gpu: gpu.close(0x1000), "open did not give it"),
        (lambda gpu: gpu.extent(0x1000), "no device memory"),
        (lambda gpu: gpu.export(gpu.allocate(GPU0, 64) + 1), "no allocation of this process begins there"),
        (_drop_stream_twice, "no stream, or dropped already"),
        (lambda gpu: gpu.drop_stream(gpu.current_stream(GPU0)), "torch's own"),
        (_drop_event_twice, "destroyed already"),
        (lambda gpu: gpu.export_event(gpu.event(GPU0)), "interprocess=True"),
        (_record_elsewhere, "recorded on a stream of"),
        (_launch_elsewhere, "with stream"),
        (lambda gpu: gpu.tensor(GPU0, gpu.allocate(GPU0, 8), 9), "end behind"),
        (lambda gpu: gpu.allocate(GPU0, 0), "of 0 bytes"),
        (lambda gpu: gpu.pin(0), "0 bytes"),
        (lambda gpu: gpu.open(GPU0, b"short"), "64 bytes, not 5"),
    ],
)
def test_a_broken_contract_is_noticed(break_it: Callable[[FakeDriver], None], match: str) -> None:
    both(break_it, match)


@pytest.mark.parametrize(
    "forget",
    [
        lambda gpu: gpu.allocate(GPU0, 8),
        lambda gpu: gpu.pin(8),
        lambda gpu: gpu.stream(GPU0),
        lambda gpu: gpu.event(GPU0, interprocess=True),
    ],
)
def test_what_is_not_given_back_is_noticed(forget: Callable[[FakeDriver], int]) -> None:
    gpu = FakeDriver()
    forget(gpu)
    with pytest.raises(AssertionError, match="never given back"):
        gpu.check()


def test_a_late_write_is_noticed() -> None:
    gpu = FakeDriver()
    address = gpu.allocate(GPU0, 64)
    late = gpu.tensor(GPU0, address, 64)
    gpu.free(address)
    late[3] = 1
    with pytest.raises(AssertionError, match="written after it was given back"):
        gpu.check()


def test_an_event_that_a_thread_waits_for_is_not_destroyed() -> None:
    gpu = FakeDriver()
    stream, event = gpu.stream(GPU0), gpu.event(GPU0)
    gpu.hold(stream)
    gpu.record(event, stream)
    thread = threading.Thread(target=gpu.synchronize, args=(event,))
    thread.start()
    while not gpu.calls["synchronize"]:
        pass
    with pytest.raises(Broken, match="while a thread waits"):
        gpu.drop_event(event)
    gpu.release(stream)
    thread.join()
    gpu.shut()


def test_work_that_fails_spoils_the_context() -> None:
    gpu = FakeDriver()
    stream = gpu.stream(GPU0)
    gpu.launch(GPU0, stream, lambda: torch.empty(3).view(2))
    with pytest.raises(DeviceError, match="IllegalAddress") as caught:
        while True:  # as with a real one, some later call tells
            gpu.event(GPU0)
    assert caught.value.sticky
    with pytest.raises(AssertionError, match="work on stream"):
        gpu.check()


def test_a_test_can_let_a_call_fail(gpu: FakeDriver) -> None:
    gpu.fail("pin", DeviceError("cudaErrorMemoryAllocation", "pin"))
    with pytest.raises(DeviceError):
        gpu.pin(8)
    gpu.unpin(gpu.pin(8))


def test_memory_without_a_handle_and_devices_that_are_not_there(gpu: FakeDriver) -> None:
    address = gpu.allocate_unexportable(GPU0, 8)
    with pytest.raises(Unexportable):
        gpu.export(address)
    tensor = gpu.empty(GPU0, (4,), exportable=False)
    with pytest.raises(Unexportable):
        gpu.export(gpu.extent(tensor.data_ptr()).base)
    gpu.free(address)
    with pytest.raises(DeviceError, match="not visible"):
        gpu.allocate("GPU-22222222-2222-4222-8222-222222222222", 8)
    with pytest.raises(DeviceError, match="own"):
        gpu.open(GPU0, gpu.export(gpu.extent(gpu.empty(GPU0, (1,)).data_ptr()).base))


def test_it_is_installed_and_taken_out() -> None:
    fake = FakeDriver()
    install_driver(fake)
    try:
        assert driver() is fake and installed_driver() is fake
    finally:
        install_driver(None)
        fake.check()


# -- between processes ----------------------------------------------------------------------------------------------


def _exporter(pipe: Connection) -> None:
    """Allocates, fills, exports; then does what it is told."""
    gpu = FakeDriver((GPU0, GPU1))
    address, stream = gpu.allocate(GPU0, 5000), gpu.stream(GPU0)
    event = gpu.event(GPU0, interprocess=True)
    put(address, b"hello")
    pipe.send((gpu.export(address), gpu.export_event(event)))
    while (word := pipe.recv()) != "end":
        match word:
            case "hold":
                gpu.hold(stream)
            case "record":
                gpu.record(event, stream)
            case "release":
                gpu.release(stream)
            case "free":
                gpu.free(address)
        pipe.send(list(gpu.failures))
    gpu.shut()


@pytest.fixture
def exporter() -> Iterator[tuple[BaseProcess, Callable[[str], list[str]], bytes, bytes]]:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_exporter, args=(theirs,))
    process.start()
    theirs.close()
    memory, event = ours.recv()

    def tell(word: str) -> list[str]:
        ours.send(word)
        failures: list[str] = ours.recv()
        return failures

    yield process, tell, memory, event
    if process.is_alive():
        ours.send("end")
    process.join()
    process.close()
    ours.close()


Exporter = tuple[BaseProcess, Callable[[str], list[str]], bytes, bytes]


@pytest.mark.slow
def test_memory_is_shared_between_processes_and_mappings_are_counted(gpu: FakeDriver, exporter: Exporter) -> None:
    _, tell, memory, _ = exporter
    address = gpu.open(GPU0, memory)
    assert get(address, 5) == b"hello" and gpu.open(GPU0, memory) == address
    assert gpu.extent(address) == (address, 5000) and gpu.holds(gpu.tensor(GPU0, address, 5)) == GPU0
    here, stream = gpu.allocate(GPU1, 5), gpu.stream(GPU1)
    gpu.copy(here, address, 5, stream)
    gpu.drain(stream)
    assert get(here, 5) == b"hello"
    gpu.close(address)
    assert get(address, 5) == b"hello"
    gpu.close(address)
    assert get(address, 5) != b"hello"
    with pytest.raises(Broken, match="closed already"):
        gpu.close(address)
    forgive(gpu)
    gpu.drop_stream(stream)
    gpu.free(here)
    assert tell("free") == []


@pytest.mark.slow
def test_an_exporter_that_frees_what_is_open_elsewhere_is_noticed(gpu: FakeDriver, exporter: Exporter) -> None:
    _, tell, memory, _ = exporter
    address = gpu.open(GPU0, memory)
    assert "while another process has it open" in tell("free")[0]
    gpu.close(address)
    with pytest.raises(DeviceError, match="MapBufferObjectFailed"):
        gpu.open(GPU0, memory)


@pytest.mark.slow
def test_a_mapping_that_is_left_open_is_noticed(exporter: Exporter) -> None:
    gpu = FakeDriver()
    gpu.open(GPU0, exporter[2])
    with pytest.raises(AssertionError, match="never given back: mapping"):
        gpu.check()


@pytest.mark.slow
def test_only_peers_reach_each_other(exporter: Exporter) -> None:
    gpu = FakeDriver((GPU0, GPU1), peers=set())
    assert gpu.peers(GPU1, GPU1) and not gpu.peers(GPU0, GPU1)
    with pytest.raises(DeviceError, match="PeerAccessUnsupported"):
        gpu.open(GPU1, exporter[2])
    gpu.close(gpu.open(GPU0, exporter[2]))
    gpu.check()


@pytest.mark.slow
def test_an_event_of_another_process_is_waited_for(gpu: FakeDriver, exporter: Exporter) -> None:
    _, tell, _, handle = exporter
    event, stream = gpu.open_event(GPU0, handle), gpu.stream(GPU0)
    assert gpu.reached(event)
    tell("hold")
    tell("record")
    assert not gpu.reached(event)
    ran: list[bool] = []
    gpu.wait(stream, event)
    gpu.launch(GPU0, stream, lambda: ran.append(gpu.reached(event)))
    assert not ran
    tell("release")
    gpu.synchronize(event)
    gpu.drain(stream)
    assert ran == [True]
    with pytest.raises(Broken, match="only that one records"):
        gpu.record(event, stream)
    forgive(gpu)
    gpu.drop_event(event)
    gpu.drop_stream(stream)


@pytest.mark.slow
def test_what_a_killed_process_exported_can_be_closed_and_its_event_never_comes(
    gpu: FakeDriver, exporter: Exporter
) -> None:
    process, tell, memory, handle = exporter
    address, event = gpu.open(GPU0, memory), gpu.open_event(GPU0, handle)
    tell("hold")
    tell("record")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert get(address, 5) == b"hello" and not gpu.reached(event)
    with pytest.raises(Broken, match="for ever"):
        gpu.synchronize(event)
    forgive(gpu)
    with pytest.raises(DeviceError, match="MapBufferObjectFailed"):
        gpu.open(GPU1, memory[:-1] + b"\1")
    with pytest.raises(DeviceError, match="MapBufferObjectFailed"):
        gpu.open_event(GPU0, handle)
    gpu.close(address)
    gpu.drop_event(event)
