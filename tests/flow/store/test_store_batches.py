"""Registering batches against a real server: generations, rosters, what never goes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import redis.asyncio

from etha.errors import ConfigError, PeerLostError, ProtocolError
from etha.store.reading import MAX_FIELD
from etha.store.registry import Store
from tests.unit.store.server import Server, agent, fresh_namespace, served

#: FEW of common.lua.
FEW = 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
async def store(server: Server) -> AsyncIterator[Store]:
    async with agent(server.url, fresh_namespace(), "a") as opened:
        yield opened


async def enroll(store: Store, side: str, rank: int = 0, *, epoch: int = 1, expected: int = 2) -> int:
    return await store.batches.enroll("w", "b", epoch, side, rank, f'{{"from": "{side}/{rank}"}}', expected=expected)


async def state(store: Store) -> tuple[str, int]:
    batch = await store.batches.get("w", "b")
    assert batch is not None
    return batch.state, batch.generation


async def test_a_batch_is_registered_when_all_ranks_have_come(store: Store) -> None:
    assert await store.batches.get("w", "b") is None
    for rank in range(3):
        assert await state_after(store, "t", rank, expected=4) == ("registering", 1)
    assert await state_after(store, "i", 0, expected=4) == ("registered", 1)
    roster = await store.batches.roster("w", "b", 1)
    assert list(roster.entries) == [("i", 0), ("t", 0), ("t", 1), ("t", 2)]
    assert roster.entries["t", 2] == '{"from": "t/2"}'
    await store.batches.verdict("w", "b", 1, "a", "d1", expected=1)
    assert (await store.batches.roster("w", "b", 1)).verdicts == {"a": "d1"}


async def state_after(store: Store, side: str, rank: int, *, expected: int) -> tuple[str, int]:
    await enroll(store, side, rank, expected=expected)
    return await state(store)


async def test_who_registers_again_waits_in_the_next_generation(store: Store) -> None:
    assert await enroll(store, "t") == await enroll(store, "i") == 1
    assert not await store.batches.unenroll("w", "b", 1, "t", 0), "all had come: it is closed, not taken back"
    assert await enroll(store, "t") == 2
    assert await state(store) == ("registering", 2)
    first = await store.batches.roster("w", "b", 1)
    assert set(first.entries) == {("t", 0), ("i", 0)} and first.closed == {("t", 0)}
    assert await enroll(store, "i") == 2
    assert await state(store) == ("registered", 2)


async def test_a_batch_is_closed_when_all_have_closed(store: Store) -> None:
    await enroll(store, "t"), await enroll(store, "i")
    for _ in range(2):
        await store.batches.unenroll("w", "b", 1, "t", 0)
    assert await state(store) == ("registered", 1)
    await store.batches.unenroll("w", "b", 1, "i", 0)
    assert await state(store) == ("closed", 1)


async def test_a_withdrawn_rank_may_come_back_into_the_same_generation(store: Store) -> None:
    assert await enroll(store, "t") == 1
    assert await store.batches.unenroll("w", "b", 1, "t", 0), "still open: taken back"
    assert (await store.batches.roster("w", "b", 1)).entries == {}
    assert await enroll(store, "t") == 1
    await enroll(store, "i")
    assert await state(store) == ("registered", 1)


async def test_a_new_epoch_is_a_new_generation_and_seq_goes_on(store: Store) -> None:
    await enroll(store, "t"), await enroll(store, "i")
    await store.batches.set_fields(
        "w", "b", {"generation": 1, "seq": 7, "version": "step-7", "tensors": 3, "bytes": 12}
    )
    assert await enroll(store, "t", epoch=2) == 2
    with pytest.raises(PeerLostError, match=r"at epoch 2.*at epoch 1: call init_pair again"):
        await enroll(store, "i", epoch=1)
    assert await enroll(store, "i", epoch=2) == 2
    batch = await store.batches.get("w", "b")
    assert batch is not None and (batch.epoch, batch.seq, batch.version) == (2, 7, "step-7")
    assert [(b.pair, b.batch) for b in await store.batches.all()] == [("w", "b")]


async def test_an_unfinished_generation_of_an_older_epoch_is_left_behind(store: Store) -> None:
    assert await enroll(store, "t", epoch=1) == 1
    assert await enroll(store, "i", epoch=2) == 2
    assert await state(store) == ("registering", 2)
    assert not await store.batches.unenroll("w", "b", 1, "t", 0)
    assert await state(store) == ("registering", 2)


async def test_the_same_call_repeated_by_a_lost_answer_counts_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, asked = store._session.connection.script, 0

    async def twice(name: str, keys: list[str], request: dict[str, object], timeout: float) -> object:
        nonlocal asked
        if name != "enroll":
            return await script(name, keys, request, timeout)
        asked += 1
        await script(name, keys, request, timeout)
        return await script(name, keys, request, timeout)

    monkeypatch.setattr(store._session.connection, "script", twice)
    assert await enroll(store, "t") == 1
    assert await enroll(store, "i") == 1, "the first of the two completed the generation"
    assert asked == 2 and await state(store) == ("registered", 1)
    assert (await store.batches.roster("w", "b", 1)).entries.keys() == {("t", 0), ("i", 0)}


async def test_many_ranks_at_once_share_one_generation(server: Server) -> None:
    namespace = fresh_namespace()
    async with agent(server.url, namespace, "a") as store, agent(server.url, namespace, "b") as other:
        calls = [enroll(store, "t", rank, expected=40) for rank in range(20)]
        calls += [enroll(other, "i", rank, expected=40) for rank in range(20)]
        assert set(await asyncio.gather(*calls)) == {1}
        assert await state(other) == ("registered", 1)


async def test_seq_generation_and_epoch_never_go_back(store: Store) -> None:
    await store.batches.set_fields(
        "w", "b", {"generation": 3, "epoch": 2, "seq": 9, "version": 9, "state": "registered"}
    )
    await store.batches.set_fields("w", "b", {"generation": 2, "epoch": 1, "seq": 8, "version": 8, "state": "moving"})
    batch = await store.batches.get("w", "b")
    assert batch is not None
    assert (batch.generation, batch.epoch, batch.seq, batch.version, batch.state) == (3, 2, 9, 9, "registered")
    await store.batches.set_fields("w", "b", {"seq": 10, "version": "10", "last_seconds": 0.25, "last_error": None})
    batch = await store.batches.get("w", "b")
    assert batch is not None and (batch.seq, batch.version, batch.last_seconds) == (10, "10", 0.25)
    with pytest.raises(ValueError, match="no fields"):
        await store.batches.set_fields("w", "b", {"seqq": 1})


@pytest.mark.parametrize("version", [None, 0, -3, 12, "v1", "12", "", '"quoted"', "a b", "Ω"])
async def test_versions_come_back_as_they_were(store: Store, version: int | str | None) -> None:
    await store.batches.set_fields("w", "b", {"seq": 1, "version": version})
    batch = await store.batches.get("w", "b")
    assert batch is not None and batch.version == version and type(batch.version) is type(version)


async def test_layouts_and_manifests_are_stored_once(store: Store) -> None:
    await store.batches.put_layouts({"a1": "{}", "b2": "[1]"})
    assert await store.batches.layouts(["b2", "a1", "b2", "c3"]) == {"a1": "{}", "b2": "[1]"}
    fields = {f"layer.{i} ü": f'{{"shape": [{i}]}}' for i in range(5000)}
    await store.batches.put_manifest("m1", fields)
    assert await store.batches.manifest("m1") == fields
    await store.batches.put_manifest("m1", {"another": "{}"})
    assert await store.batches.manifest("m1") == fields, "a key under its digest is whole and stays"
    assert await store.batches.manifest("m2") == {}
    parts = [key async for key in store._session.connection._client.scan_iter(match=store.keys.prefix + "*part*")]
    assert parts == []


async def test_sizes_are_bounded_both_ways(store: Store) -> None:
    with pytest.raises(ConfigError, match="at most"):
        await store.batches.enroll("w", "b", 1, "t", 0, "x" * (MAX_FIELD + 1), expected=2)
    await store._session.connection._client.hset(store.keys.manifest("m1"), "t", "x" * (MAX_FIELD + 1))
    with pytest.raises(ProtocolError, match="manifest:m1"):
        await store.batches.manifest("m1")
    await enroll(store, "t")
    await store._session.connection._client.hset(store.keys.roster("w", "b", 1), "t/9999999999", "{}")
    with pytest.raises(ProtocolError, match=r"ranks:1'.*SIDE/RANK"):
        await store.batches.roster("w", "b", 1)
    await store._session.connection._client.hset(store.keys.batch("w", "b"), "seq", "-1")
    with pytest.raises(ProtocolError, match=r"batch:w:b'.*'seq' is '-1', expected a whole number"):
        await store.batches.get("w", "b")


async def test_events_are_read_forward_from_where_one_was(store: Store) -> None:
    await store.event("hello", pair="w", seq=3)
    last = (await store.events())[-1]
    assert last[1] == {"kind": "hello", "pair": "w", "seq": "3"}
    await store.event("again")
    assert [fields["kind"] for _, fields in await store.events(after=last[0])] == ["again"]


async def test_a_batch_of_a_pair_that_counts_anew_can_be_registered(store: Store) -> None:
    """After a loss of all data the pair counts from one, and an agent puts the batch of an earlier life back."""
    await store.batches.set_fields("w", "b", {"generation": 7, "epoch": 4, "seq": 5, "state": "registered"})
    async with redis.asyncio.Redis.from_url(store.url, decode_responses=True) as client:
        await client.hset(store.keys.pair("w"), mapping={"state": "formed", "epoch": 2})
        with pytest.raises(PeerLostError, match="pair w is at epoch 4"):
            await enroll(store, "t", epoch=1)
        await client.hset(store.keys.pair("w"), "epoch", 1)
    assert await enroll(store, "t", epoch=1) == await enroll(store, "i", epoch=1) == 8
    assert await state(store) == ("registered", 8)


@asynccontextmanager
async def announced(store: Store, key: str) -> AsyncIterator[Callable[[], Awaitable[list[str]]]]:
    """What is published on ``key``: all until the moment of the call."""
    async with redis.asyncio.Redis.from_url(store.url, decode_responses=True) as client, client.pubsub() as pubsub:
        await pubsub.subscribe(key, "the end")

        async def until_now() -> list[str]:
            await client.publish("the end", "")
            found = []
            async for message in pubsub.listen():
                if message["type"] == "message" and message["channel"] == "the end":
                    break
                if message["type"] == "message":
                    found.append(message["data"])
            return found

        yield until_now


async def test_a_thousand_ranks_are_not_a_thousand_wake_ups(store: Store) -> None:
    """All who wait read all entries at each wake-up, so announcing everybody would cost the cube of their number."""
    ranks = 100
    async with announced(store, store.keys.batch("w", "b")) as until_now:
        for rank in range(ranks):
            await enroll(store, "t", rank, expected=ranks + 1)
        assert await until_now() == ["registering"]
        await enroll(store, "i", expected=ranks + 1)
        assert await until_now() == ["registered"]
        for number in range(ranks + 1):
            await store.batches.verdict("w", "b", 1, f"a{number}", "d", expected=ranks + 1)
        assert await until_now() == ["verdict"]
        await store.batches.verdict("w", "b", 1, "a0", "d", expected=ranks + 1)
        assert len((await store.batches.roster("w", "b", 1)).verdicts) == ranks + 1


async def test_each_of_few_is_announced(store: Store) -> None:
    async with announced(store, store.keys.batch("w", "b")) as until_now:
        for rank in range(FEW - 1):
            await enroll(store, "t", rank, expected=FEW)
        await enroll(store, "i", expected=FEW)
        assert await until_now() == ["registering"] * (FEW - 1) + ["registered"]
        for number in range(FEW):
            await store.batches.verdict("w", "b", 1, f"a{number}", "d", expected=FEW)
        assert await until_now() == ["verdict"] * FEW
