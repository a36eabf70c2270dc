"""Cancellation and deadlines of calls that wait or move: nothing writes into memory of a call that has returned."""

from __future__ import annotations

import asyncio
import random
import signal
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

import etha
from etha.errors import AgentLostError, TransferAbortedError, TransferError, TransferTimeoutError
from etha.memory.revocation import SLOTS

from .jobs import Job, tell, wait_for
from .sides import Sides
from .sites import Site

SIZE = 3 << 22  # 48 MiB of float32: some 6 ms, cut into 6 pieces
POISON = -7.0


class Link:
    """One tensor from a trainer to an inference worker, checked as a whole after every attempt."""

    def __init__(self, sides: Sides, handles: dict[Any, Any], source: torch.Tensor, target: torch.Tensor) -> None:
        self.sides, self.source, self.target = sides, source, target
        self.send, self.recv = handles["trainer", 0], handles["inference", 0]
        self.version, self.seq = 0, 0

    @classmethod
    async def open(cls, sides: Sides, **options: Any) -> Link:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        source, target = torch.zeros(SIZE), torch.zeros(SIZE)
        tensors = {"trainer": {"w": source}, "inference": {"w": target}}
        link = cls(sides, await sides.register("b", lambda side, rank: (tensors[side], options)), source, target)
        await link.good()
        return link

    async def good(self) -> float:
        """The next transfer is right; its seconds."""
        self.version += 1
        self.source.fill_(float(self.version))
        self.target.fill_(POISON)
        began = time.monotonic()
        sent, got = await asyncio.gather(self.send.transfer("send", version=self.version), self.recv.transfer("recv"))
        took = time.monotonic() - began
        assert (sent.seq, sent.version) == (got.seq, got.version)
        assert got.seq > self.seq and got.version == self.version
        self.seq = got.seq
        assert torch.all(self.target == self.version)
        return took

    def start(self, **deadlines: float) -> tuple[asyncio.Task[Any], asyncio.Task[Any]]:
        """The next version on its way: (sending, receiving)."""
        self.version += 1
        self.source.fill_(float(self.version))
        sending = asyncio.create_task(self.send.transfer("send", version=self.version, **deadlines))
        return sending, asyncio.create_task(self.recv.transfer("recv", **deadlines))

    def quiet(self, *handles: etha.BatchHandle) -> bool:
        """No lane thread of an agent is inside the tensors of these workers, whose calls have returned."""
        pages = [handle._registration.connection.page for handle in handles]
        return not any(page._inside(slot) for page in pages for slot in range(1, SLOTS))


def moments(aborted: list[object], enough: int = 3) -> Iterator[int]:
    """At least 8 tries, then more until ``enough`` were aborted, and a failure after 80."""
    for turn in range(80):
        if turn >= 8 and len(aborted) >= enough:
            return
        yield turn
    pytest.fail("80 moments, and too few of them while bytes moved")


async def ended(task: asyncio.Task[Any]) -> Any:
    """The result, the error, or the cancellation of a task, as a value."""
    [found] = await asyncio.gather(task, return_exceptions=True)
    return found


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
async def test_a_receiver_cancelled_at_any_moment_keeps_its_tensors_to_itself(site: Site, atomic: bool) -> None:
    dice = random.Random(7)
    aborted: list[object] = []
    async with Sides(site, f"p-{uuid.uuid4().hex[:8]}") as sides:
        link = await Link.open(sides, atomic=atomic)
        took = await link.good()
        for _ in moments(aborted, 3):
            before = float(link.target[0])
            sending, receiving = link.start()
            await asyncio.sleep(dice.uniform(0, 1.2 * took))
            receiving.cancel()
            got = await ended(receiving)
            assert link.quiet(link.recv), "a lane is inside the tensors of a call that has returned"
            if atomic:
                value = float(link.target[0])
                assert value in (before, link.version) and torch.all(link.target == value), "old or new, never both"
            link.target.fill_(POISON)
            await asyncio.wait({sending}, timeout=1)
            if not sending.done():  # the receiver was cancelled before GO: the sender goes on waiting
                sending.cancel()
            sent = await ended(sending)
            await sides.ask_all()
            assert torch.all(link.target == POISON), "somebody wrote into the tensors of a call that had returned"
            if isinstance(sent, TransferError):
                assert isinstance(sent, TransferAbortedError) and sent.outcome == "aborted" and not sent.torn
                assert "recv of inference rank 0 ended: it was cancelled" in sent.message
                assert isinstance(got, asyncio.CancelledError)
                aborted.append(sent)
            elif not isinstance(sent, asyncio.CancelledError):
                link.seq = sent.seq
            await link.good()


@pytest.mark.parametrize("atomic", [False, True])
async def test_a_sender_cancelled_at_any_moment_may_change_its_tensors(site: Site, atomic: bool) -> None:
    dice = random.Random(11)
    aborted: list[object] = []
    async with Sides(site, f"p-{uuid.uuid4().hex[:8]}") as sides:
        link = await Link.open(sides, atomic=atomic)
        took = await link.good()
        for _ in moments(aborted, 3):
            before = float(link.target[0])
            sending, receiving = link.start()
            await asyncio.sleep(dice.uniform(0, 1.2 * took))
            sending.cancel()
            await ended(sending)
            assert link.quiet(link.send)
            link.source.fill_(POISON)
            got = await asyncio.gather(asyncio.wait_for(receiving, 0.3), return_exceptions=True)
            match got[0]:
                case TransferAbortedError() as error:
                    assert (
                        error.outcome == "aborted" and "send of trainer rank 0 ended: it was cancelled" in error.message
                    )
                    assert not (atomic and error.torn)
                    if atomic:
                        assert torch.all(link.target == before), "an aborted transfer shows nothing of itself"
                    assert error.torn or torch.all(link.target == before)
                    aborted.append(error)
                case TimeoutError():  # cancelled before GO: the receiver goes on waiting
                    assert torch.all(link.target == before)
                case result:
                    assert result.version == link.version and torch.all(link.target == link.version)
            await link.good()


async def test_a_task_cancelled_twice_still_waits_until_nothing_writes(site: Site) -> None:
    dice = random.Random(13)
    aborted: list[object] = []
    async with Sides(site, f"p-{uuid.uuid4().hex[:8]}") as sides:
        link = await Link.open(sides)
        took = await link.good()
        for _ in moments(aborted, 5):
            sending, receiving = link.start()
            await asyncio.sleep(dice.uniform(0.2 * took, took))
            for _ in range(3):
                receiving.cancel()
                await asyncio.sleep(0)
            await ended(receiving)
            assert link.quiet(link.recv)
            link.target.fill_(POISON)
            if isinstance(sent := await ended(sending), TransferError):
                aborted.append(sent)
            await sides.ask_all()
            assert torch.all(link.target == POISON)
        await link.good()


@pytest.mark.parametrize("atomic", [False, True])
async def test_a_deadline_after_go_aborts_for_all(site: Site, atomic: bool) -> None:
    dice = random.Random(17)
    aborted: list[object] = []
    async with Sides(site, f"p-{uuid.uuid4().hex[:8]}") as sides:
        link = await Link.open(sides, atomic=atomic)
        took = await link.good()
        for turn in moments(aborted, 3):
            before = float(link.target[0])
            deadline = dice.uniform(0, 1.2 * took)
            link.version += 1
            link.source.fill_(float(link.version))
            late = {"timeout": deadline}
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
                aborted.append(error)
            else:
                other = await ended(second)
                assert not isinstance(other, BaseException), "one worker has a result, another an error"
                assert torch.all(link.target == link.version)
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
                assert torch.all(target == POISON)
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


async def test_ctrl_c_in_the_blocking_client_cancels_there_too(guests: Job, site: Site, pair: str) -> None:
    worker = guests.start(blocking, pair, 4, at=("inference", 0))
    # The second only looks what has come to the other side's agent.
    async with site.client("trainer", 0, timeout=60) as client, site.client("inference", 0) as there:
        await client.init_pair(pair, "trainer", "inference", device_mesh=(1,), placements=[Replicate()])
        source = torch.ones(SIZE)
        handle = await client.register_tensors("b", {"w": source}, pair_name=pair)
        took = (await handle.transfer("send")).seconds
        seq = 1
        for turn in range(4):
            await asyncio.to_thread(worker.told, f"waiting {turn}")
            sending = None
            if turn >= 2:  # while bytes move, or just after
                sending = asyncio.create_task(handle.transfer("send", version=turn))
                await asyncio.sleep(took * (turn - 1) / 3)
            else:  # the call waits at the agent
                while not any(b["pair"] == pair and b["state"] == "waiting" for b in (await there.status())["batches"]):
                    pass
            worker.kill(signal.SIGINT)
            await asyncio.to_thread(worker.told, "interrupted")
            if sending is not None:
                await asyncio.wait({sending}, timeout=0.5)
                sending.cancel()  # interrupted before GO, the sender would wait on
                sent = await ended(sending)
                if isinstance(sent, TransferError):
                    assert isinstance(sent, TransferAbortedError) and "it was cancelled" in sent.message
            await asyncio.gather(client.status(), there.status())
            worker.go("look")
        source.fill_(9.0)
        last = await handle.transfer("send", version=9)
        assert last.seq > seq
        await asyncio.to_thread(worker.told, "closing")
    assert await asyncio.to_thread(worker.result) == ["interrupted"] * 4 + [last.seq]


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
