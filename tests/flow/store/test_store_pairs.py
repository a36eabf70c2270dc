"""Joining and leaving pairs against real servers: launches, epochs, who may hold a rank."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from etha.errors import ConfigError, PeerLostError, ProtocolError
from etha.store.groups import Entrance
from etha.store.keys import TABLE
from etha.store.records import PairView, RankHolder
from etha.store.registry import Store
from tests.flow.store.test_store_batches import FEW, announced
from tests.unit.store.server import BINARIES, Server, agent, binary_of, dead, fresh_namespace, here, served, sleeping


@pytest.fixture(scope="module", params=BINARIES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("redis"), binary=binary_of(request.param)) as running:
        yield running


@pytest.fixture
async def store(server: Server) -> AsyncIterator[Store]:
    async with agent(server.url, fresh_namespace(), "a") as opened:
        yield opened


@pytest.fixture
def others() -> Iterator[list[RankHolder]]:
    """Three more live processes."""
    with sleeping() as one, sleeping() as two, sleeping() as three:
        yield [one, two, three]


async def trainer(store: Store, member: RankHolder, rank: int = 0, size: int = 1, **more: Any) -> PairView:
    return await store.pairs.join(
        "w", "trainer", "inference", rank=rank, world_size=size, member=member, launch=more.pop("launch", None), **more
    )


async def inference(store: Store, member: RankHolder, rank: int = 0, size: int = 1, **more: Any) -> PairView:
    return await store.pairs.join(
        "w", "inference", "trainer", rank=rank, world_size=size, member=member, launch=more.pop("launch", None), **more
    )


def kinds(events: list[tuple[str, dict[str, str]]]) -> list[str]:
    return [fields["kind"] for _, fields in events]


async def test_a_pair_forms_when_all_ranks_of_both_sides_are_there(store: Store, others: list[RankHolder]) -> None:
    view = await inference(store, others[0], rank=1, size=2)
    assert (view.state, view.epoch) == ("forming", 0)
    assert view.missing() == {"inference": (0,), "trainer": (0,)}
    view = await trainer(store, here())
    assert view.state == "forming" and view.missing() == {"inference": (0,)}
    view = await inference(store, others[1], rank=0, size=2)
    assert (view.state, view.epoch, view.missing()) == ("formed", 1, {})
    assert {name: side.world_size for name, side in view.sides.items()} == {"inference": 2, "trainer": 1}
    assert view.member("inference", 1) == replace(others[0], launch="auto-1", epoch=1)
    assert [v.name for v in await store.pairs.all()] == ["w"]
    assert kinds(await store.events()) == ["agent_came", "joined", "joined", "joined", "formed"]


async def test_many_ranks_are_announced_when_the_last_has_come(store: Store) -> None:
    async with announced(store, store.keys.pair("w")) as until_now:
        for rank in range(100):
            await trainer(store, here(), rank=rank, size=100)
        assert await until_now() == ["forming"]
        for rank in range(99):
            await inference(store, here(), rank=rank, size=100)
        assert await until_now() == ["forming"]
        assert (await inference(store, here(), rank=99, size=100)).state == "formed"
        assert await until_now() == ["formed"]
        await trainer(store, here(), rank=50, size=100, launch="another")
        assert await until_now() == ["lost"]


async def test_each_of_few_ranks_is_announced(store: Store) -> None:
    async with announced(store, store.keys.pair("w")) as until_now:
        for rank in range(FEW):
            await trainer(store, here(), rank=rank, size=FEW)
        assert await until_now() == ["forming"] * FEW


async def test_the_same_call_again_changes_nothing(store: Store, others: list[RankHolder]) -> None:
    await trainer(store, here())
    first = await inference(store, others[0])
    assert first.state == "formed"
    assert await inference(store, others[0]) == first
    assert kinds(await store.events())[-1] == "formed"


async def test_names_that_do_not_fit_are_refused(store: Store, others: list[RankHolder]) -> None:
    await trainer(store, here())
    with pytest.raises(ConfigError, match="links inference and trainer, not judge and trainer"):
        await store.pairs.join("w", "judge", "trainer", rank=0, world_size=1, member=others[0], launch=None)
    with pytest.raises(ConfigError, match="both"):
        await store.pairs.join("v", "x", "x", rank=0, world_size=1, member=here(), launch=None)
    with pytest.raises(ConfigError, match="rank 2 is not in side trainer of world_size 2"):
        await trainer(store, here(), rank=2, size=2)
    with pytest.raises(ConfigError, match="1 to 100"):
        await store.pairs.join("a:b", "x", "y", rank=0, world_size=1, member=here(), launch=None)


async def test_other_side_names_are_free_again_when_all_holders_are_dead(store: Store) -> None:
    await trainer(store, dead())
    view = await store.pairs.join("w", "judge", "actor", rank=0, world_size=1, member=here(), launch=None)
    assert sorted(view.sides) == ["actor", "judge"]


async def test_a_stranger_with_another_world_size_does_not_break_a_formed_pair(
    store: Store, others: list[RankHolder]
) -> None:
    await trainer(store, here(), rank=0, size=1)
    assert (await inference(store, here(), rank=0, size=1)).state == "formed"
    with pytest.raises(ConfigError, match="rank 2 says 3, launch auto-1 began with 1"):
        await trainer(store, others[0], rank=2, size=3)
    view = await store.pairs.get("w")
    assert view is not None and (view.state, view.epoch) == ("formed", 1)


async def test_world_sizes_inside_a_launch_must_agree(store: Store, others: list[RankHolder]) -> None:
    await trainer(store, here(), rank=0, size=2)
    with pytest.raises(ConfigError, match="rank 1 says 3, launch auto-1 began with 2"):
        await trainer(store, others[0], rank=1, size=3)
    # Not when those who said otherwise are dead.
    await inference(store, dead(), rank=0, size=4)
    view = await inference(store, others[0], rank=0, size=1)
    assert view.sides["inference"].world_size == 1


async def test_a_live_holder_keeps_its_rank(store: Store, others: list[RankHolder]) -> None:
    await trainer(store, others[0])
    with pytest.raises(ConfigError, match=f"rank 0 of side trainer on pair w is held by pid {others[0].pid} on host"):
        await trainer(store, others[1])
    await store.pairs.join("v", "x", "y", rank=0, world_size=1, member=others[0], launch="L")
    with pytest.raises(ConfigError, match="is alive"):  # the same under an id that is the current launch
        await store.pairs.join("v", "x", "y", rank=0, world_size=1, member=others[1], launch="L")


async def test_a_dead_holder_that_never_formed_is_replaced(store: Store, others: list[RankHolder]) -> None:
    await trainer(store, dead(), rank=0, size=2)
    await trainer(store, others[0], rank=1, size=2)
    view = await trainer(store, here(), rank=0, size=2)
    assert view.sides["trainer"].launch == "auto-1" and len(view.sides["trainer"].members) == 2


async def test_a_dead_holder_of_a_formed_pair_opens_the_next_launch(store: Store, others: list[RankHolder]) -> None:
    await trainer(store, dead(), rank=0, size=2)
    await trainer(store, others[0], rank=1, size=2)
    assert (await inference(store, others[1])).epoch == 1
    view = await trainer(store, here(), rank=0, size=2)
    assert (view.state, view.reason, view.epoch) == ("lost", "relaunched", 1)
    assert view.sides["trainer"].launch == "auto-2"
    assert list(view.sides["trainer"].members) == [0], "the others of the old launch call again"
    await trainer(store, others[0], rank=1, size=2)
    view = await inference(store, others[1])
    assert (view.state, view.epoch, view.reason) == ("formed", 2, None)


async def test_a_relaunch_may_have_another_size(store: Store, others: list[RankHolder]) -> None:
    await trainer(store, dead(1), rank=0, size=2)
    await trainer(store, dead(2), rank=1, size=2)
    await inference(store, here())
    # Rank 1 was reported dead, rank 0 was not: either way the next life begins.
    assert await store.pairs.leave("w", "trainer", 1, dead(2), "died")
    for rank in range(3):
        view = await trainer(store, others[rank], rank=rank, size=3)
    assert view.sides["trainer"].launch == "auto-2"
    view = await inference(store, here())
    assert (view.state, view.epoch) == ("formed", 2)


async def test_a_vacant_rank_of_a_formed_launch_opens_the_next_one(store: Store, others: list[RankHolder]) -> None:
    await trainer(store, others[0])
    await inference(store, here())
    await store.pairs.leave("w", "trainer", 0, others[0], "died")
    view = await trainer(store, others[1], rank=0, size=1)
    assert view.sides["trainer"].launch == "auto-2"


async def test_survivors_that_wait_already_are_not_evicted(store: Store, others: list[RankHolder]) -> None:
    await trainer(store, others[0], rank=0, size=2)
    await trainer(store, others[1], rank=1, size=2)
    await inference(store, here())
    await store.pairs.leave("w", "trainer", 1, others[1], "died")
    await trainer(store, others[0], rank=0, size=2)
    view = await trainer(store, others[2], rank=1, size=2)
    assert view.sides["trainer"].launch == "auto-1" and len(view.sides["trainer"].members) == 2
    assert (await inference(store, here())).epoch == 2


async def test_an_explicit_launch_evicts_the_older_and_fences_it(store: Store, others: list[RankHolder]) -> None:
    await trainer(store, others[0], launch="run-1")
    assert (await inference(store, here())).epoch == 1
    view = await trainer(store, others[1], launch="run-2")
    assert (view.state, view.reason) == ("lost", "relaunched")
    assert view.member("trainer", 0) == replace(others[1], launch="run-2", epoch=2)
    with pytest.raises(PeerLostError, match=r"launch run-1 of side trainer.*superseded by launch run-2") as caught:
        await trainer(store, others[0], launch="run-1")
    assert caught.value.reason == "relaunched"
    assert (await inference(store, here())).epoch == 2


async def test_another_torchrun_run_is_refused_by_a_launch_that_lives(store: Store, others: list[RankHolder]) -> None:
    await trainer(store, dead(), rank=0, size=2, launch="one.0", run="one")
    await trainer(store, others[0], rank=1, size=2, launch="one.0", run="one")
    who = rf"launch one\.0 of side trainer lives \(rank 1, pid {others[0].pid} on host {others[0].host}\)"
    with pytest.raises(ConfigError, match=f"{who}.*another torchrun run, two: .*takeover=True.*ETHA_TAKEOVER=1"):
        await trainer(store, others[1], rank=0, size=2, launch="two.0", run="two")
    view = await trainer(store, others[1], rank=1, size=2, launch="one.1", run="one")
    assert view.sides["trainer"].launch == "one.1", "a restart of the same run evicts at once"
    view = await trainer(store, others[2], rank=0, size=2, launch="two.0", run="two", takeover=True)
    assert list(view.sides["trainer"].members) == [0], "asked for"
    view = await trainer(store, others[1], rank=1, size=2, launch="L")
    assert view.sides["trainer"].launch == "L", "an explicit id evicts at once"


async def test_another_torchrun_run_follows_a_launch_that_is_dead(store: Store, others: list[RankHolder]) -> None:
    for number in range(3):
        await trainer(store, dead(number + 1), launch=f"{number}.0", run=str(number))
    assert (await trainer(store, others[0], launch="3.0", run="3")).sides["trainer"].launch == "3.0"


async def test_a_job_without_a_launch_id_hears_how_to_take_over(store: Store, others: list[RankHolder]) -> None:
    await trainer(store, others[0])
    ways = r"start it with an ETHA_LAUNCH_ID of its own, .*`torchrun --rdzv-id NAME` with ETHA_TAKEOVER=1 does, too"
    with pytest.raises(ConfigError, match=rf"pid {others[0].pid} .*no launch id.*{ways}"):
        await trainer(store, others[1])
    for size in (1, 2):  # another size is refused for that
        with pytest.raises(ConfigError, match=rf"ETHA_TAKEOVER=1 and takeover=True have no effect.*{ways}"):
            await trainer(store, others[1], rank=size - 1, size=size, takeover=True)
    await trainer(store, others[1], launch="mine")  # as it was told
    view = await trainer(store, others[2], launch="NAME.0", run="NAME", takeover=True)
    assert view.member("trainer", 0) == replace(others[2], launch="NAME.0", epoch=1)


async def test_retired_launches_are_bounded(store: Store) -> None:
    for number in range(20):
        await trainer(store, here(), launch=f"run-{number}")
    with pytest.raises(PeerLostError):
        await trainer(store, here(), launch="run-3")
    assert (await trainer(store, here(), launch="run-2")).sides["trainer"].launch == "run-2"


async def test_explicit_and_told_by_occupancy_mix(store: Store, others: list[RankHolder]) -> None:
    await trainer(store, others[0], rank=0, size=2)
    view = await trainer(store, others[1], rank=1, size=2, launch="L")
    assert view.sides["trainer"].launch == "L" and list(view.sides["trainer"].members) == [1]
    view = await trainer(store, others[0], rank=0, size=2)
    assert view.sides["trainer"].launch == "L", "a vacant rank joins an explicit launch"
    await store.pairs.join("v", "x", "y", rank=0, world_size=1, member=dead(), launch="L")
    view = await store.pairs.join("v", "x", "y", rank=0, world_size=1, member=here(), launch=None)
    assert view.sides["x"].launch == "auto-1", "a dead holder of an explicit launch opens the next one"


async def test_the_same_id_with_a_dead_holder_replaces_it(store: Store, others: list[RankHolder]) -> None:
    await trainer(store, dead(), rank=0, size=2, launch="L")
    await trainer(store, others[0], rank=1, size=2, launch="L")
    await inference(store, here())
    view = await trainer(store, others[1], rank=0, size=2, launch="L")
    assert (view.state, view.reason) == ("lost", "relaunched") and len(view.sides["trainer"].members) == 2


@pytest.mark.parametrize("reason", ["died", "closed"])
async def test_leaving_a_formed_pair_loses_it(store: Store, others: list[RankHolder], reason: Any) -> None:
    await trainer(store, others[0])
    await inference(store, here())
    assert not await store.pairs.leave("w", "trainer", 0, others[1], reason), "only its holder"
    assert not await store.pairs.leave("w", "trainer", 1, others[0], reason)
    assert await store.pairs.leave("w", "trainer", 0, others[0], reason)
    assert not await store.pairs.leave("w", "trainer", 0, others[0], reason)
    state = await store.pairs.state("w")
    assert state is not None and (state.state, state.reason, state.epoch) == ("lost", reason, 1)
    assert f"trainer rank 0 (pid {others[0].pid}" in state.error
    view = await inference(store, here())
    assert view.state == "lost" and view.missing() == {"trainer": (0,)}


async def test_a_pair_that_all_have_left_in_order_is_closed(store: Store, others: list[RankHolder]) -> None:
    await trainer(store, others[0], rank=0, size=2)
    await trainer(store, others[1], rank=1, size=2)
    await inference(store, others[2])
    for side, rank, member in (("trainer", 1, others[1]), ("inference", 0, others[2]), ("trainer", 0, others[0])):
        view = await store.pairs.get("w")
        assert view is not None and view.state != "closed"
        await store.pairs.leave("w", side, rank, member, "closed")
    view = await store.pairs.get("w")
    assert view is not None and (view.state, view.reason, view.error) == ("closed", "closed", "")
    assert (await inference(store, others[2])).state == "lost"
    await trainer(store, others[0], rank=0, size=2)
    assert (await trainer(store, others[1], rank=1, size=2)).epoch == 2
    await store.pairs.leave("w", "trainer", 1, others[1], "died")
    await store.pairs.leave("w", "trainer", 0, others[0], "closed")
    await store.pairs.leave("w", "inference", 0, others[2], "closed")
    assert (await store.pairs.get("w")).state == "lost"  # type: ignore[union-attr]


async def test_a_pair_is_forgotten_with_its_batch_once_nobody_belongs_to_it(
    store: Store, others: list[RankHolder]
) -> None:
    await trainer(store, here())
    await inference(store, others[0])
    for side in ("trainer", "inference"):
        await store.batches.enroll("w", "state", 1, side, 0, "{}", expected=2)
    assert not await store.pairs.forget("w", "state"), "two members"
    await store.pairs.leave("w", "trainer", 0, here(), "closed")
    assert not await store.pairs.forget("w", "state"), "one member"
    await store.pairs.leave("w", "inference", 0, others[0], "died")
    assert await store.pairs.forget("w", "state")
    assert await store.pairs.forget("w", "state"), "once more changes nothing"
    assert await store.pairs.get("w") is None
    assert await store.pairs.names() == set()
    assert not (await store.batches.roster("w", "state", 1)).entries


async def test_leaving_while_it_forms_frees_the_rank(store: Store, others: list[RankHolder]) -> None:
    await trainer(store, others[0], size=2)
    await store.pairs.leave("w", "trainer", 0, others[0], "died")
    view = await trainer(store, others[1], size=2)
    assert (view.state, view.sides["trainer"].launch) == ("forming", "auto-1")


async def test_a_worker_whose_agent_was_replaced_joins_the_next_epoch(server: Server, others: list[RankHolder]) -> None:
    namespace = fresh_namespace()
    async with agent(server.url, namespace, "a") as store, agent(server.url, namespace, "b") as new:
        await trainer(store, others[0])
        await inference(store, here())
        view = await trainer(new, replace(others[0], agent="b"))
        assert (view.state, view.reason, view.sides["trainer"].launch) == ("lost", "died", "auto-1")
        assert (await inference(store, here())).epoch == 2


async def test_a_holder_on_another_host_lives_while_its_agent_does(server: Server, others: list[RankHolder]) -> None:
    namespace = fresh_namespace()
    far = dead(agent="far", host="far-away")
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(agent(server.url, namespace, "a"))
        other = await stack.enter_async_context(agent(server.url, namespace, "far", host="far-away"))
        await trainer(other, far)
        with pytest.raises(ConfigError, match="on host far-away"):
            await trainer(store, here())
        await other.agents.withdraw()
        view = await trainer(store, here())
        assert view.member("trainer", 0) == replace(here(), launch="auto-1", epoch=1)


async def test_a_lease_that_is_not_renewed_is_waited_out(
    server: Server, others: list[RankHolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace = fresh_namespace()
    monkeypatch.setattr("etha.store.session.AGENT_LEASE", 1.5)
    monkeypatch.setattr("etha.store.lease.AGENT_BEAT", 0.4)
    async with agent(server.url, namespace, "far", host="far-away") as other:
        await trainer(other, dead(agent="far", host="far-away"))
    # Its agent is gone without a word, as if killed; the lease still stands.
    async with agent(server.url, namespace, "a") as store:
        assert [record.id for record in await store.agents.all()] == ["a", "far"]
        await trainer(store, here())
        assert [record.id for record in await store.agents.all()] == ["a"]


async def test_who_waits_and_has_lost_its_agent_does_not_complete_a_pair(server: Server) -> None:
    namespace = fresh_namespace()
    async with agent(server.url, namespace, "a") as store, agent(server.url, namespace, "far", host="f") as other:
        await trainer(other, dead(agent="far", host="f"))
        await other.agents.withdraw()
        view = await inference(store, here())
        assert view.state == "forming" and view.missing() == {"trainer": (0,)}


async def test_epochs_are_one_for_each_forming_in_any_order(store: Store, others: list[RankHolder]) -> None:
    members = [*others, here()]
    for epoch in range(1, 6):
        calls = [trainer(store, members[rank], rank=rank, size=2, launch=f"t{epoch}") for rank in range(2)]
        calls += [inference(store, members[rank + 2], rank=rank, size=2, launch=f"i{epoch}") for rank in range(2)]
        views = await asyncio.gather(*(calls if epoch % 2 else reversed(calls)))
        assert sum(view.state == "formed" for view in views) >= 1
        view = await store.pairs.get("w")
        assert view is not None and (view.state, view.epoch) == ("formed", epoch)


async def test_what_others_wrote_is_refused_with_the_key_named(store: Store) -> None:
    client = store._session.connection._client
    key = store.keys.pair("w")
    await client.hset(key, mapping={"state": "formed", "epoch": "1", "sides": "[1]"})
    with pytest.raises(ProtocolError, match=r"pair:w'.*'sides' is .*expected a JSON list"):
        await store.pairs.get("w")
    await client.delete(key)
    await trainer(store, here())
    await client.hset(store.keys.side("w", "trainer"), "0", '{"agent": 7}')
    with pytest.raises(ProtocolError, match="pair:w:trainer"):
        await store.pairs.get("w")
    with pytest.raises(ProtocolError, match="pair:w:trainer"):
        await trainer(store, here())
    await client.delete(store.keys.side("w", "trainer"))
    await client.set(store.keys.side("w", "trainer"), "a string")
    with pytest.raises(ProtocolError, match=r"cannot read .*pair:w"):
        await store.pairs.get("w")


async def test_every_key_has_a_lease_and_readable_text(store: Store, others: list[RankHolder]) -> None:
    await trainer(store, others[0])
    await inference(store, here())
    await store.batches.put_layouts({"ab12": '{"mesh": {"shape": [1], "ranks": null}}'})
    await store.batches.put_manifest("cd34", {"layer.weight": '{"shape": [1]}'})
    for side in ("trainer", "inference"):
        await store.batches.enroll("w", "b", 1, side, 0, '{"manifest": "cd34"}', expected=2)
    entrance = Entrance(group="g", replica="r", rank=0, world=1, asked="1")
    await store.groups.enter(entrance, here(), wants=True)
    await store.groups.put("g", 1, {"0": b"address"})
    client = store._session.connection._client
    found = [key async for key in client.scan_iter(match=store.keys.prefix + "*")]
    shapes = {"^" + re.sub(r"[A-Z]+", "[^:]+", kind.pattern) + "$": kind for kind in TABLE}
    used = {kind.pattern for shape, kind in shapes.items() for key in found if re.match(shape, key.split("}:", 1)[1])}
    # Publications have their own test: test_store_publications.py.
    wanted = {kind.pattern for kind in TABLE if not kind.pattern.startswith("publication")}
    assert used == wanted, "every row of the key table, and"
    assert len(found) == len(wanted) + 1, "nothing else (one side more)"
    for key in found:
        assert await client.pttl(key) > 0, key
        if await client.type(key) == "hash":
            for value in (await client.hgetall(key)).values():
                assert value.isprintable(), key


async def test_what_workers_hold_does_not_end_although_nothing_changes(store: Store, others: list[RankHolder]) -> None:
    """A job may train for longer than the lease of its pair without forming it again."""
    await inference(store, others[0])
    await trainer(store, here())
    await store.batches.enroll("w", "b", 1, "trainer", 0, "{}", expected=1)
    keys = store.keys
    held = [keys.pairs, keys.pair("w"), keys.side("w", "trainer"), keys.side("w", "inference")]
    held += [keys.batches, keys.batch("w", "b")]
    for key in held:
        assert await store._session.connection._client.pexpire(key, 60_000)
    store.agents._renewed_held = float("-inf")
    await store.agents._beat(5.0)
    for key in held:
        assert await store._session.connection._client.ttl(key) > 6 * 86400, key
