"""What the workers of a soak do: meet, register two mixed batches, move them many times with every element compared.

Both batches hold the same mixture: sharded, replicated and summed; cast, turned and shared; one is applied
atomically with its checksums compared, one is written in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

import etha
from tests.flow.truth import cut, stale

OPTIONS: tuple[tuple[str, dict[str, object]], ...] = (("plain", {}), ("atomic", {"atomic": True, "verify": "sample"}))
#: Exact in every dtype of the cargo, and a prime, so that no version looks like another's neighbour.
_MODULUS = 97
Make = Callable[[torch.Tensor], torch.Tensor]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, column by column in memory."""
    return tensor.t().contiguous().t()


def spaced(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, every other one of a larger tensor's columns."""
    found = torch.zeros(tensor.shape[0], 2 * tensor.shape[1], dtype=tensor.dtype)[:, ::2]
    found.copy_(tensor)
    return found


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements in memory that agents map."""
    found = etha.empty(tuple(tensor.shape), tensor.dtype)
    found.copy_(tensor)
    return found


@dataclass(frozen=True, slots=True)
class End:
    """One tensor on one side."""

    dtype: torch.dtype
    placement: Placement
    make: Make = plain


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor of the batch on both sides."""

    shape: tuple[int, int]
    source: End
    target: End

    def end(self, side: str) -> End:
        """That of the trainer or of the other side."""
        return self.source if side == "trainer" else self.target


#: 1.2 MiB.
ITEMS = {
    "rows": Item((512, 256), End(torch.float32, Shard(0)), End(torch.float32, Shard(1))),
    "cast": Item((256, 256), End(torch.float32, Shard(1), turned), End(torch.bfloat16, Replicate(), _shared)),
    "long": Item((128, 64), End(torch.int64, Replicate(), spaced), End(torch.int64, Shard(0), turned)),
    "bytes": Item((256, 256), End(torch.uint8, Shard(0), _shared), End(torch.uint8, Replicate(), spaced)),
    "half": Item((256, 256), End(torch.float16, Shard(1), _shared), End(torch.float16, Shard(0), _shared)),
    "sum": Item((128, 128), End(torch.float32, Partial()), End(torch.float32, Replicate())),
}
NBYTES = sum(item.shape[0] * item.shape[1] * item.source.dtype.itemsize for item in ITEMS.values())


def _mine(item: Item, me: SimpleNamespace, version: int) -> torch.Tensor:
    """What this worker's part of ``item`` holds in that version."""
    end = item.end(me.side)
    rows, columns = item.shape
    whole = ((torch.arange(rows * columns, dtype=torch.int64) + 31 * version) % _MODULUS).reshape(rows, columns)
    whole = whole.to(end.dtype)
    if isinstance(end.placement, Shard):
        return cut(whole, end.placement.dim, me.world, me.rank)
    if isinstance(end.placement, Partial) and me.rank:
        return torch.zeros_like(whole)
    return whole


def enter(me: SimpleNamespace) -> None:
    """``init_pair`` and both batches; with the client and the tensors that are there, or with new ones."""
    if getattr(me, "client", None) is None:
        me.client = etha.TensorBusClient(timeout=60)
        me.tensors = {
            batch: {name: item.end(me.side).make(stale(_mine(item, me, 0))) for name, item in ITEMS.items()}
            for batch, _ in OPTIONS
        }
    me.bond = me.client.init_pair(me.pair, me.side, me.remote, me.world, (me.world,), rank=me.rank)
    me.handles = [
        me.client.register_tensors(
            batch,
            me.tensors[batch],
            pair_name=me.pair,
            placements={name: [item.end(me.side).placement] for name, item in ITEMS.items()},
            shapes={name: item.shape for name, item in ITEMS.items()},
            **options,
        )
        for batch, options in OPTIONS
    ]


def move(me: SimpleNamespace, first: int, count: int) -> None:
    """Versions ``first`` to ``first + count - 1``, batch after batch in turn."""
    for version in range(first, first + count):
        turn = version % len(OPTIONS)
        tensors = me.tensors[OPTIONS[turn][0]]
        if me.side == "trainer":
            for name, item in ITEMS.items():
                tensors[name].copy_(_mine(item, me, version))
            me.handles[turn].transfer("send", version=version)
            continue
        result = me.handles[turn].transfer("recv")
        assert result.version == version
        for name, item in ITEMS.items():
            assert torch.equal(tensors[name], _mine(item, me, version)), f"{name} of version {version}"


def leave(me: SimpleNamespace) -> None:
    """Close the client and drop the tensors, as a program that ends does; the process may begin anew."""
    me.client.close()
    me.client = me.tensors = me.handles = me.bond = None


def lose(me: SimpleNamespace) -> None:
    """Wait for ``pair.lost``."""
    assert me.bond.lost.wait(30), "pair.lost has not been told"


def settle(me: SimpleNamespace) -> int:
    """One round trip to the agent, after which it has done what it was told before; its pid."""
    pid: int = me.client.status()["agent"]["pid"]
    return pid
