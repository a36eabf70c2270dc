"""What a call on a GPU comes after, and what it says of its own device, over cards that are played (``played.py``)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from etha.cuda.driver import DeviceError
from etha.errors import ConfigError, EthaError, RegistrationError, TransferError, TransferTimeoutError
from tests.fakes.cuda import GPU0
from tests.flow.truth import stale, whole

from .played import Cards
from .test_transfers import formed


@pytest.fixture
def cards(runtime: Path) -> Iterator[Cards]:
    with Cards(runtime) as cards:
        cards.start("cuda:0")
        yield cards


async def ready(cards: Cards, a: Any, b: Any, *, name: str = "b", exportable: bool = True, **options: Any) -> Any:
    """(given, wanted, left, right): one tensor a side, registered by clients whose pair is formed."""
    given = cards.tensor(whole((64, 5)), exportable=exportable)
    wanted = cards.tensor(stale(whole((64, 5))), exportable=exportable)
    left, right = await asyncio.gather(
        a.register_tensors(name, {"w": given}, pair_name="weights", **options),
        b.register_tensors(name, {"w": wanted}, pair_name="weights", **options),
    )
    return given, wanted, left, right


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("by_name", [False, True])
async def test_a_call_is_of_the_stream_on_which_it_was_made(cards: Cards, snapshot: bool, by_name: bool) -> None:
    """Not of the one that is current when its task begins."""
    async with cards.client("cuda:0") as a, cards.client("cuda:0") as b:
        await formed(a, b)
        given, wanted, left, right = await ready(cards, a, b)
        _, _, *others = await ready(cards, a, b, name="other")
        side = cards.driver.stream(GPU0)
        cards.driver.hold(side)
        cards.driver.launch(GPU0, side, lambda: given.fill_(9))
        with cards.driver.using(side):
            call = a.transfer("b", "send", snapshot=snapshot) if by_name else left.transfer("send", snapshot=snapshot)
            sending = asyncio.create_task(call)
        receiving = asyncio.create_task(right.transfer("recv"))
        for _ in range(3):  # later calls, which have moved
            await asyncio.gather(others[0].transfer("send"), others[1].transfer("recv"))
        assert not sending.done() and not receiving.done()
        assert not (wanted == whole((64, 5))).all()
        cards.driver.release(side)
        result = await sending
        if snapshot:
            await result
        await receiving
        assert (wanted == 9).all()
        cards.driver.drop_stream(side)


async def test_what_is_wrong_is_told_by_awaiting_the_call(cards: Cards) -> None:
    async with cards.client("cuda:0") as a, cards.client("cuda:0") as b:
        await formed(a, b)
        _, _, left, right = await ready(cards, a, b)
        calls = [a.transfer("nothing", "send"), left.transfer("recv", version=[])]
        with pytest.raises(RegistrationError, match="'nothing' is not registered"):
            await calls[0]
        with pytest.raises(ConfigError, match="version"):
            await calls[1]
        await left.close()
        await right.close()
        closed = left.transfer("send")
        with pytest.raises(RegistrationError, match="is closed"):
            await closed


async def held(cards: Cards) -> None:
    """Returns once a thread of this process waits for the held device, so that what is released comes after it."""
    while not cards.driver.calls["settle"]:
        await asyncio.to_thread(threading.Event().wait, 0.001)


@pytest.mark.parametrize("how", ["atomic", "paused by on_commit", "staged"])
async def test_what_is_queued_until_commit_still_reads_the_old_version(cards: Cards, how: str) -> None:
    async with cards.client("cuda:0") as a, cards.client("cuda:0") as b:
        await formed(a, b)
        staged = how == "staged"
        given, wanted, left, right = await ready(cards, a, b, exportable=not staged, atomic=not staged)
        old, seen = wanted.clone(), torch.zeros(64, 5)
        stream = cards.driver.stream(GPU0)
        cards.driver.hold(stream)

        def decode() -> None:
            cards.driver.launch(GPU0, stream, lambda: seen.copy_(wanted))

        options: dict[str, Any] = {}
        if how == "paused by on_commit":  # until which an engine goes on
            options["on_commit"] = decode
        else:
            decode()
        receiving = asyncio.ensure_future(right.transfer("recv", **options))
        await left.transfer("send")
        await held(cards)
        assert not receiving.done() and torch.equal(wanted, old)
        cards.driver.release(stream)
        await receiving
        assert torch.equal(seen, old) and torch.equal(wanted, given)
        cards.driver.drop_stream(stream)


async def test_a_client_is_closed_while_it_puts_in_place_what_it_has_received(cards: Cards) -> None:
    async with cards.client("cuda:0") as a:
        b = cards.client("cuda:0")
        await formed(a, b)
        given, wanted, left, right = await ready(cards, a, b, atomic=True)
        stream = cards.driver.stream(GPU0)
        cards.driver.hold(stream)
        cards.driver.launch(GPU0, stream, lambda: None)
        receiving = asyncio.ensure_future(right.transfer("recv"))
        await left.transfer("send")
        await held(cards)
        closing = asyncio.ensure_future(b.close())
        await a.status()
        assert not closing.done() and not receiving.done(), "the kernel that was queued still reads the old version"
        cards.driver.release(stream)
        await asyncio.gather(closing, receiving)
        assert torch.equal(wanted, given)
        cards.driver.drop_stream(stream)


@pytest.mark.parametrize("snapshot", [False, True], ids=["send", "snapshot"])
async def test_what_is_copied_here_waits_for_its_own_gpu_until_the_deadline(cards: Cards, snapshot: bool) -> None:
    """And can be cancelled; nothing of it is left on the device."""
    async with cards.client("cuda:0") as a, cards.client("cuda:0") as b:
        await formed(a, b)
        given, wanted, left, right = await ready(cards, a, b, exportable=snapshot)
        stream = cards.driver.current_stream(GPU0)
        cards.driver.hold(stream)
        cards.driver.launch(GPU0, stream, lambda: given.fill_(4))
        with pytest.raises(TransferTimeoutError, match="this worker's own GPU is behind") as late:
            await asyncio.wait_for(left.transfer("send", snapshot=snapshot, timeout=0.3), 20)
        assert late.value.outcome == "withdrawn" and "'b'" in str(late.value)
        before = cards.driver.calls["reached"]
        waiting = asyncio.ensure_future(left.transfer("send", snapshot=snapshot))
        while cards.driver.calls["reached"] < before + 3:
            await a.status()
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=20)
        assert waiting.cancelled()
        cards.driver.release(stream)
        sent, _ = await asyncio.gather(left.transfer("send", snapshot=snapshot), right.transfer("recv"))
        if snapshot:
            await sent
        assert (wanted == 4).all()


async def test_a_call_waits_for_nothing_that_was_queued_after_it(cards: Cards) -> None:
    async with cards.client("cuda:0") as a, cards.client("cuda:0") as b:
        await formed(a, b)
        given, wanted, left, right = await ready(cards, a, b)
        _, _, *others = await ready(cards, a, b, name="other")
        stream, go = cards.driver.current_stream(GPU0), threading.Event()
        cards.driver.hold(stream)
        cards.driver.launch(GPU0, stream, lambda: given.fill_(7))
        first = asyncio.ensure_future(left.transfer("send"))
        cards.driver.launch(GPU0, stream, lambda: go.wait() and None)
        second = asyncio.ensure_future(others[0].transfer("send"))
        side = cards.driver.stream(GPU0)
        with cards.driver.using(side):
            receiving = [asyncio.ensure_future(handle.transfer("recv")) for handle in (right, others[1])]
        await a.status()
        cards.driver.release(stream)
        try:
            await asyncio.wait_for(asyncio.gather(first, receiving[0]), 20)
            assert (wanted == 7).all() and not second.done()
        finally:
            go.set()
        await asyncio.gather(second, receiving[1])
        cards.driver.drop_stream(side)


async def test_few_events_exist(cards: Cards) -> None:
    """The agent opens each that it sees."""
    async with cards.client("cuda:0") as a, cards.client("cuda:0") as b:
        await formed(a, b)
        _, _, left, right = await ready(cards, a, b)
        for _ in range(5):
            await asyncio.gather(left.transfer("send"), right.transfer("recv"))
        left.transfer("send").close()  # a call that nobody awaits
        assert cards.driver.calls["record"] == 11 and cards.driver.calls["event"] <= 4


@pytest.mark.parametrize("verb", ["send", "recv"])
async def test_memory_that_a_sleep_mode_has_taken_away(cards: Cards, verb: str) -> None:
    async with cards.client("cuda:0") as a, cards.client("cuda:0") as b:
        await formed(a, b)
        given, wanted, left, right = await ready(cards, a, b, exportable=False)
        await asyncio.gather(left.transfer("send"), right.transfer("recv"))
        there = given.clone()
        if verb == "send":
            cards.driver.unmap(given)
            with pytest.raises(RegistrationError, match=r"'b'.*no memory now: 'w'"):
                await left.transfer("send")
            cards.driver.unmap(given, again=True)
            given.copy_(there)
        else:
            future = await left.transfer("send", snapshot=True)
            cards.driver.unmap(wanted)
            with pytest.raises(RegistrationError, match=r"no memory now: 'w'.*is committed"):
                await right.transfer("recv")
            await future
            cards.driver.unmap(wanted, again=True)
            given.copy_(there.mul_(2))
        await asyncio.gather(left.transfer("send"), right.transfer("recv"))
        assert torch.equal(wanted, there)


@pytest.mark.parametrize("exportable", [True, False])
@pytest.mark.parametrize("report", [True, False])
async def test_a_device_that_fails_before_a_call(cards: Cards, exportable: bool, report: bool) -> None:
    async with cards.client("cuda:0") as a, cards.client("cuda:0") as b:
        await formed(a, b)
        _, _, left, _ = await ready(cards, a, b, exportable=exportable)
        method = "record" if exportable else "launch"
        cards.driver.fail(method, DeviceError("cudaErrorLaunchFailure", "by the test"))
        call = left.transfer("send", on_error="report" if report else "raise")
        if report:
            error: EthaError | None = (await call).error
        else:
            with pytest.raises(TransferError) as raised:
                await call
            error = raised.value
        assert isinstance(error, TransferError) and error.outcome == "withdrawn"
        assert GPU0 in str(error) and "cudaErrorLaunchFailure" in str(error)


async def test_a_device_that_fails_after_commit(cards: Cards) -> None:
    async with cards.client("cuda:0") as a, cards.client("cuda:0") as b:
        await formed(a, b)
        _, _, left, right = await ready(cards, a, b, atomic=True)
        cards.driver.fail("settle", DeviceError("cudaErrorLaunchFailure", "by the test"))
        sent, received = await asyncio.gather(left.transfer("send"), right.transfer("recv"), return_exceptions=True)
        assert not isinstance(sent, BaseException) and isinstance(received, TransferError)
        assert received.torn and "committed" in str(received)
        with pytest.raises(TransferError, match="half-written"):
            await right.transfer("send")


@pytest.mark.parametrize(
    ("method", "options", "kind"),
    [
        ("extent", {}, RegistrationError),
        ("allocate", {"atomic": True, "direction": "recv"}, ConfigError),
        ("tensor", {}, ConfigError),
    ],
)
async def test_a_device_that_fails_at_registration(cards: Cards, method: str, options: Any, kind: Any) -> None:
    async with cards.client("cuda:0") as a, cards.client("cuda:0") as b:
        await formed(a, b)
        cards.driver.fail(method, DeviceError("cudaErrorLaunchFailure", "by the test"))
        tensors = [cards.tensor(whole((8,)), exportable=method != "tensor") for _ in range(2)]
        calls = [
            client.register_tensors("b", {"w": tensor}, pair_name="weights", timeout=1, **options)
            for client, tensor in zip((a, b), tensors, strict=True)
        ]
        found = await asyncio.gather(*calls, return_exceptions=True)
        failed = [e for e in found if isinstance(e, kind) and "cudaErrorLaunchFailure" in str(e) and GPU0 in str(e)]
        assert len(failed) == 1 and not any(isinstance(e, DeviceError) for e in found)
