"""What goes wrong between cards: nobody waits for ever, nothing is touched afterwards, and a fresh start is exact."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from torch.distributed.tensor import Shard

from etha.cuda.driver import DeviceError
from etha.cuda.reaper import reaper
from etha.errors import ConfigError, PeerLostError, ProtocolError, TransferError, TransferTimeoutError
from etha.memory.reach import RevokedError
from etha.memory.revocation import Guard, LentPage, RevocationPage
from etha.transport.base import TransportPeer, WireRun
from etha.transport.copy.device_memory import CardError, DeviceMemory
from etha.transport.copy.program import Member
from etha.transport.nccl import communicator, pipeline
from etha.transport.nccl.transport import NcclTransport
from tests.unit.transport.agents import Job, same
from tests.unit.transport.cards import Fleet, Placed, fleet
from tests.unit.transport.nccl.test_schedule import small
from tests.unit.transport.tcp.test_transport import partial, rows

B = ("target", 0)


class Trip:
    """A call's guard: the ``at``-th group that enters it sets something off on the loop, and goes on after that."""

    def __init__(self, at: int, act: Callable[[], None], guard: Guard | None = None) -> None:
        self._loop, self._at, self._act, self._guard = asyncio.get_running_loop(), at, act, guard
        self._done = threading.Event()
        self.inside: set[int] = set()
        self.entered = 0

    def enter(self, thread: int) -> bool:
        assert thread not in self.inside, "two groups with one number"
        self.entered += 1
        if self.entered == self._at:
            self._loop.call_soon_threadsafe(self._run)
            assert self._done.wait(10)
        if self._guard is not None and not self._guard.enter(thread):
            return False
        self.inside.add(thread)
        return True

    def _run(self) -> None:
        self._act()
        self._done.set()

    def leave(self, thread: int) -> None:
        self.inside.discard(thread)
        if self._guard is not None:
            self._guard.leave(thread)


def columns(n: int = 96, width: int = 2048) -> Job:
    """Rows to columns: everything has to be packed and unpacked, in many groups."""
    return rows(2, 1, (n, width), Shard(1), "aa", "b")


def cut_small(placed_at: Fleet, job: Job) -> Placed:
    return Placed(job, placed_at, small(job, limit=64 << 10, chunk=32 << 10, straight=64 << 10))


async def again(placed: Placed, at: Fleet, scope: object = "again") -> None:
    """A fresh communicator after a fault, and a transfer that is exact."""
    for held in placed.target.values():
        for tensor in held.values():
            tensor.zero_()
    transports, runs = await placed.runs(2, scope=scope)
    async with asyncio.timeout(30):
        await asyncio.gather(*(transports[name].run(runs[name]) for name in runs))
    same(placed.target, placed.job.expected())


async def both(a: Awaitable[object], b: Awaitable[object]) -> list[object]:
    async with asyncio.timeout(30):
        return list(await asyncio.gather(a, b, return_exceptions=True))


@pytest.mark.parametrize("how", ["stop", "cancel", "abort"])
async def test_a_run_that_is_stopped_in_the_middle_touches_nothing_afterwards(how: str) -> None:
    async with fleet("ab") as at:
        placed = cut_small(at, columns())
        transports, runs = await placed.runs()
        other = asyncio.ensure_future(transports["a"].run(runs["a"]))
        cause = ValueError("the coordinator says so")

        def act() -> None:
            if how == "cancel":
                task.cancel()
            else:
                getattr(transports["b"], how)(cause)

        trip = Trip(5, act)
        task = asyncio.ensure_future(transports["b"].run(replace(runs["b"], guards={B: trip})))
        with pytest.raises(asyncio.CancelledError if how == "cancel" else ValueError):
            await task
        # A task that was cancelled hears of it in the loop's next turn: the thread may enter one more group until then.
        entered = trip.entered
        assert entered == 5 or (how == "cancel" and entered == 6)
        assert not trip.inside
        assert not transports["b"].usable
        placed.target[0]["t"].fill_(7)
        # The other end is not told by NCCL, only by the agents.
        assert not other.done()
        transports["a"].stop(cause)
        with pytest.raises(ValueError, match="the coordinator"):
            await other
        assert trip.entered == entered and bool((placed.target[0]["t"] == 7).all())
        assert at.cards["b"].nccl.aborts == at.cards["a"].nccl.aborts == 1
        if how != "abort":
            await again(placed, at)


async def test_a_peer_that_dies_in_the_middle_just_hangs_until_one_is_told() -> None:
    async with fleet("ab") as at:
        placed = cut_small(at, columns())
        transports, runs = await placed.runs()
        trip = Trip(4, lambda: at.world.kill("b"))
        dead = asyncio.ensure_future(transports["b"].run(replace(runs["b"], guards={B: trip})))
        living = asyncio.ensure_future(transports["a"].run(runs["a"]))
        await asyncio.to_thread(trip._done.wait, 10)
        groups = -1
        while groups != at.world.groups:
            groups = at.world.groups
            await at.cards["a"].plane.thread.start(iter_once())
        assert not living.done()
        transports["a"].stop(PeerLostError("agent b is lost", reason="died"))
        with pytest.raises(PeerLostError, match="agent b"):
            await living
        transports["b"].stop(ValueError("it is dead"))
        with pytest.raises(ValueError, match="dead"):
            await dead


def iter_once():  # type: ignore[no-untyped-def]
    yield True


async def test_memory_that_is_taken_back_ends_the_run_with_its_owner() -> None:
    async with fleet("ab") as at:
        placed = cut_small(at, columns())
        transports, runs = await placed.runs()
        page = RevocationPage()
        lent = LentPage(os.dup(page.fd))
        word = page.open()
        trip = Trip(5, lambda: None, lent.guard(word))
        found: list[bool] = []
        trip._act = lambda: found.append(page.revoke(word))
        guards: dict[Member, Guard] = {B: trip}  # type: ignore[dict-item]
        a, b = (asyncio.ensure_future(transports[n].run(r)) for n, r in (
            ("a", runs["a"]), ("b", replace(runs["b"], guards=guards)))
        )  # fmt: skip
        with pytest.raises(RevokedError) as caught:
            await b
        assert caught.value.owner == B
        assert not page.busy(word) and not trip.inside
        placed.target[0]["t"].fill_(7)
        transports["a"].stop(PeerLostError("told", reason="died"))
        await both(a, asyncio.sleep(0))
        assert bool((placed.target[0]["t"] == 7).all())
        page.close()
        await again(placed, at)


async def test_a_call_is_left_only_when_the_device_has_passed_its_groups() -> None:
    """The unpack stream is held: its call is busy, and a revocation says so."""
    async with fleet("ab") as at:
        placed = cut_small(at, columns())
        transports, runs = await placed.runs()
        card = at.cards["b"]
        assert card.plane._ring is not None
        card.driver.hold(card.plane._ring.unpack)
        page = RevocationPage()
        word = page.open()
        full = asyncio.Event()
        lent = LentPage(os.dup(page.fd))
        trip = Trip(2, full.set, lent.guard(word))
        a = asyncio.ensure_future(transports["a"].run(runs["a"]))
        b = asyncio.ensure_future(transports["b"].run(replace(runs["b"], guards={B: trip})))
        await full.wait()
        assert page.revoke(word) is False and page.busy(word)
        card.driver.release(card.plane._ring.unpack)
        with pytest.raises(RevokedError):
            await b
        assert not page.busy(word)
        transports["a"].stop(PeerLostError("told", reason="died"))
        await both(a, asyncio.sleep(0))
        page.close()


async def test_an_error_that_shows_up_later_is_a_lost_peer() -> None:
    async with fleet("ab") as at:
        placed = cut_small(at, columns())
        transports, runs = await placed.runs()
        trip = Trip(4, lambda: at.world.fail("b", "remote process exited or there was a network error"))
        a = asyncio.ensure_future(transports["a"].run(runs["a"]))
        with pytest.raises(PeerLostError, match="network error"):
            await transports["b"].run(replace(runs["b"], guards={B: trip}))
        transports["a"].stop(PeerLostError("told", reason="died"))
        with pytest.raises(PeerLostError, match="told"):
            await a
        await again(placed, at)


async def test_a_device_that_refuses_ends_the_run() -> None:
    async with fleet("ab") as at:
        placed = cut_small(at, columns())
        transports, runs = await placed.runs()
        card = at.cards["b"]
        trip = Trip(4, lambda: card.driver.fail("record", DeviceError("cudaErrorInvalidValue", "record")))
        a = asyncio.ensure_future(transports["a"].run(runs["a"]))
        with pytest.raises(CardError, match="cudaErrorInvalidValue"):
            await transports["b"].run(replace(runs["b"], guards={B: trip}))
        assert not trip.inside
        transports["a"].stop(PeerLostError("told", reason="died"))
        await both(a, asyncio.sleep(0))
        await again(placed, at)


async def test_memory_that_is_freed_meanwhile_keeps_no_stop_waiting() -> None:
    """Freeing waits for what is queued, here for a peer that does not come, and every call waits for the freeing."""
    async with fleet("ab") as at:
        placed = cut_small(at, columns())
        transports, runs = await placed.runs()
        card, late = at.cards["b"], at.cards["a"]
        assert late.plane._ring is not None
        late.driver.hold(late.plane._ring.pack)
        a = asyncio.ensure_future(transports["a"].run(runs["a"]))
        memory, second = DeviceMemory(card.driver, card.plane.device.uuid, 4096), threading.Event()
        trip = Trip(2, second.set)  # the first group is queued
        b = asyncio.ensure_future(transports["b"].run(replace(runs["b"], guards={B: trip})))
        assert await asyncio.to_thread(second.wait, 20)
        memory.release()
        assert not await asyncio.to_thread(reaper.drain, 0.2)
        transports["b"].stop(PeerLostError("told", reason="died"))
        with pytest.raises(PeerLostError, match="told"):
            await b
        late.driver.release(late.plane._ring.pack)
        transports["a"].stop(PeerLostError("told", reason="died"))
        await both(a, asyncio.sleep(0))
        assert await asyncio.to_thread(reaper.drain)


async def test_a_device_that_does_not_come_to_rest_is_said_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call stays busy for its worker, and the plane refuses more."""
    monkeypatch.setattr(pipeline, "ABORTING", 0.2)
    async with fleet("ab") as at:
        placed = cut_small(at, columns())
        transports, runs = await placed.runs()
        card = at.cards["b"]
        ring = card.plane._ring
        assert ring is not None
        card.driver.hold(ring.unpack)
        trip = Trip(2, lambda: transports["b"].stop(ValueError("enough")))
        a = asyncio.ensure_future(transports["a"].run(runs["a"]))
        with pytest.raises(TransferError, match="restart this agent") as caught:
            await transports["b"].run(replace(runs["b"], guards={B: trip}))
        assert not caught.value.quiesced and trip.inside
        assert not transports["b"].usable
        with pytest.raises(TransferError, match="restart this agent"):
            await transports["b"].run(runs["b"])
        transports["a"].stop(PeerLostError("told", reason="died"))
        await both(a, asyncio.sleep(0))
        card.driver.release(ring.unpack)
        await asyncio.to_thread(card.driver.drain, ring.unpack)
        card.plane.stuck = None  # as if nothing had been: so that what is left can be counted
        reaper.let_go()


async def test_agents_that_do_not_come_in_time_are_named() -> None:
    async with fleet("ab") as at:
        unique_id = await at.cards["a"].plane.communicators.unique_id()
        with pytest.raises(TransferTimeoutError, match="agents a, b"):
            await at.cards["a"].plane.communicators.get(1, "ab", unique_id, seconds=0.05)
        assert at.cards["a"].nccl.aborts == 1
        # The same set may form again, with another id.
        placed = Placed(columns(8, 8), at)
        await placed.transfer()


async def test_the_maker_of_an_id_has_to_live_until_all_are_there() -> None:
    async with fleet("abc") as at:
        unique_id = await at.cards["c"].plane.communicators.unique_id()
        at.world.kill("c")
        found = await both(*(at.cards[n].plane.communicators.get(1, "ab", unique_id, seconds=0.05) for n in "ab"))
        assert all(isinstance(error, TransferTimeoutError) for error in found)


async def test_an_epoch_that_ends_while_its_communicator_forms() -> None:
    async with fleet("ab") as at:
        communicators = at.cards["a"].plane.communicators
        forming = asyncio.ensure_future(communicators.get(1, "ab", await communicators.unique_id()))
        await at.cards["a"].plane.thread.start(iter_once())
        await communicators.drop(1)
        with pytest.raises(PeerLostError, match="closed"):
            await forming


async def test_who_asks_while_it_forms_gets_the_same_one_once_it_has() -> None:
    async with fleet("ab") as at:
        a, b = (at.cards[name].plane.communicators for name in "ab")
        unique_id = await a.unique_id()
        given_up, second = (asyncio.ensure_future(a.get(1, "ab", unique_id)) for _ in range(2))
        await at.cards["a"].plane.thread.start(iter_once())
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert not second.done()
        third, _ = await asyncio.gather(a.get(1, "ab", unique_id), b.get(1, "ab", unique_id))
        assert third is await second and third.usable


async def test_two_communicators_form_side_by_side_in_any_order() -> None:
    """Each agent begins with another one: nobody waits for the other's thread."""
    async with fleet("abc") as at:
        sets = ("ab", "bc", "ac")
        ids = {s: await at.cards[s[0]].plane.communicators.unique_id() for s in sets}

        async def all_of(name: str, order: list[str]) -> None:
            mine = [s for s in order if name in s]
            await asyncio.gather(*(at.cards[name].plane.communicators.get(1, s, ids[s]) for s in mine))

        async with asyncio.timeout(20):
            await asyncio.gather(
                all_of("a", ["ab", "ac"]), all_of("b", ["bc", "ab"]), all_of("c", ["ac", "bc"])
            )  # fmt: skip


async def test_a_communicator_is_kept_for_its_epoch_and_made_anew_for_the_next() -> None:
    async with fleet("ab") as at:
        first = await at.connect("ab", scope=1)
        assert (await at.cards["a"].plane.communicators.get(1, "ab", b"")) is first["a"]
        second = await at.connect("ab", scope=2)
        assert second["a"] is not first["a"]
        async with asyncio.timeout(20):
            await asyncio.gather(*(card.plane.communicators.drop(1) for card in at.cards.values()))
        assert not first["a"].usable and second["a"].usable
        assert at.cards["a"].nccl.aborts == 0


async def test_closing_does_not_wait_for_a_peer_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "CLOSING", 0.05)
    async with fleet("ab") as at:
        made = await at.connect("ab")
        async with asyncio.timeout(20):
            await at.cards["a"].plane.communicators.drop(1)
        assert at.cards["a"].nccl.aborts == 1 and not made["a"].usable


async def test_a_stop_after_the_own_part_ends_the_communicator_too() -> None:
    async with fleet("ab") as at:
        placed = Placed(columns(), at)
        transports, runs = await placed.runs()
        await asyncio.gather(*(transports[name].run(runs[name]) for name in "ab"))
        transports["a"].stop(PeerLostError("c has failed", reason="died"))
        assert not transports["a"].usable
        with pytest.raises(PeerLostError, match="c has failed"):
            await transports["a"].run(runs["a"])
        fresh = await at.connect("ab", scope=2)
        for name in "ab":
            transports[name] = NcclTransport(at.cards[name].plane, fresh[name])
            await transports[name].open([TransportPeer(agent=other) for other in "ab" if other != name])
        await asyncio.gather(*(transports[name].run(runs[name]) for name in "ab"))
        same(placed.target, placed.job.expected())


async def test_a_transport_that_is_closed_refuses() -> None:
    async with fleet("ab") as at:
        placed = Placed(columns(), at)
        transports, runs = await placed.runs()
        await transports["a"].close()
        with pytest.raises(PeerLostError, match="closed"):
            await transports["a"].run(runs["a"])


async def test_a_run_that_fails_before_its_first_group_leaves_nobody_waiting_for_a_member() -> None:
    job = columns()
    async with fleet("ab") as at:
        placed = cut_small(at, job)
        at.cards["b"].plane.budget.limit = 1000
        comms = await at.connect("ab")
        transport = NcclTransport(at.cards["b"].plane, comms["b"])
        with pytest.raises(ConfigError, match="staging"):
            await transport.run(WireRun(program=placed.wire("b"), seq=1))
        assert not transport.usable and at.cards["b"].nccl.aborts == 1


async def test_what_does_not_fit_the_communicator_is_refused() -> None:
    async with fleet("abc") as at:
        placed = Placed(columns(), at)
        comms = await at.connect("abc")
        transport = NcclTransport(at.cards["a"].plane, comms["a"])
        with pytest.raises(ProtocolError, match="communicator of"):
            await transport.run(WireRun(program=placed.wire("a"), seq=1))
        with pytest.raises(ProtocolError, match="does not reach"):
            await transport.open([TransportPeer(agent="z")])
        with pytest.raises(ProtocolError, match="itself among them"):
            await at.cards["a"].plane.communicators.get(1, "bc", b"")


async def test_faults_in_reductions_give_back_what_they_took() -> None:
    job = partial(6, (64, 48), "ab", "ab", staging=256 << 10)
    async with fleet("ab") as at:
        placed = Placed(job, at, small(job, limit=8 << 10, chunk=8 << 10, straight=1024, part=8 << 10, most=2))
        transports, runs = await placed.runs()
        trip = Trip(3, lambda: transports["b"].stop(ValueError("no")))
        a = asyncio.ensure_future(transports["a"].run(runs["a"]))
        with pytest.raises(ValueError, match="no"):
            await transports["b"].run(replace(runs["b"], guards={("source", 1): trip}))
        transports["a"].stop(ValueError("told"))
        await both(a, asyncio.sleep(0))
        await again(placed, at)
