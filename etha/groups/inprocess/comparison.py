"""What members say of a call before a backend of torch begins with it, which would hang or abort if they differed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from etha.errors import GroupError, GroupMismatchError, GroupTimeoutError
from etha.groups import descriptor
from etha.groups.calls import GroupCall
from etha.groups.inprocess.formation import AGAIN
from etha.groups.schedule import Kind
from etha.groups.store_client import as_bytes


class StoreComparison:
    """Compares collectives through the store over which the group was formed: for backends that move no CPU bytes.

    Each call of a group has a number, under which every member puts what it calls.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._number = 0

    def compare(self, call: GroupCall, seconds: float) -> None:
        """Return when all members have made the same call. GroupMismatchError, or GroupTimeoutError that names who is
        missing."""
        self._number += 1
        own = slot_of(call, self._size)
        keys = [self._key(self._number, rank) for rank in range(self._size)]
        self._store.set(keys[self._rank], own.hex())
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError as error:
            missing = tuple(rank for rank, key in enumerate(keys) if not self._store.check([key]))
            if not missing:
                raise
            who = ", ".join(map(str, missing))
            text = f"{call.describe()} timed out after {seconds:g} seconds: rank {who} has not made it; {AGAIN}"
            raise GroupTimeoutError(text, waiting_for=missing) from error
        check_equal(call, [own if r == self._rank else self._get(key) for r, key in enumerate(keys)])
        if self._number > 1:
            # All have come to this call, so all have read what was said of the last one.
            self._store.delete_key(self._key(self._number - 1, self._rank))

    def _get(self, key: str) -> bytes:
        return bytes.fromhex(as_bytes(self._store.get(key)).decode())

    def _key(self, number: int, rank: int) -> str:
        return f"call/{number}/{rank}"


def check_equal(
    call: GroupCall,
    slots: Sequence[bytes],
    words: Callable[[int, bytes], str] = lambda rank, common: descriptor.decode(common),
) -> None:
    """GroupMismatchError unless the members, in the order of their ranks, say the same.

    ``words``: what is said of the call of a rank, from the common part of its slot.
    """
    if len({slot[: descriptor.COMMON] for slot in slots}) > 1:
        raise mismatch({rank: words(rank, slot[: descriptor.COMMON]) for rank, slot in enumerate(slots)})
    if call.kind is Kind.ALLTOALL and (wrong := descriptor.wrong_splits(slots)):
        calls = {}
        for sender, receiver, gives, takes in wrong:
            calls[sender] = f"all_to_all that gives {gives} elements to rank {receiver}"
            calls[receiver] = f"all_to_all that takes {takes} elements from rank {sender}"
        raise mismatch(calls)


def slot_of(call: GroupCall, size: int) -> bytes:
    """What a member says about a collective, of one length for all calls."""
    match call.kind:
        case Kind.ALLGATHER | Kind.SCATTER:
            tensors = call.outputs
        case Kind.ALLTOALL | Kind.BARRIER:
            tensors = []
        case _:
            tensors = call.inputs
    splits = b""
    if call.kind is Kind.ALLTOALL:
        splits = descriptor.encode_splits(*([len_.numel() for len_ in each] for each in (call.inputs, call.outputs)))
    slot = descriptor.encode_slot(common_of(call, call.kind, tensors), 0, splits=splits)
    return slot.ljust(descriptor.slot_bytes(size), b"\0")


def common_of(call: GroupCall, kind: Kind, tensors: Sequence[Tensor]) -> bytes:
    """What all members must say alike."""
    of = [*call.inputs, *call.outputs]
    root = call.root if kind in (Kind.REDUCE, Kind.BROADCAST, Kind.GATHER, Kind.SCATTER) else -1
    try:
        return descriptor.encode(
            kind,
            str(of[0].dtype).removeprefix("torch.") if of else "none",
            call.op.name if call.op is not None else "none",
            counts=tuple(tensor.numel() for tensor in tensors),
            root=root,
            factor=0.0 if call.factor is None else float(call.factor),
            extra=call.tag,
        )
    except ValueError as error:
        raise GroupError(f"{call.method}: {error}") from error


def mismatch(calls: dict[int, str]) -> GroupMismatchError:
    """The error of members that called different things, by rank."""
    text = "; ".join(f"rank {rank}: {call}" for rank, call in sorted(calls.items()))
    return GroupMismatchError(f"the members called different things: {text}; {AGAIN}", calls=calls)
