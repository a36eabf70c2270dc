"""Sets of elements of one tensor as text, such that equal sets are equal texts, however they are told; pure.

A side of a publication has of a tensor what its ranks hold together, which is a union of products of runs. The text is
JSON, "*" for all elements. For the first dim it lists groups: the indices, as [start, stop, start, stop, ...], at which
the same set of the other dims is held, and that set, in the same form. ``etha/store/publication.lua`` compares the same
texts, because Redis decides who may feed whom.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, cast

from etha.errors import LayoutError
from etha.plan.layouts.region import Product

#: All elements of a tensor.
WHOLE = "*"
#: (indices of a dim, the set of the other dims at each of them; () if it is the last dim), by the first index.
_Groups = tuple[tuple[tuple[int, ...], Any], ...]


def element_set(shape: Sequence[int], products: Iterable[Product]) -> str:
    """The elements of a tensor of ``shape`` that any of the products holds."""
    if 0 in shape:
        return WHOLE
    some = [one for one in dict.fromkeys(products) if all(kept.runs for kept in one)]
    if not shape:
        return WHOLE if some else "[]"
    found = _groups(some, 0)
    whole: _Groups = ()
    for n in reversed(shape):
        whole = (((0, n), whole),)
    return WHOLE if found == whole else json.dumps(_plain(found), separators=(",", ":"))


def includes(outer: str, inner: str) -> bool:
    """Whether all elements of ``inner`` are in ``outer``, sets of one tensor. LayoutError for other text."""
    if outer in (WHOLE, inner):
        return True
    if inner == WHOLE:
        return False
    inside, there = _read(inner), _read(outer)
    if _dims(inside) and _dims(there) and _dims(inside) != _dims(there):
        raise LayoutError(f"sets of elements of tensors of {_dims(inside)} and {_dims(there)} dims")
    return _within(inside, there)


def _read(text: str) -> list[Any]:
    try:
        found = json.loads(text)
        _check(found, _dims(found))
    except (ValueError, TypeError, LookupError, RecursionError):
        raise LayoutError(f"{text[:100]!r} is not a set of elements") from None
    return cast("list[Any]", found)


def _dims(groups: Any) -> int:
    """How many dims the first group has; 0 for no elements."""
    return 1 + (_dims(groups[0][1]) if len(groups[0]) > 1 else 0) if groups else 0


def _check(groups: Any, dims: int) -> None:
    """Raise ValueError unless these are groups over ``dims`` dims."""
    if not isinstance(groups, list):
        raise ValueError(groups)
    for indices, *rest in groups:
        if not isinstance(indices, list) or len(indices) % 2 or not all(type(i) is int for i in indices):
            raise ValueError(indices)
        if any(a >= b for a, b in pairwise(indices)) or len(rest) != (dims > 1):
            raise ValueError(indices)
        if rest:
            _check(rest[0], dims - 1)


def _groups(products: list[Product], dim: int) -> _Groups:
    points = sorted({point for one in products for run in one[dim].runs for point in run})
    place = {point: i for i, point in enumerate(points)}
    here: list[list[int]] = [[] for _ in points]  # which products hold the indices from each point to the next
    for number, one in enumerate(products):
        for start, stop in one[dim].runs:
            for i in range(place[start], place[stop]):
                here[i].append(number)
    last = not products or dim + 1 == len(products[0])
    rests: dict[tuple[int, ...], _Groups] = {}
    runs: dict[_Groups, list[int]] = {}
    for i, some in enumerate(here):
        if not some:
            continue
        key = tuple(some)
        if key not in rests:
            rests[key] = () if last else _groups([products[number] for number in some], dim + 1)
        mine = runs.setdefault(rests[key], [])
        if mine and mine[-1] == points[i]:
            mine[-1] = points[i + 1]
        else:
            mine += [points[i], points[i + 1]]
    return tuple(sorted((tuple(indices), rest) for rest, indices in runs.items()))


def _plain(groups: _Groups) -> list[Any]:
    return [[list(indices), _plain(rest)] if rest else [list(indices)] for indices, rest in groups]


def _within(inner: list[Any], outer: list[Any]) -> bool:
    """Whether each group of ``inner`` is in those groups of ``outer`` that have its set of the other dims."""
    for indices, *rest in inner:
        fitting = [there for there, *other in outer if not rest or _within(rest[0], other[0])]
        if sum(_shared(indices, there) for there in fitting) < sum(indices[1::2]) - sum(indices[::2]):
            return False
    return True


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """How many indices two lists of runs have in common."""
    i = j = total = 0
    while i < len(a) and j < len(b):
        total += max(0, min(a[i + 1], b[j + 1]) - max(a[i], b[j]))
        if a[i + 1] < b[j + 1]:
            i += 2
        else:
            j += 2
    return total
