"""`ProcessGroupGloo`: a backend of torch in this process that can be configured again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, Literal

from etha.errors import GroupAbortedError, GroupError
from etha.groups.base import GroupConfig, ProcessGroup, Timeout
from etha.groups.calls import GroupCall
from etha.groups.inprocess.formation import AGAIN, Carrier, Formation
from etha.groups.inprocess.gloo import GlooCarrier
from etha.groups.inprocess.nccl import NCCLCarrier
from etha.groups.work import GroupWork


class InProcessGroup(ProcessGroup):
    """A group over a backend of torch in this process. Each ``configure`` makes a new backend.

    A backend that hangs cannot be stopped. The group gives it up: all waits end, and it finishes in the background.
    """

    def __init__(self, timeout: Timeout = 60.0, errors: Literal["raise", "swallow"] = "raise") -> None:
        super().__init__(timeout, errors)
        self._formation: Formation | None = None

    @abstractmethod
    def _carrier(self, store: Any, config: GroupConfig, timeout: timedelta) -> Carrier:
        """A new backend for one forming."""

    def _configure(self, config: GroupConfig) -> None:
        self._end("configure was called again")
        timeout = self._timeout
        formation = Formation(config, timeout, lambda store, config: self._carrier(store, config, timeout))
        self._formation = formation
        formation.start()

    def _issue(self, call: GroupCall) -> GroupWork:
        if self._formation is None:
            raise GroupError(f"{call.method}: the {type(self).__name__} is not configured: call configure first")
        call.timeout = call.timeout or self._timeout
        return self._formation.issue(call)

    def abort(self) -> None:
        """End all waits in this process at once. Other members see a lost member or their timeout."""
        if self._formation is not None:
            self._formation.fail(GroupAbortedError(f"abort() was called; {AGAIN}"))

    def shutdown(self) -> None:
        """Leave the group. An idle backend is freed at once, one that is busy when it has finished."""
        self._end("shutdown() was called")

    def _end(self, why: str) -> None:
        if self._formation is not None:
            self._formation.fail(GroupAbortedError(f"{why}; {AGAIN}"))
            self._formation.settle()

    def errored(self) -> Exception | None:
        """The first error since the last ``configure``."""
        swallowed = self.error()
        return swallowed if swallowed or self._formation is None else self._formation.error

    @staticmethod
    def num_abandoned() -> int:
        """Backends in this process that were given up and have not finished."""
        return len(Formation.abandoned)


class ProcessGroupGloo(InProcessGroup):
    """torch's Gloo in this process, for CPU tensors.

    Differs from Gloo alone: a mismatch of the members' calls raises `GroupMismatchError` on all of them, tensors may
    have any strides, all reductions and reduce_scatter work, and a call that was given up writes into no tensor.
    """

    _compares: ClassVar[bool] = True

    def _carrier(self, store: Any, config: GroupConfig, timeout: timedelta) -> Carrier:
        return GlooCarrier(store, config, timeout)

    def getBackendName(self) -> str:
        return "etha-gloo"


def carrier_of(name: str) -> Callable[[Any, GroupConfig, timedelta], Carrier]:
    """What makes the backend of a class of this file, for a process that hosts it."""
    carriers: dict[str, Callable[[Any, GroupConfig, timedelta], Carrier]] = {
        "ProcessGroupGloo": GlooCarrier,
        "ProcessGroupNCCL": NCCLCarrier,
    }
    if name not in carriers:
        raise GroupError(f"{name} is no group over a backend of torch")
    return carriers[name]
