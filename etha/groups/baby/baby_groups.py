"""`ProcessGroupBabyGloo`: a backend of torch in a child process, which is killed after a fault."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from etha.cuda.select import driver
from etha.errors import GroupAbortedError, GroupError
from etha.groups.baby.child_link import BabyWork, ChildLink
from etha.groups.baby.device_memory import OfferedMemory
from etha.groups.baby.nursery import prepare
from etha.groups.base import GroupConfig, ProcessGroup, Timeout
from etha.groups.calls import GroupCall
from etha.groups.inprocess.formation import AGAIN
from etha.groups.inprocess.nccl import ProcessGroupNCCL, require_nccl
from etha.groups.inprocess.torch_groups import ProcessGroupGloo


class _ClosedError(GroupAbortedError, OSError):
    """A call after ``shutdown``. torchft's baby groups raise OSError then."""


class ProcessGroupBaby(ProcessGroup):
    """A group whose backend runs in a child process. Each ``configure`` has a new child.

    ``PG_CLASS`` is the group whose backend the child uses, ``WORK_CLASS`` what calls return. When anything goes wrong,
    the child is killed and gone before the error is returned, so nothing writes into tensors afterwards, and a backend
    that hangs or crashes costs the trainer nothing.
    """

    PG_CLASS: ClassVar[type[ProcessGroup]]
    WORK_CLASS: ClassVar[type[BabyWork]] = BabyWork

    def __init__(self, timeout: Timeout = 60.0, errors: Literal["raise", "swallow"] = "raise") -> None:
        super().__init__(timeout, errors)
        self._link: ChildLink | None = None
        self._closed: GroupAbortedError | None = None
        prepare()

    def _configure(self, config: GroupConfig) -> None:
        self._end("configure was called again")
        self._closed = None
        self._link = ChildLink(self.PG_CLASS.__name__, config, self._timeout, self.WORK_CLASS, self._offered())
        self._link.start()

    def _offered(self) -> OfferedMemory | None:
        """How the child reaches tensors that are not the CPU's."""
        return None

    def _issue(self, call: GroupCall) -> BabyWork:
        if self._link is None:
            raise GroupError(f"{call.method}: the {type(self).__name__} is not configured: call configure first")
        seconds = (call.timeout or self._timeout).total_seconds()
        if self._closed is None:
            return self._link.issue(call, seconds)
        work = self.WORK_CLASS(call, self._link, seconds)
        work.finish(self._closed)
        return work

    def abort(self) -> None:
        """Kill the child. Waits in this process end at once; other members see a lost member."""
        if self._link is not None:
            self._link.fail(GroupAbortedError(f"abort() was called; {AGAIN}"))

    def shutdown(self) -> None:
        """End the child. Calls fail until the next ``configure``."""
        self._end("shutdown() was called")
        if self._link is not None:
            self._closed = _ClosedError(f"the group was shut down: its handle is closed; {AGAIN}")

    def _end(self, why: str) -> None:
        if self._link is not None:
            self._link.fail(GroupAbortedError(f"{why}; {AGAIN}"))

    def errored(self) -> Exception | None:
        """The first error since the last ``configure``."""
        swallowed = self.error()
        return swallowed if swallowed or self._link is None else self._link.error

    def num_active_work(self) -> int:
        """Calls that have not ended."""
        return 0 if self._link is None else self._link.num_active_work()

    def child_pid(self) -> int:
        """The child's process id; 0 without a child."""
        return 0 if self._link is None or self._link.error is not None else self._link.pid


class ProcessGroupBabyGloo(ProcessGroupBaby):
    """torch's Gloo in a child process, for CPU tensors."""

    PG_CLASS: ClassVar[Any] = ProcessGroupGloo
    _compares: ClassVar[bool] = True

    def getBackendName(self) -> str:
        return "etha-baby-gloo"


class ProcessGroupBabyNCCL(ProcessGroupBaby):
    """torch's NCCL in a child process, for contiguous CUDA tensors of the GPU that is current at ``configure``.

    The child opens the tensors' memory by CUDA IPC. A call begins when the current stream has come to it, and ``wait``
    returns when it is done on the device; it blocks the thread.
    """

    PG_CLASS: ClassVar[Any] = ProcessGroupNCCL
    DEVICES: ClassVar[tuple[str, ...]] = ("cuda",)

    def _configure(self, config: GroupConfig) -> None:
        require_nccl()
        super()._configure(config)

    def _offered(self) -> OfferedMemory:
        return OfferedMemory(driver())

    def getBackendName(self) -> str:
        return "etha-baby-nccl"
