"""Blocking calls that their own threads make: how a test comes to them, and how it sees them."""

from __future__ import annotations

import asyncio

from etha.bus.direct import DirectConnection
from etha.client.direct import DirectTransfer
from etha.client.sync import BatchHandle, TensorBusClient


def ask_directly(client: TensorBusClient, batch: BatchHandle) -> DirectConnection:
    """From now on blocking transfers of ``batch`` are made by their own threads. The connection over which they ask."""
    connection = batch._inner._registration.connection
    connection.collapser.settle()  # meanwhile calls go over the loop
    link = connection.link

    async def opened() -> DirectConnection:
        while link.direct is None:  # the transfer before may have begun to open it
            link._check()
            assert link.wants_direct or link._opening_direct, "the agent takes no direct connection"
            await (link.open_direct() if link.wants_direct else asyncio.sleep(0))
        return link.direct

    return client._run(opened())


def count_direct() -> list[DirectTransfer]:
    """In a worker: the calls that its threads make themselves from now on."""
    calls: list[DirectTransfer] = []
    run = DirectTransfer._answer

    def counted(self: DirectTransfer, connection: DirectConnection, pid: int) -> object:
        calls.append(self)
        return run(self, connection, pid)

    DirectTransfer._answer = counted  # type: ignore[method-assign, assignment]
    return calls
