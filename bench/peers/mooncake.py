"""Mooncake's transfer engine over tcp: each target rank reads, one entry of a batch for each contiguous run of bytes.

A source does nothing and hears nothing: the time ends with the last read. One host is tcp, too: the engine has no other
way between two processes without a GPU or an RDMA card.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .cases import Row
from .seat import Seat

if TYPE_CHECKING:
    from mooncake.engine import TransferEngine

NAME = "mooncake"
PROBE = (
    "from importlib.metadata import distributions as d; import mooncake.engine;"
    "print(*(f'{i.name} {i.version}' for i in d() if i.name.startswith('mooncake')))"
)
INSTALL = (
    "pip install torch mooncake-transfer-engine-non-cuda in a venv of its own, the library libibverbs1, "
    "then --python mooncake=VENV/bin/python (bench/peers/README.md)"
)
#: Of the payload, held at a time: at the source, at the target.
COPIES = 2
PAUSED: frozenset[str] = frozenset()


def variants(row: Row) -> list[str]:
    """One way."""
    return ["read"]


def environment(row: Row, variant: str) -> dict[str, str]:
    """Only warnings in the log."""
    return {"MC_LOG_LEVEL": "WARNING"}


class Engine:
    """One rank with an engine."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.held: dict[str, torch.Tensor] = {}
        self._engine: TransferEngine
        #: Of each source: its name, and here, there and bytes of every run.
        self._reads: list[tuple[str, list[int], list[int], list[int]]] = []

    def prepare(self) -> Any:
        """Register memory; addresses for the others."""
        from mooncake.engine import TransferEngine

        self.held = self.seat.plain()
        self._engine = TransferEngine()
        _good("initialize", self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
        addresses = [tensor.data_ptr() for tensor in self.held.values()]
        sizes = [tensor.nbytes for tensor in self.held.values()]
        _good("batch_register_memory", self._engine.batch_register_memory(addresses, sizes))
        return {"name": f"127.0.0.1:{self._engine.get_rpc_port()}", "addresses": addresses}

    def connect(self, shares: list[Any]) -> None:
        """Lists of what comes from each source."""
        if self.seat.side == "source":
            return
        row = self.seat.row
        for source, share in enumerate(shares[: row.ranks]):
            here, there, sizes = [], [], []
            for tensor, base in zip(row.tensors, share["addresses"], strict=True):
                local = self.held[tensor.name].data_ptr()
                for run in row.runs(tensor, source, self.seat.rank):
                    here.append(local + run.at_target)
                    there.append(base + run.at_source)
                    sizes.append(run.nbytes)
            if here:
                self._reads.append((share["name"], here, there, sizes))

    def transfer(self) -> None:
        """Post the reads of every source, then wait for all."""
        batches = [
            (name, self._engine.batch_transfer_async_read(name, here, there, sizes))
            for name, here, there, sizes in self._reads
        ]
        if any(batch == 0 for _, batch in batches):
            raise RuntimeError("batch_transfer_async_read posted nothing")
        if batches:
            _good("get_batch_transfer_status", self._engine.get_batch_transfer_status([batch for _, batch in batches]))

    def close(self) -> None:
        """Nothing: the engine ends with the process."""


def _good(what: str, code: int) -> None:
    if code != 0:
        raise RuntimeError(f"{what} returned {code}")


def open_adapter(seat: Seat) -> Engine:
    """For ``peers.rank``."""
    return Engine(seat)
