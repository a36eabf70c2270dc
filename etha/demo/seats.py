"""Where a rank of the demo computes, and by which backends its job's process group communicates.

cpu     everything on the host, gloo
cuda    ranks round robin over the GPUs, the inference job's after the trainer's. NCCL takes one rank per GPU, so if
        ranks of a job share a GPU, gloo moves their device tensors, too, through the host
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from etha import ConfigError
from etha.demo.options import RANKS, Options


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSeat:
    """``device`` is "cpu" or "cuda:N". ``backend`` is for ``init_process_group``; CPU tensors always use gloo."""

    device: str
    backend: str

    @property
    def kind(self) -> str:
        """ "cpu" or "cuda", for making meshes."""
        return self.device.partition(":")[0]

    def take(self) -> None:
        """Make it this process's device, before the process group and meshes, which would choose one themselves."""
        if self.kind == "cuda":
            torch.cuda.set_device(self.device)
            torch.empty(0, device=self.device)  # from here on the device counts as chosen


def seat(job: str, rank: int, options: Options) -> DemoSeat:
    if options.device == "cpu":
        return DemoSeat(device="cpu", backend="gloo")
    before = sum(RANKS[other] for other in list(RANKS)[: list(RANKS).index(job)])
    backend = "gloo" if RANKS[job] > options.cards else "cpu:gloo,cuda:nccl"
    return DemoSeat(device=f"cuda:{(before + rank) % options.cards}", backend=backend)


def cards(device: str) -> int:
    """Number of GPUs that the demo takes: all for ``device`` "cuda", otherwise none. ConfigError for "cuda" without a
    GPU."""
    if device != "cuda":
        return 0
    found = torch.cuda.device_count()
    if found == 0:
        raise ConfigError(
            f"--device cuda: torch {torch.__version__} sees no GPU here; `etha doctor` says more, "
            f"and --device cpu runs the same demo on the host"
        )
    return int(found)
