"""What a call to a process group returns: the caller waits for it, or takes its future.

Of a Python ``Work``, torch's C++ code sees ``wait`` and ``get_future`` only. An error must not be set by
``Future.set_exception``, because DDP's reducer takes that for a value and crashes. For it, a callback that raises is an
error.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from etha.errors import GroupTimeoutError
from etha.groups.calls import GroupCall
from etha.interruptible import Latch

_Work: Any = torch._C._distributed_c10d.Work


class GroupWork(_Work):  # type: ignore[misc]
    """One call that runs or has ended. Whoever carries it out calls ``finish`` once, from any thread.

    ``run``: carries the call out on the thread that waits, if nobody has begun with it. It gets the timeout of the wait
    and returns when it has called ``finish``, when the timeout has passed, or when somebody else carries the call out.
    Subclasses may override ``expire`` and ``interrupt``.
    """

    def __init__(self, call: GroupCall, run: Callable[[timedelta | None], None] | None = None) -> None:
        super().__init__()
        self.call = call
        self._run = run
        self._lock = threading.Lock()
        self._done = False
        self._error: BaseException | None = None
        self._gate = Latch()
        self._root: Future[None] | None = None
        self._future: Future[Any] | None = None
        self._callbacks: list[Callable[[], None]] = []

    def finish(self, error: BaseException | None = None) -> None:
        """End the call. Only the first call of this counts."""
        self.end(error)()

    def end(self, error: BaseException | None = None) -> Callable[[], None]:
        """End the call without its callbacks, a user's code: call what this returns where they harm nobody."""
        with self._lock:
            if self._done:
                return lambda: None
            self._error, self._done, self._run = error, True, None
            root, callbacks = self._root, self._callbacks
            self._root, self._callbacks = None, []
        self._gate.open()

        def tell() -> None:
            if root is not None:
                root.set_result(None)
            for callback in callbacks:
                callback()

        return tell

    def on_finished(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the call has ended, on the thread that ends it; at once if it has."""
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end; raise the call's error. timedelta(0) and None: no timeout but the call's own."""
        if not self._done:
            try:
                self._wait_for_end(timeout)
            except KeyboardInterrupt:
                self.interrupt()
                raise
        if self._error is not None:
            raise self._error.with_traceback(None)
        return True

    def _wait_for_end(self, timeout: timedelta | None) -> None:
        until = time.monotonic() + timeout.total_seconds() if timeout else None
        run = self._run
        if run is not None:
            run(timeout or None)
        if not self._gate.wait(until):
            self.expire(timeout or timedelta(0))

    def expire(self, timeout: timedelta) -> None:
        """The timeout of a ``wait`` has passed: end the call, because nobody will wait for it again."""
        seconds = timeout.total_seconds()
        self.finish(GroupTimeoutError(f"{self.call.describe()} timed out after {seconds:g} seconds of wait()"))

    def interrupt(self) -> None:
        """Ctrl-C has interrupted a ``wait``."""

    def get_future(self) -> Future[Any]:
        """A future with the call's tensors. Its error is a RuntimeError with the text of the call's."""
        with self._lock:
            if self._future is None:
                root: Future[None] = Future()
                self._future = root.then(self._value)
                self._root = None if self._done else root
                done = self._done
            else:
                done = False
        if done:
            root.set_result(None)
        return self._future

    def _value(self, _: Future[None]) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self.call.result()

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        """The call's tensors, once it has ended."""
        self.wait()
        return self.call.result()

    def synchronize(self) -> None:
        self.wait()

    def _source_rank(self) -> int:
        """Who sent what a ``recv_anysource`` received."""
        return self.call.root


class DummyWork(_Work):  # type: ignore[misc]
    """A call that has ended well before it was returned, because it was skipped or had nothing to do."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        """A future that holds the tensors as they are."""
        future: Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> Any:
        return self._result

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


class JoinedWork(_Work):  # type: ignore[misc]
    """Several calls that were made between ``_start_coalescing`` and ``_end_coalescing``."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = tuple(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait() if not timeout else work.wait(timeout)
        return True

    def get_future(self) -> Future[Any]:
        """A future with the tensors of all calls."""
        joined = torch.futures.collect_all([work.get_future() for work in self._works])
        return joined.then(lambda all_: [tensor for each in all_.value() for tensor in each.value()])

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)
