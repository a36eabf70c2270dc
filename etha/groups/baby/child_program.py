"""The child: carries out the calls of one forming with a backend of torch, in the trainer's tensors.

It reads and writes the trainer's memory itself, or maps it where it lies in a memfd. The trainer kills it when anything
goes wrong, so that nothing of a call that has ended can still write.
"""

from __future__ import annotations

import ctypes
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from etha.cuda.select import driver
from etha.errors import EthaError
from etha.groups.baby import mapped
from etha.groups.baby.device_memory import MappedMemory
from etha.groups.baby.messages import CallDone, ChildFormed, ConfigureChild, MakeCall, Message, only, receive, send
from etha.groups.baby.remote_store import RemoteStore
from etha.groups.baby.siblings import Siblings
from etha.groups.base import GroupConfig
from etha.groups.calls import GroupCall
from etha.groups.host.places import PeerPlaces
from etha.groups.inprocess.formation import Carrier, Formation, FormationWork
from etha.groups.inprocess.gloo import PIECES_AT_ONCE
from etha.groups.inprocess.staging import size_of
from etha.groups.inprocess.torch_groups import carrier_of
from etha.groups.schedule import Kind
from etha.memory.process import IoVec, ProcessMemory
from etha.memory.reach import ReachError

log = logging.getLogger(__name__)

#: Bytes of a piece of a large allreduce: an eighth of it between these, so that reading and writing go on beside Gloo,
#: and so that Gloo, which takes some 0.3 ms for a piece of any size, has few of them.
_LEAST_PIECE, _MOST_PIECE = 2 << 20, 8 << 20
#: Bytes of staging that are kept from call to call, because the first touch of memory takes longer than a copy.
_KEPT = 256 << 20


def serve(connection: socket.socket) -> None:
    """Form the group and carry out calls until the trainer ends the connection."""
    got = receive(connection)
    if got is None:
        return
    asked: ConfigureChild = only(got, ConfigureChild)
    calls, *store = (socket.socket(fileno=fd) for fd in got[1])
    config = GroupConfig(
        store=asked.store or RemoteStore(store[0], asked.seconds),
        replica_id="0",
        rank=asked.rank,
        world_size=asked.world_size,
        quorum_id=asked.quorum_id,
    )
    memory = _memory_of(asked)
    siblings = Siblings(config.rank, config.world_size, config.quorum_id)
    formation = _ChildFormation(config, asked, calls, memory, siblings)
    messages = _Answers(connection)
    try:
        formation.start()
    except EthaError as error:
        messages.send(ChildFormed(error=error.to_wire(), reach=memory is not None))
        return
    siblings.watch(lambda error: messages.send(CallDone(number=0, root=-1, error=error.to_wire())))
    messages.send(ChildFormed(reach=memory is not None))
    while (got := receive(connection)) is not None:
        call: MakeCall = only(got, MakeCall)
        messages.expect(call, formation.issue(RemoteCall.of(call, got[1], _new_tensors)))


class _Answers:
    """Says on a socket how calls ended."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def expect(self, asked: MakeCall, work: FormationWork) -> None:
        """Answer when the call has ended."""

        def done() -> None:
            error = work.exception()
            wire = error.to_wire() if isinstance(error, EthaError) else None
            self.send(CallDone(number=asked.number, root=work.call.root, error=wire))

        work.on_finished(done)

    def send(self, message: Message) -> None:
        with self._lock:
            try:
                send(self._connection, message)
            except OSError:
                os._exit(0)  # the trainer is gone


class _ChildFormation(Formation):
    """A formation whose thread of collectives reads them from the trainer itself, which saves a wake-up."""

    def __init__(
        self,
        config: GroupConfig,
        asked: ConfigureChild,
        calls: socket.socket,
        memory: ProcessMemory | None,
        siblings: Siblings,
    ) -> None:
        timeout = timedelta(seconds=asked.seconds)

        def make(store: Any, config: GroupConfig) -> Carrier:
            siblings.introduce(store)
            device = MappedMemory(driver(), asked.device, asked.trainer, asked.started) if asked.device else None
            inner = carrier_of(asked.group)(store, config, timeout)
            inner.owned = True
            siblings.meet(store)
            if device is not None:
                return DeviceCarrier(inner, device)
            return RemoteCarrier(inner, memory, config.rank)

        super().__init__(config, timeout, make)
        self._socket, self._answers, self._staging = calls, _Answers(calls), _Staging()
        self._places = None if memory is None else PeerPlaces(memory.pidfd)

    def _main(self) -> None:
        try:
            super()._main()
        except BaseException:
            log.exception("the child ends, because it could not read a call")
            os._exit(1)  # otherwise the trainer would wait for its deadline

    def _next(self) -> FormationWork:
        got = receive(self._socket)
        if got is None:
            os._exit(0)  # the trainer has ended the connection
        asked: MakeCall = only(got, MakeCall)
        work = FormationWork(RemoteCall.of(asked, got[1], self._staging.tensors, self._places), self)
        work.deadline = asked.until
        with self._lock:
            self._pending[work] = None
        self._answers.expect(asked, work)
        return work


def _memory_of(asked: ConfigureChild) -> ProcessMemory | None:
    """The trainer's memory, if the kernel lets this process read and write it."""
    try:
        memory = ProcessMemory(asked.trainer, asked.started)
        memory.probe(asked.beacon, asked.token)
    except ReachError:
        return None
    return memory


_Shapes = Sequence[tuple[torch.dtype, tuple[int, ...]]]


def _new_tensors(shapes: _Shapes) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype) for dtype, shape in shapes]


class _Staging:
    """Memory for the tensors of one collective after the other."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def tensors(self, shapes: _Shapes) -> list[Tensor]:
        """Tensors that nobody else uses until the next call of this."""
        lengths = [-(-torch.Size(shape).numel() * dtype.itemsize // 64) * 64 for dtype, shape in shapes]
        total = sum(lengths)
        if total > _KEPT:
            return _new_tensors(shapes)
        if total > len(self._room):
            self._room = torch.empty(total, dtype=torch.uint8)
        found, start = [], 0
        for length, (dtype, shape) in zip(lengths, shapes, strict=True):
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            found.append(self._room[start : start + nbytes].view(dtype).view(shape))
            start += length
        return found


#: Calls in which a backend may work on the trainer's tensors where they lie: it changes what the call changes only.
_IN_PLACE = frozenset({Kind.ALLREDUCE, Kind.BROADCAST, Kind.ALLGATHER, Kind.ALLTOALL, Kind.GATHER, Kind.SCATTER})


class RemoteCall(GroupCall):
    """A call over tensors of the trainer, or buffers of this process for those at ``places`` in the trainer."""

    __slots__ = ("asked", "places")
    asked: MakeCall
    places: dict[int, tuple[int, Tensor]]

    @staticmethod
    def of(
        asked: MakeCall,
        fds: list[int],
        make: Callable[[_Shapes], list[Tensor]],
        peer: PeerPlaces | None = None,
    ) -> RemoteCall:
        """``make`` makes the buffers, and ``peer`` maps the trainer's memory."""
        shapes = [(t.address, getattr(torch, t.dtype), t.shape) for t in asked.tensors]
        there: dict[int, Tensor] = {}
        if asked.event:  # a GPU's tensors, which are opened when the call's turn comes
            there = {i: torch.empty(shape, dtype=dtype, device="meta") for i, (_, dtype, shape) in enumerate(shapes)}
        elif asked.mapped:
            there = dict(enumerate(mapped.views(fds[0], shapes)))
            os.close(fds[0])
        elif peer is not None and Kind(asked.kind) in _IN_PLACE:
            for i, each in enumerate(asked.tensors):
                addresses = peer.addresses(each.segment) if each.segment else None
                if addresses and addresses[0]:
                    there[i] = _at(addresses[0], shapes[i][1], each.shape)
        rest = [i for i in range(len(shapes)) if i not in there]
        buffers = dict(zip(rest, make([shapes[i][1:] for i in rest]), strict=True))
        tensors = [there[i] if i in there else buffers[i] for i in range(len(shapes))]
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
        call.asked = asked
        call.places = {id(tensor): (shapes[i][0], tensor) for i, tensor in buffers.items()}
        return call

    def rows(self, tensors: Sequence[Tensor]) -> tuple[IoVec, IoVec]:
        """Where tensors lie here and in the trainer: tables of (address, bytes)."""
        found = {id(t): t for t in tensors if t.numel() and id(t) in self.places}
        here = [(t.data_ptr(), t.numel() * t.element_size()) for t in found.values()]
        there = [(self.places[key][0], t.numel() * t.element_size()) for key, t in found.items()]
        return _table(here), _table(there)


def _table(rows: Sequence[tuple[int, int]]) -> IoVec:
    return np.array(rows, np.uint64).reshape(-1, 2)


def _at(address: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class RemoteCarrier:
    """Reads a call's inputs from the trainer, has a backend carry it out, and writes its outputs into the trainer."""

    owned = True

    def __init__(self, inner: Any, memory: ProcessMemory | None, rank: int) -> None:
        self._inner, self._memory, self._rank = inner, memory, rank
        self._buffers: list[Tensor] = []

    def carry(self, call: GroupCall, deadline: float) -> Callable[[], None]:
        """See `Carrier`. A large allreduce is read, reduced and written piece by piece."""
        assert isinstance(call, RemoteCall)
        if call.kind is Kind.ALLREDUCE and size_of(call.inputs) > PIECES_AT_ONCE * _LEAST_PIECE:
            self._inner.reduce_pieces(call, self._pieces(call), deadline)
            return lambda: None
        self._move(ProcessMemory.read, *call.rows(call.inputs))
        write = self._inner.carry(call, deadline)

        def write_all() -> None:
            write()
            changed = call.outputs if mapped.changes_outputs(call, self._rank) else ()
            self._move(ProcessMemory.write, *call.rows(changed))

        return write_all

    def _move(self, move: Callable[[ProcessMemory, IoVec, IoVec], int], here: IoVec, there: IoVec) -> None:
        if self._memory is not None and len(here):
            move(self._memory, here, there)

    def _pieces(self, call: RemoteCall) -> Iterator[tuple[Tensor, Callable[[], None]]]:
        """Pieces of all tensors together, which all members cut alike; see `GlooCarrier.reduce_pieces`."""
        while len(self._buffers) < PIECES_AT_ONCE:
            self._buffers.append(torch.empty(_MOST_PIECE, dtype=torch.uint8))
        flat = [tensor.view(-1) for tensor in call.inputs]
        dtype = flat[0].dtype
        nbytes = max(_LEAST_PIECE, min(_MOST_PIECE, size_of(flat) // 8 & -4096))
        for k, rows in enumerate(cut([len(each) for each in flat], nbytes // dtype.itemsize)):
            parts = [flat[i][start:end] for i, start, end in rows]
            if len(rows) == 1 and id(call.inputs[rows[0][0]]) not in call.places:
                yield parts[0], lambda: None
                continue
            buffer = self._buffers[k % PIECES_AT_ONCE].view(dtype)[: sum(map(len, parts))]
            here, there, views = [], [], []
            rooms = torch.split(buffer, [len(part) for part in parts])
            for part, room, (i, start, _) in zip(parts, rooms, rows, strict=True):
                place = call.places.get(id(call.inputs[i]))
                if place is None:
                    room.copy_(part)
                    views.append((part, room))
                else:
                    length = len(part) * dtype.itemsize
                    here.append((room.data_ptr(), length))
                    there.append((place[0] + start * dtype.itemsize, length))
            tables = _table(here), _table(there)
            self._move(ProcessMemory.read, *tables)

            def store(tables: tuple[IoVec, IoVec] = tables, views: list[tuple[Tensor, Tensor]] = views) -> None:
                self._move(ProcessMemory.write, *tables)
                for part, room in views:
                    part.copy_(room)

            yield buffer, store


class DeviceCarrier:
    """Opens a call's tensors on the GPU, and has a backend carry it out in them."""

    owned = True

    def __init__(self, inner: Carrier, memory: MappedMemory) -> None:
        self._inner, self._memory = inner, memory

    def carry(self, call: GroupCall, deadline: float) -> Callable[[], None]:
        """See `Carrier`. When this returns, the device is done with the call."""
        assert isinstance(call, RemoteCall)
        with self._memory.tensors(call.asked) as tensors:
            opened = copy(call)
            opened.inputs = [tensors[i] for i in call.asked.inputs]
            opened.outputs = [tensors[i] for i in call.asked.outputs]
            self._inner.carry(opened, deadline)()
        return lambda: None


def cut(lengths: Sequence[int], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cut a row of tensors of these lengths into pieces of ``most`` elements; (tensor, start, end) of each part."""
    piece: list[tuple[int, int, int]] = []
    room = most
    for i, length in enumerate(lengths):
        start = 0
        while start < length:
            end = min(length, start + room)
            piece.append((i, start, end))
            room -= end - start
            start = end
            if not room:
                yield piece
                piece, room = [], most
    if piece:
        yield piece
