"""The loop thread of the blocking clients of one process: it runs coroutines for other threads.

A process has one such thread. The first blocking client starts it, and it ends after the last one, once all work has
ended. A forked child has no such thread; its own clients start another. No callback can end the thread. If it dies
anyway, running work raises, and the next client starts another thread.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import inspect
import logging
import os
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from weakref import finalize

import uvloop

from etha.client.future import TransferFuture
from etha.client.results import OnCommit, TransferResult
from etha.client.tasks import contain, error_of
from etha.errors import AgentLostError

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds that the end of the program waits for the thread, because a callback may block it.
_EXIT = 1.0
#: Seconds after which a blocking call notices a signal at the latest.
_SLICE = 0.1
#: Seconds of the interpreter's switch interval. Two busy threads do as much as with 5 ms, four a tenth less. It is a
#: number that the interpreter, which counts in microseconds, gives back unchanged.
SHORT_SWITCH = 0.000125
#: The interpreter rounds an interval down to microseconds: without this, every call could take one off.
_ROUNDING = 0.5e-6


class LoopThread:
    """An event loop on a daemon thread. ``call`` blocks, ``submit`` does not."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        #: Work that has not ended; several threads change this set.
        self._work: set[_Running | _Submitted] = set()
        self._closing = self._ended = False
        self._thread = threading.Thread(target=self._run, name="etha-portal", daemon=True)
        self._thread.start()
        atexit.register(self._exit)

    @property
    def alive(self) -> bool:
        """Whether it accepts work."""
        return os.getpid() == self._pid and self._thread.is_alive() and not self._closing

    @property
    def is_mine(self) -> bool:
        """Whether this code runs on the loop's own thread, in a callback of a client."""
        return threading.get_ident() == self._thread.ident

    def submit(self, work: Coroutine[Any, Any, TransferResult]) -> TransferFuture:
        """Begin a transfer on the loop."""
        submitted = _Submitted(work, self)
        self._begin(submitted)
        return submitted.future

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for it.

        Ctrl-C cancels it and waits until it has really ended (the agent has confirmed that it does not touch the
        tensors any more) before KeyboardInterrupt is raised. A second Ctrl-C does not wait.
        """
        running = _Running(work, self)
        try:
            self._begin(running)
            running.wait()
        except BaseException:
            try:
                running.cancel()
            except KeyboardInterrupt:  # a second one, before the first has had its effect
                running.cancel()
            running.wait()
            raise
        result: T = running.result()
        return result

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Run a coroutine that no thread waits for."""
        self._begin(_Running(work, self))

    def close(self, *, wait: bool = True) -> None:
        """End the thread once all work has ended; idempotent. ``wait`` for that, but never on the thread itself."""
        atexit.unregister(self._exit)
        self._retire()
        if wait and not self.is_mine and os.getpid() == self._pid:
            self._thread.join()

    # ---- inside -------------------------------------------------------------------------------

    def _begin(self, work: _Running | _Submitted) -> None:
        self._work.add(work)
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(work.begin)
        if self._ended:
            self._abandon()

    def end(self, work: _Running | _Submitted) -> None:
        """Not for users. ``work`` has ended."""
        self._work.discard(work)
        if self._closing:
            self._stop()

    def _retire(self) -> None:
        self._closing = True
        if os.getpid() == self._pid:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if not self._work:
            self._loop.stop()

    def _run(self) -> None:
        try:
            while True:
                try:
                    self._loop.run_forever()
                except BaseException:
                    log.exception("a callback raised on the thread of the blocking clients, which goes on")
                if self._closing and not self._work:
                    break
        finally:
            self._ended = self._closing = True
            self._abandon()
            self._loop.close()

    def _abandon(self) -> None:
        while self._work:
            self._work.pop().abandon()

    def _exit(self) -> None:
        """Stop at the end of the program: a thread that runs Python while the interpreter is finalized may crash it."""
        if os.getpid() != self._pid:
            return  # the thread stayed with the parent
        self._closing = True
        self._work.clear()
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_EXIT)


class _Running:
    """A coroutine on the loop of another thread, whose real end can be waited for."""

    def __init__(self, work: Coroutine[Any, Any, Any], loop_thread: LoopThread) -> None:
        # A bare lock that is held until the end, because waking from an Event costs as much as a small transfer.
        self._ended = threading.Lock()
        self._ended.acquire()
        self._work, self._loop_thread = work, loop_thread
        self._task: asyncio.Task[Any] | None = None
        self._abandoned = self._cancelled = self._over = False

    def cancel(self) -> None:
        with suppress(RuntimeError):  # the loop has ended, and the work with it
            self._loop_thread._loop.call_soon_threadsafe(self._cancel)

    def wait(self) -> None:
        # A signal that comes right before the wait, or to another thread, ends it after a slice. After an interrupt at
        # any place another wait is possible, because the lock is looked at only until ``_over`` is set.
        while not self._over and not self._ended.acquire(timeout=_SLICE):
            pass

    def begin(self) -> None:
        if self._task is None and not self._abandoned:
            self._task = contain(self._work, self._loop_thread._loop)
            self._task.add_done_callback(self._end)

    def abandon(self) -> None:
        """End the wait, because the loop is gone."""
        if self._task is None:
            self._work.close()
        if self._task is None or not self._task.done():
            self._abandoned = True
        self._release()

    def result(self) -> Any:
        if self._abandoned:
            raise AgentLostError("the event loop of this process's blocking clients has ended: create another client")
        assert self._task is not None
        if (error := error_of(self._task)) is not None:
            raise error
        return self._task.result()

    def _cancel(self) -> None:
        self.begin()  # an interrupt may come before ``begin`` has run
        if self._task is not None and not self._cancelled:
            self._cancelled = True
            self._task.cancel()

    def _end(self, _: object) -> None:
        self._release()
        self._loop_thread.end(self)

    def _release(self) -> None:
        self._over = True
        with suppress(RuntimeError):  # it was released before
            self._ended.release()


class _Submitted:
    """A transfer of the loop with its TransferFuture."""

    def __init__(self, work: Coroutine[Any, Any, TransferResult], loop_thread: LoopThread) -> None:
        self.future = TransferFuture(loop_thread._loop)
        self._work, self._loop_thread, self._begun = work, loop_thread, False

    def begin(self) -> None:
        self._begun = True
        task = contain(self._work, self._loop_thread._loop)
        self.future.follow(task)
        task.add_done_callback(lambda _: self._loop_thread.end(self))

    def abandon(self) -> None:
        """End the future, because the loop is gone."""
        if not self._begun:
            self._work.close()
        self.future.abandon()


class _Shared:
    """The loop thread of this process, and its users."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loop_thread: LoopThread | None = None
        self.users: set[object] = set()


_shared = _Shared()
#: Loop threads of the processes that this one was forked from, kept because destroying a loop that runs elsewhere is an
#: error.
_of_parents: list[LoopThread | None] = []


def _forked() -> None:
    global _shared
    _of_parents.append(_shared.loop_thread)
    _shared = _Shared()


os.register_at_fork(after_in_child=_forked)


class LoopMembership:
    """``user``'s use of the process's loop thread, until ``leave`` or until ``user`` is collected."""

    def __init__(self, user: object) -> None:
        self._shared, self._token = _shared, object()
        with _shared.lock:
            if _shared.loop_thread is None or not _shared.loop_thread.alive:
                _shared.loop_thread, _shared.users = LoopThread(), set()
            self.loop_thread = _shared.loop_thread
            _shared.users.add(self._token)
        # A finalizer runs in any thread at any moment, even while that thread holds the lock.
        self._finalizer = finalize(user, _drop, self.loop_thread, self._shared, self._token)
        self._finalizer.atexit = False

    def leave(self, *, wait: bool = True) -> None:
        """End the use; the last user ends the thread. Idempotent."""
        if self._finalizer.detach() is not None and _leave(self.loop_thread, self._shared, self._token):
            self.loop_thread.close(wait=wait)


def _leave(loop_thread: LoopThread, shared: _Shared, token: object) -> bool:
    """Remove a user; True if it was the last."""
    with shared.lock:
        if shared.loop_thread is not loop_thread:
            return False
        shared.users.discard(token)
        if shared.users:
            return False
        shared.loop_thread = None
    return True


def _drop(loop_thread: LoopThread, shared: _Shared, token: object) -> None:
    def leave() -> None:
        if _leave(loop_thread, shared, token):
            loop_thread.close()

    if os.getpid() == loop_thread._pid:
        with suppress(RuntimeError):  # the thread has ended
            loop_thread._loop.call_soon_threadsafe(leave)


class _SwitchInterval:
    """The interpreter's switch interval while calls block: SHORT_SWITCH at most. It belongs to the whole process.

    A thread that has heard from its agent has to take the interpreter's lock before it can act, several times in one
    transfer, and a busy thread gives the lock up only after this interval, which is 5 ms. It has no effect on a thread
    that nobody waits for.
    """

    def __init__(self) -> None:
        # One that a signal handler can take again, because handlers may transfer, too.
        self._lock = threading.RLock()
        #: Those that are inside. An interrupt may come between any two steps, so leaving twice, or without having
        #: entered, must do no harm; a child may leave what its parent has entered.
        self._calls: set[object] = set()
        self._before: float | None = None

    def begin(self, call: object) -> None:
        with self._lock:
            self._calls.add(call)
            if self._before is None and (before := sys.getswitchinterval()) > SHORT_SWITCH:
                self._before = before
                sys.setswitchinterval(SHORT_SWITCH)

    def end(self, call: object) -> None:
        with self._lock:
            self._calls.discard(call)
            if not self._calls:
                self._restore()

    def forked(self) -> None:
        """In the child, which has none of the calls, and whose copy of the lock may be held for ever."""
        self._lock, self._calls = threading.RLock(), set()
        self._restore()

    def _restore(self) -> None:
        before, self._before = self._before, None
        untouched = sys.getswitchinterval() == SHORT_SWITCH  # nobody has set another one meanwhile
        if before is not None and untouched:
            sys.setswitchinterval(before + _ROUNDING)


_interval = _SwitchInterval()
os.register_at_fork(after_in_child=_interval.forked)


@contextmanager
def quick_switches() -> Iterator[None]:
    """While the block runs, a thread waits for the interpreter's lock for little more than SHORT_SWITCH.

    Several threads may be inside at once; the last one restores the interval, unless it was changed meanwhile.
    """
    call = object()
    try:
        _interval.begin(call)
        yield
    finally:
        _interval.end(call)


def in_own_thread(on_commit: OnCommit) -> OnCommit:
    """A blocking client's ``on_commit``: a plain function runs in a thread of its own and not on the clients' loop.

    There it may take long, and call this or another client. A coroutine function runs on the loop.
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

        # Not a thread of the loop's executor: it has few, other calls need them, and the program's end waits for them.
        threading.Thread(target=work, name="etha-on-commit", daemon=True).start()
        value, error = await ended
        if error is not None:
            raise error
        if inspect.isawaitable(value):
            await value

    return run
