"""on_error="report" with real processes: a peer is killed half way, and the survivor goes on without a raised error."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard

import etha
from etha.bus.messages import Transfer
from tests.flow.acts import die_half_way, init, recv, register, register_large, send
from tests.flow.puppets import Stage, together
from tests.flow.truth import cut, whole

Told = tuple[bool, bool, str, str, int]


def outcome_of(result: etha.TransferResult) -> Told:
    """(ok, skipped, class of the error, its reason, seq)"""
    error = result.error
    return result.ok, result.skipped, type(error).__name__, getattr(error, "reason", ""), result.seq


def make(me: SimpleNamespace) -> None:
    """The blocking client that reports, ahead of ``init``."""
    me.client = etha.TensorBusClient(timeout=20, on_error="report")


def record_requests(me: SimpleNamespace) -> None:
    """From now on, keep the transfers that this client asks its agent for; memory may be given back at any time."""
    aio = getattr(me.client, "_aio", me.client)
    channel = aio._connection.link._channel
    me.asked = []
    post = channel.post

    def recorded(envelope: Any) -> Any:
        if isinstance(getattr(envelope, "message", None), Transfer):
            me.asked.append(envelope.message)
        return post(envelope)

    channel.post = recorded


def try_to_send(me: SimpleNamespace, blocking: bool = True) -> Told:
    """One transfer, whatever comes of it."""
    if blocking:
        return outcome_of(me.handle.transfer("send"))
    return outcome_of(me.handle.transfer("send", blocking=False).result(20))


def skip(me: SimpleNamespace) -> tuple[list[Told], int, str]:
    """Three transfers that are skipped; what they say, how many the agent was asked for, and ``errored``."""
    record_requests(me)
    results = [try_to_send(me), try_to_send(me, blocking=False), outcome_of(me.client.transfer("b", "send"))]
    return results, len(me.asked), type(me.bond.errored).__name__


def fine(me: SimpleNamespace) -> bool:
    return me.bond.errored is None


def on_loop(me: SimpleNamespace, work: Coroutine[Any, Any, Any]) -> Any:
    """Run on the puppet's own event loop, where its AsyncTensorBusClient lives from step to step."""
    if not hasattr(me, "runner"):
        me.runner = asyncio.Runner()
    return me.runner.run(work)


def init_async(me: SimpleNamespace) -> int:
    async def work() -> int:
        if not hasattr(me, "client"):
            me.client = etha.AsyncTensorBusClient(timeout=20, on_error="report")
        me.bond = await me.client.init_pair(me.pair, me.side, me.remote, me.world, (me.world,), rank=me.rank)
        return int(me.bond.epoch)

    epoch: int = on_loop(me, work())
    return epoch


def register_async(me: SimpleNamespace, shape: tuple[int, int]) -> None:
    """Batch "b" as ``register`` or ``register_large`` have it on the other side."""

    async def work() -> None:
        me.dim, me.shape, options = 0, shape, {}
        if shape == (7, 6):
            me.tensor, options = cut(whole(shape), 0, me.world, me.rank), {"shapes": {"w": shape}}
        else:
            me.tensor = torch.ones(shape[1], shape[0] // me.world).T
        me.handle = await me.client.register_tensors(
            "b", {"w": me.tensor}, pair_name=me.pair, placements={"w": [Shard(0)]}, **options
        )

    on_loop(me, work())


def try_to_send_async(me: SimpleNamespace) -> Told:
    async def work() -> Told:
        return outcome_of(await me.handle.transfer("send"))

    result: Told = on_loop(me, work())
    return result


def skip_async(me: SimpleNamespace) -> tuple[list[Told], int, str]:
    async def work() -> list[Told]:
        record_requests(me)
        return [outcome_of(await me.handle.transfer("send")), outcome_of(await me.client.transfer("b", "send"))]

    results = on_loop(me, work())
    return results, len(me.asked), type(me.bond.errored).__name__


def send_async(me: SimpleNamespace, version: int) -> int:
    async def work() -> int:
        me.tensor.copy_(cut(whole(me.shape, version), me.dim, me.world, me.rank))
        result = await me.handle.transfer("send", version=version)
        assert result.ok and me.bond.errored is None
        return int(result.seq)

    seq: int = on_loop(me, work())
    return seq


def close_async(me: SimpleNamespace) -> None:
    on_loop(me, me.client.close())
    me.runner.close()


@pytest.mark.ways("local", "tcp")
def test_the_blocking_client(stage: Stage) -> None:
    trainer, victim = stage.puppet("trainer", 0, 1), stage.puppet("inference", 0, 1)
    trainer.do(make)
    together([trainer, victim], init)
    together([trainer, victim], register_large, {})
    trainer.begin(try_to_send)
    victim.begin(die_half_way)
    assert trainer.ends() == (False, False, "PeerLostError", "died", 0)
    results, asked, errored = trainer.do(skip)
    assert results == [(False, True, "PeerLostError", "died", 0)] * 3
    assert (asked, errored) == (0, "PeerLostError"), "what is skipped is not asked for"

    again = stage.puppet("inference", 0, 1)
    assert together([trainer, again], init) == [2, 2]
    assert trainer.do(fine)
    together([trainer, again], register)
    trainer.begin(send, 5)
    assert again.do(recv) == (2, 5)
    assert trainer.ends() == 2


@pytest.mark.ways("local", "tcp")
def test_the_async_client(stage: Stage) -> None:
    trainer, victim = stage.puppet("trainer", 0, 1), stage.puppet("inference", 0, 1)
    trainer.begin(init_async)
    victim.do(init)
    assert trainer.ends() == 1
    trainer.begin(register_async, (4096, 16384))
    victim.do(register_large, {})
    trainer.ends()
    trainer.begin(try_to_send_async)
    victim.begin(die_half_way)
    assert trainer.ends() == (False, False, "PeerLostError", "died", 0)
    results, asked, errored = trainer.do(skip_async)
    assert results == [(False, True, "PeerLostError", "died", 0)] * 2
    assert (asked, errored) == (0, "PeerLostError"), "what is skipped is not asked for"

    again = stage.puppet("inference", 0, 1)
    trainer.begin(init_async)
    assert (again.do(init), trainer.ends()) == (2, 2)
    trainer.begin(register_async, (7, 6))
    again.do(register)
    trainer.ends()
    trainer.begin(send_async, 5)
    assert again.do(recv) == (2, 5)
    assert trainer.ends() == 2
    trainer.do(close_async)


def fail_alone(me: SimpleNamespace) -> tuple[Told, Told, int, bool]:
    """Nobody receives: this worker's own deadline ends the call. ``init_pair`` finds that the pair stands."""
    late = outcome_of(me.handle.transfer("send", timeout=0.1))
    skipped = try_to_send(me)
    before = me.bond
    return late, skipped, init(me), me.bond is before and me.bond.errored is None


@pytest.mark.ways("local", "tcp")
def test_a_pair_that_stands_goes_on_at_the_same_epoch(stage: Stage) -> None:
    trainer, other = stage.puppet("trainer", 0, 1), stage.puppet("inference", 0, 1)
    trainer.do(make)
    together([trainer, other], init)
    together([trainer, other], register)
    late, skipped, epoch, same = trainer.do(fail_alone)
    assert late == (False, False, "TransferTimeoutError", "", 0)
    assert skipped == (False, True, "TransferTimeoutError", "", 0)
    assert (epoch, same) == (1, True)
    trainer.begin(send, 9)
    assert other.do(recv) == (1, 9)
    assert trainer.ends() == 1
