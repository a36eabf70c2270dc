"""Callbacks of users: what they raise, and how long they take, is kept from Etha's own work.

``progress`` is called by the event loop between messages, ``on_commit`` between COMMIT and the tensors.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import math
import threading
from contextlib import suppress
from typing import Any

from etha.client.active_calls import ActiveCall, callback_of
from etha.client.arguments.checks import shown
from etha.client.deadline import Deadline
from etha.client.results import OnCommit, OnProgress
from etha.client.shield import Shield
from etha.errors import ConfigError, TransferTimeoutError

log = logging.getLogger(__name__)

#: Seconds that an on_commit has to end once it was cancelled at the deadline.
_GRACE = 1.0
#: Callbacks that have outlived their calls: a task that nobody holds may be collected.
_outliving: set[asyncio.Task[BaseException | None]] = set()


class ProgressCallback:
    """A user's ``progress``; None: there is none. What it raises does not touch the transfer.

    An Exception is logged and the callback is not called again. ``stop`` is what it raised beyond that (SystemExit,
    KeyboardInterrupt): the call raises it once the transfer is over.
    """

    def __init__(self, function: OnProgress | None, batch: str) -> None:
        self.stop: BaseException | None = None
        self._function, self._batch = function, batch

    @property
    def wanted(self) -> bool:
        """Whether it is to be called."""
        return self._function is not None

    def tell(self, done: int, total: int) -> None:
        """So many bytes of so many."""
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
    """Call it and await it until the deadline; what it raised, or that it is late. Never raises anything itself.

    Late: it is cancelled, and not waited for if it goes on all the same.
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
    """``error``, or what stands for a StopIteration: no coroutine can raise that, Python makes a RuntimeError of it."""
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
    """Whether it ends by the deadline, or where the call has none, in time once its client closes."""
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
    """Its error as a value: a task that raises SystemExit or KeyboardInterrupt ends the loop that it runs on."""
    try:
        if inspect.isawaitable(waiting := on_commit()):
            await waiting
    except BaseException as error:
        return error
    return None


def in_own_thread(on_commit: OnCommit) -> OnCommit:
    """A blocking client's ``on_commit``: a plain function runs in a thread of its own and not on the clients' loop.

    There it may take as long as it likes, and call this or another client; a coroutine function goes to the loop.
    """
    if inspect.iscoroutinefunction(on_commit):
        return on_commit

    async def run() -> None:
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:
            if not ended.done():
                ended.set_result((value, error))

        def work() -> None:
            try:
                value, error = context.run(on_commit), None
            except BaseException as raised:
                value, error = None, raised
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, value, error)

        # Not of the loop's executor: its threads are few, other calls need them, and the program waits for them.
        threading.Thread(target=work, name="etha-on-commit", daemon=True).start()
        value, error = await ended
        if error is not None:
            raise error
        if inspect.isawaitable(value):
            await value

    return run
