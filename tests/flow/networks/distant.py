"""Steps of puppets that live on hosts of their own: meet, register, transfer under watch, say what a target holds."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import Shard

import etha
from tests.flow.jobs import tell
from tests.flow.networks.tun import enter
from tests.flow.truth import cut, stale, whole

#: What ``holds`` says of a target that is neither as it was poisoned nor any version.
MIXED = "mixed"
OLD = "old"


def settle(me: SimpleNamespace, namespace: str) -> None:
    """Live in this namespace; the worker's agent starts there with its first call."""
    enter(namespace)
    me.client = etha.TensorBusClient(timeout=30)
    me.client.status(timeout=60)
    me.shapes, me.tensors, me.handles = {}, {}, {}


def meet(me: SimpleNamespace) -> int:
    """``init_pair``, once more where an agent was not in reach yet, as a user's loop does; the epoch."""
    for left in (2, 1, 0):
        try:
            me.bond = me.client.init_pair(me.pair, me.side, me.remote, me.world, (me.world,), rank=me.rank)
            break
        except (etha.AgentUnavailableError, etha.PeerLostError):
            if not left:
                raise
    epoch: int = me.bond.epoch
    return epoch


def register(me: SimpleNamespace, batch: str, shape: tuple[int, int], options: dict[str, Any]) -> None:
    """A batch of one tensor, rows that become columns."""
    me.shapes[batch] = shape
    me.tensors[batch] = stale(_part(me, batch, 0))
    me.handles[batch] = me.client.register_tensors(
        batch,
        {"w": me.tensors[batch]},
        pair_name=me.pair,
        placements={"w": [Shard(_dim(me))]},
        shapes={"w": shape},
        **options,
    )


def _dim(me: SimpleNamespace) -> int:
    return 0 if me.side == "trainer" else 1


def _part(me: SimpleNamespace, batch: str, version: int) -> torch.Tensor:
    return cut(whole(me.shapes[batch], version, torch.int32), _dim(me), me.world, me.rank)


def prepare(me: SimpleNamespace, batch: str, version: int) -> None:
    """Before a transfer: the source holds ``version``, the target nothing that is right."""
    if me.side == "trainer":
        me.tensors[batch].copy_(_part(me, batch, version))
    else:
        me.tensors[batch].fill_(77)


def transfer(me: SimpleNamespace, batch: str, version: int, timeout: float) -> tuple[int, float]:
    """One transfer; tells "moving" once while bytes move. Its seq and how long the call took."""
    began = time.monotonic()
    result = _call(me, batch, version, timeout=timeout, progress=_watch())
    return result.seq, time.monotonic() - began


def _call(me: SimpleNamespace, batch: str, version: int, **options: Any) -> Any:
    if me.side == "trainer":
        return me.handles[batch].transfer("send", version=version, **options)
    return me.handles[batch].transfer("recv", **options)


def _watch(then: Any = None) -> Any:
    reported: list[int] = []

    def progress(done: int, total: int) -> None:
        if 0 < done < total and not reported:
            reported.append(done)
            tell("moving", time.monotonic())
            if then is not None:
                then()

    return progress


def die_in_transfer(me: SimpleNamespace, batch: str, version: int) -> None:
    """Be killed while bytes move."""
    _call(me, batch, version, progress=_watch(lambda: os.kill(os.getpid(), signal.SIGKILL)))
    raise AssertionError("the transfer has ended before there was any progress")


def interrupted_in_transfer(me: SimpleNamespace, batch: str, version: int) -> float:
    """A call that Ctrl-C ends; when it has returned."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _call(me, batch, version, progress=_watch())
    except KeyboardInterrupt:
        return time.monotonic()
    raise AssertionError("the call was not interrupted")


def holds(me: SimpleNamespace, batch: str, version: int) -> str | int:
    """Every element of the target: the version, OLD as it was poisoned, or MIXED."""
    tensor = me.tensors[batch]
    if torch.equal(tensor, _part(me, batch, version)):
        return version
    return OLD if bool((tensor == 77).all()) else MIXED


def agent(me: SimpleNamespace) -> dict[str, Any]:
    """What ``status`` says of this worker's agent."""
    found: dict[str, Any] = me.client.status()["agent"]
    return found


def is_lost(me: SimpleNamespace, within: float = 0.0) -> bool:
    """Whether the pair is lost, or gets lost in this time."""
    return bool(me.bond.lost.wait(within)) if within else me.bond.lost.is_set()
