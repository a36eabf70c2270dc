"""The calls of one client that have not returned, and how ``close`` ends them.

    begin --> waits, stages, asks its agent --> COMMIT --> callback, copies --> end
             interrupt: it raises              finish: it ends by itself, its callback by the deadline at the latest

A call that waits in this process is cancelled from inside, as ``asyncio.timeout`` does, and raises an error instead. A
call that has asked its agent gets the agent's answer, so that it knows whether it was committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING

from etha.bus.link import AgentLink
from etha.errors import ConfigError, EthaError, TransferAbortedError

if TYPE_CHECKING:
    from etha.client.direct import DirectTransfer
    from etha.client.registration import Registration

#: Seconds after which it is noticed that another thread's call has ended.
_LOOK = 0.02

#: The call whose callback runs this code, if any.
_callback_of: ContextVar[ActiveCall | None] = ContextVar("etha_callback_of", default=None)
#: The call in which this code runs, if any.
_within: ContextVar[ActiveCall | None] = ContextVar("etha_within", default=None)


class ActiveCall:
    """One call, from its first step to its return. The task that makes the call enters it as a context manager."""

    def __init__(self, calls: ActiveCalls, what: str, registration: Registration | None) -> None:
        self.registration = registration
        #: Set once the transfer is committed: received data must be put in place, whatever else happens.
        self.committed = False
        #: Of the call's OpenTelemetry span; "" for none.
        self.trace_id = ""
        #: Whether it blocks the thread of its caller, whose processor is free meanwhile.
        self.blocks = False
        self._calls, self._what = calls, what
        self._link: AgentLink | None = None
        self._why: str | None = None
        self._task: asyncio.Task[object] | None = None
        self._cancelling, self._cancelled = 0, False
        self._hurry: asyncio.Future[float] | None = None
        #: The call that makes this one: ``next`` of a subscription makes transfers.
        self._outer: ActiveCall | None = None
        self._token: Token[ActiveCall | None] | None = None

    def is_part_of(self, other: ActiveCall) -> bool:
        """Whether this is the other call, or one that it makes."""
        call: ActiveCall | None = self
        while call is not None and call is not other:
            call = call._outer
        return call is not None

    @property
    def interrupted(self) -> str | None:
        """Why the call has to end; None if it need not."""
        return self._why

    @contextmanager
    def asking(self, link: AgentLink) -> Iterator[None]:
        """Enter while the agent is asked, with this call as the request's tag, because only the agent knows how the
        call ends."""
        self._link = link
        try:
            yield
        finally:
            self._link = None

    def interrupt(self, why: str, seconds: float) -> None:
        """Make the call end: at once if it waits in this process, by the agent's answer if the agent was asked.

        A committed call ends by itself. If it has no deadline, its callback gets ``seconds``.
        """
        if self._why is None:
            self._why = why
            if self._link is not None:
                self._link.withdraw(self)
            elif self.committed:
                if self._hurry is not None and not self._hurry.done():
                    self._hurry.set_result(seconds)
            elif self._task is not None:
                self._cancelled = self._task.cancel()

    def hurry(self) -> asyncio.Future[float]:
        """A future that is done once the call has to end although it has no deadline. Its result is the callback's
        remaining seconds."""
        self._hurry = asyncio.get_running_loop().create_future()
        if self._why is not None:
            self._hurry.set_result(self._calls.patience)
        return self._hurry

    def __enter__(self) -> ActiveCall:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self._outer, self._token = _within.get(), _within.set(self)
        self._calls.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.remove(self)
        task, token, registration = self._task, self._token, self.registration
        assert task is not None and token is not None
        _within.reset(token)
        # The loop keeps the context in which a socket was opened, and with it this call, as long as the socket is open.
        # The task has the call's result, which may keep the client that holds the socket.
        self._task = self._token = self._link = self.registration = None
        if self._cancelled:
            only_us = task.uncancel() <= self._cancelling
            if only_us and isinstance(error, asyncio.CancelledError):
                assert self._why is not None
                raise self._error(self._why, registration) from None

    def _error(self, why: str, registration: Registration | None) -> EthaError:
        if registration is None:
            return ConfigError(f"{self._what} has ended: {why}")
        return TransferAbortedError(f"batch {registration.batch!r}: {self._what} has ended: {why}", outcome="withdrawn")


class ActiveCalls:
    """All calls of one client. ``patience``: seconds for callbacks of calls without a deadline, once the client
    closes."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._active: set[ActiveCall] = set()
        #: Calls that their own threads make, which add them; those that are over are forgotten now and then.
        self._direct: set[DirectTransfer] = set()
        self._waiters: list[asyncio.Future[None]] = []

    def begin(self, what: str, registration: Registration | None = None) -> ActiveCall:
        """A call of the current task, which must enter it. ``registration``: that of the batch it transfers."""
        return ActiveCall(self, what, registration)

    def interrupt(self, why: str, of: Registration | None = None, *, but: ActiveCall | None = None) -> None:
        """Make all calls end, or those of one batch. Whoever makes ``but`` goes on until that has ended."""
        for direct in self.directly(of):
            direct.interrupt(why)
        for call in self._chosen(of, None):
            if but is None or call is but or not but.is_part_of(call):
                call.interrupt(why, self.patience)

    async def ended(self, of: Registration | None = None, *, but: ActiveCall | None = None) -> None:
        """Return once they have ended. ``but`` is not waited for, nor who makes it."""
        while (asked := self._chosen(of, but)) or self.directly(of):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            # A thread that has ended its call tells nobody, so that nothing can interrupt its telling.
            await asyncio.wait({waiter}, timeout=None if asked else _LOOK)

    def add_direct(self, call: DirectTransfer) -> None:
        """Add a call that its own thread makes, on that thread. It is forgotten once it is over."""
        for old in tuple(self._direct):  # in one step, because other threads change it
            if old.over:
                self._direct.discard(old)
        self._direct.add(call)

    def directly(self, of: Registration | None = None) -> list[DirectTransfer]:
        """The calls that other threads make now, of one batch or all."""
        return [c for c in tuple(self._direct) if not c.over and (of is None or c.registration is of)]

    def calling_back(self) -> ActiveCall | None:
        """The call whose callback runs this code; None if there is none or it has ended."""
        call = _callback_of.get()
        return call if call in self._active else None

    def add(self, call: ActiveCall) -> None:
        """Add a call that begins."""
        self._active.add(call)

    def remove(self, call: ActiveCall) -> None:
        """Remove a call that has ended, and wake the tasks that wait for it."""
        self._active.discard(call)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _chosen(self, of: Registration | None, but: ActiveCall | None) -> list[ActiveCall]:
        return [
            call
            for call in self._active
            if (but is None or not but.is_part_of(call)) and (of is None or call.registration is of)
        ]


def in_callback() -> bool:
    """Whether this code runs in a callback of any call."""
    return _callback_of.get() is not None


@contextmanager
def callback_of(call: ActiveCall) -> Iterator[None]:
    """Mark the code inside, and tasks and threads started with its context, as the call's callback."""
    token = _callback_of.set(call)
    try:
        yield
    finally:
        _callback_of.reset(token)
