"""What the agents of one host share with each other: where their workers' tensors and snapshots lie.

Before a batch is registered, each agent shows its workers' tensors to every agent that reads its processes, and opens
what is shown to it. It copies from what it could open; the rest is sent. A snapshot is shown once per registration,
when the worker attaches it. It is opened when its first transfer comes, which may be before it is shown.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict

import msgspec

from etha.agent.protocol.effects import Member
from etha.agent.runtime.sessions import WorkerSession
from etha.errors import EthaError, ProtocolError, TransferError
from etha.memory.cuda import Mappings
from etha.memory.handles import TensorHandle
from etha.memory.reach import ReachError
from etha.peer.introductions import MAX_TENSORS, Exhibits, ShownSegment
from etha.transport.copy.host import Exhibit, HostMemory, SegmentClaim

log = logging.getLogger(__name__)

Shown = Mapping[Member, tuple[WorkerSession, Mapping[str, TensorHandle]]]


def exhibits(tensors: Shown, *, snapshot: bool = False) -> list[Exhibits]:
    """This agent's workers as messages, in parts. A worker that cannot be shown is marked. Reads ``/proc``.

    ``snapshot``: show where their snapshots lie.
    """
    out: list[Exhibits] = []
    for (side, rank), (session, handles) in sorted(tensors.items(), key=lambda item: item[0]):
        try:
            found: Exhibit | None = Exhibit.of(session.memory, handles)
        except (ReachError, EthaError) as error:
            log.info("%s rank %d is not shown to other agents, its tensors will be sent: %s", side, rank, error)
            found = None
        out += _parts(side, rank, found)
    if snapshot:
        out = [msgspec.structs.replace(part, snapshot=True) for part in out]
    return [*out[:-1], msgspec.structs.replace(out[-1], last=True)] if out else []


def _parts(side: str, rank: int, exhibit: Exhibit | None) -> Iterator[Exhibits]:
    if exhibit is None:
        yield Exhibits(side=side, rank=rank, pid=0, started=0, segments=(), names=(), handles=(), last=False)
        return
    shown = tuple(ShownSegment(**asdict(segment)) for segment in exhibit.segments)
    names = tuple(exhibit.tensors)
    for first in range(0, max(1, len(names)), MAX_TENSORS):
        some = names[first : first + MAX_TENSORS]
        yield Exhibits(
            side=side,
            rank=rank,
            pid=exhibit.pid,
            started=exhibit.started,
            segments=shown if first == 0 else (),
            names=some,
            handles=tuple(exhibit.tensors[name] for name in some),
            last=False,
        )


def open_shown(parts: Sequence[Exhibits], mappings: Mappings | None) -> dict[Member, HostMemory]:
    """The memory of each rank that is shown in ``parts``, all or none. Blocking. ``mappings`` are those of this agent's
    card.

    ReachError, EthaError or OSError if it cannot be opened.
    """
    merged: dict[Member, tuple[Exhibits, list[ShownSegment], dict[str, TensorHandle]]] = {}
    for part in parts:
        if len(part.names) != len(part.handles):
            raise ProtocolError(f"{len(part.names)} names with {len(part.handles)} tensors")
        _, segments, handles = merged.setdefault((part.side, part.rank), (part, [], {}))
        segments += part.segments
        handles |= zip(part.names, part.handles, strict=True)
    opened: dict[Member, HostMemory] = {}
    try:
        for member, (part, segments, handles) in merged.items():
            if part.pid <= 0:
                raise ReachError("its agent cannot show it")
            opened[member] = HostMemory(_exhibit(part, segments, handles), mappings)
    except BaseException:
        for memory in opened.values():
            memory.close()
        raise
    return opened


class SharedTensors:
    """What other agents show to one registration here. ``close`` ends a wait for them.

    ``mappings`` are those of this agent's card; without them nothing on GPUs is opened.
    """

    def __init__(self, mappings: Mappings | None = None) -> None:
        self.mappings = mappings
        self._parts: dict[str, list[Exhibits]] = defaultdict(list)
        self._whole: set[str] = set()
        self._changed = asyncio.Event()
        self._memories: dict[Member, HostMemory] = {}
        self.closed = False

    def take(self, agent: str, message: Exhibits) -> None:
        """Take one part. Parts after the last one are ignored."""
        if agent in self._whole or self.closed:
            return
        self._parts[agent].append(message)
        if message.last:
            self._whole.add(agent)
            self._changed.set()

    async def wait(self, agents: Collection[str]) -> bool:
        """Wait until all of these agents have shown everything. False if it was closed first."""
        while not self.closed and not self._whole.issuperset(agents):
            self._changed.clear()
            await self._changed.wait()
        return not self.closed

    def open(self, agent: str, agents: Mapping[str, Sequence[str]]) -> bool:
        """Open what ``agent`` shows of its ranks. Returns whether it could. ``agents``: side -> agent of each rank.
        Blocking."""
        parts = self._parts.pop(agent, [])
        for part in parts:
            if not serves(agents, agent, (part.side, part.rank)):
                log.warning("agent %s shows %s rank %d, which is not its own to show", agent, part.side, part.rank)
                return False
        try:
            self._memories |= open_shown(parts, self.mappings)
            if self.closed:  # closed meanwhile: whoever released the others may not have seen these
                self.release()
                return False
        except (ReachError, EthaError, OSError) as error:
            log.info("the tensors of agent %s cannot be copied from here and will be sent: %s", agent, error)
            return False
        return True

    def memory(self, member: Member) -> HostMemory:
        """The opened memory of another agent's rank. ProtocolError if it was not opened."""
        if (found := self._memories.get(member)) is None:
            raise ProtocolError(f"{member[0]} rank {member[1]} was not shown by its agent")
        return found

    def opened(self) -> dict[Member, HostMemory]:
        """All opened memory, by rank."""
        return dict(self._memories)

    def close(self) -> None:
        """End all waits."""
        self.closed = True
        self._changed.set()

    def release(self) -> None:
        """Release all memory. No lane may use it any more."""
        while self._memories:
            self._memories.popitem()[1].close()


def serves(agents: Mapping[str, Sequence[str]], agent: str, member: Member) -> bool:
    """Whether ``member`` is a rank of ``agent``. ``agents``: side -> agent of each rank."""
    side, rank = member
    return side in agents and 0 <= rank < len(agents[side]) and agents[side][rank] == agent


def _exhibit(part: Exhibits, segments: list[ShownSegment], handles: dict[str, TensorHandle]) -> Exhibit:
    return Exhibit(
        pid=part.pid,
        started=part.started,
        segments=tuple(SegmentClaim(**msgspec.structs.asdict(segment)) for segment in segments),
        tensors=handles,
    )


#: Most messages that show one rank's memory, enough for 200,000 tensors.
_PARTS = 32


class SharedSnapshots:
    """The snapshots that other agents show. ``close`` ends a wait for them. ``mappings`` as for ``SharedTensors``."""

    def __init__(self, mappings: Mappings | None = None) -> None:
        self._mappings = mappings
        self._shown: dict[tuple[str, Member], list[Exhibits]] = defaultdict(list)
        self._opened: dict[Member, HostMemory] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def take(self, agent: str, message: Exhibits) -> None:
        """Take one part. Parts after the last one are ignored, and so are more parts than an agent sends."""
        parts = self._shown[agent, (message.side, message.rank)]
        if not self._closed and len(parts) < _PARTS and not (parts and parts[-1].last):
            parts.append(message)
            self._changed.set()

    async def open(self, members: Mapping[Member, str], stopped: Callable[[], bool]) -> bool:
        """Open what is shown of these ranks (member -> its agent). Waits for what is not shown yet.

        False if ``stopped`` or closed first; call ``wake`` after stopping. TransferError if it cannot be opened.
        """
        for member, agent in members.items():
            while not (parts := self._shown[agent, member]) or not parts[-1].last:
                if stopped() or self._closed:
                    return False
                self._changed.clear()
                await self._changed.wait()
            if member in self._opened:
                continue
            try:
                opened = await asyncio.to_thread(open_shown, parts, self._mappings)
            except (ReachError, EthaError, OSError) as error:
                text = f"the snapshot of {member[0]} rank {member[1]} cannot be read by another agent: {error}"
                raise TransferError(text) from None
            if self._closed:
                opened[member].close()
                return False
            self._opened |= opened
        return True

    def memory(self, member: Member) -> HostMemory:
        """The opened memory of a rank. ProtocolError if none was opened."""
        if (found := self._opened.get(member)) is None:
            raise ProtocolError(f"{member[0]} rank {member[1]} has shown no snapshot")
        return found

    def wake(self) -> None:
        """Have waiting calls check again whether they were stopped."""
        self._changed.set()

    def close(self) -> None:
        """End all waits."""
        self._closed = True
        self._shown.clear()
        self._changed.set()

    def release(self) -> None:
        """Release all memory. No lane may use it any more."""
        while self._opened:
            self._opened.popitem()[1].close()
