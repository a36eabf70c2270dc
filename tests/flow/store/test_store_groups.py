"""Entering and leaving elastic groups against real servers, beside the rule that the scripts apply."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from etha.errors import ConfigError, GroupLostError
from etha.groups.membership import GroupRoster, RankEntry
from etha.store.groups import Entrance
from etha.store.keys import TABLE
from etha.store.records import RankHolder, Seating
from etha.store.registry import Store
from tests.unit.store.server import (
    BINARIES,
    Server,
    agent,
    agent_record,
    binary_of,
    dead,
    fresh_namespace,
    here,
    served,
)

LONG = 1e6


@pytest.fixture(scope="module", params=BINARIES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("redis"), binary=binary_of(request.param)) as running:
        yield running


@pytest.fixture
async def store(server: Server) -> AsyncIterator[Store]:
    async with agent(server.url, fresh_namespace(), "a") as opened:
        yield opened


def process(number: int, agent: str = "a") -> RankHolder:
    """A process of another host, which lives as long as its agent's lease."""
    return RankHolder(agent=agent, host="far", pid=1000 + number, start=number)


async def enter(store: Store, replica: str, number: int, rank: int = 0, world: int = 1, **more: Any) -> Seating:
    wants, agent = more.pop("wants", True), more.pop("agent", "a")
    options = {"timeout": LONG, "grace": LONG, "asked": f"{random.random()}", **more}
    entrance = Entrance(group="g", replica=replica, rank=rank, world=world, **options)
    return await store.groups.enter(entrance, process(number, agent), wants=wants)


def names(seating: Seating) -> list[str]:
    return [member.replica for member in seating.members]


async def test_the_first_is_alone_and_who_comes_later_waits_until_it_enters_again(store: Store) -> None:
    first = await enter(store, "x", 1)
    assert (first.formed, first.epoch, first.state, names(first)) == (True, 1, "formed", ["x"])
    second = await enter(store, "y", 2)
    assert not second.formed
    assert (second.epoch, second.state) == (1, "changing")
    assert [(m.replica, m.rank, m.holder and m.holder.pid) for m in second.missing] == [("x", 0, 1001)]
    state = await store.groups.state("g")
    assert state is not None
    assert (state.state, state.epoch) == ("changing", 1)
    both = await enter(store, "x", 1, epoch=1, last=1, step=5)
    assert (both.formed, both.epoch, names(both)) == (True, 2, ["x", "y"])
    assert [m.counts for m in both.members] == [True, False]
    again = await enter(store, "y", 2, asked="t", epoch=2, last=0)
    assert not again.formed


async def test_a_question_whose_answer_was_lost_is_answered_the_same(store: Store) -> None:
    await enter(store, "x", 1)
    await enter(store, "y", 2, asked="t")
    await enter(store, "x", 1, epoch=1, last=1)
    heard = await enter(store, "y", 2, asked="t")
    assert (heard.formed, heard.epoch, names(heard)) == (True, 2, ["x", "y"])


async def test_a_question_is_known_again_by_an_agent_that_first_hears_that_its_member_is_there(store: Store) -> None:
    """The agent that has asked has died before it has heard the answer."""
    await enter(store, "x", 1)
    await enter(store, "y", 2)
    await enter(store, "x", 1, epoch=1, last=1)
    await enter(store, "x", 1, epoch=2, last=2)
    await enter(store, "y", 2, epoch=2, asked="t")
    there = await enter(store, "y", 2, epoch=2, asked="", wants=False)
    assert (there.epoch, there.state) == (3, "formed")
    heard = await enter(store, "y", 2, epoch=2, asked="t")
    assert (heard.formed, heard.epoch, heard.state, names(heard)) == (True, 3, "formed", ["x", "y"])


async def test_a_replica_comes_whole_and_goes_whole(store: Store) -> None:
    assert not (await enter(store, "x", 1, rank=0, world=2)).formed
    assert (await enter(store, "x", 2, rank=1, world=2)).formed
    entered = await enter(store, "y", 3, rank=0, world=2)
    assert entered.state == "formed", "nobody is disturbed by a replica that is not complete"
    await enter(store, "y", 4, rank=1, world=2)
    await enter(store, "x", 1, rank=0, world=2, epoch=1, last=1)
    assert (await enter(store, "x", 2, rank=1, world=2, epoch=1, last=1)).epoch == 2
    assert await store.groups.depart("g", "y", 0, process(3), "died")
    assert not await store.groups.depart("g", "y", 1, process(4), "died"), "its replica has ended already"
    launch = entered.launch
    with pytest.raises(GroupLostError, match=r"rank 0 of replica y .pid 1003 on host far. died"):
        await enter(store, "y", 4, rank=1, world=2, launch=launch, epoch=2)


async def test_a_replica_that_is_not_complete_waits_for_its_own_ranks(store: Store) -> None:
    entered = await enter(store, "x", 1, rank=1, world=3)
    assert [(one.replica, one.rank, one.holder) for one in entered.missing] == [("x", 0, None), ("x", 2, None)]


async def test_a_new_process_under_the_name_of_a_launch_that_is_over_hears_what_to_do(store: Store) -> None:
    await enter(store, "x", 1, launch="job.0")
    await store.groups.depart("g", "x", 0, process(1), "died")
    with pytest.raises(
        GroupLostError, match=r"launch job\.0 of this replica is over.*another --rdzv-id or --standalone"
    ):
        await enter(store, "x", 2, launch="job.0")
    with pytest.raises(GroupLostError, match=r"died$"):
        await enter(store, "x", 1, launch="job.0", epoch=1)  # one that was in it


@pytest.mark.parametrize("first", ["the others", "the death"])
async def test_a_death_of_which_an_empty_redis_hears_ends_the_launch(store: Store, first: str) -> None:
    """Redis has lost its data; rank 0 has died meanwhile, and rank 1 is put back before its agent says so, or after."""
    back = {"rank": 1, "world": 2, "epoch": 7, "last": 7, "launch": "one"}
    if first == "the others":
        assert not (await enter(store, "x", 2, **back)).formed
    assert await store.groups.depart("g", "x", 0, process(1), "died", launch="one")
    with pytest.raises(GroupLostError, match=r"rank 0 of replica x .pid 1001 on host far. died"):
        await enter(store, "x", 2, **back)
    assert not await store.groups.depart("g", "x", 0, process(1), "died", launch="one"), "that is known"


async def test_a_death_of_an_earlier_launch_ends_no_later_one(store: Store) -> None:
    assert not (await enter(store, "x", 3, rank=1, world=2, launch="two")).formed
    assert not await store.groups.depart("g", "x", 0, process(1), "died", launch="one")
    assert not await store.groups.depart("g", "x", 0, process(1), "died"), "a rank that was never there"
    assert (await enter(store, "x", 4, world=2, launch="two")).formed


async def test_a_survivor_goes_on_at_once(store: Store) -> None:
    await enter(store, "x", 1)
    await enter(store, "y", 2)
    await enter(store, "x", 1, epoch=1, last=1)
    await store.groups.depart("g", "x", 0, process(1), "died")
    alone = await enter(store, "y", 2, epoch=2, last=1)
    assert (alone.formed, alone.epoch, names(alone)) == (True, 3, ["y"])


async def test_a_newcomer_never_starts_without_a_member_that_lives(store: Store) -> None:
    await enter(store, "x", 1)
    newcomer = await enter(store, "y", 2, timeout=0, grace=0)
    assert not newcomer.formed
    assert [m.replica for m in newcomer.missing] == ["x"]


async def test_the_most_advanced_come_first_and_other_epochs_steps_are_not_compared(store: Store) -> None:
    for number, name in enumerate("xyz"):
        await enter(store, name, number)
    assert names(await enter(store, "x", 0, epoch=1, last=1)) == ["x", "y", "z"]
    await enter(store, "x", 0, epoch=2, last=2, step=3)
    await enter(store, "z", 2, epoch=2, last=1, step=7)
    last = await enter(store, "y", 1, epoch=2, last=2, step=4)
    assert [(m.replica, m.step, m.counts) for m in last.members] == [("y", 4, True), ("x", 3, False), ("z", 7, False)]


async def test_ranks_at_different_steps_are_a_torn_replica(store: Store) -> None:
    await enter(store, "x", 1, rank=0, world=2, last=1, epoch=1, step=3)
    with pytest.raises(GroupLostError, match="replica x is torn: its rank 0 is at step 3, its rank 1 at step 4"):
        await enter(store, "x", 2, rank=1, world=2, last=1, epoch=1, step=4)


async def test_who_cannot_reach_an_older_member_pauses(store: Store) -> None:
    await enter(store, "x", 1)
    await enter(store, "y", 2)
    await enter(store, "x", 1, epoch=1, last=1)
    await enter(store, "y", 2, epoch=2, unmet=("x",))
    alone = await enter(store, "x", 1, epoch=2, last=2, unmet=("y",))
    assert (alone.formed, names(alone)) == (True, ["x"])
    paused = await enter(store, "y", 2, epoch=2)
    assert (paused.formed, paused.state) == (False, "formed")
    assert 0 < paused.wait <= 5


async def test_a_question_that_is_asked_again_reports_nobody_again(store: Store) -> None:
    """The agent asks until the epoch has formed; who pauses would never be done with it otherwise."""
    await enter(store, "x", 1)
    await enter(store, "y", 2)
    await enter(store, "x", 1, epoch=1, last=1)
    question = {"epoch": 2, "unmet": ("x",), "asked": "t"}
    first = await enter(store, "y", 2, **question)
    again = await enter(store, "y", 2, **question)
    assert not first.formed and not again.formed
    key = store.keys.replica("g", "y")
    found = await store._session.connection.call("read", lambda client: client.hget(key, "pause"), 10)
    assert found == "5000"
    await store._session.connection.call("write", lambda client: client.hset(key, "not_before", "1"), 10)
    await enter(store, "y", 2, **question)
    found = await store._session.connection.call("read", lambda client: client.hget(key, "pause"), 10)
    assert found == "5000"


async def test_a_rank_is_held_by_one_process(store: Store) -> None:
    entrance = Entrance(group="g", replica="x", rank=0, world=1, timeout=LONG, grace=LONG)
    await store.groups.enter(entrance, dead(), wants=True)
    taken = await store.groups.enter(entrance, here(), wants=True)
    assert (taken.formed, taken.epoch) == (True, 2) and taken.launch.startswith("auto-2-")
    with pytest.raises(ConfigError, match=r"rank 0 of replica x of group g is held by pid .* which is alive"):
        await store.groups.enter(entrance, process(1), wants=True)
    with pytest.raises(ConfigError, match="replica x has 1 ranks: all replicas of a group have as many"):
        await enter(store, "y", 2, world=2)


async def test_a_named_launch_supersedes_the_one_before(store: Store) -> None:
    await enter(store, "x", 1, launch="one")
    assert (await enter(store, "x", 2, launch="two")).formed
    with pytest.raises(GroupLostError, match="launch one of replica x was superseded by launch two"):
        await enter(store, "x", 1, launch="one", epoch=1, last=1)


async def test_redis_that_lost_everything_learns_the_epoch_again(store: Store) -> None:
    restored = await enter(store, "x", 1, epoch=7, last=7, wants=False, launch="one")
    assert (restored.epoch, restored.formed) == (7, True)
    await enter(store, "y", 2)
    both = await enter(store, "x", 1, epoch=7, last=7, step=3, launch="one")
    assert (both.epoch, names(both)) == (8, ["x", "y"])


async def test_redis_that_lost_everything_opens_no_launch_again_that_has_ended(server: Server) -> None:
    """It counts launches from the beginning, and members that lived through it come back with theirs."""
    async with agent(server.url, fresh_namespace(), "a") as before:
        await enter(before, "y", 1)
        launch = (await enter(before, "x", 2)).launch
    async with agent(server.url, fresh_namespace(), "a") as store:
        await enter(store, "x", 2, epoch=2, last=2, wants=False, launch=launch)
        await store.groups.depart("g", "x", 0, process(2), "died")
        again = await enter(store, "x", 3)
        assert again.formed and again.launch != launch


async def test_a_wish_is_put_back_with_its_rank(store: Store) -> None:
    """Otherwise the agent that puts a rank back takes back what that has just asked for."""
    options = {"group": "g", "rank": 0, "world": 1, "epoch": 3, "last": 3, "timeout": LONG, "grace": LONG}
    for number, name in enumerate("xyz"):
        entrance = Entrance(replica=name, launch=f"{name}1", asked=name, **options)
        store.groups.held["g", name, 0] = (entrance, process(number))
    store.groups.wishes |= {("g", "x", 0), ("g", "z", 0)}
    await store.groups.restore(10)
    last = await enter(store, "y", 1, epoch=3, last=3, launch="y1")
    assert (last.formed, last.epoch, sorted(names(last))) == (True, 4, ["x", "y", "z"])


async def test_a_rank_that_cannot_be_put_back_keeps_no_other_away(store: Store) -> None:
    for number, (name, world) in enumerate([("x", 1), ("y", 2), ("z", 1)]):
        entrance = Entrance(group="g", replica=name, rank=0, world=world, launch="1", epoch=3, timeout=LONG, grace=LONG)
        store.groups.held["g", name, 0] = (entrance, process(number))
    await store.groups.restore(10)
    [view] = await store.groups.views()
    assert {member.holder.pid for member in view.ranks()} == {process(0).pid, process(2).pid}


async def test_members_of_an_epoch_exchange_values(store: Store) -> None:
    groups = store.groups
    await groups.put("g", 3, {"k": b"\x00v", "other": b""})
    assert await groups.values("g", 3, ["k", "other", "none"]) == {"k": b"\x00v", "other": b""}
    assert await groups.values("g", 4, ["k"]) == {}
    assert [await groups.add("g", 3, "n", 2), await groups.add("g", 3, "n", 3)] == [2, 5]
    assert await groups.values("g", 3, ["n"]) == {"n": b"5"}
    assert await groups.compare_set("g", 3, "c", b"", b"one") == b"one"
    assert await groups.compare_set("g", 3, "c", b"two", b"three") == b"one"
    assert await groups.compare_set("g", 3, "c", b"one", b"two") == b"two"
    assert await groups.compare_set("g", 3, "missing", b"x", b"y") == b"x"
    assert await groups.remove("g", 3, "c")
    assert await groups.values("g", 3, ["c"]) == {}


async def test_what_is_written_is_in_the_key_table(store: Store) -> None:
    await enter(store, "x", 1)
    await enter(store, "y", 2, unmet=("x",))
    table = {kind.pattern: kind for kind in TABLE}
    client = store._session.connection._client
    group = store.keys.group("g")
    assert set(await client.hgetall(group)) == table["group:GROUP"].fields.keys()
    own = set(await client.hgetall(store.keys.replica("g", "y"))) - {"0"}
    assert own == table["group:GROUP:REPLICA"].fields.keys() - {"RANK"}
    for key in (group, store.keys.replica("g", "y"), store.keys.groups):
        assert await client.pttl(key) > 0


@pytest.mark.parametrize("seed", range(12))
async def test_the_scripts_do_what_the_rule_says(store: Store, server: Server, seed: int) -> None:
    """Random events of three replicas of two ranks, whose agents come and go: after each, Redis holds what the rule
    says."""
    chance = random.Random(seed)
    async with agent(server.url, store.keys.namespace, "b") as other:
        agents = {"x": "a", "y": "b", "z": "b"}
        roster, now, shown = GroupRoster(world=2), 1000, True
        for turn in range(60):
            name, rank = chance.choice("xyz"), chance.randrange(2)
            act = chance.choice(["enter"] * 6 + ["depart", "agent"])
            if act == "agent":
                shown = not shown
                await (other.agents.publish(agent_record("b")) if shown else other.agents.withdraw())
                for one in {"y", "z"} & roster.replicas.keys():
                    roster = roster.serve(one, shown)
                continue
            number = "xyz".index(name) * 2 + rank
            if act == "depart":
                known = name in roster.replicas and rank in roster.replicas[name].ranks
                done = await store.groups.depart("g", name, rank, process(number, agents[name]), "died")
                assert done == known
                roster = roster.depart(name, now) if done else roster
            else:
                if agents[name] == "b" and not shown:
                    continue
                timeout, grace = chance.choice([0.0, LONG]), chance.choice([0.0, LONG])
                last = chance.randint(0, roster.epoch)
                entry = RankEntry(
                    epoch=chance.randint(last, roster.epoch),
                    last=last,
                    step=chance.choice([3, 3, 4]),
                    least=chance.choice([1, 1, 2]),
                    wants=chance.random() < 0.8,
                )
                unmet = tuple(n for n in "xyz" if chance.random() < 0.05)
                suspects = tuple(n for n in "xyz" if chance.random() < 0.1)
                roster = replace(roster, timeout=int(timeout * 1000), grace=int(grace * 1000))
                before = roster
                roster = roster.enter(name, rank, entry, now, unmet=frozenset(unmet), suspects=frozenset(suspects))
                options = {"timeout": timeout, "grace": grace, "unmet": unmet, "suspects": suspects}
                fields = {"epoch": entry.epoch, "last": last, "step": entry.step, "least": entry.least}
                try:
                    seated = await enter(
                        store, name, number, rank, 2, agent=agents[name], wants=entry.wants, **fields, **options
                    )
                except GroupLostError:
                    assert name not in roster.replicas, (turn, before, entry)
                else:
                    assert (seated.epoch, seated.state) == (roster.epoch, roster.state), (turn, before, entry)
                    expected = [] if not seated.formed else [(m.replica, m.step, m.counts) for m in roster.members]
                    assert [(m.replica, m.step, m.counts) for m in seated.members] == expected
            state = await store.groups.state("g")
            if state is not None:
                assert (state.state, state.epoch) == (roster.state, roster.epoch), (turn, act, roster)


async def test_a_group_is_seen_with_its_members_steps_and_whom_the_next_epoch_waits_for(store: Store) -> None:
    assert await store.groups.views() == []
    await enter(store, "x", 1, step=4, last=0)
    await enter(store, "y", 2, 0)
    [view] = await store.groups.views()
    line = view.line()
    assert (line["group"], line["state"], line["epoch"], line["step"]) == ("g", "changing", 1, 4)
    assert [(one["replica"], one["rank"], one["step"], one["counts"]) for one in line["members"]] == [("x", 0, 4, True)]
    assert line["members"][0]["ranks"] == [{"rank": 0, "host": "far", "pid": 1001}]
    assert [one["replica"] for one in line["joining"]] == ["y"]
    assert line["waiting_for"] == [{"replica": "x", "rank": 0, "host": "far", "pid": 1001}]
    assert line["waits"] >= 0 and view.waits is not None
    await enter(store, "x", 1, epoch=1, last=1, step=5)
    [view] = await store.groups.views()
    line = view.line()
    assert (line["state"], line["epoch"], line["step"], line["waits"]) == ("formed", 2, 5, None)
    assert [(one["replica"], one["counts"]) for one in line["members"]] == [("x", True), ("y", False)]
    assert line["joining"] == line["waiting_for"] == []
    for number, replica in enumerate("xy", 1):
        await store.groups.depart("g", replica, 0, process(number), "died")
    assert await store.groups.views() == [], "a group without replicas is not shown"


async def test_a_rank_that_nobody_has_come_for_is_waited_for_by_name(store: Store) -> None:
    await enter(store, "x", 1, 0, world=2, least=2)
    [view] = await store.groups.views()
    line = view.line()
    assert line["waiting_for"] == [{"replica": "x", "rank": 1, "host": "", "pid": None}]
    assert (line["min_replicas"], line["complete"], line["world_size"]) == (2, 0, 2)


async def test_a_replica_whose_agent_is_silent_is_shown_as_not_served(server: Server) -> None:
    namespace = fresh_namespace()
    async with agent(server.url, namespace, "a") as store:
        async with agent(server.url, namespace, "b") as other:
            await enter(other, "y", 2, agent="b")
            [view] = await store.groups.views()
            assert view.line()["members"][0]["served"]
            await other.agents.withdraw()
        [view] = await store.groups.views()
        assert not view.line()["members"][0]["served"]
