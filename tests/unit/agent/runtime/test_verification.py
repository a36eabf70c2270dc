"""Checksums of other agents: what counts, what is waited for, and how a wait ends."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Shard

from etha.agent.protocol.verification import VerificationPlan
from etha.agent.runtime.lane import Lane
from etha.agent.runtime.verification import ChecksumReaders, ReceivedSums, TransferVerification
from etha.errors import TransferError
from etha.memory.reach import RevokedError
from etha.memory.revocation import LentPage, RevocationPage
from etha.peer.introductions import Sums
from etha.transport.copy.program import Member
from etha.transport.copy.staging import Budget
from etha.transport.verify import chunks
from tests.unit.transport.agents import Job
from tests.unit.transport.tcp.test_transport import rows


def sums(seq: int, first: int, *values: int) -> Sums:
    return Sums(seq=seq, first=first, sums=np.array(values, "<u8").tobytes())


# ---- the tally ----------------------------------------------------------------------------------


def test_sums_count_once_all_have_come_in_order() -> None:
    received_sums = ReceivedSums()
    received_sums.take("a", sums(3, 0, 1, 2))
    assert received_sums.sums("a", 3, 3) is None
    received_sums.take("a", sums(3, 5, 9))  # out of order: nothing
    received_sums.take("a", sums(3, 2, 7))
    found = received_sums.sums("a", 3, 3)
    assert found is not None and found.tolist() == [1, 2, 7]
    assert received_sums.sums("a", 2, 0) is None and received_sums.sums("b", 3, 1) is None


def test_a_newer_transfer_replaces_an_older_one_that_is_over() -> None:
    received_sums = ReceivedSums()
    received_sums.take("a", sums(3, 0, 1))
    received_sums.take("a", sums(4, 0, 2))
    received_sums.take("a", sums(3, 1, 5))
    assert received_sums.sums("a", 3, 1) is None
    received_sums.forget(3)
    found = received_sums.sums("a", 4, 1)
    assert found is not None and found.tolist() == [2]
    received_sums.forget(4)
    assert received_sums.sums("a", 4, 1) is None


def test_what_a_peer_sends_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etha.transport.verify.chunks.MAX_SUMS", 4)
    received_sums = ReceivedSums()
    received_sums.take("a", sums(1, 0, 1, 2, 3))
    received_sums.take("a", sums(1, 3, 4, 5))
    received_sums.take("a", Sums(seq=1, first=3, sums=b"odd"))
    assert received_sums.sums("a", 1, 4) is None and received_sums.sums("a", 1, 3) is not None


# ---- the inspection -----------------------------------------------------------------------------


class Two:
    """Agents a (source) and b (target) of one tensor, each with a lane; nothing moves, b's memory is right."""

    def __init__(self, guards: dict[str, dict[Member, object]] | None = None) -> None:
        self.job: Job = rows(1, 1, (2048, 1024), Shard(0), "a", "b")
        self.job.target[0]["t"].copy_(self.job.source[0]["t"])
        self.lanes = {name: Lane(2) for name in "ab"}
        self.tallies = {name: ReceivedSums() for name in "ab"}
        self.budgets = {name: Budget(64 << 20) for name in "ab"}
        self.expect: list[tuple[str, Sums]] = []
        self.inspections = {
            me: TransferVerification(
                VerificationPlan(
                    self.job.plan, self.job.routing(me), *self.job.views_of(me),
                    sides=("s", "t"), staging=self.job.staging, full=True,
                ),
                1,
                (guards or {}).get(me, {}),  # type: ignore[arg-type]
                readers=ChecksumReaders(self.lanes[me], self.budgets[me]),
                received_sums=self.tallies[me],
                tell=lambda agent, message: self.expect.append((agent, message)),
            )
            for me in "ab"
        }  # fmt: skip

    def deliver(self, tallies: dict[str, ReceivedSums]) -> None:
        for agent, message in self.expect:
            tallies[agent].take("a", message)

    def close(self) -> None:
        for name in "ab":
            self.inspections[name].close()
            assert self.budgets[name].used == 0
            self.lanes[name].close()


async def test_the_source_tells_its_sums_in_bounded_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etha.agent.runtime.verification.SUMS_PER_MESSAGE", 3)
    two = Two()
    try:
        await two.inspections["a"].before()
        await two.inspections["a"].after()
        assert [(agent, message.first) for agent, message in two.expect] == [("b", 0), ("b", 3), ("b", 6)]
        assert sum(len(message.sums) for _, message in two.expect) == 8 * (8 << 20) // chunks.CHUNK
    finally:
        two.close()


@pytest.mark.parametrize("early", [True, False])
async def test_the_target_waits_for_them_and_compares(early: bool) -> None:
    two = Two()
    a, b = two.inspections["a"], two.inspections["b"]
    try:
        await b.before()
        if early:
            await a.before()
            await a.after()
            two.deliver(two.tallies)
            await b.after()
            return
        waiting = asyncio.create_task(b.after())
        await a.before()
        await a.after()
        assert not waiting.done()
        two.deliver(two.tallies)
        await waiting
    finally:
        two.close()


async def test_a_difference_names_the_chunk() -> None:
    two = Two()
    two.job.target[0]["t"].view(torch.int32)[300, 7] ^= 1
    try:
        for name in "ab":
            await two.inspections[name].before()
        await two.inspections["a"].after()
        two.deliver(two.tallies)
        with pytest.raises(
            TransferError, match=r"'t' chunk \[256:512, 0:1024\] of t rank 0 is not what s rank 0 holds"
        ):
            await two.inspections["b"].after()
    finally:
        two.close()


async def test_a_wait_for_sums_that_never_come_ends_when_the_transfer_is_stopped() -> None:
    two = Two()
    b, asked = two.inspections["b"], asyncio.Event()
    two.tallies["b"].sums = lambda *which: asked.set()  # type: ignore[method-assign]
    try:
        await b.before()
        waiting = asyncio.create_task(b.after())
        await asked.wait()
        b.stop(TransferError("enough"))
        with pytest.raises(TransferError, match="enough"):
            await waiting
    finally:
        two.close()


async def test_memory_that_was_taken_back_is_not_read() -> None:
    page = RevocationPage()
    word = page.open()
    guard = LentPage(os.dup(page.fd)).guard(word)
    two = Two({"b": {("target", 0): guard}})
    page.revoke(word)
    try:
        await two.inspections["b"].before()
        with pytest.raises(RevokedError, match="target rank 0 took its memory back"):
            await two.inspections["b"].after()
    finally:
        two.close()
        page.close()
