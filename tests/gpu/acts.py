"""Steps of the workers: meet, register every kind of tensor, move it, compare every element, move until killed."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

import etha
from etha.cuda import select as cuda
from etha.cuda.driver import Driver
from tests.fakes.cuda import GPU0, FakeDriver
from tests.flow.jobs import tell, wait_for
from tests.flow.team import bits
from tests.flow.truth import stale

from .cargo import items

#: One tensor that takes a while: rows of the trainer that become columns, at ``scale`` on each axis.
SIDE = 64
OLD = 77.0


def _driver(me: SimpleNamespace) -> Driver:
    if me.played and not hasattr(me, "driver"):
        me.driver = FakeDriver((GPU0,))
        cuda.install_driver(me.driver)
    return me.driver if me.played else cuda.driver()


def enter(me: SimpleNamespace) -> int:
    """``init_pair``, with the client that is there or a new one; the epoch."""
    if getattr(me, "client", None) is None:
        if me.device != "cpu":
            _driver(me)
        me.client = etha.TensorBusClient(device=me.device, autostart=not me.played, timeout=90)
        me.handles, me.held = {}, {}
    me.bond = me.client.init_pair(
        me.pair, me.side, me.remote, me.world, (me.world,), [Replicate()], rank=me.rank, timeout=120
    )
    return me.bond.epoch


def put(me: SimpleNamespace, like: torch.Tensor) -> torch.Tensor:
    """A copy of a CPU tensor on this worker's device, with the same strides."""
    extent = 0 if 0 in like.shape else 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    if me.played and me.device != "cpu":
        flat = me.driver.empty(GPU0, (extent,), like.dtype, exportable=me.exportable)
    else:
        flat = torch.empty(extent, dtype=like.dtype, device=me.device)
    made = flat.as_strided(like.shape, like.stride())
    made.copy_(like)
    return made


def register(me: SimpleNamespace, batch: str, scale: int, source: str, options: dict[str, Any]) -> None:
    """All of ``items(scale)``, held as ``source`` ("trainer" or "inference") sends them to the other side."""
    me.scale, me.source = scale, source
    role = "trainer" if me.side == source else "inference"
    cargo = items(scale)
    me.held[batch] = {}
    for name, item in cargo.items():
        if role == "trainer":
            mine = item.given(0, me.world, me.rank)
        else:
            mine = stale(item.wanted(0, me.world, me.world, me.rank).float()).to(item.target.dtype)
        me.held[batch][name] = put(me, item.end(role).form(mine) if mine.numel() else mine)
    me.handles[batch] = me.client.register_tensors(
        batch,
        me.held[batch],
        pair_name=me.pair,
        placements={name: [item.end(role).placement] for name, item in cargo.items()},
        shapes={name: item.shape for name, item in cargo.items()},
        **options,
    )


def move(me: SimpleNamespace, batch: str, version: int, snapshot: bool = False) -> int:
    """Once; the receiver compares every element by its bits. The seq."""
    cargo, handle = items(me.scale), me.handles[batch]
    if me.side == me.source:
        for name, item in cargo.items():
            me.held[batch][name].copy_(item.given(version, me.world, me.rank))
        if snapshot:
            future = handle.transfer("send", version=version, snapshot=True)
            for tensor in me.held[batch].values():
                tensor.zero_()
            return int(future.result(60).seq)
        return int(handle.transfer("send", version=version).seq)
    result = handle.transfer("recv")
    assert result.version == version
    for name, item in cargo.items():
        wanted = item.wanted(version, me.world, me.world, me.rank)
        assert torch.equal(bits(me.held[batch][name].cpu()), bits(wanted)), f"{name} of version {version} differs"
    return int(result.seq)


def leave_batch(me: SimpleNamespace, batch: str) -> None:
    """Close the handle and drop the tensors."""
    me.handles.pop(batch).close()
    del me.held[batch]


def status(me: SimpleNamespace) -> dict[str, Any]:
    """Of this worker's agent."""
    found: dict[str, Any] = me.client.status()
    return found


def register_one(me: SimpleNamespace, scale: int, options: dict[str, Any]) -> None:
    """Batch "one": the large tensor alone."""
    rows, columns = SIDE * scale, SIDE * scale
    dim = 0 if me.side == "trainer" else 1
    shape = (rows // me.world, columns) if dim == 0 else (rows, columns // me.world)
    me.one = put(me, torch.full(shape, OLD))
    me.handles["one"] = me.client.register_tensors(
        "one",
        {"w": me.one},
        pair_name=me.pair,
        placements={"w": [Shard(dim)]},
        shapes={"w": (rows, columns)},
        **options,
    )


def move_one(me: SimpleNamespace, version: int) -> int:
    """Once: a tensor full of ``version``."""
    if me.side == "trainer":
        me.one.fill_(version)
        return int(me.handles["one"].transfer("send", version=version).seq)
    result = me.handles["one"].transfer("recv")
    assert result.version == version and bool((me.one == version).all()), f"version {version} is not whole"
    return int(result.seq)


def keep_moving(me: SimpleNamespace, first: int) -> None:
    """Version after version until somebody dies; tells of each."""
    version = first
    while True:
        move_one(me, version)
        tell("moved", version)
        version += 1


def move_one_watching(me: SimpleNamespace, version: int) -> int:
    """``move_one`` by one who tells "lost" as soon as the pair is."""

    def watch() -> None:
        if me.bond.lost.wait(60):
            tell("lost")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        return move_one(me, version)
    finally:
        watcher.join()


def die_half_way(me: SimpleNamespace) -> None:
    """SIGKILL to this process in the middle of a transfer."""

    def progress(done: int, total: int) -> None:
        if done < total:
            tell("half way")
            os.kill(os.getpid(), signal.SIGKILL)

    me.handles["one"].transfer("send" if me.side == "trainer" else "recv", progress=progress)


def held(me: SimpleNamespace) -> list[float]:
    """The least and the largest value in the large tensor: one, if it is whole."""
    return sorted({float(me.one.min()), float(me.one.max())})


def leave(me: SimpleNamespace) -> None:
    """Close the client and drop all tensors; a played card then has everything back."""
    me.client.close()
    me.client = me.handles = me.held = me.one = me.bond = None
    gc.collect()  # stages of registrations whose epoch is over go with these, which refer to themselves
    if me.played and hasattr(me, "driver"):
        me.driver.check()


def register_shared(me: SimpleNamespace) -> None:
    """Batch "one", in memory of ``etha.empty``."""
    me.one = etha.empty((1000, 1000), device=me.device)
    me.handles["one"] = me.client.register_tensors("one", {"w": me.one}, pair_name=me.pair)


def epoch(me: SimpleNamespace) -> int:
    """Of the pair as it was formed last."""
    return int(me.bond.epoch)


def publish(me: SimpleNamespace, scale: int, versions: int) -> list[float]:
    """Put so many versions of what ``published`` has, overwrite the tensors at once; seconds of each ``put``."""
    me.client = etha.TensorBusClient(device=me.device, autostart=not me.played, timeout=90)
    tensors = {name: put(me, tensor) for name, tensor in published(scale, 0).items()}
    me.publication = me.client.publish("weights", tensors, **alone(tensors))
    seconds = []
    for version in range(1, versions + 1):
        for name, tensor in published(scale, version).items():
            tensors[name].copy_(tensor)
        begun = time.perf_counter()
        me.publication.put(version, wait=me.world if version > 1 else 0)
        seconds.append(time.perf_counter() - begun)
        for tensor in tensors.values():
            tensor.zero_()
        tell("put", version)
        if version < versions:
            wait_for("next")
    return seconds


def follow(me: SimpleNamespace, scale: int, versions: int) -> list[float]:
    """Take versions until the last one, and compare every element of each; seconds of each ``next``."""
    me.client = etha.TensorBusClient(device=me.device, autostart=not me.played, timeout=90)
    tensors = {name: put(me, stale(tensor.float()).to(tensor.dtype)) for name, tensor in published(scale, 0).items()}
    seconds = []
    subscriber = f"{me.side}-{me.rank}"
    with me.client.subscribe("weights", tensors, subscriber=subscriber, atomic=True, **alone(tensors)) as subscription:
        while not seconds or subscription.version != versions:
            begun = time.perf_counter()
            update = subscription.next()
            seconds.append(time.perf_counter() - begun)
            for name, wanted in published(scale, update.version).items():
                assert torch.equal(bits(tensors[name].cpu()), bits(wanted)), f"{name} of {update.version} differs"
            tell("held", update.version)
    return seconds


def alone(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """How a side of one rank describes its tensors."""
    placements = {name: [Replicate()] for name in tensors}
    return {"expected_world_size": 1, "rank": 0, "device_mesh": (1,), "placements": placements}


def published(scale: int, version: int) -> dict[str, torch.Tensor]:
    """Of every dtype that weights have, dense and strided; ``large`` has ``scale`` MiB."""
    small = torch.arange(999, dtype=torch.float32).reshape(27, 37) / 3 + version
    return {
        "float32": small,
        "bfloat16": small.to(torch.bfloat16),
        "float8": small.to(torch.float8_e4m3fn),
        "turned": small.t(),
        "bytes": (small.to(torch.int64) % 251).to(torch.uint8),
        "large": torch.full((scale, 1 << 18), float(version)),
    }
