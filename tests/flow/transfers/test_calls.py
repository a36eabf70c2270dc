"""One transfer call seen from the worker: futures, offers, progress, atomic targets, both clients, results."""

from __future__ import annotations

import asyncio
import threading
from random import Random
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import etha
from tests.flow.sites import Site
from tests.flow.team import Seat, Team
from tests.flow.truth import cut, stale, whole
from tests.flow.ways import Way

BIG = (1024, 2048)

pytestmark = pytest.mark.ways(*Way)


def register(me: Seat, batch: str, tensor: torch.Tensor, **options: Any) -> Any:
    return me.client.register_tensors(
        batch, {"w": tensor}, pair_name="weights", placements={"w": [Shard(0 if me.sends else 1)]}, **options
    )


def tensor_of(me: Seat, version: int, shape: tuple[int, ...] = (6, 4)) -> tuple[torch.Tensor, torch.Tensor]:
    """(what this worker registers, what it holds after a transfer)."""
    truth = cut(whole(shape, version), 0 if me.sends else 1, 2, me.rank)
    return (truth.clone() if me.sends else stale(truth)), truth


# ---- futures and offers -------------------------------------------------------------------------


def in_the_background(me: Seat) -> None:
    tensor, truth = tensor_of(me, 1)
    with register(me, "future", tensor) as handle:
        future = handle.transfer("send" if me.sends else "recv", blocking=False)
        assert isinstance(future, etha.TransferFuture)
        called = threading.Event()
        future.add_done_callback(lambda _: called.set())
        result = future.result(10)
        assert future.done() and called.wait(10)
        assert result.seq == 1 and torch.equal(tensor, truth)
        assert future.result() == result


def test_a_transfer_in_the_background_is_a_future(team: Team) -> None:
    team.run(in_the_background)


def early_future(me: Seat) -> None:
    """The receiver's future is not done, times out without being consumed, then gets its result."""
    tensor, truth = tensor_of(me, 2)
    with register(me, "early", tensor) as handle:
        if not me.sends:
            future = handle.transfer("recv", blocking=False)
            assert not future.done()
            with pytest.raises(TimeoutError):
                future.result(0.05)
            assert not future.done()
        # Only now does the sender send: both sides meet in another batch.
        me.move("early-meeting", {"t": torch.zeros(2)}, placements={"t": [Replicate()]})
        if me.sends:
            handle.transfer("send", version="late")
        else:
            assert future.result(10).version == "late"
            assert torch.equal(tensor, truth)


def test_a_future_outlives_the_waiting_for_it(team: Team) -> None:
    team.run(early_future)


def offered(me: Seat) -> Any:
    tensor, truth = tensor_of(me, 3)
    with register(me, "offer", tensor) as handle:
        found = None
        if me.sends:
            future = handle.transfer("send", version="v7", blocking=False)
            meet(me, "begun")
            future.result(10)
        else:
            first = handle.wait_offer()
            second = me.client.wait_offer("offer")
            assert first == second, "waiting for an offer takes nothing"
            meet(me, "begun")
            assert handle.transfer("recv").version == first.version
            assert torch.equal(tensor, truth)
            found = first.version, first.bytes
        with pytest.raises(etha.TransferTimeoutError) as caught:
            handle.wait_offer(timeout=0.05)
        assert caught.value.outcome == "withdrawn"
        meet(me, "waited")  # before that nobody leaves, which would end the others' waiting with another error
        return found


def meet(me: Seat, name: str) -> None:
    me.move(f"offer-{name}", {"t": torch.zeros(2)}, placements={"t": [Replicate()]})


def test_wait_offer_returns_when_the_other_side_waits_to_send(team: Team) -> None:
    assert team.run(offered)["inference"] == [("v7", 96)] * 2


def too_long(me: Seat) -> None:
    """A recv that waits beyond its deadline consumes nothing: the next one gets the first version."""
    tensor, truth = tensor_of(me, 4)
    with register(me, "too_long", tensor) as handle:
        if not me.sends:
            with pytest.raises(etha.TransferTimeoutError) as caught:
                handle.transfer("recv", timeout=0.1)
            assert caught.value.outcome == "withdrawn" and not caught.value.torn
            assert "trainer" in str(caught.value), "it says who was not ready"
        me.move("too_long-meeting", {"t": torch.zeros(2)}, placements={"t": [Replicate()]})
        result = handle.transfer("send", version=1) if me.sends else handle.transfer("recv")
        assert (result.seq, result.version) == (1, 1)
        assert torch.equal(tensor, truth)


def test_a_recv_beyond_its_deadline_consumes_nothing(team: Team) -> None:
    team.run(too_long)


def closed_while_waiting(me: Seat) -> None:
    tensor, _ = tensor_of(me, 1)
    handle = register(me, "closed", tensor)
    if me.rank == 0:
        future = handle.transfer("send" if me.sends else "recv", blocking=False)
        handle.close()
        with pytest.raises(etha.TransferError) as caught:
            future.result(10)
        assert caught.value.outcome == "withdrawn"
    handle.close()


def test_closing_a_handle_ends_what_waits_on_it(team: Team) -> None:
    team.run(closed_while_waiting)


def racing(me: Seat) -> Any:
    """Receivers with deadlines of a few milliseconds, senders without: GO races with every withdrawal."""
    rounds, random = 25, Random(me.rank)
    tensor, _ = tensor_of(me, 0)
    done: list[tuple[int, Any]] = []
    with register(me, "racing", tensor) as handle:
        while len(done) < rounds:
            version = len(done)
            truth = cut(whole((6, 4), version), 0 if me.sends else 1, 2, me.rank)
            if me.sends:
                tensor.copy_(truth)
            try:
                if me.sends:
                    result = handle.transfer("send", version=version)
                else:
                    result = handle.transfer("recv", timeout=random.choice([0.0005, 0.002, 0.005, 1]))
                    assert torch.equal(tensor, truth)
            except etha.TransferError as error:
                assert error.outcome in ("withdrawn", "aborted"), error
                assert not me.sends or error.outcome == "aborted", error
            else:
                done.append((result.seq, result.version))
    assert [version for _, version in done] == list(range(rounds)), "each version once, in order"
    return done


def test_deadlines_that_race_with_go_lose_nothing_and_double_nothing(team: Team) -> None:
    returned = team.run(racing)
    (first, *others) = [*returned["trainer"], *returned["inference"]]
    assert all(other == first for other in others), "every rank has seen the same numbers"
    assert [seq for seq, _ in first] == sorted({seq for seq, _ in first})


# ---- progress, results --------------------------------------------------------------------------


def progressing(me: Seat) -> Any:
    tensor, truth = tensor_of(me, 1, BIG)
    reported: list[tuple[int, int]] = []
    with register(me, "progress", tensor) as handle:
        result = handle.transfer("send" if me.sends else "recv", progress=lambda *news: reported.append(news))
    assert torch.equal(tensor, truth)
    assert reported and reported[-1] == (result.bytes, result.bytes)
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    assert {total for _, total in reported} == {result.bytes}
    assert result.seconds > 0 and result.gb_per_s == result.bytes / result.seconds / 1e9
    assert result.peak_staging >= 0
    return result.bytes, result.peers, result.direction


def test_progress_ends_with_all_bytes_and_results_name_the_peers(team: Team) -> None:
    returned = team.run(progressing)
    half = 4 * 1024 * 2048 // 2
    assert returned["trainer"] == [(half, (("inference", 0), ("inference", 1)), "send")] * 2
    assert returned["inference"] == [(half, (("trainer", 0), ("trainer", 1)), "recv")] * 2


def misled(me: Seat) -> None:
    """What callbacks raise is the worker's own affair."""
    tensor, truth = tensor_of(me, 5, BIG)

    def broken(done: int, total: int) -> None:
        raise ValueError("a user's bug")

    with register(me, "misled", tensor) as handle:
        result = handle.transfer("send" if me.sends else "recv", progress=broken)
    assert result.seq == 1 and torch.equal(tensor, truth)


def test_a_progress_callback_that_raises_harms_nobody(team: Team) -> None:
    team.run(misled)


# ---- atomic -------------------------------------------------------------------------------------


def old_until_commit(me: Seat) -> list[str]:
    seen: list[str] = []
    tensor, truth = tensor_of(me, 1)
    before = tensor.clone()
    # One receiving rank says atomic, and all are.
    with register(me, "atomic", tensor, atomic=not me.sends and me.rank == 0) as handle:
        assert handle.atomic
        if me.sends:
            handle.transfer("send", version=1)
            tensor.add_(1)
            handle.transfer("send", version=2)
            return seen

        def pause() -> None:
            assert torch.equal(tensor, before), "the old values stand until on_commit has returned"
            seen.append("paused")

        assert handle.transfer("recv", on_commit=pause).version == 1
        assert torch.equal(tensor, truth)
        before.copy_(truth)

        async def pause_async() -> None:
            await asyncio.sleep(0)
            pause()

        assert handle.transfer("recv", on_commit=pause_async).version == 2
        assert torch.equal(tensor, truth + 1)
    return seen


def test_an_atomic_target_holds_the_old_version_until_on_commit_has_run(team: Team) -> None:
    assert team.run(old_until_commit)["inference"] == [["paused", "paused"]] * 2


def unpausable(me: Seat) -> Any:
    """One worker's on_commit raises: the transfer has happened all the same, for it as for the others."""
    tensor, truth = tensor_of(me, 1)

    def broken() -> None:
        raise RuntimeError("the engine does not pause")

    with register(me, "unpausable", tensor, atomic=True) as handle:
        if me.sends:
            handle.transfer("send", version=1)
        elif me.rank == 0:
            with pytest.raises(RuntimeError, match="does not pause"):
                handle.transfer("recv", on_commit=broken)
        else:
            handle.transfer("recv")
        assert torch.equal(tensor, truth) and handle.version == 1
        result = handle.transfer("send", version=2) if me.sends else handle.transfer("recv")
        assert torch.equal(tensor, truth)
        return result.seq


def test_an_on_commit_that_raises_does_not_undo_what_was_committed(team: Team) -> None:
    assert team.run(unpausable) == {"trainer": [2, 2], "inference": [2, 2]}


def only_atomic(me: Seat) -> None:
    tensor, _ = tensor_of(me, 1)
    with register(me, "not_atomic", tensor) as handle:
        with pytest.raises(etha.ConfigError, match="atomic"):
            handle.transfer("recv", on_commit=lambda: None)


def test_on_commit_needs_an_atomic_batch(team: Team) -> None:
    team.run(only_atomic)


# ---- both clients -------------------------------------------------------------------------------


def mixed(me: Seat) -> Any:
    """The trainer blocks, the inference side awaits, with a client of its own beside the blocking one."""
    if me.sends:
        me.client.init_pair("mixed", me.side, me.remote, me.world, (2,), rank=me.rank)
        tensor, _ = tensor_of(me, 1)
        with me.client.register_tensors(
            "mixed", {"w": tensor}, pair_name="mixed", placements={"w": [Shard(0)]}
        ) as handle:
            handle.transfer("send", version=1)
            tensor.mul_(3)
            return handle.transfer("recv").version
    return asyncio.run(awaiting(me))


async def awaiting(me: Seat) -> Any:
    tensor, truth = tensor_of(me, 1)
    async with etha.AsyncTensorBusClient(timeout=10) as client:
        pair = await client.init_pair("mixed", me.side, me.remote, me.world, (2,), [Shard(1)], rank=me.rank)
        assert (pair.local_world_size, pair.remote_world_size, pair.lost.is_set()) == (2, 2, False)
        async with await client.register_tensors("mixed", {"w": tensor}, pair_name="mixed") as handle:
            offer = await handle.wait_offer()
            result = await handle.transfer("recv")
            assert offer.version == result.version == 1 and torch.equal(tensor, truth)
            return (await handle.transfer("send", version="back")).version


def test_the_async_and_the_blocking_client_talk_to_each_other(team: Team) -> None:
    assert team.run(mixed) == {"trainer": ["back"] * 2, "inference": ["back"] * 2}


async def test_three_clients_in_one_process_are_two_trainers_and_one_inference_rank(site: Site, pair: str) -> None:
    """Two blocking clients, each on a thread of its own, and one on this loop."""
    full = whole((7, 6), 1)

    def trainer(rank: int, client: etha.TensorBusClient) -> Any:
        with client:
            client.init_pair(pair, "trainer", "inference", 2, (2,), [Shard(0)], rank=rank)
            with client.register_tensors("three", {"w": cut(full, 0, 2, rank)}, pair_name=pair) as handle:
                return handle.transfer("send", version=rank or None)

    async with site.client("inference", 0, timeout=15) as client:
        trainers = [site.blocking("trainer", rank, timeout=15) for rank in range(2)]
        sending = asyncio.gather(*(asyncio.to_thread(trainer, rank, one) for rank, one in enumerate(trainers)))
        formed = await client.init_pair(pair, "inference", "trainer", 1, (1,), [Replicate()], rank=0)
        assert formed.epoch == 1 and formed.remote_world_size == 2
        target = etha.empty_like(full)
        async with await client.register_tensors("three", {"w": target}, pair_name=pair) as handle:
            result = await handle.transfer("recv")
            assert result.version == 1 and torch.equal(target, full)
            assert result.peers == (("trainer", 0), ("trainer", 1))
            await sending


async def test_the_blocking_client_refuses_to_block_a_running_loop(served: Site) -> None:
    with etha.TensorBusClient() as client:
        with pytest.raises(etha.ConfigError, match="AsyncTensorBusClient"):
            client.init_pair("loop", "trainer", "inference", 1)
