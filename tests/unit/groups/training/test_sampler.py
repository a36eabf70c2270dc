"""Every batch is in exactly one committed step, whoever comes, goes or fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from etha.errors import ConfigError
from etha.groups.training.sampler import Sampler
from tests.examples import examples

from .threads import Members, Quorum, World, run_all


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Seat:
    """Members as one of them sees them: what `begin` says is set by the test."""

    rank, world_size = 0, 1

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.place, self.size, self.batches, self.steps = rank, size, 0, 0

    def begin(self) -> Quorum:
        return Quorum(
            epoch=1,
            rank=self.place,
            size=self.size,
            step=self.steps,
            batches_committed=self.batches,
            recovered=False,
            changed=False,
        )

    def commit(self, ok: bool = True) -> bool:
        if ok:
            self.steps += 1
            self.batches += self.size
        return ok


def numbers(batch: torch.Tensor) -> list[int]:
    return batch.tolist()


def test_one_replica_sees_the_data_once_per_epoch_in_another_order() -> None:
    members = Seat()
    seen = []
    for batch in Sampler(Numbers(10), members, batch_size=2, epochs=2):
        seen += numbers(batch)
        members.commit()
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_comes_again_until_its_step_is_committed(workers: int) -> None:
    members = Seat()
    seen = []
    for number, batch in enumerate(Sampler(Numbers(6), members, batch_size=2, shuffle=False, num_workers=workers)):
        seen.append(numbers(batch))
        members.commit(number % 2 == 1)
    assert seen == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]


def test_reading_ahead_follows_a_change_of_the_members() -> None:
    members = Seat(rank=1, size=2)
    seen = []
    for batch in Sampler(Numbers(12), members, shuffle=False, num_workers=1, prefetch_factor=4):
        seen += numbers(batch)
        members.commit()
        if members.steps == 2:
            members.place, members.size = 0, 1
    assert seen == [1, 3, *range(4, 12)]


def test_the_last_step_gives_every_replica_a_batch() -> None:
    seats = [Seat(rank, 4) for rank in range(4)]
    seen: list[list[int]] = []
    for seat in seats:
        mine = []
        for batch in Sampler(Numbers(6), seat, shuffle=False):
            mine += numbers(batch)
            seat.commit()
        seen.append(mine)
    assert seen == [[0, 4], [1, 5], [2, 0], [3, 1]]


def test_ranks_of_a_replica_share_a_batch() -> None:
    samplers = [Sampler(Numbers(10), Seat(), batch_size=2, shuffle=False, shard=(s, 2)) for s in range(2)]
    assert [[each.indices(number) for each in samplers] for number in range(3)] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
        [[8], [9]],
    ]
    tiny = [Sampler(Numbers(1), Seat(), shuffle=False, shard=(s, 3)) for s in range(3)]
    assert [each.indices(0) for each in tiny] == [[0], [0], [0]]


def test_members_that_are_behind_get_a_batch_too() -> None:
    members = Seat(rank=5, size=2)
    assert numbers(next(iter(Sampler(Numbers(6), members, shuffle=False)))) == [1]


def test_drop_last_leaves_out_the_smaller_batch() -> None:
    assert Sampler(Numbers(10), Seat(), batch_size=4).batches == 3
    assert Sampler(Numbers(10), Seat(), batch_size=4, drop_last=True).batches == 2
    assert list(Sampler(Numbers(3), Seat(), batch_size=4, drop_last=True)) == []
    assert list(Sampler(Numbers(0), Seat())) == []


def test_a_checkpoint_of_another_order_is_refused() -> None:
    state = Sampler(Numbers(10), Seat(), batch_size=4, seed=1).state_dict()
    Sampler(Numbers(10), Seat(), batch_size=4, seed=1).load_state_dict(state)
    with pytest.raises(ConfigError, match="batch_size was 4, is 5; seed was 1, is 2"):
        Sampler(Numbers(10), Seat(), batch_size=5, seed=2).load_state_dict(state)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return count()


@pytest.mark.parametrize(
    ("data", "more"),
    [
        (Endless(), {}),
        (Numbers(3), {"batch_size": 0}),
        (Numbers(3), {"shard": (2, 2)}),
        (Numbers(3), {"sampler": [1]}),
    ],
)
def test_wrong_arguments_are_refused(data: object, more: dict) -> None:
    with pytest.raises(ConfigError):
        Sampler(data, Seat(), **more)


@settings(deadline=None, max_examples=examples(100))
@given(
    st.integers(1, 40),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=30),
)
def test_any_sizes_and_failures_take_every_batch_once(length: int, batch: int, steps: list[tuple[int, bool]]) -> None:
    """Each step with some size is committed or not; after these the sizes stay."""
    taken: Counter[int] = Counter()
    committed = 0
    total = Sampler(Numbers(length), Seat(), batch_size=batch).batches
    for size, ok in [*steps, *[(2, True)] * length]:
        if committed >= total:
            break
        for rank in range(size):
            seat = Seat(rank, size)
            seat.batches = committed
            chosen = numbers(next(iter(Sampler(Numbers(length), seat, batch_size=batch, seed=3))))
            if ok and committed + rank < total:
                taken.update(chosen)
        committed += size * ok
    assert taken == Counter(range(length))


def test_replicas_that_come_and_go_take_every_batch_once() -> None:
    world = World()
    taken: dict[str, list[int]] = {}

    def run(name: str, members: Members, until: int) -> None:
        for batch in Sampler(Numbers(40), members, shuffle=True, seed=5):
            quorum = members.begin()
            assert quorum.changed is False, "asking for the batch has begun the step"
            if members.commit():
                taken.setdefault(name, []).extend(numbers(batch))
            if quorum.step + 1 >= until:
                break

    a, b = world.members("a"), world.members("b")
    run_all(lambda: run("a", a, 5), lambda: run("b", b, 5))
    c = world.members("c")
    run_all(lambda: run("a", a, 9), lambda: run("b", b, 9), lambda: run("c", c, 9))
    world.leave("a")
    run_all(lambda: run("b", b, 99), lambda: run("c", c, 99))
    assert sorted(taken["a"] + taken["b"] + taken["c"]) == list(range(40))
