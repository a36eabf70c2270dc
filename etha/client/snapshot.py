"""Snapshots: copy a batch's tensors and send the copy, so that the tensors may change meanwhile.

A registration has one place for snapshots, mapped memory as large as what this rank registered. So a newer snapshot
first ends the older one: it withdraws one that still waits, and waits for one that moves.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

from etha.bus.messages import AttachSnapshot, Supersede
from etha.client.active_calls import ActiveCall, ActiveCalls
from etha.client.future import TransferFuture
from etha.client.memory.base import Mark
from etha.client.registration import Registration, Snapshot, stage
from etha.client.results import OnError, TransferResult, Version, reported
from etha.client.tasks import Deadline, Shield, contain
from etha.client.transfer import caught_up, check_state, pull, turn
from etha.errors import TransferAbortedError, TransferTimeoutError

#: Sends the snapshot of this edition, as part of this call.
Send = Callable[[ActiveCall, str], Awaitable[TransferResult]]


async def send_snapshot(
    registration: Registration,
    *,
    version: Version,
    on_error: OnError,
    deadline: Deadline,
    mark: Mark,
    calls: ActiveCalls,
    send: Send,
) -> TransferFuture:
    """Return once the tensors may change. The future has the result of ``send(call, edition)``.

    ``deadline`` limits the copying of the tensors, after the work before ``mark``. Raises the errors of ``transfer``,
    and TransferTimeoutError if the previous snapshot moves until then.
    """
    aside: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    snapshot = Snapshot()

    async def move() -> TransferResult:
        with calls.begin("send of a snapshot", registration) as call:
            edition = await _set_aside(registration, snapshot, version, deadline, mark)
            if not aside.done():
                aside.set_result(None)
            try:
                return await send(call, edition)
            except TransferAbortedError as error:
                if snapshot.superseded and error.outcome == "withdrawn":
                    raise _Superseded(error) from None
                raise

    async def run() -> TransferResult:
        try:
            return await reported(on_error, registration.pairs, "send", move)
        except _Superseded as superseded:  # not a failure: later transfers are not skipped
            if on_error == "report":
                return TransferResult.failed("send", superseded.error)
            raise superseded.error from None

    task = snapshot.task = contain(run(), asyncio.get_running_loop())
    try:
        either: set[asyncio.Future[Any]] = {aside, task}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        task.cancel()
        await Shield().wait(task)  # a running copy ends first
        raise
    if not aside.done() and (task.cancelled() or task.exception() is not None):
        await task
    return TransferFuture.of_task(task)


class _Superseded(Exception):
    """A newer snapshot of this worker has replaced one that nobody had received."""

    def __init__(self, error: TransferAbortedError) -> None:
        super().__init__(error.message)
        self.error = error


async def _set_aside(
    registration: Registration, snapshot: Snapshot, version: Version, deadline: Deadline, mark: Mark
) -> str:
    """Copy the tensors; returns the edition, which is the same on all ranks."""
    check_state(registration, "send")
    mark.check()
    registration.check_stands()  # else only the future would raise it, and a training loop may never look at that
    async with turn(registration, deadline.left):
        if registration.aside is None:
            await _attach(registration, deadline)
        await _make_way(registration, deadline)
        place = registration.aside
        assert place is not None
        await caught_up(registration, mark, deadline)
        check_state(registration, "send")
        await pull(registration, place)
        registration.snapshot = snapshot
        if version is not None:
            return f"label {version}"
        registration.snapshots += 1
        return f"number {registration.snapshots}"


async def _attach(registration: Registration, deadline: Deadline) -> None:
    """Allocate the place, and share it with the agent."""
    tensors = registration.locals
    connection = registration.connection
    place = await stage(connection.home, tensors, [tensor.numel() > 0 for tensor in tensors])
    handles = place.handles([connection.home.describe(tensor) for tensor in tensors])
    await registration.segments.show(handles, deadline.left)
    message = AttachSnapshot(batch=registration.batch, epoch=registration.pair.epoch, handles=tuple(handles))
    await connection.link.request(message, timeout=deadline.left)
    registration.aside = place


async def _make_way(registration: Registration, deadline: Deadline) -> None:
    """Return once nobody reads the place any more."""
    older = registration.snapshot
    if older is None or older.task is None or older.task.done():
        return
    older.superseded = True
    message = Supersede(batch=registration.batch, epoch=registration.pair.epoch)
    await registration.connection.link.request(message, timeout=deadline.left)
    done, _ = await asyncio.wait({older.task}, timeout=None if deadline.left == math.inf else deadline.left)
    if not done:
        raise TransferTimeoutError(
            f"batch {registration.batch!r}: the snapshot before this one still moves; give more time, or "
            f"await its future before the next",
            outcome="withdrawn",
        )
