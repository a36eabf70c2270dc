"""One transfer in a worker's process: lend memory, ask the agent, apply, take the memory back.

It also calls the user's callbacks: ``progress`` from the event loop between messages, ``on_commit`` after COMMIT and
before the tensors change.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Literal

from msgspec.structs import replace

from etha.bus.codec import Reply
from etha.bus.link import Answer
from etha.bus.messages import ExchangeSegments, Moved, Progress, Transfer
from etha.client.active_calls import ActiveCall, callback_of
from etha.client.arguments.checks import check_callback, check_flag, check_version, shown
from etha.client.direct import DirectTransfer
from etha.client.memory.base import Mark, StagedTensors
from etha.client.memory.exchange import PageExchange
from etha.client.own_moves import OwnMoves
from etha.client.registration import Registration, attach_shadows, leave, no_place
from etha.client.results import OnCommit, OnProgress, TransferResult, Version
from etha.client.tasks import Deadline, Shield
from etha.errors import (
    AgentLostError,
    ConfigError,
    EthaError,
    PeerLostError,
    RegistrationError,
    TransferError,
    TransferTimeoutError,
    with_note,
)
from etha.phases import NO_PHASES

log = logging.getLogger(__name__)

#: Seconds that an on_commit has to end after it was cancelled at the deadline.
_GRACE = 1.0
#: Seconds that an agent has to exchange its mappings, which takes it some milliseconds. It has just answered.
_CONFIRM = 5.0
#: Callbacks that outlive their calls. They are kept because a task that nobody holds may be collected.
_outliving: set[asyncio.Task[BaseException | None]] = set()


def check_call(
    registration: Registration,
    verb: Literal["send", "recv"],
    version: Version,
    on_commit: OnCommit | None,
    progress: OnProgress | None,
    snapshot: bool,
) -> None:
    """ConfigError for wrong arguments of a transfer."""
    if not isinstance(verb, str) or verb not in ("send", "recv"):
        raise ConfigError(f"transfer_type={shown(verb)} must be 'send' or 'recv'")
    check_version(version)
    check_callback("on_commit", on_commit)
    check_callback("progress", progress)
    check_flag("snapshot", snapshot)
    if on_commit is not None and not (verb == "recv" and registration.atomic):
        raise ConfigError("on_commit= needs transfer_type='recv' and a batch registered with atomic=True")
    if snapshot and verb != "send":
        raise ConfigError("snapshot=True is of the sender: it needs transfer_type='send'")


async def transfer(
    registration: Registration,
    verb: Literal["send", "recv"],
    *,
    version: Version,
    on_commit: OnCommit | None,
    timeout: float,
    progress: OnProgress | None,
    mark: Mark,
    call: ActiveCall,
    edition: str = "",
    expects: int | None = None,
    direct: DirectTransfer | None = None,
) -> TransferResult:
    """Move the batch once; see ``AsyncTensorBusClient.transfer``. ``check_call`` has checked the arguments.

    ``mark``: the device work that must come before the call. ``edition``: the snapshot that is sent; the tensors are
    not touched (``client.snapshot``). ``expects``: receive only what is sent under this version. ``direct``: the call's
    thread has asked the agent already.
    """
    deadline = Deadline(timeout)
    if direct is not None:
        return await _once(registration, verb, version, on_commit, deadline, progress, mark, call, direct=direct)
    if edition:
        return await _once(registration, verb, version, on_commit, deadline, progress, Mark(), call, edition)
    check_state(registration, verb)
    mark.check()
    aside = verb == "recv" and registration.shadowed
    if not aside and registration.shadows is None and not registration.source.serves:
        return await _once(registration, verb, version, on_commit, deadline, progress, mark, call, expects=expects)
    async with turn(registration, timeout):
        if verb == "recv":
            await _make_place(registration, deadline)
        if verb == "send" and registration.source.serves:
            await caught_up(registration, mark, deadline)
            await pull(registration, registration.source)
        return await _once(registration, verb, version, on_commit, deadline, progress, mark, call, expects=expects)


async def _make_place(registration: Registration, deadline: Deadline) -> None:
    """Have a place to receive in, from which this worker can copy into its tensors; else leave the batch, so that no
    other rank waits for this one."""
    try:
        if registration.shadowed and registration.shadows is None:
            registration.check_stands()
            await attach_shadows(registration, lambda: deadline.left)
        registration.check_writable(registration.stage, committed=False)
    except (ConfigError, RegistrationError) as error:
        await leave(registration, no_place(error), deadline.left)
        raise


def check_state(registration: Registration, verb: Literal["send", "recv"]) -> None:
    """RegistrationError for tensors that have moved, TransferError for half-written tensors that must not be sent."""
    registration.check_unmoved()
    if verb == "send" and registration.torn:
        raise TransferError(
            f"batch {registration.batch!r}: its tensors may be half-written by a transfer that was aborted; "
            f"receive it in full before it is sent",
            outcome="withdrawn",
        )


@asynccontextmanager
async def turn(registration: Registration, timeout: float) -> AsyncIterator[None]:
    """Enter while a call stages or applies: it has to finish before the next call of this worker begins."""
    try:
        async with asyncio.timeout(None if timeout == math.inf else timeout):
            await registration.turn.acquire()
    except TimeoutError:
        raise TransferTimeoutError(
            f"batch {registration.batch!r}: an earlier transfer of this worker did not end in time", outcome="withdrawn"
        ) from None
    try:
        yield
    finally:
        registration.turn.release()


async def caught_up(registration: Registration, mark: Mark, deadline: Deadline) -> None:
    """Wait for the work before ``mark``, until the deadline.

    Copies are queued only after that, because queued work cannot be taken back, and a copy behind a kernel that never
    ends would never end.
    """
    if not mark.event:
        return
    loop, stop = asyncio.get_running_loop(), threading.Event()
    reached: asyncio.Future[bool] = loop.create_future()

    def look() -> None:
        try:
            found = registration.connection.home.reach(mark, stop)
            deliver = partial(reached.set_result, found)
        except EthaError as error:
            deliver = partial(reached.set_exception, error)
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(deliver)

    # A thread of its own: the loop's executor has few, and other calls need them meanwhile.
    threading.Thread(target=look, name=f"etha-mark-{registration.batch}", daemon=True).start()
    left = deadline.left
    timer = None if left == math.inf else loop.call_later(left, stop.set)
    try:
        shield = Shield(cut=stop.set)
        await shield.wait(reached)
        shield.release()
        if not reached.result():
            raise TransferTimeoutError(
                f"batch {registration.batch!r}: this worker's own GPU is behind: the work that was queued on its "
                f"stream before the call is not done by the deadline; give more time, or call later",
                outcome="withdrawn",
            )
    finally:
        if timer is not None:
            timer.cancel()


async def pull(registration: Registration, stage: StagedTensors) -> None:
    """Copy live tensors -> ``stage``, to its end."""

    def work() -> None:
        registration.check_backed(stage, committed=False)
        stage.pull(registration.locals)

    if stage.quick:
        return work()
    shield = Shield()
    failed: BaseException | None = None
    try:
        await shield.in_thread(work)
    except EthaError as error:
        failed = error
    shield.release(failed)


async def _once(
    registration: Registration,
    verb: Literal["send", "recv"],
    version: Version,
    on_commit: OnCommit | None,
    deadline: Deadline,
    on_progress: OnProgress | None,
    mark: Mark,
    call: ActiveCall,
    edition: str = "",
    expects: int | None = None,
    direct: DirectTransfer | None = None,
) -> TransferResult:
    page, link = registration.connection.page, registration.connection.link
    word = page.open() if direct is None else direct.word
    mark.lent.lend(page, word)
    confirmed: list[Answer | None] = []
    progress, shield = ProgressCallback(on_progress, registration.batch), Shield()
    timeout = deadline.left
    given = timeout if direct is None else direct.seconds

    own: list[OwnMoves] = []  # none, or one: few calls move something themselves

    def take_pull() -> None:
        if direct is not None and (pull := direct.take_pull()) is not None:
            if not own:
                own.append(OwnMoves(registration, link, verb))
            own[0].follow(pull)

    if direct is not None and not direct.interrupted:
        take_pull()

    def pushed(message: Any) -> None:
        if isinstance(message, Progress):
            progress.tell(message.done, message.total)
        elif call.blocks:
            if not own:
                own.append(OwnMoves(registration, link, verb))
            own[0].begin(message)

    def late() -> TransferError:
        why = f"the agent did not answer by the deadline of {given:g} s"
        if call.interrupted is not None:
            why = f"{call.interrupted}, and the agent did not confirm the end of this call"
        return TransferTimeoutError(
            with_note(f"batch {registration.batch!r}: {why}", link.log_note),
            outcome="unknown",
            quiesced=page.revoke(word),
            torn=verb == "recv" and registration.in_place,
        )

    message = Transfer(
        batch=registration.batch,
        epoch=registration.pair.epoch,
        verb=verb,
        version=version,
        slot=word,
        progress=progress.wanted,
        edition=edition,
        mark=mark.handle,
        trace_id=call.trace_id,
        blocks=call.blocks,
        expects=expects,
    )
    asked = time.monotonic()
    try:
        collapser = registration.connection.collapser
        pages = collapser.transferring() if collapser.working else nullcontext()
        with call.asking(link), registration.connection.advice(), pages:
            if direct is not None and direct.request is not None:
                moved = await link.adopt(
                    direct.request,
                    timeout=timeout,
                    on_push=pushed,
                    on_timeout=late,
                    on_cancel=confirmed.append,
                    tag=call,
                )
            else:
                moved = await link.request(
                    message,
                    timeout=timeout,
                    on_push=pushed,
                    on_timeout=late,
                    on_cancel=confirmed.append,
                    patient=True,  # until the agent has stopped using the tensors
                    tag=call,
                )
    except asyncio.CancelledError as cancelled:
        answer = confirmed[0] if confirmed else None
        if not isinstance(answer, Reply):
            registration.torn = registration.torn or (verb == "recv" and registration.in_place and _torn(answer))
            if answer is None and not page.revoke(word) and not await shield.finish(link.agent_ended()):
                log.warning("batch %s: a frozen agent may still write into the tensors", registration.batch)
            raise
        # COMMIT came first: the others hold the new version, so this worker must, too.
        moved, shield.cancelled = answer.message, cancelled
    except AgentLostError as error:
        torn = error.outcome == "unknown" and verb == "recv" and registration.in_place
        registration.torn = registration.torn or torn
        # A killed agent has left its marks in the page, but it writes nothing any more.
        quiesced = page.revoke(word) or await shield.finish(link.agent_ended())
        shield.release()
        lost = AgentLostError(error.message, outcome=error.outcome, torn=torn, quiesced=quiesced)
        lost.phases = replace(NO_PHASES, copy_in=asked - deadline.begun)
        raise lost from None
    except TransferError as error:
        error.phases = replace(error.phases or NO_PHASES, copy_in=asked - deadline.begun)
        error.torn = error.torn and registration.in_place
        registration.torn = registration.torn or error.torn
        raise
    finally:
        page.revoke(word)
        take_pull()  # of an interrupted call only now: where it stands is unknown, so the agent had to hear first
        if own and own[0].running:  # the call has failed, or was cancelled
            await shield.finish(own[0].end())
            shield.release()
    assert isinstance(moved, Moved)
    answered = time.monotonic()
    call.committed = True
    if shield.cancelled is None:
        progress.tell(moved.nbytes, moved.nbytes)
    failed: BaseException | None = None
    if on_commit is not None:
        failed = await call_on_commit(on_commit, call, deadline, registration.batch, shield)
    # Whatever the callback raised, all others hold the new version, so this worker must, too.
    swapped: Collection[int] = ()
    try:
        if verb == "recv" and registration.pages is not None:
            swapped = await shield.finish(_swap(registration, registration.pages, shield))
        copied = registration.stage.without(swapped)
        if verb == "send" or copied.quick:
            _take_over(registration, verb, moved, copied)
        else:
            await shield.in_thread(lambda: _take_over(registration, verb, moved, copied))
    except Exception as error:
        if failed is not None:
            log.error("batch %s: on_commit failed, too", registration.batch, exc_info=failed)
        failed = error
    shield.release(failed or progress.stop)
    bytes_swapped = sum(registration.locals[i].nbytes for i in swapped)
    return _result(verb, moved, bytes_swapped, asked - deadline.begun, time.monotonic() - answered)


def finish_direct(direct: DirectTransfer, moved: Moved) -> TransferResult:
    """Record what the agent has moved for a call of another thread, on that thread: no tensor of it is staged."""
    answered = time.monotonic()
    _take_over(direct.registration, direct.verb, moved, direct.registration.stage)
    return _result(direct.verb, moved, 0, direct.asked - direct.begun, time.monotonic() - answered)


def _result(
    verb: Literal["send", "recv"], moved: Moved, swapped: int, copy_in: float, copy_out: float
) -> TransferResult:
    return TransferResult(
        seq=moved.seq,
        version=moved.version,
        bytes=moved.nbytes,
        seconds=moved.seconds,
        direction=verb,
        peers=moved.peers,
        peak_staging=moved.peak_staging,
        swapped=swapped,
        phases=replace(moved.phases, copy_in=copy_in, copy_out=copy_out),
    )


async def _swap(registration: Registration, pages: PageExchange, shield: Shield) -> Collection[int]:
    """Exchange shadows with their tensors; returns those entries, which hold the new version now."""
    async with registration.connection.segments.exchanging:
        return await _exchange(registration, pages, shield)


async def _exchange(registration: Registration, pages: PageExchange, shield: Shield) -> Collection[int]:
    tensors, shadows, connection = registration.locals, registration.shadows, registration.connection
    assert shadows is not None  # it has received into them
    done = await shield.in_thread(lambda: pages.exchange(tensors, shadows))
    if not done:
        return done
    message = ExchangeSegments(batch=registration.batch, epoch=registration.pair.epoch, segments=tuple(done.values()))
    try:
        await shield.finish(connection.link.request(message, timeout=_CONFIRM))
    except PeerLostError:
        pass  # this registration is over, and the next one maps what lies there then
    except AgentLostError:
        if not connection.lost:  # it is stopped: what it will have mapped is unknown
            await shield.finish(leave(registration, "its agent has not confirmed that it has exchanged pages", _GRACE))
    except EthaError as error:
        pages.give_up(f"the agent does not exchange its mappings: {error.message}")
        if await shield.in_thread(lambda: pages.restore(done, tensors, shadows)):
            return ()
        await shield.finish(leave(registration, "its agent maps other pages than this worker", _GRACE))
    return done


def _take_over(registration: Registration, verb: Literal["send", "recv"], moved: Moved, copied: StagedTensors) -> None:
    """Copy what was received in place, tell autograd, and record the version that the tensors hold."""
    if verb == "recv":
        try:
            if copied.serves:
                registration.check_backed(copied, committed=True)
                registration.check_writable(copied, committed=True)
                copied.push(registration.locals)
        except EthaError as error:
            registration.torn = registration.torn or not registration.atomic or getattr(error, "torn", False)
            raise
        registration.received()
        registration.torn = False
    registration.version, registration.moved = moved.version, moved


def _torn(answer: Answer | None) -> bool:
    error = getattr(answer, "error", None)
    return bool(getattr(error, "torn", True)) if error is not None else True


# ---- callbacks: their exceptions and their duration must not affect Etha's own work ----------------


class ProgressCallback:
    """A user's ``progress``, or None. Its exceptions do not affect the transfer.

    An Exception is logged, and the callback is not called again. ``stop`` holds any other (SystemExit,
    KeyboardInterrupt), which the call raises once the transfer is over.
    """

    def __init__(self, function: OnProgress | None, batch: str) -> None:
        self.stop: BaseException | None = None
        self._function, self._batch = function, batch

    @property
    def wanted(self) -> bool:
        """Whether there is a callback to call."""
        return self._function is not None

    def tell(self, done: int, total: int) -> None:
        """Call it with the bytes that are done and their total."""
        if self._function is None:
            return
        try:
            self._function(done, total)
        except Exception:
            log.exception("batch %s: the progress callback raised and is not called again", self._batch)
            self._function = None
        except BaseException as error:
            self.stop, self._function = error, None


async def call_on_commit(
    on_commit: OnCommit, call: ActiveCall, deadline: Deadline, batch: str, shield: Shield
) -> BaseException | None:
    """Call and await it until the deadline. Returns its exception, or a TransferTimeoutError if it is late; raises
    nothing.

    A late callback is cancelled, and not waited for if it continues.
    """
    with callback_of(call):
        callback = asyncio.ensure_future(_called(on_commit))
    if await _in_time(callback, call, deadline, shield):
        return _raisable(callback.result(), batch)
    callback.cancel()
    if not await shield.wait(callback, _GRACE):
        log.error("batch %s: on_commit was cancelled at the deadline and goes on", batch)
        _outliving.add(callback)
        callback.add_done_callback(_outliving.discard)
    return TransferTimeoutError(
        f"batch {batch!r}: the transfer is committed and the tensors hold what was received, but on_commit had not "
        f"returned by the deadline and was not waited for; make it shorter, or give more time",
        outcome="committed",
    )


def _raisable(error: BaseException | None, batch: str) -> BaseException | None:
    """``error``, or a ConfigError for a StopIteration, because Python turns one that a coroutine raises into a
    RuntimeError."""
    stop = error.__cause__ if type(error) is RuntimeError else error
    if not isinstance(stop, StopIteration):
        return error
    raisable = ConfigError(
        f"batch {batch!r}: on_commit raised {shown(stop)}, as next() of an iterator at its end does, which cannot be "
        f"raised here; the transfer is committed and the tensors hold what was received"
    )
    raisable.__cause__ = stop
    return raisable


async def _in_time(
    callback: asyncio.Task[BaseException | None], call: ActiveCall, deadline: Deadline, shield: Shield
) -> bool:
    """Whether it ends by the deadline, or, if the call has none, in time once its client closes."""
    seconds = deadline.left
    if seconds == math.inf:
        hurry = call.hurry()
        callback.add_done_callback(lambda _: hurry.cancel())
        await shield.wait(hurry)
        if hurry.cancelled():
            return True
        seconds = hurry.result()
    return await shield.wait(callback, seconds)


async def _called(on_commit: OnCommit) -> BaseException | None:
    """Call it and return its exception, because a task that raises SystemExit or KeyboardInterrupt ends its loop."""
    try:
        if inspect.isawaitable(waiting := on_commit()):
            await waiting
    except BaseException as error:
        return error
    return None
