"""Steps of the workers of a cell: meet, register an atomic batch, transfer once, say what the tensor holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import Shard

import etha
from etha.errors import EthaError
from tests.flow.jobs import tell
from tests.flow.puppets import Failure
from tests.flow.truth import cut, stale, whole

SMALL, LARGE = (12, 10), (4096, 16384)
OLD, NEW = 77.0, 1.0
Act = Callable[..., Any]
#: For every call of a worker: far beyond what any cell allows.
PATIENCE = 20.0


def begin(me: SimpleNamespace, pair: str) -> None:
    """The worker of another pair from now on, as a new client."""
    if hasattr(me, "client"):
        me.client.close()
    me.pair, me.bond, me.tensor = pair, None, None
    me.client = etha.TensorBusClient(timeout=PATIENCE)
    me.client.status()


def meet(me: SimpleNamespace) -> float:
    """``init_pair``; when it returned."""
    me.bond = me.client.init_pair(me.pair, me.side, me.remote, me.world, (me.world,), rank=me.rank)
    return time.monotonic()


def register(me: SimpleNamespace, batch: str, large: bool) -> None:
    """Rows that become columns; the large one is turned and cast, so that it takes its time."""
    if me.tensor is not None and not me.bond.lost.is_set():
        me.handle.close()
    dim = 0 if me.side == "trainer" else 1
    if large:
        share = LARGE[dim] // me.world
        me.tensor = torch.full((16384, share), NEW).T if dim == 0 else torch.full((4096, share), OLD).bfloat16()
        me.new = None
    else:
        me.new = cut(whole(SMALL, 5), dim, me.world, me.rank)
        me.tensor = me.new.clone() if dim == 0 else stale(me.new)
    me.handle = me.client.register_tensors(
        batch,
        {"w": me.tensor},
        pair_name=me.pair,
        placements={"w": [Shard(dim)]},
        shapes={"w": LARGE if large else SMALL},
        atomic=True,
    )


def _holds(me: SimpleNamespace) -> str:
    new = torch.equal(me.tensor, me.new) if me.new is not None else bool((me.tensor == NEW).all())
    return "new" if new else "old" if bool((me.tensor == OLD).all()) else "torn"


def move(me: SimpleNamespace) -> tuple[float, str] | Failure:
    """One transfer; when it returned, and what the tensor holds then; or how it failed."""
    reported: list[int] = []

    def progress(done: int, total: int) -> None:
        if done < total and not reported:
            reported.append(done)
            tell("moving")

    try:
        me.handle.transfer("send" if me.side == "trainer" else "recv", progress=progress)
        return time.monotonic(), _holds(me)
    except EthaError as error:
        at = time.monotonic()
        failure = Failure(kind=type(error).__name__, code=error.code, text=str(error), data=error.data(), at=at)
    if me.side == "inference":
        holds = _holds(me)
        aborted = failure.data.get("outcome") in ("aborted", "withdrawn")
        assert holds == "old" or (holds == "new" and not aborted), f"{failure}, and the target is {holds}"
    return failure


def lost(me: SimpleNamespace) -> tuple[str | None, float]:
    """Wait for ``pair.lost``; its reason and when it was heard."""
    assert me.bond.lost.wait(PATIENCE), "pair.lost has not been told"
    return me.bond.lost.reason, time.monotonic()


def stands(me: SimpleNamespace) -> Any:
    """Whether the pair stands."""
    return me.bond is not None and not me.bond.lost.is_set()


def agent_pid(me: SimpleNamespace) -> int:
    """The agent that serves this worker."""
    pid: int = me.client.status()["agent"]["pid"]
    return pid
