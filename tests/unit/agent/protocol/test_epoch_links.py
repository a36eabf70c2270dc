"""Who links with whom: few links, and everybody is reached and watched, whatever single host is down."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from etha.agent.protocol.epoch_links import MESH, EpochLinks

Sides = dict[str, list[tuple[str, str]]]


def all_of(sides: Sides) -> dict[str, EpochLinks]:
    return {agent: EpochLinks.of(agent, sides) for ranks in sides.values() for agent, _ in ranks}


@st.composite
def epochs(draw: st.DrawFn) -> Sides:
    """Agents on hosts, each with some ranks of one side or of both."""
    agents = draw(st.integers(1, 3 * MESH))
    hosts = [f"h{draw(st.integers(0, 12))}" for _ in range(agents)]
    sides: Sides = {"trainer": [], "inference": []}
    for side, ranks in sides.items():
        chosen = draw(st.lists(st.integers(0, agents - 1), min_size=1, max_size=4 * MESH))
        ranks += [(f"{number:02}", hosts[number]) for number in ([*range(agents)] if side == "trainer" else chosen)]
    return sides


@given(epochs())
def test_both_ends_of_a_link_want_it_and_all_agree_on_the_hubs(sides: Sides) -> None:
    links = all_of(sides)
    hosts = dict(rank for ranks in sides.values() for rank in ranks)
    assert len({(one.agents, one.hubs) for one in links.values()}) == 1
    for me, one in links.items():
        assert me not in one.near and one.near | one.far | {me} == one.agents == links.keys()
        for other in one.near:
            assert me in links[other].near
        assert {agent for agent in one.agents if hosts[agent] == hosts[me]} - {me} <= one.near
    hubs = next(iter(links.values())).hubs
    if len(links) <= MESH:
        assert not hubs and all(not one.far for one in links.values())
        return
    assert {sides["trainer"][0][0], sides["inference"][0][0]} <= set(hubs) and 2 <= len(hubs) <= 3
    assert all(not links[hub].far for hub in hubs)
    if len(set(hosts.values())) > 1:
        assert len({hosts[hub] for hub in hubs}) > 1, "when a host is down, the others still have a hub"
    for one in links.values():
        beside = sum(host == hosts[one.me] for host in hosts.values())
        assert one.me in hubs or len(one.near) <= 3 + beside, "the number of links does not grow with the epoch"


def test_only_hubs_pass_on_and_only_hubs_are_believed() -> None:
    sides = {"t": [(f"t{n}", f"h{n}") for n in range(MESH)], "i": [("i0", "h99")]}
    links = all_of(sides)
    assert links["t5"].hubs == ("i0", "t0") and links["t5"].near == {"i0", "t0"}
    assert links["t0"].relays("t5", "t5", "t6") and not links["t0"].relays("t5", "t4", "t6")
    assert not links["t0"].relays("t5", "t5", "somebody") and not links["t4"].relays("t5", "t5", "t6")
    assert links["t5"].accepts("i0", "t6") and not links["t5"].accepts("t4", "t6")
    assert not links["t5"].accepts("i0", "t0"), "a hub is heard on its own link only"
