"""Publications against real servers, beside the rule that the scripts apply."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from etha.agent.protocol.sources import Holder, HolderSlot, Hop, Sources
from etha.errors import ConfigError, EthaError, GroupLostError
from etha.plan.layouts.element_set import element_set, includes
from etha.plan.layouts.region import read_product
from etha.store.keys import AGENT_LEASE, CLAIM_LEASE, HISTORY_LEASE, MAX_VERSIONS, TABLE
from etha.store.publication_records import (
    ClaimAnswer,
    ClaimRequest,
    HeldVersion,
    PublicationRank,
    PublicationSide,
    PublishedTensor,
    SourceClaim,
    TensorTable,
    set_digest,
)
from etha.store.publications import PARTS
from etha.store.records import RankHolder
from etha.store.registry import Store
from tests.unit.plan.truth import random_dim, runs_of
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


@pytest.fixture(scope="module", params=BINARIES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("redis"), binary=binary_of(request.param)) as running:
        yield running


@pytest.fixture
async def store(server: Server) -> AsyncIterator[Store]:
    async with agent(server.url, fresh_namespace(), "a") as opened:
        yield opened


def table(dtype: str = "float32", covers: str = "*", size: int = 4) -> TensorTable:
    return TensorTable(
        {
            "w": PublishedTensor(dtype=dtype, shape=(size, 3), covers=covers),
            "b": PublishedTensor(dtype="float32", shape=()),
        }
    )


def part_of(start: int, stop: int) -> TensorTable:
    """Some rows of "w", and all of "b"."""
    text = element_set((4, 3), [read_product([[(start, stop)], [(0, 3)]])])
    return replace(table(covers=set_digest(text)), sets={set_digest(text): text})


def process(number: int, agent: str = "a") -> RankHolder:
    """A process of another host, which lives as long as its agent's lease."""
    return RankHolder(agent=agent, host="far", pid=1000 + number, start=number)


class Fleet:
    """The sides of publication "p" with one rank each, by name."""

    def __init__(self, store: Store) -> None:
        self.store, self.publications = store, store.publications
        self.sides: dict[str, PublicationSide] = {}
        self.calls: dict[str, int] = {}
        self.puts = 0

    async def enter(self, side: str, number: int, **more: Any) -> PublicationSide:
        role = "publisher" if side == "trainer" else "subscriber"
        agent, tensors = more.pop("agent", "a"), more.pop("tensors", table())
        member = more.pop("member", None) or process(number, agent)
        options = {"rank": 0, "world": 1, "slots": 2 if role == "publisher" else 1, **more}
        entrance = PublicationRank(publication="p", side=side, role=role, tensors=tensors, **options)
        self.sides[side] = await self.publications.enter(entrance, member)
        return self.sides[side]

    async def put(self, version: int | str | None = None) -> int:
        self.puts += 1
        serial = self.sides["trainer"].serial
        slot = await self.publications.prepare("p", "trainer", serial, 0, self.puts)
        assert slot.ready
        return await self.publications.announce("p", "trainer", serial, 0, self.puts, slot, version)

    async def ask(self, side: str, *, again: bool = False, **more: Any) -> ClaimAnswer:
        if not again:
            self.calls[side] = self.calls.get(side, 0) + 1
        serial = more.pop("serial", self.sides[side].serial)
        request = ClaimRequest(publication="p", subscriber=side, serial=serial, call=self.calls[side], **more)
        return await self.publications.claim(request)

    async def claim(self, side: str, **more: Any) -> SourceClaim:
        """The claim that a subscriber is granted, or has been granted."""
        answer = await self.ask(side, **more)
        assert answer.claim is not None, f"{side} waits: {answer}"
        return answer.claim

    async def commit(self, claim: SourceClaim) -> bool:
        return await self.publications.release(claim, committed=True, seconds=0.5)

    async def fail(self, claim: SourceClaim, **more: Any) -> bool:
        return await self.publications.release(claim, committed=False, error="cut", **more)

    async def lapse(self, number: int) -> None:
        """The time of a lease passes."""
        key = self.store.keys.publication_part("p", "leases")
        await self.store._session.connection.call("write", lambda client: client.zadd(key, {str(number): 0}), 10)


@pytest.fixture
def fleet(store: Store) -> Fleet:
    return Fleet(store)


async def test_versions_spread_from_replica_to_replica(fleet: Fleet) -> None:
    await fleet.enter("trainer", 0, copies=2)
    for number in range(4):
        await fleet.enter(f"r{number}", 1 + number)
        waiting = await fleet.ask(f"r{number}")
        assert (waiting.claim, waiting.over, waiting.wait) == (None, False, 0)
    assert await fleet.put("v1") == 1
    first = await fleet.claim("r0", again=True)
    assert (first.holder, first.seq, first.version, first.source_world) == (
        f"trainer/{first.source_serial}",
        1,
        "v1",
        1,
    )
    blocked = await fleet.ask("r1", again=True)
    assert blocked.claim is None and 0 < blocked.wait <= CLAIM_LEASE + 0.01
    assert await fleet.commit(first)
    second, third = await fleet.claim("r1", again=True), await fleet.claim("r2", again=True)
    assert {second.source, third.source} == {"r0", "trainer"}
    assert (await fleet.ask("r3", again=True)).claim is None
    for claim in (second, third):
        assert await fleet.commit(claim)
    last = await fleet.claim("r3", again=True)
    assert last.source != "trainer", "it has given its two copies"
    assert await fleet.commit(last)
    assert await fleet.publications.receivers("p", 1) == ("r0", "r1", "r2", "r3")
    view = await fleet.publications.view("p")
    assert view is not None
    assert {one.state for one in view.subscribers} == {"current"} and not view.claims and not view.queue


async def test_who_has_left_before_redis_hears_of_its_hop_has_received_the_version(fleet: Fleet) -> None:
    """The release of its claim and its leave are told one after the other, in either order."""
    await fleet.enter("trainer", 0, places=2)
    for number, name in enumerate(("r0", "r1")):
        await fleet.enter(name, 1 + number)
    await fleet.put("v1")
    first, second = [await fleet.claim(name) for name in ("r0", "r1")]
    assert await fleet.publications.leave("p", "r0", 0, process(1), "closed")
    assert not await fleet.commit(first)
    assert await fleet.publications.receivers("p", 1) == ("r0",)
    assert await fleet.publications.holding_names("p", 1) == ()
    assert await fleet.commit(second)
    assert await fleet.publications.leave("p", "r1", 0, process(2), "closed")
    assert await fleet.publications.receivers("p", 1) == ("r0", "r1")


@pytest.mark.parametrize("side", ["trainer", "r"])
async def test_another_torchrun_run_takes_a_living_launch_over_only_if_it_is_told_to(fleet: Fleet, side: str) -> None:
    hosts = (RankHolder(agent="a", host=f"host-{number}", pid=1000 + number, start=1) for number in itertools.count())

    async def enter(launch: str, **more: Any) -> None:
        """From one more host; all of them live as long as their agent."""
        await fleet.enter(side, 0, member=next(hosts), launch=launch, **more)

    await enter("one.0", run="one")
    with pytest.raises(
        ConfigError, match=r"launch one\.0 lives \(pid 1000 on host .*\), .* run, two: .*ETHA_TAKEOVER=1"
    ):
        await enter("two.0", run="two")
    await enter("one.1", run="one")  # torchrun has restarted it
    await enter("mine")  # ETHA_LAUNCH_ID
    with pytest.raises(ConfigError, match="launch mine lives"):
        await enter("two.0", run="two")
    await enter("two.0", run="two", takeover=True)
    # One that has ended is no launch that lives.
    await fleet.enter(side, 1, launch="three.0", run="three", takeover=True)
    await fleet.enter(side, 2, launch="four.0", run="four")


async def test_a_question_whose_answer_was_lost_is_answered_the_same(fleet: Fleet) -> None:
    await fleet.enter("trainer", 0)
    await fleet.enter("r", 1)
    await fleet.put()
    claim = await fleet.claim("r")
    assert await fleet.claim("r", again=True) == claim
    assert await fleet.commit(claim)
    assert not await fleet.commit(claim), "the answer was lost, and the hop is reported again"
    over = await fleet.ask("r", again=True)
    assert (over.claim, over.over, over.held, over.last) == (None, True, 1, 1)


async def test_ranks_of_a_replica_get_the_same_claim_and_must_ask_the_same(fleet: Fleet) -> None:
    await fleet.enter("trainer", 0)
    await fleet.put()
    half = await fleet.enter("r", 1, rank=0, world=2)
    assert not half.complete
    assert (await fleet.ask("r")).claim is None
    assert (await fleet.enter("r", 2, rank=1, world=2)).complete
    claim = await fleet.claim("r", again=True)
    assert await fleet.claim("r", again=True) == claim
    other = await fleet.ask("r", again=True, version=1)
    assert other.claim is None and "version 1 and the newest version: give the same on all ranks" in other.differs
    assert await fleet.claim("r", again=True) == claim


async def test_of_what_the_ranks_of_a_replica_hold_the_lowest_counts(fleet: Fleet) -> None:
    """A hop that was aborted has written to one of them only."""
    await fleet.enter("trainer", 0)
    for rank in range(2):
        await fleet.enter("r", 1 + rank, rank=rank, world=2)
    await fleet.put()
    assert (await fleet.ask("r", newer_than=1)).claim is None
    claim = await fleet.claim("r", again=True, newer_than=0)
    assert claim.seq == 1
    assert await fleet.claim("r", again=True, newer_than=1) == claim


async def test_a_put_is_announced_once_all_ranks_have_set_it_aside(fleet: Fleet) -> None:
    for rank in range(2):
        side = await fleet.enter("trainer", rank, rank=rank, world=2)
    put = fleet.publications
    first = await put.prepare("p", "trainer", side.serial, 0, 1)
    assert (first.slot, first.seq, first.ready) == (0, 1, True)
    assert await put.announce("p", "trainer", side.serial, 0, 1, first, "v") == 0
    ahead = await put.prepare("p", "trainer", side.serial, 0, 2)
    assert ahead.behind and not ahead.ready
    second = await put.prepare("p", "trainer", side.serial, 1, 1)
    assert second == first
    with pytest.raises(ConfigError, match=r"rank 1 puts version \"w\", rank 0 \"v\": give the same on all ranks"):
        await put.announce("p", "trainer", side.serial, 1, 1, second, "w")
    assert await put.announce("p", "trainer", side.serial, 1, 1, second, "v") == 1
    assert await put.announce("p", "trainer", side.serial, 0, 1, first, "v") == 1, "rank 0 asks how it went"
    assert (await put.prepare("p", "trainer", side.serial, 0, 2)).slot == 1


async def test_with_two_slots_a_put_never_waits_and_with_one_it_names_who_reads(fleet: Fleet) -> None:
    await fleet.enter("trainer", 0, places=4, slots=1)
    await fleet.enter("r", 1)
    await fleet.put()
    claim = await fleet.claim("r")
    serial = fleet.sides["trainer"].serial
    slot = await fleet.publications.prepare("p", "trainer", serial, 0, 2)
    assert not slot.ready and slot.wait > 0
    assert [(one.claim, one.subscriber, one.protected) for one in slot.readers] == [(claim.number, "r", False)]
    await fleet.fail(claim, overwritten=True)
    slot = await fleet.publications.prepare("p", "trainer", serial, 0, 2)
    assert slot.ready
    assert (await fleet.ask("r")).claim is None, "the version that was there is forgotten"
    await fleet.publications.announce("p", "trainer", serial, 0, 2, slot, None)
    again = await fleet.claim("r", again=True)
    assert (again.seq, again.version, again.protected) == (2, 2, True), "a hop that was ended once is not ended again"


async def test_events_say_where_a_rank_runs(fleet: Fleet) -> None:
    await fleet.enter("trainer", 0)
    member = RankHolder(agent="a", host="far-id", name="node7", pid=77, start=1)
    await fleet.enter("r0", 1, member=member)
    joined = [fields for _, fields in await fleet.store.events() if fields["kind"] == "joined"]
    found = [(one["side"], one["rank"], one["pid"], one["host"]) for one in joined]
    assert found == [("trainer", "0", "1000", "far"), ("r0", "0", "77", "node7")]


async def test_a_put_that_is_given_up_takes_no_version_away(fleet: Fleet) -> None:
    await fleet.enter("trainer", 0, places=4, slots=1)
    for number in range(3):
        await fleet.enter(f"r{number}", 1 + number)
    await fleet.put("first")
    reads = await fleet.claim("r0")
    serial = fleet.sides["trainer"].serial
    assert not (await fleet.publications.prepare("p", "trainer", serial, 0, 2)).ready
    assert (await fleet.ask("r1")).claim is None, "nobody new reads what a put waits for"
    await fleet.publications.abandon("p", "trainer", serial, 0, 1)  # another put
    assert (await fleet.ask("r1", again=True)).claim is None
    await fleet.publications.abandon("p", "trainer", serial, 0, 2)
    assert (await fleet.claim("r1", again=True)).version == "first"
    await fleet.fail(reads)
    assert not (await fleet.publications.prepare("p", "trainer", serial, 0, 3)).ready
    await fleet.publications.leave("p", "trainer", 0, process(0), "died")
    assert (await fleet.claim("r2")).version == "first", "the publisher died before it had written anything"


async def test_a_slot_that_a_rank_may_write_is_not_read_again(fleet: Fleet) -> None:
    for rank in range(2):
        side = await fleet.enter("trainer", rank, rank=rank, world=2, slots=1)
    await fleet.enter("r", 2)
    put = fleet.publications
    for rank in range(2):
        slot = await put.prepare("p", "trainer", side.serial, rank, 1)
        await put.announce("p", "trainer", side.serial, rank, 1, slot, None)
    assert (await put.prepare("p", "trainer", side.serial, 0, 2)).ready
    await put.abandon("p", "trainer", side.serial, 1, 2)
    await put.leave("p", "trainer", 0, process(0), "died")
    assert (await fleet.ask("r")).claim is None


async def test_a_slot_that_is_read_is_not_overwritten(fleet: Fleet) -> None:
    await fleet.enter("trainer", 0, places=4)
    for number in range(3):
        await fleet.enter(f"r{number}", 1 + number)
    await fleet.put()
    reads = await fleet.claim("r0")
    for _ in range(5):
        await fleet.put()
    assert (await fleet.ask("r1", newer_than=1)).claim is None, "the other slot is kept for the next put"
    assert (await fleet.ask("r2")).claim is None, "r1 waits for the publisher's other slot"
    await fleet.commit(reads)
    assert [
        (await fleet.claim(name, again=True, **more)).seq for name, more in (("r1", {"newer_than": 1}), ("r2", {}))
    ] == [6, 6]


async def test_a_holder_feeds_whom_its_dtype_and_its_part_fit(fleet: Fleet) -> None:
    await fleet.enter("trainer", 0, places=1)
    await fleet.enter("half", 1, tensors=table("bfloat16"))
    await fleet.enter("whole", 2)
    await fleet.enter("half2", 3, tensors=table("bfloat16"))
    await fleet.enter("part", 4, tensors=table(covers="0123"))
    await fleet.enter("part2", 5, tensors=table(covers="4567"))
    await fleet.put()
    await fleet.commit(await fleet.claim("half"))
    holds = await fleet.claim("whole")
    assert holds.source == "trainer", "bf16 would not give it what the publisher has"
    assert (await fleet.claim("half2")).source == "half"
    assert (await fleet.ask("part")).claim is None
    await fleet.commit(holds)
    part = await fleet.claim("part", again=True)
    assert part.source in ("whole", "trainer")
    await fleet.commit(part)
    assert (await fleet.claim("part2")).source != "part", "it has another part"


async def test_a_holder_of_some_elements_feeds_those_who_want_no_others(fleet: Fleet) -> None:
    await fleet.enter("trainer", 0, places=1)
    await fleet.enter("most", 1, tensors=part_of(0, 3))
    for number, name in enumerate(("inside", "across", "whole"), 2):
        await fleet.enter(
            name, number, places=0, tensors={"inside": part_of(1, 3), "across": part_of(2, 4)}.get(name, table())
        )
    await fleet.put()
    await fleet.commit(await fleet.claim("most"))
    reads = await fleet.claim("across")
    assert reads.source == "trainer"
    assert (await fleet.claim("inside")).source == "most", "the publisher's place is taken, and this one has its rows"
    assert (await fleet.ask("whole")).claim is None
    await fleet.commit(reads)
    assert (await fleet.claim("whole", again=True)).source == "trainer"


async def test_the_script_compares_sets_as_python_does(store: Store) -> None:
    """A publisher that holds a random set, and a subscriber that wants another one."""
    rng = random.Random(7)
    answers = []
    for number in range(150):
        shape = tuple(rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.choice([1, 2, 2, 3])))

        has, wants = (
            element_set(
                shape,
                [read_product([runs_of(random_dim(rng, n)) for n in shape]) for _ in range(rng.choice([1, 2, 5]))],
            )
            for _ in range(2)
        )
        if rng.random() < 0.4:  # often enough one is in the other
            both = [json.loads(text) for text in (has, wants) if text != "*"]
            has = element_set(shape, [one for groups in both for one in products_of(groups)]) if len(both) == 2 else "*"
        for side, text in (("trainer", has), ("r", wants)):
            tensors = TensorTable(
                {"w": PublishedTensor(dtype="float32", shape=shape, covers=set_digest(text))},
                {} if text == "*" else {set_digest(text): text},
            )
            role: Any = "publisher" if side == "trainer" else "subscriber"
            entrance = PublicationRank(publication=f"p{number}", side=side, role=role, rank=0, world=1, tensors=tensors)
            if side == "trainer" or includes(has, wants):
                assert (await store.publications.enter(entrance, process(number))).complete
            else:
                with pytest.raises(ConfigError, match="tensor w lacks elements there that are wanted here"):
                    await store.publications.enter(entrance, process(number))
        answers.append(includes(has, wants))
        there = await store.publications.description(f"p{number}")
        assert there is not None and there.elements("w") == has
    assert 30 < sum(answers) < 120


async def test_a_set_that_is_none_is_named(fleet: Fleet) -> None:
    await fleet.enter("trainer", 0, tensors=part_of(0, 3))
    keys, digest = fleet.store.keys, part_of(0, 3).tensors["w"].covers
    client = fleet.store._session.connection._client
    for text in ("{", "[[7]]", "7"):
        await client.hset(keys.publication_part("p", "sets"), digest, text)
        with pytest.raises(EthaError, match=f"field '{digest}' or .* is not a set of elements"):
            await fleet.enter("r", 1, tensors=part_of(1, 2))


def products_of(groups: Any) -> list[Any]:
    """A set of elements, as products again."""
    found = []
    for indices, *rest in groups:
        runs = list(zip(indices[::2], indices[1::2], strict=True))
        found += [(*read_product([runs]), *more) for more in products_of(rest[0])] if rest else [read_product([runs])]
    return found


async def test_a_dead_publishers_version_is_kept_until_somebody_has_all_of_it(fleet: Fleet) -> None:
    await fleet.enter("trainer", 0)
    await fleet.enter("part", 1, tensors=part_of(0, 3))
    await fleet.enter("whole", 2)
    await fleet.put()
    await fleet.commit(await fleet.claim("part"))
    await fleet.publications.leave("p", "trainer", 0, process(0), "died")
    reads = await fleet.claim("whole")
    assert reads.source == "trainer"
    await fleet.commit(reads)
    view = await fleet.publications.view("p")
    assert view is not None and {one.side for one in view.holders} == {"part", "whole"}


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (table(size=5), r"tensor w has global shape \[4,3\] there and \[5,3\] here"),
        (
            TensorTable({"x": PublishedTensor(dtype="float32", shape=())}),
            "tensor x is not among those that are published",
        ),
    ],
)
async def test_a_subscriber_whose_tensors_are_not_those_is_told(fleet: Fleet, tensors: TensorTable, text: str) -> None:
    await fleet.enter("trainer", 0)
    with pytest.raises(ConfigError, match=f"publication p, subscriber r: {text}"):
        await fleet.enter("r", 1, tensors=tensors)


async def test_of_several_holders_the_nearest_is_preferred(server: Server, fleet: Fleet) -> None:
    await fleet.enter("trainer", 0, places=9)
    far = RankHolder(agent="a", host="rack", pid=5, start=5)
    await fleet.enter("zone", 1, zone="z", places=9)
    await fleet.enter("near", 2, member=far, places=9)
    await fleet.enter("link", 3, places=9, member=RankHolder(agent="a", host="other", pid=7, start=7))
    await fleet.put()
    for name in ("zone", "near", "link"):
        await fleet.commit(await fleet.claim(name))
    await fleet.enter("r", 4, zone="z", member=RankHolder(agent="a", host="rack", pid=6, start=6))
    link = f"link/{fleet.sides['link'].serial}"
    sources = []
    for _ in range(4):
        given = await fleet.claim("r", links=(link,), avoid=tuple(sources))
        sources.append(given.holder)
        await fleet.fail(given)
    assert [one.partition("/")[0] for one in sources] == ["link", "near", "zone", "trainer"]
    assert (await fleet.ask("r", avoid=tuple(sources))).claim is None


async def test_a_subscriber_that_is_read_serves_to_the_end_before_it_receives(fleet: Fleet) -> None:
    await fleet.enter("trainer", 0)
    for number in range(3):
        await fleet.enter(f"r{number}", 1 + number)
    await fleet.put()
    await fleet.commit(await fleet.claim("r0"))
    one, two = await fleet.claim("r1"), await fleet.claim("r2")
    reader = one if one.source == "r0" else two
    await fleet.put()
    assert (await fleet.ask("r0", newer_than=1)).claim is None
    await fleet.commit(two if reader is one else one)
    assert (await fleet.ask("r0", again=True, newer_than=1)).claim is None, "its buffer is still read"
    await fleet.commit(reader)
    assert (await fleet.claim("r0", again=True, newer_than=1)).seq == 2


async def test_a_claim_that_lapses_gives_its_place_back_and_may_still_commit(fleet: Fleet) -> None:
    await fleet.enter("trainer", 0)
    await fleet.enter("r0", 1)
    await fleet.enter("r1", 2)
    await fleet.put()
    claim = await fleet.claim("r0")
    assert (await fleet.ask("r1")).claim is None
    assert await fleet.publications.renew(claim)
    await fleet.lapse(claim.number)
    other = await fleet.claim("r1", again=True)
    assert other.number > claim.number
    assert not await fleet.publications.renew(claim)
    assert not await fleet.commit(claim)
    holder = await fleet.publications.holder("p", f"r0/{fleet.sides['r0'].serial}")
    assert holder is not None and holder.slots[0].seq == 1, "its hop counts"
    trainer = await fleet.publications.holder("p", other.holder)
    assert trainer is not None and trainer.used == 1, "the place of the other claim is not given back with it"


async def test_a_waiting_subscriber_is_woken_when_it_is_its_turn(fleet: Fleet) -> None:
    await fleet.enter("trainer", 0)
    await fleet.enter("r", 1)
    key = fleet.store.keys.publication_side("p", "r")
    async with asyncio.timeout(10), fleet.store.changes(key, ticks=False) as changed:
        await changed()
        assert (await fleet.ask("r")).claim is None
        await fleet.put()
        await changed()
        assert (await fleet.claim("r", again=True)).seq == 1


async def test_a_dead_publishers_last_version_is_kept_until_somebody_has_it(fleet: Fleet) -> None:
    first = await fleet.enter("trainer", 0)
    await fleet.put("a")
    await fleet.put("b")
    await fleet.publications.leave("p", "trainer", 0, process(0), "died")
    orphan = await fleet.publications.holder("p", f"trainer/{first.serial}")
    assert orphan is not None and orphan.orphan
    assert [one.version for one in orphan.slots.values()] == ["b"]
    await fleet.enter("r", 1)
    fleet.puts = 0
    second = await fleet.enter("trainer", 9)
    assert second.seq == 2 and second.version == "b" and second.puts == 0
    claim = await fleet.claim("r")
    assert (claim.source_serial, claim.version) == (first.serial, "b")
    assert await fleet.put("c") == 3, "versions go on"
    assert await fleet.publications.holder("p", claim.holder) is not None, "it is still read"
    await fleet.commit(claim)
    assert await fleet.publications.holder("p", claim.holder) is None
    assert (await fleet.claim("r", newer_than=2)).seq == 3


async def test_a_publisher_comes_again_with_another_world_size(fleet: Fleet) -> None:
    await fleet.enter("trainer", 0, member=dead())
    await fleet.put("a")
    await fleet.enter("r", 1)
    await fleet.commit(await fleet.claim("r"))
    fleet.puts = 0
    assert not (await fleet.enter("trainer", 0, rank=0, world=2, member=here())).complete
    await fleet.enter("late", 2)
    assert (await fleet.claim("late")).source == "r", "replicas feed each other meanwhile"
    assert (await fleet.enter("trainer", 7, rank=1, world=2)).complete


async def test_a_publication_has_one_publisher_that_lives(fleet: Fleet) -> None:
    await fleet.enter("trainer", 0)
    with pytest.raises(ConfigError, match=r"trainer publishes it already, and is alive .pid 1000 on host far."):
        await fleet.publications.enter(
            PublicationRank(publication="p", side="other", role="publisher", rank=0, world=1, tensors=table()), here()
        )
    with pytest.raises(ConfigError, match="trainer is a publisher of it already: give each side its own name"):
        await fleet.publications.enter(
            PublicationRank(publication="p", side="trainer", role="subscriber", rank=0, world=1, tensors=table()),
            here(),
        )
    with pytest.raises(ConfigError, match=r"rank 0 is held by pid 1000 on host far, which is alive"):
        await fleet.enter("trainer", 5, member=here())


async def test_a_launch_that_is_over_hears_why(fleet: Fleet) -> None:
    await fleet.enter("trainer", 0)
    await fleet.enter("r", 1, launch="one")
    await fleet.put()
    claim = await fleet.claim("r")
    await fleet.enter("r", 2, launch="two")
    fleet.calls["r"] = 0
    with pytest.raises(GroupLostError, match="launch one of r was superseded by launch two"):
        await fleet.ask("r", serial=claim.serial)
    with pytest.raises(GroupLostError, match="launch one of r was superseded by launch two"):
        await fleet.enter("r", 1, launch="one")
    assert not await fleet.commit(claim), "nor does its hop count for the new launch"
    view = await fleet.publications.view("p")
    assert view is not None and not view.claims and view.subscribers[0].seq == 0


async def test_a_version_is_pinned_as_long_as_somebody_has_it(fleet: Fleet) -> None:
    await fleet.enter("trainer", 0, places=2)
    await fleet.enter("r0", 1)
    await fleet.enter("r1", 2)
    await fleet.put("old")
    await fleet.commit(await fleet.claim("r0"))
    await fleet.put("mid")
    await fleet.put("new")
    back = await fleet.claim("r1", version="old")
    assert (back.source, back.seq) == ("r0", 1)
    await fleet.commit(back)
    with pytest.raises(ConfigError, match=r'no holder has version "none" .* those that are held: "mid", "new", "old"'):
        await fleet.ask("r1", version="none")
    holding = await fleet.claim("r0", version="mid")
    assert holding.source == "trainer" and holding.seq == 2
    assert (await fleet.ask("r1", version="new")).claim is None, "the publisher keeps one slot for the next put"
    await fleet.publications.leave("p", "trainer", 0, process(0), "died")
    assert (await fleet.claim("r1", again=True, version="new")).version == "new"


async def test_a_pinned_version_that_is_lost_meanwhile_is_refused(fleet: Fleet) -> None:
    await fleet.enter("trainer", 0)
    await fleet.enter("r0", 1)
    await fleet.enter("r1", 2)
    await fleet.put("one")
    await fleet.claim("r0")
    assert (await fleet.ask("r1", version="one")).claim is None
    await fleet.publications.forget("p", f"trainer/{fleet.sides['trainer'].serial}")
    with pytest.raises(ConfigError, match='no holder has version "one"'):
        await fleet.ask("r1", again=True, version="one")


async def test_a_holder_whose_agent_is_silent_is_passed_over(server: Server, fleet: Fleet) -> None:
    async with agent(server.url, fleet.store.keys.namespace, "b") as other:
        await fleet.enter("trainer", 0, copies=1)
        await fleet.enter("r0", 1, agent="b")
        await fleet.enter("r1", 2)
        await fleet.put()
        await fleet.commit(await fleet.claim("r0"))
        await other.agents.withdraw()
        claim = await fleet.claim("r1")
        assert claim.source == "trainer", "the only copy that it has given is lost"
        assert await fleet.publications.holder("p", f"r0/{fleet.sides['r0'].serial}") is None


async def test_a_side_of_which_one_agent_answers_is_not_forgotten(server: Server, fleet: Fleet) -> None:
    """Its ranks would put it back without the others, and wait for these for ever."""
    keys = fleet.store.keys
    async with agent(server.url, keys.namespace, "b") as other:
        await fleet.enter("trainer", 0)
        await fleet.enter("half", 1, world=2)
        assert (await fleet.enter("half", 2, rank=1, world=2, agent="b")).complete
        await fleet.enter("silent", 3, agent="b")
        await other.agents.withdraw()
        connection = fleet.store._session.connection
        await connection.call("sweep", lambda client: client.hset(keys.publication("p"), "swept", 0), 10)
        await fleet.enter("late", 4)
        view = await fleet.publications.view("p")
        assert view is not None and [one.name for one in view.subscribers] == ["half", "late"]
        assert (await fleet.ask("half")).claim is None


async def test_a_question_is_taken_back(fleet: Fleet) -> None:
    await fleet.enter("trainer", 0)
    await fleet.enter("r", 1)
    side = fleet.sides["r"]
    await fleet.ask("r")
    await fleet.publications.withdraw("p", "r", side.serial, 1)
    await fleet.put()
    view = await fleet.publications.view("p")
    assert view is not None and not view.queue and not view.claims
    assert (await fleet.ask("r", again=True)).over
    claim = await fleet.claim("r")
    await fleet.publications.withdraw("p", "r", side.serial, 2)
    assert not await fleet.publications.renew(claim)


async def test_what_redis_has_lost_is_put_back(server: Server) -> None:
    async with agent(server.url, fresh_namespace(), "a") as before:
        fleet = Fleet(before)
        await fleet.enter("trainer", 0)
        await fleet.enter("r", 1)
        await fleet.put("one")
        claim = await fleet.claim("r")
        await fleet.commit(claim)
        await fleet.put("two")
        running = await fleet.claim("r", newer_than=1)
        trainer, replica = fleet.sides["trainer"], fleet.sides["r"]
    async with agent(server.url, fresh_namespace(), "a") as store:
        publications = store.publications
        for number, (name, side, role) in enumerate([("trainer", trainer, "publisher"), ("r", replica, "subscriber")]):
            entrance = PublicationRank(
                publication="p", side=name, role=role, rank=0, world=1, tensors=table(), launch=side.launch,
                slots=2 if role == "publisher" else 1, serial=side.serial,
            )  # fmt: skip
            publications.held["p", name, 0] = (entrance, process(number))
        digest = table().digest
        publications.versions["p", f"trainer/{trainer.serial}"] = (
            HeldVersion(slot=0, seq=1, version="one", description=digest),
            HeldVersion(slot=1, seq=2, version="two", description=digest),
        )
        await publications.restore(10)
        again = Fleet(store)
        again.sides, again.calls, again.puts = {"trainer": trainer, "r": replica}, dict(fleet.calls), 2
        assert await again.commit(running) is False
        view = await publications.view("p")
        assert view is not None
        assert (view.seq, view.version, view.subscribers[0].seq) == (2, "two", 2)
        assert await again.put("three") == 3
        again.calls["r"] = 9
        claim = await again.claim("r", newer_than=2)
        assert claim.seq == 3 and claim.number > running.number


async def test_a_rank_is_not_put_back_into_a_launch_that_is_over(fleet: Fleet) -> None:
    """Redis was away; another rank has left before the agent of this one has put it back."""
    for rank in range(2):
        await fleet.enter("r", 1 + rank, rank=rank, world=2)
    await fleet.publications.leave("p", "r", 0, process(1), "died")
    launched, entrance = fleet.sides["r"], PublicationRank(
        publication="p", side="r", role="subscriber", rank=1, world=2, tensors=table(), slots=1
    )  # fmt: skip
    put_back = replace(entrance, serial=launched.serial, launch=launched.launch)
    fleet.publications.held["p", "r", 1] = (put_back, process(2))
    await fleet.publications.restore(10)
    with pytest.raises(GroupLostError, match=r"rank 0 of r .pid 1001 on host far. died"):
        await fleet.ask("r")
    del fleet.publications.held["p", "r", 1]
    assert not (await fleet.enter("r", 2, rank=1, world=2)).complete, "a later launch may come"
    assert (await fleet.enter("r", 1, rank=0, world=2)).complete


async def test_a_launch_that_misses_a_rank_for_longer_than_a_lease_is_over(fleet: Fleet) -> None:
    """An empty Redis does not know that it has left."""
    await fleet.enter("r", 2, rank=1, world=2)
    assert (await fleet.ask("r")).claim is None
    client, keys = fleet.store._session.connection._client, fleet.store.keys
    side = keys.publication_side("p", "r")
    since = int(await client.hget(side, "silent"))
    assert since > 0
    await client.hset(side, "silent", since - int(AGENT_LEASE * 1000) - 1)
    with pytest.raises(GroupLostError, match="rank 0 of r has left"):
        await fleet.ask("r", again=True)


async def test_what_is_written_is_in_the_key_table_and_leased(fleet: Fleet) -> None:
    await fleet.enter("trainer", 0)
    await fleet.enter("r0", 1)
    await fleet.enter("r1", 2)
    await fleet.enter("r2", 3)
    await fleet.enter("some", 4, tensors=part_of(0, 2))
    await fleet.put()
    await fleet.commit(await fleet.claim("r0"))
    await fleet.commit(await fleet.claim("r2"))
    await fleet.put()
    await fleet.claim("r0", newer_than=1)
    assert (await fleet.ask("r1", newer_than=1)).claim is None
    table_of = {kind.pattern: kind for kind in TABLE}
    client, keys = fleet.store._session.connection._client, fleet.store.keys
    expected = {
        **{f"publication:NAME:{part}": keys.publication_part("p", part) for part in PARTS},
        "publication:NAME": keys.publication("p"),
        "publication:NAME:side:SIDE": keys.publication_side("p", "r0"),
        "publication:NAME:table:DIGEST": keys.publication_table("p", table().digest),
        "publications": keys.publications,
    }
    others = {"publication:NAME:ranks:SIDE"}  # what ranks tell each other, which no script of this page writes
    assert expected.keys() == {pattern for pattern in table_of if pattern.startswith("publication")} - others
    for pattern, key in expected.items():
        kind, type_ = table_of[pattern], await client.type(key)
        assert type_.replace("zset", "sorted set") == kind.type, key
        assert 0 < await client.pttl(key) <= HISTORY_LEASE * 1000, key
        if pattern in ("publication:NAME", "publication:NAME:side:SIDE"):
            assert set(await client.hgetall(key)) - {"0"} == kind.fields.keys() - {"RANK"}, key
    there = {key async for key in client.scan_iter(f"{keys.prefix}publication*")}
    sides = {keys.publication_side("p", name) for name in ("r1", "r2", "some", "trainer")}
    assert there == {*expected.values(), *sides, keys.publication_table("p", part_of(0, 2).digest)}


async def test_nothing_grows(fleet: Fleet) -> None:
    """Versions, launches that are over, claims and questions: what is kept of each has an end."""
    await fleet.enter("trainer", 0)
    client, keys = fleet.store._session.connection._client, fleet.store.keys

    async def sizes() -> dict[str, int]:
        found = {}
        async for key in client.scan_iter(f"{keys.prefix}publication*"):
            text = await client.type(key)
            count = {"hash": client.hlen, "zset": client.zcard, "set": client.scard}[text]
            found[key] = await count(key)
        found["retired"] = len(json.loads(await client.hget(keys.publication("p"), "retired")))
        return found

    seen = []
    for number in range(2 * (MAX_VERSIONS + 10)):
        await fleet.put()
        if number % 4 == 0:
            await fleet.enter("r", 1, launch=f"l{number}")
            fleet.calls["r"] = 0
            await fleet.claim("r")
        if number in (MAX_VERSIONS + 9, 2 * MAX_VERSIONS + 17):
            await fleet.publications.leave("p", "r", 0, process(1), "closed")
            seen.append(await sizes())
    assert seen[0] == seen[1] and seen[0][keys.publication_part("p", "versions")] == MAX_VERSIONS
    assert seen[0]["retired"] == 64 and keys.publication_part("p", "claims") not in seen[0]


# ---- the scripts and the rule -----------------------------------------------------------------------------


def named(place: dict[int, int], text: str) -> str:
    """SIDE/SERIAL with the serial's place among all numbers, because the clock numbers what Redis has."""
    side, _, serial = text.partition("/")
    return f"{side}/{place.get(int(serial), -1)}" if serial else ""


def open_to_all(rule: Sources, one: Holder) -> bool:
    """Whether Redis lists a holder as free: the publisher only with versions of which it has not given enough copies to
    holders that may feed whomever it may feed itself."""

    def given(slot: HolderSlot) -> bool:
        children = [rule.holders[name] for name in slot.children if name in rule.holders]
        capped = one.publisher and not one.orphan and 0 < one.copies <= len(slot.children)
        return capped and any(child.kind == one.kind for child in children)

    can = zip(one.slots, one.claimable(), strict=True)
    return one.offer() > 0 and any(free and not given(slot) for slot, free in can)


def by_rule(rule: Sources) -> dict[str, Any]:
    """What the rule knows, comparable."""
    numbers = {one.serial for one in rule.holders.values()} | {one.serial for one in rule.subscribers.values()}
    place = {number: index for index, number in enumerate(sorted(numbers | set(rule.hops)))}
    return {
        "seq": rule.seq,
        "publisher": named(place, rule.publisher),
        "orphans": [named(place, name) for name in rule.orphans],
        "draining": [named(place, name) for name in rule.draining],
        "queue": [named(place, ask.name) for ask in rule.queue],
        "free": sorted(named(place, name) for name, one in rule.holders.items() if open_to_all(rule, one)),
        "holders": {
            named(place, name): [
                (
                    s.seq,
                    s.used,
                    [named(place, n) for n in s.children],
                    named(place, s.origin),
                    s.arrival and (s.arrival.seq, s.arrival.label, place[s.arrival.claim], s.arrival.depth),
                )
                for s in one.slots
            ]
            for name, one in rule.holders.items()
        },
        "hops": [
            (
                place[n],
                hop.call,
                named(place, hop.target),
                named(place, hop.holder),
                hop.slot,
                hop.seq,
                hop.protected,
                place.get(hop.upstream, -1),
            )
            for n, hop in sorted(rule.hops.items())
        ],
        "sides": {
            name: (place[one.serial], one.call, one.over, place.get(one.claim, -1), one.held, one.protect)
            for name, one in rule.subscribers.items()
        },
    }


async def in_redis(store: Store) -> dict[str, Any]:
    """What Redis holds, in the same form."""
    keys = store.keys

    async def read(client: Any) -> dict[str, Any]:
        values = await client.hgetall(keys.publication("p"))
        parts = {name: await client.hgetall(keys.publication_part("p", name)) for name in ("holders", "claims")}
        queue = await client.zrange(keys.publication_part("p", "queue"), 0, -1)
        free = await client.zrange(keys.publication_part("p", "free"), 0, -1)
        names = await client.smembers(keys.publication_part("p", "sides"))
        sides = {name: await client.hgetall(keys.publication_side("p", name)) for name in names}
        holders = {name: json.loads(text) for name, text in parts["holders"].items()}
        claims = {int(number): json.loads(text) for number, text in parts["claims"].items()}
        subscribers = {name: one for name, one in sides.items() if one["role"] == "subscriber"}
        numbers = {one["serial"] for one in holders.values()} | {int(one["serial"]) for one in subscribers.values()}
        place = {number: index for index, number in enumerate(sorted(numbers | set(claims)))}
        assert await client.zcard(keys.publication_part("p", "leases")) == len(claims)
        for name, one in holders.items():
            assert one["used"] == sum(slot["used"] for slot in one["slots"]), name
        return {
            "seq": int(values["seq"]),
            "publisher": named(place, values["holder"]),
            "orphans": [named(place, name) for name in json.loads(values["orphans"])],
            "draining": [named(place, name) for name in json.loads(values["draining"])],
            "queue": [named(place, name) for name in queue],
            "free": sorted(named(place, name) for name in free),
            "holders": {
                named(place, name): [
                    (
                        slot["seq"],
                        slot["used"],
                        [named(place, child) for child in slot["children"] or []],
                        named(place, slot.get("from", "")),
                        (arrival := slot.get("arrival"))
                        and (arrival["seq"], arrival["version"], place[arrival["claim"]], arrival["depth"]),
                    )
                    for slot in one["slots"]
                ]
                for name, one in holders.items()
            },
            "hops": [
                (
                    place[number],
                    one["call"],
                    named(place, f"{one['subscriber']}/{one['serial']}"),
                    named(place, f"{one['source']}/{one['source_serial']}"),
                    one["slot"],
                    one["seq"],
                    one["protected"],
                    place.get(one["upstream"], -1),
                )
                for number, one in sorted(claims.items())
            ],
            "sides": {
                name: (
                    place[int(one["serial"])],
                    int(one["call"]),
                    int(one["over"]),
                    place.get(int(one["claim"]), -1),
                    int(one["held"]),
                    one["protect"] == "1",
                )
                for name, one in subscribers.items()
            },
        }

    found: dict[str, Any] = await store._session.connection.call("read", read, 10)
    return found


#: What subscribers of each kind have: the publisher's tensors are "a".
TABLES = {
    "a": table(),
    "half": table("bfloat16"),
    "part": part_of(1, 4),
    "rest": part_of(0, 2),
}


class Duet:
    """The same events for the rule and for Redis. Hops are pairs: the rule's, and the claim in Redis."""

    def __init__(self, fleet: Fleet, chance: random.Random) -> None:
        self.fleet, self.chance = fleet, chance
        self.rule = Sources(
            serial=1000,
            unfit=frozenset({("half", "part"), ("half", "rest"), ("part", "half"), ("rest", "half")}),
            lacking=frozenset({("half", "a"), ("part", "a"), ("rest", "a"), ("part", "rest"), ("rest", "part")}),
        )
        self.options: dict[str, Any] = {
            "slots": chance.choice([1, 2, 2, 3]),
            "places": chance.choice([1, 2, 3]),
            "copies": chance.choice([0, 1, 2]),
        }
        self.agents = {"r0": "a", "r1": "a", "r2": "b", "r3": "b"}
        self.replicas = {
            name: {
                "places": chance.choice([0, 1, 1, 2]),
                "passes": chance.choice([False, True, True]),
                "kind": chance.choice(["a", "a", "half", "part", "part", "rest"]),
                "zone": chance.choice(["", "z"]),
                "host": chance.choice(["far", "near"]),
            }
            for name in self.agents
        }
        self.late: list[tuple[Hop, SourceClaim]] = []
        self.launches = 0

    async def publish(self) -> None:
        self.rule.publish("trainer", host="far", **self.options)
        copies = self.options["copies"] or None
        self.launches += 1
        await self.fleet.enter("trainer", 0, launch=f"l{self.launches}", **{**self.options, "copies": copies})
        self.fleet.puts = 0

    async def subscribe(self, name: str) -> None:
        options = self.replicas[name]
        self.rule.subscribe(name, **options)
        self.launches += 1
        number = int(name[1:]) + 1
        member = RankHolder(agent=self.agents[name], host=options["host"], pid=1000 + number, start=number)
        more = {
            "places": options["places"],
            "passes": options["passes"],
            "zone": options["zone"],
            "launch": f"l{self.launches}",
            "member": member,
        }
        tensors = TABLES[options["kind"]]
        await self.fleet.enter(name, number, tensors=tensors, **more)
        self.fleet.calls[name] = 0
        self.late = [(hop, claim) for hop, claim in self.late if hop.subscriber != name]

    async def ask(self, name: str) -> None:
        mine = self.rule.subscribers[name]
        again = self.chance.random() < 0.2 and mine.call > 0
        if again:
            asks = [ask for ask in self.rule.queue if ask.subscriber == name]
            hops = [hop for hop in self.rule.hops.values() if hop.subscriber == name]
            if not asks and not hops:
                return
            label = asks[0].label if asks else hops[0].label if hops[0].pinned else ""
            more: dict[str, Any] = {"newer_than": (asks or hops)[0].newer_than}
        else:
            label = str(self.chance.randint(1, max(1, self.rule.seq))) if self.chance.random() < 0.1 else ""
            more = {"newer_than": mine.held}
        # Not a publisher that has ended: its side's number in Redis is that of the launch after it.
        holders = [one for one in self.rule.holders if self.far((one,))]
        links = tuple(one for one in holders if self.chance.random() < 0.1)
        avoid = tuple(one for one in holders if self.chance.random() < 0.1)
        far = {"links": self.far(links), "avoid": self.far(avoid)} if not again else {}
        near = {"links": links, "avoid": avoid} if not again else {}
        try:
            expected = self.rule.claim(name, mine.call + (not again), label=label, **more, **near)
        except LookupError:
            with pytest.raises(ConfigError, match="no holder has version"):
                await self.fleet.ask(name, again=again, version=int(label), **more, **far)
            # A question that is refused at once leaves no trace, so the next one has the same number.
            self.fleet.calls[name] = mine.call
            return
        answer = await self.fleet.ask(name, again=again, version=int(label) if label else None, **more, **far)
        assert (answer.claim is None) == (expected is None)

    def far(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Holders as Redis names them."""
        sides = {self.rule.publisher: "trainer"}
        sides |= {f"{name}/{one.serial}": name for name, one in self.rule.subscribers.items()}
        return tuple(f"{sides[name]}/{self.fleet.sides[sides[name]].serial}" for name in names if name in sides)

    async def claims(self) -> list[tuple[Hop, SourceClaim]]:
        view = await self.fleet.publications.view("p")
        assert view is not None and len(view.claims) == len(self.rule.hops)
        return list(zip((self.rule.hops[n] for n in sorted(self.rule.hops)), view.claims, strict=True))

    async def put(self) -> None:
        serial = self.fleet.sides["trainer"].serial
        put = self.rule.puts + 1
        slot, ready = self.rule.prepare()
        found = await self.fleet.publications.prepare("p", "trainer", serial, 0, put)
        assert (found.slot, found.ready, found.seq) == (slot, ready, self.rule.put and self.rule.put.seq)
        assert len(found.readers) == sum(
            (h.holder, h.slot) == (self.rule.publisher, slot) for h in self.rule.hops.values()
        )
        await self.same("prepare")
        if self.chance.random() < 0.2:
            await self.fleet.publications.abandon("p", "trainer", serial, 0, put)
            self.rule.abandon()
        elif ready and self.chance.random() < 0.8:
            assert (
                await self.fleet.publications.announce("p", "trainer", serial, 0, put, found, None)
                == self.rule.announce()
            )

    async def end(self) -> None:
        running = await self.claims()
        hop, claim = self.chance.choice(running + self.late)
        self.late = [one for one in self.late if one[0] is not hop]
        if self.chance.random() < 0.7:
            assert await self.fleet.commit(claim) == self.rule.release(hop, committed=True)
            return
        held = self.chance.choice([0, max(1, hop.seq - 1)])
        overwritten = self.chance.random() < 0.3
        keeps = HeldVersion(slot=0, seq=held, version=held, description=table().digest) if held else None
        known = self.rule.release(hop, committed=False, held=held, overwritten=overwritten)
        assert await self.fleet.fail(claim, held=keeps, overwritten=overwritten) == known

    async def lapse(self) -> None:
        hop, claim = self.chance.choice(await self.claims())
        self.rule.expired.add(hop.number)
        await self.fleet.lapse(claim.number)
        self.late.append((hop, claim))
        if self.chance.random() < 0.5:
            assert not self.rule.renew(hop.number) and not await self.fleet.publications.renew(claim)

    async def same(self, event: str) -> None:
        if self.rule.expired:
            return  # Redis finds out with its next script
        assert not list(copy.deepcopy(self.rule).violations())
        assert await in_redis(self.fleet.store) == by_rule(self.rule), event


@pytest.mark.parametrize("seed", range(6))
async def test_the_scripts_do_what_the_rule_says(server: Server, store: Store, seed: int) -> None:
    """Random events of a publisher and four subscribers, whose agents come and go: after each, Redis holds what the
    rule says."""
    chance = random.Random(seed)
    duet = Duet(Fleet(store), chance)
    shown = True
    async with agent(server.url, store.keys.namespace, "b") as other:
        await duet.publish()
        for name in duet.agents:
            await duet.subscribe(name)
        seen: dict[str, int] = {}
        for turn in range(120):
            rule = duet.rule
            acts = ["ask"] * 6 + ["put"] * 3 + ["publish", "depart", "agent", "withdraw", "forget", "subscribe"]
            acts += ["end"] * 5 * bool(rule.hops or duet.late) + ["lapse"] * bool(rule.hops)
            act = chance.choice(acts)
            name = chance.choice(list(duet.agents))
            heard = shown or duet.agents[name] == "a"
            if act == "ask" and name in rule.subscribers:
                await duet.ask(name)
            elif act == "put" and rule.publisher_side and rule.publisher:
                await duet.put()
            elif act == "publish" and chance.random() < 0.3:
                await duet.publish()
            elif act == "subscribe" and heard and (name not in rule.subscribers or chance.random() < 0.3):
                await duet.subscribe(name)
            elif act == "depart" and name in rule.subscribers and chance.random() < 0.5:
                number = int(name[1:]) + 1
                member = RankHolder(
                    agent=duet.agents[name], host=duet.replicas[name]["host"], pid=1000 + number, start=number
                )
                assert await store.publications.leave("p", name, 0, member, "died")
                rule.leave(name)
                duet.late = [(hop, claim) for hop, claim in duet.late if hop.subscriber != name]
            elif act == "agent":
                shown = not shown
                await (other.agents.publish(agent_record("b")) if shown else other.agents.withdraw())
                for one in rule.holders.values():
                    one.served = shown or duet.agents.get(one.side, "a") == "a"
                # No wake-up says that an agent is silent. Whoever waits asks again when a lease has ended.
                rule.renew(0)
                await store.publications._script("publication_release", "p", {"act": "renew", "number": 0}, 10)
            elif act == "withdraw" and name in rule.subscribers:
                call = rule.subscribers[name].call
                await store.publications.withdraw("p", name, duet.fleet.sides[name].serial, call)
                rule.withdraw(name, call)
            elif act == "forget" and rule.holders and chance.random() < 0.3:
                place = chance.choice([one for one in rule.holders if one in duet_names(duet)])
                [far] = duet.far((place,))
                await store.publications.forget("p", far)
                rule.forget(place)
            elif act == "end":
                await duet.end()
            elif act == "lapse":
                await duet.lapse()
            else:
                continue
            seen[act] = seen.get(act, 0) + 1
            await duet.same(f"{turn}: {act}")
        assert seen["ask"] > 8 and seen["end"] > 3, seen


def duet_names(duet: Duet) -> list[str]:
    """The holders that are no orphans."""
    found = [f"{name}/{one.serial}" for name, one in duet.rule.subscribers.items()]
    return [*found, duet.rule.publisher]
