"""A client's home for publications of a GPU's tensors: the GPU's memory, and copies of it on the host.

    publish     tensors on the GPU --put--> slots on the host --agents--> subscribers
    subscribe   holders --agents--> shadow memory on the host --commit--> tensors on the GPU

The host's agent keeps and sends the versions. So they outlive this process, take no memory of the GPU, and cross the
bus to it once for each version, however many subscribers there are. The agent never touches the GPU. Some of the
tensors may lie on the host.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from etha.client.memory.base import Mark, StagedTensors
from etha.client.memory.cpu import CpuMemory
from etha.client.memory.cuda import GpuMemory
from etha.memory.handles import TensorHandle


class GpuOnHost:
    """See the module. To its agent it is the host."""

    name = agent = "cpu"
    refused = ""
    lends = False

    def __init__(self, gpu: GpuMemory) -> None:
        """``gpu`` is closed with it."""
        self._gpu, self._host = gpu, CpuMemory()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a plain tensor lies on the GPU or on the host."""
        return self._gpu.holds(tensor) or self._host.holds(tensor)

    def describe(self, tensor: torch.Tensor) -> TensorHandle:
        """A tensor on the host as ``CpuMemory`` has it; of one on the GPU its form, at an address that no agent
        uses."""
        if not self._gpu.holds(tensor):
            return self._host.describe(tensor)
        return TensorHandle(
            segment=None,
            offset=tensor.data_ptr(),
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
            dtype=str(tensor.dtype).removeprefix("torch."),
        )

    def show(self, segment: str) -> tuple[dict[str, Any], list[int]]:
        return self._host.show(segment)

    def stage(self, tensors: Sequence[torch.Tensor], chosen: Sequence[bool]) -> StagedTensors:
        """Memory of the host."""
        return StagedTensors(home=self, tensors=self._host.stage(tensors, chosen).tensors)

    def mark(self) -> Mark:
        """Record this thread's current stream. The agent is told nothing of it; ``reach`` waits for it."""
        found = self._gpu.mark()
        found.handle = b""
        return found

    def reach(self, mark: Mark, stop: threading.Event) -> bool:
        return self._gpu.reach(mark, stop)

    def backed(self, tensor: torch.Tensor) -> bool:
        return not self._gpu.holds(tensor) or self._gpu.backed(tensor)

    def writable(self, tensor: torch.Tensor) -> bool:
        return self._gpu.holds(tensor) or self._host.writable(tensor)

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, live: bool) -> None:
        self._gpu.copy(pairs, live=live)

    def quick(self, nbytes: int) -> bool:
        return self._gpu.quick(nbytes)

    def close(self, *, released: bool) -> None:
        """The GPU's part. No agent has mapped any of it."""
        self._gpu.close(released=True)
