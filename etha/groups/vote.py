"""The vote of one rank on one step, in two stages; pure.

    across: this rank and the same rank of all other replicas add their ballots
    inside: the ranks of this replica add what each of them knows of its first stage

Replicas that decide differently can be mended: whoever has not committed is behind, and loads the state of one that
has. Ranks of one replica that decide differently cannot, because each has only a part of the weights. So the last stage
is inside the replica, and a rank that has contributed to it never says "not committed" without its result: the replica
ends instead (``EndReplica``). That costs little, because a replica that has lost a rank has lost weights anyway.

A ballot has 16 bytes, two numbers that are added up. Feed the machine the sums or the failures; it returns what to do.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from etha.errors import ProtocolError

_SHIFT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """What one rank says, or the sum of what many say.

    ``nays``: how many will not commit. ``behind``: how many do not have the state of this step. ``changes``: how many
    know that the epoch must change.
    """

    nays: int = 0
    behind: int = 0
    changes: int = 0

    def words(self) -> tuple[int, int]:
        """The two numbers that travel."""
        return self.nays + (self.behind << _SHIFT), self.changes

    @classmethod
    def of(cls, words: tuple[int, int]) -> Ballot:
        """From the sum of such numbers."""
        return cls(nays=words[0] & ((1 << _SHIFT) - 1), behind=words[0] >> _SHIFT, changes=words[1])


class Stage(enum.Enum):
    """Where a vote is."""

    NEW = "new"
    ACROSS = "across"
    INSIDE = "inside"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class AddAcross:
    """Add up this ballot with the same rank of the other replicas, within the deadline of the vote."""

    ballot: Ballot


@dataclass(frozen=True, slots=True)
class AddInside:
    """Add up this ballot with the other ranks of the replica, within the deadline of the vote."""

    ballot: Ballot


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The outcome, which all ranks of this replica have. ``change``: the epoch must change before the next step.
    ``behind``: somebody in the epoch still has no state."""

    committed: bool
    change: bool
    behind: bool


@dataclass(frozen=True, slots=True)
class EndReplica:
    """The outcome is unknown and others of this replica may have committed: this replica must end."""

    reason: str


VoteEffect = AddAcross | AddInside | Decided | EndReplica


class Vote:
    """One rank's vote. ``ranks``: how many ranks its replica has; with one there is no second stage."""

    def __init__(self, ranks: int) -> None:
        self.stage = Stage.NEW
        self._ranks = ranks

    def cast(self, ballot: Ballot, *, broken: bool = False) -> VoteEffect:
        """Begin. ``broken``: the group across the replicas has failed before, so nothing can be added up there."""
        self._move(Stage.NEW, Stage.ACROSS)
        if broken:
            return self.across_failed()
        return AddAcross(ballot)

    def across(self, total: Ballot) -> VoteEffect:
        """The sum over all replicas has come."""
        self._move(Stage.ACROSS, Stage.INSIDE)
        return self._last(total)

    def across_failed(self) -> VoteEffect:
        """There will be no sum: a member was lost, or the deadline has passed."""
        self._move(Stage.ACROSS, Stage.INSIDE)
        return self._last(Ballot(nays=1, changes=1))

    def inside(self, total: Ballot) -> VoteEffect:
        """The sum over this replica has come."""
        self._move(Stage.INSIDE, Stage.OVER)
        return Decided(committed=total.nays == 0, change=total.changes > 0, behind=total.behind > 0)

    def inside_failed(self, reason: str) -> VoteEffect:
        """A rank of this replica was lost, or has not answered in time."""
        self._move(Stage.INSIDE, Stage.OVER)
        return EndReplica(reason)

    def _last(self, ballot: Ballot) -> VoteEffect:
        return self.inside(ballot) if self._ranks == 1 else AddInside(ballot)

    def _move(self, before: Stage, after: Stage) -> None:
        if self.stage is not before:
            raise ProtocolError(f"a vote that is {self.stage.value} cannot go from {before.value} to {after.value}")
        self.stage = after
