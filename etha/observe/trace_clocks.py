"""One clock for all hosts of a trace, from beats on the links between their agents; pure.

An agent sends a beat (t1), the other gets it (t2) and sends it back (t3), and the first gets it back (t4). Then the
other's clock is ahead by ((t2 - t1) + (t3 - t4)) / 2, and the error is at most half of what the way took, (t4 - t1) -
(t3 - t2). This is NTP's formula (RFC 5905, section 8). As in NTP's clock filter (section 10), of several beats the one
with the least round trip counts, here of each WINDOW, because clocks of hosts drift against each other. Between two
windows the offset is interpolated.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

#: Nanoseconds in which one beat counts.
WINDOW = 64_000_000_000


@dataclass(frozen=True, slots=True)
class Sample:
    """At ``at`` on one clock, the other was ``ahead`` of it, give or take ``error``; all in ns."""

    at: int
    ahead: int
    error: int

    @classmethod
    def of(cls, sent: int, came: int, went: int, back: int) -> Sample:
        """From the four times of a beat: t1 to t4."""
        return cls(
            (sent + back) // 2, ((came - sent) + (went - back)) // 2, max(0, (back - sent) - (went - came) + 1) // 2
        )

    def turned(self) -> Sample:
        """The same, as the other clock sees it."""
        return Sample(self.at + self.ahead, -self.ahead, self.error)


@dataclass(frozen=True, slots=True)
class Shift:
    """What to add to a clock's times, in ns: ``by[i]`` at ``at[i]``, in a line between them, the same outside of
    them."""

    at: tuple[int, ...]
    by: tuple[int, ...]
    error: int = 0

    def __call__(self, time: int) -> int:
        """What to add to ``time``."""
        after = bisect_right(self.at, time)
        if after == 0 or after == len(self.at):
            return self.by[after - 1 if after else 0]
        begun, ended, first, last = self.at[after - 1], self.at[after], self.by[after - 1], self.by[after]
        return first + (last - first) * (time - begun) // (ended - begun)


NO_SHIFT = Shift((0,), (0,))


class Clocks:
    """Clocks by name, and what was measured between them."""

    def __init__(self) -> None:
        #: (clock, other) -> window -> the best sample. Each is kept in both directions.
        self._best: dict[tuple[str, str], dict[int, Sample]] = defaultdict(dict)

    def measured(self, clock: str, other: str, sample: Sample) -> None:
        """Take a sample of ``clock`` against ``other``."""
        if clock == other:
            return
        for key, one in (((clock, other), sample), ((other, clock), sample.turned())):
            windows = self._best[key]
            known = windows.get(one.at // WINDOW)
            if known is None or one.error < known.error:
                windows[one.at // WINDOW] = one

    def shifts(self, root: str) -> Mapping[str, Shift]:
        """For each clock that a chain of links joins to ``root``: what turns its times into those of ``root``.

        The chain with the least error is taken. Its error is the sum of its links' errors.
        """
        found: dict[str, Shift] = {}
        queue: list[tuple[int, str, str]] = [(0, root, root)]
        while queue:
            error, clock, before = heapq.heappop(queue)
            if clock in found:
                continue
            found[clock] = NO_SHIFT if clock == root else self._shift(clock, before, found[before], error)
            for (one, other), windows in self._best.items():
                if one == clock and other not in found:
                    worst = max(sample.error for sample in windows.values())
                    heapq.heappush(queue, (error + worst, other, clock))
        return found

    def _shift(self, clock: str, before: str, further: Shift, error: int) -> Shift:
        samples = sorted(self._best[clock, before].values(), key=lambda sample: sample.at)
        # One time may be the best of two windows, seen from the other clock.
        times = {sample.at: sample.ahead + further(sample.at + sample.ahead) for sample in samples}
        return Shift(tuple(times), tuple(times.values()), error)


def by_real_time(monotonic: int, realtime: int, root_monotonic: int, root_realtime: int) -> Shift:
    """The shift of a clock that no link joins to the root: their hosts' real times are taken for equal."""
    return Shift((monotonic,), ((realtime - monotonic) - (root_realtime - root_monotonic),))
