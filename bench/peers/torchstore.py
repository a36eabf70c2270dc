"""torchstore: sources put, targets get in place, DTensors where there are several ranks. One storage volume a rank.

torchstore picks its transport: shared memory on one host, Gloo between hosts. For the row between hosts each side has a
host name and a Monarch worker of its own. It leaves to its user when to get; here a barrier of Gloo says so.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Coroutine
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .cases import SIDES, Row
from .seat import Seat

NAME = "torchstore"
PROBE = (
    "from importlib.metadata import version as v; import torchstore; from monarch._src.spmd import host_mesh;"
    "print('torchstore', v('torchstore') + ', torchmonarch', v('torchmonarch') + ', torch', v('torch'))"
)
INSTALL = (
    "torchstore from its repository and torchmonarch 0.5.0 in a venv of its own, "
    "then --python torchstore=VENV/bin/python (bench/peers/README.md)"
)
#: Of the payload, held at a time: at the source, at the target, in the store, and in a buffer.
COPIES = 4
PAUSED: frozenset[str] = frozenset()


def variants(row: Row) -> list[str]:
    """All tensors in one call."""
    return ["put, get"]


def environment(row: Row, variant: str) -> dict[str, str]:
    """Loopback for the barrier, and for what goes between hosts."""
    return {"GLOO_SOCKET_IFNAME": "lo"}


class Store:
    """One rank, launched as torchrun would."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.held: dict[str, torch.Tensor] = {}
        self._given: dict[str, torch.Tensor] = {}
        self._loop = asyncio.Runner()

    def _run(self, work: Coroutine[Any, Any, Any]) -> None:
        self._loop.run(work)

    def prepare(self) -> Any:
        """Ports that are free."""
        self.held = self.seat.plain()
        with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as other:
            return [one.getsockname()[1], other.getsockname()[1]]

    def connect(self, shares: list[Any]) -> None:
        """A world for the barrier and for DTensors' meshes, then the store."""
        seat, row = self.seat, self.seat.row
        hosts = 2 if row.way == "tcp" else 1
        local_world, first = seat.world // hosts, row.ranks if hosts == 2 and seat.side == "target" else 0
        os.environ |= {
            "RANK": str(seat.world_rank), "WORLD_SIZE": str(seat.world),
            "LOCAL_RANK": str(seat.world_rank - first), "LOCAL_WORLD_SIZE": str(local_world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(shares[0][0]),
        }  # fmt: skip
        if hosts == 2:
            os.environ["HOSTNAME"] = f"peers-{seat.side}"
        import torchstore

        files = FileStore(str(seat.directory / "barrier"), seat.world)
        dist.init_process_group("gloo", store=files, rank=seat.world_rank, world_size=seat.world)
        meshes = [DeviceMesh("cpu", list(range(at, at + row.ranks))) for at in (0, row.ranks)]
        mine = meshes[SIDES.index(seat.side)]
        shard = Shard(0 if seat.side == "source" else row.dim)
        for name, tensor in self.held.items():
            one = row.ranks == 1
            self._given[name] = tensor if one else DTensor.from_local(tensor, mine, [shard], run_check=False)
        how = {"transport": "tcp", "monarch_port": shares[first][1]} if hosts == 2 else {}
        self._run(torchstore.initialize_spmd(strategy=torchstore.LocalRankStrategy(), **how))

    def transfer(self) -> None:
        """Targets get what sources have put."""
        import torchstore

        if self.seat.side == "source":
            self._run(torchstore.put_batch(self._given))
            dist.barrier()
        else:
            dist.barrier()
            self._run(torchstore.get_batch(self._given))

    def close(self) -> None:
        """End the store and its volumes."""
        import torchstore

        dist.barrier()
        self._run(torchstore.shutdown())


def open_adapter(seat: Seat) -> Store:
    """For ``peers.rank``."""
    return Store(seat)
