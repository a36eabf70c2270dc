"""A worker that asks its agent what a client asks, over a simulated bus.

Both ends really encode and decode. What the agent's end takes is charged to the agent; the worker takes no time. Its
tensors are addresses at which nothing lies, because nobody reads or writes them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import Any

from etha.agent.server import Agent
from etha.bus.codec import Envelope, Failure, Push, Reply, Request, decode, encode
from etha.bus.handshake import WorkerHello
from etha.bus.messages import Entry, InitPair, Moved, PairFormed, Register, Registered, Transfer
from etha.bus.sessions import Peer
from etha.errors import EthaError
from etha.memory.handles import TensorHandle, span_nbytes
from etha.memory.process import start_time
from etha.plan import Layout
from etha.version import __version__
from simulation.virtual_time import Actor, VirtualLoop

PAIR, BATCH = "scale", "weights"
#: Seconds from one end of the bus to the other.
_BUS = 30e-6
#: Where the first tensor of all workers begins. No two tensors overlap, and none lies where this process has memory.
_FIRST_ADDRESS = 1 << 50


class SimulatedWorker:
    """Rank ``rank`` of ``side``, whose tensors have global ``shape`` and lie as ``layout`` says."""

    def __init__(
        self,
        loop: VirtualLoop,
        agent: Agent,
        owner: Actor,
        side: str,
        rank: int,
        layout: Layout,
        shape: tuple[int, ...],
    ) -> None:
        self._loop, self._agent, self._owner = loop, agent, owner
        self.side, self.rank, self._layout, self._shape = side, rank, layout, shape
        self.actor = Actor(f"{side} {rank}", measured=False)
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        #: What the agent has told without being asked, which is an error here.
        self.pushed: list[Any] = []
        self.epoch = 0
        pid = os.getpid()
        self._hello = WorkerHello(
            version=__version__,
            namespace=agent.settings.namespace,
            redis=None,
            host=agent.settings.host_id,
            pid=pid,
            start=start_time(pid),
        )
        self._peer = Peer(
            key=f"{side}-{rank}", pid=pid, uid=os.getuid(), start=self._hello.start, hello=self._hello, post=self._post,
            hand=lambda *_: False,  # it shows its memory to nobody
        )  # fmt: skip

    def connect(self) -> None:
        """Open a session. Call it as the agent."""
        self._agent.hello(self._peer, self._hello)

    async def init_pair(self, remote: str, world_size: int) -> None:
        """Raises AssertionError unless the pair is formed."""
        message = InitPair(pair=PAIR, side=self.side, remote=remote, world_size=world_size, rank=self.rank, launch=None)
        found = await self._ask(message)
        assert isinstance(found, PairFormed), found
        assert (found.local_world_size, found.remote_world_size) == (world_size, world_size), found
        self.epoch = found.epoch

    async def register(self, tensors: int) -> None:
        """Register so many tensors. Raises AssertionError unless all ranks do."""
        local = self._layout.local_shape(self._shape, self.rank)
        strides = (local[1], 1)
        self.nbytes = span_nbytes(local, strides, 4)
        # The two sides count from different places.
        first = (self.rank << 1 | (self.side == "source")) * tensors
        entries = tuple(
            Entry(
                name=f"t{i}",
                pair=0,
                layout=0,
                shape=self._shape,
                handle=TensorHandle(
                    segment=None,
                    offset=_FIRST_ADDRESS + (first + i) * _rounded(self.nbytes),
                    shape=local,
                    strides=strides,
                    dtype="float32",
                ),
            )
            for i in range(tensors)
        )
        message = Register(
            batch=BATCH,
            epoch=self.epoch,
            form="map",
            pairs=(PAIR,),
            layouts=(self._layout.to_plain(),),
            entries=entries,
            refusals=(),
            direction=None,
            bucket_size=None,
            atomic=False,
            verify=None,
            seq=0,
        )
        found = await self._ask(message)
        assert isinstance(found, Registered), found
        self._tensors = tensors

    async def transfer(self) -> None:
        """Send or receive. Raises AssertionError unless all of this rank's bytes count as moved."""
        verb: Any = "send" if self.side == "source" else "recv"
        message = Transfer(batch=BATCH, epoch=self.epoch, verb=verb, version=None, slot=0, progress=False)
        found = await self._ask(message)
        assert isinstance(found, Moved), found
        assert found.nbytes == self.nbytes * self._tensors, (found, self.nbytes)

    async def _ask(self, message: Any) -> Any:
        """The answer, or its error."""
        id, answer = next(self._ids), self._loop.create_future()
        self._waiting[id] = answer
        data = encode(Request(id, None, message))
        self._loop.call_later(_BUS, self._asked, data, context=self._owner.context)
        return await answer

    # ---- at the agent -------------------------------------------------------------------------

    def _asked(self, data: bytes) -> None:
        request = decode(data, self._loop.time())
        assert isinstance(request, Request)
        self._peer.requests.add(request.id)
        self._agent.received(self._peer, request)

    def _post(self, peer: Peer, envelope: Envelope) -> None:
        self._loop.call_later(_BUS, self._told, encode(envelope), context=self.actor.context)

    # ---- at the worker ------------------------------------------------------------------------

    def _told(self, data: bytes) -> None:
        match decode(data):
            case Reply(id=id, message=message):
                self._waiting.pop(id).set_result(message)
            case Failure(id=id, error=error):
                self._waiting.pop(id).set_exception(error)
            case Push(message=message):
                self.pushed.append(message)
                for answer in self._waiting.values():
                    if not answer.done():
                        answer.set_exception(EthaError(f"{self.actor}: {message}"))


def _rounded(nbytes: int) -> int:
    """So many bytes and some room, so that tensors do not touch each other."""
    return (nbytes + 4096) & ~63
