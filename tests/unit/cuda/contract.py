"""What every driver does: run over the fake one with the other tests, and over a card in tests/gpu.

exporter (a child)            this process
memory, event     --handles-->  opens twice, waits, copies, closes
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

import torch

from etha.cuda.driver import Driver
from etha.memory.cuda import Exports, Mappings, Signals, Waits
from etha.memory.process import start_time

NBYTES = 3 << 20
Make = Callable[[], Driver]


def filled(cuda: Driver, address: int, value: int, stream: int) -> None:
    """Queue it, as torch's work."""
    uuid = cuda.devices()[0].uuid
    flat = cuda.tensor(uuid, address, NBYTES)
    cuda.launch(uuid, stream, partial(_fill, flat, value))


def _fill(flat: torch.Tensor, value: int) -> None:
    flat.fill_(value)


def copies_events_and_streams(cuda: Driver) -> None:
    """Device and pinned memory either way; events order two streams, and tell when work is done."""
    uuid = cuda.devices()[0].uuid
    here, there, pinned = cuda.allocate(uuid, NBYTES), cuda.allocate(uuid, NBYTES), cuda.pin(NBYTES)
    one, two, between, done = cuda.stream(uuid), cuda.stream(uuid), cuda.event(uuid), cuda.event(uuid)
    assert cuda.reached(done)
    cuda.synchronize(done)
    for value in range(1, 20):
        filled(cuda, here, value, one)
        cuda.copy(there, here, NBYTES, one)
        cuda.record(between, one)
        cuda.wait(two, between)
        cuda.copy(pinned, there, NBYTES, two)
        cuda.record(done, two)
        cuda.synchronize(done)
        assert cuda.reached(done) and cuda.reached(between)
        assert ctypes.string_at(pinned, NBYTES) == bytes([value]) * NBYTES
        cuda.wait(one, done)
    base, nbytes = cuda.extent(here + 5)
    assert base == here and nbytes >= NBYTES and cuda.holds(cuda.tensor(uuid, here, 8)) == uuid
    before = cuda.serial(here)
    for value in (30, 31):
        filled(cuda, there, value, one if value == 30 else cuda.current_stream(uuid))
        cuda.copy(pinned, there, NBYTES, one if value == 30 else cuda.current_stream(uuid))
        cuda.settle(uuid)
        assert ctypes.string_at(pinned, NBYTES) == bytes([value]) * NBYTES
    assert cuda.backed(here) and cuda.backed(here + NBYTES - 1) and not cuda.backed(64)
    for drop, what in ((cuda.drop_event, between), (cuda.drop_event, done), (cuda.drop_stream, one)):
        drop(what)
    cuda.drop_stream(two)
    cuda.free(here)
    again = cuda.allocate(uuid, NBYTES)
    assert cuda.serial(again) != before
    for address in (there, again):
        cuda.free(address)
    cuda.unpin(pinned)


def exporter(pipe: Connection, make: Make) -> None:
    """Memory of cudaMalloc and an event, both exported; fills it with what it is told."""
    cuda = make()
    uuid = cuda.devices()[0].uuid
    address, signals = cuda.allocate(uuid, NBYTES), Signals(cuda, uuid)
    flat = cuda.tensor(uuid, address, NBYTES)
    exports = Exports(cuda)
    while (value := pipe.recv()) is not None:
        cuda.launch(uuid, cuda.current_stream(uuid), partial(_fill, flat, value))
        event, handle = signals.record()
        pipe.send((exports.header(exports.find(flat[7:])[0]), handle))
        cuda.synchronize(event)
        signals.release(event)
    signals.close()
    del flat
    cuda.free(address)


def memory_and_events_of_another_process(make: Make, *, kill: bool) -> list[str]:
    """Read in order through one mapping; ``kill``: what is open survives its exporter. What was sticky comes back."""
    cuda, context = make(), multiprocessing.get_context("spawn")
    uuid = cuda.devices()[0].uuid
    ours, theirs = context.Pipe()
    child = context.Process(target=exporter, args=(theirs, make))
    child.start()
    theirs.close()
    assert child.pid is not None
    pid, started = child.pid, start_time(child.pid)
    sticky: list[str] = []
    mappings = Mappings(cuda, uuid, lambda error: sticky.append(str(error)))
    waits = Waits(cuda, uuid, lambda error: sticky.append(str(error)))
    pinned, stream, done = cuda.pin(NBYTES), cuda.stream(uuid), cuda.event(uuid)
    held = []
    for value in (3, 4, 5):
        ours.send(value)
        header, handle = ours.recv()
        held.append(mappings.attach(pid, started, header))
        waits.wait(pid, started, handle)
        cuda.copy(pinned, held[-1].address, NBYTES, stream)
        cuda.record(done, stream)
        cuda.synchronize(done)
        assert ctypes.string_at(pinned, NBYTES) == bytes([value]) * NBYTES
    assert len({mapping.address for mapping in held}) == len(mappings) == len(waits) == 1
    if kill:
        os.kill(pid, signal.SIGKILL)
        child.join()
    for mapping in held:
        mapping.close()
    waits.release(pid, started)
    if not kill:
        ours.send(None)
    child.join()
    assert child.exitcode == (-signal.SIGKILL if kill else 0)
    child.close()
    ours.close()
    cuda.drop_event(done)
    cuda.drop_stream(stream)
    cuda.unpin(pinned)
    return sticky
