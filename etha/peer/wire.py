"""Peer messages <-> bytes: one msgpack map per message, decoded strictly and within bounds. Pure.

    {"v": 1, "op": "ready", "scope": [pair, epoch, batch, generation] | null, "args": {...}}

Messages are structs as in the bus's ``schema``. Errors inside messages travel as code, text and data. What is ``Said``
has a scope. Hello, Welcome, Beat and Bye belong to the link itself and have none.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw
from msgspec.msgpack import Decoder, Encoder

from etha.bus.codec import Malformed, made_error, plain_scalar
from etha.bus.schema import JsonObject, StrictStruct, Text
from etha.config import check_name
from etha.decoders import decoder, made_alone
from etha.errors import EthaError, ProtocolError
from etha.peer.introductions import Introduction
from etha.peer.messages import OPS, Message, message

__all__ = [
    "MAX_MESSAGE",
    "MAX_TOGETHER",
    "PROTOCOL",
    "Beat",
    "Bye",
    "Control",
    "Envelope",
    "Hello",
    "Malformed",
    "Said",
    "Scope",
    "Welcome",
    "decode",
    "encode",
]

#: Version of these messages. Raise it when a message gains, loses or changes a field: neither end takes unknown ones.
PROTOCOL = 8
#: Most messages that travel together, each as a frame of its own of one ZeroMQ message.
MAX_TOGETHER = 16
#: Most bytes of one message. Both ends set this limit on their sockets, too.
MAX_MESSAGE = 1 << 23
#: Of an error: most characters of its text and of its remote traceback, and most bytes of its data. More is cut off.
MAX_TEXT = 1 << 15
MAX_DATA = 1 << 20
_MAX_INT = (1 << 53) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What a message is about: one registration of a batch in one epoch of a pair.

    ``batch`` "" with ``generation`` 0 stands for the pair itself.
    """

    pair: str
    epoch: int
    batch: str = ""
    generation: int = 0

    def __post_init__(self) -> None:
        check_name("pair", self.pair)
        if self.batch:
            check_name("batch", self.batch)
        for name, number in (("epoch", self.epoch), ("generation", self.generation)):
            if type(number) is not int or not 0 <= number <= _MAX_INT:
                raise ProtocolError(f"{name} {number!r} is no number from 0 to {_MAX_INT}")

    def __str__(self) -> str:
        of = f" batch {self.batch} generation {self.generation}" if self.batch else ""
        return f"pair {self.pair} epoch {self.epoch}{of}"


@message("hello")
class Hello(StrictStruct, frozen=True, kw_only=True):
    """First on every link. ``losses``: losses of links between the two that the sender knows of (``sessions``)."""

    version: Annotated[str, Meta(max_length=100)]
    losses: int


@message("welcome")
class Welcome(StrictStruct, frozen=True, kw_only=True):
    """The answer to Hello: the link is open."""

    version: Annotated[str, Meta(max_length=100)]


@message("beat")
class Beat(StrictStruct, frozen=True, kw_only=True):
    """Beat ``number`` of the agent that opened the link; it comes back unchanged."""

    number: int


@message("bye")
class Bye(StrictStruct, frozen=True, kw_only=True):
    """The sender takes no further part in this link; ``text`` says why."""

    text: Annotated[str, Meta(max_length=MAX_TEXT)]


Control = Hello | Welcome | Beat | Bye
#: What agents say over an open link; it has a scope.
Said = Message | Introduction


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message and what it is about. ``scope`` is None exactly for the link's own messages."""

    scope: Scope | None
    message: Said | Control


class _Error(StrictStruct, frozen=True, kw_only=True):
    """An EthaError on the wire."""

    code: Annotated[str, Meta(max_length=100)]
    text: Annotated[str, Meta(max_length=MAX_TEXT)]
    data: JsonObject
    traceback: Annotated[str, Meta(max_length=MAX_TEXT)] | None


def _error_to_wire(error: EthaError) -> dict[str, Any]:
    data = error.data()
    # Losing details must never lose the message: an ABORT without its list of violations still aborts.
    try:
        if len(_ENCODER.encode(data)) > MAX_DATA:
            data = {}
    except (TypeError, ValueError, OverflowError, RecursionError):
        data = {}
    trace = error.remote_traceback
    return {
        "code": error.code,
        "text": _sound(error.message)[:MAX_TEXT],
        "data": data,
        "traceback": None if trace is None else _sound(trace)[-MAX_TEXT:],
    }


def _sound(text: str) -> str:
    """``text`` without lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


class _Wire(StrictStruct, frozen=True, kw_only=True):
    v: int
    op: Text
    scope: tuple[Text, int, Text, int] | None
    args: Raw


def _shape(cls: type) -> tuple[type, frozenset[str]]:
    """What is decoded as ``cls``, and its fields that hold errors, which are decoded as ``_Error``."""
    hints = typing.get_type_hints(cls, include_extras=True)
    errors = frozenset(name for name, hint in hints.items() if hint is EthaError)
    if not errors:
        return cls, errors
    shape = [(name, _Error if name in errors else hint) for name, hint in hints.items()]
    return msgspec.defstruct(cls.__name__, shape, bases=(StrictStruct,)), errors


_CONTROLS = frozenset(typing.get_args(Control))
_BY_OP: dict[str, type] = {op: cls for cls, op in OPS.items()}
_SHAPES = {cls: _shape(cls) for cls in OPS}
_DECODERS: dict[type, tuple[Decoder[Any], frozenset[str]]] = made_alone(
    lambda: {cls: (Decoder(shape), errors) for cls, (shape, errors) in _SHAPES.items()}
)
_WIRE = decoder(_Wire)


def _default(value: Any) -> Any:
    return _error_to_wire(value) if isinstance(value, EthaError) else plain_scalar(value)


_ENCODER = Encoder(enc_hook=_default)


def encode(scope: Scope | None, message: Said | Control) -> bytes:
    """The bytes of ``message``. ProtocolError for what cannot be encoded or is larger than MAX_MESSAGE."""
    op = OPS.get(type(message))
    if op is None or (scope is None) is not (type(message) in _CONTROLS):
        raise ProtocolError(f"{type(message).__name__} with scope {scope} is no message between agents")
    about = None if scope is None else (scope.pair, scope.epoch, scope.batch, scope.generation)
    try:
        data = _ENCODER.encode({"v": PROTOCOL, "op": op, "scope": about, "args": message})
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"{op} cannot be encoded: {error}") from None
    if len(data) > MAX_MESSAGE:
        raise ProtocolError(f"{op} has {len(data)} bytes, at most {MAX_MESSAGE} travel")
    return data


def decode(data: bytes | memoryview) -> Envelope:
    """The message in ``data``. Malformed (a ProtocolError that names the field) for anything else."""
    if len(data) > MAX_MESSAGE:
        raise Malformed(f"a message of {len(data)} bytes, at most {MAX_MESSAGE} are taken")
    try:
        wire = _WIRE.decode(data)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not a message between agents: {error}") from None
    if wire.v != PROTOCOL:
        raise Malformed(f"the other agent speaks protocol {wire.v}, this one {PROTOCOL}: use one version of etha")
    cls = _BY_OP.get(wire.op)
    if cls is None:
        raise Malformed(f"unknown message {wire.op[:60]!r}")
    try:
        scope = None if wire.scope is None else _scope(*wire.scope)
        if (scope is None) is not (cls in _CONTROLS):
            raise ValueError("its scope is missing" if scope is None else "a scope where none belongs")
        return Envelope(scope, _message(cls, wire.args))
    except (ValueError, RecursionError) as error:
        raise Malformed(f"malformed {wire.op}: {error}") from None


# The messages of a transfer have the scope of those before it.
@lru_cache(maxsize=1024)
def _scope(pair: str, epoch: int, batch: str, generation: int) -> Scope:
    try:
        return Scope(pair=pair, epoch=epoch, batch=batch, generation=generation)
    except EthaError as error:
        raise ValueError(f"scope: {error}") from None


def _message(cls: type, args: Raw) -> Any:
    decoder, errors = _DECODERS[cls]
    try:
        found = decoder.decode(args)
    except EthaError as error:  # raised by the message's own __post_init__
        raise ValueError(str(error)) from None
    if not errors:
        return found
    values = msgspec.structs.asdict(found)
    return cls(**values | {name: made_error(*msgspec.structs.astuple(values[name])) for name in errors})
