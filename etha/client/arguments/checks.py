"""Checks of a client's arguments, before anything is sent: each returns its value or raises ConfigError.

Both clients, their handles, ``etha.testing`` and ``etha.empty`` use them. So a mistake has the same text everywhere and
never reaches the agent, which would report a protocol error.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from etha.config import MAX_WORLD
from etha.errors import ConfigError

#: Integers that fit a message: 64 bits, signed or unsigned.
LEAST_INT, MOST_INT = -(1 << 63), (1 << 64) - 1
MOST_SIZE = (1 << 63) - 1
#: Characters of a version label.
MAX_VERSION = 65_536


def shown(value: object) -> str:
    """``value`` as an error shows it: short, and safe if its ``repr`` fails."""
    try:
        text = repr(value)
    except Exception:  # int limits its digits, and a user's class may raise anything
        text = f"a {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:97]}..."


def check_timeout(value: Any, what: str) -> float:
    """Seconds, 0 or more; ``math.inf`` is allowed."""
    if isinstance(value, numbers.Real) and value is not True and value is not False:
        try:
            seconds = float(value)
        except (OverflowError, ValueError):
            raise ConfigError(f"{what}={shown(value)} is too large: use math.inf for no deadline") from None
        if seconds >= 0:  # False for NaN
            return seconds
    raise ConfigError(f"{what}={shown(value)} must be seconds, 0 or more (math.inf: no deadline)")


def check_version(value: Any) -> None:
    """None, an int of 64 bits, or a text that can be encoded and is not too long."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"version={shown(value)} must be an int or a str")
    if isinstance(value, int) and not LEAST_INT <= value <= MOST_INT:
        raise ConfigError(f"version={shown(value)} does not fit 64 bits ({LEAST_INT} to {MOST_INT}): use a str")
    if isinstance(value, str) and len(value) > MAX_VERSION:
        raise ConfigError(
            f"version={shown(value)} has {len(value):,} characters, at most {MAX_VERSION:,} are possible: shorten it"
        )
    if isinstance(value, str):
        check_text("version", value)


def check_text(what: str, value: str) -> str:
    """A text that can be encoded: no lone surrogates, as in undecodable file names."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{what} {shown(value)} has a surrogate at position {error.start}, which no text can hold: decode it first"
        ) from None
    return value


def check_flag(what: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{what}={shown(value)} must be True or False")
    return value


def check_callback(what: str, value: Any) -> None:
    """None or a callable."""
    if value is not None and not callable(value):
        raise ConfigError(f"{what}={shown(value)} cannot be called: give a function")


def check_optional_text(what: str, value: Any) -> None:
    """None or a text."""
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{what}={shown(value)} must be a str or None")


def check_bucket_size(value: Any) -> None:
    """None or a number of bytes."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_SIZE:
        raise ConfigError(f"bucket_size={shown(value)} must be a number of bytes, 1 to {MOST_SIZE}")


def check_whole(what: str, value: Any) -> int:
    """A whole number: an int or an integer type such as numpy's, but no bool, float or text."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except (TypeError, ValueError, RuntimeError):  # a tensor of several elements raises the last two
            pass
    raise ConfigError(f"{what} is {shown(value)}, not a whole number")


def check_shape(what: str, value: Any) -> tuple[int, ...]:
    """A shape: a sequence of whole numbers, 0 or more, whose product fits 63 bits."""
    sizes = check_sizes(what, value)
    if why := impossible(sizes):
        raise ConfigError(f"{what}: {why}")
    return sizes


def check_sizes(what: str, value: Any) -> tuple[int, ...]:
    """A sequence of whole numbers, which need not be a possible shape."""
    if isinstance(value, str | bytes | Mapping | Set) or not isinstance(value, Iterable):
        raise ConfigError(f"{what}={shown(value)} must be a shape, such as (4, 8)")
    try:
        entries = list(value)
    except TypeError:  # a tensor of no dims
        raise ConfigError(f"{what}={shown(value)} must be a shape, such as (4, 8)") from None
    return tuple(check_whole(f"{what}: size {dim}", size) for dim, size in enumerate(entries))


def impossible(sizes: tuple[int, ...]) -> str:
    """Why no tensor can have these sizes; "" if one can."""
    for dim, size in enumerate(sizes):
        if not 0 <= size <= MOST_SIZE:
            return f"size {dim} is {shown(size)}, not from 0 to {MOST_SIZE}"
    # For a tensor without elements, too, because torch computes its strides.
    most = math.prod(max(size, 1) for size in sizes)
    return f"{shown(sizes)} has more elements than fit 63 bits" if most > MOST_SIZE else ""


def check_mapping(what: str, value: Any, example: str) -> None:
    """None or a mapping."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{what}={shown(value)} must be a mapping, such as {example}")


def check_placements(what: str, value: Any) -> None:
    """None or a sequence of placements, one for each axis of the mesh. The layout checks each placement."""
    if value is not None and (isinstance(value, str) or not isinstance(value, Sequence)):
        raise ConfigError(f"{what}={shown(value)} must be a sequence, a placement for each axis, such as [Shard(0)]")


def check_rank(rank: Any, world_size: Any) -> None:
    """A rank inside a side, and a possible size of a side."""
    for what, value in (("rank", rank), ("expected_world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{what}={shown(value)} is not an int")
    if world_size > MAX_WORLD:
        raise ConfigError(f"expected_world_size={shown(world_size)}: a side has at most {MAX_WORLD} ranks")
    if world_size < 1:
        raise ConfigError(f"expected_world_size={shown(world_size)}: a side has at least 1 rank")
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"rank {shown(rank)} is not inside a side of {shown(world_size)} ranks (0 to {shown(world_size - 1)})"
        )


def check_ranks(value: Any) -> None:
    """None or a mapping: rank in the torch world -> rank in the side."""
    check_mapping("ranks", value, "{4: 0, 5: 1}")
    for key, rank in (value or {}).items():
        check_whole("ranks: a key", key)
        if not 0 <= check_whole(f"ranks[{shown(key)}]", rank) < MAX_WORLD:
            raise ConfigError(f"ranks[{shown(key)}]={shown(rank)} is no rank, 0 to {MAX_WORLD - 1}")


def check_each(what: str, value: Mapping[str, Any] | None, check: Callable[[str, Any], object]) -> None:
    """``check(what[name], entry)`` for each entry of a mapping."""
    for name, entry in (value or {}).items():
        check(f"{what}[{shown(name)}]", entry)
