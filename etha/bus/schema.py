"""Type hints of a message's fields, compiled once into a strict checker of untrusted plain data.

Pure. What comes out of a checker is exactly what the hints say: no coercion but list -> tuple and
int -> float, ``bool`` is no ``int``, every field present and no other, everything bounded. It knows
nothing of envelopes, operations or msgpack: that is ``codec``.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from etha.errors import EthaError

#: Bounds where a field says nothing else: characters, bytes, items of one collection.
MAX_STRING = 1 << 16
MAX_BYTES = 1 << 26
MAX_ITEMS = 1 << 16
#: Nesting and nodes of a ``dict[str, Any]``.
MAX_DEPTH = 32
MAX_NODES = 1 << 20

Checker = Callable[[Any], Any]

#: dataclass -> its field names: what ``codec`` needs to encode messages and what is nested in them.
STRUCTS: dict[type, tuple[str, ...]] = {}
_CHECKERS: dict[type, Checker] = {}


@dataclass(frozen=True, slots=True)
class Bounds:
    """``Annotated[str, Bounds(max=...)]``: the most characters, bytes or items that a field may have."""

    max: int


class Mismatch(Exception):
    """A value is not what its hint says; ``str()`` names the path to it from the message down."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        self.path: list[str] = []

    def __str__(self) -> str:
        return f"{''.join(reversed(self.path)).lstrip('.') or 'message'}: {self.text}"


def shown(value: object) -> str:
    """An untrusted value in at most 60 characters; what is large or nested is not looked at."""
    if isinstance(value, str | bytes):
        value = value[:60]
    text = repr(value) if isinstance(value, str | bytes | int | float | None) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _scalar(kind: type, name: str) -> Checker:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise Mismatch(f"expected {name}, got {shown(value)}")
        return value

    return check


def _number(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise Mismatch(f"expected float, got {shown(value)}") from None
    raise Mismatch(f"expected float, got {shown(value)}")


def _sized(kind: type[str] | type[bytes], name: str, limit: int) -> Checker:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise Mismatch(f"expected {name}, got {shown(value)}")
        if len(value) > limit:
            raise Mismatch(f"{len(value)} long, at most {limit} allowed")
        return value

    return check


def _literal(allowed: tuple[Any, ...]) -> Checker:
    # Keyed by type as well: True == 1 and hashes alike.
    known = {(type(value), value) for value in allowed}

    def check(value: Any) -> Any:
        if type(value) not in (str, int, bool, bytes, types.NoneType) or (type(value), value) not in known:
            raise Mismatch(f"expected one of {', '.join(map(repr, allowed))}, got {shown(value)}")
        return value

    return check


def _items(item: Checker, limit: int) -> Checker:
    def check(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise Mismatch(f"expected an array, got {shown(value)}")
        if len(value) > limit:
            raise Mismatch(f"{len(value)} items, at most {limit} allowed")
        index = 0
        try:
            for index, element in enumerate(value):
                value[index] = item(element)
        except Mismatch as error:
            error.path.append(f"[{index}]")
            raise
        return tuple(value)

    return check


def _record(items: Sequence[Checker]) -> Checker:
    def check(value: Any) -> tuple[Any, ...]:
        if type(value) is not list or len(value) != len(items):
            got = f"{len(value)} items" if type(value) is list else shown(value)
            raise Mismatch(f"expected an array of {len(items)}, got {got}")
        index = 0
        try:
            for index, (item, element) in enumerate(zip(items, value, strict=True)):
                value[index] = item(element)
        except Mismatch as error:
            error.path.append(f"[{index}]")
            raise
        return tuple(value)

    return check


def _mapping(item: Checker, limit: int) -> Checker:
    def check(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise Mismatch(f"expected a map, got {shown(value)}")
        if len(value) > limit:
            raise Mismatch(f"{len(value)} items, at most {limit} allowed")
        for key, element in value.items():
            if type(key) is not str or len(key) > MAX_STRING:
                raise Mismatch(f"expected text of at most {MAX_STRING} as a key, got {shown(key)}")
            try:
                value[key] = item(element)
            except Mismatch as error:
                error.path.append(f"[{shown(key)}]")
                raise
        return value

    return check


def plain(value: Any) -> Any:
    """``value`` itself if it is bounded plain data (None, bool, int, float, str, bytes, list, dict of str)."""
    nodes, stack = 0, [(value, 0)]
    while stack:
        item, depth = stack.pop()
        nodes += 1
        if depth > MAX_DEPTH or nodes > MAX_NODES:
            raise Mismatch(f"plain data deeper than {MAX_DEPTH} or of more than {MAX_NODES} values")
        kind = type(item)
        if kind is dict:
            if not all(type(key) is str for key in item):
                raise Mismatch("a key that is no text")
            stack += [(element, depth + 1) for element in item.values()]
        elif kind is list:
            stack += [(element, depth + 1) for element in item]
        elif (kind is str and len(item) > MAX_BYTES) or kind not in (str, bytes, int, float, bool, types.NoneType):
            raise Mismatch(f"not plain data: {shown(item)}")
    return value


def _union(arms: Sequence[tuple[Checker, frozenset[type]]], hint: Any) -> tuple[Checker, frozenset[type]]:
    by_type: dict[type, Checker] = {}
    for arm, accepted in arms:
        for kind in accepted:
            if kind in by_type:
                raise TypeError(f"ambiguous union {hint}: two arms take a {kind.__name__}")
            by_type[kind] = arm

    def check(value: Any) -> Any:
        arm = by_type.get(type(value))
        if arm is None:
            names = ", ".join(sorted(kind.__name__ for kind in by_type))
            raise Mismatch(f"expected one of {names}, got {shown(value)}")
        return arm(value)

    return check, frozenset(by_type)


_SCALARS: dict[Any, tuple[Checker, frozenset[type]]] = {
    int: (_scalar(int, "int"), frozenset({int})),
    bool: (_scalar(bool, "bool"), frozenset({bool})),
    float: (_number, frozenset({float, int})),
    types.NoneType: (_scalar(types.NoneType, "null"), frozenset({types.NoneType})),
    None: (_scalar(types.NoneType, "null"), frozenset({types.NoneType})),
}


def _compile(hint: Any, bounds: Bounds | None = None) -> tuple[Checker, frozenset[type]]:
    """The checker of ``hint`` and the plain types that it looks at; TypeError for an unsupported hint."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        found = [extra for extra in args[1:] if isinstance(extra, Bounds)]
        return _compile(args[0], found[0] if found else bounds)
    if origin is Union or origin is types.UnionType:
        return _union([_compile(arm, None if arm is types.NoneType else bounds) for arm in args], hint)
    if hint is str:
        return _sized(str, "text", bounds.max if bounds else MAX_STRING), frozenset({str})
    if hint is bytes:
        return _sized(bytes, "bytes", bounds.max if bounds else MAX_BYTES), frozenset({bytes})
    limit = bounds.max if bounds else MAX_ITEMS
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _items(_compile(args[0])[0], limit), frozenset({list})
    if origin is dict and args[0] is str:
        if args[1] is Any:
            return _bounded_plain(limit), frozenset({dict})
        return _mapping(_compile(args[1])[0], limit), frozenset({dict})
    if bounds is not None:
        raise TypeError(f"Bounds on {hint}: only text, bytes, tuple[T, ...] and dict have a size")
    if origin is Literal:
        return _literal(args), frozenset(type(value) for value in args)
    if origin is tuple:
        return _record([_compile(arg)[0] for arg in args]), frozenset({list})
    if isinstance(hint, type) and is_dataclass(hint):
        return struct(hint), frozenset({dict})
    try:
        return _SCALARS[hint]
    except (KeyError, TypeError):
        raise TypeError(f"unsupported hint {hint!r} in a message") from None


def _bounded_plain(limit: int) -> Checker:
    def check(value: Any) -> dict[str, Any]:
        if type(value) is not dict or len(value) > limit:
            raise Mismatch(f"expected a map of at most {limit}, got {shown(value)}")
        return typing.cast("dict[str, Any]", plain(value))

    return check


def struct(cls: type) -> Checker:
    """The checker that makes a ``cls`` (a dataclass) of a map with exactly its fields."""
    if cls in _CHECKERS:
        return _CHECKERS[cls]
    hints = typing.get_type_hints(cls, include_extras=True)
    names = tuple(field.name for field in fields(cls))
    checks: list[tuple[str, Checker]] = []
    for name in names:
        try:
            checks.append((name, _compile(hints[name])[0]))
        except TypeError as error:
            raise TypeError(f"{cls.__name__}.{name}: {error}") from None
    expected = frozenset(names)

    def check(value: Any) -> Any:
        if type(value) is not dict:
            raise Mismatch(f"expected a map, got {shown(value)}")
        if value.keys() != expected:
            missing = sorted(expected - value.keys())
            unknown = sorted(map(shown, islice(value.keys() - expected, 8)))
            raise Mismatch(f"fields missing: {missing or 'none'}, unknown: {unknown or 'none'}")
        name = ""
        try:
            for name, item in checks:
                value[name] = item(value[name])
        except Mismatch as error:
            error.path.append(f".{name}")
            raise
        try:
            return cls(**value)
        except (EthaError, ValueError, TypeError) as error:  # the message's own __post_init__
            raise Mismatch(str(error)) from None

    STRUCTS[cls] = names
    _CHECKERS[cls] = check
    return check
