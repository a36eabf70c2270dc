"""Names of the pairs by which newcomers load: allowed, distinct, and found again by their group."""

from __future__ import annotations

import pytest

from etha.config import check_name, load_epoch, load_pair


@pytest.mark.parametrize("group", ["dp", "a.epoch-3", "x" * 60, "x" * 61, "y" * 100])
def test_a_pair_is_found_by_its_group_and_epoch(group: str) -> None:
    names = {load_pair(group, epoch, member) for epoch in (1, 12, 10**9) for member in (0, 3, 999)}
    assert len(names) == 9
    for name in names:
        assert check_name("pair", name) == name
    assert load_epoch(group, load_pair(group, 12, 3)) == 12


def test_pairs_of_others_are_not_taken_for_loads() -> None:
    assert load_epoch("dp", "weights") is None
    assert load_epoch("dp", load_pair("dp2", 1, 0)) is None
    assert load_epoch("a", load_pair("a.epoch-3", 1, 0)) is None
    assert load_epoch("x" * 61, load_pair("x" * 62, 1, 0)) is None
    assert load_epoch("dp", "dp.epoch-1.member-0.mine") is None
    assert load_epoch("d.p", "dxp.epoch-1.member-0") is None
