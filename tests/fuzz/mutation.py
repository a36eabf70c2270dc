"""Mutations of valid messages: of their bytes, and of the plain data inside them. Seeded, nothing else."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import msgpack

#: Numbers at the edges of what fields, machines and formats can hold.
NUMBERS: tuple[Any, ...] = (
    -1, 0, 1, 2, 63, 64, 65, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 53, (1 << 62) - 1,
    (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 31), -(1 << 63), math.nan, math.inf, -math.inf, -0.0, 1e308, 0.5,
)  # fmt: skip
TEXTS = (
    "", "x", "\0", "a b", "../../etc/passwd", "%s%n", "\N{PILE OF POO}", "x" * 101, "x" * 70_000, "\ud800", "nan",
    "None", "true", "-", "--5", "+1", "1_0", "٣", "0" * 5000, "9" * 5000, "1e999", "{", "[]", "{}", '"', "null",
)  # fmt: skip
#: msgpack headers that promise far more than follows.
PROMISES = tuple(
    bytes.fromhex(h)
    for h in ("ddffffffff", "dfffffffff", "dbffffffff", "c6ffffffff", "c9ffffffff7f", "dcffff", "deffff", "dd00100000")
)


def deep(depth: int) -> list[Any]:
    """Lists in lists."""
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


def other(value: Any, rng: random.Random) -> Any:
    """Some plain value in place of ``value``: another type, an edge, or much too much of it."""
    match rng.randrange(9):
        case 0 | 1:
            return rng.choice(NUMBERS)
        case 2 | 3:
            return rng.choice(TEXTS)
        case 4:
            return rng.choice((None, True, False, b"", b"\xff" * 40, [], {}, [[]], {"": {}}))
        case 5:
            return deep(rng.choice((1, 5, 31, 33, 200, 600)))
        case 6:
            return [value] * rng.choice((1, 2, 3) if isinstance(value, dict | list | str | bytes) else (1, 2, 1000))
        case 7:
            return {"op": value, "x": value}
        case _ if isinstance(value, int) and not isinstance(value, bool):
            return value + rng.choice((-1, 1, 1 << 40))
        case _ if isinstance(value, str) and value:
            at = rng.randrange(len(value))
            return value[:at] + rng.choice(TEXTS[:9]) + value[at + rng.randrange(2) :]
        case _:
            return str(value)


def reshape(value: Any, rng: random.Random) -> Any:
    """``value`` (plain data, changed in place) with one thing in it replaced, doubled, dropped or renamed."""
    places: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict | list):
            keys = list(item) if isinstance(item, dict) else list(range(len(item)))
            places += [(item, key) for key in keys]
            stack += [item[key] for key in keys]
    if not places:
        return other(value, rng)
    holder, key = rng.choice(places)
    match rng.randrange(8):
        case 0 if isinstance(holder, dict):
            name = rng.choice((*NUMBERS, *TEXTS)) if rng.random() < 0.3 else f"{key}x"
            holder[name] = holder.pop(key)
        case 1:
            del holder[key]
        case 2 if isinstance(holder, list):
            holder.insert(key, holder[key])
        case 3:
            far, name = rng.choice(places)
            holder[key] = plain_copy(far[name]) if far is not holder and name_in(far, name) else None
        case _:
            holder[key] = other(holder[key], rng)
    return value


def name_in(holder: Any, key: Any) -> bool:
    """Whether the place is still there."""
    return key in holder if isinstance(holder, dict) else key < len(holder)


def plain_copy(value: Any, depth: int = 100) -> Any:
    """A copy of plain data that shares nothing; null where it is nested too deeply."""
    if not isinstance(value, dict | list) or depth == 0:
        return None if depth == 0 else value
    if isinstance(value, dict):
        return {k: plain_copy(v, depth - 1) for k, v in value.items()}
    return [plain_copy(v, depth - 1) for v in value]


def damage(data: bytes, rng: random.Random, spare: bytes = b"") -> bytes:
    """``data`` with bits flipped, pieces cut, doubled, filled in, or another message's (``spare``) put in."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(8):
            case 0 | 1 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 2 if at < len(out):
                out[at] = rng.choice((0, 0x7F, 0x80, 0xC1, 0xD4, 0xFF))
            case 3:
                del out[at : at + rng.choice((1, 1, 4, 64))]
            case 4:
                out[at:at] = rng.randbytes(rng.choice((1, 2, 8, 300)))
            case 5:
                out[at:at] = rng.choice(PROMISES) * rng.choice((1, 1, 40))
            case 6:
                start = rng.randrange(len(spare) + 1)
                out[at:] = spare[start:]
            case _:
                out[at:at] = out[at : at + rng.randrange(1, 64)]
    return bytes(out)


def mutated(message: bytes, rng: random.Random, spare: bytes = b"") -> bytes:
    """A msgpack message that is somewhat wrong: in its bytes, or valid msgpack of the wrong things."""
    if rng.random() < 0.4:
        return damage(message, rng, spare)
    plain = msgpack.unpackb(message)
    for _ in range(rng.choice((1, 1, 2, 3))):
        plain = reshape(plain, rng)
    try:
        return bytes(msgpack.packb(plain, unicode_errors="surrogatepass"))
    except (ValueError, TypeError, OverflowError):  # deeper or larger than msgpack can say
        return damage(message, rng, spare)


def mutated_text(text: str, rng: random.Random) -> str:
    """A value of Redis that is somewhat wrong: JSON of the wrong things, damaged JSON, or any text."""
    return _wrong_text(text, rng).encode("utf-8", "replace").decode()  # as the Redis client reads it


def _wrong_text(text: str, rng: random.Random) -> str:
    match rng.randrange(4):
        case 0:
            return rng.choice((*TEXTS, "[" * 60_000, '{"a":' * 20_000, str(rng.choice(NUMBERS))))
        case 1:
            return damage(text.encode(), rng).decode("utf-8", "replace")
        case _:
            try:
                plain = json.loads(text)
                return json.dumps(reshape(plain, rng), default=repr, skipkeys=True)
            except (ValueError, RecursionError):
                return str(other(text, rng))


def mutated_hash(values: dict[str, str], rng: random.Random) -> dict[str, str]:
    """A hash of Redis of which a field or two are wrong, missing, or too many."""
    out = dict(values)
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(list(out) or ["x"])
        match rng.randrange(8):
            case 0:
                out.pop(name, None)
            case 1:
                out[mutated_text(name, rng)[:200]] = out.get(name, "")
            case 2:
                out[name] = out[rng.choice(list(out) or [name])] if out else ""
            case _:
                out[name] = mutated_text(out.get(name, ""), rng)
    return out
