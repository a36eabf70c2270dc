"""A process group over the one that a Manager of torchft configures. Etha does not import torchft."""

from __future__ import annotations

from typing import Any

from torch.distributed import ReduceOp

from etha.groups.swallowing import Swallower
from etha.groups.work import JoinedWork
from etha.groups.wrappers import ProcessGroupWrapper


def is_torchft_manager(found: Any) -> bool:
    """Whether it has what torchft's ManagedProcessGroup uses of a Manager."""
    return all(hasattr(found, name) for name in ("_pg", "allreduce", "num_participants", "errored", "report_error"))


class TorchftManagedGroup(ProcessGroupWrapper):
    """Allreduces go through the manager, other calls to its group; ``size()`` is the number of participants.

    Errors are reported to the manager, and calls are skipped until it has configured its group again.
    """

    def __init__(self, manager: Any) -> None:
        super().__init__(pg=manager._pg, errors="swallow")
        self._manager = manager
        self._swallower = _Reporter(manager)

    def _begin(self, method: str, args: tuple[Any, ...]) -> Any:
        if method != "allreduce":
            return self._hand_on(method, args)
        tensors, *more = args
        op = getattr(more[0], "reduceOp", more[0]) if more else ReduceOp.SUM
        works = [self._manager.allreduce(tensor, reduce_op=op) for tensor in tensors]
        return works[0] if len(works) == 1 else JoinedWork(works)

    def size(self) -> int:
        return int(self._manager.num_participants())


class _Reporter(Swallower):
    """Keeps the first error in the manager, which takes it back when it configures its group."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        super().__init__()

    @property
    def error(self) -> Exception | None:
        """The manager's error."""
        found = self._manager.errored()
        error: Exception | None = getattr(found, "original_exception", found)
        return error

    @error.setter
    def error(self, error: Exception | None) -> None:
        if error is not None:
            self._manager.report_error(error)
