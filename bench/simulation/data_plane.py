"""Streams and copies that move no bytes.

A batch's transport, its leases of streams, tokens, programs and bookings are Etha's own. Not real: the connections, of
which each takes two round trips, and the run itself, which ends one message delay after it has begun. So a transfer
shows what agreeing costs, and its first one what compiling costs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from etha.agent.runtime.lane import MAX_THREADS, WorkspacePool
from etha.transport.base import Progress, WireRun
from etha.transport.tcp.data_plane import DataPlane, StreamSet
from etha.transport.tcp.listener import DataAddress
from etha.transport.wire.flows import WireProgram
from simulation.network import DataPort


class SimulatedOutlet:
    """A stream to another agent."""

    healthy = True
    closed = False

    def shut(self) -> None:
        """Nothing runs that could be woken."""


class SimulatedRun:
    """What ``TcpTransport`` sees of a run: everything has moved when it is over."""

    error: BaseException | None = None
    unfinished = False

    def __init__(self, program: WireProgram, label: tuple[bytes, int]) -> None:
        self.program, self.label = program, label
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        received = sum(flow.nbytes for flow in program.receives.values())
        self.done = received + sum(flow.nbytes for flow in program.sends.values())
        self.touched, self.wired = bool(program.receives), received

    def finish(self) -> None:
        """It is over."""
        if not self.over.done():
            self.over.set_result(None)

    def fail(self, cause: BaseException) -> None:
        """The transfer is aborted."""
        if not self.over.done():
            self.error = cause
            self.over.set_result(None)


class SimulatedPlane(DataPlane):
    """An agent's data plane without sockets and threads."""

    def __init__(self, port: DataPort, **options: Any) -> None:
        super().__init__(port, **options)
        self._port = port
        port.network.doors[port.address] = (port.actor, options["admit"])

    async def run(self) -> None:
        """Nobody connects to a port."""
        await asyncio.Event().wait()

    async def _open(self, one: StreamSet, address: DataAddress) -> None:
        tokens = await address.tokens(self.streams)
        network = self._port.network
        actor, admit = network.doors[f"{address.host}:{address.port}"]
        for token in tokens:
            network.send(actor, 1.5, admit, token)
        await asyncio.sleep(4 * network.latency)
        one.outlets = [SimulatedOutlet() for _ in tokens]
        self._port.actor.account.streams += len(tokens)

    def begin(self, wire_run: WireRun, sets: Mapping[str, StreamSet], on_progress: Progress | None) -> SimulatedRun:
        """Start a run. It needs no staging, and is over after one message delay."""
        run = SimulatedRun(wire_run.program, (wire_run.key, wire_run.seq))
        asyncio.get_running_loop().call_later(self._port.network.latency, run.finish)
        return run

    def finish(self, run: Any) -> None:
        """The run is over, and nothing is left of it."""

    def note(self, run: Any, seconds: float) -> None:
        """Speeds of this run say nothing."""


class SimulatedLane:
    """A lane that has nothing to do, because all bytes go between agents."""

    idle = True
    busy = 0.0

    def __init__(self) -> None:
        self.workspaces = WorkspacePool()
        self.threads = MAX_THREADS

    def submit(self, *_: Any, **__: Any) -> None:
        """No copies within an agent are simulated."""
        raise NotImplementedError

    def close(self) -> None:
        """No threads were started."""
