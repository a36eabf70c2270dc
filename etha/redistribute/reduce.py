"""Contributions reduced as they come: in ascending order, in the accumulating dtype, rounded once.

    contribution 0, 1, ... K-1, each in pieces --> total --> result

The order is that of the route, whatever comes first, so the bits are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from etha.plan import Slot
from etha.plan.proof.simulate import combine, finish
from etha.redistribute.piece import LocalRegion, bits

#: Dtypes that torch adds to float32 exactly as if they were converted before.
_PROMOTED = (torch.bfloat16, torch.float16)


class Coming:
    """What has come, or will: ``wait`` before its memory is read."""

    def __init__(self, work: dist.Work | None) -> None:
        self._work = work

    def wait(self) -> None:
        """Return once it is here. Raises what the process group raises, for example if the peer died."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a contribution: ``dense`` (bits, in the piece's shape) goes to ``region`` of the total."""

    region: LocalRegion
    dense: torch.Tensor
    coming: Coming


def reduce_parts(parts: Sequence[Sequence[Piece]], result: torch.Tensor, how: Slot) -> None:
    """Combine the contributions into ``result``; ``parts[k]`` are the pieces of contribution k, which cover it."""
    if how.op in ("sum", "avg") and all(piece.region.few for pieces in parts for piece in pieces):
        _add_up(parts, result, how)
        return
    total: torch.Tensor | None = None
    for pieces in parts:
        part = torch.empty(result.shape, dtype=result.dtype, device=result.device)
        for piece in pieces:
            piece.coming.wait()
            piece.region.unpack(bits(part), piece.dense)
        part = part.to(how.accumulate)
        if how.op == "norm":
            part = part**how.p
        total = part if total is None else combine(total, part, how)
    assert total is not None  # there is at least one contribution
    result.copy_(finish(total, how))


def _add_up(parts: Sequence[Sequence[Piece]], result: torch.Tensor, how: Slot) -> None:
    """``combine``'s addition, in place, each piece where it goes."""
    own = result.dtype == how.accumulate
    total = result if own else torch.empty(result.shape, dtype=how.accumulate, device=result.device)
    first, *rest = parts
    if rest and own and _whole(first, result) and _whole(rest[0], result):
        (a,), (b,), *rest = parts
        a.coming.wait()
        b.coming.wait()
        torch.add(a.dense.view(result.dtype), b.dense.view(result.dtype), out=result)
    else:
        for sums, part in _placed(first, total, result.dtype):
            sums.copy_(part)
    for pieces in rest:
        for sums, part in _placed(pieces, total, result.dtype):
            sums.add_(part if own or part.dtype in _PROMOTED else part.to(how.accumulate))
    if how.op == "avg":
        total.div_(how.divisor)
    if not own:
        result.copy_(total)


def _whole(pieces: Sequence[Piece], result: torch.Tensor) -> bool:
    return len(pieces) == 1 and pieces[0].region.is_whole(result.shape)


def _placed(
    pieces: Sequence[Piece], total: torch.Tensor, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of ``total``, each with what is to go there, once it is here."""
    for piece in pieces:
        piece.coming.wait()
        if piece.region.numel:
            yield from piece.region.boxes(total, piece.dense.view(dtype))
