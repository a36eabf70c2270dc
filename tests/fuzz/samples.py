"""Valid messages of every kind, made from the type hints of their structs: new kinds are covered as they come."""

from __future__ import annotations

import random
import types
import typing
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from etha.bus import codec
from etha.bus import handshake as handshake
from etha.bus import messages as messages
from etha.bus.codec import Cancel, Failure, Push, Reply, Request
from etha.bus.schema import JsonObject
from etha.errors import EthaError, PeerLostError, ProtocolError, RegistrationError, RendezvousTimeoutError, Violation
from etha.peer import wire
from etha.peer.wire import Scope

LAYOUT = {"mesh": {"shape": [2], "ranks": None}, "placements": [["S", 0]]}
REGION = {"mesh": {"shape": [1], "ranks": [3]}, "region": [[[0, 2], [5, 9]], [[1, 4]]]}
ERRORS = (
    ProtocolError("spoken wrongly"),
    PeerLostError("gone", reason="died"),
    RendezvousTimeoutError("late", missing={"t": (0, 1)}),
    RegistrationError("no", violations=[Violation(code="dtype", name="w", side="a", rank=1, text="no")]),
)


def of_hint(hint: Any, rng: random.Random) -> Any:
    """A value that a field of type ``hint`` takes."""
    origin, args = get_origin(hint), get_args(hint)
    if hint == JsonObject:
        return rng.choice((LAYOUT, REGION, {}, {"a": [1, {"b": "c"}], "d": None}))
    if origin is Annotated:
        value = of_hint(args[0], rng)
        return value[: args[1].max_length] if args[0] is bytes else value
    if origin is Union or origin is types.UnionType:
        return of_hint(rng.choice(args), rng)
    if origin is Literal:
        return rng.choice(args)
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(of_hint(args[0], rng) for _ in range(rng.randrange(4)))
        return tuple(of_hint(arg, rng) for arg in args)
    if origin is dict:
        return {rng.choice("abc"): of_hint(args[1], rng) for _ in range(rng.randrange(3))}
    if isinstance(hint, type) and issubclass(hint, EthaError):
        return rng.choice(ERRORS)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return of_class(hint, rng)
    simple: dict[Any, Any] = {
        int: rng.choice((0, 1, 2, 7, 4096)),
        float: rng.choice((0.0, 0.5, 12.0)),
        bool: rng.random() < 0.5,
        str: rng.choice(("trainer", "inference", "weights", "step_0", "float32", "")),
        bytes: rng.randbytes(rng.choice((0, 8, 40))),
        types.NoneType: None,
        None: None,
    }
    return simple[hint]


def of_class(cls: type, rng: random.Random) -> Any:
    """An instance of a struct."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return cls(**{field.name: of_hint(hints[field.name], rng) for field in msgspec.structs.fields(cls)})


def bus_messages(rng: random.Random) -> list[bytes]:
    """One of every envelope with one of every message that etha itself registers, encoded."""
    kinds = [cls for cls in codec.MESSAGES.values() if cls.__module__.startswith("etha.")]
    found: list[codec.Envelope] = [Cancel(3)]
    for cls in kinds:
        made = of_class(cls, rng)
        found += [Request(rng.randrange(1, 99), rng.choice((None, 2.5)), made), Reply(4, made), Push(0, made)]
    found += [Failure(5, error, rng.choice((None, "Traceback ..."))) for error in ERRORS]
    return [codec.encode(envelope) for envelope in found]


def peer_messages(rng: random.Random, scope: Scope | None = None) -> list[bytes]:
    """One of everything that agents say to each other, encoded."""
    scope = scope or Scope(pair="weights", epoch=1, batch="step_0", generation=1)
    found = [(scope, of_class(cls, rng)) for cls in typing.get_args(wire.Said)]
    found += [(None, of_class(cls, rng)) for cls in typing.get_args(wire.Control)]
    return [wire.encode(*said) for said in found]
