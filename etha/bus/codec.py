"""Messages <-> bytes: one msgpack map per message, decoded strictly and within bounds.

    request  {"v", "id", "op", "left", "args"}      reply    {"v", "id", "ok": {"op", "args"}}
    cancel   {"v", "id", "cancel": true}            failure  {"v", "id", "error": {code, text, data, traceback}}
    push     {"v", "id", "push": {"op", "args"}}    id: of the request it belongs to, 0 for none

Pure; nothing is ever unpickled. ``schema`` checks the arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack  # type: ignore[import-untyped, unused-ignore]

from etha.bus.schema import MAX_NODES, MAX_STRING, STRUCTS, Bounds, Checker, Mismatch, plain, shown, struct
from etha.errors import EthaError, ProtocolError, from_wire

__all__ = [
    "MAX_MESSAGE",
    "PROTOCOL",
    "Bounds",
    "Cancel",
    "Envelope",
    "Failure",
    "Malformed",
    "Push",
    "Reply",
    "Request",
    "decode",
    "encode",
    "message",
    "unpack",
]

PROTOCOL = 1
#: Bytes of one message; both ends give it to their sockets as well.
MAX_MESSAGE = 1 << 26
#: Characters kept of an error's text and of a remote traceback.
MAX_TEXT = 1 << 20
_MAX_ID = (1 << 63) - 1
#: Characters of what is said about a malformed message: it goes back to its sender and into the log.
_MAX_COMPLAINT = 1000

T = TypeVar("T")

_BY_OP: dict[str, tuple[type, Checker]] = {}
_OPS: dict[type, str] = {}


@dataclass(frozen=True, slots=True)
class Request:
    """``message`` asks for an answer under ``id`` (> 0); ``left`` seconds remain, None: no deadline.

    ``deadline`` is the receiver's ``now + left`` (see ``decode``) and does not travel.
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
    """Unasked news, about request ``id`` or, with 0, about the session."""

    id: int
    message: Any


@dataclass(frozen=True, slots=True)
class Cancel:
    """Request ``id`` is not wanted any more; it is answered all the same."""

    id: int


Envelope = Request | Reply | Failure | Push | Cancel


class Malformed(ProtocolError):
    """Bytes that are no message of ours; ``id`` is the request's, where at least that could be read."""

    def __init__(self, message: str, id: int | None = None) -> None:
        super().__init__(message[:_MAX_COMPLAINT])
        self.id = id


def message(op: str) -> Callable[[type[T]], type[T]]:
    """Register the decorated dataclass as the message of operation ``op``; TypeError for unusable hints."""

    def register(cls: type[T]) -> type[T]:
        if op in _BY_OP:
            raise TypeError(f"operation {op!r} belongs to {_BY_OP[op][0].__name__} already")
        _BY_OP[op] = (cls, struct(cls))
        _OPS[cls] = op
        return cls

    return register


def _default(value: Any) -> dict[str, Any]:
    names = STRUCTS.get(type(value))
    if names is None:
        raise TypeError(f"{type(value).__name__} cannot travel")
    return {name: getattr(value, name) for name in names}


def _named(message: Any) -> dict[str, Any]:
    return {"op": _op(message), "args": message}


def _op(message: Any) -> str:
    try:
        return _OPS[type(message)]
    except KeyError:
        raise ProtocolError(f"{type(message).__name__} is not a registered message") from None


def encode(envelope: Envelope) -> bytes:
    """The bytes of ``envelope``; ProtocolError for what cannot travel or is larger than MAX_MESSAGE."""
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
        data = msgpack.packb(wire, default=_default)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"{_describe(envelope)} cannot be encoded: {error}") from None
    if len(data) > MAX_MESSAGE:
        raise ProtocolError(f"{_describe(envelope)} has {len(data)} bytes, at most {MAX_MESSAGE} travel")
    return bytes(data)


def _describe(envelope: Envelope) -> str:
    inner = getattr(envelope, "message", None)
    return type(envelope).__name__.lower() + ("" if inner is None else f" {_OPS.get(type(inner), '?')!r}")


def decode(data: bytes | memoryview, now: float = 0.0) -> Envelope:
    """The envelope in ``data``; a request's deadline is ``now`` (loop time) plus what was left.

    Raises Malformed (a ProtocolError that names the field) for anything else than one valid message.
    """
    if len(data) > MAX_MESSAGE:
        raise Malformed(f"a message of {len(data)} bytes, at most {MAX_MESSAGE} are taken")
    wire = unpack(data, MAX_NODES)
    if type(wire) is not dict:
        raise Malformed(f"not a message: {type(wire).__name__} instead of a map")
    id, version = wire.pop("id", None), wire.pop("v", None)
    if type(id) is not int or not 0 <= id <= _MAX_ID:
        raise Malformed("not a message: no id")
    if version != PROTOCOL or type(version) is not int:
        text = f"the other end speaks protocol {shown(version)}, this one {PROTOCOL}: use one version of etha"
        raise Malformed(text, id)
    try:
        return _envelope(id, wire, now)
    except Mismatch as error:
        raise Malformed(f"malformed message {id}: {error}", id) from None


def unpack(data: bytes | memoryview, most: int) -> Any:
    """The one msgpack value in ``data``, none of its collections of more than ``most`` items; Malformed.

    msgpack allocates an array as long as its header says. So where one may be long, the whole is walked
    first without building anything: what is promised and does not follow costs nothing.
    """
    raw = bytes(data)
    try:
        if b"\xdc" in raw or b"\xdd" in raw:  # heads of arrays of 16 items and more
            walk = msgpack.Unpacker(max_buffer_size=len(raw))
            walk.feed(raw)
            walk.skip()
        return msgpack.unpackb(
            raw,
            strict_map_key=True,
            max_str_len=len(raw),
            max_bin_len=len(raw),
            max_array_len=most,
            max_map_len=most,
            max_ext_len=0,
        )
    except msgpack.OutOfData:
        raise Malformed("not msgpack: it ends too early") from None
    except ValueError as error:  # msgpack's other errors and bad UTF-8 are all ValueErrors
        raise Malformed(f"not msgpack: {error}") from None


def _envelope(id: int, wire: dict[str, Any], now: float) -> Envelope:
    keys = wire.keys()
    if keys == {"op", "left", "args"}:
        if id == 0:
            raise Mismatch("a request needs an id above 0")
        left = wire["left"]
        if left is not None and (type(left) not in (float, int) or not math.isfinite(left)):
            raise Mismatch(f"left: expected seconds or null, got {shown(left)}")
        deadline = math.inf if left is None else now + max(0.0, left)
        return Request(id, left, _message(wire["op"], wire["args"]), deadline)
    if len(wire) != 1:
        raise Mismatch(f"no envelope has the fields {sorted(map(shown, keys))[:8]}")
    ((kind, body),) = wire.items()
    match kind:
        case "ok" | "push":
            if type(body) is not dict or body.keys() != {"op", "args"}:
                raise Mismatch(f"{kind}: expected op and args")
            inner = _message(body["op"], body["args"])
            return Reply(id, inner) if kind == "ok" else Push(id, inner)
        case "error":
            return _failure(id, body)
        case "cancel" if body is True:
            return Cancel(id)
    raise Mismatch(f"no envelope has the field {shown(kind)}")


def _message(op: Any, args: Any) -> Any:
    found = _BY_OP.get(op) if type(op) is str else None
    if found is None:
        raise Mismatch(f"unknown operation {shown(op)}")
    try:
        return found[1](args)
    except Mismatch as error:
        error.path.append(op)
        raise


def _failure(id: int, body: Any) -> Failure:
    if type(body) is not dict or body.keys() != {"code", "text", "data", "traceback"}:
        raise Mismatch("error: expected code, text, data, traceback")
    code, text, data, traceback = body["code"], body["text"], body["data"], body["traceback"]
    if type(code) is not str or len(code) > MAX_STRING or type(text) is not str or type(data) is not dict:
        raise Mismatch("error: code and text are text, data is a map")
    if traceback is not None and type(traceback) is not str:
        raise Mismatch("error.traceback: expected text or null")
    plain(data)
    try:
        return Failure(id, from_wire(body, traceback), traceback)
    except (TypeError, ValueError, AttributeError, KeyError) as error:  # data that its class does not take
        raise Mismatch(f"error.data of {shown(code)}: {error}") from None
