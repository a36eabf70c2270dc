"""The logs of all ranks of an elastic job, and what must hold of them: a pure check, without processes.

Each rank logs a step when its vote is out. A *step number* may be committed twice only if those who did so first have
died, or have loaded the others' state since: then the last epoch's is the one that counts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One step of one rank of one launch of a replica. ``first``: the step's first batch; it takes one per member.
    ``digest``: of the weights, the optimizer's state and the buffers after the vote. ``loaded``: the rank has loaded
    the others' state before this step. ``watches``: it was behind, so the step is not its own; ``members`` are those
    whose it is."""

    replica: str
    launch: int
    rank: int
    epoch: int
    members: tuple[str, ...]
    step: int
    first: int
    committed: bool
    digest: str
    loaded: bool = False
    watches: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """A step that counts."""

    step: int
    epoch: int
    members: tuple[str, ...]
    first: int

    @property
    def batches(self) -> range:
        return range(self.first, self.first + len(self.members))


def check_history(logs: Iterable[RankStep], start: int = 0) -> list[CommittedStep]:
    """The steps that count, from number ``start`` on, in their order.

    AssertionError if a step mixes two memberships, if ranks of a replica have different votes, if members of a step
    differ after it, if somebody goes on from a step that does not count, or if a step or a batch is missing or twice.
    """
    logs = list(logs)
    _check_epochs(logs)
    _check_votes(logs)
    _check_digests(logs)
    chain = _chain(logs, start)
    _check_lines(logs, chain)
    return [chain[number] for number in sorted(chain)]


def _check_epochs(logs: list[RankStep]) -> None:
    """A step of an epoch has one membership, and whoever logs it is a member or watches."""
    members: dict[tuple[int, int], tuple[str, ...]] = {}
    launches: dict[tuple[int, str], int] = {}
    for log in logs:
        known = members.setdefault((log.epoch, log.step), log.members)
        assert known == log.members, f"a step mixes members {known} and {log.members}: {log}"
        assert (log.replica in log.members) != log.watches, f"{log.replica} is no member of the step: {log}"
        launch = launches.setdefault((log.epoch, log.replica), log.launch)
        assert launch == log.launch, f"two launches of {log.replica} are in epoch {log.epoch}: {log}"
    steps: dict[tuple[int, int], int] = {}
    for log in logs:
        if log.committed:
            first = steps.setdefault((log.epoch, log.step), log.first)
            assert first == log.first, f"step {log.step} has batches from {first} and from {log.first}: {log}"


def _check_votes(logs: list[RankStep]) -> None:
    """All ranks of a replica have the same answer for each try of a step."""
    tries: dict[tuple[object, ...], list[bool]] = defaultdict(list)
    for log in logs:
        tries[log.replica, log.launch, log.rank, log.epoch, log.step].append(log.committed)
    votes: dict[tuple[object, ...], tuple[int, list[bool]]] = {}
    for (replica, launch, rank, *at), answers in tries.items():
        other, known = votes.setdefault((replica, launch, *at), (rank, answers))  # type: ignore[arg-type]
        # Of a replica that has ended one rank may have logged a try less.
        both = min(len(known), len(answers))
        assert known[:both] == answers[:both], (
            f"ranks {other} and {rank} of {replica} (launch {launch}) disagree on epoch and step {at}: "
            f"{known} and {answers}"
        )


def _check_digests(logs: list[RankStep]) -> None:
    """After a committed step the same rank of all replicas holds the same bytes; a step that is not leaves them."""
    after: dict[tuple[int, int, int], RankStep] = {}
    last: dict[tuple[str, int, int], RankStep] = {}
    for log in logs:
        who = (log.replica, log.launch, log.rank)
        if log.committed:
            other = after.setdefault((log.epoch, log.step, log.rank), log)
            assert other.digest == log.digest, f"{other.replica} and {log.replica} differ after step {log.step}: {log}"
        elif who in last and not log.loaded:
            assert last[who].digest == log.digest, f"a step that was not committed has changed something: {log}"
        last[who] = log


def _chain(logs: list[RankStep], start: int) -> dict[int, CommittedStep]:
    chain: dict[int, CommittedStep] = {}
    for log in logs:
        if log.committed and (log.step not in chain or chain[log.step].epoch < log.epoch):
            chain[log.step] = CommittedStep(step=log.step, epoch=log.epoch, members=log.members, first=log.first)
    numbers = sorted(chain)
    assert numbers == list(range(start, start + len(numbers))), f"steps are missing: {_gaps(numbers, start)}"
    for before, step in itertools.pairwise(numbers):
        a, b = chain[before], chain[step]
        assert b.first == a.first + len(a.members), f"batches between step {a} and {b} are missing or twice"
        assert b.epoch >= a.epoch, f"step {b} was committed in an older epoch than {a}"
    return chain


def _gaps(numbers: list[int], start: int) -> list[int]:
    return sorted(set(range(start, max(numbers, default=start))) - set(numbers))


def _check_lines(logs: list[RankStep], chain: dict[int, CommittedStep]) -> None:
    """Nobody goes on from a step that does not count: it dies, or loads what counts."""
    lines: dict[tuple[str, int, int], list[RankStep]] = defaultdict(list)
    for log in logs:
        lines[log.replica, log.launch, log.rank].append(log)
    for line in lines.values():
        stray: RankStep | None = None
        done = -1
        for log in line:
            if log.loaded:
                stray, done = None, -1
            if not log.committed:
                continue
            assert stray is None, f"{log} goes on from {stray}, which does not count"
            assert done in (-1, log.step - 1), f"{log} comes after step {done}"
            done = log.step
            if chain[log.step].epoch != log.epoch:
                stray = log
