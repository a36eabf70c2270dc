"""The reaper: whoever lets go of a device's memory never waits for the device, neither does a garbage collection."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from etha.cuda.driver import DeviceError
from etha.cuda.reaper import Reaper, reaper
from etha.memory.revocation import Guard
from etha.transport.copy.cpu import Workspace
from etha.transport.copy.device import Copier
from etha.transport.copy.device_memory import CardError, DeviceMemory, PinnedMemory
from etha.transport.copy.program import Member
from etha.transport.copy.staging import Budget
from etha.transport.geometry.tiles import Tile
from etha.transport.verify.checksums import ChecksumReader, Read, checksum
from tests.fakes.cuda import GPU0, FakeDriver
from tests.unit.transport.copy.test_copier import ops
from tests.unit.transport.on_device import card, card_view, on_card


class Watched(FakeDriver):
    """Which threads have called what waits for the device; ``trying``: somebody is inside."""

    def __init__(self, nbytes: int = 1 << 30) -> None:
        super().__init__(nbytes=nbytes)
        self.by: list[str] = []
        self.trying = threading.Event()

    def free(self, address: int) -> None:
        self.by.append(threading.current_thread().name)
        self.trying.set()
        super().free(address)

    def unpin(self, address: int) -> None:
        self.by.append(threading.current_thread().name)
        super().unpin(address)


@pytest.fixture
def gpu() -> Iterator[Watched]:
    driver = Watched()
    yield driver
    driver.check()


def test_who_lets_go_does_not_wait_for_what_is_queued(gpu: Watched) -> None:
    memory, pinned = DeviceMemory(gpu, GPU0, 4096), PinnedMemory(gpu, GPU0, 4096)
    stream = gpu.stream(GPU0)
    gpu.hold(stream)  # as an NCCL kernel whose peer does not come
    gpu.copy(memory.address, pinned.address, 4096, stream)
    memory.release()
    pinned.release()
    memory.release()
    assert gpu.trying.wait(20)
    assert not reaper.drain(0.01)
    assert len(gpu.leaks()) == 3
    gpu.release(stream)
    assert reaper.drain()
    gpu.drop_stream(stream)
    assert gpu.leaks() == []
    assert gpu.by == ["etha-reaper"] * 2


def test_nothing_is_freed_while_somebody_holds(gpu: Watched) -> None:
    first, second = DeviceMemory(gpu, GPU0, 4096), DeviceMemory(gpu, GPU0, 4096)
    reaper.hold()
    reaper.hold()
    first.release()
    reaper.let_go()
    assert not reaper.drain(0.1) and not gpu.by
    reaper.let_go()
    assert reaper.drain() and len(gpu.by) == 1
    second.release()
    assert reaper.drain() and len(gpu.by) == 2


def test_a_hold_waits_for_what_is_being_freed(gpu: Watched) -> None:
    memory, stream, held = DeviceMemory(gpu, GPU0, 4096), gpu.stream(GPU0), threading.Event()
    gpu.hold(stream)
    gpu.copy(memory.address, memory.address, 1, stream)
    memory.release()
    assert gpu.trying.wait(20)

    def hold() -> None:
        reaper.hold()
        held.set()

    thread = threading.Thread(target=hold)
    thread.start()
    assert not held.wait(0.1)
    gpu.release(stream)
    assert held.wait(20)
    reaper.let_go()
    thread.join()
    gpu.drop_stream(stream)


def test_neither_does_a_garbage_collection(gpu: Watched) -> None:
    copier = Copier(gpu, GPU0)
    launch = copier.compile(ops(card_view(on_card(gpu, torch.rand(5, 4))), card_view(gpu.empty(GPU0, (4, 5)).t())))
    held: list[object] = [launch, DeviceMemory(gpu, GPU0, 64), PinnedMemory(gpu, GPU0, 64)]
    held.append(held)  # nothing but a collection finds it
    copier.close()
    del launch, held, copier
    gc.collect()
    assert reaper.drain()
    assert gpu.leaks() == []
    assert len(gpu.by) == 4 and set(gpu.by) == {"etha-reaper"}


def test_memory_that_was_let_go_of_makes_room_for_more() -> None:
    gpu = Watched(nbytes=8192)
    first, stream = DeviceMemory(gpu, GPU0, 8192), gpu.stream(GPU0)
    refused = threading.Event()
    allocate = gpu.allocate

    def watched(uuid: str, nbytes: int) -> int:
        try:
            return allocate(uuid, nbytes)
        except DeviceError:
            gpu.release(stream)
            refused.set()
            raise

    gpu.allocate = watched  # type: ignore[method-assign]
    gpu.hold(stream)
    event = gpu.event(GPU0)
    gpu.record(event, stream)
    first.release()
    second = DeviceMemory(gpu, GPU0, 8192)
    assert refused.is_set()
    with pytest.raises(CardError, match=r"8192 bytes.*0 are free"):
        DeviceMemory(gpu, GPU0, 8192)
    second.release()
    gpu.drop_event(event)
    gpu.drop_stream(stream)
    gpu.check()


def test_what_fails_is_told_and_the_rest_is_given_back(caplog: pytest.LogCaptureFixture) -> None:
    mine, given = Reaper(), []
    assert mine.drain()
    mine.begin()
    mine.hand(lambda: given.append(1 // 0))
    mine.hand(lambda: given.append(2))
    assert mine.drain()
    assert given == [2]
    assert "division" in caplog.text


def test_a_reader_at_a_threads_own_workspace_leaves_it_as_it_is() -> None:
    with card() as (driver, copier):
        source = on_card(driver, torch.rand(64, 32).t())
        work, budget, guards = Workspace(copier), Budget(1 << 30), dict[Member, Guard]()
        whole = torch.zeros(32, 64)
        steps = [(op.tile, op.source_offset, op.target_offset) for op in ops(card_view(source), card_view(whole))]
        assert all(isinstance(tile, Tile) for tile, _, _ in steps)
        for _ in range(2):
            streams = driver.calls["stream"]
            reader = ChecksumReader(0, budget, guards, None, work)
            read = Read(
                laid=(card_view(source), steps, None), owner=("source", 0), numel=2048, dtype=torch.float32,
                target=torch.float32,
            )  # fmt: skip
            assert reader.sums([read]) == [checksum(source.reshape(-1), torch.float32, False)]
            assert budget.used > 0
            reader.close()
            assert budget.used == 0
            assert driver.calls["stream"] == streams
        copier.finish()
