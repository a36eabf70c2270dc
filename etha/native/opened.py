"""Opens the compiled library for one of its uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from etha.config import native_allowed

Library = TypeVar("Library")


def opened(make: Callable[[str], Library]) -> Library | None:
    """``make(path)`` of the compiled library; None if there is none of this source, or ``ETHA_NATIVE=0`` forbids it."""
    from etha.native.build import LIBRARY, is_current

    if not native_allowed() or not is_current(LIBRARY):
        return None
    try:
        return make(str(LIBRARY))
    except (OSError, AttributeError):  # compiled for another machine; etha.native says why
        return None
