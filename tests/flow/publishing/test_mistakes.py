"""What is refused, and in which words, and a replica that changes what it serves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import etha
from etha.bus.messages import BeginPut, EndHop, Publish
from etha.memory.handles import TensorHandle
from tests.flow.publishing.fleets import Cut, Fleet, Replica
from tests.flow.sites import Site

SHAPES = {"w": (6, 4), "b": (3,)}

pytestmark = pytest.mark.ways("local")


async def test_a_subscriber_that_cannot_serve(site: Site, pair: str) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        with pytest.raises(etha.ConfigError, match=r"etha\.empty.*atomic=True.*serve=False"):
            await fleet.subscribe("replica", Cut())
        client = site.client("replica", 0)
        async with client:
            regions: Any = {"w": [[(0, 2)], [(0, 4)]]}
            with pytest.raises(etha.ConfigError, match=r"etha\.empty.*atomic=True.*serve=False"):
                await client.subscribe(pair, {"w": torch.zeros(2, 4)}, subscriber="r", regions=regions, shapes=SHAPES)


async def test_a_dtype_that_cannot_be_cast(site: Site, pair: str) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        await fleet.publish(Cut())
        with pytest.raises(etha.RegistrationError, match="floats are cast into floats") as raised:
            await fleet.subscribe("replica", Cut(dtypes={"w": torch.int32}), serve=False)
        assert [(v.code, v.name) for v in raised.value.violations] == [("dtype", "w")]


async def test_tensors_that_do_not_fit(site: Site, pair: str) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        await fleet.publish(Cut())
        for shapes, code, name in (
            ({"w": (6, 5), "b": (3,)}, "shape_mismatch", "w"),
            ({"w": (6, 4)}, "missing_name", "b"),
            ({"w": (6, 4), "b": (3,), "c": (1,)}, "unknown_name", "c"),
        ):
            async with Fleet(site, pair, shapes) as other:
                with pytest.raises(etha.RegistrationError, match="others") as raised:
                    await other.subscribe("replica", Cut(world=2), serve=False)
                assert [(v.code, v.name) for v in raised.value.violations] == [(code, name)]


@pytest.mark.parametrize(
    ("shapes", "code", "name"),
    [
        ({"w": (6, 5), "b": (3,)}, "shape_mismatch", "w"),
        ({"w": (6, 4), "b": (3,), "c": (1,)}, "missing_name", "c"),
        ({"w": (6, 4)}, "unknown_name", "b"),
    ],
)
async def test_a_publisher_that_comes_again_with_other_tensors(
    site: Site, pair: str, shapes: dict[str, tuple[int, ...]], code: str, name: str
) -> None:
    """A replica that waits hears it, as one that subscribes does, and one that asks again. It follows once they fit."""
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(Cut())
        replica = await fleet.subscribe("replica", Cut(world=2), atomic=True)
        await trainer.put(1)
        await replica.next()
        waiting = [asyncio.ensure_future(one.next()) for one in replica.subscriptions]
        await asyncio.gather(*(client.status() for client in replica.clients))  # both have asked
        await trainer.close()
        fleet.shapes = shapes
        other = await fleet.publish(Cut())
        await other.put(2)
        for found in [*waiting, replica.subscriptions[0].next(), replica.subscriptions[1].next()]:
            with pytest.raises(etha.RegistrationError, match="others") as raised:
                await found
            assert [(v.code, v.name) for v in raised.value.violations] == [(code, name)]
        (state,) = await other.publications[0].subscribers()
        assert (state.state, state.seq) == ("behind", 1)
        assert name in state.error
        await other.close()
        fleet.shapes = SHAPES
        again = await fleet.publish(Cut())
        await again.put(3)
        assert (await replica.next()).version == 3


async def test_elements_that_are_not_published(site: Site, pair: str) -> None:
    """A publisher of regions, and subscribers that want more of a tensor than its ranks hold together."""
    held = {"w": [[[(0, 3)], [(0, 4)]], [[(2, 5)], [(0, 2)]]]}
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(Cut(world=2, regions=held))
        for cut in (Cut(), Cut(regions={"w": [[[(3, 5)], [(1, 3)]]]})):
            with pytest.raises(
                etha.RegistrationError, match="wants elements of it that no rank of publication"
            ) as raised:
                await fleet.subscribe("replica", cut, serve=False)
            assert [(v.code, v.name, v.side) for v in raised.value.violations] == [("uncovered", "w", "replica")]
        replica = await fleet.subscribe(
            "replica", Cut(regions={"w": [[[[(0, 5)], [(0, 2)]], [[(1, 2)], [(2, 4)]]]]}), atomic=True
        )
        await trainer.put(1)
        assert (await replica.next()).source == "trainer"


async def test_a_region_beyond_the_shape(site: Site, pair: str) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        regions = {"w": [[[(0, 2)], [(0, 4)]], [[(5, 7)], [(0, 4)]]]}
        clients = [site.client("trainer", rank) for rank in range(2)]
        local = {"w": torch.zeros(2, 4), "b": torch.zeros(3)}
        async with clients[0], clients[1]:
            answers = await asyncio.gather(
                *(
                    client.publish(
                        pair, dict(local), shapes=SHAPES, regions={"w": regions["w"][rank]}, rank=rank,
                        expected_world_size=2, device_mesh=(2,), placements={"b": Cut().placements(SHAPES)["b"]},
                    )
                    for rank, client in enumerate(clients)
                ),
                return_exceptions=True,
            )  # fmt: skip
        for answer in answers:
            assert isinstance(answer, etha.RegistrationError)
            assert [(v.code, v.name, v.rank) for v in answer.violations] == [("layout", "w", 1)]
            assert "reaches to 7 in dim 0, where the tensor has 6" in answer.violations[0].text
        assert fleet.cut is None


async def test_a_rank_that_does_not_come(site: Site, pair: str) -> None:
    options: dict[str, Any] = {"expected_world_size": 2, "rank": 0, "device_mesh": (2,), "timeout": 0.5}
    placements = Cut().placements(SHAPES)
    async with site.client("trainer", 0) as client:
        with pytest.raises(etha.RendezvousTimeoutError, match="trainer rank 1") as raised:
            await client.publish(pair, Cut().held(SHAPES, 0, 0), placements=placements, **options)
        assert raised.value.missing == {"trainer": (1,)}
        with pytest.raises(etha.RendezvousTimeoutError, match="replica rank 1"):
            await client.subscribe(
                pair, Cut().held(SHAPES, 0, 0), subscriber="replica", placements=placements, serve=False, **options
            )


async def test_names_that_are_taken(site: Site, pair: str) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        await fleet.publish(Cut())
        await fleet.subscribe("replica", Cut(), serve=False)
        with pytest.raises(etha.ConfigError, match="trainer"):
            await fleet.publish(Cut())
        with pytest.raises(etha.ConfigError, match="trainer"):
            await fleet.publish(Cut(), publisher="another")
        with pytest.raises(etha.ConfigError, match="replica"):
            await fleet.subscribe("replica", Cut(), serve=False)
        with pytest.raises(etha.ConfigError, match="trainer"):
            await fleet.subscribe("trainer", Cut(), serve=False)


async def test_one_client_follows_a_publication_once_also_if_it_subscribes_twice_at_once(site: Site, pair: str) -> None:
    async with Fleet(site, pair, SHAPES) as fleet, site.client("replica", 0) as client:
        trainer = await fleet.publish(Cut())
        tensors = [Cut().held(SHAPES, 0, 0) for _ in range(2)]

        async def subscribe(number: int) -> etha.AsyncSubscription:
            how = Cut().options(SHAPES, 0)
            return await client.subscribe(pair, tensors[number], subscriber=f"r{number}", serve=False, **how)

        made = await asyncio.gather(subscribe(0), subscribe(1), return_exceptions=True)
        (refused,) = (one for one in made if isinstance(one, BaseException))
        assert isinstance(refused, etha.ConfigError) and "follows publication" in refused.message
        (kept,) = (one for one in made if isinstance(one, etha.AsyncSubscription))
        await trainer.put(1)
        assert (await kept.next()).version == 1


async def test_calls_that_cannot_be_right(site: Site, pair: str) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(Cut())
        replica = await fleet.subscribe("replica", Cut(), serve=False)
        (subscription,), (publication,) = replica.subscriptions, trainer.publications
        with pytest.raises(etha.TransferTimeoutError, match="nothing was announced"):
            await subscription.next(timeout=0.2)
        with pytest.raises(etha.ConfigError, match="atomic=True"):
            await subscription.next(on_commit=lambda: None)
        with pytest.raises(etha.ConfigError, match="wait="):
            await publication.put(1, wait=-1)
        with pytest.raises(etha.ConfigError, match=r"fan_out=2000000 must be a whole number, 1 to 1048576"):
            await trainer.clients[0].publish("other", {}, fan_out=2_000_000)
        for number in (-1, 10**30, True, "1"):
            with pytest.raises(etha.ConfigError, match="newer_than="):
                await subscription.next(newer_than=number)
        waiting = asyncio.ensure_future(subscription.next())
        await replica.clients[0].status()
        with pytest.raises(etha.ConfigError, match="another call"):
            await subscription.next()
        await trainer.put(1)
        assert (await waiting).version == 1
        with pytest.raises(etha.TransferTimeoutError, match=r"seq 1 is the newest version that was announced$"):
            await subscription.next(timeout=0.2)
        with pytest.raises(etha.TransferTimeoutError, match="Redis has lost them: newer_than=0"):
            await subscription.next(newer_than=7, timeout=0.2)
        trainer.tensors[0]["w"].data = torch.zeros(6, 4)
        with pytest.raises(etha.RegistrationError, match="'w'"):
            await publication.put(2)
        await subscription.close()
        with pytest.raises(etha.ConfigError, match="closed"):
            await subscription.next()
        await publication.close()
        with pytest.raises(etha.ConfigError, match="closed"):
            await publication.put(3)


async def test_ranks_that_put_different_labels(site: Site, pair: str) -> None:
    async with Fleet(site, pair, SHAPES) as fleet:
        trainer = await fleet.publish(Cut(world=2))
        found = await asyncio.gather(
            *(one.put(number) for number, one in enumerate(trainer.publications)), return_exceptions=True
        )
        errors = [one for one in found if isinstance(one, BaseException)]
        assert [type(error) for error in errors] == [etha.ConfigError] and "same on all ranks" in str(errors[0])
        failed = trainer.publications[found.index(errors[0])]
        with pytest.raises(etha.ConfigError, match="publish again"):
            await failed.put(5)


async def test_messages_that_no_client_sends(site: Site, pair: str) -> None:
    """They are refused at once, by name, and the session goes on."""
    fields: dict[str, Any] = {"publication": pair, "launch": None, "layouts": (), "entries": (), "refusals": ()}
    publisher: dict[str, Any] = {**fields, "publisher": "trainer", "rank": 0}
    handle = TensorHandle(segment="ab", offset=0, shape=(1,), strides=(1,), dtype="float32")
    wrong = (
        (Publish(**publisher, world_size=1 << 60, slots=((),)), etha.ConfigError, "ranks"),
        (Publish(**{**publisher, "rank": 3}, world_size=2, slots=((),)), etha.ConfigError, "rank 3"),
        (Publish(**publisher, world_size=1, slots=()), etha.ProtocolError, "a slot"),
        (Publish(**publisher, world_size=1, slots=((handle,),)), etha.ProtocolError, "1"),
        (BeginPut(publication=pair, number=1, grace=1.0), etha.ConfigError, "call publish"),
        (EndHop(publication=pair, subscriber="x", claim=1, error=""), etha.ConfigError, "call subscribe"),
    )
    async with site.client("trainer", 0) as client:
        await client.status()
        assert client._connection is not None
        for message, kind, text in wrong:
            with pytest.raises(kind, match=text):
                await client._connection.link.request(message, timeout=10)
        await client.status()


# ---- a replica that changes what it serves ----

TENSORS = {"w": (60, 40), "b": (30,), "none": (0, 4)}
CUT = Cut(world=2, dims={"w": 0})


def scale(replica: Replica) -> None:
    """As an engine that quantizes its weights in place."""
    for held in replica.tensors:
        for tensor in held.values():
            tensor.mul_(0.5)


@pytest.mark.parametrize("what", ["all", "one tensor of one rank"])
async def test_nobody_receives_what_a_replica_has_changed(site: Site, pair: str, what: str) -> None:
    async with Fleet(site, pair, TENSORS) as fleet:
        trainer = await fleet.publish(CUT)
        first = await fleet.subscribe("first", CUT, mapped=True)
        await trainer.put(1)
        await first.next()
        await trainer.close()
        if what == "all":
            scale(first)
        else:
            first.tensors[1]["b"].add_(1)
        second = await fleet.subscribe("second", Cut(world=2, dims={"w": 1}), atomic=True)
        with pytest.raises(etha.TransferTimeoutError, match="first"):
            await asyncio.gather(*(one.next(timeout=3) for one in second.subscriptions))
        assert all((tensor == 77).all() for held in second.tensors for tensor in held.values())

        again = await fleet.publish(CUT)
        state = {one.name: one for one in await again.publications[0].subscribers()}["first"]
        assert "has been written to since its version came" in state.error and "serve=False" in state.error
        assert state.seq == 1, "it holds what it has made of the version"
        await again.put(2)
        await first.next()
        await second.next()
        first.check(2)
        second.check(2)
        await again.close()
        third = await fleet.subscribe("third", CUT, atomic=True)
        await third.next()  # from either
        third.check(2)
