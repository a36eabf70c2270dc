"""An ``init_pair`` that ends early: its worker hears of it once Redis has given its rank up, or cannot."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from etha.agent.runtime.sessions import OpenCalls, WorkerSession
from etha.agent.services import rendezvous
from etha.agent.services.rendezvous import RendezvousService
from etha.bus.codec import Request
from etha.bus.messages import InitPair
from etha.store.records import PairView, RankHolder, SideView

HOLDER = RankHolder(agent="A", host="here", pid=1, start=1)
ASKED = InitPair(pair="p", side="trainer", remote="inference", world_size=1, rank=0, launch=None)
#: What nobody here uses.
UNUSED: Any = None


class Pairs:
    """A store whose answer to ``leave`` the test gives."""

    def __init__(self) -> None:
        self.joined, self.leaving, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def join(self, *_: Any, **__: Any) -> PairView:
        self.joined.set()
        waits = RankHolder(agent="A", host="here", pid=1, start=1, epoch=1)
        sides = {"trainer": SideView(world_size=1, members={0: waits}), "inference": SideView()}
        return PairView(name="p", state="forming", epoch=0, sides=sides)

    async def leave(self, *_: Any, **__: Any) -> bool:
        self.leaving.set()
        await self.left.wait()
        return True


class Rendezvous:
    """The service of agent "A", which one worker asks."""

    def __init__(self) -> None:
        self.pairs, self.calls, self.errors = Pairs(), OpenCalls(), asyncio.Queue[str]()
        self.tasks: set[asyncio.Task[None]] = set()
        peer = SimpleNamespace(key="worker", fail=lambda _, error: self.errors.put_nowait(error.code))
        self.session: Any = WorkerSession(peer=peer, holder=HOLDER, memory=UNUSED)  # type: ignore[arg-type]
        self.store = SimpleNamespace(
            url="redis://here", pairs=self.pairs, keys=SimpleNamespace(pair=lambda name: name), watch=self.watch
        )
        self.service = RendezvousService(
            store=self.store,  # type: ignore[arg-type]
            links=UNUSED,
            calls=self.calls,
            sessions=lambda: [self.session],
            spawn=self.spawn,
            broken=UNUSED,
            hints=SimpleNamespace(of_pair=self.hint),  # type: ignore[arg-type]
        )

    @contextlib.contextmanager
    def watch(self, *_: Any, **__: Any) -> Iterator[None]:
        yield

    async def hint(self, *_: Any, **__: Any) -> str:
        return ""

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.add(asyncio.get_running_loop().create_task(work))

    async def ask(self) -> None:
        """The worker's call waits for others."""
        self.service.init(self.session, Request(1, None, ASKED), ASKED)
        await self.pairs.joined.wait()
        await self.turns()
        assert self.service.shown()[0][0].waits_for_others(("worker", 1))

    async def turns(self) -> None:
        """Let every task do what it can."""
        for _ in range(20):
            await asyncio.sleep(0)

    def end(self, expired: bool) -> None:
        self.calls._ended(("worker", 1), expired)

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()


@pytest.mark.parametrize("expired", [True, False], ids=["late", "cancelled"])
async def test_a_worker_hears_that_it_gave_up_once_its_rank_is_free(expired: bool) -> None:
    one = Rendezvous()
    await one.ask()
    one.end(expired)
    await one.pairs.leaving.wait()
    await one.turns()
    assert one.errors.empty(), "another rank may still complete an epoch with this one"
    one.pairs.left.set()
    assert await one.errors.get() == "rendezvous_timeout"
    one.close()


async def test_nobody_waits_for_a_redis_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_GIVEN_UP", 0.05)
    one = Rendezvous()
    await one.ask()
    one.end(True)
    assert await one.errors.get() == "rendezvous_timeout"
    assert not one.pairs.left.is_set()
    one.close()
