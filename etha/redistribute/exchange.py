"""The wire: one buffer out, one in. A collective if a group has exactly these ranks, otherwise point to point.

Sizes are never sent, because both ends have them from the same plan. Gloo aborts a process that gets more than it asked
for. Point-to-point messages therefore carry the plan's number as their tag, so that ranks which were called with
different arguments wait for each other instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class GroupExchange:
    """An exchange between ``ranks`` of the torch world. ``group`` has exactly these ranks, or is None."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None

    @property
    def order(self) -> list[int]:
        """Ranks in the order in which their parts lie in the buffers."""
        return list(self.ranks) if self.group is None else dist.get_process_group_ranks(self.group)

    def exchange(
        self, out: torch.Tensor, sent: Mapping[int, int], into: torch.Tensor, received: Mapping[int, int], tag: int
    ) -> None:
        """Send ``sent[rank]`` elements of ``out`` to each rank, in ``order``; fill ``into`` likewise.

        Both are contiguous 1-d tensors of one dtype. On CUDA the caller's stream waits for what arrives.
        """
        order, width = self.order, out.element_size()
        outs = [sent.get(rank, 0) * width for rank in order]
        ins = [received.get(rank, 0) * width for rank in order]
        raw_out, raw_in = out.view(torch.uint8), into.view(torch.uint8)
        if self.group is not None:
            dist.all_to_all_single(raw_in, raw_out, ins, outs, group=self.group)
            return
        ops = []
        for rank, end, n in zip(order, accumulate(ins), ins, strict=True):
            if n:
                ops.append(dist.P2POp(dist.irecv, raw_in[end - n : end], rank, tag=tag))
        for rank, end, n in zip(order, accumulate(outs), outs, strict=True):
            if n:
                ops.append(dist.P2POp(dist.isend, raw_out[end - n : end], rank, tag=tag))
        if ops:
            for work in dist.batch_isend_irecv(ops):
                work.wait()
