"""Which dtypes compiled code changes into each other (casts.c)."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Cast(enum.IntEnum):
    """How the dtype of elements changes; the same numbers as in casts.c."""

    NONE = 0
    FLOAT32_BFLOAT16 = 1
    BFLOAT16_FLOAT32 = 2
    FLOAT32_FLOAT16 = 3
    FLOAT16_FLOAT32 = 4

    @property
    def sizes(self) -> tuple[int, int]:
        """(bytes of an element before, bytes after); those of Cast.NONE are bytes."""
        return _SIZES[self]


_SIZES = {Cast.NONE: (1, 1), **{cast: (4, 2) if cast % 2 else (2, 4) for cast in list(Cast)[1:]}}


def cast_of(source: torch.dtype, target: torch.dtype) -> Cast | None:
    """The cast from one dtype to another; None if compiled code has none."""
    if source is target:
        return Cast.NONE
    names = [str(dtype).removeprefix("torch.").upper() for dtype in (source, target)]
    return Cast.__members__.get("_".join(names))
