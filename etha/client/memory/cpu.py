"""A client's home on the host: memory that an agent maps, or reads and writes in place."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from etha.client.memory.base import Mark, StagedTensors, home_name
from etha.client.memory.tensors import empty
from etha.errors import ProtocolError
from etha.memory import shared, writable
from etha.memory.handles import TensorHandle, describe, span_nbytes
from etha.memory.room import check_room

#: Below this many bytes a copy on the loop is faster than handing it to a thread.
_SMALL = 1 << 18


class CpuMemory:
    """The host's memory."""

    name = agent = "cpu"
    refused = ""

    def holds(self, tensor: torch.Tensor) -> bool:
        return home_name(tensor) == self.name

    def describe(self, tensor: torch.Tensor) -> TensorHandle:
        """The tensor's segment if it lies in one, else this process's memory, which the agent reads and writes in
        place."""
        return describe(tensor)

    def show(self, segment: str) -> tuple[dict[str, Any], list[int]]:
        """The sealed memfd."""
        found = shared.segment(segment)
        if found is None:
            raise ProtocolError(f"segment {segment} is gone while one of its tensors is registered")
        return {"segment": found.id, "nbytes": found.nbytes}, [found.fd]

    def stage(self, tensors: Sequence[torch.Tensor], chosen: Sequence[bool]) -> StagedTensors:
        """Allocate, and touch the pages, once it is known that all of them fit."""
        needed = sum(tensor.nbytes for tensor, take in zip(tensors, chosen, strict=True) if take)
        if needed:
            check_room(needed, "what stands for this batch's tensors (shadows, a snapshot, or staging)")
        made = [empty(tuple(t.shape), dtype=t.dtype) if take else None for t, take in zip(tensors, chosen, strict=True)]
        return StagedTensors(home=self, tensors=made)

    def mark(self) -> Mark:
        """An empty mark, because the host has no queue of work."""
        return Mark()

    def reach(self, mark: Mark, stop: threading.Event) -> bool:
        return True

    def backed(self, tensor: torch.Tensor) -> bool:
        """True: the tensor keeps its memory."""
        return True

    def writable(self, tensor: torch.Tensor) -> bool:
        nbytes = span_nbytes(tensor.shape, tensor.stride(), tensor.itemsize)
        return writable.writable(tensor.data_ptr(), nbytes)

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, live: bool) -> None:
        for target, source in pairs:
            target.copy_(source)

    def quick(self, nbytes: int) -> bool:
        return nbytes < _SMALL

    lends = False

    def close(self, *, released: bool) -> None:
        """Nothing to do, because a memfd lives as long as its mappings."""
