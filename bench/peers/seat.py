"""What a rank's adapter is told, and what every adapter offers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from .cases import Row, Side
from .truth import DTYPES

#: Seconds that a peer's own waits may take.
TIMEOUT = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One rank of one side of a row, and a folder that all ranks of the contender share."""

    row: Row
    side: Side
    rank: int
    variant: str
    directory: Path

    @property
    def world(self) -> int:
        """Ranks of both sides."""
        return 2 * self.row.ranks

    @property
    def world_rank(self) -> int:
        """Sources first."""
        return self.rank + (self.row.ranks if self.side == "target" else 0)

    def plain(self) -> dict[str, torch.Tensor]:
        """Local tensors in ordinary memory."""
        shapes = {tensor: self.row.local_shape(tensor, self.side, self.rank) for tensor in self.row.tensors}
        return {tensor.name: torch.empty(shape, dtype=DTYPES[tensor.dtype]) for tensor, shape in shapes.items()}


class Adapter(Protocol):
    """A library, as a good user of it moves the row. What can be prepared once is prepared outside ``transfer``."""

    #: The local tensors: a source's are read, a target's written.
    held: dict[str, torch.Tensor]

    def prepare(self) -> Any:
        """Make tensors and connections; what the other ranks must know of this one, as JSON."""

    def connect(self, shares: list[Any]) -> None:
        """Hear what each rank said, sources first."""

    def transfer(self) -> None:
        """Move everything once; called on all ranks at about the same time."""

    def close(self) -> None:
        """Let go of everything."""
