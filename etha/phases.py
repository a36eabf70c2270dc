"""The seconds that each phase of a transfer took; pure.

    worker: copy_in | ask the agent                                                  answer | copy_out
    agent:                          wait | book | GO | compile | verify, move, verify | commit

What is between the worker and its agent belongs to no phase; it takes less than a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class Phases(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of each phase of one transfer, as one worker or one agent saw it. Iterating gives (name, seconds).

    A phase that was not reached has 0.

    ``copy_in``: in the worker, until its agent was asked: its turn, its GPU's earlier work, the copy of tensors that
    the agent cannot reach into memory that it can. ``wait``: from this worker's request until GO, less ``book``: others
    had not called yet. ``book``: the coordinator's, from the last READY until every agent had what the transfer needs
    (staging memory, the way to a peer, the card). ``compile``: programs are compiled in the first transfer of a
    direction only. ``move``: the bytes moved. ``verify``: checks before and after (``verify=``). ``commit``: from this
    agent's vote until the decision, so also what it waited for slower agents. ``copy_out``: in the worker, after
    COMMIT: ``on_commit``, and the copy of shadows or staging into its tensors.
    """

    copy_in: float = 0.0
    wait: float = 0.0
    book: float = 0.0
    compile: float = 0.0
    move: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    copy_out: float = 0.0

    @property
    def total(self) -> float:
        """The sum: the whole call, less the way between the worker and its agent."""
        return sum(seconds for _, seconds in self)

    @property
    def longest(self) -> str:
        """The name of the longest phase."""
        return max(self, key=lambda phase: phase[1])[0]

    @property
    def last(self) -> str:
        """The name of the last phase that was reached; "wait" if none was."""
        return next((name for name, seconds in reversed(list(self)) if seconds > 0), "wait")

    def __iter__(self) -> Iterator[tuple[str, float]]:
        """(name, seconds) of each phase, in order."""
        return iter([(name, getattr(self, name)) for name in PHASES])


#: Of a call that has not reached any.
NO_PHASES = Phases()
#: Names of the phases, in order.
PHASES = Phases.__struct_fields__
