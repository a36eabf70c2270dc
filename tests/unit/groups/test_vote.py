"""The commit vote: every order of messages of 2 replicas of 2 ranks, with a kill or a timeout between any two."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from etha.errors import ProtocolError
from etha.groups.vote import AddAcross, AddInside, Ballot, Decided, EndReplica, Stage, Vote

#: (replica, rank in it)
RANKS = tuple(itertools.product((0, 1), (0, 1)))


def across(rank: tuple[int, int]) -> tuple[str, int]:
    return ("across", rank[1])


def inside(rank: tuple[int, int]) -> tuple[str, int]:
    return ("inside", rank[0])


def members(group: tuple[str, int]) -> list[tuple[int, int]]:
    return [rank for rank in RANKS if group in (across(rank), inside(rank))]


@dataclass
class World:
    """All ranks, and what has been contributed to each all-reduce. ``waits``: the all-reduce that a rank is in."""

    ballots: dict[tuple[int, int], Ballot]
    votes: dict[tuple[int, int], Vote] = field(default_factory=lambda: {rank: Vote(2) for rank in RANKS})
    given: dict[tuple[str, int], dict[tuple[int, int], Ballot]] = field(default_factory=dict)
    waits: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    outcomes: dict[tuple[int, int], Decided | EndReplica] = field(default_factory=dict)
    dead: frozenset[tuple[int, int]] = frozenset()
    failed: frozenset[tuple[int, int]] = frozenset()

    def key(self) -> object:
        given = tuple((group, tuple(sorted((r, b.words()) for r, b in by.items()))) for group, by in self.given.items())
        stages = tuple(vote.stage.value for vote in self.votes.values())
        outcomes = tuple(sorted((rank, repr(outcome)) for rank, outcome in self.outcomes.items()))
        return tuple(sorted(given)), stages, tuple(sorted(self.waits.items())), outcomes, self.dead, self.failed

    def act(self, rank: tuple[int, int], effect: object) -> None:
        match effect:
            case AddAcross(ballot=ballot):
                self._give(rank, across(rank), ballot)
            case AddInside(ballot=ballot):
                self._give(rank, inside(rank), ballot)
            case Decided() | EndReplica():
                self.waits.pop(rank, None)
                self.outcomes[rank] = effect

    def _give(self, rank: tuple[int, int], group: tuple[str, int], ballot: Ballot) -> None:
        self.given.setdefault(group, {})[rank] = ballot
        self.waits[rank] = group

    def copy(self) -> World:
        votes = {}
        for rank, vote in self.votes.items():
            votes[rank] = Vote(2)
            votes[rank].stage = vote.stage
        given = {group: dict(by) for group, by in self.given.items()}
        return replace(self, votes=votes, given=given, waits=dict(self.waits), outcomes=dict(self.outcomes))

    def moves(self, victim: tuple[int, int] | None) -> Iterator[World]:
        for rank in RANKS:
            if rank in self.dead:
                continue
            if rank == victim:
                yield self.killed(rank)
            if rank in self.outcomes:
                continue
            if rank not in self.waits:
                yield self.moved(rank, "cast")
                yield self.moved(rank, "broken")
                continue
            # A timeout, or the news that somebody was lost, may come at any moment: that is the deadline of each wait.
            yield self.moved(rank, "fail")
            if set(self.given[self.waits[rank]]) == set(members(self.waits[rank])):
                yield self.moved(rank, "receive")

    def killed(self, rank: tuple[int, int]) -> World:
        after = self.copy()
        after.dead |= {rank}
        after.waits.pop(rank, None)
        return after

    def moved(self, rank: tuple[int, int], how: str) -> World:
        after = self.copy()
        vote, group = after.votes[rank], after.waits.get(rank)
        if group is None:
            if how == "broken":
                after.failed |= {rank}
            after.act(rank, vote.cast(after.ballots[rank], broken=how == "broken"))
            return after
        total = None
        if how == "receive":
            words = [ballot.words() for ballot in after.given[group].values()]
            total = Ballot.of((sum(w[0] for w in words), sum(w[1] for w in words)))
        if group[0] == "across":
            if total is None:
                after.failed |= {rank}
            after.act(rank, vote.across_failed() if total is None else vote.across(total))
        else:
            after.act(rank, vote.inside_failed("lost") if total is None else vote.inside(total))
        return after

    def check(self) -> None:
        for replica in (0, 1):
            ranks = [rank for rank in RANKS if rank[0] == replica]
            found = [self.outcomes.get(rank) for rank in ranks]
            lives = not self.dead & set(ranks) and not any(isinstance(one, EndReplica) for one in found)
            decided = {(one.committed, one.change) for one in found if isinstance(one, Decided)}
            assert not lives or len(decided) <= 1, "a living replica has ranks with different votes"
            if set(ranks) & self.failed:
                assert all(one.change for one in found if isinstance(one, Decided)), "nobody stays in a broken epoch"
        for one in self.outcomes.values():
            if isinstance(one, Decided) and one.committed:
                assert not self.failed_before_commit(), "a step is committed that somebody has not contributed to"
                assert all(ballot.nays == 0 for ballot in self.ballots.values())

    def failed_before_commit(self) -> bool:
        """Whether a rank has given nothing to the sum across the replicas."""
        return any(set(self.given.get(("across", column), ())) != set(members(("across", column))) for column in (0, 1))


def walk(ballots: dict[tuple[int, int], Ballot], victim: tuple[int, int] | None) -> tuple[int, set[object]]:
    """All reachable states; how many there are, and the outcomes that replicas have."""
    start = World(ballots)
    seen, todo, ends = {start.key()}, [start], set[object]()
    while todo:
        world = todo.pop()
        world.check()
        following = list(world.moves(victim))
        if not following or all(rank in world.outcomes or rank in world.dead for rank in RANKS):
            ends |= {
                tuple(sorted(type(o).__name__ + str(getattr(o, "committed", "")) for o in world.outcomes.values()))
            }
        for after in following:
            if (key := after.key()) not in seen:
                seen.add(key)
                todo.append(after)
    return len(seen), ends


YES, NO = Ballot(), Ballot(nays=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("no", "victim", "states"), [(None, None, 7_539), (None, (0, 0), 15_078), ((0, 0), (0, 1), 15_078)]
)
def test_no_living_replica_has_ranks_with_different_votes(
    no: tuple[int, int] | None, victim: tuple[int, int] | None, states: int
) -> None:
    """All ranks are alike, so it is enough that one of them dies. docs/groups-proofs.md has the counts."""
    found, ends = walk({rank: NO if rank == no else YES for rank in RANKS}, victim)
    assert found == states
    if no is None:
        assert ("DecidedTrue",) * 4 in ends
        assert ("DecidedFalse", "DecidedFalse", "DecidedTrue", "DecidedTrue") in ends, (
            "replicas may differ: one is behind"
        )
    else:
        assert not any("DecidedTrue" in end for end in ends)  # type: ignore[operator, attr-defined]


def test_a_ballot_travels_as_two_numbers() -> None:
    one, two = Ballot(nays=1, behind=2, changes=0), Ballot(nays=0, behind=1, changes=3)
    words = (one.words()[0] + two.words()[0], one.words()[1] + two.words()[1])
    assert Ballot.of(words) == Ballot(nays=1, behind=3, changes=3)


def test_one_rank_decides_by_the_sum_over_the_replicas() -> None:
    vote = Vote(1)
    assert vote.cast(YES) == AddAcross(YES)
    assert vote.across(Ballot(changes=1)) == Decided(committed=True, change=True, behind=False)
    assert vote.stage is Stage.OVER
    with pytest.raises(ProtocolError, match="a vote that is over cannot go from across to inside"):
        vote.across(YES)
