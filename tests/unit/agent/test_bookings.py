"""Lanes in one order: one agent's queue, and transfers of many batches over agents that they share."""

from __future__ import annotations

from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from etha.agent.bookings import Bookings, Granted, Recalled

from .agreement import World


def ticket(start: int, agent: str = "a", batch: str = "x") -> tuple[int, str, str]:
    return (start, agent, batch)


def test_a_free_lane_is_granted_at_once_and_the_next_waits() -> None:
    lane = Bookings()
    assert lane.want("x", ticket(1)) == [Granted("x")]
    assert lane.want("y", ticket(2)) == []
    assert lane.free("x") == [Granted("y")]


def test_the_oldest_ticket_is_next() -> None:
    lane = Bookings()
    lane.want("x", ticket(1))
    lane.begin("x")
    lane.want("y", ticket(3))
    lane.want("z", ticket(2))
    assert lane.free("x") == [Granted("z")]


def test_an_older_ticket_recalls_a_younger_grant_once() -> None:
    lane = Bookings()
    lane.want("x", ticket(9))
    assert lane.want("y", ticket(5)) == [Recalled("x")]
    assert lane.want("z", ticket(4)) == []
    assert lane.free("x") == [Granted("z")]
    assert lane.want("x", ticket(9)) == []


def test_what_has_begun_is_not_recalled() -> None:
    lane = Bookings()
    lane.want("x", ticket(9))
    lane.begin("x")
    assert lane.want("y", ticket(5)) == []


def test_who_wants_no_longer_is_forgotten() -> None:
    lane = Bookings()
    lane.want("x", ticket(1))
    lane.want("y", ticket(2))
    assert lane.free("y") == [] and lane.free("y") == [] and lane.free("nobody") == []
    assert lane.free("x") == [] and lane.holder is None


def test_equal_starts_are_ordered_by_agent_then_batch() -> None:
    lane = Bookings()
    lane.want("x", ticket(1, "b", "b1"))
    assert lane.want("y", ticket(1, "b", "b0")) == [Recalled("x")]


def test_a_lane_held_for_calls_that_wait_gives_way_to_any_ticket() -> None:
    lane = Bookings()
    assert lane.hold("x") and not lane.hold("y") and not lane.hold("x")
    assert lane.want("y", ticket(9)) == [Recalled("x")]
    assert lane.free("x") == [Granted("y")]
    lane.begin("y")
    assert not lane.hold("z")
    assert lane.free("y") == [] and lane.hold("z")


AGENTS = ["a", "b", "c", "d"]
batches = st.lists(
    st.tuples(st.sampled_from(AGENTS), st.lists(st.sampled_from(AGENTS), min_size=1, max_size=3)),
    min_size=2,
    max_size=6,
)


@given(batches=batches, held=st.booleans(), data=st.data())
@settings(max_examples=400, deadline=None)
def test_transfers_over_shared_agents_all_end(
    batches: list[tuple[str, list[str]]], held: bool, data: st.DataObject
) -> None:
    ticks, lanes, worlds = count(), {}, {}
    for number, (sender, receivers) in enumerate(batches):
        agents = {"t": (sender,), "i": tuple(receivers)}
        World(agents, batch=f"b{number}", now=lambda: next(ticks) // 2, lanes=lanes, worlds=worlds, held=held)
    todo = [(w, m, v) for w in worlds.values() for m, v in w.verbs() for _ in range(2)]
    keys = []
    while True:
        moves = [("link", w, link) for w in worlds.values() for link in w.busy()]
        moves += [("moved", w, agent) for w in worlds.values() for agent in w.running]
        moves += [("call", *todo[i]) for i in range(len(todo))]
        if not moves:
            break
        match moves[data.draw(st.integers(0, len(moves) - 1))]:
            case "link", world, link:
                world.deliver(*link)
            case "moved", world, agent:
                world.moved(agent)
            case "call", world, member, verb:
                todo.remove((world, member, verb))
                keys.append((world, world.call(member, verb)))
    for world, key in keys:
        assert key in world.results, f"{world.batch} waits for ever"
    assert all(lane.holder is None for lane in lanes.values())
