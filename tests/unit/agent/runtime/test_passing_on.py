"""A run that sends what is still arriving ends well only once the hop that brings it has committed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from etha.agent.runtime.run import DirectionProgram, TransferRun
from etha.errors import TransferError
from etha.transport.arrival import ArrivingVersion
from etha.transport.base import WireRun
from etha.transport.copy.program import Program
from etha.transport.copy.staging import Budget
from etha.transport.wire.flows import Flow, WireProgram

NOTHING = np.zeros(0, np.int64)
NEAR = Program(
    total=0, nbytes={}, peers={}, pieces=(), staged=0, tiles=(), pairs=(), tile=np.zeros(0, np.int32),
    pair=np.zeros(0, np.int32), source=NOTHING, target=NOTHING,
)  # fmt: skip


class Wire:
    """Streams that have sent everything at once."""

    def __init__(self) -> None:
        self.sent = asyncio.Event()

    async def run(self, run: WireRun, progress: Any) -> int:
        assert run.passed is not None
        self.sent.set()
        return 0

    def stop(self, error: BaseException) -> None:
        """There is nothing to stop."""


class Run:
    """A run over such streams, and how it has ended."""

    def __init__(self, passed: ArrivingVersion) -> None:
        self.wire, self.over = Wire(), asyncio.get_running_loop().create_future()
        tasks: set[asyncio.Task[None]] = set()

        def spawn(work: Any) -> None:
            tasks.add(asyncio.ensure_future(work))

        flow = Flow(peer="b", digest=b"", nbytes=1, lanes=((),))
        self.run = TransferRun(
            DirectionProgram(near=NEAR, nbytes={}, peers={}, wire=WireProgram(sends={"b": flow}, receives={})),
            1,
            {},
            lane=cast(Any, SimpleNamespace(workspaces=None, threads=1)),
            plane=cast(Any, SimpleNamespace(budget=Budget(1 << 20))),
            wire=cast(Any, self.wire),
            after=0,
            bases={},
            held=0,
            spawn=spawn,
            progress=lambda done: None,
            over=lambda error, touched: self.over.set_result(error),
            passed=passed,
        )
        self.run.start()

    async def still_waits(self) -> None:
        """All was sent, and the loop has had time for what follows from that."""
        await self.wire.sent.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not self.over.done()


@pytest.mark.parametrize("early", [False, True])
async def test_it_ends_well_once_that_hop_has_committed(early: bool) -> None:
    passed = ArrivingVersion(1, 5)
    if early:
        passed.end(whole=True)
    run = Run(passed)
    if not early:
        await run.still_waits()
        passed.end(whole=True)
    assert await run.over is None


@pytest.mark.parametrize(
    "end", [lambda run, passed: passed.end(whole=False), lambda run, passed: run.run.stop()], ids=["lost", "stopped"]
)
async def test_it_fails_if_that_hop_ends_otherwise_or_it_is_stopped(
    end: Callable[[Run, ArrivingVersion], None],
) -> None:
    passed = ArrivingVersion(1, 5)
    run = Run(passed)
    await run.still_waits()
    end(run, passed)
    assert isinstance(await run.over, TransferError)
    assert not passed.followed, "it listens no more"
