"""Messages <-> bytes: one msgpack map per message, decoded strictly and within bounds.

    request  {"v", "id", "op", "left", "args"}      reply    {"v", "id", "ok": {"op", "args"}}
    cancel   {"v", "id", "cancel": true}            failure  {"v", "id", "error": {code, text, data, traceback}}
    push     {"v", "id", "push": {"op", "args"}}    id: of the request it belongs to, 0 for none

Pure; nothing is ever unpickled. Messages are structs as in ``schema``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw
from msgspec.msgpack import Decoder, Encoder

from etha.bus.schema import MAX_BYTES, JsonObject, StrictStruct, Text
from etha.decoders import decoder
from etha.errors import EthaError, ProtocolError, from_wire

__all__ = [
    "MAX_MESSAGE",
    "PROTOCOL",
    "Cancel",
    "Envelope",
    "Failure",
    "Malformed",
    "Push",
    "Reply",
    "Request",
    "decode",
    "encode",
    "make_decoders",
    "message",
]

#: Version of these messages. Raise it when a message gains, loses or changes a field: neither end takes unknown ones.
PROTOCOL = 9
#: Largest message in bytes; both ends pass it to their sockets, too.
MAX_MESSAGE = 1 << 26
#: Characters kept of an error's text and of a remote traceback.
MAX_TEXT = 1 << 20
_Id = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
#: Longest description of a malformed message, in characters. It goes back to the sender and into the log.
_MAX_COMPLAINT = 1000

T = TypeVar("T")

#: Operation -> its message class, and back.
MESSAGES: dict[str, type] = {}
_OPS: dict[type, str] = {}


@dataclass(frozen=True, slots=True)
class Request:
    """``message`` asks for an answer under ``id`` (> 0). ``left``: remaining seconds, None for no deadline.

    ``deadline`` is the receiver's ``now + left`` (see ``decode``) and is not sent.
    """

    id: int
    left: float | None
    message: Any
    deadline: float = math.inf


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to request ``id``."""

    id: int
    message: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """Request ``id`` failed; ``traceback`` is the remote one as text."""

    id: int
    error: EthaError
    traceback: str | None = None


@dataclass(frozen=True, slots=True)
class Push:
    """A message that nobody asked for, about request ``id`` or, if 0, about the session. A worker's are about that.

    ``fds`` are the descriptors that came with it. They are no part of its bytes.
    """

    id: int
    message: Any
    fds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Cancel:
    """Request ``id`` is not wanted any more. It is still answered."""

    id: int


Envelope = Request | Reply | Failure | Push | Cancel


class Malformed(ProtocolError):
    """Bytes that are not one of our messages. ``id`` is the request's, if at least that could be read."""

    def __init__(self, message: str, id: int | None = None) -> None:
        super().__init__(message[:_MAX_COMPLAINT])
        self.id = id


def message(op: str) -> Callable[[type[T]], type[T]]:
    """Register the decorated ``StrictStruct`` as the message of operation ``op``."""

    def register(cls: type[T]) -> type[T]:
        if not issubclass(cls, StrictStruct):
            raise TypeError(f"{cls.__name__} is no StrictStruct: it would take fields that it does not have")
        if op in MESSAGES:
            raise TypeError(f"operation {op!r} belongs to {MESSAGES[op].__name__} already")
        MESSAGES[op] = cls
        _OPS[cls] = op
        return cls

    return register


class _Named(StrictStruct, frozen=True, kw_only=True):
    op: Text
    args: Raw


class _Error(StrictStruct, frozen=True, kw_only=True):
    code: Text
    text: Annotated[str, Meta(max_length=MAX_BYTES)]
    data: JsonObject
    traceback: Annotated[str, Meta(max_length=MAX_BYTES)] | None


_ABSENT: Any = UNSET


class _Wire(StrictStruct, frozen=True, kw_only=True):
    """Any envelope. The fields that are present tell the kinds apart; all but ``v`` and ``id`` can be absent."""

    v: int
    id: _Id
    op: Text = _ABSENT
    left: float | None = _ABSENT
    args: Raw = _ABSENT
    ok: _Named = _ABSENT
    push: _Named = _ABSENT
    error: _Error = _ABSENT
    cancel: bool = _ABSENT


class _Head(msgspec.Struct):
    """The part of a refused message that can usually be read."""

    v: int
    id: _Id


_VARYING = _Wire.__struct_fields__[2:]


def plain_scalar(value: Any) -> Any:
    """``value`` as the str, int or float that its type inherits from (NumPy's float64 is a float): msgspec takes exact
    types only."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} cannot travel")


_ENCODER = Encoder(enc_hook=plain_scalar)
_WIRE, _HEAD = decoder(_Wire), decoder(_Head)


@cache
def _decoder(op: str) -> Decoder[Any]:
    return decoder(MESSAGES[op])


def make_decoders() -> None:
    """Make those of all messages that are registered: after the last class of a module that registers some."""
    for op in MESSAGES:
        _decoder(op)


def _named(message: Any) -> dict[str, Any]:
    return {"op": _op(message), "args": message}


def _op(message: Any) -> str:
    try:
        return _OPS[type(message)]
    except KeyError:
        raise ProtocolError(f"{type(message).__name__} is not a registered message") from None


def encode(envelope: Envelope) -> bytes:
    """The bytes of ``envelope``. ProtocolError if a value cannot be encoded or the message exceeds MAX_MESSAGE."""
    wire: dict[str, Any] = {"v": PROTOCOL, "id": envelope.id}
    match envelope:
        case Request():
            wire |= {"op": _op(envelope.message), "left": envelope.left, "args": envelope.message}
        case Reply():
            wire["ok"] = _named(envelope.message)
        case Push():
            wire["push"] = _named(envelope.message)
        case Cancel():
            wire["cancel"] = True
        case Failure():
            error = envelope.error.to_wire()
            error["text"] = str(error["text"])[:MAX_TEXT]
            wire["error"] = {**error, "traceback": envelope.traceback and envelope.traceback[-MAX_TEXT:]}
    try:
        data = _ENCODER.encode(wire)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"{_describe(envelope)} cannot be encoded: {error}") from None
    if len(data) > MAX_MESSAGE:
        raise ProtocolError(f"{_describe(envelope)} has {len(data)} bytes, at most {MAX_MESSAGE} travel")
    return data


def _describe(envelope: Envelope) -> str:
    inner = getattr(envelope, "message", None)
    return type(envelope).__name__.lower() + ("" if inner is None else f" {_OPS.get(type(inner), '?')!r}")


def decode(data: bytes | memoryview, now: float = 0.0) -> Envelope:
    """The envelope in ``data``. A request's deadline is ``now`` (loop time) plus its ``left``.

    Raises Malformed (a ProtocolError that names the field) for anything but one valid message.
    """
    if len(data) > MAX_MESSAGE:
        raise Malformed(f"a message of {len(data)} bytes, at most {MAX_MESSAGE} are taken")
    try:
        wire = _WIRE.decode(data)
        if wire.v != PROTOCOL:
            raise ValueError("another protocol")
        return _envelope(wire, now)
    except (ValueError, RecursionError) as error:  # msgspec's errors, and that of bad UTF-8, are ValueErrors
        raise _refusal(data, error) from None


def _refusal(data: bytes | memoryview, error: Exception) -> Malformed:
    try:
        head = _HEAD.decode(data)
    except (ValueError, RecursionError):
        return Malformed(f"not a message: {error}")
    if head.v != PROTOCOL:
        text = f"the other end speaks protocol {head.v}, this one {PROTOCOL}: use one version of etha"
        return Malformed(text, head.id)
    return Malformed(f"malformed message {head.id}: {error}", head.id)


def _envelope(wire: _Wire, now: float) -> Envelope:
    number = len(_VARYING) - msgspec.structs.astuple(wire).count(UNSET)
    if number == 3 and wire.op is not _ABSENT and wire.left is not _ABSENT and wire.args is not _ABSENT:
        if wire.id == 0:
            raise ValueError("a request needs an id above 0")
        if wire.left is not None and not math.isfinite(wire.left):
            raise ValueError("left: expected seconds or null")
        deadline = math.inf if wire.left is None else now + max(0.0, wire.left)
        return Request(wire.id, wire.left, _message(wire.op, wire.args), deadline)
    if number == 1:
        if wire.ok is not _ABSENT:
            return Reply(wire.id, _message(wire.ok.op, wire.ok.args))
        if wire.push is not _ABSENT:
            return Push(wire.id, _message(wire.push.op, wire.push.args))
        if wire.cancel is not _ABSENT and wire.cancel:
            return Cancel(wire.id)
        if wire.error is not _ABSENT:
            error = made_error(*msgspec.structs.astuple(wire.error))
            return Failure(wire.id, error, wire.error.traceback)
    given = [name for name in _VARYING if getattr(wire, name) is not UNSET]
    raise ValueError(f"no envelope has the fields {', '.join(given) or 'id and v alone'}")


def _message(op: str, args: Raw) -> Any:
    if op not in MESSAGES:
        raise ValueError(f"unknown operation {op[:60]!r}")
    try:
        return _decoder(op).decode(args)
    except (ValueError, EthaError) as error:  # EthaError: from the message's own __post_init__
        raise ValueError(f"{op}: {error}") from None


def made_error(code: str, text: str, data: dict[str, Any], traceback: str | None) -> EthaError:
    """The error with these parts. ValueError for data that its class does not accept."""
    try:
        return from_wire({"code": code, "text": text, "data": data}, traceback)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ValueError(f"data of error {code[:60]!r}: {error}") from None
