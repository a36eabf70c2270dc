"""The child: carries out the calls of one forming with a backend of torch, in the trainer's tensors.

It reads and writes the trainer's memory itself. The trainer kills it when anything goes wrong, so that nothing of a
call that has ended can still write.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from etha.errors import EthaError
from etha.groups.baby import mapped
from etha.groups.baby.messages import CallDone, ChildFormed, ConfigureChild, MakeCall, only, receive, send
from etha.groups.baby.remote_store import RemoteStore
from etha.groups.base import GroupConfig
from etha.groups.calls import GroupCall
from etha.groups.inprocess.formation import Carrier, Formation
from etha.groups.inprocess.torch_groups import carrier_of
from etha.groups.schedule import Kind
from etha.memory.process import IoVec, ProcessMemory
from etha.memory.reach import ReachError


def serve(connection: socket.socket) -> None:
    """Form the group and carry out calls until the trainer ends the connection."""
    got = receive(connection)
    if got is None:
        return
    asked: ConfigureChild = only(got, ConfigureChild)
    child = _Child(connection, asked, got[1])
    error = child.form()
    child.answer(ChildFormed(error=error, reach=child.memory is not None))
    if error is not None:
        return
    while (got := receive(connection)) is not None:
        child.call(only(got, MakeCall), got[1])


class _Child:
    def __init__(self, connection: socket.socket, asked: ConfigureChild, fds: list[int]) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        store: Any = asked.store or RemoteStore(socket.socket(fileno=fds[0]), asked.seconds)
        self.memory = memory = _memory_of(asked)
        timeout = timedelta(seconds=asked.seconds)
        config = GroupConfig(
            store=store,
            replica_id="0",
            rank=asked.rank,
            world_size=asked.world_size,
            quorum_id=asked.quorum_id,
        )

        def make(store: Any, config: GroupConfig) -> Carrier:
            inner = carrier_of(asked.group)(store, config, timeout)
            inner.owned = True
            return RemoteCarrier(inner, memory, config.rank)

        self._formation = Formation(config, timeout, make)

    def form(self) -> dict[str, Any] | None:
        try:
            self._formation.start()
        except EthaError as error:
            return error.to_wire()
        return None

    def call(self, asked: MakeCall, fds: list[int]) -> None:
        """Queue a call; its answer comes when it has ended."""
        work = self._formation.issue(RemoteCall.of(asked, fds[0] if asked.mapped else -1))
        work.on_finished(lambda: self._done(asked.number, work))

    def _done(self, number: int, work: Any) -> None:
        error = work.exception()
        wire = error.to_wire() if isinstance(error, EthaError) else None
        self.answer(CallDone(number=number, root=work.call.root, error=wire))

    def answer(self, message: Any) -> None:
        with self._lock:
            try:
                send(self._connection, message)
            except OSError:
                os._exit(0)  # the trainer is gone


def _memory_of(asked: ConfigureChild) -> ProcessMemory | None:
    """The trainer's memory, if the kernel lets this process read and write it."""
    try:
        memory = ProcessMemory(asked.trainer, asked.started)
        memory.probe(asked.beacon, asked.token)
    except ReachError:
        return None
    return memory


class RemoteCall(GroupCall):
    """A call whose tensors are buffers of this process for tensors of the trainer, which lie at ``places``."""

    __slots__ = ("places",)
    places: dict[int, tuple[int, Tensor]]

    @staticmethod
    def of(asked: MakeCall, fd: int) -> RemoteCall:
        """Buffers are not touched before the call's turn comes. ``fd``: they lie in this memfd; -1 if they do not."""
        shapes = [(t.address, getattr(torch, t.dtype), t.shape) for t in asked.tensors]
        if asked.mapped:
            tensors = mapped.views(fd, shapes)
            os.close(fd)
        else:
            tensors = [torch.empty(shape, dtype=dtype) for _, dtype, shape in shapes]
        call = RemoteCall(
            kind=Kind(asked.kind),
            method=asked.method,
            inputs=[tensors[i] for i in asked.inputs],
            outputs=[tensors[i] for i in asked.outputs],
            op=None if asked.op is None else ReduceOp.RedOpType.__members__[asked.op],
            factor=asked.factor,
            root=asked.root,
            tag=asked.tag,
            timeout=timedelta(seconds=asked.seconds),
        )
        call.places = (
            {} if asked.mapped else {id(t): (place.address, t) for t, place in zip(tensors, asked.tensors, strict=True)}
        )
        return call

    def rows(self, tensors: Sequence[Tensor]) -> tuple[IoVec, IoVec]:
        """Where tensors lie here and in the trainer: tables of (address, bytes)."""
        found = {id(t): t for t in tensors if t.numel() and id(t) in self.places}
        here = [(t.data_ptr(), t.numel() * t.element_size()) for t in found.values()]
        there = [(self.places[key][0], t.numel() * t.element_size()) for key, t in found.items()]
        return np.array(here, np.uint64).reshape(-1, 2), np.array(there, np.uint64).reshape(-1, 2)


class RemoteCarrier:
    """Reads a call's inputs from the trainer, has a backend carry it out, and writes its outputs into the trainer."""

    owned = True

    def __init__(self, inner: Carrier, memory: ProcessMemory | None, rank: int) -> None:
        self._inner, self._memory, self._rank = inner, memory, rank

    def carry(self, call: GroupCall, deadline: float) -> Callable[[], None]:
        """See `Carrier`."""
        assert isinstance(call, RemoteCall)
        here, there = call.rows(call.inputs)
        if self._memory is not None and len(here):
            self._memory.read(here, there)
        write = self._inner.carry(call, deadline)

        def write_all() -> None:
            write()
            here, there = call.rows(call.outputs if mapped.changes_outputs(call, self._rank) else ())
            if self._memory is not None and len(here):
                self._memory.write(here, there)

        return write_all
