"""Where a member of a ProcessGroupEtha stands in a call: it says when it waits, and can be held between two steps.

The product has no such seam: this stands in for the library that runs a call's steps, and runs as many of them as the
test wants before it goes on with the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from etha import native
from etha.native.structs import STEP


def _nobody(word: str) -> None:
    """Nobody listens."""


def _steps(steps: Any, *kinds: native.StepKind) -> list[int]:
    """The places of steps of these kinds."""
    return [int(place) for place in np.isin(steps["kind"], [int(kind) for kind in kinds]).nonzero()[0]]


class Seam:
    """Wraps the library of one engine."""

    def __init__(self, library: Any) -> None:
        self._library, self._say = library, _nobody
        self._hold: float | None = None
        self._said = True
        self.resume = threading.Event()

    def arm(self, hold: float | None, say: Callable[[str], None]) -> None:
        """For the next call: ``hold`` is how far its bytes are moved before it is held, from 0 to 1. ``say`` gets
        "waiting" before the first wait of the call, and "held" when it is held."""
        self._hold, self._say, self._said = hold, say, False
        self.resume.clear()

    def run(self, args: Any) -> Any:
        steps = args.kept[0]
        assert steps.dtype == STEP
        args.brief_us = 0  # it would keep the interpreter's lock while another thread has to speak
        # Found before it speaks: a Ctrl-C that came while numpy looks at a member of an enum would be lost, because
        # numpy takes every error in a lookup for an attribute that is not there.
        waits, moves = _steps(steps, native.StepKind.WAIT), _steps(steps, native.StepKind.COPY, native.StepKind.REDUCE)
        if not self._said and waits:
            self._run_to(args, waits[0])
            self._said = True
            self._say("waiting")
        if self._hold is not None and moves:
            result = self._run_to(args, moves[int(self._hold * (len(moves) - 1))] + 1)
            if result is not native.RunResult.DONE:
                return result
            self._hold = None
            self._say("held")
            self.resume.wait()
        return self._library.run(args)

    def _run_to(self, args: Any, step: int) -> Any:
        every, args.nsteps = args.nsteps, max(step, args.next)
        try:
            return self._library.run(args)
        finally:
            args.nsteps = every

    def progress(self, links: Any, messages: Any, *, slice_ms: int = 0) -> Any:
        """The first time, come back once nothing moves any more."""
        if self._said:
            return self._library.progress(links, messages, slice_ms=slice_ms)
        result = self._library.progress(links, messages, slice_ms=5)
        if result is native.RunResult.AGAIN and (self._hold is None or messages["done"].any()):
            self._said = True
            self._say("waiting")
            if self._hold is not None:
                self._hold = None
                self._say("held")
                self.resume.wait()
        return result

    def stop(self, memory: Any, reason: int) -> None:
        """A call that is held goes on to hear that it has been stopped."""
        self._library.stop(memory, reason)
        self.resume.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)
