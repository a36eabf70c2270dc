"""The rule by which epochs form, walked: every order of events of 3 members of one rank each, and single sentences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from etha.groups.membership import GroupRoster, RankEntry, ReplicaEntry, SeatedMember

NAMES = ("x", "y", "z")
#: The walk's clock stands still but for two events: that ``grace`` is over, and that ``timeout`` is.
NOW, GRACE, TIMEOUT = 1, 10, 100
#: What the weights of a member depend on: the votes in which its steps were committed.
History = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """One trainer. ``does``: "trains", "votes" (waits for the sum of a vote), "asks" (for the next epoch), "dead", or
    is "new"."""

    does: str = "new"
    epoch: int = 0
    last: int = 0
    weights: History = ()
    #: Its number of votes in this epoch.
    votes: int = 0
    #: It has not the state of the others in its epoch.
    behind: bool = False
    #: It will not vote in this epoch any more.
    broken: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Redis, three trainers, and of each epoch its members, its weights at the start, and its votes."""

    roster: GroupRoster
    trainers: tuple[tuple[str, Trainer], ...]
    #: epoch -> (members, weights of those that count)
    epochs: tuple[tuple[int, tuple[str, ...], History], ...] = ()
    #: (epoch, member) -> votes that it has contributed to
    given: tuple[tuple[tuple[int, str], int], ...] = ()
    deaths: int = 0

    def of(self, name: str) -> Trainer:
        return dict(self.trainers)[name]

    def with_(self, name: str, **changes: object) -> State:
        trainers = tuple((n, replace(t, **changes) if n == name else t) for n, t in self.trainers)  # type: ignore[arg-type]
        return replace(self, trainers=trainers)

    def key(self) -> object:
        roster = self.roster
        replicas = tuple(sorted((n, r.since, r.ranks[0], r.served) for n, r in roster.replicas.items()))
        order = tuple(name for name, *_ in sorted(replicas, key=lambda r: r[1]))
        shown = tuple((n, rank, served) for n, _, rank, served in replicas)
        return (
            shown,
            order,
            roster.epoch,
            roster.opened,
            roster.base,
            roster.members,
            self.trainers,
            self.epochs,
            self.given,
            self.deaths,
        )


class Walk:
    """Every order of events, up to bounds. ``most`` epochs, ``deaths``, and committed ``steps``."""

    def __init__(self, *, most: int, deaths: int, steps: int) -> None:
        self.most, self.deaths, self.steps = most, deaths, steps
        self.formed = 0

    def run(self) -> int:
        start = State(
            roster=GroupRoster(timeout=TIMEOUT, grace=GRACE),
            trainers=tuple((name, Trainer()) for name in NAMES),
        )
        seen, todo = {start.key()}, [start]
        while todo:
            state = todo.pop()
            self.check(state)
            for after in self.events(state):
                if (key := after.key()) not in seen:
                    seen.add(key)
                    todo.append(after)
        return len(seen)

    def events(self, state: State) -> Iterator[State]:
        roster = state.roster
        for name in NAMES:
            trainer = state.of(name)
            if trainer.does == "new" and any(t.does == "new" and n < name for n, t in state.trainers):
                continue  # all are alike, so they may start in the order of their names
            if trainer.does in ("new", "dead"):
                yield self.ask(
                    state.with_(name, epoch=0, last=0, weights=(), votes=0, behind=False, broken=False), name
                )
                continue
            if state.deaths < self.deaths:
                dead = replace(state.with_(name, does="dead"), deaths=state.deaths + 1)
                yield self.redis(dead, roster.depart(name, NOW))
            if trainer.does == "asks":
                entry = roster.replicas[name].ranks[0]
                if not entry.wants and entry.epoch == roster.epoch:
                    yield from self.hear(state, name)
                continue
            if trainer.does == "trains":
                yield self.ask(state, name)
                if not trainer.broken and len(trainer.weights) < self.steps:
                    given = dict(state.given)
                    given[trainer.epoch, name] = trainer.votes + 1
                    voting = state.with_(name, does="votes", votes=trainer.votes + 1)
                    yield replace(voting, given=tuple(sorted(given.items())))
            if trainer.does == "votes":
                yield state.with_(name, does="trains", broken=True)
                members, _ = self.epoch(state, trainer.epoch)
                given = dict(state.given)
                if all(given.get((trainer.epoch, other), 0) >= trainer.votes for other in members):
                    weights = (*trainer.weights, (trainer.epoch, trainer.votes))
                    # Who was behind has received the result, but has other weights, until it has loaded them.
                    if trainer.behind:
                        yield state.with_(name, does="trains")
                    else:
                        yield state.with_(name, does="trains", weights=weights)
        if roster.opened and roster.epoch < self.most:
            for wait in (GRACE, TIMEOUT):
                later = roster.form(NOW + wait)
                if later.epoch != roster.epoch:
                    opened = NOW if later.opened else 0
                    yield self.redis(state, replace(later, opened=opened))

    def ask(self, state: State, name: str) -> State:
        """A trainer calls ``begin``."""
        if state.roster.epoch >= self.most:
            return state
        trainer = state.of(name)
        entry = RankEntry(epoch=trainer.epoch, last=trainer.last, step=len(trainer.weights), wants=True)
        return self.redis(state.with_(name, does="asks"), state.roster.enter(name, 0, entry, NOW))

    def redis(self, state: State, roster: GroupRoster) -> State:
        """Redis has changed; note an epoch that has formed."""
        before, state = state.roster, replace(state, roster=roster)
        if roster.epoch == before.epoch:
            return state
        assert roster.epoch == before.epoch + 1, "one event forms at most one epoch"
        self.formed += 1
        names = tuple(member.replica for member in roster.members)
        counting = [state.of(member.replica) for member in roster.members if member.counts]
        assert len({one.weights for one in counting}) == 1, f"members that count have different weights: {state}"
        assert all(state.of(name).does == "asks" for name in names), "nobody is in an epoch that it has not asked for"
        weights = counting[0].weights
        for name, other in state.trainers:
            lost = other.does not in ("new", "dead") and other.last > counting[0].last
            assert not lost, f"{name} lives and has the state of epoch {other.last}, and all begin without it: {state}"
        old = [one for one in state.epochs if one[0] == before.epoch]
        for _, members, _ in old:
            left = [name for name in members if state.of(name).does == "dead" or name in names or state.of(name).broken]
            assert left, "nobody has left the epoch before: it could go on beside the new one"
        living = {t.epoch for _, t in state.trainers if t.does not in ("new", "dead")} | {roster.epoch}
        epochs = tuple(one for one in state.epochs if one[0] in living)
        given = tuple(one for one in state.given if one[0][0] in living)
        return replace(state, epochs=(*epochs, (roster.epoch, names, weights)), given=given)

    def hear(self, state: State, name: str) -> Iterator[State]:
        """The answer to ``begin`` arrives; a member that is behind loads the state, or fails to."""
        epoch = state.roster.epoch
        _, weights = self.epoch(state, epoch)
        mine = next(member for member in state.roster.members if member.replica == name)
        admitted = state.with_(name, does="trains", epoch=epoch, votes=0, broken=False)
        if mine.counts:
            yield admitted.with_(name, last=epoch, behind=False)
        else:
            yield admitted.with_(name, last=epoch, behind=False, weights=weights)
            yield admitted.with_(name, behind=True)

    def epoch(self, state: State, number: int) -> tuple[tuple[str, ...], History]:
        return next((members, weights) for epoch, members, weights in state.epochs if epoch == number)

    def check(self, state: State) -> None:
        """What holds in every state."""
        roster = state.roster
        by_vote: dict[tuple[int, int], set[History]] = {}
        for _, trainer in state.trainers:
            for at, vote in enumerate(trainer.weights):
                by_vote.setdefault(vote, set()).add(trainer.weights[: at + 1])
        assert all(len(found) == 1 for found in by_vote.values()), "one step mixes two memberships"
        waiting = [name for name, one in roster.replicas.items() if one.ranks[0].wants]
        if waiting and roster.epoch < self.most:
            missing = roster.missing(NOW)
            assert roster.opened, "somebody waits, and nobody counts the time"
            assert missing, f"all are there, and no epoch forms: {roster}"
            # Nobody waits for ever: when the time is over, the epoch forms, or a member that lives is awaited by name.
            late = roster.form(NOW + TIMEOUT)
            held = late.missing(NOW + TIMEOUT) if late.epoch == roster.epoch else []
            assert late.epoch > roster.epoch or all(state.of(name).does != "dead" for name in held)


@pytest.mark.slow
def test_every_order_of_events_of_three_members() -> None:
    """Three trainers start, vote, fail, are late, die and start again. docs/groups-proofs.md has the counts."""
    assert Walk(most=2, deaths=1, steps=1).run() == 5_953
    assert Walk(most=3, deaths=0, steps=1).run() == 28_919


@pytest.mark.proof
def test_every_order_of_events_of_three_members_in_three_epochs() -> None:
    assert Walk(most=3, deaths=1, steps=1).run() == 233_166


@pytest.mark.proof
def test_every_order_of_events_of_three_members_in_four_epochs() -> None:
    assert Walk(most=4, deaths=0, steps=1).run() == 708_644


def test_the_walk_notices_an_epoch_without_a_member_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: GroupRoster, now: int) -> list[str]:
        absent = [name for name in self.replicas if name not in self.ready(now)]
        return [name for name in absent if self.previous(name) and now < self._deadline(name)]

    monkeypatch.setattr(GroupRoster, "missing", missing)
    with pytest.raises(AssertionError, match="it could go on beside the new one"):
        Walk(most=2, deaths=0, steps=0).run()


def test_the_walk_notices_that_steps_of_different_epochs_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    step = property(lambda self: (0, min(rank.step for rank in self.ranks.values())))
    monkeypatch.setattr(ReplicaEntry, "progress", step)
    with pytest.raises(AssertionError, match=r"members that count have different weights|all begin without it"):
        Walk(most=4, deaths=0, steps=1).run()


def roster(**replicas: tuple[int, int, bool]) -> GroupRoster:
    """Replicas of one rank that were in epoch 1: (last, step, whether it wants the next). Who has a state counted."""
    members = tuple(SeatedMember(replica=name, step=0, counts=last > 0) for name, (last, _, _) in replicas.items())
    found = GroupRoster(epoch=1, members=members)
    for name, (last, step, wants) in replicas.items():
        found = found.enter(name, 0, RankEntry(epoch=1, last=last, step=step, wants=wants), NOW)
    return found


def test_a_busy_member_is_waited_for_until_the_timeout() -> None:
    waiting = roster(x=(1, 0, False), y=(1, 0, True))
    assert waiting.missing(NOW) == ["x"]
    assert waiting.form(NOW + waiting.grace).epoch == 1
    late = waiting.form(NOW + waiting.timeout)
    assert [member.replica for member in late.members] == ["y"]


def test_a_member_whose_agent_is_silent_is_waited_for_until_the_grace() -> None:
    waiting = roster(x=(1, 0, False), y=(1, 0, True)).serve("x", False)
    assert waiting.form(NOW).epoch == 1
    assert [member.replica for member in waiting.form(NOW + waiting.grace).members] == ["y"]


def test_a_newcomer_waits_for_a_member_that_lives_however_long() -> None:
    waiting = roster(x=(1, 0, False)).enter("y", 0, RankEntry(wants=True), NOW)
    assert waiting.form(NOW + 10 * waiting.timeout).epoch == 1
    assert waiting.depart("x", NOW).epoch == 2


def test_who_could_not_reach_an_older_member_pauses_longer_each_time() -> None:
    both = roster(x=(1, 0, False), y=(1, 0, False))
    paused = both.enter("y", 0, RankEntry(epoch=1, last=1, wants=True), NOW, unmet=frozenset({"x"}))
    assert paused.replicas["y"].not_before == NOW + 5_000
    alone = paused.enter("x", 0, RankEntry(epoch=1, last=1, wants=True), NOW, unmet=frozenset({"y"}))
    assert [member.replica for member in alone.members] == ["x"]
    assert alone.replicas["y"].pause == 5_000, "both name each other, which counts once"
    later = NOW + 6_000
    again = alone.enter("y", 0, RankEntry(epoch=1, last=1, wants=True), later, unmet=frozenset({"x"}))
    assert again.replicas["y"].pause == 10_000


def test_a_newcomer_that_has_not_loaded_does_not_begin_anew_while_somebody_has_the_weights() -> None:
    """However long the other is busy, and also if it was not in the last epoch."""
    waiting = roster(x=(1, 5, False), y=(0, 0, True))
    assert waiting.form(NOW + 10 * waiting.timeout).epoch == 1
    both = waiting.enter("x", 0, RankEntry(epoch=1, last=1, step=5, wants=True), NOW)
    assert [(one.replica, one.counts) for one in both.members] == [("x", True), ("y", False)]
    later = both.enter("old", 0, RankEntry(epoch=1, last=1, step=4), NOW).depart("x", NOW)
    alone = later.enter("y", 0, RankEntry(epoch=2, wants=True), NOW)
    assert alone.form(NOW + 10 * alone.timeout).epoch == 2, "old was in an epoch, and may have the weights"
    found = alone.enter("old", 0, RankEntry(epoch=1, last=1, step=4, wants=True), NOW)
    assert [one.replica for one in found.members] == ["old", "y"]


def test_of_two_that_cannot_reach_each_other_the_one_without_the_weights_pauses() -> None:
    """Also if it was launched first."""
    both = roster(x=(0, 0, False), y=(1, 5, False))
    paused = both.enter("x", 0, RankEntry(epoch=1, wants=True), NOW, unmet=frozenset({"y"}))
    alone = paused.enter("y", 0, RankEntry(epoch=1, last=1, step=5, wants=True), NOW, unmet=frozenset({"x"}))
    assert [member.replica for member in alone.members] == ["y"]


def test_a_number_that_an_empty_redis_has_given_again_is_noticed() -> None:
    """A newcomer began before the agent of a member had put that back."""
    fresh = GroupRoster().enter("new", 0, RankEntry(wants=True), NOW)
    assert (fresh.epoch, [one.replica for one in fresh.members]) == (1, ["new"])
    both = fresh.enter("old", 0, RankEntry(epoch=1, last=1, step=50), NOW)
    assert both.epoch == 2 and not both.members
    asked = both.enter("new", 0, RankEntry(epoch=1, last=1, step=7, wants=True), NOW)
    assert asked.epoch == 2 and asked.missing(NOW + 10 * asked.timeout) == ["old"], "nobody goes on alone"
    found = asked.enter("old", 0, RankEntry(epoch=1, last=1, step=51, wants=True), NOW)
    assert [(one.replica, one.counts) for one in found.members] == [("old", True), ("new", False)]


def test_members_of_one_epoch_are_put_back_one_after_the_other() -> None:
    found = GroupRoster()
    for name in "xyz":
        found = found.enter(name, 0, RankEntry(epoch=4, last=4, step=9), NOW)
    assert found.epoch == 4


def test_a_later_epoch_that_redis_has_lost_counts_and_not_the_one_that_began_meanwhile() -> None:
    fresh = GroupRoster().enter("new", 0, RankEntry(wants=True), NOW)
    found = fresh.enter("old", 0, RankEntry(epoch=4, last=4, step=9), NOW)
    found = found.enter("new", 0, RankEntry(epoch=1, last=1, step=70, wants=True), NOW)
    assert found.epoch == 4 and found.missing(NOW + 10 * found.timeout) == ["old"]
