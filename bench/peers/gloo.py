"""torch.distributed's Gloo: point to point between the ranks of one world, sources first.

each    one isend and irecv for each tensor and pair of ranks; a source packs what is not contiguous
packed  everything for one rank in one buffer, which the receiver unpacks
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from .cases import Block, Row, Whole
from .seat import TIMEOUT, Seat
from .truth import DTYPES

NAME = "gloo"
PROBE = "import torch, torch.distributed as d; assert d.is_gloo_available(); print('torch', torch.__version__)"
INSTALL = "pip install torch"
#: Of the payload, held at a time: at the source, at the target, and packed at both.
COPIES = 4
PAUSED: frozenset[str] = frozenset()


def variants(row: Row) -> list[str]:
    """Packing is for many tensors."""
    return ["each", "packed"] if len(row.tensors) > 1 else ["each"]


def environment(row: Row, variant: str) -> dict[str, str]:
    """Loopback, also on one host: Gloo has no other way between processes."""
    return {"GLOO_SOCKET_IFNAME": "lo"}


class World:
    """One rank of the world."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.held: dict[str, torch.Tensor] = {}
        #: Of each rank of the other side: the parts of our tensors that it has or needs.
        self._views: dict[int, list[torch.Tensor]] = {}

    def prepare(self) -> Any:
        """Join the world."""
        seat, row = self.seat, self.seat.row
        self.held = seat.plain()
        store = FileStore(str(seat.directory / "gloo"), seat.world)
        timeout = datetime.timedelta(seconds=TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=seat.world_rank, world_size=seat.world, timeout=timeout)
        for other in range(row.ranks):
            source, target = (seat.rank, other) if seat.side == "source" else (other, seat.rank)
            pieces = [(tensor, row.piece(tensor, source, target)) for tensor in row.tensors]
            views = [self._view(tensor, piece) for tensor, piece in pieces if piece is not None]
            if views:
                self._views[other + (row.ranks if seat.side == "source" else 0)] = views

    def connect(self, shares: list[Any]) -> None:
        """Connect every pair that will talk, outside the first transfer."""
        dist.barrier()

    def _view(self, tensor: Whole, piece: Block) -> torch.Tensor:
        local = self.seat.row.local(tensor, self.seat.side, self.seat.rank)
        view = self.held[tensor.name].view(local.rows, local.columns)
        return view.narrow(0, piece.row - local.row, piece.rows).narrow(1, piece.column - local.column, piece.columns)

    def transfer(self) -> None:
        """Post everything, then wait."""
        move = self._packed if self.seat.variant == "packed" else self._each
        move()

    def _each(self) -> None:
        works, late = [], []
        for other, views in self._views.items():
            for tag, view in enumerate(views):
                if self.seat.side == "source":
                    works.append(dist.isend(view.contiguous(), other, tag=tag))
                    continue
                room = view if view.is_contiguous() else torch.empty_like(view, memory_format=torch.contiguous_format)
                works.append(dist.irecv(room, other, tag=tag))
                if room is not view:
                    late.append((view, room))
        for work in works:
            work.wait()
        for view, room in late:
            view.copy_(room)

    def _packed(self) -> None:
        for other, views in self._views.items():
            if self.seat.side == "source":
                dist.send(torch.cat([view.reshape(-1) for view in views]), other)
                continue
            room = torch.empty(sum(view.numel() for view in views), dtype=DTYPES[self.seat.row.tensors[0].dtype])
            dist.recv(room, other)
            for view, part in zip(views, room.split([view.numel() for view in views]), strict=True):
                view.copy_(part.view(view.shape))

    def close(self) -> None:
        """Leave."""
        dist.destroy_process_group()


def open_adapter(seat: Seat) -> World:
    """For ``peers.rank``."""
    return World(seat)
