"""Which functions of ``etha`` a process enters, in the order of a clock that all processes share (CLOCK_MONOTONIC)."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import etha

_PACKAGE = Path(etha.__file__).parent
_ROOT = f"{_PACKAGE.parent}/"
_INSIDE = f"{_PACKAGE}/"


class Step(NamedTuple):
    """A function was entered (or a coroutine went on), or left: at ``ns``, in ``thread`` of the process ``who``."""

    ns: int
    who: str
    thread: int
    entered: bool
    #: From the root of the repository: "etha/client/aio.py".
    file: str
    function: str


class Recorder:
    """Every thread that starts after it is made is recorded, between ``start`` and ``stop``."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._steps: list[Step] = []
        self._recording = False
        self._ignored: Callable[[], bool] = lambda: False
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def start(self, ignored: Callable[[], bool] = lambda: False) -> None:
        """``ignored()`` tells, when a function is entered or left, whether what runs now is left out."""
        self._steps, self._ignored, self._recording = [], ignored, True

    def stop(self) -> list[Step]:
        """What was recorded."""
        self._recording = False
        return self._steps

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._recording or event not in ("call", "return"):
            return
        code = frame.f_code
        if code.co_filename.startswith(_INSIDE) and not self._ignored():
            file = code.co_filename.removeprefix(_ROOT)
            thread = threading.get_ident()
            self._steps.append(Step(time.monotonic_ns(), self._who, thread, event == "call", file, code.co_qualname))
