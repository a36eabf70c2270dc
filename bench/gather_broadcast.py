"""What is done today between two jobs: the source's full tensor on one rank, broadcast to all targets, cut there.

One gloo world: ranks 0..M-1 are sources, M..M+N-1 targets. Its form is the fast one: every distinct shard is gathered
once, contributions to a Partial are reduced first, buffers are made before the clock runs, nothing is copied where a
tensor can be sent or received in place.
"""

from __future__ import annotations

from itertools import product

import torch
import torch.distributed as dist
from mesh_cases import contribution

from etha.plan import Layout

Cell = tuple[tuple[int, int], ...]


def cell_of(layout: Layout, shape: tuple[int, ...], rank: int) -> Cell:
    """The one run per dim that a source rank holds."""
    owned = layout.owned(shape, rank)
    assert owned is not None and all(len(runs) == 1 for runs in owned), "sources of one block each"
    return tuple(runs[0] for runs in owned)


class GatherBroadcast:
    """One tensor of ``shape``; ``local`` is this rank's source or target tensor. Made by all ranks together."""

    def __init__(
        self, source: Layout, target: Layout, shape: tuple[int, ...], rank: int, sources: int, local: torch.Tensor
    ) -> None:
        self._local, self._rank = local, rank
        targets = dist.get_world_size() - sources
        cells: dict[Cell, dict[int, int]] = {}
        for r in range(sources):
            number, count = contribution(source, r)
            cells.setdefault(cell_of(source, shape, r), {}).setdefault(number, r)  # the first replica of each
        self._groups: list[dist.ProcessGroup] = []
        self._reduce: tuple[int, dist.ProcessGroup] | None = None
        led: dict[int, Cell] = {}
        for cell, contributors in cells.items():
            ranks = [contributors[number] for number in range(count)]
            led[ranks[0]] = cell
            if count > 1:
                group = self._group(ranks)
                if rank in ranks:
                    self._reduce = ranks[0], group
        leaders = sorted(led)
        self._gather = self._group(leaders) if len(leaders) > 1 else None
        self._fan = self._group([0, *range(sources, sources + targets)])
        self._leads, self._fans = rank in leaders, rank == 0 or rank >= sources
        #: Bytes that this rank allocates besides its tensor.
        self.buffers = 0
        self._sum = self._buffer(local.shape) if self._reduce is not None else local
        whole_here = tuple(local.shape) == shape
        if rank == 0:
            self._whole = self._sum if self._gather is None else self._buffer(shape)
        elif rank >= sources:
            self._whole = local if whole_here else self._buffer(shape)
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        if rank == 0 and self._gather is not None:
            for leader in leaders:  # in the order of the group's ranks
                place = self._whole[tuple(slice(*run) for run in led[leader])]
                self._parts.append((place, place if place.is_contiguous() else self._buffer(place.shape)))
        self._cuts: list[tuple[torch.Tensor, torch.Tensor]] = []
        if rank >= sources and not whole_here:
            owned = target.owned(shape, rank - sources)
            assert owned is not None
            starts = [[sum(b - a for a, b in runs[:i]) for i in range(len(runs))] for runs in owned]
            for at in product(*(range(len(runs)) for runs in owned)):
                runs = [owned[d][i] for d, i in enumerate(at)]
                here = tuple(
                    slice(starts[d][i], starts[d][i] + b - a)
                    for (d, i), (a, b) in zip(enumerate(at), runs, strict=True)
                )
                self._cuts.append((local[here], self._whole[tuple(slice(*run) for run in runs)]))

    def _group(self, ranks: list[int]) -> dist.ProcessGroup:
        group = dist.new_group(sorted(ranks))
        self._groups.append(group)
        return group

    def _buffer(self, shape: tuple[int, ...] | torch.Size) -> torch.Tensor:
        made = torch.zeros(shape)
        self.buffers += made.nbytes
        return made

    def run(self) -> None:
        """Move the tensor once; returns when this rank has done its part."""
        if self._reduce is not None:
            leader, group = self._reduce
            self._sum.copy_(self._local)  # gloo reduces in place, the source must stay
            dist.reduce(self._sum, leader, group=group)
        if self._gather is not None and self._leads:
            dist.gather(self._sum, [buffer for _, buffer in self._parts] or None, 0, group=self._gather)
            for place, buffer in self._parts:
                if buffer is not place:
                    place.copy_(buffer)
        if self._fans:
            dist.broadcast(self._whole, 0, group=self._fan)
        for here, there in self._cuts:
            here.copy_(there)

    def close(self) -> None:
        """Give the groups up."""
        for group in self._groups:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


def crossings(targets: int) -> int:
    """How often gloo's binomial broadcast sends the tensor from its root, alone on its host, to the other host."""
    return targets.bit_length()  # ceil(log2(targets + 1)) children of the root
