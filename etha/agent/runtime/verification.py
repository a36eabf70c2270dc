"""Inspection: the checks of one transfer while it runs: sums on the lane, sums from other agents, the comparison.

    before() -> the transfer moves -> after()          stop(error) at any time ends what waits or runs

Both ends sum at the same time, right after their own part has moved. The receiving end compares. The sending end is
done once its sums are sent, because nothing is committed before all ends are done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from etha.agent.protocol.verification import Piece, VerificationBook, VerificationPlan
from etha.agent.runtime.lane import NOTHING, Lane, Running
from etha.memory.revocation import Guard
from etha.peer.introductions import SUMS_PER_MESSAGE, Sums
from etha.transport.copy.program import Member
from etha.transport.copy.staging import Budget, StagingMemory
from etha.transport.verify import chunks
from etha.transport.verify.checksums import ChecksumReader


class ReceivedSums:
    """Collects the sums that other agents send. ``watch`` is called after each message that counts."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, bytearray]] = {}
        self.watch: Callable[[], None] | None = None

    def take(self, agent: str, message: Sums) -> None:
        """Take one message. Messages that are late, out of order or beyond all bounds are ignored."""
        seq, data = self._held.get(agent, (0, bytearray()))
        if message.seq < seq:
            return
        if message.seq > seq:
            seq, data = message.seq, bytearray()
            self._held[agent] = seq, data
        follows = len(message.sums) % 8 == 0 and message.first * 8 == len(data)
        if follows and len(data) + len(message.sums) <= 8 * chunks.MAX_SUMS:
            data += message.sums
        if self.watch is not None:
            self.watch()

    def sums(self, agent: str, seq: int, count: int) -> npt.NDArray[np.uint64] | None:
        """The ``count`` sums of a transfer; None while some are missing."""
        held, data = self._held.get(agent, (0, b""))
        if held != seq or len(data) < 8 * count:
            return None
        return np.frombuffer(bytes(data), "<u8", count)

    def forget(self, seq: int) -> None:
        """A transfer is over here: drop the sums of it and of earlier ones."""
        self._held = {agent: held for agent, held in self._held.items() if held[0] > seq}


class _Pass:
    """Pieces of a book as a job of the lane."""

    barriers: tuple[int, ...] = ()

    def __init__(
        self, checks: VerificationPlan, pieces: Sequence[Piece], reader: Callable[[int], ChecksumReader]
    ) -> None:
        self._checks, self._pieces, self._reader = checks, pieces, reader

    @property
    def pieces(self) -> int:
        return len(self._pieces)

    def run(self, piece: int, thread: int) -> int:
        """Run one piece. TransferError for a difference, ReachErrors as memory raises them."""
        self._checks.run(self._pieces[piece], self._reader(thread))
        return 0


class ChecksumReaders:
    """The checksum readers of a lane, one per thread, shared by all transfers and kept while any transfer checks."""

    def __init__(self, lane: Lane, budget: Budget, memory: StagingMemory | None = None) -> None:
        self.lane, self._budget, self._memory = lane, budget, memory
        self._passes = 0
        self._readers: dict[int, ChecksumReader] = {}

    def of(self, thread: int, guards: Mapping[Member, Guard]) -> ChecksumReader:
        """The calling lane thread's reader, for one piece of a transfer with these guards."""
        found = self._readers.get(thread)
        if found is None:
            # Streams and device memory belong to the thread, and are not made anew for each transfer.
            work = self.lane.workspaces.mine() if self.lane.workspaces.device else None
            found = self._readers[thread] = ChecksumReader(thread, self._budget, guards, self._memory, work)
        found.guards = guards
        return found

    def enter(self) -> None:
        """A transfer's pass begins. Call it on the loop's thread, like ``leave``."""
        self._passes += 1

    def leave(self) -> int:
        """A transfer's pass is over; the last one frees all memory. Returns the bytes that readers have, or had."""
        self._passes -= 1
        if self._passes:
            return sum(reader.nbytes for reader in list(self._readers.values()))
        readers, self._readers = self._readers, {}
        return sum(reader.close() for reader in readers.values())


class TransferVerification:
    """The inspection of one transfer. ``tell(agent, message)`` sends to another agent. Call ``close`` when it is
    over."""

    def __init__(
        self,
        checks: VerificationPlan,
        seq: int,
        guards: Mapping[Member, Guard],
        *,
        readers: ChecksumReaders,
        received_sums: ReceivedSums,
        tell: Callable[[str, Sums], None],
    ) -> None:
        self._checks, self._seq, self._guards = checks, seq, guards
        self._readers, self._received_sums, self._tell = readers, received_sums, tell
        self._book: VerificationBook | None = None
        self._most = 0
        self._running: Running | None = None
        self._error: BaseException | None = None
        self._news = asyncio.Event()
        #: What the trace says of its pieces.
        self.about: Mapping[str, Any] = NOTHING

    async def before(self) -> None:
        """Choose the chunks, and sum what the transfer will overwrite."""
        self._book = await asyncio.to_thread(self._checks.book, self._seq)
        await self._run(self._book.first)

    async def after(self) -> None:
        """Sum and compare the rest. TransferError names the first chunk whose ends differ."""
        book = self._book
        assert book is not None, "before() comes first"
        await self._run(book.then)
        for agent, lines in book.gives.items():
            sums = np.array([line.expected[0] for line in lines], "<u8").tobytes()
            for first in range(0, len(sums), 8 * SUMS_PER_MESSAGE):
                self._tell(
                    agent, Sums(seq=self._seq, first=first // 8, sums=sums[first : first + 8 * SUMS_PER_MESSAGE])
                )
        for agent, lines in book.takes.items():
            for line, found in zip(lines, await self._sums_of(agent, len(lines)), strict=True):
                line.expected.append(found)
                self._checks.compare(line)

    def stop(self, error: BaseException) -> None:
        """End it soon with ``error``. Idempotent; returns at once."""
        self._error = self._error or error
        if self._running is not None:
            self._running.abort(error)
        self._news.set()

    def close(self) -> int:
        """Stop waiting for sums. Returns the most bytes that lane threads had for checks meanwhile."""
        self._received_sums.forget(self._seq)
        self._received_sums.watch = None
        return self._most

    # ---- inside -------------------------------------------------------------------------------

    async def _run(self, pieces: Sequence[Piece]) -> None:
        if self._error is None and pieces:
            over: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
            job = _Pass(self._checks, pieces, lambda thread: self._readers.of(thread, self._guards))
            self._readers.enter()
            self._running = self._readers.lane.submit(job, on_done=over.set_result, about=self.about)
            error = await over
            self._most = max(self._most, self._readers.leave())
            self._running = None
            self._error = self._error or error
        if self._error is not None:
            raise self._error

    async def _sums_of(self, agent: str, count: int) -> list[int]:
        """Wait for the sums of another agent. The agent's loss or the call's end stops this."""
        self._received_sums.watch = self._news.set
        while (sums := self._received_sums.sums(agent, self._seq, count)) is None:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        return [int(x) for x in sums]
