"""Groups around another group: all calls handed on, errors swallowed, or faults injected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.futures import Future

from etha.errors import GroupError
from etha.groups.base import GroupConfig, ProcessGroup, Timeout, as_timedelta
from etha.groups.calls import ALIASES
from etha.groups.store_client import create_store_client

_Work: Any = torch._C._distributed_c10d.Work
#: Methods by the name that torch's other releases have for them.
_OTHER_NAME = {**ALIASES, **{new: old for old, new in ALIASES.items()}}


class ProcessGroupWrapper(ProcessGroup):
    """Hands all calls on to another group, ``parent``: one of `etha.groups`, or a group or backend of torch itself.

    Without ``pg``, ``configure`` makes the group by ``_create_pg(store, rank, world_size)``, which subclasses define.
    """

    DEVICES = ()

    def __init__(
        self,
        timeout: Timeout = 60.0,
        pg: Any = None,
        errors: Literal["raise", "swallow"] = "raise",
    ) -> None:
        super().__init__(timeout, errors)
        self._pg = pg
        self._made = pg is None

    @property
    def parent(self) -> Any:
        """The wrapped group."""
        if self._pg is None:
            raise GroupError(f"the {type(self).__name__} is not configured: call configure first")
        return self._pg

    def _configure(self, config: GroupConfig) -> None:
        if not self._made and hasattr(self._pg, "configure"):
            ranks = None if config.global_ranks is None else list(config.global_ranks)
            place = (config.quorum_id, config.group_rank, config.group_world_size, ranks)
            self._pg.configure(config.store, config.replica_id, config.rank, config.world_size, *place)
            return
        if not self._made:
            raise GroupError(f"a {type(self._pg).__name__} of torch cannot be configured again")
        if self._pg is not None:
            self.abort()
        store = config.store if not isinstance(config.store, str) else create_store_client(config.store, self._timeout)
        self._pg = self._create_pg(store, config.rank, config.world_size)

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        raise GroupError(f"{type(self).__name__} wraps a group: give it one")

    def _begin(self, method: str, args: tuple[Any, ...]) -> Any:
        return self._hand_on(method, args)

    def _hand_on(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call the parent's method, by its other name where the parent has an older or newer interface."""
        parent = self.parent
        found = getattr(parent, method, None) or getattr(parent, _OTHER_NAME.get(method, method), None)
        if found is None:
            raise GroupError(f"{type(parent).__name__} has no {method}")
        return found(*args)

    def abort(self) -> None:
        """Abort the parent."""
        if self._pg is not None and hasattr(self._pg, "abort"):
            self._pg.abort()
        if self._made:
            self._pg = None

    def shutdown(self) -> None:
        """Shut the parent down."""
        if self._pg is not None and hasattr(self._pg, "shutdown"):
            self._pg.shutdown()
        if self._made:
            self._pg = None

    def errored(self) -> Exception | None:
        """The first error since the last ``configure``: a swallowed one, or the parent's."""
        found = self.error()
        if found is None and hasattr(self._pg, "errored"):
            found = self._pg.errored()
        return found

    def set_timeout(self, timeout: Timeout) -> None:
        """For this group and its parent."""
        super().set_timeout(timeout)
        if hasattr(self._pg, "configure"):
            self._pg.set_timeout(as_timedelta(timeout))

    def size(self) -> int:
        return super().size() if self._pg is None else int(self._pg.size())

    def rank(self) -> int:
        return super().rank() if self._pg is None else int(self._pg.rank())

    def getBackendName(self) -> str:
        name = getattr(self._pg, "getBackendName", None) or getattr(self._pg, "name", None)
        return name() if name is not None else super().getBackendName()

    @property
    def _device_types(self) -> list[torch.device]:
        return list(getattr(self._pg, "_device_types", ()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(pg={self._pg!r})"


class ErrorSwallowingProcessGroupWrapper(ProcessGroupWrapper):
    """Swallows the errors of all collectives of a group until the next ``configure``.

    A collective that fails, and each one after it, gives defined outputs: a reduction leaves its input, a gather has
    the own piece and zeros. Barriers, receives and object collectives raise. ``error()`` is the first error.
    """

    def __init__(self, pg: Any) -> None:
        super().__init__(pg=pg, errors="swallow")


@dataclass(slots=True, kw_only=True, eq=False)
class _Fault:
    """An error that is to come: in the call or its work, of one method or any, after so many calls of it."""

    error: Exception
    method: str | None
    when: Literal["call", "work"]
    after: int


class FakeProcessGroupWrapper(ProcessGroupWrapper):
    """Injects faults into the calls of a group, for tests of what handles them."""

    def __init__(self, pg: Any) -> None:
        super().__init__(pg=pg)
        self._faults: list[_Fault] = []

    def report_future_error(self, e: Exception) -> None:
        """Let the next call's ``wait`` and future raise ``e``, once."""
        self.inject(e)

    def inject(
        self, error: Exception, *, method: str | None = None, when: Literal["call", "work"] = "work", after: int = 0
    ) -> None:
        """Let a call raise an error, once: the next one, or that after ``after`` more; of any method, or of one.

        ``when``: "call": the call itself raises; "work": its ``wait`` and its future do, after the parent's have ended.
        """
        self._faults.append(_Fault(error=error, method=method, when=when, after=after))

    def _configure(self, config: GroupConfig) -> None:
        self._faults.clear()
        super()._configure(config)

    def _begin(self, method: str, args: tuple[Any, ...]) -> Any:
        fault = self._due(method)
        if fault is not None and fault.when == "call":
            raise fault.error
        work = self._hand_on(method, args)
        return work if fault is None else _FailingWork(work, fault.error)

    def _due(self, method: str) -> _Fault | None:
        for fault in self._faults:
            if fault.method in (None, method):
                if not fault.after:
                    self._faults.remove(fault)
                    return fault
                fault.after -= 1
        return None


class _FailingWork(_Work):  # type: ignore[misc]
    """A work that raises an error once the parent's has ended."""

    def __init__(self, work: Any, error: Exception) -> None:
        super().__init__()
        self._work, self._error = work, error

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait(timeout) if timeout else self._work.wait()
        raise self._error

    def get_future(self) -> Future[Any]:
        def fail(_: Future[Any]) -> Any:
            raise self._error

        future: Callable[..., Any] = self._work.get_future
        return future().then(fail)  # type: ignore[no-any-return]
