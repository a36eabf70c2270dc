"""Steps of puppets: meet, register a tensor, send and receive it, be killed half way."""

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
from tests.flow.truth import cut, stale, whole

SHAPE = (7, 6)


def init(me: SimpleNamespace, timeout: float = 30.0) -> int:
    """``init_pair``; the epoch."""
    if not hasattr(me, "client"):
        me.client = etha.TensorBusClient(timeout=20)
    tell("started")
    me.bond = me.client.init_pair(me.pair, me.side, me.remote, me.world, (me.world,), rank=me.rank, timeout=timeout)
    return me.bond.epoch


def register(me: SimpleNamespace) -> None:
    """Batch "b" of one tensor: the trainer's rows, the other side's columns."""
    me.dim, me.shape = (0, SHAPE) if me.side == "trainer" else (1, SHAPE)
    mine = cut(whole(SHAPE), me.dim, me.world, me.rank)
    me.tensor = mine if me.side == "trainer" else stale(mine)
    me.handle = me.client.register_tensors(
        "b",
        {"w": me.tensor},
        pair_name=me.pair,
        placements={"w": [Shard(me.dim)]},
        shapes={"w": SHAPE},
    )


def register_large(me: SimpleNamespace, options: dict[str, Any]) -> None:
    """Batch "b" as 256 MB that cannot move fast: turned, and cast on the way."""
    me.dim, me.shape = (0, (4096, 16384)) if me.side == "trainer" else (1, (4096, 16384))
    share = me.shape[me.dim] // me.world
    if me.side == "trainer":
        me.tensor = torch.ones(16384, share).T
    else:
        me.tensor = torch.full((4096, share), 77, dtype=torch.bfloat16)
    me.handle = me.client.register_tensors(
        "b", {"w": me.tensor}, pair_name=me.pair, placements={"w": [Shard(me.dim)]}, **options
    )


def transfer(me: SimpleNamespace) -> None:
    """One transfer of whatever is in the tensor."""
    me.handle.transfer("send" if me.side == "trainer" else "recv")


def send(me: SimpleNamespace, version: int) -> int:
    """Send that version; its seq."""
    me.tensor.copy_(cut(whole(me.shape, version), me.dim, me.world, me.rank))
    return me.handle.transfer("send", version=version).seq


def recv(me: SimpleNamespace) -> tuple[int, Any]:
    """Receive; seq and version, once every element has been compared."""
    result = me.handle.transfer("recv")
    assert torch.equal(me.tensor, cut(whole(me.shape, result.version), me.dim, me.world, me.rank))
    return result.seq, result.version


def close(me: SimpleNamespace) -> None:
    """Close the client as a program that ends does."""
    me.client.close()


def lost(me: SimpleNamespace) -> tuple[str | None, float]:
    """Wait for ``pair.lost``; its reason and when it was heard."""
    assert me.bond.lost.wait(20)
    return me.bond.lost.reason, time.monotonic()


def is_lost(me: SimpleNamespace) -> bool:
    """Whether the pair is lost by now."""
    return me.bond.lost.is_set()


def die_half_way(me: SimpleNamespace) -> None:
    """In the middle of a transfer: tell, and kill this process."""

    def progress(done: int, total: int) -> None:
        if done < total / 2:
            tell("half way", time.monotonic())
            os.kill(os.getpid(), signal.SIGKILL)

    me.handle.transfer("send" if me.side == "trainer" else "recv", progress=progress)
    raise AssertionError("the transfer has ended before there was any progress")


def is_old(me: SimpleNamespace) -> bool:
    """Whether the target of ``register_large`` holds what was there first, all of it."""
    return bool((me.tensor == 77).all())
