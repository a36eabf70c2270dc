"""What trainer, nursery and child say to each other: msgpack in packets of a socket, checked as it is read.

A message that is too long for a packet travels in a memfd beside it.
"""

from __future__ import annotations

import array
import os
import socket
from typing import Any

import msgspec

from etha.bus.schema import Blob, Items, JsonObject, StrictStruct, Text
from etha.decoders import decoder

#: Bytes of a message that fit a packet.
_INLINE = 1 << 15
_MAX_FDS = 4
# Plain numbers, because adding flags of Python's enums takes longer than the system call.
_NO_SIGNAL, _CLOEXEC = int(socket.MSG_NOSIGNAL), int(socket.MSG_CMSG_CLOEXEC)
_ROOM = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)


# ---- trainer <-> nursery ---------------------------------------------------------------------


class ForkChild(StrictStruct, frozen=True, kw_only=True, tag="fork"):
    """Fork a child that serves the socket beside this message."""


class ReapChild(StrictStruct, frozen=True, kw_only=True, tag="reap"):
    """Wait for a child that has died."""

    pid: int


class ForkSpare(StrictStruct, frozen=True, kw_only=True, tag="spare"):
    """Fork a second nursery that serves the socket beside this message."""


class NurseryReply(StrictStruct, frozen=True, kw_only=True, tag="nursery"):
    """Ready (pid 0), or the child that was forked or reaped. 0 for a spare: this machine has none."""

    pid: int = 0


# ---- trainer -> child ------------------------------------------------------------------------


class ConfigureChild(StrictStruct, frozen=True, kw_only=True, tag="configure"):
    """Form the group. ``group`` names the class whose backend is used; an empty ``store`` is served by the trainer.

    ``device``: the uuid of the GPU whose tensors the calls have; empty for the CPU.
    Beside it: the socket for collectives, and the one of a store that the trainer serves.
    """

    group: Text
    store: Text
    rank: int
    world_size: int
    quorum_id: int | None
    seconds: float
    trainer: int
    started: int
    beacon: int
    token: Blob
    device: Text = ""


class SharedTensor(StrictStruct, frozen=True, kw_only=True, array_like=True):
    """A contiguous tensor in the trainer's memory, or at an offset of the memfd beside the call.

    ``segment`` says where it lies in memory that the child can map (see `host.places`); empty if it does not. For a
    GPU's tensor it names one of the call's ``headers``, and ``address`` is the offset in that.
    """

    address: int
    dtype: Text
    shape: Items[int]
    segment: Blob = b""


class MakeCall(StrictStruct, frozen=True, kw_only=True, tag="call"):
    """A call in normal form. ``inputs`` and ``outputs`` are indices into ``tensors``; ``until``: CLOCK_MONOTONIC.

    ``headers`` and ``event``: see `device_memory`.
    """

    number: int
    kind: int
    method: Text
    op: Text | None
    factor: float | None
    root: int
    tag: int
    seconds: float
    until: float
    tensors: Items[SharedTensor]
    inputs: Items[int]
    outputs: Items[int]
    mapped: bool
    headers: Items[JsonObject] = ()
    event: Blob = b""


# ---- child -> trainer ------------------------------------------------------------------------


class ChildFormed(StrictStruct, frozen=True, kw_only=True, tag="formed"):
    """The group is formed; or it is not, because of an error. ``reach``: the child reaches the trainer's memory."""

    error: JsonObject | None = None
    reach: bool = True


class CallDone(StrictStruct, frozen=True, kw_only=True, tag="done"):
    """A call has ended. ``root``: who sent what a receive from anyone got. An error of number 0 is the group's."""

    number: int
    root: int
    error: JsonObject | None = None


# ---- the store -------------------------------------------------------------------------------


class AskStore(StrictStruct, frozen=True, kw_only=True, tag="store"):
    """One operation on the trainer's store."""

    operation: Text
    keys: Items[Text]
    values: Items[Blob] = ()
    amount: int = 0
    seconds: float | None = None


class StoreReply(StrictStruct, frozen=True, kw_only=True, tag="stored"):
    """What the store answered, or the text of its error."""

    values: Items[Blob] = ()
    number: int = 0
    error: Text | None = None


Message = (
    ForkChild
    | ForkSpare
    | ReapChild
    | NurseryReply
    | ConfigureChild
    | MakeCall
    | ChildFormed
    | CallDone
    | AskStore
    | StoreReply
)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = decoder(Message)


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection that keeps the borders of packets."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(connection: socket.socket, message: Message, fds: tuple[int, ...] = (), flags: int = 0) -> None:
    """Send a message with descriptors. OSError if the other end is gone; BlockingIOError as ``flags`` say."""
    data = _encoder.encode(message)
    spill = -1
    try:
        if len(data) > _INLINE:
            spill = os.memfd_create("etha-message", os.MFD_CLOEXEC)
            os.write(spill, data) if len(data) < 1 << 30 else None
            data, fds = b"", (spill, *fds)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        connection.sendmsg([b"\1" if spill >= 0 else b"\0", data], rights, int(flags) | _NO_SIGNAL)
    finally:
        if spill >= 0:
            os.close(spill)


def receive(connection: socket.socket, flags: int = 0) -> tuple[Message, list[int]] | None:
    """The next message and its descriptors; None if the other end is gone. BlockingIOError as ``flags`` say."""
    data, rights, _, _ = connection.recvmsg(_INLINE + 1, _ROOM, int(flags) | _CLOEXEC)
    fds = array.array("i")
    for _, _, raw in rights:
        fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
    if not data:
        return None
    found, body = fds.tolist(), data[1:]
    if data[0]:
        spill = found.pop(0)
        try:
            body = os.pread(spill, os.fstat(spill).st_size, 0)
        finally:
            os.close(spill)
    return _decoder.decode(body), found


def only(got: tuple[Any, list[int]] | None, kind: type[Any]) -> Any:
    """The message of the kind that must come next; ConnectionError for anything else."""
    if got is None or not isinstance(got[0], kind):
        raise ConnectionError("the other end of a socket is gone" if got is None else f"unexpected {got[0]!r}")
    return got[0]
