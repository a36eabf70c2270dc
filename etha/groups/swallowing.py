"""Errors of collectives, swallowed: outputs get defined values, and calls are skipped until the next ``configure``.

A training loop whose backward pass must not raise asks for the error afterwards. Barriers, receives and object
collectives raise nevertheless, because a caller cannot see from their outputs that nothing came: a receiver would
unpickle garbage.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.futures import Future

from etha.errors import GroupError
from etha.groups.calls import GroupCall
from etha.groups.work import DummyWork, GroupWork

log = logging.getLogger(__name__)

_Work: Any = torch._C._distributed_c10d.Work
#: Methods whose errors are raised.
_RAISING = frozenset({"barrier", "recv", "recv_anysource"})
#: Functions of torch.distributed that pickle.
_OBJECTS = frozenset(
    {
        *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
        *("send_object_list", "recv_object_list"),
    }
)


class Swallower:
    """What a group that swallows errors remembers: the first error since the last ``configure``."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._seen_in_call = False

    def report(self, error: Exception, *, seen_in_call: bool = False) -> None:
        """Skip all further calls because of an error. Only the first error is kept."""
        if self.error is None:
            log.warning("calls are skipped until the group is configured again: %s", error)
            self.error, self._seen_in_call = error, seen_in_call

    def run(self, method: str, begin: Callable[[], Any], normal_form: Callable[[], GroupCall], rank: int) -> Any:
        """The work of a call: of the call itself, or of one that was skipped.

        Arguments that cannot be right still raise, because that is an error of the caller and not of the group.
        """
        if self.error is None:
            try:
                return SwallowingWork(self, method, begin(), normal_form, rank)
            except Exception as error:
                if type(error) is GroupError:
                    raise
                self.report(error, seen_in_call=True)
        if _must_raise(method) and not self._seen_in_call:
            return begin()  # the error was reported from elsewhere: the group itself knows whether it works
        call = normal_form()
        if _must_raise(method):
            failed = GroupWork(call)
            failed.finish(self.error)
            return failed
        call.fill_defaults(rank)
        return DummyWork(call.result())


class SwallowingWork(_Work):  # type: ignore[misc]
    """A call whose error is reported to its group instead of being raised."""

    def __init__(
        self, swallower: Swallower, method: str, work: Any, normal_form: Callable[[], GroupCall], rank: int
    ) -> None:
        super().__init__()
        self._swallower, self._method, self._work, self._rank = swallower, method, work, rank
        self._normal_form = normal_form

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end, well or not."""
        try:
            self._work.wait(timeout) if timeout else self._work.wait()
        except Exception as error:
            self._swallow(error)
        return True

    def get_future(self) -> Future[Any]:
        """A future that always has tensors; after an error the defined values."""

        def value(done: Future[Any]) -> Any:
            try:
                return done.value()
            except Exception as error:
                own = self._work.exception() if isinstance(self._work, GroupWork) else None
                return self._swallow(own if isinstance(own, Exception) else error).result()

        return self._work.get_future().then(value)  # type: ignore[no-any-return]

    def _swallow(self, error: Exception) -> GroupCall:
        self._swallower.report(error, seen_in_call=True)
        if _must_raise(self._method):
            raise error
        call = self._normal_form()
        call.fill_defaults(self._rank)
        return call

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> BaseException | None:
        found: BaseException | None = self._work.exception()
        return found

    def result(self) -> Any:
        return self._work.result()

    def synchronize(self) -> None:
        self.wait()


def _must_raise(method: str) -> bool:
    """Whether the caller could not see that the outputs are defaults. torch's object collectives are on the stack."""
    if method in _RAISING:
        return True
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in _OBJECTS and frame.f_globals.get("__name__") == "torch.distributed.distributed_c10d":
            return True
        frame = frame.f_back
    return False
