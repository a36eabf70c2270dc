"""`ManagedProcessGroup`: a process group that follows the epochs of a `Members`, and whose errors a vote answers."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.futures import Future

from etha.errors import GroupError, GroupMismatchError
from etha.groups.base import GroupConfig, Timeout, as_timedelta
from etha.groups.calls import FLOAT8, GroupCall
from etha.groups.plain_ddp import plain_ddp_hint
from etha.groups.schedule import Kind
from etha.groups.torchft_manager import TorchftManagedGroup, is_torchft_manager
from etha.groups.work import DummyWork, JoinedWork
from etha.groups.wrappers import ProcessGroupWrapper

log = logging.getLogger(__name__)

_OP: Any = ReduceOp.RedOpType
_Work: Any = torch._C._distributed_c10d.Work
#: via -> the class in etha.groups of the group that carries the calls out.
_CARRIERS = {
    "etha": "ProcessGroupEtha",
    "gloo": "ProcessGroupGloo",
    "nccl": "ProcessGroupNCCL",
    "baby-gloo": "ProcessGroupBabyGloo",
    "baby-nccl": "ProcessGroupBabyNCCL",
}
#: While a member is behind, these are averaged in int64, and the others reduced in float32.
_SHORT = {torch.uint8, torch.int8, torch.int16, torch.int32}
_NARROW = FLOAT8 | {torch.float16, torch.bfloat16}
#: Works that a group remembers until its step ends; completed ones are dropped beyond that.
_MOST_WORKS = 256


class ManagedProcessGroup(ProcessGroupWrapper):
    """The replicas of a `Members` as a process group: formed by ``members.begin()``, which alone configures it.

    ``size()`` and ``rank()`` are those of the epoch, and 1 and 0 before the first one: then each call is that of a
    group of one. Errors are swallowed (see `ErrorSwallowingProcessGroupWrapper`), and the step's ``commit()`` returns
    False. ``via`` names what carries the calls out: "etha", "gloo", "nccl", "baby-gloo", "baby-nccl", or is a function
    that makes such a group from a timeout.

    A member that is still behind is not counted: it receives the results that the last member that counts receives, and
    contributes nothing. Its ``rank()`` is that member's. It keeps its own piece of an all-to-all, and receives no
    messages.

    Given a torchft ``Manager`` instead of members, it is a group over the manager's own, as torchft's.
    """

    def __new__(cls, members: Any, *args: Any, **kwargs: Any) -> Any:
        """A group of another class if ``members`` is a Manager of torchft."""
        return TorchftManagedGroup(members) if is_torchft_manager(members) else super().__new__(cls)

    def __init__(
        self, members: Any, via: str | Callable[[float], Any] = "etha", *, timeout: Timeout | None = None
    ) -> None:
        if not hasattr(members, "manage"):
            raise GroupError(f"ManagedProcessGroup({members!r}): Members, or a Manager of torchft, are needed")
        seconds = as_timedelta(members.timeout if timeout is None else timeout).total_seconds()
        super().__init__(seconds, pg=carrier(via)(seconds), errors="swallow")
        self._members, self._formed = members, False
        self._true_rank, self._true_size, self._count = 0, 1, 1
        self._works: list[Any] = []
        self._explained: Exception | None = None
        members.manage(self)

    # ---- for Members ---------------------------------------------------------------------------

    def enter_epoch(self, store: Any, replica: str, rank: int, members: int, epoch: int) -> None:
        """Form the group of an epoch. All its members count until ``set_participants`` says otherwise."""
        self._works.clear()
        self._formed = False
        self._pg.configure(store, replica, rank, members, epoch)
        assert self._swallower is not None
        self._swallower.error = None
        self._true_rank, self._true_size, self._formed = rank, members, True
        self.set_participants(members)

    def set_participants(self, count: int) -> None:
        """The first ``count`` members of the epoch count in the next step."""
        self._count = count
        self._set_members(min(self._true_rank, count - 1), count)

    def break_off(self) -> None:
        """A member has left or died: end the calls of a group that does not notice by itself, and a forming."""
        if not self._formed or self._pg.getBackendName() != "etha":
            threading.Thread(target=self._pg.abort, name="etha-group-abort", daemon=True).start()

    def step_error(self) -> Exception | None:
        """The first error since the epoch was formed. Waits for calls that still run."""
        works, self._works = self._works, []
        for work in works:
            if not work.is_completed():
                try:
                    work.wait()
                except Exception as error:
                    self.report_error(error)
        first = self.errored()
        if isinstance(first, GroupMismatchError) and first is not self._explained:
            self._explained = first
            if hint := plain_ddp_hint(self):
                log.warning("%s", hint)
        return first

    # ---- calls -------------------------------------------------------------------------------

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Refused: the group is configured by ``members.begin()``."""
        raise GroupError("a ManagedProcessGroup is configured by members.begin()")

    @property
    def supports_reconfigure(self) -> bool:
        """False: the membership forms the group."""
        return False

    def _configure(self, config: GroupConfig) -> None:
        raise GroupError("a ManagedProcessGroup is configured by members.begin()")

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return "etha"

    def _begin(self, method: str, args: tuple[Any, ...]) -> Any:
        if not self._formed:
            call = self._normal_form(method, args)
            call.fill_defaults(0)
            return DummyWork(call.result())
        work = self._hand_on(method, args) if self._count == self._true_size else self._around(method, args)
        if len(self._works) >= _MOST_WORKS:
            self._works = [one for one in self._works if not one.is_completed()]
        self._works.append(work)
        return work

    def _around(self, method: str, args: tuple[Any, ...]) -> Any:
        """A call while some members are behind: these contribute what changes nothing."""
        try:
            call = self._normal_form(method, args)
        except GroupError as error:
            self._pg._say_refusal(method, error)
            raise
        watches = self._true_rank >= self._count
        match call.kind:
            case Kind.BROADCAST | Kind.BARRIER:
                return self._hand_on(method, args)
            case Kind.ALLREDUCE | Kind.REDUCE:
                if watches:
                    for tensor in call.inputs:
                        tensor.fill_(_neutral(call.op, tensor.dtype))
                return self._reduce(call)
            case Kind.ALLGATHER:
                return self._gather(call)
            case Kind.REDUCE_SCATTER:
                return self._reduce_scatter(call, watches)
            case Kind.GATHER:
                return self._gather_to_root(call)
            case Kind.SCATTER:
                return self._scatter(call)
            case Kind.ALLTOALL:
                return self._exchange(call, watches)
            case _ if not watches:
                return self._hand_on(method, args)  # a message between two members that count
            case Kind.SEND:
                return DummyWork(call.result())  # the member whose rank this one has sends it
            case _:
                raise GroupMismatchError(f"{call.describe()}: a member that is behind receives no messages")

    def _reduce(self, call: GroupCall) -> Any:
        wider: torch.dtype | None = None
        if any(tensor.dtype in _NARROW for tensor in call.inputs):  # so that the result is rounded once
            wider = torch.float32
        elif call.op == _OP.AVG and any(tensor.dtype in _SHORT for tensor in call.inputs):  # nor may the sum wrap
            wider = torch.int64
        if wider is not None:
            wide = [tensor.to(wider) for tensor in call.inputs]
            whole = GroupCall(kind=call.kind, method=call.method, inputs=wide, outputs=wide, op=call.op)
            whole.factor, whole.returned = call.factor, call.returned
            return _Copied(self._reduce(whole), call, list(zip(call.outputs, wide, strict=True)))
        divisor = self._count if call.op == _OP.AVG else 1
        opts = torch.distributed.AllreduceOptions()
        opts.reduceOp = ReduceOp(_OP.SUM if call.op in (_OP.AVG, _OP.PREMUL_SUM) else call.op)
        if call.op == _OP.PREMUL_SUM and call.factor is not None:
            for tensor in call.inputs:
                tensor.mul_(call.factor)
        works = [self._pg.allreduce([tensor], opts) for tensor in call.inputs]
        return _Divided(JoinedWork(works), call, divisor)

    def _gather(self, call: GroupCall) -> Any:
        n, works = self._count, []
        for number, given in enumerate(call.inputs):
            own = call.outputs[number * n : (number + 1) * n]
            unused = [torch.empty_like(given) for _ in range(self._true_size - n)]
            works.append(self._pg.allgather([[*own, *unused]], [given]))
        return _Divided(JoinedWork(works), call, 1)

    def _reduce_scatter(self, call: GroupCall, watches: bool) -> Any:
        """By reducing all pieces to all, because those that do not count have no piece of their own."""
        pieces = [torch.full_like(t, _neutral(call.op, t.dtype)) if watches else t.clone() for t in call.inputs]
        n, whole = self._count, GroupCall(kind=Kind.ALLREDUCE, method=call.method, inputs=pieces, outputs=pieces)
        whole.op, whole.factor, whole.returned = call.op, call.factor, call.returned
        own = list(zip(call.outputs, pieces[self.rank() :: n], strict=True))
        return _Copied(self._reduce(whole), call, own)

    def _gather_to_root(self, call: GroupCall) -> Any:
        [given] = call.inputs
        found = [torch.empty_like(given) for _ in range(self._true_size)]
        work = self._pg.allgather([found], [given.contiguous()])
        return _Copied(work, call, list(zip(call.outputs, found, strict=False)))

    def _scatter(self, call: GroupCall) -> Any:
        """By a broadcast of all pieces."""
        [own] = call.outputs
        root = self._true_rank == call.root
        pieces = [t.clone() for t in call.inputs] if root else [torch.empty_like(own) for _ in range(self._count)]
        works = [self._pg.broadcast_one(piece, call.root) for piece in pieces]
        return _Copied(JoinedWork(works), call, [(own, pieces[self.rank()])])

    def _exchange(self, call: GroupCall, watches: bool) -> Any:
        """An all-to-all in which nothing goes to or comes from those that are behind; they keep their own piece."""
        none = [call.inputs[0].new_empty(0)] * (self._true_size - self._count)
        inputs, outputs = call.inputs, call.outputs
        if watches:
            none = [call.inputs[0].new_empty(0)] * self._true_size
            call.fill_defaults(self.rank())
            inputs, outputs = [], []
        opts = torch.distributed.AllToAllOptions()
        return _Copied(self._pg.alltoall([*outputs, *none], [*inputs, *none], opts), call, [])


class _Divided(_Work):  # type: ignore[misc]
    """A work whose results are divided at its end, and whose future has the tensors of the call."""

    def __init__(self, work: Any, call: GroupCall, divisor: int) -> None:
        super().__init__()
        self._work, self._call, self._divisor = work, call, divisor
        self._lock, self._divided = threading.Lock(), divisor == 1

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait(timeout) if timeout else self._work.wait()
        self._divide()
        return True

    def get_future(self) -> Future[Any]:
        """A future that holds the call's tensors."""

        def value(done: Future[Any]) -> list[Tensor]:
            done.value()
            self._divide()
            return self._call.result()

        return self._work.get_future().then(value)  # type: ignore[no-any-return]

    def _divide(self) -> None:
        with self._lock:
            if not self._divided:
                self._divided = True
                with torch.no_grad():
                    for tensor in self._call.outputs:
                        tensor.div_(self._divisor, rounding_mode=None if tensor.is_floating_point() else "trunc")

    def is_completed(self) -> bool:
        if not self._work.is_completed():
            return False
        self._divide()
        return True

    def is_success(self) -> bool:
        return self.is_completed()

    def exception(self) -> BaseException | None:
        return None

    def result(self) -> list[Tensor]:
        self.wait()
        return self._call.result()

    def synchronize(self) -> None:
        self.wait()


class _Copied(_Divided):
    """A work whose results are copied into the call's tensors at its end."""

    def __init__(self, work: Any, call: GroupCall, pairs: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(work, call, 1)
        self._pairs, self._divided = pairs, False

    def _divide(self) -> None:
        with self._lock:
            if not self._divided:
                self._divided = True
                with torch.no_grad():
                    for output, piece in self._pairs:
                        output.copy_(piece.view(output.shape))


def _neutral(op: Any, dtype: torch.dtype) -> Any:
    """What changes nothing when it is reduced with anything."""
    if op in (_OP.SUM, _OP.AVG, _OP.PREMUL_SUM, _OP.BOR, _OP.BXOR):
        return -0.0 if dtype.is_floating_point else 0  # 0.0 and -0.0 are 0.0
    if op == _OP.PRODUCT:
        return 1
    if dtype is torch.bool:
        return op in (_OP.MIN, _OP.BAND)
    if op == _OP.BAND:
        return -1 if torch.iinfo(dtype).min < 0 else torch.iinfo(dtype).max
    least = op == _OP.MAX
    if dtype in FLOAT8 and dtype is not torch.float8_e5m2:  # the others have no infinity
        return torch.finfo(dtype).min if least else torch.finfo(dtype).max
    if dtype.is_floating_point:
        return float("-inf") if least else float("inf")
    return torch.iinfo(dtype).min if least else torch.iinfo(dtype).max


def carrier(via: str | Callable[[float], Any]) -> Callable[[float], Any]:
    """What makes the group that carries calls out, from a timeout in seconds."""
    if callable(via):
        return via
    if via not in _CARRIERS:
        raise GroupError(f"via={via!r} is none of {', '.join(map(repr, _CARRIERS))}")
    try:
        return getattr(importlib.import_module("etha.groups"), _CARRIERS[via])  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        raise GroupError(f"via={via!r} is not available: {error}") from None
