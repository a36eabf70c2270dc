"""Staging: the memory that an agent's streams use besides the workers' own, within a budget and measured.

A copy slot is what a thread needs to touch workers' memory: a number by which revocation pages tell threads apart, and
scratch memory. There are few slots, so that few threads copy at once. Nobody waits for the network while holding a
slot.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue

import torch

from etha.errors import ConfigError
from etha.memory.reach import ReachError, RevokedError
from etha.memory.revocation import THREADS, Guard
from etha.memory.room import RoomCheck
from etha.memory.views import CARRIERS, View
from etha.transport.copy import cpu
from etha.transport.copy.cpu import Buffer, Workspace
from etha.transport.copy.program import Member
from etha.transport.geometry.iovec import Op
from etha.transport.geometry.tiles import BOUNCE_BYTES

#: Advice in the error of an agent whose machine has less memory than the agent may use.
GIVE_LESS = "give this agent less (ETHA_STAGING, etha agent --staging)"
#: Lane threads use the numbers below this one.
FIRST_NUMBER = 8


class Peak:
    """The most bytes of a budget in use at once between ``Budget.watch()`` and ``Budget.seen()``."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class Budget:
    """Counts bytes in use, at most ``limit`` and at most what the machine has, and their peak. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._room = RoomCheck(shared=False, cure=GIVE_LESS)
        self.used = self.peak = 0
        #: Asked in turn, before ``take`` refuses, to free at least that many bytes of unused memory.
        self.spares: list[Callable[[int], None]] = []
        self._watches: set[Peak] = set()
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> None:
        """Count ``nbytes`` more, or fewer if negative.

        ConfigError if that would exceed the limit, or if the machine has no room for them.
        """
        with self._lock:
            for give_up in self.spares:
                if nbytes > 0 and self.used + nbytes > self.limit:
                    give_up(self.used + nbytes - self.limit)
            if nbytes > 0 and self.used + nbytes > self.limit:
                raise ConfigError(
                    f"{nbytes} bytes of staging more than the {self.used} in use would exceed the {self.limit} of this "
                    f"agent: give it more staging memory, or fewer streams per peer"
                )
            if nbytes > 0:
                self._room.check(nbytes, f"staging beside the {self.used} bytes of it that this agent uses")
            self.used += nbytes
            self.peak = max(self.peak, self.used)
            for watch in self._watches:
                watch.nbytes = max(watch.nbytes, self.used)

    def watch(self) -> Peak:
        """Start to measure a peak, until ``seen``."""
        with self._lock:
            peak = Peak(self.used)
            self._watches.add(peak)
        return peak

    def seen(self, peak: Peak) -> int:
        """Stop measuring the peak and return its bytes."""
        with self._lock:
            self._watches.discard(peak)
        return peak.nbytes


class StagingMemory:
    """Where staging is allocated: in the host's memory. A GPU agent's (``GpuDevice.memory``) is reachable by
    its devices, too."""

    def buffer(self, nbytes: int) -> Buffer:
        return Buffer(nbytes)

    def view(self, buffer: Buffer, dtype: torch.dtype) -> View:
        """All of a buffer as a flat tensor."""
        return dense_view(buffer.typed(dtype))

    def workspace(self) -> Workspace:
        """The workspace of a copy slot."""
        return Workspace()


class StagingChunk:
    """A staging buffer: a stream packs into it before it sends, or receives into it before it unpacks."""

    def __init__(self, budget: Budget, memory: StagingMemory | None = None) -> None:
        self._budget, self._memory = budget, memory or StagingMemory()
        self._buffer = Buffer(0)
        self._views: dict[torch.dtype, View] = {}

    def reserve(self, nbytes: int) -> memoryview:
        """The first ``nbytes`` of the buffer, which is reallocated if it is smaller than that."""
        if nbytes > self._buffer.nbytes:
            self.release()
            rounded = rounded_up(nbytes)
            self._budget.take(rounded)
            self._buffer = self._memory.buffer(rounded)
        return memoryview(self._buffer.typed(torch.uint8).numpy())[:nbytes]  # type: ignore[arg-type, unused-ignore]

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    @property
    def flat(self) -> torch.Tensor:
        """The whole buffer as bytes."""
        return self._buffer.typed(torch.uint8)

    def view(self, dtype: torch.dtype) -> View:
        """The whole buffer as a flat tensor of ``dtype``."""
        found = self._views.get(dtype)
        if found is None:
            found = self._views[dtype] = self._memory.view(self._buffer, dtype)
        return found

    def release(self) -> None:
        """Free the memory. Idempotent."""
        self._budget.take(-self._buffer.nbytes)
        self._buffer = Buffer(0)
        self._views.clear()


class Pool:
    """Unused chunks, kept for the next user of the same size, and freed when the budget gets short.

    They take at most a quarter of the budget. Thread-safe.
    """

    def __init__(self, budget: Budget, memory: StagingMemory | None = None) -> None:
        self._budget, self._memory = budget, memory
        self._lock = threading.Lock()
        self._spare: deque[StagingChunk] = deque()
        self._nbytes = 0
        budget.spares.append(self._give_up)

    def take(self, nbytes: int) -> StagingChunk:
        """A chunk of ``nbytes``, rounded up. ConfigError if the budget does not have that much."""
        wanted = rounded_up(nbytes)
        with self._lock:
            for chunk in reversed(self._spare):  # the chunk used last is in the caches
                if chunk.nbytes == wanted:
                    self._spare.remove(chunk)
                    self._nbytes -= wanted
                    return chunk
        chunk = StagingChunk(self._budget, self._memory)
        chunk.reserve(nbytes)
        return chunk

    def give(self, chunk: StagingChunk) -> None:
        """Take a chunk back."""
        with self._lock:
            self._spare.append(chunk)
            self._nbytes += chunk.nbytes
            over = self._nbytes - self._budget.limit // 4
        self._give_up(over)

    def _give_up(self, nbytes: int) -> None:
        while nbytes > 0:
            with self._lock:
                if not self._spare:
                    return
                chunk = self._spare.popleft()
                self._nbytes -= chunk.nbytes
            nbytes -= chunk.nbytes
            chunk.release()

    def close(self) -> None:
        """Free all chunks. Idempotent."""
        self._give_up(sys.maxsize)


def rounded_up(nbytes: int) -> int:
    """Bytes that a chunk for ``nbytes`` takes."""
    return -(-nbytes // 4096) * 4096


class CopySlot:
    """One copy slot (see the module). Whoever made a given ``work`` closes it; only its growth here counts in the
    budget."""

    def __init__(
        self, number: int, budget: Budget, memory: StagingMemory | None = None, work: Workspace | None = None
    ) -> None:
        self.number = number
        self._own = work is None
        self.work = (memory or StagingMemory()).workspace() if work is None else work
        self._budget = budget
        self._seen = self.work.nbytes
        #: Bytes of scratch memory counted in the budget so far.
        self.grown = 0

    @contextmanager
    def inside(self, guards: Mapping[Member, Guard], owners: Sequence[Member]) -> Iterator[None]:
        """Touch the memory of ``owners`` in this context. RevokedError if one of their calls has returned."""
        entered: list[Guard] = []
        try:
            for member in owners:
                guard = guards.get(member)
                if guard is not None:
                    if not guard.enter(self.number):
                        raise RevokedError(f"{member[0]} rank {member[1]} took its memory back", owner=member)
                    entered.append(guard)
            yield
        except ReachError as error:
            if error.owner is None and len(owners) == 1:
                error.owner = owners[0]
            raise
        finally:
            for guard in entered:
                guard.leave(self.number)

    def close(self) -> None:
        """Free a device's memory and stream. Nobody may use the slot any more. Idempotent."""
        if self._own and self.work.copier is not None:
            self.work.copier.close()

    def run(self, ops: Sequence[Op]) -> None:
        """Copy operations of any mix of paths and processes, each kind in one go."""
        if not self._own:
            self._seen = self.work.nbytes  # other users may have grown it meanwhile
        try:
            cpu.run_mixed(ops, self.work)
        finally:
            self.account()

    def account(self) -> None:
        """Count the growth of the scratch memory in the budget."""
        grown, self._seen = self.work.nbytes - self._seen, self.work.nbytes
        if grown:
            self._budget.take(grown)
            self.grown += grown


#: Most bytes that a copy slot uses, without reductions: two buffers of a page more than a piece.
_SLOT_BYTES = 2 * (BOUNCE_BYTES + 4096)


class CopySlots:
    """All copy slots of an agent's streams."""

    def __init__(self, budget: Budget, count: int | None = None, memory: StagingMemory | None = None) -> None:
        # A card's NCCL groups use the last three. Half of the memory is left for what transfers need besides.
        most = min(THREADS - FIRST_NUMBER - 3, max(1, budget.limit // (2 * _SLOT_BYTES)))
        self.count = min(most, len(os.sched_getaffinity(0)) + 2) if count is None else min(most, count)
        self._free: SimpleQueue[CopySlot] = SimpleQueue()
        self._all = [CopySlot(FIRST_NUMBER + i, budget, memory) for i in range(self.count)]
        for copy_slot in self._all:
            self._free.put(copy_slot)

    @contextmanager
    def one(self) -> Iterator[CopySlot]:
        """A copy slot. Waits for a holder, which never waits for the network."""
        copy_slot = self._free.get()
        try:
            yield copy_slot
        finally:
            self._free.put(copy_slot)

    def free(self) -> CopySlot | None:
        """A copy slot if one is free now, otherwise None. Give it back with ``leave``."""
        try:
            return self._free.get_nowait()
        except Empty:
            return None

    def leave(self, copy_slot: CopySlot) -> None:
        """Give back a slot that ``free`` returned."""
        self._free.put(copy_slot)

    def close(self) -> None:
        """Free devices' memory and streams. Nobody may hold a slot any more. Idempotent."""
        for copy_slot in self._all:
            copy_slot.close()

    @property
    def scratch(self) -> int:
        """Most bytes that all copy slots use at once, without reductions."""
        return self.count * _SLOT_BYTES


def dense_view(flat: torch.Tensor) -> View:
    """A view of a flat tensor in this agent's own memory."""
    return View(
        shape=(flat.numel(),),
        strides=(1,),
        dtype=flat.dtype,
        address=flat.data_ptr(),
        space="scratch",
        place=0,
        nbytes=flat.numel() * flat.itemsize,
        flat=flat,
        raw=flat.view(CARRIERS[flat.itemsize]),
    )
