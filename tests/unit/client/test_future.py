"""TransferFuture: one class over a task of another thread's loop, and over one of the running loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from etha.client.future import TransferFuture
from etha.client.loop_thread import LoopThread
from etha.client.results import TransferResult
from etha.errors import ConfigError, TransferAbortedError

RESULT = TransferResult(seq=3, version=7, bytes=8, seconds=0.5, direction="send", peers=(), peak_staging=0)
FAILED = TransferAbortedError("somebody else failed")

Work = Coroutine[Any, Any, TransferResult]


class Gate:
    """A transfer that ends when the test says so; ``confirmed`` is set where its cancellation ended."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.open, self.confirm, self.confirmed = error, asyncio.Event(), asyncio.Event(), False

    async def work(self) -> TransferResult:
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            await self.confirm.wait()
            self.confirmed = True
            raise
        if self.error is not None:
            raise self.error
        return RESULT


@pytest.fixture
def loop_thread() -> Iterator[LoopThread]:
    loop_thread = LoopThread()
    yield loop_thread
    loop_thread.close()


def let(loop_thread: LoopThread, function: Callable[[], None]) -> None:
    """Run a function on the loop thread, to its end."""

    async def run() -> None:
        function()

    loop_thread.call(run())


def test_a_thread_waits_for_the_result(loop_thread: LoopThread) -> None:
    gate = Gate()
    future = loop_thread.submit(gate.work())
    assert not future.done() and not future.cancelled()
    with pytest.raises(TimeoutError):
        future.result(0.001)
    with pytest.raises(TimeoutError):
        future.exception(0.001)
    let(loop_thread, gate.open.set)
    assert future.result(10) is RESULT and future.exception() is None
    assert future.done() and not future.cancelled() and not future.cancel()


def test_the_error_is_raised_to_whoever_asks(loop_thread: LoopThread) -> None:
    gate = Gate(FAILED)
    future = loop_thread.submit(gate.work())
    let(loop_thread, gate.open.set)
    assert future.exception(10) is FAILED
    with pytest.raises(TransferAbortedError):
        future.result()


def test_done_callbacks_get_the_future(loop_thread: LoopThread) -> None:
    gate, reported = Gate(), concurrent.futures.Future[tuple[TransferFuture, str]]()
    future = loop_thread.submit(gate.work())
    future.add_done_callback(lambda f: reported.set_result((f, threading.current_thread().name)))
    let(loop_thread, gate.open.set)
    assert reported.result(10) == (future, "etha-portal")
    late: list[TransferFuture] = []
    future.add_done_callback(late.append)
    assert late == [future], "at once when it is over"


def test_it_is_cancelled_once_the_transfer_has_ended(loop_thread: LoopThread) -> None:
    gate = Gate()
    future = loop_thread.submit(gate.work())
    let(loop_thread, lambda: None)  # the transfer has begun
    assert future.cancel() and future.cancel()
    let(loop_thread, lambda: None)
    assert not future.done() and not future.cancelled(), "tensors may still be written"
    let(loop_thread, gate.confirm.set)
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(10)
    with pytest.raises(concurrent.futures.CancelledError):
        future.exception()
    assert gate.confirmed and future.done() and future.cancelled() and not future.cancel()


def test_cancelled_before_it_began(loop_thread: LoopThread) -> None:
    gate = Gate()
    hold = threading.Event()
    loop_thread._loop.call_soon_threadsafe(hold.wait)
    future = loop_thread.submit(gate.work())
    assert future.cancel()
    hold.set()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(10)
    assert future.cancelled() and not gate.confirmed


async def test_an_event_loop_awaits_what_another_thread_moves(loop_thread: LoopThread) -> None:
    gate, broken = Gate(), Gate(FAILED)
    future, failing = loop_thread.submit(gate.work()), loop_thread.submit(broken.work())
    for waiting in (future, failing):
        with pytest.raises(ConfigError, match="await it"):
            waiting.result()
        with pytest.raises(ConfigError, match="await it"):
            waiting.exception(0)
    loop_thread._loop.call_soon_threadsafe(gate.open.set)
    loop_thread._loop.call_soon_threadsafe(broken.open.set)
    assert await future is RESULT and await future is RESULT
    assert future.result() is RESULT, "over: there is nothing to wait for"
    with pytest.raises(TransferAbortedError):
        await failing
    assert failing.exception() is FAILED


async def test_a_task_of_this_loop() -> None:
    gate = Gate()
    future = TransferFuture.of_task(asyncio.create_task(gate.work()))
    reported: list[TransferFuture] = []
    future.add_done_callback(reported.append)
    with pytest.raises(ConfigError, match="await it"):
        future.result()
    gate.open.set()
    assert await future is RESULT and future.result() is RESULT
    assert reported == [future]


async def test_to_await_is_only_to_look() -> None:
    gate = Gate()
    future = TransferFuture.of_task(asyncio.create_task(gate.work()))

    async def look() -> TransferResult:
        return await future

    looking = [asyncio.create_task(look()) for _ in range(2)]
    await asyncio.sleep(0)
    looking[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking[0]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await future
    assert not future.done()
    gate.open.set()
    assert await looking[1] is RESULT


async def test_cancel_ends_the_task_and_whoever_awaits() -> None:
    gate = Gate()
    future = TransferFuture.of_task(asyncio.create_task(gate.work()))

    async def look() -> TransferResult:
        return await future

    looking = asyncio.create_task(look())
    await asyncio.sleep(0)
    assert future.cancel()
    gate.confirm.set()
    with pytest.raises(asyncio.CancelledError):
        await looking
    assert future.cancelled() and gate.confirmed
    with pytest.raises(asyncio.CancelledError):
        await future


async def test_the_future_keeps_its_task_and_an_error_that_nobody_fetched_is_silent() -> None:
    reported: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    gate = Gate(FAILED)
    future = TransferFuture.of_task(asyncio.create_task(gate.work()))
    ended = loop.create_future()
    future.add_done_callback(lambda _: ended.set_result(None))
    gate.open.set()
    await ended
    del future
    gc.collect()
    assert reported == []


def test_a_loop_that_is_gone_is_not_waited_for(loop_thread: LoopThread) -> None:
    """Who awaited has left with its event loop; the transfer ends all the same."""
    gate = Gate()
    future = loop_thread.submit(gate.work())

    async def look() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await future

    asyncio.run(look())
    let(loop_thread, gate.open.set)
    assert future.result(10) is RESULT


def test_a_closed_loop_takes_no_cancellation() -> None:
    loop = asyncio.new_event_loop()
    future = TransferFuture(loop)
    loop.close()
    assert not future.cancel() and not future.done()


def test_a_forked_child_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy would never end, and what it asks for would reach nobody."""
    loop = asyncio.new_event_loop()
    try:
        future = TransferFuture(loop)
        monkeypatch.setattr(os, "getpid", lambda: -1)
        for call in (
            future.done,
            future.cancelled,
            future.cancel,
            future.result,
            future.exception,
            future.__await__().__next__,
        ):
            with pytest.raises(ConfigError, match="this transfer belongs to process"):
                call()
        with pytest.raises(ConfigError, match="this transfer belongs to process"):
            future.add_done_callback(print)
    finally:
        loop.close()


def test_a_done_callback_that_is_no_function_is_refused() -> None:
    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(ConfigError, match="add_done_callback takes a function of the future, not 5"):
            TransferFuture(loop).add_done_callback(5)  # type: ignore[arg-type]
    finally:
        loop.close()
