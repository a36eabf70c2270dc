"""The segments that a client has shared with its agent, and which of its registrations use them.

    use = segments.use()                    one registration
    await use.show(handles, timeout)        the agent maps what it has not mapped yet
    await use.release(timeout)              the agent unmaps what no other registration of this client uses

The client names the segments to unmap, because only it knows those of registrations that the agent has not received
yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import torch

from etha.bus.link import AgentLink
from etha.bus.messages import LetGo, Released
from etha.client.memory.base import TensorMemory
from etha.memory import shared
from etha.memory.handles import TensorHandle, span_nbytes

#: Most segments of one request.
_MOST = 1 << 15


class SharedSegments:
    """All segments of one connection."""

    def __init__(self, link: AgentLink, home: TensorMemory) -> None:
        self._link, self._home = link, home
        self._shown: set[str] = set()
        self._uses: set[SegmentUse] = set()
        #: Prevents that a segment is shared again while it is being unmapped.
        self._changing = asyncio.Lock()
        #: Held from an exchange of segments until the agent has confirmed it, and while a registration finds out where
        #: its tensors lie. So the agent never hears of a place that is about to change.
        self.exchanging = asyncio.Lock()

    def use(self) -> SegmentUse:
        """The segments of one more registration."""
        return SegmentUse(self)

    async def show(self, use: SegmentUse, handles: Iterable[TensorHandle], timeout: float) -> None:
        """See ``SegmentUse.show``."""
        names = {handle.segment: None for handle in handles if handle.segment is not None}
        use.names.update(names)
        shared.hold(use, names)
        self._uses.add(use)
        async with self._changing:
            for name in names:
                if name not in self._shown:
                    header, descriptors = self._home.show(name)
                    await self._link.send_descriptors(header, descriptors, timeout=timeout)
                    self._shown.add(name)

    async def release(self, use: SegmentUse, timeout: float) -> None:
        """See ``SegmentUse.release``."""
        self._uses.discard(use)
        use.let_go()
        async with self._changing:
            while unused := sorted(self._shown.difference(*(other.names for other in self._uses)))[:_MOST]:
                # Even if no answer comes: sharing a segment that the agent still has does no harm.
                self._shown.difference_update(unused)
                released = await self._link.request(LetGo(all=False, segments=tuple(unused)), timeout=timeout)
                assert isinstance(released, Released)


class SegmentUse:
    """The segments of one registration: those of its tensors and of their staging. While it uses them, nobody else
    exchanges them (``memory.shared.exchange``)."""

    def __init__(self, segments: SharedSegments) -> None:
        self._segments = segments
        self.names: set[str] = set()
        #: Those of its tensors, from the moment at which it was found out where they lie.
        self.held: set[str] = set()

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """From now on nobody else exchanges the segments in which these lie."""
        for tensor in tensors:
            if tensor.device.type == "cpu":
                nbytes = span_nbytes(tensor.shape, tensor.stride(), tensor.itemsize)
                if (segment := shared.hold_at(self, tensor.data_ptr(), nbytes)) is not None:
                    self.held.add(segment.id)

    def let_go(self) -> None:
        """Others may exchange all of them. Idempotent."""
        shared.let_go(self, self.names | self.held)

    async def show(self, handles: Iterable[TensorHandle], timeout: float) -> None:
        """Let the agent map every segment that the handles name and that it has not mapped."""
        await self._segments.show(self, handles, timeout)

    async def release(self, timeout: float) -> None:
        """End the registration's use: the agent unmaps what only this one used. Idempotent."""
        await self._segments.release(self, timeout)
