"""What goes wrong between agents: strangers, silence, different plans, aborts, lost peers, calls that have returned."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import time
from collections.abc import Awaitable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

from etha.errors import PeerLostError, ProtocolError
from etha.memory.mapping import WorkerMemory
from etha.memory.process import start_time
from etha.memory.reach import RevokedError, WorkerGoneError
from etha.memory.revocation import LentPage, RevocationPage
from etha.transport.base import Transport, TransportPeer, WireRun
from etha.transport.tcp.listener import DataListener
from etha.transport.tcp.streams import ReceiveStream
from etha.transport.tcp.transport import TcpTransport
from tests.unit.transport.agents import TOKEN, Agent, Gate, Job, agents, same, transfer
from tests.unit.transport.tcp.test_transport import partial, rows


async def opened(at: dict[str, Agent], job: Job, seq: int = 1) -> dict[str, WireRun]:
    """Streams are open on both sides; the runs of all agents, not begun."""
    runs = {}
    for name in job.agents:
        runs[name] = WireRun(program=job.wire(name), seq=seq)
        transport: Transport[WireRun] = at[name].transport  # the Protocol, as mypy sees it
        peers = runs[name].program.sends
        await transport.open([TransportPeer(agent=peer, address=at[peer].address_for(name)) for peer in peers])
    return runs


async def fails(run: Awaitable[int]) -> BaseException:
    """The error of a run that must not hang."""
    try:
        async with asyncio.timeout(60):
            await run
    except BaseException as error:
        return error
    raise AssertionError("it did not fail")


def big(**options: object) -> Job:
    """More than the kernel buffers for a stream (4 MiB and more), so that who sends cannot be done before who reads."""
    return rows(1, 1, (4096, 4096), Shard(0), "a", "b", **options)


# ---- the data port ---------------------------------------------------------------------------------


async def read_all(port: int, words: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(words)
    try:
        async with asyncio.timeout(60):
            return await reader.read()
    except ConnectionResetError:
        return b""  # closed with our words unread
    finally:
        writer.close()


async def test_a_wrong_token_is_closed_with_one_line_and_nothing_is_parsed(caplog: pytest.LogCaptureFixture) -> None:
    async with agents("ab") as at:
        entered: list[object] = []
        at["a"].plane._entered = lambda *args: entered.append(args)  # type: ignore[method-assign]
        assert await read_all(at["a"].port, b"x" * TOKEN + b"garbage" * 1000) == b""
        assert not entered
    # asyncio's own warnings of slow steps have the name of this test in them
    ours = [r for r in caplog.records if r.name.startswith("etha")]
    assert [r.levelname for r in ours if "token" in r.message] == ["WARNING"]


async def test_a_token_opens_one_connection() -> None:
    async with agents("ab") as at:
        (token,) = await at["a"].address_for("b").tokens(1)
        reader, writer = await asyncio.open_connection("127.0.0.1", at["a"].port)
        writer.write(token + bytes(8))
        assert await reader.readexactly(1) == b"\x01"
        assert await read_all(at["a"].port, token + bytes(8)) == b""
        writer.close()


async def test_a_connection_that_says_nothing_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    port = listener.getsockname()[1]
    door = DataListener(listener, token_bytes=TOKEN, admit=lambda token: None, entered=lambda *_: None, patience=0.05)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(door.run())
        assert await read_all(port, b"") == b""
        assert await read_all(port, b"half a token") == b""
        running.cancel()
    assert len([r for r in caplog.records if "no token in" in r.message]) == 2


async def test_an_opener_that_is_not_let_in_hears_of_it() -> None:
    async with agents("ab") as at:
        address = at["b"].address_for("a")

        async def wrong(n: int) -> list[bytes]:
            return [b"y" * TOKEN] * n

        object.__setattr__(address, "tokens", wrong)
        with pytest.raises(PeerLostError, match="agent b"):
            await at["a"].transport.open([TransportPeer(agent="b", address=address)])


async def test_garbage_after_a_good_token_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    job = rows(2, 2, (64, 64), Shard(1), "ab", "ab")
    async with agents("ab") as at:
        (token,) = await at["a"].address_for("b").tokens(1)
        assert (await read_all(at["a"].port, token + bytes(8) + b"z" * 4096)) in (b"", b"\x01")
        await transfer(job, at)
    same(job.target, job.expected())
    assert len([r for r in caplog.records if "data stream from agent b was closed" in r.message]) == 1


# ---- both ends must agree ---------------------------------------------------------------------


@pytest.mark.parametrize("change", ["bucket_size", "streams", "shape"])
async def test_ends_that_differ_notice_before_anything_is_written(change: str) -> None:
    job = big()
    other = rows(1, 1, (4096, 4098), Shard(0), "a", "b") if change == "shape" else big()
    if change != "shape":
        setattr(other, change, 1 << 20 if change == "bucket_size" else 2)
    async with agents("ab") as at:
        runs = await opened(at, job)
        runs["b"] = WireRun(program=other.wire("b"), seq=1)
        errors = await asyncio.gather(*(fails(at[n].transport.run(runs[n])) for n in "ab"))
    assert isinstance(errors[1], ProtocolError) and "same plan" in str(errors[1])
    assert isinstance(errors[0], PeerLostError)
    assert bool((other.target[0]["t"] == 0).all())


# ---- ends before the end ----------------------------------------------------------------------


async def test_abort_ends_both_with_their_cause_and_streams_are_opened_anew() -> None:
    job = big()
    async with agents("ab") as at:
        runs = await opened(at, job)
        a = asyncio.ensure_future(fails(at["a"].transport.run(runs["a"])))  # b never runs: a fills the sockets
        await asyncio.sleep(0.05)
        assert not a.done()
        began = time.monotonic()
        at["a"].transport.stop(ValueError("enough"))
        assert time.monotonic() - began < 0.05
        error = await a
        assert isinstance(error, ValueError) and time.monotonic() - began < 0.5
        for seq in (2, 3):
            await transfer(job, at, seq)
            same(job.target, job.expected())


@pytest.mark.parametrize("to", [0, 1], ids=["straight", "packed"])
async def test_an_abort_in_the_middle_ends_both_ends_at_once(to: int) -> None:
    job = rows(2, 2, (16384, 1024), Shard(to), "aa", "bb")  # more than the kernel buffers
    async with agents("ab") as at:
        runs = await opened(at, job)
        gate = Gate(lambda: at["b"].transport.stop(ValueError("enough")))
        runs["b"].guards = {("target", r): gate for r in range(2)}  # type: ignore[assignment, misc]
        began = time.monotonic()
        errors = await asyncio.gather(*(fails(at[n].transport.run(runs[n])) for n in "ab"))
        assert time.monotonic() - began < 1
        assert isinstance(errors[0], PeerLostError) and isinstance(errors[1], ValueError)
        await transfer(job, at, 2)
    same(job.target, job.expected())


async def test_cancelling_waits_until_no_thread_touches_memory() -> None:
    job = big()
    async with agents("ab") as at:
        runs = await opened(at, job)
        task = asyncio.ensure_future(at["b"].transport.run(runs["b"]))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        at["a"].transport.stop(ValueError("told by the link"))
        await transfer(job, at, 2)
    same(job.target, job.expected())


async def test_abort_of_the_transport_refuses_more() -> None:
    job = big()
    async with agents("ab") as at:
        runs = await opened(at, job)
        at["b"].transport.abort(ValueError("over"))
        assert isinstance(await fails(at["b"].transport.run(runs["b"])), ValueError)


async def test_a_peer_that_is_dropped_ends_the_run() -> None:
    job = partial(4, (128, 128), "ab", "ab")
    async with agents("ab") as at:
        runs = await opened(at, job)
        a = asyncio.ensure_future(fails(at["a"].transport.run(runs["a"])))
        await asyncio.sleep(0.02)
        at["a"].plane.drop("b")
        error = await a
    assert isinstance(error, PeerLostError) and error.reason == "died"


async def test_close_ends_what_runs_and_every_thread() -> None:
    job = big()
    async with agents("ab") as at:
        runs = await opened(at, job)
        a = asyncio.ensure_future(fails(at["a"].transport.run(runs["a"])))
        await asyncio.sleep(0.02)
        await at["a"].plane.close()
        assert isinstance(await a, PeerLostError)
        assert isinstance(await fails(at["a"].transport.run(runs["a"])), PeerLostError)


async def test_a_late_abort_makes_the_next_run_open_streams_anew() -> None:
    """a has sent all and is done when the transfer is aborted: what lies in the sockets must not meet the next."""
    job = rows(1, 1, (64, 64), Shard(0), "a", "b")
    async with agents("ab") as at:
        runs = await opened(at, job)
        await at["a"].transport.run(runs["a"])
        at["a"].transport.stop(ValueError("aborted"))
        await transfer(job, at, 2)
    same(job.target, job.expected())


# ---- several transfers at once ----------------------------------------------------------------


class Batch:
    """A job over agents a and b that has a transport of its own on each, as a batch of theirs."""

    def __init__(self, at: dict[str, Agent], number: int, job: Job) -> None:
        self.at, self.job = at, job
        self.key = bytes([number]) * 32
        self.transports = {name: TcpTransport(at[name].plane) for name in "ab"}
        self.programs = {name: job.wire(name) for name in "ab"}

    async def open(self) -> Batch:
        for name, program in self.programs.items():
            peers = [TransportPeer(agent=peer, address=self.at[peer].address_for(name)) for peer in program.sends]
            await self.transports[name].open(peers)
        return self

    async def run(self, name: str, seq: int = 1) -> int:
        return await self.transports[name].run(WireRun(program=self.programs[name], key=self.key, seq=seq))

    def settled(self) -> None:
        for transport in self.transports.values():
            transport.settled()

    def stop(self) -> None:
        for transport in self.transports.values():
            transport.stop(ValueError("aborted"))


async def test_a_transfer_that_stands_still_holds_up_no_other_between_the_same_agents() -> None:
    async with agents("ab") as at:
        stuck = await Batch(at, 1, big()).open()
        standing = asyncio.ensure_future(stuck.run("a"))  # b does not begin: its streams fill up
        await asyncio.sleep(0.05)
        jobs = [big(private=(True, True)), rows(1, 1, (64, 64), Shard(0), "a", "b"), partial(4, (128, 128), "ab", "ab")]
        for number, job in enumerate(jobs, 2):
            batch = await Batch(at, number, job).open()
            await asyncio.gather(batch.run("a"), batch.run("b"))
            batch.settled()
            same(job.target, job.expected())
        assert not standing.done()
        assert await stuck.run("b") == await standing, "it goes on as soon as the other end does"
        same(stuck.job.target, stuck.job.expected())


async def test_an_abort_closes_no_streams_but_its_own() -> None:
    async with agents("ab") as at:
        stays, goes = await Batch(at, 1, big()).open(), await Batch(at, 2, big()).open()
        first = [asyncio.ensure_future(batch.run("a")) for batch in (stays, goes)]
        await asyncio.sleep(0.05)
        goes.stop()
        assert isinstance(await fails(first[1]), ValueError)
        assert await stays.run("b") == await first[0]
        same(stays.job.target, stays.job.expected())
        stays.settled()
        goes.settled()
        await asyncio.gather(goes.run("a", 2), goes.run("b", 2))
        same(goes.job.target, goes.job.expected())


async def test_streams_serve_one_batch_after_the_other() -> None:
    async with agents("ab") as at:
        for number in range(1, 6):
            batch = await Batch(at, number, rows(1, 1, (64, 64), Shard(0), "a", "b")).open()
            await asyncio.gather(batch.run("a"), batch.run("b"))
            batch.settled()
        assert [one.slot for one in at["a"].plane._sets["b"]] == [0]
        assert len(at["b"].plane._inlets["a"]) == at["a"].plane.streams


async def test_many_batches_at_once_of_which_some_are_aborted_at_any_moment() -> None:
    """Reductions and private memory too: the others are exact, and in the end nothing of the staging is in use."""
    chance = random.Random(7)

    async def one(at: dict[str, Agent], number: int) -> None:
        batch = await Batch(at, number, fresh(number)).open()
        for seq in range(1, 7):
            ends = [asyncio.ensure_future(batch.run(name, seq)) for name in chance.sample("ab", 2)]
            stop: asyncio.TimerHandle | None = None
            if aborted := chance.random() < 0.4:
                stop = asyncio.get_running_loop().call_later(chance.random() * 0.02, batch.stop)
            found = await asyncio.gather(*ends, return_exceptions=True)
            if stop is not None:
                stop.cancel()  # it must not meet the next one
            errors = [error for error in found if isinstance(error, BaseException)]
            if errors:
                assert aborted and all(isinstance(error, ValueError | PeerLostError) for error in errors), errors
                batch.stop()
            else:
                same(batch.job.target, batch.job.expected())
            batch.stop() if aborted else batch.settled()

    def fresh(number: int) -> Job:
        match number % 3:
            case 0:
                return partial(4, (128, 128), "ab", "ab")
            case 1:
                return rows(1, 1, (4096, 1024), Shard(0), "a", "b", private=(True, True))
        return rows(2, 2, (512, 512), Shard(1), "aa", "bb")

    async with agents("ab") as at:
        async with asyncio.timeout(60):
            await asyncio.gather(*(one(at, number) for number in range(1, 9)))
        planes = [agent.plane for agent in at.values()]
    assert [plane.budget.used - sum(copy_slot.grown for copy_slot in plane.copy_slots._all) for plane in planes] == [
        0,
        0,
    ]


# ---- memory that is taken back ----------------------------------------------------------------


@pytest.mark.parametrize("member", [("source", 0), ("target", 0)])
@pytest.mark.parametrize("to", [0, 1], ids=["straight", "packed"])
async def test_a_call_that_has_returned_is_not_touched(member: tuple[str, int], to: int) -> None:
    job = rows(2, 2, (512, 512), Shard(to), "aa", "bb")
    page = RevocationPage()
    lent = LentPage(os.dup(page.fd))
    word = page.open()
    guards = {"a" if member[0] == "source" else "b": {member: lent.guard(word)}}
    async with agents("ab") as at:
        await transfer(job, at, 1, guards)
        same(job.target, job.expected())
        for held in job.target.values():
            held["t"].zero_()
        assert page.revoke(word)
        runs = await opened(at, job, 2)
        for name, given in guards.items():
            runs[name].guards = given
        async with asyncio.timeout(60):
            found = await asyncio.gather(*(at[n].transport.run(runs[n]) for n in "ab"), return_exceptions=True)
        mine, others = found if member[0] == "source" else reversed(found)
        assert isinstance(mine, RevokedError) and mine.owner == member
        assert isinstance(others, PeerLostError) or member[0] == "target"  # who sends may be done before
        if member[0] == "target":
            assert bool((job.target[0]["t"] == 0).all())
        assert not page.busy(word)
    page.close()


async def test_a_worker_that_died_is_named() -> None:
    worker = WorkerMemory(os.getpid(), start_time(os.getpid()))
    job = big(private=(True, False), memory=worker)
    async with agents("ab") as at:
        runs = await opened(at, job)
        worker.close()  # as if its process had gone
        errors = await asyncio.gather(*(fails(at[n].transport.run(runs[n])) for n in "ab"))
    assert isinstance(errors[0], WorkerGoneError) and errors[0].owner == ("source", 0)
    assert isinstance(errors[1], PeerLostError)


async def test_many_aborted_and_repeated_transfers_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    """Stops at any moment, from either end; whatever comes next is whole."""
    caplog.set_level(logging.ERROR)
    job = partial(6, (96, 96), "aab", "ab", streams=2)
    expected = job.expected()
    async with agents("ab", streams=2) as at:
        for seq in range(1, 25):
            name = "ab"[seq % 2]
            asyncio.get_running_loop().call_later(
                0.0005 * seq,
                lambda name=name: at[name].transport.stop(ValueError("stop")),  # type: ignore[misc]
            )
            try:
                async with asyncio.timeout(60):
                    await transfer(job, at, seq)
            except* (ValueError, PeerLostError):
                for agent in at.values():
                    agent.transport.stop(ValueError("aborted"))
        await transfer(job, at, 99)
    same(job.target, expected)
    assert isinstance(job.target[0]["t00"], torch.Tensor)


async def test_a_run_that_is_stopped_begins_no_copy_that_waited_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has called waits for what still writes to its tensors: copies into other processes can take long."""
    job = rows(2, 2, (64, 64), Shard(1), "aa", "bb")
    before = {rank: {name: tensor.clone() for name, tensor in held.items()} for rank, held in job.target.items()}
    loop, waits = asyncio.get_running_loop(), asyncio.Event()
    unpack = ReceiveStream._unpack

    def unpacked(self: ReceiveStream, *args: Any) -> None:
        loop.call_soon_threadsafe(waits.set)
        unpack(self, *args)

    monkeypatch.setattr(ReceiveStream, "_unpack", unpacked)
    async with agents("ab") as at:
        runs = await opened(at, job)
        slots = at["b"].plane.copy_slots
        taken = [slots._free.get() for _ in range(slots.count)]
        try:
            run = asyncio.ensure_future(at["b"].transport.run(runs["b"]))
            sends = asyncio.ensure_future(at["a"].transport.run(runs["a"]))
            await waits.wait()
            at["b"].transport.stop(ValueError("no"))
        finally:
            for one in taken:
                slots.leave(one)
        assert isinstance(await fails(run), ValueError)
        await asyncio.wait([sends])
        sends.exception()
        assert not runs["b"].touched
        same(job.target, before)
