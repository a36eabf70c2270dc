"""Peer messages <-> bytes: one msgpack map per message, decoded strictly and within bounds.

    {"v": 1, "op": "ready", "scope": [pair, epoch, batch, generation] | null, "args": {...}}

Pure; fields are checked by the bus's schema, errors inside messages travel as code, text and data.
What is ``Said`` has a scope; Hello, Welcome, Beat and Bye are the link's own, without.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Annotated, Any

import msgpack  # type: ignore[import-untyped, unused-ignore]

from etha.bus.codec import Malformed, unpack
from etha.bus.schema import MAX_ITEMS, STRUCTS, Bounds, Checker, Mismatch, plain, shown, struct
from etha.config import check_name
from etha.errors import EthaError, ProtocolError, from_wire
from etha.peer.introductions import Introduction
from etha.peer.messages import OPS, Message, message

__all__ = [
    "MAX_MESSAGE",
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

PROTOCOL = 1
#: Bytes of one message; both ends give it to their sockets as well.
MAX_MESSAGE = 1 << 23
#: Of an error: characters of its text and of its remote traceback, bytes of its data; more is cut off.
MAX_TEXT = 1 << 15
MAX_DATA = 1 << 20
_MAX_INT = (1 << 53) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What a message is about: one registration of a batch in one forming of a pair.

    ``batch`` "" with ``generation`` 0 is the pair itself.
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
@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First on every link. ``losses``: how often the sender has lost this peer, so that both lose alike."""

    version: Annotated[str, Bounds(max=100)]
    losses: int


@message("welcome")
@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The answer to Hello: the link stands."""

    version: Annotated[str, Bounds(max=100)]


@message("beat")
@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Beat ``number`` of the one who opened the link; comes back as it is."""

    number: int


@message("bye")
@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    """The sender takes part in this link no more; ``text`` says why."""

    text: Annotated[str, Bounds(max=MAX_TEXT)]


Control = Hello | Welcome | Beat | Bye
#: What agents say over a link that stands; it has a scope.
Said = Message | Introduction


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message and what it is about; ``scope`` is None exactly for the link's own messages."""

    scope: Scope | None
    message: Said | Control


@dataclass(frozen=True, slots=True, kw_only=True)
class _Error:
    """An EthaError as it travels."""

    code: Annotated[str, Bounds(max=100)]
    text: Annotated[str, Bounds(max=MAX_TEXT)]
    data: dict[str, Any] = field(default_factory=dict)
    traceback: Annotated[str, Bounds(max=MAX_TEXT)] | None = None


def _error_to_wire(error: EthaError) -> dict[str, Any]:
    data = error.data()
    # Losing details must never lose the message: an ABORT without its list of violations still aborts.
    try:
        if len(msgpack.packb(data)) > MAX_DATA:
            data = {}
    except (TypeError, ValueError, OverflowError):
        data = {}
    trace = error.remote_traceback
    return {
        "code": error.code,
        "text": _sound(error.message)[:MAX_TEXT],
        "data": data,
        "traceback": None if trace is None else _sound(trace)[-MAX_TEXT:],
    }


def _sound(text: str) -> str:
    """``text`` without lone surrogates, which have no UTF-8."""
    return text.encode("utf-8", "replace").decode()


def _error_from_wire(wire: _Error) -> EthaError:
    try:
        plain(wire.data)
        return from_wire({"code": wire.code, "text": wire.text, "data": wire.data}, wire.traceback)
    except (TypeError, ValueError, AttributeError, KeyError) as error:  # data that its class does not take
        raise Mismatch(f"data of error {shown(wire.code)}: {error}") from None


def _checker(cls: type) -> Checker:
    """The strict checker of ``cls``: errors inside are checked as ``_Error`` and then made again."""
    hints = typing.get_type_hints(cls, include_extras=True)
    errors = [name for name, hint in hints.items() if hint is EthaError]
    if not errors:
        return struct(cls)
    shape = [(f.name, _Error if f.name in errors else hints[f.name]) for f in fields(cls)]
    check = struct(make_dataclass(cls.__name__, shape, frozen=True, slots=True, kw_only=True))

    def made(value: Any) -> Any:
        checked = check(value)
        values = {f.name: getattr(checked, f.name) for f in fields(cls)}
        return cls(**values | {name: _error_from_wire(values[name]) for name in errors})

    return made


_CONTROLS = frozenset(typing.get_args(Control))
_NAMES: dict[type, tuple[str, ...]] = {cls: tuple(f.name for f in fields(cls)) for cls in OPS}
_BY_OP: dict[str, tuple[type, Checker]] = {op: (cls, _checker(cls)) for cls, op in OPS.items()}


def _default(value: Any) -> Any:
    if isinstance(value, EthaError):
        return _error_to_wire(value)
    if (names := STRUCTS.get(type(value))) is not None:
        return {name: getattr(value, name) for name in names}
    raise TypeError(f"{type(value).__name__} cannot travel")


def encode(scope: Scope | None, message: Said | Control) -> bytes:
    """The bytes of ``message``; ProtocolError for what cannot travel or is larger than MAX_MESSAGE."""
    op = OPS.get(type(message))
    if op is None or (scope is None) is not (type(message) in _CONTROLS):
        raise ProtocolError(f"{type(message).__name__} with scope {scope} is no message between agents")
    wire = {
        "v": PROTOCOL,
        "op": op,
        "scope": None if scope is None else (scope.pair, scope.epoch, scope.batch, scope.generation),
        "args": {name: getattr(message, name) for name in _NAMES[type(message)]},
    }
    try:
        data = bytes(msgpack.packb(wire, default=_default))
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"{op} cannot be encoded: {error}") from None
    if len(data) > MAX_MESSAGE:
        raise ProtocolError(f"{op} has {len(data)} bytes, at most {MAX_MESSAGE} travel")
    return data


def decode(data: bytes | memoryview) -> Envelope:
    """The message in ``data``; Malformed (a ProtocolError that names the field) for anything else than one."""
    if len(data) > MAX_MESSAGE:
        raise Malformed(f"a message of {len(data)} bytes, at most {MAX_MESSAGE} are taken")
    wire = unpack(data, MAX_ITEMS)
    if type(wire) is not dict or wire.keys() != {"v", "op", "scope", "args"}:
        raise Malformed("not a message between agents")
    if type(wire["v"]) is not int or wire["v"] != PROTOCOL:
        theirs = shown(wire["v"])
        raise Malformed(f"the other agent speaks protocol {theirs}, this one {PROTOCOL}: use one version of etha")
    found = _BY_OP.get(wire["op"]) if type(wire["op"]) is str else None
    if found is None:
        raise Malformed(f"unknown message {shown(wire['op'])}")
    cls, check = found
    try:
        scope = _scope(wire["scope"])
        if (scope is None) is not (cls in _CONTROLS):
            raise Mismatch("its scope is missing" if scope is None else "a scope where none belongs")
        return Envelope(scope, check(wire["args"]))
    except Mismatch as error:
        raise Malformed(f"malformed {wire['op']}: {error}") from None


def _scope(value: Any) -> Scope | None:
    if value is None:
        return None
    if type(value) is not list or [type(item) for item in value] != [str, int, str, int]:
        raise Mismatch("scope: expected pair, epoch, batch, generation")
    try:
        return Scope(pair=value[0], epoch=value[1], batch=value[2], generation=value[3])
    except EthaError as error:
        raise Mismatch(f"scope: {error}") from None
