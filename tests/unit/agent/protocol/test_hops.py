"""Hops on the side that sends: their names, what a buffer holds, and which of them end."""

from __future__ import annotations

import pytest

from etha.agent.protocol.hops import HopBuffer, ended_hops, hop_batch, hop_pair, new_hops
from etha.config import check_name


def test_all_agents_derive_one_name_for_a_hop_s_pair_and_launches_have_their_own() -> None:
    name = hop_pair("policy", "trainer/17", "replica-7/18")
    assert name == hop_pair("policy", "trainer/17", "replica-7/18")
    assert name.startswith("hop.policy.trainer.replica-7.")
    others = [
        hop_pair("policy", "trainer/18", "replica-7/18"),
        hop_pair("policy", "trainer/17", "replica-7/19"),
        hop_pair("policy2", "trainer/17", "replica-7/18"),
        hop_pair("policy", "trainer/17", "replica-8/18"),
    ]
    assert len({name, *others}) == 5


def test_names_of_any_length_are_names() -> None:
    pair = hop_pair("p" * 100, "s" * 100 + "/1795501003870", "r" * 100 + "/1795501003871")
    assert check_name("pair", pair) and check_name("batch", hop_batch(pair, 15))
    assert pair != hop_pair("p" * 100, "s" * 100 + "/1795501003870", "r" * 99 + "x/1795501003871")
    assert hop_batch(pair, 0) != hop_batch(pair, 1)


def test_a_buffer_is_read_only_while_it_holds_the_claim_s_version() -> None:
    buffer = HopBuffer()
    assert not buffer.holds(0) and not buffer.holds(1)
    buffer.fill(3)
    assert buffer.holds(3) and not buffer.holds(2) and not buffer.holds(4)
    buffer.clear()
    assert not buffer.holds(3) and not buffer.holds(0)


def test_a_buffer_that_is_read_is_not_filled_with_another_version() -> None:
    buffer = HopBuffer()
    buffer.fill(3)
    buffer.readers.add(11)
    buffer.fill(3)
    with pytest.raises(AssertionError, match="11"):
        buffer.fill(4)
    buffer.readers.discard(11)
    buffer.fill(4)
    assert buffer.holds(4)


def test_a_hop_that_has_not_begun_to_read_ends_with_its_claim() -> None:
    assert ended_hops({}, {1: "a/1", 2: "b/2"}, reading={2}) == [1]
    assert ended_hops({1: "a/1"}, {1: "a/1", 2: "b/2"}, reading=()) == [2]


def test_a_hop_that_reads_goes_on_until_its_subscriber_has_a_newer_claim() -> None:
    hops, reading = {1: "a/1", 2: "b/2"}, {1, 2}
    assert ended_hops({}, hops, reading) == []
    assert ended_hops({3: "b/2"}, hops, reading) == [2]
    assert ended_hops({1: "a/1", 3: "b/2"}, {**hops, 3: "b/2"}, reading) == [2]


def test_a_buffer_is_passed_on_to_those_who_want_what_comes() -> None:
    buffer = HopBuffer()
    buffer.fill(3)
    buffer.clear()
    buffer.pass_on(4)
    buffer.readers.add(11)
    assert not buffer.holds(4), "a hop that needs all of it waits"
    buffer.pass_on(4)
    with pytest.raises(AssertionError, match="11"):
        buffer.pass_on(5)
    with pytest.raises(AssertionError, match="11"):
        buffer.fill(5)
    buffer.fill(4)
    assert buffer.holds(4)


def test_no_hop_begins_twice_while_redis_still_has_its_claim() -> None:
    begun: set[int] = set()
    assert new_hops([5, 3], [], begun) == [3, 5]
    assert new_hops([3, 5, 7], [3, 5], begun) == [7]
    assert new_hops([3, 5, 7], [5], begun) == []  # 3 has ended, and is not released yet
    assert new_hops([7], [5], begun) == [] and begun == {5, 7}  # Redis has lost the claim of 5, which still moves
    assert new_hops([5, 7, 9], [5], begun) == [9]
    assert new_hops([], [], begun) == [] and not begun
