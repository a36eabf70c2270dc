"""Gloo in the trainer's process. Before each call the members compare what they call, because Gloo would abort.

What they say about a call has room for a small call's bytes, so that such a call is this one exchange.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from etha.groups import descriptor
from etha.groups.base import GroupConfig
from etha.groups.calls import GroupCall, writing
from etha.groups.inprocess.comparison import check_equal, common_of, mismatch, slot_of
from etha.groups.inprocess.formation import options_of, remaining, tensor_of
from etha.groups.inprocess.staging import StagedReduction, pack, size_of, unpack
from etha.groups.schedule import Kind

_c10d: Any = torch._C._distributed_c10d
#: Bytes of a small call of each member; all members together exchange at most _ROOM_OF_ALL more than they need.
_ROOM, _ROOM_OF_ALL = 4096, 1 << 16
#: Pieces of a large call that are under way at once: two in Gloo's threads, and one that is read or written.
PIECES_AT_ONCE = 3


class GlooCarrier:
    """torch's Gloo backend of one forming. Only threads of the formation use it, and only with staging of its own."""

    #: Whether the tensors of calls are staging already, so that nobody minds what is written into them.
    owned = False

    def __init__(self, store: Any, config: GroupConfig, timeout: timedelta) -> None:
        self._rank, self._size = config.rank, config.world_size
        self._backend: Any = _c10d.ProcessGroupGloo(store, config.rank, config.world_size, timeout)
        self._said = descriptor.slot_bytes(self._size)
        self._room = min(_ROOM, _ROOM_OF_ALL // self._size // 64 * 64)
        # Collectives run one after the other, so one set of buffers serves them all.
        self._mine = torch.zeros(self._said + self._room, dtype=torch.uint8)
        self._slots = list(torch.zeros(self._size, self._said + self._room, dtype=torch.uint8))

    def carry(self, call: GroupCall, deadline: float) -> Callable[[], None]:
        """Compare the call with the others', then carry it out in staging; returns what writes its outputs."""
        if call.kind in (Kind.SEND, Kind.RECV, Kind.RECV_ANY):
            return self._message(call, deadline)
        with torch.no_grad():
            small = self._small(call, deadline)
            if small is not None:
                return small
            reason = tensor_of(descriptor.encode_reason(call.refused, self._room)) if call.refused else None
            self._compare(call, deadline, reason)
            carry: dict[Kind, Callable[[GroupCall, float], Callable[[], None]]] = {
                Kind.ALLREDUCE: self._allreduce,
                Kind.REDUCE: self._reduce,
                Kind.BROADCAST: self._broadcast,
                Kind.ALLGATHER: self._allgather,
                Kind.REDUCE_SCATTER: self._reduce_scatter,
                Kind.ALLTOALL: self._alltoall,
                Kind.GATHER: self._gather,
                Kind.SCATTER: self._scatter,
                Kind.BARRIER: lambda call, deadline: _nothing,
            }
            return carry[call.kind](call, deadline)

    # ---- what the members call ---------------------------------------------------------------

    def _compare(self, call: GroupCall, deadline: float, payload: Tensor | None = None) -> list[Tensor]:
        """Compare what the members call; returns the bytes that each of them gave beside it."""
        mine, said = self._mine, self._said
        mine[:said].copy_(tensor_of(slot_of(call, self._size)))
        if payload is not None:
            mine[said : said + payload.numel()].copy_(payload)
        options = options_of(_c10d.AllgatherOptions, deadline)
        self._wait(self._backend.allgather([self._slots], [mine], options), deadline)
        check_equal(call, [slot[:said].numpy().tobytes() for slot in self._slots], self._words)
        return [slot[said:] for slot in self._slots]

    def _words(self, rank: int, common: bytes) -> str:
        """What a member calls; and why, if it has refused its own arguments."""
        words = descriptor.decode(common)
        if descriptor.is_refusal(common) and (
            reason := descriptor.decode_reason(self._slots[rank][self._said :].numpy().tobytes())
        ):
            words += f": {reason}"
        return words

    def _small(self, call: GroupCall, deadline: float) -> Callable[[], None] | None:
        """Carry out a call whose bytes fit beside what is said about it; None if they do not."""
        match call.kind:
            case Kind.ALLREDUCE | Kind.REDUCE:
                reduction = self._reduction(call)
                nbytes = sum(tensor.numel() for tensor in call.inputs) * reduction.dtype.itemsize
                if nbytes > self._room:
                    return None
                given = self._compare(call, deadline, reduction.stage(call.inputs).view(torch.uint8))
                if call.kind is Kind.REDUCE and self._rank != call.root:
                    return _nothing
                flat = reduction.fold([each[:nbytes].view(reduction.dtype) for each in given])
                return _writer(call.outputs, lambda: reduction.write(flat, call.outputs))
            case Kind.BROADCAST:
                if size_of(call.inputs) > self._room:
                    return None
                given = self._compare(call, deadline, pack(call.inputs, owned=True))
                return _nothing if self._rank == call.root else _unpacking(given[call.root], call.outputs)
            case Kind.ALLGATHER:
                n = self._size
                if max(size_of(call.outputs[rank::n]) for rank in range(n)) > self._room:
                    return None
                given = self._compare(call, deadline, pack(call.inputs, owned=True))

                def write() -> None:
                    for rank, each in enumerate(given):
                        unpack(each, call.outputs[rank::n])

                return _writer(call.outputs, write)
            case _:
                return None

    def reduce_pieces(
        self, call: GroupCall, pieces: Iterable[tuple[Tensor, Callable[[], None]]], deadline: float
    ) -> None:
        """Carry out an ALLREDUCE piece by piece, several at once.

        A piece is a tensor, into which the result goes, and what is done with it then. The next one is asked for when
        fewer than PIECES_AT_ONCE are under way. All members cut alike.
        """
        running: deque[tuple[Any, Callable[[], None]]] = deque()

        def finish() -> None:
            work, then = running.popleft()
            self._wait(work, deadline)
            then()

        with torch.no_grad():
            self._compare(call, deadline)
            for tensor, store in pieces:
                reduction, flat = self._staged(call, [tensor])
                options = options_of(_c10d.AllreduceOptions, deadline, reduceOp=reduction.op)

                def then(
                    reduction: StagedReduction = reduction,
                    flat: Tensor = flat,
                    tensor: Tensor = tensor,
                    store: Callable[[], None] = store,
                ) -> None:
                    reduction.write(flat, [tensor])
                    store()

                running.append((self._backend.allreduce([flat], options), then))
                if len(running) == PIECES_AT_ONCE:
                    finish()
            while running:
                finish()

    def _message(self, call: GroupCall, deadline: float) -> Callable[[], None]:
        """A message: the sender says what comes, the receiver what it expects, and then it comes."""
        sends, tag = call.kind is Kind.SEND, call.tag * 4
        tensors = call.inputs if sends else call.outputs
        mine, theirs = tensor_of(common_of(call, Kind.SEND, tensors)), tensor_of(bytes(descriptor.COMMON))
        if sends:
            self._wait(self._backend.send([mine], call.root, tag), deadline)
            self._wait(self._backend.recv([theirs], call.root, tag + 1), deadline)
        else:
            self._receive_header(call, theirs, tag, deadline)
            self._wait(self._backend.send([mine], call.root, tag + 1), deadline)
        if not torch.equal(mine, theirs):
            own, others = (descriptor.decode(each.numpy().tobytes()) for each in (mine, theirs))
            verbs = ("send", "recv") if sends else ("recv", "send")
            calls = {self._rank: own.replace("send", verbs[0]), call.root: others.replace("send", verbs[1])}
            raise mismatch(calls)
        staging = pack(tensors, owned=self.owned) if sends else torch.empty(size_of(tensors), dtype=torch.uint8)
        if staging.numel():
            move = self._backend.send if sends else self._backend.recv
            self._wait(move([staging], call.root, tag + 2), deadline)
        return _nothing if sends else _writer(tensors, lambda: unpack(staging, tensors))

    def _receive_header(self, call: GroupCall, header: Tensor, tag: int, deadline: float) -> None:
        if call.kind is Kind.RECV:
            self._wait(self._backend.recv([header], call.root, tag), deadline)
            return
        work = self._backend.recv_anysource([header], tag)
        self._wait(work, deadline)
        call.root = work._source_rank()

    # ---- collectives -------------------------------------------------------------------------

    def _allreduce(self, call: GroupCall, deadline: float) -> Callable[[], None]:
        reduction, flat = self._staged(call, call.inputs)
        options = options_of(_c10d.AllreduceOptions, deadline, reduceOp=reduction.op)
        if flat.numel():
            self._wait(self._backend.allreduce([flat], options), deadline)
        return _writer(call.outputs, lambda: reduction.write(flat, call.outputs))

    def _reduce(self, call: GroupCall, deadline: float) -> Callable[[], None]:
        reduction, flat = self._staged(call, call.inputs)
        options = options_of(_c10d.ReduceOptions, deadline, reduceOp=reduction.op, rootRank=call.root)
        if flat.numel():
            self._wait(self._backend.reduce([flat], options), deadline)
        if self._rank != call.root:
            return _nothing
        return _writer(call.outputs, lambda: reduction.write(flat, call.outputs))

    def _broadcast(self, call: GroupCall, deadline: float) -> Callable[[], None]:
        staging = pack(call.inputs, owned=self.owned)
        options = options_of(_c10d.BroadcastOptions, deadline, rootRank=call.root)
        if staging.numel():
            self._wait(self._backend.broadcast([staging], options), deadline)
        if self._rank == call.root:
            return _nothing
        return _writer(call.outputs, lambda: unpack(staging, call.outputs))

    def _allgather(self, call: GroupCall, deadline: float) -> Callable[[], None]:
        """Gloo gathers equal pieces: each is as long as the longest."""
        n = self._size
        outputs = [call.outputs[rank::n] for rank in range(n)]
        longest = max(size_of(each) for each in outputs)
        source = pack(call.inputs, owned=self.owned)
        if len(source) < longest:
            source = torch.cat([source, torch.zeros(longest - len(source), dtype=torch.uint8)])
        gathered = [self._target(each, longest) for each in outputs]
        if longest:
            options = options_of(_c10d.AllgatherOptions, deadline)
            self._wait(self._backend.allgather([gathered], [source], options), deadline)

        def write() -> None:
            for staging, tensors in zip(gathered, outputs, strict=True):
                unpack(staging, tensors)

        return _writer(call.outputs, write)

    def _reduce_scatter(self, call: GroupCall, deadline: float) -> Callable[[], None]:
        """Gloo has none: each member gets all pieces for it and reduces them in the order of the ranks."""
        n, reduction = self._size, self._reduction(call)
        sources = [reduction.stage(call.inputs[rank::n]) for rank in range(n)]
        own = sources[self._rank].numel()
        pieces = self._exchange(torch.cat(sources), [len(each) for each in sources], [own] * n, deadline)
        flat = reduction.fold(list(pieces))
        return _writer(call.outputs, lambda: reduction.write(flat, call.outputs))

    def _alltoall(self, call: GroupCall, deadline: float) -> Callable[[], None]:
        give, take = ([size_of([tensor]) for tensor in each] for each in (call.inputs, call.outputs))
        pieces = self._exchange(pack(call.inputs, owned=self.owned), give, take, deadline)
        return _writer(call.outputs, lambda: unpack(torch.cat(list(pieces)), call.outputs))

    def _exchange(self, source: Tensor, give: list[int], take: list[int], deadline: float) -> Sequence[Tensor]:
        target = torch.empty(sum(take), dtype=source.dtype)
        options = options_of(_c10d.AllToAllOptions, deadline)
        self._wait(self._backend.alltoall_base(target, source, take, give, options), deadline)
        return torch.split(target, take)

    def _gather(self, call: GroupCall, deadline: float) -> Callable[[], None]:
        source = pack(call.inputs, owned=self.owned)
        gathered = [self._target([output], len(source)) for output in call.outputs]
        options = options_of(_c10d.GatherOptions, deadline, rootRank=call.root)
        if source.numel():
            self._wait(self._backend.gather([gathered] if gathered else [], [source], options), deadline)

        def write() -> None:
            for staging, tensor in zip(gathered, call.outputs, strict=True):
                unpack(staging, [tensor])

        return _writer(call.outputs, write)

    def _scatter(self, call: GroupCall, deadline: float) -> Callable[[], None]:
        sources = [pack([tensor]) for tensor in call.inputs]
        target = torch.empty(size_of(call.outputs), dtype=torch.uint8)
        options = options_of(_c10d.ScatterOptions, deadline, rootRank=call.root)
        if target.numel():
            self._wait(self._backend.scatter([target], [sources] if sources else [], options), deadline)
        return _writer(call.outputs, lambda: unpack(target, call.outputs))

    # ---- parts -------------------------------------------------------------------------------

    def _target(self, tensors: Sequence[Tensor], length: int) -> Tensor:
        """Where a piece of a gather comes: into its only tensor if that is ours and as long."""
        if self.owned and len(tensors) == 1 and size_of(tensors) == length and tensors[0].is_contiguous():
            return pack(tensors, owned=True)
        return torch.empty(length, dtype=torch.uint8)

    def _reduction(self, call: GroupCall) -> StagedReduction:
        return StagedReduction(call.op, call.inputs[0].dtype, call.factor, self._size, owned=self.owned)

    def _staged(self, call: GroupCall, tensors: Sequence[Tensor]) -> tuple[StagedReduction, Tensor]:
        reduction = self._reduction(call)
        return reduction, reduction.stage(tensors)

    def _wait(self, work: Any, deadline: float) -> None:
        work.wait(remaining(deadline))


def _nothing() -> None:
    """Write no output."""


def _writer(tensors: Sequence[Tensor], write: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        with writing(tensors):
            write()

    return run


def _unpacking(packed: Tensor, tensors: Sequence[Tensor]) -> Callable[[], None]:
    return _writer(tensors, lambda: unpack(packed, tensors))
