"""A rank that cannot use a batch that stands, and the registration after it: all meet again, whoever comes first."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import etha
from etha.errors import EthaError, PeerLostError
from tests.flow.jobs import Job, Worker, tell, wait_for
from tests.flow.sites import Site

ROWS, COLUMNS = 64, 1 << 14  # 4 MiB
WORLDS = {"trainer": 2, "inference": 2}
MEMBERS = [(side, rank) for side, world in WORLDS.items() for rank in range(world)]
VICTIM = ("inference", 1)


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """This process may not make files of more than a megabyte, memory files included."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def source() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)


def tensor_of(side: str, rank: int) -> torch.Tensor:
    """A rank's rows of the source, or zeros to receive all of them in."""
    return source()[rank * ROWS // 2 :][: ROWS // 2].clone() if side == "trainer" else torch.zeros(ROWS, COLUMNS)


class Member:
    """One rank with either kind of client; its calls return what they raise."""

    def __init__(self, pair: str, side: str, rank: int, *, blocking: bool, late: bool) -> None:
        self.pair, self.side, self.rank, self.late = pair, side, rank, late
        self.tensor = tensor_of(side, rank)
        self._runner = None if blocking else asyncio.Runner()
        self._client: Any = etha.TensorBusClient(timeout=60.0) if blocking else etha.AsyncTensorBusClient(timeout=60.0)

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        if self._runner is None:
            return getattr(self._client, name)(*args, **options)

        async def call() -> Any:
            return await getattr(self._client, name)(*args, **options)

        return self._runner.run(call())

    def meet(self) -> None:
        other = "inference" if self.side == "trainer" else "trainer"
        placements = [Shard(0)] if self.side == "trainer" else [Replicate()]
        self.call("init_pair", self.pair, self.side, other, 2, (2,), placements, rank=self.rank)

    def register(self) -> str:
        """With ``late`` its shadow is allocated by the first call that receives, not here."""
        direction = None if self.late or self.side == "trainer" else "recv"
        options = {"shapes": {"w": (ROWS, COLUMNS)}, "atomic": True, "direction": direction}
        return self._said("register_tensors", "b", {"w": self.tensor}, pair_name=self.pair, **options)

    def transfer(self) -> str:
        return self._said("transfer", "b", "send" if self.side == "trainer" else "recv")

    def _said(self, name: str, *args: Any, **options: Any) -> str:
        try:
            self.call(name, *args, **options)
        except PeerLostError as error:
            return f"{error.reason} {error.outcome}: {error}"
        except EthaError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def close(self) -> None:
        self.call("close")
        if self._runner is not None:
            self._runner.close()


def member(pair: str, side: str, rank: int, *, blocking: bool, late: bool) -> None:
    """Does what the test says and tells what came of it, until it is told to end."""
    one = Member(pair, side, rank, blocking=blocking, late=late)
    try:
        one.meet()
        tell("met")
        while (order := wait_for("do")) != "end":
            with no_room() if order.startswith("poor ") else contextlib.nullcontext():
                said = one.register() if order.endswith("register") else one.transfer()
            tell("said", said)
        assert side == "trainer" or torch.equal(one.tensor, source())
    finally:
        one.close()


class Stage:
    """All ranks, each told what to do by name."""

    def __init__(self, job: Job, pair: str, *, blocking: bool, late: bool) -> None:
        self.workers: dict[tuple[str, int], Worker] = {
            (side, rank): job.start(member, pair, side, rank, at=(side, rank), blocking=blocking, late=late)
            for side, rank in MEMBERS
        }
        for worker in self.workers.values():
            worker.expect("met")

    def do(self, orders: dict[tuple[str, int], str]) -> dict[tuple[str, int], str]:
        """Give these orders, in this order, and wait for what comes of all."""
        for one, order in orders.items():
            self.workers[one].go("do", order)
        return {one: self.workers[one].expect("said", timeout=90.0) for one in orders}

    def everybody(self, order: str, *, first: tuple[str, int]) -> dict[tuple[str, int], str]:
        """``first`` is told before the others, but nobody waits for it."""
        return self.do(dict.fromkeys([first, *(one for one in MEMBERS if one != first)], order))

    def end(self) -> None:
        for worker in self.workers.values():
            worker.go("do", "end")
        for worker in self.workers.values():
            worker.result()


# The suite takes one half; `make proof` has the other.
cases = pytest.mark.parametrize(
    ("blocking", "first"),
    [
        pytest.param(True, ("trainer", 0), id="blocking-sender first"),
        pytest.param(False, VICTIM, id="async-failed rank first"),
        pytest.param(True, VICTIM, id="blocking-failed rank first", marks=pytest.mark.proof),
        pytest.param(False, ("trainer", 0), id="async-sender first", marks=pytest.mark.proof),
    ],
)


@pytest.mark.ways("local", "tcp", "three")
@cases
@pytest.mark.parametrize("late", [False, True], ids=["as it registers", "as it receives"])
def test_all_meet_again_after_a_rank_without_room(
    site: Site, pair: str, blocking: bool, first: tuple[str, int], late: bool
) -> None:
    with Job(site.env) as job:
        stage = Stage(job, pair, blocking=blocking, late=late)
        poor = {VICTIM: f"poor {'transfer' if late else 'register'}"}
        others = {one: "register" for one in MEMBERS if one != VICTIM}
        if late:
            assert not any(stage.do(others | {VICTIM: "register"}).values())
            reported = stage.do(dict.fromkeys(others, "transfer") | poor)
        else:
            said = stage.do(others | poor)
            reported = {VICTIM: said[VICTIM]} | {one: said[one] or stage.do({one: "transfer"})[one] for one in others}
        assert reported[VICTIM].startswith("ConfigError: ") and "RLIMIT_FSIZE" in reported[VICTIM]
        for one in others:
            assert reported[one].startswith("closed withdrawn: "), reported
            assert "inference rank 1 cannot take part in batch 'b', register it again" in reported[one]
        for _ in range(2):  # the second time it is open, and changes nothing
            assert not any(stage.everybody("register", first=first).values())
        assert not any(stage.everybody("transfer", first=first).values())
        stage.end()


@pytest.mark.ways("local", "tcp", "three")
@cases
def test_ranks_that_register_again_before_they_have_called_meet_too(
    site: Site, pair: str, blocking: bool, first: tuple[str, int]
) -> None:
    """They may know of the failed rank from their own program: nothing of the old registration is given to them."""
    with Job(site.env) as job:
        stage = Stage(job, pair, blocking=blocking, late=False)
        for victims in [{VICTIM}, {VICTIM, ("inference", 0)}, {VICTIM}]:
            said = stage.do({one: "poor register" if one in victims else "register" for one in MEMBERS})
            assert all(said[one] for one in victims)
        assert not any(stage.everybody("register", first=first).values())
        assert not any(stage.everybody("transfer", first=first).values())
        stage.end()
