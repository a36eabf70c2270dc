"""Calls that end early: ``init_pair`` once Redis has given its rank up, or cannot; what is named without Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from etha.agent.runtime import tasks
from etha.agent.runtime.sessions import OpenCalls, Seat, WorkerSession
from etha.agent.services.registration import RegistrationService
from etha.agent.services.rendezvous import RendezvousService
from etha.bus.codec import Request
from etha.bus.messages import InitPair, Register
from etha.errors import AgentUnavailableError, EthaError, RedisUnavailableError
from etha.store.records import PairView, RankHolder, SideView

HOLDER = RankHolder(agent="A", host="here", pid=1, start=1)
ASKED = InitPair(pair="p", side="trainer", remote="inference", world_size=1, rank=0, launch=None)
BATCH = Register(
    batch="b",
    epoch=1,
    form="map",
    pairs=("p",),
    layouts=(),
    entries=(),
    refusals=(),
    direction=None,
    bucket_size=None,
    atomic=False,
    verify=None,
    seq=0,
)
#: What nobody here uses.
UNUSED: Any = None


class Pairs:
    """A store whose answer to ``leave`` the test gives."""

    def __init__(self) -> None:
        self.joined, self.leaving, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.away: EthaError | None = None

    async def join(self, *_: Any, **__: Any) -> PairView:
        if self.away is not None:
            raise self.away
        self.joined.set()
        waits = RankHolder(agent="A", host="here", pid=1, start=1, epoch=1)
        sides = {"trainer": SideView(world_size=1, members={0: waits}), "inference": SideView()}
        return PairView(name="p", state="forming", epoch=0, sides=sides)

    async def get(self, *_: Any, **__: Any) -> PairView | None:
        return None  # who has come since is not known here

    async def leave(self, *_: Any, **__: Any) -> bool:
        self.leaving.set()
        await self.left.wait()
        return True


class Rendezvous:
    """The service of agent "A", which one worker asks."""

    def __init__(self) -> None:
        self.pairs, self.calls, self.errors = Pairs(), OpenCalls(), asyncio.Queue[EthaError]()
        self.tasks: set[asyncio.Task[None]] = set()
        peer = SimpleNamespace(key="worker", fail=lambda _, error: self.errors.put_nowait(error))
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
    assert (await one.errors.get()).code == "rendezvous_timeout"
    one.close()


async def test_nobody_waits_for_a_redis_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TAKEN_BACK", 0.05)
    one = Rendezvous()
    await one.ask()
    one.end(True)
    assert (await one.errors.get()).code == "rendezvous_timeout"
    assert not one.pairs.left.is_set()
    one.close()


async def test_an_init_pair_without_redis_is_named_in_its_error() -> None:
    one = Rendezvous()
    one.pairs.away = RedisUnavailableError("Redis at redis://here could not be reached")
    one.service.init(one.session, Request(1, None, ASKED), ASKED)
    error = await one.errors.get()
    assert error.message == "init_pair of 'p' by trainer rank 0: Redis at redis://here could not be reached"
    one.close()


async def test_a_registration_without_redis_is_named_in_its_error() -> None:
    one = Rendezvous()

    async def put_layouts(*_: Any, **__: Any) -> None:
        raise RedisUnavailableError("Redis at redis://here could not be reached")

    service = RegistrationService(
        me="A",
        store=SimpleNamespace(batches=SimpleNamespace(put_layouts=put_layouts)),  # type: ignore[arg-type]
        links=UNUSED,
        calls=one.calls,
        rendezvous=SimpleNamespace(error=lambda _: None),  # type: ignore[arg-type]
        transfers=UNUSED,
        gc_scheduler=UNUSED,
        spawn=one.spawn,
        hints=UNUSED,
    )
    one.session.seats["p"] = Seat(pair="p", side="trainer", rank=0, remote="inference", holder=HOLDER, epoch=1)
    service.register(one.session, Request(1, None, BATCH), BATCH)
    error = await one.errors.get()
    assert error.message.startswith(
        "register_tensors of batch 'b' of pair 'p' by trainer rank 0: Redis at redis://here"
    )
    assert error.code == "redis_unavailable"
    one.close()


@pytest.mark.parametrize("over", [False, True])
async def test_an_epoch_that_is_over_is_no_trouble_if_its_agents_did_not_meet(
    over: bool, caplog: pytest.LogCaptureFixture
) -> None:
    one = Rendezvous()
    await one.ask()
    service: Any = one.service
    known, service._broken = service._known["p"], lambda *_: None
    formed = RankHolder(agent="A", host="here", pid=1, start=1, epoch=1)
    sides = {side: SideView(world_size=1, members={0: formed}) for side in ("trainer", "inference")}
    known.machine.viewed(PairView(name="p", state="formed", epoch=1, sides=sides))
    if over:
        known.machine.viewed(PairView(name="p", state="lost", epoch=1, reason="died", error="b died", sides=sides))

    async def form(*_: Any) -> None:
        raise AgentUnavailableError("agents b did not meet this one within 10 s")

    service._links = SimpleNamespace(form=form, forget=lambda pair, epoch: None)
    one.pairs.sever = AsyncMock()  # type: ignore[attr-defined]
    await service._meet(known, 1, {"A", "b"})
    await one.turns()
    found = [record for record in caplog.records if record.levelname == "WARNING" and record.name.startswith("etha")]
    assert len(found) == (0 if over else 1)
    one.close()
