"""Cancellation and deadlines of calls that wait or move: nothing writes into memory of a call that has returned."""

from __future__ import annotations

import asyncio
import random
import signal
import uuid
from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

import etha
from etha.errors import AgentLostError, PeerLostError, TransferAbortedError, TransferError, TransferTimeoutError
from tests.flow.clients.cancelling import POISON, SIZE, Aim, Link, Moments, ended
from tests.flow.jobs import Job, tell, wait_for
from tests.flow.sides import Sides
from tests.flow.sites import Site

#: In each of three ways, atomic and not: two hundred in all.
MOMENTS = 34


@pytest.mark.parametrize("who", ["send", "recv"])
async def test_a_call_cancelled_while_it_waits_consumes_nothing(site: Site, who: str) -> None:
    async with Sides(site, f"p-{uuid.uuid4().hex[:8]}") as sides:
        link = await Link.open(sides)
        for turn in range(4):
            task = asyncio.create_task((link.send if who == "send" else link.recv).transfer(who))
            for _ in range(turn):
                await sides.ask_all()
            await asyncio.sleep(0)
            task.cancel()
            assert isinstance(await ended(task), asyncio.CancelledError)
        seq = link.seq
        await link.good()
        assert link.seq == seq + 1
        batch = [b for b in (await sides.clients["trainer", 0].status())["batches"] if b["pair"] == sides.pair]
        assert batch[0]["waiting_for"] == [] and batch[0]["state"] == "registered"


@pytest.mark.parametrize("atomic", [False, True])
async def test_a_call_cancelled_at_any_moment_keeps_its_tensors_to_itself(site: Site, atomic: bool) -> None:
    async with Sides(site, f"p-{uuid.uuid4().hex[:8]}") as sides:
        tried = Moments(await Link.open(sides, SIZE // 3, atomic=atomic), atomic, seed=7)
        await tried.run(MOMENTS)
    print(f"\n{site.way}, atomic={atomic}: {tried}")


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("atomic", [False, True])
async def test_calls_cancelled_at_two_hundred_moments(site: Site, atomic: bool) -> None:
    async with Sides(site, f"p-{uuid.uuid4().hex[:8]}") as sides:
        tried = Moments(await Link.open(sides, atomic=atomic), atomic, seed=2026)
        await tried.run(200)
    print(f"\n{site.way}, atomic={atomic}: {tried}")


async def test_a_task_cancelled_twice_still_waits_until_nothing_writes(site: Site) -> None:
    async with Sides(site, f"p-{uuid.uuid4().hex[:8]}") as sides:
        link = await Link.open(sides)
        aim = Aim(random.Random(13), await link.good())
        for _ in aim.moments(5):
            sending, receiving = link.start()
            await asyncio.sleep(aim.delay())
            for _ in range(3):
                receiving.cancel()
                await asyncio.sleep(0)
            await ended(receiving)
            assert link.quiet(link.recv)
            link.target.fill_(POISON)
            if not await link.settled(sending):
                sending.cancel()
            aim.correct(await ended(sending))
            await sides.ask_all()
            assert torch.all(link.target == POISON)
        await link.good()


@pytest.mark.parametrize("atomic", [False, True])
async def test_a_deadline_after_go_aborts_for_all(site: Site, atomic: bool) -> None:
    async with Sides(site, f"p-{uuid.uuid4().hex[:8]}") as sides:
        link = await Link.open(sides, atomic=atomic)
        aim = Aim(random.Random(17), await link.good())
        for turn in aim.moments(3):
            before = float(link.target[0])
            link.version += 1
            link.source.fill_(float(link.version))
            late = {"timeout": aim.delay()}
            sending = asyncio.create_task(
                link.send.transfer("send", version=link.version, **(late if turn % 2 else {}))
            )
            receiving = asyncio.create_task(link.recv.transfer("recv", **({} if turn % 2 else late)))
            first, second = (sending, receiving) if turn % 2 else (receiving, sending)
            error = await ended(first)
            assert link.quiet(link.send if turn % 2 else link.recv) or not isinstance(error, TransferError)
            if isinstance(error, TransferError) and error.outcome == "withdrawn":
                assert isinstance(error, TransferTimeoutError)
                second.cancel()
                await ended(second)
            elif isinstance(error, TransferError):
                other = await ended(second)
                assert isinstance(error, TransferTimeoutError) and error.outcome == "aborted"
                assert isinstance(other, TransferAbortedError) and other.outcome == "aborted"
                assert f"seq {link.seq + 1} aborted" in error.message and "its deadline passed" in other.message
                assert not sending.exception().torn  # type: ignore[union-attr]
                torn = receiving.exception().torn  # type: ignore[union-attr]
                assert not (atomic and torn)
                assert torn or torch.all(link.target == before)
            else:
                other = await ended(second)
                assert not isinstance(other, BaseException), "one worker has a result, another an error"
                assert torch.all(link.target == link.version)
            aim.correct(error)
            await link.good()


async def test_a_client_closed_while_its_transfer_moves(site: Site) -> None:
    for delay in (0.0, 0.002, 0.005):
        async with site.client("inference", 0) as there, Sides(site, f"p-{uuid.uuid4().hex[:8]}") as sides:
            link = await Link.open(sides)
            sending, receiving = link.start()
            await asyncio.sleep(delay)
            await sides.clients["inference", 0].close()
            got = await ended(receiving)
            assert link.quiet(link.recv)
            link.target.fill_(POISON)
            sent = await ended(sending)
            await asyncio.gather(there.status(), sides.clients["trainer", 0].status())
            assert torch.all(link.target == POISON)
            if isinstance(got, BaseException):
                assert isinstance(got, AgentLostError | TransferError), got
                assert isinstance(sent, TransferError) or sent.version == link.version


def blocking(pair: str, interrupts: int) -> list[Any]:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without it
    target = torch.zeros(SIZE)
    seen: list[Any] = []
    with etha.TensorBusClient() as client:
        client.init_pair(pair, "inference", "trainer", device_mesh=(1,), placements=[Replicate()])
        handle = client.register_tensors("b", {"w": target}, pair_name=pair)
        handle.transfer("recv")
        for turn in range(interrupts):
            try:
                tell(f"waiting {turn}")
                while True:  # a transfer may be over before the interrupt comes: then it meets the next call
                    handle.transfer("recv")
            except KeyboardInterrupt:
                target.fill_(POISON)
                tell("interrupted")
                wait_for("look")
                assert torch.all(target == POISON), "somebody wrote into the tensors of a call that had returned"
                tell("looked")
                result = handle.transfer("recv")
                assert result.version is not None and torch.all(target == float(result.version))
                seen.append("interrupted")
        result = handle.transfer("recv")
        assert torch.all(target == float(result.version or 0))
        seen.append(result.seq)
        future = handle.transfer("recv", blocking=False)
        assert not future.done()
        with pytest.raises(TimeoutError):
            future.result(0.05)
        tell("closing")
    with pytest.raises((AgentLostError, TransferError)):
        future.result(5)
    return seen


async def interrupt(guests: Job, site: Site, pair: str, turns: int) -> Counter[str]:
    """Ctrl-C in a blocking receiver, twice while it waits and then at random moments; how the sender's calls ended."""
    worker = guests.start(blocking, pair, turns, at=("inference", 0))
    dice, ends = random.Random(23), Counter[str]()
    # The second only looks what has come to the other side's agent.
    async with site.client("trainer", 0, timeout=60) as client, site.client("inference", 0) as there:
        await client.init_pair(pair, "trainer", "inference", device_mesh=(1,), placements=[Replicate()])
        source = torch.ones(SIZE)
        handle = await client.register_tensors("b", {"w": source}, pair_name=pair)
        first = last = await handle.transfer("send")
        for turn in range(turns):
            await asyncio.to_thread(worker.expect, f"waiting {turn}")
            while not any(b["pair"] == pair and b["state"] == "waiting" for b in (await there.status())["batches"]):
                pass
            sending = None
            if turn >= 2:  # before GO, while bytes move, or just after
                source.fill_(float(turn))
                sending = asyncio.create_task(handle.transfer("send", version=turn))
                await asyncio.sleep(dice.uniform(0, 1.3 * last.seconds))
            worker.kill(signal.SIGINT)
            await asyncio.to_thread(worker.expect, "interrupted")
            if sending is not None:
                await asyncio.wait({sending}, timeout=0.5)
                sending.cancel()  # interrupted before GO, the sender would wait on
                sent = await ended(sending)
                if isinstance(sent, TransferError):
                    assert isinstance(sent, TransferAbortedError) and "it was cancelled" in sent.message
                ends[type(sent).__name__] += 1
            await asyncio.gather(client.status(), there.status())
            worker.go("look")
            await asyncio.to_thread(worker.expect, "looked")
            source.fill_(float(1000 + turn))
            last = await handle.transfer("send", version=1000 + turn)
        source.fill_(9.0)
        last = await handle.transfer("send", version=9)
        assert last.seq > first.seq
        await asyncio.to_thread(worker.expect, "closing")
    assert await asyncio.to_thread(worker.result) == ["interrupted"] * turns + [last.seq]
    print(f"\n{site.way}: Ctrl-C {turns} times, the other call ended with {dict(ends)}")
    return ends


async def test_ctrl_c_in_the_blocking_client_cancels_there_too(guests: Job, site: Site, pair: str) -> None:
    await interrupt(guests, site, pair, 8)


@pytest.mark.proof
@pytest.mark.timeout(600)
async def test_ctrl_c_at_sixty_moments(guests: Job, site: Site, pair: str) -> None:
    ends = await interrupt(guests, site, pair, 60)
    assert ends["TransferAbortedError"] and ends["TransferResult"], ends


async def test_on_commit_runs_before_the_tensors_change_and_cannot_keep_them_old(site: Site) -> None:
    async with Sides(site, f"p-{uuid.uuid4().hex[:8]}") as sides:
        link = await Link.open(sides, atomic=True)
        seen: list[float] = []

        async def pause() -> None:
            seen.append(float(link.target[0]))
            await asyncio.sleep(0)
            seen.append(float(link.target[-1]))

        link.source.fill_(5.0)
        old = float(link.target[0])
        await asyncio.gather(link.send.transfer("send"), link.recv.transfer("recv", on_commit=pause))
        assert seen == [old, old] and torch.all(link.target == 5)

        def refuse() -> None:
            raise RuntimeError("the engine does not stop")

        link.source.fill_(6.0)
        sending = asyncio.create_task(link.send.transfer("send", version=6))
        with pytest.raises(RuntimeError, match="the engine does not stop"):
            await link.recv.transfer("recv", on_commit=refuse)
        assert (await sending).version == 6
        assert torch.all(link.target == 6), "the others hold the new version, so must this worker"
        assert link.recv.version == 6


async def test_a_cancel_between_commit_and_the_end_of_on_commit_still_applies(site: Site) -> None:
    async with Sides(site, f"p-{uuid.uuid4().hex[:8]}") as sides:
        link = await Link.open(sides, atomic=True)
        paused, go = asyncio.Event(), asyncio.Event()

        async def pause() -> None:
            paused.set()
            await go.wait()

        link.source.fill_(5.0)
        sending = asyncio.create_task(link.send.transfer("send"))
        receiving = asyncio.create_task(link.recv.transfer("recv", on_commit=pause))
        await paused.wait()
        assert (await sending).seq > 1, "the sender does not wait for the receiver's engine"
        for _ in range(2):
            receiving.cancel()
            await asyncio.sleep(0)
        assert not receiving.done()
        go.set()
        assert isinstance(await ended(receiving), asyncio.CancelledError)
        assert torch.all(link.target == 5)
        await link.good()


@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_a_registration_given_up_at_any_moment_can_be_made_again(site: Site, how: str) -> None:
    """Nobody goes on to hold a batch on which the other side does not count any more."""
    async with Sides(site, f"p-{uuid.uuid4().hex[:8]}") as sides:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        tensors = {member: {"w": torch.zeros(100)} for member in sides.members}

        def registering(member: tuple[str, int], **options: Any) -> asyncio.Task[Any]:
            client = sides.clients[member]
            return asyncio.create_task(client.register_tensors("b", tensors[member], pair_name=sides.pair, **options))

        async def move(member: tuple[str, int], task: asyncio.Task[Any]) -> Any:
            while True:
                try:
                    handle = await task
                    await handle.transfer("send" if member[0] == "trainer" else "recv")
                    return handle
                except PeerLostError:
                    task = registering(member)

        stays, leaves = sides.members
        for turn in range(8):
            first = registering(stays)
            if how == "late":
                await ended(registering(leaves, timeout=0.0005 * 2**turn))
            else:
                task = registering(leaves)
                for _ in range(2**turn):
                    await asyncio.sleep(0)
                task.cancel()
                await ended(task)
            tensors[stays]["w"].fill_(turn + 1)
            handles = await asyncio.gather(
                move(stays, registering(stays) if first.done() and not first.exception() else first),
                move(leaves, registering(leaves)),
            )
            assert bool((tensors[leaves]["w"] == turn + 1).all())
            await asyncio.gather(*(handle.close() for handle in handles))
