"""One tensor from a trainer to an inference worker, and calls that are cancelled while it moves."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

import etha
from etha import TransferResult
from etha.errors import TransferAbortedError, TransferError
from etha.memory.revocation import SLOTS
from tests.flow.sides import Sides

SIZE = 3 << 22  # 48 MiB of float32: some 6 ms, cut into 6 pieces
POISON = -7.0
#: How a call that was cancelled has ended: before GO; aborted; committed while it was cancelled, or before.
KINDS = ("before GO", "moving", "committed", "over")


class Link:
    """One tensor from a trainer to an inference worker, checked as a whole after every attempt."""

    def __init__(self, sides: Sides, handles: dict[Any, Any], source: torch.Tensor, target: torch.Tensor) -> None:
        self.sides, self.source, self.target = sides, source, target
        self.send, self.recv = handles["trainer", 0], handles["inference", 0]
        self.version, self.seq = 0, 0

    @classmethod
    async def open(cls, sides: Sides, size: int = SIZE, **options: Any) -> Link:
        await sides.meet(device_mesh=(1,), placements=[Replicate()])
        source, target = torch.zeros(size), torch.zeros(size)
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
        pages = [handle._registration.connection.page for handle in handles]  # type: ignore[attr-defined]
        return not any(page._inside(slot) for page in pages for slot in range(1, SLOTS))

    async def settled(self, task: asyncio.Task[Any]) -> bool:
        """Whether ``task`` ends by itself: False once nothing moves and it waits for a call that will not come."""
        waiting = 0
        while not task.done() and waiting < 3:
            states = [
                batch["state"]
                for client in self.sides.clients.values()
                for batch in (await client.status())["batches"]
                if batch["pair"] == self.sides.pair
            ]
            waiting = waiting + 1 if "waiting" in states and "moving" not in states else 0
        return task.done()


class Moments:
    """Cancels one of the two calls at moments spread over all of a transfer. ``counts``: (tenth, kind) -> how many."""

    def __init__(self, link: Link, atomic: bool, seed: int) -> None:
        self.link, self.atomic, self.dice = link, atomic, random.Random(seed)
        self.counts: Counter[tuple[int, str]] = Counter()
        self.took = 0.0

    async def run(self, moments: int) -> None:
        """At least so many, and more until one has hit moving bytes and one a decided transfer.

        On an idle machine hardly any comes before GO: ``test_agreement`` has those.
        """
        self.took = await self.link.good()
        for turn in range(4 * moments):
            if turn >= moments and {kind for _, kind in self.counts} >= {"moving", "committed"}:
                return
            share = self.dice.uniform(0, 1.15) if turn % 10 else 0.0
            kind = await self.one(self.dice.choice(("send", "recv")), share * self.took)
            self.counts[int(10 * share), kind] += 1
            self.took = 0.8 * self.took + 0.2 * await self.link.good()
        pytest.fail(f"{4 * moments} moments, and one kind of end was never seen: {self}")

    async def one(self, who: str, delay: float) -> str:
        """A call of ``who`` cancelled after ``delay`` seconds: its memory is its own once it has returned."""
        link, before = self.link, float(self.link.target[0])
        sending, receiving = link.start()
        mine, other = (sending, receiving) if who == "send" else (receiving, sending)
        await asyncio.sleep(delay)
        mine.cancel()
        end = await ended(mine)
        assert link.quiet(link.send if who == "send" else link.recv), "a lane is inside a call that has returned"
        if who == "recv" and self.atomic:
            value = float(link.target[0])
            assert value in (before, link.version) and torch.all(link.target == value), "old or new, never both"
        poisoned = link.source if who == "send" else link.target
        poisoned.fill_(POISON)
        if not await link.settled(other):
            other.cancel()
        found = await ended(other)
        await link.sides.ask_all()
        assert torch.all(poisoned == POISON), "somebody wrote into the tensors of a call that had returned"
        match found:
            case asyncio.CancelledError():
                assert isinstance(end, asyncio.CancelledError)
                assert who == "recv" or not self.atomic or torch.all(link.target == before)
                return "before GO"
            case TransferAbortedError():
                assert isinstance(end, asyncio.CancelledError)
                name = "send of trainer" if who == "send" else "recv of inference"
                assert f"{name} rank 0 ended: it was cancelled" in found.message and found.outcome == "aborted"
                assert not (found.torn and (self.atomic or who == "recv"))
                assert who == "recv" or found.torn or torch.all(link.target == before)
                return "moving"
            case TransferResult():
                assert found.version == link.version
                assert who == "recv" or torch.all(link.target == link.version), "not what was sent"
                link.seq = found.seq
                return "committed" if isinstance(end, asyncio.CancelledError) else "over"
        raise AssertionError(f"the other call ended with {found!r}")

    def __str__(self) -> str:
        lines = [f"{sum(self.counts.values())} moments of transfers of {1000 * self.took:.0f} ms"]
        for kind in KINDS:
            cells = [self.counts[tenth, kind] for tenth in range(12)]
            lines.append(f"  {kind:<10}" + "".join(f"{n or '.':>4}" for n in cells) + f"  = {sum(cells)}")
        return "\n".join(lines)


class Aim:
    """Delays that hit a transfer while its bytes move. Each end corrects the aim, because the machine may be busier, or
    less busy, than when ``took`` was measured."""

    def __init__(self, dice: random.Random, took: float) -> None:
        self._dice, self._span = dice, took
        self.hits = 0

    def delay(self) -> float:
        """Seconds after which to end the next transfer."""
        return self._dice.uniform(0.2, 1.2) * self._span

    def correct(self, end: object) -> None:
        """``end``: how the transfer ended for the other call."""
        if isinstance(end, TransferError) and end.outcome == "aborted":
            self.hits += 1
        elif isinstance(end, TransferResult):
            self._span *= 0.8  # it was over
        else:
            self._span *= 1.2  # it had not begun

    def moments(self, enough: int) -> Iterator[int]:
        """At least 8 tries, then more until there are ``enough`` hits, and a failure after 80."""
        for turn in range(80):
            if turn >= 8 and self.hits >= enough:
                return
            yield turn
        pytest.fail(f"80 moments, and only {self.hits} of them while bytes moved")


async def ended(task: asyncio.Task[Any]) -> Any:
    """The result, the error, or the cancellation of a task, as a value."""
    [found] = await asyncio.gather(task, return_exceptions=True)
    return found
