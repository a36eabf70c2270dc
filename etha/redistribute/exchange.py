"""The wire: one buffer out and one in, or messages from and to the places where their elements lie.

Sizes are never sent, because both ends have them from the same plan. Gloo aborts a process that gets more than it asked
for. Messages therefore carry the plan's number as their tag, so that ranks which were called with different arguments
wait for each other instead.
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
    def order(self) -> tuple[int, ...]:
        """Ranks in the order in which their parts lie in the buffers."""
        return self.ranks if self.group is None else tuple(dist.get_process_group_ranks(self.group))

    def exchange(
        self, out: torch.Tensor, sent: Mapping[int, int], into: torch.Tensor, received: Mapping[int, int], tag: int
    ) -> None:
        """Send ``sent[rank]`` elements of ``out`` to each rank, in ``order``; fill ``into`` likewise.

        Both are contiguous 1-d tensors of one dtype. On CUDA the caller's stream waits for what arrives. A collective
        if there is a group, otherwise one batch of messages over WORLD.
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

    def link(self, device: torch.device, tag: int) -> MessageWire | None:
        """Messages one by one, if the group's backend for ``device`` sends from and to the host's memory (gloo)."""
        group = dist.group.WORLD if self.group is None else self.group
        gloo = getattr(dist, "ProcessGroupGloo", None)
        if group is None or gloo is None or device.type != "cpu":
            return None
        backend = group._get_backend(device)
        if not isinstance(backend, gloo):
            return None
        places = {rank: place for place, rank in enumerate(dist.get_process_group_ranks(group))}
        return MessageWire(backend, places, tag)


@dataclass(frozen=True, slots=True)
class MessageWire:
    """Messages of one exchange, sent and received in place. Their tensors are contiguous.

    It calls the group's backend itself: torch's functions for it take longer than a small message.
    """

    backend: dist.ProcessGroup
    places: Mapping[int, int]
    tag: int

    def send(self, tensor: torch.Tensor, peer: int) -> dist.Work:
        """Begin to send to a rank of the torch world. Leave the memory alone until ``wait()`` of what it returns."""
        return self.backend.send([tensor], self.places[peer], self.tag)

    def receive(self, tensor: torch.Tensor, peer: int) -> dist.Work:
        """Begin to fill ``tensor`` with the next message from ``peer``, which is as long."""
        return self.backend.recv([tensor], self.places[peer], self.tag)
