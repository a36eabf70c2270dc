"""Etha: both sides register, ``transfer`` is one call. Plain tensors, and those of ``etha.empty``."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import harness
import torch

from .cases import SIDES, Row
from .seat import TIMEOUT, Seat
from .truth import DTYPES

if TYPE_CHECKING:
    from etha import BatchHandle

NAME = "etha"
PROBE = "import etha; print(etha.__version__)"
INSTALL = "pip install -e . in the root of this repository"
#: Of the payload, held at a time: at the source, at the target.
COPIES = 2
PAUSED: frozenset[str] = frozenset()


def variants(row: Row) -> list[str]:
    """Memory of the source and of the target."""
    return ["plain -> plain", "plain -> empty", "empty -> empty"]


def environment(row: Row, variant: str) -> dict[str, str]:
    """The runner adds those that place the agents."""
    return {}


class Bus:
    """One rank with a client of its own."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.held: dict[str, torch.Tensor] = {}
        self._open = ExitStack()
        self._batch: BatchHandle

    def prepare(self) -> Any:
        """Both sides meet here."""
        from torch.distributed.tensor import Shard

        import etha

        seat, row = self.seat, self.seat.row
        memory = seat.variant.split(" -> ")[SIDES.index(seat.side)]
        if memory == "plain":
            self.held = seat.plain()
        else:
            for tensor in row.tensors:
                shape = row.local_shape(tensor, seat.side, seat.rank)
                self.held[tensor.name] = etha.empty(shape, dtype=DTYPES[tensor.dtype])
        client = self._open.enter_context(etha.TensorBusClient(device="cpu", timeout=TIMEOUT))
        pair = seat.directory.name
        client.init_pair(
            pair, seat.side, SIDES[1 - SIDES.index(seat.side)], expected_world_size=row.ranks, rank=seat.rank,
            device_mesh=(row.ranks,), placements=[Shard(0)],
        )  # fmt: skip
        placements = {name: [Shard(0 if seat.side == "source" else row.dim)] for name in self.held}
        self._batch = self._open.enter_context(
            client.register_tensors("row", self.held, pair_name=pair, placements=placements)
        )
        harness.settle_pages()

    def connect(self, shares: list[Any]) -> None:
        """Nothing: the agents have met."""

    def transfer(self) -> None:
        """Returns on both sides when the target holds everything."""
        self._batch.transfer("send" if self.seat.side == "source" else "recv")

    def close(self) -> None:
        """End batch and client."""
        self._open.close()


def open_adapter(seat: Seat) -> Bus:
    """For ``peers.rank``."""
    return Bus(seat)
