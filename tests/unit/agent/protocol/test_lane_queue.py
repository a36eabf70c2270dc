"""Bookings: one agent's queue, and transfers of many batches over agents whose lanes or amounts they share."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from etha.agent.protocol.lane_queue import Granted, LaneQueue, Need, Recalled
from tests.examples import examples
from tests.unit.agent.protocol.agreement import World


def ticket(start: int, agent: str = "a", batch: str = "x") -> tuple[int, str, str]:
    return (start, agent, batch)


def test_a_free_lane_is_granted_at_once_and_the_next_waits() -> None:
    lane = LaneQueue()
    assert lane.want("x", ticket(1)) == [Granted("x")]
    assert lane.want("y", ticket(2)) == []
    assert lane.free("x") == [Granted("y")]


def test_the_oldest_ticket_is_next() -> None:
    lane = LaneQueue()
    lane.want("x", ticket(1))
    lane.begin("x")
    lane.want("y", ticket(3))
    lane.want("z", ticket(2))
    assert lane.free("x") == [Granted("z")]


def test_an_older_ticket_recalls_a_younger_grant_once() -> None:
    lane = LaneQueue()
    lane.want("x", ticket(9))
    assert lane.want("y", ticket(5)) == [Recalled("x")]
    assert lane.want("z", ticket(4)) == []
    assert lane.free("x") == [Granted("z")]
    assert lane.want("x", ticket(9)) == []


def test_what_has_begun_is_not_recalled() -> None:
    lane = LaneQueue()
    lane.want("x", ticket(9))
    lane.begin("x")
    assert lane.want("y", ticket(5)) == []


def test_who_wants_no_longer_is_forgotten() -> None:
    lane = LaneQueue()
    lane.want("x", ticket(1))
    lane.want("y", ticket(2))
    assert lane.free("y") == [] and lane.free("y") == [] and lane.free("nobody") == []
    assert lane.free("x") == [] and not lane.holders


def test_equal_starts_are_ordered_by_agent_then_batch() -> None:
    lane = LaneQueue()
    lane.want("x", ticket(1, "b", "b1"))
    assert lane.want("y", ticket(1, "b", "b0")) == [Recalled("x")]


def test_a_lane_held_for_calls_that_wait_gives_way_to_any_ticket() -> None:
    lane = LaneQueue()
    assert lane.hold("x") and not lane.hold("y") and not lane.hold("x")
    assert lane.want("y", ticket(9)) == [Recalled("x")]
    assert lane.free("x") == [Granted("y")]
    lane.begin("y")
    assert not lane.hold("z")
    assert lane.free("y") == [] and lane.hold("z")


# ---- amounts ------------------------------------------------------------------------------------

LIMITS = {"staging": 100, "to b": 2, "to c": 2, "card": 8}


def amounts() -> LaneQueue:
    return LaneQueue(LIMITS.__getitem__)


def test_what_fits_is_granted_beside_what_runs() -> None:
    here = amounts()
    for number in range(2):
        assert here.want(number, ticket(number), {"staging": 40, "to b": 1}) == [Granted(number)]
        assert here.begin(number) == []
    assert here.want("third", ticket(2), {"staging": 1, "to b": 1}) == []
    assert here.want("elsewhere", ticket(3), {"staging": 10, "to c": 1}) == [Granted("elsewhere")]
    assert here.free(0) == [Granted("third")]


def test_a_way_whose_places_are_all_taken_keeps_nobody_from_another() -> None:
    here = amounts()
    for number in range(5):  # two have begun, and will not end; three wait behind them
        here.want(number, ticket(number), {"to b": 1})
        here.begin(number)
    assert here.holders == {0, 1}
    for number in range(10, 12):
        assert here.want(number, ticket(number), {"to c": 1}) == [Granted(number)]


def test_who_is_older_keeps_what_it_waits_for_from_who_is_younger() -> None:
    here = amounts()
    here.want("runs", ticket(1), {"staging": 60})
    here.begin("runs")
    assert here.want("much", ticket(2), {"staging": 90}) == []
    assert here.want("little", ticket(3), {"staging": 10}) == [], "or what is little would go first for ever"
    assert not here.hold("idle", {"staging": 10}) and here.hold("other", {"to c": 1})
    assert here.free("runs") == [Granted("much"), Granted("little")]


def test_only_as_much_is_recalled_as_is_wanted_and_the_youngest_first() -> None:
    here = amounts()
    for number in (5, 6, 7):
        here.want(number, ticket(number), {"staging": 30})
    assert here.want("old", ticket(1), {"staging": 45}) == [Recalled(7), Recalled(6)]
    assert here.want("older", ticket(0), {"staging": 15}) == [], "enough is on its way already"
    assert here.free(7) == [Granted("older")]
    assert here.free(6) == [Granted("old")]


def test_who_begins_although_it_was_recalled_has_another_recalled_for_it() -> None:
    here = amounts()
    for number in (5, 6):
        here.want(number, ticket(number), {"to b": 1})
    assert here.want("old", ticket(1), {"to b": 1}) == [Recalled(6)]
    assert here.begin(6) == [Recalled(5)], "GO had overtaken the recall"
    assert here.free(5) == [Granted("old")]


def test_nobody_needs_more_than_there_is() -> None:
    here = amounts()
    assert here.want("all", ticket(1), {"staging": 1 << 40, "card": 1 << 40}) == [Granted("all")]
    here.begin("all")
    assert here.want("next", ticket(2), {"card": 1}) == []
    assert here.free("all") == [Granted("next")]


AGENTS = ["a", "b", "c", "d"]
batches = st.lists(
    st.tuples(st.sampled_from(AGENTS), st.lists(st.sampled_from(AGENTS), min_size=1, max_size=3)),
    min_size=2,
    max_size=6,
)


#: What a batch needs of each of its agents, and how much there is.
needs = st.dictionaries(st.sampled_from(sorted(LIMITS)), st.integers(1, 120), max_size=3)


@given(batches=batches, held=st.booleans(), data=st.data())
@settings(max_examples=examples(400), deadline=None)
def test_transfers_over_shared_agents_all_end(
    batches: list[tuple[str, list[str]]], held: bool, data: st.DataObject
) -> None:
    play(batches, held, chosen_by(data), lambda: {"lane": 1}, lambda resource: 1)


@given(batches=batches, held=st.booleans(), data=st.data())
@settings(max_examples=examples(400), deadline=None)
def test_transfers_that_share_amounts_all_end(
    batches: list[tuple[str, list[str]]], held: bool, data: st.DataObject
) -> None:
    def need() -> Need:
        return {name: min(amount, LIMITS[name]) for name, amount in data.draw(needs).items()}

    play(batches, held, chosen_by(data), need, LIMITS.__getitem__)


def chosen_by(data: st.DataObject) -> Callable[[int], int]:
    return lambda count: data.draw(st.integers(0, count - 1))


def play(
    batches: list[tuple[str, list[str]]],
    held: bool,
    choose: Callable[[int], int],
    need: Callable[[], Need],
    limit: Callable[[str], int],
) -> None:
    """Two calls of each rank, everything that can happen in any order; and nobody waits for ever.

    ``choose(n)``: which of n things happens next.
    """
    ticks, lanes, worlds = count(), dict[str, LaneQueue](), dict[str, World]()
    for number, (sender, receivers) in enumerate(batches):
        agents = {"t": (sender,), "i": tuple(receivers)}
        options = {"now": lambda: next(ticks) // 2, "lanes": lanes, "worlds": worlds, "held": held}
        World(agents, batch=f"b{number}", need=need(), limit=limit, **options)
    todo = [(w, m, v) for w in worlds.values() for m, v in w.verbs() for _ in range(2)]
    keys = []
    while True:
        moves = [("link", w, link) for w in worlds.values() for link in w.busy()]
        moves += [("moved", w, agent) for w in worlds.values() for agent in w.running]
        moves += [("call", *todo[i]) for i in range(len(todo))]
        if not moves:
            break
        match moves[choose(len(moves))]:
            case "link", world, link:
                world.deliver(*link)
            case "moved", world, agent:
                world.moved(agent)
            case "call", world, member, verb:
                todo.remove((world, member, verb))
                keys.append((world, world.call(member, verb)))
    for world, key in keys:
        assert key in world.results, f"{world.batch} waits for ever"
    assert all(not lane.holders for lane in lanes.values())
