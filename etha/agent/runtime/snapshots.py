"""Where workers set their tensors aside before they send them, as one registration on an agent knows it.

A worker's own agent is told once a registration (``AttachSnapshot``), and tells the agents of its host that
copy from it. Those open it when the first transfer of a snapshot comes, which may be before it is shown.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from etha.agent.protocol.effects import Member
from etha.agent.runtime.host_sharing import exhibits, open_shown
from etha.errors import EthaError, ProtocolError, TransferError
from etha.memory.cuda import Mappings
from etha.memory.reach import ReachError
from etha.peer.introductions import Exhibits
from etha.transport.copy.host import HostMemory

if TYPE_CHECKING:
    from etha.agent.runtime.peers import Links
    from etha.agent.services.batch_state import Live

#: Messages that show one rank's: those of 200,000 tensors.
_PARTS = 32


async def show(live: Live, links: Links, member: Member) -> None:
    """Tell the agents that copy from ``member`` where its snapshots are."""
    tensors = live.tensors.get(member)  # none: the batch was closed at once
    readers = live.read_by(member[0])
    if not readers or tensors is None or tensors.snapshot is None:
        return
    shown = {member: (tensors.session, tensors.snapshot)}
    for message in await asyncio.to_thread(exhibits, shown, snapshot=True):
        for agent in readers:
            links.tell(agent, live.scope, message)


class Snapshots:
    """Those that other agents show. ``close`` ends a wait for them; ``mappings`` as of ``Exhibition``."""

    def __init__(self, mappings: Mappings | None = None) -> None:
        self._mappings = mappings
        self._shown: dict[tuple[str, Member], list[Exhibits]] = defaultdict(list)
        self._opened: dict[Member, HostMemory] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def take(self, agent: str, message: Exhibits) -> None:
        """One part; what comes after the last is ignored, and so is what no agent would send."""
        parts = self._shown[agent, (message.side, message.rank)]
        if not self._closed and len(parts) < _PARTS and not (parts and parts[-1].last):
            parts.append(message)
            self._changed.set()

    async def open(self, members: Mapping[Member, str], stopped: Callable[[], bool]) -> bool:
        """Open what is shown of these ranks (each of its agent); waits for what is not shown yet.

        False when ``stopped`` or closed before; call ``wake`` for the first. TransferError: it cannot be opened.
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
        """What was opened; ProtocolError for a rank of which nothing was."""
        if (found := self._opened.get(member)) is None:
            raise ProtocolError(f"{member[0]} rank {member[1]} has shown no snapshot")
        return found

    def wake(self) -> None:
        """Who waits looks again whether it was stopped."""
        self._changed.set()

    def close(self) -> None:
        """Nothing more is waited for."""
        self._closed = True
        self._shown.clear()
        self._changed.set()

    def release(self) -> None:
        """Let go of all memory; no lane may be inside it any more."""
        while self._opened:
            self._opened.popitem()[1].close()
