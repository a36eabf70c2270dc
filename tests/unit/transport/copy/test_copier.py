"""A copier: what run() waits for, what it needs the CPU for, and what it gives back."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace

import pytest
import torch

from etha.cuda.driver import DeviceError
from etha.memory.mapping import WorkerMemory
from etha.memory.reach import ReachError
from etha.memory.views import View, view_of
from etha.transport.copy.device import Copier
from etha.transport.geometry import boxes
from etha.transport.geometry.boxes import BoxAxis, Placed
from etha.transport.geometry.iovec import Op
from etha.transport.geometry.tiles import Ends, Tile, tiles
from tests.examples import examples
from tests.fakes.cuda import GPU0, FakeDriver
from tests.unit.transport.copy.test_local import allocate, bits, me, private
from tests.unit.transport.on_device import card, card_view, on_card

__all__ = ["me"]  # the fixture


def ops(source: View, target: View) -> list[Op]:
    """All of one tensor into another of its shape, as a program would have it."""
    axes = tuple(BoxAxis(n, s, t) for n, s, t in zip(source.shape, source.strides, target.strides, strict=True))
    device = source.device is not None or target.device is not None
    ends = Ends(
        source=source.dtype,
        target=target.dtype,
        source_private=source.private,
        target_private=target.private,
        device=device,
    )
    if 0 in source.shape:
        return []
    placed = Placed(boxes.ordered(tuple(a for a in axes if a.steps > 1), "target"), 0, 0)
    return [
        Op(tile, source, target, a, b)
        for tile, at, to in tiles([placed], ends)
        for a, b in zip(at.tolist(), to.tolist(), strict=True)
    ]


class Watched(FakeDriver):
    """Tells when somebody waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Event()

    def synchronize(self, event: int) -> None:
        self.waiting.set()
        super().synchronize(event)


def test_run_returns_only_when_the_device_is_done() -> None:
    driver = Watched()
    copier = Copier(driver, GPU0)
    try:
        source, target = on_card(driver, torch.rand(50, 40)), driver.empty(GPU0, (40, 50)).t()
        launch = copier.compile(ops(card_view(source), card_view(target)))
        driver.hold(copier.stream)
        driver.waiting.clear()
        thread = threading.Thread(target=copier.run, args=(launch,))
        thread.start()
        assert driver.waiting.wait(20)
        assert thread.is_alive()
        assert not target.any()
        driver.release(copier.stream)
        thread.join(20)
        assert torch.equal(source, target)
        launch.release()
        copier.close()
        driver.check()
    finally:
        driver.shut()


def test_a_refusal_in_the_middle_still_waits_for_what_was_queued() -> None:
    with card() as (driver, copier):
        views = [
            (card_view(on_card(driver, torch.rand(30, 30))), card_view(driver.empty(GPU0, (30, 30), dtype).t()))
            for dtype in (torch.float32, torch.float64)
        ]
        launch = copier.compile([op for pair in views for op in ops(*pair)])
        assert len(launch.fused) == 2
        driver.fail("launch", DeviceError("cudaErrorMemoryAllocation", "launch"))
        with pytest.raises(ReachError, match="cudaErrorMemoryAllocation"):
            copier.run(launch)
        assert driver.pending(copier.stream) == 0
        copier.run(launch)
        launch.release()


def test_a_launch_goes_on_anybodys_stream_as_often_as_one_likes() -> None:
    with card() as (driver, copier):
        source, target = on_card(driver, torch.rand(50, 40)), driver.empty(GPU0, (50, 40), torch.bfloat16)
        launch = copier.compile(ops(card_view(source), card_view(target)))
        stream, event = driver.stream(GPU0), driver.event(GPU0)
        for _ in range(3):
            source.mul_(2)
            copier.enqueue(launch, stream)
            driver.record(event, stream)
            driver.synchronize(event)
            assert torch.equal(target, source.bfloat16())
        driver.drop_event(event)
        driver.drop_stream(stream)
        launch.release()


@pytest.mark.parametrize("kind", ["mapped", "private"])
@pytest.mark.parametrize("seed", range(examples(12)))
def test_plain_host_memory_goes_through_a_small_buffer(seed: int, kind: str, me: WorkerMemory) -> None:
    rng = random.Random(seed)
    near = view_of if kind == "mapped" else lambda t: private(me, t)
    with card(bounce=4096) as (driver, copier):
        found, pairs = [], []
        for _ in range(6):
            shape = tuple(rng.choice([1, 3, 16, 33, 80]) for _ in range(rng.randint(0, 3)))
            dtypes = [rng.choice([torch.float32, torch.bfloat16, torch.float64]) for _ in range(2)]
            source, target = allocate(rng, shape, dtypes[0], True), allocate(rng, shape, dtypes[1], False)
            expected = source.to(dtypes[1])
            match rng.choice(["in", "out", "card", "host"]):
                case "in":
                    target = on_card(driver, target)
                    ends = near(source), card_view(target)
                case "out":
                    source = on_card(driver, source)
                    ends = card_view(source), near(target)
                case "card":
                    source, target = on_card(driver, source), on_card(driver, target)
                    ends = card_view(source), card_view(target)
                case _:
                    ends = near(source), near(target)
            found += ops(*ends)
            pairs.append((source, target, expected))
        copier.run_ops(found)
        for _, target, expected in pairs:
            assert bits(target) == bits(expected)
        pinned = [leak for leak in driver.leaks() if "pinned" in leak]
        assert sum(int(leak.split()[2]) for leak in pinned) <= (1 << 20) + 2 * 4096


def test_pinned_memory_is_reached_as_the_devices_own() -> None:
    with card() as (driver, copier):
        address = driver.pin(4096)
        pinned = driver.tensor(GPU0, address, 4096).view(torch.float32)
        view = replace(view_of(pinned.view(32, 32)), pinned=True)
        target = driver.empty(GPU0, (32, 32))
        pinned.copy_(torch.rand(1024))
        copier.run_ops(ops(view, card_view(target.t())))
        assert torch.equal(target.t(), pinned.view(32, 32))
        copier.run_ops(ops(card_view(target), replace(view_of(pinned.view(32, 32)), pinned=True)))
        assert torch.equal(target, pinned.view(32, 32))
        assert driver.calls["pin"] == 2, "the test's, and the one from which tables are sent"
        driver.unpin(address)


def test_what_needs_the_cpu_is_not_queued() -> None:
    with card() as (driver, copier):
        launch = copier.compile(ops(view_of(torch.rand(8)), card_view(driver.empty(GPU0, (8,)))))
        with pytest.raises(ValueError, match="use run"):
            copier.enqueue(launch, copier.stream)


def test_a_cast_of_what_is_not_aligned_is_refused_before_the_device_sees_it() -> None:
    with card() as (driver, copier):
        odd = driver.empty(GPU0, (64,), torch.uint8)
        source = replace(card_view(driver.empty(GPU0, (4,))), address=odd.data_ptr() + 2)
        with pytest.raises(ReachError, match=r"float32 at 0x.* is not aligned to its 4 bytes"):
            copier.compile(ops(source, card_view(driver.empty(GPU0, (4,), torch.float64))))


def test_scratch_and_tables_grow_and_are_given_back() -> None:
    with card() as (driver, copier):
        first = copier.scratch(1000)
        assert copier.scratch(10) is first
        assert copier.scratch(1 << 20) is not first
        source, target = on_card(driver, torch.rand(2, 3)), driver.empty(GPU0, (3, 2))
        found = ops(card_view(source), card_view(target.t()))
        for n in (1, 20_000):  # tables of 144 bytes an operation, more than is taken at first
            target.zero_()
            copier.run_ops(found * n)
            assert torch.equal(source, target.t())


def test_ten_thousand_small_tensors_are_compiled_in_some_milliseconds(capsys: pytest.CaptureFixture[str]) -> None:
    with card() as (driver, copier):
        memory = driver.empty(GPU0, (10_000, 64))
        target = driver.empty(GPU0, (10_000, 64), torch.bfloat16)
        ends = Ends(source=memory.dtype, target=target.dtype, source_private=False, target_private=False, device=True)
        shapes = [tuple(BoxAxis(2 + (i + k) % 4, 8 >> k, 4 >> k) for k in range(2)) for i in range(100)]
        chosen = [Tile(path=3, axes=axes, ends=ends) for axes in shapes]  # type: ignore[arg-type]
        all_of_it = [Op(chosen[i % 100], card_view_of(memory, i), card_view_of(target, i), 0, 0) for i in range(10_000)]
        began = time.perf_counter()
        launch = copier.compile(all_of_it)
        took = time.perf_counter() - began
        with capsys.disabled():
            print(f"\n10,000 small tensors compiled in {took * 1e3:.1f} ms, {launch.table_nbytes} bytes of tables")
        assert [fused.count for fused in launch.fused] == [10_000]
        launch.release()


def card_view_of(memory: torch.Tensor, i: int) -> View:
    """One row of it."""
    return replace(card_view(memory[:1]), address=memory.data_ptr() + i * 64 * memory.itemsize)
