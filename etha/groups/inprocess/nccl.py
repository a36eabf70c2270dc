"""`ProcessGroupNCCL`: torch's NCCL in this process, which can be configured again.

NCCL works in the caller's tensors, in the order of CUDA streams, and ``wait`` makes the current stream wait. A
communicator is aborted as soon as a call fails, which also ends its kernels. Before each collective the members compare
it through their store, because NCCL would hang; so a collective begins when all members have made it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.futures import Future

from etha.errors import EthaError, GroupAbortedError, GroupError, GroupLostError, GroupTimeoutError
from etha.groups.base import GroupConfig, ProcessGroup
from etha.groups.calls import GroupCall, refusal
from etha.groups.inprocess.comparison import StoreComparison
from etha.groups.inprocess.formation import AGAIN, options_of, remaining
from etha.groups.schedule import POINT_TO_POINT, Kind
from etha.groups.store_client import create_store_client
from etha.groups.work import GroupWork

_c10d: Any = torch._C._distributed_c10d
_Work: Any = _c10d.Work


def require_nccl() -> None:
    """GroupError if this torch has no NCCL."""
    if not hasattr(_c10d, "ProcessGroupNCCL"):
        raise GroupError("this torch has no NCCL: install one for CUDA, or use ProcessGroupGloo")


def _new_backend(store: Any, config: GroupConfig, timeout: timedelta) -> Any:
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return _c10d.ProcessGroupNCCL(store, config.rank, config.world_size, options)


class NCCLCarrier:
    """torch's NCCL of one forming, for a process that may be killed: each call is waited for before the next begins."""

    owned = True

    def __init__(self, store: Any, config: GroupConfig, timeout: timedelta) -> None:
        self._size = config.world_size
        self._comparison = StoreComparison(store, config.rank, config.world_size)
        self._backend = _new_backend(store, config, timeout)

    def carry(self, call: GroupCall, deadline: float) -> Callable[[], None]:
        """See `formation.Carrier`. The outputs are written when this returns, as far as the host can tell."""
        if call.kind not in POINT_TO_POINT:
            self._comparison.compare(call, remaining(deadline).total_seconds())
        for work in self._begin(call, deadline):
            work.wait(remaining(deadline))
        return lambda: None

    def _begin(self, call: GroupCall, deadline: float) -> list[Any]:
        backend, n, inputs, outputs = self._backend, self._size, call.inputs, call.outputs

        def options(kind: str, **fields: Any) -> Any:
            return options_of(getattr(_c10d, f"{kind}Options"), deadline, **fields)

        op = _c10d._make_nccl_premul_sum(call.factor) if call.factor is not None else call.op
        match call.kind:
            case Kind.ALLREDUCE:
                return [backend.allreduce([tensor], options("Allreduce", reduceOp=op)) for tensor in inputs]
            case Kind.REDUCE:
                opts = options("Reduce", reduceOp=op, rootRank=call.root)
                return [backend.reduce([tensor], opts) for tensor in inputs]
            case Kind.BROADCAST:
                return [backend.broadcast([tensor], options("Broadcast", rootRank=call.root)) for tensor in inputs]
            case Kind.ALLGATHER:
                opts = options("Allgather")
                return [backend.allgather([outputs[i * n : i * n + n]], [t], opts) for i, t in enumerate(inputs)]
            case Kind.REDUCE_SCATTER:
                opts = options("ReduceScatter", reduceOp=op)
                return [backend.reduce_scatter([t], [inputs[i * n : i * n + n]], opts) for i, t in enumerate(outputs)]
            case Kind.ALLTOALL:
                return [backend.alltoall(outputs, inputs, options("AllToAll"))]
            case Kind.GATHER:
                return [backend.gather([outputs] if outputs else [], inputs, options("Gather", rootRank=call.root))]
            case Kind.SCATTER:
                return [backend.scatter(outputs, [inputs] if inputs else [], options("Scatter", rootRank=call.root))]
            case Kind.SEND:
                return [backend.send([tensor], call.root, call.tag) for tensor in inputs]
            case Kind.RECV:
                return [backend.recv([tensor], call.root, call.tag) for tensor in outputs]
            case Kind.BARRIER:
                return [backend.barrier(options("Barrier"))]
            case _:
                raise GroupError(f"NCCL has no {call.method}: name the rank that is received from")


class ProcessGroupNCCL(ProcessGroup):
    """torch's NCCL in this process, for CUDA tensors. Needs a torch that has NCCL."""

    DEVICES: ClassVar[tuple[str, ...]] = ("cuda",)
    _backend: Any = None
    _failure: Exception | None = None
    _epoch: int | None = None
    _comparison: StoreComparison

    def _configure(self, config: GroupConfig) -> None:
        self._abort("configure was called again")
        require_nccl()
        store = config.store if not isinstance(config.store, str) else create_store_client(config.store, self._timeout)
        self._failure, self._epoch = None, config.quorum_id
        self._comparison = StoreComparison(store, config.rank, config.world_size)
        try:
            self._backend = _new_backend(store, config, self._timeout)
        except RuntimeError as error:
            raise self._translated(error, "configure") from error

    def _say_refusal(self, method: str, error: GroupError) -> None:
        """See the base class. Compared here and now: the others come to this call at once, or the group is over."""
        call = refusal(method, str(error)) if self.size() > 1 and self._backend is not None else None
        if call is not None and self._failure is None:
            self._compare(call)

    def _begin(self, method: str, args: tuple[Any, ...]) -> Any:
        try:
            call = self._normal_form(method, args)
        except GroupError as error:
            self._say_refusal(method, error)
            raise
        backend = self._backend
        if backend is None and self._failure is None:
            raise GroupError(f"{method}: the {type(self).__name__} is not configured: call configure first")
        if self._failure is None and call.kind not in POINT_TO_POINT:
            self._compare(call)
        if self._failure is None:
            try:
                return _StreamWork(self, getattr(backend, method)(*args), call.describe())
            except RuntimeError as error:
                self._fail(self._translated(error, call.describe()))
        failed = GroupWork(call)
        failed.finish(self._failure)
        return failed

    def _compare(self, call: GroupCall) -> None:
        try:
            self._comparison.compare(call, (call.timeout or self._timeout).total_seconds())
        except EthaError as error:
            self._fail(error)
        except RuntimeError as error:
            self._fail(self._translated(error, call.describe()))

    def _translated(self, error: RuntimeError, what: str) -> GroupError:
        reason = " ".join(str(error).split("\n", maxsplit=1)[0].split())
        if "imeout" in reason or "imed out" in reason:
            seconds = self._timeout.total_seconds()
            return GroupTimeoutError(f"{what} timed out after {seconds:g} seconds ({reason}); {AGAIN}")
        return GroupLostError(f"{what} failed: {reason}; {AGAIN}", reason=reason, epoch=self._epoch)

    def _fail(self, error: Exception) -> None:
        """Abort the communicator; only the first error is kept."""
        if self._failure is None:
            self._failure = error
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort()

    def _abort(self, why: str) -> None:
        if self._backend is not None:
            self._fail(GroupAbortedError(f"{why}; {AGAIN}"))

    def abort(self) -> None:
        """Abort the communicator, and with it all kernels that wait."""
        self._abort("abort() was called")

    def shutdown(self) -> None:
        """Abort the communicator. Calls fail until the next ``configure``."""
        self._abort("shutdown() was called")

    def errored(self) -> Exception | None:
        """The first error since the last ``configure``."""
        return self.error() or self._failure

    def getBackendName(self) -> str:
        return "etha-nccl"


class _StreamWork(_Work):  # type: ignore[misc]
    """A call of NCCL, whose errors abort the group."""

    def __init__(self, group: ProcessGroupNCCL, work: Any, what: str) -> None:
        super().__init__()
        self._group, self._work, self._what = group, work, what

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream wait for the call; with a timeout, this thread waits."""
        group = self._group
        try:
            self._work.wait(timeout) if timeout else self._work.wait()
        except RuntimeError as error:
            group._fail(group._translated(error, self._what))
        if group._failure is not None:
            raise group._failure.with_traceback(None)
        return True

    def get_future(self) -> Future[Any]:
        """The future of NCCL's work, with its streams."""
        future: Future[Any] = self._work.get_future()
        return future

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def synchronize(self) -> None:
        self.wait()
