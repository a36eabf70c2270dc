"""How many seconds something may take that happens at once: what docs/recovery.md promises, or more on a busy machine.

`make faults` holds the promises as they are (``--seconds``). In `make test` much runs at once, so a bound of a second
would fail for want of a processor. There it only tells "at once" from "at a deadline".
"""

from __future__ import annotations

#: What a busy machine may take in addition; less than the deadlines of the tests that ask.
BUSY = 10.0

#: Whether ``--seconds`` was given.
exact = False


def within(seconds: float) -> float:
    """``seconds``, and as much more as this run allows."""
    return seconds if exact else seconds + BUSY
