"""Field types of messages: strict msgspec structs in which every text, array and map has a bound.

Pure. ``msgspec`` decodes into the types that a struct declares and checks them at once. It coerces nothing but list ->
tuple and int -> float, and rejects unknown fields and values above their bounds. ``codec`` adds envelopes and
operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

#: Bounds of fields that declare none: characters, bytes, items of one collection.
MAX_STRING = 1 << 16
MAX_BYTES = 1 << 26
MAX_ITEMS = 1 << 16
#: How deep the values of a ``JsonObject`` nest, and the items of one collection inside it.
MAX_DEPTH = 6
MAX_NESTED_ITEMS = 1 << 20

T = TypeVar("T")

Text = Annotated[str, Meta(max_length=MAX_STRING)]
Blob = Annotated[bytes, Meta(max_length=MAX_BYTES)]
Items = Annotated[tuple[T, ...], Meta(max_length=MAX_ITEMS)]


class StrictStruct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages; every text, array and map in it has a bound.

    Subclasses repeat ``frozen`` for type checkers, and ``kw_only`` because msgspec does not inherit it.
    """


if TYPE_CHECKING:
    JsonObject = dict[str, Any]
else:

    def _values(depth):
        scalar = bool | int | float | Annotated[str, Meta(max_length=MAX_BYTES)] | None
        if depth == 0:
            return scalar
        inner, most = _values(depth - 1), Meta(max_length=MAX_NESTED_ITEMS)
        return scalar | Annotated[list[inner], most] | Annotated[dict[str, inner], most]

    #: Written out level by level, because ``Any`` accepts maps whose keys are not text: a sender can choose integer
    #: keys for which a dict takes quadratic time.
    JsonObject = Annotated[dict[str, _values(MAX_DEPTH)], Meta(max_length=MAX_ITEMS)]
