"""Differences: a version is sent as what has changed since the one that its targets hold. What that takes, as data.

A source that still has the version before (``BaseVersion``) lets its streams compare both, piece by piece, at the wire
dtype. That is exact because targets hold the wire's own bits: programs with a wider target or with reductions never do
it (``may_differ``). ``DifferenceChoice`` decides whether it is worth the work. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from etha.memory.views import View
from etha.plan import Plan
from etha.transport.wire.flows import span_memory

#: Bytes per second below which a connection is worth a first try. Comparing takes about half a nanosecond a byte.
TRY = 1.5e9
#: Least payload, in bytes, for which it is considered.
LEAST = 256 << 10
#: Least staging memory of an agent, in bytes, with which its batches may send differences.
LEAST_STAGING = 64 << 20
#: After this many transfers without, one with differences is tried again.
AGAIN = 16

ViewKey = tuple[int, int, torch.dtype]


def key_of(view: View) -> ViewKey:
    """What two views of the same memory have in common."""
    return view.address, view.nbytes, view.dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BaseVersion:
    """Version ``seq`` as a source still has it. ``views``: for each view that is sent, the same tensor of that version.

    ``intact()``: nobody has begun to overwrite it. Call it from any thread, after what was read was compared.
    """

    seq: int
    views: Mapping[ViewKey, View]
    intact: Callable[[], bool]

    def view(self, view: View) -> View:
        """The tensor of ``view`` in this version."""
        return self.views[key_of(view)]

    def memory(self, view: View, offset: int, nbytes: int) -> memoryview:
        """``nbytes`` of that tensor, from ``offset`` bytes after its address."""
        found = self.view(view)
        return span_memory(found, found.address + offset, nbytes)


def joined(bases: Iterable[BaseVersion | None]) -> BaseVersion | None:
    """One version from those of several ranks; None unless all of them have the same."""
    found = list(bases)
    some = [one for one in found if one is not None]
    if len(some) < len(found) or len({one.seq for one in some}) != 1:
        return None
    return BaseVersion(
        seq=some[0].seq,
        views={key: view for one in some for key, view in one.views.items()},
        intact=lambda: all(one.intact() for one in some),
    )


def may_differ(plan: Plan, staging: int) -> bool:
    """Whether targets of this plan hold the wire's own bits, nothing is reduced, and ``staging`` bytes are enough."""
    if staging < LEAST_STAGING or any(klass.reduction is not None for klass in plan.classes):
        return False
    return all(plan.wire_dtype(tensor) == plan.target[name].dtype for tensor, name in enumerate(plan.names))


class DifferenceChoice:
    """Whether to send differences to one peer.

    ``mode`` is one of ``config.DIFFERENCES``; with "auto", what transfers have taken says which way is faster.
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        #: Bytes of payload per second with and without; 0.0 if not known.
        self._with = self._without = 0.0
        self._since = 0

    def choose(self, nbytes: int) -> bool:
        """Whether the next transfer, of ``nbytes`` to a peer that holds a version before, shall send the difference."""
        if self._mode != "auto":
            return self._mode == "always"
        if nbytes < LEAST or not self._without:
            return False
        if self._with:
            return self._with > self._without or self._since >= AGAIN
        return self._without < TRY

    def note(self, nbytes: int, seconds: float, *, differed: bool) -> None:
        """A transfer of ``nbytes`` has taken ``seconds``."""
        if nbytes < LEAST or seconds <= 0:
            return
        speed = nbytes / seconds
        if differed:
            self._with, self._since = (self._with + speed) / 2 if self._with else speed, 0
        else:
            self._without = (self._without + speed) / 2 if self._without else speed
            self._since += 1
